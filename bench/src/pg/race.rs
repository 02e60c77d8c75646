//! Many short statements on 16 connections while cancels fly: a cancel must hit the statement it was meant for or
//! nobody.
//!
//! Two ways to make them fly, both through the module's own protocol:
//!
//! - **Contention.** Hogs (a statement that holds a hot row's lock through some work) alternate with innocents
//!   (statements that hold nothing anyone waits for) on the same connections. The controller, set to be as trigger-happy
//!   as its ranges allow, picks hogs that are often over before the cancel arrives. An innocent that is hit was hit by
//!   a cancel meant for another statement.
//! - **Aimed.** Cancels are posted for chosen statement sequences: gone ones, present ones and ones that are still to
//!   come. A statement that ends in a cancel nobody aimed at its sequence is a wrong hit.
use super::cluster::Cluster;
use super::install::Install;
use super::session;
use crate::clock::now_ns;
use crate::host::{setting, Dataset, Server};
use crate::race::{Report, Rng, CONNECTIONS};
use crate::record::Mode;
use anyhow::{bail, Context, Result};
use postgres::Client;
use std::collections::HashSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::Mutex;
use std::time::Duration;

fn start(install: &Install, extra: &[(&str, &str)]) -> Result<Cluster> {
    let dataset = Dataset {
        sql: vec!["CREATE TABLE race_hot (id int PRIMARY KEY, n bigint); INSERT INTO race_hot SELECT i, 0 FROM generate_series(1, 4) i".into()],
        ..Dataset::oltp(session::SCHEMA, 1, 1000)
    };
    let settings: Vec<_> = extra.iter().map(|(n, v)| setting(n, v)).collect();
    install.start_cluster(&dataset, Some(Mode::Enforce), &settings, "race")
}

/// Contention: `statements` in all, or what `limit` allows.
pub fn contention(install: &Install, statements: u64, seed: u64, limit: Duration) -> Result<Report> {
    let cluster = start(
        install,
        &[
            ("atropos.slo", "1"),
            ("atropos.window_length", "20"),
            ("atropos.trigger_windows", "1"),
            ("atropos.contention_threshold", "0.01"),
            ("atropos.min_relief", "0.01"),
            ("atropos.cancel_rate", "1000"),
            ("atropos.cancel_burst", "1000"),
            ("atropos.cancel_share", "1"),
            ("atropos.verify", "10"),
            // Durability is not what races here.
            ("synchronous_commit", "off"),
        ],
    )?;
    let began_ns = now_ns();
    let until_ns = began_ns + limit.as_nanos() as i64;
    let dir = cluster.dir();
    let parts: Vec<Result<Report>> = std::thread::scope(|s| {
        let threads: Vec<_> = (0..CONNECTIONS as u64)
            .map(|i| {
                s.spawn(move || {
                    hogs_and_innocents(dir, statements / CONNECTIONS as u64, Rng(seed * 1000 + i), until_ns)
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|_| bail!("a connection's thread panicked"))).collect()
    });
    let mut report = Report::default();
    for part in parts {
        report.add(part?);
    }
    report.seconds = (now_ns() - began_ns) as f64 / 1e9;
    report.requested =
        crate::decisions::read(&cluster.decision_log(), (began_ns, now_ns()), crate::clock::wall_offset_ns())?
            .iter()
            .filter(|d| d.acted())
            .count() as u64;
    check_alive(&cluster)?;
    Box::new(cluster).finish()?;
    Ok(report)
}

fn check_alive(cluster: &Cluster) -> Result<()> {
    let crashes = cluster.crash_lines();
    if !crashes.is_empty() {
        bail!("the server crashed during the race: {}", crashes.join("; "));
    }
    Ok(())
}

fn hogs_and_innocents(dir: &Path, statements: u64, mut rng: Rng, until_ns: i64) -> Result<Report> {
    let mut client = session::connect(dir, "race")?;
    let mut report = Report::default();
    while report.statements < statements && now_ns() < until_ns {
        report.statements += 1;
        let hog = rng.below(8) == 0;
        let statement = if hog {
            // Its row lock is held through the count, up to about 10 ms, for every sixth up to 100 ms, and released at once:
            // only the long ones outlast a window and what is usual, and are cancelled.
            let most = if rng.below(6) == 0 { 200_000 } else { 20_000 };
            format!(
                "WITH u AS MATERIALIZED (UPDATE race_hot SET n = n + 1 WHERE id = 1 RETURNING n) SELECT count(md5(i::text)) FROM u, generate_series(1, {}) i",
                rng.below(most)
            )
        } else {
            match rng.below(3) {
                0 => "SELECT 1".to_owned(),
                1 => format!("SELECT count(*) FROM generate_series(1, {})", rng.below(300)),
                _ => format!("SELECT c FROM sbtest1 WHERE id = {}", rng.below(1000)),
            }
        };
        let Err(e) = client.simple_query(&statement) else {
            continue;
        };
        let failure = session::failure(&e);
        if client.is_closed() {
            report.lost_sessions += 1;
            report.examples.push(format!("lost: {failure:?} at {statement}"));
            client = session::connect(dir, "race")?;
        } else if !failure.by_atropos() {
            bail!("unexpected error at {statement}: {failure:?}");
        } else if hog {
            report.hits += 1;
            // A session is cancelled once at most; a new one keeps cancels flying.
            client = session::connect(dir, "race")?;
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
    pid: AtomicI64,
    /// The sequence of the statement that runs now or ran last, as far as its client knows.
    sequence: AtomicI64,
    /// Sequences that were aimed at; noted before the cancel is posted.
    aimed: Mutex<HashSet<i64>>,
}

/// Aimed: cancels for past, present and coming statement sequences, while `statements` run.
pub fn aimed(install: &Install, statements: u64, seed: u64, limit: Duration) -> Result<Report> {
    let cluster = start(install, &[("synchronous_commit", "off"), ("atropos.slo", "3600000")])?;
    cluster.connect("race")?.batch_execute("CREATE EXTENSION atropos")?;
    let targets: Vec<Target> = (0..CONNECTIONS).map(|_| Target::default()).collect();
    let (began_ns, done, requested) = (now_ns(), AtomicBool::new(false), AtomicU64::new(0));
    let until_ns = began_ns + limit.as_nanos() as i64;
    let dir = cluster.dir();
    let (targets, done, requested) = (&targets, &done, &requested);
    let parts: Result<Vec<Report>> = std::thread::scope(|s| {
        let shooters: Vec<_> =
            (0..2u64).map(|i| s.spawn(move || shoot(dir, targets, done, requested, Rng(seed * 77 + i)))).collect();
        let threads: Vec<_> = (0..CONNECTIONS)
            .map(|i| {
                s.spawn(move || {
                    sequenced(dir, &targets[i], statements / CONNECTIONS as u64, Rng(seed * 1000 + i as u64), until_ns)
                })
            })
            .collect();
        let parts: Vec<Result<Report>> =
            threads.into_iter().map(|t| t.join().unwrap_or_else(|_| bail!("a connection's thread panicked"))).collect();
        done.store(true, Ordering::Relaxed);
        for shooter in shooters {
            shooter.join().unwrap_or_else(|_| bail!("a cancelling thread panicked"))?;
        }
        parts.into_iter().collect()
    });
    let mut report = Report::default();
    parts?.into_iter().for_each(|p| report.add(p));
    report.seconds = (now_ns() - began_ns) as f64 / 1e9;
    report.requested = requested.load(Ordering::Relaxed);
    check_alive(&cluster)?;
    Box::new(cluster).finish()?;
    Ok(report)
}

fn shoot(dir: &Path, targets: &[Target], done: &AtomicBool, requested: &AtomicU64, mut rng: Rng) -> Result<()> {
    let mut client = session::connect(dir, "race canceller")?;
    let cancel = client.prepare("SELECT atropos_cancel($1, $2)")?;
    while !done.load(Ordering::Relaxed) {
        let target = &targets[rng.below(targets.len() as u64) as usize];
        let (pid, sequence) = (target.pid.load(Ordering::Acquire), target.sequence.load(Ordering::Acquire));
        if pid == 0 {
            continue;
        }
        // 0 would mean "whatever runs", which nobody could check.
        let aim = (sequence + rng.below(4) as i64 - 1).max(1);
        target.aimed.lock().expect("no thread panics with the lock").insert(aim);
        // A refused one (the sequence is gone, or not there yet) is part of the game.
        client.query(&cancel, &[&(pid as i32), &aim])?;
        requested.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

fn own_sequence(client: &mut Client) -> Result<i64> {
    Ok(client.query_one("SELECT atropos_scope()", &[])?.get(0))
}

fn sequenced(dir: &Path, target: &Target, statements: u64, mut rng: Rng, until_ns: i64) -> Result<Report> {
    let mut report = Report::default();
    let mut client = session::connect(dir, "race")?;
    // How far the sequence moves from one simple statement to the next, learned while nobody aims at us.
    let read = |client: &mut Client| -> Result<i64> {
        for message in client.simple_query("SELECT atropos_scope()")? {
            if let postgres::SimpleQueryMessage::Row(row) = message {
                return row
                    .get(0)
                    .context("atropos_scope() is NULL: this session is not tracked")?
                    .parse()
                    .context("atropos_scope()");
            }
        }
        bail!("atropos_scope() gave no row")
    };
    let first = read(&mut client)?;
    let mut sequence = read(&mut client)?;
    let step = sequence - first;
    if step <= 0 {
        bail!("the statement sequence moved by {step} from one statement to the next");
    }
    target.sequence.store(sequence, Ordering::Release);
    target.pid.store(i64::from(session::backend_pid(&mut client)?), Ordering::Release);
    // The extended protocol of the call above moved the sequence by an amount of its own; the next read finds it again.
    let mut known = false;
    while report.statements < statements && now_ns() < until_ns {
        report.statements += 1;
        let expected = sequence + step;
        target.sequence.store(expected, Ordering::Release);
        let work = if rng.below(4) == 0 { rng.below(3000) } else { rng.below(50) };
        let result = client.simple_query(&format!(
            "SELECT atropos_scope(), (SELECT count(md5(i::text)) FROM generate_series(1, {work}) i)"
        ));
        match result {
            Ok(messages) => {
                let row = messages.iter().find_map(|m| {
                    if let postgres::SimpleQueryMessage::Row(r) = m {
                        r.get(0)
                    } else {
                        None
                    }
                });
                let seen: i64 = row.context("atropos_scope() gave no row")?.parse()?;
                if known && seen != expected {
                    bail!("the sequence went from {sequence} to {seen}, not to {expected}: the oracle does not hold");
                }
                (sequence, known) = (seen, true);
            }
            Err(e) => {
                let failure = session::failure(&e);
                if client.is_closed() {
                    report.lost_sessions += 1;
                    report.examples.push(format!("lost: {failure:?}"));
                    return Ok(report);
                }
                if !failure.by_atropos() {
                    bail!("unexpected error: {failure:?}");
                }
                if !known {
                    // Hit before the sequence was known again: neither right nor wrong can be said of it.
                    sequence = own_sequence(&mut client)?;
                    continue;
                }
                if target.aimed.lock().expect("no thread panics with the lock").contains(&expected) {
                    report.hits += 1;
                } else {
                    report.wrong_hits += 1;
                    report
                        .examples
                        .push(format!("wrong: statement {expected} was hit, nobody aimed at it: {failure:?}"));
                }
                sequence = expected;
            }
        }
    }
    target.pid.store(0, Ordering::Release);
    Ok(report)
}
