//! Telling a task to stop: the mailbox first, then the host's action, where it may run.

use crate::cancel::action::{self, Level, CANCEL, TERMINATE};
use crate::cancel::mailbox::Request;
use crate::primitive::Ordering::{Acquire, Relaxed};
use crate::region::layout::TaskSlot;
use crate::region::lease::Leader;
use crate::region::owner::ProcessId;
use crate::region::Region;

/// Posts `request` to the task and its children and has their actions run; not for a leader that was deposed since.
pub fn deliver(region: &Region, leader: Leader, task: u64, request: &Request) {
    let Some(slot) = region.task(task).filter(|_| region.header().lease.holds(leader.me, leader.term)) else {
        return;
    };
    tell(region, leader, task, slot, request);
    for (child, slot) in region.live_tasks() {
        if child != task && slot.parent.load(Relaxed) != 0 && super::collect::family_head(region, child) == task {
            let request = Request { scope: slot.scope.load(Acquire), ..request.clone() };
            tell(region, leader, child, slot, &request);
        }
    }
}

fn tell(region: &Region, leader: Leader, task: u64, slot: &TaskSlot, request: &Request) {
    let me = leader.me;
    if !slot.mailbox.stands(request.scope, || leader.term) || slot.mailbox.rung.load(Relaxed) != request.rung {
        slot.mailbox.post(request, leader.term);
    }
    let callback = if request.rung >= 2 { &TERMINATE } else { &CANCEL };
    let leads = || region.header().lease.holds(me, leader.term);
    let owner = slot.owner.get();
    if owner.pid != me.pid && !owner.is_alive() {
        // It will be reaped. Its pid may be somebody else's by now, whom no action must hit.
        return;
    }
    if callback.anywhere() || (owner.pid == me.pid && callback.is_set()) {
        if let Err(e) = action::run(task, slot.key.load(Relaxed), owner.pid, request, leads) {
            region.header().counters.actions_failed.fetch_add(1, Relaxed);
            action::log(Level::Warning, &format!("cancel action for task {}: {e}", slot.key.load(Relaxed)));
        }
    } else if owner.pid != me.pid {
        // Without an agent the task is left to its own poll of the mailbox.
        region.ring(owner.pid);
    }
}

/// Is there something to escalate to for a task of `owner`?
pub fn can_terminate(region: &Region, me: ProcessId, task: u64) -> bool {
    let Some(slot) = region.task(task) else {
        return false;
    };
    let pid = slot.owner.get().pid;
    TERMINATE.anywhere() || (pid == me.pid && TERMINATE.is_set()) || (pid != me.pid && region.agent_of(pid).is_some())
}

/// Takes a standing request back.
pub fn withdraw(region: &Region, task: u64, scope: u64) {
    if let Some(slot) = region.task(task) {
        slot.mailbox.withdraw(scope);
    }
}

/// Has the scope ended, or is the task idle and holds nothing any more?
pub fn is_over(region: &Region, task: u64, scope: u64) -> bool {
    let Some(slot) = region.task(task) else {
        return true;
    };
    let idle = slot.request_start_ns.load(Acquire) == 0 && slot.trace.occupied.load(Acquire) == 0;
    // A new scope in which the old holdings live on (the next statement of a transaction) is not the end of them, but
    // it is the end of what may be cancelled.
    slot.scope.load(Acquire) != scope || idle
}
