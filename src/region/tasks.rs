//! Slots of tasks and workers: handles, claiming, ending, reaping.
//!
//! A handle is `generation << INDEX_BITS | index + 1`. A slot's state word is `generation << STATE_BITS | state`; it
//! changes by compare-and-swap only, so a handle is valid exactly while the word says "this generation, ACTIVE". While it
//! is CLAIMED the bits above the generation name the claimer: it may be killed before it wrote itself down as the owner.

use super::layout::*;
use super::owner::ProcessId;
use super::Region;
use crate::primitive::{
    AtomicU32, AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};
use std::collections::HashMap;

pub const INDEX_BITS: u32 = 20;
const INDEX_MASK: u64 = (1 << INDEX_BITS) - 1;
/// Generations wrap here; above them a claimed slot's word has room for a pid (Linux: below 2^22).
const GENERATION_BITS: u32 = 40;
pub(super) const GENERATION_MASK: u64 = (1 << GENERATION_BITS) - 1;
const CLAIMER_SHIFT: u32 = GENERATION_BITS + STATE_BITS;

#[inline(always)]
pub fn handle_of(index: usize, state_word: u64) -> u64 {
    (state_word >> STATE_BITS & GENERATION_MASK) << INDEX_BITS | (index as u64 + 1)
}

#[inline(always)]
pub fn index_of(handle: u64) -> usize {
    (handle & INDEX_MASK).wrapping_sub(1) as usize
}

/// The state word under which `handle` is valid.
#[inline(always)]
pub fn active_word(handle: u64) -> u64 {
    handle >> INDEX_BITS << STATE_BITS | ACTIVE
}

/// The state word under which the slot of `handle`, which has ended, is still kept for the thread that ended it.
#[inline(always)]
fn cached_word(handle: u64) -> u64 {
    handle >> INDEX_BITS << STATE_BITS | CACHED
}

fn next_generation(word: u64) -> u64 {
    ((word >> STATE_BITS) + 1) & GENERATION_MASK
}

/// Something with a state word and an owner: a task's or a worker's slot.
pub trait Slot {
    fn state(&self) -> &AtomicU64;
    fn owner(&self) -> &Owner;
    fn trace(&self) -> &Trace;
}

impl Slot for TaskSlot {
    fn state(&self) -> &AtomicU64 {
        &self.state
    }
    fn owner(&self) -> &Owner {
        &self.owner
    }
    fn trace(&self) -> &Trace {
        &self.trace
    }
}

impl Slot for WorkerSlot {
    fn state(&self) -> &AtomicU64 {
        &self.state
    }
    fn owner(&self) -> &Owner {
        &self.owner
    }
    fn trace(&self) -> &Trace {
        &self.trace
    }
}

impl TaskSlot {
    /// Is it, or was it last, the slot of `handle`?
    pub fn is_of(&self, handle: u64) -> bool {
        self.state.load(Acquire) >> STATE_BITS == active_word(handle) >> STATE_BITS
    }
}

/// Takes `slot` for process `pid` if its word still is `seen`; returns the word it will have, without a state.
fn claim<S: Slot>(slot: &S, seen: u64, pid: u32) -> Option<u64> {
    let next = next_generation(seen) << STATE_BITS;
    let claimed = (pid as u64) << CLAIMER_SHIFT | next | CLAIMED;
    slot.state().compare_exchange(seen, claimed, AcqRel, Relaxed).ok().map(|_| next)
}

/// Claims a free slot, starting at the hint; failing that, one that a thread only keeps for later.
fn claim_any<S: Slot>(slots: &[S], pid: u32, hint: &AtomicU32, used: &AtomicU32) -> Option<(usize, u64)> {
    let n = slots.len();
    let start = hint.load(Relaxed) as usize % n;
    for wanted in [FREE, CACHED] {
        for i in 0..n {
            let index = (start + i) % n;
            let word = slots[index].state().load(Relaxed);
            if word & ((1 << STATE_BITS) - 1) == wanted {
                if let Some(word) = claim(&slots[index], word, pid) {
                    // Low numbers first: the controller reads up to the highest one ever used.
                    hint.store(if wanted == FREE { index as u32 + 1 } else { 0 }, Relaxed);
                    if used.load(Relaxed) <= index as u32 {
                        used.fetch_max(index as u32 + 1, Relaxed);
                    }
                    return Some((index, word));
                }
            }
        }
    }
    None
}

impl Region {
    /// Begins a task; None when the table is full (counted). `cached` is the handle this thread ended last.
    #[link_section = ".text.hot.atropos"]
    pub fn begin_task(&self, me: ProcessId, key: u64, cached: u64) -> Option<u64> {
        let h = self.header();
        let tasks = self.tasks();
        let again = tasks.get(index_of(cached)).and_then(|slot| {
            // Only the slot this thread left behind: same generation, still CACHED.
            claim(slot, cached_word(cached), me.pid).map(|word| (index_of(cached), word))
        });
        let Some((index, word)) = again.or_else(|| claim_any(tasks, me.pid, &h.task_hint, &h.tasks_used)) else {
            h.counters.tasks_untracked.fetch_add(1, Relaxed);
            return None;
        };
        let slot = &tasks[index];
        slot.owner.set(me);
        slot.key.store(key, Relaxed);
        slot.parent.store(0, Relaxed);
        slot.class.store(0, Relaxed);
        slot.priority.store(0, Relaxed);
        slot.flags.store(FLAG_IMPLICIT_REQUEST, Relaxed);
        slot.label[0].store(0, Relaxed);
        slot.work_start_ns.store(0, Relaxed);
        slot.open_request(self.now_ns());
        slot.state.store(word | ACTIVE, Release);
        Some(handle_of(index, word))
    }

    /// Ends a task of this process; `keep` = this thread may want the slot again soon. False for a stale or foreign handle.
    #[link_section = ".text.hot.atropos"]
    pub fn end_task(&self, me: ProcessId, handle: u64, keep: bool) -> bool {
        let Some(slot) = self.own_task(me.pid, handle) else {
            return false;
        };
        self.header().leave(slot, 0);
        let word = active_word(handle);
        let next = word & !((1 << STATE_BITS) - 1) | if keep { CACHED } else { FREE };
        // Compare-and-swap: of two threads that free it at once, one does.
        slot.state.compare_exchange(word, next, AcqRel, Relaxed).is_ok()
    }

    /// Is the slot of `handle` still kept for whoever ended it with `keep`?
    pub fn is_kept(&self, handle: u64) -> bool {
        let slot = self.tasks().get(index_of(handle));
        slot.is_some_and(|slot| slot.state.load(Relaxed) == cached_word(handle))
    }

    /// The slot of a live handle.
    #[inline(always)]
    pub fn task(&self, handle: u64) -> Option<&TaskSlot> {
        let slot = self.tasks().get(index_of(handle))?;
        (slot.state.load(Acquire) == active_word(handle)).then_some(slot)
    }

    /// The same, if the task belongs to process `pid`: only its owner may write into it. A child that kept a handle of
    /// its parent's must not.
    #[inline(always)]
    pub fn own_task(&self, pid: u32, handle: u64) -> Option<&TaskSlot> {
        self.task(handle).filter(|slot| slot.owner.pid.load(Relaxed) == pid)
    }

    #[inline(always)]
    pub fn worker(&self, handle: u64) -> Option<&WorkerSlot> {
        let slot = self.workers().get(index_of(handle))?;
        (slot.state.load(Acquire) == active_word(handle)).then_some(slot)
    }

    /// Another worker joins `task`.
    pub fn attach(&self, me: ProcessId, task: u64) -> Option<u64> {
        self.task(task)?;
        let h = self.header();
        let workers = self.workers();
        let Some((index, word)) = claim_any(workers, me.pid, &h.worker_hint, &h.workers_used) else {
            h.counters.workers_untracked.fetch_add(1, Relaxed);
            return None;
        };
        let slot = &workers[index];
        slot.owner.set(me);
        slot.task.store(task, Relaxed);
        slot.state.store(word | ACTIVE, Release);
        Some(handle_of(index, word))
    }

    pub fn detach(&self, worker: u64) -> bool {
        let Some(slot) = self.worker(worker) else {
            return false;
        };
        slot.trace.clear(self.header().clock.event_ns());
        let word = active_word(worker);
        slot.state.compare_exchange(word, word & !((1 << STATE_BITS) - 1) | FREE, AcqRel, Relaxed).is_ok()
    }

    /// Live task slots with their handles.
    pub fn live_tasks(&self) -> impl Iterator<Item = (u64, &TaskSlot)> {
        self.used_tasks().iter().enumerate().filter_map(|(i, slot)| {
            let word = slot.state.load(Acquire);
            (word & 3 == ACTIVE).then(|| (handle_of(i, word), slot))
        })
    }

    /// Live extra workers.
    pub fn live_workers(&self) -> impl Iterator<Item = &WorkerSlot> {
        self.used_workers().iter().filter(|slot| slot.state.load(Acquire) & 3 == ACTIVE)
    }

    /// Frees the slots of dead processes. `thorough` also compares start times, which reads /proc.
    pub fn reap(&self, thorough: bool) -> usize {
        // One question per process, not per slot.
        let mut verdicts: HashMap<ProcessId, bool> = HashMap::new();
        self.reap_owned_by(|owner: ProcessId| {
            let judge = || if thorough { !owner.is_alive() } else { !owner.pid_exists() };
            *verdicts.entry(owner).or_insert_with(judge)
        })
    }

    /// Frees what the program that process `me` ran before had here: exec without a shutdown keeps pid and start time.
    pub fn reap_former_life(&self, me: ProcessId) -> usize {
        self.reap_owned_by(|owner| owner == me || (owner == ProcessId { start_ticks: 0, ..me }))
    }

    fn reap_owned_by(&self, mut dead: impl FnMut(ProcessId) -> bool) -> usize {
        let h = self.header();
        let (me, now_ns) = (std::process::id(), self.now_ns());
        let mut reaped = 0;
        for slot in self.used_tasks() {
            reaped += reap_slot(slot, me, now_ns, &mut dead) as usize;
        }
        for slot in self.used_workers() {
            reaped += reap_slot(slot, me, now_ns, &mut dead) as usize;
        }
        self.reap_agents(dead);
        h.counters.slots_reaped.fetch_add(reaped as u64, Relaxed);
        reaped
    }
}

/// Frees a slot whose owner has died; `me` claims it for that long, so that a reaper that dies over it is reaped as well.
fn reap_slot<S: Slot>(slot: &S, me: u32, now_ns: u64, dead: &mut impl FnMut(ProcessId) -> bool) -> bool {
    let word = slot.state().load(Acquire);
    let owner = match word & 3 {
        ACTIVE | CACHED => slot.owner().get(),
        // Killed inside begin: only the pid is known.
        CLAIMED => ProcessId { pid: (word >> CLAIMER_SHIFT) as u32, start_ticks: 0 },
        _ => return false,
    };
    if !dead(owner) {
        return false;
    }
    let Some(next) = claim(slot, word, me) else { return false };
    slot.trace().clear(now_ns);
    slot.state().store(next | FREE, Release);
    true
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn region() -> (Region, ProcessId) {
        (Region::anonymous(16, 16).unwrap(), ProcessId::current())
    }

    #[test]
    fn handles_die_with_their_task() {
        let (r, me) = region();
        let a = r.begin_task(me, 1, 0).unwrap();
        assert!(r.task(a).is_some());
        assert!(r.end_task(me, a, false) && !r.end_task(me, a, false), "the second free does nothing");
        let b = r.begin_task(me, 2, 0).unwrap();
        assert!(r.task(a).is_none() && a != b);
        for rubbish in [0, 1, 7, u64::MAX, a ^ (1 << 63), INDEX_MASK] {
            assert!(r.task(rubbish).is_none() || rubbish == b, "{rubbish:x}");
        }
    }

    #[test]
    fn a_foreign_or_earlier_lifes_handle_is_refused() {
        let (r, me) = region();
        let a = r.begin_task(me, 1, 0).unwrap();
        let other = ProcessId { pid: me.pid + 1, ..me };
        assert!(r.own_task(other.pid, a).is_none() && !r.end_task(other, a, false));
        assert!(r.own_task(me.pid, a).is_some());
        // However many tasks the earlier life had.
        let last = (0..100_000).fold(a, |last, key| {
            r.end_task(me, last, true);
            r.begin_task(me, key, last).unwrap()
        });
        let (next_life, _) = region();
        let b = next_life.begin_task(me, 1, 0).unwrap();
        assert!(b >> INDEX_BITS > last >> INDEX_BITS, "{b:x} {last:x}");
        assert_ne!(a, b);
        assert!(next_life.task(a).is_none() && r.task(b).is_none());
    }

    #[test]
    fn a_thread_gets_its_slot_again_and_others_take_it_when_full() {
        let (r, me) = region();
        let a = r.begin_task(me, 1, 0).unwrap();
        assert!(!r.is_kept(a), "it lives");
        r.end_task(me, a, true);
        assert!(r.is_kept(a) && !r.is_kept(0));
        let b = r.begin_task(me, 2, a).unwrap();
        assert_eq!(index_of(a), index_of(b));
        assert!(!r.is_kept(a), "another generation has it");
        r.end_task(me, b, true);
        let others: Vec<u64> = (0..16).map(|k| r.begin_task(me, k, 0).unwrap()).collect();
        assert_eq!(r.begin_task(me, 99, b), None, "its cached slot has gone, the table is full");
        assert_eq!(r.header().counters.tasks_untracked.load(Relaxed), 1);
        for t in others {
            assert!(r.end_task(me, t, false));
        }
        assert!(r.begin_task(me, 1, 0).is_some());
    }

    #[test]
    fn slots_of_the_dead_come_back() {
        let (r, me) = region();
        let dead = ProcessId { pid: 0x3fff_fff0, start_ticks: 1 };
        let reused = ProcessId { start_ticks: me.start_ticks + 1, ..me };
        let t = [me, dead, reused].map(|id| r.begin_task(id, 1, 0).unwrap());
        let w = r.attach(dead, t[0]).unwrap();
        assert_eq!(r.reap(false), 2);
        assert!(r.task(t[0]).is_some() && r.task(t[1]).is_none() && r.worker(w).is_none());
        assert!(r.task(t[2]).is_some(), "pid exists");
        assert_eq!(r.reap(true), 1);
        assert!(r.task(t[2]).is_none());
    }

    #[test]
    fn slots_of_those_who_died_inside_begin_come_back() {
        let (r, me) = region();
        let dead = ProcessId { pid: 0x003f_fff0, start_ticks: 1 };
        let h = r.header();
        for pid in [dead.pid, me.pid] {
            assert!(claim_any(r.tasks(), pid, &h.task_hint, &h.tasks_used).is_some());
            assert!(claim_any(r.workers(), pid, &h.worker_hint, &h.workers_used).is_some());
        }
        assert_eq!((r.reap(true), r.reap(true)), (2, 0), "whoever lives may go on where it is");
        let again = r.begin_task(me, 1, 0).into_iter().chain((0..15).filter_map(|k| r.begin_task(me, k, 0)));
        assert_eq!(again.count(), 15);
    }

    #[test]
    fn a_former_lifes_slots_come_back_and_no_others() {
        let (r, me) = region();
        let other = ProcessId { pid: 1, start_ticks: 1 };
        let [mine, theirs] = [me, other].map(|id| r.begin_task(id, 1, 0).unwrap());
        assert!(claim_any(r.tasks(), me.pid, &r.header().task_hint, &r.header().tasks_used).is_some());
        assert!(r.register_agent(me).is_ok() && r.register_agent(other).is_ok());
        assert_eq!(r.reap_former_life(me), 2);
        assert!(r.task(mine).is_none() && r.task(theirs).is_some());
        assert!(r.agent_of(me.pid).is_none() && r.agent_of(other.pid).is_some());
    }

    #[test]
    fn generations_wrap_and_leave_room_for_the_claimer() {
        let (r, me) = region();
        for slot in r.tasks() {
            slot.state.store(GENERATION_MASK << STATE_BITS, Relaxed);
        }
        let a = r.begin_task(me, 1, 0).unwrap();
        assert_eq!((a >> INDEX_BITS, r.task(a).is_some()), (0, true));
        assert!(r.end_task(me, a, false) && r.begin_task(me, 1, 0).is_some_and(|b| b != a));
    }

    #[test]
    fn racing_threads_never_share_a_slot() {
        let (r, me) = region();
        std::thread::scope(|s| {
            for k in 0..4u64 {
                let r = &r;
                s.spawn(move || {
                    let mut cached = 0;
                    for i in 0..20_000 {
                        let key = k << 32 | i;
                        let Some(t) = r.begin_task(me, key, cached) else {
                            continue;
                        };
                        assert_eq!(r.task(t).unwrap().key.load(Relaxed), key);
                        assert!(r.end_task(me, t, i % 3 != 0));
                        cached = t;
                    }
                });
            }
        });
        assert_eq!(r.live_tasks().count(), 0);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::cancel::mailbox::Request;
    use loom::sync::Arc;
    use loom::thread::spawn;

    /// Every interleaving with at most `preemptions` switches away from a thread that could go on; 3 find what is known
    /// to be found at all in most programs, and the tests still end.
    fn model(preemptions: usize, run: impl Fn() + Sync + Send + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(preemptions);
        model.check(run);
    }

    const ME: ProcessId = ProcessId { pid: 1, start_ticks: 0 };
    const DEAD: ProcessId = ProcessId { pid: 0x003f_fff0, start_ticks: 1 };

    fn alone() -> Arc<Region> {
        Arc::new(Region::model(1, 1))
    }

    /// Two that want one free slot: one gets it, the other is told and counted.
    #[test]
    fn a_slot_is_claimed_once() {
        model(3, || {
            let r = alone();
            let other = r.clone();
            let thread = spawn(move || other.begin_task(ME, 7, 0));
            let mine = r.begin_task(ME, 8, 0);
            let theirs = thread.join().unwrap();
            assert!(mine.is_some() ^ theirs.is_some());
            let (task, key) = if mine.is_some() { (mine, 8) } else { (theirs, 7) };
            assert_eq!(r.task(task.unwrap()).unwrap().key.load(Relaxed), key);
            assert_eq!(r.header().counters.tasks_untracked.load(Relaxed), 1);
        });
    }

    /// Whoever finds a task in the table finds all of it.
    #[test]
    fn a_task_is_seen_whole_or_not_at_all() {
        model(3, || {
            let r = alone();
            let host = r.clone();
            let thread = spawn(move || host.begin_task(ME, 7, 0).unwrap());
            for (handle, slot) in r.live_tasks() {
                assert_eq!((slot.key.load(Relaxed), slot.owner.get()), (7, ME));
                assert!(slot.scope.load(Relaxed) == 1 && slot.request_start_ns.load(Relaxed) != 0);
                assert!(r.task(handle).is_some());
            }
            thread.join().unwrap();
        });
    }

    /// A thread takes the slot it has just left again while another, in need, takes whatever is left: one of them has it,
    /// under a number of its own, and the old handle is dead.
    #[test]
    fn a_slot_is_used_again_by_one() {
        model(3, || {
            let r = alone();
            let first = r.begin_task(ME, 1, 0).unwrap();
            let other = r.clone();
            let thread = spawn(move || other.begin_task(ME, 3, 0));
            assert!(r.end_task(ME, first, true));
            let again = r.begin_task(ME, 2, first);
            let theirs = thread.join().unwrap();
            assert!(again.is_some() ^ theirs.is_some());
            let (task, key) = if again.is_some() { (again, 2) } else { (theirs, 3) };
            let slot = r.task(task.unwrap()).unwrap();
            assert_eq!((slot.key.load(Relaxed), slot.scope.load(Relaxed)), (key, 2));
            assert!(r.task(first).is_none() && task != Some(first) && !r.is_kept(first));
        });
    }

    /// Two threads end one task: it ends once.
    #[test]
    fn a_task_ends_once() {
        model(3, || {
            let r = alone();
            let task = r.begin_task(ME, 1, 0).unwrap();
            let other = r.clone();
            let thread = spawn(move || other.end_task(ME, task, true));
            let mine = r.end_task(ME, task, false);
            assert!(mine ^ thread.join().unwrap());
            assert_eq!(r.live_tasks().count(), 0);
        });
    }

    /// The leader posts for the task that it saw; the owner meanwhile ends it and begins the next in the same slot.
    #[test]
    fn a_cancel_never_stands_for_the_next_task_of_a_slot() {
        model(2, || {
            let r = alone();
            let task = r.begin_task(ME, 1, 0).unwrap();
            let scope = r.task(task).unwrap().scope.load(Relaxed);
            let leader = r.clone();
            let thread = spawn(move || {
                if let Some(slot) = leader.task(task) {
                    slot.mailbox.post(&Request { scope, rung: 1, ..Request::default() }, 0);
                }
            });
            assert!(r.end_task(ME, task, true));
            let next = r.begin_task(ME, 2, task).unwrap();
            let slot = r.task(next).unwrap();
            assert!(!slot.cancel_requested(&r.header().lease) && slot.standing_request(&r.header().lease).is_none());
            thread.join().unwrap();
            assert!(!slot.cancel_requested(&r.header().lease) && slot.standing_request(&r.header().lease).is_none());
        });
    }

    /// The controllers of two leaders (one of them has been replaced and does not know yet) free a dead process's slot
    /// while a living one wants it: it is freed once, and never taken from the living. `left`: how it was left.
    fn freed_once(left: fn(&Region) -> u64) {
        model(2, move || {
            let r = alone();
            let old = left(&r);
            let other = r.clone();
            let thread = spawn(move || other.reap(false));
            let reaped = r.reap(false);
            let new = r.begin_task(ME, 2, 0);
            let also = thread.join().unwrap();
            assert!(reaped + also == 1 && r.task(old).is_none());
            if let Some(new) = new {
                assert_eq!(r.task(new).unwrap().key.load(Relaxed), 2);
            }
            assert_eq!(r.reap(false), 0);
        });
    }

    #[test]
    fn a_dead_owners_slot_is_freed_once() {
        freed_once(|r| r.begin_task(DEAD, 1, 0).unwrap());
    }

    #[test]
    fn a_slot_whose_claimer_died_inside_begin_is_freed_once() {
        freed_once(|r| {
            let claimed = claim_any(r.tasks(), DEAD.pid, &r.header().task_hint, &r.header().tasks_used);
            claimed.map(|(index, word)| handle_of(index, word)).unwrap()
        });
    }

    /// A worker's slot, with what it holds, as the controller sees it while it changes.
    #[test]
    fn what_a_worker_does_is_seen_at_one_moment() {
        model(2, || {
            let r = alone();
            let host = r.clone();
            let task = r.begin_task(ME, 1, 0).unwrap();
            let thread = spawn(move || {
                let trace = &host.task(task).unwrap().trace;
                trace.wait_begin(5, 1, 7);
                trace.acquire(9, 0, 1, 7, 3);
            });
            let (view, whole) = r.task(task).unwrap().trace.view(0);
            if whole {
                match (view.wait, &view.held[..]) {
                    (None, []) => {}
                    (Some(wait), []) => assert_eq!((wait.resource, wait.instance, wait.since_ns), (1, 7, 5)),
                    (None, [h]) => assert_eq!((h.resource, h.instance, h.amount, h.since_ns), (1, 7, 3, 9)),
                    torn => panic!("{torn:?}"),
                }
            }
            thread.join().unwrap();
        });
    }
}
