//! Sessions of the bench's own: control, and the noise of a case.
use crate::cases::Failure;
use anyhow::{Context, Result};
use mysql::prelude::Queryable;
use mysql::{Conn, OptsBuilder};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// The administrator, and the account of the load and the noise: no privileges beyond its data, and FLUSH.
pub const ADMIN: &str = "root";
pub const USER: &str = "app";
pub const DATABASE: &str = "bench";

pub fn socket(dir: &Path) -> PathBuf {
    dir.join("mysqld.sock")
}

/// As the bench's ordinary user, in its database.
pub fn connect(dir: &Path) -> Result<Conn> {
    connect_as(dir, USER, Some(DATABASE))
}

pub fn connect_as(dir: &Path, user: &str, database: Option<&str>) -> Result<Conn> {
    let options = OptsBuilder::new().socket(Some(socket(dir).display().to_string())).user(Some(user)).db_name(database);
    Conn::new(options).with_context(|| format!("connect as {user} to the server at {}", dir.display()))
}

/// sysbench, connected to the server in `dir`.
pub fn sysbench(dir: &Path, schema: &str) -> Command {
    let mut command = Command::new("sysbench");
    command
        .arg("--db-driver=mysql")
        .arg(format!("--mysql-socket={}", socket(dir).display()))
        .arg(format!("--mysql-user={USER}"))
        .arg(format!("--mysql-db={schema}"));
    command
}

/// How the server ended a statement or a session.
pub fn failure(error: &mysql::Error) -> Failure {
    match error {
        mysql::Error::MySqlError(e) => Failure { code: e.code.to_string(), text: e.message.clone() },
        other => Failure { code: String::new(), text: format!("the connection was lost ({other})") },
    }
}

/// Runs a statement and reads all it gives. (`query_drop` drops an error that comes after the first packet, as that of
/// a SELECT which was killed while it ran.)
pub fn run(client: &mut Conn, sql: impl AsRef<str>) -> Result<(), mysql::Error> {
    let mut result = client.query_iter(sql)?;
    while let Some(rows) = result.iter() {
        for row in rows {
            row?;
        }
    }
    Ok(())
}

/// Sends nothing for `hold`, as a client that went away to think; returns early when the server ends the session.
pub fn stay_idle(client: &mut Conn, hold: Duration) -> Result<(), mysql::Error> {
    let until = Instant::now() + hold;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        let mut socket = libc::pollfd { fd: client.as_raw_fd(), events: libc::POLLIN | libc::POLLRDHUP, revents: 0 };
        // SAFETY: one valid pollfd for the time of the call.
        let ready = unsafe { libc::poll(&mut socket, 1, left.as_millis().clamp(1, 500) as i32) };
        if ready > 0 {
            // Unasked, the server only says that we are gone: the next command tells how.
            return run(client, "DO 0");
        }
    }
}
