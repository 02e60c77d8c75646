//! Prepared data folders, made once per dataset and server version and copied for each run.
use super::cluster::{guc, new_run_dir, server_command, Cluster};
use super::install::{cache_dir, make_dir, server_identity, Install};
use super::session;
use crate::load;
use anyhow::{bail, Context, Result};
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(Clone, Debug)]
pub struct Dataset {
    /// sysbench's sbtest1..tables in each of these schemas.
    pub schemas: Vec<&'static str>,
    pub tables: u32,
    pub rows: u32,
    /// Rows beyond `rows` in sbtest1 of the first schema: the load never touches them, a culprit's UPDATE does.
    pub extra_rows: u32,
    pub sql: Vec<String>,
}

impl Dataset {
    pub fn oltp(tables: u32, rows: u32) -> Dataset {
        Dataset { schemas: vec!["public"], tables, rows, extra_rows: 0, sql: vec![] }
    }
}

/// The data folder for `dataset`; prepared now (which takes a minute) when the cache does not have it yet.
pub fn data_dir(install: &Install, dataset: &Dataset) -> Result<PathBuf> {
    let base = cache_dir()?.join("templates");
    make_dir(&base, None)?;
    let key = fnv(&format!("3 {} {dataset:?}", install.version));
    let home = base.join(format!("pg{}-{}x{}-{key:016x}", install.version, dataset.tables, dataset.rows));
    // One maker at a time; the others find it ready. The lock goes with the descriptor.
    let lock = File::create(base.join(format!("{key:016x}.lock")))?;
    // SAFETY: the descriptor is open.
    if unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX) } != 0 {
        bail!("locking {} failed: {}", base.display(), std::io::Error::last_os_error());
    }
    if !home.join("ready").exists() {
        eprintln!(
            "preparing the data: {} tables of {} rows, {} more in the first (kept for later runs)",
            dataset.tables, dataset.rows, dataset.extra_rows
        );
        let _ = fs::remove_dir_all(&home);
        prepare(install, dataset, &home).with_context(|| format!("prepare the template {}", home.display()))?;
        File::create(home.join("ready"))?;
    }
    Ok(home.join("data"))
}

fn prepare(install: &Install, dataset: &Dataset, home: &Path) -> Result<()> {
    let dir = new_run_dir()?;
    let out = server_command(&install.bin("initdb"), &dir)?
        .arg("-D")
        .arg(dir.join("data"))
        .args(["-U", session::USER, "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"])
        .output()
        .context("run initdb")?;
    if !out.status.success() {
        let _ = fs::remove_dir_all(&dir);
        bail!("initdb failed ({}): {}", out.status, String::from_utf8_lossy(&out.stderr));
    }
    // Durability does not matter until the folder is ready, and then it is synced as a whole.
    let settings = [
        guc("fsync", "off"),
        guc("autovacuum", "off"),
        guc("full_page_writes", "off"),
        guc("maintenance_work_mem", "'256MB'"),
    ];
    fs::write(dir.join("data/postgresql.auto.conf"), "")?;
    let cluster = create_database(install, dir, &settings)?;
    let mut client = cluster.connect("prepare")?;
    for schema in &dataset.schemas {
        client.batch_execute(&format!("CREATE SCHEMA IF NOT EXISTS {schema}"))?;
        load::prepare(cluster.dir(), schema, dataset.tables, dataset.rows)?;
    }
    if dataset.extra_rows > 0 {
        client.batch_execute(&format!(
            "INSERT INTO {0}.sbtest1 (id, k, c, pad) SELECT {1} + i, {1} + i, md5(i::text) || md5((i + 1)::text) || md5((i + 2)::text), md5(i::text)
               FROM generate_series(1, {2}) i;
             SELECT setval('{0}.sbtest1_id_seq', {1} + {2})",
            dataset.schemas[0], dataset.rows, dataset.extra_rows
        ))?;
    }
    for sql in &dataset.sql {
        client.batch_execute(sql).with_context(|| format!("prepare: {sql}"))?;
    }
    client.batch_execute("VACUUM (FREEZE, ANALYZE)")?;
    client.batch_execute("CHECKPOINT")?;
    drop(client);
    let dir = cluster.stop_keep();
    make_dir(home, server_identity()?)?;
    fs::rename(dir.join("data"), home.join("data"))?;
    let _ = fs::remove_dir_all(&dir);
    Command::new("sync").arg("-f").arg(home).status()?;
    Ok(())
}

fn create_database(install: &Install, dir: PathBuf, settings: &[(String, String)]) -> Result<Cluster> {
    // The readiness check connects to the bench's database, so that must exist: single-user mode makes it.
    let mut command = server_command(&install.bin("postgres"), &dir)?;
    command.args(["--single", "-D"]).arg(dir.join("data")).arg("postgres").stdin(std::process::Stdio::piped());
    command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped());
    let mut child = command.spawn()?;
    use std::io::Write;
    child
        .stdin
        .take()
        .context("stdin of postgres --single")?
        .write_all(format!("CREATE DATABASE {}\n", session::DATABASE).as_bytes())?;
    let out = child.wait_with_output()?;
    if !out.status.success() {
        let _ = fs::remove_dir_all(&dir);
        bail!("CREATE DATABASE failed ({}): {}", out.status, String::from_utf8_lossy(&out.stderr));
    }
    Cluster::start_in(install, dir, settings, "prepare")
}

fn fnv(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}
