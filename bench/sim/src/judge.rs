//! What was really the matter, by the model's own counterfactuals: copies of the host, with tasks taken out, run on
//! without any controller.
//!
//! - What is looked at are the requests that arrive in one second: the one that begins when the host would have got over
//!   what has piled up, if all long tasks were gone (a copy of it shows when; [`CANCEL_NS`] later at least). A request is
//!   late over the objective: the one given, or a fifth over the p99 of a clean run.
//! - The host is *overloaded* if more than [`LATE`] of them are late; and that is over, as far as long tasks can help, if
//!   no more are late than that, or than twice as many as without any long task.
//! - A task is a *culprit* at a moment if it is pivotal: there are other long tasks without which (none of them, some or
//!   all) the overload would stay, but end if this one were gone too. With a single culprit that is "its end ends the
//!   overload"; of several equal ones, each.
//! - A pick was *right* if it was a culprit at the moment it was picked.
//! - A culprit was *missed* if it had been one for half a second, nobody picked it, and it still was one when it ended
//!   by itself.

use crate::drive::{run, Ablation, Acts};
use crate::host::{Host, NoTap, BUCKET_NS, MS, SECOND};
use crate::scenario::{Scenario, CALM_NS};
use std::collections::HashMap;

/// More late requests than this make an overload.
pub const LATE: f64 = 0.03;
/// Taking a task out must spare so many at least, else it is chance.
const MARGIN: f64 = 0.01;
/// A cancel takes as long to have its effect.
const CANCEL_NS: u64 = 100 * MS;
/// The host has recovered when so long no more are late than [`LATE`]; it is given no longer than the second.
const SETTLED_NS: u64 = 250 * MS;
const LONGEST_RECOVERY_NS: u64 = 2 * SECOND;
/// The time that is looked at then.
const LOOK_NS: u64 = SECOND;
/// The host looks overloaded if more than [`LATE`] are late that arrived in so long.
const RECENT_NS: u64 = 250 * MS;
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

/// Counterfactuals of one moment, each run once.
struct Moment {
    host: Host,
    long: Vec<usize>,
    /// From when on requests are looked at.
    from_ns: Option<u64>,
    late: HashMap<Vec<usize>, f64>,
}

impl Moment {
    fn new(host: &Host) -> Moment {
        Moment { long: host.long_sessions(), host: host.clone(), from_ns: None, late: HashMap::new() }
    }

    /// Part of the requests that will be late once `gone` are gone.
    fn late(&mut self, gone: &[usize]) -> f64 {
        let mut key = gone.to_vec();
        key.sort_unstable();
        if let Some(&late) = self.late.get(&key) {
            return late;
        }
        let from_ns = self.recovered_ns();
        let mut host = self.host.without(gone);
        host.run(from_ns + LOOK_NS, &mut NoTap);
        let late = host.late_share(from_ns, from_ns + LOOK_NS);
        self.late.insert(key, late);
        late
    }

    fn recovered_ns(&mut self) -> u64 {
        if let Some(ns) = self.from_ns {
            return ns;
        }
        let mut host = self.host.without(&self.long);
        let first_ns = (host.now_ns + CANCEL_NS).next_multiple_of(BUCKET_NS);
        let last_ns = first_ns + LONGEST_RECOVERY_NS;
        host.run(last_ns + SETTLED_NS, &mut NoTap);
        let settled = |&at_ns: &u64| host.late_share(at_ns, at_ns + SETTLED_NS) <= LATE;
        let ns = (first_ns..last_ns).step_by(BUCKET_NS as usize).find(settled).unwrap_or(last_ns);
        *self.from_ns.insert(ns)
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
        let least = LATE.max(2.0 * self.late(&with));
        [others.clone(), others.into_iter().rev().collect()].iter().any(|order| self.pivotal(session, order, least))
    }

    /// The fewest of `order` (from its beginning) without which, and without `session`, the overload ends: does it go
    /// on without them alone?
    fn pivotal(&mut self, session: usize, order: &[usize], least: f64) -> bool {
        let with = |n: usize| [&order[..n], &[session]].concat();
        let (mut low, mut high) = (0, order.len());
        while low < high {
            let middle = (low + high) / 2;
            if self.late(&with(middle)) <= least {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        let (stays, ends) = (self.late(&order[..low]), self.late(&with(low)));
        stays > least && stays - ends >= MARGIN
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
        // Cheap first: the run itself shows most moments to be calm.
        let first_ns = moment.now_ns + CANCEL_NS;
        let mut looks = (first_ns..=first_ns + LONGEST_RECOVERY_NS).step_by(LOOK_NS as usize / 2);
        if looks.all(|from_ns| host.late_share(from_ns, from_ns + LOOK_NS) <= LATE) {
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
    Truth { kind, late: host.late_since(CALM_NS), overload_ns: overload_ns(&host, CALM_NS) }
}

/// Time since `from_ns` in which over a tenth of the arrivals were late.
pub fn overload_ns(host: &Host, from_ns: u64) -> u64 {
    let buckets = from_ns / (2 * BUCKET_NS)..host.now_ns / (2 * BUCKET_NS);
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

pub fn verdict(s: &Scenario, ablation: Ablation) -> Result<Verdict, String> {
    let mut host = Host::new(s.spec.clone());
    let mut picks: Vec<Judged> = Vec::new();
    let mut picked: Vec<Task> = Vec::new();
    // Long tasks alive at each moment, and the host where it looks overloaded.
    let mut moments: Vec<(Vec<Task>, Option<Moment>)> = Vec::new();
    let mut next_ns = CALM_NS;
    let acts = run(&mut host, s.end_ns, &s.terms, ablation, |host, cancels| {
        if host.now_ns >= next_ns {
            next_ns += MOMENT_NS;
            let recent = host.late_share(host.now_ns - RECENT_NS, host.now_ns);
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
    Ok(Verdict { said, picks, missed, late, overload_ns: overload_ns(&host, CALM_NS), lost_ns: host.lost_ns, acts })
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
    use crate::drive::{Commits, Progress, Terms};
    use crate::host::{Act, ClassSpec, LongTask, Mode, Shape, Spec};
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
            again: false,
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
            log_stalls: Vec::new(),
            timeout_ns: 0,
            long: acts.iter().map(long).collect(),
        };
        let terms = Terms {
            config: Config::default(),
            progress: Progress::Exact,
            edges: false,
            commits: Commits::Wait,
            seed: 5,
        };
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
    fn the_library_cancels_the_holder() {
        let s = with(&[HOLDER, Act::Harmless]);
        assert_eq!(truth(&s).kind, Kind::Resource);
        let library = verdict(&s, Ablation::Nothing).unwrap();
        let picked: Vec<(usize, bool)> = library.picks.iter().map(|p| (p.session, p.right)).collect();
        assert_eq!((picked, library.missed), (vec![(60, true)], vec![]));
        assert!(library.picks[0].after_ns.unwrap() < 500 * MS);
    }

    #[test]
    fn a_cancelled_task_runs_again_when_few_requests_come_and_not_before() {
        let mut s = with(&[HOLDER]);
        s.end_ns = 25 * SECOND;
        let spec = Arc::make_mut(&mut s.spec);
        spec.long[0].again = true;
        let ran = |s: &Scenario| {
            let mut host = Host::new(s.spec.clone());
            let acts = run(&mut host, s.end_ns, &s.terms, Ablation::Nothing, |_, _| {}).unwrap();
            (acts.cancels.len(), acts.asked, acts.waited_ns, host.made_good())
        };
        assert_eq!(ran(&s), (1, 1, vec![], 0), "as many requests as before");
        Arc::make_mut(&mut s.spec).shapes.push(Shape::Surge { from_ns: 12 * SECOND, to_ns: u64::MAX, factor: 0.2 });
        let (cancels, asked, waited_ns, made_good) = ran(&s);
        assert_eq!((cancels, asked, waited_ns.len(), made_good), (1, 1, 1, 1));
        assert!(
            (4 * SECOND..7 * SECOND).contains(&waited_ns[0]),
            "cancelled after 7 s, evening from 12 s on: {waited_ns:?}"
        );
    }

    #[test]
    fn a_culprit_that_nobody_picks_is_missed() {
        // Not all time is lost while somebody goes on.
        let mut s = with(&[HOLDER, Act::Harmless]);
        s.terms.config.min_relief = 1.0;
        s.end_ns = 14 * SECOND;
        let v = verdict(&s, Ablation::Nothing).unwrap();
        assert_eq!((v.picks.len(), v.missed), (0, vec![60]));
    }
}
