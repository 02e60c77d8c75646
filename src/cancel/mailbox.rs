//! A task's mailbox: one cancel request, naming the scope it is for.
//!
//! The leader writes it, the owner compares its scope with its own at the point where it acts. Only the owner changes
//! the scope, so a request can never hit a later one. It also names the term it was posted in and stands in that term
//! only: a leader that was suspended in the middle of posting and wakes up deposed tells nobody anything. Who takes over
//! confirms the requests it finds.

use crate::primitive::Ordering::{Acquire, Relaxed, Release};
use crate::region::layout::{Lease, Mailbox, TaskSlot, REASON_WORDS};
use crate::region::text;

/// What the controller asks for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Request {
    pub scope: u64,
    pub decision_id: u64,
    /// 1 = cancel action, 2 = terminate action.
    pub rung: u32,
    pub resource: u32,
    pub instance: u64,
    pub held_ns: u64,
    pub victims: u32,
    pub reason: String,
}

/// A number that other contents hardly have (FNV-1a, over words instead of bytes). The counter of the mailbox tells
/// writes apart from reads, not a deposed leader's late write from its successor's; this does.
fn seal(r: &Request, reason: &str) -> u64 {
    let numbers = [r.scope, r.decision_id, r.instance, r.held_ns, r.victims as u64];
    let small = (r.resource as u64) << 32 | r.rung as u64;
    let words = reason.as_bytes().chunks(8).map(|part| part.iter().fold(0, |word, &byte| word << 8 | byte as u64));
    let all = numbers.into_iter().chain([small]).chain(words);
    all.fold(0xcbf2_9ce4_8422_2325, |hash, word| (hash ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(29))
}

impl Mailbox {
    /// By the leader of `term` only.
    pub fn post(&self, request: &Request, term: u32) {
        // Out of the way first: a reader must never pair the new scope with the old reason.
        self.scope.store(0, Release);
        self.seq.write(|| {
            self.decision_id.store(request.decision_id, Relaxed);
            self.instance.store(request.instance, Relaxed);
            self.held_ns.store(request.held_ns, Relaxed);
            self.resource.store(request.resource, Relaxed);
            self.rung.store(request.rung, Relaxed);
            self.victims.store(request.victims, Relaxed);
            self.term.store(term, Relaxed);
            text::store_words(&self.reason, &request.reason);
            // As it will be read.
            let kept = text::cut(&request.reason, REASON_WORDS * 8 - 1).split('\0').next().unwrap_or_default();
            self.seal.store(seal(request, kept), Relaxed);
        });
        self.scope.store(request.scope, Release);
    }

    /// Does a request for `scope` stand, in leader `term`'s time?
    #[inline(always)]
    pub fn stands(&self, scope: u64, term: impl FnOnce() -> u32) -> bool {
        // The second line is read only when there is something to find.
        self.scope.load(Acquire) == scope && self.term.load(Relaxed) == term()
    }

    /// Makes a predecessor's request for `scope` one of `term`, by its leader.
    pub fn confirm(&self, scope: u64, term: u32) {
        if self.scope.load(Acquire) == scope {
            self.term.store(term, Release);
        }
    }

    /// Takes the request for `scope` back, if it still stands.
    pub fn withdraw(&self, scope: u64) {
        let _ = self.scope.compare_exchange(scope, 0, Release, Relaxed);
    }

    /// The request for `scope`; None = it was written all the time, or two leaders' posts have mixed.
    fn read(&self, scope: u64) -> Option<Request> {
        let (request, sealed) = self.seq.read(if cfg!(loom) { 2 } else { 64 }, || {
            let request = Request {
                scope,
                decision_id: self.decision_id.load(Relaxed),
                rung: self.rung.load(Relaxed),
                resource: self.resource.load(Relaxed),
                instance: self.instance.load(Relaxed),
                held_ns: self.held_ns.load(Relaxed),
                victims: self.victims.load(Relaxed),
                reason: text::load_words(&self.reason),
            };
            (request, self.seal.load(Relaxed))
        })?;
        (seal(&request, &request.reason) == sealed).then_some(request)
    }

    /// Does `request` of leader `term` stand, whole? Else it is to be posted again.
    pub fn has(&self, request: &Request, term: u32) -> bool {
        self.stands(request.scope, || term)
            && self.read(request.scope).is_some_and(|r| (r.decision_id, r.rung) == (request.decision_id, request.rung))
    }
}

impl TaskSlot {
    /// The request that stands for the task's present scope.
    pub fn standing_request(&self, lease: &Lease) -> Option<Request> {
        let scope = self.scope.load(Relaxed);
        if scope == 0 || !self.mailbox.stands(scope, || lease.term()) {
            return None;
        }
        let request = self.mailbox.read(scope)?;
        // Withdrawn or replaced while it was read?
        self.mailbox.stands(scope, || lease.term()).then_some(request)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::region::owner::ProcessId;
    use crate::region::Region;

    #[test]
    fn a_request_stands_for_its_scope_only() {
        let r = Region::anonymous(16, 16).unwrap();
        let t = r.begin_task(ProcessId::current(), 1, 0).unwrap();
        let slot = r.task(t).unwrap();
        let request =
            Request { scope: slot.scope.load(Relaxed), reason: "held the lock".into(), rung: 1, ..Default::default() };
        let lease = &r.header().lease;
        assert_eq!(slot.standing_request(lease), None);
        slot.mailbox.post(&request, 0);
        assert!(slot.cancel_requested(lease));
        assert_eq!(slot.standing_request(lease), Some(request.clone()));
        r.begin_request(slot, 0);
        assert!(!slot.cancel_requested(lease) && slot.standing_request(lease).is_none());
        slot.mailbox.post(&Request { scope: slot.scope.load(Relaxed), ..request }, 0);
        slot.mailbox.withdraw(slot.scope.load(Relaxed));
        assert!(!slot.cancel_requested(lease));
    }

    #[test]
    fn what_a_deposed_leader_posts_does_not_stand() {
        let r = Region::anonymous(16, 16).unwrap();
        let (me, lease) = (ProcessId::current(), &r.header().lease);
        let t = r.begin_task(me, 1, 0).unwrap();
        let slot = r.task(t).unwrap();
        let (mut first, mut second) = (0, 0);
        lease.contend(me, &mut first, 1_000_000_000);
        let request = Request { scope: slot.scope.load(Relaxed), rung: 1, ..Default::default() };
        slot.mailbox.post(&request, first);
        assert!(slot.cancel_requested(lease));
        lease.contend(me, &mut second, 9_000_000_000);
        assert!(!slot.cancel_requested(lease), "nobody answers for it yet");
        slot.mailbox.confirm(request.scope, second);
        assert_eq!(slot.standing_request(lease), Some(request.clone()));
        slot.mailbox.withdraw(request.scope);
        slot.mailbox.post(&request, first);
        assert!(!slot.cancel_requested(lease) && slot.standing_request(lease).is_none());
        slot.mailbox.post(&request, second);
        assert!(slot.cancel_requested(lease));
    }

    #[test]
    fn a_mixture_of_two_requests_does_not_stand() {
        let r = Region::anonymous(16, 16).unwrap();
        let t = r.begin_task(ProcessId::current(), 1, 0).unwrap();
        let (slot, lease) = (r.task(t).unwrap(), &r.header().lease);
        let reason = "a reason that is too long for the mailbox, ".repeat(9) + "and has a\0 in it";
        let request =
            Request { scope: slot.scope.load(Relaxed), decision_id: 7, rung: 1, reason, ..Default::default() };
        slot.mailbox.post(&request, 0);
        assert!(slot.standing_request(lease).is_some() && slot.mailbox.has(&request, 0));
        assert!(!slot.mailbox.has(&Request { rung: 2, ..request.clone() }, 0));
        slot.mailbox.rung.store(2, Relaxed);
        assert!(
            slot.standing_request(lease).is_none() && !slot.mailbox.has(&Request { rung: 2, ..request.clone() }, 0)
        );
        slot.mailbox.post(&Request { reason: "short\0 and no more".into(), ..request }, 0);
        assert_eq!(slot.standing_request(lease).unwrap().reason, "short");
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;

    fn request(n: u64) -> Request {
        Request { scope: n, decision_id: n, held_ns: n, rung: 1, reason: n.to_string(), ..Request::default() }
    }

    /// A lease in its first term.
    fn led() -> Lease {
        let lease = Lease::default();
        lease.word.store(1 << 32 | 1, Relaxed);
        lease
    }

    fn model(preemptions: usize, run: impl Fn() + Sync + Send + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(preemptions);
        model.check(run);
    }

    /// While the leader posts for scope 1 and then for scope 2, an owner that finds its scope 2 in the mailbox before and
    /// after reading got request 2 whole, never a mixture.
    #[test]
    fn a_scope_never_reads_anothers_request() {
        model(2, || {
            let (slot, lease) = (Arc::new(TaskSlot::default()), led());
            slot.scope.store(2, Relaxed);
            let leader = {
                let slot = slot.clone();
                loom::thread::spawn(move || (1..=2).for_each(|n| slot.mailbox.post(&request(n), 1)))
            };
            if let Some(read) = slot.standing_request(&lease) {
                assert_eq!(read, request(2));
            }
            leader.join().unwrap();
            assert_eq!(
                slot.standing_request(&lease),
                Some(request(2)),
                "a request that was posted is found in the end"
            );
        });
    }

    /// The owner goes on to its next scope while the leader posts for the present one and takes it back.
    #[test]
    fn a_request_never_stands_for_a_later_scope() {
        model(3, || {
            let (slot, lease) = (Arc::new(TaskSlot::default()), led());
            slot.open_request(1);
            let leader = {
                let slot = slot.clone();
                loom::thread::spawn(move || {
                    slot.mailbox.post(&request(1), 1);
                    slot.mailbox.withdraw(1);
                })
            };
            if let Some(read) = slot.standing_request(&lease) {
                assert_eq!(read, request(1));
            }
            slot.open_request(2);
            assert!(!slot.cancel_requested(&lease) && slot.standing_request(&lease).is_none());
            leader.join().unwrap();
            assert!(!slot.cancel_requested(&lease) && slot.mailbox.scope.load(Relaxed) == 0);
        });
    }

    /// A leader that was suspended while it posted goes on while its successor posts for the same scope: the owner finds the
    /// request of one of them, or none (the successor repeats it), never a mixture.
    #[test]
    fn a_deposed_leaders_late_post_never_mixes_with_its_successors() {
        // One switch inside a post is what it takes; more, with what loom lets the loads see, take hours.
        model(1, || {
            let (slot, lease) = (Arc::new(TaskSlot::default()), led());
            lease.word.store(2 << 32 | 1, Relaxed);
            slot.scope.store(9, Relaxed);
            let by = |term: u32| Request { scope: 9, ..request(term as u64) };
            let old = slot.clone();
            let old = loom::thread::spawn(move || old.mailbox.post(&by(1), 1));
            slot.mailbox.post(&by(2), 2);
            old.join().unwrap();
            if let Some(read) = slot.standing_request(&lease) {
                assert!(read == by(1) || read == by(2), "{read:?}");
            }
        });
    }
}
