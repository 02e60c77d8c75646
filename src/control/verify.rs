//! Following a cancel until its effect is known: repeat what may have been lost, escalate, give up.

use super::actuator;
use super::estimator::Estimate;
use super::window::{ResourceKind, Wait, Window};
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
/// Throughput beyond this factor of what it was has grown.
const MORE: f64 = 1.10;
/// A queue may take so long to be served.
const LONGEST_DRAIN_NS: u64 = 1_000 * MS;

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
    /// Those who waited for the resource when it was sent.
    waiting_then: u64,
    /// Those who still waited at a time after it had ended.
    draining: Option<(u64, u64)>,
    /// It was seen to help.
    helped: bool,
}

impl Pending {
    pub fn new(decision: Decision, request: Request, now_ns: u64, waiting_then: u64) -> Pending {
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
            waiting_then,
            draining: None,
            helped: false,
        }
    }

    /// Did its end set free those who waited, as this window shows? True at most once.
    ///
    /// Of a lock: whoever waited for it then waits no more. Of what no holder in particular blocks, a window later: the
    /// contention is over, or (a queue, of which each server that comes back is a part) fewer wait or more gets done.
    pub fn now_helped(
        &mut self,
        window: &Window,
        estimate: &Estimate,
        contention_threshold: f64,
        throughput_per_s: f64,
    ) -> bool {
        let Some(ended_ns) = self.ended_ns.filter(|_| !self.helped) else { return false };
        let (resource, instance) = (self.request.resource, self.request.instance);
        let since_ns = window.now_ns.saturating_sub(ended_ns);
        self.helped = match estimate.resource(resource) {
            Some(r) if r.kind == ResourceKind::Lock => {
                let same = |w: &Wait| (w.resource, w.instance) == (resource, instance) && w.waited_ns > since_ns;
                !window.tasks.iter().any(|t| t.waits.iter().any(same))
            }
            Some(_) if since_ns < window.length_ns => false,
            Some(r) => {
                let more = throughput_per_s > MORE * self.decision.throughput_per_s;
                let moves = r.kind == ResourceKind::Queue && (r.waiting < self.waiting_then || more);
                r.level < contention_threshold || moves
            }
            None => false,
        };
        self.helped
    }

    /// Nobody else is chosen until this is known: the waiters may be on their way already.
    pub fn awaits_effect(&self) -> bool {
        self.ended_ns.is_none() && !self.overdue
    }

    /// It has ended, and windows still hold the time before.
    pub fn settles(&self) -> bool {
        self.ended_ns.is_some()
    }

    /// Ever fewer wait for the queue: it is being served, and nothing is known before it is empty or stops.
    fn drains(&mut self, estimate: Option<&Estimate>, ended_ns: u64, now_ns: u64, window_ns: u64) -> bool {
        let Some(r) = estimate.and_then(|e| e.resource(self.request.resource)) else { return false };
        if r.kind != ResourceKind::Queue || r.waiting == 0 || now_ns > ended_ns.saturating_add(LONGEST_DRAIN_NS) {
            return false;
        }
        match self.draining {
            Some((at_ns, _)) if now_ns < at_ns.saturating_add(window_ns) => true,
            Some((_, before)) if r.waiting >= before => false,
            None if r.waiting >= self.waiting_then => false,
            _ => {
                self.draining = Some((now_ns, r.waiting));
                true
            }
        }
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
            // Between two looks it may be drained yet.
            let queue = self.decision.resource_kind == Some(ResourceKind::Queue);
            let unseen_ns = if queue { LONGEST_DRAIN_NS } else { 2 * window_ns };
            match estimate.and_then(level) {
                Some(level) if now_ns >= ended_ns.saturating_add(window_ns + window_ns / 2) => {
                    if self.drains(estimate, ended_ns, now_ns, window_ns) {
                        return Verdict::Wait;
                    }
                    self.decision.contention_after = Some(level)
                }
                // Nobody looks any more, because nothing is suspected any more.
                None if now_ns >= ended_ns.saturating_add(unseen_ns) => {}
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
            if self.decision.work_since_ns != 0 {
                let lost_ns = now_ns.saturating_sub(self.decision.work_since_ns);
                self.decision.work_lost_ms = Some(lost_ns as f64 / 1e6);
                counters.work_wasted_ns.fetch_add(lost_ns, Relaxed);
            }
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
