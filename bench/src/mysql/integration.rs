//! The checks on MySQL for the test command.
use super::install::Install;
use super::race;
use crate::cases::Role;
use crate::integration::{short_case, told, Check};
use crate::race::{AIMED_STATEMENTS, AT_MOST, CONTENTION_STATEMENTS};
use crate::record::Mode;
use anyhow::{ensure, Result};

pub const CHECKS: &[Check<Install>] = &[
    ("c1: a backup's FLUSH TABLES WITH READ LOCK goes with 1317 naming Atropos, the UPDATEs it waits for stay", backup),
    ("c2: a long UPDATE that locks the rows of everyone goes", long_update),
    ("x1: an idle transaction that blocks others is ended", idle),
    ("x9: an ALTER that bars everyone goes, the report it waits for stays", queued_ddl),
    ("observe mode records and cancels nobody", observe),
    ("short statements under flying cancels: no wrong hit", race_contention),
    ("short statements under aimed cancels: no wrong hit", race_aimed),
];

/// The client of a cancelled statement sees MySQL's own error, and the text says who and why.
fn named(record: crate::record::Record) -> Result<String> {
    let error = record.culprit_error.clone().unwrap_or_default();
    ensure!(error.starts_with("1317: ") && error.contains("Atropos"), "the culprit saw {error:?}");
    Ok(told(record))
}

fn backup(install: &Install, seed: u64) -> Result<String> {
    named(short_case(install, "c1", Mode::Enforce, seed, 12.0)?)
}

fn long_update(install: &Install, seed: u64) -> Result<String> {
    named(short_case(install, "c2", Mode::Enforce, seed, 8.0)?)
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
    named(record)
}

fn observe(install: &Install, seed: u64) -> Result<String> {
    Ok(told(short_case(install, "x1", Mode::Observe, seed, 12.0)?))
}

fn race_contention(install: &Install, seed: u64) -> Result<String> {
    race::contention(install, CONTENTION_STATEMENTS, seed, AT_MOST)?.passed("contention", CONTENTION_STATEMENTS)
}

fn race_aimed(install: &Install, seed: u64) -> Result<String> {
    race::aimed(install, AIMED_STATEMENTS, seed, AT_MOST)?.passed("aimed", AIMED_STATEMENTS)
}
