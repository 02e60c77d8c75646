//! Leadership: one controller per region at a time.
//!
//! The lease is a word (term and pid) changed by compare-and-swap only, and a heartbeat. A candidate takes over when
//! the leader's process is gone or its heartbeat is two periods old. A leader that was suspended finds another term
//! when it wakes, and steps back before it writes anything.

use super::layout::Lease;
use super::owner::ProcessId;
use crate::primitive::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// Who acts, and by which leadership.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leader {
    pub me: ProcessId,
    pub term: u32,
}

/// A leader beats at least this often; a candidate waits two of them.
pub const HEARTBEAT_NS: u64 = 100_000_000;

/// What a tick may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Leads since earlier.
    Leader,
    /// Leads from now on: state kept from an earlier term is void.
    NewLeader,
    Follower,
}

impl Lease {
    /// Renews, takes over or stands by. `term` is what this candidate remembers of its own leadership (0 = none).
    pub fn contend(&self, me: ProcessId, term: &mut u32, now_ns: u64) -> Role {
        let word = self.word.load(Acquire);
        let mine = (*term as u64) << 32 | me.pid as u64;
        if *term != 0 && word == mine {
            // Never back: whoever slept since it read the clock may be renewing its successor's lease.
            self.heartbeat_ns.fetch_max(now_ns, AcqRel);
            return Role::Leader;
        }
        *term = 0;
        if word != 0 {
            let beat = self.heartbeat_ns.load(Acquire);
            let leader = ProcessId { pid: word as u32, start_ticks: 0 };
            // The same process, another controller object (a restart within the process): its lease must run out too.
            let fresh = now_ns.saturating_sub(beat) < 2 * HEARTBEAT_NS;
            if fresh && leader.pid_exists() {
                return Role::Follower;
            }
        }
        let next_term = ((word >> 32) as u32).wrapping_add(1).max(1);
        let next = (next_term as u64) << 32 | me.pid as u64;
        // Before the word: whoever sees the new leader must not find the old one's heartbeat and depose it at once. Of
        // candidates that lose the race below, the winner's word says that they stand by.
        self.heartbeat_ns.fetch_max(now_ns, AcqRel);
        if self.word.compare_exchange(word, next, AcqRel, Relaxed).is_err() {
            return Role::Follower;
        }
        *term = next_term;
        Role::NewLeader
    }

    /// Still the leader? Asked again right before an act.
    pub fn holds(&self, me: ProcessId, term: u32) -> bool {
        term != 0 && self.word.load(Acquire) == (term as u64) << 32 | me.pid as u64
    }

    /// Gives it up, so that a candidate need not wait.
    pub fn resign(&self, me: ProcessId, term: u32) {
        if self.holds(me, term) {
            // Old enough for a candidate, and still a beat: who waits for a leader sees how long there has been none.
            let beat_ns = self.heartbeat_ns.load(Relaxed);
            self.heartbeat_ns.store(beat_ns.saturating_sub(2 * HEARTBEAT_NS), Release);
        }
    }

    /// The term of whoever leads, or led last; 0 = nobody yet.
    pub fn term(&self) -> u32 {
        (self.word.load(Acquire) >> 32) as u32
    }

    pub fn leader_pid(&self) -> u32 {
        self.word.load(Relaxed) as u32
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::region::Region;

    #[test]
    fn one_leads_the_other_takes_over_within_two_heartbeats() {
        let r = Region::anonymous(16, 16).unwrap();
        let lease = &r.header().lease;
        let me = ProcessId::current();
        let (mut a, mut b) = (0, 0);
        let t0 = 1_000_000_000;
        assert_eq!(lease.contend(me, &mut a, t0), Role::NewLeader);
        assert_eq!(lease.contend(me, &mut b, t0 + 1), Role::Follower);
        assert_eq!(lease.contend(me, &mut a, t0 + HEARTBEAT_NS), Role::Leader);
        assert_eq!(lease.contend(me, &mut b, t0 + 2 * HEARTBEAT_NS), Role::Follower);
        assert_eq!(lease.contend(me, &mut b, t0 + 3 * HEARTBEAT_NS), Role::NewLeader);
        assert!(!lease.holds(me, a), "the sleeper must notice");
        let beat = lease.heartbeat_ns.load(Relaxed);
        lease.word.store((a as u64) << 32 | me.pid as u64, Relaxed);
        assert_eq!(lease.contend(me, &mut a, t0 + 1), Role::Leader);
        assert_eq!(lease.heartbeat_ns.load(Relaxed), beat, "a heartbeat from before the sleep deposes nobody");
        lease.word.store((b as u64) << 32 | me.pid as u64, Relaxed);
        assert_eq!(lease.contend(me, &mut a, t0 + 3 * HEARTBEAT_NS + 1), Role::Follower);
    }

    #[test]
    fn a_dead_leader_is_replaced_at_once() {
        let r = Region::anonymous(16, 16).unwrap();
        let lease = &r.header().lease;
        let (mut a, mut b) = (0, 0);
        let dead = ProcessId { pid: 0x3fff_fff0, start_ticks: 1 };
        assert_eq!(lease.contend(dead, &mut a, 5), Role::NewLeader);
        assert_eq!(lease.contend(ProcessId::current(), &mut b, 6), Role::NewLeader);
    }

    #[test]
    fn a_new_leader_is_fresh_from_its_first_moment() {
        let r = Region::anonymous(16, 16).unwrap();
        let lease = &r.header().lease;
        let (mut a, mut b) = (0, 0);
        assert_eq!(lease.contend(ProcessId { pid: 0x3fff_fff0, start_ticks: 1 }, &mut a, 1), Role::NewLeader);
        let me = ProcessId::current();
        assert_eq!(lease.contend(me, &mut b, 9_000_000_000), Role::NewLeader);
        assert_eq!(lease.contend(me, &mut 0, 9_000_000_000), Role::Follower);
        lease.resign(me, b);
        assert_eq!(lease.contend(me, &mut 0, 9_000_000_001), Role::NewLeader);
    }

    #[test]
    fn of_many_candidates_one_wins() {
        let r = Region::anonymous(16, 16).unwrap();
        let wins: usize = std::thread::scope(|s| {
            let threads: Vec<_> = (0..8)
                .map(|_| s.spawn(|| r.header().lease.contend(ProcessId::current(), &mut 0, 9_000_000_000)))
                .collect();
            threads.into_iter().map(|t| (t.join().unwrap() == Role::NewLeader) as usize).sum()
        });
        assert_eq!(wins, 1);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;

    /// Of two candidates for a free lease exactly one leads, and it can tell.
    #[test]
    fn one_of_two_candidates_leads() {
        loom::model(|| {
            let lease = Arc::new(Lease::default());
            let contend = |lease: Arc<Lease>, pid: u32| {
                let me = ProcessId { pid, start_ticks: 1 };
                let mut term = 0;
                let leads = lease.contend(me, &mut term, 1) == Role::NewLeader;
                assert_eq!(leads, term != 0);
                leads
            };
            // Both pids must exist, for a leader whose process is gone is replaced at once.
            let pid = std::process::id();
            let other = lease.clone();
            let thread = loom::thread::spawn(move || contend(other, pid));
            let mine = contend(lease, 1);
            let theirs = thread.join().unwrap();
            assert!(mine ^ theirs);
        });
    }
}
