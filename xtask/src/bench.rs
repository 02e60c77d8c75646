//! The overload cases and the benchmarks: what they need is made sure of here, the work is bench/'s.

use crate::server::{self, Server, Variants};
use crate::{apt, dirs, progress};
use anyhow::{anyhow, bail, Result};
use clap::ValueEnum;
use std::process::Command;
use std::time::SystemTime;

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
    /// What one call on the hot path costs, a step of the controller, and a task in memory; beside the budgets
    Hot {
        /// Write bench/results/hot-<date>.json and .md
        #[arg(long)]
        record: bool,
        /// Passed on to the benchmarks: a part of a name, criterion's options
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
        ensure(host(&args.args)?, Variants::Patched)?;
    }
    run_through(tool("case", &args.args))
}

pub fn bench(args: &BenchArgs) -> Result<()> {
    match &args.what {
        Bench::Hot { record, args } => {
            apt::ensure(apt::BENCH)?;
            let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs());
            let mut cargo = dirs::cargo();
            cargo.args(["bench", "-p", "atropos-bench", "--bench", "hot", "--bench", "tick", "--"]).args(args);
            run_through(cargo)?;
            let criterion = dirs::target()?.join("criterion");
            let mut show: Vec<String> = vec!["--criterion".into(), criterion.display().to_string()];
            show.extend(["--since".into(), since.to_string()]);
            show.extend(record.then(|| "--record".into()));
            run_through(tool("micro", &show))
        }
        Bench::Overhead { args } => {
            ensure(host(args)?, Variants::All)?;
            if args.iter().any(|arg| arg == "--instructions") {
                apt::ensure(apt::COUNT)?;
            }
            run_through(tool("overhead", args))
        }
    }
}

fn ensure(host: Server, variants: Variants) -> Result<()> {
    server::ensure(host, variants)?;
    apt::ensure(match host {
        Server::Postgresql => apt::LOAD_POSTGRESQL,
        Server::Mysql => apt::LOAD_MYSQL,
        Server::Httpd => apt::LOAD_HTTPD,
    })
}

/// Cases that exist on one host other than PostgreSQL only.
const MYSQL_ONLY: &[&str] = &["c1", "c2"];
const HTTPD_ONLY: &[&str] = &["c9", "x10"];

/// The server that the tool will use for these arguments: `--host`, else the case's own.
fn host(args: &[String]) -> Result<Server> {
    let mut given = args.iter().skip_while(|arg| *arg != "--host").nth(1).map(String::as_str);
    given = given.or_else(|| args.iter().find_map(|arg| arg.strip_prefix("--host=")));
    if let Some(name) = given {
        return Server::from_str(name, false).map_err(|_| {
            let names: Vec<_> = Server::ALL.iter().map(|server| server.name()).collect();
            anyhow!("--host {name}: it is one of {}", names.join(", "))
        });
    }
    let names = |cases: &[&str]| args.iter().any(|arg| cases.contains(&arg.as_str()));
    Ok(match () {
        () if names(MYSQL_ONLY) => Server::Mysql,
        () if names(HTTPD_ONLY) => Server::Httpd,
        () => Server::Postgresql,
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_is_the_one_named_or_the_case_s_own() {
        for (args, expected) in [
            ("c6 --mode all", Server::Postgresql),
            ("x1", Server::Postgresql),
            ("x1 --host mysql", Server::Mysql),
            ("--host=httpd x5", Server::Httpd),
            ("c1 --mode all", Server::Mysql),
            ("c9 --variant busy", Server::Httpd),
            ("x10", Server::Httpd),
            ("c1 --host postgresql", Server::Postgresql),
        ] {
            let args: Vec<String> = args.split(' ').map(String::from).collect();
            assert_eq!(host(&args).unwrap(), expected, "{args:?}");
        }
        assert!(host(&["--host".into(), "oracle".into()]).unwrap_err().to_string().contains("one of postgresql"));
    }
}
