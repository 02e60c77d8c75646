//! A task's mailbox: one cancel request, naming the scope it is for.
//!
//! The leader writes it, the owner compares its scope with its own at the point where it acts. Only the owner changes
//! the scope, so a request can never hit a later one. It also names the term it was posted in and stands in that term
//! only: a leader that was suspended in the middle of posting and wakes up deposed tells nobody anything. Who takes over
//! confirms the requests it finds.

use crate::primitive::Ordering::{Acquire, Relaxed, Release};
use crate::region::layout::{Lease, Mailbox, TaskSlot};
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

    fn read(&self, scope: u64) -> Option<Request> {
        self.seq.read(64, || Request {
            scope,
            decision_id: self.decision_id.load(Relaxed),
            rung: self.rung.load(Relaxed),
            resource: self.resource.load(Relaxed),
            instance: self.instance.load(Relaxed),
            held_ns: self.held_ns.load(Relaxed),
            victims: self.victims.load(Relaxed),
            reason: text::load_words(&self.reason),
        })
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
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;

    /// While the leader posts for scope 1 and then for scope 2, an owner that finds its scope 2 in the mailbox before and
    /// after reading got request 2 whole, never a mixture.
    #[test]
    fn a_scope_never_reads_anothers_request() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(|| {
            let mailbox = Arc::new(Mailbox::default());
            let request = |n: u64| Request { scope: n, decision_id: n, held_ns: n, ..Request::default() };
            let leader = {
                let mailbox = mailbox.clone();
                loom::thread::spawn(move || (1..=2).for_each(|n| mailbox.post(&request(n), 1)))
            };
            if mailbox.scope.load(Acquire) == 2 {
                let read = mailbox.read(2);
                if mailbox.scope.load(Acquire) == 2 {
                    assert_eq!(read, Some(request(2)));
                }
            }
            leader.join().unwrap();
        });
    }
}
