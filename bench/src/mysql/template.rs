//! Prepared data folders, made once per dataset and server version and copied for each run.
use super::install::Install;
use super::server::{base_settings, option_file, Mysqld};
use super::session;
use crate::dirs::{self, new_run_dir, server_command};
use crate::host::{setting, Dataset};
use crate::load;
use anyhow::{bail, Context, Result};
use mysql::prelude::Queryable;
use std::fs;
use std::path::{Path, PathBuf};

/// The data folder for `dataset`; prepared now (which takes a minute) when the cache does not have it yet.
pub fn data_dir(install: &Install, dataset: &Dataset) -> Result<PathBuf> {
    let name = format!("mysql{}-{}x{}", install.version, dataset.tables, dataset.rows);
    dirs::template(&name, &format!("2 {} {dataset:?}", install.version), |home| {
        eprintln!(
            "preparing the data: {} tables of {} rows, {} more in one (kept for later runs)",
            dataset.tables, dataset.rows, dataset.extra_rows
        );
        prepare(install, dataset, home)
    })
}

fn prepare(install: &Install, dataset: &Dataset, home: &Path) -> Result<()> {
    let dir = new_run_dir()?;
    // Durability does not matter until the folder is ready; the copy starts without left-over work (purge, redo).
    let settings = [
        setting("innodb_flush_log_at_trx_commit", "0"),
        setting("sync_binlog", "0"),
        setting("disable_log_bin", "ON"),
        setting("innodb_fast_shutdown", "0"),
    ];
    let all: Vec<_> = base_settings().into_iter().chain(settings.clone()).collect();
    fs::write(dir.join("my.cnf"), option_file(&install.prefix, &dir, &all))?;
    let out = server_command(&install.prefix.join("bin/mysqld"), &dir)?
        .arg(format!("--defaults-file={}", dir.join("my.cnf").display()))
        .arg("--initialize-insecure")
        .output()
        .context("run mysqld --initialize-insecure")?;
    if !out.status.success() {
        let _ = fs::remove_dir_all(&dir);
        bail!("mysqld --initialize-insecure failed ({}): {}", out.status, String::from_utf8_lossy(&out.stderr));
    }
    let server = Mysqld::start_in(install, dir, &settings, "prepare", false)?;
    let mut client = server.admin()?;
    client.query_drop(format!("CREATE DATABASE {}", session::DATABASE))?;
    client.query_drop(format!("CREATE USER {}@localhost", session::USER))?;
    client.query_drop(format!("GRANT RELOAD ON *.* TO {}@localhost", session::USER))?;
    for schema in [&session::DATABASE].into_iter().chain(dataset.schemas.iter()) {
        client.query_drop(format!("CREATE DATABASE IF NOT EXISTS {schema}"))?;
        client.query_drop(format!("GRANT ALL ON {schema}.* TO {}@localhost", session::USER))?;
    }
    for schema in &dataset.schemas {
        load::prepare(session::sysbench(crate::host::Server::dir(&server), schema), dataset.tables, dataset.rows)?;
    }
    let sql = extra_rows(dataset).into_iter().chain(dataset.sql.iter().cloned());
    client.query_drop(format!("USE {}", session::DATABASE))?;
    client.query_drop("SET cte_max_recursion_depth = 100000000")?;
    for sql in sql {
        client.query_drop(&sql).with_context(|| format!("prepare: {sql}"))?;
    }
    drop(client);
    let dir = server.stop_keep()?;
    dirs::adopt_template(&dir, home)
}

fn extra_rows(dataset: &Dataset) -> Option<String> {
    let (schema, table, rows) = (dataset.schemas[0], dataset.extra_table, dataset.rows);
    let series = series(dataset.extra_rows);
    (dataset.extra_rows > 0).then(|| {
        format!(
            "INSERT INTO {schema}.sbtest{table} (id, k, c, pad) {series}
             SELECT {rows} + i, {rows} + i, CONCAT(SHA2(i, 224), SHA2(i + 1, 224)), SHA2(i, 224) FROM series"
        )
    })
}

/// A common table expression `series` of `i` from 1 to `rows`.
pub fn series(rows: u32) -> String {
    format!("WITH RECURSIVE series (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM series WHERE i < {rows})")
}
