//! Sessions of the bench's own: control, and the noise of a case.
use crate::cases::Failure;
use anyhow::{Context, Result};
use postgres::fallible_iterator::FallibleIterator;
use postgres::{Client, NoTls};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// The superuser of the bench's clusters, its database and the only port (a name of the socket, nothing listens on TCP).
pub const USER: &str = "atropos";
pub const DATABASE: &str = "bench";
pub const PORT: u16 = 5432;
/// The schema of the stock load.
pub const SCHEMA: &str = "public";

pub fn connect(socket_dir: &Path, application_name: &str) -> Result<Client> {
    connect_to(socket_dir, application_name, DATABASE)
}

pub fn connect_to(socket_dir: &Path, application_name: &str, database: &str) -> Result<Client> {
    postgres::Config::new()
        .host_path(socket_dir)
        .port(PORT)
        .user(USER)
        .dbname(database)
        .application_name(application_name)
        .connect_timeout(Duration::from_secs(10))
        .connect(NoTls)
        .with_context(|| format!("connect to the server at {}", socket_dir.display()))
}

pub fn backend_pid(client: &mut Client) -> Result<i32> {
    Ok(client.query_one("SELECT pg_backend_pid()", &[])?.get(0))
}

/// How the server ended a statement or a session.
pub fn failure(error: &postgres::Error) -> Failure {
    match error.as_db_error() {
        Some(e) => Failure {
            code: e.code().code().to_owned(),
            text: [Some(e.message()), e.detail(), e.hint()].into_iter().flatten().collect::<Vec<_>>().join(" | "),
        },
        None => Failure { code: String::new(), text: error.to_string() },
    }
}

/// sysbench, connected to the server in `dir`.
pub fn sysbench(dir: &Path, schema: &str) -> Command {
    let mut command = Command::new("sysbench");
    command
        .arg("--db-driver=pgsql")
        .arg(format!("--pgsql-host={}", dir.display()))
        .arg(format!("--pgsql-port={PORT}"))
        .arg(format!("--pgsql-user={USER}"))
        .arg(format!("--pgsql-db={DATABASE}"))
        .env("PGOPTIONS", format!("-c search_path={schema}"))
        .env("PGAPPNAME", "sysbench");
    command
}

/// Sends nothing for `hold`, as a client that went away to think; returns early when the server ends the session.
pub fn stay_idle(client: &mut Client, hold: Duration) -> Result<(), postgres::Error> {
    let until = Instant::now() + hold;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        // Waiting for notifications is the way to hear what the server says unasked: here, that we are gone.
        client.notifications().timeout_iter(left.min(Duration::from_millis(500))).next()?;
    }
}
