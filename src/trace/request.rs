//! Requests: the latency and throughput signal, and the scope sequence that guards cancels.

use crate::control::histogram::bucket_of;
use crate::primitive::Ordering::{Relaxed, Release};
use crate::region::layout::*;
use crate::region::Region;

impl TaskSlot {
    /// A new scope begins now. Owner only.
    pub fn open_request(&self, now_ns: u64) {
        // A new scope never finds an old cancel: the mailbox names the scope it is for.
        self.scope.store(self.scope.load(Relaxed).wrapping_add(1), Release);
        self.client_wait_ns.store(0, Relaxed);
        self.client_wait_start_ns.store(0, Relaxed);
        self.request_start_ns.store(now_ns, Release);
    }

    /// The request in flight had waited for `waited_ns` before it could be seen: it began as much earlier. Owner only.
    pub fn began_earlier(&self, waited_ns: u64) {
        let start_ns = self.request_start_ns.load(Relaxed);
        if start_ns != 0 {
            // 0 would mean that no request is in flight.
            self.request_start_ns.store(start_ns.saturating_sub(waited_ns).max(1), Release);
        }
    }

    /// Client time of the request in flight up to `now_ns`.
    pub fn client_ns(&self, now_ns: u64) -> u64 {
        let running = match self.client_wait_start_ns.load(Relaxed) {
            0 => 0,
            start => now_ns.saturating_sub(start),
        };
        self.client_wait_ns.load(Relaxed).saturating_add(running)
    }

    /// What the header knows of a class it knows of that class only.
    #[inline(always)]
    pub fn set_class(&self, class: u32) {
        let class = class.min(MAX_CLASSES as u32 - 1);
        if self.class.load(Relaxed) != class {
            self.class.store(class, Relaxed);
            self.set_flag(FLAG_CLASS_KNOWN, false);
        }
    }

    #[inline(always)]
    pub fn set_flag(&self, flag: u32, on: bool) {
        let flags = self.flags.load(Relaxed);
        self.flags.store(if on { flags | flag } else { flags & !flag }, Relaxed);
    }

    /// The marks that are one request's: a session's next request is the retry, or no longer is.
    #[cold]
    #[inline(never)]
    fn turn_marks(&self) {
        let flags = self.flags.load(Relaxed);
        let retry = if flags & FLAG_RETRY_NEXT != 0 { FLAG_RETRIED } else { 0 };
        self.flags.store(flags & !(FLAG_IMPLICIT_REQUEST | FLAG_RETRY_NEXT | FLAG_RETRIED) | retry, Relaxed);
    }

    /// Does a cancel stand for the present scope?
    #[inline(always)]
    pub fn cancel_requested(&self, lease: &Lease) -> bool {
        self.mailbox.stands(self.scope.load(Relaxed), || lease.term())
    }
}

impl Region {
    pub fn begin_request(&self, slot: &TaskSlot, class: u32) {
        self.header().begin_request(slot, class);
    }

    pub fn end_request(&self, slot: &TaskSlot, status: i32) {
        self.header().end_request(slot, status);
    }
}

/// The hot calls have the header at hand, which is one step nearer than the region.
impl Header {
    /// Begins a request on the task; one that is open ends as completed, except the implicit one of its creation.
    #[inline(always)]
    pub fn begin_request(&self, slot: &TaskSlot, class: u32) {
        self.begin_request_at(slot, class, self.clock.precise_ns());
    }

    #[inline(always)]
    fn begin_request_at(&self, slot: &TaskSlot, class: u32, now_ns: u64) {
        if slot.request_start_ns.load(Relaxed) != 0 {
            self.end_earlier(slot, now_ns);
        }
        if slot.flags.load(Relaxed) & (FLAG_IMPLICIT_REQUEST | FLAG_RETRY_NEXT | FLAG_RETRIED) != 0 {
            slot.turn_marks();
        }
        slot.set_class(class);
        slot.open_request(now_ns);
    }

    #[cold]
    #[inline(never)]
    fn end_earlier(&self, slot: &TaskSlot, now_ns: u64) {
        let flags = slot.flags.load(Relaxed);
        if flags & FLAG_IMPLICIT_REQUEST != 0 {
            // "Retried", said of a new task before its first request, is meant for that.
            slot.set_flag(FLAG_RETRY_NEXT, flags & FLAG_RETRIED != 0);
            slot.request_start_ns.store(0, Relaxed);
        } else {
            self.close_request(slot, 0, now_ns);
        }
    }

    /// Begins a request that has one of `resource` (0 = nothing) from its begin on; returns its scope. 0: the gate is
    /// closed, which whoever calls this need not look at before.
    #[inline(always)]
    pub fn enter(&self, slot: &TaskSlot, class: u32, resource: u32) -> u64 {
        if self.clock.open.load(Relaxed) == 0 {
            return 0;
        }
        let now_ns = self.clock.precise_ns();
        self.begin_request_at(slot, class, now_ns);
        slot.trace.acquire(now_ns, self.clock.tracing_since_ns(), resource, 0, 1);
        slot.scope.load(Relaxed)
    }

    /// Ends the request in flight, if there is one, and forgets what the task holds and waits for.
    #[inline(always)]
    pub fn leave(&self, slot: &TaskSlot, status: i32) {
        let now_ns = self.clock.precise_ns();
        self.close_request(slot, status, now_ns);
        slot.trace.clear(now_ns);
    }

    /// Ends the request in flight, if there is one. Status 0 = ok.
    #[inline(always)]
    pub fn end_request(&self, slot: &TaskSlot, status: i32) {
        if slot.request_start_ns.load(Relaxed) != 0 {
            self.close_request(slot, status, self.clock.precise_ns());
        }
    }

    #[inline(always)]
    fn close_request(&self, slot: &TaskSlot, status: i32, now_ns: u64) {
        let start_ns = slot.request_start_ns.load(Relaxed);
        if start_ns == 0 {
            return;
        }
        // A request begun before tracing was turned on was not measured from its beginning.
        if start_ns >= self.clock.tracing_since_ns() {
            let latency_ns = now_ns.saturating_sub(start_ns).saturating_sub(slot.client_ns(now_ns));
            slot.exec_ns.store(slot.exec_ns.load(Relaxed).wrapping_add(latency_ns), Relaxed);
            slot.completions.store(slot.completions.load(Relaxed).wrapping_add(1), Relaxed);
            if status != 0 {
                slot.failures.store(slot.failures.load(Relaxed).wrapping_add(1), Relaxed);
            }
            let flags = slot.flags.load(Relaxed);
            if flags & FLAG_RETRIED != 0 {
                self.retry_ended(status);
            }
            if flags & FLAG_BACKGROUND == 0 {
                self.count_latency(slot, latency_ns);
            }
        }
        slot.request_end_ns.store(now_ns, Relaxed);
        slot.request_start_ns.store(0, Release);
    }

    #[cold]
    #[inline(never)]
    fn retry_ended(&self, status: i32) {
        let counter = if status == 0 { &self.counters.retries_succeeded } else { &self.counters.retries_failed };
        counter.fetch_add(1, Relaxed);
    }

    #[inline(always)]
    fn count_latency(&self, slot: &TaskSlot, latency_ns: u64) {
        let class = slot.class.load(Relaxed) as usize % MAX_CLASSES;
        if slot.flags.load(Relaxed) & FLAG_CLASS_KNOWN == 0 {
            self.classes_used.fetch_or(1 << class, Relaxed);
            slot.set_flag(FLAG_CLASS_KNOWN, true);
        }
        // Neighbouring slots count in different places.
        let slot_number = (slot as *const TaskSlot as usize) / core::mem::size_of::<TaskSlot>();
        self.classes[class][slot_number % SHARDS].buckets[bucket_of(latency_ns)].fetch_add(1, Relaxed);
    }

    /// Client time begins or ends inside the request in flight.
    pub fn client_wait(&self, slot: &TaskSlot, on: bool) {
        let now_ns = self.clock.precise_ns();
        if on {
            if slot.client_wait_start_ns.load(Relaxed) == 0 {
                slot.client_wait_start_ns.store(now_ns, Relaxed);
            }
        } else {
            slot.client_wait_ns.store(slot.client_ns(now_ns), Relaxed);
            slot.client_wait_start_ns.store(0, Relaxed);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::region::owner::ProcessId;

    fn completions(r: &Region, class: usize) -> u32 {
        r.header().classes[class].iter().flat_map(|s| &s.buckets).map(|b| b.load(Relaxed)).sum()
    }

    #[test]
    fn creating_a_task_is_a_request_unless_the_host_says_otherwise() {
        let r = Region::anonymous(16, 16).unwrap();
        let me = ProcessId::current();
        let t = r.begin_task(me, 1, 0).unwrap();
        assert!(r.end_task(ProcessId::current(), t, false));
        assert_eq!(completions(&r, 0), 1);

        let t = r.begin_task(me, 1, 0).unwrap();
        let slot = r.task(t).unwrap();
        for _ in 0..3 {
            let scope = slot.scope.load(Relaxed);
            r.begin_request(slot, 2);
            assert_eq!(slot.scope.load(Relaxed), scope + 1);
            r.end_request(slot, 0);
            r.end_request(slot, 0);
        }
        r.end_task(ProcessId::current(), t, false);
        assert_eq!((completions(&r, 0), completions(&r, 2)), (1, 3));
    }

    #[test]
    fn a_request_that_waited_unseen_began_earlier() {
        let r = Region::anonymous(16, 16).unwrap();
        let t = r.begin_task(ProcessId::current(), 1, 0).unwrap();
        let slot = r.task(t).unwrap();
        r.header().clock.tracing_since_ns.store(0, Relaxed);
        r.begin_request(slot, 0);
        slot.began_earlier(3_000_000_000);
        r.end_request(slot, 0);
        assert!(slot.exec_ns.load(Relaxed) >= 3_000_000_000);
        slot.began_earlier(1);
        assert_eq!(slot.request_start_ns.load(Relaxed), 0, "no request is in flight");
    }

    #[test]
    fn the_request_after_an_implicit_one_that_ended_counts() {
        let r = Region::anonymous(16, 16).unwrap();
        let slot = r.task(r.begin_task(ProcessId::current(), 1, 0).unwrap()).unwrap();
        r.end_request(slot, 0);
        r.begin_request(slot, 1);
        r.begin_request(slot, 1);
        r.end_request(slot, 0);
        assert_eq!((completions(&r, 0), completions(&r, 1)), (1, 2));
    }

    #[test]
    fn a_mark_said_before_the_first_request_is_meant_for_it() {
        let r = Region::anonymous(16, 16).unwrap();
        let slot = r.task(r.begin_task(ProcessId::current(), 1, 0).unwrap()).unwrap();
        slot.set_flag(FLAG_RETRIED, true);
        r.begin_request(slot, 1);
        assert_eq!(slot.flags.load(Relaxed) & (FLAG_RETRIED | FLAG_RETRY_NEXT), FLAG_RETRIED);
        r.end_request(slot, -1);
        r.begin_request(slot, 1);
        assert_eq!(slot.flags.load(Relaxed) & (FLAG_RETRIED | FLAG_RETRY_NEXT), 0);
        let c = &r.header().counters;
        assert_eq!((c.retries_succeeded.load(Relaxed), c.retries_failed.load(Relaxed)), (0, 1));
    }

    #[test]
    fn client_time_is_not_execution_time() {
        let r = Region::anonymous(16, 16).unwrap();
        let t = r.begin_task(ProcessId::current(), 1, 0).unwrap();
        let slot = r.task(t).unwrap();
        r.begin_request(slot, 0);
        r.header().client_wait(slot, true);
        std::thread::sleep(std::time::Duration::from_millis(30));
        r.header().client_wait(slot, false);
        r.end_request(slot, 0);
        let exec = slot.exec_ns.load(Relaxed);
        let client = slot.client_wait_ns.load(Relaxed);
        assert!(client >= 30_000_000 && exec < client, "{exec} {client}");
    }

    #[test]
    fn a_request_may_have_a_server_from_its_begin_on_and_leaves_nothing_behind() {
        let r = Region::anonymous(16, 16).unwrap();
        r.header().clock.tracing_since_ns.store(0, Relaxed);
        let t = r.begin_task(ProcessId::current(), 1, 0).unwrap();
        let slot = r.task(t).unwrap();
        assert_eq!((r.header().enter(slot, 2, 7), slot.trace.occupied.load(Relaxed)), (0, 0), "the gate is closed");
        r.header().clock.open.store(1, Relaxed);
        let totals = || {
            let mut totals = crate::trace::view::Totals::default();
            slot.trace.add_totals(&mut totals);
            totals
        };
        for n in 1..=3u64 {
            let before = slot.scope.load(Relaxed);
            assert_eq!(r.header().enter(slot, 2, 7), before + 1);
            let (view, settled) = slot.trace.view(0);
            assert!(settled && view.held.len() == 1 && view.held[0].resource == 7);
            assert_eq!(view.held[0].since_ns, slot.request_start_ns.load(Relaxed));
            slot.trace.acquire(1, 0, 8, 55, 1);
            slot.trace.wait_begin(1, 9, 3);
            slot.trace.progress(4, 5);
            r.header().leave(slot, 1);
            let (view, settled) = slot.trace.view(0);
            assert!(settled && view.held.is_empty() && view.wait.is_none() && view.progress == (0, 0));
            assert_eq!(slot.request_start_ns.load(Relaxed), 0);
            assert_eq!((completions(&r, 2) as u64, slot.failures.load(Relaxed), totals()[7].acquired), (n, n, n));
        }
        assert!(totals()[9].wait_ns > 0 && totals()[8].hold_ns > 0);
        // Leaving again ends nothing; entering twice ends the first; 0 is no resource.
        r.header().leave(slot, 1);
        assert_eq!(completions(&r, 2), 3);
        r.header().enter(slot, 3, 0);
        r.header().enter(slot, 3, 0);
        assert_eq!((completions(&r, 3), slot.trace.occupied.load(Relaxed)), (1, 0));
    }

    /// A task that changes its class must not count for one that the controller does not look at.
    #[test]
    fn each_class_is_made_known() {
        let r = Region::anonymous(16, 16).unwrap();
        let t = r.begin_task(ProcessId::current(), 1, 0).unwrap();
        let slot = r.task(t).unwrap();
        r.begin_request(slot, 1);
        r.end_request(slot, 0);
        r.begin_request(slot, 1);
        slot.set_class(4);
        r.end_request(slot, 0);
        r.end_task(ProcessId::current(), t, false);
        let again = r.begin_task(ProcessId::current(), 1, t).unwrap();
        r.end_task(ProcessId::current(), again, false);
        assert_eq!(r.header().classes_used.load(Relaxed), 1 << 0 | 1 << 1 | 1 << 4);
    }

    #[test]
    fn background_tasks_do_not_count() {
        let r = Region::anonymous(16, 16).unwrap();
        let t = r.begin_task(ProcessId::current(), 1, 0).unwrap();
        r.task(t).unwrap().set_flag(FLAG_BACKGROUND, true);
        r.end_task(ProcessId::current(), t, false);
        assert_eq!(completions(&r, 0), 0);
    }
}
