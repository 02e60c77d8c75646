//! A task's mailbox: one cancel request, naming the scope it is for.
//!
//! The leader writes it, the owner compares its scope with its own at the point where it acts. Only the owner changes
//! the scope, so a request can never hit a later one.

use crate::primitive::Ordering::{Acquire, Relaxed, Release};
use crate::region::layout::{Mailbox, TaskSlot};
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
    /// Leader only.
    pub fn post(&self, request: &Request) {
        // Out of the way first: a reader must never pair the new scope with the old reason.
        self.scope.store(0, Release);
        self.seq.write(|| {
            self.decision_id.store(request.decision_id, Relaxed);
            self.instance.store(request.instance, Relaxed);
            self.held_ns.store(request.held_ns, Relaxed);
            self.resource.store(request.resource, Relaxed);
            self.rung.store(request.rung, Relaxed);
            self.victims.store(request.victims, Relaxed);
            text::store_words(&self.reason, &request.reason);
        });
        self.scope.store(request.scope, Release);
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
    pub fn standing_request(&self) -> Option<Request> {
        let scope = self.scope.load(Relaxed);
        if scope == 0 || self.mailbox.scope.load(Acquire) != scope {
            return None;
        }
        let request = self.mailbox.read(scope)?;
        // Withdrawn or replaced while it was read?
        (self.mailbox.scope.load(Acquire) == scope).then_some(request)
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
        assert_eq!(slot.standing_request(), None);
        slot.mailbox.post(&request);
        assert!(slot.cancel_requested());
        assert_eq!(slot.standing_request(), Some(request.clone()));
        r.begin_request(slot, 0);
        assert!(!slot.cancel_requested() && slot.standing_request().is_none());
        slot.mailbox.post(&Request { scope: slot.scope.load(Relaxed), ..request });
        slot.mailbox.withdraw(slot.scope.load(Relaxed));
        assert!(!slot.cancel_requested());
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
                loom::thread::spawn(move || (1..=2).for_each(|n| mailbox.post(&request(n))))
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
