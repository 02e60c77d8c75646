//! atropos-sim: the library's real pipeline on a modelled host, thousands of times, against what the model knows of the
//! truth. See the README beside it.

mod drive;
mod host;
mod judge;
mod report;
mod rng;
mod scenario;
mod study;

use anyhow::{anyhow, bail, Context, Result};
use clap::{Parser, Subcommand};
use drive::Ablation;
use std::path::PathBuf;

#[derive(Parser)]
#[command(about = "Simulated servers under the real pipeline")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs all studies and writes the report with its plots.
    Report {
        /// Few scenarios, nothing written: do the studies run, and do they hold?
        #[arg(long)]
        smoke: bool,
        /// Scenarios of the main study (1..=100000); the others take a part of them.
        #[arg(long, default_value_t = 3000, value_parser = clap::value_parser!(u64).range(1..=100_000))]
        scenarios: u64,
        /// Another seed gives other scenarios of the same kinds.
        #[arg(long, default_value_t = study::SEED)]
        seed: u64,
        /// Folder for the report [default: bench/results]
        #[arg(long)]
        out: Option<PathBuf>,
    },
    /// Runs the main study only and prints its tables.
    Main {
        #[arg(long, default_value_t = 3000, value_parser = clap::value_parser!(u64).range(1..=100_000))]
        scenarios: u64,
        #[arg(long, default_value_t = study::SEED)]
        seed: u64,
    },
    /// Runs the study of cancelled tasks that run again, and prints its tables.
    Again {
        /// Scenarios of which those are taken that are meant to have a culprit.
        #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..=100_000))]
        scenarios: u64,
        #[arg(long, default_value_t = study::SEED)]
        seed: u64,
    },
    /// Runs one scenario and says what was the matter and what was done.
    One {
        index: u64,
        #[arg(long, default_value_t = study::SEED)]
        seed: u64,
    },
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Command::Report { smoke: true, seed, .. } => smoke(seed),
        Command::Report { scenarios, seed, out, .. } => {
            let results = atropos_link::checkout().join("bench/results");
            let path = report::write(seed, scenarios, &out.unwrap_or(results))?;
            println!("{}", path.display());
            Ok(())
        }
        Command::Main { scenarios, seed } => {
            let indices: Vec<u64> = (0..scenarios).collect();
            let runs = study::main_study(seed, &indices).map_err(|e| anyhow!(e))?;
            print!("{}", report::main_tables(&runs));
            print!("\n{}", report::commits_note(seed, &runs)?);
            Ok(())
        }
        Command::Again { scenarios, seed } => {
            print!("{}", report::again_tables(seed, &study::aggressive(seed, scenarios))?);
            Ok(())
        }
        Command::One { index, seed } => one(seed, index),
    }
}

/// A few of each, and what must hold of any number.
fn smoke(seed: u64) -> Result<()> {
    let indices: Vec<u64> = (0..120).collect();
    let runs = study::main_study(seed, &indices).map_err(|e| anyhow!(e))?;
    let sums = study::Sums::of(&runs);
    println!(
        "{} scenarios, {} incidents: {} cancels, {} right; {} culprits missed; {} false positives; {:.0}% of late left",
        sums.runs,
        sums.incidents,
        sums.picks,
        sums.right,
        sums.missed,
        sums.false_positives,
        sums.late_part() * 100.0
    );
    if sums.incidents < 20 || sums.precision() < 0.95 || sums.recall() < 0.95 || sums.false_positives > 1 {
        bail!("far from what the pipeline can do: precision {:.3}, recall {:.3}", sums.precision(), sums.recall());
    }
    Ok(())
}

fn one(seed: u64, index: u64) -> Result<()> {
    let s = scenario::scenario(seed, index);
    println!("{:?}: {}\n{:#?}", s.family, s.family.words(), s.spec);
    println!("objective {} ms (0 = learnt), edges {}", s.terms.config.slo_ms, s.terms.edges);
    let truth = judge::truth(&s);
    println!("without a controller: {truth:?}");
    let v = judge::verdict(&s, Ablation::Nothing).map_err(|e| anyhow!(e)).context("the run")?;
    println!(
        "said {:?}; late {}; overload {} ms; objective {} us; missed {:?}",
        v.said,
        v.late,
        v.overload_ns / 1_000_000,
        v.acts.slo_ns / 1000,
        v.missed
    );
    for p in &v.picks {
        let who = match p.session.checked_sub(s.spec.sessions) {
            Some(long) => format!("long task {long}"),
            None => format!("ordinary session {}", p.session),
        };
        let right = if p.right { "right" } else { "WRONG" };
        let (at_s, p99_us) = (p.at_ns as f64 / 1e9, p.p99_ns / 1000);
        println!("  at {at_s:.3} s {right}: {who}, p99 {p99_us} us: {}", p.reason);
    }
    Ok(())
}
