//! Running a cancelled request again.

use super::*;
use crate::cancel::retry::Answer;
use crate::process::{active, require};

/// Answer of atropos_retry_wait and _poll: do not run it again, tell the client; atropos_last_error says why.
pub const ATROPOS_DROP: c_int = 0;
/// Run the cancelled request again, now.
pub const ATROPOS_RETRY: c_int = 1;
/// Answer of atropos_retry_poll only: not yet.
pub const ATROPOS_RETRY_LATER: c_int = 2;

fn answer(ask: impl FnOnce() -> Result<Answer>) -> c_int {
    guard(ATROPOS_DROP, || match ask() {
        Ok(Answer::Run) => ATROPOS_RETRY,
        Ok(Answer::Later) => ATROPOS_RETRY_LATER,
        Err(e) => {
            remember(&e.text);
            ATROPOS_DROP
        }
    })
}

/// Waits until a request that the controller has cancelled may run again: ATROPOS_RETRY, or ATROPOS_DROP.
///
/// Call it once the request has ended and its work is undone, with the handle under which it was cancelled: either
/// after atropos_free_cancel(task), or, where the task lives on (a session), between atropos_request_end and the next
/// begin, holding nothing. Any thread of the task's process may call it; it blocks without holding anything.
///
/// It may run again when each resource it was cancelled for has been calm for `retry_calm_ms` and the server does at
/// most `retry_load_share` of the work it did before; those who wait go one by one, who has waited longest first, the next
/// when the one before has ended or has run for `retry_calm_ms` without contention. A request runs again once: its
/// retry is marked (ATROPOS_TASK_RETRIED) and is not cancelled. A session's next request is marked by the library; on a task
/// made anew for the retry the host sets the mark.
///
/// `deadline_ns`: until when a retry makes sense, on CLOCK_MONOTONIC, in ns (the client's patience); 0 = none. Background
/// tasks, and those without a deadline, wait for at most `retry_background_max_ms`.
///
/// ATROPOS_DROP comes at once for a task that was not cancelled by the controller (or by hand, or too long ago: ten minutes,
/// or 128 cancels), for what has run again already, with a past deadline, while the mode is off, before
/// atropos_init, and where no controller has ever run; within 2 s after the last one has stopped.
///
/// Only what is safe may run again: not a byte of the answer was sent, the transaction is rolled back, and it was not one
/// statement inside an explicit transaction block, whose earlier statements would be missing.
#[no_mangle]
pub extern "C" fn atropos_retry_wait(task: atropos_task_t, deadline_ns: u64) -> c_int {
    answer(|| {
        let p = require()?;
        p.region.wait_retry(p.me, task, deadline_ns, || active().is_some_and(|now| std::ptr::eq(now, p)))
    })
}

/// As atropos_retry_wait, for hosts that must not block: ATROPOS_RETRY_LATER until there is an answer. The first call begins
/// the wait and its deadline counts. Call it again at least once a second; who stays silent for 3 s, or does not come within
/// 1 s when it is its turn, is dropped. Where this process drives the controller itself, tick in between.
#[no_mangle]
pub extern "C" fn atropos_retry_poll(task: atropos_task_t, deadline_ns: u64) -> c_int {
    answer(|| {
        let p = require()?;
        p.region.poll_retry(p.me, task, deadline_ns)
    })
}

/// The request is not to run again after all (its client has gone, the server stops): whoever waits for it, in any thread of
/// this process, is told ATROPOS_DROP. Harmless for every other handle.
#[no_mangle]
pub extern "C" fn atropos_retry_give_up(task: atropos_task_t) {
    guard((), || {
        if let Some(p) = active() {
            p.region.give_up_retry(p.me, task);
        }
    })
}
