//! Fast assertions on a real server, for the test command: each says what must hold and what was seen.
use crate::cases::{self, Role};
use crate::measure::Part;
use crate::pg::cluster::{guc, new_run_dir, Cluster};
use crate::pg::install::Install;
use crate::pg::session::{self, SqlFailure};
use crate::pg::template::{self, Dataset};
use crate::race;
use crate::record::{Mode, Record};
use crate::runner::{module_settings, run_once, summary, Options};
use anyhow::{bail, ensure, Context, Result};
use std::time::{Duration, Instant};

type Check = (&'static str, fn(&Install, u64) -> Result<String>);

const CHECKS: &[Check] = &[
    ("the module needs shared_preload_libraries and says so", preload_guard),
    ("settings have ranges, units and a reserved prefix, and reload without a restart", settings),
    ("status and decisions are JSON, and not for everyone", sql_surface),
    ("a cancelled statement fails with 57014 naming Atropos, and its session goes on", table_lock),
    ("an idle transaction that blocks others is ended", idle),
    ("an ALTER that bars everyone goes, the report it waits for stays", queued_ddl),
    ("observe mode records and cancels nobody", observe),
    ("a protected role is never cancelled", protected_role),
    ("a crash of one backend (kill -9) does not end the watch", crash_restart),
    ("short statements under flying cancels: no wrong hit", race_contention),
    ("short statements under aimed cancels: no wrong hit", race_aimed),
];

/// Runs all checks (or those whose name contains `only`); an error when one failed.
pub fn run(install: &Install, seed: u64, only: Option<&str>) -> Result<()> {
    let mut failed = 0;
    let chosen: Vec<_> = CHECKS.iter().filter(|(name, _)| only.is_none_or(|o| name.contains(o))).collect();
    ensure!(!chosen.is_empty(), "no check's name contains {only:?}");
    for (i, (name, check)) in chosen.iter().enumerate() {
        let began = Instant::now();
        let result = check(install, seed);
        let took = began.elapsed().as_secs_f64();
        match result {
            Ok(seen) => println!("{:2}/{} ok      {name} ({took:.1} s): {seen}", i + 1, chosen.len()),
            Err(e) => {
                failed += 1;
                println!("{:2}/{} FAILED  {name} ({took:.1} s): {e:#}", i + 1, chosen.len());
            }
        }
    }
    println!("integration: {} passed, {failed} failed", chosen.len() - failed);
    if failed > 0 {
        bail!("{failed} of {} integration checks failed", chosen.len());
    }
    Ok(())
}

fn small(install: &Install, mode: Option<Mode>, extra: &[(&str, &str)]) -> Result<Cluster> {
    let template = template::data_dir(install, &Dataset::oltp(1, 1000))?;
    let dir = new_run_dir()?;
    let mut settings = mode.map(|m| module_settings(m, &dir.join("decisions.jsonl"))).unwrap_or_default();
    settings.extend(extra.iter().map(|(n, v)| guc(n, v)));
    Cluster::start_copy(install, dir, &template, &settings, "integration")
}

/// What the server says against `sql`.
fn refused(client: &mut postgres::Client, sql: &str) -> Result<SqlFailure> {
    match client.batch_execute(sql) {
        Ok(()) => bail!("{sql} succeeded"),
        Err(e) => Ok(SqlFailure::of(&e)),
    }
}

fn preload_guard(install: &Install, _seed: u64) -> Result<String> {
    let cluster = small(install, None, &[])?;
    let mut client = cluster.connect("check")?;
    let failure = refused(&mut client, "LOAD 'atropos'")?;
    ensure!(failure.text.contains("shared_preload_libraries"), "LOAD said {failure:?}");
    cluster.finish()?;
    Ok(failure.text)
}

fn settings(install: &Install, _seed: u64) -> Result<String> {
    let cluster = small(install, Some(Mode::Observe), &[])?;
    let mut client = cluster.connect("check")?;
    for (name, bad) in [("atropos.mode", "sometimes"), ("atropos.slo", "-1"), ("atropos.window_length", "1")] {
        let failure = refused(&mut client, &format!("ALTER SYSTEM SET {name} = '{bad}'"))?;
        ensure!(failure.sqlstate == "22023", "{name} = {bad}: {failure:?}");
    }
    let failure = refused(&mut client, "SET atropos.no_such_setting = 1")?;
    ensure!(failure.text.contains("atropos"), "an unknown setting: {failure:?}");
    client.batch_execute("ALTER SYSTEM SET atropos.mode = 'off'")?;
    client.batch_execute("SELECT pg_reload_conf()")?;
    // The command line's file wins over nothing: bench.conf is read first, ALTER SYSTEM's file last.
    let give_up = Instant::now() + Duration::from_secs(5);
    loop {
        let shown: String = client.query_one("SHOW atropos.mode", &[])?.get(0);
        if shown == "off" {
            break;
        }
        ensure!(Instant::now() < give_up, "after the reload atropos.mode is still {shown}");
        std::thread::sleep(Duration::from_millis(50));
    }
    cluster.finish()?;
    Ok("bad values refused with 22023, mode reloaded".into())
}

fn sql_surface(install: &Install, _seed: u64) -> Result<String> {
    let cluster = small(install, Some(Mode::Observe), &[])?;
    let mut client = cluster.connect("check")?;
    client.batch_execute("CREATE EXTENSION atropos")?;
    let status: String = client.query_one("SELECT atropos_status()::text", &[])?.get(0);
    let json: serde_json::Value =
        serde_json::from_str(&status).with_context(|| format!("atropos_status(): {status}"))?;
    ensure!(json.is_object(), "atropos_status() is {status}");
    client.query("SELECT * FROM atropos_decisions()", &[])?;
    client.batch_execute("CREATE ROLE nobody_special; SET ROLE nobody_special")?;
    let failure = refused(&mut client, "SELECT atropos_status()")?;
    ensure!(failure.sqlstate == "42501", "as an ordinary role: {failure:?}");
    cluster.finish()?;
    Ok(format!("{} bytes of status; an ordinary role gets 42501", status.len()))
}

/// A shortened run of a case. Speed is not judged here, and neither is the length of the stall: who is cancelled is.
fn short_case(install: &Install, id: &str, mode: Mode, seed: u64, after_s: f64) -> Result<Record> {
    let case = cases::find(id)?;
    let mut short = cases::Case { timing: cases::Timing { warmup_s: 6.0, quiet_s: 2.0, after_s }, ..clone_case(case) };
    if let cases::Expect::Culprits { stall_s, .. } = &mut short.expect {
        *stall_s = stall_s.min(after_s - 3.0);
    }
    let options = Options { seed, duration_s: None, set: vec![] };
    let (record, _): (Record, Part) = run_once(install, &short, mode, 1, None, &options)?;
    ensure!(record.verdict == "pass", "{}", summary(&record));
    Ok(record)
}

fn clone_case(c: &cases::Case) -> cases::Case {
    let expect = match c.expect {
        cases::Expect::Nobody => cases::Expect::Nobody,
        cases::Expect::Culprits { stall_s, limits } => cases::Expect::Culprits { stall_s, limits },
    };
    cases::Case { expect, ..*c }
}

fn told(record: Record) -> String {
    let ms = |v: Option<f64>| v.map_or("never".into(), |v| format!("{v:.0} ms"));
    format!(
        "decided {} after the onset, the culprit saw it after {}: {}",
        ms(record.first_cancel_ms.or(record.first_would_cancel_ms)),
        ms(record.culprit_saw_ms),
        record.culprit_error.unwrap_or_else(|| "no error".into())
    )
}

fn table_lock(install: &Install, seed: u64) -> Result<String> {
    let record = short_case(install, "c6", Mode::Enforce, seed, 8.0)?;
    let error = record.culprit_error.clone().unwrap_or_default();
    ensure!(error.starts_with("57014: canceling statement"), "the culprit saw {error:?}");
    Ok(told(record))
}

fn idle(install: &Install, seed: u64) -> Result<String> {
    Ok(told(short_case(install, "x1", Mode::Enforce, seed, 8.0)?))
}

fn queued_ddl(install: &Install, seed: u64) -> Result<String> {
    let record = short_case(install, "x9", Mode::Enforce, seed, 12.0)?;
    ensure!(
        record.actors.iter().any(|a| a.role == Role::Bystander && a.failure.is_none()),
        "the report did not finish"
    );
    Ok(told(record))
}

fn observe(install: &Install, seed: u64) -> Result<String> {
    Ok(told(short_case(install, "x1", Mode::Observe, seed, 12.0)?))
}

/// A holder that is protected, and waiters that are not: nobody may go.
fn protected_role(install: &Install, _seed: u64) -> Result<String> {
    let cluster = small(install, Some(Mode::Enforce), &[("atropos.protect_roles", "'vip'"), ("atropos.slo", "20")])?;
    cluster.connect("check")?.batch_execute("CREATE ROLE vip LOGIN SUPERUSER")?;
    let mut holder = postgres::Config::new()
        .host_path(cluster.dir())
        .user("vip")
        .dbname(session::DATABASE)
        .connect(postgres::NoTls)?;
    holder.batch_execute("BEGIN; LOCK TABLE sbtest1 IN EXCLUSIVE MODE")?;
    let dir = cluster.dir();
    let waited = std::thread::scope(|s| {
        let waiters: Vec<_> = (0..8)
            .map(|i| {
                s.spawn(move || -> Result<()> {
                    let mut client = session::connect(dir, "waiter")?;
                    client.batch_execute(&format!("UPDATE sbtest1 SET k = k + 1 WHERE id = {}", i + 1))?;
                    Ok(())
                })
            })
            .collect();
        // Long enough for any decision: the objective is 20 ms.
        let stayed = session::stay_idle(&mut holder, Duration::from_secs(3));
        let committed = stayed.and_then(|()| holder.batch_execute("COMMIT"));
        for waiter in waiters {
            waiter.join().map_err(|_| anyhow::anyhow!("a waiter panicked"))??;
        }
        committed.context("the protected session")
    });
    waited?;
    let acted = std::fs::read_to_string(cluster.decision_log())
        .map_or(0, |t| t.lines().filter(|l| !l.contains("would_cancel")).count());
    ensure!(acted == 0, "{acted} decisions acted though the holder is protected");
    cluster.finish()?;
    Ok("it held a table for 3 s under an objective of 20 ms and committed".into())
}

/// After the crash of a backend the server restarts itself; the culprit must still be found.
fn crash_restart(install: &Install, _seed: u64) -> Result<String> {
    let cluster = small(install, Some(Mode::Enforce), &[("atropos.slo", "20")])?;
    let mut doomed = cluster.connect("doomed")?;
    let pid = session::backend_pid(&mut doomed)?;
    doomed.batch_execute("BEGIN; LOCK TABLE sbtest1 IN EXCLUSIVE MODE")?;
    crate::guard::signal(pid, libc::SIGKILL);
    let give_up = Instant::now() + Duration::from_secs(30);
    // The server is back when a session can work again.
    while let Err(e) = cluster.connect("back").and_then(|mut c| Ok(c.batch_execute("SELECT 1")?)) {
        ensure!(Instant::now() < give_up, "no connection within 30 s after the crash: {e:#}");
        std::thread::sleep(Duration::from_millis(100));
    }
    let seen = holder_is_cancelled(&cluster)?;
    cluster.finish()?;
    Ok(seen)
}

/// An idle holder and eight waiters in closed loops: the holder must be ended within 10 s, no waiter hit.
fn holder_is_cancelled(cluster: &Cluster) -> Result<String> {
    let dir = cluster.dir();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let stop = &stop;
    std::thread::scope(|s| {
        let waiters: Vec<_> = (0..8)
            .map(|i| {
                s.spawn(move || -> Result<()> {
                    let mut client = session::connect(dir, "waiter")?;
                    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                        client.batch_execute(&format!("UPDATE sbtest1 SET k = k + 1 WHERE id = {}", i + 1))?;
                    }
                    Ok(())
                })
            })
            .collect();
        std::thread::sleep(Duration::from_millis(500));
        let began = Instant::now();
        let held = (|| -> Result<String> {
            let mut holder = session::connect(dir, "holder")?;
            holder.batch_execute("BEGIN; LOCK TABLE sbtest1 IN EXCLUSIVE MODE")?;
            match session::stay_idle(&mut holder, Duration::from_secs(10)) {
                Ok(()) => bail!("the holder still stands after 10 s"),
                Err(e) => Ok(format!("ended after {} ms: {}", began.elapsed().as_millis(), SqlFailure::of(&e).text)),
            }
        })();
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        for waiter in waiters {
            waiter.join().map_err(|_| anyhow::anyhow!("a waiter panicked"))?.context("a waiter was hit")?;
        }
        held
    })
}

/// Aimed cancels: the full count takes seconds. Contention takes minutes for it, so it is a part here and all of it in
/// the `race` command.
const AIMED_STATEMENTS: u64 = 100_000;
const CONTENTION_STATEMENTS: u64 = 20_000;

fn race_contention(install: &Install, seed: u64) -> Result<String> {
    let report = race::contention(install, CONTENTION_STATEMENTS, seed, Duration::from_secs(240))?;
    ensure!(report.holds() && report.statements >= CONTENTION_STATEMENTS, "{}", report.text("contention"));
    Ok(report.text("contention"))
}

fn race_aimed(install: &Install, seed: u64) -> Result<String> {
    let report = race::aimed(install, AIMED_STATEMENTS, seed, Duration::from_secs(240))?;
    ensure!(report.holds() && report.statements >= AIMED_STATEMENTS, "{}", report.text("aimed"));
    Ok(report.text("aimed"))
}
