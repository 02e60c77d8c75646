//! Region -> `Window`: reads what the workers wrote and cuts out the last window.
//!
//! Totals in the slots only ever grow, so a window is the difference of two samples; what is running is counted up to
//! the sample's time. Samples are taken every quarter of a window and the window slides over them.

use super::histogram::{Histogram, BUCKETS};
use super::sample::{Look, Sampler, Trouble};
use super::system;
use super::window::*;
use crate::cancel::action::{self, Level};
use crate::primitive::Ordering::{Acquire, Relaxed};
use crate::region::layout::*;
use crate::region::tasks::{handle_of, index_of};
use crate::region::Region;
use crate::trace::view::{ahead, Held, RunningWait, Totals, TraceView};
use std::cell::Cell;
use std::collections::VecDeque;

/// Samples per window.
pub const STRIDES: u64 = 4;
/// Observations of a host's queue older than this are out of date.
const QUEUE_FRESH_NS: u64 = 1_000_000_000;
/// As so many requests in flight they are shown at most; more would say no more.
const UNTRACKED_SHOWN: u64 = 64;

/// Children of children are followed so far: more would cost a large table of long chains too much.
const FAMILY_DEPTH: usize = 16;

/// Averages are learnt this often, from at least so many acquisitions.
const USUAL_EVERY_NS: u64 = 1_000_000_000;
const USUAL_LEAST: u64 = 20;
/// Of fewer who give a lock back nothing is said: one of them may be the culprit that was cancelled, and locks are looked at
/// again at once.
const TURNOVER_LEAST: u64 = 3;

/// Everything that only grows, at one time.
#[derive(Default)]
struct Sample {
    at_ns: u64,
    /// Measured only while an overload is suspected: reading every task's cells costs most of a tick.
    resources: Option<Totals>,
    /// Completions per class and latency; empty = the class has completed nothing yet.
    classes: [Vec<u32>; MAX_CLASSES],
    slot_exec_ns: Vec<u64>,
    /// What the kernel told of threads, with the resources.
    system: Option<Look>,
}

/// Times noted while nobody refreshed the cached clock: they may be anywhere between its last value and the next.
struct Gap {
    from_ns: u64,
    to_ns: u64,
}

#[derive(Default)]
pub struct Collector {
    room: Room,
    samples: VecDeque<Sample>,
    gaps: VecDeque<Gap>,
    completions: u64,
    measured_ns: u64,
    usual: [Usual; MAX_RESOURCES],
    usual_at_ns: u64,
    usual_spoilt: bool,
    /// CPU and block I/O.
    pub sampler: Sampler,
}

/// Memory of earlier windows for the next one: thousands of small lists would else be made and thrown away each time.
#[derive(Default)]
struct Room {
    sample: Sample,
    /// In-flight ages per class.
    ages_ns: [Vec<u64>; MAX_CLASSES],
    tasks: Vec<TaskView>,
    parents: Vec<u64>,
    edges: Vec<Edge>,
    trace: TraceView,
}

/// What is usual of a resource in calm times.
#[derive(Clone, Copy, Default)]
struct Usual {
    hold_ns: u64,
    /// Totals when it was last looked at.
    total_hold_ns: u64,
    total_acquired: u64,
}

impl Collector {
    /// The cached clock stood still at `from_ns` until `to_ns`. What was noted at `from_ns` counts from `to_ns` on: a
    /// controller's pause must not make anybody look like a long holder.
    pub fn clock_gap(&mut self, from_ns: u64, to_ns: u64) {
        self.gaps.push_back(Gap { from_ns, to_ns });
        if self.gaps.len() > 32 {
            self.gaps.pop_front();
        }
    }

    /// Forgets earlier samples: the next window begins with the next sample.
    pub fn restart(&mut self) {
        self.samples.clear();
    }

    /// Requests completed since the region began, as of the last window.
    pub fn completions(&self) -> u64 {
        self.completions
    }

    /// Length of the last window's end in which resources and execution time were measured: all of it, unless measuring
    /// began with the present suspicion. 0 = not measured yet.
    pub fn measured_ns(&self) -> u64 {
        self.measured_ns
    }

    /// Takes a window back that nobody needs any more: the next one is made in its room.
    pub fn reuse(&mut self, window: Window) {
        for class in window.classes {
            self.room.ages_ns[class.class as usize % MAX_CLASSES] = class.in_flight_age_ns;
        }
        // One without details has no room worth keeping.
        if window.tasks.capacity() > 0 {
            (self.room.tasks, self.room.edges) = (window.tasks, window.edges);
        }
    }

    /// Learns for how long things are held on average: once a second, since it reads all cells. A second in which there was
    /// an `overload` teaches nothing. True = a second was over; what is known then stands in the region, for a successor.
    pub fn learn_usual(&mut self, region: &Region, now_ns: u64, overload: bool) -> bool {
        self.usual_spoilt |= overload;
        if now_ns.saturating_sub(self.usual_at_ns) < USUAL_EVERY_NS {
            return false;
        }
        let skip = std::mem::take(&mut self.usual_spoilt) || self.usual_at_ns == 0;
        self.usual_at_ns = now_ns;
        let mut totals = Totals::default();
        let tasks = ahead(region.used_tasks(), |t| t.trace.ask_for_first_line(), |t| t.trace.ask_for_other_lines());
        let workers = region.used_workers().iter();
        tasks.map(|t| &t.trace).chain(workers.map(|w| &w.trace)).for_each(|trace| trace.add_totals(&mut totals));
        for (usual, total) in self.usual.iter_mut().zip(&totals) {
            let held_ns = grown(total.hold_ns, usual.total_hold_ns);
            let acquired = grown(total.acquired, usual.total_acquired);
            (usual.total_hold_ns, usual.total_acquired) = (total.hold_ns, total.acquired);
            if skip || acquired < USUAL_LEAST {
                continue;
            }
            let average = held_ns / acquired;
            // A quarter of the new: a single odd second does not move it far.
            usual.hold_ns = if usual.hold_ns == 0 { average } else { usual.hold_ns - usual.hold_ns / 4 + average / 4 };
        }
        for (id, entry) in region.header().registered() {
            let usual = &self.usual[id as usize];
            entry.usual_hold_ns.store(usual.hold_ns, Relaxed);
        }
        true
    }

    /// Begins with what a predecessor has learnt.
    pub fn inherit(&mut self, region: &Region) {
        for (id, entry) in region.header().registered() {
            let usual = &mut self.usual[id as usize];
            usual.hold_ns = entry.usual_hold_ns.load(Relaxed);
        }
    }

    /// Adds the resources' totals to the newest sample, so that the next detailed window can begin there.
    pub fn measure_resources(&mut self, region: &Region) {
        let since_ns = region.header().clock.tracing_since_ns();
        let mut totals = Totals::default();
        let Some(newest) = self.samples.back_mut() else { return };
        let times = Times::new(newest.at_ns, &self.gaps);
        let tasks = ahead(region.used_tasks(), |t| t.ask_for_first_lines(true), |t| t.trace.ask_for_other_lines());
        let tasks = tasks.map(|slot| (&slot.state, &slot.trace));
        let workers = region.used_workers().iter().map(|w| (&w.state, &w.trace));
        for (state, trace) in tasks.chain(workers) {
            trace.add_totals(&mut totals);
            if state.load(Acquire) & 3 == ACTIVE {
                count_unstable(region, trace.view_into(since_ns, &mut self.room.trace));
                add_running(&self.room.trace, &times, &mut totals);
            }
        }
        let system = self.sampler.look(region, newest.at_ns, say);
        (newest.resources, newest.system) = (Some(totals), system);
    }

    /// Reads the region and gives the window that ends now. `detailed` adds resources, tasks and edges; such a window
    /// reaches back to the first measurement of the resources, at most `window_ns`.
    pub fn window(&mut self, region: &Region, now_ns: u64, window_ns: u64, detailed: bool) -> Window {
        let since_ns = region.header().clock.tracing_since_ns();
        let mut sample = self.next_sample(region, now_ns, window_ns);
        let mut totals = Totals::default();
        let mut window = Window { now_ns, ..Window::default() };
        let times = Times::new(now_ns, &self.gaps);
        // A window with details begins with the first sample that has them.
        let measured = self.samples.iter().find_map(|s| s.resources.as_ref().map(|totals| (s, totals)));
        let measured = measured.filter(|_| detailed);
        let measured_ns = measured.map_or(0, |(then, _)| now_ns.saturating_sub(then.at_ns));
        // Of what is held now, the time inside the window.
        let mut running_ns = [0u64; MAX_RESOURCES];
        let Room { ages_ns, tasks, parents, edges, trace, .. } = &mut self.room;
        ages_ns.iter_mut().for_each(Vec::clear);
        parents.clear();
        edges.clear();

        self.completions = 0;
        self.measured_ns = 0;
        let slots = ahead(
            region.used_tasks(),
            |slot| slot.ask_for_first_lines(detailed),
            |slot| {
                if detailed {
                    slot.trace.ask_for_other_lines()
                }
            },
        );
        for (index, slot) in slots.enumerate() {
            let word = slot.state.load(Acquire);
            let live = word & 3 == ACTIVE;
            // Before everything else of the task: what is read after it may be of a later scope already, and then a cancel
            // that names this one is void. The other way round it would hit a request for what the one before it did.
            let scope = slot.scope.load(Acquire);
            self.completions = self.completions.wrapping_add(slot.completions.load(Relaxed));
            let start = slot.request_start_ns.load(Acquire);
            let in_request = live && start != 0 && start >= since_ns;
            let flags = slot.flags.load(Relaxed);
            let age_ns =
                if in_request { now_ns.saturating_sub(start).saturating_sub(slot.client_ns(now_ns)) } else { 0 };
            let exec_ns = slot.exec_ns.load(Relaxed).wrapping_add(age_ns);
            sample.slot_exec_ns.push(exec_ns);
            let class = slot.class.load(Relaxed) as usize % MAX_CLASSES;
            if in_request && flags & FLAG_BACKGROUND == 0 {
                ages_ns[class].push(age_ns);
            }
            if !detailed {
                continue;
            }
            slot.trace.add_totals(&mut totals);
            // By slot, so that a request that vanishes (its process died) takes no other's time with it.
            let exec_before_ns = measured.and_then(|(then, _)| then.slot_exec_ns.get(index).copied());
            if measured.is_some() {
                window.exec_ns = window.exec_ns.saturating_add(grown(exec_ns, exec_before_ns.unwrap_or(0)));
            }
            if !live {
                continue;
            }
            if tasks.len() == parents.len() {
                tasks.push(TaskView::default());
            }
            let view = &mut tasks[parents.len()];
            parents.push(slot.parent.load(Relaxed));
            let (mut waits, mut holdings) = (emptied(&mut view.waits), emptied(&mut view.holdings));
            let (mut trace, stable) = slot.trace.view_as(since_ns, &mut holdings, |trace, h| times.holding(trace, h));
            count_unstable(region, stable);
            for h in &holdings {
                let total = &mut totals[h.resource as usize % MAX_RESOURCES];
                total.hold_ns = total.hold_ns.wrapping_add(h.held_ns);
                total.held = total.held.wrapping_add(h.amount);
                let running = &mut running_ns[h.resource as usize % MAX_RESOURCES];
                *running = running.wrapping_add(h.held_ns.min(measured_ns));
            }
            let id = handle_of(index, word);
            if let Some(wait) = &mut trace.wait {
                wait.since_ns = times.since(wait.since_ns);
                let waited_ns = now_ns.saturating_sub(wait.since_ns);
                add_wait(id, wait, waited_ns, &mut waits, edges);
                let total = &mut totals[wait.resource as usize % MAX_RESOURCES].wait_ns;
                *total = total.wrapping_add(waited_ns);
            }
            *view = TaskView {
                id,
                key: slot.key.load(Relaxed),
                // Read where it is shown: the stages do not need it.
                label: String::new(),
                class: class as u16,
                priority: slot.priority.load(Relaxed),
                background: flags & FLAG_BACKGROUND != 0,
                protected: flags & FLAG_PROTECTED != 0,
                cancellable: flags & FLAG_UNCANCELLABLE == 0,
                cancelled: flags & FLAG_RETRIED != 0 || slot.mailbox.stands(scope, || region.header().lease.term()),
                scope,
                in_request,
                age_ns,
                idle_ns: if in_request { 0 } else { now_ns.saturating_sub(slot.request_end_ns.load(Relaxed)) },
                work_ns: match slot.work_start_ns.load(Relaxed) {
                    0 => age_ns,
                    start => now_ns.saturating_sub(start),
                },
                work_waited_ns: match slot.work_start_ns.load(Relaxed) {
                    0 => 0,
                    start => trace.waited_since(slot.work_waited.load(Relaxed), start, now_ns),
                },
                progress: (trace.progress != (0, 0)).then_some(trace.progress),
                waits,
                holdings,
                exec_ns: grown(exec_ns, exec_before_ns.unwrap_or(exec_ns)).min(measured_ns),
                rollback_ns: 0,
                starved_ns: 0,
            };
        }
        if detailed {
            tasks.truncate(parents.len());
            // What those did who have gone stays; what is done ends with them.
            region.used_workers().iter().for_each(|worker| worker.trace.add_totals(&mut totals));
            for worker in region.live_workers() {
                count_unstable(region, worker.trace.view_into(since_ns, trace));
                add_running(trace, &times, &mut totals);
                let Some(at) = place_of(tasks, worker.task.load(Relaxed)) else { continue };
                // What several workers hold counts once.
                let view = &mut tasks[at];
                for h in &view.holdings {
                    let running = &mut running_ns[h.resource as usize];
                    *running = running.wrapping_sub(h.held_ns.min(measured_ns));
                }
                if let Some(wait) = &trace.wait {
                    let waited_ns = now_ns.saturating_sub(times.since(wait.since_ns));
                    add_wait(view.id, wait, waited_ns, &mut view.waits, edges);
                }
                add_holdings(&mut view.holdings, trace.held.iter().map(|&h| times.holding(trace, h)));
                for h in &view.holdings {
                    let running = &mut running_ns[h.resource as usize];
                    *running = running.wrapping_add(h.held_ns.min(measured_ns));
                }
            }
            sample.resources = Some(totals);
            sample.system = self.sampler.look(region, now_ns, say);
        }

        // Who waits outside (a full backlog) is as late as who waits inside, and with every server of the queue taken
        // nobody else is there to show it. They count for the class that most requests are of.
        for (_, entry) in region.header().registered() {
            let (waiting, oldest_ns) = untracked(entry, now_ns);
            let shown = waiting.min(UNTRACKED_SHOWN);
            if shown > 0 {
                let class = busiest(&sample.classes);
                ages_ns[class].extend((0..shown).map(|i| oldest_ns - oldest_ns / shown * i));
            }
        }

        if let Some(then) = self.samples.front() {
            window.length_ns = now_ns.saturating_sub(then.at_ns);
            for (class, (counts, before)) in sample.classes.iter().zip(&then.classes).enumerate() {
                if counts.is_empty() && ages_ns[class].is_empty() {
                    continue;
                }
                let mut latency = Histogram::default();
                for (bucket, &n) in counts.iter().enumerate() {
                    latency.add(bucket, n.wrapping_sub(before.get(bucket).copied().unwrap_or(0)) as u64);
                }
                let in_flight_age_ns = std::mem::take(&mut ages_ns[class]);
                window.classes.push(ClassWindow { class: class as u16, latency, in_flight_age_ns });
            }
        }
        if let Some((then, before)) = measured {
            for (id, entry) in region.header().registered() {
                let (now, before) = (&totals[id as usize], &before[id as usize]);
                let (untracked_waiting, untracked_oldest_wait_ns) = untracked(entry, now_ns);
                let hold_ns = grown(now.hold_ns, before.hold_ns);
                let acquired = grown(now.acquired, before.acquired);
                let gone_ns = hold_ns.saturating_sub(running_ns[id as usize]);
                // Not those who acquired: a crowd of readers that came in together before the window leaves in it.
                let given_back = acquired.saturating_add(before.held).saturating_sub(now.held);
                let kind = entry.kind().unwrap_or(ResourceKind::Lock);
                let least = if kind == ResourceKind::Lock { TURNOVER_LEAST } else { 1 };
                window.resources.push(ResourceWindow {
                    id,
                    kind,
                    name: entry.name(),
                    wait_ns: grown(now.wait_ns, before.wait_ns),
                    hold_ns,
                    usual_hold_ns: self.usual[id as usize].hold_ns,
                    turnover_ns: if given_back < least { 0 } else { gone_ns / given_back },
                    servers: entry.servers.load(Relaxed),
                    acquired,
                    evicted: grown(now.evicted, before.evicted),
                    untracked_waiting,
                    untracked_oldest_wait_ns,
                });
            }
            if let (Some(before), Some(now)) = (&then.system, &sample.system) {
                let exec_ns = |slot: usize| {
                    // The threads were looked at last: a slot may have come into use since the rest was read.
                    let of = |s: &Sample| s.slot_exec_ns.get(slot).copied().unwrap_or(0);
                    grown(of(&sample), of(then)).min(measured_ns)
                };
                add_system(&self.sampler, region, &mut window, tasks, before, now, &exec_ns, measured_ns);
            }
        }
        self.measured_ns = measured_ns;
        self.samples.push_back(sample);

        if detailed {
            fold_children(tasks, parents, edges);
            (window.tasks, window.edges) = (std::mem::take(tasks), std::mem::take(edges));
        }
        window
    }

    /// A sample of now, its completions filled in; drops those that no window reaches back to any more: one begins with the
    /// oldest sample that is at most `window_ns` old.
    fn next_sample(&mut self, region: &Region, now_ns: u64, window_ns: u64) -> Sample {
        while self.samples.len() > 1 && self.samples[1].at_ns.saturating_add(window_ns) <= now_ns {
            self.room.sample = self.samples.pop_front().unwrap_or_default();
        }
        let Sample { mut classes, mut slot_exec_ns, .. } = std::mem::take(&mut self.room.sample);
        read_classes(region, &mut classes);
        slot_exec_ns.clear();
        Sample { at_ns: now_ns, resources: None, classes, slot_exec_ns, system: None }
    }
}

/// CPU and block I/O as resources of the window, between two looks at the threads.
#[allow(clippy::too_many_arguments)]
fn add_system(
    sampler: &Sampler,
    region: &Region,
    window: &mut Window,
    tasks: &mut [TaskView],
    before: &Look,
    now: &Look,
    exec_ns: &dyn Fn(usize) -> u64,
    length_ns: u64,
) {
    let part =
        |slot: usize| system::Part { used: now.slot(slot).sums.since(before.slot(slot).sums), exec_ns: exec_ns(slot) };
    let pressure =
        |now: Option<u64>, before: Option<u64>| Some((grown(now?, before?) as f64 / length_ns.max(1) as f64).min(1.0));
    window.pressure.cpu = pressure(now.pressure_cpu_ns, before.pressure_cpu_ns);
    window.pressure.io = pressure(now.pressure_io_ns, before.pressure_io_ns);
    let machine = system::Machine {
        cpus: sampler.cpus(),
        tasks: now.tasks,
        looked_at: now.looked_at,
        pressure_io: window.pressure.io,
    };
    let parts: Vec<system::Part> = now.slots().map(part).collect();
    let (cpu, io) = sampler.samples();
    for id in system::sampled(cpu, io) {
        let name = region.header().resource_name(id);
        window.resources.push(system::resource_window(id, name, &parts, &machine));
        for task in tasks.iter_mut() {
            let slot = index_of(task.id);
            system::show(task, id, &part(slot), &now.slot(slot), &machine);
        }
    }
}

fn say(trouble: Trouble) {
    action::log(Level::Warning, trouble.words());
}

/// The list's room, for another list.
fn emptied<T>(list: &mut Vec<T>) -> Vec<T> {
    list.clear();
    std::mem::take(list)
}

/// Where the task stands in `tasks`, which are in the order of their slots.
fn place_of(tasks: &[TaskView], task: TaskId) -> Option<usize> {
    let at = tasks.binary_search_by_key(&index_of(task), |t| index_of(t.id)).ok()?;
    (tasks[at].id == task).then_some(at)
}

/// Times that were noted, as they count at one moment: those noted in a gap of the clock from its end.
struct Times<'a> {
    now_ns: u64,
    gaps: &'a VecDeque<Gap>,
    newest_gap_ns: u64,
    /// A bit for each gap, by a hash of its begin: nearly all times that begin none are known by it at once.
    begins: [u64; 4],
    /// The last time looked for, and how it counts: what the cached clock stamped is stamped alike.
    last: Cell<(u64, u64)>,
}

/// Fibonacci hashing: a byte.
fn hash(noted_ns: u64) -> usize {
    (noted_ns.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as usize
}

impl<'a> Times<'a> {
    fn new(now_ns: u64, gaps: &'a VecDeque<Gap>) -> Self {
        let mut begins = [0; 4];
        gaps.iter().map(|g| hash(g.from_ns)).for_each(|h| begins[h / 64] |= 1 << (h % 64));
        Times {
            now_ns,
            gaps,
            newest_gap_ns: gaps.back().map_or(0, |g| g.from_ns),
            begins,
            last: Cell::new((u64::MAX, u64::MAX)),
        }
    }

    #[inline(always)]
    fn since(&self, noted_ns: u64) -> u64 {
        // After the newest gap, as nearly always, there is nothing to look for.
        let h = hash(noted_ns);
        if noted_ns > self.newest_gap_ns || self.begins[h / 64] >> (h % 64) & 1 == 0 {
            return noted_ns;
        }
        if self.last.get().0 != noted_ns {
            self.last.set((noted_ns, self.find(noted_ns)));
        }
        self.last.get().1
    }

    fn find(&self, noted_ns: u64) -> u64 {
        // They are in the order of time.
        let found = self.gaps.partition_point(|g| g.from_ns <= noted_ns).checked_sub(1);
        found.map(|i| &self.gaps[i]).filter(|g| g.from_ns == noted_ns).map_or(noted_ns, |g| g.to_ns)
    }

    /// What a worker holds, as the stages see it.
    #[inline(always)]
    fn holding(&self, trace: &TraceView, h: Held) -> Holding {
        let since_ns = self.since(h.since_ns);
        let held_ns = self.now_ns.saturating_sub(since_ns);
        // The wait that runs counts too.
        let waits_since_ns = trace.wait.map_or(self.now_ns, |w| self.since(w.since_ns));
        let waited_ns = h.waited_ns.saturating_add(self.now_ns.saturating_sub(waits_since_ns.max(since_ns)));
        Holding {
            resource: h.resource,
            instance: h.instance,
            amount: h.amount,
            held_ns,
            waited_ns: waited_ns.min(held_ns),
        }
    }
}

fn count_unstable(region: &Region, stable: bool) {
    if !stable {
        region.header().counters.unstable_reads.fetch_add(1, Relaxed);
    }
}

/// Waiters that are not tasks yet, and the oldest one's wait, as last observed.
fn untracked(entry: &ResourceEntry, now_ns: u64) -> (u64, u64) {
    let fresh = now_ns.saturating_sub(entry.queue_observed_ns.load(Relaxed)) < QUEUE_FRESH_NS;
    let waiting = if fresh { entry.queue_waiting.load(Relaxed) } else { 0 };
    (waiting, if waiting > 0 { entry.queue_oldest_wait_ns.load(Relaxed) } else { 0 })
}

fn add_running(trace: &TraceView, times: &Times, totals: &mut Totals) {
    if let Some(wait) = trace.wait {
        let total = &mut totals[wait.resource as usize].wait_ns;
        *total = total.wrapping_add(times.now_ns.saturating_sub(times.since(wait.since_ns)));
    }
    for held in &trace.held {
        let total = &mut totals[held.resource as usize];
        total.hold_ns = total.hold_ns.wrapping_add(times.now_ns.saturating_sub(times.since(held.since_ns)));
        total.held = total.held.wrapping_add(held.amount);
    }
}

/// Growth of a total; a total that seems to shrink (a clock's step between two kinds of time) did not grow.
fn grown(now: u64, before: u64) -> u64 {
    let difference = now.wrapping_sub(before);
    if difference > u64::MAX / 2 {
        0
    } else {
        difference
    }
}

/// The class with the most completions ever.
fn busiest(classes: &[Vec<u32>]) -> usize {
    let completions = |class: &usize| classes[*class].iter().map(|&n| n as u64).sum::<u64>();
    (0..classes.len()).filter(|&class| !classes[class].is_empty()).max_by_key(completions).unwrap_or(0)
}

/// Completions of each class so far; a class without any stays, or becomes, empty.
fn read_classes(region: &Region, classes: &mut [Vec<u32>]) {
    let used = region.header().classes_used.load(Relaxed);
    for (class, (counts, shards)) in classes.iter_mut().zip(&region.header().classes).enumerate() {
        counts.clear();
        if used >> class & 1 == 0 {
            continue;
        }
        counts.resize(BUCKETS, 0);
        for shard in shards {
            for (count, bucket) in counts.iter_mut().zip(&shard.buckets) {
                *count = count.wrapping_add(bucket.load(Relaxed));
            }
        }
    }
}

/// A worker's wait is its task's.
fn add_wait(task: TaskId, wait: &RunningWait, waited_ns: u64, waits: &mut Vec<Wait>, edges: &mut Vec<Edge>) {
    let RunningWait { resource, instance, blocked_by, .. } = *wait;
    waits.push(Wait { resource, instance, waited_ns });
    if blocked_by != 0 {
        edges.push(Edge { waiter: task, blocker: blocked_by, kind: EdgeKind::Holds, resource, instance });
    }
}

/// Several workers of one task may hold the same thing: it is the task's, since the first of them.
fn add_holdings(all: &mut Vec<Holding>, more: impl Iterator<Item = Holding>) {
    // One worker's holdings are distinct.
    let others = all.len();
    for h in more {
        match all[..others].iter_mut().find(|a| a.resource == h.resource && a.instance == h.instance) {
            Some(a) => {
                if is_system(h.resource) {
                    a.held_ns = a.held_ns.saturating_add(h.held_ns); // each with threads of its own
                } else if h.held_ns - h.waited_ns > a.held_ns - a.waited_ns {
                    (a.held_ns, a.waited_ns) = (h.held_ns, h.waited_ns);
                }
                a.amount = a.amount.saturating_add(h.amount);
            }
            None => all.push(h),
        }
    }
}

/// A child's holdings and waits are its parent's: cancelling the parent ends both. `parents`: of each task, 0 = none.
fn fold_children(tasks: &mut Vec<TaskView>, parents: &[u64], edges: &mut [Edge]) {
    if parents.iter().all(|&parent| parent == 0) {
        return;
    }
    // Bounded: a cycle of parents ends somewhere in it.
    let root = |start: usize| {
        let mut at = start;
        for _ in 0..FAMILY_DEPTH {
            match place_of(tasks, parents[at]) {
                Some(up) if up != at => at = up,
                _ => break,
            }
        }
        at
    };
    let roots: Vec<usize> = (0..tasks.len()).map(root).collect();
    let head = |id: u64| place_of(tasks, id).map_or(id, |at| tasks[roots[at]].id);
    for edge in edges.iter_mut() {
        edge.waiter = head(edge.waiter);
        edge.blocker = head(edge.blocker);
    }
    let folds = |at: usize| roots[at] != at && roots[roots[at]] == roots[at];
    for at in (0..tasks.len()).filter(|&at| folds(at)) {
        let child = std::mem::take(&mut tasks[at]);
        let parent = &mut tasks[roots[at]];
        parent.waits.extend(child.waits);
        add_holdings(&mut parent.holdings, child.holdings.into_iter());
        parent.exec_ns = parent.exec_ns.saturating_add(child.exec_ns);
        parent.work_ns = parent.work_ns.max(child.work_ns);
        parent.protected |= child.protected;
    }
    let mut at = 0;
    tasks.retain(|_| {
        at += 1;
        !folds(at - 1)
    });
}

/// The heads of task families, for edges that the host names later.
pub fn family_head(region: &Region, mut task: u64) -> u64 {
    for _ in 0..FAMILY_DEPTH {
        match region.task(task).map(|slot| slot.parent.load(Relaxed)) {
            Some(parent) if parent != 0 && parent != task && region.task(parent).is_some() => task = parent,
            _ => break,
        }
    }
    task
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::region::owner::ProcessId;

    const MS: u64 = 1_000_000;

    fn setup() -> (Region, ProcessId, u32) {
        let r = Region::anonymous(16, 16).unwrap();
        r.header().clock.coarse_ns.store(0, Relaxed);
        let lock = r.header().register("lock", ResourceKind::Lock).unwrap();
        (r, ProcessId::current(), lock)
    }

    #[test]
    fn a_window_is_the_difference_of_two_samples_with_what_runs() {
        let (r, me, lock) = setup();
        let (a, b) = (r.begin_task(me, 1, 0).unwrap(), r.begin_task(me, 2, 0).unwrap());
        let t0 = r.now_ns();
        for (t, start) in [(a, t0), (b, t0)] {
            r.task(t).unwrap().request_start_ns.store(start, Relaxed);
        }
        r.task(a).unwrap().trace.acquire(t0, 0, lock, 7, 1);
        let mut c = Collector::default();
        c.window(&r, t0 + 100 * MS, 100 * MS, false);
        c.measure_resources(&r);
        r.task(b).unwrap().trace.wait_begin(t0 + 120 * MS, lock, 7);
        let w = c.window(&r, t0 + 200 * MS, 100 * MS, true);
        assert_eq!(w.length_ns, 100 * MS);
        assert_eq!(w.exec_ns, 200 * MS, "two requests run through the whole window");
        assert_eq!((w.resources[0].wait_ns, w.resources[0].hold_ns), (80 * MS, 100 * MS));
        assert_eq!(w.classes[0].in_flight_age_ns, [200 * MS, 200 * MS]);
        let (va, vb) = (&w.tasks[0], &w.tasks[1]);
        assert_eq!(va.holdings, [Holding { resource: lock, instance: 7, amount: 1, held_ns: 200 * MS, waited_ns: 0 }]);
        assert_eq!(vb.waits, [Wait { resource: lock, instance: 7, waited_ns: 80 * MS }]);
        assert_eq!((va.exec_ns, va.key, vb.key), (100 * MS, 1, 2));
        r.task(b).unwrap().trace.wait_abandoned(t0 + 210 * MS, lock);
        let w = c.window(&r, t0 + 300 * MS, 100 * MS, true);
        assert_eq!(w.resources[0].wait_ns, 10 * MS);
        assert!(w.tasks[1].waits.is_empty());
    }

    #[test]
    fn a_holders_own_waits_are_told_apart() {
        let (r, me, lock) = setup();
        let a = r.begin_task(me, 1, 0).unwrap();
        let (t0, trace) = (r.now_ns(), &r.task(a).unwrap().trace);
        trace.wait_begin(t0, lock, 5);
        trace.wait_abandoned(t0 + 500 * MS, lock);
        trace.acquire(t0 + 500 * MS, 0, lock, 7, 1);
        trace.wait_begin(t0 + 600 * MS, lock, 8);
        trace.acquire(t0 + 1600 * MS, 0, lock, 8, 1);
        let w = Collector::default().window(&r, t0 + 1650 * MS, 100 * MS, true);
        let held: Vec<(u64, u64)> = w.tasks[0].holdings.iter().map(|h| (h.held_ns / MS, h.waited_ns / MS)).collect();
        // Its unit is 2^20 ns.
        assert_eq!(held[0].0, 1150);
        assert!((998..=1002).contains(&held[0].1), "{held:?}");
        assert_eq!(held[1].0, 50);
        assert!(held[1].1 <= 2, "{held:?}");
        trace.wait_begin(t0 + 1650 * MS, lock, 9);
        let w = Collector::default().window(&r, t0 + 1750 * MS, 100 * MS, true);
        let h = w.tasks[0].holdings[1];
        assert!(h.held_ns - h.waited_ns <= 51 * MS, "the wait that runs counts too: {h:?}");
    }

    #[test]
    fn waits_within_a_unit_of_work_are_told_apart() {
        let (r, me, lock) = setup();
        let a = r.begin_task(me, 1, 0).unwrap();
        let (t0, slot) = (r.now_ns(), r.task(a).unwrap());
        slot.trace.wait_begin(t0, lock, 5);
        slot.trace.wait_abandoned(t0 + 500 * MS, lock);
        slot.work_waited.store((slot.trace.waited_ns.load(Relaxed) >> WAITED_SHIFT) as u32, Relaxed);
        slot.work_start_ns.store(t0 + 500 * MS, Relaxed);
        slot.trace.wait_begin(t0 + 600 * MS, lock, 6);
        slot.trace.wait_abandoned(t0 + 800 * MS, lock);
        slot.trace.wait_begin(t0 + 900 * MS, lock, 7);
        let w = Collector::default().window(&r, t0 + 1000 * MS, 100 * MS, true);
        assert_eq!(w.tasks[0].work_ns, 500 * MS);
        assert!((298..=302).contains(&(w.tasks[0].work_waited_ns / MS)), "{}", w.tasks[0].work_waited_ns);
    }

    #[test]
    fn those_who_wait_outside_are_as_late_as_those_inside() {
        let (r, _, slots) = setup();
        let t0 = r.now_ns();
        let entry = r.header().resource(slots).unwrap();
        entry.queue_waiting.store(4, Relaxed);
        entry.queue_oldest_wait_ns.store(400 * MS, Relaxed);
        entry.queue_observed_ns.store(t0, Relaxed);
        let mut c = Collector::default();
        c.window(&r, t0 + 100 * MS, 100 * MS, false);
        let w = c.window(&r, t0 + 200 * MS, 100 * MS, false);
        assert_eq!(w.classes[0].in_flight_age_ns, [400 * MS, 300 * MS, 200 * MS, 100 * MS]);
        let a = r.begin_task(ProcessId::current(), 1, 0).unwrap();
        r.begin_request(r.task(a).unwrap(), 5);
        r.end_request(r.task(a).unwrap(), 0);
        let w = c.window(&r, t0 + 210 * MS, 100 * MS, false);
        let waiters: Vec<(u16, usize)> = w.classes.iter().map(|c| (c.class, c.in_flight_age_ns.len())).collect();
        assert_eq!(waiters, [(5, 4)], "they count for the class that most requests are of");
        let late = c.window(&r, t0 + QUEUE_FRESH_NS, 100 * MS, false);
        assert!(
            late.classes.iter().all(|c| c.in_flight_age_ns.is_empty()),
            "an observation that is not repeated is out of date"
        );
    }

    /// A request that held nothing must never be shown with what the one before it on the same session held.
    #[test]
    fn holdings_are_never_shown_under_a_later_scope() {
        let (r, me, lock) = setup();
        let task = r.begin_task(me, 1, 0).unwrap();
        let slot = r.task(task).unwrap();
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|s| {
            s.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    r.begin_request(slot, 0);
                    // What is held is named after the scope that holds it.
                    let scope = slot.scope.load(Relaxed);
                    slot.trace.acquire(r.now_ns(), 0, lock, scope, 1);
                    slot.trace.release(r.now_ns(), lock, scope, 1);
                    r.end_request(slot, 0);
                }
            });
            let mut c = Collector::default();
            let (mut shown, mut wrong) = (0, None);
            for i in 0..20_000 {
                let w = c.window(&r, r.now_ns() + i, 100 * MS, true);
                for h in &w.tasks[0].holdings {
                    shown += 1;
                    wrong = wrong.or((h.instance < w.tasks[0].scope).then_some((w.tasks[0].scope, *h)));
                }
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            assert!(shown > 0, "the race was never met");
            assert!(wrong.is_none(), "scope and what it was shown with: {wrong:?}");
        });
    }

    #[test]
    fn the_turnover_is_of_those_who_gave_it_back() {
        let (r, me, lock) = setup();
        let (hog, quick) = (r.begin_task(me, 1, 0).unwrap(), r.begin_task(me, 2, 0).unwrap());
        let t0 = r.now_ns();
        r.task(hog).unwrap().trace.acquire(t0, 0, lock, 0, 1);
        let mut c = Collector::default();
        c.window(&r, t0 + 100 * MS, 100 * MS, false);
        c.measure_resources(&r);
        let w = c.window(&r, t0 + 150 * MS, 100 * MS, true);
        assert_eq!(w.resources[0].turnover_ns, 0, "nobody gave it back");
        let trace = &r.task(quick).unwrap().trace;
        for i in 0..4 {
            trace.acquire(t0 + (160 + 10 * i) * MS, 0, lock, 0, 1);
            trace.release(t0 + (165 + 10 * i) * MS, lock, 0, 1);
        }
        let w = c.window(&r, t0 + 200 * MS, 100 * MS, true);
        assert_eq!(w.resources[0].turnover_ns, 5 * MS);
    }

    #[test]
    fn a_crowd_that_came_in_before_the_window_and_leaves_in_it_turns_over() {
        // Seen in the simulation: the last of a crowd of readers looked like a monopolist, for nobody had come in lately.
        let (r, me, lock) = setup();
        let readers: Vec<u64> = (0..6).map(|key| r.begin_task(me, key, 0).unwrap()).collect();
        let t0 = r.now_ns();
        readers.iter().for_each(|&t| r.task(t).unwrap().trace.acquire(t0, 0, lock, 0, 1));
        let mut c = Collector::default();
        c.window(&r, t0 + 100 * MS, 100 * MS, false);
        c.measure_resources(&r);
        for (n, &t) in readers.iter().enumerate().take(4) {
            r.task(t).unwrap().trace.release(t0 + (120 + 20 * n as u64) * MS, lock, 0, 1);
        }
        let w = c.window(&r, t0 + 200 * MS, 100 * MS, true);
        // 20, 40, 60 and 80 ms of the window.
        assert_eq!((w.resources[0].acquired, w.resources[0].turnover_ns), (0, 50 * MS));
        // Two are too few to speak for all: one may be a culprit that was cancelled.
        readers.iter().skip(4).for_each(|&t| r.task(t).unwrap().trace.release(t0 + 290 * MS, lock, 0, 1));
        let w = c.window(&r, t0 + 300 * MS, 100 * MS, true);
        assert_eq!(w.resources[0].turnover_ns, 0);
    }

    #[test]
    fn the_usual_hold_is_learnt_in_calm_seconds() {
        let (r, me, lock) = setup();
        let a = r.begin_task(me, 1, 0).unwrap();
        let (t0, trace) = (r.now_ns(), &r.task(a).unwrap().trace);
        let mut c = Collector::default();
        c.learn_usual(&r, t0, false);
        for i in 0..50 {
            trace.acquire(t0 + i * 20 * MS, 0, lock, i, 1);
            trace.release(t0 + i * 20 * MS + 10 * MS, lock, i, 1);
        }
        c.learn_usual(&r, t0 + 500 * MS, false);
        assert_eq!(c.usual[lock as usize].hold_ns, 0, "not yet");
        c.learn_usual(&r, t0 + 1000 * MS, false);
        assert_eq!(c.usual[lock as usize].hold_ns, 10 * MS);
        for i in 0..50 {
            trace.acquire(t0 + 1000 * MS, 0, lock, i, 1);
            trace.release(t0 + 1900 * MS, lock, i, 1);
        }
        c.learn_usual(&r, t0 + 1500 * MS, true);
        c.learn_usual(&r, t0 + 2000 * MS, false);
        assert_eq!(c.usual[lock as usize].hold_ns, 10 * MS, "what was held in an overload is not usual");
    }

    #[test]
    fn what_was_noted_during_a_pause_of_the_clock_counts_from_its_end() {
        let (r, me, lock) = setup();
        let a = r.begin_task(me, 1, 0).unwrap();
        let t0 = r.now_ns();
        r.task(a).unwrap().trace.acquire(t0, 0, lock, 7, 1);
        let mut c = Collector::default();
        c.clock_gap(t0, t0 + 5000 * MS);
        let w = c.window(&r, t0 + 5010 * MS, 100 * MS, true);
        assert_eq!(w.tasks[0].holdings[0].held_ns, 10 * MS);
    }

    #[test]
    fn workers_and_children_count_for_their_task() {
        let (r, me, lock) = setup();
        let parent = r.begin_task(me, 1, 0).unwrap();
        let child = r.begin_task(me, 2, 0).unwrap();
        let other = r.begin_task(me, 3, 0).unwrap();
        let worker = r.attach(me, parent).unwrap();
        r.task(child).unwrap().parent.store(parent, Relaxed);
        let t0 = r.now_ns();
        r.worker(worker).unwrap().trace.acquire(t0, 0, lock, 1, 1);
        r.task(child).unwrap().trace.acquire(t0, 0, lock, 2, 1);
        r.task(other).unwrap().trace.wait_begin(t0, lock, 2);
        r.task(other).unwrap().trace.blocked_by(lock, child);
        let w = Collector::default().window(&r, t0 + MS, 100 * MS, true);
        let keys: Vec<u64> = w.tasks.iter().map(|t| t.key).collect();
        assert_eq!(keys, [1, 3]);
        let mut instances: Vec<u64> = w.tasks[0].holdings.iter().map(|h| h.instance).collect();
        instances.sort();
        assert_eq!(instances, [1, 2]);
        assert_eq!(w.edges[0].blocker, parent);
        assert_eq!(family_head(&r, child), parent);
    }

    #[test]
    fn what_workers_did_stays_when_they_go_and_counts_once_when_they_come_back() {
        let (r, me, lock) = setup();
        let parent = r.begin_task(me, 1, 0).unwrap();
        let t0 = r.now_ns();
        let work = |from_ns: u64, ns: u64| {
            let worker = r.attach(me, parent).unwrap();
            r.worker(worker).unwrap().trace.acquire(from_ns, 0, lock, 1, 1);
            r.worker(worker).unwrap().trace.release(from_ns + ns, lock, 1, 1);
            r.detach(worker);
        };
        // Long before anything is looked at.
        work(t0 - 50_000 * MS, 40_000 * MS);
        let mut c = Collector::default();
        c.window(&r, t0, 100 * MS, false);
        c.measure_resources(&r);
        let held = |c: &mut Collector, at_ns| {
            let w = c.window(&r, at_ns, 100 * MS, true);
            (w.resources[0].hold_ns / MS, w.resources[0].acquired)
        };
        work(t0 + 10 * MS, 10 * MS);
        assert_eq!(held(&mut c, t0 + 50 * MS), (10, 1));
        work(t0 + 60 * MS, 20 * MS);
        work(t0 + 80 * MS, 5 * MS);
        assert_eq!(held(&mut c, t0 + 90 * MS), (35, 3));
        let worker = r.attach(me, parent).unwrap();
        assert_eq!(held(&mut c, t0 + 95 * MS), (35, 3), "a worker begins with nothing done");
        r.detach(worker);
    }

    #[test]
    fn a_closed_gates_leftovers_are_not_seen() {
        let (r, me, lock) = setup();
        let a = r.begin_task(me, 1, 0).unwrap();
        let t0 = r.now_ns();
        r.task(a).unwrap().trace.acquire(t0, 0, lock, 7, 1);
        r.task(a).unwrap().trace.wait_begin(t0, lock, 8);
        r.header().clock.tracing_since_ns.store(t0 + MS, Relaxed);
        let w = Collector::default().window(&r, t0 + 2 * MS, 100 * MS, true);
        assert!(w.tasks[0].holdings.is_empty() && w.tasks[0].waits.is_empty() && !w.tasks[0].in_request);
    }
}
