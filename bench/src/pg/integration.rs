//! The checks on PostgreSQL for the test command.
use super::cluster::Cluster;
use super::install::Install;
use super::{race, session};
use crate::cases::{Failure, Role};
use crate::host::{setting, Dataset, Server};
use crate::integration::{short_case, told, Check};
use crate::race::{AIMED_STATEMENTS, AT_MOST, CONTENTION_STATEMENTS};
use crate::record::Mode;
use anyhow::{bail, ensure, Context, Result};
use std::time::{Duration, Instant};

pub const CHECKS: &[Check<Install>] = &[
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

fn small(install: &Install, mode: Option<Mode>, extra: &[(&str, &str)]) -> Result<Cluster> {
    let settings: Vec<_> = extra.iter().map(|(n, v)| setting(n, v)).collect();
    install.start_cluster(&Dataset::oltp(session::SCHEMA, 1, 1000), mode, &settings, "integration")
}

/// What the server says against `sql`.
fn refused(client: &mut postgres::Client, sql: &str) -> Result<Failure> {
    match client.batch_execute(sql) {
        Ok(()) => bail!("{sql} succeeded"),
        Err(e) => Ok(session::failure(&e)),
    }
}

fn preload_guard(install: &Install, _seed: u64) -> Result<String> {
    let cluster = small(install, None, &[])?;
    let mut client = cluster.connect("check")?;
    let failure = refused(&mut client, "LOAD 'atropos'")?;
    ensure!(failure.text.contains("shared_preload_libraries"), "LOAD said {failure:?}");
    Box::new(cluster).finish()?;
    Ok(failure.text)
}

fn settings(install: &Install, _seed: u64) -> Result<String> {
    let cluster = small(install, Some(Mode::Observe), &[])?;
    let mut client = cluster.connect("check")?;
    for (name, bad) in [("atropos.mode", "sometimes"), ("atropos.slo", "-1"), ("atropos.window_length", "1")] {
        let failure = refused(&mut client, &format!("ALTER SYSTEM SET {name} = '{bad}'"))?;
        ensure!(failure.code == "22023", "{name} = {bad}: {failure:?}");
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
    Box::new(cluster).finish()?;
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
    ensure!(failure.code == "42501", "as an ordinary role: {failure:?}");
    Box::new(cluster).finish()?;
    Ok(format!("{} bytes of status; an ordinary role gets 42501", status.len()))
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
    Box::new(cluster).finish()?;
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
    Box::new(cluster).finish()?;
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
                Err(e) => Ok(format!("ended after {} ms: {}", began.elapsed().as_millis(), session::failure(&e).text)),
            }
        })();
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        for waiter in waiters {
            waiter.join().map_err(|_| anyhow::anyhow!("a waiter panicked"))?.context("a waiter was hit")?;
        }
        held
    })
}

fn race_contention(install: &Install, seed: u64) -> Result<String> {
    race::contention(install, CONTENTION_STATEMENTS, seed, AT_MOST)?.passed("contention", CONTENTION_STATEMENTS)
}

fn race_aimed(install: &Install, seed: u64) -> Result<String> {
    race::aimed(install, AIMED_STATEMENTS, seed, AT_MOST)?.passed("aimed", AIMED_STATEMENTS)
}
