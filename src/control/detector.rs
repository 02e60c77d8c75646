//! `Window -> Signal`: is the server overloaded?
//!
//! Suspected: the p99 is over the objective for `trigger_windows` steps in a row while the throughput does not grow
//! with it (Breakwater's method). A request that is still in flight and already older than the objective counts as
//! a latency: a full stall completes nothing, and only its ages show it.

use std::collections::BTreeMap;

use super::baseline::{Baseline, Learnt};
use super::window::{ClassWindow, Window};

/// Throughput within this factor of the reference has not grown.
const GROWTH: f64 = 1.05;
/// Throughput below this factor of the reference has fallen.
const FALL: f64 = 0.90;
/// A regular overload is taken for the new normal after this long, ns: see [`Baseline::relearn`].
const RELEARN_AFTER_NS: u64 = 30_000_000_000;
/// Weight of a step in the estimate of how far the throughput recently reached.
const RECENT: f64 = 0.25;
/// So many requests at least must be late: of the few that a thin window holds the slowest alone is its p99.
const LEAST_LATE: f64 = 3.0;
/// A request in flight counts in full for so long; an older one only for the part that this is of its age, ns. It became
/// late once, but is seen in every window: a few reports that run for minutes would else be late for minutes.
const FRESH_NS: f64 = 1e9;
/// Nothing completed is a stall if, since the oldest in flight began, so many should have by what is usual.
const MISSING: f64 = 3.0;

/// What the server shall keep.
#[derive(Clone, Debug, PartialEq)]
pub struct Objective {
    /// Absolute objective for the p99 of every class, ns; None = relative to the class's learned baseline.
    pub slo_ns: Option<u64>,
    /// How far over the baseline p99 the relative objective lies (0.20 = 20%).
    pub tolerance: f64,
    /// Steps in a row that make an overload, and that end it; 0 counts as 1.
    pub trigger_windows: u32,
}

impl Default for Objective {
    fn default() -> Self {
        Objective { slo_ns: None, tolerance: 0.20, trigger_windows: 3 }
    }
}

/// Where the detector stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// No absolute objective, and no class's baseline is known yet.
    Learning,
    Normal,
    /// Over the objective, not long enough yet.
    Suspected {
        since_ns: u64,
        windows: u32,
    },
    Overload,
}

/// What one step found. p99, objective and baseline p99 are those of `worst_class`, the class farthest over (or
/// nearest to) its objective; throughput and in-flight numbers are sums over the classes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Signal {
    pub state: State,
    /// Tasks should be collected and events timed precisely: true from the first breach on.
    pub watch: bool,
    /// This window is over the objective while throughput does not grow.
    pub breached: bool,
    /// Time of the first breach of the present suspicion or overload, ns; 0 = none.
    pub since_ns: u64,
    pub worst_class: u16,
    /// 0 without samples.
    pub p99_ns: u64,
    /// 0 while unknown.
    pub slo_ns: u64,
    pub throughput_per_s: f64,
    /// 0 while unknown.
    pub baseline_p99_ns: u64,
    /// 0 while unknown.
    pub baseline_throughput_per_s: f64,
    pub in_flight: u64,
    pub oldest_in_flight_ns: u64,
    /// Who is older is late: the smallest objective of the classes over theirs, ns; 0 = none is.
    pub late_ns: u64,
    /// Part of the requests that are late, of the class over its objective of which most are (0..=1).
    pub late_share: f64,
}

#[derive(Clone, Debug, Default)]
struct ClassState {
    baseline: Baseline,
    /// Smoothed throughput of the steps before the breach.
    recent_per_s: Option<f64>,
    /// Highest throughput since the breach began: only more than that is growth.
    reached_per_s: f64,
    over: bool,
    seen: bool,
}

/// Remembers between steps; otherwise pure: the same windows give the same signals.
#[derive(Clone, Debug)]
pub struct Detector {
    state: State,
    since_ns: u64,
    /// Steps in a row under the objective while overloaded.
    calm: u32,
    classes: BTreeMap<u16, ClassState>,
    /// End of the last window that was learnt from.
    learnt_until_ns: u64,
}

impl Default for Detector {
    fn default() -> Self {
        Detector::new()
    }
}

/// One class in one window.
struct Look {
    class: u16,
    p99_ns: u64,
    objective_ns: Option<u64>,
    throughput_per_s: f64,
    late_share: f64,
    over: bool,
    breached: bool,
}

impl Detector {
    pub fn new() -> Self {
        Detector { state: State::Learning, since_ns: 0, calm: 0, classes: BTreeMap::new(), learnt_until_ns: 0 }
    }

    /// Begins with what a predecessor has learnt of a class.
    pub fn inherit(&mut self, class: u16, learnt: Learnt) {
        self.classes.entry(class).or_default().baseline = Baseline::inherited(learnt);
    }

    /// What is known per class, for a successor.
    pub fn learnt(&self) -> impl Iterator<Item = (u16, Learnt)> + '_ {
        self.classes.iter().filter_map(|(&class, c)| Some((class, c.baseline.learnt()?)))
    }

    /// A class's baseline, once the class has been seen.
    pub fn baseline(&self, class: u16) -> Option<&Baseline> {
        self.classes.get(&class).map(|c| &c.baseline)
    }

    /// Typical duration per class, ns, where known: the estimator's stand-in for missing progress.
    pub fn class_durations_ns(&self) -> BTreeMap<u16, u64> {
        let known = self.classes.iter().filter(|c| c.1.baseline.is_known());
        known.filter_map(|(&class, c)| Some((class, c.baseline.duration_ns()?))).collect()
    }

    /// One step; windows come in the order of time and may overlap.
    pub fn step(&mut self, window: &Window, objective: &Objective) -> Signal {
        let any_known = self.classes.values().any(|c| c.baseline.is_known());
        let look = |c: &ClassWindow| self.look(c, window.length_ns, objective, any_known);
        let looks: Vec<Look> = window.classes.iter().map(look).collect();
        let over = looks.iter().any(|l| l.over);
        let breached = looks.iter().any(|l| l.breached);
        let trigger = objective.trigger_windows.max(1);
        self.advance(over, breached, trigger, window.now_ns, looks.iter().any(|l| l.objective_ns.is_some()), objective);
        self.remember(window, &looks, over);
        self.signal(window, &looks, breached)
    }

    fn look(&mut self, class: &ClassWindow, length_ns: u64, objective: &Objective, any_known: bool) -> Look {
        let state = self.classes.entry(class.class).or_default();
        let throughput_per_s = match length_ns {
            0 => 0.0,
            ns => class.latency.total() as f64 * 1e9 / ns as f64,
        };
        let baseline = state.baseline.throughput_per_s();
        let before = baseline.unwrap_or(0.0).max(state.recent_per_s.unwrap_or(0.0));
        let reference = if state.over { before.max(state.reached_per_s) } else { before };
        let objective_ns = objective.slo_ns.or_else(|| state.baseline.objective_ns(objective.tolerance));
        let (p99_ns, enough, late_share) = p99_with_in_flight(class, objective_ns, throughput_per_s, reference);
        // Of a class that little is known of (reports, of which a few run now and then) nobody can say that it is slow.
        let judged = state.baseline.is_known() || !any_known;
        let over = judged && enough && objective_ns.is_some_and(|slo| p99_ns > slo);
        // Without any reference (the first windows with an absolute objective) nothing shows growth.
        let grows = reference > 0.0 && throughput_per_s > GROWTH * reference;
        let breached = over && !grows;
        Look { class: class.class, p99_ns, objective_ns, throughput_per_s, late_share, over, breached }
    }

    fn advance(&mut self, over: bool, breached: bool, trigger: u32, now_ns: u64, has_objective: bool, o: &Objective) {
        match self.state {
            State::Overload => {
                self.calm = if over { 0 } else { self.calm.saturating_add(1) };
                if self.calm >= trigger {
                    self.state = State::Normal;
                }
            }
            _ if breached => {
                let windows = match self.state {
                    State::Suspected { windows, .. } => windows.saturating_add(1),
                    _ => {
                        self.since_ns = now_ns;
                        1
                    }
                };
                self.state = if windows >= trigger {
                    self.calm = 0;
                    State::Overload
                } else {
                    State::Suspected { since_ns: self.since_ns, windows }
                };
            }
            State::Suspected { .. } => self.state = State::Normal,
            State::Learning if has_objective || o.slo_ns.is_some() => self.state = State::Normal,
            State::Normal if o.slo_ns.is_none() && !self.classes.values().any(|c| c.baseline.is_known()) => {
                self.state = State::Learning; // the absolute objective was taken away
            }
            State::Learning | State::Normal => {}
        }
        if matches!(self.state, State::Learning | State::Normal) {
            self.since_ns = 0;
        }
    }

    /// Learns what may be learnt and keeps the throughput before and during a breach.
    fn remember(&mut self, window: &Window, looks: &[Look], over: bool) {
        let normal = matches!(self.state, State::Learning | State::Normal) && !over;
        let lasting = self.state == State::Overload && window.now_ns.saturating_sub(self.since_ns) >= RELEARN_AFTER_NS;
        let apart =
            self.learnt_until_ns == 0 || window.now_ns.saturating_sub(self.learnt_until_ns) >= window.length_ns.max(1);
        self.classes.values_mut().for_each(|c| c.seen = false);
        for (class, look) in window.classes.iter().zip(looks) {
            let state = self.classes.entry(class.class).or_default();
            state.seen = true;
            if look.over {
                state.reached_per_s =
                    if state.over { state.reached_per_s.max(look.throughput_per_s) } else { look.throughput_per_s };
            } else {
                let old = state.recent_per_s.unwrap_or(look.throughput_per_s);
                state.recent_per_s = Some(old + RECENT * (look.throughput_per_s - old));
            }
            state.over = look.over;
            let keeps_up = state.baseline.throughput_per_s().is_some_and(|known| look.throughput_per_s >= FALL * known);
            if apart && normal {
                state.baseline.learn(class, window.length_ns);
            } else if apart && lasting && keeps_up {
                state.baseline.relearn(class, window.length_ns);
            }
        }
        for state in self.classes.values_mut().filter(|c| !c.seen) {
            state.over = false; // a class without a request in the window cannot be late
        }
        if apart && (normal || lasting) {
            self.learnt_until_ns = window.now_ns;
        }
    }

    fn signal(&self, window: &Window, looks: &[Look], breached: bool) -> Signal {
        let ratio = |l: &&Look| l.objective_ns.map_or(0.0, |slo| l.p99_ns as f64 / slo.max(1) as f64);
        let worst = looks
            .iter()
            .max_by(|a, b| a.breached.cmp(&b.breached).then(ratio(a).total_cmp(&ratio(b))).then(b.class.cmp(&a.class)));
        let worst_class = worst.map_or(0, |l| l.class);
        let ages = || window.classes.iter().flat_map(|c| c.in_flight_age_ns.iter().copied());
        Signal {
            state: self.state,
            watch: breached || matches!(self.state, State::Suspected { .. } | State::Overload),
            breached,
            since_ns: self.since_ns,
            worst_class,
            p99_ns: worst.map_or(0, |l| l.p99_ns),
            slo_ns: worst.and_then(|l| l.objective_ns).unwrap_or(0),
            throughput_per_s: looks.iter().map(|l| l.throughput_per_s).sum(),
            baseline_p99_ns: self.baseline(worst_class).and_then(Baseline::p99_ns).unwrap_or(0),
            baseline_throughput_per_s: self.classes.values().filter_map(|c| c.baseline.throughput_per_s()).sum(),
            in_flight: ages().count() as u64,
            oldest_in_flight_ns: ages().max().unwrap_or(0),
            late_share: looks.iter().filter(|l| l.over).map(|l| l.late_share).fold(0.0, f64::max),
            late_ns: looks.iter().filter(|l| l.over).filter_map(|l| l.objective_ns).min().unwrap_or(0),
        }
    }
}

/// p99 over completions and the requests in flight that are already late (a younger one says nothing yet); 0 for none.
/// Whether enough of them are late to say anything, and which part is.
///
/// The completions of a window that a stall has just entered belong to the time before it, and at a high rate they
/// would hide the stall until they have left the window. So once the throughput has fallen and more than half of the
/// requests in flight are late, or when nothing completed at all, the ages alone count.
fn p99_with_in_flight(
    class: &ClassWindow,
    objective_ns: Option<u64>,
    per_s: f64,
    reference_per_s: f64,
) -> (u64, bool, f64) {
    let ages = &class.in_flight_age_ns;
    let late = || ages.iter().copied().filter(|&age| objective_ns.is_some_and(|slo| age > slo));
    let weight: f64 = late().map(|age| (FRESH_NS / age as f64).min(1.0)).sum();
    let oldest_s = ages.iter().max().map_or(0.0, |&ns| ns as f64 / 1e9);
    let nothing = class.latency.total() == 0 && oldest_s * reference_per_s >= MISSING;
    let fallen = per_s < FALL * reference_per_s && late().count() * 2 > ages.len();
    // A server that stands still from its first requests on has no rate that anything could be missed by.
    let from_the_first = class.latency.total() == 0 && reference_per_s == 0.0;
    if nothing || fallen || from_the_first {
        // Exact, not by bucket: an age just over the objective must not read as just under it.
        let mut ages = ages.clone();
        let rank = (ages.len() as f64 * 0.99).ceil() as usize;
        let p99_ns = if rank > 0 { *ages.select_nth_unstable(rank - 1).1 } else { 0 };
        return (p99_ns, nothing || from_the_first || weight >= LEAST_LATE, 1.0);
    }
    let late_done = objective_ns.map_or(0, |slo| class.latency.over(slo));
    let mut all = class.latency.clone();
    if class.latency.total() > 0 {
        late().for_each(|age| all.record(age));
    }
    let late = late_done as f64 + weight;
    let share = late / (class.latency.total() as f64 + weight).max(1.0);
    (all.quantile(0.99).unwrap_or(0), late >= LEAST_LATE, share)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const STEP: u64 = 25 * MS;

    /// A server of 16 workers whose requests are known one by one; windows of 100 ms slide by 25 ms.
    struct Server {
        detector: Detector,
        objective: Objective,
        now_ns: u64,
        done: Vec<(u64, u64)>, // (end, latency)
        in_flight: Vec<u64>,   // begin
    }

    impl Server {
        fn new(slo_ms: Option<u64>) -> Self {
            let objective = Objective { slo_ns: slo_ms.map(|ms| ms * MS), ..Objective::default() };
            Server { detector: Detector::new(), objective, now_ns: 1000 * MS, done: vec![], in_flight: vec![] }
        }

        /// One step in which `n` requests complete, each after `latency_ms(i)`.
        fn step(&mut self, n: u64, latency_ms: impl Fn(u64) -> u64) -> Signal {
            for i in 0..n {
                self.done.push((self.now_ns + STEP * (i + 1) / n, latency_ms(i) * MS));
            }
            self.now_ns += STEP;
            let mut class = ClassWindow::default();
            self.done.retain(|d| d.0 + 100 * MS > self.now_ns);
            self.done.iter().for_each(|d| class.latency.record(d.1));
            class.in_flight_age_ns = self.in_flight.iter().map(|b| self.now_ns - b).collect();
            let window = Window { now_ns: self.now_ns, length_ns: 100 * MS, classes: vec![class], ..Window::default() };
            self.detector.step(&window, &self.objective)
        }

        fn steps(&mut self, steps: usize, n: u64, latency_ms: impl Fn(u64) -> u64) -> Signal {
            (0..steps).map(|_| self.step(n, &latency_ms)).last().unwrap()
        }

        fn stall(&mut self, requests: usize) {
            self.in_flight = vec![self.now_ns; requests];
        }
    }

    #[test]
    fn a_full_stall_without_any_completion_is_detected() {
        let mut s = Server::new(Some(20));
        assert_eq!(s.steps(40, 36, |_| 5).state, State::Normal);
        s.stall(16);
        let first = s.step(0, |_| 0); // ages 25 ms, over the objective of 20
        assert!(first.breached && first.watch, "{first:?}");
        assert!(matches!(first.state, State::Suspected { windows: 1, .. }));
        s.step(0, |_| 0);
        let third = s.step(0, |_| 0);
        assert_eq!(third.state, State::Overload);
        assert_eq!((third.in_flight, third.oldest_in_flight_ns), (16, 75 * MS));
        assert_eq!(third.p99_ns, 75 * MS);
        assert_eq!(third.since_ns, first.since_ns);
    }

    #[test]
    fn a_server_that_stands_still_from_its_first_requests_on_is_overloaded() {
        let mut s = Server::new(Some(20));
        s.stall(2);
        assert_eq!(s.steps(5, 0, |_| 0).state, State::Overload);
    }

    #[test]
    fn a_stall_is_not_hidden_by_the_many_completions_just_before_it() {
        let mut s = Server::new(Some(20));
        s.steps(40, 2500, |_| 1); // 100,000 per second: 16 stalled ones are far below 1% of a window
        s.stall(16);
        assert!(s.step(0, |_| 0).breached);
        s.step(0, |_| 0);
        assert_eq!(s.step(0, |_| 0).state, State::Overload);
    }

    #[test]
    fn a_stall_is_found_against_the_learned_baseline() {
        let mut s = Server::new(None);
        assert_eq!(s.steps(20, 36, |i| 4 + i % 3).state, State::Learning);
        let normal = s.steps(80, 36, |i| 4 + i % 3);
        assert_eq!(normal.state, State::Normal);
        assert!((6 * MS..9 * MS).contains(&normal.slo_ns), "{normal:?}");
        assert!((1300.0..1450.0).contains(&normal.baseline_throughput_per_s), "{normal:?}");
        s.stall(16);
        assert_eq!(s.steps(3, 0, |_| 0).state, State::Overload);
    }

    #[test]
    fn a_successor_sees_a_stall_without_learning_anew() {
        let mut s = Server::new(None);
        s.steps(200, 36, |i| 4 + i % 3);
        let learnt: Vec<_> = s.detector.learnt().collect();
        assert_eq!(learnt.len(), 1);
        let mut next = Server::new(None);
        learnt.iter().for_each(|&(class, l)| next.detector.inherit(class, l));
        assert_eq!(next.step(36, |_| 5).state, State::Normal);
        next.stall(16);
        assert_eq!(next.steps(3, 0, |_| 0).state, State::Overload);
        assert_eq!(next.detector.learnt().collect::<Vec<_>>(), learnt, "nothing was learnt from it");
    }

    #[test]
    fn latency_that_grows_with_throughput_is_demand_not_overload() {
        let mut s = Server::new(Some(20));
        s.steps(80, 20, |_| 5);
        for load in 0..12 {
            let signal = s.step(30 + load * 6, |_| 30);
            assert!(!signal.breached, "at step {load}: {signal:?}");
        }
        // The load stops growing and the latency stays: now it is one.
        assert_eq!(s.steps(10, 30 + 11 * 6, |_| 30).state, State::Overload);
    }

    #[test]
    fn throughput_above_an_old_baseline_but_below_the_moment_before_is_no_growth() {
        let mut s = Server::new(Some(20));
        s.steps(80, 20, |_| 5);
        s.steps(8, 60, |_| 5); // the load has just tripled
        let first = s.step(40, |_| 50);
        assert!(first.breached && first.throughput_per_s > 2.0 * first.baseline_throughput_per_s, "{first:?}");
        assert_eq!(s.steps(2, 40, |_| 50).state, State::Overload);
    }

    #[test]
    fn leaves_only_after_as_many_calm_steps() {
        let mut s = Server::new(Some(20));
        s.steps(40, 36, |_| 5);
        s.stall(16);
        assert_eq!(s.steps(8, 0, |_| 0).state, State::Overload);
        s.in_flight.clear();
        assert_eq!(s.steps(2, 36, |_| 5).state, State::Overload);
        assert_eq!(s.step(36, |_| 5).state, State::Normal);
    }

    #[test]
    fn a_single_bad_step_is_only_suspected() {
        let mut s = Server::new(Some(20));
        s.steps(40, 36, |_| 5);
        s.stall(16);
        assert!(s.step(0, |_| 0).watch);
        s.in_flight.clear();
        let after = s.step(36, |_| 5);
        assert_eq!((after.state, after.watch, after.since_ns), (State::Normal, false, 0));
    }

    #[test]
    fn an_overload_is_not_learned_as_normal() {
        let mut s = Server::new(None);
        let before = s.steps(200, 36, |_| 5).baseline_p99_ns;
        let during = s.steps(400, 30, |_| 50); // ten seconds
        assert_eq!((during.state, during.baseline_p99_ns), (State::Overload, before));
    }

    #[test]
    fn a_regular_overload_of_minutes_is_relearned_when_throughput_holds() {
        let mut s = Server::new(None);
        s.steps(400, 36, |_| 10);
        assert_eq!(s.steps(1200, 36, |_| 14).state, State::Overload);
        assert_eq!(s.steps(4000, 36, |_| 14).state, State::Normal);
    }

    #[test]
    fn one_long_request_among_many_short_ones_is_no_breach() {
        let mut s = Server::new(Some(20));
        s.steps(40, 36, |_| 5);
        s.stall(1);
        for _ in 0..100 {
            assert!(!s.step(36, |_| 5).breached);
        }
    }

    #[test]
    fn of_a_thin_window_the_slowest_alone_is_no_breach() {
        let mut s = Server::new(Some(20));
        s.steps(80, 3, |_| 5);
        assert!(!s.step(3, |i| if i < 2 { 50 } else { 5 }).breached, "two of twelve");
        let third = s.step(3, |i| if i < 1 { 50 } else { 5 });
        assert!(third.breached && (0.2..0.3).contains(&third.late_share), "{third:?}");
        assert_eq!(third.late_ns, 20 * MS);
    }

    #[test]
    fn requests_that_take_long_are_late_for_a_second_and_not_as_long_as_they_run() {
        let mut s = Server::new(Some(20));
        s.steps(80, 20, |_| 5);
        s.stall(4); // of 80 in a window
        assert!(s.steps(20, 20, |_| 5).breached, "four are 500 ms old");
        assert!(!s.steps(60, 20, |_| 5).breached, "and four of 1600 are 2 s old");
    }

    #[test]
    fn of_a_class_that_little_is_known_of_nobody_is_late() {
        let mut d = Detector::new();
        let o = Objective { slo_ns: Some(20 * MS), ..Objective::default() };
        let mut step = |t: u64, reports: u64| {
            let mut classes = vec![ClassWindow::default(), ClassWindow { class: 1, ..Default::default() }];
            (0..100).for_each(|_| classes[0].latency.record(5 * MS));
            classes[1].in_flight_age_ns = vec![t * 100 * MS; reports as usize];
            (0..t % 2).for_each(|_| classes[1].latency.record(900 * MS));
            let window = Window { now_ns: t * 100 * MS, length_ns: 100 * MS, classes, ..Window::default() };
            d.step(&window, &o)
        };
        (1..20).for_each(|t| assert!(!step(t, 0).breached));
        (20..60).for_each(|t| assert!(!step(t, 5).breached, "at {t}"));
    }

    #[test]
    fn each_class_is_measured_against_its_own_baseline() {
        let mut d = Detector::new();
        let o = Objective::default();
        let window = |t: u64, fast_ms: u64, slow_ms: u64| {
            let mut classes =
                vec![ClassWindow { class: 1, ..Default::default() }, ClassWindow { class: 2, ..Default::default() }];
            (0..100).for_each(|_| classes[0].latency.record(fast_ms * MS));
            (0..100).for_each(|_| classes[1].latency.record(slow_ms * MS));
            Window { now_ns: t * 100 * MS, length_ns: 100 * MS, classes, ..Window::default() }
        };
        for t in 1..50 {
            assert!(!d.step(&window(t, 5, 100), &o).breached);
        }
        let signal = d.step(&window(50, 20, 100), &o);
        assert!(signal.breached, "20 ms is late for class 1 though class 2 takes longer: {signal:?}");
        assert_eq!(signal.worst_class, 1);
        assert_eq!(d.class_durations_ns().len(), 2);
    }

    #[test]
    fn nothing_breaks_on_extreme_windows() {
        let mut d = Detector::new();
        let class = ClassWindow { class: u16::MAX, in_flight_age_ns: vec![u64::MAX; 3], ..Default::default() };
        for (now_ns, length_ns) in [(0, 0), (u64::MAX, u64::MAX), (0, 1), (u64::MAX, 0)] {
            let w = Window { now_ns, length_ns, classes: vec![class.clone()], ..Window::default() };
            for slo_ns in [None, Some(0), Some(u64::MAX)] {
                let s = d.step(&w, &Objective { slo_ns, tolerance: f64::MAX, trigger_windows: 0 });
                assert!(s.throughput_per_s.is_finite() && s.baseline_throughput_per_s.is_finite());
            }
        }
    }
}
