//! Who owns a slot, and whether they still live: pid + start time, since pids are reused.

use super::layout::Owner;
use crate::primitive::Ordering::Relaxed;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProcessId {
    pub pid: u32,
    pub start_ticks: u64,
}

impl ProcessId {
    /// This process.
    pub fn current() -> Self {
        let pid = std::process::id();
        ProcessId { pid, start_ticks: start_ticks(pid).unwrap_or(0) }
    }

    /// Signal 0 only: a cheap first test that takes a reused pid for the old owner.
    pub fn pid_exists(self) -> bool {
        // SAFETY: kill with signal 0 sends nothing.
        let gone = unsafe { libc::kill(self.pid as libc::pid_t, 0) } != 0
            && std::io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH);
        self.pid != 0 && !gone
    }

    /// Exact: the pid exists, is no zombie, and started when the owner did.
    pub fn is_alive(self) -> bool {
        self.pid_exists()
            && match start_ticks(self.pid) {
                Some(ticks) => self.start_ticks == 0 || ticks == self.start_ticks,
                // No /proc, or a zombie: a zombie's memory is gone, so it owns nothing.
                None => !std::path::Path::new("/proc/self/stat").exists(),
            }
    }
}

/// Start time in clock ticks since boot (field 22 of /proc/PID/stat); None if there is no such process or all of it is a
/// zombie.
fn start_ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command may contain spaces and brackets: count from its last ')'.
    let mut fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace();
    let state = fields.next()?;
    let threads: u32 = fields.nth(16)?.parse().ok()?;
    // A process whose first thread has ended (pthread_exit in main) shows that thread's Z and lives on in the others.
    if state == "X" || state == "Z" && threads <= 1 {
        return None;
    }
    fields.nth(1)?.parse().ok()
}

/// Waiting for another process that is about to finish something: long enough for one that the scheduler passed over,
/// not for one that was stopped half-way, or for a damaged word that names a process with no part in it.
pub struct Patience {
    begun: Option<std::time::Instant>,
}

impl Patience {
    // A fuzzer damages such words all the time, and nobody will come to finish.
    pub const LIMIT: std::time::Duration = std::time::Duration::from_millis(if cfg!(fuzzing) { 5 } else { 1000 });

    pub fn new() -> Self {
        Patience { begun: None }
    }

    /// Pauses for a moment; false = enough was waited.
    pub fn wait(&mut self) -> bool {
        let waited = self.begun.get_or_insert_with(std::time::Instant::now).elapsed();
        crate::primitive::yield_now();
        // What a run of a model does must not depend on the time.
        cfg!(loom) || waited < Self::LIMIT
    }
}

impl Default for Patience {
    fn default() -> Self {
        Self::new()
    }
}

impl Owner {
    pub fn set(&self, id: ProcessId) {
        self.pid.store(id.pid, Relaxed);
        self.tid.store(0, Relaxed);
        self.start_ticks.store(id.start_ticks, Relaxed);
    }

    pub fn get(&self) -> ProcessId {
        ProcessId { pid: self.pid.load(Relaxed), start_ticks: self.start_ticks.load(Relaxed) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn this_process_lives_and_an_impostor_does_not() {
        let me = ProcessId::current();
        assert!(me.start_ticks > 0 && me.is_alive());
        assert!(!ProcessId { start_ticks: me.start_ticks + 1, ..me }.is_alive());
        assert!(!ProcessId { pid: 0, start_ticks: 0 }.is_alive());
    }

    #[test]
    fn a_zombie_owns_nothing() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let id = ProcessId { pid: child.id(), start_ticks: start_ticks(child.id()).unwrap_or(0) };
        // Wait for its end without reaping it.
        let mut info = std::mem::MaybeUninit::<libc::siginfo_t>::zeroed();
        // SAFETY: `info` is valid for writing; WNOWAIT leaves the zombie in place.
        unsafe { libc::waitid(libc::P_PID, id.pid, info.as_mut_ptr(), libc::WEXITED | libc::WNOWAIT) };
        assert!(!id.is_alive());
        child.wait().unwrap();
        assert!(!id.is_alive());
    }

    #[test]
    fn this_process_started_lately() {
        // Fields are counted from behind the name: state, 16 fields, threads, one field, start time.
        let me = std::process::id();
        let boot = std::fs::read_to_string("/proc/uptime").unwrap();
        let uptime_s: f64 = boot.split(' ').next().unwrap().parse().unwrap();
        // SAFETY: sysconf only reads.
        let ticks_per_s = unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as f64;
        let age_s = uptime_s - start_ticks(me).unwrap() as f64 / ticks_per_s;
        assert!((-1.0..3600.0).contains(&age_s), "{age_s}");
    }
}
