//! Agents: what runs cancel actions inside the process that owns the task, when the controller leads elsewhere.

use super::action::{self, Level};
use crate::error::{Code, Error, Result};
use crate::primitive::{
    AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};
use crate::region::layout::Agent;
use crate::region::owner::ProcessId;
use crate::region::{futex_wake_all, Region};

fn word_of(pid: u32) -> u64 {
    (pid as u64) << 1 | 1
}

impl Agent {
    /// Frees the place if its word still is `word`.
    pub fn free(&self, word: u64) {
        // Before the word: the next owner must not be taken for dead by its predecessor's start time.
        self.start_ticks.store(0, Relaxed);
        let _ = self.word.compare_exchange(word, 0, AcqRel, Relaxed);
    }
}

impl Region {
    /// This process's agent entry, if it has one.
    pub fn agent_of(&self, pid: u32) -> Option<&Agent> {
        self.header().agents.iter().find(|a| a.word.load(Acquire) == word_of(pid))
    }

    /// Registers this process as one that runs actions for its own tasks.
    pub fn register_agent(&self, me: ProcessId) -> Result<&Agent> {
        if let Some(agent) = self.agent_of(me.pid) {
            return Ok(agent);
        }
        for agent in &self.header().agents {
            if agent.word.load(Relaxed) == 0 && agent.word.compare_exchange(0, word_of(me.pid), AcqRel, Relaxed).is_ok()
            {
                agent.start_ticks.store(me.start_ticks, Release);
                return Ok(agent);
            }
        }
        self.header().counters.agents_refused.fetch_add(1, Relaxed);
        Err(Error::new(
            Code::Full,
            format!(
                "all {} agent places are taken: actions of this process run only if the controller leads here",
                self.header().agents.len()
            ),
        ))
    }

    /// This process runs no actions any more.
    pub fn leave_agent(&self, me: ProcessId) {
        if let Some(agent) = self.agent_of(me.pid) {
            agent.free(word_of(me.pid));
        }
    }

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
