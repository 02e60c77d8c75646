//! What must be gone when this program ends, however it ends: child processes and their folders.
//!
//! Normal ends and panics go through the owners' `Drop`; Ctrl-C, SIGTERM and SIGHUP through the handler here; and
//! when this process is killed outright the kernel tells its children (`PR_SET_PDEATHSIG`), while left-over folders
//! are swept by the next run.
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

struct Entry {
    pid: i32,
    signal: i32,
    dir: Option<PathBuf>,
}

static ENTRIES: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

fn entries() -> MutexGuard<'static, Vec<Entry>> {
    ENTRIES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Call once, early.
pub fn install_handler() -> Result<()> {
    ctrlc::set_handler(|| {
        eprintln!("\ninterrupted: stopping what this run started");
        // Held to the end: nobody may register or reap a child while we signal the ones we know.
        let entries = entries();
        for e in entries.iter() {
            signal(e.pid, e.signal);
        }
        for e in entries.iter() {
            let give_up = Instant::now() + Duration::from_secs(5);
            while alive(e.pid) && Instant::now() < give_up {
                std::thread::sleep(Duration::from_millis(20));
            }
            if let Some(dir) = &e.dir {
                let _ = std::fs::remove_dir_all(dir);
            }
        }
        std::process::exit(130);
    })
    .context("install the interrupt handler")
}

pub fn signal(pid: i32, signal: i32) {
    // SAFETY: kill has no memory effects; the pid is a child of ours that has not been reaped yet.
    unsafe { libc::kill(pid, signal) };
}

/// True while `pid` runs; a zombie that nobody has reaped yet counts as gone.
pub fn alive(pid: i32) -> bool {
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => !stat.rsplit(") ").next().unwrap_or("").starts_with('Z'),
        Err(_) => false,
    }
}

/// CPU time used so far by `pid`, and by its children that have been waited for, in ns.
pub fn cpu_ns(pid: i32, with_dead_children: bool) -> i64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // Fields 14..17 of proc(5), counted after the command's closing parenthesis: utime stime cutime cstime.
    let fields =
        stat.rsplit(") ").next().unwrap_or("").split_whitespace().skip(11).filter_map(|f| f.parse::<i64>().ok());
    let ticks: i64 = fields.take(if with_dead_children { 4 } else { 2 }).sum();
    // SAFETY: sysconf has no preconditions.
    let ticks_per_s = unsafe { libc::sysconf(libc::_SC_CLK_TCK) }.max(1);
    ticks * (1_000_000_000 / ticks_per_s)
}

/// A child process in its own process group, registered until it has been waited for.
pub struct Guarded {
    child: Child,
    signal: i32,
    done: bool,
}

impl Guarded {
    /// `signal` ends the child when we are interrupted or die; `dir` is removed then too.
    pub fn spawn(mut command: Command, signal: i32, dir: Option<PathBuf>) -> Result<Guarded> {
        use std::os::unix::process::CommandExt;
        command.process_group(0);
        // SAFETY: prctl is async-signal-safe, and nothing else runs between fork and exec. It runs after the change
        // of user, which would clear the setting.
        unsafe {
            command.pre_exec(move || match libc::prctl(libc::PR_SET_PDEATHSIG, signal) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        let mut entries = entries();
        let child = command.spawn().with_context(|| format!("start {}", command.get_program().to_string_lossy()))?;
        entries.push(Entry { pid: child.id() as i32, signal, dir });
        Ok(Guarded { child, signal, done: false })
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    pub fn running(&mut self) -> Result<bool> {
        Ok(self.wait_until(Instant::now())?.is_none())
    }

    /// Waits for the child's end until `give_up`; `None` when it still runs then.
    pub fn wait_until(&mut self, give_up: Instant) -> Result<Option<std::process::ExitStatus>> {
        loop {
            {
                // Reaping and forgetting happen under the lock, so that the handler never signals a reused pid.
                let mut entries = entries();
                if let Some(status) = self.child.try_wait()? {
                    if !self.done {
                        self.done = true;
                        let pid = self.pid();
                        entries.retain(|e| e.pid != pid);
                    }
                    return Ok(Some(status));
                }
            }
            if Instant::now() >= give_up {
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Ends the child with `signal`, and for good after `patience`.
    pub fn stop(&mut self, signal_first: i32, patience: Duration) {
        if self.done {
            return;
        }
        signal(self.pid(), signal_first);
        if let Ok(None) | Err(_) = self.wait_until(Instant::now() + patience) {
            signal(self.pid(), self.signal);
            if let Ok(None) | Err(_) = self.wait_until(Instant::now() + Duration::from_secs(10)) {
                signal(self.pid(), libc::SIGKILL);
                let _ = self.wait_until(Instant::now() + Duration::from_secs(10));
            }
        }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let signal = self.signal;
        self.stop(signal, Duration::from_secs(10));
    }
}
