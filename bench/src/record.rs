//! What a run leaves: one JSON object with the fixed fields of the cases, and a verdict in words.
use crate::cases::{Actor, Case, Expect, Limits, Role};
use crate::decisions::Decision;
use crate::measure::{self, Part, Stall};
use serde::Serialize;
use serde_json::Value;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// No noise; the module is loaded and its mode is off.
    Clean,
    /// Noise; the module is loaded and its mode is off.
    Off,
    Observe,
    Enforce,
    /// Peers: as off, with the server's own time limits set; shown beside Atropos, not judged.
    Timeouts,
    /// As off, with pt-kill (percona-toolkit) running.
    PtKill,
    /// As off, with mod_qos (httpd) loaded.
    ModQos,
}

impl Mode {
    pub const ALL: [Mode; 7] =
        [Mode::Clean, Mode::Off, Mode::Observe, Mode::Enforce, Mode::Timeouts, Mode::PtKill, Mode::ModQos];

    pub fn name(self) -> &'static str {
        ["clean", "off", "observe", "enforce", "timeouts", "pt_kill", "mod_qos"][self as usize]
    }

    /// The mode that Atropos itself is in.
    pub fn atropos(self) -> &'static str {
        match self {
            Mode::Observe => "observe",
            Mode::Enforce => "enforce",
            _ => "off",
        }
    }

    /// Whether others than Atropos act.
    pub fn peer(self) -> bool {
        matches!(self, Mode::Timeouts | Mode::PtKill | Mode::ModQos)
    }
}

#[derive(Clone, Debug, Serialize)]
pub struct Record {
    pub case: String,
    pub host: &'static str,
    pub host_version: String,
    pub mode: Mode,
    pub run: u32,
    pub seed: u64,
    /// The measured part, from the onset.
    pub duration_s: f64,
    pub clean_tps: f64,
    pub tps: f64,
    pub tps_ratio: f64,
    pub clean_p99_ms: f64,
    pub p99_ms: f64,
    pub p99_ratio: f64,
    pub stall_s: f64,
    /// From the start of the load.
    pub onset_ms: f64,
    /// From the onset to the decision, when somebody was told to stop; with a peer, to the first error of any client.
    pub first_cancel_ms: Option<f64>,
    pub recovered_ms: Option<f64>,
    /// Who was told to stop; in a peer's mode, whoever saw an error for it.
    pub cancelled: u32,
    /// Of these, who was no culprit.
    pub false_cancelled: u32,
    pub dropped: u32,
    pub retried_ok: u32,
    /// p99 within the default tolerance (20%) of clean.
    pub slo_met: bool,

    // Beyond the fixed fields.
    /// "round": the clean run of the same round, same part; "quiet": this run's own part before the noise.
    pub clean_from: &'static str,
    pub variant: &'static str,
    /// From the onset to the first would-be decision of observe mode.
    pub first_would_cancel_ms: Option<f64>,
    pub would_cancel: u32,
    /// From the onset to the moment the first culprit's own client saw the error.
    pub culprit_saw_ms: Option<f64>,
    pub culprit_error: Option<String>,
    /// How long the culprits lived from the onset, the longest.
    pub culprit_lived_ms: Option<f64>,
    pub p50_ms: f64,
    pub max_ms: f64,
    pub p99_open_ms: f64,
    pub clean_p99_open_ms: f64,
    pub quiet_tps: f64,
    pub quiet_p99_ms: f64,
    pub completed: usize,
    pub conflicts: u32,
    pub other_errors: Vec<String>,
    pub actors: Vec<Actor>,
    pub decisions: Vec<Value>,
    /// "pass", or what was not as it must be; "not judged" for a peer.
    pub verdict: String,
}

/// All that a verdict is about.
pub struct Outcome<'a> {
    pub mode: Mode,
    pub actors: &'a [Actor],
    pub decisions: &'a [Decision],
    /// Errors that victims' clients saw because somebody stopped them: Atropos, or the peer.
    pub victim_hits: u32,
    pub stall: Stall,
    /// Whether the module is loaded (not on the vanilla server).
    pub loaded: bool,
    pub crashes: &'a [String],
    /// Errors of the load that no case explains.
    pub unexplained: &'a [String],
}

impl Outcome<'_> {
    fn culprit(&self, key: i64) -> bool {
        self.actors.iter().any(|a| a.role == Role::Culprit && a.key == key)
    }

    pub fn cancelled(&self) -> u32 {
        if self.mode.peer() {
            let actors = self.actors.iter().filter(|a| a.failure.is_some()).count() as u32;
            return actors + self.victim_hits;
        }
        self.decisions.iter().filter(|d| d.acted()).count() as u32
    }

    /// Cancels of anyone but a culprit. Decisions and what clients saw are two views of the same acts, so the larger.
    pub fn false_cancelled(&self) -> u32 {
        let decided = self.decisions.iter().filter(|d| d.acted() && !self.culprit(d.key)).count() as u32;
        let bystanders = self
            .actors
            .iter()
            .filter(|a| a.role == Role::Bystander)
            .filter(|a| a.failure.as_ref().is_some_and(|f| self.mode.peer() || f.by_atropos()))
            .count() as u32;
        decided.max(self.victim_hits + bystanders)
    }

    /// What is wrong with the run, in words; empty when all is as it must be. Speed is judged over all runs instead.
    pub fn faults(&self, case: &Case) -> Vec<String> {
        let mut faults = vec![];
        let mut must = |ok: bool, text: String| {
            if !ok {
                faults.push(text)
            }
        };
        must(self.crashes.is_empty(), format!("the server crashed: {}", self.crashes.join("; ")));
        if self.mode.peer() {
            return faults;
        }
        must(
            self.unexplained.is_empty(),
            format!("the load saw errors it should not: {}", self.unexplained.join("; ")),
        );
        must(self.false_cancelled() == 0, format!("{} cancelled that must not be", self.false_cancelled()));
        let acting = self.loaded && self.mode == Mode::Enforce;
        let would = self.decisions.iter().filter(|d| !d.acted()).count();
        if !acting {
            must(self.cancelled() == 0, format!("{} cancelled in mode {}", self.cancelled(), self.mode.name()));
        }
        if matches!(self.mode, Mode::Clean | Mode::Off) {
            must(self.decisions.is_empty(), format!("{} decisions while Atropos is off", self.decisions.len()));
        }
        for a in self.actors {
            let decided = self.decisions.iter().any(|d| d.acted() && d.key == a.key);
            // An idle session's connection may go without a word; then the decision tells who did it.
            let told = a.failure.as_ref().is_some_and(|f| f.by_atropos() || (f.silent() && decided));
            let saw = a
                .failure
                .as_ref()
                .map_or("finished its work".to_owned(), |f| format!("ended with {:?} {}", f.code, f.text));
            if a.role == Role::Culprit && acting {
                must(told, format!("the culprit ({}, key {}) was not cancelled: it {saw}", a.what, a.key));
                if told {
                    let code = a.failure.as_ref().map_or("", |f| &f.code);
                    let allowed = case.host.cancel_codes();
                    must(
                        allowed.contains(&code),
                        format!("the culprit ({}) saw the code {code:?} instead of one of {allowed:?}", a.what),
                    );
                    must(decided, format!("no decision names the culprit ({}, key {})", a.what, a.key));
                }
            } else {
                must(a.failure.is_none(), format!("{} (key {}) did not finish: it {saw}", a.what, a.key));
            }
        }
        match case.expect {
            Expect::Nobody => {
                must(self.cancelled() == 0, format!("{} cancelled though nobody is to blame", self.cancelled()));
                must(would == 0, format!("{would} would have been cancelled though nobody is to blame"));
            }
            Expect::Culprits { stall_s, .. } => {
                // The noise is real: without help it does its harm.
                let stalls = matches!(self.mode, Mode::Off | Mode::Observe);
                must(
                    !stalls || self.stall.stall_s >= stall_s,
                    format!("the stall lasted {:.1} s instead of {stall_s} s or more", self.stall.stall_s),
                );
                if self.loaded && self.mode == Mode::Observe {
                    let named = self.decisions.iter().any(|d| !d.acted() && self.culprit(d.key));
                    must(named, "observe mode recorded no decision that names the culprit".into());
                    let wrong = self.decisions.iter().filter(|d| !d.acted() && !self.culprit(d.key)).count();
                    must(wrong == 0, format!("observe mode would have cancelled {wrong} that must not be"));
                }
            }
        }
        faults
    }
}

/// The verdict on a peer's run.
pub const NOT_JUDGED: &str = "not judged";

/// The reference that ratios are taken against.
#[derive(Clone, Copy, Debug)]
pub struct Clean {
    pub part: Part,
    pub from: &'static str,
}

pub fn ratio(value: f64, reference: f64) -> f64 {
    if reference > 0.0 {
        value / reference
    } else {
        f64::NAN
    }
}

fn cell(values: impl Iterator<Item = Option<f64>>, digits: usize) -> String {
    let all: Vec<Option<f64>> = values.collect();
    let missing = all.iter().filter(|v| v.is_none()).count();
    match measure::spread(all.into_iter().flatten()) {
        None => "-".into(),
        Some((median, low, high)) => {
            let never = if missing > 0 { format!(", {missing} none") } else { String::new() };
            format!("{median:.digits$} ({low:.digits$}..{high:.digits$}{never})")
        }
    }
}

/// A table of medians (smallest..largest) for each mode, as Markdown.
pub fn table(records: &[Record]) -> String {
    let head = [
        "mode",
        "runs",
        "tps",
        "tps / clean",
        "p99 ms",
        "p99 / clean",
        "stall s",
        "first cancel ms",
        "culprit saw ms",
        "recovered ms",
        "cancelled",
        "false",
        "passed",
    ];
    let mut rows = vec![head.map(String::from).to_vec()];
    for mode in Mode::ALL {
        let of: Vec<&Record> = records.iter().filter(|r| r.mode == mode).collect();
        if of.is_empty() {
            continue;
        }
        let num = |f: fn(&Record) -> f64, digits| cell(of.iter().map(|r| Some(f(r)).filter(|v| v.is_finite())), digits);
        let opt = |f: fn(&Record) -> Option<f64>| cell(of.iter().map(|r| f(r)), 0);
        rows.push(vec![
            mode.name().into(),
            of.len().to_string(),
            num(|r| r.tps, 0),
            num(|r| r.tps_ratio, 3),
            num(|r| r.p99_ms, 1),
            num(|r| r.p99_ratio, 3),
            num(|r| r.stall_s, 1),
            opt(|r| r.first_cancel_ms.or(r.first_would_cancel_ms)),
            opt(|r| r.culprit_saw_ms),
            opt(|r| r.recovered_ms),
            of.iter().map(|r| r.cancelled).sum::<u32>().to_string(),
            of.iter().map(|r| r.false_cancelled).sum::<u32>().to_string(),
            match mode.peer() {
                true => "not judged".into(),
                false => format!("{}/{}", of.iter().filter(|r| r.verdict == "pass").count(), of.len()),
            },
        ]);
    }
    markdown(&rows)
}

pub fn markdown(rows: &[Vec<String>]) -> String {
    let width = |c: usize| rows.iter().map(|r| r[c].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    let line = |r: &[String]| {
        let cells: Vec<String> = r.iter().zip(&widths).map(|(c, w)| format!("{c:w$}")).collect();
        format!("| {} |\n", cells.join(" | "))
    };
    let mut text = line(&rows[0]);
    text += &format!("|{}|\n", widths.iter().map(|w| "-".repeat(w + 2)).collect::<Vec<_>>().join("|"));
    rows[1..].iter().for_each(|r| text += &line(r));
    text
}

/// What the medians over all runs say against what is expected, in words; (holds, text) each.
pub fn judge(expect: Expect, records: &[Record]) -> Vec<(bool, String)> {
    let mut said = vec![];
    let judged = records.iter().filter(|r| r.verdict != NOT_JUDGED).count();
    let passed = records.iter().filter(|r| r.verdict == "pass").count();
    said.push((
        passed == judged,
        format!("{passed} of {judged} runs as they must be (who was cancelled, who was not, what was recorded)"),
    ));
    let Expect::Culprits { stall_s, limits } = expect else {
        return said;
    };
    let median = |mode, f: fn(&Record) -> Option<f64>| {
        measure::spread(records.iter().filter(|r| r.mode == mode).filter_map(f)).map(|s| s.0)
    };
    if let Some(seen) = median(Mode::Off, |r| Some(r.stall_s)) {
        said.push((seen >= stall_s, format!("off: the stall is really there, {seen:.1} s (at least {stall_s} s)")));
    }
    let enforced = records.iter().any(|r| r.mode == Mode::Enforce);
    if let (Some(Limits { first_cancel_ms, tps_ratio, p99_ratio }), true) = (limits, enforced) {
        let first = median(Mode::Enforce, |r| r.first_cancel_ms).unwrap_or(f64::INFINITY);
        said.push((
            first <= first_cancel_ms,
            format!("enforce: told to stop {first:.0} ms after the onset (at most {first_cancel_ms} ms)"),
        ));
        let tps = median(Mode::Enforce, |r| Some(r.tps_ratio)).unwrap_or(f64::NAN);
        said.push((tps >= tps_ratio, format!("enforce: throughput {tps:.3} of clean (at least {tps_ratio})")));
        let p99 = median(Mode::Enforce, |r| Some(r.p99_ratio)).unwrap_or(f64::NAN);
        said.push((p99 <= p99_ratio, format!("enforce: p99 {p99:.3} of clean (at most {p99_ratio})")));
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::{self, Failure};
    use crate::host::HostId;

    fn actor(role: Role, key: i64, failure: Option<(&str, &str)>) -> Actor {
        let failure = failure.map(|(code, text)| Failure { code: code.into(), text: text.into() });
        Actor { role, what: "x", key, started_ns: 0, ended_ns: 1, failure }
    }

    fn decision(key: i64, result: &str) -> Decision {
        Decision {
            id: 1,
            time_ns: 0,
            key,
            resource: String::new(),
            instance: 0,
            reason: String::new(),
            results: vec![result.into()],
            acknowledged_ms: None,
            json: Value::Null,
        }
    }

    fn faults(
        case: &str,
        mode: Mode,
        actors: &[Actor],
        decisions: &[Decision],
        hits: u32,
        stall_s: f64,
    ) -> Vec<String> {
        let stall = Stall { stall_s, recovered_ms: None };
        let o =
            Outcome { mode, actors, decisions, victim_hits: hits, stall, loaded: true, crashes: &[], unexplained: &[] };
        o.faults(cases::find(case, None).unwrap())
    }

    #[test]
    fn a_connection_that_went_silently_is_atropos_s_doing_only_when_a_decision_says_so() {
        let gone = [actor(Role::Culprit, 7, Some(("", "server closed the connection")))];
        let stall = Stall { stall_s: 0.3, recovered_ms: None };
        let faults = |decisions: &[Decision]| {
            let (actors, mode) = (&gone[..], Mode::Enforce);
            let o = Outcome {
                mode,
                actors,
                decisions,
                victim_hits: 0,
                stall,
                loaded: true,
                crashes: &[],
                unexplained: &[],
            };
            o.faults(cases::find("x1", Some(HostId::Mysql)).unwrap())
        };
        assert!(faults(&[decision(7, "escalated")]).is_empty());
        assert!(!faults(&[]).is_empty());
    }

    #[test]
    fn a_peer_is_counted_by_what_clients_saw_and_not_judged() {
        let actors = [actor(Role::Culprit, 7, Some(("1317", "x"))), actor(Role::Bystander, 8, Some(("1317", "x")))];
        let stall = Stall { stall_s: 9.0, recovered_ms: None };
        let (mode, decisions) = (Mode::PtKill, &[][..]);
        let o = Outcome {
            mode,
            actors: &actors,
            decisions,
            victim_hits: 3,
            stall,
            loaded: true,
            crashes: &[],
            unexplained: &[],
        };
        assert_eq!((o.cancelled(), o.false_cancelled()), (5, 4));
        assert!(o.faults(cases::find("c1", None).unwrap()).is_empty());
    }

    #[test]
    fn enforce_passes_only_when_exactly_the_culprit_went() {
        let told = actor(Role::Culprit, 7, Some(("57014", "canceling statement | Atropos: held a lock")));
        assert!(faults("c6", Mode::Enforce, std::slice::from_ref(&told), &[decision(7, "ended")], 0, 0.2).is_empty());
        assert!(!faults("c6", Mode::Enforce, std::slice::from_ref(&told), &[], 0, 0.2).is_empty());
        assert!(!faults("c6", Mode::Enforce, std::slice::from_ref(&told), &[decision(7, "ended")], 1, 0.2).is_empty());
        assert!(!faults(
            "c6",
            Mode::Enforce,
            std::slice::from_ref(&told),
            &[decision(7, "ended"), decision(8, "requested")],
            0,
            0.2
        )
        .is_empty());
        assert!(!faults("c6", Mode::Enforce, &[actor(Role::Culprit, 7, None)], &[], 0, 9.0).is_empty());
        assert!(!faults(
            "c6",
            Mode::Enforce,
            &[actor(Role::Culprit, 7, Some(("57014", "due to user request")))],
            &[],
            0,
            9.0
        )
        .is_empty());
    }

    #[test]
    fn observe_records_and_cancels_nobody() {
        let free = actor(Role::Culprit, 7, None);
        assert!(
            faults("c6", Mode::Observe, std::slice::from_ref(&free), &[decision(7, "would_cancel")], 0, 9.0).is_empty()
        );
        assert!(!faults("c6", Mode::Observe, std::slice::from_ref(&free), &[], 0, 9.0).is_empty());
        assert!(!faults("c6", Mode::Observe, std::slice::from_ref(&free), &[decision(8, "would_cancel")], 0, 9.0)
            .is_empty());
        assert!(!faults("c6", Mode::Observe, &[free], &[decision(7, "requested")], 0, 9.0).is_empty());
    }

    #[test]
    fn off_needs_the_stall_and_nobody_means_nobody() {
        let free = actor(Role::Culprit, 7, None);
        assert!(faults("c6", Mode::Off, std::slice::from_ref(&free), &[], 0, 9.0).is_empty());
        assert!(!faults("c6", Mode::Off, std::slice::from_ref(&free), &[], 0, 1.0).is_empty());
        assert!(faults("x5", Mode::Enforce, &[], &[], 0, 0.0).is_empty());
        assert!(!faults("x5", Mode::Enforce, &[], &[decision(9, "ended")], 0, 0.0).is_empty());
    }

    fn record(mode: Mode, first_cancel_ms: Option<f64>, tps_ratio: f64, stall_s: f64, verdict: &str) -> Record {
        Record {
            case: "x".into(),
            host: "x",
            host_version: "1".into(),
            mode,
            run: 1,
            seed: 1,
            duration_s: 20.0,
            clean_tps: 100.0,
            tps: 100.0 * tps_ratio,
            tps_ratio,
            clean_p99_ms: 10.0,
            p99_ms: 10.0,
            p99_ratio: 1.0,
            stall_s,
            onset_ms: 10_000.0,
            first_cancel_ms,
            recovered_ms: None,
            cancelled: 0,
            false_cancelled: 0,
            dropped: 0,
            retried_ok: 0,
            slo_met: true,
            clean_from: "round",
            variant: "patched",
            first_would_cancel_ms: None,
            would_cancel: 0,
            culprit_saw_ms: None,
            culprit_error: None,
            culprit_lived_ms: None,
            p50_ms: 1.0,
            max_ms: 20.0,
            p99_open_ms: 10.0,
            clean_p99_open_ms: 10.0,
            quiet_tps: 100.0,
            quiet_p99_ms: 10.0,
            completed: 1000,
            conflicts: 0,
            other_errors: vec![],
            actors: vec![],
            decisions: vec![],
            verdict: verdict.into(),
        }
    }

    #[test]
    fn medians_are_held_against_the_limits() {
        let limits = Limits { first_cancel_ms: 500.0, tps_ratio: 0.97, p99_ratio: 1.1 };
        let expect = Expect::Culprits { stall_s: 8.0, limits: Some(limits) };
        let enforce = |first_ms, tps_ratio| record(Mode::Enforce, Some(first_ms), tps_ratio, 0.2, "pass");
        let mut records = vec![enforce(100.0, 0.9), enforce(200.0, 0.98), enforce(900.0, 0.99)];
        records.push(record(Mode::Off, None, 0.5, 10.0, "pass"));
        let holds = |records: &[Record]| judge(expect, records).iter().map(|(holds, _)| *holds).collect::<Vec<_>>();
        assert_eq!(holds(&records), [true; 5], "runs, stall, told, throughput, p99");
        records[1].tps_ratio = 0.96;
        records[3].stall_s = 7.0;
        records[0].verdict = "somebody else was cancelled".into();
        assert_eq!(holds(&records), [false, false, true, false, true]);
        // Nobody told at all is no median of those who were.
        records.iter_mut().for_each(|r| r.first_cancel_ms = None);
        assert!(!holds(&records)[2]);
        assert_eq!(judge(Expect::Nobody, &records).len(), 1);
    }
}
