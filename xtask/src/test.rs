//! `cargo xtask test`: every check of the project, set-up included, as numbered steps with a summary at the end.

use crate::progress::{self, clock, Ended, Step};
use crate::server::{mysql, Server};
use crate::{abi, apt, bench, dirs, instructions, sanitize};
use anyhow::{bail, Result};
use std::fs::File;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub struct TestArgs {
    /// Run this step only (may be given several times).
    #[arg(long, value_name = "STEP")]
    pub only: Vec<String>,
    /// Name the steps and what they run.
    #[arg(long)]
    pub list: bool,
}

struct Check {
    name: &'static str,
    what: &'static str,
    command: fn() -> Result<Command>,
    limit_minutes: u64,
    /// Steps without whose success this one makes no sense. All others run whatever failed before them.
    needs: &'static [&'static str],
    /// Why this machine cannot run it now, and what would change that.
    unless: fn() -> Option<String>,
}

const fn always() -> Option<String> {
    None
}

/// Compiling MySQL anew would take longer than all the rest together.
fn mysql_is_cold() -> Option<String> {
    (!mysql::is_warm()).then(|| {
        "MySQL is not built here; once `cargo xtask server build mysql --variant all` has run (an hour on 2 cores), this \
         step runs too"
            .into()
    })
}

const CHECKS: &[Check] = &[
    Check {
        name: "setup",
        what: "Debian packages and the server user",
        command: || own(&["setup"]),
        limit_minutes: 20,
        needs: &[],
        unless: always,
    },
    Check {
        name: "format",
        what: "cargo fmt changes nothing",
        command: || cargo(&["fmt", "--all", "--check", "--", "--color", "never"]),
        limit_minutes: 2,
        needs: &[],
        unless: always,
    },
    Check {
        name: "clippy",
        what: "no warning in any crate",
        command: || cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]),
        limit_minutes: 20,
        needs: &[],
        unless: always,
    },
    Check {
        name: "unit",
        what: "tests of the library, the benches and xtask",
        command: || {
            let others = ["--exclude", "atropos-ffi-tests", "--exclude", "atropos-fuzz-targets"];
            cargo(&[&["test", "--workspace", "--no-fail-fast"], &others[..]].concat())
        },
        limit_minutes: 20,
        needs: &[],
        unless: always,
    },
    Check {
        name: "corpus",
        what: "every input of the fuzz targets' corpus (`cargo xtask fuzz` looks for more, by hand)",
        command: || cargo(&["test", "-p", "atropos-fuzz-targets", "--test", "corpus", "--", "--nocapture"]),
        limit_minutes: 10,
        needs: &[],
        unless: always,
    },
    Check {
        name: "loom",
        what: "the lock-free parts under every interleaving",
        command: loom,
        limit_minutes: 20,
        needs: &[],
        unless: always,
    },
    Check {
        name: "miri",
        what: "the pure stages in Rust's interpreter, which sees undefined behaviour",
        command: sanitize::miri,
        limit_minutes: 20,
        needs: &[],
        unless: sanitize::miri_is_missing,
    },
    Check {
        name: "ffi",
        what: "C and C++ programs against the public headers, and every fault scenario once",
        command: || cargo(&["test", "-p", "atropos-ffi-tests", "--no-fail-fast"]),
        limit_minutes: 20,
        needs: &[],
        unless: always,
    },
    Check {
        name: "address",
        what: "the C programs and the library under AddressSanitizer, with its leak check",
        command: || own(&["sanitize", "address"]),
        limit_minutes: 20,
        needs: &["ffi"],
        unless: sanitize::runtime_is_missing,
    },
    Check {
        name: "thread",
        what: "the C programs and the library under ThreadSanitizer",
        command: || own(&["sanitize", "thread"]),
        limit_minutes: 20,
        needs: &["ffi"],
        unless: sanitize::runtime_is_missing,
    },
    Check {
        name: "memcheck",
        what: "the C programs under valgrind's memcheck",
        command: || own(&["sanitize", "memcheck"]),
        limit_minutes: 20,
        needs: &["ffi"],
        unless: always,
    },
    Check {
        name: "abi",
        what: "the binary interface against the committed one (abidiff); additions are fine",
        command: || own(&["abi"]),
        limit_minutes: 10,
        needs: &[],
        unless: || (std::env::consts::ARCH != "x86_64").then(|| "the committed interface is x86_64's".into()),
    },
    Check {
        name: "instructions",
        what: "instructions of the hot calls, against those recorded",
        command: || own(&["instructions"]),
        limit_minutes: 10,
        needs: &[],
        unless: instructions::nothing_recorded,
    },
    Check {
        name: "install",
        what: "installed package, used through CMake and pkg-config",
        command: install,
        limit_minutes: 10,
        needs: &[],
        unless: always,
    },
    Check {
        name: "demo",
        what: "embedded demonstration on SQLite, short",
        command: || own(&["demo", "--smoke"]),
        limit_minutes: 10,
        needs: &[],
        unless: always,
    },
    Check {
        name: "simulation",
        what: "random servers under the controller: right culprits, nobody else; short",
        command: || cargo(&["run", "--release", "-q", "-p", "atropos-sim", "--", "report", "--smoke"]),
        limit_minutes: 10,
        needs: &[],
        unless: always,
    },
    Check {
        name: "patches",
        what: "patch series of all servers complete, documented and small",
        command: || own(&["server", "lint"]),
        limit_minutes: 1,
        needs: &[],
        unless: always,
    },
    Check {
        name: "postgresql",
        what: "PostgreSQL built, vanilla and patched, with the extension",
        command: || own(&["server", "build", "postgresql", "--variant", "all"]),
        limit_minutes: 40,
        needs: &[],
        unless: always,
    },
    Check {
        name: "integration",
        what: "overloads on PostgreSQL, and 100,000 statements under random cancels",
        command: || integration(Server::Postgresql),
        limit_minutes: 20,
        needs: &["postgresql"],
        unless: always,
    },
    Check {
        name: "regress",
        what: "PostgreSQL's own tests with the module in enforce mode",
        command: || own(&["server", "check", "postgresql"]),
        limit_minutes: 30,
        needs: &["postgresql"],
        unless: always,
    },
    Check {
        name: "httpd",
        what: "httpd with PHP built, vanilla and patched, with their modules",
        command: || own(&["server", "build", "httpd", "--variant", "all"]),
        limit_minutes: 40,
        needs: &[],
        unless: always,
    },
    Check {
        name: "httpd-integration",
        what: "overloads, restarts, crashes and 1,000 cancelled scripts on httpd with PHP",
        command: || integration(Server::Httpd),
        limit_minutes: 20,
        needs: &["httpd"],
        unless: always,
    },
    Check {
        name: "mysql",
        what: "MySQL: built, vanilla and patched, with the plugin; on a cold machine what the patches touch compiled",
        command: build_mysql,
        limit_minutes: 40,
        needs: &[],
        unless: always,
    },
    Check {
        name: "mysql-integration",
        what: "overloads on MySQL, and 100,000 statements under random cancels",
        command: || integration(Server::Mysql),
        limit_minutes: 20,
        needs: &["mysql"],
        unless: mysql_is_cold,
    },
    Check {
        name: "mysql-check",
        what: "MySQL's own tests for locks, kill and metadata locks with the plugin in enforce mode",
        command: || own(&["server", "check", "mysql"]),
        limit_minutes: 60,
        needs: &["mysql"],
        unless: mysql_is_cold,
    },
];

/// All that building and testing needs; separate so that CI images can be prepared with it.
pub fn setup() -> Result<()> {
    let recipes = Server::ALL.map(|server| server.recipe().packages).concat();
    let loads = [apt::LOAD_POSTGRESQL, apt::LOAD_MYSQL, apt::LOAD_HTTPD].concat();
    let mut packages: Vec<&str> = [apt::TEST, apt::BUILD, apt::COUNT, abi::PACKAGES, &recipes, &loads].concat();
    packages.sort_unstable();
    packages.dedup();
    apt::ensure(&packages)?;
    dirs::ensure_server_user()
}

fn cargo(args: &[&str]) -> Result<Command> {
    let mut command = dirs::cargo();
    command.args(args);
    Ok(command)
}

fn own(args: &[&str]) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(args).current_dir(dirs::workspace());
    Ok(command)
}

/// A target folder of its own: the flag rebuilds everything, which must not throw the other steps' work away.
fn loom() -> Result<Command> {
    let mut command = cargo(&["test", "--release", "-p", "atropos", "--lib", "--target-dir"])?;
    let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
    command.env("RUSTFLAGS", format!("{flags} --cfg loom").trim());
    // The model needs speed, but not the last of it; this halves the build.
    command.env("CARGO_PROFILE_RELEASE_LTO", "off").env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16");
    command.arg(dirs::target()?.join("loom")).arg("loom_tests");
    Ok(command)
}

fn install() -> Result<Command> {
    let mut command = own(&["install", "--verify", "--prefix"])?;
    command.arg(dirs::target()?.join("install-test"));
    Ok(command)
}

fn integration(server: Server) -> Result<Command> {
    Ok(bench::tool("integration", &["--host".into(), server.name().into()]))
}

fn build_mysql() -> Result<Command> {
    if mysql::is_warm() {
        own(&["server", "build", "mysql", "--variant", "all"])
    } else {
        own(&["server", "build", "mysql", "--touched"])
    }
}

enum Outcome {
    Passed,
    Failed(String),
    Skipped(String),
}

#[derive(Default, Debug, PartialEq)]
struct Counts {
    passed: u64,
    failed: u64,
    /// Ignored or skipped by the tool itself, with the names it gave.
    skipped: u64,
    skipped_names: Vec<String>,
}

pub fn test(args: &TestArgs) -> Result<ExitCode> {
    for name in &args.only {
        if !CHECKS.iter().any(|check| check.name == name) {
            let names: Vec<_> = CHECKS.iter().map(|check| check.name).collect();
            bail!("--only {name}: there is no such step; the steps are {}", names.join(", "));
        }
    }
    let selected: Vec<&Check> =
        CHECKS.iter().filter(|c| args.only.is_empty() || args.only.iter().any(|n| n == c.name)).collect();
    if args.list {
        for check in selected {
            println!("{:<17} {}\n                  $ {}", check.name, check.what, progress::shown(&(check.command)()?));
        }
        return Ok(ExitCode::SUCCESS);
    }
    let logs = dirs::make(dirs::target()?.join("test-logs"))?;
    let mut done: Vec<(&Check, Outcome, Counts, Duration)> = Vec::new();
    for (i, check) in selected.iter().enumerate() {
        println!("[{}/{}] {}: {}", i + 1, selected.len(), check.name, check.what);
        let broken = check
            .needs
            .iter()
            .find(|need| done.iter().any(|(c, o, ..)| c.name == **need && !matches!(o, Outcome::Passed)));
        let started = Instant::now();
        let broken = broken.map(|need| format!("it needs the step `{need}`, which did not pass"));
        let (outcome, counts) = match broken.or_else(check.unless) {
            Some(why) => (Outcome::Skipped(why), Counts::default()),
            // A step that cannot even start has failed; the others still run.
            None => run(check, &logs.join(format!("{}.log", check.name)))
                .unwrap_or_else(|error| (Outcome::Failed(format!("{error:#}")), Counts::default())),
        };
        match &outcome {
            Outcome::Failed(why) => println!("FAILED {}: {why}\n", check.name),
            Outcome::Skipped(why) => println!("SKIPPED {}: {why}\n", check.name),
            Outcome::Passed => {}
        }
        done.push((check, outcome, counts, started.elapsed()));
    }
    Ok(summary(&done))
}

fn run(check: &Check, log: &Path) -> Result<(Outcome, Counts)> {
    File::create(log)?;
    let mut counts = Counts::default();
    let mut watch = |line: &str| {
        counts.read(line);
        let line = line.trim();
        (!line.is_empty()).then(|| line.chars().take(70).collect())
    };
    let limit = Some(Duration::from_secs(check.limit_minutes * 60));
    let ended =
        Step { label: check.name, log, expected: None, limit, watch: &mut watch }.run_unchecked((check.command)()?)?;
    let outcome = match ended {
        // A tool that counts failures and yet exits with 0 is not to be believed.
        Ended::Code(0) if counts.failed == 0 => Outcome::Passed,
        Ended::Code(0) => Outcome::Failed(format!("{} tests failed\n{}", counts.failed, progress::tail(log))),
        ended => Outcome::Failed(format!("{ended}\n{}", progress::tail(log))),
    };
    Ok((outcome, counts))
}

impl Counts {
    /// cargo's `test result: ok. 3 passed; 0 failed; 1 ignored; …` and `test x ... ignored, why`, and our own tools'
    /// `3 passed, 0 failed, 1 skipped` or `integration: 3 passed, 0 failed`.
    fn read(&mut self, line: &str) {
        let line = line.trim();
        if let Some(name) = line.strip_prefix("test ").filter(|rest| rest.contains(" ... ignored")) {
            self.skipped_names.push(name.to_string());
            return;
        }
        if let Some(name) = line.strip_prefix("SKIPPED ") {
            self.skipped_names.push(name.to_string());
            return;
        }
        let result =
            line.strip_prefix("test result: ").and_then(|rest| rest.split_once(". ")).map(|(_, counts)| counts);
        let own = line.split_once(": ").map_or(line, |(_tool, counts)| counts);
        let parts: Vec<&str> = result.unwrap_or(own).split(if result.is_some() { "; " } else { ", " }).collect();
        let number = |part: Option<&&str>, words: &[&str]| -> Option<u64> {
            let (number, word) = part?.split_once(' ')?;
            words.contains(&word).then(|| number.parse().ok())?
        };
        let skipped = match parts.len() {
            2 => Some(0),
            _ => number(parts.get(2), &["ignored", "skipped"]),
        };
        if let (Some(passed), Some(failed), Some(skipped)) =
            (number(parts.first(), &["passed"]), number(parts.get(1), &["failed"]), skipped)
        {
            self.passed += passed;
            self.failed += failed;
            self.skipped += skipped;
        }
    }
}

fn summary(done: &[(&Check, Outcome, Counts, Duration)]) -> ExitCode {
    println!("\n==== summary");
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for (check, outcome, counts, took) in done {
        let (mark, why) = match outcome {
            Outcome::Passed => ("ok", String::new()),
            Outcome::Failed(why) => ("FAILED", format!("  {}", why.lines().next().unwrap_or_default())),
            Outcome::Skipped(why) => ("SKIPPED", format!("  {why}")),
        };
        // A step without tests of its own counts as one; a failed step as at least one failure.
        let (p, f, s) = match outcome {
            Outcome::Passed if counts.passed == 0 => (1, 0, counts.skipped),
            Outcome::Passed => (counts.passed, 0, counts.skipped),
            Outcome::Failed(_) => (counts.passed, counts.failed.max(1), counts.skipped),
            Outcome::Skipped(_) => (0, 0, 1),
        };
        passed += p;
        failed += f;
        skipped += s;
        println!("{mark:<8} {:<17} {:>6}  {p} passed, {f} failed, {s} skipped{why}", check.name, clock(*took));
    }
    for (check, outcome, counts, _) in done {
        if let Outcome::Skipped(why) = outcome {
            println!("!!!! SKIPPED step {}: {why}", check.name);
        }
        for name in &counts.skipped_names {
            println!("!!!! SKIPPED in {}: {name}", check.name);
        }
    }
    // Last, because who reads only the end of a long output (a CI's, say) must see why.
    for (check, outcome, ..) in done {
        if let Outcome::Failed(why) = outcome {
            println!("!!!! FAILED step {}: {}", check.name, gist(why));
        }
    }
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    if failed > 0 {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

/// How it ended and the end of what it printed, short enough to stand in a summary.
fn gist(why: &str) -> String {
    const LINES: usize = 8;
    const WIDTH: usize = 300;
    let lines: Vec<&str> = why.lines().filter(|line| !line.trim().is_empty()).collect();
    let end = lines.len().saturating_sub(LINES).max(1);
    let shown = lines.iter().take(1).chain(lines.get(end..).unwrap_or_default());
    shown.map(|line| line.chars().take(WIDTH).collect::<String>()).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(lines: &[&str]) -> Counts {
        let mut counts = Counts::default();
        lines.iter().for_each(|line| counts.read(line));
        counts
    }

    #[test]
    fn counts_of_cargo_and_of_our_tools_add_up() {
        let found = counts(&[
            "test a::b ... ok",
            "test a::c ... ignored, takes an hour",
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.02s",
            "test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.02s",
            "213 passed, 1 failed, 4 skipped",
            "integration: 10 passed, 1 failed",
            "5 passed and much else, 3 failed",
        ]);
        assert_eq!((found.passed, found.failed, found.skipped), (238, 4, 5));
        assert_eq!(found.skipped_names, ["a::c ... ignored, takes an hour"]);
    }

    #[test]
    fn a_step_only_needs_steps_before_it() {
        for (i, check) in CHECKS.iter().enumerate() {
            for need in check.needs {
                assert!(CHECKS[..i].iter().any(|earlier| earlier.name == *need), "{} needs {need}", check.name);
            }
        }
    }

    #[test]
    fn an_unknown_step_is_refused() {
        let error = test(&TestArgs { only: vec!["nosuch".into()], list: false }).unwrap_err();
        assert!(error.to_string().contains("the steps are setup"), "{error}");
    }

    fn check(command: fn() -> Result<Command>) -> (Outcome, Counts) {
        let log = std::env::temp_dir().join(format!(
            "atropos-xtask-{}-{:?}.log",
            std::process::id(),
            std::thread::current().id()
        ));
        let found =
            run(&Check { name: "t", what: "", command, limit_minutes: 1, needs: &[], unless: always }, &log).unwrap();
        std::fs::remove_file(log).unwrap();
        found
    }

    fn sh(script: &str) -> Result<Command> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Ok(command)
    }

    #[test]
    fn the_gist_of_a_failure_is_how_it_ended_and_its_last_lines() {
        assert_eq!(gist("ended with exit code 1"), "ended with exit code 1");
        let log: String = (0..30).map(|i| format!("\n    line {i}\n")).collect();
        let found = gist(&format!("ended with exit code 1{log}"));
        assert!(found.starts_with("ended with exit code 1\n    line 22\n") && found.ends_with("line 29"), "{found}");
        assert_eq!(gist(&"x".repeat(1000)).len(), 300);
    }

    #[test]
    fn exit_code_and_counted_failures_both_fail_a_step() {
        assert!(matches!(check(|| sh("echo 2 passed, 0 failed, 0 skipped")), (Outcome::Passed, c) if c.passed == 2));
        assert!(
            matches!(check(|| sh("echo boom; exit 3")), (Outcome::Failed(why), _) if why.contains("code 3") && why.contains("boom"))
        );
        assert!(matches!(check(|| sh("echo 2 passed, 1 failed, 0 skipped")), (Outcome::Failed(_), c) if c.failed == 1));
    }
}
