//! Where `cargo xtask server build postgresql` puts its builds, and the user that may run them.
use anyhow::{bail, Context, Result};
use std::ffi::CString;
use std::fs;
use std::os::unix::fs::{chown, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

/// PostgreSQL refuses to run as root, so root runs it as this system user.
pub const SERVER_USER: &str = "atropos";

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Variant {
    Patched,
    Vanilla,
}

#[derive(Clone, Debug)]
pub struct Install {
    pub prefix: PathBuf,
    pub variant: Variant,
    /// "15.18", as the server says it.
    pub version: String,
}

/// The unprivileged identity servers run under; `None` when this process is unprivileged itself.
#[derive(Clone, Copy, Debug)]
pub struct RunAs {
    pub uid: u32,
    pub gid: u32,
}

pub fn is_root() -> bool {
    // SAFETY: geteuid has no preconditions.
    unsafe { libc::geteuid() == 0 }
}

/// `/var/cache/atropos` for root (the server user must be able to enter it), else the user's own cache.
pub fn cache_dir() -> Result<PathBuf> {
    if is_root() {
        return Ok("/var/cache/atropos".into());
    }
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|p| p.is_absolute());
    let base = match base {
        Some(base) => base,
        None => {
            PathBuf::from(std::env::var_os("HOME").context("neither XDG_CACHE_HOME nor HOME is set")?).join(".cache")
        }
    };
    Ok(base.join("atropos"))
}

impl Install {
    /// Finds the build of `variant`; `prefix` (`--prefix`) overrides the place.
    pub fn find(variant: Variant, prefix: Option<&Path>) -> Result<Install> {
        let name = match variant {
            Variant::Patched => "patched",
            Variant::Vanilla => "vanilla",
        };
        let prefix = match prefix {
            Some(p) => p.to_path_buf(),
            None => cache_dir()?.join("install/postgresql-15").join(name),
        };
        let postgres = prefix.join("bin/postgres");
        if !postgres.exists() {
            bail!(
                "no PostgreSQL at {}: build it with `cargo xtask server build postgresql --variant {name}`",
                prefix.display()
            );
        }
        let out =
            Command::new(&postgres).arg("--version").output().with_context(|| format!("run {}", postgres.display()))?;
        let text = String::from_utf8_lossy(&out.stdout);
        let version = text.split_whitespace().nth(2).unwrap_or("unknown").to_owned();
        Ok(Install { prefix, variant, version })
    }

    pub fn bin(&self, program: &str) -> PathBuf {
        self.prefix.join("bin").join(program)
    }
}

/// The user servers run as; creates the system user when root and missing, and says so.
pub fn server_identity() -> Result<Option<RunAs>> {
    if !is_root() {
        return Ok(None);
    }
    if let Some(found) = lookup(SERVER_USER)? {
        return Ok(Some(found));
    }
    eprintln!("creating the system user {SERVER_USER} (PostgreSQL does not run as root)");
    let status = Command::new("useradd")
        .args(["--system", "--user-group", "--no-create-home", "--shell", "/usr/sbin/nologin", SERVER_USER])
        .status()
        .context("run useradd")?;
    // Another process may have created it in between: what counts is that it exists now.
    match lookup(SERVER_USER)? {
        Some(found) => Ok(Some(found)),
        None => bail!("useradd --system {SERVER_USER} failed ({status}); create that user and run again"),
    }
}

fn lookup(name: &str) -> Result<Option<RunAs>> {
    let name = CString::new(name)?;
    let mut buffer = vec![0u8; 16384];
    let mut entry = std::mem::MaybeUninit::<libc::passwd>::uninit();
    let mut found = std::ptr::null_mut();
    // SAFETY: all pointers live across the call and the length is the buffer's own.
    let rc = unsafe {
        libc::getpwnam_r(name.as_ptr(), entry.as_mut_ptr(), buffer.as_mut_ptr().cast(), buffer.len(), &mut found)
    };
    if rc != 0 {
        bail!("looking up the user {name:?} failed: {}", std::io::Error::from_raw_os_error(rc));
    }
    if found.is_null() {
        return Ok(None);
    }
    // SAFETY: a non-null result points to `entry`, which getpwnam_r has filled.
    let entry = unsafe { entry.assume_init() };
    Ok(Some(RunAs { uid: entry.pw_uid, gid: entry.pw_gid }))
}

/// Makes `dir` with mode 0755 for us, or 0700 for the server user when `owner` is given.
pub fn make_dir(dir: &Path, owner: Option<RunAs>) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    if let Some(owner) = owner {
        chown(dir, Some(owner.uid), Some(owner.gid)).with_context(|| format!("chown {}", dir.display()))?;
        fs::set_permissions(dir, fs::Permissions::from_mode(0o700))?;
    }
    Ok(())
}
