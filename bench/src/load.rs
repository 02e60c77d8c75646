//! The victims: Debian's sysbench with our Lua script, and the transactions it logged.
use crate::guard::Guarded;
use crate::host::Host;
use anyhow::{bail, Context, Result};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const LUA: &str = include_str!("../lua/oltp_logged.lua");

/// One group of client threads.
#[derive(Clone, Debug)]
pub struct Load {
    pub schema: &'static str,
    /// "read_write", "read_only" or "write_only".
    pub test: &'static str,
    pub threads: u32,
    pub tables: u32,
    pub rows: u32,
    /// From the noise's start on all of it turns to the last table.
    pub moves: bool,
    /// Further sysbench options, e.g. `--rand-type=pareto`.
    pub options: Vec<String>,
}

impl Load {
    pub fn oltp(schema: &'static str, threads: u32, tables: u32, rows: u32) -> Load {
        Load { schema, test: "read_write", threads, tables, rows, moves: false, options: vec![] }
    }

    /// Rows are picked evenly: sysbench's default of a few hot rows makes conflicts and deadlocks by chance. Those
    /// belong to x5 and to group B of x3.
    pub fn evenly(self) -> Load {
        Load { options: vec!["--rand-type=uniform".into()], ..self }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    Ok,
    /// Deadlock, serialization failure or unique violation: part of the stock load.
    Conflict,
    /// PostgreSQL's 57014, MySQL's 1317, whoever asked for it.
    Cancelled,
    /// The connection went.
    Connection,
    Other,
    /// A time limit of the server's own: MySQL's 1205 (lock wait) and 3024 (execution).
    TimedOut,
}

/// One transaction as its client saw it; times on CLOCK_MONOTONIC.
#[derive(Clone, Copy, Debug)]
pub struct Transaction {
    pub start_ns: i64,
    pub latency_ns: i64,
    pub status: Status,
}

impl Transaction {
    pub fn end_ns(&self) -> i64 {
        self.start_ns + self.latency_ns
    }
}

#[derive(Clone, Debug)]
pub struct LoadError {
    pub start_ns: i64,
    pub status: Status,
    /// As in `cases::Failure`.
    pub code: String,
    pub text: String,
}

#[derive(Default)]
pub struct LoadLog {
    /// By end time.
    pub transactions: Vec<Transaction>,
    pub errors: Vec<LoadError>,
    /// Why the load ended before its time, if it did.
    pub died: Option<String>,
}

pub struct RunningLoad {
    process: Guarded,
    prefix: PathBuf,
    threads: u32,
    tail: Arc<Mutex<Tail>>,
}

#[derive(Default)]
struct Tail {
    tps: f64,
    lines: Vec<String>,
}

/// Creates sysbench's tables; `sysbench` is connected to where they shall be.
pub fn prepare(mut sysbench: Command, tables: u32, rows: u32) -> Result<()> {
    let out = sysbench
        .args(["oltp_read_write", "--threads=2", "--rand-seed=1"])
        .arg(format!("--tables={tables}"))
        .arg(format!("--table-size={rows}"))
        .arg("prepare")
        .stdin(Stdio::null())
        .output()
        .context("run sysbench (install it: apt-get install sysbench)")?;
    if !out.status.success() {
        bail!(
            "sysbench prepare failed ({}): {}{}",
            out.status,
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr)
        );
    }
    Ok(())
}

/// "sysbench 1.0.20".
pub fn version() -> String {
    let out = Command::new("sysbench").arg("--version").output();
    out.map(|o| String::from_utf8_lossy(&o.stdout).trim().to_owned())
        .unwrap_or_else(|_| "sysbench: not installed".into())
}

impl Load {
    /// Starts the load for `seconds` on the server in `dir`; logs go to `<dir>/load-<name>.*`. `noise_ns` is when the
    /// noise will start, for a load that moves then.
    pub fn start(
        &self,
        host: &dyn Host,
        dir: &Path,
        name: &str,
        seconds: f64,
        seed: u64,
        noise_ns: i64,
    ) -> Result<RunningLoad> {
        let script = dir.join("oltp_logged.lua");
        fs::write(&script, LUA)?;
        let prefix = dir.join(format!("load-{name}"));
        let mut command = host.sysbench(dir, self.schema);
        command
            .arg(&script)
            .arg(format!("--threads={}", self.threads))
            .arg(format!("--tables={}", self.tables))
            .arg(format!("--table-size={}", self.rows))
            .arg(format!("--time={}", seconds.ceil()))
            // 0 would mean "from the clock": every run states its seed.
            .arg(format!("--rand-seed={}", seed % 0x7fff_fffe + 1))
            .args(["--report-interval=1", "--percentile=99"])
            .args(&self.options)
            .arg("run")
            .env("ATROPOS_BENCH_LOG", &prefix)
            .env("ATROPOS_BENCH_TEST", self.test)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if self.moves {
            command.env("ATROPOS_BENCH_MOVE_NS", noise_ns.to_string());
        }
        let mut process = Guarded::spawn(command, libc::SIGKILL, None)
            .context("start sysbench (install it: apt-get install sysbench)")?;
        let tail = Arc::new(Mutex::new(Tail::default()));
        let out = process.child().stdout.take().context("sysbench's stdout")?;
        let err = process.child().stderr.take().context("sysbench's stderr")?;
        let streams: [Box<dyn std::io::Read + Send>; 2] = [Box::new(out), Box::new(err)];
        for stream in streams {
            let tail = tail.clone();
            // Ends with the process, at the end of its stream.
            std::thread::spawn(move || {
                for line in BufReader::new(stream).lines().map_while(Result::ok) {
                    let Ok(mut tail) = tail.lock() else { return };
                    if let Some(tps) =
                        line.split("tps: ").nth(1).and_then(|r| r.split_whitespace().next()?.parse().ok())
                    {
                        tail.tps = tps;
                    } else if !line.trim().is_empty() {
                        tail.lines.push(line);
                        let excess = tail.lines.len().saturating_sub(20);
                        tail.lines.drain(..excess);
                    }
                }
            });
        }
        Ok(RunningLoad { process, prefix, threads: self.threads, tail })
    }
}

impl RunningLoad {
    /// Transactions per second in the last whole second, by sysbench's count.
    pub fn recent_tps(&self) -> f64 {
        self.tail.lock().map(|t| t.tps).unwrap_or(0.0)
    }

    fn last_lines(&self) -> String {
        self.tail.lock().map(|t| t.lines.join("\n")).unwrap_or_default()
    }

    pub fn running(&mut self) -> Result<bool> {
        self.process.running()
    }

    /// Waits for the load's own end and reads its log. A load that died leaves what it had written by then.
    pub fn finish(mut self, patience: Duration) -> Result<LoadLog> {
        let died = match self.process.wait_until(Instant::now() + patience)? {
            Some(status) if status.success() => None,
            Some(status) => Some(match status.signal() {
                // sysbench 1.0.20 reads a SQLSTATE that a broken connection does not have.
                Some(libc::SIGSEGV) => {
                    "sysbench crashed, as it does when the server ends one of its sessions".to_owned()
                }
                _ => format!("sysbench failed ({status}): {}", self.last_lines()),
            }),
            None => {
                bail!("sysbench did not end within {} s after its time:\n{}", patience.as_secs(), self.last_lines())
            }
        };
        let mut log = LoadLog { died, ..LoadLog::default() };
        for thread in 0..self.threads {
            log.read(
                &self.prefix.with_extension(format!("{thread}.bin")),
                &self.prefix.with_extension(format!("{thread}.err")),
            )?;
        }
        log.transactions.sort_unstable_by_key(|t| t.end_ns());
        Ok(log)
    }
}

impl LoadLog {
    fn read(&mut self, records: &Path, errors: &Path) -> Result<()> {
        const RECORD: usize = 24;
        let bytes = match fs::read(records) {
            // It died before this thread began.
            Err(_) if self.died.is_some() => return Ok(()),
            read => read.with_context(|| format!("read the load's log {}", records.display()))?,
        };
        if bytes.len() % RECORD != 0 && self.died.is_none() {
            bail!("{}: {} bytes is no whole number of {RECORD}-byte records", records.display(), bytes.len());
        }
        for r in bytes.chunks_exact(RECORD) {
            let word = |at: usize| i64::from_ne_bytes(r[at..at + 8].try_into().expect("8 bytes"));
            let status = i32::from_ne_bytes(r[16..20].try_into().expect("4 bytes"));
            self.transactions.push(Transaction { start_ns: word(0), latency_ns: word(8), status: Status::of(status)? });
        }
        for line in fs::read_to_string(errors)?.lines() {
            let mut parts = line.splitn(4, '\t');
            let mut next = || parts.next().unwrap_or_default().to_owned();
            let (start, status, code, text) = (next(), next(), next(), next());
            let start_ns = start.parse().with_context(|| format!("{}: bad line {line:?}", errors.display()))?;
            self.errors.push(LoadError { start_ns, status: Status::of(status.parse()?)?, code, text });
        }
        Ok(())
    }

    pub fn merge(&mut self, other: LoadLog) {
        self.transactions.extend(other.transactions);
        self.transactions.sort_unstable_by_key(|t| t.end_ns());
        self.errors.extend(other.errors);
        self.died = self.died.take().or(other.died);
    }
}

impl Status {
    /// Mirrors the constants of the Lua script.
    fn of(code: i32) -> Result<Status> {
        Ok(match code {
            0 => Status::Ok,
            1 => Status::Conflict,
            2 => Status::Cancelled,
            3 => Status::Connection,
            4 => Status::Other,
            5 => Status::TimedOut,
            _ => bail!("unknown status {code} in the load's log"),
        })
    }
}
