//! One PostgreSQL server that lives as long as a run: a copy of a template, its own folder and Unix socket.
//!
//! It never listens on TCP. The folder is on disk (beside the cache) because fsync stays on, as in production.
use super::install::{cache_dir, make_dir, server_identity, Install};
use super::session;
use crate::guard::{self, Guarded};
use anyhow::{bail, Result};
use postgres::Client;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// A line of the server's configuration.
pub type Guc = (String, String);

pub fn guc(name: &str, value: impl ToString) -> Guc {
    (name.to_owned(), value.to_string())
}

/// The settings of every run: sizes for 2 cores, durability as in production, and no checkpoint by chance in the
/// middle of a measured part (a case that wants checkpoints sets them itself).
pub fn base_settings() -> Vec<Guc> {
    [
        ("listen_addresses", "''"),
        ("max_connections", "120"),
        ("max_worker_processes", "16"),
        ("shared_buffers", "'512MB'"),
        ("max_wal_size", "'8GB'"),
        ("min_wal_size", "'512MB'"),
        ("checkpoint_timeout", "'30min'"),
        ("fsync", "on"),
        ("synchronous_commit", "on"),
        ("logging_collector", "off"),
        ("log_line_prefix", "'%m [%p] %q%a '"),
        ("log_statement", "'none'"),
        // The stock load produces unique violations and deadlocks by design; FATALs and above are kept, and what the
        // extension reports.
        ("log_min_error_statement", "'panic'"),
    ]
    .map(|(name, value)| guc(name, value))
    .to_vec()
}

pub struct Cluster {
    pub install: Install,
    dir: PathBuf,
    server: Guarded,
    name: String,
    finished: bool,
}

static SEQUENCE: AtomicU32 = AtomicU32::new(0);

/// A new folder for a run, owned by the server's user.
pub fn new_run_dir() -> Result<PathBuf> {
    let base = cache_dir()?.join("run");
    make_dir(&base, None)?;
    if SEQUENCE.load(Ordering::Relaxed) == 0 {
        sweep(&base);
    }
    let name = format!("{}-{}", std::process::id(), SEQUENCE.fetch_add(1, Ordering::Relaxed));
    let mut dir = base.join(&name);
    // A Unix socket's path must fit in 107 bytes with its name (".s.PGSQL.5432.lock"); a deep home does not fit.
    if dir.as_os_str().len() > 80 {
        dir = std::env::temp_dir().join(format!("atropos-run-{name}"));
    }
    make_dir(&dir, server_identity()?)?;
    Ok(dir)
}

/// Removes folders of runs whose process was killed before it could clean up.
fn sweep(base: &Path) {
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_string_lossy().split('-').next().and_then(|p| p.parse::<i32>().ok());
        if pid.is_some_and(|pid| !guard::alive(pid)) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// A command that runs as the server's user, in `dir`, with a plain environment.
pub fn server_command(program: &Path, dir: &Path) -> Result<Command> {
    let mut command = Command::new(program);
    command
        .current_dir(dir)
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("LC_ALL", "C")
        .env("HOME", dir)
        .env("TZ", "UTC");
    command.stdin(Stdio::null());
    if let Some(run_as) = server_identity()? {
        command.uid(run_as.uid).gid(run_as.gid);
    }
    Ok(command)
}

impl Cluster {
    /// Copies `template` (a data folder) into `dir` and starts a server on it with `settings` after the base settings.
    pub fn start_copy(
        install: &Install,
        dir: PathBuf,
        template: &Path,
        settings: &[Guc],
        name: &str,
    ) -> Result<Cluster> {
        let copy = || -> Result<()> {
            let status =
                Command::new("cp").args(["-a", "--reflink=auto"]).arg(template).arg(dir.join("data")).status()?;
            if !status.success() {
                bail!(
                    "copying the template {} to {} failed ({status}): is the disk full?",
                    template.display(),
                    dir.display()
                );
            }
            // The copy's pages reach the disk now, not as write-back in the middle of the measured part.
            Command::new("sync").arg("-f").arg(&dir).status()?;
            Ok(())
        };
        if let Err(e) = copy() {
            let _ = fs::remove_dir_all(&dir);
            return Err(e);
        }
        Self::start_in(install, dir, settings, name)
    }

    /// Starts a server on `dir`/data, which exists. `dir` belongs to the cluster from here on.
    pub fn start_in(install: &Install, dir: PathBuf, settings: &[Guc], name: &str) -> Result<Cluster> {
        let mut conf = String::from("# written by the bench for this run\n");
        for (name, value) in base_settings().iter().chain(settings) {
            conf += &format!("{name} = {value}\n");
        }
        conf += &format!("unix_socket_directories = '{}'\n", dir.display());
        fs::write(dir.join("bench.conf"), conf)?;
        let log = File::create(dir.join("server.log"))?;
        let mut command = server_command(&install.bin("postgres"), &dir)?;
        command.arg("-D").arg(dir.join("data")).arg(format!("--config-file={}", dir.join("bench.conf").display()));
        command.stdout(log.try_clone()?).stderr(log);
        // SIGQUIT is the immediate shutdown: backends are told to go at once.
        let server = Guarded::spawn(command, libc::SIGQUIT, Some(dir.clone()))?;
        let mut cluster = Cluster { install: install.clone(), dir, server, name: name.to_owned(), finished: false };
        cluster.wait_ready()?;
        Ok(cluster)
    }

    fn wait_ready(&mut self) -> Result<()> {
        let give_up = Instant::now() + Duration::from_secs(60);
        loop {
            if !self.server.running()? {
                bail!("the server of {} ended while starting:\n{}", self.name, self.log_tail(15));
            }
            match session::connect(&self.dir, "ready") {
                Ok(_) => return Ok(()),
                Err(e) if Instant::now() > give_up => {
                    bail!(
                        "the server of {} did not accept connections within 60 s ({e}):\n{}",
                        self.name,
                        self.log_tail(15)
                    )
                }
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    /// The folder of the run; it is also the socket folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn pid(&self) -> i32 {
        self.server.pid()
    }

    pub fn decision_log(&self) -> PathBuf {
        self.dir.join("decisions.jsonl")
    }

    pub fn connect(&self, application_name: &str) -> Result<Client> {
        session::connect(&self.dir, application_name)
    }

    pub fn log(&self) -> String {
        fs::read(self.dir.join("server.log")).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default()
    }

    pub fn log_tail(&self, lines: usize) -> String {
        let log = self.log();
        let all: Vec<_> = log.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }

    /// Lines of the server log that mean a crash: no case may ever cause one.
    pub fn crash_lines(&self) -> Vec<String> {
        let bad = ["PANIC:", "TRAP:", "was terminated by signal", "terminating any other active server processes"];
        self.log().lines().filter(|l| bad.iter().any(|b| l.contains(b))).map(str::to_owned).collect()
    }

    /// CPU time used so far by the server and its children, dead and alive, in ns.
    pub fn cpu_ns(&self) -> i64 {
        let own = cpu_ticks(self.pid(), true);
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", self.pid())).unwrap_or_default();
        let alive: u64 = children.split_whitespace().filter_map(|p| p.parse().ok()).map(|p| cpu_ticks(p, false)).sum();
        // SAFETY: sysconf has no preconditions.
        let ticks_per_s = unsafe { libc::sysconf(libc::_SC_CLK_TCK) }.max(1);
        ((own + alive) as i64) * (1_000_000_000 / ticks_per_s)
    }

    /// Ends the server after a good run; its folder goes.
    pub fn finish(mut self) -> Result<()> {
        self.server.stop(libc::SIGINT, Duration::from_secs(30));
        self.finished = true;
        Ok(())
    }

    /// Ends the server and hands its folder over instead of removing it.
    pub fn stop_keep(mut self) -> PathBuf {
        self.server.stop(libc::SIGINT, Duration::from_secs(60));
        self.finished = true;
        std::mem::take(&mut self.dir)
    }
}

fn cpu_ticks(pid: i32, with_dead_children: bool) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // Fields 14..17 of proc(5), counted after the command's closing parenthesis: utime stime cutime cstime.
    let fields: Vec<u64> = stat
        .rsplit(") ")
        .next()
        .unwrap_or("")
        .split_whitespace()
        .skip(11)
        .take(4)
        .filter_map(|f| f.parse().ok())
        .collect();
    fields.iter().take(if with_dead_children { 4 } else { 2 }).sum()
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.server.stop(libc::SIGQUIT, Duration::from_secs(10));
        if self.dir.as_os_str().is_empty() {
            return;
        }
        if !self.finished {
            // The run failed: its log and decisions are what one needs next.
            if let Ok(logs) = cache_dir().map(|c| c.join("logs")) {
                let kept = logs.join(format!("{}-{}", self.name, std::process::id()));
                let _ = fs::create_dir_all(&kept);
                for file in ["server.log", "decisions.jsonl", "bench.conf"] {
                    let _ = fs::copy(self.dir.join(file), kept.join(file));
                }
                eprintln!("{}: the server's log is kept in {}", self.name, kept.display());
            }
        }
        let _ = fs::remove_dir_all(&self.dir);
    }
}
