//! `cargo xtask fuzz`: the targets of fuzz/ under libFuzzer and AddressSanitizer, for a given time on the processor.

use crate::dirs;
use crate::progress::{self, Progress, Step};
use anyhow::{bail, Context, Result};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

#[derive(clap::Args)]
pub struct FuzzArgs {
    /// `config`, `region`, `decision_log` or `calls`; all of them, one after the other, if none is named.
    pub targets: Vec<String>,
    /// Processor time for each: what other programs take does not count.
    #[arg(long, default_value_t = 10, value_name = "N")]
    pub minutes: u64,
    /// Instead of fuzzing, add to fuzz/corpus the fewest of the inputs found so far that reach what it does not.
    #[arg(long)]
    pub merge: bool,
}

struct Target {
    name: &'static str,
    /// Longest input, bytes.
    max_len: u32,
    options: &'static [&'static str],
    /// Is memory that is left at the end a finding?
    leaks: bool,
}

const TARGETS: &[Target] = &[
    Target { name: "config", max_len: 1024, options: &["-dict=fuzz/config.dict"], leaks: true },
    Target { name: "region", max_len: 512, options: &[], leaks: true },
    Target { name: "decision_log", max_len: 8192, options: &["-dict=fuzz/decision_log.dict"], leaks: true },
    // What another thread may still be inside is kept mapped for good, on purpose.
    Target { name: "calls", max_len: 2048, options: &["-detect_leaks=0"], leaks: false },
];

/// An input that takes longer hangs; far over what any takes on a busy machine.
const TIMEOUT_S: u64 = 60;
/// libFuzzer is asked again after so long how much processor time it had.
const SLICE_S: u64 = 60;

pub fn run(args: &FuzzArgs) -> Result<()> {
    let chosen: Vec<&Target> = match &*args.targets {
        [] => TARGETS.iter().collect(),
        named => named.iter().map(|name| find(name)).collect::<Result<_>>()?,
    };
    let binaries = build()?;
    let mut findings = Vec::new();
    for target in chosen {
        let job = Job::new(target, &binaries)?;
        if args.merge {
            job.merge()?;
        } else if let Some(finding) = job.fuzz(Duration::from_secs(args.minutes * 60))? {
            findings.push(finding);
        }
    }
    if !findings.is_empty() {
        bail!(
            "{}\nWhen a fault is mended, its input goes to fuzz/corpus/<target>/, where `cargo xtask test` replays it.",
            findings.join("\n")
        );
    }
    Ok(())
}

fn find(name: &str) -> Result<&'static Target> {
    TARGETS.iter().find(|target| target.name == name).with_context(|| {
        let names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
        format!("there is no fuzz target {name}; there are {}", names.join(", "))
    })
}

/// Builds all targets, and cargo-fuzz first if it is missing; returns the binaries' folder.
fn build() -> Result<PathBuf> {
    let log = dirs::logs()?.join("fuzz-build.log");
    let step = |label: &str, minutes: u64, command: Command| {
        let expected = Some(Duration::from_secs(minutes * 60));
        Step { label, log: &log, expected, limit: None, watch: &mut |_| None }.run(command)
    };
    let there = dirs::cargo().args(["fuzz", "--version"]).stdout(Stdio::null()).stderr(Stdio::null()).status()?;
    if !there.success() {
        let mut install = dirs::cargo();
        install.args(["install", "cargo-fuzz", "--locked"]);
        step("install cargo-fuzz", 3, install)?;
    }
    let target_dir = dirs::target()?.join("fuzz");
    let mut build = dirs::cargo();
    build.args(["fuzz", "build", "--target-dir"]).arg(&target_dir);
    // The sanitizer's flags are unstable: this lets the stable compiler take them.
    build.env("RUSTC_BOOTSTRAP", "1").env_remove("CARGO_TARGET_DIR");
    step("build the fuzz targets", 2, build)?;
    let host = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    Ok(target_dir.join(host).join("release"))
}

struct Job<'a> {
    target: &'a Target,
    binary: PathBuf,
    log: PathBuf,
    /// Inputs found so far; a later run goes on with them.
    found: PathBuf,
    /// Those that failed.
    artifacts: PathBuf,
    /// The committed inputs, from the workspace.
    corpus: PathBuf,
}

impl<'a> Job<'a> {
    fn new(target: &'a Target, binaries: &Path) -> Result<Self> {
        let work = dirs::target()?.join("fuzz-work").join(target.name);
        let log = work.join("log");
        let job = Job {
            target,
            binary: binaries.join(target.name),
            found: dirs::make(work.join("found"))?,
            artifacts: dirs::make(work.join("artifacts"))?,
            corpus: Path::new("fuzz/corpus").join(target.name),
            log,
        };
        File::create(&job.log)?;
        Ok(job)
    }

    fn command(&self) -> Result<Command> {
        let log = File::options().append(true).open(&self.log)?;
        let mut command = Command::new(&self.binary);
        command.current_dir(dirs::workspace()).args(self.target.options).stdin(Stdio::null());
        // libFuzzer's option is about single inputs; at the program's end AddressSanitizer asks again.
        command.env("ASAN_OPTIONS", format!("detect_leaks={}", u8::from(self.target.leaks)));
        command.stdout(log.try_clone()?).stderr(log);
        Ok(command)
    }

    /// What it found, if anything.
    fn fuzz(&self, budget: Duration) -> Result<Option<String>> {
        let name = self.target.name;
        let (mut used, mut executions) = (Duration::ZERO, 0);
        let mut line = Progress::start(&format!("fuzz {name}"), None);
        while used < budget {
            let mut command = self.command()?;
            command.arg(&self.found).arg(&self.corpus).args([
                format!("-max_total_time={}", SLICE_S.min((budget - used).as_secs() + 1)),
                format!("-timeout={TIMEOUT_S}"),
                format!("-max_len={}", self.target.max_len),
                format!("-artifact_prefix={}/", self.artifacts.display()),
                // Its memory watcher is a thread: with another one about, the library frees nothing at its restarts.
                "-rss_limit_mb=0".into(),
                "-malloc_limit_mb=1024".into(),
                "-print_final_stats=1".into(),
            ]);
            let before = children_cpu();
            let status = command.status().with_context(|| format!("cannot start {}", self.binary.display()))?;
            used += children_cpu() - before;
            let text = std::fs::read(&self.log)?;
            let text = String::from_utf8_lossy(&text);
            executions =
                text.lines().filter_map(|l| l.strip_prefix("stat::number_of_executed_units:")).map(number).sum();
            if !status.success() {
                line.finish(false, "");
                let (log, artifacts) = (self.log.display(), self.artifacts.display());
                let tail = progress::tail(&self.log);
                return Ok(Some(format!("fuzz {name}: {status}; input in {artifacts}, log {log}\n{tail}")));
            }
            line.tick(&format!("{executions} inputs, {} s of processor time", used.as_secs()));
        }
        line.finish(true, &format!("{executions} inputs in {} s of processor time, no finding", used.as_secs()));
        Ok(None)
    }

    fn merge(&self) -> Result<()> {
        let count = || -> Result<usize> { Ok(std::fs::read_dir(dirs::workspace().join(&self.corpus))?.count()) };
        let before = count()?;
        let mut command = self.command()?;
        command.arg("-set_cover_merge=1").arg(format!("-timeout={TIMEOUT_S}")).arg("-rss_limit_mb=0");
        command.arg(&self.corpus).arg(&self.found);
        if !command.status()?.success() {
            bail!("merging {}: see {}", self.target.name, self.log.display());
        }
        println!("fuzz/corpus/{}: {before} inputs, now {}", self.target.name, count()?);
        Ok(())
    }
}

fn number(text: &str) -> u64 {
    text.trim().parse().unwrap_or(0)
}

/// Processor time of all children that have ended.
fn children_cpu() -> Duration {
    // SAFETY: rusage is plain data that the call fills; it cannot fail for RUSAGE_CHILDREN.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage);
        usage
    };
    let time = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
    time(usage.ru_utime) + time(usage.ru_stime)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_has_its_inputs_and_its_binary() {
        let manifest = std::fs::read_to_string(dirs::workspace().join("fuzz/Cargo.toml")).unwrap();
        assert_eq!(manifest.matches("[[bin]]").count(), TARGETS.len());
        for target in TARGETS {
            assert!(manifest.contains(&format!("name = \"{}\"", target.name)));
            assert!(dirs::workspace().join("fuzz/corpus").join(target.name).is_dir());
        }
        assert!(find("nosuch").err().unwrap().to_string().contains("config, region"));
    }
}
