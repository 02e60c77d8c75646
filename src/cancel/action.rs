//! The host's callbacks, kept per process: function pointers never enter shared memory.

use crate::cancel::mailbox::Request;
use crate::capi::{atropos_cancel_request, atropos_edge, ATROPOS_EDGE_QUEUED, ATROPOS_EDGE_UNKNOWN};
use crate::control::window::{Edge, EdgeKind};
use crate::error::{Code, Error, Result};
use crate::primitive::{AtomicU32, AtomicUsize, Ordering};
use core::ffi::{c_int, c_void};
use std::ffi::CString;

/// The controller may run the action in its own process, for tasks of any process.
pub const ANYWHERE: u32 = 1;

/// A C function and its argument. Set before the controller runs; changing one while it runs may pair an old argument
/// with a new function only if the host changes both at once without stopping the controller first.
pub struct Callback {
    function: AtomicUsize,
    argument: AtomicUsize,
    flags: AtomicU32,
}

impl Callback {
    pub const fn none() -> Self {
        Callback { function: AtomicUsize::new(0), argument: AtomicUsize::new(0), flags: AtomicU32::new(0) }
    }

    pub fn set(&self, function: usize, argument: *mut c_void, flags: u32) {
        self.function.store(0, Ordering::Release);
        self.argument.store(argument as usize, Ordering::Relaxed);
        self.flags.store(flags, Ordering::Relaxed);
        self.function.store(function, Ordering::Release);
    }

    /// (function, argument) as they were set; None = not set.
    fn get(&self) -> Option<(usize, *mut c_void)> {
        let function = self.function.load(Ordering::Acquire);
        (function != 0).then(|| (function, self.argument.load(Ordering::Relaxed) as *mut c_void))
    }

    pub fn is_set(&self) -> bool {
        self.get().is_some()
    }

    pub fn anywhere(&self) -> bool {
        self.is_set() && self.flags.load(Ordering::Relaxed) & ANYWHERE != 0
    }
}

pub type CancelFn = unsafe extern "C" fn(*const atropos_cancel_request, *mut c_void) -> c_int;
pub type EdgeFn = unsafe extern "C" fn(*mut atropos_edge, usize, *mut c_void) -> usize;
pub type ProgressFn = unsafe extern "C" fn(u64, u64, *mut u64, *mut u64, *mut c_void) -> c_int;
pub type CostFn = unsafe extern "C" fn(u64, u64, *mut c_void) -> u64;
pub type DescribeFn = unsafe extern "C" fn(u32, u64, *mut core::ffi::c_char, usize, *mut c_void) -> usize;
pub type LogFn = unsafe extern "C" fn(c_int, *const core::ffi::c_char, *mut c_void);

pub static CANCEL: Callback = Callback::none();
pub static TERMINATE: Callback = Callback::none();
pub static EDGES: Callback = Callback::none();
pub static PROGRESS: Callback = Callback::none();
pub static ROLLBACK_COST: Callback = Callback::none();
pub static DESCRIBE: Callback = Callback::none();
pub static LOG: Callback = Callback::none();

/// Calls into the host that have not returned yet, in this process.
static RUNNING: AtomicU32 = AtomicU32::new(0);

/// While it lives, a function of the host runs: the library's own frames, with references into the region, lie below it.
pub struct InHost;

impl InHost {
    pub fn enter() -> Self {
        RUNNING.fetch_add(1, Ordering::AcqRel);
        InHost
    }

    /// Is any thread of this process inside a function of the host that the library called?
    pub fn anywhere() -> bool {
        RUNNING.load(Ordering::Acquire) != 0
    }
}

impl Drop for InHost {
    fn drop(&mut self) {
        RUNNING.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Levels of the log callback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    Error = 1,
    Warning = 2,
    Notice = 3,
    Debug = 4,
}

/// Says something to the host's log; nothing where the host gave none.
pub fn log(level: Level, message: &str) {
    if let Some((function, argument)) = LOG.get() {
        let text = CString::new(message.replace('\0', " ")).unwrap_or_default();
        let _inside = InHost::enter();
        // SAFETY: `function` was given as an atropos_log_fn; the text lives through the call.
        unsafe { std::mem::transmute::<usize, LogFn>(function)(level as c_int, text.as_ptr(), argument) }
    }
}

/// Runs the host's action of the request's rung for `task`, unless it is not wanted any more: asked at the last moment, for
/// an action cannot be taken back as a request can. Err when there is none or it could not.
pub fn run(task: u64, key: u64, owner_pid: u32, request: &Request, wanted: impl FnOnce() -> bool) -> Result<()> {
    let callback = if request.rung >= 2 { &TERMINATE } else { &CANCEL };
    let Some((function, argument)) = callback.get() else {
        return Err(Error::new(Code::Unsupported, "the host set no action for this rung in this process"));
    };
    let reason = CString::new(request.reason.replace('\0', " ")).unwrap_or_default();
    let c_request = atropos_cancel_request {
        size: std::mem::size_of::<atropos_cancel_request>(),
        task,
        key,
        scope: request.scope,
        owner_pid,
        rung: request.rung,
        decision_id: request.decision_id,
        resource: request.resource,
        instance: request.instance,
        reason: reason.as_ptr(),
    };
    if !wanted() {
        return Ok(());
    }
    let _inside = InHost::enter();
    // SAFETY: `function` was given as an atropos_cancel_fn; the request lives through the call.
    let code = unsafe { std::mem::transmute::<usize, CancelFn>(function)(&c_request, argument) };
    if code == 0 {
        Ok(())
    } else {
        Err(Error::new(Code::Invalid, format!("the host's action answered {code}")))
    }
}

/// How far a task is, by the host's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    Unknown,
    Known {
        done: u64,
        total: u64,
    },
    /// It commits, and so will be done without our doing, or could not heed a cancel.
    Uncancellable,
}

/// Asks the host how far a task is.
pub fn progress(task: u64, key: u64) -> Progress {
    let Some((function, argument)) = PROGRESS.get() else { return Progress::Unknown };
    let (mut done, mut total) = (0, 0);
    let _inside = InHost::enter();
    // SAFETY: `function` was given as an atropos_progress_fn; both numbers live through the call.
    match unsafe { std::mem::transmute::<usize, ProgressFn>(function)(task, key, &mut done, &mut total, argument) } {
        1 => Progress::Known { done, total },
        -1 => Progress::Uncancellable,
        _ => Progress::Unknown,
    }
}

/// What undoing a task's work would take, ns, by the host's word; 0 = none or unknown.
pub fn rollback_cost_ns(task: u64, key: u64) -> u64 {
    let Some((function, argument)) = ROLLBACK_COST.get() else { return 0 };
    let _inside = InHost::enter();
    // SAFETY: `function` was given as an atropos_cost_fn.
    unsafe { std::mem::transmute::<usize, CostFn>(function)(task, key, argument) }
}

/// Asks the host who blocks whom. (edges, how many there were in all) `kind_of` judges the edges whose kind the host left
/// open.
pub fn edges(max: usize, kind_of: impl Fn(&Edge) -> EdgeKind) -> (Vec<Edge>, usize) {
    let Some((function, argument)) = EDGES.get() else {
        return (Vec::new(), 0);
    };
    let empty = atropos_edge { waiter: 0, blocker: 0, resource: 0, kind: 0, instance: 0 };
    let mut buffer = vec![empty; max];
    let _inside = InHost::enter();
    // SAFETY: `function` was given as an atropos_edge_fn; the buffer has `max` places.
    let total = unsafe { std::mem::transmute::<usize, EdgeFn>(function)(buffer.as_mut_ptr(), max, argument) };
    buffer.truncate(total.min(max));
    let edges = buffer
        .into_iter()
        .filter(|e| e.waiter != 0)
        .map(|e| {
            let kind = if e.kind == ATROPOS_EDGE_QUEUED { EdgeKind::Queued } else { EdgeKind::Holds };
            let edge = Edge { waiter: e.waiter, blocker: e.blocker, kind, resource: e.resource, instance: e.instance };
            Edge { kind: if e.kind == ATROPOS_EDGE_UNKNOWN { kind_of(&edge) } else { kind }, ..edge }
        })
        .collect();
    (edges, total)
}

/// The host's words for one object of a resource; None where it has none.
pub fn describe(resource: u32, instance: u64) -> Option<String> {
    let (function, argument) = DESCRIBE.get()?;
    let mut buffer = [0u8; 96];
    let _inside = InHost::enter();
    // SAFETY: `function` was given as an atropos_describe_fn; the buffer has the size given, and keeps a final NUL.
    let length = unsafe {
        let buffer = buffer.as_mut_ptr().cast::<core::ffi::c_char>();
        std::mem::transmute::<usize, DescribeFn>(function)(resource, instance, buffer, 95, argument)
    };
    let text = String::from_utf8_lossy(&buffer[..length.min(95)]).trim_end_matches('\0').to_string();
    (!text.is_empty()).then_some(text)
}
