//! Agents: what runs cancel actions inside the process that owns the task, when the controller leads elsewhere.

use super::action::{self, Level};
use crate::error::Code;
use crate::primitive::{
    AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};
use crate::region::layout::Agent;
use crate::region::owner::ProcessId;
use crate::region::{futex_wake_all, Region};

impl Region {
    /// Wakes the agent of process `pid`; false if it has none.
    pub fn ring(&self, pid: u32) -> bool {
        let Some(agent) = self.agent_of(pid) else {
            return false;
        };
        agent.doorbell.fetch_add(1, Release);
        futex_wake_all(&agent.doorbell);
        true
    }

    /// Runs the actions of all standing requests for tasks of this process; returns how many.
    pub fn run_pending(&self, me: ProcessId) -> usize {
        let mut ran = 0;
        for (handle, slot) in self.live_tasks() {
            if slot.owner.get() != me {
                continue;
            }
            // The action runs for the scope in the mailbox; whether that is still the task's is for the owner to say.
            let Some(request) = slot.standing_request(&self.header().lease) else {
                continue;
            };
            if slot.acknowledged_scope.load(Relaxed) == request.scope {
                continue; // rung for another task
            }
            let stands = || slot.cancel_requested(&self.header().lease);
            match action::run(handle, slot.key.load(Relaxed), me.pid, &request, stands) {
                Ok(()) => ran += 1,
                Err(e) if e.code == Code::Unsupported => {}
                Err(e) => {
                    self.header().counters.actions_failed.fetch_add(1, Relaxed);
                    action::log(Level::Warning, &format!("cancel action for task {}: {e}", slot.key.load(Relaxed)));
                }
            }
        }
        ran
    }
}

/// The doorbell count an agent has served, kept by its caller.
pub struct Served(AtomicU64);

impl Served {
    pub const fn new() -> Self {
        Served(AtomicU64::new(0))
    }

    /// True once per ring.
    pub fn rang(&self, agent: &Agent) -> bool {
        let now = agent.doorbell.load(Acquire) as u64 + 1;
        self.0.swap(now, AcqRel) != now
    }
}

impl Default for Served {
    fn default() -> Self {
        Self::new()
    }
}
