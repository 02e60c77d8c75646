//! What the kernel tells of the threads that work for tasks: CPU time and run-queue delay
//! (`/proc/PID/task/TID/schedstat`), block I/O (`io`, `stat`), and pressure (PSI).
//!
//! The host calls nothing. Only the leading controller reads, only while an overload is suspected, only threads of tasks
//! that run or have just run, and at most so many of them a look as a tick may cost; a counter tells of the rest. The
//! descriptors stay open from look to look and are closed when the suspicion ends.
//!
//! An open descriptor belongs to one thread for good: when that has ended, reading it fails even if its number was given
//! to another. So a reused number never mixes two threads' sums.
//!
//! Block-I/O delay: where delay accounting is on (`kernel.task_delayacct`) the kernel's own sum, in its ticks; and always the
//! share of looks that find the thread in uninterruptible sleep. The larger of both: the sum leaves out waits for a file
//! system's journal, which is where a commit waits.
//!
//! SPDX-License-Identifier: MIT OR Apache-2.0

use super::system::{SlotUse, Sums};
use crate::primitive::Ordering::{Acquire, Relaxed};
use crate::region::layout::*;
use crate::region::owner::ProcessId;
use crate::region::tasks::index_of;
use crate::region::Region;
use std::collections::HashMap;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;

/// Threads read in one look: in the kernel about 1 us each for the CPU, 6.5 us with I/O.
const MOST_THREADS: usize = 128;
/// Of one task: a task of very many threads must not be all that is seen.
const MOST_OF_TASK: usize = 64;
/// Files opened in one look: opening costs ten times a read.
const MOST_OPENED: usize = 64;
/// The host's descriptors are its own: at most this part of what it may have.
const DESCRIPTORS_PART: u64 = 8;
/// A thread that was not looked at for so long was not asleep all the while because it sleeps now.
const LONGEST_SLEEP_NS: u64 = 100_000_000;
/// Descriptors of threads that no task has used for so long are closed.
const FORGET_NS: u64 = 2_000_000_000;
/// A tick of `stat`'s times: the kernel promises 100 a second to programs, whatever its own are.
const TICK_NS: u64 = 10_000_000;
/// Room for a `stat` line; the command in it has at most 64 bytes.
const LINE_BYTES: usize = 1024;

/// One reading of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Reading {
    cpu_ns: u64,
    run_delay_ns: u64,
    io_bytes: u64,
    io_ticks: u64,
    /// In uninterruptible sleep at this moment.
    asleep: bool,
}

/// `run_ns run_delay_ns timeslices`
fn parse_schedstat(text: &str) -> Option<(u64, u64)> {
    let mut fields = text.split_ascii_whitespace();
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

/// (uninterruptible sleep, delayacct_blkio_ticks): fields 3 and 42; the command may contain spaces and brackets.
fn parse_stat(text: &str) -> Option<(bool, u64)> {
    let mut fields = text[text.rfind(')')? + 1..].split_ascii_whitespace();
    let state = fields.next()?;
    Some((state == "D", fields.nth(38)?.parse().ok()?))
}

/// (runnable, number of the process's threads): fields 3 and 20.
fn parse_state(text: &str) -> Option<(bool, u64)> {
    let mut fields = text[text.rfind(')')? + 1..].split_ascii_whitespace();
    let state = fields.next()?;
    Some((state == "R", fields.nth(16)?.parse().ok()?))
}

/// A thread at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadState {
    /// It runs, or would if it had a processor.
    pub ready: bool,
    pub cpu_ns: u64,
}

impl ThreadState {
    /// `tid` 0: the process's only thread. None = it has ended, is one of several, or /proc hides it.
    pub fn read(pid: u32, tid: u32) -> Option<ThreadState> {
        let mut line = [0u8; LINE_BYTES];
        let mut open = |name: &str| {
            let file = File::open(format!("/proc/{pid}/task/{}/{name}", if tid == 0 { pid } else { tid })).ok()?;
            read(&file, &mut line).map(str::to_string)
        };
        // The sum first: whoever runs between the two reads shows it at the next look.
        let (cpu_ns, _) = parse_schedstat(&open("schedstat")?)?;
        let (ready, threads) = parse_state(&open("stat")?)?;
        (tid != 0 || threads == 1).then_some(ThreadState { ready, cpu_ns })
    }
}

/// Bytes that went to or came from a disk.
fn parse_io(text: &str) -> Option<u64> {
    let value = |name: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(name))?;
        line.trim().parse::<u64>().ok()
    };
    Some(value("read_bytes:")?.wrapping_add(value("write_bytes:")?))
}

/// Total stall time of `some`, ns.
fn parse_pressure(text: &str) -> Option<u64> {
    let line = text.lines().find(|l| l.starts_with("some "))?;
    let total = line.split_ascii_whitespace().find_map(|f| f.strip_prefix("total="))?;
    total.parse::<u64>().ok()?.checked_mul(1000)
}

fn parse_open_files(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|l| l.strip_prefix("Max open files"))?;
    let soft = line.split_ascii_whitespace().next()?;
    if soft == "unlimited" {
        return Some(u64::MAX);
    }
    soft.parse().ok()
}

/// The control group of the unified hierarchy, from /proc/PID/cgroup.
fn parse_cgroup(text: &str) -> Option<&str> {
    text.lines().find_map(|l| l.strip_prefix("0::"))
}

/// Reads a file of the kernel's from its beginning. None = the thread has ended, or no text.
fn read<'a>(file: &File, line: &'a mut [u8; LINE_BYTES]) -> Option<&'a str> {
    let n = file.read_at(line, 0).ok().filter(|&n| n > 0)?;
    std::str::from_utf8(&line[..n]).ok().or_else(|| {
        // A thread's name may be any bytes; the numbers after it are what is wanted.
        let end = line[..n].iter().rposition(|&b| b == b')')?;
        std::str::from_utf8(&line[end..n]).ok()
    })
}

/// A thread's open files.
struct Thread {
    schedstat: Option<File>,
    /// `stat` and `io`
    io: Option<(File, File)>,
    last: Reading,
    last_ns: u64,
}

impl Thread {
    fn open(pid: u32, tid: u32, cpu: bool, io: bool) -> std::io::Result<Thread> {
        let open = |name: &str| File::open(format!("/proc/{pid}/task/{tid}/{name}"));
        Ok(Thread {
            schedstat: if cpu { Some(open("schedstat")?) } else { None },
            io: if io { Some((open("stat")?, open("io")?)) } else { None },
            last: Reading::default(),
            last_ns: 0,
        })
    }

    fn read(&self, line: &mut [u8; LINE_BYTES]) -> Option<Reading> {
        let mut reading = Reading::default();
        if let Some(file) = &self.schedstat {
            (reading.cpu_ns, reading.run_delay_ns) = parse_schedstat(read(file, line)?)?;
        }
        if let Some((stat, io)) = &self.io {
            (reading.asleep, reading.io_ticks) = parse_stat(read(stat, line)?)?;
            reading.io_bytes = parse_io(read(io, line)?)?;
        }
        Some(reading)
    }

    /// What it did since the last look; nothing at the first.
    fn step(&mut self, reading: Reading, now_ns: u64) -> Sums {
        let (last, last_ns) =
            (std::mem::replace(&mut self.last, reading), std::mem::replace(&mut self.last_ns, now_ns));
        if last_ns == 0 {
            return Sums::default();
        }
        let slept_ns = if reading.asleep { now_ns.saturating_sub(last_ns).min(LONGEST_SLEEP_NS) } else { 0 };
        let told_ns = reading.io_ticks.saturating_sub(last.io_ticks).saturating_mul(TICK_NS);
        Sums {
            cpu_ns: reading.cpu_ns.saturating_sub(last.cpu_ns),
            run_delay_ns: reading.run_delay_ns.saturating_sub(last.run_delay_ns),
            io_bytes: reading.io_bytes.saturating_sub(last.io_bytes),
            io_delay_ns: slept_ns.max(told_ns),
        }
    }
}

/// Pressure of one resource.
struct Pressure {
    file: Option<File>,
}

impl Pressure {
    /// The whole machine's, for who is in the way may be in another container; where that is hidden the own group's.
    fn open(name: &str) -> Pressure {
        let own = || {
            let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
            let group = parse_cgroup(&groups)?.trim_end_matches('/');
            File::open(format!("/sys/fs/cgroup{group}/{name}.pressure")).ok()
        };
        Pressure { file: File::open(format!("/proc/pressure/{name}")).ok().or_else(own) }
    }

    fn total_ns(&self, line: &mut [u8; LINE_BYTES]) -> Option<u64> {
        parse_pressure(read(self.file.as_ref()?, line)?)
    }
}

/// Why threads could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// /proc hides them (hidepid, another user's process, no /proc).
    Hidden,
    /// Too many descriptors are open.
    Descriptors,
}

impl Trouble {
    pub fn words(self) -> &'static str {
        match self {
            Trouble::Hidden => {
                "CPU and I/O of some threads cannot be sampled: /proc hides them (another user's process, hidepid, or no /proc); \
                 whoever uses up the CPU or the disk there is not found"
            }
            Trouble::Descriptors => {
                "CPU and I/O of some threads cannot be sampled: no more files can be opened; raise the limit of open files, or \
                 set system_cpu and system_io off"
            }
        }
    }
}

/// The state of one look, kept by a sample of the window.
#[derive(Clone, Default)]
pub struct Look {
    slots: HashMap<u32, SlotUse>,
    /// Tasks that run, as far as their threads are known, and how many of them were looked at.
    pub tasks: u64,
    pub looked_at: u64,
    pub pressure_cpu_ns: Option<u64>,
    pub pressure_io_ns: Option<u64>,
}

impl Look {
    /// The slots of which something is known.
    pub fn slots(&self) -> impl Iterator<Item = usize> + '_ {
        self.slots.keys().map(|&slot| slot as usize)
    }

    /// What is known of a slot; all zero where nothing is.
    pub fn slot(&self, index: usize) -> SlotUse {
        self.slots.get(&(index as u32)).copied().unwrap_or_default()
    }
}

/// A thread to be looked at.
struct Job {
    running: bool,
    age_ns: u64,
    slot: u32,
    scope: u64,
    pid: u32,
    tid: u32,
}

#[derive(Default)]
pub struct Sampler {
    cpu: bool,
    io: bool,
    threads: HashMap<(u32, u32), Thread>,
    slots: HashMap<u32, SlotUse>,
    /// Completions of a slot at the last look: whoever completed none since then did nothing worth a look.
    completions: HashMap<u32, u64>,
    pressure: Option<(Pressure, Pressure)>,
    descriptors: u64,
    cpus: u64,
    said: Vec<Trouble>,
}

impl Sampler {
    pub fn set(&mut self, cpu: bool, io: bool) {
        if (cpu, io) != (self.cpu, self.io) {
            self.close();
            (self.cpu, self.io) = (cpu, io);
        }
    }

    pub fn on(&self) -> bool {
        self.cpu || self.io
    }

    pub fn samples(&self) -> (bool, bool) {
        (self.cpu, self.io)
    }

    /// Processors that this process may use: its affinity and its control group's quota.
    pub fn cpus(&self) -> u64 {
        self.cpus
    }

    /// Nothing is suspected any more: gives the descriptors back.
    pub fn close(&mut self) {
        let said = std::mem::take(&mut self.said);
        *self = Sampler { cpu: self.cpu, io: self.io, said, ..Sampler::default() };
    }

    /// Open descriptors.
    pub fn open_files(&self) -> usize {
        let of_pressure = self.pressure.as_ref().map_or(0, |p| p.0.file.iter().chain(&p.1.file).count());
        self.threads.len() * self.files_each() + of_pressure
    }

    fn files_each(&self) -> usize {
        self.cpu as usize + 2 * self.io as usize
    }

    /// Reads what is to be read; `say` hears of each kind of trouble once. None while switched off.
    pub fn look(&mut self, region: &Region, now_ns: u64, mut say: impl FnMut(Trouble)) -> Option<Look> {
        if !self.on() {
            return None;
        }
        let mut line = [0u8; LINE_BYTES];
        if self.pressure.is_none() {
            self.pressure = Some((Pressure::open("cpu"), Pressure::open("io")));
            self.cpus = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
            let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
            self.descriptors = parse_open_files(&limits).unwrap_or(1024) / DESCRIPTORS_PART;
        }
        let mut jobs = self.jobs(region, now_ns);
        let (tasks, threads) = choose(&mut jobs);
        let (looked_at, threads_looked_at) = running(&jobs);
        let mut look = Look { tasks, looked_at, ..Look::default() };
        let skipped = threads - threads_looked_at;
        if skipped > 0 {
            region.header().counters.system_threads_skipped.fetch_add(skipped, Relaxed);
        }
        let mut sums: HashMap<u32, (Sums, u64)> = HashMap::with_capacity(jobs.len());
        let mut opened = 0;
        for job in &jobs {
            let did = match self.read(job, now_ns, &mut opened, &mut line) {
                Ok(did) => did,
                Err(None) => continue,
                Err(Some(trouble)) => {
                    region.header().counters.system_threads_unreadable.fetch_add(1, Relaxed);
                    if !self.said.contains(&trouble) {
                        self.said.push(trouble);
                        say(trouble);
                    }
                    continue;
                }
            };
            let (sum, threads) = sums.entry(job.slot).or_default();
            sum.add(did);
            *threads += 1;
        }
        for job in &jobs {
            // Once per slot: its threads are one task's.
            let Some((mut sum, threads)) = sums.remove(&job.slot) else { continue };
            sum.run_delay_ns /= threads;
            sum.io_delay_ns /= threads;
            let slot = self.slots.entry(job.slot).or_default();
            slot.sums.add(sum);
            if slot.scope == job.scope {
                slot.scope_cpu_ns = slot.scope_cpu_ns.saturating_add(sum.cpu_ns);
                // Waiting for the disk is doing I/O, too: what it waits for is on its way.
                let io = sum.io_bytes > 0 || sum.io_delay_ns > 0;
                slot.scope_io_ns += if io { now_ns.saturating_sub(slot.looked_ns) } else { 0 };
            } else {
                // What was done until now was partly the request's before: in doubt nobody's.
                (slot.scope, slot.scope_cpu_ns, slot.scope_io_ns) = (job.scope, 0, 0);
            }
            slot.looked_ns = now_ns;
        }
        self.threads.retain(|_, t| now_ns.saturating_sub(t.last_ns) < FORGET_NS);
        let (cpu, io) = self.pressure.as_ref()?;
        look.pressure_cpu_ns = cpu.total_ns(&mut line);
        look.pressure_io_ns = io.total_ns(&mut line);
        look.slots = self.slots.clone();
        Some(look)
    }

    /// Threads of tasks that run, or that have completed a request since the last look.
    fn jobs(&mut self, region: &Region, now_ns: u64) -> Vec<Job> {
        let since_ns = region.header().clock.tracing_since_ns();
        let mut jobs = Vec::new();
        let job = |index: usize, slot: &TaskSlot, owner: &Owner, running: bool, age_ns: u64| Job {
            running,
            age_ns,
            slot: index as u32,
            // Before everything that is read of its threads: what they do later may be another request's.
            scope: slot.scope.load(Acquire),
            pid: owner.pid.load(Relaxed),
            tid: owner.tid.load(Relaxed),
        };
        let age = |slot: &TaskSlot| match slot.request_start_ns.load(Acquire) {
            start if start == 0 || start < since_ns => None,
            start => Some(now_ns.saturating_sub(start)),
        };
        for (index, slot) in region.used_tasks().iter().enumerate() {
            let state = slot.state.load(Acquire) & 3;
            if (state != ACTIVE && state != CACHED) || slot.owner.tid.load(Relaxed) == 0 {
                continue;
            }
            let age_ns = if state == ACTIVE { age(slot) } else { None };
            let completions = slot.completions.load(Relaxed);
            let before = self.completions.insert(index as u32, completions);
            if age_ns.is_some() || before != Some(completions) {
                jobs.push(job(index, slot, &slot.owner, age_ns.is_some(), age_ns.unwrap_or(0)));
            }
        }
        for worker in region.live_workers() {
            let task = worker.task.load(Relaxed);
            let Some(slot) = region.task(task).filter(|_| worker.owner.tid.load(Relaxed) != 0) else { continue };
            if let Some(age_ns) = age(slot) {
                jobs.push(job(index_of(task), slot, &worker.owner, true, age_ns));
            }
        }
        jobs
    }

    /// What a thread did since the last look. Err(None): it has ended, or its turn comes later.
    fn read(
        &mut self,
        job: &Job,
        now_ns: u64,
        opened: &mut usize,
        line: &mut [u8; LINE_BYTES],
    ) -> Result<Sums, Option<Trouble>> {
        let key = (job.pid, job.tid);
        if let Some(thread) = self.threads.get_mut(&key) {
            if let Some(reading) = thread.read(line) {
                return Ok(thread.step(reading, now_ns));
            }
            // It has ended; the number may name another by now.
            self.threads.remove(&key);
        }
        if *opened >= MOST_OPENED {
            return Err(None);
        }
        if (self.threads.len() + 1) * self.files_each() > self.descriptors as usize {
            return Err(Some(Trouble::Descriptors));
        }
        *opened += self.files_each();
        match Thread::open(job.pid, job.tid, self.cpu, self.io) {
            Ok(mut thread) => {
                let first = thread.read(line).ok_or(None)?;
                thread.step(first, now_ns);
                self.threads.insert(key, thread);
                Ok(Sums::default())
            }
            Err(e) => Err(trouble(&e, job)),
        }
    }
}

fn trouble(e: &std::io::Error, job: &Job) -> Option<Trouble> {
    match e.kind() {
        ErrorKind::PermissionDenied => Some(Trouble::Hidden),
        // hidepid shows nothing instead of refusing: then a process that lives seems to have no first thread.
        ErrorKind::NotFound => {
            let process = ProcessId { pid: job.pid, start_ticks: 0 };
            (job.pid == job.tid && process.pid_exists()).then_some(Trouble::Hidden)
        }
        _ if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => Some(Trouble::Descriptors),
        _ => None,
    }
}

/// Each thread once, the oldest requests first, no more than a look may cost. Gives the running tasks and the running
/// threads that there are.
fn choose(jobs: &mut Vec<Job>) -> (u64, u64) {
    // A thread that several tasks name works for the one that began last: the others went on without it.
    jobs.sort_unstable_by_key(|j| ((j.pid, j.tid), !j.running, j.age_ns, j.slot));
    jobs.dedup_by_key(|j| (j.pid, j.tid));
    let there = running(jobs);
    jobs.sort_unstable_by(|a, b| {
        (b.running, b.age_ns).cmp(&(a.running, a.age_ns)).then((a.slot, a.pid, a.tid).cmp(&(b.slot, b.pid, b.tid)))
    });
    let mut of_task: HashMap<u32, usize> = HashMap::new();
    jobs.retain(|job| {
        let of_task = of_task.entry(job.slot).or_default();
        *of_task += 1;
        *of_task <= MOST_OF_TASK
    });
    jobs.truncate(MOST_THREADS);
    there
}

/// How many tasks, and threads of them, run.
fn running(jobs: &[Job]) -> (u64, u64) {
    let slots = jobs.iter().filter(|j| j.running).map(|j| j.slot);
    let threads = slots.clone().count();
    (slots.collect::<std::collections::HashSet<u32>>().len() as u64, threads as u64)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::atomic::{AtomicBool, AtomicU32};
    use std::time::{Duration, Instant};

    #[test]
    fn what_the_kernel_writes_is_understood() {
        assert_eq!(parse_schedstat("311648 68507 2\n"), Some((311648, 68507)));
        let stat = "4242 (a) b (D) S 1) D 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 \
                    33 34 35 36 37 777 39 40\n";
        // Field 42 is the 40th after the command.
        let fields: Vec<&str> = stat[stat.rfind(')').unwrap() + 2..].split(' ').collect();
        assert_eq!(parse_stat(stat), Some((true, fields[39].parse().unwrap())));
        assert_eq!(parse_state(stat), Some((false, 17)));
        assert_eq!(parse_io("rchar: 5\nwchar: 6\nread_bytes: 4096\nwrite_bytes: 8192\n"), Some(12288));
        assert_eq!(
            parse_pressure("some avg10=0.00 avg60=0.00 avg300=0.00 total=12\nfull avg10=0.00 total=9\n"),
            Some(12_000)
        );
        assert_eq!(parse_open_files("Limit  Soft\nMax open files            1024      524288  files\n"), Some(1024));
        assert_eq!(parse_open_files("Max open files            unlimited unlimited files\n"), Some(u64::MAX));
        assert_eq!(parse_cgroup("4:memory:/x\n0::/a/b\n"), Some("/a/b"));
    }

    proptest! {
        #[test]
        fn any_text_is_borne(text in "\\PC{0,200}|([0-9]{1,25}[ )(\n]){0,60}|some total=[0-9]{0,25}|read_bytes: [0-9]{0,25}") {
            let _ = (parse_schedstat(&text), parse_stat(&text), parse_io(&text), parse_pressure(&text));
            let _ = (parse_open_files(&text), parse_cgroup(&text), parse_state(&text));
        }
    }

    #[test]
    fn this_kernels_files_are_understood() {
        let (pid, tid) = (std::process::id(), my_tid());
        spin(Duration::from_millis(30)); // a running thread's sum is brought up to date at the scheduler's ticks
        let thread = Thread::open(pid, tid, true, true).unwrap();
        let reading = thread.read(&mut [0; LINE_BYTES]).expect("schedstat, stat and io of the own thread");
        assert!(reading.cpu_ns > 0 && !reading.asleep);
    }

    #[test]
    fn a_thread_that_runs_is_ready_and_one_that_sleeps_is_not() {
        let (pid, me) = (std::process::id(), my_tid());
        spin(Duration::from_millis(30));
        let runs = ThreadState::read(pid, me).expect("the own thread");
        assert!(runs.ready && runs.cpu_ns > 0);
        let (tid, done) = (AtomicU32::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| {
                tid.store(my_tid(), Relaxed);
                while !done.load(Relaxed) {
                    std::thread::park();
                }
            });
            let asleep = || match tid.load(Relaxed) {
                0 => false,
                tid => !ThreadState::read(pid, tid).expect("a thread that lives").ready,
            };
            while !asleep() {
                std::thread::yield_now();
            }
            assert_eq!(ThreadState::read(pid, 0), None, "of several threads none is meant");
            done.store(true, Relaxed);
            sleeper.thread().unpark();
        });
        assert_eq!(ThreadState::read(pid, u32::MAX), None);
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep");
        let sleeps = || !ThreadState::read(child.id(), 0).expect("its only thread").ready;
        while !sleeps() {
            std::thread::yield_now();
        }
        child.kill().and_then(|()| child.wait()).expect("a child that lives");
        assert_eq!(ThreadState::read(child.id(), 0), None);
    }

    fn my_tid() -> u32 {
        // SAFETY: gettid has no arguments and cannot fail.
        unsafe { libc::syscall(libc::SYS_gettid) as u32 }
    }

    fn spin(cpu: Duration) {
        let start = thread_time();
        while thread_time() - start < cpu {
            std::hint::spin_loop();
        }
    }

    fn thread_time() -> Duration {
        let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `t` is valid for writing.
        unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t) };
        Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
    }

    fn region() -> Region {
        let region = Region::anonymous(64, 256).unwrap();
        region.header().clock.tracing_since_ns.store(0, Relaxed);
        region
    }

    fn task(region: &Region, key: u64, tid: u32) -> (u64, usize) {
        let task = region.begin_task(ProcessId::current(), key, 0).unwrap();
        region.task(task).unwrap().owner.tid.store(tid, Relaxed);
        (task, index_of(task))
    }

    fn sampler() -> Sampler {
        let mut s = Sampler::default();
        s.set(true, true);
        s
    }

    #[test]
    fn cpu_time_is_the_tasks_whose_thread_used_it() {
        let r = region();
        let (_, mine) = task(&r, 1, my_tid());
        let stop = AtomicBool::new(false);
        let other_tid = AtomicU32::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                other_tid.store(my_tid(), Relaxed);
                while !stop.load(Relaxed) {
                    std::thread::park_timeout(Duration::from_millis(5));
                }
            });
            while other_tid.load(Relaxed) == 0 {
                std::thread::yield_now();
            }
            let (_, idle) = task(&r, 2, other_tid.load(Relaxed));
            let mut s = sampler();
            let say = |t: Trouble| panic!("{t:?}");
            let first = s.look(&r, r.now_ns(), say).unwrap();
            assert_eq!((first.slot(mine).sums, first.tasks), (Sums::default(), 2), "the first look only notes");
            spin(Duration::from_millis(60));
            let second = s.look(&r, r.now_ns(), say).unwrap();
            stop.store(true, Relaxed);
            let used_ns = second.slot(mine).sums.since(first.slot(mine).sums).cpu_ns;
            assert!(used_ns >= 50_000_000, "{used_ns}");
            assert_eq!(second.slot(mine).scope_cpu_ns, used_ns);
            assert!(second.slot(idle).sums.cpu_ns < used_ns / 2, "{:?}", second.slot(idle));
            assert_eq!(
                s.open_files(),
                2 * 3 + s.pressure.as_ref().map_or(0, |p| p.0.file.iter().chain(&p.1.file).count())
            );
            s.close();
            assert_eq!(s.open_files(), 0);
        });
    }

    #[test]
    fn a_new_scope_begins_with_nothing_used() {
        let r = region();
        let (id, slot) = task(&r, 1, my_tid());
        let mut s = sampler();
        s.look(&r, r.now_ns(), |_| ());
        spin(Duration::from_millis(20));
        let before = s.look(&r, r.now_ns(), |_| ()).unwrap().slot(slot);
        assert!(before.scope_cpu_ns > 0);
        r.begin_request(r.task(id).unwrap(), 0);
        spin(Duration::from_millis(20));
        let after = s.look(&r, r.now_ns(), |_| ()).unwrap().slot(slot);
        assert_eq!((after.scope, after.scope_cpu_ns), (before.scope + 1, 0));
        assert!(after.sums.cpu_ns > before.sums.cpu_ns, "the slot's sum goes on");
    }

    /// An ended thread's number given to another must not add the one's time to the other's.
    #[test]
    fn a_reused_number_is_another_thread() {
        let r = region();
        let tid = std::thread::spawn(|| {
            spin(Duration::from_millis(5));
            my_tid()
        });
        let tid = tid.join().unwrap();
        let (_, slot) = task(&r, 1, tid);
        let mut s = sampler();
        s.set(true, false);
        // As if it had been open while the thread lived: a descriptor of a thread that has ended.
        let gone =
            std::thread::spawn(|| (my_tid(), File::open(format!("/proc/self/task/{}/schedstat", my_tid())).unwrap()));
        let (_, file) = gone.join().unwrap();
        let last = Reading { cpu_ns: 1 << 40, ..Reading::default() };
        let thread = Thread { schedstat: Some(file), io: None, last, last_ns: 1 };
        s.threads.insert((std::process::id(), tid), thread);
        let look = s.look(&r, r.now_ns(), |t| panic!("a thread that ended is no trouble: {t:?}")).unwrap();
        assert_eq!(look.slot(slot).sums, Sums::default());
        assert_eq!(s.threads.len(), 0, "its descriptor is closed");
    }

    #[test]
    fn more_threads_than_a_look_may_cost_are_counted() {
        let job = |slot: u32, tid: u32, age_ns: u64| Job { running: true, age_ns, slot, scope: 1, pid: 1, tid };
        let mut jobs: Vec<Job> = (1..=300).map(|n| job(n, n, n as u64)).collect();
        jobs.extend((1000..1200).map(|tid| job(400, tid, 1 << 40)));
        assert_eq!(choose(&mut jobs), (301, 500));
        assert_eq!(jobs.len(), MOST_THREADS);
        assert_eq!(running(&jobs).0, 1 + (MOST_THREADS - MOST_OF_TASK) as u64);
        assert_eq!(jobs.iter().filter(|j| j.slot == 400).count(), MOST_OF_TASK);
        assert_eq!(
            jobs.iter().map(|j| j.slot).min(),
            Some(300 - (MOST_THREADS - MOST_OF_TASK) as u32 + 1),
            "the oldest"
        );
        // A thread that two name works for the one that began last.
        let mut twice = vec![job(1, 7, 5000), job(2, 7, 10)];
        assert_eq!(choose(&mut twice), (1, 1));
        assert_eq!(twice.iter().map(|j| j.slot).collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn hidden_threads_are_said_once_and_do_no_harm() {
        let r = region();
        // The first process's I/O is not for everybody; as root it is, so a process that never was stands in.
        let (id, _) = task(&r, 1, 1);
        r.task(id).unwrap().owner.pid.store(0x3fff_fff0, Relaxed);
        let mut s = sampler();
        let look = s.look(&r, r.now_ns(), |t| panic!("an ended process is no trouble: {t:?}")).unwrap();
        assert_eq!(look.tasks, 1);
        let refused = std::io::Error::from_raw_os_error(libc::EACCES);
        let job = Job { running: true, age_ns: 0, slot: 0, scope: 1, pid: std::process::id(), tid: std::process::id() };
        assert_eq!(trouble(&refused, &job), Some(Trouble::Hidden));
        let missing = std::io::Error::from_raw_os_error(libc::ENOENT);
        assert_eq!(trouble(&missing, &job), Some(Trouble::Hidden), "this process lives, so /proc hides it");
        assert_eq!(trouble(&std::io::Error::from_raw_os_error(libc::EMFILE), &job), Some(Trouble::Descriptors));
        assert_eq!(trouble(&std::io::Error::from_raw_os_error(libc::ESRCH), &job), None);
        s.descriptors = 2;
        r.task(id).unwrap().owner.set(ProcessId::current());
        r.task(id).unwrap().owner.tid.store(my_tid(), Relaxed);
        let mut said = Vec::new();
        for _ in 0..3 {
            s.look(&r, r.now_ns(), |t| said.push(t));
        }
        assert_eq!(said, [Trouble::Descriptors], "said once");
        assert_eq!(r.header().counters.system_threads_unreadable.load(Relaxed), 3);
    }

    #[test]
    fn sleep_and_ticks_become_delay() {
        let open = || Thread { schedstat: None, io: None, last: Reading::default(), last_ns: 0 };
        let (mut sleeps, mut told) = (open(), open());
        let ms = 1_000_000;
        sleeps.step(Reading::default(), 1000 * ms);
        let asleep = Reading { asleep: true, ..Reading::default() };
        assert_eq!(sleeps.step(asleep, 1025 * ms).io_delay_ns, 25 * ms);
        assert_eq!(sleeps.step(asleep, 9000 * ms).io_delay_ns, LONGEST_SLEEP_NS, "nobody looked for long");
        told.step(Reading { io_ticks: 4, ..Reading::default() }, 1000 * ms);
        assert_eq!(told.step(Reading { io_ticks: 7, ..Reading::default() }, 1025 * ms).io_delay_ns, 30 * ms);
    }

    /// Not a benchmark, but the figure of the README comes from here: `cargo test --release -- --ignored --nocapture look_costs`.
    #[test]
    #[ignore = "prints a cost, checks nothing"]
    fn look_costs() {
        for (cpu, io) in [(true, false), (false, true), (true, true)] {
            let r = region();
            let stop = AtomicBool::new(false);
            std::thread::scope(|scope| {
                for n in 0..60 {
                    let (r, stop) = (&r, &stop);
                    scope.spawn(move || {
                        task(r, n, my_tid());
                        while !stop.load(Relaxed) {
                            std::thread::park_timeout(Duration::from_millis(50));
                        }
                    });
                }
                while r.live_tasks().filter(|(_, slot)| slot.owner.tid.load(Relaxed) != 0).count() < 60 {
                    std::thread::yield_now();
                }
                let mut s = Sampler::default();
                s.set(cpu, io);
                let first = Instant::now();
                while s.threads.len() < 60 {
                    s.look(&r, r.now_ns(), |_| ());
                }
                let open_ns = first.elapsed().as_nanos() as u64 / 60;
                let mut costs: Vec<u64> = (0..200)
                    .map(|_| {
                        let start = thread_time();
                        s.look(&r, r.now_ns(), |_| ());
                        (thread_time() - start).as_nanos() as u64 / 60
                    })
                    .collect();
                costs.sort_unstable();
                println!(
                    "cpu {cpu} io {io}: {} ns a thread and look (median of 200), {open_ns} ns to open",
                    costs[100]
                );
                stop.store(true, Relaxed);
            });
        }
    }
}
