//! The table of agents: which processes run cancel actions for their own tasks.

use super::layout::Agent;
use super::owner::ProcessId;
use super::Region;
use crate::error::{Code, Error, Result};
use crate::primitive::Ordering::{AcqRel, Acquire, Relaxed, Release};

fn word_of(pid: u32) -> u64 {
    (pid as u64) << 1 | 1
}

impl Agent {
    /// Frees the place if its word still is `word`.
    fn free(&self, word: u64) {
        // Before the word, and 0 fits every process: the next owner must not be taken for dead by its predecessor's start
        // time.
        self.start_ticks.store(0, Relaxed);
        let _ = self.word.compare_exchange(word, 0, AcqRel, Relaxed);
    }
}

impl Region {
    /// This process's agent entry, if it has one.
    pub fn agent_of(&self, pid: u32) -> Option<&Agent> {
        self.header().agents.iter().find(|a| a.word.load(Acquire) == word_of(pid))
    }

    /// Registers this process as one that runs actions for its own tasks. One thread of a process at a time: two would get
    /// an entry each, and only the first is ever rung.
    pub fn register_agent(&self, me: ProcessId) -> Result<&Agent> {
        if let Some(agent) = self.agent_of(me.pid) {
            // It may be that of a dead process whose number this one was given.
            agent.start_ticks.store(me.start_ticks, Release);
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

    /// Frees the entries of dead processes.
    pub(super) fn reap_agents(&self, mut dead: impl FnMut(ProcessId) -> bool) {
        for agent in &self.header().agents {
            let word = agent.word.load(Acquire);
            let owner = ProcessId { pid: (word >> 1) as u32, start_ticks: agent.start_ticks.load(Relaxed) };
            if word != 0 && dead(owner) {
                agent.free(word);
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn register(r: &Region, pid: u32, start_ticks: u64) -> &Agent {
        r.register_agent(ProcessId { pid, start_ticks }).unwrap()
    }

    #[test]
    fn a_process_has_one_entry_and_the_dead_leave_theirs() {
        let r = Region::anonymous(16, 16).unwrap();
        let (a, b) = (register(&r, 5, 50), register(&r, 6, 60));
        assert!(!std::ptr::eq(a, b) && std::ptr::eq(register(&r, 5, 50), a));
        r.reap_agents(|owner| owner == ProcessId { pid: 5, start_ticks: 50 });
        assert!(r.agent_of(5).is_none() && r.agent_of(6).is_some());
        assert!(std::ptr::eq(register(&r, 7, 70), a));
        r.reap_agents(|owner| owner.start_ticks == 50);
        assert!(r.agent_of(7).is_some(), "the predecessor's start time is gone");
    }

    #[test]
    fn a_process_that_was_given_a_dead_ones_number_is_no_impostor() {
        let r = Region::anonymous(16, 16).unwrap();
        register(&r, 5, 50);
        register(&r, 5, 99);
        r.reap_agents(|owner| owner != ProcessId { pid: 5, start_ticks: 99 });
        assert!(r.agent_of(5).is_some());
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread::spawn;

    /// A process registers while the leader, and one that does not know yet that it has been replaced, reap a dead one's
    /// entry: no mixture of the dead process and the new one is taken for dead.
    #[test]
    fn a_process_registers_while_a_dead_ones_entry_is_freed() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let r = Arc::new(Region::model(1, 1));
            let dead = ProcessId { pid: 5, start_ticks: 50 };
            let me = ProcessId { pid: 6, start_ticks: 60 };
            r.register_agent(dead).unwrap();
            let reapers = [r.clone(), r.clone()];
            let reapers = reapers.map(|r| spawn(move || r.reap_agents(|owner| owner.start_ticks == dead.start_ticks)));
            r.register_agent(me).unwrap();
            reapers.into_iter().for_each(|reaper| reaper.join().unwrap());
            r.reap_agents(|owner| owner.start_ticks == dead.start_ticks);
            assert!(r.agent_of(me.pid).is_some() && r.agent_of(dead.pid).is_none());
        });
    }
}
