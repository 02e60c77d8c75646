//! The C ABI: a thin shell over the safe core, and the only place with `extern "C"`.
//!
//! `include/atropos.h` is generated from this folder. Every function catches panics at the boundary, accepts NULL, 0
//! and stale handles, and keeps errno for the hot calls (none of them makes a system call).

#![allow(non_camel_case_types)]

mod hot;
mod retry;
mod tasks;

// For callers in Rust (fuzzing, benches): the same functions that C hosts call.
pub use hot::*;
pub use retry::*;
pub use tasks::*;

use crate::cancel::action;
use crate::config::{Config, Mode};
use crate::control::window::{self, ResourceKind};
use crate::error::{Code, Error, Result};
use crate::primitive::{AtomicPtr, AtomicU32};
use crate::process;
use crate::region::lease::Role;
use crate::region::resources::kind_from;
use core::ffi::{c_char, c_int, c_void, CStr};
use std::cell::RefCell;

/// A task: a unit of work that can be cancelled. Index + generation; 0 = "not tracked". Every call accepts 0 and stale
/// handles and then does nothing.
pub type atropos_task_t = u64;
/// A worker (one thread or process working for a task), returned by atropos_task_attach.
pub type atropos_worker_t = u64;
/// A registered resource; 0 = unknown, harmless.
pub type atropos_resource_t = u32;

/// Done.
pub const ATROPOS_OK: c_int = 0;
/// A bad argument (NULL, size, range).
pub const ATROPOS_E_INVALID: c_int = -1;
/// Before atropos_init or after atropos_shutdown.
pub const ATROPOS_E_NOT_INIT: c_int = -2;
/// A second atropos_init in this process, or the thread runs already.
pub const ATROPOS_E_ALREADY: c_int = -3;
/// Unknown key or bad value; atropos_last_error names line, key and what is allowed.
pub const ATROPOS_E_CONFIG: c_int = -4;
/// A system call failed.
pub const ATROPOS_E_IO: c_int = -5;
/// The region file was refused: wrong magic, layout, size, owner or mode.
pub const ATROPOS_E_REGION: c_int = -6;
/// A table of the region is full.
pub const ATROPOS_E_FULL: c_int = -7;
/// The handle is stale or was never given out.
pub const ATROPOS_E_STALE: c_int = -8;
/// Another process leads the controller (not a failure: keep ticking, this one stands by).
pub const ATROPOS_E_NOT_LEADER: c_int = -9;
/// A call in a forked child that must call atropos_after_fork first.
pub const ATROPOS_E_FORKED: c_int = -10;
/// A bug in the library, caught at the boundary.
pub const ATROPOS_E_PANIC: c_int = -11;
/// Not supported on this system.
pub const ATROPOS_E_UNSUPPORTED: c_int = -12;

/// Resource type: something that is held by one or few at a time.
pub const ATROPOS_LOCK: u32 = 1;
/// Resource type: units of a pool; taking one may evict another's.
pub const ATROPOS_MEMORY: u32 = 2;
/// Resource type: a queue with servers (worker slots, tickets); a task holds it while it occupies a server.
pub const ATROPOS_QUEUE: u32 = 3;

/// In a cancel's `resource`: the task uses up the CPU. Nobody registers it, the library samples it (`system_cpu`).
pub const ATROPOS_RESOURCE_CPU: u32 = 4294967294;
/// In a cancel's `resource`: the task uses up the disk (`system_io`).
pub const ATROPOS_RESOURCE_BLOCK_IO: u32 = 4294967295;
const _: () = assert!(ATROPOS_RESOURCE_CPU == window::CPU && ATROPOS_RESOURCE_BLOCK_IO == window::BLOCK_IO);

/// Nothing is traced.
pub const ATROPOS_MODE_OFF: u32 = 1;
/// Decide and record, cancel nobody (the default).
pub const ATROPOS_MODE_OBSERVE: u32 = 2;
/// Decide, record and cancel.
pub const ATROPOS_MODE_ENFORCE: u32 = 3;

/// Request class of the task, 0..15: each class has its own baseline.
pub const ATROPOS_TASK_CLASS: u32 = 1;
/// -100..100, higher = more important; of near-equal culprits the lower goes first.
pub const ATROPOS_TASK_PRIORITY: u32 = 2;
/// 0/1: background work, whose latency does not count.
pub const ATROPOS_TASK_BACKGROUND: u32 = 3;
/// 0/1: never cancelled.
pub const ATROPOS_TASK_PROTECTED: u32 = 4;
/// 0/1: the request in flight was cancelled once and runs again (atropos_retry_wait): it is not cancelled a second time. The
/// mark goes with the request.
pub const ATROPOS_TASK_RETRIED: u32 = 5;
/// 0/1, default 1: 0 while cancelling is not possible (a commit in progress).
pub const ATROPOS_TASK_CANCELLABLE: u32 = 6;
/// The value is the address of a NUL-terminated string; 47 bytes are kept.
pub const ATROPOS_TASK_LABEL: u32 = 7;
/// 1: the unit of work that a cancel would lose (a transaction) begins now; 0: it ended.
pub const ATROPOS_TASK_WORK_START: u32 = 8;

/// Edge kind: not known; the library looks whether the blocker itself waits for the same thing.
pub const ATROPOS_EDGE_UNKNOWN: u32 = 0;
/// Edge kind: the blocker holds what the waiter wants.
pub const ATROPOS_EDGE_HOLDS: u32 = 1;
/// Edge kind: the blocker only stands before the waiter in the queue, with a request that bars it.
pub const ATROPOS_EDGE_QUEUED: u32 = 2;

/// Action flag: the controller may run it in its own process, for tasks of any process.
pub const ATROPOS_ACTION_ANYWHERE: u32 = 1;

/// Settings. `size` must be sizeof(atropos_config). Numbers: 0 = default. Precedence: defaults < file < text < fields.
/// A program may be built with an older or a newer header than the library's: the struct only grows at its end, and fields
/// that the library does not know must be 0.
/// The text keys are the field names, and `clock` (auto, coarse, precise), `system_cpu` and `system_io` (on, off; default
/// off): CPU and block I/O as resources, sampled from the kernel for running tasks while an overload is suspected.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct atropos_config {
    pub size: usize,
    /// NULL: an anonymous shared mapping, inherited over fork. Else a file, created with mode 0600.
    pub region_path: *const c_char,
    /// NULL, or the path of a file of "key = value" lines, # begins a comment.
    pub file: *const c_char,
    /// NULL, or text of the same form.
    pub text: *const c_char,
    /// NULL, or a path: the controller's process appends one JSON object per line.
    pub decision_log: *const c_char,
    /// ATROPOS_MODE_*; default observe.
    pub mode: u32,
    /// Tasks tracked at once, 16..65536; default 1024. Further tasks run untracked.
    pub max_tasks: u32,
    /// Workers beyond each task's first, 16..65536; default 256.
    pub max_workers: u32,
    /// Length of a window in ms, 20..10000; default 100. Windows slide by a quarter of it.
    pub window_ms: u32,
    /// Windows in a row over the objective before an overload is acted on, 1..100; default 3.
    pub trigger_windows: u32,
    /// Time a cancel has to show effect, in ms, 10..60000; default 200.
    pub verify_ms: u32,
    /// Objective for the 99th percentile of latency in ms; 0 = relative to the learned baseline.
    pub slo_ms: f64,
    /// Relative objective: this share above the baseline, 0.01..10; default 0.20.
    pub slo_tolerance: f64,
    /// Share of execution time lost to a resource from which on it is overloaded, 0..1; default 0.30.
    pub contention_threshold: f64,
    /// Share of execution time that a cancel must give back, 0..1; default 0.25.
    pub min_relief: f64,
    /// Cancels per second in the long run; default 2.
    pub cancel_rate_per_s: f64,
    /// Cancels at once; default 4.
    pub cancel_burst: u32,
    /// At most this share of completions may be cancelled (the burst excepted), 0..1; default 0.01.
    pub cancel_share: f64,
    /// For how long what a task was cancelled for must have been calm before it runs again, in ms, 10..600000; default
    /// 1000. See atropos_retry_wait.
    pub retry_calm_ms: u32,
    /// Longest wait to run again of a background task, or of one without a deadline, in ms, 1..86400000; default 600000.
    pub retry_background_max_ms: u32,
    /// A cancelled task runs again only while the throughput is at most this share of what it was before the cancel,
    /// above 0..1; default 0.5. 1 = at any throughput; 0 (only without any load) can be said in the text form.
    pub retry_load_share: f64,
}

/// "waiter waits for blocker", as the host knows it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct atropos_edge {
    pub waiter: atropos_task_t,
    /// 0: somebody untracked, whom nobody can cancel.
    pub blocker: atropos_task_t,
    pub resource: atropos_resource_t,
    /// ATROPOS_EDGE_*
    pub kind: u32,
    pub instance: u64,
}

/// What a cancel action gets.
#[repr(C)]
pub struct atropos_cancel_request {
    pub size: usize,
    pub task: atropos_task_t,
    pub key: u64,
    /// The scope sequence the decision was made for.
    pub scope: u64,
    pub owner_pid: u32,
    /// 1 = cancel action, 2 = terminate action.
    pub rung: u32,
    pub decision_id: u64,
    pub resource: atropos_resource_t,
    pub instance: u64,
    /// One line in words; valid during the call.
    pub reason: *const c_char,
}

/// A task's mailbox, for the host that acts on it. `size` must be sizeof(atropos_cancel_info): no more is written, and
/// fields that only a newer header has become 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct atropos_cancel_info {
    pub size: usize,
    pub scope: u64,
    pub decision_id: u64,
    pub resource: atropos_resource_t,
    pub rung: u32,
    pub instance: u64,
    /// How long the task had held (or barred) the resource.
    pub held_ns: u64,
    /// Tasks that waited for it.
    pub victims: u32,
    pub resource_name: [c_char; 32],
    pub reason: [c_char; 160],
}

/// 0: told to stop; anything else: could not. May be called again for the same scope (a lost cancel is repeated). It must
/// return, as every callback: no exception, longjmp or pthread_exit out of it. While one blocks its thread serves nobody
/// else: a controller's is replaced by another process's within 200 ms, if there is one.
pub type atropos_cancel_fn =
    Option<unsafe extern "C" fn(req: *const atropos_cancel_request, arg: *mut c_void) -> c_int>;
/// Fills at most `max` edges and returns how many there are. Called only while an overload is suspected, by the thread
/// that runs the controller.
pub type atropos_edge_fn =
    Option<unsafe extern "C" fn(edges: *mut atropos_edge, max: usize, arg: *mut c_void) -> usize>;
/// Level: 1 error, 2 warning, 3 notice, 4 debug. Called only by threads inside init, reload, tick, controller or agent.
pub type atropos_log_fn = Option<unsafe extern "C" fn(level: c_int, message: *const c_char, arg: *mut c_void)>;
/// Fills in how far a task is (rows processed, rows expected; `total` 0 = unknown) and returns 1; 0 when it does not know; -1
/// when nothing can cancel the task just now, such as in the middle of a commit: it is left alone.
/// Called by the thread that runs the controller, for those who might be cancelled; wins over atropos_progress.
pub type atropos_progress_fn = Option<
    unsafe extern "C" fn(task: atropos_task_t, key: u64, done: *mut u64, total: *mut u64, arg: *mut c_void) -> c_int,
>;
/// How long, in ns, undoing the task's work would take (a rollback); 0 = nothing to undo, or not known. Called by the
/// thread that runs the controller, for those who might be cancelled.
pub type atropos_cost_fn = Option<unsafe extern "C" fn(task: atropos_task_t, key: u64, arg: *mut c_void) -> u64>;
/// Writes words for one object of a resource ("table 16402 of database 5"), at most `size` bytes, and returns how many;
/// 0 = none. Called by the thread that runs the controller.
pub type atropos_describe_fn = Option<
    unsafe extern "C" fn(
        r: atropos_resource_t,
        instance: u64,
        buf: *mut c_char,
        size: usize,
        arg: *mut c_void,
    ) -> usize,
>;
/// One recorded decision as a JSON object.
pub type atropos_decision_fn = Option<unsafe extern "C" fn(json: *const c_char, arg: *mut c_void)>;

/// Points to the word that opens the inline gates of atropos_trace.h: a static zero without a region, a word of the
/// region otherwise, so that turning tracing off anywhere turns it off in all processes.
#[no_mangle]
pub static atropos_gate: AtomicPtr<AtomicU32> = AtomicPtr::new(&process::CLOSED as *const AtomicU32 as *mut AtomicU32);

thread_local! {
    static LAST_ERROR: RefCell<String> = const { RefCell::new(String::new()) };
}

fn remember(text: &str) {
    // A thread that is being torn down has no place for the text any more; the code still says what happened.
    let _ = LAST_ERROR.try_with(|e| e.borrow_mut().replace_range(.., text));
}

/// Runs a call; a panic becomes `default`.
#[inline(always)]
fn guard<R>(default: R, call: impl FnOnce() -> R) -> R {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)) {
        Ok(result) => result,
        Err(_) => default,
    }
}

/// Runs a call that answers with a code.
fn code(call: impl FnOnce() -> Result<()>) -> c_int {
    guard(ATROPOS_E_PANIC, || match call() {
        Ok(()) => ATROPOS_OK,
        Err(e) => {
            remember(&e.text);
            e.code as c_int
        }
    })
}

/// SAFETY: `text` is NULL or NUL-terminated and lives through the use.
unsafe fn text_of<'a>(what: &str, text: *const c_char) -> Result<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|_| Error::new(Code::Invalid, format!("{what} is not UTF-8")))
}

/// Bytes of `atropos_config` in the first release; it only ever grows at its end.
const CONFIG_BYTES_FIRST: usize = 120;
/// Bytes of `atropos_cancel_info` in the first release.
const CANCEL_INFO_BYTES_FIRST: usize = 248;
/// No struct of any version is as large: such a size is an uninitialised one, not a newer header's.
const STRUCT_BYTES_MOST: usize = 4096;
const _: () = assert!(
    std::mem::size_of::<atropos_config>() >= CONFIG_BYTES_FIRST
        && std::mem::size_of::<atropos_cancel_info>() >= CANCEL_INFO_BYTES_FIRST
);

/// Can a struct that says it has `size` bytes be of some version of the header?
fn is_plausible_size(name: &str, size: usize, first: usize, known: usize) -> Result<()> {
    // Every version's is a multiple of its alignment: another size is a mistake, or rubbish.
    if (first..=STRUCT_BYTES_MOST).contains(&size) && size % std::mem::align_of::<u64>() == 0 {
        return Ok(());
    }
    Err(Error::new(
        Code::Invalid,
        format!("{name}.size is {size}, this library's struct has {known} bytes: set it to sizeof({name})"),
    ))
}

/// The caller's settings, whichever version's header it was built with: fields that an older header does not have are 0
/// (= default), and fields that only a newer one has must be 0, for this library cannot do what they ask.
///
/// SAFETY: as `atropos_init`; `cfg` is not NULL.
unsafe fn sized_config(cfg: *const atropos_config) -> Result<atropos_config> {
    let known = std::mem::size_of::<atropos_config>();
    // SAFETY: the caller's promise: the first member is there whatever the version.
    let size = unsafe { std::ptr::addr_of!((*cfg).size).read() };
    is_plausible_size("atropos_config", size, CONFIG_BYTES_FIRST, known)?;
    // SAFETY: the caller says that so many bytes are there.
    let given = unsafe { std::slice::from_raw_parts(cfg.cast::<u8>(), size) };
    if let Some(at) = given.iter().skip(known).position(|byte| *byte != 0) {
        return Err(Error::new(
            Code::Invalid,
            format!(
                "atropos_config has {size} bytes, this library knows {known} and byte {} is set: the program was built \
                 for a newer libatropos; leave its newer fields 0 or install that version",
                known + at
            ),
        ));
    }
    let mut config = std::mem::MaybeUninit::<atropos_config>::zeroed();
    // SAFETY: both have at least so many bytes and do not overlap; zero is valid for every field (NULL, 0).
    unsafe {
        std::ptr::copy_nonoverlapping(given.as_ptr(), config.as_mut_ptr().cast(), size.min(known));
        Ok(config.assume_init())
    }
}

/// SAFETY: as `atropos_init`.
unsafe fn config_from(base: Config, cfg: *const atropos_config) -> Result<Config> {
    let mut config = base;
    if cfg.is_null() {
        return Ok(config);
    }
    // SAFETY: the caller's promise.
    let c = unsafe { sized_config(cfg)? };
    // SAFETY: the caller's promise about the pointers.
    let [file, text, region_path, decision_log] = unsafe {
        [
            text_of("atropos_config.file", c.file)?,
            text_of("atropos_config.text", c.text)?,
            text_of("atropos_config.region_path", c.region_path)?,
            text_of("atropos_config.decision_log", c.decision_log)?,
        ]
    };
    if let Some(file) = file {
        config.apply_file(file)?;
    }
    if let Some(text) = text {
        config.apply_text("text", text)?;
    }
    if c.mode != 0 {
        config.mode = Mode::from_u32(c.mode).ok_or_else(|| {
            Error::new(
                Code::Config,
                format!(
                    "atropos_config: bad value `{}` for `mode`; allowed: ATROPOS_MODE_OFF, _OBSERVE, _ENFORCE",
                    c.mode
                ),
            )
        })?;
    }
    let numbers = [
        ("max_tasks", c.max_tasks as f64),
        ("max_workers", c.max_workers as f64),
        ("window_ms", c.window_ms as f64),
        ("trigger_windows", c.trigger_windows as f64),
        ("verify_ms", c.verify_ms as f64),
        ("slo_ms", c.slo_ms),
        ("slo_tolerance", c.slo_tolerance),
        ("contention_threshold", c.contention_threshold),
        ("min_relief", c.min_relief),
        ("cancel_rate_per_s", c.cancel_rate_per_s),
        ("cancel_burst", c.cancel_burst as f64),
        ("cancel_share", c.cancel_share),
        ("retry_calm_ms", c.retry_calm_ms as f64),
        ("retry_background_max_ms", c.retry_background_max_ms as f64),
        ("retry_load_share", c.retry_load_share),
    ];
    for (name, value) in numbers {
        if value != 0.0 {
            config.set("atropos_config", name, &value.to_string())?;
        }
    }
    for (name, value) in [("region_path", region_path), ("decision_log", decision_log)] {
        if let Some(value) = value {
            config.set("atropos_config", name, value)?;
        }
    }
    Ok(config)
}

/// Makes this process part of a region: creates it, or joins the one that `region_path` names. NULL = all defaults.
/// A process that joins takes the settings that are there. A forked child calls atropos_after_fork instead.
///
/// # Safety
/// `cfg` is NULL or points to a struct whose first member is its size; its strings are NULL or NUL-terminated.
#[no_mangle]
pub unsafe extern "C" fn atropos_init(cfg: *const atropos_config) -> c_int {
    code(|| {
        // SAFETY: the caller's promise.
        process::init(unsafe { config_from(Config::default(), cfg)? })
    })
}

/// Leaves the region: stops this library's threads, ends this process's tasks, closes the gates. Calls that other threads
/// are inside stay harmless: they find an empty region. Waits for a callback that runs on the library's threads.
#[no_mangle]
pub extern "C" fn atropos_shutdown() -> c_int {
    code(process::shutdown)
}

/// Changes settings while running, for all processes of the region. What `cfg` does not name goes back to its default;
/// sizes and region_path must stay as they are (or unnamed).
///
/// # Safety
/// As atropos_init.
#[no_mangle]
pub unsafe extern "C" fn atropos_reload(cfg: *const atropos_config) -> c_int {
    code(|| {
        let process = process::require()?;
        let now = process.config();
        let fixed = Config {
            max_tasks: now.max_tasks,
            max_workers: now.max_workers,
            region_path: now.region_path,
            ..Config::default()
        };
        // SAFETY: the caller's promise.
        process.reload(unsafe { config_from(fixed, cfg)? })
    })
}

/// In a forked child: joins the inherited region under its own identity. Until then every call does nothing here.
/// Calling it again is harmless.
#[no_mangle]
pub extern "C" fn atropos_after_fork() -> c_int {
    code(process::after_fork)
}

/// Copies the text of this thread's last error, NUL-terminated and cut to `size`; returns its full length.
///
/// # Safety
/// `buf` is NULL or has room for `size` bytes.
#[no_mangle]
pub unsafe extern "C" fn atropos_last_error(buf: *mut c_char, size: usize) -> usize {
    guard(0, || {
        let text = LAST_ERROR.try_with(|e| e.borrow().clone()).unwrap_or_default();
        // SAFETY: the caller's promise.
        unsafe { copy_out(&text, buf, size) }
    })
}

/// SAFETY: `buf` is NULL or has room for `size` bytes.
unsafe fn copy_out(text: &str, buf: *mut c_char, size: usize) -> usize {
    if !buf.is_null() && size > 0 {
        let kept = crate::region::text::cut(text, size - 1);
        // SAFETY: kept.len() < size, and the caller promised the room.
        unsafe {
            std::ptr::copy_nonoverlapping(kept.as_ptr().cast::<c_char>(), buf, kept.len());
            *buf.add(kept.len()) = 0;
        }
    }
    text.len()
}

/// What an error code means; never NULL.
#[no_mangle]
pub extern "C" fn atropos_strerror(code: c_int) -> *const c_char {
    if code == ATROPOS_OK {
        return c"ok".as_ptr();
    }
    Code::ALL.iter().find(|c| **c as c_int == code).map_or(c"unknown error code", |c| c.meaning()).as_ptr()
}

/// The library's version at run time: major << 16 | minor << 8 | patch.
#[no_mangle]
pub extern "C" fn atropos_version() -> u32 {
    const fn number(text: &str) -> u32 {
        let (bytes, mut n, mut i) = (text.as_bytes(), 0, 0);
        while i < bytes.len() {
            n = n * 10 + (bytes[i] - b'0') as u32;
            i += 1;
        }
        n
    }
    number(env!("CARGO_PKG_VERSION_MAJOR")) << 16
        | number(env!("CARGO_PKG_VERSION_MINOR")) << 8
        | number(env!("CARGO_PKG_VERSION_PATCH"))
}

/// Sets the log callback of this process (NULL: none). May be called before atropos_init.
///
/// # Safety
/// `func` must stay callable with `arg` until another is set.
#[no_mangle]
pub unsafe extern "C" fn atropos_set_log(func: atropos_log_fn, arg: *mut c_void) -> c_int {
    code(|| {
        action::LOG.set(func.map_or(0, |f| f as usize), arg, 0);
        Ok(())
    })
}

/// Registers a resource, or finds it by name; returns 0 on failure (atropos_last_error says why). The same name has the
/// same number in all processes. At most 31 resources; names of 1 to 31 bytes.
///
/// # Safety
/// `name` is NULL or NUL-terminated.
#[no_mangle]
pub unsafe extern "C" fn atropos_resource_register(name: *const c_char, kind: u32) -> atropos_resource_t {
    guard(0, || {
        // SAFETY: the caller's promise.
        match unsafe { register(name, kind) } {
            Ok(id) => id,
            Err(e) => {
                remember(&e.text);
                0
            }
        }
    })
}

/// SAFETY: `name` is NULL or NUL-terminated.
unsafe fn register(name: *const c_char, kind: u32) -> Result<u32> {
    // SAFETY: the caller's promise.
    let name = unsafe { text_of("the resource's name", name)? }
        .ok_or_else(|| Error::new(Code::Invalid, "the resource's name is NULL"))?;
    let kind: ResourceKind = kind_from(kind).ok_or_else(|| {
        Error::new(
            Code::Invalid,
            format!("resource {name:?}: type {kind} is none of ATROPOS_LOCK, ATROPOS_MEMORY, ATROPOS_QUEUE"),
        )
    })?;
    process::require()?.region.header().register(name, kind)
}

/// Sets the function that lists "who blocks whom" now (NULL: none), in the process that runs the controller.
///
/// # Safety
/// `func` must stay callable with `arg` until another is set.
#[no_mangle]
pub unsafe extern "C" fn atropos_edge_source(func: atropos_edge_fn, arg: *mut c_void) -> c_int {
    code(|| {
        action::EDGES.set(func.map_or(0, |f| f as usize), arg, 0);
        Ok(())
    })
}

/// Sets the function that says how far a task is (NULL: nothing), in the process that runs the controller: for hosts that
/// count rows where no call can be placed.
///
/// # Safety
/// `func` must stay callable with `arg` until another is set.
#[no_mangle]
pub unsafe extern "C" fn atropos_set_progress_source(func: atropos_progress_fn, arg: *mut c_void) -> c_int {
    code(|| {
        action::PROGRESS.set(func.map_or(0, |f| f as usize), arg, 0);
        Ok(())
    })
}

/// Sets the function that says what undoing a task's work would take (NULL: nothing), in the process that runs the
/// controller. It is taken off what cancelling the task would give back, and breaks near-ties.
///
/// # Safety
/// `func` must stay callable with `arg` until another is set.
#[no_mangle]
pub unsafe extern "C" fn atropos_set_rollback_cost(func: atropos_cost_fn, arg: *mut c_void) -> c_int {
    code(|| {
        action::ROLLBACK_COST.set(func.map_or(0, |f| f as usize), arg, 0);
        Ok(())
    })
}

/// Sets the function that gives instances words in decisions (NULL: they stay numbers), in the process that runs the
/// controller.
///
/// # Safety
/// `func` must stay callable with `arg` until another is set.
#[no_mangle]
pub unsafe extern "C" fn atropos_set_describe(func: atropos_describe_fn, arg: *mut c_void) -> c_int {
    code(|| {
        action::DESCRIBE.set(func.map_or(0, |f| f as usize), arg, 0);
        Ok(())
    })
}

/// How many servers a QUEUE resource has in all (worker slots); 0 = not known. While some are free nobody is to blame for
/// waits.
#[no_mangle]
pub extern "C" fn atropos_queue_capacity(r: atropos_resource_t, servers: u64) {
    guard((), || {
        if let Some(entry) = process::active().and_then(|process| process.region.header().resource(r)) {
            entry.servers.store(servers, crate::primitive::Ordering::Relaxed);
        }
    })
}

/// Waiters that are not tasks yet (connections in the kernel's backlog): how many, and for how long the oldest. Counts for
/// a second: repeat it at every tick. They count as requests in flight of the class that most requests are of.
#[no_mangle]
pub extern "C" fn atropos_queue_observed(r: atropos_resource_t, waiting: u64, oldest_wait_ns: u64) {
    guard((), || {
        use crate::primitive::Ordering::Relaxed;
        let Some(process) = process::active() else {
            return;
        };
        if let Some(entry) = process.region.header().resource(r) {
            entry.queue_waiting.store(waiting, Relaxed);
            entry.queue_oldest_wait_ns.store(oldest_wait_ns, Relaxed);
            entry.queue_observed_ns.store(process.region.now_ns(), Relaxed);
        }
    })
}

/// Sets what stops a task of this process (NULL: nothing but the mailbox, which cooperative hosts poll). It runs in this
/// process: by the controller if that leads here, else by the agent (atropos_agent_start or atropos_agent_poll).
///
/// # Safety
/// `func` must stay callable with `arg` until another is set.
#[no_mangle]
pub unsafe extern "C" fn atropos_set_cancel_action(func: atropos_cancel_fn, arg: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { atropos_set_cancel_action_ex(func, arg, 0) }
}

/// As atropos_set_cancel_action, with flags (ATROPOS_ACTION_*).
///
/// # Safety
/// As atropos_set_cancel_action.
#[no_mangle]
pub unsafe extern "C" fn atropos_set_cancel_action_ex(func: atropos_cancel_fn, arg: *mut c_void, flags: u32) -> c_int {
    code(|| set_action(&action::CANCEL, func, arg, flags))
}

/// Sets the next rung: what ends a task that did not react to the cancel action (its session, say).
///
/// # Safety
/// As atropos_set_cancel_action.
#[no_mangle]
pub unsafe extern "C" fn atropos_set_terminate_action(func: atropos_cancel_fn, arg: *mut c_void, flags: u32) -> c_int {
    code(|| set_action(&action::TERMINATE, func, arg, flags))
}

fn set_action(which: &action::Callback, func: atropos_cancel_fn, arg: *mut c_void, flags: u32) -> Result<()> {
    if flags & !ATROPOS_ACTION_ANYWHERE != 0 {
        return Err(Error::new(
            Code::Invalid,
            format!("action flags {flags:#x}: only ATROPOS_ACTION_ANYWHERE is known"),
        ));
    }
    which.set(func.map_or(0, |f| f as usize), arg, flags);
    Ok(())
}

/// Runs the standing cancel requests of this process's tasks, for processes that must not have threads; returns how
/// many actions ran, or an error code. Call it now and then; it is cheap when nothing was asked.
#[no_mangle]
pub extern "C" fn atropos_agent_poll() -> c_int {
    guard(ATROPOS_E_PANIC, || match process::require().and_then(|p| p.poll_agent()) {
        Ok(n) => n.min(c_int::MAX as usize) as c_int,
        Err(e) => {
            remember(&e.text);
            e.code as c_int
        }
    })
}

/// Starts a thread that does so instead, all signals blocked.
#[no_mangle]
pub extern "C" fn atropos_agent_start() -> c_int {
    code(|| process::require()?.start_agent())
}

/// Starts the controller's own thread in this process, all signals blocked.
#[no_mangle]
pub extern "C" fn atropos_controller_start() -> c_int {
    code(|| process::require()?.start_controller())
}

/// Stops the library's threads of this process, waits for them and gives the lead up.
#[no_mangle]
pub extern "C" fn atropos_controller_stop() -> c_int {
    code(|| {
        process::require()?.stop_threads(false);
        Ok(())
    })
}

/// How long, in ms, the host may pause before its next atropos_controller_tick: 25 in calm times, less while an overload
/// is suspected or a cancel is on its way. 0 without a region.
#[no_mangle]
pub extern "C" fn atropos_controller_pause_ms() -> u32 {
    guard(0, || process::active().map_or(0, |p| p.pause().as_millis() as u32))
}

/// One step of the controller, for hosts that drive it: call it every 5 to 25 ms. ATROPOS_OK when this process leads,
/// ATROPOS_E_NOT_LEADER when another one does.
#[no_mangle]
pub extern "C" fn atropos_controller_tick() -> c_int {
    guard(ATROPOS_E_PANIC, || match process::require() {
        Ok(p) if p.tick() == Role::Follower => ATROPOS_E_NOT_LEADER,
        Ok(_) => ATROPOS_OK,
        Err(e) => {
            remember(&e.text);
            e.code as c_int
        }
    })
}

/// JSON text of state, counters, resources and tasks, NUL-terminated and cut to `size`; returns its full length.
///
/// # Safety
/// `buf` is NULL or has room for `size` bytes.
#[no_mangle]
pub unsafe extern "C" fn atropos_stats(buf: *mut c_char, size: usize) -> usize {
    guard(0, || match process::require() {
        Ok(p) => {
            let text = crate::report::stats::json(p.region);
            // SAFETY: the caller's promise.
            unsafe { copy_out(&text, buf, size) }
        }
        Err(e) => {
            remember(&e.text);
            // SAFETY: the caller's promise. An empty text, so that a host may print what it got.
            unsafe { copy_out("", buf, size) }
        }
    })
}

/// Calls `func` for each decision the region still keeps (the last 64), oldest first; returns how many, or an error code.
///
/// # Safety
/// `func` is callable with `arg`.
#[no_mangle]
pub unsafe extern "C" fn atropos_decisions(func: atropos_decision_fn, arg: *mut c_void) -> c_int {
    guard(ATROPOS_E_PANIC, || {
        let result = process::require().and_then(|p| {
            let func = func.ok_or_else(|| Error::new(Code::Invalid, "the callback is NULL"))?;
            let decisions = crate::report::decision::recorded(p.region);
            for json in &decisions {
                let text = std::ffi::CString::new(json.as_str()).unwrap_or_default();
                // SAFETY: the caller's promise; the text lives through the call.
                unsafe { func(text.as_ptr(), arg) };
            }
            Ok(decisions.len())
        });
        match result {
            Ok(n) => n as c_int,
            Err(e) => {
                remember(&e.text);
                e.code as c_int
            }
        }
    })
}
