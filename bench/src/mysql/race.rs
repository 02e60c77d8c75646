//! The races on MySQL; see `crate::race` for what they show.
//!
//! Two ways to make cancels fly, both through the plugin's own protocol:
//!
//! - **Contention.** Hogs (a statement that holds a hot row's lock through some work) alternate with innocents
//!   (statements that hold nothing anyone waits for) on the same connections. The controller, set to be as trigger-happy
//!   as its ranges allow, picks hogs that are often over before the cancel arrives. An innocent that is hit was hit by
//!   a cancel meant for another statement.
//! - **Aimed.** Cancels are posted for chosen scopes: gone ones, present ones and ones that are still to come. A
//!   statement that ends in a cancel nobody aimed at its scope is a wrong hit.
use super::install::Install;
use super::server::Mysqld;
use super::session;
use crate::clock::{now_ns, wall_offset_ns};
use crate::host::{setting, Dataset, Server};
use crate::race::{Report, Rng, CONNECTIONS};
use crate::record::Mode;
use anyhow::{bail, Context, Result};
use mysql::prelude::Queryable;
use mysql::Conn;
use std::collections::HashSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::Mutex;
use std::time::Duration;

fn start(install: &Install, extra: &[(&str, &str)]) -> Result<Mysqld> {
    let sql = [
        "CREATE TABLE race_hot (id INT PRIMARY KEY, n BIGINT NOT NULL)",
        "INSERT INTO race_hot VALUES (1, 0), (2, 0), (3, 0), (4, 0)",
    ];
    let dataset = Dataset { sql: sql.map(String::from).to_vec(), ..Dataset::oltp(session::DATABASE, 1, 1000) };
    let settings: Vec<_> = extra
        .iter()
        // Durability is not what races here.
        .chain(&[("innodb_flush_log_at_trx_commit", "0"), ("sync_binlog", "0")])
        .map(|(n, v)| setting(n, v))
        .collect();
    install.start_server(&dataset, Some(Mode::Enforce), &settings, "race", false)
}

fn end(server: Mysqld) -> Result<()> {
    let crashes = server.crash_lines();
    if !crashes.is_empty() {
        bail!("the server crashed during the race: {}", crashes.join("; "));
    }
    Box::new(server).finish()
}

/// The reports of all connections' threads, as one.
fn sum(parts: Vec<Result<Report>>, began_ns: i64) -> Result<Report> {
    let mut report = Report::default();
    for part in parts {
        report.add(part?);
    }
    report.seconds = (now_ns() - began_ns) as f64 / 1e9;
    Ok(report)
}

/// Contention: `statements` in all, or what `limit` allows.
pub fn contention(install: &Install, statements: u64, seed: u64, limit: Duration) -> Result<Report> {
    let server = start(
        install,
        &[
            ("atropos_slo_ms", "1"),
            ("atropos_window_ms", "20"),
            ("atropos_trigger_windows", "1"),
            ("atropos_contention_threshold", "0.01"),
            ("atropos_min_relief", "0.01"),
            ("atropos_cancel_rate_per_s", "1000"),
            ("atropos_cancel_burst", "1000"),
            ("atropos_cancel_share", "1"),
            ("atropos_verify_ms", "10"),
        ],
    )?;
    let began_ns = now_ns();
    let until_ns = began_ns + limit.as_nanos() as i64;
    let (dir, each) = (server.dir(), statements / CONNECTIONS as u64);
    let parts = std::thread::scope(|s| {
        let threads: Vec<_> = (0..CONNECTIONS as u64)
            .map(|i| s.spawn(move || hogs_and_innocents(dir, each, Rng(seed * 1000 + i), until_ns)))
            .collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|_| bail!("a connection's thread panicked"))).collect()
    });
    let mut report = sum(parts, began_ns)?;
    let decisions = crate::decisions::read(&server.decision_log(), (began_ns, now_ns()), wall_offset_ns())?;
    report.requested = decisions.iter().filter(|d| d.acted()).count() as u64;
    end(server)?;
    Ok(report)
}

fn hogs_and_innocents(dir: &Path, statements: u64, mut rng: Rng, until_ns: i64) -> Result<Report> {
    let mut client = session::connect(dir)?;
    let mut report = Report::default();
    while report.statements < statements && now_ns() < until_ns {
        report.statements += 1;
        let hog = rng.below(8) == 0;
        let statement = if hog {
            // The row is locked when it is read and stays so through the work: up to about 15 ms, for every sixth up to
            // 150 ms. Only the long ones outlast a window and what is usual, and are cancelled. The work refers to the
            // row, so that it cannot come first, and ends with an error when killed (BENCHMARK would end as if done).
            let most = if rng.below(6) == 0 { 1000 } else { 100 };
            let rows = rng.below(most);
            let work = format!("SELECT COUNT(*) FROM sbtest1 a, sbtest1 b WHERE a.id <= {rows} AND a.k + b.k <> h.n");
            format!("UPDATE race_hot h SET n = n + 1 WHERE id = 1 AND ({work}) >= 0")
        } else {
            match rng.below(3) {
                0 => "SELECT 1".to_owned(),
                1 => format!("SELECT COUNT(*) FROM sbtest1 WHERE id <= {}", rng.below(500)),
                _ => format!("SELECT c FROM sbtest1 WHERE id = {}", rng.below(1000)),
            }
        };
        let Err(e) = session::run(&mut client, &statement) else {
            continue;
        };
        let failure = session::failure(&e);
        if failure.silent() {
            report.lost_sessions += 1;
            report.examples.push(format!("lost: {failure:?} at {statement}"));
            client = session::connect(dir)?;
        } else if !failure.by_atropos() {
            bail!("unexpected error at {statement}: {failure:?}");
        } else if hog {
            report.hits += 1;
            // A session is cancelled once at most; a new one keeps cancels flying.
            client = session::connect(dir)?;
        } else {
            report.wrong_hits += 1;
            report.examples.push(format!("wrong: {failure:?} at {statement}"));
        }
    }
    Ok(report)
}

/// One connection of the aimed race, as the cancelling side sees it.
#[derive(Default)]
struct Target {
    /// Its connection, 0 when it is not to be aimed at.
    id: AtomicI64,
    /// The scope of the statement that runs now or ran last, as far as its client knows.
    scope: AtomicI64,
    /// Scopes that were aimed at; noted before the cancel is posted.
    aimed: Mutex<HashSet<i64>>,
}

impl Target {
    fn was_aimed_at(&self, scope: i64) -> bool {
        self.aimed.lock().expect("no thread panics with the lock").contains(&scope)
    }
}

/// Aimed: cancels for past, present and coming scopes, while `statements` run.
pub fn aimed(install: &Install, statements: u64, seed: u64, limit: Duration) -> Result<Report> {
    // An objective out of reach: whatever is cancelled here was cancelled by hand.
    let server = start(install, &[("atropos_slo_ms", "3600000")])?;
    let targets: Vec<Target> = (0..CONNECTIONS).map(|_| Target::default()).collect();
    let (began_ns, done, requested) = (now_ns(), AtomicBool::new(false), AtomicU64::new(0));
    let until_ns = began_ns + limit.as_nanos() as i64;
    let (dir, each) = (server.dir(), statements / CONNECTIONS as u64);
    let (targets, done, requested) = (&targets, &done, &requested);
    let parts: Result<Vec<Result<Report>>> = std::thread::scope(|s| {
        let shooters: Vec<_> =
            (0..2u64).map(|i| s.spawn(move || shoot(dir, targets, done, requested, Rng(seed * 77 + i)))).collect();
        let threads: Vec<_> = (0..CONNECTIONS)
            .map(|i| s.spawn(move || scoped(dir, &targets[i], each, Rng(seed * 1000 + i as u64), until_ns)))
            .collect();
        let parts =
            threads.into_iter().map(|t| t.join().unwrap_or_else(|_| bail!("a connection's thread panicked"))).collect();
        done.store(true, Ordering::Relaxed);
        for shooter in shooters {
            shooter.join().unwrap_or_else(|_| bail!("a cancelling thread panicked"))?;
        }
        Ok(parts)
    });
    let mut report = sum(parts?, began_ns)?;
    report.requested = requested.load(Ordering::Relaxed);
    end(server)?;
    Ok(report)
}

fn shoot(dir: &Path, targets: &[Target], done: &AtomicBool, requested: &AtomicU64, mut rng: Rng) -> Result<()> {
    let mut client = session::connect_as(dir, session::ADMIN, None)?;
    let cancel = client.prep("SELECT atropos_cancel(?, ?)").context("atropos_cancel")?;
    while !done.load(Ordering::Relaxed) {
        let target = &targets[rng.below(targets.len() as u64) as usize];
        let (id, scope) = (target.id.load(Ordering::Acquire), target.scope.load(Ordering::Acquire));
        if id == 0 {
            continue;
        }
        // 0 would mean "whatever runs", which nobody could check.
        let aim = (scope + rng.below(4) as i64 - 1).max(1);
        target.aimed.lock().expect("no thread panics with the lock").insert(aim);
        // A refused one (the scope is gone, or not there yet) is part of the game.
        client.exec_drop(&cancel, (id, aim))?;
        requested.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

fn scoped(dir: &Path, target: &Target, statements: u64, mut rng: Rng, until_ns: i64) -> Result<Report> {
    let mut report = Report::default();
    let mut client = session::connect(dir)?;
    // How far the scope moves from one statement to the next, learned while nobody aims at us.
    let read = |client: &mut Conn| -> Result<i64> {
        let seen: Option<Option<i64>> = client.query_first("SELECT atropos_scope()").context("atropos_scope()")?;
        seen.flatten().context("atropos_scope() is NULL: this session is not tracked")
    };
    let first = read(&mut client)?;
    let mut scope = read(&mut client)?;
    let step = scope - first;
    if step <= 0 {
        bail!("the scope moved by {step} from one statement to the next");
    }
    target.scope.store(scope, Ordering::Release);
    target.id.store(client.connection_id().into(), Ordering::Release);
    while report.statements < statements && now_ns() < until_ns {
        report.statements += 1;
        let expected = scope + step;
        target.scope.store(expected, Ordering::Release);
        let rows = if rng.below(4) == 0 { rng.below(1000) } else { rng.below(50) };
        // The scope, and work that looks at each row whether it is to end. No subquery: of one that is killed just before
        // it begins MySQL makes NULL, and sends that without an error. All of the answer is read, the error may come last.
        let work = format!("SELECT atropos_scope(), COUNT(*) FROM sbtest1 WHERE id <= {rows} AND SHA2(c, 256) <> ''");
        match client.query::<(i64, i64), _>(work) {
            Ok(answer) => {
                let (seen, _) = *answer.first().context("a SELECT without a row")?;
                if seen != expected {
                    bail!("the scope went from {scope} to {seen}, not to {expected}: the oracle does not hold");
                }
            }
            Err(e) => {
                let failure = session::failure(&e);
                if failure.silent() {
                    report.lost_sessions += 1;
                    report.examples.push(format!("lost: {failure:?}"));
                    return Ok(report);
                }
                if !failure.by_atropos() {
                    bail!("unexpected error: {failure:?}");
                }
                if target.was_aimed_at(expected) {
                    report.hits += 1;
                } else {
                    report.wrong_hits += 1;
                    let text = format!("wrong: scope {expected} was hit, nobody aimed at it: {failure:?}");
                    report.examples.push(text);
                }
            }
        }
        scope = expected;
    }
    target.id.store(0, Ordering::Release);
    Ok(report)
}
