//! Where things live: the workspace, the cache of downloads and build trees, the install prefixes, and the
//! unprivileged user that servers run as when we are root.

use anyhow::{bail, Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The system user that runs servers and their tests when xtask runs as root (PostgreSQL refuses root).
pub const SERVER_USER: &str = "atropos";

/// Where root keeps what `SERVER_USER` must be able to read: root's own home is closed to it.
const ROOT_SHARED: &str = "/var/cache/atropos";

pub fn workspace() -> &'static Path {
    atropos_link::checkout()
}

pub fn is_root() -> bool {
    // SAFETY: geteuid has no preconditions and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// Downloads, build trees and logs: `${XDG_CACHE_HOME:-$HOME/.cache}/atropos`.
pub fn cache() -> Result<PathBuf> {
    let base = match std::env::var_os("XDG_CACHE_HOME").filter(|v| !v.is_empty()) {
        Some(dir) => PathBuf::from(dir),
        None => {
            let home = std::env::var_os("HOME").filter(|v| !v.is_empty());
            PathBuf::from(home.context("neither XDG_CACHE_HOME nor HOME is set: set one, build trees go there")?)
                .join(".cache")
        }
    };
    make(base.join("atropos"))
}

/// What the server user must reach: `/var/cache/atropos` for root, else the cache itself.
pub fn shared() -> Result<PathBuf> {
    if is_root() {
        make(PathBuf::from(ROOT_SHARED))
    } else {
        cache()
    }
}

/// Parent of the server prefixes, e.g. `<install>/postgresql-15/patched`.
pub fn install() -> Result<PathBuf> {
    make(shared()?.join("install"))
}

pub fn logs() -> Result<PathBuf> {
    make(cache()?.join("logs"))
}

/// Cargo's target directory for this workspace, whatever the environment or configuration made of it.
pub fn target() -> Result<PathBuf> {
    let out = cargo().args(["metadata", "--no-deps", "--format-version", "1"]).output().context("cargo metadata")?;
    if !out.status.success() {
        bail!("cargo metadata failed:\n{}", String::from_utf8_lossy(&out.stderr));
    }
    let meta: serde_json::Value = serde_json::from_slice(&out.stdout)?;
    Ok(PathBuf::from(meta["target_directory"].as_str().context("cargo metadata names no target_directory")?))
}

/// The cargo that runs us, in the workspace.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace());
    command
}

pub fn make(dir: PathBuf) -> Result<PathBuf> {
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    Ok(dir)
}

/// Creates `SERVER_USER` if root lacks it; does nothing for others (servers then run as the present user).
pub fn ensure_server_user() -> Result<()> {
    if !is_root() || Command::new("id").arg(SERVER_USER).output()?.status.success() {
        return Ok(());
    }
    println!("creating the system user `{SERVER_USER}`: servers do not run as root");
    let args = ["--system", "--user-group", "--no-create-home", "--home-dir", ROOT_SHARED];
    let status = Command::new("useradd").args(args).args(["--shell", "/usr/sbin/nologin", SERVER_USER]).status()?;
    if !status.success() {
        bail!("useradd {SERVER_USER} failed: create that system user by hand, then run this again");
    }
    Ok(())
}

/// `program` as the server user when root, else as it is.
pub fn as_server_user(program: &Path) -> Command {
    if !is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args([format!("--reuid={SERVER_USER}"), format!("--regid={SERVER_USER}")]);
    command.args(["--init-groups", "--"]).arg(program).env("HOME", ROOT_SHARED).env("USER", SERVER_USER);
    command
}
