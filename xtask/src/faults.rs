//! `cargo xtask faults`: the fault scenarios often, or for long.

use crate::dirs;
use anyhow::{bail, Result};

#[derive(clap::Args)]
pub struct FaultsArgs {
    /// How often each scenario is run.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    times: u64,
    /// 10,000 tasks a second for ten minutes instead of for seconds.
    #[arg(long)]
    long: bool,
    /// Only scenarios whose name contains this; `cargo xtask faults --list` names them.
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Scenarios at a time; most of them wait most of the time.
    #[arg(long, default_value_t = 4)]
    jobs: usize,
    /// Name the scenarios.
    #[arg(long)]
    list: bool,
}

pub fn faults(args: &FaultsArgs) -> Result<()> {
    let mut tests = dirs::cargo();
    tests.args(["test", "-p", "atropos-ffi-tests", "--test", "faults", "--"]);
    tests.arg(format!("--test-threads={}", args.jobs)).args(&args.only);
    if args.list {
        tests.arg("--list");
    }
    let seconds = match args.times {
        _ if args.long => 600,
        1 => 20,
        _ => 6,
    };
    tests.env("ATROPOS_FAULT_TIMES", args.times.to_string()).env("ATROPOS_FAULT_SECONDS", seconds.to_string());
    if !tests.status()?.success() {
        bail!("scenarios failed (times each: {}); what they wrote stands above", args.times);
    }
    if !args.list {
        println!("all scenarios green, {} times each", args.times);
    }
    Ok(())
}
