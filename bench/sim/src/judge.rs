//! What was really the matter, by the model's own counterfactuals: copies of the host, with tasks taken out, run on
//! without any controller.
//!
//! - The host is *overloaded* at a moment if more than [`LATE`] of the requests are late that arrive in the second
//!   after it might have recovered. To recover it may take a quarter of a second, and the time to serve what has piled
//!   up and to read the buffer pool anew. (A request is late over the objective: the one given, or a fifth over the
//!   p99 of a clean run.)
//! - A task is a *culprit* at a moment if the host is overloaded and the task is pivotal: there are other long tasks
//!   without which (none of them, some or all) the host would still be overloaded, but not if this one were gone too.
//!   With a single culprit that is "its end ends the overload"; of several equal ones, each.
//! - A pick was *right* if it was a culprit at the moment it was picked.
//! - A culprit was *missed* if it had been one for half a second, nobody picked it, and it still was one when it ended
//!   by itself.

use crate::drive::{run, Acts, Loop};
use crate::host::{Host, NoTap, BUCKET_NS, MS, SECOND};
use crate::scenario::{Scenario, CALM_NS};
use std::collections::HashMap;

/// More late requests than this make an overload.
pub const LATE: f64 = 0.03;
/// Taking a task out must spare so many at least, else it is chance.
const MARGIN: f64 = 0.01;
/// The time in which the host may recover beside what [`Host::backlog_ns`] says, and then the time that is looked at.
const RECOVER_NS: u64 = 250 * MS;
const LONGEST_RECOVERY_NS: u64 = 2 * SECOND;
const LOOK_NS: u64 = SECOND;
/// Moments at which the judge looks for culprits that nobody picked.
const MOMENT_NS: u64 = 500 * MS;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    None,
    Regular,
    Resource,
}

/// A task in one of its requests.
type Task = (usize, u32);

fn recover_ns(host: &Host) -> u64 {
    (RECOVER_NS + host.backlog_ns()).min(LONGEST_RECOVERY_NS)
}

/// Counterfactuals of one moment, each run once.
struct Moment {
    host: Host,
    long: Vec<usize>,
    late: HashMap<Vec<usize>, f64>,
}

impl Moment {
    fn new(host: &Host) -> Moment {
        Moment { long: host.long_sessions(), host: host.clone(), late: HashMap::new() }
    }

    /// Part of the requests that will be late once `gone` are gone.
    fn late(&mut self, gone: &[usize]) -> f64 {
        let mut key = gone.to_vec();
        key.sort_unstable();
        if let Some(&late) = self.late.get(&key) {
            return late;
        }
        let mut host = self.host.without(gone);
        let from_ns = (host.now_ns + recover_ns(&host)).next_multiple_of(BUCKET_NS);
        host.run(from_ns + LOOK_NS, &mut NoTap);
        let late = host.late_share(from_ns, from_ns + LOOK_NS);
        self.late.insert(key, late);
        late
    }

    fn overloaded(&mut self) -> bool {
        self.late(&[]) > LATE
    }

    fn is_culprit(&mut self, session: usize) -> bool {
        if !self.overloaded() {
            return false;
        }
        let others: Vec<usize> = self.long.iter().copied().filter(|&s| s != session).collect();
        let mut with: Vec<usize> = others.clone();
        with.push(session);
        if self.late(&with) > LATE {
            return false; // whoever goes, the overload stays
        }
        [others.clone(), others.into_iter().rev().collect()].iter().any(|order| self.pivotal(session, order))
    }

    /// The fewest of `order` (from its beginning) without which, and without `session`, the overload ends: does it go
    /// on without them alone?
    fn pivotal(&mut self, session: usize, order: &[usize]) -> bool {
        let with = |n: usize| [&order[..n], &[session]].concat();
        let (mut low, mut high) = (0, order.len());
        while low < high {
            let middle = (low + high) / 2;
            if self.late(&with(middle)) <= LATE {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        let (stays, ends) = (self.late(&order[..low]), self.late(&with(low)));
        stays > LATE && stays - ends >= MARGIN
    }
}

/// What would be without any controller.
#[derive(Clone, Debug)]
pub struct Truth {
    pub kind: Kind,
    pub late: u64,
    /// Time in which over a tenth of the arrivals were late.
    pub overload_ns: u64,
}

/// Runs the scenario without a controller and says what it was.
pub fn truth(s: &Scenario) -> Truth {
    let mut host = Host::new(s.spec.clone());
    let mut moments = Vec::new();
    host.run(CALM_NS - SECOND, &mut NoTap);
    while host.now_ns < s.end_ns {
        host.run(host.now_ns + MOMENT_NS / 2, &mut NoTap);
        moments.push(host.clone());
    }
    let mut kind = Kind::None;
    for moment in &moments {
        let from_ns = moment.now_ns + recover_ns(moment);
        // Cheap first: the run itself shows most moments to be calm.
        if host.late_share(from_ns, from_ns + LOOK_NS) <= LATE {
            continue;
        }
        let mut m = Moment::new(moment);
        if !m.overloaded() {
            continue;
        }
        kind = kind.max(Kind::Regular);
        if m.long.clone().into_iter().any(|session| m.is_culprit(session)) {
            kind = Kind::Resource;
            break;
        }
    }
    Truth { kind, late: host.late_since(CALM_NS), overload_ns: overload_ns(&host) }
}

fn overload_ns(host: &Host) -> u64 {
    let buckets = CALM_NS / (2 * BUCKET_NS)..host.now_ns / (2 * BUCKET_NS);
    let over = buckets.filter(|b| host.late_share(b * 2 * BUCKET_NS, (b + 1) * 2 * BUCKET_NS) > 0.10).count();
    over as u64 * 2 * BUCKET_NS
}

#[derive(Clone, Debug)]
pub struct Judged {
    pub at_ns: u64,
    pub session: usize,
    pub right: bool,
    /// From getting what it monopolised to being told to stop; None for tasks that have nothing.
    pub after_ns: Option<u64>,
    pub reason: String,
    pub p99_ns: u64,
}

/// One run under a controller, judged.
#[derive(Clone, Debug)]
pub struct Verdict {
    pub said: Kind,
    pub picks: Vec<Judged>,
    pub missed: Vec<usize>,
    pub late: u64,
    pub overload_ns: u64,
    pub lost_ns: u64,
    pub acts: Acts,
}

pub fn verdict(s: &Scenario, which: Loop) -> Result<Verdict, String> {
    let mut host = Host::new(s.spec.clone());
    let mut picks: Vec<Judged> = Vec::new();
    let mut picked: Vec<Task> = Vec::new();
    // Long tasks alive at each moment, and the host where it looks overloaded.
    let mut moments: Vec<(Vec<Task>, Option<Moment>)> = Vec::new();
    let mut next_ns = CALM_NS;
    let acts = run(&mut host, s.end_ns, &s.terms, which, |host, cancels| {
        if host.now_ns >= next_ns {
            next_ns += MOMENT_NS;
            let recent = host.late_share(host.now_ns - RECOVER_NS, host.now_ns);
            let alive = host.long_sessions().into_iter().map(|s| host.task_of(s)).collect();
            moments.push((alive, (recent > LATE).then(|| Moment::new(host))));
        }
        if !cancels.is_empty() {
            let mut moment = Moment::new(host);
            for c in cancels {
                picked.push(host.task_of(c.session));
                let after_ns = host.active_since_ns(c.session).map(|since| host.now_ns - since);
                let right = moment.is_culprit(c.session);
                let (session, reason) = (c.session, c.reason.clone());
                picks.push(Judged { at_ns: c.at_ns, session, right, after_ns, reason, p99_ns: c.p99_ns });
            }
        }
    })?;
    let missed = missed(&mut moments, &picked);
    let said = match (picks.is_empty(), acts.overload) {
        (false, _) => Kind::Resource,
        (true, true) => Kind::Regular,
        (true, false) => Kind::None,
    };
    let late = host.late_since(CALM_NS);
    Ok(Verdict { said, picks, missed, late, overload_ns: overload_ns(&host), lost_ns: host.lost_ns, acts })
}

fn missed(moments: &mut [(Vec<Task>, Option<Moment>)], picked: &[Task]) -> Vec<usize> {
    let mut last: HashMap<Task, usize> = HashMap::new();
    for (i, (alive, _)) in moments.iter().enumerate() {
        for &task in alive.iter().filter(|t| !picked.contains(t)) {
            last.insert(task, i);
        }
    }
    let mut missed: Vec<usize> = Vec::new();
    for (&(session, request), &last) in &last {
        let mut was = |i: Option<usize>| {
            let Some((alive, Some(moment))) = i.and_then(|i| moments.get_mut(i)) else { return false };
            alive.contains(&(session, request)) && moment.is_culprit(session)
        };
        // At its last moment it may have had too little left to be one.
        let twice = |was: &mut dyn FnMut(Option<usize>) -> bool, i: Option<usize>| {
            was(i) && was(i.and_then(|i| i.checked_sub(1)))
        };
        if twice(&mut was, Some(last)) || twice(&mut was, last.checked_sub(1)) {
            missed.push(session);
        }
    }
    missed.sort_unstable();
    missed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drive::{Ablation, Progress, Terms};
    use crate::host::{Act, ClassSpec, LongTask, Mode, Spec};
    use crate::scenario::Family;
    use atropos::config::Config;
    use std::sync::Arc;

    /// 500 requests a second on four processors, all on one table, and these long tasks from 7 s on.
    fn with(acts: &[Act]) -> Scenario {
        let long = |&act: &Act| LongTask {
            act,
            start_ns: 7 * SECOND,
            duration_ns: 5 * SECOND,
            busy: false,
            class: 1,
            reaction_ns: 5 * MS,
            undo: 0.0,
            resubmits: 0,
        };
        let class = ClassSpec { share: 1.0, cpu_ns: 2e6, sigma: 0.3, delay_ns: 0.0, late_ns: 10 * MS };
        let spec = Spec {
            seed: 5,
            cores: 4.0,
            sessions: 60,
            workers: 0,
            hidden_backlog: false,
            tables: 1,
            hot_share: 1.0,
            write_share: 0.0,
            write_mode: Mode::WriteRows,
            classes: vec![class],
            pool: None,
            rate_per_s: 500.0,
            shapes: Vec::new(),
            slow: None,
            timeout_ns: 0,
            long: acts.iter().map(long).collect(),
        };
        let terms = Terms { config: Config::default(), progress: Progress::Exact, edges: false, seed: 5 };
        Scenario { family: Family::LockOne, spec: Arc::new(spec), terms, end_ns: 10 * SECOND }
    }

    fn culprits(s: &Scenario) -> Vec<usize> {
        let mut host = Host::new(s.spec.clone());
        host.run(8 * SECOND, &mut NoTap);
        let mut moment = Moment::new(&host);
        (0..s.spec.long.len()).filter(|&i| moment.is_culprit(host.session_of(i))).collect()
    }

    const HOLDER: Act = Act::Lock { table: 0, mode: Mode::Exclusive };
    const READER: Act = Act::Lock { table: 0, mode: Mode::ReadRows };

    #[test]
    fn who_holds_what_all_need_is_the_culprit_and_who_is_beside_it_is_not() {
        assert_eq!(culprits(&with(&[HOLDER, Act::Harmless])), [0]);
        assert_eq!(culprits(&with(&[READER, Act::Harmless])), [] as [usize; 0]);
    }

    #[test]
    fn either_of_an_alter_and_the_reader_before_it_ends_the_stall() {
        assert_eq!(culprits(&with(&[READER, Act::Alter { table: 0, work_ns: 5 * MS }])), [0, 1]);
    }

    #[test]
    fn nobody_is_the_culprit_of_too_many_requests() {
        let mut s = with(&[Act::Harmless]);
        Arc::make_mut(&mut s.spec).rate_per_s = 3000.0;
        assert_eq!(culprits(&s), [] as [usize; 0]);
        assert_eq!(truth(&s).kind, Kind::Regular);
    }

    #[test]
    fn the_library_and_the_copy_of_its_loop_cancel_the_holder() {
        let s = with(&[HOLDER, Act::Harmless]);
        assert_eq!(truth(&s).kind, Kind::Resource);
        let (library, copy) =
            (verdict(&s, Loop::Library).unwrap(), verdict(&s, Loop::Copy(Ablation::Nothing)).unwrap());
        let picked: Vec<(usize, bool)> = library.picks.iter().map(|p| (p.session, p.right)).collect();
        assert_eq!((picked, library.missed), (vec![(60, true)], vec![]));
        assert_eq!(library.acts.cancels, copy.acts.cancels);
        assert!(library.picks[0].after_ns.unwrap() < 500 * MS);
    }

    #[test]
    fn a_culprit_that_nobody_picks_is_missed() {
        let mut s = with(&[HOLDER]);
        s.terms.config.min_relief = 1.0;
        s.end_ns = 14 * SECOND;
        let v = verdict(&s, Loop::Library).unwrap();
        assert_eq!((v.picks.len(), v.missed), (0, vec![60]));
    }
}
