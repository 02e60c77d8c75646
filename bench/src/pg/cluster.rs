//! One PostgreSQL server that lives as long as a run: a copy of a template, its own folder and Unix socket.
//!
//! It never listens on TCP.
use super::install::Install;
use super::session;
use crate::dirs::{copy_template, keep_logs, server_command};
use crate::guard::{self, Guarded};
use crate::host::{setting, Server, Setting, DECISION_LOG};
use anyhow::{bail, Result};
use postgres::Client;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The settings of every run: sizes for 2 cores, durability as in production, and no checkpoint by chance in the
/// middle of a measured part (a case that wants checkpoints sets them itself).
pub fn base_settings() -> Vec<Setting> {
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
    .map(|(name, value)| setting(name, value))
    .to_vec()
}

pub struct Cluster {
    pub install: Install,
    dir: PathBuf,
    server: Guarded,
    name: String,
    finished: bool,
}

impl Cluster {
    /// Copies `template` (a data folder) into `dir` and starts a server on it with `settings` after the base settings.
    pub fn start_copy(
        install: &Install,
        dir: PathBuf,
        template: &Path,
        settings: &[Setting],
        name: &str,
    ) -> Result<Cluster> {
        copy_template(template, &dir)?;
        Self::start_in(install, dir, settings, name)
    }

    /// Starts a server on `dir`/data, which exists. `dir` belongs to the cluster from here on.
    pub fn start_in(install: &Install, dir: PathBuf, settings: &[Setting], name: &str) -> Result<Cluster> {
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

    pub fn pid(&self) -> i32 {
        self.server.pid()
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

    /// Ends the server and hands its folder over instead of removing it.
    pub fn stop_keep(mut self) -> PathBuf {
        self.server.stop(libc::SIGINT, Duration::from_secs(60));
        self.finished = true;
        std::mem::take(&mut self.dir)
    }
}

impl Server for Cluster {
    fn dir(&self) -> &Path {
        &self.dir
    }

    fn crash_lines(&self) -> Vec<String> {
        let bad = ["PANIC:", "TRAP:", "was terminated by signal", "terminating any other active server processes"];
        self.log().lines().filter(|l| bad.iter().any(|b| l.contains(b))).map(str::to_owned).collect()
    }

    fn cpu_ns(&self) -> i64 {
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", self.pid())).unwrap_or_default();
        let alive: i64 =
            children.split_whitespace().filter_map(|p| p.parse().ok()).map(|p| guard::cpu_ns(p, false)).sum();
        guard::cpu_ns(self.pid(), true) + alive
    }

    fn finish(mut self: Box<Self>) -> Result<()> {
        self.server.stop(libc::SIGINT, Duration::from_secs(30));
        self.finished = true;
        Ok(())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.server.stop(libc::SIGQUIT, Duration::from_secs(10));
        if self.dir.as_os_str().is_empty() {
            return;
        }
        if !self.finished {
            keep_logs(&self.name, &self.dir, &["server.log", DECISION_LOG, "bench.conf"]);
        }
        let _ = fs::remove_dir_all(&self.dir);
    }
}
