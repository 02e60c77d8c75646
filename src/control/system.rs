//! The machine's own resources, CPU and block I/O, as resources of a window. Pure: what the kernel said comes in as
//! plain numbers (see [`super::sample`]).
//!
//! - Contention: a thread that could run and did not (run-queue delay), or that slept for a disk (block-I/O delay), lost that
//!   time. A task with several threads lost the average of theirs, and never more than its execution time.
//! - Usage: CPU time, and bytes read and written: of I/O the kernel tells no time.
//! - Both are pools: cancelling a task gives back its share.
//!
//! SPDX-License-Identifier: MIT OR Apache-2.0

use super::window::{Holding, ResourceId, ResourceKind, ResourceWindow, TaskView, Wait, BLOCK_IO, CPU};

/// Delays of less than this part of a task's execution time are everyday life: it is not shown as a waiter.
const WAITER_PART: u64 = 10;
/// Sleep that the kernel calls uninterruptible may be for a lock inside it. Where it also tells that hardly anybody on the
/// machine waited for a disk (less than this part of the window), it was.
const LEAST_IO_PRESSURE: f64 = 0.01;

/// What the threads of a task slot did, as sums that only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    pub cpu_ns: u64,
    /// Average of the slot's threads.
    pub run_delay_ns: u64,
    pub io_bytes: u64,
    /// Average of the slot's threads.
    pub io_delay_ns: u64,
}

impl Sums {
    pub fn add(&mut self, other: Sums) {
        let total = |a: &mut u64, b: u64| *a = a.wrapping_add(b);
        total(&mut self.cpu_ns, other.cpu_ns);
        total(&mut self.run_delay_ns, other.run_delay_ns);
        total(&mut self.io_bytes, other.io_bytes);
        total(&mut self.io_delay_ns, other.io_delay_ns);
    }

    /// What was added since `before`.
    pub fn since(self, before: Sums) -> Sums {
        Sums {
            cpu_ns: self.cpu_ns.wrapping_sub(before.cpu_ns),
            run_delay_ns: self.run_delay_ns.wrapping_sub(before.run_delay_ns),
            io_bytes: self.io_bytes.wrapping_sub(before.io_bytes),
            io_delay_ns: self.io_delay_ns.wrapping_sub(before.io_delay_ns),
        }
    }
}

/// What is known of a slot at one look.
#[derive(Clone, Copy, Debug, Default)]
pub struct SlotUse {
    pub sums: Sums,
    /// The scope that was in it, and its CPU time since it was first seen.
    pub scope: u64,
    pub scope_cpu_ns: u64,
    /// For how long that scope was seen to do I/O.
    pub scope_io_ns: u64,
    /// Time of the last look.
    pub looked_ns: u64,
}

/// One slot's part of a window.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    pub used: Sums,
    /// Execution time inside the window.
    pub exec_ns: u64,
}

impl Part {
    fn amount(&self, id: ResourceId) -> u64 {
        if id == CPU {
            self.used.cpu_ns
        } else {
            self.used.io_bytes
        }
    }

    /// Time lost to the resource: a delay before a request began, or after it ended, cost that request nothing.
    fn lost_ns(&self, id: ResourceId) -> u64 {
        let delay_ns = if id == CPU { self.used.run_delay_ns } else { self.used.io_delay_ns };
        delay_ns.min(self.exec_ns)
    }
}

/// What every look was told of the machine.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    /// Processors that this process may use.
    pub cpus: u64,
    /// Tasks that run, as far as their threads are known, and how many of them were looked at.
    pub tasks: u64,
    pub looked_at: u64,
    pub pressure_io: Option<f64>,
}

impl Machine {
    /// Is there any block I/O to wait for? Where the kernel does not say, there is.
    fn io_stalls(&self) -> bool {
        self.pressure_io.map_or(true, |part| part >= LEAST_IO_PRESSURE)
    }

    fn counts(&self, id: ResourceId) -> bool {
        id == CPU || self.io_stalls()
    }
}

/// The resource in a window that these slots had a part in.
pub fn resource_window(id: ResourceId, name: String, parts: &[Part], machine: &Machine) -> ResourceWindow {
    let sum = |value: &dyn Fn(&Part) -> u64| parts.iter().fold(0u64, |sum, p| sum.saturating_add(value(p)));
    let lost_ns = if machine.counts(id) { sum(&|p| p.lost_ns(id)) } else { 0 };
    // Those nobody looked at fare no better than the others.
    let unseen = machine.tasks.saturating_sub(machine.looked_at);
    let more_ns = super::graph::scale(lost_ns, unseen, machine.looked_at);
    ResourceWindow {
        id,
        kind: ResourceKind::System,
        name,
        wait_ns: lost_ns.saturating_add(more_ns),
        hold_ns: 0,
        usual_hold_ns: 0,
        turnover_ns: 0,
        servers: if id == CPU { machine.cpus } else { 0 },
        acquired: sum(&|p| p.amount(id)),
        evicted: 0,
        untracked_waiting: 0,
        untracked_oldest_wait_ns: 0,
    }
}

/// Shows what a task's slot used and lost, as a holding and a wait.
pub fn show(view: &mut TaskView, id: ResourceId, part: &Part, now: &SlotUse, machine: &Machine) {
    let waited_ns = part.lost_ns(id);
    if machine.counts(id) && waited_ns > 0 && waited_ns >= part.exec_ns / WAITER_PART {
        view.waits.push(Wait { resource: id, instance: 0, waited_ns });
    }
    // A request that began after the look is not to blame for what its slot did before.
    if part.amount(id) > 0 && now.scope == view.scope && view.in_request {
        let held_ns = if id == CPU { now.scope_cpu_ns } else { now.scope_io_ns };
        view.holdings.push(Holding { resource: id, instance: 0, amount: part.amount(id), held_ns, waited_ns: 0 });
    }
}

/// The SYSTEM resources that are sampled.
pub fn sampled(cpu: bool, io: bool) -> impl Iterator<Item = ResourceId> {
    [(cpu, CPU), (io, BLOCK_IO)].into_iter().filter_map(|(on, id)| on.then_some(id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::estimator::{estimate, EstimatorParams, OverloadKind};
    use crate::control::policy::{choose, Choice, PolicyParams};
    use crate::control::window::{TaskId, Window};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const MS: u64 = 1_000_000;

    /// A window of 100 ms on a machine with two processors.
    struct Busy {
        window: Window,
        parts: Vec<Part>,
        machine: Machine,
        id: ResourceId,
        usual_ns: BTreeMap<u16, u64>,
    }

    impl Busy {
        fn new(id: ResourceId) -> Busy {
            let machine = Machine { cpus: 2, tasks: 1, looked_at: 1, pressure_io: None };
            let window = Window { now_ns: 1 << 40, length_ns: 100 * MS, ..Window::default() };
            Busy { window, parts: Vec::new(), machine, id, usual_ns: BTreeMap::new() }
        }

        /// `used` = CPU time in ms or MiB in the window; `so_far_ms` = the request's CPU time, or time with I/O.
        fn task(&mut self, id: TaskId, used: u64, delay_ms: u64, so_far_ms: u64) -> &mut TaskView {
            let exec_ns = 100 * MS;
            let (cpu_ns, io_bytes) = if self.id == CPU { (used * MS, 0) } else { (0, used << 20) };
            let used = Sums { cpu_ns, io_bytes, run_delay_ns: delay_ms * MS, io_delay_ns: delay_ms * MS };
            let part = Part { used, exec_ns };
            let so_far = so_far_ms * MS;
            let now = SlotUse { sums: used, scope: 7, scope_cpu_ns: so_far, scope_io_ns: so_far, looked_ns: 0 };
            let mut view = TaskView {
                id,
                scope: 7,
                cancellable: true,
                in_request: true,
                age_ns: 2 * so_far.max(100 * MS),
                exec_ns,
                ..TaskView::default()
            };
            show(&mut view, self.id, &part, &now, &self.machine);
            self.window.exec_ns += exec_ns;
            self.parts.push(part);
            self.window.tasks.push(view);
            self.window.tasks.last_mut().unwrap()
        }

        fn estimate(&mut self) -> crate::control::estimator::Estimate {
            let name = if self.id == CPU { "CPU" } else { "block I/O" };
            self.window.resources = vec![resource_window(self.id, name.into(), &self.parts, &self.machine)];
            let class_duration_ns = self.usual_ns.clone();
            estimate(&self.window, &EstimatorParams { class_duration_ns, ..EstimatorParams::default() })
        }

        fn choose(&mut self) -> Choice {
            let e = self.estimate();
            choose(&e, &self.window, &PolicyParams::default(), 4)
        }

        fn picked(&mut self) -> Vec<TaskId> {
            self.choose().picks.iter().map(|p| p.task).collect()
        }
    }

    fn hog(id: ResourceId) -> Busy {
        let mut b = Busy::new(id);
        b.task(1, 170, 70, 900);
        (2..12).for_each(|t| _ = b.task(t, 3, 90, 3));
        b
    }

    #[test]
    fn whoever_takes_the_machine_from_all_others_is_the_culprit() {
        for id in [CPU, BLOCK_IO] {
            let c = hog(id).choose();
            assert_eq!(c.picks.len(), 1, "{c:?}");
            assert_eq!((c.picks[0].task, c.picks[0].resource), (1, id));
            assert_eq!(c.picks[0].victims, (2..12).collect::<Vec<_>>());
            assert!(c.picks[0].reason.len() < crate::region::layout::REASON_WORDS * 8, "{}", c.picks[0].reason);
        }
        let reason = hog(CPU).choose().picks[0].reason.clone();
        assert!(reason.contains("used 900 ms of CPU time") && reason.contains("10 others wait for CPU"), "{reason}");
        let reason = hog(BLOCK_IO).choose().picks[0].reason.clone();
        assert!(reason.contains("done I/O for 900 ms (170 MiB lately)"), "{reason}");
    }

    #[test]
    fn forty_equal_queries_are_a_regular_overload() {
        let mut b = Busy::new(CPU);
        (1..41).for_each(|t| _ = b.task(t, 5, 95, 4000));
        assert_eq!(b.estimate().kind, OverloadKind::Regular);
        let c = b.choose();
        assert!(c.picks.is_empty());
        assert!(c.nobody_because.contains("CPU is short") && c.nobody_because.contains("regular"), "{c:?}");
        // Many light ones beside them make each look far above the fair share: still nobody's monopoly.
        (41..241).for_each(|t| _ = b.task(t, 0, 90, 1));
        assert_eq!(b.picked(), []);
    }

    #[test]
    fn an_ordinary_request_is_never_the_culprit() {
        let mut b = Busy::new(CPU);
        b.task(1, 170, 70, 180); // it has just begun
        (2..12).for_each(|t| _ = b.task(t, 3, 90, 3));
        assert_eq!(b.picked(), [], "less than two windows");
        // Its class, or those it delays, usually take as long.
        for class in [5, 0] {
            let mut b = hog(CPU);
            b.window.tasks[0].class = 5;
            b.usual_ns.insert(class, 300 * MS);
            assert_eq!(b.picked(), [], "class {class}");
            b.usual_ns.insert(class, 20 * MS);
            assert_eq!(b.picked(), [1], "class {class}");
        }
    }

    #[test]
    fn two_of_two_processors_busy_without_delays_are_no_overload() {
        let mut b = Busy::new(CPU);
        b.task(1, 100, 0, 5000);
        (2..12).for_each(|t| _ = b.task(t, 5, 4, 5));
        assert_eq!(b.picked(), []);
    }

    #[test]
    fn neighbours_on_the_machine_are_not_a_tasks_fault() {
        let mut b = Busy::new(CPU);
        b.task(1, 30, 70, 900); // the most of all tasks, but most of the machine went to others
        (2..12).for_each(|t| _ = b.task(t, 2, 95, 3));
        assert_eq!(b.picked(), []);
    }

    #[test]
    fn a_hogs_own_delays_are_no_relief() {
        let mut b = Busy::new(CPU);
        b.task(1, 190, 100, 900);
        b.task(2, 5, 10, 3);
        let e = b.estimate();
        assert_eq!(e.resources[0].lost_ns, 110 * MS);
        assert!(e.candidate(1).unwrap().uses[0].freed_ns <= 10 * MS, "{:?}", e.candidate(1));
    }

    #[test]
    fn whoever_holds_a_lock_while_a_hog_starves_it_is_not_to_blame() {
        for (id, with_hog) in [(CPU, true), (BLOCK_IO, true), (CPU, false), (BLOCK_IO, false)] {
            let mut b = Busy::new(id);
            let (used, so_far) = if with_hog { (170, 150) } else { (0, 0) };
            b.task(1, used, 10, so_far); // not yet for long enough to be cancelled itself
            let holder = b.task(2, 1, 90, 1);
            holder.age_ns = 300 * MS;
            let held_ns = holder.age_ns;
            holder.holdings.push(Holding { resource: 1, instance: 7, amount: 1, held_ns, waited_ns: 0 });
            for t in 3..12 {
                b.task(t, 0, 0, 0).waits.push(Wait { resource: 1, instance: 7, waited_ns: 90 * MS });
            }
            let mut lock = resource_window(1, "lock".into(), &[], &b.machine);
            (lock.kind, lock.wait_ns) = (ResourceKind::Lock, 9 * 90 * MS);
            b.window.resources = vec![lock, resource_window(id, "machine".into(), &b.parts, &b.machine)];
            let e = estimate(&b.window, &EstimatorParams::default());
            let c = choose(&e, &b.window, &PolicyParams::default(), 4);
            let picked: Vec<TaskId> = c.picks.iter().map(|p| p.task).collect();
            assert_eq!(picked, if with_hog { vec![] } else { vec![2] }, "{id} {with_hog} {c:?}");
        }
    }

    #[test]
    fn sleep_in_the_kernel_without_any_disk_is_no_io() {
        let mut b = Busy::new(BLOCK_IO);
        b.machine.pressure_io = Some(0.0);
        b.task(1, 170, 0, 900);
        (2..12).for_each(|t| _ = b.task(t, 3, 90, 3));
        assert_eq!(b.estimate().resources[0].lost_ns, 0);
        assert_eq!(b.picked(), []);
    }

    #[test]
    fn delays_outside_of_requests_cost_none() {
        let used = Sums { run_delay_ns: 90 * MS, ..Sums::default() };
        let parts = [Part { used, exec_ns: 2 * MS }];
        let machine = Machine { cpus: 2, tasks: 3, looked_at: 1, pressure_io: None };
        let w = resource_window(CPU, String::new(), &parts, &machine);
        assert_eq!(w.wait_ns, 6 * MS, "two more tasks like it were not looked at");
    }

    fn number() -> impl Strategy<Value = u64> {
        prop_oneof![6 => 0..300 * MS, 1 => Just(0), 1 => Just(u64::MAX)]
    }

    proptest! {
        /// Whatever the kernel says: numbers stay in their range, and whoever is picked has a quarter of the machine.
        #[test]
        fn any_numbers_are_borne(
            tasks in prop::collection::vec((number(), number(), number(), number(), number()), 0..20),
            cpus in 0..9u64, running in number(), looked_at in number(), pressure in prop::option::of(0.0..2.0f64),
        ) {
            for id in [CPU, BLOCK_IO] {
                let mut b = Busy::new(id);
                b.machine = Machine { cpus, tasks: running, looked_at, pressure_io: pressure };
                for (n, &(used, delay, so_far, exec_ns, age_ns)) in (1u64..).zip(&tasks) {
                    let sums = Sums { cpu_ns: used, io_bytes: used, run_delay_ns: delay, io_delay_ns: delay };
                    let part = Part { used: sums, exec_ns };
                    let now = SlotUse { sums, scope: 7, scope_cpu_ns: so_far, scope_io_ns: so_far, looked_ns: 0 };
                    let mut view = TaskView { id: n, scope: 7, cancellable: true, in_request: true, age_ns, ..TaskView::default() };
                    show(&mut view, id, &part, &now, &b.machine);
                    b.parts.push(part);
                    b.window.tasks.push(view);
                }
                let c = b.choose();
                let all: u64 = b.parts.iter().fold(0, |sum, p| sum.saturating_add(p.amount(id)));
                for p in &c.picks {
                    let amount = b.parts[p.task as usize - 1].amount(id);
                    prop_assert!(amount as f64 >= all as f64 * 0.249, "{} of {}", amount, all);
                    prop_assert!(p.relief_share.is_finite() && (0.0..=1.0).contains(&p.relief_share) && p.gain.is_finite());
                }
            }
        }
    }
}
