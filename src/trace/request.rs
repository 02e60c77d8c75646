//! Requests: the latency and throughput signal, and the scope sequence that guards cancels.

use crate::control::histogram::bucket_of;
use crate::primitive::Ordering::{Acquire, Relaxed, Release};
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

    pub fn set_flag(&self, flag: u32, on: bool) {
        let flags = self.flags.load(Relaxed);
        self.flags.store(if on { flags | flag } else { flags & !flag }, Relaxed);
    }

    /// Does a cancel stand for the present scope?
    #[inline(always)]
    pub fn cancel_requested(&self) -> bool {
        self.mailbox.scope.load(Acquire) == self.scope.load(Relaxed)
    }
}

impl Region {
    /// Begins a request on the task; one that is open ends as completed, except the implicit one of its creation.
    pub fn begin_request(&self, slot: &TaskSlot, class: u32) {
        let now = self.now_ns();
        if slot.flags.load(Relaxed) & FLAG_IMPLICIT_REQUEST != 0 {
            slot.set_flag(FLAG_IMPLICIT_REQUEST, false);
            slot.request_start_ns.store(0, Relaxed);
        } else {
            self.close_request(slot, 0, now);
        }
        slot.class.store(class.min(MAX_CLASSES as u32 - 1), Relaxed);
        slot.open_request(now);
    }

    /// Ends the request in flight, if there is one. Status 0 = ok.
    #[link_section = ".text.hot.atropos"]
    pub fn end_request(&self, slot: &TaskSlot, status: i32) {
        if slot.request_start_ns.load(Relaxed) != 0 {
            self.close_request(slot, status, self.now_ns());
        }
    }

    fn close_request(&self, slot: &TaskSlot, status: i32, now_ns: u64) {
        let start = slot.request_start_ns.load(Relaxed);
        if start == 0 {
            return;
        }
        let latency = now_ns.saturating_sub(start).saturating_sub(slot.client_ns(now_ns));
        let header = self.header();
        // A request begun before tracing was turned on was not measured from its beginning.
        if start >= header.clock.tracing_since_ns() {
            slot.exec_ns.store(slot.exec_ns.load(Relaxed).wrapping_add(latency), Relaxed);
            slot.completions.store(slot.completions.load(Relaxed).wrapping_add(1), Relaxed);
            if status != 0 {
                slot.failures.store(slot.failures.load(Relaxed).wrapping_add(1), Relaxed);
            }
            if slot.flags.load(Relaxed) & FLAG_BACKGROUND == 0 {
                let class = slot.class.load(Relaxed) as usize % MAX_CLASSES;
                if header.classes_used.load(Relaxed) >> class & 1 == 0 {
                    header.classes_used.fetch_or(1 << class, Relaxed);
                }
                // Neighbouring slots count in different places.
                let slot_number = (slot as *const TaskSlot as usize) / core::mem::size_of::<TaskSlot>();
                header.classes[class][slot_number % SHARDS].buckets[bucket_of(latency)].fetch_add(1, Relaxed);
            }
        }
        slot.request_end_ns.store(now_ns, Relaxed);
        slot.request_start_ns.store(0, Release);
    }

    /// Client time begins or ends inside the request in flight.
    pub fn client_wait(&self, slot: &TaskSlot, on: bool) {
        let now = self.now_ns();
        if on {
            if slot.client_wait_start_ns.load(Relaxed) == 0 {
                slot.client_wait_start_ns.store(now, Relaxed);
            }
        } else {
            slot.client_wait_ns.store(slot.client_ns(now), Relaxed);
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
    fn client_time_is_not_execution_time() {
        let r = Region::anonymous(16, 16).unwrap();
        let t = r.begin_task(ProcessId::current(), 1, 0).unwrap();
        let slot = r.task(t).unwrap();
        r.begin_request(slot, 0);
        r.client_wait(slot, true);
        std::thread::sleep(std::time::Duration::from_millis(30));
        r.client_wait(slot, false);
        r.end_request(slot, 0);
        let exec = slot.exec_ns.load(Relaxed);
        let client = slot.client_wait_ns.load(Relaxed);
        assert!(client >= 30_000_000 && exec < client, "{exec} {client}");
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
