//! MySQL's own tests (mtr) for locks, kill and metadata locks, on the patched server with our plugin in enforce mode.

use super::CheckArgs;
use crate::progress::{Ended, Step};
use crate::server::{mysql, Server, Variant};
use crate::{apt, dirs, progress};
use anyhow::{bail, Context, Result};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;
use std::time::Duration;

/// A test belongs to the list if one of these is a word of its name.
const TOPICS: &[&str] = &["lock", "locks", "locking", "kill", "mdl", "metadata", "flush", "deadlock", "deadlocks"];
const SUITES: &[&str] = &["main", "innodb"];
/// The driver insists on these, beside the programs that the server was built with.
const PROGRAMS: &[&str] = &[
    "ibd2sdi",
    "innochecksum",
    "my_print_defaults",
    "myisamchk",
    "myisampack",
    "mysql_config_editor",
    "mysql_keyring_encryption_test",
    "mysql_migrate_keyring",
    "mysql_tzinfo_to_sql",
    "mysqlbinlog",
    "mysqlcheck",
    "mysqlimport",
    "mysqlshow",
    "mysqlslap",
    "mysqltest",
    "mysqltest_safe_process",
    "perror",
];
/// What the driver is written in, and what some of its tests call.
const PACKAGES: &[&str] = &["perl", "libjson-perl", "openssl"];

/// MySQL's tests pass without our plugin too: a suite of our own, run with them, proves that it was there, in its
/// mode, and that its controller was alive.
const WITNESS: &str = "atropos_witness.witness";
const WITNESS_TEST: &str = "\
SELECT @@GLOBAL.atropos_mode;
let $wait_condition = SELECT VARIABLE_VALUE = 'ON' FROM performance_schema.global_status
  WHERE VARIABLE_NAME = 'Atropos_controller_alive';
--source include/wait_condition.inc
SELECT VARIABLE_VALUE FROM performance_schema.global_status WHERE VARIABLE_NAME = 'Atropos_controller_alive';
";
const WITNESS_RESULT: &str = "\
SELECT @@GLOBAL.atropos_mode;
@@GLOBAL.atropos_mode
enforce
SELECT VARIABLE_VALUE FROM performance_schema.global_status WHERE VARIABLE_NAME = 'Atropos_controller_alive';
VARIABLE_VALUE
ON
";

const LIMIT: Duration = Duration::from_secs(40 * 60);

pub fn check(args: &CheckArgs) -> Result<()> {
    apt::ensure(PACKAGES)?;
    mysql::build_programs(PROGRAMS)?;
    let recipe = Server::Mysql.recipe();
    let tree = recipe.tree(Variant::Patched)?;
    let work = dirs::shared()?.join("check/mysql");
    lay_out(&tree, &recipe.prefix(Variant::Patched)?, &work)?;
    let tests = if args.tests.is_empty() { tests_on_topic(&tree)? } else { args.tests.clone() };

    let decisions = work.join("var/decisions.jsonl");
    let mut command = dirs::as_server_user(Path::new("perl"));
    command.current_dir(work.join("mysql-test")).env("LC_ALL", "C").arg("mysql-test-run.pl");
    command.args(["--force", "--max-test-fail=0", "--retry=0", "--suite-timeout=40", "--report-unstable-tests"]);
    command.arg(format!("--vardir={}", work.join("var/mtr").display()));
    command.arg(format!("--parallel={}", std::thread::available_parallelism().map_or(2, usize::from)));
    command.args(["--mysqld=--plugin-load-add=atropos.so", "--mysqld=--loose-atropos_mode=enforce"]);
    command.arg(format!("--mysqld=--loose-atropos_decision_log={}", decisions.display()));
    for (name, value) in super::settings(args)? {
        command.arg(format!("--mysqld=--loose-{name}={value}"));
    }
    command.args(&tests).arg(WITNESS);

    let log = dirs::logs()?.join("mysql-9.7-mtr.log");
    std::fs::File::create(&log)?;
    let mut results = Results::default();
    let label = format!("{} of MySQL's own tests, plugin in enforce mode", tests.len());
    let mut watch = |line: &str| results.read(line);
    let expected = Some(Duration::from_secs(480));
    let ended =
        Step { label: &label, log: &log, expected, limit: Some(LIMIT), watch: &mut watch }.run_unchecked(command)?;
    report(&results, &ended, &log, &decisions)
}

/// The suites and the programs as an installation has them, where the server user can read them. Links, where the
/// file system allows: the suites' data are large.
fn lay_out(tree: &Path, prefix: &Path, work: &Path) -> Result<()> {
    super::remove_work(work)?;
    let suites = dirs::make(work.join("mysql-test/suite"))?;
    let from = tree.join("mysql-test");
    if !from.is_dir() {
        bail!("{} is not there: build the server anew (cargo xtask server build mysql)", from.display());
    }
    for entry in std::fs::read_dir(&from)? {
        let path = entry?.path();
        if path.file_name() != Some(OsStr::new("suite")) {
            link_or_copy(&path, &work.join("mysql-test"))?;
        }
    }
    // Tests include files of other suites.
    for suite in SUITES.iter().filter(|suite| **suite != "main").chain(&["binlog", "rpl", "sys_vars"]) {
        link_or_copy(&from.join("suite").join(suite), &suites)?;
    }
    link_or_copy(&prefix.join("share"), work)?;
    link_or_copy(&prefix.join("lib"), work)?;
    link_or_copy(&prefix.join("bin"), work)?;
    let bld = mysql::build_folder(tree);
    for program in PROGRAMS {
        link_or_copy(&bld.join("runtime_output_directory").join(program), &work.join("bin"))?;
    }
    link_or_copy(&bld.join("scripts/mysql_fix_privilege_tables.sql"), &work.join("share"))?;
    let witness = suites.join("atropos_witness");
    for (name, text) in [("t/witness.test", WITNESS_TEST), ("r/witness.result", WITNESS_RESULT)] {
        let path = witness.join(name);
        dirs::make(path.parent().expect("has a parent").to_path_buf())?;
        std::fs::write(path, text)?;
    }
    super::give_away(&dirs::make(work.join("var"))?)
}

fn link_or_copy(from: &Path, into: &Path) -> Result<()> {
    let linked = super::run("cp", ["-al".as_ref(), from.as_ref(), into.as_ref()]);
    linked.or_else(|_| super::run("cp", ["-a".as_ref(), from.as_ref(), into.as_ref()]))
}

/// `suite.test` of all tests on our topics that these sources have.
fn tests_on_topic(tree: &Path) -> Result<Vec<String>> {
    let mut tests = Vec::new();
    for suite in SUITES {
        let dir = match *suite {
            "main" => tree.join("mysql-test/t"),
            suite => tree.join("mysql-test/suite").join(suite).join("t"),
        };
        for entry in std::fs::read_dir(&dir).with_context(|| format!("cannot list {}", dir.display()))? {
            let name = entry?.file_name();
            let test = name.to_str().and_then(|name| name.strip_suffix(".test"));
            tests.extend(test.filter(|test| on_topic(test)).map(|test| format!("{suite}.{test}")));
        }
    }
    tests.sort();
    Ok(tests)
}

fn on_topic(test: &str) -> bool {
    test.split(['_', '-']).any(|word| TOPICS.contains(&word))
}

#[derive(Default)]
struct Results {
    passed: usize,
    witnessed: bool,
    failed: Vec<String>,
    /// Why, and how many.
    skipped: BTreeMap<String, usize>,
    /// The driver's own closing words; without them the run did not get to its end.
    verdict: Option<String>,
}

impl Results {
    /// Lines such as `[ 12%] main.lock  w1  [ pass ]   1234`, `main.kill 'x'  [ skipped ]  Need debug version`.
    fn read(&mut self, line: &str) -> Option<String> {
        let line = line.trim();
        if line.starts_with("Completed:") {
            self.verdict = Some(line.to_string());
        }
        let rest = match line.strip_prefix('[').and_then(|rest| rest.split_once("%]")) {
            Some((_, rest)) => rest.trim_start(),
            None => line,
        };
        let mark =
            ["[ pass ]", "[ fail ]", "[ skipped ]", "[ disabled ]"].into_iter().find(|mark| rest.contains(mark))?;
        let (name, detail) = rest.split_once(mark)?;
        let name = name.split_whitespace().next().filter(|name| name.contains('.') || *name == "shutdown_report")?;
        match mark {
            "[ pass ]" if name == WITNESS => self.witnessed = true,
            "[ pass ]" if name.contains('.') => self.passed += 1,
            "[ pass ]" => {}
            "[ fail ]" => self.failed.push(format!("{name} {}", detail.trim()).trim().to_string()),
            _ => *self.skipped.entry(detail.trim().to_string()).or_default() += 1,
        }
        let failed = if self.failed.is_empty() { String::new() } else { format!(", {} failed", self.failed.len()) };
        Some(format!("{} passed{failed}", self.passed))
    }
}

fn report(results: &Results, ended: &Ended, log: &Path, decisions: &Path) -> Result<()> {
    let acts = std::fs::read_to_string(decisions).map_or(0, |text| text.lines().count());
    println!(
        "Atropos recorded {acts} decisions during the run{}",
        if acts > 0 { format!(": {}", decisions.display()) } else { String::new() }
    );
    let Some(verdict) = &results.verdict else {
        bail!("the tests did not get to their end: the driver {ended}\n{}", progress::tail(log));
    };
    println!("{verdict}");
    let skipped: usize = results.skipped.values().sum();
    for (why, count) in &results.skipped {
        println!("SKIPPED {count} of MySQL's own tests: {why}");
    }
    let mut failed = results.failed.clone();
    if !results.witnessed && !failed.iter().any(|name| name.starts_with(WITNESS)) {
        failed.push(format!("{WITNESS}: it did not run, so nothing shows that the plugin was there"));
    }
    println!("{} passed, {} failed, {skipped} skipped", results.passed, failed.len());
    if *ended != Ended::Code(0) || !failed.is_empty() {
        bail!("the driver {ended}; failing tests:\n    {}\n{}", failed.join("\n    "), log.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topics_are_words_of_names() {
        for name in ["lock", "flush_read_lock_kill", "innodb-lock", "sp-lock", "trigger_mdl", "foreign_key_locks_self"]
        {
            assert!(on_topic(name), "{name}");
        }
        for name in ["blocks", "clock_skew", "skilled", "log_options_cmdline", "block_killer"] {
            assert!(!on_topic(name), "{name}");
        }
    }

    #[test]
    fn driver_output_is_counted_and_failures_are_named() {
        let mut results = Results::default();
        for line in [
            "[  3%] main.lock_multi                           w2  [ pass ]   2041",
            "[  4%] main.kill                                 w1  [ fail ]",
            "[  5%] innodb.deadlock_detect                    w1  [ skipped ]  Need debug version",
            "innodb.lock_contention                           [ disabled ]   Bug#1",
            "[  6%] innodb.lock_sys_resize                    w1  [ skipped ]  Need debug version",
            "[ 99%] atropos_witness.witness                   w1  [ pass ]     12",
            "[100%] shutdown_report                           [ pass ]",
            "a line with [ pass ] in it",
            "Completed: Failed 1/4 tests, 75.00% were successful.",
        ] {
            results.read(line);
        }
        assert_eq!((results.passed, results.witnessed), (1, true));
        assert_eq!(results.failed, ["main.kill"]);
        assert_eq!(results.skipped.get("Need debug version"), Some(&2));
        assert_eq!(results.skipped.values().sum::<usize>(), 3);
        assert!(results.verdict.unwrap().starts_with("Completed: Failed 1/4"));
    }

    #[test]
    fn a_run_without_our_witness_fails() {
        let results = Results { passed: 3, verdict: Some("Completed: all".into()), ..Results::default() };
        let error = report(&results, &Ended::Code(0), Path::new("log"), Path::new("/nonexistent")).unwrap_err();
        assert!(error.to_string().contains("did not run"), "{error}");
    }

    #[test]
    fn a_run_without_a_verdict_is_an_error() {
        let missing = Path::new("/nonexistent");
        let error = report(&Results::default(), &Ended::Code(0), missing, missing).unwrap_err();
        assert!(error.to_string().contains("did not get to their end"), "{error}");
    }
}
