//! Following a cancel until its effect is known: repeat what may have been lost, escalate, give up.

use super::actuator;
use super::estimator::Estimate;
use crate::cancel::mailbox::Request;
use crate::primitive::Ordering::{Acquire, Relaxed};
use crate::region::layout::FLAG_UNCANCELLABLE;
use crate::region::lease::Leader;
use crate::region::Region;
use crate::report::decision::{Decision, Outcome};

const MS: u64 = 1_000_000;
/// First repeat of a cancel that was not acknowledged; each further one waits twice as long.
const REPEAT_NS: u64 = 10 * MS;
const LONGEST_REPEAT_NS: u64 = 160 * MS;

/// What `step` found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Wait,
    /// The decision has news worth recording.
    Changed,
    /// Nothing more will be learnt.
    Done,
}

/// A cancel on its way.
pub struct Pending {
    pub decision: Decision,
    request: Request,
    sent_ns: u64,
    rung_since_ns: u64,
    next_repeat_ns: u64,
    repeat_ns: u64,
    acknowledged_ns: Option<u64>,
    ended_ns: Option<u64>,
    /// Verify time has passed: others may be chosen.
    overdue: bool,
}

impl Pending {
    pub fn new(decision: Decision, request: Request, now_ns: u64) -> Pending {
        Pending {
            decision,
            request,
            sent_ns: now_ns,
            rung_since_ns: now_ns,
            next_repeat_ns: now_ns.saturating_add(REPEAT_NS),
            repeat_ns: REPEAT_NS,
            acknowledged_ns: None,
            ended_ns: None,
            overdue: false,
        }
    }

    /// Nobody else is chosen until this is known: the waiters may be on their way already.
    pub fn awaits_effect(&self) -> bool {
        self.ended_ns.is_none() && !self.overdue
    }

    fn since_sent_ms(&self, now_ns: u64) -> f64 {
        now_ns.saturating_sub(self.sent_ns) as f64 / 1e6
    }

    pub fn step(
        &mut self,
        region: &Region,
        leader: Leader,
        now_ns: u64,
        verify_ns: u64,
        window_ns: u64,
        estimate: Option<&Estimate>,
    ) -> Verdict {
        let counters = &region.header().counters;
        let (task, scope) = (self.decision.task, self.decision.scope);
        if let Some(ended_ns) = self.ended_ns {
            // The effect is read from the first window that lies wholly after the end (windows are up to a stride longer).
            let level = |e: &Estimate| e.resource(self.request.resource).map(|r| r.level);
            match estimate.and_then(level) {
                Some(level) if now_ns >= ended_ns.saturating_add(window_ns + window_ns / 2) => {
                    self.decision.contention_after = Some(level)
                }
                // Nobody looks any more, because nothing is suspected any more.
                None if now_ns >= ended_ns.saturating_add(2 * window_ns) => {}
                _ => return Verdict::Wait,
            }
            return Verdict::Done;
        }
        let acknowledged = region.task(task).is_some_and(|s| s.acknowledged_scope.load(Acquire) == scope);
        let over = actuator::is_over(region, task, scope);
        if (acknowledged || over) && self.acknowledged_ns.is_none() {
            self.acknowledged_ns = Some(now_ns);
            self.decision.acknowledged_ms = Some(self.since_sent_ms(now_ns));
            self.decision.outcome = Outcome::Acknowledged;
            counters.cancels_acknowledged.fetch_add(1, Relaxed);
        }
        if over {
            self.ended_ns = Some(now_ns);
            self.decision.ended_ms = Some(self.since_sent_ms(now_ns));
            self.decision.outcome = Outcome::Ended;
            actuator::withdraw(region, task, scope);
            return Verdict::Changed;
        }
        if let Some(acknowledged_ns) = self.acknowledged_ns {
            // Undoing may take long; others may be chosen then, but this one is never asked again.
            self.overdue = now_ns.saturating_sub(acknowledged_ns) > verify_ns;
            return Verdict::Wait;
        }
        // Not in the middle of what must not be stopped (a commit): what is due then waits until that is over.
        let blocked = region.task(task).is_some_and(|s| s.flags.load(Relaxed) & FLAG_UNCANCELLABLE != 0);
        if now_ns.saturating_sub(self.rung_since_ns) > verify_ns {
            if self.request.rung == 1 && !blocked && actuator::can_terminate(region, leader.me, task) {
                self.request.rung = 2;
                self.rung_since_ns = now_ns;
                self.decision.rung = 2;
                self.decision.sends += 1;
                self.decision.outcome = Outcome::Escalated;
                counters.cancels_escalated.fetch_add(1, Relaxed);
                actuator::deliver(region, leader, task, &self.request);
                return Verdict::Changed;
            }
            if !self.overdue {
                self.overdue = true;
                self.decision.outcome = Outcome::Unresponsive;
                counters.cancels_unresponsive.fetch_add(1, Relaxed);
                // The request stands while the scope does: a task that looks late still stops.
                return Verdict::Changed;
            }
        }
        if now_ns >= self.next_repeat_ns {
            self.repeat_ns = (self.repeat_ns * 2).min(LONGEST_REPEAT_NS);
            self.next_repeat_ns = now_ns.saturating_add(self.repeat_ns);
            if !blocked {
                self.decision.sends += 1;
                actuator::deliver(region, leader, task, &self.request);
            }
        }
        Verdict::Wait
    }
}
