//! The cases on httpd with PHP: load, noise and what must come of it.
use super::client::{self, get, Fault};
use super::load::{Group, Pages};
use super::server::{Config, Httpd, Mpm, STATIC_PAGE};
use crate::cases::{Expect, Limits, Role, Timing};
use crate::race::Rng;
use crate::record::Mode;
use anyhow::{bail, ensure, Context, Result};
use serde::Serialize;
use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

pub struct Case {
    pub id: &'static str,
    pub title: &'static str,
    pub stands_for: &'static str,
    /// Worker slots of the server.
    pub slots: u32,
    /// Ways to make the noise; the first is the default.
    pub variants: &'static [&'static str],
    pub groups: fn() -> Vec<Group>,
    pub timing: Timing,
    pub noise: Option<fn(&Noise) -> Result<NoiseRun>>,
    pub expect: Expect,
}

/// How long the culprits take when nobody stops them: as in the paper's case.
const LONG_S: f64 = 30.0;
/// x10's holder: longer than the measured part.
const HOLD_S: f64 = 25.0;
/// Clients of the static page.
const STATIC_CLIENTS: u32 = 8;

/// What the noise of a run gets to know.
pub struct Noise<'a> {
    pub server: &'a Httpd,
    pub slots: u32,
    pub variant: &'a str,
    pub stop: Arc<AtomicBool>,
}

/// A request of the noise, after its end. Times on CLOCK_MONOTONIC.
#[derive(Clone, Debug, Serialize)]
pub struct Request {
    pub role: Role,
    /// The label of its task: "GET /long.php/culprit-1".
    pub label: String,
    pub started_ns: i64,
    pub ended_ns: i64,
    /// `None`: no answer.
    pub status: Option<u16>,
    pub retry_after_s: Option<u32>,
    /// The end of the answer came and was marked as such.
    pub complete: bool,
    /// Still without an answer when the run ended.
    pub unfinished: bool,
    pub text: String,
}

impl Request {
    pub fn succeeded(&self) -> bool {
        self.status == Some(200) && self.complete
    }

    /// Refused or cut off, by whomever.
    pub fn stopped(&self) -> bool {
        !self.unfinished && !self.succeeded()
    }
}

pub struct NoiseRun {
    /// When the stall began.
    pub onset_ns: i64,
    pub requests: Vec<JoinHandle<Request>>,
    /// What the noise holds to its end: the lock that the variant `flock` waits for.
    pub held: Option<File>,
}

/// Sends `label`'s request with `query` from a thread of its own.
pub fn request(
    address: SocketAddr,
    role: Role,
    path: &str,
    query: &str,
    headers: &[(&str, &str)],
    stop: Arc<AtomicBool>,
) -> JoinHandle<Request> {
    let text = get(&format!("{path}{query}"), headers, false);
    let label = format!("GET {path}");
    std::thread::spawn(move || {
        let v = client::visit(address, &text, &|| stop.load(Ordering::Relaxed));
        Request {
            role,
            label,
            started_ns: v.started_ns,
            ended_ns: v.ended_ns,
            status: v.status(),
            retry_after_s: v.result.as_ref().ok().and_then(|r| r.retry_after_s),
            complete: v.looks_complete(),
            unfinished: matches!(v.result, Err(Fault::GaveUp)),
            text: v.text(),
        }
    })
}

fn statics() -> Vec<Group> {
    vec![Group { name: "static", clients: STATIC_CLIENTS, pages: Pages::One(STATIC_PAGE), pace_per_s: None }]
}

/// Static pages, short and longer scripts, some with one of a few sessions: more clients than workers and CPUs.
fn busy() -> Vec<Group> {
    vec![
        Group { name: "static", clients: 8, pages: Pages::One(STATIC_PAGE), pace_per_s: None },
        Group { name: "php", clients: 16, pages: Pages::Drawn(work), pace_per_s: None },
    ]
}

fn work(rng: &mut Rng, client: u32) -> String {
    let rounds = match rng.below(100) {
        0 => 50_000 + rng.below(50_000),
        1..=9 => 5_000 + rng.below(15_000),
        _ => 200 + rng.below(1_800),
    };
    match rng.below(10) {
        // Two tabs of the same visitor.
        0 => format!("/work.php?n={rounds}&sid={}", client / 2),
        // A page that waits for a database.
        1 => format!("/work.php?n={rounds}&ms={}", 2 + rng.below(30)),
        _ => format!("/work.php?n={rounds}"),
    }
}

/// Three long PHP requests at once.
fn long_requests(n: &Noise) -> Result<NoiseRun> {
    let mut held = None;
    if n.variant == "flock" {
        let path = n.server.marks().join("lock");
        let file = File::options().create(true).write(true).truncate(false).open(&path)?;
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o666))?;
        // SAFETY: flock takes a descriptor that `file` keeps open.
        if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) } != 0 {
            bail!("flock {}: {}", path.display(), std::io::Error::last_os_error());
        }
        held = Some(file);
    }
    let how = match n.variant {
        "blocking" => "usleep",
        other => other,
    };
    let culprits: Vec<String> = (1..=3).map(|i| format!("culprit-{i}")).collect();
    let requests: Vec<_> = culprits
        .iter()
        .map(|name| {
            let query = format!("?s={LONG_S}&how={how}");
            let path = format!("/long.php/{name}");
            request(n.server.address, Role::Culprit, &path, &query, &[], n.stop.clone())
        })
        .collect();
    // The first one's beginning: what comes before all three are there counts against us.
    let mut began = vec![];
    for (name, request) in culprits.iter().zip(&requests) {
        // A peer may refuse one before its script begins.
        let refused = || request.is_finished();
        began.extend(n.server.wait_mark_or(name, Duration::from_secs(10), &refused)?);
    }
    let onset_ns = began.into_iter().min().context("no culprit's script began")?;
    Ok(NoiseRun { onset_ns, requests, held })
}

/// A script keeps its session's lock; the same visitor's other requests wait for it until they hold every worker.
fn session_lock(n: &Noise) -> Result<NoiseRun> {
    let cookie = [("Cookie", "PHPSESSID=thesamevisitor0123456789")];
    let query = format!("?hold={HOLD_S}");
    let holder = request(n.server.address, Role::Culprit, "/session.php/holder", &query, &cookie, n.stop.clone());
    let onset_ns = n.server.wait_mark("holder.locked", Duration::from_secs(10))?;
    let mut requests = vec![holder];
    for i in 1..n.slots {
        let path = format!("/session.php/waiter-{i}");
        requests.push(request(n.server.address, Role::Bystander, &path, "", &cookie, n.stop.clone()));
    }
    Ok(NoiseRun { onset_ns, requests, held: None })
}

pub static CASES: &[Case] = &[
    Case {
        id: "c9",
        title: "three PHP requests of 30 s hold the worker slots that everybody needs",
        stands_for:
            "the paper's c9 (httpd with PHP, slow requests fill a small pool); mod_qos manual, \"Slow Application\"",
        slots: 3,
        variants: &["blocking", "busy", "flock"],
        groups: statics,
        timing: Timing { warmup_s: 5.0, quiet_s: 5.0, after_s: 20.0 },
        noise: Some(long_requests),
        expect: Expect::Culprits {
            stall_s: 16.0,
            limits: Some(Limits { first_cancel_ms: 500.0, tps_ratio: 0.97, p99_ratio: 1.10 }),
        },
    },
    Case {
        id: "x10",
        title: "a PHP session's lock holder makes waiters that fill the pool: the holder goes, its waiters do not",
        stands_for: "PHP manual, session_write_close(): only one script may operate on a session at any time",
        slots: 8,
        variants: &["usleep"],
        groups: statics,
        timing: Timing { warmup_s: 5.0, quiet_s: 5.0, after_s: 20.0 },
        noise: Some(session_lock),
        expect: Expect::Culprits { stall_s: 14.0, limits: None },
    },
    Case {
        id: "x5",
        title: "busy but clean: static pages and scripts at saturation, no culprit",
        stands_for: "ours: no published work states its false cancels",
        slots: 8,
        variants: &["mix"],
        groups: busy,
        timing: Timing { warmup_s: 10.0, quiet_s: 0.0, after_s: 60.0 },
        noise: None,
        expect: Expect::Nobody,
    },
];

/// What httpd has beside Atropos.
pub const PEERS: &[Mode] = &[Mode::Timeouts, Mode::ModQos];

pub fn find(id: &str) -> Result<&'static Case> {
    let known = || CASES.iter().map(|c| c.id).collect::<Vec<_>>().join(", ");
    CASES.iter().find(|c| c.id == id).with_context(|| format!("no case {id:?} on httpd; there are {}", known()))
}

/// Limits as a careful administrator sets them. PHP's own default for max_execution_time, 30 s, would let every culprit
/// of c9 end by itself.
const TIMEOUTS: &[&str] = &["Timeout 30", "RequestReadTimeout header=20-40,MinRate=500 body=20,MinRate=500"];
const PHP_TIMEOUTS: &[&str] = &["max_execution_time = 10"];

/// mod_qos as its manual advises: the use cases "Slow Application" (a limit for each application; there 100 of 256
/// workers, here the same share of ours, rounded up) and "HTTP Keep-Alive" (none above 70% of the connections).
fn qos(slots: u32) -> [String; 2] {
    let limit = (f64::from(slots) * 100.0 / 256.0).ceil();
    [format!("QS_LocRequestLimitMatch \"^/.*\\.php\" {limit}"), "QS_SrvMaxConnClose 70%".into()]
}

/// Where Debian's package libapache2-mod-qos puts the module.
const MOD_QOS: &str = "/usr/lib/apache2/modules/mod_qos.so";

/// What a peer's mode sets, in words.
pub fn means(mode: Mode, slots: u32) -> String {
    match mode {
        Mode::Timeouts => format!("{}; PHP: {}", TIMEOUTS.join(", "), PHP_TIMEOUTS.join(", ")),
        Mode::ModQos => {
            format!("Debian's libapache2-mod-qos (with LoadFile libpcre.so.3) and {}", qos(slots).join(", "))
        }
        _ => String::new(),
    }
}

fn add_peer(config: &mut Config, mode: Mode) -> Result<()> {
    match mode {
        Mode::Timeouts => {
            config.directives.extend(TIMEOUTS.iter().map(|d| d.to_string()));
            config.php_ini.extend(PHP_TIMEOUTS.iter().map(|d| d.to_string()));
        }
        Mode::ModQos => {
            ensure!(Path::new(MOD_QOS).exists(), "there is no {MOD_QOS}: apt-get install libapache2-mod-qos");
            // The package's module calls PCRE 1 and does not name it: alone it does not load into Debian's own httpd.
            config.directives.push("LoadFile libpcre.so.3".into());
            config.directives.push(format!("LoadModule qos_module \"{MOD_QOS}\""));
            config.directives.extend(qos(config.slots()));
        }
        Mode::PtKill => bail!("pt-kill is for MySQL; httpd has the peers timeouts and mod_qos"),
        _ => {}
    }
    Ok(())
}

/// Under prefork the first request of each connection waits for a worker. With httpd's default of 100 that is one request
/// in a hundred, so the 99th percentile fell among those that wait in one run and among the others in the next.
pub const PREFORK_KEEP_ALIVE_REQUESTS: u32 = 50;

/// The server of a run.
pub fn config(mpm: Mpm, slots: u32, mode: Mode) -> Result<Config> {
    let mut config = Config::new(mpm, slots);
    if mpm == Mpm::Prefork {
        config.keep_alive_requests = PREFORK_KEEP_ALIVE_REQUESTS;
    }
    config.atropos = Some(mode);
    add_peer(&mut config, mode)?;
    Ok(config)
}
