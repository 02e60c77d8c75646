//! `cargo xtask sanitize`: the C programs of `ffi-tests/` and the library's own tests under AddressSanitizer,
//! ThreadSanitizer and valgrind's memcheck; and Miri, where it is installed.
//!
//! Three steps of `cargo xtask test`: every C program, linked statically. `--long` adds the shared library and the
//! library's own tests.

use crate::dirs;
use anyhow::{bail, Context, Result};
use std::path::PathBuf;
use std::process::Command;

#[derive(clap::Args)]
pub struct SanitizeArgs {
    /// Default: all three, one after the other.
    #[arg(value_enum)]
    watchers: Vec<Watcher>,
    /// Every form of linking, and the library's own tests (address, thread): a quarter of an hour each.
    #[arg(long)]
    long: bool,
    /// Only C programs whose name contains this.
    #[arg(long, value_name = "PART")]
    only: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Watcher {
    /// AddressSanitizer with its leak check
    Address,
    /// ThreadSanitizer
    Thread,
    /// valgrind's memcheck
    Memcheck,
}

impl Watcher {
    const ALL: [Watcher; 3] = [Watcher::Address, Watcher::Thread, Watcher::Memcheck];

    /// As `ffi-tests` and, for the sanitizers, the compilers call it.
    fn name(self) -> &'static str {
        match self {
            Watcher::Address => "address",
            Watcher::Thread => "thread",
            Watcher::Memcheck => "memcheck",
        }
    }
}

pub fn sanitize(args: &SanitizeArgs) -> Result<()> {
    let mut failed = Vec::new();
    for &watcher in if args.watchers.is_empty() { &Watcher::ALL[..] } else { &args.watchers } {
        if watcher != Watcher::Memcheck {
            if let Some(why) = runtime_is_missing() {
                bail!("{}: {why}", watcher.name());
            }
        }
        let mut commands = vec![programs(watcher, args)];
        if args.long && args.only.is_none() && watcher != Watcher::Memcheck {
            commands.push(own_tests(watcher)?);
        }
        for mut command in commands {
            println!("{}: {}", watcher.name(), crate::progress::shown(&command));
            let status = command.status().with_context(|| format!("cannot start {:?}", command.get_program()))?;
            if !status.success() {
                failed.push(watcher.name());
            }
        }
    }
    if !failed.is_empty() {
        bail!("findings or failures under: {}", failed.join(", "));
    }
    Ok(())
}

fn programs(watcher: Watcher, args: &SanitizeArgs) -> Command {
    let mut command = dirs::cargo();
    command.args(["test", "-p", "atropos-ffi-tests", "--test", "programs", "--no-fail-fast", "--"]);
    match (&args.only, args.long) {
        (Some(part), _) => command.arg(part),
        (None, true) => &mut command,
        (None, false) => command.args(["linked_static", "dlopen"]),
    };
    // What a watcher cannot show is said by the tests themselves.
    command.arg("--show-output");
    command.env("ATROPOS_WATCH", watcher.name());
    command
}

/// The library's own tests, instrumented. The property tests of the pure stages have neither threads nor unsafe code:
/// a few cases of each do.
fn own_tests(watcher: Watcher) -> Result<Command> {
    let name = watcher.name();
    let mut command = dirs::cargo();
    command.args(["test", "-p", "atropos", "--lib", "--target", &host()?, "--target-dir"]);
    command.arg(dirs::target()?.join(format!("sanitize-{name}")));
    command.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", rust_flags(name)?).env("PROPTEST_CASES", "16");
    let suppressions = dirs::workspace().join("ffi-tests/suppressions/thread.txt");
    command.env("TSAN_OPTIONS", format!("suppressions='{}'", suppressions.display()));
    Ok(command)
}

fn rustc(args: &[&str]) -> Result<String> {
    let program = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let out = Command::new(program).args(args).output().context("rustc")?;
    Ok(String::from_utf8_lossy(&out.stdout).trim().to_string())
}

fn host() -> Result<String> {
    let about = rustc(&["-vV"])?;
    Ok(about.lines().find_map(|line| line.strip_prefix("host: ")).context("rustc -vV names no host")?.to_string())
}

/// As `ffi-tests/src/watch.rs` says.
fn rust_flags(sanitizer: &str) -> Result<String> {
    let known = rustc(&["-C", "help"])?.contains("unsafe-allow-abi-mismatch");
    let mix = if known { " -Cunsafe-allow-abi-mismatch=sanitizer" } else { "" };
    let seen = if sanitizer == "thread" { " --cfg atropos_tsan" } else { "" };
    Ok(format!("-Zsanitizer={sanitizer} -Cforce-frame-pointers=yes{seen}{mix}"))
}

/// Why the sanitizers cannot run here; the run times come with rustup's compilers, not with every distribution's.
pub fn runtime_is_missing() -> Option<String> {
    let dir = PathBuf::from(rustc(&["--print", "target-libdir"]).ok()?);
    let names: Vec<String> = std::fs::read_dir(&dir)
        .map(|entries| entries.filter_map(|e| Some(e.ok()?.file_name().to_string_lossy().into_owned())).collect())
        .unwrap_or_default();
    let missing = ["_rt.asan.a", "_rt.tsan.a"].into_iter().find(|end| !names.iter().any(|name| name.ends_with(end)))?;
    Some(format!(
        "no *{missing} in {}: this Rust compiler comes without the sanitizers' run times; rustup's has them",
        dir.display()
    ))
}

/// Why Miri cannot run here, and what would change that.
pub fn miri_is_missing() -> Option<String> {
    let there = dirs::cargo().args(["miri", "--version"]).output().is_ok_and(|out| out.status.success());
    (!there).then(|| {
        "Miri is not installed: it needs a nightly toolchain (`rustup toolchain install nightly --component miri,rust-src`, \
         then `cargo +nightly xtask test --only miri`)"
            .into()
    })
}

/// What Miri can run: it has no shared mappings, so nothing that needs a region.
pub fn miri() -> Result<Command> {
    let mut command = dirs::cargo();
    command.args(["miri", "test", "-p", "atropos", "--lib", "--target-dir"]);
    command.arg(dirs::target()?.join("miri"));
    command.args(["--", "control::", "config::", "report::json", "region::text", "region::seqcount"]);
    // Those that make a region.
    command.args(["--skip", "controller::", "--skip", "collect::", "--skip", "verify::"]);
    command.env("PROPTEST_CASES", "4").env("MIRIFLAGS", "-Zmiri-disable-isolation");
    Ok(command)
}
