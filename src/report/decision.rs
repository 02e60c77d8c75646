//! Decisions: one recorded act (or would-be act) with its evidence, as JSON.
//!
//! A decision is written when it is made and again when its outcome is known; in the log file the later line with the
//! same id supersedes the earlier one. The region keeps the last ones for whoever asks.

use super::json::Json;
use super::window::kind_name;
use crate::cancel::action::{self, Level};
use crate::config::Mode;
use crate::control::window::ResourceKind;
use crate::primitive::Ordering::{Acquire, Relaxed, Release};
use crate::region::layout::{DECISIONS, DECISION_BYTES};
use crate::region::Region;
use std::io::{Seek, Write};
use std::os::unix::fs::OpenOptionsExt;

/// What came of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Outcome {
    /// Observe mode: nobody was told.
    WouldCancel,
    /// Told to stop.
    #[default]
    Requested,
    /// The host says it acts on it.
    Acknowledged,
    /// The scope is over, or holds nothing any more.
    Ended,
    /// The cancel action had no effect in time: the terminate action was run.
    Escalated,
    /// Neither had.
    Unresponsive,
}

impl Outcome {
    pub fn name(self) -> &'static str {
        match self {
            Outcome::WouldCancel => "would_cancel",
            Outcome::Requested => "requested",
            Outcome::Acknowledged => "acknowledged",
            Outcome::Ended => "ended",
            Outcome::Escalated => "escalated",
            Outcome::Unresponsive => "unresponsive",
        }
    }
}

/// A candidate as the decision saw it.
#[derive(Clone, Debug, Default)]
pub struct Considered {
    pub task: u64,
    pub key: u64,
    pub label: String,
    pub usage_ns: u64,
    pub progress: Option<f64>,
    pub gain_ns: f64,
    pub score: f64,
    pub relief: f64,
    pub victims: usize,
    /// Why it was not chosen; empty for the chosen one.
    pub why_not: String,
}

#[derive(Clone, Debug, Default)]
pub struct Decision {
    pub id: u64,
    /// Monotonic and wall time of the decision.
    pub time_ns: u64,
    pub wall_ms: f64,
    pub mode: Mode,
    /// "overload", or "manual" for a cancel asked for by hand.
    pub state: &'static str,
    pub outcome: Outcome,
    pub task: u64,
    pub scope: u64,
    pub key: u64,
    pub label: String,
    pub class: u32,
    pub priority: i32,
    pub owner_pid: u32,
    pub resource: u32,
    pub resource_name: String,
    pub resource_kind: Option<ResourceKind>,
    pub instance: u64,
    /// The host's words for the instance; empty where it has none.
    pub instance_words: String,
    pub reason: String,
    pub p99_ns: u64,
    pub slo_ns: u64,
    pub throughput_per_s: f64,
    pub baseline_p99_ns: u64,
    pub baseline_throughput_per_s: f64,
    pub in_flight: u64,
    pub oldest_in_flight_ns: u64,
    pub contention: Vec<(String, f64)>,
    pub candidates: Vec<Considered>,
    pub suspected_after_ms: f64,
    pub rung: u32,
    pub sends: u32,
    pub acknowledged_ms: Option<f64>,
    pub ended_ms: Option<f64>,
    pub contention_after: Option<f64>,
    /// Observe mode: what cancelling would have given back, in words.
    pub would_have: String,
    /// When the work began that a cancel throws away; 0 = not known.
    pub work_since_ns: u64,
    /// From then to the task's end.
    pub work_lost_ms: Option<f64>,
    /// Whether the task was told to run again, once that is known of a task that asked, and how long it had waited.
    pub retried: Option<bool>,
    pub retry_waited_ms: Option<f64>,
    /// The last outcome that was recorded.
    pub said: Option<Outcome>,
    /// What estimator and policy were given, as JSON: enough to replay the decision. Only the log file gets it, once.
    pub replay: Option<String>,
}

impl Decision {
    pub fn json(&self) -> String {
        let task = Json::object()
            .int("id", self.task)
            .int("key", self.key)
            .text("label", &self.label)
            .int("class", self.class)
            .int("priority", self.priority)
            .int("scope", self.scope)
            .int("pid", self.owner_pid)
            .end();
        let kind = self.resource_kind.map_or("", kind_name);
        let resource = Json::object()
            .int("id", self.resource)
            .text("name", &self.resource_name)
            .text("type", kind)
            .int("instance", self.instance)
            .text("words", &self.instance_words)
            .end();
        let signal = Json::object()
            .int("p99_ns", self.p99_ns)
            .int("slo_ns", self.slo_ns)
            .float("throughput_per_s", self.throughput_per_s)
            .int("baseline_p99_ns", self.baseline_p99_ns)
            .float("baseline_throughput_per_s", self.baseline_throughput_per_s)
            .int("in_flight", self.in_flight)
            .int("oldest_in_flight_ns", self.oldest_in_flight_ns)
            .end();
        let contention = self
            .contention
            .iter()
            .fold(Json::array(), |a, (name, level)| {
                a.push(&Json::object().text("resource", name).float("level", *level).end())
            })
            .end();
        let candidates = self
            .candidates
            .iter()
            .fold(Json::array(), |a, c| {
                a.push(
                    &Json::object()
                        .int("task", c.task)
                        .int("key", c.key)
                        .text("label", &c.label)
                        .int("usage_ns", c.usage_ns)
                        .optional_float("progress", c.progress)
                        .float("gain_ns", c.gain_ns)
                        .float("score", c.score)
                        .float("relief", c.relief)
                        .int("victims", c.victims as u64)
                        .text("why_not", &c.why_not)
                        .end(),
                )
            })
            .end();
        Json::object()
            .int("id", self.id)
            .int("time_ns", self.time_ns)
            .float("wall_ms", self.wall_ms)
            .text("mode", self.mode.name())
            .text("state", self.state)
            .text("result", self.outcome.name())
            .raw("task", &task)
            .raw("resource", &resource)
            .text("reason", &self.reason)
            .raw("signal", &signal)
            .raw("contention", &contention)
            .raw("candidates", &candidates)
            .float("suspected_after_ms", self.suspected_after_ms)
            .int("rung", self.rung)
            .int("sends", self.sends)
            .optional_float("acknowledged_ms", self.acknowledged_ms)
            .optional_float("ended_ms", self.ended_ms)
            .optional_float("contention_after", self.contention_after)
            .text("would_have", &self.would_have)
            .optional_float("work_lost_ms", self.work_lost_ms)
            .text("retry", self.retried.map_or("", |ran| if ran { "ran again" } else { "dropped" }))
            .optional_float("retry_waited_ms", self.retry_waited_ms)
            .end()
    }

    fn who(&self) -> String {
        if self.label.is_empty() {
            format!("task {}", self.key)
        } else {
            format!("task {} ({})", self.key, self.label)
        }
    }

    /// One line for people about the retry.
    pub fn retry_words(&self) -> String {
        let waited_s = self.retry_waited_ms.unwrap_or(0.0) / 1e3;
        let what = match self.retried {
            Some(true) => "runs again, after a wait of",
            _ => "is not run again: nothing was calm for it within",
        };
        format!("decision {}: {} {what} {waited_s:.1} s", self.id, self.who())
    }

    /// One line for people.
    pub fn words(&self) -> String {
        let who = self.who();
        let what = match self.outcome {
            Outcome::WouldCancel => format!("would cancel {who} (observe mode)"),
            Outcome::Requested => format!("cancels {who}"),
            Outcome::Acknowledged => format!("cancelled {who}, its work is being undone"),
            Outcome::Ended => format!("{who} has stopped {:.0} ms after it was told", self.ended_ms.unwrap_or(0.0)),
            Outcome::Escalated => format!("{who} did not react to its cancel, ends its session"),
            Outcome::Unresponsive => format!("{who} reacts to nothing and is left alone"),
        };
        match self.outcome {
            Outcome::Ended => format!("decision {}: {what}", self.id),
            _ => format!("decision {}: {what}: {}", self.id, self.reason),
        }
    }

    /// Keeps it in the region, the log file and the host's log.
    pub fn record(&mut self, region: &Region, log: &mut LogFile, path: Option<&str>) {
        let said = self.said == Some(self.outcome);
        self.said = Some(self.outcome);
        let json = self.json();
        let entry = &region.header().decisions[self.id as usize % DECISIONS];
        // Too long for its place: the candidates are what can be missed.
        let kept = if json.len() <= DECISION_BYTES {
            json.clone()
        } else {
            Decision { candidates: Vec::new(), contention: Vec::new(), ..self.clone() }.json()
        };
        let bytes = kept.as_bytes();
        if bytes.len() <= DECISION_BYTES {
            entry.seq.write(|| {
                entry.id.store(self.id, Relaxed);
                entry.length.store(bytes.len() as u32, Relaxed);
                for (cell, byte) in entry.text.iter().zip(bytes) {
                    cell.store(*byte, Relaxed);
                }
            });
        }
        match self.replay.take() {
            Some(replay) => {
                let whole = format!("{},\"replay\":{replay}}}", json.strip_suffix('}').unwrap_or(&json));
                log.append(region, path, &whole)
            }
            None => log.append(region, path, &json),
        }
        // People want to know what was done and what came of it; the steps in between are in the record.
        let level = if self.outcome == Outcome::Acknowledged || said { Level::Debug } else { Level::Notice };
        action::log(level, &self.words());
    }
}

/// The file that decisions are appended to, opened anew when its path changes.
#[derive(Default)]
pub struct LogFile {
    complained: bool,
}

impl LogFile {
    fn append(&mut self, region: &Region, path: Option<&str>, json: &str) {
        let Some(path) = path else { return };
        // Opened for each of these rare lines: it may have been rotated away, and whoever led once would otherwise keep it
        // open for good, as would all others in time.
        let result = std::fs::OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK)
            .open(path)
            .and_then(|mut file| append_line(&mut file, &format!("{json}\n")));
        if let Err(e) = result {
            region.header().counters.logs_failed.fetch_add(1, Relaxed);
            // Once: a full disk must not fill the host's log as well.
            if !std::mem::replace(&mut self.complained, true) {
                action::log(Level::Error, &format!("decision_log {path}: {e}; decisions are kept in memory only"));
            }
        } else {
            self.complained = false;
        }
    }
}

/// One write per line: lines of several writers do not mix. Of a line that found room for its beginning only (a full disk)
/// nothing stays, for it would spoil the next one.
fn append_line(file: &mut std::fs::File, line: &str) -> std::io::Result<()> {
    let written = file.write(line.as_bytes())?;
    if written == line.len() {
        return Ok(());
    }
    let length = file.metadata()?.len();
    let was_last = file.stream_position().is_ok_and(|end| end == length);
    if was_last {
        file.set_len(length - written as u64)?;
    }
    Err(std::io::Error::new(std::io::ErrorKind::WriteZero, "no room for a whole line"))
}

/// A new decision's number, from 1.
pub fn next_id(region: &Region) -> u64 {
    region.header().next_decision.fetch_add(1, Release).wrapping_add(1)
}

/// The decisions the region keeps, oldest first, as JSON texts.
pub fn recorded(region: &Region) -> Vec<String> {
    let mut found: Vec<(u64, String)> = region
        .header()
        .decisions
        .iter()
        .filter(|entry| entry.id.load(Acquire) != 0)
        .filter_map(|entry| {
            entry.seq.read(64, || {
                let length = (entry.length.load(Relaxed) as usize).min(DECISION_BYTES);
                let bytes: Vec<u8> = entry.text[..length].iter().map(|b| b.load(Relaxed)).collect();
                (entry.id.load(Relaxed), String::from_utf8_lossy(&bytes).into_owned())
            })
        })
        // Another thread may shut the library down meanwhile, which empties the region; and a damaged one has no text.
        .filter(|(id, text)| *id != 0 && !text.is_empty() && !text.contains('\0'))
        .collect();
    found.sort_by_key(|d| d.0);
    found.into_iter().map(|d| d.1).collect()
}

#[cfg(all(test, not(loom)))]
mod emptied_tests {
    use super::*;

    /// As a reader finds it that a shutdown in another thread, or damage, overtook: it must not become an empty text.
    #[test]
    fn an_entry_without_text_is_no_decision() {
        let r = Region::anonymous(16, 16).unwrap();
        let entry = |id: u64, text: &[u8]| {
            let entry = &r.header().decisions[id as usize];
            entry.id.store(id, Relaxed);
            entry.length.store(text.len() as u32, Relaxed);
            entry.text.iter().zip(text).for_each(|(cell, byte)| cell.store(*byte, Relaxed));
        };
        entry(1, b"");
        entry(2, b"{\0}");
        entry(3, b"{}");
        assert_eq!(recorded(&r), ["{}"]);
    }
}
