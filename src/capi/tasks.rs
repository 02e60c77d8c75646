//! Tasks: beginning and ending them, what the host says about them, and their mailbox.

use super::*;
use crate::primitive::Ordering::{AcqRel, Acquire, Relaxed, Release};
use crate::process::{active, bind, current, require, unbind};
use crate::region::layout::*;
use crate::region::text;

fn stale(what: &str) -> Error {
    Error::new(Code::Stale, format!("the {what} handle is stale or was never given out"))
}

/// Begins a task and binds it to the calling thread; 0 = it runs untracked (no region, gate closed or table full).
/// `key` is the host's own name for it (a session number). It counts as one request until it ends, unless the host uses
/// atropos_request_begin.
#[no_mangle]
pub extern "C" fn atropos_create_cancel(key: u64) -> atropos_task_t {
    guard(0, || active().map_or(0, |p| p.create(key, true)))
}

/// Ends a task; what it held is forgotten. A second call, 0 and stale handles do nothing.
#[no_mangle]
#[link_section = ".text.hot.atropos"]
pub extern "C" fn atropos_free_cancel(task: atropos_task_t) {
    guard((), || {
        if let Some(p) = active() {
            p.free(task);
        }
    })
}

/// As atropos_create_cancel, bound to no thread: for hosts that use the explicit calls.
#[no_mangle]
#[link_section = ".text.hot.atropos"]
pub extern "C" fn atropos_task_create(key: u64) -> atropos_task_t {
    guard(0, || active().map_or(0, |p| p.create(key, false)))
}

/// The task this thread is bound to, 0 = none.
#[no_mangle]
pub extern "C" fn atropos_current_task() -> atropos_task_t {
    guard(0, current)
}

/// This thread's bound calls act on `task` from now on; 0 unbinds.
#[no_mangle]
pub extern "C" fn atropos_task_bind(task: atropos_task_t) -> c_int {
    code(|| {
        if task == 0 {
            unbind();
            return Ok(());
        }
        if bind(require()?.region, task) {
            Ok(())
        } else {
            Err(stale("task"))
        }
    })
}

/// Another worker (this thread, perhaps of another process) joins the task and is bound to it; 0 = untracked.
#[no_mangle]
pub extern "C" fn atropos_task_attach(task: atropos_task_t) -> atropos_worker_t {
    guard(0, || active().map_or(0, |p| p.attach(task)))
}

/// The worker leaves its task; what it held is forgotten.
#[no_mangle]
pub extern "C" fn atropos_task_detach(worker: atropos_worker_t) {
    guard((), || {
        if let Some(p) = active() {
            p.detach(worker);
        }
    })
}

/// `child` works for `parent`: what it holds and waits for counts as the parent's, and cancelling the parent cancels it.
#[no_mangle]
pub extern "C" fn atropos_task_child(parent: atropos_task_t, child: atropos_task_t) -> c_int {
    code(|| {
        let region = require()?.region;
        region.task(parent).ok_or_else(|| stale("parent's"))?;
        let slot = region.task(child).ok_or_else(|| stale("child's"))?;
        if parent == child {
            return Err(Error::new(Code::Invalid, "a task cannot be its own child"));
        }
        slot.parent.store(parent, Relaxed);
        Ok(())
    })
}

/// Says something about a task: `what` is ATROPOS_TASK_*.
#[no_mangle]
pub extern "C" fn atropos_task_set(task: atropos_task_t, what: u32, value: i64) -> c_int {
    code(|| {
        let region = require()?.region;
        let slot = require()?.task(task).ok_or_else(|| stale("task"))?;
        let range = |low: i64, high: i64| {
            if (low..=high).contains(&value) {
                Ok(value)
            } else {
                Err(Error::new(
                    Code::Invalid,
                    format!("atropos_task_set: value {value} for {what}; allowed: {low} to {high}"),
                ))
            }
        };
        let flag = |flag: u32, invert: bool| {
            slot.set_flag(flag, (range(0, 1)? == 1) != invert);
            Ok(())
        };
        match what {
            ATROPOS_TASK_CLASS => slot.set_class(range(0, MAX_CLASSES as i64 - 1)? as u32),
            ATROPOS_TASK_PRIORITY => slot.priority.store(range(-100, 100)? as i32, Relaxed),
            ATROPOS_TASK_BACKGROUND => return flag(FLAG_BACKGROUND, false),
            ATROPOS_TASK_PROTECTED => return flag(FLAG_PROTECTED, false),
            ATROPOS_TASK_RETRIED => return flag(FLAG_RETRIED, false),
            ATROPOS_TASK_CANCELLABLE => return flag(FLAG_UNCANCELLABLE, true),
            ATROPOS_TASK_LABEL => {
                // SAFETY: the header asks for the address of a NUL-terminated string.
                let label = unsafe { text_of("the label", value as usize as *const c_char)? };
                text::store_words(&slot.label, label.unwrap_or(""));
            }
            ATROPOS_TASK_WORK_START => {
                let begins = range(0, 1)? == 1;
                let waited_ns = slot.trace.waited_ns.load(Relaxed);
                slot.work_waited.store(waited_mark(waited_ns), Relaxed);
                slot.work_start_ns.store(if begins { region.now_ns() } else { 0 }, Relaxed)
            }
            _ => {
                return Err(Error::new(Code::Invalid, format!("atropos_task_set: {what} is no ATROPOS_TASK_* number")));
            }
        }
        Ok(())
    })
}

/// The task's scope sequence: it changes with every request that begins, and only by its owner. 0 for stale handles.
#[no_mangle]
pub extern "C" fn atropos_task_scope(t: atropos_task_t) -> u64 {
    guard(0, || active().and_then(|p| p.region.task(t)).map_or(0, |slot| slot.scope.load(Acquire)))
}

/// Asks, by hand, to cancel the task's scope (0 = the present one): the leading controller posts it at its next tick, in
/// observe and enforce mode alike, outside the budget. ATROPOS_E_STALE when the scope has passed.
///
/// # Safety
/// `reason` is NULL or NUL-terminated; 63 bytes are kept.
#[no_mangle]
pub unsafe extern "C" fn atropos_task_cancel(t: atropos_task_t, scope: u64, reason: *const c_char) -> c_int {
    code(|| {
        let region = require()?.region;
        let slot = region.task(t).ok_or_else(|| stale("task"))?;
        let present = slot.scope.load(Acquire);
        if scope != 0 && scope != present {
            return Err(Error::new(Code::Stale, format!("scope {scope} has passed: the task is at {present}")));
        }
        // SAFETY: the caller's promise.
        let reason = unsafe { text_of("the reason", reason)? };
        text::store_words(&slot.manual_reason, reason.unwrap_or("asked for by hand"));
        slot.manual_scope.store(present, Release);
        region.header().manual_requests.fetch_add(1, AcqRel);
        Ok(())
    })
}

/// Reads the task's mailbox, in its own process: 1 = a cancel stands for its present scope and `info` is filled in, else
/// 0. A task between requests keeps the scope of its last one.
///
/// # Safety
/// `info` is NULL or points to a struct whose `size` is set.
#[no_mangle]
pub unsafe extern "C" fn atropos_task_cancel_info(t: atropos_task_t, info: *mut atropos_cancel_info) -> c_int {
    guard(0, || {
        let Some(process) = active() else { return 0 };
        let Some(slot) = process.task(t) else {
            return 0;
        };
        let Some(request) = slot.standing_request(&process.header.lease) else {
            return 0;
        };
        if info.is_null() {
            return 1;
        }
        let known = std::mem::size_of::<atropos_cancel_info>();
        // SAFETY: the caller's promise: the first member is there whatever the version.
        let size = unsafe { std::ptr::addr_of!((*info).size).read() };
        if let Err(e) = is_plausible_size("atropos_cancel_info", size, CANCEL_INFO_BYTES_FIRST, known) {
            remember(&e.text);
            return 0;
        }
        let mut filled = atropos_cancel_info {
            size,
            scope: request.scope,
            decision_id: request.decision_id,
            resource: request.resource,
            rung: request.rung,
            instance: request.instance,
            held_ns: request.held_ns,
            victims: request.victims,
            resource_name: [0; 32],
            reason: [0; 160],
        };
        let name = process.region.header().resource_name(request.resource);
        // SAFETY: both arrays have the sizes given; the caller says that `info` has `size` bytes.
        unsafe {
            copy_out(&name, filled.resource_name.as_mut_ptr(), filled.resource_name.len());
            copy_out(&request.reason, filled.reason.as_mut_ptr(), filled.reason.len());
            let to = info.cast::<u8>();
            std::ptr::copy_nonoverlapping(std::ptr::addr_of!(filled).cast(), to, size.min(known));
            std::ptr::write_bytes(to.add(size.min(known)), 0, size.saturating_sub(known));
        }
        1
    })
}

/// The host acted on the cancel of `scope`: the controller stops repeating it and waits for the effect.
#[no_mangle]
pub extern "C" fn atropos_task_cancel_acknowledge(t: atropos_task_t, scope: u64) {
    guard((), || {
        if let Some(slot) = active().and_then(|p| p.task(t)) {
            slot.acknowledged_scope.store(scope, Release);
        }
    })
}
