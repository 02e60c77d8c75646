//! What a run's transactions say about a part of it: throughput, quantiles, stall, recovery.
use crate::load::{Status, Transaction};

/// Throughput and latency of completed transactions in [from, to).
#[derive(Clone, Copy, Debug, Default)]
pub struct Part {
    /// Committed transactions per second.
    pub tps: f64,
    pub p50_ms: f64,
    pub p99_ms: f64,
    /// The same quantile as clients arriving at the mean pace would have seen it: a closed loop hides a stall from
    /// its quantiles, since blocked clients send nothing. Each latency above the mean also counts for the requests
    /// that its client would have sent meanwhile.
    pub p99_open_ms: f64,
    pub max_ms: f64,
    pub completed: usize,
}

/// `sorted` ascending; nearest rank.
pub fn quantile(sorted: &[i64], q: f64) -> i64 {
    if sorted.is_empty() {
        return 0;
    }
    sorted[((q * sorted.len() as f64).ceil() as usize).clamp(1, sorted.len()) - 1]
}

/// The transactions that ended in [from, to); `all` is sorted by end.
fn ended(all: &[Transaction], from_ns: i64, to_ns: i64) -> &[Transaction] {
    let at = |t| all.partition_point(|x| x.end_ns() < t);
    &all[at(from_ns)..at(to_ns.max(from_ns))]
}

pub fn part(all: &[Transaction], from_ns: i64, to_ns: i64) -> Part {
    let mut latencies: Vec<i64> =
        ended(all, from_ns, to_ns).iter().filter(|t| t.status == Status::Ok).map(|t| t.latency_ns).collect();
    latencies.sort_unstable();
    let seconds = (to_ns - from_ns) as f64 / 1e9;
    let mean = latencies.iter().sum::<i64>() / (latencies.len().max(1) as i64);
    let mut open = Vec::with_capacity(latencies.len());
    for &latency in &latencies {
        open.push(latency);
        // A hundred thousand unsent requests for one stall is far beyond any run here; it bounds the memory.
        if mean > 0 {
            open.extend((1..100_000).map(|i| latency - i * mean).take_while(|&l| l >= mean));
        }
    }
    open.sort_unstable();
    let ms = |ns: i64| ns as f64 / 1e6;
    Part {
        tps: if seconds > 0.0 { latencies.len() as f64 / seconds } else { 0.0 },
        p50_ms: ms(quantile(&latencies, 0.5)),
        p99_ms: ms(quantile(&latencies, 0.99)),
        p99_open_ms: ms(quantile(&open, 0.99)),
        max_ms: ms(latencies.last().copied().unwrap_or(0)),
        completed: latencies.len(),
    }
}

/// Committed transactions per second in each bin of `bin_ns` from `from_ns`.
pub fn bins(all: &[Transaction], from_ns: i64, to_ns: i64, bin_ns: i64) -> Vec<f64> {
    let count = ((to_ns - from_ns) / bin_ns).max(0) as usize;
    let mut bins = vec![0.0; count];
    for t in ended(all, from_ns, from_ns + count as i64 * bin_ns).iter().filter(|t| t.status == Status::Ok) {
        bins[((t.end_ns() - from_ns) / bin_ns) as usize] += 1e9 / bin_ns as f64;
    }
    bins
}

/// A bin wide enough that half of the clean throughput is told from chance: 100 ms, or 1 s for slow loads.
pub fn bin_ns(clean_tps: f64) -> i64 {
    if clean_tps >= 200.0 {
        100_000_000
    } else {
        1_000_000_000
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stall {
    /// Seconds in bins under half of the clean throughput.
    pub stall_s: f64,
    /// From `from_ns` until throughput is back: the first half second at 90% of clean or more after the first
    /// stalled bin, if that began within 2 s. 0 when nothing stalled then, `None` when it never came back.
    pub recovered_ms: Option<f64>,
}

pub fn stall(all: &[Transaction], from_ns: i64, to_ns: i64, clean_tps: f64) -> Stall {
    let bin = bin_ns(clean_tps);
    let bins = bins(all, from_ns, to_ns, bin);
    let slow = |b: &&f64| **b < clean_tps / 2.0;
    let stall_s = bins.iter().filter(slow).count() as f64 * bin as f64 / 1e9;
    // A later dip is not the noise's doing: machines have bad moments of their own.
    let soon = (2_000_000_000 / bin) as usize;
    let Some(first) = bins.iter().take(soon).position(|b| *b < clean_tps / 2.0) else {
        return Stall { stall_s, recovered_ms: Some(0.0) };
    };
    let span = (500_000_000 / bin).max(1) as usize;
    let back = (first + 1..bins.len())
        .filter(|&at| at + span <= bins.len())
        .find(|&at| bins[at..at + span].iter().sum::<f64>() / span as f64 >= 0.9 * clean_tps);
    Stall { stall_s, recovered_ms: back.map(|at| (at as i64 * bin) as f64 / 1e6) }
}

/// Median, smallest and largest of `values`; `None` when there are none.
pub fn spread(values: impl IntoIterator<Item = f64>) -> Option<(f64, f64, f64)> {
    let mut v: Vec<f64> = values.into_iter().filter(|x| x.is_finite()).collect();
    v.sort_unstable_by(f64::total_cmp);
    let n = v.len();
    (n > 0).then(|| ((v[(n - 1) / 2] + v[n / 2]) / 2.0, v[0], v[n - 1]))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: i64 = 1_000_000;

    fn steady(from_ms: i64, to_ms: i64, every_ms: i64) -> Vec<Transaction> {
        (from_ms..to_ms)
            .step_by(every_ms as usize)
            .map(|ms| Transaction { start_ns: ms * MS, latency_ns: MS, status: Status::Ok })
            .collect()
    }

    #[test]
    fn throughput_and_quantiles_of_a_steady_load() {
        let p = part(&steady(0, 2000, 1), 0, 2000 * MS);
        assert!((p.tps - 999.5).abs() < 1.0, "{p:?}");
        assert_eq!((p.p50_ms, p.p99_ms, p.p99_open_ms, p.max_ms), (1.0, 1.0, 1.0, 1.0));
    }

    #[test]
    fn quantile_is_the_nearest_rank() {
        let v: Vec<i64> = (1..=100).collect();
        assert_eq!((quantile(&v, 0.5), quantile(&v, 0.99), quantile(&v, 1.0), quantile(&[], 0.5)), (50, 99, 100, 0));
    }

    #[test]
    fn a_stall_is_counted_in_bins_and_ends_when_throughput_is_back() {
        let mut all = steady(0, 1000, 1);
        all.extend(steady(3000, 5000, 1));
        let s = stall(&all, 0, 5000 * MS, 1000.0);
        assert!((s.stall_s - 2.0).abs() <= 0.1, "{s:?}");
        assert_eq!(s.recovered_ms, Some(3000.0), "{s:?}");
        assert_eq!(stall(&steady(0, 1000, 1), 0, 5000 * MS, 1000.0).recovered_ms, None);
        assert_eq!(
            stall(&steady(0, 5000, 1), 10 * MS, 4900 * MS, 1000.0),
            Stall { stall_s: 0.0, recovered_ms: Some(0.0) }
        );
    }

    #[test]
    fn an_open_view_shows_the_stall_that_a_closed_loop_hides() {
        let mut all = steady(0, 1000, 1);
        all.push(Transaction { start_ns: 1000 * MS, latency_ns: 1000 * MS, status: Status::Ok });
        let p = part(&all, 0, 2100 * MS);
        assert_eq!(p.p99_ms, 1.0);
        assert!(p.p99_open_ms > 900.0, "{p:?}");
    }

    #[test]
    fn only_committed_transactions_count() {
        let mut all = steady(0, 1000, 1);
        for t in &mut all {
            t.status = Status::Cancelled;
        }
        assert_eq!(part(&all, 0, 1000 * MS).completed, 0);
    }

    #[test]
    fn spread_is_median_and_range() {
        assert_eq!(spread([3.0, 1.0, 2.0]), Some((2.0, 1.0, 3.0)));
        assert_eq!(spread([1.0, 2.0]), Some((1.5, 1.0, 2.0)));
        assert_eq!(spread([]), None);
    }
}
