//! What the patched server with the module loaded costs when nothing is wrong: against the vanilla build, in pairs.
//!
//! Both servers of a pair start fresh on copies of the same data and stay up together; only one is loaded at a time
//! (`pairs`). The throughput ratio of a pair is the ratio of the sums over its slices. CPU time for each transaction is
//! reported beside it: on a shared machine it is the steadier measure.
use crate::clock::now_ns;
use crate::host::{Dataset, Host, Server, Setting};
use crate::load::Load;
use crate::measure;
use crate::pairs::{self, Second};
use crate::record::{markdown, Mode};
use anyhow::{bail, Result};
use serde::Serialize;
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
pub enum Workload {
    ReadOnly,
    ReadWrite,
}

impl Workload {
    pub fn test(self) -> &'static str {
        match self {
            Workload::ReadOnly => "read_only",
            Workload::ReadWrite => "read_write",
        }
    }
}

#[derive(Clone, Debug)]
pub struct Options {
    pub pairs: u32,
    /// Measured seconds for each server in each pair.
    pub seconds: f64,
    pub threads: u32,
    pub second: Second,
    pub mode: Mode,
    pub seed: u64,
    pub set: Vec<Setting>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Pair {
    pub workload: &'static str,
    pub pair: u32,
    pub vanilla_tps: f64,
    pub patched_tps: f64,
    /// patched / vanilla.
    pub tps_ratio: f64,
    pub vanilla_p99_ms: f64,
    pub patched_p99_ms: f64,
    pub vanilla_cpu_us: f64,
    pub patched_cpu_us: f64,
    /// CPU time for each transaction, patched / vanilla.
    pub cpu_ratio: f64,
    /// Decisions of the patched server: there is no overload, so 0.
    pub decisions: usize,
}

#[derive(Default)]
struct Side {
    completed: usize,
    seconds: f64,
    cpu_ns: i64,
    /// Transactions of the slices including warm-up, which the CPU time covers.
    all: usize,
    p99_ms: Vec<f64>,
}

const SLICE_S: f64 = 2.0;
const WARMUP_S: f64 = 1.0;

pub fn run(
    vanilla: &dyn Host,
    patched: &dyn Host,
    workload: Workload,
    o: &Options,
    mut report: impl FnMut(&Pair),
) -> Result<Vec<Pair>> {
    let load = Load { test: workload.test(), ..Load::oltp(vanilla.schema(), o.threads, 10, 10_000) };
    let dataset = Dataset::oltp(vanilla.schema(), load.tables, load.rows);
    let (second, mode) = o.second.server(vanilla, patched, o.mode);
    let (hosts, modes) = ([vanilla, second], [None, mode]);
    let mut done = vec![];
    for pair in 1..=o.pairs {
        let name = format!("overhead-{pair}");
        let servers = pairs::start_both(pair, |which| hosts[which].start(&dataset, modes[which], &o.set, &name))?;
        let measure = |which: usize, seconds: f64, seed: u64| -> Result<Slice> {
            slice(hosts[which], &*servers[which], &load, seconds, o.seed + seed)
        };
        let mut sides = [Side::default(), Side::default()];
        // One unmeasured slice each fills the caches.
        for which in [0, 1] {
            measure(which, 2.0, 0)?;
        }
        let each = (o.seconds / SLICE_S).ceil() as u32;
        for (i, which) in pairs::slices(pair, each).enumerate() {
            let side = &mut sides[which];
            let cpu_ns = servers[which].cpu_ns();
            let slice = measure(which, SLICE_S, u64::from(pair) * 10_000 + i as u64 / 2)?;
            side.cpu_ns += servers[which].cpu_ns() - cpu_ns;
            side.completed += slice.part.completed;
            side.seconds += slice.part.completed as f64 / slice.part.tps;
            side.all += slice.all;
            side.p99_ms.push(slice.part.p99_ms);
        }
        let decisions = std::fs::read_to_string(servers[1].decision_log()).map_or(0, |t| t.lines().count());
        let tps = |s: &Side| s.completed as f64 / s.seconds;
        let cpu_us = |s: &Side| s.cpu_ns as f64 / 1e3 / s.all as f64;
        let p99 = |s: &Side| measure::spread(s.p99_ms.iter().copied()).map_or(f64::NAN, |s| s.0);
        let [v, p] = &sides;
        let ended = Pair {
            workload: workload.test(),
            pair,
            vanilla_tps: tps(v),
            patched_tps: tps(p),
            tps_ratio: tps(p) / tps(v),
            vanilla_p99_ms: p99(v),
            patched_p99_ms: p99(p),
            vanilla_cpu_us: cpu_us(v),
            patched_cpu_us: cpu_us(p),
            cpu_ratio: cpu_us(p) / cpu_us(v),
            decisions,
        };
        report(&ended);
        done.push(ended);
        for server in servers {
            server.finish()?;
        }
    }
    Ok(done)
}

struct Slice {
    part: measure::Part,
    /// Transactions including the warm-up's.
    all: usize,
}

fn slice(host: &dyn Host, server: &dyn Server, load: &Load, seconds: f64, seed: u64) -> Result<Slice> {
    let running = load.start(host, server.dir(), "overhead", WARMUP_S + seconds, seed, 0)?;
    let log = running.finish(Duration::from_secs_f64(seconds + 60.0))?;
    if let Some(died) = log.died {
        bail!("{died}");
    }
    let (Some(first), Some(last)) = (log.transactions.first(), log.transactions.last()) else {
        bail!("the load completed no transaction: {:?}", log.errors.first());
    };
    debug_assert!(last.end_ns() <= now_ns());
    let from = first.start_ns + (WARMUP_S * 1e9) as i64;
    let part = measure::part(&log.transactions, from, from + (seconds * 1e9) as i64);
    Ok(Slice { part, all: log.transactions.len() })
}

/// Medians and ranges; and whether the median ratio holds against `at_least`.
pub fn report(all: &[Pair], at_least: f64) -> (bool, String) {
    let mut rows =
        vec![["workload", "pairs", "vanilla tps", "patched tps", "tps ratio", "CPU/transaction ratio", "decisions"]
            .map(String::from)
            .to_vec()];
    let (mut ok, mut verdicts) = (true, String::new());
    for test in [Workload::ReadOnly.test(), Workload::ReadWrite.test()] {
        let of: Vec<&Pair> = all.iter().filter(|p| p.workload == test).collect();
        if of.is_empty() {
            continue;
        }
        let cell = |f: fn(&Pair) -> f64, digits: usize| {
            measure::spread(of.iter().map(|p| f(p)))
                .map_or("-".into(), |(m, lo, hi)| format!("{m:.digits$} ({lo:.digits$}..{hi:.digits$})"))
        };
        let (holds, verdict) = pairs::verdict(&of.iter().map(|p| p.tps_ratio).collect::<Vec<_>>(), at_least);
        ok &= holds;
        verdicts += &format!("{test}: {verdict}\n");
        rows.push(vec![
            test.into(),
            of.len().to_string(),
            cell(|p| p.vanilla_tps, 0),
            cell(|p| p.patched_tps, 0),
            cell(|p| p.tps_ratio, 4),
            cell(|p| p.cpu_ratio, 4),
            of.iter().map(|p| p.decisions).sum::<usize>().to_string(),
        ]);
    }
    (ok, format!("{}\n{verdicts}", markdown(&rows)))
}
