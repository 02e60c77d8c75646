//! How many instructions a request costs httpd, with and without Atropos, counted by callgrind. Unlike a time, a count is the
//! same on a busy machine, so it resolves what throughput cannot.
//!
//! Counted are the instructions outside the kernel, of one process that serves one connection. What the server does to
//! start and to end drops out: the same is counted with fewer requests and taken off. The controller's thread is left
//! out, for its steps go by the clock, which under callgrind has fifty times as many ticks to a request.
use super::client::{get, Connection};
use super::install::Install;
use super::overhead::Options;
use super::server::{Config, Httpd, Mpm, STATIC_PAGE};
use crate::measure;
use crate::record::{markdown, Mode};
use anyhow::{anyhow, ensure, Context, Result};
use serde::Serialize;
use std::time::{Duration, Instant};

/// Requests of the two runs whose difference is taken.
const FEW: u32 = 200;
const MANY: u32 = 1200;
const SLOTS: u32 = 4;
/// What only the controller's thread runs.
const CONTROLLER: &str = "Controller::tick";

#[derive(Clone, Debug, Serialize)]
pub struct Count {
    pub mpm: Mpm,
    pub round: u32,
    pub vanilla: f64,
    pub patched: f64,
}

pub fn run(vanilla: &Install, patched: &Install, o: &Options, mut each: impl FnMut(&Count)) -> Result<Vec<Count>> {
    let mut counts = vec![];
    for round in 1..=o.pairs {
        let of = |install, atropos| -> Result<f64> {
            let [few, many] = [FEW, MANY].map(|requests| instructions(install, atropos, o, requests));
            Ok((many? as f64 - few? as f64) / f64::from(MANY - FEW))
        };
        let count = Count { mpm: o.mpm, round, vanilla: of(vanilla, None)?, patched: of(patched, Some(o.mode))? };
        each(&count);
        counts.push(count);
    }
    Ok(counts)
}

/// Of a whole life of the server in which it answers so many requests.
fn instructions(install: &Install, atropos: Option<Mode>, o: &Options, requests: u32) -> Result<u64> {
    let mut config = Config { atropos, counted: true, keep_alive_requests: 0, ..Config::new(o.mpm, SLOTS) };
    config.directives.extend(o.set.iter().cloned());
    let server = Httpd::start(install, &config, None, "count")?;
    let give_up = Instant::now() + Duration::from_secs(120);
    let request = get(STATIC_PAGE, &[], true);
    let mut connection = Connection::open(server.address).map_err(|fault| anyhow!("{fault}"))?;
    for _ in 0..requests {
        let reply = connection.exchange(&request, None, &|| Instant::now() > give_up);
        let reply = reply.map_err(|fault| anyhow!("{STATIC_PAGE} under callgrind: {fault}"))?;
        ensure!(reply.status == 200, "{STATIC_PAGE} under callgrind: status {}", reply.status);
        // Whoever has the next request there before this one has been cleaned up spares the server a way through the
        // listener: which of both it is must not hang on the machine's mood.
        server.wait_idle(give_up)?;
    }
    drop(connection);
    let threads = server.finish_counted()?;
    if atropos.is_some() {
        ensure!(threads.iter().any(|t| t.contains(CONTROLLER)), "no thread of the counted server ran {CONTROLLER}");
    }
    threads.iter().filter(|t| !t.contains(CONTROLLER)).map(|t| total(t)).sum()
}

/// What a thread executed, from callgrind's file of it.
fn total(file: &str) -> Result<u64> {
    let line = file.lines().find_map(|l| l.strip_prefix("totals: ").or_else(|| l.strip_prefix("summary: ")));
    let number = line.and_then(|l| l.split_whitespace().next()?.parse().ok());
    number.context("callgrind's file has no totals: did the server end by itself?")
}

pub fn report(counts: &[Count]) -> String {
    let cell = |f: fn(&Count) -> f64| {
        measure::spread(counts.iter().map(f)).map_or("-".into(), |(m, lo, hi)| format!("{m:.0} ({lo:.0}..{hi:.0})"))
    };
    let mpm = counts.first().map_or("-", |c| c.mpm.name());
    let rows = [
        ["instructions a request", "rounds", "vanilla", "patched", "more"].map(String::from).to_vec(),
        vec![
            format!("static page, {mpm}"),
            counts.len().to_string(),
            cell(|c| c.vanilla),
            cell(|c| c.patched),
            cell(|c| c.patched - c.vanilla),
        ],
    ];
    format!("{}\nOutside the kernel, without the controller's thread; median (smallest..largest).\n", markdown(&rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callgrinds_total_is_read() {
        assert_eq!(total("events: Ir\nfn=(1) main\n16 400\n\ntotals: 14752\n").unwrap(), 14752);
        assert_eq!(total("events: Ir\nsummary: 77\n").unwrap(), 77);
        assert!(total("events: Ir\n").unwrap_err().to_string().contains("no totals"));
    }
}
