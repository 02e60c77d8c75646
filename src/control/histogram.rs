//! Log-bucketed latency histogram: the bucket arithmetic shared by the region's counters and the stages.

/// Sub-buckets per octave (power of two): about 9% resolution.
pub const SUB_BITS: u32 = 3;
pub const SUB: usize = 1 << SUB_BITS;
/// Smallest octave told apart: 2^10 ns, about 1 us.
pub const MIN_SHIFT: u32 = 10;
/// 31 octaves reach 2^41 ns, over half an hour.
pub const OCTAVES: usize = 31;
pub const BUCKETS: usize = SUB * OCTAVES;

/// The bucket of a latency; clamps at both ends.
#[inline]
pub fn bucket_of(ns: u64) -> usize {
    // Without branches: it takes the same instructions whatever the latency, so that they can be counted.
    let ns = ns.max(1 << MIN_SHIFT);
    let top = 63 - ns.leading_zeros();
    let octave = (top - MIN_SHIFT) as usize;
    let sub = ((ns >> (top - SUB_BITS)) as usize) & (SUB - 1);
    (octave * SUB + sub).min(BUCKETS - 1)
}

/// Lower bound of a bucket in ns (bucket 0 starts at 0).
pub fn lower_bound_ns(bucket: usize) -> u64 {
    if bucket == 0 {
        return 0;
    }
    let octave = (bucket / SUB) as u32 + MIN_SHIFT;
    let sub = (bucket % SUB) as u64;
    (1u64 << octave) + (sub << (octave - SUB_BITS))
}

/// Counts per bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    /// Empty = no samples; else `BUCKETS` long.
    counts: Vec<u64>,
    total: u64,
}

impl Histogram {
    pub fn record(&mut self, ns: u64) {
        self.add(bucket_of(ns), 1);
    }

    pub fn add(&mut self, bucket: usize, n: u64) {
        if n == 0 {
            return;
        }
        if self.counts.is_empty() {
            self.counts = vec![0; BUCKETS];
        }
        self.counts[bucket] += n;
        self.total += n;
    }

    pub fn merge(&mut self, other: &Histogram) {
        for (bucket, &n) in other.counts.iter().enumerate() {
            self.add(bucket, n);
        }
    }

    pub fn total(&self) -> u64 {
        self.total
    }

    /// How many are over `ns`, counting all of its bucket.
    pub fn over(&self, ns: u64) -> u64 {
        self.counts.iter().skip(bucket_of(ns)).sum()
    }

    /// The `q` quantile (0..=1), interpolated inside its bucket; None without samples.
    pub fn quantile(&self, q: f64) -> Option<u64> {
        if self.total == 0 {
            return None;
        }
        let rank = (q.clamp(0.0, 1.0) * self.total as f64).max(f64::MIN_POSITIVE);
        let mut before = 0u64;
        for (bucket, &n) in self.counts.iter().enumerate() {
            if n > 0 && (before + n) as f64 >= rank {
                let low = lower_bound_ns(bucket) as f64;
                let high = lower_bound_ns(bucket + 1) as f64;
                let part = ((rank - before as f64) / n as f64).clamp(0.0, 1.0);
                return Some((low + (high - low) * part) as u64);
            }
            before += n;
        }
        unreachable!("total is the sum of the counts")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_cover_their_bounds() {
        for b in 0..BUCKETS {
            assert_eq!(bucket_of(lower_bound_ns(b)), b, "bucket {b}");
            assert_eq!(bucket_of(lower_bound_ns(b + 1) - 1), b, "end of bucket {b}");
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn quantile_is_inside_its_bucket() {
        let mut h = Histogram::default();
        assert_eq!((h.quantile(0.99), h.over(0)), (None, 0));
        for i in 1..=1000u64 {
            h.record(i * 1_000_000);
        }
        let p99 = h.quantile(0.99).unwrap() as f64;
        assert!((p99 / 990e6 - 1.0).abs() < 0.07, "{p99}");
        assert_eq!(h.over(0), 1000);
        let over = h.over(900_000_000);
        assert!((100..200).contains(&over), "{over}");
    }
}
