//! mysqld's instructions for a transaction of sysbench's kind (`callgrind`): those of the thread that serves its connection.
//! Background threads go by the clock and are left out.
use super::install::Install;
use super::session;
use crate::callgrind::{self, Count, Runs};
use crate::host::{Dataset, Host, Server};
use crate::overhead::{Options, Workload};
use crate::race::Rng;
use anyhow::{ensure, Context, Result};
use mysql::Conn;

const RUNS: Runs = Runs { few: 20, many: 120 };
const TABLES: u32 = 10;
const ROWS: u32 = 10_000;
/// What only the threads of connections run.
const CONNECTION: &str = "handle_connection";

pub fn run(
    vanilla: &Install,
    patched: &Install,
    workloads: &[Workload],
    o: &Options,
    mut each: impl FnMut(&Count),
) -> Result<Vec<Count>> {
    let mut counts = vec![];
    for &workload in workloads {
        for round in 1..=o.pairs {
            let count = Count::take(workload.test(), round, RUNS, |is_patched, transactions| {
                instructions(if is_patched { patched } else { vanilla }, workload, o, round, transactions)
            })?;
            each(&count);
            counts.push(count);
        }
    }
    Ok(counts)
}

/// Of the connections' threads in a life of the server with so many transactions, the same ones on both builds.
fn instructions(install: &Install, workload: Workload, o: &Options, round: u32, transactions: u32) -> Result<u64> {
    let dataset = Dataset::oltp(install.schema(), TABLES, ROWS);
    let server = install.start_server(&dataset, Some(o.mode), &o.set, "count", true)?;
    let mut client = session::connect(server.dir())?;
    let mut rng = Rng(o.seed + u64::from(round));
    for _ in 0..transactions {
        transaction(&mut client, workload, &mut rng).context("a transaction under callgrind")?;
    }
    drop(client);
    let threads = server.finish_counted()?;
    let connections: Vec<_> = threads.iter().filter(|t| t.contains(CONNECTION)).collect();
    ensure!(!connections.is_empty(), "no thread of the counted server ran {CONNECTION}");
    connections.into_iter().map(|t| callgrind::total(t)).sum()
}

/// The statements of sysbench's oltp_read_only, and those that oltp_read_write adds.
fn transaction(client: &mut Conn, workload: Workload, rng: &mut Rng) -> Result<(), mysql::Error> {
    let table = format!("sbtest{}", 1 + rng.below(u64::from(TABLES)));
    let mut id = || 1 + rng.below(u64::from(ROWS));
    let mut run = |sql: String| session::run(client, sql);
    run("BEGIN".into())?;
    for _ in 0..10 {
        run(format!("SELECT c FROM {table} WHERE id = {}", id()))?;
    }
    for (what, order) in [("c", ""), ("SUM(k)", ""), ("c", " ORDER BY c"), ("DISTINCT c", " ORDER BY c")] {
        let from = id();
        run(format!("SELECT {what} FROM {table} WHERE id BETWEEN {from} AND {}{order}", from + 99))?;
    }
    if workload == Workload::ReadWrite {
        run(format!("UPDATE {table} SET k = k + 1 WHERE id = {}", id()))?;
        run(format!("UPDATE {table} SET c = REPEAT('x', 119) WHERE id = {}", id()))?;
        let gone = id();
        run(format!("DELETE FROM {table} WHERE id = {gone}"))?;
        run(format!("INSERT INTO {table} (id, k, c, pad) VALUES ({gone}, 7, 'c', 'pad')"))?;
    }
    run("COMMIT".into())
}
