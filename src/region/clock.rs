//! Time: monotonic nanoseconds, the same in all processes of a region.
//!
//! Normally hot calls read `coarse_ns`, which the controller refreshes; one load. While an overload is suspected
//! `coarse_ns` is 0 and they read the time stamp counter, scaled by numbers in the region that all processes share.
//! The counter is trusted only where the kernel itself trusts it as its clock source; else clock_gettime serves.

use super::layout::Clock;
use crate::primitive::Ordering::{Acquire, Relaxed, Release};

/// Between two looks the counter may differ from the kernel's clock by this much and a small share of the time: far over
/// what the scale's error and the kernel's own adjustment make.
const STEP_NS: u64 = 10_000_000;

/// Has the counter run away from the kernel's clock between two pairs? It does where a machine was suspended or moved, or
/// its processors' counters differ.
pub fn has_stepped(before: (u64, u64), now: (u64, u64)) -> bool {
    let counter_ns = now.0.wrapping_sub(before.0) as i64;
    let kernel_ns = now.1.saturating_sub(before.1) as i64;
    counter_ns.wrapping_sub(kernel_ns).unsigned_abs() > STEP_NS + kernel_ns as u64 / 256
}

/// CLOCK_MONOTONIC in ns. Kept out of the hot calls, which have another clock.
#[inline(never)]
pub fn monotonic_ns() -> u64 {
    if cfg!(loom) {
        // loom repeats a run up to where it takes another turn: what a run does must not depend on the time.
        return 1_000_000_000;
    }
    let mut ts = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `ts` is valid for writing; CLOCK_MONOTONIC always exists on Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut ts) };
    ts.tv_sec as u64 * 1_000_000_000 + ts.tv_nsec as u64
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn tsc() -> u64 {
    // SAFETY: every x86-64 processor has rdtsc; the kernel keeps it readable from user mode.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(target_arch = "x86_64")]
fn kernel_trusts_tsc() -> bool {
    std::fs::read_to_string("/sys/devices/system/clocksource/clocksource0/current_clocksource")
        .is_ok_and(|s| s.trim() == "tsc")
}

/// Both clocks at one moment: of several readings the tightest is the one no interrupt split.
#[cfg(target_arch = "x86_64")]
fn both_clocks() -> (u64, u64) {
    let read = |_| {
        let before = tsc();
        let ns = monotonic_ns();
        let width = tsc().wrapping_sub(before);
        (width, before + width / 2, ns)
    };
    (0..16).map(read).min_by_key(|reading| reading.0).map_or((tsc(), monotonic_ns()), |(_, tsc, ns)| (tsc, ns))
}

/// ns per 2^32 ticks of the counter, measured once per process (about 10 ms); 0 = it does not tick as it should.
#[cfg(target_arch = "x86_64")]
fn tsc_rate() -> u64 {
    // A plain word and no lock: a fork while another thread measures must not leave one locked in the child.
    static RATE: core::sync::atomic::AtomicU64 = core::sync::atomic::AtomicU64::new(0);
    let known = RATE.load(core::sync::atomic::Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    let (tsc0, ns0) = both_clocks();
    std::thread::sleep(std::time::Duration::from_millis(10));
    let (tsc1, ns1) = both_clocks();
    if tsc1 <= tsc0 || ns1 <= ns0 {
        return 0;
    }
    let rate = ((((ns1 - ns0) as u128) << 32) / (tsc1 - tsc0) as u128) as u64;
    RATE.store(rate, core::sync::atomic::Ordering::Relaxed);
    rate
}

impl Clock {
    /// Sets the counter's scale. Called once, by the region's creator, before anybody reads.
    pub fn calibrate(&self) {
        #[cfg(target_arch = "x86_64")]
        if kernel_trusts_tsc() {
            let rate = tsc_rate();
            if rate != 0 {
                let (tsc, ns) = both_clocks();
                self.tsc_base.store(tsc, Relaxed);
                self.ns_base.store(ns, Relaxed);
                self.mult.store(rate, Relaxed);
                self.use_tsc.store(1, Release);
            }
        }
        let now = self.precise_ns();
        self.refreshed_ns.store(now, Relaxed);
        self.coarse_ns.store(now, Relaxed);
    }

    /// The counter's time and the kernel's at one moment; None where the counter is not used (a scale of 0 is a model's
    /// clock, which runs as it likes), or the moment was too long.
    pub fn pair(&self) -> Option<(u64, u64)> {
        if self.use_tsc.load(Relaxed) != 1 || self.mult.load(Relaxed) == 0 {
            return None;
        }
        let before = monotonic_ns();
        let counter = self.precise_ns();
        let length = monotonic_ns() - before;
        (length < 1_000_000).then(|| (counter, before + length / 2))
    }

    /// Leader only: the kernel's clock from now on. What was noted by the counter is void.
    pub fn distrust_counter(&self) {
        self.use_tsc.store(0, Release);
        let now_ns = self.precise_ns();
        self.tracing_since_ns.store(now_ns, Release);
        self.refresh(now_ns, self.coarse_ns.load(Relaxed) == 0);
    }

    /// Exact time now.
    #[inline(always)]
    pub fn precise_ns(&self) -> u64 {
        #[cfg(target_arch = "x86_64")]
        if self.use_tsc.load(Relaxed) == 1 {
            let ticks = tsc().wrapping_sub(self.tsc_base.load(Relaxed));
            let since_base_ns = ((ticks as u128 * self.mult.load(Relaxed) as u128) >> 32) as u64;
            return self.ns_base.load(Relaxed).wrapping_add(since_base_ns);
        }
        monotonic_ns()
    }

    /// The cached time; 0 while precision is asked for.
    #[inline(always)]
    pub fn cached_ns(&self) -> u64 {
        self.coarse_ns.load(Relaxed)
    }

    /// The time hot calls note: cached, or exact while precision is asked for.
    #[inline(always)]
    pub fn event_ns(&self) -> u64 {
        let coarse = self.coarse_ns.load(Relaxed);
        if coarse != 0 {
            coarse
        } else {
            self.precise_ns()
        }
    }

    /// Leader only: refreshes the cached time, or closes it so that events are exact.
    pub fn refresh(&self, now_ns: u64, precise: bool) {
        self.refreshed_ns.store(now_ns, Relaxed);
        self.coarse_ns.store(if precise { 0 } else { now_ns }, Relaxed);
    }

    pub fn tracing_since_ns(&self) -> u64 {
        self.tracing_since_ns.load(Acquire)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::region::Region;

    #[test]
    fn a_counter_that_runs_away_is_noticed_and_a_slow_look_is_not() {
        let s = 1_000_000_000;
        for (counter, kernel, stepped) in [
            (5 * s, 5 * s, false),
            (5 * s, 5 * s + 9_000_000, false),
            (5 * s, 5 * s + 40_000_000, true),
            (3600 * s, 3601 * s, false),
            (s + 30_000_000, s, true),
            (0u64.wrapping_sub(5 * s), s, true),
            (u64::MAX / 2, s, true),
        ] {
            assert_eq!(
                has_stepped((77, 99), (77u64.wrapping_add(counter), 99 + kernel)),
                stepped,
                "{counter} {kernel}"
            );
        }
    }

    #[test]
    fn the_kernels_clock_goes_on_where_the_counter_is_not_trusted_any_more() {
        let r = Region::anonymous(16, 16).unwrap();
        let clock = &r.header().clock;
        if clock.use_tsc.load(Relaxed) == 1 {
            let (counter, kernel) = (0..100).find_map(|_| clock.pair()).unwrap();
            assert!(counter.abs_diff(kernel) < 10_000_000, "{counter} {kernel}");
        }
        clock.ns_base.fetch_add(1 << 40, Relaxed);
        clock.distrust_counter();
        assert!(clock.pair().is_none() && r.now_ns().abs_diff(monotonic_ns()) < 1_000_000_000);
        assert!(clock.tracing_since_ns() <= r.now_ns() && clock.event_ns().abs_diff(r.now_ns()) < 1_000_000_000);
    }
}
