//! How late the controller's own steps come: on a machine without CPU to spare everybody holds everything for longer, and
//! nobody is to blame for it. Pure.
// SPDX-License-Identifier: MIT OR Apache-2.0

/// The latest step of the last second counts; kept by quarters of it.
const PART_NS: u64 = 250_000_000;
const PARTS: usize = 4;
/// More is a suspended machine or a host that comes when it likes, not a want of CPU.
const MOST_NS: u64 = 100_000_000;

/// Whoever runs on such a machine takes its CPU in many portions, and waits for each as long as the controller does for
/// its one. On 2 cores with 4 threads for each the controller comes 2 ms late at most; with a neighbour that takes most of
/// the CPU, 15 to 50 ms, and locks usually held for 5 ms are held for 200 to 440 ms.
const PORTIONS: u64 = 10;

/// Lateness of recent steps.
#[derive(Clone, Debug, Default)]
pub struct Starvation {
    /// (begin of the part, latest step in it), newest first.
    parts: [(u64, u64); PARTS],
}

impl Starvation {
    /// A step began at `now_ns`, so much later than it was asked for.
    pub fn note(&mut self, now_ns: u64, late_ns: u64) {
        if now_ns.saturating_sub(self.parts[0].0) >= PART_NS {
            self.parts.rotate_right(1);
            self.parts[0] = (now_ns, 0);
        }
        self.parts[0].1 = self.parts[0].1.max(late_ns.min(MOST_NS));
    }

    /// Nobody is judged on a shorter time than this, ns: so long an ordinary piece of work may be held up for want of CPU.
    pub fn excuses_ns(&self, now_ns: u64) -> u64 {
        let recent = self.parts.iter().filter(|part| now_ns.saturating_sub(part.0) < PART_NS * PARTS as u64);
        recent.map(|part| part.1).max().unwrap_or(0) * PORTIONS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_late_step_excuses_for_a_second() {
        let mut s = Starvation::default();
        s.note(10_000 * MS, 20 * MS);
        for i in 1..=60 {
            let now_ns = 10_000 * MS + i * 25 * MS;
            s.note(now_ns, MS);
            assert_eq!(s.excuses_ns(now_ns), if i < 40 { 200 * MS } else { 10 * MS }, "step {i}");
        }
        assert_eq!(s.excuses_ns(20_000 * MS), 0, "nothing is known of a time without steps");
    }

    #[test]
    fn a_suspended_machine_excuses_no_more_than_a_starved_one() {
        let mut s = Starvation::default();
        s.note(MS, u64::MAX);
        assert_eq!(s.excuses_ns(2 * MS), 1_000 * MS);
    }

    proptest! {
        #[test]
        fn the_latest_of_the_last_three_parts_always_counts(lates in prop::collection::vec(0u64..200, 1..200)) {
            let mut s = Starvation::default();
            let mut now_ns = 5_000 * MS;
            for (i, late) in lates.iter().enumerate() {
                now_ns += 25 * MS;
                s.note(now_ns, late * MS);
                let recent = lates[i.saturating_sub(25)..=i].iter().max().unwrap();
                prop_assert!(s.excuses_ns(now_ns) >= recent.min(&100) * MS * PORTIONS);
            }
        }
    }
}
