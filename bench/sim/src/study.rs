//! The studies: which scenarios are run under what, spread over the processors, and what they come to in numbers.

use crate::drive::{run, Ablation, Progress};
use crate::host::Host;
use crate::judge::{overload_ns, truth, verdict, Kind, Truth, Verdict};
use crate::scenario::{scenario, Family, Scenario};
use atropos::config::Config;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::Mutex;

/// Another seed gives other scenarios of the same kind: for checking that nothing was fitted to this one.
pub const SEED: u64 = 1;

/// One scenario under one loop.
pub struct Run {
    pub index: u64,
    pub family: Family,
    pub truth: Truth,
    pub verdict: Verdict,
}

/// `job` for each index, on as many threads as there are processors and one more, since every run waits a few
/// milliseconds for its region's clock to be calibrated; results in the order of the indices.
pub fn parallel<T: Send>(indices: &[u64], job: impl Fn(u64) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<(usize, T)>> = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(2, usize::from) + 1;
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| loop {
                let i = next.fetch_add(1, Relaxed);
                let Some(&index) = indices.get(i) else { return };
                let result = job(index);
                done.lock().expect("no job panics while it holds the lock").push((i, result));
            });
        }
    });
    let mut done = done.into_inner().expect("all threads are done");
    done.sort_by_key(|d| d.0);
    done.into_iter().map(|d| d.1).collect()
}

/// The scenarios as they are, under the library's own controller.
pub fn main_study(seed: u64, indices: &[u64]) -> Result<Vec<Run>, String> {
    parallel(indices, |index| {
        let s = scenario(seed, index);
        Ok(Run { index, family: s.family, truth: truth(&s), verdict: verdict(&s, Ablation::Nothing)? })
    })
    .into_iter()
    .collect()
}

/// The scenarios of `base` again with something changed.
pub fn again(
    seed: u64,
    base: &[&Run],
    less: Ablation,
    change: impl Fn(&mut Scenario) + Sync,
) -> Result<Vec<Run>, String> {
    let places: Vec<u64> = (0..base.len() as u64).collect();
    parallel(&places, |place| {
        let run = base[place as usize];
        let mut s = scenario(seed, run.index);
        change(&mut s);
        Ok(Run { index: run.index, family: run.family, truth: run.truth.clone(), verdict: verdict(&s, less)? })
    })
    .into_iter()
    .collect()
}

pub const ABLATIONS: [(&str, Ablation); 5] = [
    ("most contended resource only", Ablation::OneResource),
    ("current instead of future usage", Ablation::CurrentUsage),
    ("no instances", Ablation::NoInstances),
    ("one cancel per 10 s", Ablation::FixedPause),
    ("no in-flight age", Ablation::NoInFlightAge),
];

pub const PROGRESS: [(&str, Progress); 7] = [
    ("exact", Progress::Exact),
    ("missing", Progress::Missing),
    ("frozen at 5%", Progress::FrozenLow),
    ("frozen at 95%", Progress::FrozenHigh),
    ("off by 2x", Progress::Off(2)),
    ("off by 10x", Progress::Off(10)),
    ("reversed", Progress::Reversed),
];

/// A threshold and the values tried; the default is among them.
pub struct Sweep {
    pub name: &'static str,
    pub values: &'static [f64],
    pub set: fn(&mut Config, f64),
    pub default: fn(&Config) -> f64,
}

pub const SWEEPS: [Sweep; 9] = [
    Sweep {
        name: "contention_threshold",
        values: &[0.1, 0.2, 0.3, 0.4, 0.5],
        set: |c, v| c.contention_threshold = v,
        default: |c| c.contention_threshold,
    },
    Sweep {
        name: "min_relief",
        values: &[0.05, 0.15, 0.25, 0.35, 0.5],
        set: |c, v| c.min_relief = v,
        default: |c| c.min_relief,
    },
    Sweep {
        name: "trigger_windows",
        values: &[1.0, 2.0, 3.0, 5.0, 8.0],
        set: |c, v| c.trigger_windows = v as u32,
        default: |c| c.trigger_windows as f64,
    },
    Sweep {
        name: "slo_tolerance",
        values: &[0.05, 0.2, 0.5, 1.0],
        set: |c, v| c.slo_tolerance = v,
        default: |c| c.slo_tolerance,
    },
    Sweep {
        name: "cancel_burst",
        values: &[1.0, 2.0, 4.0, 8.0, 16.0],
        set: |c, v| c.cancel_burst = v as u32,
        default: |c| c.cancel_burst as f64,
    },
    Sweep {
        name: "cancel_rate_per_s",
        values: &[0.5, 1.0, 2.0, 4.0],
        set: |c, v| c.cancel_rate_per_s = v,
        default: |c| c.cancel_rate_per_s,
    },
    Sweep {
        name: "cancel_share",
        values: &[0.001, 0.01, 0.1],
        set: |c, v| c.cancel_share = v,
        default: |c| c.cancel_share,
    },
    Sweep {
        name: "window_ms",
        values: &[50.0, 100.0, 200.0, 400.0],
        set: |c, v| c.window_ms = v as u32,
        default: |c| c.window_ms as f64,
    },
    Sweep {
        name: "verify_ms",
        values: &[100.0, 200.0, 500.0, 1000.0],
        set: |c, v| c.verify_ms = v as u32,
        default: |c| c.verify_ms as f64,
    },
];

/// When a cancelled task runs again.
pub const AGAIN_SWEEPS: [Sweep; 2] = [
    Sweep {
        name: "retry_calm_ms",
        values: &[100.0, 300.0, 1000.0, 3000.0],
        set: |c, v| c.retry_calm_ms = v as u32,
        default: |c| c.retry_calm_ms as f64,
    },
    Sweep {
        name: "retry_load_share",
        values: &[0.25, 0.5, 0.75, 1.0],
        set: |c, v| c.retry_load_share = v,
        default: |c| c.retry_load_share,
    },
];

/// What running cancelled tasks again comes to.
#[derive(Clone, Debug, Default)]
pub struct Again {
    /// Cancelled tasks that asked.
    pub asked: usize,
    pub ran: usize,
    /// Of these, who had come to their end when the run was over.
    pub finished: usize,
    /// From the end of the cancelled run to the beginning of the next, ms, ascending.
    pub waited_ms: Vec<f64>,
    /// Late requests in the evening.
    pub late: u64,
    /// Time in which over a tenth of the evening's arrivals were late, ns.
    pub overload_ns: u64,
}

/// Those of the first `scenarios` in which somebody is meant to be in the way of what the library can see.
pub fn aggressive(seed: u64, scenarios: u64) -> Vec<u64> {
    let indices: Vec<u64> = (0..scenarios).collect();
    let families = parallel(&indices, |index| scenario(seed, index).family);
    indices.into_iter().zip(families).filter(|(_, f)| f.blamable()).map(|(i, _)| i).collect()
}

/// These scenarios with an evening; `change` is what is tried. `again`: cancelled tasks do run again. How many have one,
/// and what it comes to.
pub fn evenings(
    seed: u64,
    indices: &[u64],
    again: bool,
    change: impl Fn(&mut Config) + Sync,
) -> Result<(usize, Again), String> {
    let runs: Vec<Option<Again>> = parallel(indices, |index| {
        let mut s = scenario(seed, index);
        let Some(evening_ns) = s.with_evening() else { return Ok(None) };
        if !again {
            std::sync::Arc::make_mut(&mut s.spec).long.iter_mut().for_each(|l| l.again = false);
        }
        change(&mut s.terms.config);
        evening(&s, evening_ns).map(Some)
    })
    .into_iter()
    .collect::<Result<_, String>>()?;
    let mut sum = Again::default();
    for run in runs.iter().flatten() {
        sum.asked += run.asked;
        sum.ran += run.ran;
        sum.finished += run.finished;
        sum.waited_ms.extend(&run.waited_ms);
        sum.late += run.late;
        sum.overload_ns += run.overload_ns;
    }
    sum.waited_ms.sort_by(f64::total_cmp);
    Ok((runs.iter().flatten().count(), sum))
}

fn evening(s: &Scenario, evening_ns: u64) -> Result<Again, String> {
    let mut host = Host::new(s.spec.clone());
    let acts = run(&mut host, s.end_ns, &s.terms, Ablation::Nothing, |_, _| {})?;
    Ok(Again {
        asked: acts.asked,
        ran: acts.waited_ns.len(),
        finished: host.made_good(),
        waited_ms: acts.waited_ns.iter().map(|&ns| ns as f64 / 1e6).collect(),
        late: host.late_since(evening_ns),
        overload_ns: overload_ns(&host, evening_ns),
    })
}

/// What a set of runs comes to. Scenarios whose culprits the library has no resource for are not in it.
#[derive(Clone, Debug, Default)]
pub struct Sums {
    pub runs: usize,
    /// [truth][said]
    pub confusion: [[usize; 3]; 3],
    /// Scenarios without a resource overload in which somebody was cancelled.
    pub false_positives: usize,
    pub negatives: usize,
    pub picks: usize,
    pub right: usize,
    pub missed: usize,
    pub incidents: usize,
    /// Cancels in incidents.
    pub cancels: usize,
    /// From the first right pick's getting what it monopolised to its being told, ms, ascending.
    pub first_ms: Vec<f64>,
    /// Time in overload per incident with and without the controller, ms, ascending.
    pub over_ms: Vec<f64>,
    pub over_off_ms: Vec<f64>,
    pub late: u64,
    pub late_off: u64,
    pub lost_s: f64,
}

impl Sums {
    pub fn of<'a>(runs: impl IntoIterator<Item = &'a Run>) -> Sums {
        let mut s = Sums::default();
        for run in runs.into_iter().filter(|r| r.family != Family::Processors) {
            let (t, v) = (&run.truth, &run.verdict);
            s.runs += 1;
            s.confusion[t.kind as usize][v.said as usize] += 1;
            s.picks += v.picks.len();
            s.right += v.picks.iter().filter(|p| p.right).count();
            s.missed += v.missed.len();
            if t.kind != Kind::Resource {
                s.negatives += 1;
                s.false_positives += !v.picks.is_empty() as usize;
                continue;
            }
            s.incidents += 1;
            s.cancels += v.picks.len();
            s.first_ms.extend(v.picks.iter().find(|p| p.right).and_then(|p| p.after_ns).map(|ns| ns as f64 / 1e6));
            s.over_ms.push(v.overload_ns as f64 / 1e6);
            s.over_off_ms.push(t.overload_ns as f64 / 1e6);
            s.late += v.late;
            s.late_off += t.late;
            s.lost_s += v.lost_ns as f64 / 1e9;
        }
        for list in [&mut s.first_ms, &mut s.over_ms, &mut s.over_off_ms] {
            list.sort_by(f64::total_cmp);
        }
        s
    }

    pub fn precision(&self) -> f64 {
        part(self.right, self.picks)
    }

    pub fn recall(&self) -> f64 {
        part(self.right, self.right + self.missed)
    }

    pub fn false_rate(&self) -> f64 {
        if self.negatives == 0 {
            0.0
        } else {
            self.false_positives as f64 / self.negatives as f64
        }
    }

    /// Late requests against no controller at all.
    pub fn late_part(&self) -> f64 {
        self.late as f64 / self.late_off.max(1) as f64
    }

    pub fn lost_per_incident_s(&self) -> f64 {
        self.lost_s / self.incidents.max(1) as f64
    }
}

fn part(part: usize, whole: usize) -> f64 {
    if whole == 0 {
        1.0
    } else {
        part as f64 / whole as f64
    }
}

/// The `q` quantile of an ascending list; 0 for none.
pub fn quantile(sorted: &[f64], q: f64) -> f64 {
    match sorted.len() {
        0 => 0.0,
        n => sorted[((n as f64 * q) as usize).min(n - 1)],
    }
}
