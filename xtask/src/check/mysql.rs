//! MySQL's own tests (mtr) for locks, kill and metadata locks, on the patched server with our plugin in enforce mode.
//! Some of them make sessions block each other for a second on purpose, idle ones too, and then ending one is right:
//! what fails while Atropos acts must pass when it decides the same and only records it.

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
/// What one of the tests loads and, unlike others, does not do without.
const COMPONENT: &str = "component_test_backup_lock_service";
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

/// The plugin's own suite, hosts/mysql/mysql-test.
const OURS: &str = "atropos";
const LIMIT: Duration = Duration::from_secs(40 * 60);

pub fn check(args: &CheckArgs) -> Result<()> {
    apt::ensure(PACKAGES)?;
    mysql::build_programs(&[PROGRAMS, &[COMPONENT]].concat())?;
    let recipe = Server::Mysql.recipe();
    let tree = recipe.tree(Variant::Patched)?;
    let work = dirs::shared()?.join("check/mysql");
    lay_out(&tree, &recipe.prefix(Variant::Patched)?, &work)?;
    let mut results = Results::default();
    let mut tests = if args.tests.is_empty() { tests_on_topic(&tree)? } else { args.tests.clone() };
    if args.tests.is_empty() {
        tests.retain(|test| !results.needs_more(test));
    }

    let label = format!("{} of MySQL's own tests, plugin in enforce mode", tests.len());
    let decisions = work.join("var/decisions.jsonl");
    let options = |mode: &str| -> Result<Vec<String>> {
        let ours = [
            "plugin-load-add=atropos.so".to_string(),
            format!("loose-atropos-mode={mode}"),
            format!("loose-atropos-decision-log={}", decisions.display()),
        ];
        let given = super::settings(args)?.into_iter().map(|(name, value)| format!("loose-{name}={value}"));
        Ok(ours.into_iter().chain(given).map(|option| format!("--mysqld=--{option}")).collect())
    };
    let mut theirs = options("enforce")?;
    theirs.extend(tests);
    theirs.push(WITNESS.into());
    let log = dirs::logs()?.join("mysql-9.7-mtr.log");
    std::fs::File::create(&log)?;
    let ended = mtr(&work, &label, &theirs, &log, &mut results)?;
    let acts = std::fs::read_to_string(&decisions).map_or(0, |text| text.lines().count());
    println!(
        "Atropos recorded {acts} decisions during the run{}",
        if acts > 0 { format!(": {}", decisions.display()) } else { String::new() }
    );
    results.close(&ended, &log, true)?;
    let failed = results.take_failed();
    if acts > 0 && !failed.is_empty() {
        println!("once more in observe mode, for what Atropos may have ended: {}", failed.join(" "));
        let again: Vec<String> = options("observe")?.into_iter().chain(failed).collect();
        let ended = mtr(&work, "those that failed, plugin in observe mode", &again, &log, &mut results)?;
        results.close(&ended, &log, false)?;
    } else {
        results.failed.extend(failed);
    }
    if args.tests.is_empty() {
        let ended = mtr(&work, "the plugin's tests", &[format!("--suite={OURS}")], &log, &mut results)?;
        results.close(&ended, &log, false)?;
    }
    results.report(&log)
}

/// One run of the driver; the tests' outcomes are added to `results`.
fn mtr(work: &Path, label: &str, args: &[String], log: &Path, results: &mut Results) -> Result<Ended> {
    let mut command = dirs::as_server_user(Path::new("perl"));
    command.current_dir(work.join("mysql-test")).env("LC_ALL", "C").env("ATROPOS_PLUGIN_DIR", work.join("lib/plugin"));
    command.args(["mysql-test-run.pl", "--force", "--max-test-fail=0", "--retry=0", "--suite-timeout=40"]);
    command.arg(format!("--vardir={}", work.join("var/mtr").display()));
    command.arg(format!("--parallel={}", std::thread::available_parallelism().map_or(2, usize::from))).args(args);
    let expected = Some(Duration::from_secs(300));
    Step { label, log, expected, limit: Some(LIMIT), watch: &mut |line| results.read(line) }.run_unchecked(command)
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
    link_or_copy(&bld.join("plugin_output_directory").join(format!("{COMPONENT}.so")), &work.join("lib/plugin"))?;
    link_or_copy(&bld.join("scripts/mysql_fix_privilege_tables.sql"), &work.join("share"))?;
    super::run(
        "cp",
        ["-r".as_ref(), dirs::workspace().join("hosts/mysql/mysql-test").as_ref(), suites.join(OURS).as_ref()],
    )?;
    let witness = suites.join("atropos_witness");
    for (name, text) in [("t/witness.test", WITNESS_TEST), ("r/witness.result", WITNESS_RESULT)] {
        let path = witness.join(name);
        dirs::make(path.parent().expect("has a parent").to_path_buf())?;
        std::fs::write(path, text)?;
    }
    // The files below are links to ours: the folders alone are given away. In bin/ the driver describes components.
    for folder in ["var", "bin", "lib/plugin"] {
        super::give_away(&dirs::make(work.join(folder))?, &[])?;
    }
    Ok(())
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

/// Tests that need what this configuration leaves out, and do not look whether it is there.
const NOT_BUILT: &[(&str, &str)] =
    &[("main.archive_skip_lock_nowait", "the ARCHIVE engine"), ("main.skip_grants_flush", "the X plugin's options")];

impl Results {
    /// Does the test need what is not built? Then it is counted as skipped.
    fn needs_more(&mut self, test: &str) -> bool {
        let missing = NOT_BUILT.iter().find(|(name, _)| *name == test);
        if let Some((_, what)) = missing {
            *self.skipped.entry(format!("needs {what}, which this build leaves out")).or_default() += 1;
        }
        missing.is_some()
    }

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
            "[ fail ]" => self.failed.push(name.to_string()),
            _ => *self.skipped.entry(detail.trim().to_string()).or_default() += 1,
        }
        let failed = if self.failed.is_empty() { String::new() } else { format!(", {} failed", self.failed.len()) };
        Some(format!("{} passed{failed}", self.passed))
    }

    /// After a run of the driver: it must have come to its end, and its exit code must agree with what was read.
    fn close(&mut self, ended: &Ended, log: &Path, witnessed: bool) -> Result<()> {
        let Some(verdict) = self.verdict.take() else {
            bail!("the tests did not get to their end: the driver {ended}\n{}", progress::tail(log));
        };
        println!("{verdict}");
        if witnessed && !self.witnessed && !self.failed.iter().any(|name| name.starts_with(WITNESS)) {
            self.failed.push(format!("{WITNESS}: it did not run, so nothing shows that the plugin was there"));
        }
        if *ended != Ended::Code(0) && self.failed.is_empty() {
            self.failed.push(format!("the driver {ended}"));
        }
        Ok(())
    }

    /// MySQL's own tests that failed; they no longer count as such.
    fn take_failed(&mut self) -> Vec<String> {
        let (theirs, other) = std::mem::take(&mut self.failed)
            .into_iter()
            .partition(|name| !name.starts_with(WITNESS) && !name.contains(' '));
        self.failed = other;
        theirs
    }

    fn report(&self, log: &Path) -> Result<()> {
        for (why, count) in &self.skipped {
            println!("SKIPPED {count} of MySQL's own tests: {why}");
        }
        let skipped: usize = self.skipped.values().sum();
        println!("{} passed, {} failed, {skipped} skipped", self.passed, self.failed.len());
        if !self.failed.is_empty() {
            bail!("failing tests:\n    {}\nthe whole log is {}", self.failed.join("\n    "), log.display());
        }
        Ok(())
    }
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
        assert_eq!(results.take_failed(), ["main.kill"]);
        assert_eq!(results.skipped.get("Need debug version"), Some(&2));
        assert_eq!(results.skipped.values().sum::<usize>(), 3);
        assert!(results.verdict.unwrap().starts_with("Completed: Failed 1/4"));
    }

    fn finished() -> Results {
        Results { passed: 3, verdict: Some("Completed: all".into()), ..Results::default() }
    }

    #[test]
    fn a_run_without_our_witness_fails() {
        let mut results = finished();
        results.close(&Ended::Code(0), Path::new("log"), true).unwrap();
        assert!(results.report(Path::new("log")).unwrap_err().to_string().contains("did not run"));
        let mut results = Results { witnessed: true, ..finished() };
        results.close(&Ended::Code(0), Path::new("log"), true).unwrap();
        results.report(Path::new("log")).unwrap();
    }

    #[test]
    fn a_driver_that_fails_without_a_failing_test_fails() {
        let mut results = finished();
        results.close(&Ended::Code(1), Path::new("log"), false).unwrap();
        assert!(results.take_failed().is_empty());
        assert!(results.report(Path::new("log")).is_err());
    }

    #[test]
    fn a_run_without_a_verdict_is_an_error() {
        let error = Results::default().close(&Ended::Code(0), Path::new("/nonexistent"), true).unwrap_err();
        assert!(error.to_string().contains("did not get to their end"), "{error}");
    }
}
