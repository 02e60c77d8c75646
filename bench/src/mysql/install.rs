//! Where `cargo xtask server build mysql` puts its builds, and the means beside Atropos.
use super::server::{base_settings, Mysqld};
use super::{session, template};
use crate::dirs::{cache_dir, new_run_dir};
use crate::guard::Guarded;
use crate::host::{setting, Dataset, Host, HostId, Server, Setting, Variant, DECISION_LOG};
use crate::record::Mode;
use anyhow::{bail, ensure, Context, Result};
use mysql::prelude::Queryable;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

#[derive(Clone, Debug)]
pub struct Install {
    pub prefix: PathBuf,
    pub variant: Variant,
    /// "9.7.2", as the server says it.
    pub version: String,
}

/// What `timeouts` sets, in s, s and ms: our noise lasts 10 s, and limits much shorter would hit an ordinary slow day.
/// `max_execution_time` ends statements that only read; a waiter's limit ends the waiter.
const TIMEOUTS: [(&str, &str); 3] =
    [("lock_wait_timeout", "5"), ("innodb_lock_wait_timeout", "5"), ("max_execution_time", "5000")];

/// pt-kill as its manual shows it, with 5 s instead of 60 since our noise lasts 10: the oldest of those who run one
/// statement, or stay idle, for longer; it looks every 2.5 s then (half of the busy time).
pub const PT_KILL: [&str; 6] =
    ["--busy-time=5", "--idle-time=5", "--victims=oldest", "--kill", "--print", "--no-version-check"];

impl Install {
    /// Finds the build of `variant`; `prefix` (`--prefix`) overrides the place.
    pub fn find(variant: Variant, prefix: Option<&Path>) -> Result<Install> {
        let prefix = match prefix {
            Some(p) => p.to_path_buf(),
            None => cache_dir()?.join("install/mysql-9.7").join(variant.name()),
        };
        let build = || format!("build it with `cargo xtask server build mysql --variant {}`", variant.name());
        let mysqld = prefix.join("bin/mysqld");
        if !mysqld.exists() {
            bail!("no MySQL at {}: {}", prefix.display(), build());
        }
        if variant == Variant::Patched && !prefix.join("lib/plugin/atropos.so").exists() {
            bail!("the MySQL at {} has no lib/plugin/atropos.so: {}", prefix.display(), build());
        }
        // "…/mysqld  Ver 9.7.2 for Linux on x86_64 (Source distribution)"
        let out = Command::new(&mysqld)
            .args(["--no-defaults", "--version"])
            .output()
            .with_context(|| format!("run {}", mysqld.display()))?;
        let text = String::from_utf8_lossy(&out.stdout);
        let version = text.split("Ver ").nth(1).and_then(|v| v.split_whitespace().next());
        let version = version.with_context(|| format!("{} --version says {text:?}", mysqld.display()))?.to_owned();
        Ok(Install { prefix, variant, version })
    }

    /// As `Host::start`, for those who need more of the server than a case does.
    pub fn start_server(
        &self,
        dataset: &Dataset,
        mode: Option<Mode>,
        settings: &[Setting],
        name: &str,
        counted: bool,
    ) -> Result<Mysqld> {
        let template = template::data_dir(self, dataset)?;
        let dir = new_run_dir()?;
        let mut all = vec![];
        if let Some(mode) = mode.filter(|_| self.loaded()) {
            all.push(setting("plugin_load_add", "atropos.so"));
            all.push(setting("atropos_mode", mode.atropos()));
            all.push(setting("atropos_decision_log", dir.join(DECISION_LOG).display()));
        }
        if mode == Some(Mode::Timeouts) {
            all.extend(TIMEOUTS.map(|(name, value)| setting(name, value)));
        }
        all.extend(settings.iter().cloned());
        let server = Mysqld::start_copy(self, dir, &template, &all, name, counted)?;
        if mode.is_some() && self.loaded() {
            // It fails open: a server without the plugin would make every run look like mode off.
            let ask = "SELECT PLUGIN_STATUS FROM information_schema.PLUGINS WHERE PLUGIN_NAME = 'atropos'";
            let status: Option<String> = server.admin()?.query_first(ask)?;
            ensure!(status.as_deref() == Some("ACTIVE"), "the plugin is {status:?}, not ACTIVE: see the server's log");
        }
        Ok(server)
    }
}

impl Host for Install {
    fn id(&self) -> HostId {
        HostId::Mysql
    }

    fn version(&self) -> &str {
        &self.version
    }

    fn variant(&self) -> Variant {
        self.variant
    }

    fn base_settings(&self) -> Vec<Setting> {
        base_settings()
    }

    fn start(
        &self,
        dataset: &Dataset,
        mode: Option<Mode>,
        settings: &[Setting],
        name: &str,
    ) -> Result<Box<dyn Server>> {
        Ok(Box::new(self.start_server(dataset, mode, settings, name, false)?))
    }

    fn peers(&self) -> &'static [Mode] {
        &[Mode::Timeouts, Mode::PtKill]
    }

    fn means(&self, peer: Mode) -> String {
        match peer {
            Mode::PtKill => format!("pt-kill {}", PT_KILL.join(" ")),
            Mode::Timeouts => TIMEOUTS.map(|(name, value)| format!("{name} = {value}")).join(", "),
            _ => String::new(),
        }
    }

    fn peer(&self, server: &dyn Server, mode: Mode) -> Result<Option<Guarded>> {
        if mode != Mode::PtKill {
            return Ok(None);
        }
        let log = File::create(server.dir().join("pt-kill.log"))?;
        let mut command = Command::new("pt-kill");
        command
            .args(PT_KILL)
            .arg(format!("--socket={}", session::socket(server.dir()).display()))
            .arg(format!("--user={}", session::ADMIN))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let running = Guarded::spawn(command, libc::SIGTERM, None);
        running.context("start pt-kill (install it: apt-get install percona-toolkit)").map(Some)
    }

    fn schema(&self) -> &'static str {
        session::DATABASE
    }

    fn sysbench(&self, dir: &Path, schema: &str) -> Command {
        session::sysbench(dir, schema)
    }
}
