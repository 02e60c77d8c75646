//! The victims: closed loops of clients on kept-alive connections, one record for each request.
use super::client::{get, Connection, Fault};
use crate::clock::{now_ns, sleep_until};
use crate::load::{Status, Transaction};
use crate::race::Rng;
use anyhow::{anyhow, Result};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;

/// What the clients of a group ask for.
#[derive(Clone, Copy)]
pub enum Pages {
    One(&'static str),
    /// A path for each request, drawn from the client's own generator; the number is the client's.
    Drawn(fn(&mut Rng, u32) -> String),
}

/// Clients that are alike.
#[derive(Clone, Copy)]
pub struct Group {
    pub name: &'static str,
    pub clients: u32,
    pub pages: Pages,
    /// Requests per second of each client, on a fixed schedule (open loop: a late request counts from when it was due);
    /// `None`: the next request follows the answer (closed loop).
    pub pace_per_s: Option<f64>,
}

/// An answer that was not as it must be.
#[derive(Clone, Debug)]
pub struct Bad {
    pub start_ns: i64,
    pub end_ns: i64,
    pub status: Option<u16>,
    pub text: String,
}

#[derive(Default)]
pub struct Log {
    /// By end time.
    pub transactions: Vec<Transaction>,
    /// Since when the requests have waited that had no answer when the load was stopped.
    pub in_flight_ns: Vec<i64>,
    pub bad: Vec<Bad>,
    /// Kept-alive connections that the server had closed when the next request came: as it may, repeated on a new one.
    pub reconnects: u64,
    pub connections: u64,
}

pub struct Running {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    clients: Vec<JoinHandle<Log>>,
}

/// Starts all clients of `groups`.
pub fn start(address: SocketAddr, groups: &[Group], seed: u64) -> Result<Running> {
    let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut clients = vec![];
    for (g, group) in groups.iter().enumerate() {
        for number in 0..group.clients {
            let (stop, done, group) = (stop.clone(), done.clone(), *group);
            let rng = Rng(seed.wrapping_mul(0x1_0000).wrapping_add((g as u64) << 8).wrapping_add(u64::from(number)));
            let thread = std::thread::Builder::new().name(format!("{}-{number}", group.name)).stack_size(256 * 1024);
            clients.push(thread.spawn(move || client(address, group, number, rng, &stop, &done))?);
        }
    }
    Ok(Running { stop, done, clients })
}

fn client(address: SocketAddr, group: Group, number: u32, mut rng: Rng, stop: &AtomicBool, done: &AtomicU64) -> Log {
    let mut log = Log::default();
    let stopped = || stop.load(Ordering::Relaxed);
    let mut request = match group.pages {
        Pages::One(path) => get(path, &[], true),
        Pages::Drawn(_) => vec![],
    };
    let mut open: Option<Connection> = None;
    let period_ns = group.pace_per_s.map(|per_s| (1e9 / per_s) as i64);
    // Clients of a paced group are spread over one period.
    let mut due_ns = now_ns() + period_ns.map_or(0, |p| p * i64::from(number) / i64::from(group.clients.max(1)));
    while !stopped() {
        if let Pages::Drawn(draw) = group.pages {
            request = get(&draw(&mut rng, number), &[], true);
        }
        let start_ns = match period_ns {
            None => now_ns(),
            Some(period) => {
                sleep_until(due_ns);
                due_ns += period;
                due_ns - period
            }
        };
        let mut reused = open.is_some();
        let result = loop {
            let result = match open.take() {
                Some(c) => Ok(c),
                None => {
                    log.connections += 1;
                    Connection::open(address)
                }
            }
            .and_then(|mut c| {
                let reply = c.exchange(&request, None, &stopped)?;
                if reply.keep_alive {
                    open = Some(c);
                }
                Ok(reply)
            });
            match result {
                Err(Fault::Unanswered(_)) if reused => {
                    log.reconnects += 1;
                    reused = false;
                }
                other => break other,
            }
        };
        let end_ns = now_ns();
        let (status, bad) = match result {
            Ok(reply) if reply.status == 200 => (Status::Ok, None),
            Ok(reply) => (Status::Other, Some((Some(reply.status), format!("status {}", reply.status)))),
            Err(Fault::GaveUp) => {
                log.in_flight_ns.push(start_ns);
                break;
            }
            Err(Fault::Truncated { status, length }) => {
                (Status::Connection, Some((status, Fault::Truncated { status, length }.to_string())))
            }
            Err(fault) => (Status::Connection, Some((None, fault.to_string()))),
        };
        log.transactions.push(Transaction { start_ns, latency_ns: end_ns - start_ns, status });
        if let Some((status, text)) = bad {
            // A server that is gone is met at once: the next attempt may wait a moment.
            std::thread::sleep(std::time::Duration::from_millis(1));
            log.bad.push(Bad { start_ns, end_ns, status, text: format!("{}: {text}", group.name) });
        }
        done.fetch_add(1, Ordering::Relaxed);
    }
    log
}

impl Running {
    /// Requests answered so far.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Stops all clients; those that wait for an answer give up within a moment.
    pub fn finish(mut self) -> Result<Log> {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Log::default();
        for client in std::mem::take(&mut self.clients) {
            let log = client.join().map_err(|_| anyhow!("a client of the load panicked"))?;
            all.transactions.extend(log.transactions);
            all.in_flight_ns.extend(log.in_flight_ns);
            all.bad.extend(log.bad);
            all.reconnects += log.reconnects;
            all.connections += log.connections;
        }
        all.transactions.sort_unstable_by_key(|t| t.end_ns());
        all.bad.sort_unstable_by_key(|b| b.end_ns);
        Ok(all)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
