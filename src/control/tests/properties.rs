use super::*;
use crate::control::estimator::{Candidate, Role, Use};
use crate::control::histogram::Histogram;
use crate::control::policy::{dominated, Late};
use crate::control::window::{ClassWindow, ResourceId, CPU};
use proptest::prelude::*;
use proptest::strategy::ValueTree;

const TASKS: u64 = 12;
const RESOURCES: u32 = 4;

fn time() -> impl Strategy<Value = u64> {
    prop_oneof![6 => 0..5000 * MS, 2 => 20 * MS..200 * MS, 1 => Just(0), 1 => Just(u64::MAX)]
}

fn amount() -> impl Strategy<Value = u64> {
    prop_oneof![8 => 0..1000u64, 1 => Just(u64::MAX)]
}

/// The numbers up to `RESOURCES` are registered, the one above stands for the CPU; 0 is nobody's.
fn id(n: u32) -> u32 {
    if n > RESOURCES {
        CPU
    } else {
        n
    }
}

prop_compose! {
    fn wait()(resource in (0..RESOURCES + 2).prop_map(id), instance in 0..3u64, waited_ns in time()) -> Wait {
        Wait { resource, instance, waited_ns }
    }
}

prop_compose! {
    fn holding()(resource in (0..RESOURCES + 2).prop_map(id), instance in 0..3u64, amount in amount(), held_ns in time()) -> Holding {
        Holding { resource, instance, amount, held_ns, waited_ns: 0 }
    }
}

prop_compose! {
    fn task()(
        flags in prop::array::uniform5(prop::bool::weighted(0.15)),
        priority in -2..3i32,
        times in (time(), time(), time(), time()),
        starved_ns in prop_oneof![4 => Just(0), 1 => time()],
        progress in prop::option::of((amount(), amount())),
        waits in prop::collection::vec(wait(), 0..3),
        holdings in prop::collection::vec(holding(), 0..4),
    ) -> TaskView {
        TaskView {
            protected: flags[0], cancellable: !flags[1], cancelled: flags[2], in_request: !flags[3], background: flags[4],
            priority, age_ns: times.0, idle_ns: times.1, work_ns: times.1, exec_ns: times.2, progress, waits, holdings, starved_ns,
            ..TaskView::default()
        }
    }
}

prop_compose! {
    fn edge()(w in 1..TASKS + 2, b in 0..TASKS + 2, queued: bool, resource in (0..RESOURCES + 2).prop_map(id), instance in 0..3u64) -> Edge {
        let kind = if queued { EdgeKind::Queued } else { EdgeKind::Holds };
        Edge { waiter: w, blocker: b, kind, resource, instance }
    }
}

prop_compose! {
    fn resource()(
        kind in 0..3, wait in time(), hold in time(), a in amount(), e in amount(), u in amount(), o in time(),
        servers in prop_oneof![Just(0), 1..9u64, Just(u64::MAX)],
    )
        -> ResourceWindow
    {
        let kind = [ResourceKind::Lock, ResourceKind::Memory, ResourceKind::Queue][kind as usize];
        let (untracked_waiting, untracked_oldest_wait_ns) = if u < 900 { (0, 0) } else { (u, o) };
        ResourceWindow {
            id: 0, kind, name: String::new(), wait_ns: wait, hold_ns: hold, usual_hold_ns: o % 50 * MS, acquired: a, evicted: e,
            turnover_ns: hold % 30 * MS, servers,
            untracked_waiting, untracked_oldest_wait_ns,
        }
    }
}

prop_compose! {
    fn any_window()(
        mut tasks in prop::collection::vec(task(), 0..TASKS as usize),
        mut resources in prop::collection::vec(resource(), RESOURCES as usize + 1),
        edges in prop_oneof![prop::collection::vec(edge(), 0..1), prop::collection::vec(edge(), 0..30)],
        length_ns in prop_oneof![9 => Just(100 * MS), 1 => Just(0), 1 => Just(u64::MAX)],
        exec_ns in time(),
    ) -> Window {
        (1..).zip(&mut tasks).for_each(|(id, t)| (t.id, t.scope) = (id, id + 100));
        (1..).zip(&mut resources).for_each(|(n, r)| r.id = id(n));
        resources[RESOURCES as usize].kind = ResourceKind::System;
        Window { now_ns: S, length_ns, exec_ns, resources, tasks, edges, ..Window::default() }
    }
}

prop_compose! {
    fn hog()(held_ms in prop::array::uniform4(prop_oneof![1 => Just(0), 2 => 300..5000u64]), priority in -1..2i32) -> TaskView {
        let used = (1..).zip(held_ms).filter(|&(_, ms)| ms > 0);
        let holdings = used.map(|(n, ms)| Holding { resource: id(n), instance: 0, amount: 1 + ms, held_ns: ms * MS, waited_ns: 0 });
        let age_ns = held_ms.into_iter().max().unwrap() * MS;
        TaskView { cancellable: true, in_request: true, priority, age_ns, holdings: holdings.collect(), ..TaskView::default() }
    }
}

prop_compose! {
    fn waiter()(resource in 1..=RESOURCES, instance in 1..5u64, waited_ms in 20..600u64) -> TaskView {
        let waits = vec![Wait { resource: id(resource), instance, waited_ns: waited_ms * MS }];
        TaskView { cancellable: true, in_request: true, age_ns: waited_ms * MS, waits, ..TaskView::default() }
    }
}

prop_compose! {
    /// Several to choose from: each has had an instance of its own of some resources, for long.
    fn rivals()(
        mut hogs in prop::collection::vec(hog(), 2..5), waiters in prop::collection::vec(waiter(), 2..9), mut w in any_window(),
    ) -> Window {
        (1..).zip(&mut hogs).for_each(|(n, h)| h.holdings.iter_mut().for_each(|x| x.instance = n));
        w.tasks = hogs.into_iter().chain(waiters).collect();
        (1..).zip(&mut w.tasks).for_each(|(id, t)| (t.id, t.scope) = (id, id + 100));
        w.edges.clear();
        for r in &mut w.resources {
            (r.usual_hold_ns, r.turnover_ns, r.untracked_waiting) = (2 * MS, 2 * MS, 0);
        }
        w.length_ns = 100 * MS;
        w.exec_ns = w.tasks.len() as u64 * w.length_ns;
        w
    }
}

/// A share, or what a settings file may have made of it.
fn share() -> impl Strategy<Value = f64> {
    prop_oneof![8 => 0.0..1.0f64, 1 => Just(0.0), 1 => Just(1.0), 1 => Just(-1.0), 1 => Just(f64::INFINITY), 1 => Just(f64::NAN)]
}

prop_compose! {
    fn any_params()(
        shares in (share(), share(), share()), times in (time(), time(), time(), time()),
        durations in prop::collection::btree_map(0..2u16, time(), 0..3),
    ) -> (EstimatorParams, PolicyParams) {
        let estimator = EstimatorParams { contention_threshold: shares.0, class_duration_ns: durations };
        let policy = PolicyParams {
            contention_threshold: shares.0, min_relief: shares.1, near_tie: shares.2, min_gain_ns: times.0,
            min_occupation_ns: times.1, min_idle_ns: times.2, min_untold_ns: times.3, ..PolicyParams::default()
        };
        (estimator, policy)
    }
}

/// The windows must be worth it: enough of them end in a pick, several picks, a queue head, a shared blame.
#[test]
fn the_generated_windows_reach_the_interesting_cases() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let (mut picked, mut several, mut bars, mut through) = (0, 0, 0, 0);
    for _ in 0..1000 {
        let w = any_window().new_tree(&mut runner).unwrap().current();
        let (e, c) = decide(&w, 4);
        picked += !c.picks.is_empty() as u32;
        several += (c.picks.len() > 1) as u32;
        let has = |role| e.candidates.iter().any(|x| x.uses.iter().any(|u| u.role == role)) as u32;
        (bars, through) = (bars + has(Role::Bars), through + has(Role::Through));
    }
    assert!(picked >= 50 && several >= 5 && bars >= 20 && through >= 20, "{picked} {several} {bars} {through}");
}

fn decide(window: &Window, budget: usize) -> (Estimate, Choice) {
    let e = estimate(window, &EstimatorParams::default());
    let params = PolicyParams { min_relief: 0.05, ..PolicyParams::default() };
    let c = choose(&e, window, &params, budget);
    (e, c)
}

/// Which of their uses make candidates worth a cancel: the policy's rules, told once more without its bookkeeping.
struct Worth<'a> {
    window: &'a Window,
    estimate: &'a Estimate,
    params: PolicyParams,
    standing_ns: u64,
    idle_ns: u64,
}

impl<'a> Worth<'a> {
    fn new(window: &'a Window, estimate: &'a Estimate) -> Self {
        let params = PolicyParams::default();
        assert_eq!(params.late_ns, 0, "everybody is late");
        let standing_ns = Late::standing_ns(estimate, window, params.late_ns, window.tasks.len());
        let idle_ns = Late::idle_ns(estimate, window, params.min_idle_ns);
        Worth { window, estimate, params, standing_ns, idle_ns }
    }

    /// Long enough to be worth a cancel, and longer than is usual of the resource.
    fn counts(&self, c: &Candidate, u: &Use) -> bool {
        let (r, min_ns) = (self.window.resources.iter().find(|r| r.id == u.resource).unwrap(), self.params.min_gain_ns);
        let task = &self.window.tasks[c.index];
        // Of a lock at most 200 times what is usual, and 400 ms or 20 times, for those who gave it back may have waited for
        // others.
        let most_ns = match r.usual_hold_ns {
            usual_ns if r.kind == ResourceKind::Lock && usual_ns > 0 => {
                (usual_ns * 200).min((usual_ns * 20).max(400 * MS))
            }
            _ => u64::MAX,
        };
        let mut usual_ns = (r.usual_hold_ns * 5).max((r.turnover_ns * 20).min(most_ns));
        if r.kind == ResourceKind::Lock {
            usual_ns = usual_ns.max(self.standing_ns.saturating_mul(3));
        }
        // All are slow: as many times the least, up to ten; ten, too, where nobody knows what is usual.
        let times =
            if r.turnover_ns == 0 { 1.0 } else { (r.turnover_ns as f64 / r.usual_hold_ns as f64).clamp(1.0, 10.0) };
        let slowed_ns = (200.0 * MS as f64 * times) as u64;
        let untold_ns = match task.progress {
            Some((done, _)) if done > 0 => 0,
            _ if task.age_ns < 250 * MS => 450 * MS, // held over a pause of its client
            _ => 250 * MS,
        };
        let barring_ns = min_ns / 5;
        let least_ns = match (u.role, r.kind) {
            (Role::Bars, _) => barring_ns,
            (Role::Occupies, _) => min_ns.max(usual_ns).max(slowed_ns),
            (Role::Holds, ResourceKind::System) => min_ns.max(200 * MS),
            (Role::Holds, ResourceKind::Memory) => min_ns.max(usual_ns),
            (Role::Holds | Role::Through, _) => min_ns.max(usual_ns).max(untold_ns),
        };
        // Somebody has waited because of it for as long as a queue's head must have barred the queue.
        let waited = match (u.role, r.kind) {
            (Role::Holds, ResourceKind::Lock) | (Role::Through, _) => u.waited_ns >= barring_ns,
            (Role::Bars, _) => u.behind_ns >= min_ns.max(usual_ns),
            _ => true,
        };
        let left_ns = if c.progress.is_some() { min_ns.max(200 * MS) } else { min_ns };
        let starved_ns = if r.kind == ResourceKind::System { 0 } else { task.starved_ns.min(1000 * MS) };
        let own_ns = u.usage_ns.saturating_sub(starved_ns);
        waited && own_ns >= least_ns && u.usage_ns >= u.waited_ns / 2 && u.gain_ns >= left_ns as f64
    }

    /// Per resource what `of` says of the use that counts; 0 where none does.
    fn each<T: Default>(&self, c: &Candidate, of: impl Fn(&Use) -> T) -> Vec<T> {
        let counting = |r: ResourceId| c.uses.iter().find(|u| u.resource == r).filter(|u| self.counts(c, u));
        let one = |r: ResourceId| counting(r).map_or(T::default(), &of);
        self.estimate.resources.iter().map(|r| one(r.id)).collect()
    }

    fn gains(&self, c: &Candidate) -> Vec<f64> {
        self.each(c, Use::scaled_gain)
    }

    /// Does anybody wait for it now? Everybody is late here.
    fn helps(&self, c: &Candidate) -> bool {
        let waits = |u: &Use| {
            let r = self.window.resources.iter().find(|r| r.id == u.resource).unwrap();
            match r.kind {
                ResourceKind::Memory | ResourceKind::System => true,
                ResourceKind::Lock => false,
                ResourceKind::Queue => {
                    let waiting = self.window.tasks.iter().flat_map(|t| &t.waits).any(|w| w.resource == u.resource);
                    waiting || r.untracked_waiting > 0
                }
            }
        };
        !c.victims.is_empty() || c.uses.iter().any(|u| waits(u) && self.counts(c, u))
    }

    /// May it be cancelled, on its own and with what counts of it?
    fn qualifies(&self, c: &Candidate) -> bool {
        let task = &self.window.tasks[c.index];
        let idle = task.in_request || task.idle_ns >= self.idle_ns;
        let contended = |u: &Use| self.estimate.resource(u.resource).unwrap().level >= self.params.contention_threshold;
        let contends = c.uses.iter().any(|u| contended(u) && self.counts(c, u));
        let relief = self.estimate.relief_share(&self.each(c, |u| u.freed_ns));
        let may = idle && task.cancellable && !task.protected && !task.cancelled;
        may && contends && self.helps(c) && relief >= self.params.min_relief
    }
}

/// The smallest set: where contention falls, each later pick is needed for it.
fn smallest_set(w: &Window) -> Result<(), TestCaseError> {
    let (e, c) = decide(w, 32);
    let p = PolicyParams { min_relief: 0.05, ..PolicyParams::default() };
    let over = |level: f64| level > 0.0 && level >= p.contention_threshold;
    if c.picks.len() > 1 && !c.levels_after.iter().copied().any(over) {
        let set: Vec<u32> = c.picks.iter().map(|x| e.candidate(x.task).unwrap().index as u32).collect();
        let freed_ns = e.joint_relief(&set, &mut e.scratch()).freed_ns;
        let all = e.relief_share(&freed_ns);
        for i in 1..set.len() {
            let without: Vec<u32> = set.iter().copied().filter(|&t| t != set[i]).collect();
            let freed_ns = e.joint_relief(&without, &mut e.scratch()).freed_ns;
            let stays = e.resources.iter().zip(&freed_ns).any(|(r, &freed)| {
                over(r.level * (1.0 - if r.lost_ns == 0 { 0.0 } else { (freed as f64 / r.lost_ns as f64).min(1.0) }))
            });
            let rest = e.relief_share(&freed_ns);
            // Equals of the first pick go with it.
            let part = if c.picks[0].role == Role::Occupies { 0.5 } else { 1.0 - p.near_tie };
            let equal = c.picks[i].score >= c.picks[0].score * part && all - rest >= p.min_relief * 0.5;
            prop_assert!(stays || equal || rest < p.min_relief, "task {} too many", c.picks[i].task);
        }
    }
    Ok(())
}

fn not_dominated(w: &Window) -> Result<(), TestCaseError> {
    let (e, c) = decide(w, 1);
    if let Some(first) = c.picks.first() {
        let worth = Worth::new(w, &e);
        let mine = worth.gains(e.candidate(first.task).unwrap());
        for x in e.candidates.iter().filter(|x| worth.qualifies(x)) {
            prop_assert!(!dominated(&mine, &worth.gains(x), worth.params.near_tie), "{} by {}", first.task, x.task);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn only_tasks_that_may_be_cancelled_and_free_somebody_are_chosen(w in any_window()) {
        let (e, c) = decide(&w, 4);
        prop_assert!(c.picks.len() <= 4);
        for p in &c.picks {
            let t = w.tasks.iter().find(|t| t.id == p.task).unwrap();
            prop_assert!(t.cancellable && !t.protected && !t.cancelled);
            prop_assert_eq!(t.scope, p.scope);
            prop_assert!(p.relief_share > 0.0 && !p.reason.is_empty());
            prop_assert!(!p.victims.contains(&p.task));
            prop_assert!(e.candidate(p.task).unwrap().uses.iter().any(|u| u.freed_ns > 0));
        }
        prop_assert_eq!(c.picks.is_empty(), !c.nobody_because.is_empty());
        prop_assert!(c.rejected.iter().all(|r| c.picks.iter().all(|p| p.task != r.task)));
    }

    #[test]
    fn no_setting_makes_a_choice_that_must_not_be(w in any_window(), params in any_params(), budget in 0..6usize) {
        let e = estimate(&w, &params.0);
        let c = choose(&e, &w, &params.1, budget);
        prop_assert!(c.picks.len() <= budget);
        let mut tasks: Vec<TaskId> = c.picks.iter().map(|p| p.task).collect();
        for p in &c.picks {
            let t = w.tasks.iter().find(|t| t.id == p.task).unwrap();
            prop_assert!(t.cancellable && !t.protected && !t.cancelled && t.scope == p.scope);
            prop_assert!(p.score.is_finite() && p.gain.is_finite() && p.gain_ns.is_finite(), "{:?}", p);
            prop_assert!((0.0..=1.0).contains(&p.relief_share));
        }
        tasks.sort_unstable();
        tasks.dedup();
        prop_assert_eq!(tasks.len(), c.picks.len(), "nobody twice");
        for x in &e.candidates {
            prop_assert!((0.0..=1.0).contains(&x.relief_share));
            prop_assert!(x.uses.iter().all(|u| u.gain.is_finite() && u.gain_ns.is_finite() && u.gain_ns > 0.0), "{:?}", x);
        }
        // The same evidence gives the same choice, whenever it is looked at.
        prop_assert_eq!(choose(&estimate(&w, &params.0), &w, &params.1, budget), c);
    }

    #[test]
    fn nobody_is_cancelled_whom_it_does_not_take(w in any_window()) {
        smallest_set(&w)?;
    }

    #[test]
    fn of_several_rivals_nobody_is_cancelled_whom_it_does_not_take(w in rivals()) {
        smallest_set(&w)?;
    }

    #[test]
    fn every_number_is_finite_and_in_its_range(w in any_window()) {
        let (e, c) = decide(&w, 4);
        for r in &e.resources {
            prop_assert!(r.raw_contention.is_finite() && r.raw_contention >= 0.0);
            prop_assert!((0.0..=1.0).contains(&r.level));
        }
        for x in &e.candidates {
            prop_assert!((0.0..=1.0).contains(&x.relief_share));
            prop_assert!(x.progress.map_or(true, |p| (0.01..=0.99).contains(&p)));
            for u in &x.uses {
                prop_assert!(u.gain.is_finite() && u.gain_ns.is_finite() && u.gain_ns > 0.0);
                prop_assert!((0.0..=1.0).contains(&u.share));
            }
        }
        prop_assert!(c.picks.iter().all(|p| p.score.is_finite() && (0.0..=1.0).contains(&p.relief_share)));
        prop_assert!(c.levels_after.iter().zip(&e.resources).all(|(a, r)| (0.0..=r.level).contains(a)));
    }

    #[test]
    fn the_order_of_tasks_and_edges_changes_nothing(w in any_window(), seed: u64) {
        let mut other = w.clone();
        // A shuffle that proptest can replay.
        let mix = |x: u64| (x ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17);
        other.tasks.sort_by_key(|t| mix(t.id));
        other.tasks.iter_mut().for_each(|t| { t.waits.reverse(); t.holdings.reverse(); });
        other.edges.sort_by_key(|e| mix(e.waiter * 100 + e.blocker));
        prop_assert_eq!(decide(&w, 4).1, decide(&other, 4).1);
    }

    #[test]
    fn the_first_choice_is_dominated_by_nobody(w in any_window()) {
        not_dominated(&w)?;
    }

    #[test]
    fn of_several_rivals_the_first_choice_is_dominated_by_nobody(w in rivals()) {
        not_dominated(&w)?;
    }

    #[test]
    fn a_holder_of_another_instance_is_never_blamed_for_a_lock(mut w in any_window()) {
        // Only inferred locks; one task holds instances nobody waits for.
        w.edges.clear();
        w.resources.iter_mut().for_each(|r| r.kind = ResourceKind::Lock);
        if let Some(t) = w.tasks.first_mut() {
            t.holdings.iter_mut().for_each(|h| h.instance += 10);
        }
        let (e, c) = decide(&w, 4);
        if let Some(t) = w.tasks.first() {
            prop_assert!(e.candidate(t.id).is_none());
            prop_assert!(c.picks.iter().all(|p| p.task != t.id));
        }
    }

    #[test]
    fn whoever_waits_itself_is_never_blamed_for_a_lock_it_holds(w in any_window()) {
        let (e, _) = decide(&w, 4);
        for x in e.candidates.iter().filter(|x| x.blocked) {
            for u in &x.uses {
                let lock = e.resource(u.resource).unwrap().kind == ResourceKind::Lock;
                prop_assert!(!lock || matches!(u.role, Role::Bars | Role::Through), "{:?}", x);
            }
        }
    }

    #[test]
    fn more_budget_never_leaves_more_contention(w in any_window()) {
        let worst = |c: Choice| c.levels_after.iter().copied().fold(0.0, f64::max);
        let (_, none) = decide(&w, 0);
        let (_, some) = decide(&w, 4);
        prop_assert!(worst(some) <= worst(none) + 1e-12);
    }
}

/// A chain in which everybody waits for the next and the last for the first, of the size of a full table.
#[test]
fn a_ring_of_a_thousand_waiters_ends() {
    let mut s = Story::new(&[("l", ResourceKind::Lock)]);
    for id in 1..=1000 {
        s.task(id, 500);
        s.holds(id, 1, id, 400).waits(id, 1, id % 1000 + 1, 300);
    }
    assert!(s.picked().is_empty());
    for id in 1..=1000 {
        s.edge(id, id % 1000 + 1, EdgeKind::Queued, 1, 0);
    }
    s.choose();
}

#[test]
fn a_thousand_readers_that_all_want_to_write_end() {
    let mut s = Story::new(&[("l", ResourceKind::Lock)]);
    for id in 1..=300 {
        s.task(id, 500);
        s.holds(id, 1, 7, 400).waits(id, 1, 7, 300);
    }
    assert!(s.picked().is_empty());
}

#[test]
fn an_empty_window_is_a_regular_overload() {
    let w = Window {
        classes: vec![ClassWindow { latency: Histogram::default(), ..Default::default() }],
        ..Default::default()
    };
    let (e, c) = decide(&w, 4);
    assert!(e.candidates.is_empty() && c.picks.is_empty() && c.nobody_because.contains("regular"));
}
