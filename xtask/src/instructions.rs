//! `cargo xtask instructions`: how many instructions the hot calls execute, counted by callgrind and compared with what is
//! recorded. Unlike a time, a count is the same on a busy machine: this is the gate.
//! SPDX-License-Identifier: MIT OR Apache-2.0

use crate::{apt, dirs};
use anyhow::{bail, Context, Result};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(clap::Args)]
pub struct InstructionsArgs {
    /// Take what is counted now for what is expected, and write it down.
    #[arg(long)]
    pub accept: bool,
}

/// A count may differ by this share and so many instructions: another libc, another patch level of a compiler.
const TOLERANCE: f64 = 0.04;
const SLACK: f64 = 1.0;
/// With other compilers than the recorded ones only a blunder can be told from their choices.
const OTHER_COMPILERS: f64 = 0.30;

/// Prefix of the names, and the configuration. (No steps of the controller: slowed down so much, it meets a gap in its clock
/// each time, and has more to do than it ever has.)
const RUNS: [(&str, &str); 3] = [
    ("off", "mode = off"),
    ("coarse", "mode = observe\nclock = coarse"),
    ("precise", "mode = observe\nclock = precise"),
];

/// Instructions per call, by name.
type Counts = BTreeMap<String, f64>;

pub fn run(args: &InstructionsArgs) -> Result<()> {
    apt::ensure(apt::COUNT)?;
    let program = build()?;
    let mut counts = Counts::new();
    for (prefix, config) in RUNS {
        if prefix == "precise" && !kernel_uses_tsc() {
            println!("SKIPPED precise: the kernel does not use the time stamp counter here, so other code runs");
            continue;
        }
        let found = least(&program, config).with_context(|| format!("counting {prefix}"))?;
        counts.extend(found.into_iter().map(|(name, calls)| (format!("{prefix}/{name}"), calls)));
    }
    let compilers = compilers()?;
    let file = file();
    if args.accept {
        std::fs::write(&file, written(&counts, &compilers)).with_context(|| format!("write {}", file.display()))?;
        println!("{} counts written to {}", counts.len(), file.display());
        return Ok(());
    }
    let text = std::fs::read_to_string(&file).with_context(|| {
        format!("read {}: it is committed, `cargo xtask instructions --accept` makes it anew", file.display())
    })?;
    let expected = expected(&text).with_context(|| format!("{}: a line is not `name number`", file.display()))?;
    let same = text.lines().any(|l| l.strip_prefix("# compilers: ").is_some_and(|c| c == compilers));
    if !same {
        println!("other compilers than those recorded ({compilers}): a tolerance of {:.0}%", OTHER_COMPILERS * 100.0);
    }
    let problems = compare(&counts, &expected, if same { TOLERANCE } else { OTHER_COMPILERS });
    for (name, now) in &counts {
        println!("{name:<36} {now:>12.1}  expected {}", expected.get(name).map_or("?".into(), |e| format!("{e:.1}")));
    }
    println!("{} passed, {} failed, 0 skipped", counts.len() - problems.len().min(counts.len()), problems.len());
    if !problems.is_empty() {
        bail!(
            "instructions per call:\n    {}\nIf the change is meant: `cargo xtask instructions --accept`, and commit {}",
            problems.join("\n    "),
            file.display()
        );
    }
    Ok(())
}

fn file() -> PathBuf {
    dirs::workspace().join("bench/instructions.txt")
}

/// Why there is nothing to compare with.
pub fn nothing_recorded() -> Option<String> {
    (!file().exists())
        .then(|| "bench/instructions.txt is not there; `cargo xtask instructions --accept` counts and writes it".into())
}

/// The C program, linked to the shared library in its release profile.
fn build() -> Result<PathBuf> {
    let target = dirs::target()?;
    let mut cargo = dirs::cargo();
    done(cargo.args(["build", "--quiet", "--release", "--package", "atropos", "--lib"]))?;
    let dir = dirs::make(target.join("instructions"))?;
    for name in ["libatropos.so", "libatropos.so.0"] {
        let link = dir.join(name);
        // Absent the first time; anything worse shows in the next line.
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(target.join("release/libatropos.so"), &link)
            .with_context(|| format!("link {}", link.display()))?;
    }
    let (sources, include) = (dirs::workspace().join("bench/benches"), dirs::workspace().join("include"));
    let mut objects = Vec::new();
    for (compiler, standard, source) in
        [("cc", "-std=c11", "host.c"), ("cc", "-std=c11", "count.c"), ("c++", "-std=c++17", "peer.cpp")]
    {
        let object = dir.join(source).with_extension("o");
        let mut cc = Command::new(compiler);
        cc.args([standard, "-D_GNU_SOURCE", "-O2", "-g", "-pthread", "-Wall", "-Wextra", "-Werror", "-c", "-I"]);
        done(cc.arg(&include).arg(sources.join(source)).arg("-o").arg(&object))?;
        objects.push(object);
    }
    let program = dir.join("count");
    let mut link = Command::new("c++");
    link.args(&objects).arg("-pthread").arg("-L").arg(&dir).arg("-latropos").arg("-o").arg(&program);
    done(link.arg(format!("-Wl,-rpath,{}", dir.display())))?;
    Ok(program)
}

fn done(command: &mut Command) -> Result<String> {
    let out = command.output().with_context(|| format!("cannot start {:?}", command.get_program()))?;
    if !out.status.success() {
        bail!("{command:?} failed ({}):\n{}", out.status, String::from_utf8_lossy(&out.stderr));
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Time passes while it counts, the more the slower the machine: a clock may tick, and what it ticks for is counted. So each
/// call counts as what it took at least in so many runs.
const RUNS_OF_EACH: u32 = 3;

fn least(program: &Path, config: &str) -> Result<Counts> {
    let mut least = count(program, config)?;
    for _ in 1..RUNS_OF_EACH {
        for (name, calls) in count(program, config)? {
            least.entry(name).and_modify(|l| *l = l.min(calls)).or_insert(calls);
        }
    }
    Ok(least)
}

/// Runs the program under callgrind: instructions per call.
fn count(program: &Path, config: &str) -> Result<Counts> {
    let dir = dirs::make(program.with_extension("out"))?;
    std::fs::remove_dir_all(&dir).and_then(|()| std::fs::create_dir(&dir)).context("an empty folder for callgrind")?;
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--collect-atstart=no", "--quiet"]);
    valgrind.arg(format!("--callgrind-out-file={}", dir.join("dump").display()));
    valgrind.arg(program).arg(config);
    let said = done(&mut valgrind)?;
    let names: Vec<(&str, f64)> = said
        .lines()
        .map(|line| line.split_once(' ').and_then(|(name, calls)| Some((name, calls.parse().ok()?))))
        .collect::<Option<_>>()
        .with_context(|| format!("count.c said {said:?}"))?;
    let mut found = Counts::new();
    for (i, (name, calls)) in names.iter().enumerate() {
        let path = dir.join(format!("dump.{}", i + 1));
        let dump = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        let total = total(&dump, name).with_context(|| format!("{} is not the dump of {name}", path.display()))?;
        found.insert(name.to_string(), total / calls);
    }
    Ok(found)
}

/// Instructions in the dump that was made under `name`.
fn total(dump: &str, name: &str) -> Option<f64> {
    let field = |key: &str| dump.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
    field("desc: Trigger:").filter(|trigger| trigger.ends_with(name))?;
    field("totals:").or(field("summary:"))?.parse().ok()
}

/// What `Clock::calibrate` asks, too.
fn kernel_uses_tsc() -> bool {
    std::fs::read_to_string("/sys/devices/system/clocksource/clocksource0/current_clocksource")
        .is_ok_and(|source| source.trim() == "tsc")
}

fn compilers() -> Result<String> {
    let first = |command: &str| -> Result<String> {
        Ok(done(Command::new(command).arg("--version"))?.lines().next().unwrap_or_default().to_string())
    };
    Ok(format!("{}; {}", first("rustc")?, first("cc")?))
}

fn written(counts: &Counts, compilers: &str) -> String {
    let mut text = format!(
        "# Instructions per call, counted by callgrind.\n\
         # `cargo xtask instructions` compares, with --accept it writes this file.\n# compilers: {compilers}\n"
    );
    for (name, count) in counts {
        let _ = writeln!(text, "{name} {count:.2}");
    }
    text
}

fn expected(text: &str) -> Option<Counts> {
    let lines = text.lines().filter(|l| !l.starts_with('#') && !l.is_empty());
    lines.map(|l| l.split_once(' ').and_then(|(name, n)| Some((name.to_string(), n.parse().ok()?)))).collect()
}

/// What differs, in words. A count that fell is recorded anew, too: else it could grow back unseen.
fn compare(counts: &Counts, expected: &Counts, tolerance: f64) -> Vec<String> {
    let mut problems = Vec::new();
    for (name, &now) in counts {
        match expected.get(name) {
            None => problems.push(format!("{name}: {now:.1}, nothing is recorded")),
            Some(&before) if (now - before).abs() > before * tolerance + SLACK => {
                problems.push(format!("{name}: {now:.1} instead of {before:.1} ({:+.1})", now - before))
            }
            Some(_) => {}
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(all: &[(&str, f64)]) -> Counts {
        all.iter().map(|(name, n)| (name.to_string(), *n)).collect()
    }

    #[test]
    fn what_grew_shrank_or_is_new_is_told() {
        let expected = counts(&[("a", 30.0), ("b", 30.0), ("c", 30.0), ("d", 1000.0), ("gone", 1.0)]);
        let now = counts(&[("a", 32.0), ("b", 33.0), ("c", 27.0), ("d", 1030.0), ("e", 5.0)]);
        let problems = compare(&now, &expected, TOLERANCE);
        let names: Vec<&str> = problems.iter().map(|p| p.split(':').next().unwrap()).collect();
        assert_eq!(names, ["b", "c", "e"], "{problems:?}");
        assert!(problems[0].contains("33.0 instead of 30.0 (+3.0)"), "{problems:?}");
    }

    #[test]
    fn the_file_reads_back() {
        let now = counts(&[("coarse/get_free", 41.25), ("tick/calm", 98_765.5)]);
        let text = written(&now, "rustc 1; cc 2");
        assert_eq!(expected(&text).unwrap(), now);
        assert!(text.contains("# compilers: rustc 1; cc 2\n"));
        assert!(expected("coarse/get_free many").is_none());
    }

    #[test]
    fn a_dump_belongs_to_its_name() {
        let dump = "version: 1\ndesc: Trigger: Client Request: get_free\nevents: Ir\n\ntotals: 41000\n";
        assert_eq!(total(dump, "get_free"), Some(41000.0));
        assert_eq!(total(dump, "request"), None);
        assert_eq!(total("desc: Trigger: Client Request: x\n", "x"), None);
    }
}
