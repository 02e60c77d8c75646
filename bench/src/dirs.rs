//! Folders and identities of the servers under test: builds, prepared data, runs, kept logs.
//!
//! The folders are on disk (beside the builds) because durability stays on, as in production.
use crate::guard;
use anyhow::{bail, Context, Result};
use std::ffi::CString;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{chown, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// Servers refuse to run as root, so root runs them as this system user.
pub const SERVER_USER: &str = "atropos";

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

/// The user servers run as; creates the system user when root and missing, and says so.
pub fn server_identity() -> Result<Option<RunAs>> {
    if !is_root() {
        return Ok(None);
    }
    if let Some(found) = lookup(SERVER_USER)? {
        return Ok(Some(found));
    }
    eprintln!("creating the system user {SERVER_USER} (servers do not run as root)");
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

static SEQUENCE: AtomicU32 = AtomicU32::new(0);

/// A new folder for a run, owned by the server's user.
pub fn new_run_dir() -> Result<PathBuf> {
    let base = cache_dir()?.join("run");
    make_dir(&base, None)?;
    if SEQUENCE.load(Ordering::Relaxed) == 0 {
        sweep(&base);
    }
    let name = format!("{}-{}", std::process::id(), SEQUENCE.fetch_add(1, Ordering::Relaxed));
    let mut dir = base.join(&name);
    // A Unix socket's path must fit in 107 bytes with its name (".s.PGSQL.5432.lock"); a deep home does not fit.
    if dir.as_os_str().len() > 80 {
        dir = std::env::temp_dir().join(format!("atropos-run-{name}"));
    }
    make_dir(&dir, server_identity()?)?;
    Ok(dir)
}

/// Removes folders of runs whose process was killed before it could clean up.
fn sweep(base: &Path) {
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_string_lossy().split('-').next().and_then(|p| p.parse::<i32>().ok());
        if pid.is_some_and(|pid| !guard::alive(pid)) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// A command that runs as the server's user, in `dir`, with a plain environment.
pub fn server_command(program: &Path, dir: &Path) -> Result<Command> {
    let mut command = Command::new(program);
    command
        .current_dir(dir)
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("LC_ALL", "C")
        .env("HOME", dir)
        .env("TZ", "UTC");
    command.stdin(Stdio::null());
    if let Some(run_as) = server_identity()? {
        command.uid(run_as.uid).gid(run_as.gid);
    }
    Ok(command)
}

/// Keeps `files` of a failed run's folder, since they are what one needs next, and says where.
pub fn keep_logs(name: &str, dir: &Path, files: &[&str]) {
    let Ok(logs) = cache_dir().map(|c| c.join("logs")) else { return };
    let kept = logs.join(format!("{name}-{}", std::process::id()));
    let _ = fs::create_dir_all(&kept);
    for file in files {
        let _ = fs::copy(dir.join(file), kept.join(file));
    }
    eprintln!("{name}: the server's log is kept in {}", kept.display());
}

/// The prepared data folder `<name>-<hash of key>`/data; `prepare` makes it when the cache does not have it yet.
pub fn template(name: &str, key: &str, prepare: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let base = cache_dir()?.join("templates");
    make_dir(&base, None)?;
    let key = key.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3u64));
    let home = base.join(format!("{name}-{key:016x}"));
    // One maker at a time; the others find it ready. The lock goes with the descriptor.
    let lock = File::create(base.join(format!("{key:016x}.lock")))?;
    // SAFETY: the descriptor is open.
    if unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX) } != 0 {
        bail!("locking {} failed: {}", base.display(), std::io::Error::last_os_error());
    }
    if !home.join("ready").exists() {
        let _ = fs::remove_dir_all(&home);
        prepare(&home).with_context(|| format!("prepare the template {}", home.display()))?;
        File::create(home.join("ready"))?;
    }
    Ok(home.join("data"))
}

/// Makes the template `home` of the data folder that `dir` has; the rest of `dir` goes.
pub fn adopt_template(dir: &Path, home: &Path) -> Result<()> {
    make_dir(home, server_identity()?)?;
    fs::rename(dir.join("data"), home.join("data"))?;
    let _ = fs::remove_dir_all(dir);
    Command::new("sync").arg("-f").arg(home).status()?;
    Ok(())
}

/// Copies `template` (a data folder) to `dir`/data; removes `dir` when that fails.
pub fn copy_template(template: &Path, dir: &Path) -> Result<()> {
    let copied = Command::new("cp").args(["-a", "--reflink=auto"]).arg(template).arg(dir.join("data")).status();
    if !copied.as_ref().is_ok_and(|status| status.success()) {
        let _ = fs::remove_dir_all(dir);
        bail!(
            "copying the template {} to {} failed ({copied:?}): is the disk full?",
            template.display(),
            dir.display()
        );
    }
    // The copy's pages reach the disk now, not as write-back in the middle of the measured part.
    Command::new("sync").arg("-f").arg(dir).status()?;
    Ok(())
}
