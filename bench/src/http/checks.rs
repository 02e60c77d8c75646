//! Fast assertions on a real httpd with PHP, for the test command: each says what must hold and what was seen.
use super::cases::{self, request, Request};
use super::client::{self, get, get_old, Connection, Fault, Visit};
use super::install::Install;
use super::load::{self, Group, Pages};
use super::run::{run_once, summary, Setup, WebRecord};
use super::server::{Config, Footprint, Httpd, Mpm, STATIC_PAGE};
use crate::cases::Role;
use crate::clock::now_ns;
use crate::guard;
use crate::integration::Check;
use crate::record::Mode;
use anyhow::{bail, ensure, Context, Result};
use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub const CHECKS: &[Check<Install>] = &[
    ("directives have ranges, and errors name file and line", directives),
    ("the status page: HTML, lines, JSON", status_page),
    ("c9 on event: blocking scripts on every worker are refused with 503", |i, s| long(i, s, Mpm::Event, "blocking")),
    ("c9 on event: busy scripts on every worker are refused with 503", |i, s| long(i, s, Mpm::Event, "busy")),
    ("c9 on prefork: blocking scripts", |i, s| long(i, s, Mpm::Prefork, "blocking")),
    ("c9 on prefork: busy scripts", |i, s| long(i, s, Mpm::Prefork, "busy")),
    ("c9 on worker: scripts that wait for a file's lock", |i, s| long(i, s, Mpm::Worker, "flock")),
    ("c9 in observe mode: recorded, nobody stopped", observe),
    ("x10 on event: the session's holder goes, its waiters get their pages", |i, s| session(i, s, Mpm::Event)),
    ("x10 on prefork", |i, s| session(i, s, Mpm::Prefork)),
    ("a protected location is never cancelled", protected),
    ("slow readers that hold every worker of prefork are cut off", slow_readers),
    ("a script that writes to a client that does not read is cut off", endless_output),
    ("a stopped script's 503 arrives whole through a slow filter", slow_refusal),
    ("every kind of script can be stopped, on event", |i, s| matrix(i, s, Mpm::Event)),
    ("every kind of script can be stopped, on prefork", |i, s| matrix(i, s, Mpm::Prefork)),
    ("graceful restarts under load with scripts in flight, on event", |i, s| graceful(i, s, Mpm::Event)),
    ("graceful restarts under load with scripts in flight, on worker", |i, s| graceful(i, s, Mpm::Worker)),
    ("graceful restarts under load with scripts in flight, on prefork", |i, s| graceful(i, s, Mpm::Prefork)),
    ("a saturated event: shortages do not wake the controller each time", saturated),
    ("kill -9 of the child that leads: another one leads, and acts", kill_leader),
    ("1,000 PHP cancels on event: nothing is left behind", |i, s| thousand(i, s, Mpm::Event)),
    ("1,000 PHP cancels on prefork: nothing is left behind", |i, s| thousand(i, s, Mpm::Prefork)),
];

/// The scripts of the PHP extension's own tests.
fn scripts() -> PathBuf {
    atropos_link::checkout().join("hosts/php/tests")
}

fn enforcing(mpm: Mpm, children: u32, threads: u32) -> Config {
    Config { atropos: Some(Mode::Enforce), children, ..Config::new(mpm, threads) }
}

fn statics(clients: u32) -> Group {
    Group { name: "static", clients, pages: Pages::One(STATIC_PAGE), pace_per_s: None }
}

fn directives(install: &Install, _seed: u64) -> Result<String> {
    let dir = crate::dirs::new_run_dir()?;
    let module = install.atropos()?.0;
    let mut mpm = String::new();
    for name in ["mpm_event", "unixd", "authz_core"] {
        if let Some(file) = install.module(&format!("mod_{name}")) {
            mpm += &format!("LoadModule {name}_module \"{}\"\n", file.display());
        }
    }
    let conf = dir.join("bad.conf");
    let mut said = 0;
    let mut check = || -> Result<()> {
        for (bad, names) in [
            ("Atropos sometimes", "sometimes"),
            ("AtroposSLO -1", "AtroposSLO"),
            ("AtroposSLO soon", "AtroposSLO"),
            ("AtroposSet window_ms 1", "window_ms"),
            ("AtroposSet no_such_setting 1", "no_such_setting"),
            ("<Location />\nAtroposClass 16\n</Location>", "AtroposClass"),
            ("<Location />\nAtroposProtect perhaps\n</Location>", "AtroposProtect"),
            ("<Location />\nAtropos enforce\n</Location>", "Atropos"),
        ] {
            let head = format!(
                "ServerRoot \"{}\"\nServerName x\nListen 127.0.0.1:1\nPidFile pid\nErrorLog stderr\n{mpm}\
                 LoadModule atropos_module \"{}\"\n",
                dir.display(),
                module.display()
            );
            fs::write(&conf, format!("{head}{bad}\n"))?;
            let out = Command::new(install.httpd()).arg("-t").arg("-f").arg(&conf).output()?;
            let text = String::from_utf8_lossy(&out.stderr).into_owned() + &String::from_utf8_lossy(&out.stdout);
            let line = head.lines().count() + 1 + usize::from(bad.starts_with('<'));
            ensure!(!out.status.success(), "{bad:?} was accepted: {text}");
            let place = text.contains("bad.conf") && text.contains(&format!("line {line} "));
            ensure!(place && text.contains(names), "{bad:?}: the error does not say where and what: {text}");
            said += 1;
        }
        Ok(())
    };
    let done = check();
    let _ = fs::remove_dir_all(&dir);
    done?;
    Ok(format!("{said} bad lines refused by httpd -t, each with its place"))
}

fn status_page(install: &Install, seed: u64) -> Result<String> {
    let config = Config { atropos: Some(Mode::Observe), ..Config::new(Mpm::Event, 4) };
    let server = Httpd::start(install, &config, None, "status")?;
    let load = load::start(server.address, &[statics(2)], seed)?;
    std::thread::sleep(Duration::from_secs(1));
    let json = server.atropos_status()?;
    ensure!(json["atropos"]["mode"] == "observe", "mode is {}", json["atropos"]["mode"]);
    let leader = server.leader()?;
    ensure!(server.children().contains(&leader), "the leader {leader} is none of {:?}", server.children());
    let page = |query: &str| -> Result<String> {
        let seen = server.visit(&format!("/atropos-status{query}"), &[], Duration::from_secs(5));
        ensure!(seen.status() == Some(200), "/atropos-status{query}: {}", seen.text());
        Ok(String::from_utf8_lossy(&seen.body).into_owned())
    };
    let (html, lines) = (page("")?, page("?auto")?);
    ensure!(html.to_ascii_lowercase().contains("<html") && html.contains("observe"), "the page is {html}");
    ensure!(
        lines.lines().filter(|l| !l.is_empty()).all(|l| l.contains(": ")) && lines.contains("observe"),
        "?auto is not lines of \"Name: value\": {lines}"
    );
    let dir = server.dir().display().to_string();
    ensure!(!html.contains(&dir) && !json.to_string().contains(&dir), "the page tells paths of the server");
    ensure!(load.finish()?.bad.is_empty(), "the load saw errors");
    server.finish()?;
    Ok(format!("leader {leader}; {} bytes of HTML, {} lines", html.len(), lines.lines().count()))
}

/// A shortened run of a case. Speed is not judged here: who is cancelled is.
fn short_case(
    install: &Install,
    id: &str,
    mode: Mode,
    mpm: Mpm,
    variant: &'static str,
    seed: u64,
) -> Result<WebRecord> {
    let case = cases::find(id)?;
    let setup = Setup { variant, seed, duration_s: Some(8.0), ..Setup::new(case, mpm) };
    let (record, _) = run_once(install, case, mode, 1, None, &setup)?;
    ensure!(record.record.verdict == "pass", "{}", summary(&record));
    Ok(record)
}

fn told(w: &WebRecord) -> String {
    let ms = |v: Option<f64>| v.map_or("never".into(), |v| format!("{v:.0} ms"));
    format!(
        "decided {} after the onset, {} stopped: {}; {:.2} of the requests per second before it",
        ms(w.record.first_cancel_ms.or(w.record.first_would_cancel_ms)),
        w.requests.iter().filter(|r| r.stopped()).count(),
        w.record.culprit_error.as_deref().unwrap_or("nobody"),
        w.record.tps_ratio
    )
}

fn long(install: &Install, seed: u64, mpm: Mpm, variant: &'static str) -> Result<String> {
    Ok(told(&short_case(install, "c9", Mode::Enforce, mpm, variant, seed)?))
}

fn observe(install: &Install, seed: u64) -> Result<String> {
    Ok(told(&short_case(install, "c9", Mode::Observe, Mpm::Event, "blocking", seed)?))
}

fn session(install: &Install, seed: u64, mpm: Mpm) -> Result<String> {
    let w = short_case(install, "x10", Mode::Enforce, mpm, "usleep", seed)?;
    let pages = w.requests.iter().filter(|r| r.role == Role::Bystander && r.succeeded()).count();
    Ok(format!("{}; {pages} waiters got their pages", told(&w)))
}

/// The culprits' requests, joined.
fn join(requests: Vec<JoinHandle<Request>>) -> Result<Vec<Request>> {
    requests.into_iter().map(|r| r.join().map_err(|_| anyhow::anyhow!("a request panicked"))).collect()
}

/// Asks for `count` pages `path`/`name`-N from threads of their own and waits until all scripts have begun.
fn begin(
    server: &Httpd,
    name: &str,
    count: u32,
    query: &str,
    stop: &Arc<AtomicBool>,
) -> Result<Vec<JoinHandle<Request>>> {
    let one = |i| format!("{name}-{i}");
    let start = |i| request(server.address, Role::Culprit, &format!("/long.php/{}", one(i)), query, &[], stop.clone());
    let requests = (1..=count).map(start).collect();
    for i in 1..=count {
        server.wait_mark(&one(i), Duration::from_secs(10))?;
    }
    Ok(requests)
}

/// Decisions that acted, so far.
fn acted(server: &Httpd) -> usize {
    let log = fs::read_to_string(server.decision_log()).unwrap_or_default();
    log.lines().filter(|l| l.contains("\"result\":\"requested\"")).count()
}

/// Until a decision has acted.
fn await_decision(server: &Httpd) -> Result<()> {
    let give_up = Instant::now() + Duration::from_secs(10);
    while acted(server) == 0 {
        ensure!(Instant::now() < give_up, "no decision within 10 s");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn protected(install: &Install, seed: u64) -> Result<String> {
    let mut config = enforcing(Mpm::Event, 1, 3);
    config.directives.push("AtroposSLO 20ms\n<Location /long.php>\nAtroposProtect On\n</Location>".into());
    let server = Httpd::start(install, &config, None, "protected")?;
    let load = load::start(server.address, &[statics(4)], seed)?;
    std::thread::sleep(Duration::from_secs(2));
    let stop = Arc::new(AtomicBool::new(false));
    let done = join(begin(&server, "vip", 3, "?s=4", &stop)?)?;
    let log = load.finish()?;
    for r in &done {
        ensure!(r.succeeded(), "{}: {}", r.label, r.text);
    }
    ensure!(log.bad.is_empty(), "the load saw {:?}", log.bad[0]);
    ensure!(acted(&server) == 0, "{} decisions acted", acted(&server));
    server.finish()?;
    Ok("three scripts held every worker for 4 s under an objective of 20 ms and got their pages".into())
}

/// Fills every worker with scripts and wants one of them refused.
fn culprit_is_stopped(server: &Httpd, name: &str, slots: u32) -> Result<String> {
    let stop = Arc::new(AtomicBool::new(false));
    let began_ns = now_ns();
    let requests = begin(server, name, slots, "?s=20", &stop)?;
    let give_up = Instant::now() + Duration::from_secs(10);
    while !requests.iter().any(JoinHandle::is_finished) && Instant::now() < give_up {
        std::thread::sleep(Duration::from_millis(10));
    }
    // Those that are let go on are not waited for.
    std::thread::sleep(Duration::from_millis(500));
    stop.store(true, Ordering::Relaxed);
    let done = join(requests)?;
    let stopped: Vec<_> = done.iter().filter(|r| r.stopped()).collect();
    let first = stopped
        .iter()
        .min_by_key(|r| r.ended_ns)
        .with_context(|| format!("none of {slots} scripts was stopped within 10 s"))?;
    for r in &stopped {
        ensure!(r.status == Some(503) && r.retry_after_s.is_some(), "{} saw {}", r.label, r.text);
    }
    Ok(format!("{} of {slots} stopped, the first after {} ms", stopped.len(), (first.ended_ns - began_ns) / 1_000_000))
}

/// Clients that ask for a large page and read nothing.
fn slow_readers(install: &Install, seed: u64) -> Result<String> {
    const SLOTS: u32 = 3;
    let server = Httpd::start(install, &enforcing(Mpm::Prefork, 1, SLOTS), None, "slow-readers")?;
    File::create(server.dir().join("www/large.bin"))?.set_len(256 << 20)?;
    let load = load::start(server.address, &[statics(4)], seed)?;
    std::thread::sleep(Duration::from_secs(3));
    let mut readers = vec![];
    for i in 1..=SLOTS {
        let mut c = Connection::open(server.address).map_err(|e| anyhow::anyhow!("{e}"))?;
        c.send(&get(&format!("/large.bin?reader-{i}"), &[], false)).map_err(|e| anyhow::anyhow!("{e}"))?;
        readers.push(c);
    }
    await_decision(&server)?;
    std::thread::sleep(Duration::from_millis(500));
    let before = load.done();
    std::thread::sleep(Duration::from_millis(500));
    ensure!(load.done() > before, "nobody is served after the cancel");
    let log = load.finish()?;
    ensure!(log.bad.is_empty(), "the load saw {:?}", log.bad[0]);
    let told = acted(&server);
    let mut cut = 0;
    for mut c in readers {
        let give_up = Instant::now() + Duration::from_secs(20);
        match c.receive(None, &|| Instant::now() > give_up) {
            Err(Fault::Truncated { .. } | Fault::Unanswered(_)) => cut += 1,
            Ok(r) => ensure!(r.status == 200 && r.length == 256 << 20, "a reader got {r:?}"),
            Err(e) => bail!("a reader saw: {e}"),
        }
    }
    ensure!(cut >= 1 && cut <= told, "{cut} of {SLOTS} readers were cut off, {told} told to stop");
    server.finish()?;
    Ok(format!("{cut} of {SLOTS} cut off, no page looked complete that was not"))
}

/// A script that writes without end to a client that reads nothing.
fn endless_output(install: &Install, seed: u64) -> Result<String> {
    let server = Httpd::start(install, &enforcing(Mpm::Event, 1, 1), Some(&scripts()), "endless-output")?;
    let load = load::start(server.address, &[statics(3)], seed)?;
    std::thread::sleep(Duration::from_secs(3));
    let mut c = Connection::open(server.address).map_err(|e| anyhow::anyhow!("{e}"))?;
    c.send(&get("/endless-output.php", &[], false)).map_err(|e| anyhow::anyhow!("{e}"))?;
    let asked = Instant::now();
    await_decision(&server)?;
    let (before, told) = (load.done(), Instant::now());
    while load.done() < before + 100 {
        ensure!(told.elapsed() < Duration::from_secs(10), "the worker is not free 10 s after the cancel");
        std::thread::sleep(Duration::from_millis(10));
    }
    let free_ms = told.elapsed().as_millis();
    let give_up = Instant::now() + Duration::from_secs(10);
    match c.receive(None, &|| Instant::now() > give_up) {
        Err(Fault::Truncated { .. }) => {}
        other => bail!("the client that read late saw {other:?}"),
    }
    let log = load.finish()?;
    ensure!(log.bad.is_empty(), "the load saw {:?}", log.bad[0]);
    server.finish()?;
    Ok(format!("told {} ms after it began, the worker free {free_ms} ms later", (told - asked).as_millis()))
}

/// Cancels are repeated until the script has ended, so some come while its 503 is on the way through a slow filter.
fn slow_refusal(install: &Install, seed: u64) -> Result<String> {
    let mut config = enforcing(Mpm::Event, 1, 1);
    let module = install.module("mod_ratelimit").context("this httpd has no mod_ratelimit")?;
    config.directives.push(format!("LoadModule ratelimit_module \"{}\"", module.display()));
    // Two KiB a second, in a piece each 200 ms: the answer takes two or three.
    config.directives.push("<Location /long.php>\nSetOutputFilter RATE_LIMIT\nSetEnv rate-limit 2\n</Location>".into());
    let server = Httpd::start(install, &config, None, "slow-refusal")?;
    let load = load::start(server.address, &[statics(3)], seed)?;
    std::thread::sleep(Duration::from_secs(3));
    let asked = Instant::now();
    let stop = Arc::new(AtomicBool::new(false));
    let requests = begin(&server, "limited", 1, "?s=20", &stop)?;
    await_decision(&server)?;
    let told = Instant::now();
    for r in join(requests)? {
        ensure!(r.status == Some(503) && r.complete && r.retry_after_s.is_some(), "{} saw {}", r.label, r.text);
    }
    let took_ms = told.elapsed().as_millis();
    ensure!(took_ms >= 150, "the answer took {took_ms} ms: the filter did not delay it, and nothing was tested");
    let log = load.finish()?;
    ensure!(log.bad.is_empty(), "the load saw {:?}", log.bad[0]);
    server.finish()?;
    Ok(format!("told {} ms after it began, 503 whole {took_ms} ms later", (told - asked).as_millis()))
}

/// How a script's client must see that it was stopped.
#[derive(Clone, Copy, PartialEq)]
enum Seen {
    /// Nothing was sent: 503 with Retry-After, whole, and nothing of the script's own.
    Refused,
    /// Something was sent: no end that looks like one.
    CutOff,
    /// The body was being read: either, as long as no page comes.
    Either,
}

struct Kind {
    name: &'static str,
    request: fn() -> Vec<u8>,
    seen: Seen,
}

macro_rules! kind {
    ($seen:ident, $path:literal) => {
        Kind { name: $path, request: || get(concat!("/", $path), &[], false), seen: Seen::$seen }
    };
}

fn post(path: &str) -> Vec<u8> {
    // More is promised than is sent.
    format!(
        "POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/x-www-form-urlencoded\r\n\
         Content-Length: 100\r\nConnection: close\r\n\r\nseconds="
    )
    .into_bytes()
}

/// The scripts of `hosts/php/tests`, and what their clients must see.
const KINDS: &[Kind] = &[
    kind!(Refused, "busy.php"),
    kind!(Refused, "usleep.php"),
    kind!(Refused, "flock.php"),
    kind!(Refused, "accept.php"),
    kind!(Refused, "fsockopen.php"),
    kind!(Refused, "exception.php"),
    kind!(Refused, "fiber.php"),
    kind!(Refused, "buffered.php"),
    kind!(CutOff, "headers-sent.php"),
    Kind { name: "headers-sent.php by HTTP/1.0", request: || get_old("/headers-sent.php"), seen: Seen::CutOff },
    kind!(Refused, "shutdown-works.php"),
    kind!(Refused, "shutdown-hangs.php?how=busy"),
    kind!(Refused, "shutdown-hangs.php?how=call"),
    kind!(Refused, "shutdown-hangs.php?how=internal"),
    kind!(Refused, "destructor-hangs.php"),
    kind!(Refused, "output-handler-hangs.php"),
    kind!(Refused, "output-handler-hangs.php?early"),
    Kind { name: "body.php, half a form", request: || post("/body.php"), seen: Seen::Either },
    Kind { name: "upload.php, half a body", request: || post("/upload.php"), seen: Seen::Either },
];

/// What is wrong with the answer to a script that was stopped.
fn wrong(kind: &Kind, v: &Visit) -> Option<String> {
    let body = String::from_utf8_lossy(&v.body);
    let refused = || {
        let header = v.header.to_ascii_lowercase();
        // Somebody may come again: nobody may keep this answer, nor what the script had said about its page.
        let own = ["etag:", "public", "image/png"].iter().any(|h| header.contains(h));
        let retry = v.result.as_ref().is_ok_and(|r| r.retry_after_s.is_some());
        v.status() == Some(503) && retry && header.contains("no-store") && !own
    };
    let cut = matches!(v.result, Err(Fault::Truncated { .. } | Fault::Unanswered(_)));
    let right = match kind.seen {
        Seen::Refused => refused() && v.looks_complete() && !body.to_ascii_lowercase().contains("part of a page"),
        Seen::CutOff => matches!(v.result, Err(Fault::Truncated { .. })),
        Seen::Either => cut || v.status() == Some(503),
    };
    let leaks = ["finished", "output of a shutdown function"].iter().any(|t| body.contains(t));
    (!right || leaks).then(|| {
        let start: String = body.chars().take(80).collect();
        format!("{}: {}, header {:?}, body {start:?}", kind.name, v.text(), v.header)
    })
}

fn matrix(install: &Install, seed: u64, mpm: Mpm) -> Result<String> {
    // One worker: whatever script has it is the culprit.
    let mut config = enforcing(mpm, 1, 1);
    config.directives.push("<Files upload.php>\nphp_flag enable_post_data_reading off\n</Files>".into());
    let server = Httpd::start(install, &config, Some(&scripts()), &format!("matrix-{}", mpm.name()))?;
    let tmp = server.dir().join("tmp");
    let lock = File::create(tmp.join("atropos-flock-test"))?;
    fs::set_permissions(tmp.join("atropos-flock-test"), std::os::unix::fs::PermissionsExt::from_mode(0o666))?;
    // SAFETY: flock takes a descriptor that `lock` keeps open.
    ensure!(unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX) } == 0, "flock: {}", std::io::Error::last_os_error());
    let load = load::start(server.address, &[statics(3)], seed)?;
    std::thread::sleep(Duration::from_secs(3));
    let mut failures = vec![];
    let (mut slowest_ms, mut slowest_free_ms) = (0, 0);
    for kind in KINDS {
        let patience = Instant::now() + Duration::from_secs(10);
        let seen = client::visit(server.address, &(kind.request)(), &|| Instant::now() > patience);
        failures.extend(wrong(kind, &seen));
        slowest_ms = slowest_ms.max((seen.ended_ns - seen.started_ns) / 1_000_000);
        // The worker is free again: the load goes on. A script that hangs would keep it for a minute.
        let (before, told) = (load.done(), Instant::now());
        while load.done() < before + 100 {
            if told.elapsed() > Duration::from_secs(10) {
                bail!("{}: the worker is not free 10 s after the cancel{}", kind.name, failed(&failures));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        slowest_free_ms = slowest_free_ms.max(told.elapsed().as_millis());
        // Calm, in which the library learns that all is well and the budget of cancels fills up.
        std::thread::sleep(Duration::from_millis(1500));
    }
    ensure!(failures.is_empty(), "{}", failures.join("; "));
    let note = fs::read_to_string(tmp.join("atropos-shutdown-test")).unwrap_or_default();
    let said: Vec<&str> = note.lines().collect();
    for must in ["slept", "second", "destructor"] {
        ensure!(said.contains(&must), "shutdown-works.php: no {must:?} among {said:?}");
    }
    ensure!(said.len() == 3, "shutdown-works.php went on after its cancel: {said:?}");
    for (file, script) in [("atropos-fsockopen-test", "fsockopen.php"), ("atropos-body-test", "body.php")] {
        ensure!(!tmp.join(file).exists(), "{script} went on with what nobody sent");
    }
    let log = load.finish()?;
    ensure!(log.bad.is_empty(), "the load saw {:?}", log.bad[0]);
    drop(lock);
    server.finish()?;
    Ok(format!(
        "{} kinds, the slowest answer after {slowest_ms} ms, the worker free at most {slowest_free_ms} ms later",
        KINDS.len()
    ))
}

fn failed(failures: &[String]) -> String {
    if failures.is_empty() {
        String::new()
    } else {
        format!("; before it: {}", failures.join("; "))
    }
}

fn graceful(install: &Install, seed: u64, mpm: Mpm) -> Result<String> {
    const ROUNDS: u32 = 4;
    let (children, threads) = if mpm == Mpm::Prefork { (1, 8) } else { (2, 4) };
    let config = enforcing(mpm, children, threads);
    let server = Httpd::start(install, &config, None, &format!("graceful-{}", mpm.name()))?;
    let load = load::start(server.address, &[statics(4)], seed)?;
    std::thread::sleep(Duration::from_secs(2));
    let stop = Arc::new(AtomicBool::new(false));
    let mut in_flight = vec![];
    let mut slowest_ms = 0;
    for round in 1..=ROUNDS {
        let old = server.children();
        // Fewer scripts than workers: nobody is to blame.
        in_flight.extend(begin(&server, &format!("sleeps{round}"), 2, "?s=1.5&how=usleep", &stop)?);
        in_flight.extend(begin(&server, &format!("works{round}"), 1, "?s=1.5&how=busy", &stop)?);
        server.graceful();
        let asked = Instant::now();
        // The old ones go when their scripts are done, not before and not much later.
        while server.children().iter().any(|c| old.contains(c)) {
            ensure!(
                asked.elapsed() < Duration::from_secs(15),
                "round {round}: children of the last generation are still there after 15 s: {:?} of {old:?}\n{}",
                server.children(),
                server.log_tail(10)
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        slowest_ms = slowest_ms.max(asked.elapsed().as_millis());
    }
    let done = join(in_flight)?;
    for r in &done {
        ensure!(r.succeeded(), "{}: {}", r.label, r.text);
    }
    let before = load.done();
    std::thread::sleep(Duration::from_secs(2));
    ensure!(load.done() > before, "nobody is served after the restarts");
    let leader = server.leader()?;
    ensure!(server.children().contains(&leader), "the leader {leader} is none of {:?}", server.children());
    let stopped = culprit_is_stopped(&server, "after", config.slots())?;
    let log = load.finish()?;
    ensure!(log.bad.is_empty(), "the load saw {} errors, the first: {:?}", log.bad.len(), log.bad[0]);
    let crashes = server.crash_lines();
    ensure!(crashes.is_empty(), "{}", crashes.join("; "));
    server.abandon();
    Ok(format!(
        "{} scripts over {ROUNDS} restarts all finished, the last old child went after {slowest_ms} ms; \
         afterwards {stopped}",
        done.len()
    ))
}

/// Fewer workers than clients: thousands of times a second none is idle, and all is well.
fn saturated(install: &Install, seed: u64) -> Result<String> {
    const ENOUGH: u64 = 4000;
    let server = Httpd::start(install, &enforcing(Mpm::Event, 1, 3), None, "saturated")?;
    let load = load::start(server.address, &[statics(8)], seed)?;
    let look = || -> Result<(u64, u64)> {
        let status = server.atropos_status()?;
        let shortages = status["server"]["shortages"].as_u64().context("the status page tells no shortages")?;
        Ok((shortages, server.controller_sleeps()?))
    };
    let before = look()?;
    let give_up = Instant::now() + Duration::from_secs(30);
    let (shortages, sleeps) = loop {
        std::thread::sleep(Duration::from_millis(500));
        let now = look()?;
        let seen = (now.0 - before.0, now.1 - before.1);
        if seen.0 >= ENOUGH {
            break seen;
        }
        ensure!(Instant::now() < give_up, "only {} shortages in 30 s: the load does not saturate the server", seen.0);
    };
    let log = load.finish()?;
    ensure!(log.bad.is_empty(), "the load saw {:?}", log.bad.last());
    ensure!(sleeps < shortages / 4, "the controller slept {sleeps} times during {shortages} shortages");
    server.finish()?;
    Ok(format!("{shortages} shortages, the controller slept {sleeps} times"))
}

fn kill_leader(install: &Install, seed: u64) -> Result<String> {
    let config = enforcing(Mpm::Event, 2, 3);
    let server = Httpd::start(install, &config, None, "kill-leader")?;
    let load = load::start(server.address, &[statics(4)], seed)?;
    std::thread::sleep(Duration::from_secs(2));
    let first = server.leader()?;
    ensure!(server.children().contains(&first), "the leader {first} is none of {:?}", server.children());
    guard::signal(first, libc::SIGKILL);
    let killed = Instant::now();
    let next = loop {
        match server.leader() {
            Ok(pid) if pid != first && pid != 0 => break pid,
            _ => ensure!(killed.elapsed() < Duration::from_secs(10), "nobody leads 10 s after the kill"),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let took = killed.elapsed().as_millis();
    // Its place is taken by a new child, so all workers are there again.
    while server.children().len() < 2 {
        ensure!(killed.elapsed() < Duration::from_secs(10), "no new child 10 s after the kill");
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_secs(2));
    let stopped = culprit_is_stopped(&server, "after", config.slots())?;
    let log = load.finish()?;
    // What the dead child was serving is lost, and only that.
    let late = log.bad.iter().filter(|b| b.status.is_some()).count();
    ensure!(late == 0 && log.bad.len() <= 8, "the load saw {} errors, the last: {:?}", log.bad.len(), log.bad.last());
    let others: Vec<_> = server.crash_lines().into_iter().filter(|l| !l.contains("exit signal Killed (9)")).collect();
    ensure!(others.is_empty(), "{}", others.join("; "));
    server.abandon();
    Ok(format!("{first} killed, {next} leads after {took} ms; {stopped}"))
}

/// Cancels come as fast as the settings allow: what is tested is what they leave behind.
const TRIGGER_HAPPY: &[&str] = &[
    "AtroposSLO 5ms",
    "AtroposSet window_ms 20",
    "AtroposSet trigger_windows 1",
    "AtroposSet contention_threshold 0.01",
    "AtroposSet min_relief 0.01",
    "AtroposSet cancel_rate_per_s 1000",
    "AtroposSet cancel_burst 1000",
    "AtroposSet cancel_share 1",
    "AtroposSet verify_ms 100",
];

fn thousand(install: &Install, seed: u64, mpm: Mpm) -> Result<String> {
    const CANCELS: u64 = 1000;
    const WARM: u64 = 100;
    const SLOTS: u32 = 8;
    let mut config = enforcing(mpm, 1, SLOTS);
    config.directives.extend(TRIGGER_HAPPY.iter().map(|s| s.to_string()));
    let server = Httpd::start(install, &config, Some(&scripts()), &format!("thousand-{}", mpm.name()))?;
    let began = Instant::now();
    let give_up = began + Duration::from_secs(300);
    let (stopped, silent, number) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let labels = Mutex::new(Vec::<String>::new());
    let others = Mutex::new(BTreeMap::<String, u64>::new());
    // Most hang in some way, the last is done at once: a cancel that comes too late for one must not hit the next.
    const SCRIPTS: &[&str] =
        &["usleep", "accept", "buffered", "headers-sent", "fsockopen", "fiber", "shutdown-works", "busy", "quick"];
    // Clients that ask for scripts of all kinds until `until` of them were stopped.
    let batch = |until: u64| -> Result<()> {
        let load = load::start(server.address, &[statics(2)], seed)?;
        std::thread::sleep(Duration::from_secs(2));
        std::thread::scope(|s| {
            for _ in 0..SLOTS {
                let (server, stopped, silent) = (&server, &stopped, &silent);
                let (number, labels, others) = (&number, &labels, &others);
                s.spawn(move || {
                    while stopped.load(Ordering::Relaxed) < until && Instant::now() < give_up {
                        let n = number.fetch_add(1, Ordering::Relaxed);
                        let path = format!("/{}.php/{n}", SCRIPTS[n as usize % SCRIPTS.len()]);
                        let seen = server.visit(&format!("{path}?seconds=5"), &[], Duration::from_secs(20));
                        match (&seen.result, seen.status()) {
                            // The last: told before its script began, when it was no script's request yet.
                            (Ok(_), Some(503))
                            | (Err(Fault::Truncated { .. }), Some(200))
                            | (Err(Fault::Unanswered(_)), _) => {
                                if matches!(seen.result, Err(Fault::Unanswered(_))) {
                                    silent.fetch_add(1, Ordering::Relaxed);
                                }
                                stopped.fetch_add(1, Ordering::Relaxed);
                                labels.lock().unwrap_or_else(PoisonError::into_inner).push(format!("GET {path}"));
                            }
                            (Ok(_), Some(200)) => {}
                            _ => {
                                let mut others = others.lock().unwrap_or_else(PoisonError::into_inner);
                                *others.entry(format!("{path}: {}", seen.text())).or_default() += 1;
                            }
                        }
                    }
                });
            }
        });
        let log = load.finish()?;
        // A static page may be chosen, too, when its worker was not run for long enough: it is told like all others.
        ensure!(log.bad.iter().all(|b| b.status == Some(503)), "the load saw {:?}", log.bad.last());
        Ok(())
    };
    // The first ones fill caches and grow what grows once.
    batch(WARM)?;
    let before = at_rest(&server)?;
    let open_before = server.descriptors();
    batch(WARM + CANCELS)?;
    let after = at_rest(&server)?;
    let open_after = server.descriptors();
    let more: Vec<_> = open_after.iter().filter(|(kind, n)| open_before.get(*kind) != Some(n)).collect();
    let count = stopped.load(Ordering::Relaxed);
    let others = others.into_inner().unwrap_or_else(PoisonError::into_inner);
    ensure!(others.is_empty(), "scripts ended in other ways: {others:?}");
    ensure!(count >= WARM + CANCELS, "only {count} cancels in {:.0} s", began.elapsed().as_secs_f64());
    let told = told_labels(&server)?;
    let labels = labels.into_inner().unwrap_or_else(PoisonError::into_inner);
    let wrong: Vec<_> = labels.iter().filter(|l| !told.contains(*l)).collect();
    ensure!(
        wrong.is_empty(),
        "{} were stopped though nobody decided so: {:?}",
        wrong.len(),
        &wrong[..wrong.len().min(5)]
    );
    let seen = format!("before: {} [{}]; after: {} [{}]", before.0, before.1, after.0, after.1);
    ensure!(
        (before.0.processes, before.0.threads, before.0.descriptors, &before.1)
            == (after.0.processes, after.0.threads, after.0.descriptors, &after.1),
        "{seen}; open at the end, unlike before: {more:?}"
    );
    // Half a page for each would be a leak; pages that the allocators keep are not.
    let grown_kib = after.0.anonymous_kib as i64 - before.0.anonymous_kib as i64;
    ensure!(grown_kib <= CANCELS as i64 * 2, "memory grew by {grown_kib} KiB: {seen}");
    let status = server.atropos_status()?;
    let left = status["atropos"]["tasks"].as_array().context("the status page lists no tasks")?.len();
    // The request for the page itself is one.
    ensure!(left <= 1, "{left} tasks are left: {}", status["atropos"]["tasks"]);
    server.finish()?;
    let (silent, took_s) = (silent.into_inner(), began.elapsed().as_secs_f64());
    ensure!(silent <= count / 50, "{silent} of {count} were closed without a word");
    Ok(format!("{count} cancels in {took_s:.0} s, each of a request that was told, {silent} without a word; {seen}"))
}

/// The labels of all tasks that were told to stop.
fn told_labels(server: &Httpd) -> Result<HashSet<String>> {
    let log = fs::read_to_string(server.decision_log()).context("the decision log")?;
    let mut labels = HashSet::new();
    for line in log.lines() {
        let json: serde_json::Value = serde_json::from_str(line).with_context(|| format!("the decision {line}"))?;
        if json["result"] != "would_cancel" {
            labels.insert(json["task"]["label"].as_str().unwrap_or_default().to_owned());
        }
    }
    Ok(labels)
}

/// What the server takes when nobody asks for anything: the same twice in a row, since connections and children take
/// their time to go.
fn at_rest(server: &Httpd) -> Result<(Footprint, String)> {
    let give_up = Instant::now() + Duration::from_secs(20);
    let look = || -> Result<(Footprint, String)> {
        let board = server.scoreboard()?;
        let mut letters: Vec<char> = board.chars().filter(|c| *c != '.').collect();
        letters.sort_unstable();
        // The fewest over a second: the connection that asked for the scoreboard may still be open, and a file that
        // somebody has just looked into.
        let mut rest = server.footprint();
        for _ in 0..10 {
            std::thread::sleep(Duration::from_millis(100));
            let now = server.footprint();
            if now.descriptors < rest.descriptors {
                rest = now;
            }
        }
        Ok((rest, letters.into_iter().collect()))
    };
    let mut last = look()?;
    loop {
        // Longer than KeepAliveTimeout: whoever idles is closed by then.
        std::thread::sleep(Duration::from_secs(6));
        let now = look()?;
        if now == last || Instant::now() > give_up {
            return Ok(now);
        }
        last = now;
    }
}
