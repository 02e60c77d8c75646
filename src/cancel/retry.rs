//! Cancelled tasks that may run again: the queue in the region, shared by the leader and the tasks' own processes.
//!
//! With each cancel the leader notes an entry (OPEN). A host that has undone the task's work asks whether it may run
//! again (WAITING); the leader sets entries free, one by one (RELEASED); the waiter sees that and goes (EMPTY).
//!
//! ```text
//! EMPTY -> FILLING -> OPEN         the leader; an OPEN entry nobody asked about makes room for a newer cancel
//! OPEN -> WAITING                  the waiter
//! WAITING -> RELEASED              the leader
//! WAITING -> EMPTY                 dropped: by the waiter (deadline, nobody leads), or by the leader (it is gone)
//! RELEASED -> EMPTY                the waiter runs; or the leader, when nobody came for it
//! ```
//!
//! Every step is one compare-and-swap on the entry's word, which names the turn as well: where both sides move at once
//! one succeeds, and nobody ever waits for another's next store. Who waits shows signs of life, so the queue goes on
//! without those that were killed.

use crate::primitive::Ordering::{AcqRel, Acquire, Relaxed, Release};
use crate::primitive::{fence, AtomicU64};
use crate::region::layout::*;

const MS: u64 = 1_000_000;
/// A waiter shows at least this often that it is there.
pub const LIFE_SIGN_NS: u64 = 250 * MS;
/// A waiter without a sign of life for this long is gone.
pub const SILENT_NS: u64 = 3_000 * MS;
/// Who does not come for its release within this time is gone.
pub const UNTAKEN_NS: u64 = 1_000 * MS;
/// Nobody leads who has not beaten for this long.
pub const NO_LEADER_NS: u64 = 2_000 * MS;
/// A cancel nobody asked about is forgotten after this long: its host does not retry. Undoing much work may take minutes.
pub const UNASKED_NS: u64 = 600_000 * MS;

/// What the leader notes of a cancel.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cancelled {
    pub task: u64,
    pub scope: u64,
    pub decision_id: u64,
    /// The resources it was cancelled for, see `control::retry::bit_of`.
    pub resources: u64,
    pub owner_pid: u32,
    pub flags: u32,
    pub load_milli_per_s: u64,
}

pub fn state_of(word: u64) -> u64 {
    word & ((1 << RETRY_STATE_BITS) - 1)
}

pub fn turn_of(word: u64) -> u64 {
    word >> RETRY_STATE_BITS
}

fn word_of(turn: u64, state: u64) -> u64 {
    turn << RETRY_STATE_BITS | state
}

impl RetryEntry {
    /// To `state` within the same turn; false if the word is no longer `seen`.
    pub fn advance(&self, seen: u64, state: u64) -> bool {
        self.word.compare_exchange(seen, word_of(turn_of(seen), state), AcqRel, Acquire).is_ok()
    }

    /// Wakes its waiter.
    pub fn ring(&self) {
        self.bell.fetch_add(1, Release);
        #[cfg(not(loom))]
        crate::region::futex_wake_all(&self.bell);
    }

    /// Leader: sets a waiting task free; false if it left meanwhile.
    pub fn release(&self, seen: u64, now_ns: u64) -> bool {
        self.released_ns.store(now_ns, Relaxed);
        let released = self.advance(seen, RETRY_RELEASED);
        if released {
            self.ring();
        }
        released
    }

    /// Takes it out of the queue and tells its waiter; false if the word is no longer `seen`.
    pub fn drop_out(&self, seen: u64) -> bool {
        let dropped = self.advance(seen, RETRY_EMPTY);
        if dropped {
            self.ring();
        }
        dropped
    }

    /// Leader: gives the entry to another cancel; false if somebody asked about the one that it was for.
    fn fill(&self, seen: u64, turn: u64, c: &Cancelled, now_ns: u64) -> bool {
        let filling = word_of(turn, RETRY_FILLING);
        if self.word.compare_exchange(seen, filling, AcqRel, Relaxed).is_err() {
            return false;
        }
        self.task.store(c.task, Relaxed);
        self.scope.store(c.scope, Relaxed);
        self.decision_id.store(c.decision_id, Relaxed);
        self.load_milli_per_s.store(c.load_milli_per_s, Relaxed);
        self.resources.store(c.resources, Relaxed);
        self.owner_pid.store(c.owner_pid, Relaxed);
        self.flags.store(c.flags, Relaxed);
        self.released_ns.store(now_ns, Relaxed);
        self.since_ns.store(0, Relaxed);
        // Fails when the leader was taken for dead meanwhile.
        self.word.compare_exchange(filling, word_of(turn, RETRY_OPEN), Release, Relaxed).is_ok()
    }

    /// Waiter: begins to wait; the word from then on, None if the cancel has made room for another.
    fn ask(&self, open: u64, now_ns: u64, deadline_ns: u64) -> Option<u64> {
        if !self.advance(open, RETRY_WAITING) {
            return None;
        }
        self.deadline_ns.store(deadline_ns, Relaxed);
        self.seen_ns.store(now_ns, Relaxed);
        self.since_ns.store(now_ns.max(1), Release);
        Some(word_of(turn_of(open), RETRY_WAITING))
    }
}

/// Leader: notes a cancel; false = no room, all entries are waited on.
pub fn note(entries: &[RetryEntry], last_turn: &AtomicU64, c: &Cancelled, now_ns: u64) -> bool {
    // A task has one cancel that matters, its last: an older one nobody asked about makes room first.
    let rank = |e: &RetryEntry, word: u64| match state_of(word) {
        RETRY_OPEN if e.task.load(Relaxed) == c.task => Some((0, 0)),
        RETRY_EMPTY => Some((1, 0)),
        RETRY_OPEN => Some((2, turn_of(word))),
        _ => None,
    };
    // Each failed attempt means that somebody asked just then, which can happen once per entry.
    for _ in 0..=entries.len() {
        let places = entries.iter().map(|e| (e, e.word.load(Acquire)));
        let Some((_, entry, word)) =
            places.filter_map(|(e, w)| Some((rank(e, w)?, e, w))).min_by_key(|(rank, ..)| *rank)
        else {
            return false;
        };
        let turn = last_turn.fetch_add(1, Relaxed).wrapping_add(1);
        if entry.fill(word, turn, c, now_ns) {
            return true;
        }
    }
    false
}

/// A new leader: what its predecessor was writing when it died is free again.
pub fn clear_unfinished(entries: &[RetryEntry]) {
    for entry in entries {
        let word = entry.word.load(Acquire);
        if state_of(word) == RETRY_FILLING {
            entry.advance(word, RETRY_EMPTY);
        }
    }
}

/// The newest entry of a task of process `pid`, with its word: OPEN, WAITING or RELEASED.
fn find(entries: &[RetryEntry], pid: u32, task: u64) -> Option<(&RetryEntry, u64)> {
    let found = entries.iter().filter_map(|entry| {
        let word = entry.word.load(Acquire);
        let mine =
            state_of(word) >= RETRY_OPEN && entry.task.load(Relaxed) == task && entry.owner_pid.load(Relaxed) == pid;
        // Still the same turn, so it was the task of this word that was read.
        fence(Acquire);
        (mine && entry.word.load(Relaxed) == word).then_some((entry, word))
    });
    found.max_by_key(|(_, word)| *word)
}

#[cfg(not(loom))]
pub use waiter::Answer;

/// The side of the task's own process.
#[cfg(not(loom))]
mod waiter {
    use super::*;
    use crate::config::Mode;
    use crate::error::{Code, Error, Result};
    use crate::region::clock::monotonic_ns;
    use crate::region::owner::ProcessId;
    use crate::region::tasks::index_of;
    use crate::region::{futex_wait, Region};
    use std::time::Duration;

    /// What a task that may run again is told; an error says why it may not.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Answer {
        Run,
        Later,
    }

    fn dropped(why: &str) -> Error {
        Error::new(Code::Stale, format!("not run again: {why}"))
    }

    impl Region {
        /// Asks, or asks again, whether a cancelled task may run again. `deadline_ns`: CLOCK_MONOTONIC, 0 = none; that of
        /// the first call counts.
        pub fn poll_retry(&self, me: ProcessId, task: u64, deadline_ns: u64) -> Result<Answer> {
            let (entry, word) = self.retry_of(me, task, deadline_ns)?;
            self.look(me, task, entry, word)
        }

        /// The same, until there is an answer; `going` = this process still is part of the region.
        pub fn wait_retry(
            &self,
            me: ProcessId,
            task: u64,
            deadline_ns: u64,
            going: impl Fn() -> bool,
        ) -> Result<Answer> {
            let (entry, word) = self.retry_of(me, task, deadline_ns)?;
            loop {
                // Read before the word: a change after that makes the futex return at once.
                let bell = entry.bell.load(Acquire);
                if self.look(me, task, entry, word)? == Answer::Run {
                    return Ok(Answer::Run);
                }
                if !going() {
                    self.leave(entry, word);
                    return Err(dropped("the library was shut down"));
                }
                let left_ns = entry.deadline_ns.load(Relaxed).saturating_sub(self.now_ns());
                futex_wait(&entry.bell, bell, Duration::from_nanos(left_ns.min(LIFE_SIGN_NS)));
            }
        }

        /// Takes a task's question back, from any thread of its process: whoever waits is told not to run it.
        pub fn give_up_retry(&self, me: ProcessId, task: u64) {
            if let Some((entry, word)) = find(&self.header().retries, me.pid, task) {
                let since_ns = entry.since_ns.load(Relaxed);
                if entry.drop_out(word) && state_of(word) != RETRY_OPEN {
                    self.count_drop(since_ns);
                }
            }
        }

        /// The task's entry and the word under which it waits.
        fn retry_of(&self, me: ProcessId, task: u64, deadline_ns: u64) -> Result<(&RetryEntry, u64)> {
            let h = self.header();
            // Twice: between finding and asking the leader may have needed the place.
            for _ in 0..2 {
                let Some((entry, word)) = find(&h.retries, me.pid, task) else { break };
                if state_of(word) != RETRY_OPEN {
                    return Ok((entry, word_of(turn_of(word), RETRY_WAITING)));
                }
                self.may_ask(me, task, entry)?;
                let now_ns = self.now_ns();
                if let Some(word) = entry.ask(word, now_ns, self.latest_ns(entry, now_ns, deadline_ns)) {
                    h.counters.retries_asked.fetch_add(1, Relaxed);
                    h.retry_requests.fetch_add(1, AcqRel);
                    return Ok((entry, word));
                }
            }
            Err(dropped("no cancel by the controller is known for this task, or its wait has ended"))
        }

        /// The host's mistakes, which cost nothing: it may ask again.
        fn may_ask(&self, me: ProcessId, task: u64, entry: &RetryEntry) -> Result<()> {
            let Some(slot) = self.own_task(me.pid, task) else {
                return Ok(());
            };
            if slot.scope.load(Relaxed) != entry.scope.load(Relaxed) {
                return Err(dropped("the task has begun another request since its cancel"));
            }
            if slot.request_start_ns.load(Relaxed) != 0 {
                return Err(dropped("the cancelled request is still in flight: end it first"));
            }
            if slot.trace.occupied.load(Relaxed) != 0 {
                return Err(dropped("the task still holds resources: undo its work first"));
            }
            Ok(())
        }

        /// When its wait ends at the latest, in the region's time.
        fn latest_ns(&self, entry: &RetryEntry, now_ns: u64, deadline_ns: u64) -> u64 {
            let longest_ns = self.header().retry_background_max_ms().saturating_mul(MS);
            let background = entry.flags.load(Relaxed) & FLAG_BACKGROUND != 0;
            // The region's clock is scaled from a counter: what is left counts, not the two clocks' readings.
            let left_ns = match deadline_ns {
                0 => longest_ns,
                ns if background => ns.saturating_sub(monotonic_ns()).min(longest_ns),
                ns => ns.saturating_sub(monotonic_ns()),
            };
            now_ns.saturating_add(left_ns)
        }

        /// Is there an answer? `waiting`: the word under which the task waits.
        fn look(&self, me: ProcessId, task: u64, entry: &RetryEntry, waiting: u64) -> Result<Answer> {
            loop {
                let word = entry.word.load(Acquire);
                let since_ns = entry.since_ns.load(Relaxed);
                if word == word_of(turn_of(waiting), RETRY_RELEASED) {
                    if entry.advance(word, RETRY_EMPTY) {
                        self.begin_again(me, task, since_ns);
                        return Ok(Answer::Run);
                    }
                    continue;
                }
                if word != waiting {
                    return Err(dropped("its deadline passed, its host gave it up, or it showed no sign of life"));
                }
                let now_ns = self.now_ns();
                entry.seen_ns.store(now_ns, Relaxed);
                let why = if now_ns >= entry.deadline_ns.load(Relaxed) {
                    "its deadline passed before what it was cancelled for was calm"
                } else if self.ran_again_already(task, entry) {
                    "it has run again once already"
                } else if self.header().mode() == Mode::Off {
                    "Atropos is off"
                } else if self.nobody_leads(now_ns) {
                    "no controller runs that could say when it is calm"
                } else {
                    return Ok(Answer::Later);
                };
                // If this fails it was set free just now: look again.
                if entry.advance(word, RETRY_EMPTY) {
                    self.count_drop(since_ns);
                    return Err(dropped(why));
                }
            }
        }

        fn begin_again(&self, me: ProcessId, task: u64, since_ns: u64) {
            let counters = &self.header().counters;
            counters.retried.fetch_add(1, Relaxed);
            counters.retry_waited_ns.fetch_add(self.now_ns().saturating_sub(since_ns), Relaxed);
            // A task that lives on (a session): the host need not remember that its next request is the retry.
            if let Some(slot) = self.own_task(me.pid, task) {
                slot.set_flag(FLAG_RETRY_NEXT, true);
            }
        }

        /// Was the cancelled request a retry itself? Its slot tells as long as nobody else has it.
        fn ran_again_already(&self, task: u64, entry: &RetryEntry) -> bool {
            let slot = self.tasks().get(index_of(task));
            let now = slot.filter(|s| s.is_of(task)).map_or(0, |s| s.flags.load(Relaxed));
            (now | entry.flags.load(Relaxed)) & FLAG_RETRIED != 0
        }

        fn nobody_leads(&self, now_ns: u64) -> bool {
            let lease = &self.header().lease;
            let beat_ns = lease.heartbeat_ns.load(Acquire);
            lease.term() == 0 || now_ns.saturating_sub(beat_ns) > NO_LEADER_NS
        }

        /// Out of the queue, whatever the leader says of it.
        fn leave(&self, entry: &RetryEntry, waiting: u64) {
            let since_ns = entry.since_ns.load(Relaxed);
            if entry.advance(waiting, RETRY_EMPTY)
                || entry.advance(word_of(turn_of(waiting), RETRY_RELEASED), RETRY_EMPTY)
            {
                self.count_drop(since_ns);
            }
        }

        pub(crate) fn count_drop(&self, since_ns: u64) {
            let counters = &self.header().counters;
            counters.retries_dropped.fetch_add(1, Relaxed);
            if since_ns != 0 {
                counters.retry_waited_ns.fetch_add(self.now_ns().saturating_sub(since_ns), Relaxed);
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::config::{Config, Mode};
    use crate::region::clock::monotonic_ns;
    use crate::region::owner::ProcessId;
    use crate::region::Region;

    struct Stage {
        r: Region,
        me: ProcessId,
    }

    impl Stage {
        /// A region that a controller leads.
        fn new() -> Stage {
            let r = Region::anonymous(16, 16).unwrap();
            r.header().publish_settings(&Config { mode: Mode::Enforce, ..Config::default() }).unwrap();
            let s = Stage { r, me: ProcessId::current() };
            s.beat();
            s
        }

        fn beat(&self) {
            let h = self.r.header();
            h.lease.word.store(1 << 32 | self.me.pid as u64, Relaxed);
            h.lease.heartbeat_ns.store(self.r.now_ns(), Relaxed);
        }

        /// A task that was cancelled, with its entry noted.
        fn cancelled(&self, flags: u32) -> u64 {
            let task = self.r.begin_task(self.me, 1, 0).unwrap();
            let slot = self.r.task(task).unwrap();
            slot.set_flag(flags, true);
            let c = Cancelled {
                task,
                scope: slot.scope.load(Relaxed),
                owner_pid: self.me.pid,
                flags: slot.flags.load(Relaxed),
                ..Cancelled::default()
            };
            let h = self.r.header();
            assert!(note(&h.retries, &h.retry_turn, &c, self.r.now_ns()));
            task
        }

        fn poll(&self, task: u64, deadline_ns: u64) -> Result<Answer, String> {
            self.r.poll_retry(self.me, task, deadline_ns).map_err(|e| e.text)
        }

        fn release(&self, task: u64) -> bool {
            let (entry, word) = find(&self.r.header().retries, self.me.pid, task).unwrap();
            entry.release(word, self.r.now_ns())
        }

        fn counts(&self) -> (u64, u64, u64) {
            let c = &self.r.header().counters;
            (c.retries_asked.load(Relaxed), c.retried.load(Relaxed), c.retries_dropped.load(Relaxed))
        }
    }

    #[test]
    fn an_ended_task_waits_is_set_free_and_runs_once() {
        let s = Stage::new();
        let task = s.cancelled(0);
        assert!(s.r.end_task(s.me, task, true));
        // Another task has its slot by now.
        s.r.begin_task(s.me, 2, task).unwrap();
        assert_eq!(s.poll(task, 0), Ok(Answer::Later));
        assert_eq!(s.poll(task, 0), Ok(Answer::Later));
        assert!(s.release(task));
        assert_eq!(s.poll(task, 0), Ok(Answer::Run));
        assert!(s.poll(task, 0).unwrap_err().contains("its wait has ended"));
        assert_eq!(s.counts(), (1, 1, 0));
    }

    #[test]
    fn a_session_must_have_ended_the_request_and_its_next_one_is_the_retry() {
        let s = Stage::new();
        let task = s.cancelled(0);
        let slot = s.r.task(task).unwrap();
        slot.trace.acquire(1, 0, 1, 7, 1);
        assert!(s.poll(task, 0).unwrap_err().contains("in flight"));
        s.r.end_request(slot, -1);
        assert!(s.poll(task, 0).unwrap_err().contains("still holds"));
        slot.trace.release_all(2);
        assert_eq!(s.poll(task, 0), Ok(Answer::Later));
        assert!(s.release(task));
        assert_eq!(s.poll(task, 0), Ok(Answer::Run));
        let retried = || slot.flags.load(Relaxed) & (FLAG_RETRIED | FLAG_RETRY_NEXT);
        s.r.begin_request(slot, 1);
        assert_eq!(retried(), FLAG_RETRIED);
        s.r.end_request(slot, 0);
        s.r.begin_request(slot, 1);
        assert_eq!(retried(), 0, "only that one request");
        s.r.end_request(slot, 0);
        let c = &s.r.header().counters;
        assert_eq!((c.retries_succeeded.load(Relaxed), c.retries_failed.load(Relaxed)), (1, 0));
    }

    #[test]
    fn an_older_cancel_does_not_serve_a_later_request() {
        let s = Stage::new();
        let task = s.cancelled(0);
        let slot = s.r.task(task).unwrap();
        s.r.begin_request(slot, 0);
        s.r.end_request(slot, -1);
        assert!(s.poll(task, 0).unwrap_err().contains("another request"));
    }

    #[test]
    fn a_retry_is_not_retried() {
        let s = Stage::new();
        let task = s.cancelled(FLAG_RETRIED);
        s.r.end_task(s.me, task, false);
        assert!(s.poll(task, 0).unwrap_err().contains("once already"));
        // The flag came after the decision.
        let task = s.cancelled(0);
        s.r.task(task).unwrap().set_flag(FLAG_RETRIED, true);
        s.r.end_task(s.me, task, false);
        assert!(s.poll(task, 0).unwrap_err().contains("once already"));
        assert_eq!(s.counts(), (2, 0, 2));
    }

    #[test]
    fn deadlines_are_kept_and_background_tasks_have_a_longest_wait() {
        let s = Stage::new();
        let latest = |flags, deadline_ns| {
            let task = s.cancelled(flags);
            s.r.end_task(s.me, task, false);
            let _ = s.poll(task, deadline_ns);
            let (entry, _) = find(&s.r.header().retries, s.me.pid, task).expect("it waits");
            entry.deadline_ns.load(Relaxed).saturating_sub(s.r.now_ns()) / 1_000_000_000
        };
        let in_s = |s: u64| monotonic_ns() + s * 1_000_000_000;
        assert_eq!(latest(0, 0), 599);
        assert_eq!(latest(0, in_s(5)), 4);
        assert_eq!(latest(0, in_s(10_000)), 9_999);
        assert_eq!(latest(FLAG_BACKGROUND, in_s(10_000)), 599);
        assert_eq!(latest(FLAG_BACKGROUND, in_s(5)), 4);
        let task = s.cancelled(0);
        s.r.end_task(s.me, task, false);
        assert!(s.poll(task, 1).unwrap_err().contains("deadline passed"), "it lies in the past");
    }

    #[test]
    fn without_a_controller_or_with_mode_off_the_answer_comes_at_once() {
        let s = Stage::new();
        let ask = || {
            let task = s.cancelled(0);
            s.r.end_task(s.me, task, false);
            s.poll(task, 0)
        };
        assert_eq!(ask(), Ok(Answer::Later));
        s.r.header().publish_settings(&Config { mode: Mode::Off, ..Config::default() }).unwrap();
        assert!(ask().unwrap_err().contains("off"));
        s.r.header().publish_settings(&Config::default()).unwrap();
        s.r.header().lease.word.store(0, Relaxed);
        assert!(ask().unwrap_err().contains("no controller"));
        s.beat();
        s.r.header().lease.heartbeat_ns.store(s.r.now_ns() - NO_LEADER_NS - MS, Relaxed);
        assert!(ask().unwrap_err().contains("no controller"));
        assert_eq!(s.counts(), (4, 0, 3));
    }

    #[test]
    fn strangers_and_rubbish_get_nothing() {
        let s = Stage::new();
        let task = s.cancelled(0);
        let other = ProcessId { pid: s.me.pid + 1, ..s.me };
        s.r.end_task(s.me, task, false);
        assert!(s.r.poll_retry(other, task, 0).is_err());
        for rubbish in [0, 1, u64::MAX, task ^ 1 << 40] {
            assert!(s.poll(rubbish, 0).is_err());
        }
        assert_eq!(s.counts(), (0, 0, 0));
        assert_eq!(s.poll(task, 0), Ok(Answer::Later));
    }

    #[test]
    fn a_blocked_waiter_hears_of_its_release_and_of_giving_up() {
        for give_up in [false, true] {
            let s = Stage::new();
            let task = s.cancelled(0);
            s.r.end_task(s.me, task, false);
            std::thread::scope(|scope| {
                let waiter = scope.spawn(|| s.r.wait_retry(s.me, task, 0, || true));
                while s.r.header().retry_requests.load(Relaxed) == 0 {
                    std::thread::yield_now();
                }
                if give_up {
                    s.r.give_up_retry(s.me, task);
                } else {
                    assert!(s.release(task));
                }
                assert_eq!(waiter.join().unwrap().is_ok(), !give_up);
            });
            assert_eq!(s.counts(), if give_up { (1, 0, 1) } else { (1, 1, 0) });
        }
    }

    #[test]
    fn room_is_made_by_cancels_nobody_asked_about_the_oldest_first() {
        let entries: Vec<RetryEntry> = (0..4).map(|_| RetryEntry::default()).collect();
        let turns = AtomicU64::new(0);
        let put = |task| note(&entries, &turns, &Cancelled { task, owner_pid: 1, ..Cancelled::default() }, 5);
        assert!((1..=4).all(put));
        let (asked, word) = find(&entries, 1, 1).unwrap();
        asked.ask(word, 6, 100).unwrap();
        assert!(put(5));
        assert!(find(&entries, 1, 2).is_none(), "the oldest nobody asked about");
        assert!(put(4) && find(&entries, 1, 3).is_some(), "another cancel of a task takes its own place");
        for task in [3, 4, 5] {
            let (entry, word) = find(&entries, 1, task).unwrap();
            entry.ask(word, 6, 100).unwrap();
        }
        assert!(!put(6));
    }

    #[test]
    fn what_a_dead_leader_was_writing_is_free_for_its_successor() {
        let entry = RetryEntry::default();
        entry.word.store(word_of(3, RETRY_FILLING), Relaxed);
        clear_unfinished(std::slice::from_ref(&entry));
        assert_eq!(state_of(entry.word.load(Relaxed)), RETRY_EMPTY);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;

    fn waiting() -> (Arc<RetryEntry>, u64) {
        let entry = Arc::new(RetryEntry::default());
        assert!(entry.fill(0, 1, &Cancelled { task: 7, owner_pid: 1, ..Cancelled::default() }, 1));
        let word = entry.ask(word_of(1, RETRY_OPEN), 2, 9).unwrap();
        (entry, word)
    }

    /// The leader sets a task free while its waiter's deadline passes: either it leaves and the leader knows, or it runs.
    #[test]
    fn of_release_and_deadline_one_happens() {
        loom::model(|| {
            let (entry, word) = waiting();
            let leader = {
                let entry = entry.clone();
                loom::thread::spawn(move || entry.release(word, 3))
            };
            let left = entry.advance(word, RETRY_EMPTY);
            let ran = !left && entry.advance(word_of(1, RETRY_RELEASED), RETRY_EMPTY);
            let released = leader.join().unwrap();
            assert!(left ^ ran);
            assert_eq!(released, ran);
            assert_eq!(state_of(entry.word.load(Relaxed)), RETRY_EMPTY);
        });
    }

    /// Two leaders (one was suspended) and a waiter that gives up: the entry ends in one way, and once.
    #[test]
    fn an_entry_is_dropped_once() {
        loom::model(|| {
            let (entry, word) = waiting();
            let others: Vec<_> = (0..2)
                .map(|_| {
                    let entry = entry.clone();
                    loom::thread::spawn(move || entry.drop_out(word))
                })
                .collect();
            let mine = entry.advance(word, RETRY_EMPTY) as u32;
            let dropped = others.into_iter().fold(mine, |n, o| n + o.join().unwrap() as u32);
            assert_eq!(dropped, 1);
        });
    }

    /// A host asks about a cancel while the leader needs its place for another: whoever finds its task in an entry gets
    /// that task's wait, never another's.
    #[test]
    fn a_place_given_away_is_not_asked_about() {
        loom::model(|| {
            let entry = Arc::new(RetryEntry::default());
            assert!(entry.fill(0, 1, &Cancelled { task: 7, owner_pid: 1, ..Cancelled::default() }, 1));
            let leader = {
                let entry = entry.clone();
                let other = Cancelled { task: 8, owner_pid: 1, ..Cancelled::default() };
                loom::thread::spawn(move || entry.fill(word_of(1, RETRY_OPEN), 2, &other, 2))
            };
            let found = find(std::slice::from_ref(&*entry), 1, 7).map(|(_, word)| word);
            let asked = found.and_then(|word| entry.ask(word, 3, 9));
            let given_away = leader.join().unwrap();
            if let Some(word) = asked {
                assert_eq!((turn_of(word), entry.task.load(Relaxed)), (1, 7));
            }
            assert!(asked.is_some() ^ given_away);
        });
    }
}
