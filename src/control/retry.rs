//! When cancelled tasks run again: a pure stage, like the others, and the leader's walk through the queue around it.
//!
//! A retry cannot be cancelled, so it runs only when it would not do again what it was cancelled for:
//! - each resource it was cancelled for has been calm (under half of the contention threshold) for `calm_ns`;
//! - the server does at most `load_share` of the work it did before the cancel: a lock is calm as soon as its culprit has
//!   gone, but under the same load the same request makes the same queue;
//! - the retry before it has ended or has run for `calm_ns` without contention, and two windows have passed.
//!
//! Of those that may, the one that has waited longest goes, one in a step at most. Who waits for a resource that is not
//! calm holds up nobody who waits for others.

use super::window::ResourceId;
use crate::cancel::retry::SILENT_NS;
use std::collections::VecDeque;

/// Load is averaged over at least this long: shorter averages are noise.
const LEAST_LOAD_NS: u64 = 1_000_000_000;
/// Samples of the completions kept per average.
const LOAD_SAMPLES: u64 = 16;

/// A resource's bit in a set of them. Registered ones count from 0 up, those of the system from `u32::MAX` down.
pub fn bit_of(id: ResourceId) -> u64 {
    1 << if id < 32 { id } else { 63 - (u32::MAX - id).min(31) }
}

/// What the stage may be told.
#[derive(Clone, Debug, PartialEq)]
pub struct RetryParams {
    /// For how long a resource must have been calm.
    pub calm_ns: u64,
    /// Between two releases: long enough to see what the first one does.
    pub pause_ns: u64,
    /// At most this share of the load before the cancel; 1 = any load.
    pub load_share: f64,
}

/// A task that waits to run again.
#[derive(Clone, Debug, PartialEq)]
pub struct Waiting {
    /// When it began to wait, and its turn: the order in which they go.
    pub since_ns: u64,
    pub turn: u64,
    pub deadline_ns: u64,
    /// Its last sign of life.
    pub seen_ns: u64,
    /// What it was cancelled for, see [`bit_of`].
    pub resources: u64,
    /// Completions per second before its cancel; 0 = not known.
    pub load_per_s: f64,
}

/// Why a waiting task is not run again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Its deadline passed first.
    Deadline,
    /// Nobody is there to run it.
    Gone,
}

impl Why {
    pub fn words(self) -> &'static str {
        match self {
            Why::Deadline => "its deadline passed before what it was cancelled for was calm",
            Why::Gone => "whoever waited for it is gone",
        }
    }
}

/// What one step decides; the numbers are places in the list of those who wait.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Verdicts {
    pub release: Option<usize>,
    pub dropped: Vec<(usize, Why)>,
}

/// Remembers between steps how calm it has been; time comes from the caller.
#[derive(Clone, Debug)]
pub struct Turnstile {
    /// First step; nothing is known of the time before. None = no step yet.
    began_ns: Option<u64>,
    /// When each resource was last seen contended.
    contended_ns: [u64; 64],
    /// This step saw the resources.
    known: bool,
    released_ns: Option<u64>,
    /// (time, completions so far), the oldest first.
    completed: VecDeque<(u64, u64)>,
    load_per_s: Option<f64>,
    usual_per_s: Option<f64>,
}

impl Default for Turnstile {
    fn default() -> Self {
        Turnstile {
            began_ns: None,
            contended_ns: [0; 64],
            known: false,
            released_ns: None,
            completed: VecDeque::new(),
            load_per_s: None,
            usual_per_s: None,
        }
    }
}

impl Turnstile {
    /// One step. `contended`: the resources that are not calm ([`bit_of`]); None = nobody looked. `normal`: no overload is suspected.
    /// `completions`: requests completed so far.
    pub fn observe(&mut self, now_ns: u64, contended: Option<u64>, normal: bool, completions: u64, calm_ns: u64) {
        self.began_ns.get_or_insert(now_ns);
        self.known = contended.is_some();
        for (r, at_ns) in self.contended_ns.iter_mut().enumerate() {
            if contended.unwrap_or(0) >> r & 1 == 1 {
                *at_ns = now_ns;
            }
        }
        let over_ns = calm_ns.max(LEAST_LOAD_NS);
        let old = |at_ns: u64| at_ns.saturating_add(over_ns) <= now_ns;
        while self.completed.len() > 1 && old(self.completed[1].0) {
            self.completed.pop_front();
        }
        let rate = |&(at_ns, before): &(u64, u64)| {
            completions.saturating_sub(before) as f64 * 1e9 / now_ns.saturating_sub(at_ns).max(1) as f64
        };
        let front = self.completed.front();
        self.load_per_s = front.filter(|f| old(f.0)).map(rate);
        if normal {
            // Before the average is whole, what there is of it says more than nothing.
            let enough = |f: &&(u64, u64)| now_ns.saturating_sub(f.0) >= over_ns / LOAD_SAMPLES;
            self.usual_per_s = front.filter(enough).map(rate).or(self.usual_per_s);
        }
        if self.completed.back().map_or(true, |b| now_ns.saturating_sub(b.0) >= over_ns / LOAD_SAMPLES) {
            self.completed.push_back((now_ns, completions));
        }
    }

    /// Completions per second while no overload was suspected, as of lately.
    pub fn usual_per_s(&self) -> Option<f64> {
        self.usual_per_s
    }

    /// Whom to drop and whom to let run. `running`: a retry is in flight that has not run for `calm_ns` yet.
    pub fn decide(&self, now_ns: u64, waiting: &[Waiting], running: bool, params: &RetryParams) -> Verdicts {
        let why = |w: &Waiting| {
            if w.deadline_ns <= now_ns {
                Some(Why::Deadline)
            } else {
                (now_ns.saturating_sub(w.seen_ns) > SILENT_NS).then_some(Why::Gone)
            }
        };
        let dropped: Vec<_> = waiting.iter().enumerate().filter_map(|(at, w)| Some((at, why(w)?))).collect();
        let paused = self.released_ns.is_some_and(|at_ns| now_ns.saturating_sub(at_ns) < params.pause_ns);
        let mut release = None;
        if self.known && !running && !paused {
            let may = |w: &Waiting| why(w).is_none() && self.calm(now_ns, w.resources, params) && self.quiet(w, params);
            let those = waiting.iter().enumerate().filter(|(_, w)| may(w));
            release = those.min_by_key(|(_, w)| (w.since_ns, w.turn)).map(|(at, _)| at);
        }
        Verdicts { release, dropped }
    }

    /// The chosen one was set free.
    pub fn released(&mut self, now_ns: u64) {
        self.released_ns = Some(now_ns);
    }

    fn calm(&self, now_ns: u64, resources: u64, params: &RetryParams) -> bool {
        // Cancelled for nothing that is known: everything must be calm.
        let resources = if resources == 0 { u64::MAX } else { resources };
        let calm_since = |since_ns: u64| now_ns.saturating_sub(since_ns) >= params.calm_ns;
        self.began_ns.is_some_and(calm_since)
            && self.contended_ns.iter().enumerate().all(|(r, &at_ns)| resources >> r & 1 == 0 || calm_since(at_ns))
    }

    fn quiet(&self, w: &Waiting, params: &RetryParams) -> bool {
        params.load_share >= 1.0
            || w.load_per_s <= 0.0
            || self.load_per_s.is_some_and(|now| now <= params.load_share * w.load_per_s)
    }
}

#[cfg(not(loom))]
pub use desk::{Outcome, Retries};

/// The leader's walk through the region's queue.
#[cfg(not(loom))]
mod desk {
    use super::*;
    use crate::cancel::retry::{clear_unfinished, note, state_of, turn_of, Cancelled, UNASKED_NS, UNTAKEN_NS};
    use crate::primitive::Ordering::{Acquire, Relaxed};
    use crate::region::layout::*;
    use crate::region::owner::ProcessId;
    use crate::region::Region;

    /// What came of a cancelled task that asked to run again.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct Outcome {
        pub decision_id: u64,
        pub task: u64,
        /// It was told to run; else it was dropped.
        pub ran: bool,
        pub waited_ns: u64,
    }

    /// An entry as the leader saw it last.
    #[derive(Clone, Copy, Default)]
    struct Seen {
        word: u64,
        task: u64,
        decision_id: u64,
        since_ns: u64,
    }

    pub struct Retries {
        pub turnstile: Turnstile,
        seen: [Seen; RETRIES],
        requests_seen: u32,
        /// Some entry is in use.
        any: bool,
    }

    impl Default for Retries {
        fn default() -> Self {
            Retries { turnstile: Turnstile::default(), seen: [Seen::default(); RETRIES], requests_seen: 0, any: false }
        }
    }

    impl Retries {
        /// A new leader: goes on with what stands in the region.
        pub fn take_over(&mut self, region: &Region) {
            clear_unfinished(&region.header().retries);
            self.any = true;
        }

        /// A task is about to be told to stop.
        pub fn note(&mut self, region: &Region, c: &Cancelled, now_ns: u64) {
            let h = region.header();
            self.any = true;
            if !note(&h.retries, &h.retry_turn, c, now_ns) {
                h.counters.retries_refused.fetch_add(1, Relaxed);
            }
        }

        /// Is there something to learn yet of this decision's task: it may still ask, waits, or went since the last step?
        pub fn is_open(&self, region: &Region, decision_id: u64) -> bool {
            let of_it = |e: &RetryEntry| e.decision_id.load(Relaxed) == decision_id;
            self.seen.iter().any(|s| state_of(s.word) >= RETRY_OPEN && s.decision_id == decision_id)
                || region.header().retries.iter().any(|e| state_of(e.word.load(Acquire)) >= RETRY_OPEN && of_it(e))
        }

        /// Drops who must not wait on, sets one free if it is time; what has been decided about whom since the last step.
        /// `leads`: asked right before anybody is set free.
        pub fn step(
            &mut self,
            region: &Region,
            now_ns: u64,
            params: &RetryParams,
            leads: impl Fn() -> bool,
        ) -> Vec<Outcome> {
            let h = region.header();
            let mut outcomes = Vec::new();
            let requests = h.retry_requests.load(Acquire);
            if !self.any && requests == self.requests_seen {
                return outcomes;
            }
            self.requests_seen = requests;
            self.any = false;
            let (mut waiting, mut places) = (Vec::new(), Vec::new());
            for (at, entry) in h.retries.iter().enumerate() {
                let word = entry.word.load(Acquire);
                if word != self.seen[at].word {
                    outcomes.extend(self.seen[at].left(word, now_ns));
                }
                let since_ns = entry.since_ns.load(Acquire);
                let load = |cell: &crate::primitive::AtomicU64| cell.load(Relaxed);
                self.seen[at] = Seen { word, task: load(&entry.task), decision_id: load(&entry.decision_id), since_ns };
                self.any |= state_of(word) != RETRY_EMPTY;
                let changed_ns = entry.released_ns.load(Relaxed);
                let older = |ns: u64| now_ns.saturating_sub(changed_ns) > ns;
                match state_of(word) {
                    RETRY_OPEN if older(UNASKED_NS) => drop(entry.drop_out(word)),
                    // Died between two stores of asking.
                    RETRY_WAITING if since_ns == 0 && older(UNASKED_NS) => drop(entry.drop_out(word)),
                    RETRY_WAITING if since_ns != 0 => {
                        places.push(at);
                        waiting.push(Waiting {
                            since_ns,
                            turn: turn_of(word),
                            deadline_ns: load(&entry.deadline_ns),
                            seen_ns: load(&entry.seen_ns),
                            resources: entry.resources.load(Relaxed),
                            load_per_s: load(&entry.load_milli_per_s) as f64 / 1e3,
                        });
                    }
                    RETRY_RELEASED if older(UNTAKEN_NS) => outcomes.extend(self.drop_entry(region, at, now_ns)),
                    _ => {}
                }
            }
            if waiting.is_empty() {
                return outcomes;
            }
            let running = retry_in_flight(region, now_ns, params.calm_ns);
            let mut verdicts = self.turnstile.decide(now_ns, &waiting, running, params);
            for (at, _) in &verdicts.dropped {
                outcomes.extend(self.drop_entry(region, places[*at], now_ns));
            }
            while let Some(at) = verdicts.release {
                let entry = &h.retries[places[at]];
                let owner = ProcessId { pid: entry.owner_pid.load(Relaxed), start_ticks: 0 };
                if !owner.is_alive() {
                    // Killed a moment ago: the next one need not wait until it has been silent for long enough.
                    outcomes.extend(self.drop_entry(region, places[at], now_ns));
                    waiting[at].seen_ns = 0;
                    verdicts = self.turnstile.decide(now_ns, &waiting, running, params);
                    continue;
                }
                if leads() && entry.release(self.seen[places[at]].word, now_ns) {
                    self.turnstile.released(now_ns);
                    let seen = &mut self.seen[places[at]];
                    seen.word = seen.word & !((1 << RETRY_STATE_BITS) - 1) | RETRY_RELEASED;
                }
                break;
            }
            outcomes
        }

        fn drop_entry(&mut self, region: &Region, at: usize, now_ns: u64) -> Option<Outcome> {
            let seen = &mut self.seen[at];
            if !region.header().retries[at].drop_out(seen.word) {
                return None; // it went by itself: the next step sees how
            }
            region.count_drop(seen.since_ns);
            let outcome = seen.outcome(false, now_ns);
            seen.word &= !((1 << RETRY_STATE_BITS) - 1);
            Some(outcome)
        }
    }

    impl Seen {
        fn outcome(&self, ran: bool, now_ns: u64) -> Outcome {
            let waited_ns = now_ns.saturating_sub(self.since_ns);
            Outcome { decision_id: self.decision_id, task: self.task, ran, waited_ns }
        }

        /// What the waiter has done itself, seen from the entry's new word.
        fn left(&self, word: u64, now_ns: u64) -> Option<Outcome> {
            let gone = turn_of(word) != turn_of(self.word) || state_of(word) == RETRY_EMPTY;
            match state_of(self.word) {
                RETRY_RELEASED if gone => Some(self.outcome(true, now_ns)),
                RETRY_WAITING if gone && self.since_ns != 0 => Some(self.outcome(false, now_ns)),
                _ => None,
            }
        }
    }

    /// A retry that has not shown yet, by running for `calm_ns`, that it does no harm.
    fn retry_in_flight(region: &Region, now_ns: u64, calm_ns: u64) -> bool {
        region.live_tasks().any(|(_, slot)| {
            let start_ns = slot.request_start_ns.load(Acquire);
            let young = start_ns != 0 && now_ns.saturating_sub(start_ns) < calm_ns;
            young && slot.flags.load(Relaxed) & FLAG_RETRIED != 0
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const S: u64 = 1_000 * MS;

    fn params() -> RetryParams {
        RetryParams { calm_ns: S, pause_ns: 200 * MS, load_share: 0.5 }
    }

    fn waiting(since_ns: u64, resources: u64) -> Waiting {
        Waiting { since_ns, turn: since_ns, deadline_ns: u64::MAX, seen_ns: u64::MAX, resources, load_per_s: 0.0 }
    }

    /// A gate that has seen calm from 10 s to 12 s, `per_s` completions a second.
    fn calm_turnstile(per_s: u64) -> Turnstile {
        let mut gate = Turnstile::default();
        for step in 0..=80 {
            let now_ns = 10 * S + step * 25 * MS;
            gate.observe(now_ns, Some(0), true, per_s * step / 40, S);
        }
        gate
    }

    #[test]
    fn every_resource_has_a_bit_of_its_own() {
        let ids = (0..32).chain([u32::MAX - 1, u32::MAX]);
        assert_eq!(
            ids.map(bit_of).fold(0, |set, bit| {
                assert_eq!(set & bit, 0);
                set | bit
            }),
            3 << 62 | 0xffff_ffff
        );
    }

    #[test]
    fn the_one_that_waited_longest_goes_first_and_one_at_a_time() {
        let mut gate = calm_turnstile(100);
        let all = [waiting(9 * S, 2), waiting(7 * S, 2), waiting(8 * S, 2)];
        assert_eq!(gate.decide(12 * S, &all, false, &params()).release, Some(1));
        assert_eq!(gate.decide(12 * S, &all, true, &params()).release, None, "another retry runs");
        gate.released(12 * S);
        assert_eq!(gate.decide(12 * S + 199 * MS, &all, false, &params()).release, None);
        assert_eq!(gate.decide(12 * S + 200 * MS, &all, false, &params()).release, Some(1));
    }

    #[test]
    fn contention_of_its_resource_begins_the_wait_anew_and_holds_up_nobody_else() {
        let mut gate = calm_turnstile(100);
        gate.observe(12 * S + 25 * MS, Some(2), false, 200, S);
        let both = [waiting(7 * S, 2), waiting(8 * S, 4)];
        let decide = |gate: &Turnstile, now_ns| gate.decide(now_ns, &both, false, &params()).release;
        assert_eq!(decide(&gate, 12 * S + 25 * MS), Some(1));
        gate.observe(13 * S, Some(0), true, 300, S);
        assert_eq!(decide(&gate, 13 * S), Some(1), "one of its windows is missing");
        gate.observe(13 * S + 25 * MS, Some(0), true, 300, S);
        assert_eq!(decide(&gate, 13 * S + 25 * MS), Some(0));
        gate.observe(13 * S + 50 * MS, None, false, 300, S);
        assert_eq!(decide(&gate, 13 * S + 50 * MS), None, "nobody looked");
    }

    #[test]
    fn under_the_load_it_was_cancelled_in_nobody_runs_again() {
        let gate = calm_turnstile(100);
        assert_eq!(gate.usual_per_s().map(f64::round), Some(100.0));
        let with_load = |load_per_s| [Waiting { load_per_s, ..waiting(9 * S, 2) }];
        let release = |load_per_s, p: &RetryParams| gate.decide(12 * S, &with_load(load_per_s), false, p).release;
        assert_eq!(release(150.0, &params()), None);
        assert_eq!(release(210.0, &params()), Some(0));
        assert_eq!(release(0.0, &params()), Some(0), "not known");
        assert_eq!(release(150.0, &RetryParams { load_share: 1.0, ..params() }), Some(0));
    }

    #[test]
    fn a_new_leader_knows_nothing_of_the_time_before() {
        let mut gate = Turnstile::default();
        gate.observe(50 * S, Some(0), true, 1_000_000, S);
        let one = [waiting(S, 2)];
        assert_eq!(gate.decide(50 * S, &one, false, &params()).release, None);
        let busy = [Waiting { load_per_s: 1.0, ..waiting(S, 2) }];
        gate.observe(51 * S, Some(0), true, 1_000_000, S);
        assert_eq!(gate.decide(51 * S, &one, false, &params()).release, Some(0));
        assert_eq!(gate.decide(51 * S, &busy, false, &params()).release, Some(0), "the server has done nothing since");
    }

    #[test]
    fn the_late_and_the_gone_are_dropped_whatever_else_happens() {
        let mut gate = calm_turnstile(100);
        gate.observe(12 * S, Some(u64::MAX), false, 200, S);
        let late = Waiting { deadline_ns: 12 * S, ..waiting(8 * S, 2) };
        let gone = Waiting { seen_ns: 12 * S - SILENT_NS - 1, ..waiting(8 * S, 2) };
        let v = gate.decide(12 * S, &[late, waiting(9 * S, 2), gone], true, &params());
        assert_eq!(v, Verdicts { release: None, dropped: vec![(0, Why::Deadline), (2, Why::Gone)] });
    }
}

#[cfg(all(test, not(loom)))]
mod properties {
    use super::*;
    use proptest::prelude::*;

    const MS: u64 = 1_000_000;
    const STEP_NS: u64 = 25 * MS;

    /// One step of a server: which resources are contended (None: nobody looked), what it completes, who joins the queue.
    #[derive(Clone, Debug)]
    struct Step {
        contended: Option<u64>,
        completed: u64,
        joins: Vec<(u64, u64, f64)>,
        running: bool,
    }

    fn step() -> impl Strategy<Value = Step> {
        let contended = prop_oneof![6 => Just(Some(0u64)), 1 => (0..8u64).prop_map(Some), 1 => Just(None)];
        let join = (1..8u64, 0..400u64, prop_oneof![Just(0.0), 0.0..4000.0f64]);
        let joins = prop_oneof![4 => Just(vec![]), 1 => prop::collection::vec(join, 1..3)];
        (contended, 0..60u64, joins, prop::bool::weighted(0.1))
            .prop_map(|(contended, completed, joins, running)| Step { contended, completed, joins, running })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

        #[test]
        fn retries_are_fair_one_by_one_and_end_in_time(
            steps in prop::collection::vec(step(), 20..300),
            calm_ms in 25..400u64,
            load_share in prop_oneof![Just(1.0), 0.0..1.0f64],
        ) {
            let p = RetryParams { calm_ns: calm_ms * MS, pause_ns: 100 * MS, load_share };
            let mut gate = Turnstile::default();
            let mut queue: Vec<Waiting> = Vec::new();
            let (mut completions, mut turn, mut last_release) = (0, 0, None);
            // (time, contended) of each step, and (time, completions): the test's own memory of everything.
            let mut seen: Vec<(u64, Option<u64>)> = vec![];
            let mut done: Vec<(u64, u64)> = vec![];
            for (n, s) in steps.iter().enumerate() {
                let now_ns = 1_000 * MS + n as u64 * STEP_NS;
                completions += s.completed;
                seen.push((now_ns, s.contended));
                done.push((now_ns, completions));
                for &(resources, deadline_ms, load_per_s) in &s.joins {
                    turn += 1;
                    let deadline_ns = now_ns + deadline_ms * MS;
                    queue.push(Waiting { since_ns: now_ns, turn, deadline_ns, seen_ns: now_ns, resources, load_per_s });
                }
                queue.iter_mut().for_each(|w| w.seen_ns = now_ns);
                gate.observe(now_ns, s.contended, s.contended == Some(0), completions, p.calm_ns);
                let v = gate.decide(now_ns, &queue, s.running, &p);
                // Each ends by its deadline, and nobody before it.
                for (at, w) in queue.iter().enumerate() {
                    prop_assert_eq!(v.dropped.iter().any(|d| d.0 == at), w.deadline_ns <= now_ns);
                }
                if let Some(at) = v.release {
                    let w = &queue[at];
                    prop_assert!(s.contended.is_some() && !s.running && w.deadline_ns > now_ns);
                    prop_assert!(last_release.map_or(true, |l| now_ns - l >= p.pause_ns));
                    prop_assert!(now_ns - seen[0].0 >= p.calm_ns);
                    for (at_ns, contended) in &seen {
                        let calm = contended.unwrap_or(0) & w.resources == 0;
                        prop_assert!(calm || now_ns - at_ns >= p.calm_ns, "contended {} ns ago", now_ns - at_ns);
                    }
                    // Nobody is overtaken who could have gone as well.
                    for other in queue.iter().filter(|o| (o.since_ns, o.turn) < (w.since_ns, w.turn)) {
                        let subset = other.resources & !w.resources == 0;
                        let bears = other.load_per_s == 0.0 || (w.load_per_s > 0.0 && other.load_per_s >= w.load_per_s);
                        let late = other.deadline_ns <= now_ns;
                        prop_assert!(late || !(subset && (bears || load_share >= 1.0)), "{:?} before {:?}", w, other);
                    }
                    if load_share < 1.0 && w.load_per_s > 0.0 {
                        // Over any stretch that may be the average's, a step at its ends aside.
                        let over_ns = p.calm_ns.max(LEAST_LOAD_NS);
                        let slack_ns = over_ns / LOAD_SAMPLES + 2 * STEP_NS;
                        let rates = done.iter().filter(|(at, _)| (over_ns..=over_ns + slack_ns).contains(&(now_ns - at)));
                        let least = rates.map(|(at, c)| (completions - c) as f64 * 1e9 / (now_ns - at) as f64);
                        prop_assert!(least.fold(f64::MAX, f64::min) <= load_share * w.load_per_s + 1e-9);
                    }
                    gate.released(now_ns);
                    last_release = Some(now_ns);
                }
                let gone: Vec<usize> = v.dropped.iter().map(|d| d.0).chain(v.release).collect();
                let mut at = 0;
                queue.retain(|_| { at += 1; !gone.contains(&(at - 1)) });
            }
            // From here on all is calm and nothing else is done: whoever is left goes, one by one.
            queue.iter_mut().for_each(|w| w.deadline_ns = u64::MAX);
            let (mut now_ns, mut left) = (1_000 * MS + steps.len() as u64 * STEP_NS, queue.len());
            let end_ns = now_ns + p.calm_ns.max(LEAST_LOAD_NS) * 2 + (p.pause_ns + STEP_NS) * (left as u64 + 1);
            while left > 0 {
                prop_assert!(now_ns <= end_ns, "{left} still wait");
                queue.iter_mut().for_each(|w| w.seen_ns = now_ns);
                gate.observe(now_ns, Some(0), true, completions, p.calm_ns);
                if let Some(at) = gate.decide(now_ns, &queue, false, &p).release {
                    queue.remove(at);
                    gate.released(now_ns);
                    left -= 1;
                }
                now_ns += STEP_NS;
            }
        }
    }
}
