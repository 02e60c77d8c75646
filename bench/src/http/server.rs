//! One httpd with PHP that lives as long as a run: its own folder, a free port on the loopback, everything from code.
use super::client::{self, get, Visit};
use super::install::Install;
use crate::callgrind;
use crate::dirs::{keep_logs, new_run_dir, server_command, server_identity};
use crate::guard::{self, Guarded};
use crate::record::Mode;
use anyhow::{bail, ensure, Context, Result};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{chown, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Mpm {
    Event,
    Worker,
    Prefork,
}

impl Mpm {
    pub const ALL: [Mpm; 3] = [Mpm::Event, Mpm::Worker, Mpm::Prefork];

    pub fn name(self) -> &'static str {
        ["event", "worker", "prefork"][self as usize]
    }
}

/// What a run wants of its server; `Config::new` has what all have in common.
#[derive(Clone, Debug)]
pub struct Config {
    pub mpm: Mpm,
    /// Processes with threads (event, worker); prefork has a process for each worker.
    pub children: u32,
    /// Worker slots in each of them.
    pub threads: u32,
    /// ListenBacklog.
    pub backlog: u32,
    pub keep_alive_requests: u32,
    /// `None`: neither our module nor our extension is loaded.
    pub atropos: Option<Mode>,
    /// Further directives, which win.
    pub directives: Vec<String>,
    /// Further lines of php.ini.
    pub php_ini: Vec<String>,
    /// One process only, under callgrind.
    pub counted: bool,
}

impl Config {
    pub fn new(mpm: Mpm, slots: u32) -> Config {
        Config {
            mpm,
            children: 1,
            threads: slots,
            backlog: 511,
            keep_alive_requests: 100,
            atropos: None,
            directives: vec![],
            php_ini: vec![],
            counted: false,
        }
    }

    pub fn slots(&self) -> u32 {
        self.children * self.threads
    }

    fn mpm_directives(&self) -> String {
        let slots = self.slots();
        let (children, threads) = (self.children, self.threads);
        match self.mpm {
            Mpm::Prefork => format!(
                "StartServers {slots}\nMinSpareServers 1\nMaxSpareServers {slots}\nServerLimit {slots}\n\
                 MaxRequestWorkers {slots}\n"
            ),
            // Room for the children that finish their requests after a graceful restart.
            Mpm::Event | Mpm::Worker => format!(
                "StartServers {children}\nServerLimit {}\nThreadLimit {threads}\nThreadsPerChild {threads}\n\
                 MaxRequestWorkers {slots}\nMinSpareThreads 1\nMaxSpareThreads {}\n",
                children * 4,
                slots + threads + 1
            ),
        }
    }
}

/// The settings that all runs have in common, for the record.
pub fn base_settings() -> Vec<String> {
    [
        "KeepAlive On",
        "KeepAliveTimeout 5",
        "Timeout 60",
        "access log on",
        "PHP: max_execution_time = 0",
        "PHP: output_buffering = 4096 as in php.ini-production",
    ]
    .map(str::to_owned)
    .to_vec()
}

/// The pages, compiled in: a small static one and the scripts.
const PAGES: &[(&str, &str)] = &[
    ("long.php", include_str!("www/long.php")),
    ("session.php", include_str!("www/session.php")),
    ("work.php", include_str!("www/work.php")),
];
pub const STATIC_PAGE: &str = "/index.html";
/// Fits in one segment with its header.
const STATIC_BYTES: usize = 1024;

pub struct Httpd {
    pub address: SocketAddr,
    dir: PathBuf,
    server: Guarded,
    name: String,
    mpm: Mpm,
    finished: bool,
}

fn quoted(path: &Path) -> String {
    format!("\"{}\"", path.display())
}

/// A port that nobody listens on now. Another process may take it first: then the start fails and is tried again.
fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0").context("a free port on 127.0.0.1")?.local_addr()?.port())
}

fn owned(path: &Path) -> Result<()> {
    if let Some(user) = server_identity()? {
        chown(path, Some(user.uid), Some(user.gid)).with_context(|| format!("chown {}", path.display()))?;
    }
    Ok(())
}

impl Httpd {
    /// Starts a server; `scripts` (a folder) are copied beside our own pages.
    pub fn start(install: &Install, config: &Config, scripts: Option<&Path>, name: &str) -> Result<Httpd> {
        let mut last = None;
        for _ in 0..3 {
            match Self::start_once(install, config, scripts, name) {
                Err(e) if format!("{e:#}").contains("Address already in use") => last = Some(e),
                other => return other,
            }
        }
        Err(last.context("no free port")?)
    }

    fn start_once(install: &Install, config: &Config, scripts: Option<&Path>, name: &str) -> Result<Httpd> {
        let dir = new_run_dir()?;
        let prepared = (|| -> Result<SocketAddr> {
            fill(&dir, scripts)?;
            let port = free_port()?;
            fs::write(dir.join("httpd.conf"), conf(install, config, &dir, port)?)?;
            let mut ini = String::from("; written by the bench for this run\n");
            if config.atropos.is_some() {
                ini += &format!("extension = {}\n", install.atropos()?.1.display());
            }
            ini += "max_execution_time = 0\noutput_buffering = 4096\nlog_errors = On\ndisplay_errors = Off\n";
            ini += &format!("session.save_path = {}\n", quoted(&dir.join("sessions")));
            ini += &format!("sys_temp_dir = {}\n", quoted(&dir.join("tmp")));
            // Chance must not make one request of a hundred sweep old sessions.
            ini += "session.gc_probability = 0\n";
            ini += &config.php_ini.iter().map(|l| format!("{l}\n")).collect::<String>();
            fs::write(dir.join("php.ini"), ini)?;
            Ok(SocketAddr::from(([127, 0, 0, 1], port)))
        })();
        let address = match prepared {
            Ok(address) => address,
            Err(e) => {
                let _ = fs::remove_dir_all(&dir);
                return Err(e);
            }
        };
        let said = File::create(dir.join("stderr.log"))?;
        let mut command = if config.counted {
            let mut httpd = callgrind::server_command_counted(&install.httpd(), &dir)?;
            httpd.arg("-X");
            httpd
        } else {
            let mut httpd = server_command(&install.httpd(), &dir)?;
            httpd.arg("-DFOREGROUND");
            httpd
        };
        command.arg("-f").arg(dir.join("httpd.conf"));
        command.stdout(said.try_clone()?).stderr(said);
        let server = Guarded::spawn(command, libc::SIGTERM, Some(dir.clone()))?;
        let mut httpd = Httpd { address, dir, server, name: name.to_owned(), mpm: config.mpm, finished: false };
        httpd.wait_ready()?;
        Ok(httpd)
    }

    fn wait_ready(&mut self) -> Result<()> {
        let give_up = Instant::now() + Duration::from_secs(30);
        let request = get(STATIC_PAGE, &[], false);
        loop {
            if !self.server.running()? {
                bail!("httpd of {} ended while starting:\n{}", self.name, self.log_tail(15));
            }
            let seen = client::visit(self.address, &request, &|| Instant::now() > give_up);
            match seen.status() {
                Some(200) => return Ok(()),
                Some(status) => {
                    bail!("httpd of {} answers {STATIC_PAGE} with {status}:\n{}", self.name, self.log_tail(15))
                }
                None if Instant::now() > give_up => {
                    bail!("httpd of {} did not answer within 30 s:\n{}", self.name, self.log_tail(15))
                }
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    pub fn pid(&self) -> i32 {
        self.server.pid()
    }

    pub fn running(&mut self) -> Result<bool> {
        self.server.running()
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn decision_log(&self) -> PathBuf {
        self.dir.join("decisions.jsonl")
    }

    /// Where the scripts tell when they began (see `www/long.php`).
    pub fn marks(&self) -> PathBuf {
        self.dir.join("marks")
    }

    /// When the script told `name` to its mark, on CLOCK_MONOTONIC; `None`: not yet.
    pub fn mark_ns(&self, name: &str) -> Option<i64> {
        fs::read_to_string(self.marks().join(name)).ok()?.trim().parse().ok()
    }

    /// Waits until the script has told `name`; an error after `patience`.
    pub fn wait_mark(&self, name: &str, patience: Duration) -> Result<i64> {
        self.wait_mark_or(name, patience, &|| false)?.context("the script began")
    }

    /// The same; `None` when `over` says that the script will not begin any more.
    pub fn wait_mark_or(&self, name: &str, patience: Duration, over: &dyn Fn() -> bool) -> Result<Option<i64>> {
        let give_up = Instant::now() + patience;
        loop {
            let over = over();
            // Asked before the mark is looked for: who was quick has left it by then.
            if let Some(ns) = self.mark_ns(name) {
                return Ok(Some(ns));
            }
            if over {
                return Ok(None);
            }
            ensure!(Instant::now() < give_up, "{name} did not begin within {} s", patience.as_secs());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub fn visit(&self, path: &str, headers: &[(&str, &str)], patience: Duration) -> Visit {
        let give_up = Instant::now() + patience;
        client::visit(self.address, &get(path, headers, false), &|| Instant::now() > give_up)
    }

    /// `?auto` of mod_status: its lines as name and value.
    pub fn status(&self) -> Result<Vec<(String, String)>> {
        let seen = self.visit("/server-status?auto", &[], Duration::from_secs(10));
        ensure!(seen.status() == Some(200), "/server-status: {}", seen.text());
        Ok(String::from_utf8_lossy(&seen.body)
            .lines()
            .filter_map(|l| l.split_once(": "))
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect())
    }

    /// The scoreboard's letters.
    pub fn scoreboard(&self) -> Result<String> {
        let status = self.status()?;
        status.into_iter().find(|(n, _)| n == "Scoreboard").map(|(_, v)| v).context("mod_status tells no Scoreboard")
    }

    /// The JSON of our status page.
    pub fn atropos_status(&self) -> Result<serde_json::Value> {
        let seen = self.visit("/atropos-status?json", &[], Duration::from_secs(10));
        ensure!(seen.status() == Some(200), "/atropos-status?json: {}", seen.text());
        serde_json::from_slice(&seen.body)
            .with_context(|| format!("/atropos-status?json: {}", String::from_utf8_lossy(&seen.body)))
    }

    /// The process whose controller decides; 0 = none for the moment.
    pub fn leader(&self) -> Result<i32> {
        let status = self.atropos_status()?;
        Ok(status["atropos"]["controller"]["pid"].as_i64().context("the status page names no controller")? as i32)
    }

    pub fn graceful(&self) {
        guard::signal(self.pid(), libc::SIGUSR1);
    }

    /// The server's processes, the parent excepted.
    pub fn children(&self) -> Vec<i32> {
        let text = fs::read_to_string(format!("/proc/{0}/task/{0}/children", self.pid())).unwrap_or_default();
        text.split_whitespace().filter_map(|p| p.parse().ok()).collect()
    }

    /// CPU time used so far by the server and its children, dead and alive, in ns.
    pub fn cpu_ns(&self) -> i64 {
        let alive: u64 = self.children().into_iter().map(|p| cpu_ticks(p, false)).sum();
        // SAFETY: sysconf has no preconditions.
        let ticks_per_s = unsafe { libc::sysconf(libc::_SC_CLK_TCK) }.max(1);
        ((cpu_ticks(self.pid(), true) + alive) as i64) * (1_000_000_000 / ticks_per_s)
    }

    /// Waits until no thread of a counted server has anything to do. A look takes its threads one after the other, and one
    /// may wake up another meanwhile: some looks in a row.
    pub fn wait_idle(&self, give_up: Instant) -> Result<()> {
        const LOOKS: u32 = 5;
        let mut idle = 0;
        while idle < LOOKS {
            ensure!(Instant::now() < give_up, "httpd of {} is never idle", self.name);
            let threads = fs::read_dir(format!("/proc/{}/task", self.pid()))?;
            let works = |thread: fs::DirEntry| {
                let stat = fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
                stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('R'))
            };
            idle = if threads.flatten().any(works) { 0 } else { idle + 1 };
        }
        Ok(())
    }

    /// How often the children's controller threads have slept so far.
    pub fn controller_sleeps(&self) -> Result<u64> {
        let (mut sleeps, mut threads) = (0, 0);
        for thread in self.children().into_iter().flat_map(|pid| fs::read_dir(format!("/proc/{pid}/task"))).flatten() {
            let status = fs::read_to_string(thread?.path().join("status")).unwrap_or_default();
            let field = |name: &str| status.lines().find_map(|l| l.strip_prefix(name)).map(str::trim);
            if field("Name:") == Some("atropos") {
                threads += 1;
                sleeps += field("voluntary_ctxt_switches:").and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
            }
        }
        ensure!(threads > 0, "no child of httpd has a thread named atropos");
        Ok(sleeps)
    }

    pub fn footprint(&self) -> Footprint {
        let mut all = Footprint::default();
        for pid in std::iter::once(self.pid()).chain(self.children()) {
            all.processes += 1;
            all.descriptors += fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, |d| d.count());
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let number = |name: &str| -> usize {
                let line = status.lines().find_map(|l| l.strip_prefix(name));
                line.and_then(|v| v.split_whitespace().next()?.parse().ok()).unwrap_or(0)
            };
            all.threads += number("Threads:");
            all.anonymous_kib += number("RssAnon:");
        }
        all
    }

    /// How many descriptors of each kind all processes have open: a file's path, "tcp socket in state 01", "pipe", …
    pub fn descriptors(&self) -> BTreeMap<String, usize> {
        let sockets = sockets_by_inode();
        let mut kinds = BTreeMap::new();
        for pid in std::iter::once(self.pid()).chain(self.children()) {
            for entry in fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
                let target = fs::read_link(entry.path()).unwrap_or_default().display().to_string();
                let kind = match target.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']')) {
                    Some(inode) => sockets.get(inode).cloned().unwrap_or_else(|| "socket of no table".into()),
                    None => target.split(":[").next().unwrap_or_default().to_owned(),
                };
                *kinds.entry(kind).or_default() += 1;
            }
        }
        kinds
    }

    pub fn log(&self) -> String {
        fs::read(self.dir.join("error.log")).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default()
    }

    /// The ends of the error log and of what the server said before it had one.
    pub fn log_tail(&self, lines: usize) -> String {
        let all = fs::read_to_string(self.dir.join("stderr.log")).unwrap_or_default() + &self.log();
        let all: Vec<_> = all.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }

    /// Lines that mean a crash or a child that had to be killed: no run may ever cause one.
    pub fn crash_lines(&self) -> Vec<String> {
        let bad = [
            "exit signal",
            "seg fault or similar",
            "still did not exit",
            "could not make child process",
            "server reached a fatal",
            "corrupted",
            "double free",
            "free(): ",
            "malloc(): ",
            "stack smashing",
            "terminate called",
            "Assertion",
            "panicked at",
        ];
        let all = fs::read_to_string(self.dir.join("stderr.log")).unwrap_or_default() + &self.log();
        all.lines().filter(|l| bad.iter().any(|b| l.contains(b))).map(str::to_owned).collect()
    }

    /// Ends the server after a good run and says how it ended: a child that does not go is a fault. Its folder goes.
    pub fn finish(mut self) -> Result<()> {
        // Told to end at once, httpd's MPMs of threads (2.4.68, by code that no patch of ours touches) close the sockets of
        // their workers while those give the same ones back: one child in thirty crashed in close_worker_sockets() when
        // the last request had just been answered. Told to end gracefully they do not.
        let signal = if self.mpm == Mpm::Prefork { libc::SIGTERM } else { libc::SIGWINCH };
        self.server.stop(signal, Duration::from_secs(30));
        let crashes = self.crash_lines();
        ensure!(crashes.is_empty(), "at the end of {}: {}", self.name, crashes.join("; "));
        self.finished = true;
        Ok(())
    }

    /// Ends a counted server; callgrind's file of each of its threads.
    pub fn finish_counted(mut self) -> Result<Vec<String>> {
        self.server.stop(libc::SIGTERM, Duration::from_secs(60));
        let files = callgrind::threads(&self.dir)?;
        self.finished = true;
        Ok(files)
    }

    /// Ends the server at once: scripts that still run are not waited for.
    pub fn abandon(mut self) {
        self.finished = true;
        let children = self.children();
        guard::signal(self.pid(), libc::SIGTERM);
        for child in children {
            guard::signal(child, libc::SIGKILL);
        }
        self.server.stop(libc::SIGTERM, Duration::from_secs(20));
    }
}

impl Drop for Httpd {
    fn drop(&mut self) {
        self.server.stop(libc::SIGTERM, Duration::from_secs(20));
        if !self.finished {
            let files = ["error.log", "stderr.log", "decisions.jsonl", "httpd.conf", "php.ini", "access.log"];
            keep_logs(&self.name, &self.dir, &files);
        }
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// What a server takes of the system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Footprint {
    pub processes: usize,
    pub threads: usize,
    pub descriptors: usize,
    /// Memory of its own, all processes.
    pub anonymous_kib: usize,
}

impl std::fmt::Display for Footprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (p, t, d, m) = (self.processes, self.threads, self.descriptors, self.anonymous_kib);
        write!(f, "{p} processes, {t} threads, {d} descriptors, {:.1} MiB", m as f64 / 1024.0)
    }
}

fn cpu_ticks(pid: i32, with_dead_children: bool) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // Fields 14..17 of proc(5), counted after the command's closing parenthesis: utime stime cutime cstime.
    let rest = stat.rsplit(") ").next().unwrap_or("").split_whitespace().skip(11);
    rest.take(if with_dead_children { 4 } else { 2 }).filter_map(|f| f.parse::<u64>().ok()).sum()
}

/// The pages and the folders that the server writes to.
fn fill(dir: &Path, scripts: Option<&Path>) -> Result<()> {
    let www = dir.join("www");
    for folder in [&www, &dir.join("marks"), &dir.join("sessions"), &dir.join("tmp")] {
        fs::create_dir(folder)?;
        owned(folder)?;
    }
    fs::write(www.join(&STATIC_PAGE[1..]), "static\n".repeat(STATIC_BYTES / 7 + 1).split_at(STATIC_BYTES).0)?;
    for (name, text) in PAGES {
        fs::write(www.join(name), text)?;
    }
    for entry in scripts
        .map(|s| fs::read_dir(s).with_context(|| format!("read {}", s.display())))
        .transpose()?
        .into_iter()
        .flatten()
    {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "php") {
            fs::copy(&path, www.join(path.file_name().context("a script's name")?))?;
        }
    }
    for entry in fs::read_dir(&www)? {
        fs::set_permissions(entry?.path(), fs::Permissions::from_mode(0o644))?;
    }
    Ok(())
}

fn conf(install: &Install, config: &Config, dir: &Path, port: u16) -> Result<String> {
    let mut text = String::from("# written by the bench for this run\n");
    let mut load = |name: &str, file: Option<PathBuf>| {
        // What has no file is linked in.
        if let Some(file) = file {
            text += &format!("LoadModule {name}_module {}\n", quoted(&file));
        }
    };
    load(&format!("mpm_{}", config.mpm.name()), install.module(&format!("mod_mpm_{}", config.mpm.name())));
    for name in ["unixd", "authz_core", "authz_host", "log_config", "mime", "dir", "status", "reqtimeout", "env"] {
        load(name, install.module(&format!("mod_{name}")));
    }
    load("php", install.module("libphp"));
    if config.atropos.is_some() {
        load("atropos", Some(install.atropos()?.0));
    }
    text += &config.mpm_directives();
    let www = dir.join("www");
    text += &format!(
        "ServerName 127.0.0.1\n\
         ServerRoot {root}\n\
         Listen 127.0.0.1:{port}\n\
         ListenBacklog {backlog}\n\
         PidFile {pid}\n\
         DefaultRuntimeDir {root}\n\
         CoreDumpDirectory {root}\n\
         ErrorLog {error}\n\
         LogLevel warn\n\
         CustomLog {access} \"%h %l %u %t \\\"%r\\\" %>s %b\"\n\
         DocumentRoot {www}\n\
         TypesConfig {types}\n\
         PHPIniDir {root}\n\
         KeepAlive On\n\
         KeepAliveTimeout 5\n\
         MaxKeepAliveRequests {requests}\n\
         Timeout 60\n\
         GracefulShutdownTimeout 20\n\
         <Directory {www}>\n\
         Require all granted\n\
         <FilesMatch \"\\.php$\">\nSetHandler application/x-httpd-php\n</FilesMatch>\n\
         </Directory>\n\
         <Location /server-status>\nSetHandler server-status\n</Location>\n\
         <Location /atropos-status>\nSetHandler {page}\n</Location>\n",
        root = quoted(dir),
        backlog = config.backlog,
        pid = quoted(&dir.join("httpd.pid")),
        error = quoted(&dir.join("error.log")),
        access = quoted(&dir.join("access.log")),
        www = quoted(&www),
        types = quoted(&install.prefix.join("conf/mime.types")),
        requests = config.keep_alive_requests,
        // httpd compares each request with each section: with and without the module there are as many.
        page = if config.atropos.is_some() { "atropos-status" } else { "none" },
    );
    if let Some(mode) = config.atropos {
        text += &format!("Atropos {}\nAtroposDecisionLog {}\n", mode.atropos(), quoted(&dir.join("decisions.jsonl")));
    }
    text += &config.directives.iter().map(|d| format!("{d}\n")).collect::<String>();
    Ok(text)
}

/// What the kernel's tables say of each socket, by inode.
fn sockets_by_inode() -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    for (table, inode_at) in [("tcp", 9), ("tcp6", 9), ("udp", 9), ("unix", 6)] {
        let text = fs::read_to_string(format!("/proc/net/{table}")).unwrap_or_default();
        for line in text.lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let Some(inode) = fields.get(inode_at) else { continue };
            let what = match table {
                "unix" => format!("unix socket {}", fields.get(7).unwrap_or(&"without a name")),
                _ => format!("{table} socket {} in state {}", fields[1].rsplit(':').next().unwrap_or(""), fields[3]),
            };
            all.insert((*inode).to_owned(), what);
        }
    }
    all
}
