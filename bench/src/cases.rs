//! What a case is: data, load, noise and what must come of it. The cases themselves are with their hosts; each states
//! the public report it stands for.
use crate::host::{Dataset, HostId, Setting};
use crate::load::Load;
use crate::{mysql, pg};
use anyhow::{bail, Result};
use serde::Serialize;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

/// What the right answer to a session is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// In enforce mode it must be cancelled.
    Culprit,
    /// It must never be cancelled, and must finish.
    Bystander,
}

/// How the server ended a request or a session, as its client saw it.
#[derive(Clone, Debug, Serialize, PartialEq, Eq)]
pub struct Failure {
    /// SQLSTATE (PostgreSQL), error number (MySQL), status (httpd); empty when the connection broke without a word.
    pub code: String,
    /// Message, detail and hint.
    pub text: String,
}

impl Failure {
    /// Whether Atropos ended it: its errors name it.
    pub fn by_atropos(&self) -> bool {
        names_atropos(&self.text)
    }

    /// Whether the connection went without a word.
    pub fn silent(&self) -> bool {
        self.code.is_empty()
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.silent() {
            true => f.write_str(&self.text),
            false => write!(f, "{}: {}", self.code, self.text),
        }
    }
}

pub fn names_atropos(text: &str) -> bool {
    text.to_ascii_lowercase().contains("atropos")
}

/// A session of the noise, after its end. Times on CLOCK_MONOTONIC.
#[derive(Clone, Debug, Serialize)]
pub struct Actor {
    pub role: Role,
    pub what: &'static str,
    /// The key of its task: the backend's pid (PostgreSQL), the connection's number (MySQL).
    pub key: i64,
    pub started_ns: i64,
    pub ended_ns: i64,
    /// `None`: it finished its work.
    pub failure: Option<Failure>,
}

pub struct NoiseReport {
    /// When the stall began: the culprit was granted what others need (or, without a culprit, the noise started).
    pub onset_ns: i64,
    pub actors: Vec<Actor>,
}

/// What the noise of a run gets to know.
pub struct Noise<'a> {
    pub socket_dir: &'a Path,
    /// How long a noise that has no end of its own goes on.
    pub lasts: Duration,
}

#[derive(Clone, Copy, Debug)]
pub enum Expect {
    /// In enforce mode exactly the culprits are cancelled; `stall_s` is what the noise does at least when they are
    /// not, `limits` what must hold when they are.
    Culprits { stall_s: f64, limits: Option<Limits> },
    /// Nobody is to blame: nothing is cancelled in any mode.
    Nobody,
}

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub first_cancel_ms: f64,
    pub tps_ratio: f64,
    pub p99_ratio: f64,
}

#[derive(Clone, Copy, Debug)]
pub struct Timing {
    pub warmup_s: f64,
    /// Measured before the noise: the reference of a run that has no clean run beside it.
    pub quiet_s: f64,
    /// Measured from the onset.
    pub after_s: f64,
}

#[derive(Clone, Copy)]
pub struct Case {
    pub host: HostId,
    pub id: &'static str,
    pub title: &'static str,
    pub stands_for: &'static str,
    pub dataset: fn() -> Dataset,
    pub loads: fn() -> Vec<Load>,
    pub settings: fn() -> Vec<Setting>,
    pub timing: Timing,
    pub noise: Option<fn(&Noise) -> Result<NoiseReport>>,
    pub expect: Expect,
}

/// All cases, the default host of each first.
pub fn all() -> impl Iterator<Item = &'static Case> {
    pg::cases::CASES.iter().chain(mysql::cases::CASES)
}

/// The case `id` on `host`, or on its default host: PostgreSQL where it exists there.
pub fn find(id: &str, host: Option<HostId>) -> Result<&'static Case> {
    let named: Vec<_> = all().filter(|c| c.id == id).collect();
    match (named.iter().find(|c| host.is_none_or(|h| h == c.host)), host) {
        (Some(case), _) => Ok(case),
        (None, Some(host)) if !named.is_empty() => {
            let hosts: Vec<_> = named.iter().map(|c| c.host.name()).collect();
            bail!("case {id} does not exist on {}: it does on {}", host.name(), hosts.join(", "))
        }
        _ => {
            let mut ids: Vec<_> = all().map(|c| c.id).collect();
            ids.sort_unstable();
            ids.dedup();
            bail!("unknown case {id:?}: it must be one of {}", ids.join(", "))
        }
    }
}

/// What a thread of the noise came to.
pub fn joined<T>(handle: std::thread::ScopedJoinHandle<'_, T>, what: &str) -> Result<T> {
    handle.join().map_err(|_| anyhow::anyhow!("the {what} session of the noise panicked"))
}

/// The onset sent by a culprit, or why there was none.
pub fn onset(from: &mpsc::Receiver<i64>, what: &str, actor: impl FnOnce() -> Result<Actor>) -> Result<(i64, Actor)> {
    // The actor runs to its end in here; its sender is gone then, so this never waits.
    let actor = actor()?;
    match from.recv() {
        Ok(ns) => Ok((ns, actor)),
        Err(_) => bail!("{what} was never granted its lock: {:?}", actor.failure),
    }
}
