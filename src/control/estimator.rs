//! `Window -> Estimate`: how contended each resource is, and what cancelling each task would give back.
//!
//! Formulas (Atropos, SOSP 2025; DESIGN section 8):
//! - contention level = execution time lost to the resource / execution time of all tasks, in the window;
//! - resource gain = usage x remaining / completed: the use of the resource that still lies ahead;
//! - relief is counterfactual: the waits that would end if the task went (see [`super::graph`]).

use std::collections::BTreeMap;

use super::graph::{clip, scale, Graph, Part, Relief, ResourceIndex, Scratch};
use super::window::{is_system, EdgeKind, Holding, ResourceId, ResourceKind, ResourceWindow, TaskId, TaskView, Window};

/// Whoever has used CPU or I/O for no longer than this many times what requests of its class, or of those it delays,
/// usually take is no culprit.
const SYSTEM_USUAL_TIMES: u64 = 5;

/// For how long a task has had a holding at its own pace. Whoever was held up itself (a deadlock's survivor, a victim of
/// the same culprit) has not used what it held meanwhile.
pub(super) fn own_time_ns(h: &Holding) -> u64 {
    h.held_ns.saturating_sub(h.waited_ns)
}

/// Whoever occupies a queue's server for no longer than this many times what his class usually takes may only be slow, up
/// to a time, ns: of ordinary requests on a starved machine some are.
const OWN_TIMES: u64 = 10;
const OWN_LONG_NS: u64 = 1_000_000_000;

/// What an ordinary request takes, for one task.
struct Ordinary<'a> {
    /// Per resource: of those who use it and wait for it.
    usual_ns: &'a [u64],
    /// Of the task's own class.
    own_ns: u64,
    /// Per resource.
    longest_wait_ns: &'a [u64],
}

impl Ordinary<'_> {
    fn ns(&self, r: u32) -> u64 {
        self.usual_ns[r as usize].max(self.own_ns)
    }

    /// Whoever occupies a queue's server for no longer is no hog.
    fn no_hog_ns(&self, r: u32) -> u64 {
        let own_ns = self.own_ns.saturating_mul(OWN_TIMES).min(OWN_LONG_NS);
        self.ns(r).saturating_mul(2).max(own_ns)
    }
}

/// What the estimator needs besides the window.
#[derive(Clone, Debug)]
pub struct EstimatorParams {
    /// A resource whose level reaches this is contended (0..=1).
    pub contention_threshold: f64,
    /// Typical duration of a request per class, ns, where the baseline knows it: stands in for missing progress.
    pub class_duration_ns: BTreeMap<u16, u64>,
}

impl Default for EstimatorParams {
    fn default() -> Self {
        EstimatorParams { contention_threshold: 0.30, class_duration_ns: BTreeMap::new() }
    }
}

/// One resource's contention in the window.
#[derive(Clone, Debug, PartialEq)]
pub struct ResourceEstimate {
    pub id: ResourceId,
    pub kind: ResourceKind,
    pub name: String,
    /// LOCK wait/hold time, MEMORY evictions/acquisitions, QUEUE wait and SYSTEM delay/execution time; >= 0, not bounded.
    pub raw_contention: f64,
    /// Contention level: 0..=1.
    pub level: f64,
    /// Execution time lost to it inside the window, ns.
    pub lost_ns: u64,
    /// Tasks that wait for it now, and waiters that are not tasks yet.
    pub waiting: u64,
}

/// Is a single resource to blame?
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OverloadKind {
    /// These resources are contended, the worst first.
    Resource(Vec<ResourceId>),
    /// None is: admission control has to help, cancelling cannot.
    Regular,
}

/// How a task comes to stand in the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It holds what others want (LOCK, MEMORY), or uses it up (SYSTEM).
    Holds,
    /// It waits itself, at the head of a queue, and its request bars those behind it.
    Bars,
    /// It occupies a server of a queue.
    Occupies,
    /// Those who occupy the resource wait for it: it frees the resource by freeing them.
    Through,
}

/// What cancelling a task would give back of one resource.
#[derive(Clone, Debug, PartialEq)]
pub struct Use {
    pub resource: ResourceId,
    pub instance: u64,
    pub role: Role,
    /// Usage so far: ns (LOCK, QUEUE), units (MEMORY); CPU time in ns or bytes in the window (SYSTEM).
    pub usage: u64,
    /// For how long it has used it, ns (MEMORY: how long its work has lasted; CPU: CPU time so far).
    pub usage_ns: u64,
    /// For how long those who run and hold up a queue's head have used it, at most, ns; of other roles the same as
    /// `usage_ns`.
    pub behind_ns: u64,
    /// The longest wait because of it (MEMORY: 0, for those waits are many and brief), ns.
    pub waited_ns: u64,
    /// Resource gain in the unit of `usage`; finite, > 0.
    pub gain: f64,
    /// The same as time, ns: comparable over resources before weighing by `share`.
    pub gain_ns: f64,
    /// Execution time inside the window that its victims lost to this resource because of it, ns.
    pub freed_ns: u64,
    /// Part of the resource's lost time that would end, 0..=1.
    pub share: f64,
}

impl Use {
    /// The gain in the unit that scores compare: seconds of the whole resource.
    pub fn scaled_gain(&self) -> f64 {
        self.gain_ns / 1e9 * self.share
    }
}

/// A task in whose way somebody is.
#[derive(Clone, Debug)]
pub struct Candidate {
    pub task: TaskId,
    /// Its place in `Window::tasks`.
    pub index: usize,
    /// Only resources on which somebody would be freed; by resource id. Empty = its going frees nobody.
    pub uses: Vec<Use>,
    /// Share of all execution time in the window that would not have been lost, 0..=1.
    pub relief_share: f64,
    /// Tasks whose wait for a lock (or whose edges) would end, ascending; waiters of pools are not listed one by one.
    pub victims: Vec<TaskId>,
    /// Completed fraction used for the gain, within 0.01..=0.99; None = unknown.
    pub progress: Option<f64>,
    /// Work done that a cancel would throw away, ns.
    pub work_lost_ns: u64,
    /// It waits itself.
    pub blocked: bool,
}

/// The estimator's result for one window.
#[derive(Clone, Debug)]
pub struct Estimate {
    /// In the order of `Window::resources`.
    pub resources: Vec<ResourceEstimate>,
    pub kind: OverloadKind,
    /// Ascending by task id.
    pub candidates: Vec<Candidate>,
    /// Execution time of all tasks, ns: the denominator of levels and reliefs.
    pub exec_ns: u64,
    graph: Graph,
}

/// `usage x remaining / completed`, with the completed fraction bounded to 1%..99% since reported progress may be
/// wrong or stuck. Finite and > 0 for usage > 0; a lock held 1 s at 40% gains 1.5 s.
pub fn resource_gain(usage: u64, completed: f64) -> f64 {
    usage as f64 * remaining_over_completed(completed)
}

fn remaining_over_completed(completed: f64) -> f64 {
    let done = if completed.is_nan() { 0.5 } else { completed.clamp(0.01, 0.99) };
    (1.0 - done) / done
}

/// Mean of min(wait, window) for waiters that came evenly over the last `oldest` ns.
fn mean_clipped_ns(oldest_ns: u64, window_ns: u64) -> u64 {
    if oldest_ns <= window_ns {
        oldest_ns / 2
    } else {
        window_ns - scale(window_ns, window_ns / 2, oldest_ns)
    }
}

/// How far a task is: its own report; else its age against what its class usually takes.
fn completed_fraction(task: &TaskView, params: &EstimatorParams) -> Option<f64> {
    if !task.in_request {
        return None; // idle: its last report says nothing about when the client will end it
    }
    // Past what was expected the expectation was wrong, and nothing is known: else whoever was underestimated would
    // count as done, and be safe for ever.
    if let Some((done, total)) = task.progress.filter(|p| p.0 < p.1) {
        return Some((done as f64 / total as f64).clamp(0.01, 0.99));
    }
    let usual = *params.class_duration_ns.get(&task.class)?;
    // Beyond its usual duration nothing is known again; just before, at least a tenth is taken to remain.
    let left = usual.checked_sub(task.age_ns).filter(|&left| left > 0)?.max(usual / 10);
    Some((task.age_ns as f64 / (task.age_ns as f64 + left as f64)).clamp(0.01, 0.99))
}

/// Execution time lost to a resource and, per untracked waiter, what it adds to the execution time of all.
fn lost_and_untracked_ns(r: &ResourceWindow, running_ns: u64, window_ns: u64) -> (u64, u64) {
    let untracked = r.untracked_waiting.saturating_mul(mean_clipped_ns(r.untracked_oldest_wait_ns, window_ns));
    // Memory that is acquired without evicting anybody's is not contended: those waits are for cold data.
    let cold = r.kind == ResourceKind::Memory && r.acquired > 0 && r.evicted == 0;
    let tracked = if cold { 0 } else { r.wait_ns.max(running_ns) };
    (tracked.saturating_add(untracked), untracked)
}

fn ratio(a: u64, b: u64) -> f64 {
    match (a, b) {
        (0, _) => 0.0,
        // Waits without a single hold: as contended as can be said without an infinity.
        (a, 0) => a as f64,
        (a, b) => a as f64 / b as f64,
    }
}

/// Estimates contention and reliefs. Pure; never panics, no NaN for any input.
pub fn estimate(window: &Window, params: &EstimatorParams) -> Estimate {
    let index = ResourceIndex::new(&window.resources);
    let mut running_ns = vec![0u64; window.resources.len()];
    let mut waiting = vec![0u64; window.resources.len()];
    let mut tasks_exec_ns = 0u64;
    for task in &window.tasks {
        tasks_exec_ns = tasks_exec_ns.saturating_add(task.exec_ns);
        for wait in &task.waits {
            if let Some(r) = index.get(wait.resource) {
                let sum = &mut running_ns[r as usize];
                *sum = sum.saturating_add(clip(wait.waited_ns, window));
                waiting[r as usize] += 1;
            }
        }
    }
    let mut exec_ns = window.exec_ns.max(tasks_exec_ns);
    let mut lost_ns = Vec::with_capacity(window.resources.len());
    for (r, &running) in window.resources.iter().zip(&running_ns) {
        let (lost, untracked) = lost_and_untracked_ns(r, running, window.length_ns);
        lost_ns.push(lost);
        exec_ns = exec_ns.saturating_add(untracked);
    }
    let resources: Vec<ResourceEstimate> = window
        .resources
        .iter()
        .zip(lost_ns.iter().zip(&waiting))
        .map(|(r, (&lost, &waiting))| ResourceEstimate {
            id: r.id,
            kind: r.kind,
            name: r.name.clone(),
            raw_contention: match r.kind {
                ResourceKind::Lock => ratio(r.wait_ns, r.hold_ns),
                ResourceKind::Memory => ratio(r.evicted, r.acquired),
                ResourceKind::Queue | ResourceKind::System => ratio(lost, exec_ns),
            },
            level: fraction(lost, exec_ns),
            lost_ns: lost,
            waiting: waiting.saturating_add(r.untracked_waiting),
        })
        .collect();
    let mut contended: Vec<&ResourceEstimate> =
        resources.iter().filter(|r| r.lost_ns > 0 && r.level >= params.contention_threshold).collect();
    contended.sort_by(|a, b| b.level.total_cmp(&a.level).then(a.id.cmp(&b.id)));
    let mut contended: Vec<ResourceId> = contended.iter().map(|r| r.id).collect();
    let graph = Graph::new(window, &index, &lost_ns);
    let mut estimate = Estimate { resources, kind: OverloadKind::Regular, candidates: Vec::new(), exec_ns, graph };
    estimate.candidates = estimate.find_candidates(window, params);
    // A machine that is busy with work of equals is a regular overload: a CPU without a hog is nobody's monopoly.
    contended.retain(|&id| !is_system(id) || estimate.uses_of(id).next().is_some());
    if !contended.is_empty() {
        estimate.kind = OverloadKind::Resource(contended);
    }
    estimate
}

/// `part / whole` within 0..=1; 0 when there is no whole.
fn fraction(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        (part as f64 / whole as f64).min(1.0)
    }
}

impl Estimate {
    /// A resource's estimate by id.
    pub fn resource(&self, id: ResourceId) -> Option<&ResourceEstimate> {
        self.resources.iter().find(|r| r.id == id)
    }

    /// A task's candidacy, if it stands in anybody's way.
    pub fn candidate(&self, task: TaskId) -> Option<&Candidate> {
        // Ascending by task.
        self.candidates.binary_search_by_key(&task, |c| c.task).ok().map(|at| &self.candidates[at])
    }

    fn uses_of(&self, id: ResourceId) -> impl Iterator<Item = &Use> {
        self.candidates.iter().flat_map(|c| &c.uses).filter(move |u| u.resource == id)
    }

    pub(super) fn scratch(&self) -> Scratch {
        self.graph.scratch()
    }

    /// The joint counterfactual of several tasks (by place in the window): time freed per resource, in their order.
    pub(super) fn joint_relief(&self, set: &[u32], scratch: &mut Scratch) -> Relief {
        self.graph.relief(set, scratch)
    }

    /// Share of the execution time that a relief gives back, 0..=1.
    pub(super) fn relief_share(&self, freed_ns: &[u64]) -> f64 {
        fraction(freed_ns.iter().fold(0u64, |sum, &ns| sum.saturating_add(ns)), self.exec_ns)
    }

    /// Everybody a relief helps: freed waiters and those who wait for a pool of which a part comes back.
    pub(super) fn all_victims(&self, relief: &Relief, window: &Window, without: &[u32]) -> Vec<TaskId> {
        let mut victims: Vec<TaskId> = relief.victims.iter().map(|&t| window.tasks[t as usize].id).collect();
        // One pass over the waits, however many pools come back.
        let mut pools: Vec<(ResourceId, u64)> = relief
            .pools
            .iter()
            .map(|&p| &self.graph.pools[p as usize])
            .map(|pool| (self.resources[pool.resource as usize].id, pool.instance))
            .collect();
        pools.sort_unstable();
        if !pools.is_empty() {
            let waits = |t: &TaskView| t.waits.iter().any(|w| pools.binary_search(&(w.resource, w.instance)).is_ok());
            let all = window.tasks.iter().enumerate();
            victims.extend(all.filter(|(i, t)| waits(t) && !without.contains(&(*i as u32))).map(|(_, t)| t.id));
        }
        victims.sort_unstable();
        victims.dedup();
        victims
    }

    fn find_candidates(&self, window: &Window, params: &EstimatorParams) -> Vec<Candidate> {
        let completed: Vec<Option<f64>> = window.tasks.iter().map(|t| completed_fraction(t, params)).collect();
        let usual = self.usual_occupation(window, params);
        let usual_waiter = self.usual_waiter(window, params);
        let usual: Vec<u64> = usual.into_iter().zip(usual_waiter).map(|(a, b)| a.max(b)).collect();
        let mut longest_ns: Vec<u64> = window.resources.iter().map(|r| r.untracked_oldest_wait_ns).collect();
        for w in &self.graph.waits {
            if let Some(longest) = w.resource.and_then(|r| longest_ns.get_mut(r as usize)) {
                *longest = w.waited_ns.max(*longest);
            }
        }
        let mut scratch = self.scratch();
        let mut relief = Relief::default();
        let mut found = Vec::new();
        for t in 0..self.graph.tasks as u32 {
            // Holding a share of a pool that is not contended makes nobody a candidate; of one who is, it counts.
            let contends = |p: &Part| {
                let pool = &self.graph.pools[p.pool as usize];
                pool.lost_ns > 0 && self.resources[pool.resource as usize].level >= params.contention_threshold
            };
            if self.graph.bars.row(t).is_empty() && !self.graph.parts.row(t).iter().any(contends) {
                continue;
            }
            self.graph.relief_into(&[t], &mut scratch, &mut relief);
            let task = &window.tasks[t as usize];
            // What is usual of its own class is no hogging either, even where only untracked waiters suffer from it.
            let own_usual = params.class_duration_ns.get(&task.class).copied().unwrap_or(0);
            let ordinary = Ordinary { usual_ns: &usual, own_ns: own_usual, longest_wait_ns: &longest_ns };
            let uses = self.uses(t, &relief, window, &completed, &ordinary);
            found.push(Candidate {
                task: task.id,
                index: t as usize,
                relief_share: fraction(uses.iter().fold(0, |sum: u64, u| sum.saturating_add(u.freed_ns)), self.exec_ns),
                uses,
                victims: relief.victims.iter().map(|&v| window.tasks[v as usize].id).collect(),
                progress: completed[t as usize],
                work_lost_ns: task.work_ns.max(task.age_ns),
                blocked: self.graph.blocked[t as usize],
            });
        }
        found.sort_unstable_by_key(|c| (c.task, c.index));
        found
    }

    /// How long those who wait for a queue usually run, per resource: an occupant no longer than that is their
    /// equal, and its server would go to the next of the kind. 0 = not known.
    fn usual_occupation(&self, window: &Window, params: &EstimatorParams) -> Vec<u64> {
        let mut usual = vec![0u64; self.resources.len()];
        if params.class_duration_ns.is_empty() {
            return usual;
        }
        for w in &self.graph.waits {
            if let Some(r) = w.resource {
                let class = window.tasks[w.task as usize].class;
                let duration = params.class_duration_ns.get(&class).copied().unwrap_or(0);
                usual[r as usize] = usual[r as usize].max(duration);
            }
        }
        usual
    }

    /// The same for those who are delayed for want of a SYSTEM resource.
    fn usual_waiter(&self, window: &Window, params: &EstimatorParams) -> Vec<u64> {
        let mut usual = vec![0u64; self.resources.len()];
        for (r, resource) in self.resources.iter().enumerate().filter(|(_, r)| r.kind == ResourceKind::System) {
            let delayed = window.tasks.iter().filter(|t| t.waits.iter().any(|w| w.resource == resource.id));
            let durations = delayed.filter_map(|t| params.class_duration_ns.get(&t.class).copied());
            usual[r] = durations.max().unwrap_or(0);
        }
        usual
    }

    fn uses(
        &self,
        t: u32,
        relief: &Relief,
        window: &Window,
        completed: &[Option<f64>],
        ordinary: &Ordinary,
    ) -> Vec<Use> {
        let g = &self.graph;
        let task = &window.tasks[t as usize];
        // Without a completed fraction as much is taken to remain as is done: gain = usage.
        let ahead = |t: u32| completed[t as usize].map_or(1.0, remaining_over_completed);
        let held = |t: u32, barrier: u32| {
            let b = &g.barriers[barrier as usize];
            let id = b.resource.map(|r| self.resources[r as usize].id);
            let holdings = window.tasks[t as usize].holdings.iter();
            let held = holdings.filter(|h| Some(h.resource) == id && h.instance == b.instance).map(own_time_ns).max();
            // Not traced: it has held it at least as long as somebody has waited for it, and may have since its unit of
            // work began. But where holdings are traced and the task has room for more, it can only have got it since
            // its trace was read: edges are asked for later.
            let traced = b.resource.is_some_and(|r| window.resources[r as usize].acquired > 0);
            let task = &window.tasks[t as usize];
            let room = task.holdings.len() < crate::region::layout::HOLDINGS;
            let untraced = || g.longest_wait_ns(barrier).max(task.work_ns.saturating_sub(task.work_waited_ns));
            let usage = held.unwrap_or_else(|| if traced && room { 1 } else { untraced() });
            (usage, usage as f64 * ahead(t))
        };
        let mut direct: Vec<(u32, Use)> = Vec::new();
        let mut base = (0u64, 0f64, 0u64); // usage, gain, instance of what it blocks most
        let mut waited_ns = vec![0u64; self.resources.len()];
        // Ties by instance: barriers are numbered in the order of tasks, which must not matter.
        let better = |a: &Use, b: &Use| {
            a.gain_ns > b.gain_ns || (a.gain_ns == b.gain_ns && (a.instance, a.role as u8) < (b.instance, b.role as u8))
        };
        let mut add = |r: u32, new: Use| match direct.iter_mut().find(|d| d.0 == r) {
            Some(d) if !better(&new, &d.1) => {}
            Some(d) => d.1 = new,
            None => direct.push((r, new)),
        };
        for &(b, kind) in g.bars.row(t) {
            let barrier = &g.barriers[b as usize];
            let blames = !g.blocked[t as usize] || kind == EdgeKind::Queued;
            if !blames || relief.fallen.binary_search(&b).is_err() {
                continue;
            }
            let waited = g.longest_wait_ns(b);
            if let Some(r) = barrier.resource {
                waited_ns[r as usize] = waited_ns[r as usize].max(waited);
            }
            let (role, (usage, gain, behind_ns)) = match kind {
                EdgeKind::Queued if g.blocked[t as usize] => (Role::Bars, g.inherited(t, &held)),
                EdgeKind::Queued => (Role::Bars, (waited, waited as f64 * ahead(t), waited)),
                EdgeKind::Holds => {
                    let (usage, gain) = held(t, b);
                    (Role::Holds, (usage, gain, usage))
                }
            };
            if gain > base.1 || (gain == base.1 && barrier.instance < base.2) {
                base = (behind_ns.max(usage), gain, barrier.instance);
            }
            if let Some(r) = barrier.resource {
                let new = self.new_use(r, barrier.instance, role, usage, usage, gain, gain);
                add(r, Use { behind_ns, ..new });
            }
        }
        for part in g.parts.row(t).iter().filter(|p| relief.pools.contains(&p.pool)) {
            let pool = &g.pools[part.pool as usize];
            let (r, elapsed_ns) = (pool.resource, task.age_ns.max(task.work_ns).max(part.held_ns));
            match self.resources[r as usize].kind {
                ResourceKind::Memory => {
                    let gain = part.amount as f64 * ahead(t);
                    let gain_ns = elapsed_ns as f64 * ahead(t);
                    add(r, self.new_use(r, pool.instance, Role::Holds, part.amount, elapsed_ns, gain, gain_ns));
                }
                // An ordinary request is no hog, however many processors it had to itself for a moment.
                ResourceKind::System if part.held_ns <= ordinary.ns(r).saturating_mul(SYSTEM_USUAL_TIMES) => {}
                ResourceKind::System => {
                    let gain = part.amount as f64 * ahead(t);
                    let gain_ns = elapsed_ns as f64 * ahead(t);
                    add(r, self.new_use(r, pool.instance, Role::Holds, part.amount, part.held_ns, gain, gain_ns));
                }
                _ if part.held_ns <= ordinary.no_hog_ns(r) => {}
                _ => {
                    let gain = part.held_ns as f64 * ahead(t);
                    add(r, self.new_use(r, pool.instance, Role::Occupies, part.held_ns, part.held_ns, gain, gain));
                }
            }
        }
        let mut uses = Vec::new();
        for (r, &freed) in relief.freed_ns.iter().enumerate().filter(|(_, &freed)| freed > 0) {
            let own = direct.iter().find(|d| d.0 == r as u32).map(|d| d.1.clone());
            // Those who occupy this resource are stuck on the task just as long as its own victims are.
            let through =
                (base.1 > 0.0).then(|| self.new_use(r as u32, base.2, Role::Through, base.0, base.0, base.1, base.1));
            let best = match (own, through) {
                (Some(own), Some(through)) if own.role == Role::Occupies && through.gain_ns > own.gain_ns => {
                    Some(through)
                }
                (Some(own), _) => Some(own),
                (None, through) => through,
            };
            if let Some(mut new) = best.filter(|u| u.gain_ns > 0.0) {
                new.freed_ns = freed;
                new.waited_ns = match (new.role, self.resources[r].kind) {
                    (_, ResourceKind::Memory | ResourceKind::System) => 0,
                    (Role::Occupies, _) => ordinary.longest_wait_ns[r],
                    (Role::Through, _) => waited_ns.iter().copied().max().unwrap_or(0),
                    _ => waited_ns[r],
                };
                new.share = fraction(freed, self.resources[r].lost_ns);
                uses.push(new);
            }
        }
        uses.sort_by_key(|u| u.resource);
        uses
    }

    #[allow(clippy::too_many_arguments)] // one constructor for the three kinds of usage
    fn new_use(&self, r: u32, instance: u64, role: Role, usage: u64, usage_ns: u64, gain: f64, gain_ns: f64) -> Use {
        let resource = self.resources[r as usize].id;
        let (behind_ns, waited_ns, freed_ns, share) = (usage_ns, 0, 0, 0.0);
        Use { resource, instance, role, usage, usage_ns, behind_ns, waited_ns, gain, gain_ns, freed_ns, share }
    }
}
