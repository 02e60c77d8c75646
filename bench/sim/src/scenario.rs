//! Seeded random scenarios: a server, its load, and what goes wrong.

use crate::drive::{Commits, Progress, Terms};
use crate::host::{Act, ClassSpec, Host, LongTask, Mode, NoTap, PoolSpec, Shape, Spec, MS, SECOND};
use crate::rng::Rng;
use atropos::config::Config;
use std::sync::Arc;

/// Nothing goes wrong before: the baseline learns.
pub const CALM_NS: u64 = 6 * SECOND;
/// No run is longer.
const LONGEST_NS: u64 = 20 * SECOND;

/// How long an evening is looked at.
const EVENING_NS: u64 = 20 * SECOND;

/// What is made to happen. What it comes to, only the judge says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    Calm,
    Busy,
    Bursts,
    Ramp,
    Drift,
    HarmlessLong,
    HotRows,
    Blips,
    Surge,
    Slowdown,
    LockDemand,
    LogStalls,
    FewWorkers,
    RetryStorm,
    LockOne,
    LockMany,
    Report,
    Alter,
    Chain,
    Idle,
    Pool,
    Workers,
    Stuck,
    Mixed,
    Processors,
}

use Family::*;

impl Family {
    pub const ALL: [Family; 25] = [
        Calm,
        Busy,
        Bursts,
        Ramp,
        Drift,
        HarmlessLong,
        HotRows,
        Blips,
        Surge,
        Slowdown,
        LockDemand,
        LogStalls,
        FewWorkers,
        RetryStorm,
        LockOne,
        LockMany,
        Report,
        Alter,
        Chain,
        Idle,
        Pool,
        Workers,
        Stuck,
        Mixed,
        Processors,
    ];

    /// In words, for the report.
    pub fn words(self) -> &'static str {
        match self {
            Calm => "steady load, 20..70% of the processors",
            Busy => "steady load, 75..90% of the processors",
            Bursts => "bursts of 1.2..2 times the load",
            Ramp => "load grows by up to 2 times",
            Drift => "load follows a wave of +-50% (a day in seconds)",
            HarmlessLong => "long tasks in nobody's way",
            HotRows => "many short exclusive locks on few rows",
            Blips => "a lock held for 40..150 ms now and then",
            Surge => "more requests than the processors can serve",
            Slowdown => "every request takes 3..8 times as long",
            LockDemand => "everybody's short turns at one lock exceed its time",
            LogStalls => "the log's disk stands still now and then, and whoever commits holds rows meanwhile",
            FewWorkers => "requests get slow until all workers are taken",
            RetryStorm => "a surge, and clients that give up and send again",
            LockOne => "one task holds a table everybody needs",
            LockMany => "2..20 tasks hold a table each",
            Report => "a long reader keeps writers waiting",
            Alter => "a waiting ALTER behind a long reader bars everybody",
            Chain => "a holder that waits for a holder",
            Idle => "a transaction left open",
            Pool => "1..3 tasks fill the buffer pool",
            Workers => "slow requests occupy the workers",
            Stuck => "a lock holder on whom all workers get stuck",
            Mixed => "a lock and the buffer pool at once",
            Processors => "tasks that use up the processors",
        }
    }

    fn weight(self) -> u64 {
        match self {
            Calm | Busy | Bursts | Ramp | Drift | HarmlessLong | HotRows | Blips => 5,
            Surge | Slowdown | LockDemand | LogStalls | FewWorkers | RetryStorm => 4,
            LockOne | LockMany => 5,
            Processors => 1,
            _ => 4,
        }
    }

    /// The load stays as it is.
    fn steady(self) -> bool {
        matches!(self, Calm | Busy | HarmlessLong | HotRows | Blips)
    }

    /// Somebody is meant to be in the way.
    pub fn aggressive(self) -> bool {
        matches!(self, LockOne | LockMany | Report | Alter | Chain | Idle | Pool | Workers | Stuck | Mixed | Processors)
    }

    /// The same, where the library can see it.
    pub fn blamable(self) -> bool {
        self.aggressive() && self != Processors
    }
}

#[derive(Clone, Debug)]
pub struct Scenario {
    pub family: Family,
    pub spec: Arc<Spec>,
    pub terms: Terms,
    pub end_ns: u64,
}

/// The `index`-th scenario of a study.
pub fn scenario(study_seed: u64, index: u64) -> Scenario {
    let seed = study_seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ index;
    let mut rng = Rng::new(seed);
    let total: u64 = Family::ALL.iter().map(|f| f.weight()).sum();
    let mut ticket = rng.whole(0, total - 1);
    let family = *Family::ALL
        .iter()
        .find(|f| {
            let mine = ticket < f.weight();
            ticket = ticket.saturating_sub(f.weight());
            mine
        })
        .expect("a ticket below the total finds its family");
    build(seed, family, &mut rng)
}

fn build(seed: u64, family: Family, rng: &mut Rng) -> Scenario {
    let load = match family {
        Busy => rng.between(0.75, 0.90),
        Bursts | Ramp | Drift | Surge | RetryStorm => rng.between(0.25, 0.45),
        _ => rng.between(0.20, 0.70),
    };
    let cores = rng.whole(2, 16) as f64;
    let cpu_ns = rng.log_between(1.0, 8.0) * 1e6;
    let delay_ns = if rng.chance(0.5) { rng.log_between(0.5, 5.0) * 1e6 } else { 0.0 };
    let rate_per_s = (load * cores / (cpu_ns / 1e9)).clamp(120.0, 1500.0);
    // Fewer processors rather than more requests where the rate was bounded.
    let cores = (rate_per_s * cpu_ns / 1e9 / load).max(1.0).round();
    let mut spec = Spec {
        seed,
        cores,
        sessions: rng.whole(48, 160) as usize,
        workers: 0,
        hidden_backlog: false,
        tables: rng.whole(1, 12) as u32,
        hot_share: rng.between(0.0, 0.6),
        write_share: rng.between(0.0, 0.5),
        write_mode: Mode::WriteRows,
        classes: vec![ClassSpec { share: 1.0, cpu_ns, sigma: rng.between(0.2, 0.7), delay_ns, late_ns: u64::MAX }],
        pool: None,
        rate_per_s,
        shapes: Vec::new(),
        slow: None,
        log_stalls: Vec::new(),
        timeout_ns: 0,
        long: Vec::new(),
    };
    if rng.chance(0.25) {
        // A second class of ordinary requests, a few times longer.
        spec.classes[0].share = rng.between(0.8, 0.95);
        let factor = rng.between(2.0, 5.0);
        let (cpu_ns, delay_ns) = (cpu_ns * factor, delay_ns * factor);
        spec.classes.push(ClassSpec { share: 1.0, cpu_ns, delay_ns, ..spec.classes[0] });
        let mean = spec.classes[0].share + (1.0 - spec.classes[0].share) * factor;
        spec.rate_per_s /= mean;
    }
    let onset_ns = CALM_NS + (rng.between(0.0, 1.0) * 1e9) as u64;
    let lasts_ns = (rng.log_between(0.8, 8.0) * 1e9) as u64;
    let mut b = Builder { rng, spec, onset_ns, lasts_ns };
    if matches!(family, Workers | Stuck | FewWorkers) || b.rng.chance(0.25) {
        b.workers();
    }
    if matches!(family, Pool | Mixed) || b.rng.chance(0.2) {
        b.pool();
    }
    b.family(family);
    if family.blamable() && b.rng.chance(0.3) {
        let shape = match b.rng.whole(0, 2) {
            0 => Shape::Ramp { from_ns: CALM_NS, to_ns: CALM_NS + 4 * SECOND, factor: b.rng.between(0.8, 1.2) },
            1 => {
                let factor = b.rng.between(1.1, 1.3);
                Shape::Bursts { period_ns: 700 * MS, length_ns: 150 * MS, factor }
            }
            _ => Shape::Wave { period_ns: 8 * SECOND, amplitude: b.rng.between(0.1, 0.25) },
        };
        b.spec.shapes.push(shape);
    }
    if family == HarmlessLong || b.rng.chance(0.4) {
        for _ in 0..b.rng.whole(1, 4) {
            let act = if b.rng.chance(0.5) { Act::Harmless } else { b.reader() };
            let start_ns = CALM_NS - SECOND + (b.rng.between(0.0, 2.0) * 1e9) as u64;
            let duration_ns = (b.rng.log_between(0.5, 8.0) * 1e9) as u64;
            // Where the processors become scarce it would be in the way.
            let room = b.spec.cores >= 4.0 && load < 0.6 && (family.aggressive() || family.steady());
            let busy = b.rng.chance(0.3) && room;
            let long = b.long(act);
            b.spec.long.push(LongTask { start_ns, duration_ns, busy, undo: 0.0, ..long });
        }
    }
    let mut spec = b.spec;
    let clean_p99_ns = calibrate(&mut spec);
    let mut config = Config::default();
    if rng.chance(0.5) {
        config.slo_ms = (clean_p99_ns as f64 * rng.between(2.0, 4.0) / 1e6).max(2.0);
        for class in &mut spec.classes {
            class.late_ns = (config.slo_ms * 1e6) as u64;
        }
    }
    let last_ns = spec.long.iter().map(|l| l.start_ns + l.duration_ns).max().unwrap_or(0);
    let end_ns = last_ns.max(onset_ns + lasts_ns).min(LONGEST_NS - 1500 * MS) + 1500 * MS;
    // Who holds is not who blocks where locks are shared: such a host knows it, and says so.
    let edges = rng.chance(0.5) || spec.shared_locks();
    let commits = if rng.chance(0.5) { Commits::Wait } else { Commits::Uncancellable };
    let terms = Terms { config, progress: Progress::Exact, edges, commits, seed };
    Scenario { family, spec: Arc::new(spec), terms, end_ns }
}

impl Scenario {
    /// The same server in whose evening fewer requests come, where the host itself runs cancelled tasks again. From
    /// when on fewer come; None = nobody here is cancelled who could run again, for a transaction left open is over.
    pub fn with_evening(&mut self) -> Option<u64> {
        let mut rng = Rng::new(self.terms.seed ^ 0xe7e);
        let spec = Arc::make_mut(&mut self.spec);
        let harms = |l: &LongTask| !matches!(l.act, Act::Harmless | Act::Idle { .. } | Act::Middle { .. });
        let last_ns = spec.long.iter().filter(|l| harms(l)).map(|l| l.start_ns).max()?;
        for long in spec.long.iter_mut() {
            (long.resubmits, long.again) = (0, harms(long));
        }
        let evening_ns = last_ns + (rng.between(2.0, 4.0) * 1e9) as u64;
        spec.shapes.push(Shape::Surge { from_ns: evening_ns, to_ns: u64::MAX, factor: rng.log_between(0.05, 1.0) });
        self.end_ns = evening_ns + EVENING_NS;
        Some(evening_ns)
    }
}

struct Builder<'a> {
    rng: &'a mut Rng,
    spec: Spec,
    onset_ns: u64,
    lasts_ns: u64,
}

impl Builder<'_> {
    fn mean_ns(&self) -> f64 {
        let mut left = 1.0;
        let mut mean = 0.0;
        for c in &self.spec.classes {
            let share = (c.share * left).min(left);
            mean += share * (c.cpu_ns + c.delay_ns);
            left -= share;
        }
        mean
    }

    fn workers(&mut self) {
        let needed = self.spec.rate_per_s * self.mean_ns() / 1e9;
        self.spec.workers = (needed * self.rng.between(2.0, 4.0)).ceil().max(4.0) as usize;
        self.spec.sessions = self.spec.sessions.max(self.spec.workers * 2);
        self.spec.hidden_backlog = self.rng.chance(0.4);
    }

    fn pool(&mut self) {
        let capacity = self.rng.whole(4_000, 20_000);
        self.spec.pool = Some(PoolSpec {
            capacity,
            hot: (capacity as f64 * self.rng.between(0.5, 0.85)) as u64,
            touch: self.rng.whole(6, 30) as u32,
            io_ns: (self.rng.log_between(0.1, 0.3) * 1e6) as u64,
            disks: self.rng.whole(8, 32) as u32,
        });
    }

    fn long(&mut self, act: Act) -> LongTask {
        LongTask {
            act,
            start_ns: self.onset_ns,
            duration_ns: self.lasts_ns,
            busy: self.rng.chance(0.3),
            class: self.class(),
            reaction_ns: (self.rng.exponential(8.0) * 1e6) as u64,
            undo: if self.rng.chance(0.3) { self.rng.between(0.0, 0.1) } else { 0.0 },
            resubmits: if self.rng.chance(0.1) { self.rng.whole(1, 2) as u32 } else { 0 },
            again: false,
        }
    }

    /// Some hosts know long tasks to be of another kind, others do not.
    fn class(&mut self) -> u16 {
        if self.rng.chance(0.5) {
            0
        } else {
            self.spec.classes.len() as u16
        }
    }

    fn push(&mut self, act: Act) {
        let long = self.long(act);
        self.spec.long.push(long);
    }

    /// A table that a good part of the requests needs.
    fn used_table(&mut self) -> u32 {
        self.spec.hot_share = self.spec.hot_share.max(0.3);
        0
    }

    fn reader(&mut self) -> Act {
        if self.spec.write_mode == Mode::Exclusive {
            return Act::Harmless; // a long reader would be no harmless one
        }
        Act::Lock { table: self.rng.whole(0, self.spec.tables as u64 - 1) as u32, mode: Mode::ReadRows }
    }

    fn family(&mut self, family: Family) {
        let (onset_ns, lasts_ns) = (self.onset_ns, self.lasts_ns);
        let until_ns = onset_ns + lasts_ns;
        match family {
            Calm | Busy | HarmlessLong => {}
            Bursts => {
                let period_ns = (self.rng.between(0.4, 3.0) * 1e9) as u64;
                let length_ns = (period_ns as f64 * self.rng.between(0.1, 0.4)) as u64;
                let factor = self.rng.between(1.2, 2.0);
                self.spec.shapes.push(Shape::Bursts { period_ns, length_ns, factor });
            }
            Ramp => {
                let factor = self.rng.between(1.1, 2.0);
                self.spec.shapes.push(Shape::Ramp { from_ns: onset_ns, to_ns: until_ns, factor });
            }
            Drift => {
                let period_ns = (self.rng.between(4.0, 20.0) * 1e9) as u64;
                let amplitude = self.rng.between(0.2, 0.5);
                self.spec.shapes.push(Shape::Wave { period_ns, amplitude });
            }
            HotRows => {
                // Rows are many small "tables"; all their holders are short.
                self.spec.write_mode = Mode::Exclusive;
                self.spec.tables = self.rng.whole(3, 30) as u32;
                self.spec.hot_share = 0.0;
                let hold_s = self.mean_ns() / 1e9;
                let busy = self.rng.between(0.1, 0.5);
                self.spec.write_share = (busy * self.spec.tables as f64 / (self.spec.rate_per_s * hold_s)).min(1.0);
            }
            Blips => {
                self.spec.hot_share = self.rng.between(0.1, 0.6);
                let mut start_ns = onset_ns;
                for _ in 0..self.rng.whole(1, 4) {
                    let duration_ns = (self.rng.between(40.0, 150.0) * 1e6) as u64;
                    let long = self.long(Act::Lock { table: 0, mode: Mode::Exclusive });
                    self.spec.long.push(LongTask {
                        start_ns,
                        duration_ns,
                        busy: false,
                        undo: 0.0,
                        resubmits: 0,
                        ..long
                    });
                    start_ns += (self.rng.between(1.4, 3.0) * 1e9) as u64;
                }
            }
            Surge | RetryStorm => {
                let factor = self.rng.between(3.0, 5.0);
                self.spec.shapes.push(Shape::Surge { from_ns: onset_ns, to_ns: until_ns, factor });
                if family == RetryStorm {
                    self.spec.timeout_ns = (self.rng.between(0.3, 1.0) * 1e9) as u64;
                }
            }
            Slowdown | FewWorkers => {
                let factor = self.rng.between(3.0, 8.0);
                self.spec.slow = Some((onset_ns, until_ns, factor));
            }
            LockDemand => {
                self.spec.hot_share = 0.0;
                self.spec.tables = self.rng.whole(1, 3) as u32;
                // Just within the lock's time before, beyond it while requests are slower.
                self.spec.write_mode = Mode::Exclusive;
                let hold_s = self.mean_ns() / 1e9;
                let busy = self.rng.between(0.2, 0.4);
                self.spec.write_share = (busy * self.spec.tables as f64 / (self.spec.rate_per_s * hold_s)).min(1.0);
                self.spec.slow = Some((onset_ns, until_ns, self.rng.between(2.5, 4.0)));
            }
            LogStalls => {
                // Rows are many small "tables": of those who stand still before the log some are waited for, most are not.
                self.spec.write_mode = Mode::Exclusive;
                self.spec.tables = self.rng.whole(10, 100) as u32;
                self.spec.hot_share = self.rng.between(0.0, 0.05);
                let busy = self.rng.between(0.02, 0.2);
                let hold_s = self.mean_ns() / 1e9;
                self.spec.write_share = (busy * self.spec.tables as f64 / (self.spec.rate_per_s * hold_s)).min(1.0);
                let mut start_ns = onset_ns;
                for _ in 0..self.rng.whole(1, 6) {
                    let end_ns = start_ns + (self.rng.log_between(50.0, 800.0) * 1e6) as u64;
                    self.spec.log_stalls.push((start_ns, end_ns));
                    start_ns = end_ns + (self.rng.between(0.2, 2.0) * 1e9) as u64;
                }
            }
            LockOne => {
                let table = self.used_table();
                self.push(Act::Lock { table, mode: Mode::Exclusive });
            }
            LockMany => {
                let n = self.rng.whole(2, 20);
                self.spec.tables = self.spec.tables.max(n as u32);
                self.spec.hot_share = 0.0;
                for table in 0..n as u32 {
                    let start_ns = onset_ns + (self.rng.between(0.0, 0.5) * 1e9) as u64;
                    let duration_ns = (lasts_ns as f64 * self.rng.between(0.7, 1.3)) as u64 + SECOND;
                    let long = self.long(Act::Lock { table, mode: Mode::Exclusive });
                    self.spec.long.push(LongTask { start_ns, duration_ns, busy: false, ..long });
                }
            }
            Report => {
                let table = self.used_table();
                self.spec.write_share = self.rng.between(0.2, 0.8);
                self.push(Act::Lock { table, mode: Mode::ReadAll });
            }
            Alter => {
                let table = self.used_table();
                self.push(Act::Lock { table, mode: Mode::ReadRows });
                let report = self.spec.long.len() - 1;
                self.spec.long[report].start_ns -= (self.rng.between(0.1, 1.0) * 1e9) as u64;
                let work_ns = (self.rng.between(5.0, 50.0) * 1e6) as u64;
                self.push(Act::Alter { table, work_ns });
            }
            Chain => {
                self.spec.tables = self.spec.tables.max(2);
                self.spec.hot_share = 0.4;
                self.push(Act::Lock { table: 1, mode: Mode::Exclusive });
                let (start_ns, undo) = (onset_ns + (self.rng.between(0.0, 0.3) * 1e9) as u64, 0.0);
                let long = self.long(Act::Middle { own: 0, other: 1 });
                self.spec.long.push(LongTask { start_ns, undo, resubmits: 0, ..long });
            }
            Idle => {
                let table = self.used_table();
                self.push(Act::Idle { table, mode: Mode::Exclusive });
            }
            Pool | Mixed => {
                let n = if family == Pool { self.rng.whole(1, 3) } else { 1 };
                let pool = self.spec.pool.expect("made before");
                let share = self.rng.between(0.6, 0.9) / n as f64;
                for _ in 0..n {
                    let pages = (pool.capacity as f64 * share) as u64;
                    let fill_ns = (self.rng.between(0.1, 0.8) * 1e9) as u64;
                    self.push(Act::Pool { pages, fill_ns });
                }
                if family == Mixed {
                    let table = self.used_table();
                    self.push(Act::Lock { table, mode: Mode::Exclusive });
                }
            }
            Workers => {
                // So many that what is left of the workers is not enough.
                let needed = (self.spec.rate_per_s * self.mean_ns() / 1e9).ceil() as usize;
                let n = self.spec.workers.saturating_sub(needed / 2).max(1);
                for _ in 0..n.min(20) {
                    let start_ns = onset_ns + (self.rng.between(0.0, 0.3) * 1e9) as u64;
                    let long = self.long(Act::Worker);
                    self.spec.long.push(LongTask { start_ns, busy: false, ..long });
                }
                // Twenty must do: a server whose workers they cannot occupy is made smaller.
                self.spec.workers = self.spec.workers.min(20 + needed / 2);
            }
            Stuck => {
                let table = self.used_table();
                self.push(Act::Lock { table, mode: Mode::Exclusive });
            }
            Processors => {
                for _ in 0..(self.spec.cores * self.rng.between(1.5, 3.0)).ceil() as usize {
                    self.push(Act::Cpu);
                }
            }
        }
    }
}

/// Learns what is normal of each class from a run in which nothing happens: late is what is over the objective, a fifth
/// over that run's p99. Returns the largest p99, ns.
fn calibrate(spec: &mut Spec) -> u64 {
    let quiet = Spec {
        shapes: Vec::new(),
        slow: None,
        log_stalls: Vec::new(),
        long: Vec::new(),
        timeout_ns: 0,
        ..spec.clone()
    };
    let mut host = Host::new(Arc::new(quiet));
    host.latencies = Some(vec![Vec::new(); spec.classes.len()]);
    host.run(4 * SECOND, &mut NoTap);
    let mut largest = 0;
    for (class, mut latencies) in spec.classes.iter_mut().zip(host.latencies.take().unwrap_or_default()) {
        latencies.sort_unstable();
        let p99 = latencies.get(latencies.len() * 99 / 100).copied().unwrap_or(10 * MS);
        class.late_ns = (p99 + p99 / 5).max(2 * MS);
        largest = largest.max(p99);
    }
    largest
}
