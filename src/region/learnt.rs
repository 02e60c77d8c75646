//! What a leader has learnt, kept in the region for its successor.

use super::layout::{Header, MAX_CLASSES};
use crate::control::baseline::Learnt;
use crate::primitive::Ordering::Relaxed;

impl Header {
    /// Leader only.
    pub fn hand_on(&self, learnt: impl Iterator<Item = (u16, Learnt)>) {
        for (class, l) in learnt {
            let Some(cell) = self.learnt.get(class as usize) else { continue };
            cell.p99_ns.store(l.p99_ns, Relaxed);
            cell.spread_ns.store(l.spread_ns, Relaxed);
            cell.throughput_milli_per_s.store((l.throughput_per_s * 1e3) as u64, Relaxed);
            cell.duration_ns.store(l.duration_ns, Relaxed);
        }
    }

    /// By class; only those of which something is known.
    pub fn handed_on(&self) -> impl Iterator<Item = (u16, Learnt)> + '_ {
        (0..MAX_CLASSES as u16).zip(&self.learnt).filter_map(|(class, cell)| {
            let learnt = Learnt {
                p99_ns: cell.p99_ns.load(Relaxed),
                spread_ns: cell.spread_ns.load(Relaxed),
                throughput_per_s: cell.throughput_milli_per_s.load(Relaxed) as f64 / 1e3,
                duration_ns: cell.duration_ns.load(Relaxed),
            };
            (learnt.p99_ns > 0).then_some((class, learnt))
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::region::Region;

    #[test]
    fn a_successor_reads_what_was_handed_on() {
        let r = Region::anonymous(16, 16).unwrap();
        assert_eq!(r.header().handed_on().count(), 0);
        let learnt = Learnt { p99_ns: 5_000_000, spread_ns: 7_000_000, throughput_per_s: 1234.5, duration_ns: 900_000 };
        r.header().hand_on([(3, learnt), (99, learnt)].into_iter());
        assert_eq!(r.header().handed_on().collect::<Vec<_>>(), [(3, learnt)], "class 99 does not exist");
    }
}
