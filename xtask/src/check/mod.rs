//! A server's own tests on our patched build with our module in it.

mod mysql;
mod postgresql;

use crate::server::{Server, Variants};
use crate::{dirs, server};
use anyhow::{bail, Context, Result};
use clap::ValueEnum;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

#[derive(clap::Args)]
pub struct CheckArgs {
    pub server: Server,
    /// PostgreSQL only.
    #[arg(long, value_enum, default_value = "regress")]
    pub suite: Suite,
    /// Further settings of the server under test, e.g. `atropos.slo=50ms`, `atropos_slo_ms=50`.
    #[arg(long = "set", value_name = "NAME=VALUE")]
    pub settings: Vec<String>,
    /// MySQL only: these tests (`main.lock`, `innodb.innodb_mysql`) instead of those for locks, kill and metadata.
    #[arg(long = "test", value_name = "SUITE.TEST")]
    pub tests: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Suite {
    /// SQL in all its parts, with the module in enforce mode
    Regress,
    /// concurrent sessions that block each other, with the module in observe mode
    Isolation,
}

pub fn check(args: &CheckArgs) -> Result<()> {
    let run = match args.server {
        Server::Postgresql => postgresql::check,
        Server::Mysql => mysql::check,
        Server::Httpd => {
            bail!("httpd's own tests are no part of this; `cargo xtask test --only httpd-integration` tests it")
        }
    };
    server::ensure(args.server, Variants::Patched)?;
    run(args)
}

/// NAME and VALUE of each `--set`.
fn settings(args: &CheckArgs) -> Result<Vec<(&str, &str)>> {
    args.settings
        .iter()
        .map(|setting| {
            let (name, value) = setting.split_once('=').with_context(|| format!("--set {setting}: give NAME=VALUE"))?;
            Ok((name.trim(), value.trim()))
        })
        .collect()
}

fn remove_work(work: &Path) -> Result<()> {
    if work.exists() {
        std::fs::remove_dir_all(work).with_context(|| {
            format!("cannot remove {}; does a server of an earlier run still run there?", work.display())
        })?;
    }
    dirs::make(work.parent().expect("lies in check/").to_path_buf()).map(drop)
}

/// Gives `work` to the server user; `how`: further options of chown.
fn give_away(work: &Path, how: &[&str]) -> Result<()> {
    if !dirs::is_root() {
        return Ok(());
    }
    let owner = format!("{0}:{0}", dirs::SERVER_USER);
    run("chown", how.iter().map(OsStr::new).chain([owner.as_ref(), work.as_ref()]))
}

fn run<'a>(program: &str, args: impl IntoIterator<Item = &'a OsStr>) -> Result<()> {
    let out = Command::new(program).args(args).output().with_context(|| format!("cannot start {program}"))?;
    if !out.status.success() {
        bail!("{program}: {}", String::from_utf8_lossy(&out.stderr));
    }
    Ok(())
}
