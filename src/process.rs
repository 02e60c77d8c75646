//! This process's part in a region: initialisation, fork, the threads, and what the calling thread is bound to.
//!
//! Hot calls read one pointer (`active`) and the thread's binding; everything else is behind it. The region and this
//! object are not freed while another thread of the process lives: it may be inside a hot call at any time.

mod bound;

use crate::cancel::action::{self, Level};
use crate::cancel::agent::Served;
use crate::config::{Config, Mode};
use crate::control::baseline::Learnt;
use crate::control::controller::Controller;
use crate::error::{Code, Error, Result};
use crate::primitive::{AtomicPtr, AtomicU32, Ordering::*};
use crate::region::layout::{Agent, Header, Owner, TaskSlot, Trace};
use crate::region::lease::Role;
use crate::region::owner::ProcessId;
use crate::region::tasks::{active_word, index_of};
use crate::region::{futex_wait, Region};
use bound::BOUND;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, TryLockError};
use std::time::Duration;

/// What `atropos_gate` points to while there is no region.
pub static CLOSED: AtomicU32 = AtomicU32::new(0);

/// The controller's thread rests so long when a bug stopped its step.
const AFTER_PANIC: Duration = Duration::from_secs(1);
/// An agent is rung when there is something to do, and to stop. It looks by itself no more often than this, in case its
/// place in the table was taken for a dead process's: a server may have hundreds.
const AGENT_NAP: Duration = Duration::from_secs(1);

/// In a section of its own: a host that links the library may put beside it what it reads at each call itself.
#[link_section = "atropos_hot"]
static ACTIVE: AtomicPtr<Process> = AtomicPtr::new(null_mut());
/// In a forked child: the parent's object, until `after_fork` adopts it.
static INHERITED: AtomicPtr<Process> = AtomicPtr::new(null_mut());
/// What a shutdown of this process left mapped, the newest; see `sweep`.
static RETIRED: AtomicPtr<Process> = AtomicPtr::new(null_mut());
/// The pid of the process in which init, shutdown or after_fork runs; 0 = in none.
static BUSY: AtomicU32 = AtomicU32::new(0);

/// What the hot calls read stands first, on one line of the cache.
#[repr(C, align(64))]
pub struct Process {
    /// The same as the region's, one step nearer for the hot calls.
    pub header: &'static Header,
    tasks: &'static [TaskSlot],
    pub me: ProcessId,
    pub region: &'static Region,
    config: Mutex<Config>,
    /// None after shutdown.
    controller: Mutex<Option<Controller>>,
    threads: Mutex<Threads>,
    served: Served,
    /// What the region's leaders had learnt, as of the shutdown.
    learnt: OnceLock<Vec<(u16, Learnt)>>,
}

#[derive(Default)]
struct Threads {
    controller: Option<Worker>,
    agent: Option<Worker>,
    /// Shutdown has begun: none is started any more.
    closed: bool,
}

/// A thread of the library's with a stop of its own: were it shared, a start in another thread would take back the stop
/// that somebody waits for.
struct Worker {
    stop: Arc<Stop>,
    thread: std::thread::JoinHandle<()>,
}

#[derive(Default)]
struct Stop {
    asked: Mutex<bool>,
    changed: Condvar,
}

impl Stop {
    fn ask(&self) {
        *lock(&self.asked) = true;
        self.changed.notify_all();
    }

    /// Pauses; true = stop.
    fn wait(&self, timeout: Duration) -> bool {
        let (asked, _) = self
            .changed
            .wait_timeout_while(lock(&self.asked), timeout, |asked| !*asked)
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        *asked
    }
}

/// The live object of this process.
#[inline(always)]
pub fn active() -> Option<&'static Process> {
    // SAFETY: the pointer is null or a leaked Box.
    unsafe { ACTIVE.load(Acquire).as_ref() }
}

/// As `active`, with the error that fits.
pub fn require() -> Result<&'static Process> {
    active().ok_or_else(|| {
        if INHERITED.load(Acquire).is_null() {
            Error::new(Code::NotInit, "libatropos is not initialised in this process: call atropos_init first")
        } else {
            Error::new(Code::Forked, "forked child: call atropos_after_fork before anything else")
        }
    })
}

/// A lock whose holder panicked is used on: its data are plain values, each valid by itself.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Under ThreadSanitizer: std comes compiled, and what its lock does when it has to wait is not seen. What it tries
    // first is inlined here, and seen.
    while cfg!(atropos_tsan) {
        match mutex.try_lock() {
            Ok(guard) => return guard,
            Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => std::thread::yield_now(),
        }
    }
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

struct Exclusive;

impl Exclusive {
    fn enter() -> Result<Exclusive> {
        let me = std::process::id();
        // A child forked while another thread of its parent was inside has that one's mark, and no such thread.
        match BUSY.fetch_update(AcqRel, Relaxed, |holder| (holder != me).then_some(me)) {
            Ok(_) => Ok(Exclusive),
            Err(_) => Err(Error::new(Code::Already, "another thread is initialising or shutting the library down")),
        }
    }
}

impl Drop for Exclusive {
    fn drop(&mut self) {
        BUSY.store(0, Release);
    }
}

/// Runs in a forked child before fork returns there: nothing of the parent's may be used. Only stores.
extern "C" fn in_forked_child() {
    let parent = ACTIVE.swap(null_mut(), AcqRel);
    RETIRED.store(null_mut(), Release);
    if !parent.is_null() {
        INHERITED.store(parent, Release);
    }
    crate::capi::atropos_gate.store(&CLOSED as *const AtomicU32 as *mut AtomicU32, Release);
    BUSY.store(0, Release);
    BOUND.with(|b| {
        // The slots name the parent's thread, rightly.
        b.owner.set(null());
        b.tid.set(0);
        b.cached.set(0);
    });
    unbind();
}

fn install(process: Process) -> &'static Process {
    // Only one thread at a time is here. No `Once`: a child forked in the middle of it would wait for ever. Registering it
    // twice, as such a child may, does no harm.
    static AT_FORK: AtomicU32 = AtomicU32::new(0);
    if AT_FORK.load(Acquire) == 0 {
        // SAFETY: the handler only stores to atomics and thread-locals. If it could not be registered, children that
        // fork without exec would have to call after_fork before any other call; the return code says so.
        if unsafe { libc::pthread_atfork(None, None, Some(in_forked_child)) } != 0 {
            action::log(Level::Warning, "pthread_atfork failed: forked children must not call the library");
        }
        AT_FORK.store(1, Release);
    }
    let process: &'static Process = Box::leak(Box::new(process));
    INHERITED.store(null_mut(), Release);
    ACTIVE.store(process as *const Process as *mut Process, Release);
    let gate = &process.region.header().clock.open;
    crate::capi::atropos_gate.store(gate as *const AtomicU32 as *mut AtomicU32, Release);
    process
}

impl Process {
    fn new(region: &'static Region, config: Config) -> Process {
        let me = ProcessId::current();
        Process {
            region,
            me,
            header: region.header(),
            tasks: region.tasks(),
            controller: Mutex::new(Some(Controller::new(me, &config))),
            config: Mutex::new(config),
            threads: Mutex::default(),
            served: Served::new(),
            learnt: OnceLock::new(),
        }
    }

    /// Is this the object of the process that runs? In a child that a callback forked, and that returned from it, the
    /// parent's loops go on otherwise, under the parent's name.
    fn is_mine(&'static self) -> bool {
        active().is_some_and(|process| std::ptr::eq(process, self))
    }

    /// The process's view of the configuration.
    pub fn config(&self) -> Config {
        lock(&self.config).clone()
    }

    /// Applies the reloadable part of `next`. Sizes and the region's path stay.
    pub fn reload(&self, next: Config) -> Result<()> {
        let mut config = lock(&self.config);
        for (name, same) in [
            ("max_tasks", next.max_tasks == config.max_tasks),
            ("max_workers", next.max_workers == config.max_workers),
            ("region_path", next.region_path == config.region_path),
        ] {
            if !same {
                return Err(Error::new(Code::Config, format!("`{name}` cannot change without a restart of the host")));
            }
        }
        self.region.header().publish_settings(&next)?;
        *config = next;
        Ok(())
    }

    /// One step of the controller.
    pub fn tick(&self) -> Role {
        // Two threads of one process that tick at once: one steps, the other has nothing to do.
        let mut controller = match self.controller.try_lock() {
            Ok(controller) => controller,
            Err(TryLockError::Poisoned(p)) => p.into_inner(),
            Err(TryLockError::WouldBlock) => return Role::Leader,
        };
        let log_path = lock(&self.config).decision_log.clone();
        let Some(at_work) = controller.as_mut() else { return Role::Follower };
        let step = || at_work.tick(self.region, log_path.as_deref());
        match catch_unwind(AssertUnwindSafe(step)) {
            Ok(role) => role,
            Err(panic) => {
                // Whatever it left half-done is forgotten; the lease runs out and is taken anew, here or elsewhere.
                *controller = Some(Controller::new(self.me, &self.config()));
                action::log(Level::Error, "a bug in libatropos stopped a step of the controller; it begins anew");
                resume_unwind(panic)
            }
        }
    }

    /// How long the host may pause before the next tick. While somebody is inside one (the caller itself, in a callback)
    /// nobody is made to wait for its end.
    pub fn pause(&self) -> Duration {
        let pause = |controller: &Option<Controller>| controller.as_ref().map(Controller::pause);
        let known = match self.controller.try_lock() {
            Ok(controller) => pause(&controller),
            Err(TryLockError::Poisoned(poisoned)) => pause(&poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        known.unwrap_or(Controller::SHORT_PAUSE)
    }

    /// Starts the controller's own thread.
    pub fn start_controller(&'static self) -> Result<()> {
        self.start(
            |threads| &mut threads.controller,
            "controller",
            "atropos-control",
            || {
                Ok(move |stop: &Stop| {
                    let mut pause = self.pause();
                    while !stop.wait(pause) && self.is_mine() {
                        // A step that fails must not end the thread, nor fail again at full speed.
                        let stepped = catch_unwind(AssertUnwindSafe(|| self.tick()));
                        pause = if stepped.is_ok() { self.pause() } else { AFTER_PANIC };
                    }
                })
            },
        )
    }

    /// Starts the agent's own thread.
    pub fn start_agent(&'static self) -> Result<()> {
        self.start(
            |threads| &mut threads.agent,
            "agent",
            "atropos-agent",
            || {
                let agent = self.region.register_agent(self.me)?;
                Ok(move |stop: &Stop| loop {
                    // First: the word is compared inside the kernel, so no ring from here on is missed, nor a stop.
                    let rings = agent.doorbell.load(Acquire);
                    if *lock(&stop.asked) || !self.is_mine() {
                        return;
                    }
                    if self.served.rang(agent) {
                        self.region.run_pending(self.me);
                    }
                    futex_wait(&agent.doorbell, rings, AGENT_NAP);
                })
            },
        )
    }

    /// Starts one of the two threads unless it runs.
    fn start<B: FnOnce(&Stop) + Send + 'static>(
        &self,
        place: impl Fn(&mut Threads) -> &mut Option<Worker>,
        what: &str,
        name: &str,
        body: impl FnOnce() -> Result<B>,
    ) -> Result<()> {
        let mut threads = lock(&self.threads);
        if threads.closed {
            return Err(Error::new(Code::NotInit, "another thread is shutting libatropos down"));
        }
        if place(&mut threads).is_some() {
            return Err(Error::new(Code::Already, format!("the {what} thread runs already")));
        }
        let (body, stop) = (body()?, Arc::new(Stop::default()));
        let its = stop.clone();
        *place(&mut threads) = Some(Worker { stop, thread: spawn(name, move || body(&its))? });
        Ok(())
    }

    /// The host's own poll instead of an agent thread. Returns how many actions ran.
    pub fn poll_agent(&self) -> Result<usize> {
        let mine = |agent: &&Agent| agent.start_ticks.load(Relaxed) == self.me.start_ticks;
        let agent = match self.region.agent_of(self.me.pid).filter(mine) {
            Some(agent) => agent,
            None => {
                let _one_at_a_time = lock(&self.threads);
                self.region.register_agent(self.me)?
            }
        };
        Ok(if self.served.rang(agent) { self.region.run_pending(self.me) } else { 0 })
    }

    /// Stops both threads and waits for them; gives the lease up. `for_good`: none starts again.
    pub fn stop_threads(&self, for_good: bool) -> bool {
        let (controller, agent) = {
            let mut threads = lock(&self.threads);
            threads.closed |= for_good;
            (threads.controller.take(), threads.agent.take())
        };
        let any = controller.is_some() || agent.is_some();
        [&controller, &agent].into_iter().flatten().for_each(|worker| worker.stop.ask());
        if agent.is_some() {
            self.region.ring(self.me.pid);
        }
        let me = std::thread::current().id();
        for Worker { thread, .. } in [controller, agent].into_iter().flatten() {
            // A callback that shuts the library down runs on the thread itself: it cannot wait for its own end.
            if thread.thread().id() != me {
                let _ = thread.join();
            }
        }
        if let Ok(Some(controller)) = self.controller.try_lock().as_deref() {
            controller.resign(self.region);
        }
        any
    }

    /// Gives back what a shut down region needs, as far as other threads cannot be using it. They may be inside a call:
    /// what they find from now on is an empty region. A server that restarts inside itself must not grow.
    fn retire(&self) {
        let _ = self.learnt.set(self.region.header().handed_on().collect());
        // A tick that runs, perhaps on this very thread, in a callback that shuts the library down, needs all as it is.
        if let Ok(mut controller) = self.controller.try_lock() {
            *controller = None;
            self.region.discard();
        }
    }

    /// Begins a task, in the slot the calling thread ended last if that is still free: it is in the caches.
    pub fn create(&self, key: u64, bind_it: bool) -> u64 {
        let cached = BOUND.with(|b| b.cached.get());
        let Some(task) = self.region.begin_task(self.me, key, cached) else {
            return 0;
        };
        if bind_it {
            bind(self.region, task);
        } else if let Some(slot) = self.tasks.get(index_of(task)) {
            works_for(&slot.owner);
        }
        task
    }

    /// Ends a task.
    pub fn free(&self, task: u64) {
        let (bound, cached) = BOUND.with(|b| (b.task.get() == task && task != 0, b.cached.get()));
        // A thread keeps one slot, not more.
        let keep = !self.region.is_kept(cached);
        if self.region.end_task(self.me, task, keep) {
            if bound {
                // A kept slot goes on to name this thread: its next task is this thread's, too.
                BOUND.with(|b| b.owner.set(null()));
                unbind();
            }
            if keep {
                BOUND.with(|b| b.cached.set(task));
            }
        }
    }

    /// A live task of this process.
    #[inline(always)]
    pub fn task(&self, handle: u64) -> Option<&'static TaskSlot> {
        let slot = self.tasks.get(index_of(handle))?;
        (slot.state.load(Acquire) == active_word(handle) && slot.owner.pid.load(Relaxed) == self.me.pid).then_some(slot)
    }

    pub fn attach(&self, task: u64) -> u64 {
        let Some(worker) = self.region.attach(self.me, task) else {
            return 0;
        };
        if let (Some(slot), Some(w)) = (self.region.task(task), self.region.worker(worker)) {
            set_bound(self.region, task, slot, &w.trace, &w.owner);
        }
        worker
    }

    pub fn detach(&self, worker: u64) {
        if let Some(slot) = self.region.worker(worker) {
            if BOUND.with(|b| std::ptr::eq(b.trace.get(), &slot.trace)) {
                unbind();
            }
        }
        self.region.detach(worker);
    }
}

/// A thread that takes no signal of the host's.
fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<std::thread::JoinHandle<()>> {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets are valid for writing; the new thread inherits the full mask, this one gets its own back.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
    }
    let thread = std::thread::Builder::new().name(name.into()).spawn(body);
    // SAFETY: `before` was filled in above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), null_mut()) };
    thread.map_err(|e| Error::new(Code::Io, format!("start thread {name}: {e}")))
}

/// Creates or joins the region and makes this process part of it.
pub fn init(config: Config) -> Result<()> {
    let _only = Exclusive::enter()?;
    let learnt = learnt_before();
    sweep();
    if active().is_some() {
        return Err(Error::new(Code::Already, "libatropos is initialised in this process already"));
    }
    if !INHERITED.load(Acquire).is_null() {
        return Err(Error::new(Code::Forked, "forked child: the region is inherited, call atropos_after_fork"));
    }
    let region = match &config.region_path {
        Some(path) => Region::create_or_join(Path::new(path), config.max_tasks, config.max_workers)?,
        None => Region::anonymous(config.max_tasks, config.max_workers)?,
    };
    let me = ProcessId::current();
    region.reap_former_life(me);
    // Whoever joins takes the settings that are there; the creator publishes its own.
    if !has_settings(&region, me) {
        region.header().publish_settings(&config)?;
        region.header().hand_on(learnt.into_iter());
    }
    let region: &'static Region = Box::leak(Box::new(region));
    install(Process::new(region, config));
    Ok(())
}

/// Are there settings already? A process that joins in the moment after the creation waits for the creator's, unless that
/// dies over it.
fn has_settings(region: &Region, me: ProcessId) -> bool {
    let creator = region.header().identity.creator.get();
    for _ in 0..1000 {
        if region.header().settings.version.load(Acquire) != 0 {
            return true;
        }
        if creator == me || !creator.is_alive() {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    false
}

/// What the controller of this process's former region knew of each class: a restarted server is the same one.
fn learnt_before() -> Vec<(u16, Learnt)> {
    // SAFETY: null or a leaked object, which only `sweep` frees.
    let before = unsafe { RETIRED.load(Acquire).as_ref() };
    before.and_then(|process| process.learnt.get().cloned()).unwrap_or_default()
}

/// Frees what an earlier shutdown left of its region (addresses and a few pages), if nobody is there that might be inside a
/// call. Children keep their own mapping.
fn sweep() {
    // A host that restarts the library inside a callback returns into a call that still uses the old region.
    let alone =
        !action::InHost::anywhere() && std::fs::read_dir("/proc/self/task").is_ok_and(|tasks| tasks.count() == 1);
    let retired = if alone { RETIRED.swap(null_mut(), AcqRel) } else { null_mut() };
    if retired.is_null() {
        return;
    }
    // Handles kept by this thread name nothing in the next region: its generations begin elsewhere.
    unbind();
    // SAFETY: both come from Box::leak in `init` and `install`, nothing points to them since `shutdown`, and this is the
    // only thread.
    unsafe {
        let process = Box::from_raw(retired);
        drop(Box::from_raw(process.region as *const Region as *mut Region));
    }
}

/// Leaves the region. Its memory stays mapped for now: other threads may be inside a call.
pub fn shutdown() -> Result<()> {
    let _only = Exclusive::enter()?;
    let process = require()?;
    crate::capi::atropos_gate.store(&CLOSED as *const AtomicU32 as *mut AtomicU32, Release);
    process.stop_threads(true);
    ACTIVE.store(null_mut(), Release);
    unbind();
    BOUND.with(|b| b.cached.set(0));
    let region = process.region;
    for (handle, slot) in region.live_tasks() {
        if slot.owner.get() == process.me {
            region.end_task(process.me, handle, false);
        }
    }
    region.leave_agent(process.me);
    if region.header().identity.creator.get() == process.me {
        region.unlink();
    }
    process.retire();
    // An older one that could not be freed yet stays for good.
    RETIRED.store(process as *const Process as *mut Process, Release);
    Ok(())
}

/// In a forked child: joins the inherited region under its own identity. Calling it again does nothing.
pub fn after_fork() -> Result<()> {
    let _only = Exclusive::enter()?;
    if active().is_some() {
        return Ok(());
    }
    // SAFETY: null or the parent's leaked object, whose memory this child has a copy of.
    let Some(parent) = (unsafe { INHERITED.load(Acquire).as_ref() }) else {
        return Err(Error::new(Code::NotInit, "there is no inherited region: the parent did not call atropos_init"));
    };
    // A thread of the parent may have held the lock at the fork: then the defaults serve, with the region's numbers.
    let mut config = match parent.config.try_lock() {
        Ok(config) => config.clone(),
        Err(_) => Config::default(),
    };
    parent.region.header().read_settings(&mut config, &mut 0);
    install(Process::new(parent.region, config));
    Ok(())
}

/// The kernel's number of the calling thread.
#[inline]
fn my_tid() -> u32 {
    BOUND.with(|b| {
        if b.tid.get() == 0 {
            // SAFETY: gettid has no arguments and cannot fail. By number: old C libraries have no function for it.
            b.tid.set(unsafe { libc::syscall(libc::SYS_gettid) } as u32);
        }
        b.tid.get()
    })
}

/// From here on the calling thread works for the slot's task, as far as is known.
#[inline]
pub fn works_for(owner: &Owner) {
    owner.tid.store(my_tid(), Relaxed);
}

/// The same for a request that begins now; without a name where nobody asks for it, not with that of an earlier request.
#[inline(always)]
pub fn request_works_for(header: &Header, owner: &Owner) {
    if header.clock.threads_named.load(Relaxed) != 0 {
        works_for(owner);
    } else if owner.tid.load(Relaxed) != 0 {
        owner.tid.store(0, Relaxed);
    }
}

/// The calling thread no longer works for the task it was bound to: what it does now is another's doing.
fn leave_owner() {
    BOUND.with(|b| {
        // SAFETY: null or part of a slot of a region that is never unmapped while it is bound.
        let Some(owner) = (unsafe { b.owner.replace(null()).as_ref() }) else { return };
        if owner.tid.load(Relaxed) == b.tid.get() {
            owner.tid.store(0, Relaxed);
        }
    })
}

fn set_bound(region: &'static Region, task: u64, slot: &TaskSlot, trace: &Trace, owner: &Owner) {
    if BOUND.with(|b| !std::ptr::eq(b.owner.get(), owner)) {
        leave_owner();
    }
    works_for(owner);
    BOUND.with(|b| {
        b.owner.set(owner);
        b.task.set(task);
        b.word.set(active_word(task));
        b.slot.set(slot);
        b.trace.set(trace);
        b.header.set(region.header());
    });
}

/// Binds the calling thread to a live task; false for a stale handle.
pub fn bind(region: &'static Region, task: u64) -> bool {
    match region.task(task) {
        Some(slot) => {
            set_bound(region, task, slot, &slot.trace, &slot.owner);
            true
        }
        None => false,
    }
}

pub fn unbind() {
    leave_owner();
    BOUND.with(|b| {
        b.task.set(0);
        b.word.set(0);
        b.slot.set(null());
        b.trace.set(null());
    });
}

/// The task the calling thread is bound to, while it lives; 0 = none.
pub fn current() -> u64 {
    bound(|b| b.task).unwrap_or(0)
}

/// What a bound call works on.
#[derive(Clone, Copy)]
pub struct Binding {
    pub task: u64,
    pub slot: &'static TaskSlot,
    pub trace: &'static Trace,
    pub header: &'static Header,
}

/// Runs `f` with the calling thread's binding; None when there is none or its task has ended.
#[inline(always)]
pub fn bound<R>(f: impl FnOnce(Binding) -> R) -> Option<R> {
    BOUND.with(|b| {
        // SAFETY: null or a slot of a region that is never unmapped.
        let slot = unsafe { b.slot.get().as_ref() }?;
        // Ended meanwhile, by this thread or another: the binding is stale.
        if slot.state.load(Relaxed) != b.word.get() {
            return None;
        }
        // SAFETY: both were set together with `slot`, in the same region.
        let (trace, header) = unsafe { (&*b.trace.get(), &*b.header.get()) };
        Some(f(Binding { task: b.task.get(), slot, trace, header }))
    })
}

/// Does the library do anything in this process right now?
pub fn mode() -> Mode {
    active().map_or(Mode::Off, |p| p.region.header().mode())
}
