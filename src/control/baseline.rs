//! What normal looks like, per request class: p99, its noise, throughput, typical duration.
//!
//! Windows slide (they overlap by three quarters), so only those that share no time with the last one learnt are
//! taken. One window of 100 ms holds a few hundred requests at best and its p99 varies by tens of percent;
//! hence the p99 is learnt from merged histograms of about a second, as the median of recent ones (one odd second
//! changes nothing), and the noise of single windows is learnt beside it.

use std::collections::VecDeque;

use super::histogram::Histogram;
use super::window::ClassWindow;

/// Single windows (with enough completions) before a baseline counts as known.
const MIN_SAMPLES: u64 = 10;
/// Completions that make a p99 worth looking at; thinner windows are merged until they hold as many.
const MIN_COMPLETIONS: u64 = 20;
/// Time over which histograms are merged for the p99, ns.
const MERGE_NS: u64 = 1_000_000_000;
/// Merged p99s remembered: about a quarter of a minute.
const MERGED: usize = 15;
/// Single windows remembered: about 6 s.
const SINGLE: usize = 64;
/// Weight of the newest second in throughput and duration.
const ALPHA: f64 = 0.3;
/// The noise never raises the objective beyond this multiple of the p99.
const MAX_SPREAD: f64 = 3.0;
/// Relearning during a regular overload raises a sample by at most this factor over what is known.
const RELEARN_STEP: f64 = 1.10;
/// Requests faster than this differ by scheduling and by the coarse clock more than by load, ns.
const MIN_OBJECTIVE_NS: u64 = 1_000_000;

/// One class's baseline.
#[derive(Clone, Debug, Default)]
pub struct Baseline {
    merged: Histogram,
    merged_ns: u64,
    merged_completions: u64,
    single: Histogram,
    merged_p99_ns: VecDeque<u64>,
    single_p99_ns: VecDeque<u64>,
    samples: u64,
    throughput_per_s: Option<f64>,
    duration_ns: Option<f64>,
    known: Option<Known>,
}

/// What is known, derived whenever a sample comes in.
#[derive(Clone, Copy, Debug)]
struct Known {
    p99_ns: u64,
    /// The upper end of what single windows show without any overload.
    spread_ns: u64,
}

/// What a leader hands on to its successor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Learnt {
    pub p99_ns: u64,
    pub spread_ns: u64,
    pub throughput_per_s: f64,
    pub duration_ns: u64,
}

impl Baseline {
    /// Begins with what somebody else has learnt; own samples replace it once there are enough.
    pub fn inherited(l: Learnt) -> Self {
        Baseline {
            known: Some(Known { p99_ns: l.p99_ns, spread_ns: l.spread_ns }),
            throughput_per_s: Some(l.throughput_per_s),
            duration_ns: Some(l.duration_ns as f64),
            ..Baseline::default()
        }
    }

    /// To hand on; None while nothing is known.
    pub fn learnt(&self) -> Option<Learnt> {
        let known = self.known?;
        Some(Learnt {
            p99_ns: known.p99_ns,
            spread_ns: known.spread_ns,
            throughput_per_s: self.throughput_per_s?,
            duration_ns: self.duration_ns()?,
        })
    }

    /// Learns from one window in the normal state. `length_ns` = the window's.
    pub fn learn(&mut self, class: &ClassWindow, length_ns: u64) {
        self.take(class, length_ns, None);
    }

    /// Learns from a window of a regular overload that has lasted: at most `RELEARN_STEP` above what is known per
    /// sample; since the median moves only after half its samples did, about 10% in 8 s.
    pub fn relearn(&mut self, class: &ClassWindow, length_ns: u64) {
        let Some(known) = self.known else { return };
        let raised = |ns: u64| (ns as f64 * RELEARN_STEP) as u64;
        self.take(class, length_ns, Some((raised(known.p99_ns), raised(known.spread_ns))));
    }

    fn take(&mut self, class: &ClassWindow, length_ns: u64, caps: Option<(u64, u64)>) {
        let (merged_cap, single_cap) = caps.unwrap_or((u64::MAX, u64::MAX));
        self.single.merge(&class.latency);
        if self.single.total() >= MIN_COMPLETIONS {
            let p99 = self.single.quantile(0.99).unwrap_or(0).min(single_cap);
            push(&mut self.single_p99_ns, p99, SINGLE);
            self.samples = self.samples.saturating_add(1);
            self.single = Histogram::default();
        }
        self.merged.merge(&class.latency);
        self.merged_ns = self.merged_ns.saturating_add(length_ns);
        self.merged_completions = self.merged_completions.saturating_add(class.latency.total());
        if self.merged_ns >= MERGE_NS {
            self.close_merged(merged_cap);
        }
        if self.samples >= MIN_SAMPLES {
            self.known = self.derive();
        }
    }

    fn close_merged(&mut self, cap: u64) {
        let rate = self.merged_completions as f64 * 1e9 / self.merged_ns as f64;
        // The first rate is the best guess there is; later ones are smoothed.
        self.throughput_per_s = Some(self.throughput_per_s.map_or(rate, |old| old + ALPHA * (rate - old)));
        if let Some(median) = self.merged.quantile(0.5) {
            let median = median as f64;
            self.duration_ns = Some(self.duration_ns.map_or(median, |old| old + ALPHA * (median - old)));
        }
        if self.merged.total() >= MIN_COMPLETIONS {
            let p99 = self.merged.quantile(0.99).unwrap_or(0).min(cap);
            push(&mut self.merged_p99_ns, p99, MERGED);
        }
        self.merged = Histogram::default();
        (self.merged_ns, self.merged_completions) = (0, 0);
    }

    fn derive(&self) -> Option<Known> {
        let singles = sorted(&self.single_p99_ns);
        let median = *singles.get(singles.len() / 2)?;
        // Slow classes fill no second with enough completions: their single samples have to do.
        let merged = sorted(&self.merged_p99_ns);
        let p99_ns = merged.get(merged.len() / 2).copied().unwrap_or(median);
        // Second highest: one outlier is no noise. The deviation stands in for what is never learnt because it
        // already looked like a breach.
        let deviation = sorted(&singles.iter().map(|&p| p.abs_diff(median)).collect())[singles.len() / 2];
        let high = singles[singles.len().saturating_sub(2)];
        let spread = high.max(median.saturating_add(deviation.saturating_mul(4)));
        Some(Known { p99_ns, spread_ns: spread.min((p99_ns as f64 * MAX_SPREAD) as u64) })
    }

    /// Enough has been seen.
    pub fn is_known(&self) -> bool {
        self.known.is_some()
    }

    /// p99 in the normal state, ns.
    pub fn p99_ns(&self) -> Option<u64> {
        self.known.map(|k| k.p99_ns)
    }

    /// Completions per second in the normal state; known after the first merged second.
    pub fn throughput_per_s(&self) -> Option<f64> {
        self.throughput_per_s
    }

    /// Median duration of a request in the normal state, ns.
    pub fn duration_ns(&self) -> Option<u64> {
        self.duration_ns.map(|ns| ns as u64)
    }

    /// The objective relative to the baseline, ns: max(p99 x (1 + tolerance), noise of single windows, 1 ms).
    pub fn objective_ns(&self, tolerance: f64) -> Option<u64> {
        let known = self.known?;
        let relative = (known.p99_ns as f64 * (1.0 + tolerance.max(0.0))) as u64;
        Some(relative.max(known.spread_ns).max(MIN_OBJECTIVE_NS))
    }
}

fn push(ring: &mut VecDeque<u64>, value: u64, capacity: usize) {
    if ring.len() == capacity {
        ring.pop_front();
    }
    ring.push_back(value);
}

fn sorted(ring: &VecDeque<u64>) -> Vec<u64> {
    let mut all: Vec<u64> = ring.iter().copied().collect();
    all.sort_unstable();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn class(latencies_ms: &[u64]) -> ClassWindow {
        let mut c = ClassWindow::default();
        latencies_ms.iter().for_each(|ms| c.latency.record(ms * MS));
        c
    }

    fn learnt(windows: usize, latencies_ms: &[u64]) -> Baseline {
        let mut b = Baseline::default();
        (0..windows).for_each(|_| b.learn(&class(latencies_ms), 100 * MS));
        b
    }

    #[test]
    fn is_known_after_ten_windows_with_twenty_completions() {
        assert!(!learnt(9, &[5; 20]).is_known());
        let b = learnt(10, &[5; 20]);
        let p99 = b.p99_ns().unwrap();
        assert!((5 * MS..6 * MS).contains(&p99), "{p99}");
        assert_eq!(b.throughput_per_s(), Some(200.0));
    }

    #[test]
    fn thin_windows_are_merged_until_they_say_something() {
        assert!(!learnt(99, &[5; 2]).is_known(), "198 completions are nine samples");
        assert!(learnt(100, &[5; 2]).is_known());
    }

    #[test]
    fn one_odd_second_changes_nothing() {
        let mut b = learnt(100, &[5; 50]);
        let before = b.p99_ns();
        (0..10).for_each(|_| b.learn(&class(&[80; 50]), 100 * MS));
        assert_eq!(b.p99_ns(), before);
    }

    #[test]
    fn the_noise_of_single_windows_widens_the_objective() {
        let mut b = Baseline::default();
        for i in 0..60 {
            let tail = [6, 7, 8, 9, 10, 12][i % 6];
            let mut latencies = vec![4; 99];
            latencies.extend([tail, tail]);
            b.learn(&class(&latencies), 100 * MS);
        }
        let quiet = learnt(60, &[5; 100]).objective_ns(0.2).unwrap();
        assert!(quiet < 7 * MS, "{quiet}");
        assert!(b.objective_ns(0.01).unwrap() >= 12 * MS, "{:?}", b.objective_ns(0.01));
    }

    #[test]
    fn rare_but_repeated_slow_windows_are_noise_and_a_single_one_is_not() {
        // Two slow ones of 50 make a window's p99, but not that of a second.
        let mix = |slow: &[usize]| {
            let mut b = Baseline::default();
            for i in 0..60 {
                let mut latencies = [5; 50];
                latencies[..2].fill(if slow.contains(&i) { 9 } else { 5 });
                b.learn(&class(&latencies), 100 * MS);
            }
            assert!(b.p99_ns().unwrap() < 6 * MS);
            b.objective_ns(0.2).unwrap()
        };
        assert!(mix(&[10, 30, 50]) > 8 * MS);
        assert!(mix(&[30]) < 7 * MS);
    }

    #[test]
    fn relearns_slowly() {
        let mut b = learnt(200, &[10; 50]);
        let start = b.p99_ns().unwrap() as f64;
        (0..50).for_each(|_| b.relearn(&class(&[100; 50]), 100 * MS));
        assert!((b.p99_ns().unwrap() as f64) < start * 1.01, "five seconds teach nothing");
        (0..300).for_each(|_| b.relearn(&class(&[100; 50]), 100 * MS));
        let later = b.p99_ns().unwrap() as f64 / start;
        assert!((1.2..2.5).contains(&later), "{later}");
    }
}
