//! How many instructions a request costs a server, with and without Atropos, counted by valgrind's callgrind. Unlike a time, a
//! count is the same on a busy machine, so it resolves what throughput cannot.
//!
//! Counted are the instructions outside the kernel. What a server does to start and to end drops out: the same is
//! counted with fewer requests and taken off. The controller's thread is left out, for its steps go by the clock, which
//! under callgrind has fifty times as many ticks to a request.
use crate::dirs::server_command;
use crate::measure;
use crate::record::markdown;
use anyhow::{ensure, Context, Result};
use serde::Serialize;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Requests of the two runs whose difference is taken.
#[derive(Clone, Copy)]
pub struct Runs {
    pub few: u32,
    pub many: u32,
}

#[derive(Clone, Debug, Serialize)]
pub struct Count {
    pub what: String,
    pub round: u32,
    pub vanilla: f64,
    pub patched: f64,
}

impl Count {
    /// `instructions(patched, n)`: of a whole life of the server in which it answers n requests.
    pub fn take(what: &str, round: u32, runs: Runs, instructions: impl Fn(bool, u32) -> Result<u64>) -> Result<Count> {
        let each = |patched| -> Result<f64> {
            let (few, many) = (instructions(patched, runs.few)?, instructions(patched, runs.many)?);
            Ok((many as f64 - few as f64) / f64::from(runs.many - runs.few))
        };
        Ok(Count { what: what.into(), round, vanilla: each(false)?, patched: each(true)? })
    }

    pub fn line(&self) -> String {
        let more = self.patched - self.vanilla;
        format!(
            "{} round {}: vanilla {:.0}, patched {:.0}, {more:.0} more",
            self.what, self.round, self.vanilla, self.patched
        )
    }
}

/// Medians and ranges, in the order in which things were counted.
pub fn report(counts: &[Count]) -> String {
    let mut rows = vec![["instructions a request", "rounds", "vanilla", "patched", "more"].map(String::from).to_vec()];
    let mut names: Vec<&str> = counts.iter().map(|c| c.what.as_str()).collect();
    names.dedup();
    for name in names {
        let of: Vec<&Count> = counts.iter().filter(|c| c.what == name).collect();
        let cell = |f: fn(&Count) -> f64| {
            measure::spread(of.iter().map(|c| f(c)))
                .map_or("-".into(), |(m, lo, hi)| format!("{m:.0} ({lo:.0}..{hi:.0})"))
        };
        rows.push(vec![
            name.into(),
            of.len().to_string(),
            cell(|c| c.vanilla),
            cell(|c| c.patched),
            cell(|c| c.patched - c.vanilla),
        ]);
    }
    format!("{}\nOutside the kernel, without the controller's thread; median (smallest..largest).\n", markdown(&rows))
}

/// What callgrind writes, in the run's folder: a file for each thread, with its number behind the name.
const FILE: &str = "callgrind.out";

/// As `dirs::server_command`, for a server that is counted.
pub fn server_command_counted(program: &Path, dir: &Path) -> Result<Command> {
    let mut valgrind = server_command(Path::new("valgrind"), dir)?;
    valgrind.args(["--tool=callgrind", "--separate-threads=yes"]);
    valgrind.arg(format!("--callgrind-out-file={}", dir.join(FILE).display())).arg(program);
    Ok(valgrind)
}

/// callgrind's file of each thread of the server that has run in `dir` and has ended.
pub fn threads(dir: &Path) -> Result<Vec<String>> {
    let mut files = vec![];
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        if name.strip_prefix(FILE).is_some_and(|n| n.starts_with('-')) {
            files.push(fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?);
        }
    }
    ensure!(!files.is_empty(), "callgrind left no file behind in {}: see the server's log", dir.display());
    Ok(files)
}

/// What a thread executed, from callgrind's file of it.
pub fn total(file: &str) -> Result<u64> {
    let line = file.lines().find_map(|l| l.strip_prefix("totals: ").or_else(|| l.strip_prefix("summary: ")));
    let number = line.and_then(|l| l.split_whitespace().next()?.parse().ok());
    number.context("callgrind's file has no totals: did the server end by itself?")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callgrinds_total_is_read() {
        assert_eq!(total("events: Ir\nfn=(1) main\n16 400\n\ntotals: 14752\n").unwrap(), 14752);
        assert_eq!(total("events: Ir\nsummary: 77\n").unwrap(), 77);
        assert!(total("events: Ir\n").unwrap_err().to_string().contains("no totals"));
    }

    #[test]
    fn what_all_runs_have_in_common_drops_out() {
        let server = |patched, n| Ok(1_000_000 + u64::from(n) * if patched { 107 } else { 100 });
        let count = Count::take("page", 1, Runs { few: 10, many: 60 }, server).unwrap();
        assert_eq!((count.vanilla, count.patched), (100.0, 107.0));
        assert!(count.line().ends_with(" 7 more"), "{}", count.line());
        let other = Count { what: "form".into(), patched: 150.0, ..count.clone() };
        let text = report(&[count.clone(), count, other]);
        assert!(text.contains("| page") && text.contains("| 2 ") && text.contains("50 (50..50)"), "{text}");
    }
}
