//! The hot path: what a worker does, written into its own slot. No lock, no system call, no allocation, no
//! read-modify-write; every function here is called by the slot's owner only.

pub mod request;

use crate::primitive::Ordering::Relaxed;
use crate::region::layout::{Trace, HOLDINGS, MAX_RESOURCES, SETS, WAYS};

/// Amounts are clamped here, so that no sum of a run's amounts can overflow.
pub const MAX_AMOUNT: u64 = 1 << 40;

/// One step of a 64-bit mix (the finaliser of SplitMix64's family): spreads instances over the sets.
#[inline(always)]
fn set_of(resource: u32, instance: u64) -> usize {
    let mixed = (instance ^ (resource as u64) << 56).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 61) as usize & (SETS - 1)
}

impl Trace {
    /// Where (resource, instance) stands among the holdings: its place, or None and the set's free ways.
    #[inline(always)]
    fn find(&self, resource: u32, instance: u64) -> Result<usize, (usize, u64)> {
        let first = set_of(resource, instance) * WAYS;
        let used = self.occupied.load(Relaxed) >> first & ((1 << WAYS) - 1);
        let mut rest = used;
        while rest != 0 {
            let i = first + rest.trailing_zeros() as usize;
            if self.held_instance[i & (HOLDINGS - 1)].load(Relaxed) == instance
                && self.held_resource[i & (HOLDINGS - 1)].load(Relaxed) == resource as u8
            {
                return Ok(i & (HOLDINGS - 1));
            }
            rest &= rest - 1;
        }
        Err((first, !used & ((1 << WAYS) - 1)))
    }

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
        match self.find(resource, instance) {
            Ok(i) => {
                // A leftover from before tracing was turned on is a new holding.
                let stale = self.held_since_ns[i].load(Relaxed) < tracing_since_ns;
                let had = if stale { 0 } else { self.held_amount[i].load(Relaxed) };
                if stale {
                    self.held_since_ns[i].store(now_ns, Relaxed);
                }
                self.held_amount[i].store(had + amount, Relaxed);
            }
            Err((first, free)) if free != 0 => {
                let i = (first + free.trailing_zeros() as usize) & (HOLDINGS - 1);
                self.held_resource[i].store(resource as u8, Relaxed);
                self.held_instance[i].store(instance, Relaxed);
                self.held_since_ns[i].store(now_ns, Relaxed);
                self.held_amount[i].store(amount, Relaxed);
                self.occupied.store(self.occupied.load(Relaxed) | 1 << i, Relaxed);
            }
            Err(_) => self.holdings_lost.store(self.holdings_lost.load(Relaxed).wrapping_add(1), Relaxed),
        }
        self.seq.end(seq);
    }

    /// `amount` of what was acquired is given back.
    #[inline(always)]
    pub fn release(&self, now_ns: u64, resource: u32, instance: u64, amount: u64) {
        if resource == 0 || resource as usize >= MAX_RESOURCES {
            return;
        }
        match self.find(resource, instance) {
            Ok(i) => {
                let seq = self.seq.begin();
                let left = self.held_amount[i].load(Relaxed).saturating_sub(amount);
                self.held_amount[i].store(left, Relaxed);
                if left == 0 {
                    let held = now_ns.saturating_sub(self.held_since_ns[i].load(Relaxed));
                    let hold_ns = &self.cells[resource as usize].hold_ns;
                    hold_ns.store(hold_ns.load(Relaxed).wrapping_add(held), Relaxed);
                    self.occupied.store(self.occupied.load(Relaxed) & !(1 << i), Relaxed);
                }
                self.seq.end(seq);
            }
            Err(_) => self.releases_unmatched.store(self.releases_unmatched.load(Relaxed).wrapping_add(1), Relaxed),
        }
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
            self.wait_resource.store(0, Relaxed);
        }
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
        self.progress_done.store(done, Relaxed);
        self.progress_total.store(total, Relaxed);
        self.seq.end(seq);
    }

    /// Drops every holding (the end of a transaction). `now_ns` closes their hold times.
    pub fn release_all(&self, now_ns: u64) {
        self.seq.write(|| {
            let mut rest = self.occupied.load(Relaxed);
            while rest != 0 {
                let i = rest.trailing_zeros() as usize;
                let resource = self.held_resource[i].load(Relaxed) as usize % MAX_RESOURCES;
                let held = now_ns.saturating_sub(self.held_since_ns[i].load(Relaxed));
                let hold_ns = &self.cells[resource].hold_ns;
                hold_ns.store(hold_ns.load(Relaxed).wrapping_add(held), Relaxed);
                rest &= rest - 1;
            }
            self.occupied.store(0, Relaxed);
        });
    }

    /// Forgets what a task did; totals stay, for they belong to the slot and only ever grow.
    pub fn clear(&self, now_ns: u64) {
        self.release_all(now_ns);
        self.seq.write(|| {
            self.close_wait(now_ns);
            self.blocked_by.store(0, Relaxed);
            self.progress_done.store(0, Relaxed);
            self.progress_total.store(0, Relaxed);
        });
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

    fn held(t: &Trace) -> Vec<(u8, u64, u64, u64)> {
        (0..HOLDINGS)
            .filter(|i| t.occupied.load(Relaxed) >> i & 1 == 1)
            .map(|i| {
                (
                    t.held_resource[i].load(Relaxed),
                    t.held_instance[i].load(Relaxed),
                    t.held_since_ns[i].load(Relaxed),
                    t.held_amount[i].load(Relaxed),
                )
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
            assert!(kept > 48, "{kept}");
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
        fn holdings_equal_a_map(ops in proptest::collection::vec((proptest::bool::ANY, 1u32..4, 0u64..6, 1u64..4), 0..200)) {
            with_trace(|t| {
                let mut model = std::collections::BTreeMap::<(u8, u64), u64>::new();
                for (acquire, r, instance, amount) in ops {
                    if acquire {
                        t.acquire(1, 0, r, instance, amount);
                        *model.entry((r as u8, instance)).or_default() += amount;
                    } else {
                        t.release(1, r, instance, amount);
                        let left = model.get(&(r as u8, instance)).copied().unwrap_or(0).saturating_sub(amount);
                        if left == 0 { model.remove(&(r as u8, instance)); } else { model.insert((r as u8, instance), left); }
                    }
                }
                let mut have: Vec<_> = held(t).into_iter().map(|(r, i, _, a)| ((r, i), a)).collect();
                have.sort();
                assert_eq!(have, model.into_iter().collect::<Vec<_>>());
            });
        }
    }
}
