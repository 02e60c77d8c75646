//! PostgreSQL's own regression tests (what `make check` runs) on the patched server with our module
//! loaded.

use super::{CheckArgs, Suite};
use crate::progress::{Ended, Step};
use crate::server::{Server, Variant};
use crate::{dirs, progress};
use anyhow::{bail, Result};
use std::path::Path;
use std::time::Duration;

/// pg_regress and pg_isolation_regress make a cluster of their own, start it, and compare each test's output.
/// They are called as `make check` calls them, but out of a copy that the server user owns, since servers do not run as root.
struct Layout {
    name: &'static str,
    driver: &'static str,
    schedule: &'static str,
    mode: &'static str,
    options: &'static [&'static str],
    /// Our own test after theirs: file of the test, its text, file of the expected output, its text.
    witness: [&'static str; 4],
    limit: Duration,
}

/// The suites pass without our module too: a test of our own, run last, proves that it was there, in its mode, and that
/// its controller was alive at the end.
const WITNESS: &str = "atropos_witness";
const WITNESS_SQL: &str = "\
CREATE EXTENSION atropos;
SHOW atropos.mode;
SELECT (s->'controller'->>'heartbeat_age_ms')::float8 < 5000 AS controller_alive FROM atropos_status() s;
";
const WITNESS_SQL_OUT: &str = "\
CREATE EXTENSION atropos;
SHOW atropos.mode;
 atropos.mode 
--------------
 enforce
(1 row)

SELECT (s->'controller'->>'heartbeat_age_ms')::float8 < 5000 AS controller_alive FROM atropos_status() s;
 controller_alive 
------------------
 t
(1 row)

";
const WITNESS_SPEC: &str = "\
setup { CREATE EXTENSION atropos; }
session s1
step mode { SHOW atropos.mode; }
step controller { SELECT (s->'controller'->>'heartbeat_age_ms')::float8 < 5000 AS alive FROM atropos_status() s; }
permutation mode controller
";
const WITNESS_SPEC_OUT: &str = "\
Parsed test spec with 1 sessions

starting permutation: mode controller
step mode: SHOW atropos.mode;
atropos.mode
------------
observe     
(1 row)

step controller: SELECT (s->'controller'->>'heartbeat_age_ms')::float8 < 5000 AS alive FROM atropos_status() s;
alive
-----
t    
(1 row)

";

impl Suite {
    fn layout(self) -> Layout {
        match self {
            Suite::Regress => Layout {
                name: "regress",
                driver: "pg_regress",
                schedule: "parallel_schedule",
                mode: "enforce",
                options: &["--dlpath=.", "--max-concurrent-tests=20"],
                witness: ["sql/atropos_witness.sql", WITNESS_SQL, "expected/atropos_witness.out", WITNESS_SQL_OUT],
                limit: Duration::from_secs(25 * 60),
            },
            Suite::Isolation => Layout {
                name: "isolation",
                driver: "pg_isolation_regress",
                schedule: "isolation_schedule",
                // These tests make sessions block each other for seconds on purpose: cancelling them would be right.
                mode: "observe",
                options: &[],
                witness: ["specs/atropos_witness.spec", WITNESS_SPEC, "expected/atropos_witness.out", WITNESS_SPEC_OUT],
                limit: Duration::from_secs(40 * 60),
            },
        }
    }
}

/// The controller takes one worker of the pool; select_parallel expects all of the default 8 for itself.
const MAX_WORKER_PROCESSES: u32 = 8 + 1;

pub fn check(args: &CheckArgs) -> Result<()> {
    let recipe = Server::Postgresql.recipe();
    let suite = args.suite.layout();
    let work = dirs::shared()?.join("check").join(suite.name);
    copy_suite(&recipe.tree(Variant::Patched)?.join("src/test").join(suite.name), &work)?;
    let decisions = work.join("decisions.jsonl");
    let config = work.join("temp.conf");
    let mut text = format!(
        "shared_preload_libraries = 'atropos'\natropos.mode = {}\natropos.decision_log = '{}'\nmax_worker_processes = {MAX_WORKER_PROCESSES}\n",
        suite.mode,
        decisions.display()
    );
    for (name, value) in super::settings(args)? {
        text += &format!("{name} = '{}'\n", value.replace('\'', "''"));
    }
    std::fs::write(&config, text)?;
    let [test, test_text, expected, expected_text] = suite.witness;
    std::fs::write(work.join(test), test_text)?;
    std::fs::write(work.join(expected), expected_text)?;

    let mut command = dirs::as_server_user(&work.join(suite.driver));
    command.current_dir(&work).env("LC_ALL", "C").args(["--temp-instance=./tmp_check", "--inputdir=."]);
    command.arg(format!("--bindir={}", recipe.prefix(Variant::Patched)?.join("bin").display()));
    command.arg(format!("--temp-config={}", config.display())).args(suite.options);
    command.arg(format!("--schedule={}", suite.schedule)).arg(WITNESS);

    let log = dirs::logs()?.join(format!("postgresql-15-{}.log", suite.name));
    std::fs::File::create(&log)?;
    let mut results = Results::default();
    let label = format!("PostgreSQL's {} tests, module in {} mode", suite.name, suite.mode);
    let mut watch = |line: &str| results.read(line);
    let expected = Some(Duration::from_secs(120));
    let ended = Step { label: &label, log: &log, expected, limit: Some(suite.limit), watch: &mut watch }
        .run_unchecked(command)?;
    report(&results, &ended, &work, &log, &decisions)
}

#[derive(Default)]
struct Results {
    passed: usize,
    failed: Vec<String>,
    /// The driver's own closing words; without them the run did not get to its end.
    verdict: Option<String>,
}

impl Results {
    /// Lines such as `test boolean  ... ok   123 ms` or, within a parallel group, `     boolean  ... FAILED   99 ms`.
    fn read(&mut self, line: &str) -> Option<String> {
        let line = line.trim();
        if let Some((name, result)) = line.split_once(" ... ") {
            let name = name.trim_start_matches("test ").trim();
            if result.trim_start().starts_with("ok") {
                self.passed += 1;
            } else {
                self.failed.push(format!("{name}: {result}"));
            }
        } else if line.contains(" tests passed") || line.contains(" tests failed") {
            self.verdict = Some(line.to_string());
        }
        let failed = if self.failed.is_empty() { String::new() } else { format!(", {} failed", self.failed.len()) };
        Some(format!("{} passed{failed}", self.passed))
    }
}

fn report(results: &Results, ended: &Ended, work: &Path, log: &Path, decisions: &Path) -> Result<()> {
    let acts = std::fs::read_to_string(decisions).map_or(0, |text| text.lines().count());
    println!(
        "Atropos recorded {acts} decisions during the run{}",
        if acts > 0 { format!(": {}", decisions.display()) } else { String::new() }
    );
    let Some(verdict) = &results.verdict else {
        let server_log = work.join("log/postmaster.log");
        bail!(
            "the tests did not get to their end: the driver {ended}\n{}\n{}",
            progress::tail(log),
            progress::tail(&server_log)
        );
    };
    println!("{verdict}");
    if *ended != Ended::Code(0) || !results.failed.is_empty() {
        println!("{} passed, {} failed, 0 skipped", results.passed, results.failed.len());
        let diffs = ["regression.diffs", "output_iso/regression.diffs"].map(|name| work.join(name));
        let diffs: Vec<String> =
            diffs.iter().filter(|path| path.is_file()).map(|path| path.display().to_string()).collect();
        bail!("failing tests:\n    {}\nthe differences: {}", results.failed.join("\n    "), diffs.join(" "));
    }
    println!("{} passed, 0 failed, 0 skipped", results.passed);
    Ok(())
}

/// A fresh copy that the server user owns.
fn copy_suite(from: &Path, work: &Path) -> Result<()> {
    if !from.is_dir() {
        bail!("{} is not there: build the server anew (cargo xtask server build postgresql)", from.display());
    }
    super::remove_work(work)?;
    super::run("cp", ["-a".as_ref(), from.as_ref(), work.as_ref()])?;
    super::give_away(work, &["-R"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_output_is_counted_and_failures_are_named() {
        let mut results = Results::default();
        for line in [
            "============== running regression test queries        ==============",
            "test tablespace                   ... ok          123 ms",
            "parallel group (2 tests):  char boolean",
            "     boolean                      ... ok           30 ms",
            "     char                         ... FAILED       21 ms",
            "test locks                        ... FAILED (test process exited with exit code 2)   99 ms",
            " 2 of 4 tests failed. ",
        ] {
            results.read(line);
        }
        assert_eq!(results.passed, 2);
        assert_eq!(results.failed.len(), 2);
        assert!(results.failed[0].starts_with("char: FAILED") && results.failed[1].starts_with("locks: FAILED (test"));
        assert_eq!(results.verdict.as_deref(), Some("2 of 4 tests failed."));
    }

    #[test]
    fn a_run_without_a_verdict_is_an_error() {
        let missing = Path::new("/nonexistent");
        let error = report(&Results::default(), &Ended::Code(0), missing, missing, missing).unwrap_err();
        assert!(error.to_string().contains("did not get to their end"), "{error}");
    }
}
