//! What the cases, the measurements and the comparisons need of a server, whichever it is.
use crate::guard::Guarded;
use crate::record::Mode;
use crate::{mysql, pg};
use anyhow::{bail, Result};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum HostId {
    Postgresql,
    Mysql,
    Httpd,
}

impl HostId {
    /// As on the command line and in records.
    pub fn name(self) -> &'static str {
        ["postgresql", "mysql", "httpd"][self as usize]
    }

    pub fn title(self) -> &'static str {
        ["PostgreSQL", "MySQL", "Apache httpd"][self as usize]
    }

    /// The codes with which a client may learn that Atropos stopped it; empty: the connection went without a word.
    pub fn cancel_codes(self) -> &'static [&'static str] {
        match self {
            // A statement; an idle session: by the idle timeout's code, or as an administrator's act.
            HostId::Postgresql => &["57014", "25P03", "57P01"],
            // A statement; KILL CONNECTION closes an idle session's socket, and nothing can be said on it any more.
            HostId::Mysql => &["1317", ""],
            // The page in its stead; or the connection, when part of the page was already sent.
            HostId::Httpd => &["503", ""],
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Variant {
    Patched,
    Vanilla,
}

impl Variant {
    pub fn name(self) -> &'static str {
        match self {
            Variant::Patched => "patched",
            Variant::Vanilla => "vanilla",
        }
    }
}

/// A line of the server's configuration.
pub type Setting = (String, String);

pub fn setting(name: &str, value: impl ToString) -> Setting {
    (name.to_owned(), value.to_string())
}

/// What a database server starts with.
#[derive(Clone, Debug)]
pub struct Dataset {
    /// sysbench's sbtest1..tables in each of these schemas (MySQL: databases).
    pub schemas: Vec<&'static str>,
    pub tables: u32,
    pub rows: u32,
    /// Rows beyond `rows` in table `extra_table` of the first schema: the load never touches them, a culprit does.
    pub extra_rows: u32,
    pub extra_table: u32,
    pub sql: Vec<String>,
}

impl Dataset {
    pub fn oltp(schema: &'static str, tables: u32, rows: u32) -> Dataset {
        Dataset { schemas: vec![schema], tables, rows, extra_rows: 0, extra_table: 1, sql: vec![] }
    }
}

/// An installed database server that runs can be started on.
pub trait Host {
    fn id(&self) -> HostId;
    /// "15.18", as the server says it.
    fn version(&self) -> &str;
    fn variant(&self) -> Variant;
    /// The settings of every run.
    fn base_settings(&self) -> Vec<Setting>;
    /// A fresh server on a copy of `dataset`, in a folder of its own: base settings, then `settings`. The module is
    /// loaded in the way `mode` wants it; `None` leaves it out, as the vanilla build does in any case.
    fn start(&self, dataset: &Dataset, mode: Option<Mode>, settings: &[Setting], name: &str)
        -> Result<Box<dyn Server>>;
    /// The modes beside Atropos's own that this host has means for.
    fn peers(&self) -> &'static [Mode];
    /// What a peer's mode does here, as settings or a command line.
    fn means(&self, peer: Mode) -> String;
    /// What runs beside the server in a peer's mode, if anything does; it ends when dropped.
    fn peer(&self, server: &dyn Server, mode: Mode) -> Result<Option<Guarded>>;
    /// The schema (MySQL: database) of the stock load.
    fn schema(&self) -> &'static str;
    /// sysbench with the options that connect it to the server in `dir`.
    fn sysbench(&self, dir: &Path, schema: &str) -> Command;

    fn loaded(&self) -> bool {
        self.variant() == Variant::Patched
    }
}

/// A server that lives as long as a run; when dropped without `finish` its logs are kept.
pub trait Server: Sync {
    /// The folder of the run; it is also the socket's.
    fn dir(&self) -> &Path;
    /// Lines of the server's log that mean a crash: no case may ever cause one.
    fn crash_lines(&self) -> Vec<String>;
    /// CPU time used so far by the server, all its processes together, in ns.
    fn cpu_ns(&self) -> i64;
    /// Ends the server after a good run; its folder goes.
    fn finish(self: Box<Self>) -> Result<()>;

    fn decision_log(&self) -> PathBuf {
        self.dir().join(DECISION_LOG)
    }
}

pub const DECISION_LOG: &str = "decisions.jsonl";

/// Finds the build of `variant`; `prefix` (`--prefix`) overrides the place.
pub fn find(id: HostId, variant: Variant, prefix: Option<&Path>) -> Result<Box<dyn Host>> {
    Ok(match id {
        HostId::Postgresql => Box::new(pg::install::Install::find(variant, prefix)?),
        HostId::Mysql => Box::new(mysql::install::Install::find(variant, prefix)?),
        HostId::Httpd => bail!("httpd has no database to load: its cases bring their own load"),
    })
}
