//! One mysqld that lives as long as a run: a copy of a template, its own folder and Unix socket.
//!
//! It never listens on TCP.
use super::install::Install;
use super::session;
use crate::callgrind;
use crate::dirs::{copy_template, keep_logs, server_command};
use crate::guard::{self, Guarded};
use crate::host::{setting, Server, Setting, DECISION_LOG};
use anyhow::{bail, Result};
use mysql::Conn;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The settings of every run: sizes for 2 cores, and durability as in production (binary log included). The redo log
/// has room for the changes of half a minute, so that no checkpoint falls into a measured part; its files, whole from
/// the start, are copied with the template.
pub fn base_settings() -> Vec<Setting> {
    [
        ("skip_networking", "ON"),
        // Our builds do without it.
        ("loose_mysqlx", "OFF"),
        ("secure_file_priv", "NULL"),
        ("max_connections", "200"),
        ("innodb_buffer_pool_size", "512M"),
        ("innodb_redo_log_capacity", "512M"),
        ("innodb_flush_log_at_trx_commit", "1"),
        ("sync_binlog", "1"),
        // The same warmth in each run, not that of the run which made the template.
        ("innodb_buffer_pool_load_at_startup", "OFF"),
        ("innodb_buffer_pool_dump_at_shutdown", "OFF"),
        // The folder goes after the run: redo is written, pages need not be.
        ("innodb_fast_shutdown", "2"),
        ("log_error_verbosity", "3"),
    ]
    .map(|(name, value)| setting(name, value))
    .to_vec()
}

pub struct Mysqld {
    dir: PathBuf,
    server: Guarded,
    name: String,
    finished: bool,
}

/// The text of an option file, which names where the build in `prefix` and the run in `dir` are.
pub fn option_file(prefix: &Path, dir: &Path, settings: &[Setting]) -> String {
    let places = [
        ("basedir", prefix.to_path_buf()),
        ("lc_messages_dir", prefix.join("share")),
        ("character_sets_dir", prefix.join("share/charsets")),
        ("plugin_dir", prefix.join("lib/plugin")),
        ("datadir", dir.join("data")),
        ("tmpdir", dir.to_path_buf()),
        ("socket", session::socket(dir)),
        ("pid_file", dir.join("mysqld.pid")),
    ];
    let mut text = String::from("# written by the bench for this run\n[mysqld]\n");
    for (name, place) in places {
        text += &format!("{name} = {}\n", place.display());
    }
    for (name, value) in settings {
        text += &format!("{name} = {value}\n");
    }
    text
}

impl Mysqld {
    /// Copies `template` (a data folder) into `dir` and starts a server on it with `settings` after the base settings.
    pub fn start_copy(
        install: &Install,
        dir: PathBuf,
        template: &Path,
        settings: &[Setting],
        name: &str,
        counted: bool,
    ) -> Result<Mysqld> {
        copy_template(template, &dir)?;
        // Each server has its own identity; a copied one would be the template's.
        let _ = fs::remove_file(dir.join("data/auto.cnf"));
        Self::start_in(install, dir, settings, name, counted)
    }

    /// Starts a server on `dir`/data, which exists. `dir` belongs to it from here on. `counted`: under callgrind.
    pub fn start_in(
        install: &Install,
        dir: PathBuf,
        settings: &[Setting],
        name: &str,
        counted: bool,
    ) -> Result<Mysqld> {
        let mut all = base_settings();
        all.extend(settings.iter().cloned());
        fs::write(dir.join("my.cnf"), option_file(&install.prefix, &dir, &all))?;
        let log = File::create(dir.join("server.log"))?;
        let mysqld = install.prefix.join("bin/mysqld");
        let (mut command, patience) = if counted {
            (callgrind::server_command_counted(&mysqld, &dir)?, Duration::from_secs(600))
        } else {
            (server_command(&mysqld, &dir)?, Duration::from_secs(60))
        };
        command.arg(format!("--defaults-file={}", dir.join("my.cnf").display()));
        command.stdout(log.try_clone()?).stderr(log);
        let server = Guarded::spawn(command, libc::SIGKILL, Some(dir.clone()))?;
        let mut server = Mysqld { dir, server, name: name.to_owned(), finished: false };
        server.wait_ready(patience)?;
        Ok(server)
    }

    fn wait_ready(&mut self, patience: Duration) -> Result<()> {
        let give_up = Instant::now() + patience;
        loop {
            if !self.server.running()? {
                bail!("the server of {} ended while starting:\n{}", self.name, self.log_tail(15));
            }
            match self.admin() {
                Ok(_) => return Ok(()),
                Err(e) if Instant::now() > give_up => bail!(
                    "the server of {} did not accept connections within {patience:?} ({e:#}):\n{}",
                    self.name,
                    self.log_tail(15)
                ),
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    /// A session of the administrator.
    pub fn admin(&self) -> Result<Conn> {
        session::connect_as(&self.dir, session::ADMIN, None)
    }

    pub fn log(&self) -> String {
        fs::read(self.dir.join("server.log")).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default()
    }

    fn log_tail(&self, lines: usize) -> String {
        let log = self.log();
        let all: Vec<_> = log.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }

    /// Ends a counted server; callgrind's file of each of its threads.
    pub fn finish_counted(mut self) -> Result<Vec<String>> {
        self.server.stop(libc::SIGTERM, Duration::from_secs(600));
        let files = callgrind::threads(&self.dir)?;
        self.finished = true;
        Ok(files)
    }

    /// Ends the server and hands its folder over instead of removing it.
    pub fn stop_keep(mut self) -> Result<PathBuf> {
        self.server.stop(libc::SIGTERM, Duration::from_secs(120));
        self.finished = true;
        if !self.log().contains("Shutdown complete") {
            bail!("the server of {} did not shut down in order:\n{}", self.name, self.log_tail(15));
        }
        Ok(std::mem::take(&mut self.dir))
    }
}

impl Server for Mysqld {
    fn dir(&self) -> &Path {
        &self.dir
    }

    fn crash_lines(&self) -> Vec<String> {
        let bad =
            ["mysqld got signal", "mysqld got exception", "Assertion failure", "[FATAL]", "Semaphore wait has lasted"];
        let log = self.log();
        let mut lines: Vec<String> =
            log.lines().filter(|l| bad.iter().any(|b| l.contains(b))).map(str::to_owned).collect();
        if lines.is_empty() && !guard::alive(self.server.pid()) {
            lines.push(format!("the server is gone; its last words: {}", self.log_tail(3)));
        }
        lines
    }

    fn cpu_ns(&self) -> i64 {
        guard::cpu_ns(self.server.pid(), false)
    }

    fn finish(mut self: Box<Self>) -> Result<()> {
        // In order, so that the end of the plugin's threads is part of each run; killed when that takes too long.
        self.server.stop(libc::SIGTERM, Duration::from_secs(60));
        if !self.log().contains("Shutdown complete") {
            bail!(
                "the server of {} did not shut down within 60 s or crashed doing so:\n{}",
                self.name,
                self.log_tail(15)
            );
        }
        self.finished = true;
        Ok(())
    }
}

impl Drop for Mysqld {
    fn drop(&mut self) {
        self.server.stop(libc::SIGKILL, Duration::from_secs(10));
        if self.dir.as_os_str().is_empty() {
            return;
        }
        if !self.finished {
            keep_logs(&self.name, &self.dir, &["server.log", DECISION_LOG, "my.cnf", "pt-kill.log"]);
        }
        let _ = fs::remove_dir_all(&self.dir);
    }
}
