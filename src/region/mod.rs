//! The memory all processes of a host share: creation, attachment, and typed access to it.

pub mod agents;
pub mod clock;
pub mod layout;
pub mod learnt;
pub mod lease;
#[cfg(loom)]
mod model;
pub mod owner;
pub mod resources;
pub mod seqcount;
pub mod settings;
pub mod tasks;
pub mod text;

use crate::error::{Code, Error, Result};
use crate::primitive::Ordering::{Acquire, Relaxed, Release};
use layout::*;
use owner::ProcessId;
use std::ffi::CString;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A mapped region. Never unmapped once hot calls may use it: a thread may be inside at any time.
pub struct Region {
    base: *const u8,
    bytes: usize,
    max_tasks: u32,
    max_workers: u32,
    path: Option<PathBuf>,
}

// SAFETY: the memory behind `base` is shared atomics only.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// An anonymous shared mapping: private to this process and those it forks.
    pub fn anonymous(max_tasks: u32, max_workers: u32) -> Result<Region> {
        let bytes = region_bytes(max_tasks, max_workers);
        let region = Region::map(None, bytes, max_tasks, max_workers, true)?;
        region.initialise();
        Ok(region)
    }

    /// Creates the region file `path` (mode 0600), or joins the one a living process made, or replaces one whose
    /// creator has died. A file that is not a region of ours is refused, never overwritten.
    pub fn create_or_join(path: &Path, max_tasks: u32, max_workers: u32) -> Result<Region> {
        // Each round either succeeds or has seen another process change the file, or about to; a second is more than enough.
        for _ in 0..200 {
            match std::fs::symlink_metadata(path) {
                Ok(_) => {
                    match Region::open(path, true) {
                        Ok(region) if region.header().identity.creator.get().is_alive() => return Ok(region),
                        Ok(_) => {}
                        Err(_) if std::fs::symlink_metadata(path).is_err() => continue, // removed since
                        // An earlier version's, whose host has crashed: it must not keep its successor from starting.
                        Err(_) if Region::is_abandoned(path) => {}
                        Err(refused) => return Err(refused),
                    }
                    // One at a time: the second would replace what the first has just made, and both would serve.
                    // What it had seen may be another file by now: it looks again under the lock.
                    let Some(_only) = Replacing::enter(path).filter(|_| Region::is_abandoned(path)) else {
                        std::thread::sleep(std::time::Duration::from_millis(5));
                        continue;
                    };
                    if let Some(region) = Region::publish(path, max_tasks, max_workers, true)? {
                        return Ok(region);
                    }
                }
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                    if let Some(region) = Region::publish(path, max_tasks, max_workers, false)? {
                        return Ok(region);
                    }
                }
                Err(e) => return Err(Error::new(Code::Io, format!("region file {}: {e}", path.display()))),
            }
        }
        Err(Error::new(
            Code::Region,
            format!("region file {}: other processes keep replacing it; give each server its own path", path.display()),
        ))
    }

    /// Maps an existing region read-only, for a watcher.
    pub fn open_readonly(path: &Path) -> Result<Region> {
        Region::open(path, false)
    }

    /// Builds the region under a temporary name and gives it its name in one step, so that nobody ever sees half of
    /// it. None = somebody else was faster.
    fn publish(path: &Path, max_tasks: u32, max_workers: u32, replace: bool) -> Result<Option<Region>> {
        let mut temporary = path.as_os_str().to_owned();
        // SAFETY: gettid cannot fail.
        temporary.push(format!(".{}.tmp", unsafe { libc::gettid() }));
        let temporary = PathBuf::from(temporary);
        remove_leftovers(path);
        let _ = std::fs::remove_file(&temporary);
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW)
            .open(&temporary)
            .map_err(|e| Error::new(Code::Io, format!("create region file {}: {e}", temporary.display())))?;
        let result = (|| {
            let bytes = region_bytes(max_tasks, max_workers);
            // posix_fallocate reserves the pages: a full disk is an error here and not a SIGBUS later.
            // SAFETY: a plain system call on an open descriptor.
            let rc = unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, bytes as libc::off_t) };
            if rc != 0 {
                let why = std::io::Error::from_raw_os_error(rc);
                return Err(Error::new(
                    Code::Io,
                    format!("reserve {bytes} bytes for region file {}: {why}", path.display()),
                ));
            }
            let mut region = Region::map(Some(&file), bytes, max_tasks, max_workers, true)?;
            region.initialise();
            region.path = Some(path.to_owned());
            let (from, to) = (c_path(&temporary)?, c_path(path)?);
            // SAFETY: both are NUL-terminated paths.
            let rc = unsafe {
                if replace {
                    libc::rename(from.as_ptr(), to.as_ptr())
                } else {
                    libc::link(from.as_ptr(), to.as_ptr())
                }
            };
            if rc != 0 {
                let e = std::io::Error::last_os_error();
                if e.raw_os_error() == Some(libc::EEXIST) {
                    return Ok(None);
                }
                return Err(Error::new(Code::Io, format!("name region file {}: {e}", path.display())));
            }
            // Two may have replaced a dead one at once: the name belongs to the last.
            let mine = file.metadata().map(|m| m.ino()).ok();
            let named = std::fs::symlink_metadata(path).map(|m| m.ino()).ok();
            Ok((mine == named).then_some(region))
        })();
        let _ = std::fs::remove_file(&temporary);
        result
    }

    /// Is the file a region of ours, of whatever version, whose creator is dead?
    fn is_abandoned(path: &Path) -> bool {
        let flags = libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let Ok(file) = std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path) else { return false };
        let Ok(meta) = file.metadata() else { return false };
        let bytes = std::mem::size_of::<Identity>();
        // SAFETY: geteuid cannot fail.
        let ours = meta.uid() == unsafe { libc::geteuid() } && meta.mode() & 0o777 == 0o600;
        if !ours || !meta.file_type().is_file() || (meta.len() as usize) < bytes {
            return false;
        }
        let Ok(head) = Region::map(Some(&file), std::mem::size_of::<Header>(), 0, 0, false) else { return false };
        let id = &head.header().identity; // the first page: no more of the file may be there
        id.ready.load(Acquire) == 1 && id.magic.load(Relaxed) == MAGIC && !id.creator.get().is_alive()
    }

    fn open(path: &Path, write: bool) -> Result<Region> {
        let refuse = |why: String| Error::new(Code::Region, format!("region file {}: {why}", path.display()));
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(write)
            .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(path)
            .map_err(|e| refuse(format!("cannot be opened: {e}")))?;
        let meta = file.metadata().map_err(|e| refuse(format!("cannot be examined: {e}")))?;
        if !meta.file_type().is_file() {
            return Err(refuse("wrong kind: not a regular file; choose another region_path".into()));
        }
        // SAFETY: geteuid cannot fail.
        let me = unsafe { libc::geteuid() };
        if meta.uid() != me {
            return Err(refuse(format!(
                "wrong owner: uid {}, expected {me}; remove it or choose another region_path",
                meta.uid()
            )));
        }
        if meta.mode() & 0o777 != 0o600 {
            return Err(refuse(format!(
                "wrong mode: {:04o}, expected 0600 (others could forge cancels); remove it",
                meta.mode() & 0o777
            )));
        }
        if (meta.len() as usize) < std::mem::size_of::<Header>() {
            return Err(refuse(format!(
                "wrong size: {} bytes, a region has at least {}; remove it",
                meta.len(),
                region_bytes(0, 0)
            )));
        }
        let head = Region::map(Some(&file), std::mem::size_of::<Header>(), 0, 0, false)?;
        let id = &head.header().identity;
        if id.ready.load(Acquire) != 1 || id.magic.load(Relaxed) != MAGIC {
            return Err(refuse("wrong magic: not an Atropos region; remove it or choose another region_path".into()));
        }
        let (version, header_bytes) = (id.layout_version.load(Relaxed), id.header_bytes.load(Relaxed) as usize);
        if version != LAYOUT_VERSION || header_bytes != std::mem::size_of::<Header>() {
            return Err(refuse(format!(
                "wrong version: layout {version} with a header of {header_bytes} bytes, this library has layout {LAYOUT_VERSION} with {}; all processes of a host must use one library",
                std::mem::size_of::<Header>()
            )));
        }
        let (tasks, workers) = (id.max_tasks.load(Relaxed), id.max_workers.load(Relaxed));
        let sane = (1..=65536).contains(&tasks) && (1..=65536).contains(&workers);
        let bytes = if sane { region_bytes(tasks, workers) } else { 0 };
        if !sane || id.total_bytes.load(Relaxed) != bytes as u64 || meta.len() != bytes as u64 {
            return Err(refuse(format!(
                "wrong size: {} bytes, its header says {} for {tasks} tasks and {workers} workers; remove it",
                meta.len(),
                id.total_bytes.load(Relaxed)
            )));
        }
        drop(head);
        let mut region = Region::map(Some(&file), bytes, tasks, workers, write)?;
        region.path = Some(path.to_owned());
        Ok(region)
    }

    fn map(
        file: Option<&std::fs::File>,
        bytes: usize,
        max_tasks: u32,
        max_workers: u32,
        write: bool,
    ) -> Result<Region> {
        let protection = libc::PROT_READ | if write { libc::PROT_WRITE } else { 0 };
        let (flags, fd) = match file {
            Some(f) => (libc::MAP_SHARED, f.as_raw_fd()),
            None => (libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1),
        };
        // SAFETY: a new mapping; nothing existing is touched.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, fd, 0) };
        if base == libc::MAP_FAILED {
            return Err(Error::os("map", format_args!("{bytes} bytes for the region")));
        }
        Ok(Region { base: base.cast(), bytes, max_tasks, max_workers, path: None })
    }

    /// Fills in the header of fresh zeroed memory; `ready` last.
    fn initialise(&self) {
        let h = self.header();
        h.clock.calibrate();
        // Generations begin beyond those of every earlier region of this boot, so that handles of an earlier life in this
        // process stay stale: one generation per 16 ns, which is less than a slot's shortest life.
        let first = (h.clock.refreshed_ns.load(Relaxed) >> 4) & tasks::GENERATION_MASK;
        for slot in self.tasks() {
            slot.state.store(first << STATE_BITS, Relaxed);
        }
        for slot in self.workers() {
            slot.state.store(first << STATE_BITS, Relaxed);
        }
        let id = &h.identity;
        id.layout_version.store(LAYOUT_VERSION, Relaxed);
        id.header_bytes.store(std::mem::size_of::<Header>() as u32, Relaxed);
        id.total_bytes.store(self.bytes as u64, Relaxed);
        id.max_tasks.store(self.max_tasks, Relaxed);
        id.max_workers.store(self.max_workers, Relaxed);
        id.creator.set(ProcessId::current());
        id.magic.store(MAGIC, Relaxed);
        id.ready.store(1, Release);
    }

    #[inline(always)]
    pub fn header(&self) -> &Header {
        // SAFETY: `map` gave at least a header's bytes, page aligned; zero and every other bit pattern is valid for
        // atomics, and nothing but atomics is in there.
        unsafe { &*self.base.cast::<Header>() }
    }

    #[inline(always)]
    pub fn tasks(&self) -> &[TaskSlot] {
        // SAFETY: `map` covered `region_bytes(max_tasks, max_workers)`; the tables follow the header in this order and
        // their alignment divides its size (const-asserted in layout).
        unsafe {
            let first = self.base.add(std::mem::size_of::<Header>()).cast::<TaskSlot>();
            std::slice::from_raw_parts(first, self.max_tasks as usize)
        }
    }

    #[inline(always)]
    pub fn workers(&self) -> &[WorkerSlot] {
        let offset = region_bytes(self.max_tasks, 0);
        // SAFETY: as for `tasks`.
        unsafe {
            let first = self.base.add(offset).cast::<WorkerSlot>();
            std::slice::from_raw_parts(first, self.max_workers as usize)
        }
    }

    /// The tasks' slots that have ever been used: free ones among them, but whatever is live, or was, is here.
    /// Whoever looks through a table looks here, so that a large one that is nearly empty costs nothing.
    pub fn used_tasks(&self) -> &[TaskSlot] {
        let (slots, used) = (self.tasks(), self.header().tasks_used.load(Acquire) as usize);
        // The count lies in memory that others write: never more than there is.
        &slots[..used.min(slots.len())]
    }

    /// The same of workers.
    pub fn used_workers(&self) -> &[WorkerSlot] {
        let (slots, used) = (self.workers(), self.header().workers_used.load(Acquire) as usize);
        &slots[..used.min(slots.len())]
    }

    /// Gives the memory back to the system. In its place, in this process only, stand zeros, every field's valid first
    /// state: a call that another thread is still inside finds an empty region.
    pub fn discard(&self) {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: exactly our own mapping is replaced, in one step, by memory that is as good for every access: all of it
        // is atomics, for which any change by others is to be expected.
        unsafe { libc::mmap(self.base.cast_mut().cast(), self.bytes, protection, flags, -1, 0) };
    }

    /// Precise time now.
    #[inline(always)]
    pub fn now_ns(&self) -> u64 {
        self.header().clock.precise_ns()
    }

    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Removes the file's name if it still is this region's.
    pub fn unlink(&self) {
        let Some(path) = &self.path else { return };
        if let Ok(named) = Region::open(path, false) {
            if named.header().identity.creator.get() == self.header().identity.creator.get() {
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

#[cfg(not(loom))]
impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and whoever hands out references that outlive `self` leaks it first.
        unsafe { libc::munmap(self.base.cast_mut().cast(), self.bytes) };
    }
}

/// The right to replace a dead creator's file: a lock on that file, which ends with its holder.
struct Replacing(#[allow(dead_code)] std::fs::File);

impl Replacing {
    /// None = somebody else is about to, or has.
    fn enter(path: &Path) -> Option<Replacing> {
        let flags = libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let file = std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
        // SAFETY: a plain system call on an open descriptor.
        if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
            return None;
        }
        // Whoever held the lock before may have put another file there.
        let (locked, named) = (file.metadata().ok()?, std::fs::symlink_metadata(path).ok()?);
        ((locked.dev(), locked.ino()) == (named.dev(), named.ino())).then_some(Replacing(file))
    }
}

/// Removes the unfinished files of processes that were killed while they made `path`: `NAME.PID.tmp`.
fn remove_leftovers(path: &Path) {
    let (Some(dir), Some(name)) = (path.parent(), path.file_name().and_then(|n| n.to_str())) else { return };
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let file = entry.file_name();
        let rest = file.to_str().and_then(|f| f.strip_prefix(name)?.strip_prefix('.')?.strip_suffix(".tmp"));
        let Some(pid) = rest.and_then(|pid| pid.parse().ok()) else { continue };
        if !(ProcessId { pid, start_ticks: 0 }).pid_exists() {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

fn c_path(path: &Path) -> Result<CString> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| Error::new(Code::Invalid, format!("path {} contains a NUL byte", path.display())))
}

#[cfg(not(loom))]
/// A futex in shared memory: waits until `word` differs from `seen`, a wake, or the timeout.
pub fn futex_wait(word: &crate::primitive::AtomicU32, seen: u32, timeout: std::time::Duration) {
    let ts = libc::timespec { tv_sec: timeout.as_secs() as _, tv_nsec: timeout.subsec_nanos() as _ };
    // SAFETY: `word` lives in the region, `ts` on the stack; FUTEX_WAIT only reads them.
    unsafe { libc::syscall(libc::SYS_futex, word as *const _ as *const u32, libc::FUTEX_WAIT, seen, &ts) };
}

#[cfg(not(loom))]
pub fn futex_wake_all(word: &crate::primitive::AtomicU32) {
    // SAFETY: waking waits on an address reads nothing.
    unsafe { libc::syscall(libc::SYS_futex, word as *const _ as *const u32, libc::FUTEX_WAKE, i32::MAX) };
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn path(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("atropos-region-{}-{name}", std::process::id()))
    }

    fn refusal(path: &Path) -> String {
        let e = Region::create_or_join(path, 16, 16).err().expect("must be refused");
        assert_eq!(e.code, Code::Region, "{e}");
        e.text
    }

    #[test]
    fn a_second_opener_joins_and_a_watcher_reads() {
        let p = path("join");
        let a = Region::create_or_join(&p, 16, 32).unwrap();
        assert_eq!(std::fs::metadata(&p).unwrap().permissions().mode() & 0o777, 0o600);
        let b = Region::create_or_join(&p, 999, 999).unwrap();
        a.header().counters.ticks.store(7, Relaxed);
        assert_eq!(b.header().counters.ticks.load(Relaxed), 7);
        assert_eq!((b.tasks().len(), b.workers().len()), (16, 32));
        assert_eq!(Region::open_readonly(&p).unwrap().header().counters.ticks.load(Relaxed), 7);
        a.unlink();
        assert!(!p.exists());
    }

    #[test]
    fn a_dead_creators_file_is_replaced() {
        let p = path("dead");
        let a = Region::create_or_join(&p, 16, 16).unwrap();
        a.header().identity.creator.start_ticks.fetch_add(1, Relaxed);
        a.header().counters.ticks.store(7, Relaxed);
        let b = Region::create_or_join(&p, 32, 16).unwrap();
        assert_eq!((b.header().counters.ticks.load(Relaxed), b.tasks().len()), (0, 32));
        a.unlink();
        assert!(p.exists(), "the old region must not remove the new one's name");
        b.header().identity.creator.start_ticks.fetch_add(1, Relaxed);
        b.header().identity.layout_version.store(LAYOUT_VERSION - 1, Relaxed);
        let short = std::fs::OpenOptions::new().write(true).open(&p).unwrap();
        short.set_len(std::mem::size_of::<Identity>() as u64).unwrap();
        let c = Region::create_or_join(&p, 16, 16).unwrap();
        assert_eq!(
            c.header().identity.layout_version.load(Relaxed),
            LAYOUT_VERSION,
            "an earlier version's is no obstacle"
        );
        c.unlink();
    }

    #[test]
    fn what_killed_creators_left_unfinished_is_removed() {
        let p = path("leftover");
        let name = |pid: u32| PathBuf::from(format!("{}.{pid}.tmp", p.display()));
        let (dead, living, other) = (name(0x003f_fff0), name(1), PathBuf::from(format!("{}.x.tmp", p.display())));
        for file in [&dead, &living, &other] {
            std::fs::write(file, "half").unwrap();
        }
        Region::create_or_join(&p, 16, 16).unwrap().unlink();
        assert!(!dead.exists() && living.exists() && other.exists());
        for file in [&living, &other] {
            std::fs::remove_file(file).unwrap();
        }
    }

    #[test]
    fn one_at_a_time_replaces_a_dead_ones_file() {
        let p = path("replacing");
        std::fs::write(&p, "old").unwrap();
        let first = Replacing::enter(&p).unwrap();
        assert!(Replacing::enter(&p).is_none());
        let late = std::fs::File::open(&p).unwrap();
        std::fs::remove_file(&p).unwrap();
        drop(first);
        assert!(Replacing::enter(&p).is_none(), "its file has gone");
        drop(late);
    }

    #[test]
    fn a_discarded_region_is_empty_for_whoever_still_uses_it() {
        let r = Region::anonymous(16, 16).unwrap();
        let me = ProcessId::current();
        let t = r.begin_task(me, 1, 0).unwrap();
        let (task, trace) = (r.task(t).unwrap(), &r.task(t).unwrap().trace);
        r.discard();
        trace.acquire(1, 0, 1, 1, 1);
        task.standing_request(&r.header().lease);
        assert!(r.task(t).is_none() && !r.end_task(me, t, false) && r.live_tasks().count() == 0);
        assert!(r.begin_task(me, 1, t).is_some());
    }

    #[test]
    fn foreign_files_are_refused_and_left_alone() {
        let p = path("foreign");
        std::fs::write(&p, "hello").unwrap();
        std::fs::set_permissions(&p, PermissionsExt::from_mode(0o644)).unwrap();
        assert!(refusal(&p).contains("wrong mode: 0644"));
        std::fs::set_permissions(&p, PermissionsExt::from_mode(0o600)).unwrap();
        assert!(refusal(&p).contains("wrong size: 5 bytes"));
        std::fs::write(&p, vec![1u8; region_bytes(16, 16)]).unwrap();
        assert!(refusal(&p).contains("wrong magic"));
        std::fs::remove_file(&p).unwrap();

        let r = Region::create_or_join(&p, 16, 16).unwrap();
        r.header().identity.layout_version.store(LAYOUT_VERSION + 1, Relaxed);
        assert!(refusal(&p).contains("wrong version"));
        r.header().identity.layout_version.store(LAYOUT_VERSION, Relaxed);
        std::fs::OpenOptions::new().append(true).open(&p).unwrap().set_len(region_bytes(16, 16) as u64 + 1).unwrap();
        assert!(refusal(&p).contains("wrong size"));
        std::fs::remove_file(&p).unwrap();

        std::os::unix::fs::symlink("/dev/null", &p).unwrap();
        assert!(refusal(&p).contains("cannot be opened"));
        std::fs::remove_file(&p).unwrap();
        std::fs::create_dir(&p).unwrap();
        refusal(&p);
        std::fs::remove_dir(&p).unwrap();
        let e = Region::create_or_join(Path::new("/no/such/folder/r"), 16, 16).err().unwrap();
        assert_eq!(e.code, Code::Io);
    }

    #[test]
    fn concurrent_creators_share_one_region() {
        let p = path("race");
        let regions: Vec<Region> = std::thread::scope(|s| {
            let handles: Vec<_> = (0..8).map(|_| s.spawn(|| Region::create_or_join(&p, 16, 16).unwrap())).collect();
            handles.into_iter().map(|h| h.join().unwrap()).collect()
        });
        regions[0].header().counters.ticks.store(42, Relaxed);
        for r in &regions {
            assert_eq!(r.header().counters.ticks.load(Relaxed), 42);
        }
        regions[0].unlink();
    }
}
