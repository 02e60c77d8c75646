//! The hot calls, bound and explicit, and the paper's six names.
//!
//! What a host with a task for each request calls every time stands side by side (`.text.hot`, in region and trace as
//! well): between two requests the processor runs other code for long, so each page and line of ours is fetched anew.

use super::{atropos_cancel_fn, atropos_resource_t, atropos_task_t, guard};
use crate::process::{active, bound};
use crate::region::layout::{Header, Trace};
use core::ffi::{c_int, c_void};

// The three hottest calls, once for both forms. The cached clock is the rule; the precise one is a tail call, so that the
// rule saves no registers for it.

#[inline(always)]
fn get(h: &Header, trace: &Trace, r: u32, instance: u64, amount: u64) {
    match h.clock.cached_ns() {
        0 => get_precise(h, trace, r, instance, amount),
        now_ns => trace.acquire(now_ns, h.clock.tracing_since_ns(), r, instance, amount),
    }
}

#[inline(never)]
fn get_precise(h: &Header, trace: &Trace, r: u32, instance: u64, amount: u64) {
    trace.acquire(h.clock.precise_ns(), h.clock.tracing_since_ns(), r, instance, amount);
}

#[inline(always)]
fn free(h: &Header, trace: &Trace, r: u32, instance: u64, amount: u64) {
    match h.clock.cached_ns() {
        0 => free_precise(h, trace, r, instance, amount),
        now_ns => trace.release(now_ns, r, instance, amount),
    }
}

#[inline(never)]
fn free_precise(h: &Header, trace: &Trace, r: u32, instance: u64, amount: u64) {
    trace.release(h.clock.precise_ns(), r, instance, amount);
}

#[inline(always)]
fn wait(h: &Header, trace: &Trace, r: u32, instance: u64) {
    match h.clock.cached_ns() {
        0 => wait_precise(h, trace, r, instance),
        now_ns => trace.wait_begin(now_ns, r, instance),
    }
}

#[inline(never)]
fn wait_precise(h: &Header, trace: &Trace, r: u32, instance: u64) {
    trace.wait_begin(h.clock.precise_ns(), r, instance);
}

/// The bound task acquired `amount` of `r`; ends its wait for `r`.
#[no_mangle]
pub extern "C" fn atropos_get_resource(r: atropos_resource_t, amount: u64) {
    atropos_get_resource_on(r, 0, amount)
}

/// The bound task gave `amount` of `r` back. What is not held is ignored and counted.
#[no_mangle]
pub extern "C" fn atropos_free_resource(r: atropos_resource_t, amount: u64) {
    atropos_free_resource_on(r, 0, amount)
}

/// The bound task begins to wait for `r`; atropos_get_resource or atropos_wait_abandoned ends the wait.
#[no_mangle]
pub extern "C" fn atropos_slow_by_resource(r: atropos_resource_t, amount: u64) {
    atropos_slow_by_resource_on(r, 0, amount)
}

/// As atropos_get_resource, for one object of the resource (this table's lock); 0 = not told apart.
#[no_mangle]
pub extern "C" fn atropos_get_resource_on(r: atropos_resource_t, instance: u64, amount: u64) {
    guard((), || {
        bound(|b| get(b.header, b.trace, r, instance, amount));
    })
}

/// As atropos_free_resource, for one object.
#[no_mangle]
pub extern "C" fn atropos_free_resource_on(r: atropos_resource_t, instance: u64, amount: u64) {
    guard((), || {
        bound(|b| free(b.header, b.trace, r, instance, amount));
    })
}

/// As atropos_slow_by_resource, for one object.
#[no_mangle]
pub extern "C" fn atropos_slow_by_resource_on(r: atropos_resource_t, instance: u64, amount: u64) {
    let _ = amount;
    guard((), || {
        bound(|b| wait(b.header, b.trace, r, instance));
    })
}

/// The bound task's wait for `r` ended without it.
#[no_mangle]
pub extern "C" fn atropos_wait_abandoned(r: atropos_resource_t) {
    guard((), || {
        bound(|b| b.trace.wait_abandoned(b.header.clock.event_ns(), r));
    })
}

/// MEMORY: this task's acquisitions evicted `amount` units of others.
#[no_mangle]
pub extern "C" fn atropos_evicted(r: atropos_resource_t, amount: u64) {
    guard((), || {
        bound(|b| b.trace.evicted(r, amount));
    })
}

/// Progress of the bound task: rows processed, rows expected (0 = unknown).
#[no_mangle]
pub extern "C" fn atropos_progress(done: u64, total: u64) {
    guard((), || {
        bound(|b| b.trace.progress(done, total));
    })
}

/// Does a cancel stand for the bound task's present scope? A cheap poll for cooperative hosts: nonzero = stop.
#[no_mangle]
pub extern "C" fn atropos_cancel_requested() -> c_int {
    guard(0, || bound(|b| b.slot.cancel_requested(&b.header.lease)).unwrap_or(false) as c_int)
}

/// The bound task's running wait for `r` is for `blocker`, until the wait ends. Better than inference.
#[no_mangle]
pub extern "C" fn atropos_blocked_by(r: atropos_resource_t, blocker: atropos_task_t) {
    guard((), || {
        bound(|b| b.trace.blocked_by(r, blocker));
    })
}

/// Begins a request on the bound task, of class 0..15: latency and throughput are measured from here on, and the task's
/// scope sequence changes. A request that is open ends as completed.
#[no_mangle]
pub extern "C" fn atropos_request_begin(class_: u32) {
    guard((), || {
        if let (Some(process), Some(slot)) = (active(), bound(|b| b.slot)) {
            process.header.begin_request(slot, class_);
        }
    })
}

/// Ends the bound task's request; status 0 = ok. What it holds stays held (idle in transaction).
#[no_mangle]
pub extern "C" fn atropos_request_end(status: i32) {
    guard((), || {
        if let (Some(process), Some(slot)) = (active(), bound(|b| b.slot)) {
            process.header.end_request(slot, status);
        }
    })
}

/// As atropos_get_resource_on, on a task. One thread at a time per task.
#[no_mangle]
#[link_section = ".text.hot.atropos"]
pub extern "C" fn atropos_task_get_resource(t: atropos_task_t, r: atropos_resource_t, instance: u64, amount: u64) {
    guard((), || {
        let Some(process) = active() else { return };
        if let Some(slot) = process.task(t) {
            get(process.header, &slot.trace, r, instance, amount);
        }
    })
}

/// As atropos_free_resource_on, on a task.
#[no_mangle]
pub extern "C" fn atropos_task_free_resource(t: atropos_task_t, r: atropos_resource_t, instance: u64, amount: u64) {
    guard((), || {
        let Some(process) = active() else { return };
        if let Some(slot) = process.task(t) {
            free(process.header, &slot.trace, r, instance, amount);
        }
    })
}

/// As atropos_slow_by_resource_on, on a task.
#[no_mangle]
pub extern "C" fn atropos_task_slow_by_resource(t: atropos_task_t, r: atropos_resource_t, instance: u64, amount: u64) {
    let _ = amount;
    guard((), || {
        let Some(process) = active() else { return };
        if let Some(slot) = process.task(t) {
            wait(process.header, &slot.trace, r, instance);
        }
    })
}

/// As atropos_wait_abandoned, on a task.
#[no_mangle]
pub extern "C" fn atropos_task_wait_abandoned(t: atropos_task_t, r: atropos_resource_t) {
    guard((), || {
        let Some(process) = active() else { return };
        if let Some(slot) = process.task(t) {
            slot.trace.wait_abandoned(process.header.clock.event_ns(), r);
        }
    })
}

/// As atropos_blocked_by, on a task.
#[no_mangle]
pub extern "C" fn atropos_task_blocked_by(t: atropos_task_t, r: atropos_resource_t, blocker: atropos_task_t) {
    guard((), || {
        if let Some(slot) = active().and_then(|process| process.task(t)) {
            slot.trace.blocked_by(r, blocker);
        }
    })
}

/// The task's request had waited for `r` for `wait_ns` before it could be seen (a connection in the kernel's backlog): it
/// counts as begun so much earlier. Call it right after the request began.
#[no_mangle]
pub extern "C" fn atropos_task_waited(t: atropos_task_t, r: atropos_resource_t, wait_ns: u64) {
    guard((), || {
        if let Some(slot) = active().and_then(|process| process.task(t)) {
            slot.began_earlier(wait_ns);
            slot.trace.waited(r, wait_ns);
        }
    })
}

/// As atropos_progress, on a task.
#[no_mangle]
pub extern "C" fn atropos_task_progress(t: atropos_task_t, done: u64, total: u64) {
    guard((), || {
        if let Some(slot) = active().and_then(|p| p.task(t)) {
            slot.trace.progress(done, total);
        }
    })
}

/// As atropos_cancel_requested, on a task.
#[no_mangle]
pub extern "C" fn atropos_task_cancel_requested(t: atropos_task_t) -> c_int {
    guard(0, || {
        let Some(process) = active() else { return 0 };
        process.task(t).is_some_and(|slot| slot.cancel_requested(&process.header.lease)) as c_int
    })
}

/// Drops everything the task holds (the end of a transaction).
#[no_mangle]
pub extern "C" fn atropos_task_release_all(t: atropos_task_t) {
    guard((), || {
        let Some(process) = active() else { return };
        if let Some(slot) = process.task(t) {
            slot.trace.release_all(process.header.clock.event_ns());
        }
    })
}

/// As atropos_request_begin, on a task.
#[no_mangle]
pub extern "C" fn atropos_task_request_begin(t: atropos_task_t, class_: u32) {
    guard((), || {
        let Some(process) = active() else { return };
        if let Some(slot) = process.task(t) {
            crate::process::request_works_for(process.header, &slot.owner);
            process.header.begin_request(slot, class_);
        }
    })
}

/// As atropos_request_end, on a task.
#[no_mangle]
pub extern "C" fn atropos_task_request_end(t: atropos_task_t, status: i32) {
    guard((), || {
        let Some(process) = active() else { return };
        if let Some(slot) = process.task(t) {
            process.header.end_request(slot, status);
        }
    })
}

/// For a request that occupies a server of a queue from its begin on: as atropos_task_request_begin, and the task has 1 of
/// `r` (0 = nothing). Returns the request's scope sequence; 0 = untracked: the gate is closed (it needs no look at
/// atropos_trace_is_on before), a stale handle, or another process's task.
#[no_mangle]
#[link_section = ".text.hot.atropos"]
pub extern "C" fn atropos_task_enter(t: atropos_task_t, class_: u32, r: atropos_resource_t) -> u64 {
    guard(0, || {
        let Some(process) = active() else { return 0 };
        process.task(t).map_or(0, |slot| {
            crate::process::request_works_for(process.header, &slot.owner);
            process.header.enter(slot, class_, r)
        })
    })
}

/// As atropos_task_request_end, and what the task holds and waits for is forgotten: the task is ready for another request.
#[no_mangle]
#[link_section = ".text.hot.atropos"]
pub extern "C" fn atropos_task_leave(t: atropos_task_t, status: i32) {
    guard((), || {
        let Some(process) = active() else { return };
        if let Some(slot) = process.task(t) {
            process.header.leave(slot, status);
        }
    })
}

/// Brackets time the host spends waiting for its own client inside a request: it is not execution time.
#[no_mangle]
pub extern "C" fn atropos_task_client_wait(t: atropos_task_t, on: i32) {
    guard((), || {
        let Some(process) = active() else { return };
        if let Some(slot) = process.task(t) {
            process.header.client_wait(slot, on != 0);
        }
    })
}

/// The paper's name of atropos_create_cancel.
#[no_mangle]
pub extern "C" fn createCancel(key: u64) -> atropos_task_t {
    super::tasks::atropos_create_cancel(key)
}

/// The paper's name of atropos_free_cancel.
#[no_mangle]
pub extern "C" fn freeCancel(task: atropos_task_t) {
    super::tasks::atropos_free_cancel(task)
}

/// The paper's name of atropos_set_cancel_action.
///
/// # Safety
/// As atropos_set_cancel_action.
#[no_mangle]
pub unsafe extern "C" fn setCancelAction(func: atropos_cancel_fn, arg: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { super::atropos_set_cancel_action(func, arg) }
}

/// The paper's name of atropos_get_resource.
#[no_mangle]
pub extern "C" fn getResource(r: atropos_resource_t, amount: u64) {
    atropos_get_resource(r, amount)
}

/// The paper's name of atropos_free_resource.
#[no_mangle]
pub extern "C" fn freeResource(r: atropos_resource_t, amount: u64) {
    atropos_free_resource(r, amount)
}

/// The paper's name of atropos_slow_by_resource.
#[no_mangle]
pub extern "C" fn slowByResource(r: atropos_resource_t, amount: u64) {
    atropos_slow_by_resource(r, amount)
}
