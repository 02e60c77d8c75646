//! Who waits for whom, and the counterfactual: which waits would end if these tasks were gone?
//!
//! Everything is in dense indices (tasks and resources by their place in the window), in few and flat lists, so that a
//! window of 1,000 tasks x 32 resources stays far below the controller's budget.
//!
//! Three shapes of blocking:
//! - a **barrier** (LOCK, or any wait whose edges the host gave): waits that end once *all* its blockers are gone;
//! - a **pool** (MEMORY, QUEUE, SYSTEM): nobody in particular blocks. Of memory a holder gives back its share, of CPU and
//!   I/O what it used in the window; of a queue each server that comes back serves many, so what counts is how many of
//!   those that are usually busy are missing;
//! - a **stuck slot**: whoever occupies a queue's server while it waits for a lock gives the server back only when
//!   the lock's holder goes, so the relief of the queue belongs to that holder.

use super::window::{is_system, EdgeKind, ResourceId, ResourceKind, ResourceWindow, TaskId, TaskView, Window};
use std::ops::Range;

/// A holder that acquired this much later than the oldest wait began still counts as "there before": events read a
/// coarse clock.
const CLOCK_SLACK_NS: u64 = 2_000_000;
/// A wait younger than this is a hiccup when its task has held what others want ten times longer: without this a
/// culprit that takes many short locks on its way would be excused at every second look.
const BRIEF_WAIT_NS: u64 = 5_000_000;
const BRIEF_WAIT_FACTOR: u64 = 10;
/// How many tasks of a chain are asked for the gain that a queue head inherits.
const MAX_INHERIT: usize = 64;
/// Whoever has a queue's server for this many turnovers of the others, and all through the window, does not turn over.
pub(super) const LONG_TURNOVERS: u64 = 10;
/// Whoever uses less than this part of the CPU or of the I/O does not monopolise it, however little the others use.
const SYSTEM_LEAST_SHARE: f64 = 0.25;
/// Nobody: an untracked blocker.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
pub(super) struct WaitRec {
    pub task: u32,
    pub resource: Option<u32>,
    pub waited_ns: u64,
    /// The part of it inside the window.
    pub clipped_ns: u64,
}

/// Who holds a lock that somebody waits for.
#[derive(Clone, Copy, Debug)]
struct Holder {
    task: u32,
    held_ns: u64,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Blocker {
    pub task: u32,
    pub kind: EdgeKind,
}

/// Waits that end once all blockers are gone.
#[derive(Clone, Debug)]
pub(super) struct Barrier {
    pub resource: Option<u32>,
    pub instance: u64,
    /// Somebody untracked blocks too: nothing we do ends these waits.
    pub untracked: bool,
    /// Its places in the graph's list of all blockers, and in that of all waits before barriers.
    blockers: Range<u32>,
    waits: Range<u32>,
    longest_wait_ns: u64,
    /// For how long one of its blockers has held something at its own pace, at most.
    longest_own_ns: u64,
}

/// One instance of a MEMORY, QUEUE or SYSTEM resource.
#[derive(Clone, Debug)]
pub(super) struct Pool {
    pub resource: u32,
    pub instance: u64,
    /// Units (MEMORY) or servers (QUEUE) that tasks hold; SYSTEM: what there is, at least what tasks used.
    pub total: u64,
    pub holders: u32,
    /// Execution time lost to this instance in the window.
    pub lost_ns: u64,
    /// QUEUE: servers that turn over and servers that are missing, at least 1: each that comes back ends as large a part
    /// of the waits.
    pub wanted: u64,
    /// Nobody in the pool runs (QUEUE): all its servers are stuck behind locks.
    pub stuck: bool,
}

/// A task's part of a pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub pool: u32,
    pub amount: u64,
    /// A queue's server: at its own pace. Whoever has it and waits for a lock is only a victim.
    pub held_ns: u64,
    /// SYSTEM: its own delays in the window; they end with it, but free nobody.
    pub delayed_ns: u64,
}

/// A holding of a pool, before those of a task are put together.
struct PoolHolder {
    resource: u32,
    instance: u64,
    task: u32,
    amount: u64,
    held_ns: u64,
    own_ns: u64,
}

/// Rows of `T` per task, in one allocation.
#[derive(Clone, Debug)]
pub(super) struct Rows<T> {
    start: Vec<u32>,
    items: Vec<T>,
}

impl<T> Default for Rows<T> {
    fn default() -> Self {
        Rows { start: Vec::new(), items: Vec::new() }
    }
}

impl<T> Rows<T> {
    /// `pairs` = (row, item); the order inside a row is kept.
    fn new(rows: usize, pairs: Vec<(u32, T)>) -> Self
    where
        T: Copy,
    {
        let mut start = vec![0u32; rows + 1];
        for (row, _) in &pairs {
            start[*row as usize + 1] += 1;
        }
        for i in 0..rows {
            start[i + 1] += start[i];
        }
        let Some(&(_, any)) = pairs.first() else { return Rows { start, items: Vec::new() } };
        let mut items = vec![any; pairs.len()];
        let mut next = start.clone();
        for (row, item) in pairs {
            let at = &mut next[row as usize];
            items[*at as usize] = item;
            *at += 1;
        }
        Rows { start, items }
    }

    pub fn row(&self, row: u32) -> &[T] {
        match self.start.get(row as usize..row as usize + 2) {
            Some(s) => &self.items[s[0] as usize..s[1] as usize],
            None => &[],
        }
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Graph {
    pub tasks: usize,
    pub resources: usize,
    pub waits: Vec<WaitRec>,
    pub barriers: Vec<Barrier>,
    /// Those of one barrier stand together.
    blockers: Vec<Blocker>,
    barrier_waits: Vec<u32>,
    /// Per task: the barriers it blocks.
    pub bars: Rows<(u32, EdgeKind)>,
    /// Per task: the waits it is in.
    pub waits_of: Rows<u32>,
    /// Per wait: the barrier it stands before (`NONE` = unknown blocker, or a pool).
    barrier_of: Vec<u32>,
    pub pools: Vec<Pool>,
    /// Per task: what it holds of pools.
    pub parts: Rows<Part>,
    /// The task waits for somebody: what it holds is its own blocker's fault.
    pub blocked: Vec<bool>,
    /// For how long each task has held something at its own pace, at most.
    own_ns: Vec<u64>,
    /// Per resource: is it a queue?
    queue: Vec<bool>,
    /// Per resource: is it the machine's?
    system: Vec<bool>,
}

/// What a set of tasks would give back if it went.
#[derive(Clone, Debug, Default)]
pub(super) struct Relief {
    /// Per resource: time lost inside the window that would not have been.
    pub freed_ns: Vec<u64>,
    /// Tasks whose wait would end, without the set itself; ascending.
    pub victims: Vec<u32>,
    /// Barriers that would fall; ascending.
    pub fallen: Vec<u32>,
    /// Pools of which a part would come back; ascending.
    pub pools: Vec<u32>,
}

impl Relief {
    fn clear(&mut self, resources: usize) {
        self.freed_ns.clear();
        self.freed_ns.resize(resources, 0);
        self.victims.clear();
        self.fallen.clear();
        self.pools.clear();
    }
}

/// Work space of the counterfactual, reused over candidates: a stamp makes clearing it free.
pub(super) struct Scratch {
    stamp: u32,
    barrier: Vec<(u32, u32)>,
    waits_left: Vec<(u32, u32)>,
    task: Vec<(u32, Gone)>,
    pool_freed: Vec<u64>,
    bars_to_hit: Vec<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Gone {
    No,
    /// Removed while it waits itself: it stops barring the queue, but is not to blame for what it holds.
    QueueOnly,
    Yes,
}

/// Dense numbering of ids.
pub(super) struct Index<K> {
    sorted: Vec<(K, u32)>,
}

impl<K: Ord + Copy> Index<K> {
    pub fn new(ids: impl Iterator<Item = K>) -> Self {
        let mut sorted: Vec<(K, u32)> = ids.enumerate().map(|(i, k)| (k, i as u32)).collect();
        sorted.sort_unstable();
        Index { sorted }
    }

    pub fn get(&self, id: K) -> Option<u32> {
        self.sorted.binary_search_by(|probe| probe.0.cmp(&id)).ok().map(|i| self.sorted[i].1)
    }
}

/// Resources by id. The library numbers them from 1 and has few, so nearly all are found without a search.
pub(super) struct ResourceIndex {
    direct: [u32; DIRECT],
    others: Index<ResourceId>,
}

const DIRECT: usize = 64;

impl ResourceIndex {
    pub fn new(resources: &[ResourceWindow]) -> Self {
        let mut direct = [NONE; DIRECT];
        for (place, r) in resources.iter().enumerate().filter(|(_, r)| (r.id as usize) < DIRECT) {
            direct[r.id as usize] = place as u32;
        }
        // Numbered by place in the window, so all are listed; of the first ones none is ever looked for here.
        let any = resources.iter().any(|r| r.id as usize >= DIRECT);
        ResourceIndex { direct, others: Index::new(resources.iter().filter(|_| any).map(|r| r.id)) }
    }

    pub fn get(&self, id: ResourceId) -> Option<u32> {
        match self.direct.get(id as usize) {
            Some(&place) => (place != NONE).then_some(place),
            None => self.others.get(id),
        }
    }
}

/// The (resource, instance) pairs that somebody waits for, numbered as they come; found by hashing.
struct Groups {
    keys: Vec<(u32, u64)>,
    /// A number or `NONE`; at most half full, a power of two long.
    table: Vec<u32>,
}

impl Groups {
    fn with_room_for(most: usize) -> Self {
        Groups { keys: Vec::new(), table: vec![NONE; (2 * most).next_power_of_two()] }
    }

    /// The place of the pair in the table, or where it would be.
    fn place(&self, resource: u32, instance: u64) -> usize {
        // Fibonacci hashing: the product's upper bits depend on all bits of the pair.
        let hash = (instance ^ (resource as u64) << 56).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let mask = self.table.len() - 1;
        let mut at = hash as usize & mask;
        while self.table[at] != NONE && self.keys[self.table[at] as usize] != (resource, instance) {
            at = (at + 1) & mask;
        }
        at
    }

    fn add(&mut self, resource: u32, instance: u64) -> u32 {
        let at = self.place(resource, instance);
        if self.table[at] == NONE {
            self.table[at] = self.keys.len() as u32;
            self.keys.push((resource, instance));
        }
        self.table[at]
    }

    fn get(&self, resource: u32, instance: u64) -> Option<u32> {
        Some(self.table[self.place(resource, instance)]).filter(|&group| group != NONE)
    }

    /// The groups in ascending order of what they are.
    fn ordered(&self) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.keys.len() as u32).collect();
        order.sort_unstable_by_key(|&group| self.keys[group as usize]);
        order
    }
}

/// Orders by resource, then instance, then the third: one comparison instead of three.
fn key(resource: u32, instance: u64, third: u32) -> u128 {
    (resource as u128) << 96 | (instance as u128) << 32 | third as u128
}

/// `a * b / c` without overflow; 0 when `c` is 0.
pub(super) fn scale(a: u64, b: u64, c: u64) -> u64 {
    if c == 0 {
        return 0;
    }
    u64::try_from(a as u128 * b as u128 / c as u128).unwrap_or(u64::MAX)
}

fn range(places: &Range<u32>) -> Range<usize> {
    places.start as usize..places.end as usize
}

/// The time of a wait inside the window.
pub(super) fn clip(waited_ns: u64, window: &Window) -> u64 {
    waited_ns.min(window.length_ns)
}

impl Graph {
    /// `lost_ns` = execution time lost per resource (by place in the window), running waits included.
    pub fn new(window: &Window, resources: &ResourceIndex, lost_ns: &[u64]) -> Graph {
        let kind_of = |r: u32| window.resources[r as usize].kind;
        let tasks = window.tasks.len();
        let mut g = Graph {
            tasks,
            resources: window.resources.len(),
            queue: window.resources.iter().map(|r| r.kind == ResourceKind::Queue).collect(),
            system: window.resources.iter().map(|r| r.kind == ResourceKind::System).collect(),
            ..Graph::default()
        };

        // Waits, and the (resource, instance) groups of those that need inference.
        let edges = EdgeIndex::new(window);
        let waiting: usize = window.tasks.iter().map(|t| t.waits.len()).sum();
        g.waits.reserve(waiting);
        let mut wait_pairs = Vec::with_capacity(waiting);
        let mut groups = Groups::with_room_for(waiting);
        let mut inferred: Vec<(u32, u32)> = Vec::with_capacity(waiting); // (group, wait)
        let mut run_wait_ns = vec![0u64; window.resources.len()];
        let mut pool_waits: Vec<(u32, u64, u64)> = Vec::new();
        for (t, task) in window.tasks.iter().enumerate() {
            let t = t as u32;
            let has_edges = edges.of(t).next().is_some();
            let first = g.waits.len() as u32;
            for wait in &task.waits {
                let Some(r) = resources.get(wait.resource) else {
                    continue;
                };
                let kind = kind_of(r);
                let clipped_ns = clip(wait.waited_ns, window);
                if kind != ResourceKind::Lock {
                    run_wait_ns[r as usize] = run_wait_ns[r as usize].saturating_add(clipped_ns);
                    pool_waits.push((r, wait.instance, clipped_ns));
                }
                if matches!(kind, ResourceKind::Memory | ResourceKind::System) {
                    continue; // it runs on, only slower
                }
                let w = g.waits.len() as u32;
                g.waits.push(WaitRec { task: t, resource: Some(r), waited_ns: wait.waited_ns, clipped_ns });
                wait_pairs.push((t, w));
                if !has_edges && kind == ResourceKind::Lock {
                    inferred.push((groups.add(r, wait.instance), w));
                }
            }
            if has_edges {
                if g.waits.len() as u32 == first {
                    // The host knows of a wait that was not traced: it blocks, but has no length.
                    let r = edges.of(t).find_map(|e| resources.get(e.resource));
                    wait_pairs.push((t, first));
                    g.waits.push(WaitRec { task: t, resource: r, waited_ns: 0, clipped_ns: 0 });
                }
                g.push_edge_barrier(&edges, t, first..g.waits.len() as u32, resources);
            }
        }
        g.waits_of = Rows::new(tasks, wait_pairs);

        // Holders of the waited-for locks, and of the contended pools.
        let pool_lost = |(r, &lost_ns): (&ResourceWindow, &u64)| r.kind != ResourceKind::Lock && lost_ns > 0;
        let mut wanted: Vec<bool> = window.resources.iter().zip(lost_ns).map(pool_lost).collect();
        groups.keys.iter().for_each(|k| wanted[k.0 as usize] = true);
        let mut holders: Vec<(u32, Holder)> = Vec::new();
        let mut pool_holders: Vec<PoolHolder> = Vec::new();
        let mut oldest_hold_ns = Vec::with_capacity(tasks);
        g.own_ns.reserve(tasks);
        for (t, task) in window.tasks.iter().enumerate() {
            let (mut oldest_ns, mut own_ns) = (0, 0);
            for h in &task.holdings {
                if !is_system(h.resource) {
                    oldest_ns = h.held_ns.max(oldest_ns);
                    own_ns = h.held_ns.saturating_sub(h.waited_ns).max(own_ns);
                }
                let Some(r) = resources.get(h.resource) else {
                    continue;
                };
                // Of most resources nobody wants anything just now.
                if !wanted[r as usize] {
                    continue;
                }
                if kind_of(r) == ResourceKind::Lock {
                    if let Some(group) = groups.get(r, h.instance) {
                        holders.push((group, Holder { task: t as u32, held_ns: h.held_ns }));
                    }
                } else {
                    let queue = g.queue[r as usize];
                    let (instance, task, held_ns) = (h.instance, t as u32, h.held_ns);
                    let amount = if queue { 1 } else { h.amount };
                    let own_ns = if queue { held_ns.saturating_sub(h.waited_ns) } else { held_ns };
                    pool_holders.push(PoolHolder { resource: r, instance, task, amount, held_ns, own_ns });
                }
            }
            oldest_hold_ns.push(oldest_ns);
            g.own_ns.push(own_ns);
        }
        g.infer_barriers(&groups, inferred, holders);
        g.index_barriers();
        g.build_pools(pool_holders, pool_waits, &run_wait_ns, lost_ns, window);
        g.mark_blocked(&oldest_hold_ns);
        g.mark_delayed(window);
        g
    }

    fn push_edge_barrier(&mut self, edges: &EdgeIndex, waiter: u32, waits: Range<u32>, resources: &ResourceIndex) {
        let (mut resource, mut instance, mut untracked) = (None, 0, false);
        let first = self.blockers.len();
        for e in edges.of(waiter) {
            if resource.is_none() {
                resource = resources.get(e.resource);
                instance = e.instance;
            }
            match e.blocker {
                NONE => untracked = true,
                b if b == waiter => {} // a worker of the same task
                b => match self.blockers[first..].iter_mut().find(|k| k.task == b) {
                    // Holding is the stronger tie: it stands whatever becomes of the queue.
                    Some(known) if e.kind == EdgeKind::Holds => known.kind = EdgeKind::Holds,
                    Some(_) => {}
                    None => self.blockers.push(Blocker { task: b, kind: e.kind }),
                },
            }
        }
        if resource.is_none() {
            resource = waits.clone().filter_map(|w| self.waits[w as usize].resource).min();
        }
        self.push_barrier(resource, instance, untracked, first, waits);
    }

    /// A barrier whose blockers were appended from `first_blocker` on. Without any, somebody unknown blocks.
    fn push_barrier(
        &mut self,
        resource: Option<u32>,
        instance: u64,
        untracked: bool,
        first_blocker: usize,
        waits: impl IntoIterator<Item = u32>,
    ) {
        let blockers = first_blocker as u32..self.blockers.len() as u32;
        let first_wait = self.barrier_waits.len() as u32;
        self.barrier_waits.extend(waits);
        let waits = first_wait..self.barrier_waits.len() as u32;
        let untracked = untracked || blockers.is_empty();
        let (longest_wait_ns, longest_own_ns) = (0, 0);
        self.barriers.push(Barrier { resource, instance, untracked, blockers, waits, longest_wait_ns, longest_own_ns });
    }

    /// LOCK waits without edges: the holders of the same instance block.
    fn infer_barriers(&mut self, groups: &Groups, waits: Vec<(u32, u32)>, holders: Vec<(u32, Holder)>) {
        let waits = Rows::new(groups.keys.len(), waits);
        let holders = Rows::new(groups.keys.len(), holders);
        let (mut all, mut own, mut others) = (Vec::new(), Vec::new(), Vec::new());
        for group in groups.ordered() {
            let (resource, instance) = groups.keys[group as usize];
            let waits = waits.row(group);
            // One entry per task, with its longest hold; tasks come in their order.
            all.clear();
            for &h in holders.row(group) {
                match all.last_mut() {
                    Some(Holder { task, held_ns }) if *task == h.task => *held_ns = h.held_ns.max(*held_ns),
                    _ => all.push(h),
                }
            }
            // Whoever acquired after the oldest wait began did not cause it (a compatible reader passing by);
            // unless nobody is left: then the lock changes hands quickly and its present holders are all there is.
            let oldest = waits.iter().map(|&w| self.waits[w as usize].waited_ns).max().unwrap_or(0);
            let before = |h: &Holder| h.held_ns.saturating_add(CLOCK_SLACK_NS) >= oldest;
            if all.iter().any(before) {
                all.retain(before);
            }
            own.clear();
            others.clear();
            for &w in waits {
                let holds = all.binary_search_by_key(&self.waits[w as usize].task, |h| h.task).is_ok();
                if holds { &mut own } else { &mut others }.push(w);
            }
            let blocker = |h: &Holder| Blocker { task: h.task, kind: EdgeKind::Holds };
            if !others.is_empty() {
                let first = self.blockers.len();
                self.blockers.extend(all.iter().map(blocker));
                self.push_barrier(Some(resource), instance, false, first, others.iter().copied());
            }
            for &wait in &own {
                // It wants more of what it holds (an upgrade): the other holders are in its way.
                let (first, me) = (self.blockers.len(), self.waits[wait as usize].task);
                self.blockers.extend(all.iter().filter(|h| h.task != me).map(blocker));
                self.push_barrier(Some(resource), instance, false, first, [wait]);
            }
        }
    }

    /// What hangs on the barriers, once all are known.
    fn index_barriers(&mut self) {
        let mut bars = Vec::with_capacity(self.blockers.len());
        self.barrier_of = vec![NONE; self.waits.len()];
        for (b, barrier) in self.barriers.iter_mut().enumerate() {
            for k in &self.blockers[range(&barrier.blockers)] {
                bars.push((k.task, (b as u32, k.kind)));
                barrier.longest_own_ns = barrier.longest_own_ns.max(self.own_ns[k.task as usize]);
            }
            for &w in &self.barrier_waits[range(&barrier.waits)] {
                self.barrier_of[w as usize] = b as u32;
                barrier.longest_wait_ns = barrier.longest_wait_ns.max(self.waits[w as usize].waited_ns);
            }
        }
        self.bars = Rows::new(self.tasks, bars);
    }

    fn build_pools(
        &mut self,
        mut holders: Vec<PoolHolder>,
        mut waits: Vec<(u32, u64, u64)>,
        run_wait_ns: &[u64],
        lost_ns: &[u64],
        window: &Window,
    ) {
        holders.sort_unstable_by_key(|h| key(h.resource, h.instance, h.task));
        waits.sort_unstable_by_key(|w| key(w.0, w.1, 0));
        let mut total_of = vec![0u64; window.resources.len()];
        for h in &holders {
            total_of[h.resource as usize] = total_of[h.resource as usize].saturating_add(h.amount);
        }
        let mut parts: Vec<(u32, Part)> = Vec::new();
        let (mut h, mut w) = (0, 0);
        while h < holders.len() {
            let (resource, instance) = (holders[h].resource, holders[h].instance);
            let members = take_while(&holders, &mut h, |x| (x.resource, x.instance) == (resource, instance));
            while w < waits.len() && (waits[w].0, waits[w].1) < (resource, instance) {
                w += 1;
            }
            let waited = take_while(&waits, &mut w, |x| (x.0, x.1) == (resource, instance));
            let waited_ns = waited.iter().fold(0u64, |sum, x| sum.saturating_add(x.2));
            let total = members.iter().fold(0u64, |sum, x| sum.saturating_add(x.amount));
            let r = resource as usize;
            // The loss belongs to the instances that tasks wait for; without tracked waiters to all alike.
            let lost_ns = match run_wait_ns[r] {
                0 => scale(lost_ns[r], total, total_of[r]),
                all => scale(lost_ns[r], waited_ns, all),
            };
            let (lost_ns, wanted) = match self.queue[r] {
                true => wanted_servers(&window.resources[r], window.length_ns, members, waited.len(), lost_ns),
                false => (lost_ns, 1),
            };
            let (id, system) = (window.resources[r].id, self.system[r]);
            let pool = self.pools.len() as u32;
            let mut distinct = 0;
            let mut last = NONE;
            for m in members {
                if m.task == last {
                    let part = &mut parts.last_mut().expect("a member came before").1;
                    part.amount = part.amount.saturating_add(m.amount);
                    part.held_ns = part.held_ns.max(m.own_ns);
                    continue;
                }
                last = m.task;
                distinct += 1;
                let delayed_ns =
                    if system { delays_ns(&window.tasks[m.task as usize], id, instance, window) } else { 0 };
                parts.push((m.task, Part { pool, amount: m.amount, held_ns: m.own_ns, delayed_ns }));
            }
            // What the tasks did not use others did, or it lay idle: neither comes back with a task.
            let total = if system { total.max(capacity(&window.resources[r], window.length_ns)) } else { total };
            self.pools.push(Pool { resource, instance, total, holders: distinct, lost_ns, wanted, stuck: false });
        }
        self.parts = Rows::new(self.tasks, parts);
    }

    /// A task that waits for a lock (not just briefly) or for a queue that still moves is blocked. Memory waits do
    /// not block: the task runs on, slower. A queue whose servers are all stuck behind locks excuses nobody: whoever
    /// waits for it with a lock in hand may be what it is stuck on.
    fn mark_blocked(&mut self, oldest_hold_ns: &[u64]) {
        let is_queue = |w: &WaitRec| w.resource.is_some_and(|r| self.queue[r as usize]);
        let brief = |w: &WaitRec| {
            w.waited_ns < BRIEF_WAIT_NS
                && w.waited_ns.saturating_mul(BRIEF_WAIT_FACTOR) < oldest_hold_ns[w.task as usize]
        };
        let mut blocked = vec![false; self.tasks];
        for (i, w) in self.waits.iter().enumerate() {
            let pinned = !is_queue(w) || self.barrier_of[i] != NONE;
            if pinned && !brief(w) {
                blocked[w.task as usize] = true;
            }
        }
        let mut runs = vec![false; self.pools.len()];
        for t in 0..self.tasks as u32 {
            for part in self.parts.row(t) {
                runs[part.pool as usize] |= !blocked[t as usize];
            }
        }
        let mut has_pool = vec![false; self.resources];
        let mut moves = vec![false; self.resources];
        for (pool, &runs) in self.pools.iter_mut().zip(&runs) {
            pool.stuck = !runs;
            has_pool[pool.resource as usize] = true;
            moves[pool.resource as usize] |= runs;
        }
        for (i, w) in self.waits.iter().enumerate() {
            if let Some(r) = w.resource.map(|r| r as usize) {
                let queued = self.queue[r] && self.barrier_of[i] == NONE;
                if queued && (moves[r] || !has_pool[r]) && !brief(w) {
                    blocked[w.task as usize] = true;
                }
            }
        }
        self.blocked = blocked;
    }

    /// Whoever stands still most of the time because somebody else uses up the machine is not to blame for the locks it holds
    /// meanwhile (a commit that waits for a flooded disk). Without such a hog the I/O is its own, and so is the blame.
    fn mark_delayed(&mut self, window: &Window) {
        for (p, pool) in self.pools.iter().enumerate().filter(|(_, pool)| self.system[pool.resource as usize]) {
            let hogs_it = |t: usize| {
                let mut parts = self.parts.row(t as u32).iter();
                parts.any(|part| part.pool == p as u32 && monopolises(part.amount, pool, true))
            };
            let hogs: Vec<bool> = (0..self.tasks).map(hogs_it).collect();
            if !hogs.contains(&true) {
                continue;
            }
            let id = window.resources[pool.resource as usize].id;
            for (t, task) in window.tasks.iter().enumerate().filter(|&(t, _)| !hogs[t]) {
                let delayed_ns = delays_ns(task, id, pool.instance, window);
                self.blocked[t] |= delayed_ns > 0 && delayed_ns >= task.exec_ns / 2;
            }
        }
    }

    pub fn scratch(&self) -> Scratch {
        Scratch {
            stamp: 0,
            barrier: vec![(0, 0); self.barriers.len()],
            waits_left: vec![(0, 0); self.tasks],
            task: vec![(0, Gone::No); self.tasks],
            pool_freed: vec![0; self.pools.len()],
            bars_to_hit: Vec::new(),
        }
    }

    /// The counterfactual for a set of tasks. A freed waiter runs and then frees those who wait for what it holds;
    /// every barrier falls at most once and every task goes at most once, so cycles end.
    pub fn relief(&self, set: &[u32], s: &mut Scratch) -> Relief {
        let mut out = Relief::default();
        self.relief_into(set, s, &mut out);
        out
    }

    /// The same, in the room of an earlier one.
    pub fn relief_into(&self, set: &[u32], s: &mut Scratch, out: &mut Relief) {
        s.stamp += 1;
        let stamp = s.stamp;
        out.clear(self.resources);
        // Whoever is freed goes on as it did before: one that has held what others want for longer than those who free it
        // did not begin to stand in the way because of them, and will not stop.
        let own_ns = set.iter().map(|&t| self.untraced_ns(t).max(self.own_ns[t as usize])).max().unwrap_or(0);
        let mut bars_to_hit = std::mem::take(&mut s.bars_to_hit);
        bars_to_hit.clear();
        for &t in set {
            if s.task[t as usize].0 == stamp {
                continue; // named twice
            }
            let state = if self.blocked[t as usize] { Gone::QueueOnly } else { Gone::Yes };
            s.task[t as usize] = (stamp, state);
            bars_to_hit
                .extend(self.bars.row(t).iter().filter(|b| state == Gone::Yes || b.1 == EdgeKind::Queued).map(|b| b.0));
        }
        let mut next = 0;
        while next < bars_to_hit.len() {
            let b = bars_to_hit[next];
            next += 1;
            let barrier = &self.barriers[b as usize];
            let left = &mut s.barrier[b as usize];
            if left.0 != stamp {
                *left = (stamp, barrier.blockers.len() as u32 + barrier.untracked as u32);
            }
            left.1 -= 1;
            if left.1 > 0 {
                continue;
            }
            out.fallen.push(b);
            for &w in &self.barrier_waits[range(&barrier.waits)] {
                let wait = &self.waits[w as usize];
                let t = wait.task as usize;
                if let Some(r) = wait.resource {
                    let freed = &mut out.freed_ns[r as usize];
                    *freed = freed.saturating_add(wait.clipped_ns);
                }
                let left = &mut s.waits_left[t];
                if left.0 != stamp {
                    *left = (stamp, self.waits_of.row(wait.task).len() as u32);
                }
                left.1 -= 1;
                let state = &mut s.task[t];
                if state.0 != stamp {
                    *state = (stamp, Gone::No);
                    out.victims.push(wait.task);
                }
                if left.1 == 0 && state.1 != Gone::Yes && self.own_ns[t] <= own_ns {
                    let was = std::mem::replace(&mut state.1, Gone::Yes);
                    let bars = self.bars.row(wait.task).iter();
                    bars_to_hit.extend(bars.filter(|b| was == Gone::No || b.1 == EdgeKind::Holds).map(|b| b.0));
                }
            }
        }
        s.bars_to_hit = bars_to_hit;
        // A task that only barred the queue stops waiting too: without this the report it waits for would always
        // seem to free a little more than it does.
        if !out.victims.is_empty() {
            for &t in set.iter().filter(|&&t| s.task[t as usize].1 == Gone::QueueOnly) {
                for &w in self.waits_of.row(t) {
                    let b = self.barrier_of[w as usize];
                    let fell = b != NONE && s.barrier[b as usize] == (stamp, 0);
                    if let (false, Some(r)) = (fell, self.waits[w as usize].resource) {
                        let freed = &mut out.freed_ns[r as usize];
                        *freed = freed.saturating_add(self.waits[w as usize].clipped_ns);
                    }
                }
            }
        }
        self.free_pools(set, s, out);
        out.victims.sort_unstable();
        out.fallen.sort_unstable();
    }

    /// The shares of pools that come back: all that the set holds, and the servers that freed waiters were stuck on.
    fn free_pools(&self, set: &[u32], s: &mut Scratch, out: &mut Relief) {
        if self.pools.is_empty() {
            return;
        }
        let freed_waiters = out.victims.len();
        for i in 0..set.len() + freed_waiters {
            let (t, own) = if i < set.len() { (set[i], true) } else { (out.victims[i - set.len()], false) };
            if s.task[t as usize] != (s.stamp, Gone::Yes) {
                continue; // a server stuck behind a lock would only be taken by the next one that gets stuck
            }
            for part in self.parts.row(t) {
                let pool = &self.pools[part.pool as usize];
                let queue = self.queue[pool.resource as usize];
                let counts = if queue {
                    own || self.blocked[t as usize]
                } else {
                    own && monopolises(part.amount, pool, self.system[pool.resource as usize])
                };
                if counts && pool.lost_ns > 0 {
                    if s.pool_freed[part.pool as usize] == 0 {
                        out.pools.push(part.pool);
                    }
                    let freed = &mut s.pool_freed[part.pool as usize];
                    *freed = freed.saturating_add(part.amount);
                }
            }
        }
        out.pools.sort_unstable();
        for &p in &out.pools {
            let pool = &self.pools[p as usize];
            let amount = std::mem::take(&mut s.pool_freed[p as usize]);
            let freed = &mut out.freed_ns[pool.resource as usize];
            let all = if self.queue[pool.resource as usize] { pool.wanted } else { pool.total };
            let own = set.iter().flat_map(|&t| self.parts.row(t)).filter(|part| part.pool == p);
            let own_delays_ns = own.fold(0u64, |sum, part| sum.saturating_add(part.delayed_ns));
            let of_others_ns = pool.lost_ns.saturating_sub(own_delays_ns);
            *freed = freed.saturating_add(scale(of_others_ns, amount.min(all), all));
        }
    }

    /// What the blocked task `t` bars its victims for: the usage of whom it waits for, at least its own wait, and the gain
    /// of whom it waits for (nobody who runs: its own wait). (usage, gain,
    /// largest usage of those who run and hold it up); `direct(task, barrier)` = (usage, gain) of a holder that runs.
    pub fn inherited(&self, t: u32, direct: &dyn Fn(u32, u32) -> (u64, f64)) -> (u64, f64, u64) {
        let mut best = (0u64, 0f64, 0u64);
        let mut seen = vec![t];
        let mut next = 0;
        while next < seen.len() {
            let task = seen[next];
            next += 1;
            for &w in self.waits_of.row(task) {
                let waited = self.waits[w as usize].waited_ns;
                if task == t {
                    best.0 = best.0.max(waited);
                }
                let b = self.barrier_of[w as usize];
                if b == NONE {
                    continue;
                }
                for k in self.blockers_of(b) {
                    if self.blocked[k.task as usize] {
                        if seen.len() < MAX_INHERIT && !seen.contains(&k.task) {
                            seen.push(k.task);
                        }
                    } else {
                        let (usage, gain) = direct(k.task, b);
                        best.1 = best.1.max(gain);
                        best.2 = best.2.max(usage);
                    }
                }
            }
        }
        if best.1 == 0.0 {
            best.1 = best.0 as f64;
        }
        best
    }

    /// What a task without a known holding has at least: it has been waited for as long, and stands before whom it waits.
    fn untraced_ns(&self, t: u32) -> u64 {
        let bars = self.bars.row(t).iter().map(|&(b, _)| self.longest_wait_ns(b));
        let behind = self.waits_of.row(t).iter().flat_map(|&w| self.barrier_of.get(w as usize)).filter(|&&b| b != NONE);
        bars.chain(behind.map(|&b| self.barriers[b as usize].longest_own_ns)).max().unwrap_or(0)
    }

    pub fn longest_wait_ns(&self, barrier: u32) -> u64 {
        self.barriers[barrier as usize].longest_wait_ns
    }

    fn blockers_of(&self, barrier: u32) -> &[Blocker] {
        &self.blockers[range(&self.barriers[barrier as usize].blockers)]
    }
}

/// (time lost for want of servers, servers wanted). Work goes through a queue in proportion to the servers that turn over,
/// T; so of the lost time k more give back k of (T + missing). No more are missing than wait, or than do not turn over.
fn wanted_servers(
    queue: &ResourceWindow,
    window_ns: u64,
    members: &[PoolHolder],
    waiting: usize,
    lost_ns: u64,
) -> (u64, u64) {
    // On average over the window: at one moment a server between two requests looks free.
    if queue.servers > 0 && scale(queue.hold_ns, 4, window_ns.max(1)) < queue.servers.saturating_mul(3) {
        return (0, 1);
    }
    let long_ns = window_ns.max(queue.turnover_ns.saturating_mul(LONG_TURNOVERS));
    let long = members.iter().filter(|m| m.held_ns >= long_ns).count() as u64;
    let turning = queue.servers.max(members.len() as u64) - long;
    let missing = long.min(queue.untracked_waiting.saturating_add(waiting as u64));
    (lost_ns, turning.saturating_add(missing).max(1))
}

/// Among several holders of memory only those well above the fair share are to blame: twice the fair share, or (of
/// few holders) half way from the fair share to all of it. Of a SYSTEM resource a share of all besides: with many light
/// users the fair share is next to nothing, and each of forty equal reports would be far above it.
fn monopolises(amount: u64, pool: &Pool, system: bool) -> bool {
    let fair = 1.0 / pool.holders.max(1) as f64;
    let least = if system { SYSTEM_LEAST_SHARE } else { 0.0 };
    amount as f64 >= pool.total as f64 * (2.0 * fair).min((1.0 + fair) / 2.0).max(least)
}

/// What there is of a SYSTEM resource in a window: CPU time of all processors; of I/O it is not known (0).
fn capacity(resource: &ResourceWindow, window_ns: u64) -> u64 {
    resource.servers.saturating_mul(window_ns)
}

/// A task's waits for one resource, inside the window.
fn delays_ns(task: &TaskView, resource: u32, instance: u64, window: &Window) -> u64 {
    let waits = task.waits.iter().filter(|w| (w.resource, w.instance) == (resource, instance));
    waits.fold(0u64, |sum, w| sum.saturating_add(clip(w.waited_ns, window)))
}

/// The run of items from `*at` on for which `same` holds; moves `*at` behind it.
fn take_while<'a, T>(items: &'a [T], at: &mut usize, same: impl Fn(&T) -> bool) -> &'a [T] {
    let start = *at;
    while *at < items.len() && same(&items[*at]) {
        *at += 1;
    }
    &items[start..*at]
}

#[derive(Clone, Copy)]
struct DenseEdge {
    blocker: u32,
    kind: EdgeKind,
    resource: u32,
    instance: u64,
}

/// The host's edges by waiter, in dense task numbers.
struct EdgeIndex {
    rows: Rows<DenseEdge>,
}

impl EdgeIndex {
    fn new(window: &Window) -> Self {
        if window.edges.is_empty() {
            return EdgeIndex { rows: Rows::default() };
        }
        let ids: Index<TaskId> = Index::new(window.tasks.iter().map(|t| t.id));
        // Sorted by what they say, so that the order in which the host lists them changes nothing.
        let mut edges = window.edges.clone();
        edges.sort_unstable_by_key(|e| (e.waiter, e.resource, e.instance, e.blocker, e.kind == EdgeKind::Queued));
        let pairs = edges.iter().filter_map(|e| {
            let waiter = ids.get(e.waiter)?;
            let blocker = if e.blocker == 0 { NONE } else { ids.get(e.blocker).unwrap_or(NONE) };
            Some((waiter, DenseEdge { blocker, kind: e.kind, resource: e.resource, instance: e.instance }))
        });
        EdgeIndex { rows: Rows::new(window.tasks.len(), pairs.collect()) }
    }

    fn of(&self, waiter: u32) -> impl Iterator<Item = &DenseEdge> {
        self.rows.row(waiter).iter()
    }
}
