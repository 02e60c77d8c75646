//! `cargo xtask`: everything around the library that one command should do, set-up included.

mod abi;
mod apt;
mod bench;
mod check;
mod demo;
mod dirs;
mod faults;
mod fuzz;
mod install;
mod instructions;
mod patches;
mod progress;
mod report;
mod sanitize;
mod server;
mod source;
mod stamp;
mod test;

use anyhow::{bail, Context, Result};
use clap::{Parser, Subcommand};
use std::process::ExitCode;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    about = "Builds, tests, measures and demonstrates libatropos",
    max_term_width = 100
)]
struct Cli {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run every check of the project, set-up included; the last line is `N passed, M failed, K skipped`
    Test(test::TestArgs),
    /// Build a patched server, run its own tests, or check its patches
    #[command(subcommand)]
    Server(ServerTask),
    /// Run an overload case on a real server: `case c6 --mode all`, `case --list`
    Case(bench::CaseArgs),
    /// Run the SQLite demonstration: a table, and a report with the timelines
    Demo(demo::DemoArgs),
    /// Measure what Atropos costs
    Bench(bench::BenchArgs),
    /// Run the fault scenarios (processes killed, stopped, forked, out of room) often, or for long: `faults --times 50`
    Faults(faults::FaultsArgs),
    /// Run the C programs, and with --long the library's own tests too, under a sanitizer or valgrind
    Sanitize(sanitize::SanitizeArgs),
    /// Compare the library's binary interface with the committed one; `--accept` makes the present one that
    Abi(abi::AbiArgs),
    /// Fuzz the library (libFuzzer, AddressSanitizer): `fuzz`, `fuzz calls --minutes 60`
    Fuzz(fuzz::FuzzArgs),
    /// Count the instructions of the hot calls, and compare with those recorded
    Instructions(instructions::InstructionsArgs),
    /// Install the library, its headers, and what CMake and pkg-config need
    Install(install::InstallArgs),
    /// Install the Debian packages that building and testing need
    Setup,
}

#[derive(Subcommand)]
enum ServerTask {
    /// Download, patch, build and install a server, and our module in it
    Build(server::BuildArgs),
    /// Run the server's own tests with our module in enforce mode
    Check(check::CheckArgs),
    /// Check that the patches are complete, documented and small
    Lint {
        /// All of them if none is named.
        servers: Vec<server::Server>,
    },
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Task::Test(args) => test::test(&args),
        Task::Server(ServerTask::Build(args)) => server::build(&args).map(success),
        Task::Server(ServerTask::Check(args)) => check::check(&args).map(success),
        Task::Server(ServerTask::Lint { servers }) => lint(&servers).map(success),
        Task::Case(args) => bench::case(&args).map(success),
        Task::Demo(args) => demo::run(&args).map(success),
        Task::Bench(args) => bench::bench(&args).map(success),
        Task::Faults(args) => faults::faults(&args).map(success),
        Task::Sanitize(args) => sanitize::sanitize(&args).map(success),
        Task::Abi(args) => abi::run(&args).map(success),
        Task::Fuzz(args) => fuzz::run(&args).map(success),
        Task::Instructions(args) => instructions::run(&args).map(success),
        Task::Install(args) => install::install(&args).map(success),
        Task::Setup => test::setup().map(success),
    };
    done.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

fn success(_: ()) -> ExitCode {
    ExitCode::SUCCESS
}

/// Every release series that has patches.
fn lint(servers: &[server::Server]) -> Result<()> {
    let mut problems = Vec::new();
    for server in if servers.is_empty() { &server::Server::ALL } else { servers } {
        let all = dirs::workspace().join("patches").join(server.name());
        let mut series_dirs: Vec<_> = std::fs::read_dir(&all)
            .with_context(|| format!("no patches for {}: {}", server.name(), all.display()))?
            .map(|entry| entry.map(|entry| entry.path()))
            .collect::<Result<_, _>>()?;
        series_dirs.sort();
        for dir in series_dirs.iter().filter(|path| path.is_dir()) {
            let most = server.recipe().max_added_lines;
            let series = patches::Series::read(dir)?;
            let (found, added) = series.lint(most)?;
            println!("{}: {} patches, {added} lines added (at most {most})", dir.display(), series.len());
            problems.extend(found);
        }
    }
    if !problems.is_empty() {
        bail!("patch lint:\n    {}", problems.join("\n    "));
    }
    Ok(())
}
