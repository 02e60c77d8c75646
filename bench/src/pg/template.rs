//! Prepared data folders, made once per dataset and server version and copied for each run.
use super::cluster::Cluster;
use super::install::Install;
use super::session;
use crate::dirs::{self, new_run_dir, server_command};
use crate::host::{setting, Dataset, Server};
use crate::load;
use anyhow::{bail, Context, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// The data folder for `dataset`; prepared now (which takes a minute) when the cache does not have it yet.
pub fn data_dir(install: &Install, dataset: &Dataset) -> Result<PathBuf> {
    let name = format!("pg{}-{}x{}", install.version, dataset.tables, dataset.rows);
    dirs::template(&name, &format!("3 {} {dataset:?}", install.version), |home| {
        eprintln!(
            "preparing the data: {} tables of {} rows, {} more in one (kept for later runs)",
            dataset.tables, dataset.rows, dataset.extra_rows
        );
        prepare(install, dataset, home)
    })
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
        setting("fsync", "off"),
        setting("autovacuum", "off"),
        setting("full_page_writes", "off"),
        setting("maintenance_work_mem", "'256MB'"),
    ];
    fs::write(dir.join("data/postgresql.auto.conf"), "")?;
    let cluster = create_database(install, dir, &settings)?;
    let mut client = cluster.connect("prepare")?;
    for schema in &dataset.schemas {
        client.batch_execute(&format!("CREATE SCHEMA IF NOT EXISTS {schema}"))?;
        load::prepare(session::sysbench(cluster.dir(), schema), dataset.tables, dataset.rows)?;
    }
    if dataset.extra_rows > 0 {
        client.batch_execute(&format!(
            "INSERT INTO {0}.sbtest{3} (id, k, c, pad) SELECT {1} + i, {1} + i, md5(i::text) || md5((i + 1)::text) || md5((i + 2)::text), md5(i::text)
               FROM generate_series(1, {2}) i;
             SELECT setval('{0}.sbtest{3}_id_seq', {1} + {2})",
            dataset.schemas[0], dataset.rows, dataset.extra_rows, dataset.extra_table
        ))?;
    }
    for sql in &dataset.sql {
        client.batch_execute(sql).with_context(|| format!("prepare: {sql}"))?;
    }
    client.batch_execute("VACUUM (FREEZE, ANALYZE)")?;
    client.batch_execute("CHECKPOINT")?;
    drop(client);
    let dir = cluster.stop_keep();
    dirs::adopt_template(&dir, home)
}

fn create_database(install: &Install, dir: PathBuf, settings: &[crate::host::Setting]) -> Result<Cluster> {
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
