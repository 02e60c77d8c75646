//! The overload cases and the benchmarks: what they need is made sure of here, the work is bench/'s.

use crate::server::{self, Variants};
use crate::{apt, dirs, progress};
use anyhow::{bail, Result};
use std::process::Command;

#[derive(clap::Args)]
pub struct CaseArgs {
    /// Passed on as they are: a case's name and its options; `--list` names the cases.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
    pub args: Vec<String>,
}

#[derive(clap::Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub what: Bench,
}

#[derive(clap::Subcommand)]
pub enum Bench {
    /// What one call on the hot path costs
    Hot {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// What the patched server loses against the vanilla one without an overload
    Overhead {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
}

pub fn case(args: &CaseArgs) -> Result<()> {
    // A list or a help text needs no server.
    if !args.args.iter().any(|arg| matches!(arg.as_str(), "--list" | "--help" | "-h")) {
        server::ensure(Variants::Patched)?;
        apt::ensure(apt::LOAD)?;
    }
    run_through(tool("case", &args.args))
}

pub fn bench(args: &BenchArgs) -> Result<()> {
    match &args.what {
        Bench::Hot { args } => {
            let mut cargo = dirs::cargo();
            cargo.args(["bench", "-p", "atropos-bench", "--"]).args(args);
            run_through(cargo)
        }
        Bench::Overhead { args } => {
            server::ensure(Variants::All)?;
            apt::ensure(apt::LOAD)?;
            run_through(tool("overhead", args))
        }
    }
}

/// `cargo run --release -p atropos-bench -- <subcommand> …`, where the user stands: file names among the arguments
/// are meant from there.
pub fn tool(subcommand: &str, args: &[String]) -> Command {
    let mut cargo = dirs::cargo();
    if let Ok(here) = std::env::current_dir() {
        cargo.current_dir(here);
    }
    cargo.args(["run", "--quiet", "--release", "-p", "atropos-bench", "--manifest-path"]);
    cargo.arg(dirs::workspace().join("Cargo.toml")).args(["--", subcommand]).args(args);
    cargo
}

/// In the user's own terminal and process group: output and Ctrl-C go straight through.
fn run_through(mut command: Command) -> Result<()> {
    progress::group::leave_interrupts_to_child();
    let status = command.status()?;
    if !status.success() {
        bail!("`{}` failed ({status})", progress::shown(&command));
    }
    Ok(())
}
