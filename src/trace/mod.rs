//! The hot path: what a worker does, written into its own slot. No lock, no system call, no allocation, no
//! read-modify-write; every function here is called by the slot's owner only.

pub mod request;
pub mod view;

use crate::primitive::Ordering::Relaxed;
use crate::region::layout::{waited_mark, Trace, HOLDINGS, MAX_RESOURCES};

/// Amounts are clamped here, so that no sum of a run's amounts can overflow.
pub const MAX_AMOUNT: u64 = 1 << 40;

/// A byte that tells most different things apart (the multiplier is the golden ratio's, as in Fibonacci hashing).
#[inline(always)]
fn tag_of(resource: u32, instance: u64) -> u64 {
    (instance ^ (resource as u64) << 56).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56
}

const BYTES: u64 = 0x0101_0101_0101_0101;

impl crate::region::layout::HoldingCell {
    #[inline(always)]
    fn is(&self, resource: u32, instance: u64) -> bool {
        self.instance.load(Relaxed) == instance && self.resource.load(Relaxed) == resource
    }

    #[inline(always)]
    fn fill(&self, resource: u32, instance: u64, since_ns: u64, amount: u64, waited_ns: u64) {
        self.waited.store(waited_mark(waited_ns), Relaxed);
        self.resource.store(resource, Relaxed);
        self.instance.store(instance, Relaxed);
        self.since_ns.store(since_ns, Relaxed);
        self.amount.store(amount, Relaxed);
    }
}

impl Trace {
    /// Where (resource, instance) stands among the holdings.
    #[inline(always)]
    fn find(&self, resource: u32, instance: u64, occupied: u64) -> Option<usize> {
        let wanted = tag_of(resource, instance) * BYTES;
        let mut words = occupied;
        let mut first = 0;
        while words != 0 {
            if words & 0xff != 0 {
                // The bytes of `different` that are 0 are the tags that match; the borrow may mark one too many above
                // a match, which the comparison below sorts out.
                let different = self.tags[first / 8].load(Relaxed) ^ wanted;
                let mut matches = different.wrapping_sub(BYTES) & !different & (BYTES << 7);
                while matches != 0 {
                    let i = first + matches.trailing_zeros() as usize / 8;
                    if occupied >> i & 1 == 1 && self.held[i & (HOLDINGS - 1)].is(resource, instance) {
                        return Some(i & (HOLDINGS - 1));
                    }
                    matches &= matches - 1;
                }
            }
            words >>= 8;
            first += 8;
        }
        None
    }

    #[inline(always)]
    fn set_tag(&self, i: usize, tag: u64) {
        let (tags, shift) = (&self.tags[i / 8], i % 8 * 8);
        tags.store(tags.load(Relaxed) & !(0xff << shift) | tag << shift, Relaxed);
    }

    /// Bit 0 stands for progress.
    #[inline(always)]
    fn touch(&self, resource: u32) {
        let touched = self.touched.load(Relaxed);
        if touched >> resource & 1 == 0 {
            self.touched.store(touched | 1 << resource, Relaxed);
        }
    }

    /// `resource` was acquired; ends the wait for it, if one runs.
    #[inline(always)]
    pub fn acquire(&self, now_ns: u64, tracing_since_ns: u64, resource: u32, instance: u64, amount: u64) {
        if resource == 0 || resource as usize >= MAX_RESOURCES {
            return;
        }
        let amount = amount.min(MAX_AMOUNT);
        // Spelt out, here and below: a closure would not be inlined, and this is the hot path.
        let seq = self.seq.begin();
        if self.wait_resource.load(Relaxed) == resource {
            self.close_wait(now_ns);
        }
        self.touch(resource);
        let acquired = &self.cells[resource as usize].acquired;
        acquired.store(acquired.load(Relaxed).wrapping_add(amount), Relaxed);
        // Nothing or one thing held is the rule: branches the processor predicts. The rest is a tail call, so that the
        // rule pays no saved registers for it.
        match self.occupied.load(Relaxed) {
            0 => {
                self.held[0].fill(resource, instance, now_ns, amount, self.waited_ns.load(Relaxed));
                self.occupied.store(1, Relaxed);
                self.seq.end(seq);
            }
            1 if self.held[0].is(resource, instance) => {
                self.acquire_again(0, now_ns, tracing_since_ns, resource, instance, amount);
                self.seq.end(seq);
            }
            _ => self.acquire_among(now_ns, tracing_since_ns, resource, instance, amount),
        }
    }

    #[inline(always)]
    fn acquire_again(&self, i: usize, now_ns: u64, tracing_since_ns: u64, resource: u32, instance: u64, amount: u64) {
        let held = &self.held[i];
        // A leftover from before tracing was turned on is a new holding.
        if held.since_ns.load(Relaxed) < tracing_since_ns {
            held.fill(resource, instance, now_ns, amount, self.waited_ns.load(Relaxed));
        } else {
            held.amount.store(held.amount.load(Relaxed).wrapping_add(amount), Relaxed);
        }
    }

    /// The rest of `acquire` with several things held; ends the write that `acquire` began.
    #[inline(never)]
    fn acquire_among(&self, now_ns: u64, tracing_since_ns: u64, resource: u32, instance: u64, amount: u64) {
        let occupied = self.occupied.load(Relaxed);
        if occupied == 1 {
            let first = &self.held[0];
            self.set_tag(0, tag_of(first.resource.load(Relaxed), first.instance.load(Relaxed)));
        }
        if let Some(i) = self.find(resource, instance, occupied) {
            self.acquire_again(i, now_ns, tracing_since_ns, resource, instance, amount);
        } else if occupied != u64::MAX {
            let i = (!occupied).trailing_zeros() as usize;
            self.set_tag(i, tag_of(resource, instance));
            self.held[i].fill(resource, instance, now_ns, amount, self.waited_ns.load(Relaxed));
            self.occupied.store(occupied | 1 << i, Relaxed);
        } else {
            self.holdings_lost.store(self.holdings_lost.load(Relaxed).wrapping_add(1), Relaxed);
        }
        self.seq.end_running();
    }

    /// `amount` of what was acquired is given back.
    #[inline(always)]
    pub fn release(&self, now_ns: u64, resource: u32, instance: u64, amount: u64) {
        if resource == 0 || resource as usize >= MAX_RESOURCES {
            return;
        }
        if self.occupied.load(Relaxed) == 1 && self.held[0].is(resource, instance) {
            self.give_back(0, now_ns, resource, amount);
        } else {
            self.release_among(now_ns, resource, instance, amount);
        }
    }

    #[inline(never)]
    fn release_among(&self, now_ns: u64, resource: u32, instance: u64, amount: u64) {
        let occupied = self.occupied.load(Relaxed);
        // Of a single one the tag is not kept, and that it is another one was seen before.
        match if occupied == 1 { None } else { self.find(resource, instance, occupied) } {
            Some(i) => self.give_back(i, now_ns, resource, amount),
            None => self.releases_unmatched.store(self.releases_unmatched.load(Relaxed).wrapping_add(1), Relaxed),
        }
    }

    #[inline(always)]
    fn give_back(&self, i: usize, now_ns: u64, resource: u32, amount: u64) {
        let held = &self.held[i];
        let left = held.amount.load(Relaxed).saturating_sub(amount);
        let seq = self.seq.begin();
        held.amount.store(left, Relaxed);
        if left == 0 {
            let held_ns = now_ns.saturating_sub(held.since_ns.load(Relaxed));
            let hold_ns = &self.cells[resource as usize].hold_ns;
            hold_ns.store(hold_ns.load(Relaxed).wrapping_add(held_ns), Relaxed);
            self.occupied.store(self.occupied.load(Relaxed) & !(1 << i), Relaxed);
        }
        self.seq.end(seq);
    }

    /// A wait begins. A worker waits for one thing at a time: a wait that runs ends as abandoned.
    #[inline(always)]
    pub fn wait_begin(&self, now_ns: u64, resource: u32, instance: u64) {
        if resource == 0 || resource as usize >= MAX_RESOURCES {
            return;
        }
        let seq = self.seq.begin();
        self.close_wait(now_ns);
        self.touch(resource);
        self.wait_instance.store(instance, Relaxed);
        self.wait_start_ns.store(now_ns, Relaxed);
        self.blocked_by.store(0, Relaxed);
        self.wait_resource.store(resource, Relaxed);
        self.seq.end(seq);
    }

    /// The wait for `resource` ended without it.
    #[inline(always)]
    pub fn wait_abandoned(&self, now_ns: u64, resource: u32) {
        if resource != 0 && self.wait_resource.load(Relaxed) == resource {
            let seq = self.seq.begin();
            self.close_wait(now_ns);
            self.seq.end(seq);
        }
    }

    #[inline(always)]
    fn close_wait(&self, now_ns: u64) {
        let resource = self.wait_resource.load(Relaxed) as usize;
        if resource != 0 && resource < MAX_RESOURCES {
            let waited = now_ns.saturating_sub(self.wait_start_ns.load(Relaxed));
            let wait_ns = &self.cells[resource].wait_ns;
            wait_ns.store(wait_ns.load(Relaxed).wrapping_add(waited), Relaxed);
            self.waited_ns.store(self.waited_ns.load(Relaxed).wrapping_add(waited), Relaxed);
            self.wait_resource.store(0, Relaxed);
        }
    }

    /// A wait of `waited_ns` lies behind it that could not be seen while it lasted.
    pub fn waited(&self, resource: u32, waited_ns: u64) {
        if resource == 0 || resource as usize >= MAX_RESOURCES {
            return;
        }
        self.seq.write(|| {
            self.touch(resource);
            for total in [&self.cells[resource as usize].wait_ns, &self.waited_ns] {
                total.store(total.load(Relaxed).wrapping_add(waited_ns), Relaxed);
            }
        });
    }

    /// The running wait is for `blocker`.
    pub fn blocked_by(&self, resource: u32, blocker: u64) {
        if self.wait_resource.load(Relaxed) == resource {
            self.seq.write(|| self.blocked_by.store(blocker, Relaxed));
        }
    }

    /// Acquisitions of this worker evicted `amount` units of others.
    #[inline(always)]
    pub fn evicted(&self, resource: u32, amount: u64) {
        if resource == 0 || resource as usize >= MAX_RESOURCES {
            return;
        }
        self.seq.write(|| {
            self.touch(resource);
            let evicted = &self.cells[resource as usize].evicted;
            evicted.store(evicted.load(Relaxed).wrapping_add(amount.min(MAX_AMOUNT)), Relaxed);
        });
    }

    #[inline(always)]
    pub fn progress(&self, done: u64, total: u64) {
        let seq = self.seq.begin();
        self.touch(0);
        self.progress_done.store(done, Relaxed);
        self.progress_total.store(total, Relaxed);
        self.seq.end(seq);
    }

    /// Drops every holding (the end of a transaction). `now_ns` closes their hold times.
    pub fn release_all(&self, now_ns: u64) {
        self.seq.write(|| self.drop_holdings(now_ns));
    }

    fn drop_holdings(&self, now_ns: u64) {
        let mut rest = self.occupied.load(Relaxed);
        while rest != 0 {
            let i = rest.trailing_zeros() as usize;
            let resource = self.held[i].resource.load(Relaxed) as usize % MAX_RESOURCES;
            let held_ns = now_ns.saturating_sub(self.held[i].since_ns.load(Relaxed));
            let hold_ns = &self.cells[resource].hold_ns;
            hold_ns.store(hold_ns.load(Relaxed).wrapping_add(held_ns), Relaxed);
            rest &= rest - 1;
        }
        self.occupied.store(0, Relaxed);
    }

    /// Forgets what a task did; totals stay, for they belong to the slot and only ever grow. Who has nothing to forget
    /// reads one line and writes none.
    #[inline(always)]
    pub fn clear(&self, now_ns: u64) {
        let touched = self.touched.load(Relaxed);
        let idle = self.occupied.load(Relaxed) == 0 && self.wait_resource.load(Relaxed) == 0 && touched & 1 == 0;
        // A writer that died half-way left the counter odd.
        if idle && self.seq.is_settled() {
            return;
        }
        let seq = self.seq.begin();
        self.drop_holdings(now_ns);
        self.close_wait(now_ns);
        if touched & 1 != 0 {
            self.touched.store(touched & !1, Relaxed);
            self.progress_done.store(0, Relaxed);
            self.progress_total.store(0, Relaxed);
        }
        self.seq.end(seq);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::region::Region;

    fn with_trace(test: impl FnOnce(&Trace)) {
        let r = Region::anonymous(16, 16).unwrap();
        test(&r.tasks()[0].trace);
    }

    fn held(t: &Trace) -> Vec<(u32, u64, u64, u64)> {
        (0..HOLDINGS)
            .filter(|i| t.occupied.load(Relaxed) >> i & 1 == 1)
            .map(|i| {
                let h = &t.held[i];
                let (resource, instance) = (h.resource.load(Relaxed), h.instance.load(Relaxed));
                (resource, instance, h.since_ns.load(Relaxed), h.amount.load(Relaxed))
            })
            .collect()
    }

    #[test]
    fn a_holding_lasts_from_its_first_acquire_to_its_last_release() {
        with_trace(|t| {
            t.acquire(100, 0, 3, 77, 1);
            t.acquire(200, 0, 3, 77, 1);
            assert_eq!(held(t), [(3, 77, 100, 2)]);
            t.release(300, 3, 77, 1);
            assert_eq!(held(t), [(3, 77, 100, 1)]);
            t.release(400, 3, 77, 1);
            assert_eq!(held(t), []);
            assert_eq!(t.cells[3].hold_ns.load(Relaxed), 300);
        });
    }

    #[test]
    fn a_wait_ends_by_acquire_by_abandon_or_by_the_next_wait() {
        with_trace(|t| {
            t.wait_begin(100, 1, 5);
            t.acquire(150, 0, 1, 5, 1);
            t.wait_begin(200, 1, 6);
            t.wait_abandoned(220, 2);
            assert_eq!(t.wait_resource.load(Relaxed), 1, "another resource's end is not this one's");
            t.wait_abandoned(230, 1);
            t.wait_begin(300, 1, 7);
            t.wait_begin(307, 2, 7);
            t.acquire(400, 0, 1, 8, 1);
            assert_eq!(t.wait_resource.load(Relaxed), 2);
            assert_eq!(t.cells[1].wait_ns.load(Relaxed), 50 + 30 + 7);
        });
    }

    #[test]
    fn a_wait_from_before_counts_and_ends_nothing() {
        with_trace(|t| {
            t.wait_begin(100, 1, 5);
            t.waited(2, 70);
            assert_eq!((t.cells[2].wait_ns.load(Relaxed), t.waited_ns.load(Relaxed)), (70, 70));
            assert_eq!(t.wait_resource.load(Relaxed), 1);
        });
    }

    #[test]
    fn misuse_is_harmless_and_counted() {
        with_trace(|t| {
            t.release(1, 1, 1, 1);
            assert_eq!(t.releases_unmatched.load(Relaxed), 1);
            for bad in [0, MAX_RESOURCES as u32, u32::MAX] {
                t.acquire(1, 0, bad, 0, 1);
                t.release(1, bad, 0, 1);
                t.wait_begin(1, bad, 0);
                t.wait_abandoned(1, bad);
                t.evicted(bad, 1);
                t.waited(bad, 1);
            }
            assert_eq!((held(t).len(), t.wait_resource.load(Relaxed)), (0, 0));
            t.acquire(1, 0, 1, 0, u64::MAX);
            t.acquire(1, 0, 1, 0, u64::MAX);
            assert_eq!(held(t)[0].3, 2 * MAX_AMOUNT);
            t.release(1, 1, 0, u64::MAX);
            assert_eq!(held(t), []);
            // Time that runs backwards by a clock's step counts as none.
            t.acquire(100, 0, 1, 0, 1);
            t.release(50, 1, 0, 1);
            assert_eq!(t.cells[1].hold_ns.load(Relaxed), 0);
        });
    }

    #[test]
    fn many_holdings_are_kept_and_the_rest_is_counted() {
        with_trace(|t| {
            for i in 0..1000u64 {
                t.acquire(i, 0, 1, i, 1);
            }
            let kept = held(t).len();
            assert_eq!(kept, HOLDINGS);
            assert_eq!(t.holdings_lost.load(Relaxed) as usize + kept, 1000);
            for i in 0..1000u64 {
                t.release(2000, 1, i, 1);
            }
            assert_eq!(held(t), []);
        });
    }

    #[test]
    fn leftovers_from_before_tracing_are_new_holdings() {
        with_trace(|t| {
            t.acquire(100, 0, 1, 9, 1);
            t.acquire(900, 500, 1, 9, 1);
            assert_eq!(held(t), [(1, 9, 900, 1)]);
        });
    }

    proptest::proptest! {
        /// Against a plain map, for any sequence of calls that fits.
        #[test]
        fn holdings_equal_a_map(ops in proptest::collection::vec((proptest::bool::ANY, 1u32..4, 0u64..20, 1u64..4), 0..300)) {
            with_trace(|t| {
                let mut model = std::collections::BTreeMap::<(u32, u64), u64>::new();
                for (acquire, r, instance, amount) in ops {
                    if acquire {
                        t.acquire(1, 0, r, instance, amount);
                        *model.entry((r, instance)).or_default() += amount;
                    } else {
                        t.release(1, r, instance, amount);
                        let left = model.get(&(r, instance)).copied().unwrap_or(0).saturating_sub(amount);
                        if left == 0 { model.remove(&(r, instance)); } else { model.insert((r, instance), left); }
                    }
                }
                let mut have: Vec<_> = held(t).into_iter().map(|(r, i, _, a)| ((r, i), a)).collect();
                have.sort();
                assert_eq!(have, model.into_iter().collect::<Vec<_>>());
            });
        }
    }
}
