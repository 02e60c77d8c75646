//! What the patched httpd with mod_atropos costs when nothing is wrong: wrk on a small static file, against the vanilla
//! build of the same configuration, in pairs.
//!
//! Both servers of a pair stay up together; only one is loaded at a time (`pairs`), a second long: with slices of five
//! seconds pairs spread over 12%. CPU time for each request is reported beside the throughput: on a shared machine it is
//! steadier.
use super::install::Install;
use super::server::{Config, Httpd, Mpm, STATIC_PAGE};
use crate::measure;
use crate::pairs::{self, Second};
use crate::record::{markdown, Mode};
use anyhow::{bail, ensure, Context, Result};
use serde::Serialize;
use std::process::Command;

#[derive(Clone, Debug)]
pub struct Options {
    pub pairs: u32,
    /// Measured seconds for each server in each pair.
    pub seconds: f64,
    /// Kept-alive connections of wrk, from one thread.
    pub connections: u32,
    pub mpm: Mpm,
    pub second: Second,
    pub mode: Mode,
    pub set: Vec<String>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Pair {
    pub workload: &'static str,
    pub mpm: Mpm,
    pub pair: u32,
    pub vanilla_rps: f64,
    pub patched_rps: f64,
    /// patched / vanilla.
    pub rps_ratio: f64,
    pub vanilla_cpu_us: f64,
    pub patched_cpu_us: f64,
    /// The server's CPU time for each request, patched / vanilla.
    pub cpu_ratio: f64,
    /// Decisions of the patched server: there is no overload, so 0.
    pub decisions: usize,
}

#[derive(Default)]
struct Side {
    requests: u64,
    seconds: f64,
    cpu_ns: i64,
}

/// The shortest that wrk runs.
const SLICE_S: f64 = 1.0;
/// More workers than connections: nobody waits for one.
const SLOTS: u32 = 25;

pub fn run(vanilla: &Install, patched: &Install, o: &Options, mut each: impl FnMut(&Pair)) -> Result<Vec<Pair>> {
    let mut done = vec![];
    for pair in 1..=o.pairs {
        let servers = pairs::start_both(pair, |which| -> Result<Httpd> {
            let (install, atropos) = [(vanilla, None), o.second.server(vanilla, patched, o.mode)][which];
            let mut config = Config { atropos, ..Config::new(o.mpm, SLOTS) };
            config.directives.extend(o.set.iter().cloned());
            Httpd::start(install, &config, None, &format!("overhead-{pair}"))
        })?;
        let mut sides = [Side::default(), Side::default()];
        // One unmeasured slice each fills the caches.
        for server in &servers {
            wrk(server, o, SLICE_S)?;
        }
        for which in pairs::slices(pair, (o.seconds / SLICE_S).ceil() as u32) {
            let cpu_ns = servers[which].cpu_ns();
            let (requests, seconds) = wrk(&servers[which], o, SLICE_S)?;
            let side = &mut sides[which];
            side.cpu_ns += servers[which].cpu_ns() - cpu_ns;
            side.requests += requests;
            side.seconds += seconds;
        }
        let decisions = std::fs::read_to_string(servers[1].decision_log()).map_or(0, |t| t.lines().count());
        let rps = |s: &Side| s.requests as f64 / s.seconds;
        let cpu_us = |s: &Side| s.cpu_ns as f64 / 1e3 / s.requests as f64;
        let [v, p] = &sides;
        let ended = Pair {
            workload: "static page",
            mpm: o.mpm,
            pair,
            vanilla_rps: rps(v),
            patched_rps: rps(p),
            rps_ratio: rps(p) / rps(v),
            vanilla_cpu_us: cpu_us(v),
            patched_cpu_us: cpu_us(p),
            cpu_ratio: cpu_us(p) / cpu_us(v),
            decisions,
        };
        each(&ended);
        done.push(ended);
        for server in servers {
            server.finish()?;
        }
    }
    Ok(done)
}

/// "wrk 4.1.0".
pub fn wrk_version() -> String {
    let out = Command::new("wrk").arg("-v").output();
    let text = out.map(|o| String::from_utf8_lossy(&o.stdout).into_owned() + &String::from_utf8_lossy(&o.stderr));
    let words = text.unwrap_or_default();
    words.split_whitespace().take(2).collect::<Vec<_>>().join(" ")
}

/// Loads the server for `seconds`: requests answered, and in how long.
fn wrk(server: &Httpd, o: &Options, seconds: f64) -> Result<(u64, f64)> {
    let whole = seconds.ceil().max(1.0);
    let out = Command::new("wrk")
        .args(["-t1", &format!("-c{}", o.connections), &format!("-d{whole}s")])
        .arg(format!("http://{}{STATIC_PAGE}", server.address))
        .output()
        .context("run wrk (install it: apt-get install wrk)")?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.success(), "wrk failed ({}): {text}", out.status);
    if text.contains("Non-2xx") || text.contains("Socket errors") {
        bail!("wrk saw errors: {text}");
    }
    parse(&text).with_context(|| format!("wrk said {text}"))
}

/// From "  123456 requests in 5.01s, 150.00MB read".
fn parse(text: &str) -> Option<(u64, f64)> {
    let line = text.lines().find(|l| l.contains(" requests in "))?;
    let (requests, rest) = line.trim().split_once(" requests in ")?;
    let took = rest.split(',').next()?.trim();
    let seconds = match (took.strip_suffix("ms"), took.strip_suffix('m'), took.strip_suffix('s')) {
        (Some(ms), _, _) => ms.parse::<f64>().ok()? / 1e3,
        (_, Some(minutes), _) => minutes.parse::<f64>().ok()? * 60.0,
        (_, _, Some(s)) => s.parse().ok()?,
        _ => return None,
    };
    Some((requests.parse().ok()?, seconds))
}

/// Medians and ranges; and whether the median ratio holds against `at_least`.
pub fn report(all: &[Pair], at_least: f64) -> (bool, String) {
    let mut rows = vec![[
        "workload",
        "MPM",
        "pairs",
        "vanilla req/s",
        "patched req/s",
        "req/s ratio",
        "CPU us/request vanilla",
        "CPU us/request patched",
        "CPU ratio",
        "decisions",
    ]
    .map(String::from)
    .to_vec()];
    let (mut ok, mut verdicts) = (true, String::new());
    for mpm in Mpm::ALL {
        let of: Vec<&Pair> = all.iter().filter(|p| p.mpm == mpm).collect();
        if of.is_empty() {
            continue;
        }
        let cell = |f: fn(&Pair) -> f64, digits: usize| {
            measure::spread(of.iter().map(|p| f(p)))
                .map_or("-".into(), |(m, lo, hi)| format!("{m:.digits$} ({lo:.digits$}..{hi:.digits$})"))
        };
        let (holds, verdict) = pairs::verdict(&of.iter().map(|p| p.rps_ratio).collect::<Vec<_>>(), at_least);
        ok &= holds;
        verdicts += &format!("{verdict}\n");
        rows.push(vec![
            of[0].workload.into(),
            mpm.name().into(),
            of.len().to_string(),
            cell(|p| p.vanilla_rps, 0),
            cell(|p| p.patched_rps, 0),
            cell(|p| p.rps_ratio, 4),
            cell(|p| p.vanilla_cpu_us, 2),
            cell(|p| p.patched_cpu_us, 2),
            cell(|p| p.cpu_ratio, 4),
            of.iter().map(|p| p.decisions).sum::<usize>().to_string(),
        ]);
    }
    (ok, format!("{}\n{verdicts}", markdown(&rows)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrk_is_read() {
        assert_eq!(parse("  Latency  1ms\n  123456 requests in 5.01s, 150.00MB read\n"), Some((123_456, 5.01)));
        assert_eq!(parse("  9 requests in 100.50ms, 1KB read"), Some((9, 0.1005)));
        assert_eq!(parse("  9 requests in 1.50m, 1KB read"), Some((9, 90.0)));
        assert_eq!(parse("unable to connect"), None);
    }
}
