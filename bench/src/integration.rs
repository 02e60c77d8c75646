//! Fast assertions on a real server, for the test command: each says what must hold and what was seen.
use crate::cases::{self, Case, Expect, Timing};
use crate::host::Host;
use crate::measure::Part;
use crate::record::{Mode, Record};
use crate::runner::{run_once, summary, Options};
use anyhow::{bail, ensure, Result};
use std::time::Instant;

/// What must hold, and the check: it gets the server's installation and a seed, and says what was seen.
pub type Check<T> = (&'static str, fn(&T, u64) -> Result<String>);

/// Runs all checks (or those whose name contains `only`); an error when one failed.
pub fn run<T>(checks: &[Check<T>], target: &T, seed: u64, only: Option<&str>) -> Result<()> {
    let mut failed = 0;
    let chosen: Vec<_> = checks.iter().filter(|(name, _)| only.is_none_or(|o| name.contains(o))).collect();
    ensure!(!chosen.is_empty(), "no check's name contains {only:?}");
    for (i, (name, check)) in chosen.iter().enumerate() {
        let began = Instant::now();
        let result = check(target, seed);
        let took = began.elapsed().as_secs_f64();
        match result {
            Ok(seen) => println!("{:2}/{} ok      {name} ({took:.1} s): {seen}", i + 1, chosen.len()),
            Err(e) => {
                failed += 1;
                println!("{:2}/{} FAILED  {name} ({took:.1} s): {e:#}", i + 1, chosen.len());
            }
        }
    }
    println!("integration: {} passed, {failed} failed", chosen.len() - failed);
    if failed > 0 {
        bail!("{failed} of {} integration checks failed", chosen.len());
    }
    Ok(())
}

/// A shortened run of a case. Speed is not judged here, and neither is the length of the stall: who is cancelled is.
pub fn short_case(host: &dyn Host, id: &str, mode: Mode, seed: u64, after_s: f64) -> Result<Record> {
    let case = cases::find(id, Some(host.id()))?;
    let mut short = Case { timing: Timing { warmup_s: 6.0, quiet_s: 2.0, after_s }, ..*case };
    if let Expect::Culprits { stall_s, .. } = &mut short.expect {
        *stall_s = stall_s.min(after_s - 3.0);
    }
    let options = Options { seed, duration_s: None, set: vec![] };
    let (record, _): (Record, Part) = run_once(host, &short, mode, 1, None, &options)?;
    ensure!(record.verdict == "pass", "{}", summary(&record));
    Ok(record)
}

/// What a run of a case showed, in words.
pub fn told(record: Record) -> String {
    let ms = |v: Option<f64>| v.map_or("never".into(), |v| format!("{v:.0} ms"));
    format!(
        "decided {} after the onset, the culprit saw it after {}: {}",
        ms(record.first_cancel_ms.or(record.first_would_cancel_ms)),
        ms(record.culprit_saw_ms),
        record.culprit_error.unwrap_or_else(|| "no error".into())
    )
}
