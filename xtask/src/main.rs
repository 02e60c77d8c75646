//! `cargo xtask`: everything around the library that one command should do, set-up included.

mod apt;
mod dirs;
mod patches;
mod progress;
mod server;
mod source;
mod stamp;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about = "Builds, tests, measures and demonstrates libatropos", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Build a patched server or run its own tests
    #[command(subcommand)]
    Server(ServerTask),
}

#[derive(Subcommand)]
enum ServerTask {
    /// Download, patch, build and install a server, and our module in it
    Build(server::BuildArgs),
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Task::Server(ServerTask::Build(args)) => server::build(&args),
    }
}
