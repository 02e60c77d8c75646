//! httpd's instructions for a small file over a kept-alive connection (`callgrind`): of one process that serves one
//! connection.
use super::client::{get, Connection};
use super::install::Install;
use super::overhead::Options;
use super::server::{Config, Httpd, STATIC_PAGE};
use crate::callgrind::{self, Count, Runs};
use crate::record::Mode;
use anyhow::{anyhow, ensure, Result};
use std::time::{Duration, Instant};

const RUNS: Runs = Runs { few: 200, many: 1200 };
const SLOTS: u32 = 4;
/// What only the controller's thread runs.
const CONTROLLER: &str = "Controller::tick";

pub fn run(vanilla: &Install, patched: &Install, o: &Options, mut each: impl FnMut(&Count)) -> Result<Vec<Count>> {
    let mut counts = vec![];
    for round in 1..=o.pairs {
        let what = format!("static page, {}", o.mpm.name());
        let count = Count::take(&what, round, RUNS, |is_patched, requests| {
            let (install, atropos) = if is_patched { (patched, Some(o.mode)) } else { (vanilla, None) };
            instructions(install, atropos, o, requests)
        })?;
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
    threads.iter().filter(|t| !t.contains(CONTROLLER)).map(|t| callgrind::total(t)).sum()
}
