//! Properties of the stages that remember: histogram, baseline, detector, budget; and, on a region, the collector's
//! windows and the following of a cancel. Each is driven by random steps and compared with what can be said without it.

use super::{MS, S};
use crate::control::baseline::Baseline;
use crate::control::budget::{Budget, BudgetParams};
use crate::control::detector::{Detector, Objective, State};
use crate::control::histogram::{bucket_of, lower_bound_ns, Histogram};
use crate::control::window::{ClassWindow, Window};
use proptest::prelude::*;

fn latency() -> impl Strategy<Value = u64> {
    prop_oneof![8 => 0..200 * MS, 2 => 0..5000u64, 1 => any::<u64>()]
}

fn histogram(latencies: &[u64]) -> Histogram {
    let mut h = Histogram::default();
    latencies.iter().for_each(|&ns| h.record(ns));
    h
}

fn class(class: u16, latencies: &[u64], in_flight_age_ns: Vec<u64>) -> ClassWindow {
    ClassWindow { class, latency: histogram(latencies), in_flight_age_ns }
}

proptest! {
    #[test]
    fn a_quantile_is_in_the_bucket_of_the_sample_of_that_rank(
        mut all in prop::collection::vec(latency(), 1..300), q in 0.0..=1.0f64, half in 0..300usize,
    ) {
        let h = histogram(&all);
        let got = h.quantile(q).unwrap();
        // Merging is recording all.
        let (a, b) = all.split_at(half.min(all.len()));
        let mut merged = histogram(a);
        merged.merge(&histogram(b));
        prop_assert_eq!(&merged, &h);
        all.sort_unstable();
        let rank = ((q * all.len() as f64).ceil() as usize).clamp(1, all.len());
        let bucket = bucket_of(all[rank - 1]);
        let (low, high) = (lower_bound_ns(bucket), lower_bound_ns(bucket + 1));
        prop_assert!((low..=high).contains(&got), "{} is not in {}..={}", got, low, high);
        prop_assert!(h.quantile((q + 0.1).min(1.0)).unwrap() >= got, "a higher quantile is no lower");
    }

    #[test]
    fn a_baseline_lies_within_what_it_has_learnt_and_relearns_slowly(
        learnt in prop::collection::vec((0..60usize, MS..100 * MS), 1..80),
        relearnt in prop::collection::vec((0..60usize, latency()), 0..80),
        tolerance in prop_oneof![0.0..3.0f64, Just(-1.0), Just(f64::NAN)],
    ) {
        let mut b = Baseline::default();
        // A window of so many requests that took about as long, the slowest twice.
        let window = |&(n, ns): &(usize, u64)| {
            let mut all = vec![ns; n];
            all.truncate(n.saturating_sub(1));
            all.extend((n > 0).then(|| ns.saturating_mul(2)));
            class(0, &all, vec![])
        };
        learnt.iter().for_each(|w| b.learn(&window(w), 100 * MS));
        let all = || learnt.iter().filter(|w| w.0 > 0).flat_map(|w| [w.1, w.1 * 2]);
        if let (Some(p99), Some(lowest), Some(highest)) = (b.p99_ns(), all().min(), all().max()) {
            prop_assert!(p99 >= lower_bound_ns(bucket_of(lowest)) && p99 <= lower_bound_ns(bucket_of(highest) + 1));
            let objective = b.objective_ns(tolerance).unwrap();
            prop_assert!(objective >= MS && objective >= p99);
        }
        let throughput = b.throughput_per_s();
        prop_assert!(throughput.map_or(true, |t| (0.0..=600.0).contains(&t)), "{:?}", throughput);
        let mut known = b.p99_ns().unwrap_or(0);
        for w in &relearnt {
            b.relearn(&window(w), 100 * MS);
            let now = b.p99_ns().unwrap_or(0);
            prop_assert!(now <= (known as f64 * 1.1) as u64 + 1, "{} after {}", now, known);
            known = known.max(now);
        }
        // Who inherits it knows as much.
        if let Some(handed_on) = b.learnt() {
            prop_assert_eq!(Baseline::inherited(handed_on).learnt(), Some(handed_on));
        }
    }

    /// Never more than the burst at once; over any time no more than burst + rate x time, and burst + share x completions.
    #[test]
    fn no_history_overspends_the_budget(
        params in (0.0..50.0f64, 0..8u32, 0.0..=1.0f64),
        steps in prop::collection::vec((0..3 * S, 0..200u64, 0..6usize), 0..100),
    ) {
        let (rate_per_s, burst, share) = params;
        let mut b = Budget::new(BudgetParams { rate_per_s, burst, share });
        let (mut now_ns, mut completions, mut granted) = (S, 0, 0);
        b.refill(now_ns, 0);
        for (passed_ns, done, wanted) in steps {
            now_ns += passed_ns;
            completions += done;
            b.refill(now_ns, done);
            let left = b.left();
            prop_assert!(left <= burst as usize);
            let got = b.take(wanted);
            prop_assert_eq!((got, b.left()), (wanted.min(left), left - got));
            granted += got;
            let by_time = burst as f64 + rate_per_s * (now_ns - S) as f64 / 1e9;
            let by_share = burst as f64 + share * completions as f64;
            prop_assert!(granted as f64 <= by_time.min(by_share) + 1e-6, "{} of {} and {}", granted, by_time, by_share);
        }
    }
}

/// One class's share of a step: completions of one latency, and ages in flight.
type Load = (usize, u64, Vec<u64>);

fn load() -> impl Strategy<Value = Load> {
    (0..80usize, 1..60u64, prop::collection::vec(0..80u64, 0..6))
}

fn objective() -> impl Strategy<Value = Objective> {
    (prop::option::of(1..50u64), 0.0..1.0f64, 0..5u32).prop_map(|(slo_ms, tolerance, trigger_windows)| Objective {
        slo_ns: slo_ms.map(|ms| ms * MS),
        tolerance,
        trigger_windows,
    })
}

fn windows(steps: &[(u64, Load, Load)]) -> Vec<Window> {
    let mut now_ns = S;
    let window = |(apart_ms, a, b): &(u64, Load, Load)| {
        now_ns += apart_ms * MS;
        let classes = [(0, a), (3, b)].map(|(number, (completions, latency_ms, ages_ms))| {
            class(number, &vec![latency_ms * MS; *completions], ages_ms.iter().map(|ms| ms * MS).collect())
        });
        Window { now_ns, length_ns: 100 * MS, classes: classes.into(), ..Window::default() }
    };
    steps.iter().map(window).collect()
}

proptest! {
    #[test]
    fn the_detector_changes_its_mind_only_after_as_many_steps_as_it_shall(
        steps in prop::collection::vec((1..120u64, load(), load()), 1..150), objective in objective(),
    ) {
        let (mut d, mut again) = (Detector::new(), Detector::new());
        let trigger = objective.trigger_windows.max(1);
        let (mut breached, mut calm, mut before) = (0, 0, State::Learning);
        let mut overload_since_ns = 0;
        for w in windows(&steps) {
            let known: Vec<_> = d.learnt().collect();
            let s = d.step(&w, &objective);
            prop_assert_eq!(again.step(&w, &objective), s, "the same windows give the same signals");
            breached = if s.breached { breached + 1 } else { 0 };
            // At least as many as the detector counts: a step over the objective is none of its calm ones, breach or not.
            calm = if s.breached { 0 } else { calm + 1 };
            match (before, s.state) {
                (State::Overload, State::Overload) => {}
                (_, State::Overload) => {
                    prop_assert!(breached >= trigger, "{} breaches", breached);
                    overload_since_ns = s.since_ns;
                }
                (State::Overload, _) => prop_assert!(calm >= trigger, "{} calm steps", calm),
                _ => {}
            }
            let rest = matches!(s.state, State::Learning | State::Normal);
            prop_assert_eq!(s.since_ns == 0, rest);
            prop_assert_eq!(s.watch, s.breached || !rest);
            prop_assert!(s.since_ns <= w.now_ns && s.throughput_per_s.is_finite() && s.baseline_throughput_per_s.is_finite());
            if s.state == State::Overload && before == State::Overload && w.now_ns - overload_since_ns < 30 * S {
                prop_assert_eq!(d.learnt().collect::<Vec<_>>(), known, "an overload is not learnt");
            }
            before = s.state;
        }
    }

    #[test]
    fn nobody_late_is_no_breach(steps in prop::collection::vec((1..120u64, load(), load()), 1..100), trigger in 0..5u32) {
        // Everything takes less than 60 or 80 ms; the histogram may say 9% more.
        let objective = Objective { slo_ns: Some(90 * MS), trigger_windows: trigger, ..Objective::default() };
        let mut d = Detector::new();
        for w in windows(&steps) {
            let s = d.step(&w, &objective);
            prop_assert!(!s.breached && !s.watch && s.state == State::Normal, "{:?}", s);
        }
    }

    /// A full stall under an absolute objective: nothing completes, all are late (one or two say nothing where others come
    /// seldom). However it came, it is an overload after `trigger` steps.
    #[test]
    fn a_stall_is_seen_in_time(
        before in prop::collection::vec((1..120u64, load(), load()), 0..60), late in 3..6usize, objective in objective(),
    ) {
        prop_assume!(objective.slo_ns.is_some());
        let mut d = Detector::new();
        let mut now_ns = S;
        for w in windows(&before) {
            now_ns = w.now_ns;
            d.step(&w, &objective);
        }
        let mut last = State::Learning;
        for i in 1..=objective.trigger_windows.max(1) as u64 {
            // In all classes: of one that little is known of nobody can say that it is slow.
            let classes = [0, 3].map(|number| class(number, &[], vec![100 * MS + i * 25 * MS; late])).into();
            let w = Window { now_ns: now_ns + i * 25 * MS, length_ns: 100 * MS, classes, ..Window::default() };
            last = d.step(&w, &objective).state;
        }
        prop_assert_eq!(last, State::Overload);
    }
}

/// What needs a region.
#[cfg(not(loom))]
mod on_a_region {
    use super::*;
    use crate::cancel::mailbox::Request;
    use crate::config::Mode;
    use crate::control::collect::Collector;
    use crate::control::verify::{Pending, Verdict};
    use crate::control::window::ResourceKind;
    use crate::primitive::Ordering::Relaxed;
    use crate::region::layout::FLAG_UNCANCELLABLE;
    use crate::region::lease::{Leader, Role};
    use crate::region::owner::ProcessId;
    use crate::region::Region;
    use crate::report::decision::{Decision, Outcome};

    const TASKS: usize = 3;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Wait(usize, u32, u64),
        Acquire(usize, u32, u64),
        Release(usize, u32, u64),
        Abandon(usize, u32),
        Look,
    }

    fn step() -> impl Strategy<Value = Step> {
        let who = || (0..TASKS, 1..3u32, 0..3u64);
        prop_oneof![
            3 => who().prop_map(|(t, r, i)| Step::Wait(t, r, i)),
            4 => who().prop_map(|(t, r, i)| Step::Acquire(t, r, i)),
            4 => who().prop_map(|(t, r, i)| Step::Release(t, r, i)),
            1 => who().prop_map(|(t, r, _)| Step::Abandon(t, r)),
            3 => Just(Step::Look),
        ]
    }

    /// Intervals of one resource, kept the simple way.
    #[derive(Default)]
    struct Kept {
        /// (from, to) of those over, and from of those that run, by task (and instance).
        waits: Vec<(u64, u64)>,
        waiting: std::collections::BTreeMap<usize, u64>,
        holds: Vec<(u64, u64)>,
        holding: std::collections::BTreeMap<(usize, u64), u64>,
    }

    fn overlap(from: u64, to: u64, all: impl Iterator<Item = (u64, u64)>) -> u64 {
        all.map(|(a, b)| b.min(to).saturating_sub(a.max(from))).sum()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

        /// A window's times are exactly what of each wait and hold lies inside it.
        #[test]
        fn a_window_holds_what_lies_inside_it(steps in prop::collection::vec((0..40u64, step()), 1..120)) {
            let r = Region::anonymous(16, 16).unwrap();
            for name in ["a", "b"] {
                r.header().register(name, ResourceKind::Lock).unwrap();
            }
            let me = ProcessId::current();
            let tasks: Vec<u64> = (0..TASKS as u64).map(|key| r.begin_task(me, key, 0).unwrap()).collect();
            let mut kept: [Kept; 3] = Default::default();
            let mut now_ns = r.now_ns();
            let mut c = Collector::default();
            c.window(&r, now_ns, 100 * MS, true);
            for (apart_ms, step) in steps {
                now_ns += apart_ms * MS;
                let trace = |task: usize| &r.task(tasks[task]).unwrap().trace;
                let end_wait = |kept: &mut [Kept; 3], task: usize, only: Option<u32>| {
                    for (number, k) in kept.iter_mut().enumerate() {
                        if only.map_or(true, |r| r as usize == number) {
                            k.waits.extend(k.waiting.remove(&task).map(|from| (from, now_ns)));
                        }
                    }
                };
                match step {
                    Step::Wait(task, r, i) => {
                        trace(task).wait_begin(now_ns, r, i);
                        end_wait(&mut kept, task, None);
                        kept[r as usize].waiting.insert(task, now_ns);
                    }
                    Step::Acquire(task, r, i) => {
                        trace(task).acquire(now_ns, 0, r, i, 1);
                        end_wait(&mut kept, task, Some(r));
                        kept[r as usize].holding.entry((task, i)).or_insert(now_ns);
                    }
                    Step::Release(task, r, i) => {
                        // All of it: how often it was acquired is the trace's own test.
                        trace(task).release(now_ns, r, i, u64::MAX);
                        let k = &mut kept[r as usize];
                        k.holds.extend(k.holding.remove(&(task, i)).map(|from| (from, now_ns)));
                    }
                    Step::Abandon(task, r) => {
                        trace(task).wait_abandoned(now_ns, r);
                        end_wait(&mut kept, task, Some(r));
                    }
                    Step::Look => {
                        let w = c.window(&r, now_ns, 100 * MS, true);
                        let from = now_ns - w.length_ns;
                        for resource in &w.resources {
                            let k = &kept[resource.id as usize];
                            let waits = k.waits.iter().copied().chain(k.waiting.values().map(|&from| (from, now_ns)));
                            let holds = k.holds.iter().copied().chain(k.holding.values().map(|&from| (from, now_ns)));
                            prop_assert_eq!(resource.wait_ns, overlap(from, now_ns, waits), "waits for {}", resource.name);
                            prop_assert_eq!(resource.hold_ns, overlap(from, now_ns, holds), "holds of {}", resource.name);
                        }
                        for (task, view) in tasks.iter().zip(&w.tasks) {
                            prop_assert_eq!(view.id, *task);
                            let held: usize = kept.iter().map(|k| {
                                k.holding.keys().filter(|(t, _)| tasks[*t] == *task).count()
                            }).sum();
                            prop_assert_eq!(view.holdings.len(), held);
                        }
                    }
                }
            }
        }
    }

    #[derive(Clone, Copy, Debug)]
    enum Event {
        /// The owner says it acts on it.
        Acknowledge,
        /// The owner goes on to its next scope, or ends the task.
        NextScope,
        End,
        /// Cancelling becomes impossible, or possible again.
        Block(bool),
        Nothing,
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            1 => Just(Event::Acknowledge), 1 => Just(Event::NextScope), 1 => Just(Event::End),
            2 => any::<bool>().prop_map(Event::Block), 20 => Just(Event::Nothing),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

        /// Whatever the owner does: only the scope that was decided on is ever asked, never again after it has
        /// acknowledged, the ladder has two rungs, and what has ended is followed to its end.
        #[test]
        fn a_cancel_is_followed_without_hitting_anybody_else(
            steps in prop::collection::vec((1..60u64, event()), 1..80), verify_ms in 1..300u64, has_agent: bool,
        ) {
            let r = Region::anonymous(16, 16).unwrap();
            let (me, owner) = (ProcessId::current(), ProcessId { pid: 1, start_ticks: 0 });
            if has_agent {
                r.register_agent(owner).unwrap();
            }
            let (lease, mut leader) = (&r.header().lease, Leader { me, term: 0 });
            prop_assert_eq!(lease.contend(me, &mut leader.term, r.now_ns()), Role::NewLeader);
            let task = r.begin_task(owner, 7, 0).unwrap();
            let slot = r.task(task).unwrap();
            r.header().clock.coarse_ns.store(0, Relaxed);
            r.begin_request(slot, 0);
            slot.trace.acquire(1, 0, 1, 1, 1);
            let scope = slot.scope.load(Relaxed);
            let mut now_ns = r.now_ns();
            let request = Request { scope, decision_id: 1, rung: 1, resource: 1, ..Request::default() };
            slot.mailbox.post(&request, leader.term);
            let mut p = Pending::new(decision(task, scope), request, now_ns, 1);
            let mut acknowledged = false;
            for (apart_ms, event) in steps {
                now_ns += apart_ms * MS;
                let live = r.task(task).is_some();
                match event {
                    Event::Acknowledge if live => {
                        slot.acknowledged_scope.store(scope, Relaxed);
                        acknowledged |= slot.scope.load(Relaxed) == scope;
                    }
                    Event::NextScope if live => r.begin_request(slot, 0),
                    Event::End if live => {
                        r.end_task(owner, task, false);
                    }
                    Event::Block(on) if live => slot.set_flag(FLAG_UNCANCELLABLE, on),
                    _ => {}
                }
                let over = r.task(task).is_none() || slot.scope.load(Relaxed) != scope;
                let (sends, rung) = (p.decision.sends, p.decision.rung);
                let blocked = slot.flags.load(Relaxed) & FLAG_UNCANCELLABLE != 0;
                let verdict = p.step(&r, leader, now_ns, verify_ms * MS, 100 * MS, None);
                let asked = p.decision.sends - sends;
                prop_assert!(asked == 0 || !(over || acknowledged), "asked again: {:?}", p.decision.outcome);
                prop_assert!(asked == 0 || !blocked, "asked what cannot be cancelled");
                prop_assert!(asked <= 1 && (rung..=2).contains(&p.decision.rung) && (has_agent || p.decision.rung == 1));
                let posted = slot.mailbox.scope.load(Relaxed);
                prop_assert!(posted == 0 || posted == scope, "a scope that was never decided on: {}", posted);
                // Nobody asks a slot whose task has ended.
                prop_assert!(!over || r.task(task).is_none() || !slot.cancel_requested(lease));
                prop_assert_eq!(!over, p.decision.ended_ms.is_none());
                match verdict {
                    Verdict::Done => {
                        prop_assert!(over && p.decision.outcome == Outcome::Ended);
                        return Ok(());
                    }
                    Verdict::Changed => prop_assert!(p.decision.outcome != Outcome::Requested),
                    Verdict::Wait => {}
                }
            }
        }
    }

    fn decision(task: u64, scope: u64) -> Decision {
        Decision {
            id: 1,
            mode: Mode::Enforce,
            state: "overload",
            task,
            scope,
            key: 7,
            owner_pid: 1,
            resource: 1,
            rung: 1,
            sends: 1,
            ..Decision::default()
        }
    }
}
