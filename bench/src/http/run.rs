//! One run of a case on httpd.
use super::cases::{self, Case, Noise, NoiseRun, Request};
use super::install::Install;
use super::load::{self, Log};
use super::server::{Config, Httpd, Mpm};
use crate::cases::{Expect, Role};
use crate::clock::{self, ms, now_ns, sleep_until};
use crate::decisions::{self, Decision};
use crate::host::Variant;
use crate::load::Status;
use crate::measure::{self, Part, Stall};
use crate::record::{ratio, Mode, Record, NOT_JUDGED};
use anyhow::{ensure, Context, Result};
use serde::Serialize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a run is, beside its case.
#[derive(Clone, Debug)]
pub struct Setup {
    pub mpm: Mpm,
    /// One of the case's.
    pub variant: &'static str,
    pub slots: u32,
    pub seed: u64,
    /// Overrides the case's measured seconds after the onset.
    pub duration_s: Option<f64>,
    /// Further directives of the server, which win.
    pub set: Vec<String>,
}

impl Setup {
    pub fn new(case: &Case, mpm: Mpm) -> Setup {
        Setup { mpm, variant: case.variants[0], slots: case.slots, seed: 1, duration_s: None, set: vec![] }
    }
}

/// A run on httpd: the fixed fields, and what only a web server has.
#[derive(Clone, Debug, Serialize)]
pub struct WebRecord {
    #[serde(flatten)]
    pub record: Record,
    pub mpm: Mpm,
    pub noise: &'static str,
    pub slots: u32,
    /// Over the requests answered and the ages of those in flight at the end: a stall that lasts to the end completes
    /// nothing that the plain quantile could see.
    pub p99_in_flight_ms: f64,
    pub in_flight_at_end: usize,
    /// How long after the onset the last culprit that was stopped saw it.
    pub last_culprit_saw_ms: Option<f64>,
    /// Connections that the server closed between two requests.
    pub reconnects: u64,
    pub connections: u64,
    /// Victims' requests that were refused or cut off.
    pub victims_refused: usize,
    pub requests: Vec<Request>,
}

fn label(d: &Decision) -> &str {
    d.json["task"]["label"].as_str().unwrap_or_default()
}

/// What a verdict is about.
struct Outcome<'a> {
    mode: Mode,
    loaded: bool,
    requests: &'a [Request],
    decisions: &'a [Decision],
    victims_refused: usize,
    stall: Stall,
    crashes: &'a [String],
}

impl Outcome<'_> {
    fn culprit(&self, d: &Decision) -> bool {
        self.requests.iter().any(|r| r.role == Role::Culprit && r.label == label(d))
    }

    /// Told to stop, or refused, though they must not be; decisions and what clients saw are two views of the same
    /// acts, so the larger.
    fn false_cancelled(&self) -> u32 {
        let decided = self.decisions.iter().filter(|d| d.acted() && !self.culprit(d)).count();
        let bystanders = self.requests.iter().filter(|r| r.role == Role::Bystander && r.stopped()).count();
        decided.max(self.victims_refused + bystanders) as u32
    }

    /// What is wrong with the run; empty when all is as it must be. Speed is judged over all runs instead.
    fn faults(&self, case: &Case, stall_s: f64) -> Vec<String> {
        let mut faults = vec![];
        let mut must = |ok: bool, text: String| {
            if !ok {
                faults.push(text)
            }
        };
        must(self.crashes.is_empty(), format!("the server's log: {}", self.crashes.join("; ")));
        let acting = self.loaded && self.mode == Mode::Enforce;
        let acted = self.decisions.iter().filter(|d| d.acted()).count();
        if !acting {
            must(acted == 0, format!("{acted} cancelled in mode {}", self.mode.name()));
        }
        if self.mode != Mode::Observe && !acting {
            must(self.decisions.is_empty(), format!("{} decisions while Atropos is off", self.decisions.len()));
        }
        // What a peer refuses is its way to protect; it stands in the record and is not judged.
        if self.mode.peer() {
            return faults;
        }
        must(self.false_cancelled() == 0, format!("{} cancelled or refused that must not be", self.false_cancelled()));
        for r in self.requests.iter().filter(|r| r.stopped()) {
            let named = self.decisions.iter().any(|d| d.acted() && label(d) == r.label);
            must(acting && named, format!("{} was stopped by nobody's decision: {}", r.label, r.text));
            // Nothing was sent before: the whole answer is the refusal.
            let polite = r.status == Some(503) && r.complete && r.retry_after_s.is_some();
            must(polite, format!("{} saw {} instead of 503 with Retry-After", r.label, r.text));
        }
        let would: Vec<_> = self.decisions.iter().filter(|d| !d.acted()).collect();
        match case.expect {
            Expect::Nobody => {
                must(self.decisions.is_empty(), format!("{} decisions though nobody is to blame", self.decisions.len()))
            }
            Expect::Culprits { .. } if self.mode == Mode::Clean => {}
            Expect::Culprits { .. } if acting => {
                let told = self.requests.iter().filter(|r| r.role == Role::Culprit && r.stopped()).count();
                must(told > 0, "no culprit was cancelled".into());
                for r in self.requests.iter().filter(|r| r.role == Role::Bystander) {
                    must(r.succeeded(), format!("{} did not get its page: {}", r.label, r.text));
                }
            }
            Expect::Culprits { .. } => {
                must(
                    self.stall.stall_s >= stall_s,
                    format!("the stall lasted {:.1} s instead of {stall_s} s or more", self.stall.stall_s),
                );
                if self.loaded && self.mode == Mode::Observe {
                    must(
                        would.iter().any(|d| self.culprit(d)),
                        "observe mode recorded no decision that names a culprit".into(),
                    );
                    let wrong: Vec<_> = would.iter().filter(|d| !self.culprit(d)).map(|d| label(d)).collect();
                    must(wrong.is_empty(), format!("observe mode would have cancelled {}", wrong.join(", ")));
                }
            }
        }
        faults
    }
}

fn server_config(install: &Install, mode: Mode, setup: &Setup) -> Result<Config> {
    let mut config = cases::config(setup.mpm, setup.slots, mode)?;
    if install.variant != Variant::Patched {
        ensure!(
            !matches!(mode, Mode::Observe | Mode::Enforce),
            "mode {} needs the patched server: the vanilla one does not load the module",
            mode.name()
        );
        config.atropos = None;
    }
    config.directives.extend(setup.set.iter().cloned());
    Ok(config)
}

/// How long the stall must be when nobody acts. One slot more than the culprits hold leaves a slowdown instead.
fn least_stall_s(case: &Case, setup: &Setup, after_s: f64) -> f64 {
    match case.expect {
        Expect::Culprits { stall_s, .. } if setup.slots <= case.slots => stall_s.min(after_s - 4.0).max(0.0),
        _ => 0.0,
    }
}

/// What the case expects, with the least stall that can be in this set-up.
pub fn expected(case: &Case, setup: &Setup) -> Expect {
    match case.expect {
        Expect::Culprits { limits, .. } => {
            let stall_s = least_stall_s(case, setup, setup.duration_s.unwrap_or(case.timing.after_s));
            Expect::Culprits { stall_s, limits }
        }
        Expect::Nobody => Expect::Nobody,
    }
}

/// Runs `case` once. `clean` is the clean run of the same round; without it the run's own quiet part is the reference.
pub fn run_once(
    install: &Install,
    case: &Case,
    mode: Mode,
    run: u32,
    clean: Option<Part>,
    setup: &Setup,
) -> Result<(WebRecord, Part)> {
    let mut timing = case.timing;
    timing.after_s = setup.duration_s.unwrap_or(timing.after_s);
    let seed = setup.seed + u64::from(run);
    let name = format!("{}-{}-{}-{}-{run}", case.id, setup.mpm.name(), setup.variant, mode.name());
    let config = server_config(install, mode, setup)?;
    let loaded = config.atropos.is_some();
    let mut server = Httpd::start(install, &config, None, &name)?;

    let start_ns = now_ns();
    let wall_offset_ns = clock::wall_offset_ns();
    let load = load::start(server.address, &(case.groups)(), seed)?;
    let at = |s: f64| start_ns + (s * 1e9) as i64;
    let head_s = timing.warmup_s + timing.quiet_s;
    let mut shown = (now_ns(), 0);
    let mut wait_until = |until_ns: i64, server: &mut Httpd| -> Result<()> {
        while now_ns() < until_ns {
            ensure!(server.running()?, "httpd of {name} ended by itself:\n{}", server.log_tail(15));
            sleep_until(until_ns.min(now_ns() + 100_000_000));
            let (last_ns, last_done) = shown;
            let (now, done) = (now_ns(), load.done());
            if now - last_ns > 10_000_000_000 {
                let per_s = (done - last_done) as f64 * 1e9 / (now - last_ns) as f64;
                eprintln!("{name}: {:.0} s, {per_s:.0} requests/s", (now - start_ns) as f64 / 1e9);
                shown = (now, done);
            }
        }
        Ok(())
    };
    wait_until(at(head_s), &mut server)?;

    let stop = Arc::new(AtomicBool::new(false));
    let noise = match case.noise.filter(|_| mode != Mode::Clean) {
        None => NoiseRun { onset_ns: at(head_s), requests: vec![], held: None },
        Some(noise) => {
            let known = Noise { server: &server, slots: setup.slots, variant: setup.variant, stop: stop.clone() };
            noise(&known).context("the noise")?
        }
    };
    let onset_ns = noise.onset_ns;
    let end_ns = onset_ns + (timing.after_s * 1e9) as i64;
    wait_until(end_ns, &mut server)?;
    let log = load.finish()?;
    // Waiters that were let go finish within a moment, which is not measured; a lock that is held is given back then.
    drop(noise.held);
    let patience = Instant::now() + Duration::from_secs(if mode == Mode::Enforce { 5 } else { 0 });
    while Instant::now() < patience && noise.requests.iter().any(|r| !r.is_finished()) {
        std::thread::sleep(Duration::from_millis(20));
    }
    stop.store(true, Ordering::Relaxed);
    let mut requests = vec![];
    for r in noise.requests {
        requests.push(r.join().map_err(|_| anyhow::anyhow!("a request of the noise panicked"))?);
    }

    let decided = decisions::read(&server.decision_log(), (start_ns, now_ns()), wall_offset_ns)?;
    let crashes = server.crash_lines();
    let quiet = measure::part(&log.transactions, at(timing.warmup_s), at(head_s));
    let part = measure::part(&log.transactions, onset_ns, end_ns);
    let (clean, clean_from) = match clean {
        Some(part) => (part, "round"),
        None if mode == Mode::Clean || timing.quiet_s == 0.0 => (part, "itself"),
        None => (quiet, "quiet"),
    };
    let stall = measure::stall(&log.transactions, onset_ns, end_ns, clean.tps);
    let outcome = Outcome {
        mode,
        loaded,
        requests: &requests,
        decisions: &decided,
        victims_refused: log.bad.len(),
        stall,
        crashes: &crashes,
    };
    let mut faults = outcome.faults(case, least_stall_s(case, setup, timing.after_s));
    if part.completed == 0 && mode == Mode::Enforce {
        faults.push("no request completed in the measured part".into());
    }
    let since_onset = |t: i64| ms(t - onset_ns);
    let culprits = || requests.iter().filter(|r| r.role == Role::Culprit);
    let first = |acted: bool| {
        let right =
            decided.iter().filter(|d| d.acted() == acted && (culprits().next().is_none() || outcome.culprit(d)));
        right.map(|d| d.time_ns).min().map(since_onset)
    };
    let stopped = || culprits().filter(|r| r.stopped());
    let p99_ratio = ratio(part.p99_ms, clean.p99_ms);
    let mut bad: Vec<String> = log.bad.iter().map(|b| b.text.clone()).collect();
    bad.dedup();
    bad.truncate(5);
    let record = Record {
        case: case.id.into(),
        host: "httpd",
        host_version: install.versions().join(", "),
        mode,
        run,
        seed,
        duration_s: timing.after_s,
        clean_tps: clean.tps,
        tps: part.tps,
        tps_ratio: ratio(part.tps, clean.tps),
        clean_p99_ms: clean.p99_ms,
        p99_ms: part.p99_ms,
        p99_ratio,
        stall_s: stall.stall_s,
        onset_ms: ms(onset_ns - start_ns),
        // A peer tells no decision: `culprit_saw_ms` is what there is of it.
        first_cancel_ms: first(true),
        recovered_ms: stall.recovered_ms,
        cancelled: decided.iter().filter(|d| d.acted()).count() as u32,
        false_cancelled: outcome.false_cancelled(),
        dropped: 0,
        retried_ok: 0,
        slo_met: p99_ratio <= 1.20 && part.completed > 0,
        clean_from,
        variant: install.variant.name(),
        first_would_cancel_ms: first(false),
        would_cancel: decided.iter().filter(|d| !d.acted()).count() as u32,
        culprit_saw_ms: stopped().map(|r| since_onset(r.ended_ns)).reduce(f64::min),
        culprit_error: stopped().next().map(|r| r.text.clone()),
        culprit_lived_ms: culprits().map(|r| since_onset(r.ended_ns)).reduce(f64::max),
        p50_ms: part.p50_ms,
        max_ms: part.max_ms,
        p99_open_ms: part.p99_open_ms,
        clean_p99_open_ms: clean.p99_open_ms,
        quiet_tps: quiet.tps,
        quiet_p99_ms: quiet.p99_ms,
        completed: part.completed,
        conflicts: 0,
        other_errors: bad,
        actors: vec![],
        decisions: decided.iter().map(|d| without_replay(&d.json)).collect(),
        verdict: match faults.is_empty() {
            false => format!("fail: {}", faults.join("; ")),
            true if mode.peer() => NOT_JUDGED.into(),
            true => "pass".into(),
        },
    };
    let web = WebRecord {
        record,
        mpm: setup.mpm,
        noise: setup.variant,
        slots: setup.slots,
        p99_in_flight_ms: p99_in_flight_ms(&log, onset_ns, end_ns),
        in_flight_at_end: log.in_flight_ns.len(),
        last_culprit_saw_ms: stopped().map(|r| since_onset(r.ended_ns)).reduce(f64::max),
        reconnects: log.reconnects,
        connections: log.connections,
        victims_refused: log.bad.len(),
        requests,
    };
    if faults.is_empty() {
        match web.requests.iter().any(|r| r.unfinished) {
            // Scripts go on for half a minute; nobody waits for them.
            true => server.abandon(),
            false => server.finish()?,
        }
    } // else the drop keeps the server's log
    Ok((web, part))
}

fn p99_in_flight_ms(log: &Log, from_ns: i64, to_ns: i64) -> f64 {
    let ended = log.transactions.iter().filter(|t| t.status == Status::Ok && (from_ns..to_ns).contains(&t.end_ns()));
    let mut all: Vec<i64> = ended.map(|t| t.latency_ns).collect();
    all.extend(log.in_flight_ns.iter().map(|&start| to_ns - start).filter(|age| *age > 0));
    all.sort_unstable();
    ms(measure::quantile(&all, 0.99))
}

/// A decision without the window it was made from, which is for the log only: a hundred times the rest.
fn without_replay(decision: &serde_json::Value) -> serde_json::Value {
    let mut decision = decision.clone();
    if let Some(fields) = decision.as_object_mut() {
        fields.remove("replay");
    }
    decision
}

/// One line about a finished run.
pub fn summary(w: &WebRecord) -> String {
    let r = &w.record;
    let opt = |v: Option<f64>| v.map_or("-".into(), |v| format!("{v:.0} ms"));
    format!(
        "{} {} {} {:8} run {}: {:.0} requests/s ({:.3} of clean), p99 {:.2} ms ({:.3}), stall {:.1} s, first cancel {}, \
         culprits saw {}..{}, recovered {}, cancelled {} (false {}), refused {}: {}",
        r.case,
        w.mpm.name(),
        w.noise,
        r.mode.name(),
        r.run,
        r.tps,
        r.tps_ratio,
        r.p99_ms,
        r.p99_ratio,
        r.stall_s,
        opt(r.first_cancel_ms.or(r.first_would_cancel_ms)),
        opt(r.culprit_saw_ms),
        opt(w.last_culprit_saw_ms),
        opt(r.recovered_ms),
        r.cancelled,
        r.false_cancelled,
        w.victims_refused,
        r.verdict
    )
}
