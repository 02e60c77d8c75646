//! One run of a case, and the rounds of a measurement.
use crate::cases::{names_atropos, Case, Failure, Noise, NoiseReport, Role};
use crate::clock::{self, ms, now_ns, sleep_until};
use crate::decisions::{self, Decision};
use crate::host::{Host, Setting};
use crate::load::{LoadError, LoadLog, RunningLoad, Status};
use crate::measure::{self, Part};
use crate::record::{ratio, Clean, Mode, Outcome, Record, NOT_JUDGED};
use anyhow::{bail, Context, Result};
use std::io::{IsTerminal, Write};
use std::time::Duration;

#[derive(Clone, Debug)]
pub struct Options {
    pub seed: u64,
    /// Overrides the case's measured seconds after the onset.
    pub duration_s: Option<f64>,
    /// Further settings of the server, which win over the case's.
    pub set: Vec<Setting>,
}

/// The latest time a granted lock is waited for before the noise counts as failed, and the slack the load gets for it.
const GRANT_SLACK_S: f64 = 3.0;

struct Progress {
    what: String,
    tty: bool,
    printed_s: i64,
}

impl Progress {
    fn show(&mut self, elapsed_s: f64, total_s: f64, part: &str, tps: f64) {
        let text = format!("{}: {elapsed_s:5.0} of {total_s:.0} s, {part}, {tps:.0} transactions/s", self.what);
        let mut err = std::io::stderr();
        if self.tty {
            let _ = write!(err, "\r\x1b[K{text}");
        } else if elapsed_s as i64 / 10 != self.printed_s / 10 || self.printed_s < 0 {
            let _ = writeln!(err, "{text}");
        }
        self.printed_s = elapsed_s as i64;
    }

    fn clear(&self) {
        if self.tty {
            eprint!("\r\x1b[K");
        }
    }
}

/// Runs `case` once. `clean` is the clean run of the same round; without it the run's own quiet part is the reference.
pub fn run_once(
    host: &dyn Host,
    case: &Case,
    mode: Mode,
    run: u32,
    clean: Option<Part>,
    o: &Options,
) -> Result<(Record, Part)> {
    let loaded = host.loaded();
    if !loaded && matches!(mode, Mode::Observe | Mode::Enforce) {
        bail!("mode {} needs the patched server: the vanilla one cannot load the module", mode.name());
    }
    if mode.peer() && !host.peers().contains(&mode) {
        bail!("{} has no mode {}", host.id().title(), mode.name());
    }
    let mut timing = case.timing;
    timing.after_s = o.duration_s.unwrap_or(timing.after_s);
    let seed = o.seed + u64::from(run);
    let name = format!("{}-{}-{run}", case.id, mode.name());

    let mut settings = (case.settings)();
    settings.extend(o.set.iter().cloned());
    let server = host.start(&(case.dataset)(), Some(mode), &settings, &name)?;
    let peer = host.peer(&*server, mode)?;

    let head_s = timing.warmup_s + timing.quiet_s;
    let total_s = head_s + GRANT_SLACK_S + timing.after_s;
    let start_ns = now_ns();
    let wall_offset_ns = clock::wall_offset_ns();
    let mut loads: Vec<RunningLoad> = vec![];
    for (i, load) in (case.loads)().iter().enumerate() {
        let noise_ns = start_ns + (head_s * 1e9) as i64;
        loads.push(load.start(host, server.dir(), &i.to_string(), total_s, seed * 10 + i as u64, noise_ns)?);
    }
    let mut progress = Progress { what: name.clone(), tty: std::io::stderr().is_terminal(), printed_s: -1 };
    let at = |s: f64| start_ns + (s * 1e9) as i64;
    // Waits until a time, until something is done, or until a load has died, which ends the run.
    let mut wait_until = |until_ns: i64, loads: &mut [RunningLoad], done: &dyn Fn() -> bool| -> Result<()> {
        while now_ns() < until_ns && !done() {
            for load in loads.iter_mut() {
                if !load.running()? {
                    return Ok(());
                }
            }
            sleep_until(until_ns.min(now_ns() + 250_000_000));
            let elapsed = (now_ns() - start_ns) as f64 / 1e9;
            let part = if elapsed < timing.warmup_s {
                "warm-up"
            } else if elapsed < head_s {
                "quiet"
            } else {
                "measured"
            };
            progress.show(elapsed, total_s, part, loads.iter().map(|l| l.recent_tps()).sum());
        }
        Ok(())
    };
    wait_until(at(head_s), &mut loads, &|| false)?;

    let measured_until = |onset_ns: i64| onset_ns + (timing.after_s * 1e9) as i64;
    let noise_report = match case.noise.filter(|_| mode != Mode::Clean) {
        None => NoiseReport { onset_ns: at(head_s), actors: vec![] },
        Some(noise) => std::thread::scope(|s| {
            let dir = server.dir();
            let lasts = Duration::from_secs_f64(timing.after_s);
            let handle = s.spawn(move || noise(&Noise { socket_dir: dir, lasts }));
            wait_until(at(head_s + timing.after_s), &mut loads, &|| handle.is_finished())?;
            handle.join().map_err(|_| anyhow::anyhow!("the noise of {} panicked", case.id))?.context("the noise")
        })?,
    };
    let onset_ns = noise_report.onset_ns;
    let end_ns = measured_until(onset_ns);
    wait_until(end_ns, &mut loads, &|| false)?;
    progress.clear();
    let mut log = LoadLog::default();
    for load in loads {
        log.merge(load.finish(Duration::from_secs(60))?);
    }
    if log.died.is_none() && onset_ns > at(head_s + GRANT_SLACK_S) {
        bail!(
            "the noise got what it wanted only {:.1} s after it asked: the measured part is cut short",
            (onset_ns - at(head_s)) as f64 / 1e9
        );
    }

    let decided = decisions::read(&server.decision_log(), (start_ns, now_ns()), wall_offset_ns)?;
    let crashes = server.crash_lines();
    let quiet = measure::part(&log.transactions, at(timing.warmup_s), at(head_s));
    let part = measure::part(&log.transactions, onset_ns, end_ns);
    let clean = match clean {
        Some(part) => Clean { part, from: "round" },
        None if mode == Mode::Clean || timing.quiet_s == 0.0 => Clean { part, from: "itself" },
        None => Clean { part: quiet, from: "quiet" },
    };
    let stall = measure::stall(&log.transactions, onset_ns, end_ns, clean.part.tps);

    drop(peer);

    // Nobody else cancels statements here, and sysbench does not tell the detail that names Atropos. A peer may hit in
    // any way, so there every error that is no conflict is its doing.
    let hit = |e: &&LoadError| match mode.peer() {
        true => e.status != Status::Conflict,
        false => e.status == Status::Cancelled || names_atropos(&e.text),
    };
    let victim_hits = log.errors.iter().filter(hit).count() as u32;
    let mut unexplained: Vec<String> = log
        .errors
        .iter()
        .filter(|e| e.status != Status::Conflict && !hit(e))
        .map(|e| format!("{} {}", e.code, e.text))
        .collect();
    let unexplained_count = unexplained.len();
    unexplained.dedup();
    unexplained.truncate(5);
    if unexplained_count > unexplained.len() {
        unexplained.push(format!("{unexplained_count} in all"));
    }

    let actors = &noise_report.actors;
    let outcome = Outcome {
        mode,
        actors,
        decisions: &decided,
        victim_hits,
        stall,
        loaded,
        crashes: &crashes,
        unexplained: &unexplained,
    };
    let mut faults = outcome.faults(case);
    faults.extend(log.died.clone());
    if part.completed == 0 {
        faults.push("no transaction completed in the measured part".into());
    }
    let since_onset = |t: i64| ms(t - onset_ns);
    let culprits = || actors.iter().filter(|a| a.role == Role::Culprit);
    // Where there is a culprit, what counts is the decision about it; others are false ones and counted as such.
    let right = |d: &&Decision| culprits().next().is_none() || culprits().any(|a| a.key == d.key);
    let first = |acted: bool| {
        decided.iter().filter(|d| d.acted() == acted).filter(right).map(|d| d.time_ns).min().map(since_onset)
    };
    // A peer keeps no log of ours: the first that its doing is known of is the first error a client saw, culprit or not.
    let first_error = || {
        let hit = |s: Status| !matches!(s, Status::Ok | Status::Conflict);
        let victims = log.transactions.iter().filter(|t| hit(t.status)).map(|t| t.end_ns());
        let actors = actors.iter().filter(|a| a.failure.is_some()).map(|a| a.ended_ns);
        victims.chain(actors).min().map(since_onset)
    };
    let told = || culprits().filter(|a| a.failure.is_some());
    let p99_ratio = ratio(part.p99_ms, clean.part.p99_ms);
    let record = Record {
        case: case.id.into(),
        host: host.id().name(),
        host_version: host.version().to_owned(),
        mode,
        run,
        seed,
        duration_s: timing.after_s,
        clean_tps: clean.part.tps,
        tps: part.tps,
        tps_ratio: ratio(part.tps, clean.part.tps),
        clean_p99_ms: clean.part.p99_ms,
        p99_ms: part.p99_ms,
        p99_ratio,
        stall_s: stall.stall_s,
        onset_ms: ms(onset_ns - start_ns),
        first_cancel_ms: if mode.peer() { first_error() } else { first(true) },
        recovered_ms: stall.recovered_ms,
        cancelled: outcome.cancelled(),
        false_cancelled: outcome.false_cancelled(),
        // Re-execution is a later stage: nothing is retried, so nothing is dropped.
        dropped: 0,
        retried_ok: 0,
        slo_met: p99_ratio <= 1.20,
        clean_from: clean.from,
        variant: host.variant().name(),
        first_would_cancel_ms: first(false),
        would_cancel: decided.iter().filter(|d| !d.acted()).count() as u32,
        culprit_saw_ms: told().map(|a| since_onset(a.ended_ns)).reduce(f64::min),
        culprit_error: told().next().and_then(|a| a.failure.as_ref()).map(Failure::to_string),
        culprit_lived_ms: culprits().map(|a| since_onset(a.ended_ns)).reduce(f64::max),
        p50_ms: part.p50_ms,
        max_ms: part.max_ms,
        p99_open_ms: part.p99_open_ms,
        clean_p99_open_ms: clean.part.p99_open_ms,
        quiet_tps: quiet.tps,
        quiet_p99_ms: quiet.p99_ms,
        completed: part.completed,
        conflicts: log.transactions.iter().filter(|t| t.status == Status::Conflict).count() as u32,
        other_errors: unexplained,
        actors: noise_report.actors,
        decisions: decided.iter().map(|d| without_replay(&d.json)).collect(),
        verdict: match faults.is_empty() {
            true if mode.peer() => NOT_JUDGED.into(),
            true => "pass".into(),
            false => format!("fail: {}", faults.join("; ")),
        },
    };
    if faults.is_empty() {
        server.finish()?;
    } // else the drop keeps the server's log
    Ok((record, part))
}

/// One line about a finished run.
pub fn summary(r: &Record) -> String {
    let opt = |v: Option<f64>| v.map_or("-".into(), |v| format!("{v:.0} ms"));
    format!(
        "{} {:8} run {}: {:.0} tps ({:.3} of clean), p99 {:.1} ms ({:.3}), stall {:.1} s, first cancel {}, culprit saw {}, recovered {}, cancelled {} (false {}): {}",
        r.case,
        r.mode.name(),
        r.run,
        r.tps,
        r.tps_ratio,
        r.p99_ms,
        r.p99_ratio,
        r.stall_s,
        opt(r.first_cancel_ms.or(r.first_would_cancel_ms)),
        opt(r.culprit_saw_ms),
        opt(r.recovered_ms),
        r.cancelled,
        r.false_cancelled,
        r.verdict
    )
}

/// Runs `modes` for `runs` rounds; `once` runs one mode, beside the clean run of its round if there was one. Rounds rotate
/// the order of the modes after the clean one, so that no mode always meets the same state of the machine; the clean run
/// comes first since the others are held against it.
pub fn run_rounds<R>(
    modes: &[Mode],
    runs: u32,
    mut once: impl FnMut(Mode, u32, Option<Part>) -> Result<(R, Part)>,
    mut each: impl FnMut(&R) -> Result<()>,
) -> Result<Vec<R>> {
    let mut records = vec![];
    for run in 1..=runs {
        let mut clean = None;
        let mut order: Vec<Mode> = modes.iter().copied().filter(|m| *m != Mode::Clean).collect();
        if !order.is_empty() {
            let shift = (run as usize - 1) % order.len();
            order.rotate_left(shift);
        }
        if modes.contains(&Mode::Clean) {
            order.insert(0, Mode::Clean);
        }
        for mode in order {
            let (record, part) = once(mode, run, clean)?;
            if mode == Mode::Clean {
                clean = Some(part);
            }
            each(&record)?;
            records.push(record);
        }
    }
    Ok(records)
}

/// A decision without the window it was made from, which is for the log only: a hundred times the rest.
fn without_replay(decision: &serde_json::Value) -> serde_json::Value {
    let mut decision = decision.clone();
    if let Some(fields) = decision.as_object_mut() {
        fields.remove("replay");
    }
    decision
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mode_runs_beside_its_rounds_clean_run_and_the_others_take_turns() {
        let modes = [Mode::Off, Mode::Clean, Mode::Observe, Mode::Enforce];
        let once = |mode: Mode, run: u32, clean: Option<Part>| {
            let part = Part { tps: run.into(), ..Part::default() };
            Ok(((run, mode, clean.map(|c| c.tps)), part))
        };
        let mut told = 0;
        let records = run_rounds(&modes, 3, once, |_| {
            told += 1;
            Ok(())
        });
        let records = records.unwrap();
        assert_eq!((told, records.len()), (12, 12));
        let order = |run: u32| records.iter().filter(|r| r.0 == run).map(|r| r.1).collect::<Vec<_>>();
        assert_eq!(order(1), [Mode::Clean, Mode::Off, Mode::Observe, Mode::Enforce]);
        assert_eq!(order(2), [Mode::Clean, Mode::Observe, Mode::Enforce, Mode::Off]);
        assert_eq!(order(3), [Mode::Clean, Mode::Enforce, Mode::Off, Mode::Observe]);
        for (run, mode, clean) in records {
            assert_eq!(clean, (mode != Mode::Clean).then_some(run.into()), "{run} {mode:?}");
        }
    }

    #[test]
    fn without_a_clean_run_there_is_none_to_be_held_against() {
        let once = |_, _, clean: Option<Part>| Ok((clean.is_some(), Part::default()));
        assert_eq!(run_rounds(&[Mode::Enforce], 2, once, |_| Ok(())).unwrap(), [false, false]);
    }
}
