//! `Estimate -> Choice`: who is cancelled, and in words why; or why nobody is.
//!
//! 1. Candidates: cancellable, not protected, never cancelled before, and somebody would be freed.
//! 2. Those beaten on every resource by another candidate never win: they score less by more than a near-tie.
//! 3. The highest sum of contention level x resource gain wins (Atropos, SOSP 2025); near-ties go to the lower
//!    priority, then to the one whose end throws away less work.
//! 4. If contention would still stand, or too little would be given back, the next is chosen against what the first
//!    leaves, until every resource is under the threshold and nobody like the first is left, or the budget is
//!    used; later picks that turn out not to be needed are taken back.
//! 5. If the whole set gives back less than `min_relief`, nobody is cancelled; of a larger one the budget takes the first.

use super::estimator::{own_time_ns, Candidate, Estimate, OverloadKind, ResourceEstimate, Role, Use};
use super::graph::scale;
use super::window::{is_system, ResourceId, ResourceKind, ResourceWindow, TaskId, TaskView, Window, CPU};

/// Each member of a set must give back at least this part of `min_relief`: else a contended resource with many
/// small holders (nobody monopolises it) would eat the budget one harmless request after the other.
const MEMBER_SHARE: f64 = 0.10;
/// Once contention is under its threshold, whoever is as bad as the first pick (in a queue: half as bad, which is no more than
/// a moment later) and gives back this part of `min_relief` alone goes all the same: of three equal hogs the third costs as
/// much as the first.
const ALONE_SHARE: f64 = 0.5;
const EQUAL_PART: f64 = 0.5;
/// Whoever is looked at after the first pick need have occupied its server only for this part of what the first must have:
/// once that one goes, contention is too low for the rest to be looked at again.
const EQUAL_OCCUPATION_PART: u64 = 2;
/// Where those who turn over take several times as long as is usual, all are slow, and who occupies a server is no hog before it
/// has done so for as many times as long; no more than this, and this where nobody knows yet what is usual (the server has just
/// started, into a crowd).
const MOST_SLOWED: u64 = 10;
/// Whoever has held a lock for less than this many times what is usual is no culprit.
const USUAL_TIMES: u64 = 5;
/// Or than this many times what those have held it who give it back now. Of exponential times one in 22,000 is ten times
/// the mean, and a busy server has those; of twenty times there is one in half a billion.
const NOW_TIMES: u64 = 20;
/// What they held a lock for includes their waits for others, perhaps for the culprit's. So where it is known what is usual,
/// they count as slowed by no more than `MOST_SLOWED`, and together no more is asked for than this, ns, or as many times what
/// is usual.
const NOW_MOST_NS: u64 = 400_000_000;
/// Where so many who wait for nothing and bar nobody are late as well, and they are this part of all who are late, something
/// else holds the server up (the disk of its log, a starved machine), and locks are only held until that is over:
const STANDING_LEAST: usize = 3;
const STANDING_PART: usize = 5;
/// a culprit has held its lock for this many times as long as those have stood.
const STANDING_TIMES: u64 = 3;
/// They have stood for at most this many times the longest wait for a lock: who is older is a report that takes its time.
const STANDING_AGE_TIMES: u64 = 2;
/// Where so many others hold something between two requests of theirs, for this part of the least or longer, and bar nobody,
/// clients are slow in general: whoever bars others must have been idle for so many times as long as those (the median). Of
/// those that are forgotten, and of what is asked for, no more than so many times the least.
const IDLERS_LEAST: usize = 2;
const IDLERS_PART: u64 = 4;
const IDLERS_TIMES: u64 = 3;
const IDLERS_MOST: u64 = 10;
/// Of the time in which somebody was ready to run and got no processor no more than this is taken off what it has used, ns:
/// whoever has locks and never gets a processor must go in the end.
const MOST_STARVED_NS: u64 = 1_000_000_000;
/// Whoever has had what others wait for, for less than this part of the longest wait, is not what they wait for.
const EXPLAINS_PART: u64 = 2;
/// A queue makes people late if they wait in it for this part of what makes them late.
const QUEUE_PART: u64 = 4;
/// Memory (and the machine) slows all who use it: if no more than these are late they only just are.
const MEMORY_LATE: f64 = 0.10;
/// A queue's head need have barred it only for this part of what a holder must have held.
const BARS_PART: u64 = 5;
/// A cancelled task holds on until its work is undone: that is taken off its gain, but an estimate of it is no more than
/// a guess, so this part of the gain always stays.
const LEAST_NET_GAIN: f64 = 0.1;
/// Most tasks that a choice weighs together, whatever the budget: each costs a pass over the candidates.
const MAX_PICKS: usize = 32;
/// How many rejected candidates a decision explains.
const MAX_REJECTED: usize = 8;

/// What the policy may be told.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyParams {
    /// A resource at or over this level is contended (0..=1).
    pub contention_threshold: f64,
    /// A choice must give back at least this share of all execution time (0..=1).
    pub min_relief: f64,
    /// Whoever has used the resource, or will use it, for less than this is not worth a cancel, ns: at least the
    /// latency objective, for its victims can bear as much.
    pub min_gain_ns: u64,
    /// Whoever has occupied a queue's server, or used the CPU or I/O, for less than this may only have been held up by a
    /// busy machine, ns.
    pub min_occupation_ns: u64,
    /// Whoever has held a lock for less than this, and has told of no progress meanwhile, may only have been held up himself
    /// (a processor taken away, a page from a slow disk): that is over in the next moment, and a cancel gains nothing, ns.
    pub min_untold_ns: u64,
    /// Whoever is idle between two requests for less than this may be about to go on: its client is only slow, ns. So is it for
    /// whoever has held a lock for less, over pauses of its client.
    pub min_idle_ns: u64,
    /// Whoever is known to be done within this is let finish, ns: a cancel takes as long to be noticed and undone.
    pub min_remaining_ns: u64,
    /// Whoever is older, or waits for longer, is late, ns; somebody late must be helped.
    pub late_ns: u64,
    /// Part of the requests that are late, of the class of which most are (0..=1).
    pub late_share: f64,
    /// A cancel has just ended. A lock passes on at once, but a queue has to be served and a pool to be read anew before
    /// they show it: until then nobody is to blame for those.
    pub settles: bool,
    /// Scores within this fraction of the best count as equal (0..1).
    pub near_tie: f64,
}

impl Default for PolicyParams {
    fn default() -> Self {
        PolicyParams {
            contention_threshold: 0.30,
            min_relief: 0.20,
            min_gain_ns: 20_000_000,
            min_occupation_ns: 200_000_000,
            min_untold_ns: 250_000_000,
            min_idle_ns: 450_000_000,
            min_remaining_ns: 200_000_000,
            late_ns: 0,
            late_share: 1.0,
            settles: false,
            near_tie: 0.10,
        }
    }
}

/// One task to cancel.
#[derive(Clone, Debug, PartialEq)]
pub struct Pick {
    pub task: TaskId,
    /// The scope the decision was made for.
    pub scope: u64,
    /// The resource on which its end helps most.
    pub resource: ResourceId,
    pub instance: u64,
    pub role: Role,
    /// Tasks it keeps waiting, ascending; never itself.
    pub victims: Vec<TaskId>,
    /// Waiters that are no tasks yet (a kernel backlog) of the queues of which servers come back.
    pub untracked_waiting: u64,
    pub score: f64,
    /// Share of all execution time that its end gives back, on top of earlier picks; 0..=1.
    pub relief_share: f64,
    /// Usage and gain on `resource`: ns (LOCK, QUEUE) or units (MEMORY).
    pub usage: u64,
    pub gain: f64,
    /// Time it has used the resource, and is expected to use it yet, ns.
    pub usage_ns: u64,
    pub gain_ns: f64,
    pub progress: Option<f64>,
    pub work_lost_ns: u64,
    /// One line in words.
    pub reason: String,
}

impl Pick {
    /// All who wait because of it.
    pub fn waiting(&self) -> usize {
        self.victims.len().saturating_add(self.untracked_waiting as usize)
    }
}

/// A candidate that was considered and not taken.
#[derive(Clone, Debug, PartialEq)]
pub struct Rejected {
    pub task: TaskId,
    pub score: f64,
    pub relief_share: f64,
    /// One line in words.
    pub why: String,
}

/// The policy's answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Choice {
    /// In the order to act; empty = nobody.
    pub picks: Vec<Pick>,
    /// The best of those not taken, best first.
    pub rejected: Vec<Rejected>,
    /// Level per resource as the picks would leave it; in the order of `Estimate::resources`.
    pub levels_after: Vec<f64>,
    /// Why nobody was picked; empty when somebody was.
    pub nobody_because: String,
}

/// The paper's scoring: sum of contention level x resource gain. Levels (0.6, 0.4) with gains (3, 1) score 2.2.
/// Gains must be in comparable units (here: seconds of the whole resource, [`Use::scaled_gain`]).
pub fn score(levels: &[f64], gains: &[f64]) -> f64 {
    levels.iter().zip(gains).map(|(level, gain)| level * gain).sum()
}

/// Is `a` beaten by `b` on every resource, by more than the margin of a near-tie? False when `a` gains nothing.
pub fn dominated(a: &[f64], b: &[f64], near_tie: f64) -> bool {
    a.iter().any(|&gain| gain > 0.0) && a.iter().zip(b).all(|(&a, &b)| a <= 0.0 || a < b * (1.0 - near_tie))
}

/// A candidate against what earlier picks leave.
struct Rated<'a> {
    candidate: &'a Candidate,
    /// Scaled gain per resource, in the order of `Estimate::resources`.
    gains: Vec<f64>,
    score: f64,
    /// What it adds to the relief of earlier picks.
    relief_share: f64,
    why_not: Option<WhyNot>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum WhyNot {
    Protected,
    Cancelled,
    Uncancellable,
    FreesNobody,
    NotContended,
    HardlyUsed,
    Starved,
    HardlyIdle,
    SoonDone,
    Settling,
    NobodyLate,
    SmallShare,
    Dominated,
    NotNeeded,
}

impl WhyNot {
    fn words(self, c: &Candidate) -> &'static str {
        match self {
            WhyNot::Protected => "protected by the host",
            WhyNot::Cancelled => "cancelled once already",
            WhyNot::Uncancellable => "cannot be cancelled now",
            WhyNot::FreesNobody if c.blocked => "waits itself: whoever it waits for is to blame",
            WhyNot::FreesNobody => "frees nobody: others block its waiters too",
            WhyNot::NotContended => "frees only resources below the contention threshold",
            WhyNot::HardlyUsed => {
                "has used the resource at its own pace, or others have waited for it, for no longer than is usual or the \
                 objective allows"
            }
            WhyNot::Starved => "is ready to run and gets no processor: the machine holds it up",
            WhyNot::HardlyIdle => "is between two requests: its client may go on at any moment",
            WhyNot::SoonDone => "will soon be done",
            WhyNot::Settling => "the effect of the last cancel does not show yet",
            WhyNot::NobodyLate => "nobody whom it keeps waiting is late",
            WhyNot::SmallShare => "frees too little on its own",
            WhyNot::Dominated => "another task gives back more of every resource",
            WhyNot::NotNeeded => "not needed: contention falls without it",
        }
    }
}

/// Chooses whom to cancel, at most `budget_left` tasks. Pure; the order of tasks in the window does not matter.
pub fn choose(estimate: &Estimate, window: &Window, params: &PolicyParams, budget_left: usize) -> Choice {
    let mut c = Chooser::new(estimate, window, params);
    if !c.contended() {
        let nobody_because = "no resource is contended: a regular overload, which cancelling cannot help".to_string();
        return Choice { levels_after: c.left, nobody_because, ..Choice::default() };
    }
    let mut rated = c.rate();
    let mut rejected = c.explain(&rated);
    let mut picks: Vec<(u32, Pick)> = Vec::new();
    while budget_left > 0 && picks.len() < MAX_PICKS && c.contended() {
        let Some(best) = c.best_of(&rated) else {
            break;
        };
        let equal = |first: &Pick| c.equals(first, rated[best].score, rated[best].relief_share);
        if !c.needs_more() && picks.first().is_some_and(|(_, first)| !equal(first)) {
            break;
        }
        let pick = c.take(&rated[best], picks.last().map(|_| &picks[..]));
        picks.push((rated[best].candidate.index as u32, pick));
        if c.contended() {
            rated = c.rate();
        }
    }
    c.give_back(&mut picks);
    let gives = estimate.relief_share(&c.freed_ns);
    let mut nobody_because = String::new();
    if picks.is_empty() {
        nobody_because = match rejected.first() {
            _ if budget_left == 0 => "the cancel budget is used up".to_string(),
            _ if estimate.kind == OverloadKind::Regular => format!(
                "{} short and no request stands out: a regular overload, which cancelling cannot help",
                c.short_of()
            ),
            None => "nobody tracked stands in the way of those who wait".to_string(),
            Some(r) => format!("no candidate qualifies; the nearest, task {}: {}", r.task, r.why),
        };
    } else if gives < params.min_relief {
        nobody_because = format!(
            "the best choice would give back {}, less than min_relief {}",
            percent(gives),
            percent(params.min_relief)
        );
        picks.clear();
        c.reset();
    }
    if picks.len() > budget_left {
        // Worth it as a whole: the budget only spreads it over time.
        picks.truncate(budget_left);
        c.set_to(picks.iter().map(|p| p.0).collect());
    }
    let picks: Vec<Pick> = picks.into_iter().map(|p| p.1).collect();
    rejected.retain(|r| !picks.iter().any(|p| p.task == r.task));
    rejected.truncate(MAX_REJECTED);
    Choice { picks, rejected, levels_after: c.left, nobody_because }
}

/// Who is late.
pub(super) struct Late {
    /// Ascending.
    tasks: Vec<TaskId>,
    /// Per resource without holders that block in particular: does it make anybody late?
    waiting: Vec<bool>,
    /// For how long those have stood whom nothing that is traced holds up, ns (the median); 0 = too few to matter.
    standing_ns: u64,
    /// For how long an idle holder must have been idle, ns.
    idle_ns: u64,
}

impl Late {
    fn new(estimate: &Estimate, window: &Window, params: &PolicyParams) -> Self {
        let late_ns = params.late_ns;
        let late = |t: &&TaskView| t.age_ns >= late_ns || t.waits.iter().any(|w| w.waited_ns >= late_ns);
        let mut tasks: Vec<TaskId> = window.tasks.iter().filter(late).map(|t| t.id).collect();
        tasks.sort_unstable();
        let queue_ns = late_ns / QUEUE_PART;
        let mut waiting: Vec<bool> = (window.resources.iter())
            .map(|r| match r.kind {
                // Whoever waits for memory does so often and briefly: at this moment perhaps nobody does.
                ResourceKind::Memory | ResourceKind::System => params.late_share >= MEMORY_LATE,
                _ => r.untracked_waiting > 0 && r.untracked_oldest_wait_ns >= queue_ns,
            })
            .collect();
        for wait in window.tasks.iter().flat_map(|t| &t.waits).filter(|w| w.waited_ns >= queue_ns) {
            if let Some(r) = estimate.resources.iter().position(|r| r.id == wait.resource) {
                waiting[r] |= estimate.resources[r].kind == ResourceKind::Queue;
            }
        }
        let standing_ns = Self::standing_ns(estimate, window, late_ns, tasks.len());
        let idle_ns = Self::idle_ns(estimate, window, params.min_idle_ns);
        Late { tasks, waiting, standing_ns, idle_ns }
    }

    pub(super) fn idle_ns(estimate: &Estimate, window: &Window, least_ns: u64) -> u64 {
        let most_ns = least_ns.saturating_mul(IDLERS_MOST);
        let idles = |t: &&TaskView| {
            let holds = !t.in_request && !t.holdings.is_empty();
            holds && (least_ns / IDLERS_PART..=most_ns).contains(&t.idle_ns) && estimate.candidate(t.id).is_none()
        };
        let idlers: Vec<u64> = window.tasks.iter().filter(idles).map(|t| t.idle_ns).collect();
        if idlers.len() < IDLERS_LEAST {
            return least_ns;
        }
        median(idlers).saturating_mul(IDLERS_TIMES).clamp(least_ns, most_ns)
    }

    pub(super) fn standing_ns(estimate: &Estimate, window: &Window, late_ns: u64, late: usize) -> u64 {
        let waits = window.tasks.iter().flat_map(|t| &t.waits);
        let longest_ns = waits.filter(|w| !is_system(w.resource)).map(|w| w.waited_ns).max().unwrap_or(0);
        let ages = late_ns..=longest_ns.saturating_mul(STANDING_AGE_TIMES);
        // Whoever has just been freed is late, and runs at its own pace: what it holds tells for how long.
        let own_ns = |t: &TaskView| match t.holdings.iter().map(own_time_ns).max() {
            Some(held_ns) => held_ns.min(t.age_ns),
            None => t.age_ns,
        };
        let stands = |t: &&TaskView| {
            t.in_request && t.waits.is_empty() && ages.contains(&own_ns(t)) && estimate.candidate(t.id).is_none()
        };
        let standing: Vec<u64> = window.tasks.iter().filter(stands).map(own_ns).collect();
        if standing.len() < STANDING_LEAST || standing.len() * STANDING_PART < late {
            return 0;
        }
        median(standing)
    }
}

/// For how long at least a culprit has used the resource, by how long others do.
fn usual_ns(resource: &ResourceWindow) -> u64 {
    let usual_ns = resource.usual_hold_ns;
    let times = |ns: u64, times: u64| ns.saturating_mul(times);
    let most_ns = match resource.kind {
        ResourceKind::Lock if usual_ns > 0 => {
            times(usual_ns, NOW_TIMES * MOST_SLOWED).min(times(usual_ns, NOW_TIMES).max(NOW_MOST_NS))
        }
        _ => u64::MAX,
    };
    times(usual_ns, USUAL_TIMES).max(times(resource.turnover_ns, NOW_TIMES).min(most_ns))
}

/// The state of one decision: who is picked so far and what that leaves.
struct Chooser<'a> {
    estimate: &'a Estimate,
    window: &'a Window,
    params: &'a PolicyParams,
    levels: Vec<f64>,
    /// By place in the window.
    set: Vec<u32>,
    /// Time per resource that the set gives back.
    freed_ns: Vec<u64>,
    /// Level per resource that the set would leave.
    left: Vec<f64>,
    late: Late,
    scratch: super::graph::Scratch,
}

impl<'a> Chooser<'a> {
    fn new(estimate: &'a Estimate, window: &'a Window, params: &'a PolicyParams) -> Self {
        let levels: Vec<f64> = estimate.resources.iter().map(|r| r.level).collect();
        let freed_ns = vec![0; levels.len()];
        let (left, scratch) = (levels.clone(), estimate.scratch());
        let late = Late::new(estimate, window, params);
        Chooser { estimate, window, params, levels, set: Vec::new(), freed_ns, left, late, scratch }
    }

    fn over(&self, level: f64) -> bool {
        level > 0.0 && level >= self.params.contention_threshold
    }

    /// Is there still something to do about a resource: it would stay contended, or what is picked so far gives back too
    /// little to be worth any cancel, or what it still costs is worth one more.
    fn open(&self, r: usize) -> bool {
        self.unsolved(r) || (self.begun(r) && self.costs_on(r))
    }

    fn unsolved(&self, r: usize) -> bool {
        self.over(self.left[r])
            || (self.begun(r) && self.estimate.relief_share(&self.freed_ns) < self.params.min_relief)
    }

    /// It was contended, and somebody is picked.
    fn begun(&self, r: usize) -> bool {
        !self.set.is_empty() && self.over(self.levels[r])
    }

    /// Is what the set leaves of the time lost to the resource worth a cancel by itself?
    fn costs_on(&self, r: usize) -> bool {
        let left_ns = self.estimate.resources[r].lost_ns.saturating_sub(self.freed_ns[r]);
        part(left_ns, self.estimate.exec_ns) >= self.params.min_relief * ALONE_SHARE
    }

    fn contended(&self) -> bool {
        (0..self.left.len()).any(|r| self.open(r))
    }

    /// Is one with this score as bad as the first pick, and worth a cancel beside it?
    fn equals(&self, first: &Pick, score: f64, relief_share: f64) -> bool {
        let part = if first.role == Role::Occupies { EQUAL_PART } else { 1.0 - self.params.near_tie };
        score >= first.score * part && relief_share >= self.params.min_relief * ALONE_SHARE
    }

    /// Would the set leave contention, or give back too little to be worth it?
    fn needs_more(&self) -> bool {
        (0..self.left.len()).any(|r| self.unsolved(r))
    }

    /// The contended resources in words.
    fn short_of(&self) -> String {
        let open = (0..self.left.len()).filter(|&r| self.open(r));
        let names: Vec<&str> = open.map(|r| self.estimate.resources[r].name.as_str()).collect();
        format!("{} {}", names.join(" and "), if names.len() == 1 { "is" } else { "are" })
    }

    fn reset(&mut self) {
        self.set_to(Vec::new());
    }

    fn set_to(&mut self, set: Vec<u32>) {
        self.freed_ns = self.estimate.joint_relief(&set, &mut self.scratch).freed_ns;
        self.left = self.levels_left(&self.freed_ns);
        self.set = set;
    }

    fn levels_left(&self, freed_ns: &[u64]) -> Vec<f64> {
        let resources = self.estimate.resources.iter().zip(freed_ns);
        resources.map(|(r, &freed)| r.level * (1.0 - part(freed, r.lost_ns))).collect()
    }

    /// Rates every candidate against what the set leaves.
    fn rate(&mut self) -> Vec<Rated<'a>> {
        let (estimate, set_len) = (self.estimate, self.set.len());
        let mut rated = Vec::with_capacity(estimate.candidates.len());
        for candidate in &estimate.candidates {
            if self.set.contains(&(candidate.index as u32)) {
                continue;
            }
            let mut freed_ns = vec![0u64; self.levels.len()];
            if set_len == 0 {
                for (r, u) in candidate.uses.iter().filter_map(|u| Some((self.place(u)?, u))) {
                    freed_ns[r] = u.freed_ns;
                }
            } else if !candidate.uses.is_empty() {
                self.set.push(candidate.index as u32);
                freed_ns = estimate.joint_relief(&self.set, &mut self.scratch).freed_ns;
                self.set.pop();
                for (freed, before) in freed_ns.iter_mut().zip(&self.freed_ns) {
                    *freed = freed.saturating_sub(*before);
                }
            }
            rated.push(self.rate_one(candidate, &freed_ns));
        }
        rated
    }

    fn place(&self, u: &Use) -> Option<usize> {
        self.estimate.resources.iter().position(|r| r.id == u.resource)
    }

    /// For how long a hog must have occupied a server of this queue, by the pace at which the others turn over just now.
    fn slowed_occupation_ns(&self, queue: &ResourceWindow) -> u64 {
        let least_ns = self.params.min_occupation_ns;
        let most_ns = least_ns.saturating_mul(MOST_SLOWED);
        match (queue.turnover_ns, queue.usual_hold_ns) {
            (0, _) => least_ns,
            (_, 0) => most_ns,
            (now_ns, usual_ns) => scale(least_ns, now_ns, usual_ns).clamp(least_ns, most_ns),
        }
    }

    fn rate_one(&self, candidate: &'a Candidate, freed_ns: &[u64]) -> Rated<'a> {
        let task = &self.window.tasks[candidate.index];
        let min_ns = self.params.min_gain_ns;
        let mut gains = vec![0.0; self.levels.len()];
        let mut worth_ns = vec![0u64; self.levels.len()];
        let least_ns = if candidate.progress.is_some() { min_ns.max(self.params.min_remaining_ns) } else { min_ns };
        // A request of one row that has not come to it yet tells nothing.
        let untold_ns = match self.params.min_untold_ns {
            _ if task.progress.is_some_and(|(done, _)| done > 0) => 0,
            untold_ns if task.age_ns < untold_ns => untold_ns.max(self.params.min_idle_ns),
            untold_ns => untold_ns,
        };
        let (mut frees, mut contended, mut used, mut lasts, mut settling) = (false, false, false, false, false);
        let mut starved = false;
        let mut helps = candidate.victims.iter().any(|v| self.late.tasks.binary_search(v).is_ok());
        for (r, u) in candidate.uses.iter().filter_map(|u| Some((self.place(u)?, u))) {
            if freed_ns[r] == 0 {
                continue;
            }
            if self.params.settles
                && (u.role == Role::Occupies
                    || matches!(self.estimate.resources[r].kind, ResourceKind::Memory | ResourceKind::System))
            {
                settling = true;
                continue;
            }
            frees = true;
            let contends = self.open(r);
            // Nobody who has a lock for about as long as everybody has it monopolises it: as long as in calm times, or as
            // now that all are slow (a starved CPU).
            let mut usual_ns = self.window.resources.get(r).map_or(0, usual_ns);
            if self.estimate.resources[r].kind == ResourceKind::Lock {
                usual_ns = usual_ns.max(self.late.standing_ns.saturating_mul(STANDING_TIMES));
            }
            // The head of a queue has barred it only since it came, while what it waits for has been held all along: by the
            // same measure the holder would always qualify first, and go though ending the head loses nothing.
            // But it bars nobody for long if those it waits for will soon be done.
            if u.role == Role::Bars && u.behind_ns < min_ns.max(usual_ns) {
                continue;
            }
            // Nor may the holder go before the head can be judged: until the head came nobody waited for the holder.
            let barring_ns = min_ns / BARS_PART;
            let bars = match (u.role, self.estimate.resources[r].kind) {
                (Role::Holds, ResourceKind::Lock) | (Role::Through, _) => u.waited_ns >= barring_ns,
                _ => true,
            };
            let min_ns = match u.role {
                Role::Bars => barring_ns,
                // On a starved machine all are slow: only who stands out from those that do turn over hogs a server.
                Role::Occupies => {
                    let part = if self.set.is_empty() { 1 } else { EQUAL_OCCUPATION_PART };
                    let slowed_ns = self.window.resources.get(r).map_or(0, |w| self.slowed_occupation_ns(w));
                    min_ns.max(usual_ns).max(slowed_ns / part)
                }
                // On a busy machine ordinary requests, too, have had the CPU for a moment.
                Role::Holds if self.estimate.resources[r].kind == ResourceKind::System => {
                    min_ns.max(self.params.min_occupation_ns)
                }
                Role::Holds if self.estimate.resources[r].kind == ResourceKind::Memory => min_ns.max(usual_ns),
                Role::Holds | Role::Through => min_ns.max(usual_ns).max(untold_ns),
            };
            // What the machine held it up for is not its own time.
            let own_ns = match self.estimate.resources[r].kind {
                ResourceKind::System => u.usage_ns,
                _ => u.usage_ns.saturating_sub(task.starved_ns.min(MOST_STARVED_NS)),
            };
            starved |= contends && u.usage_ns >= min_ns && own_ns < min_ns;
            // Where all take their short turns at a lock or a server, they have waited for those who had it before too.
            let used_it = bars && own_ns >= min_ns && u.usage_ns >= u.waited_ns / EXPLAINS_PART;
            contended |= contends;
            used |= contends && used_it;
            if used_it && u.gain_ns >= least_ns as f64 {
                lasts |= contends;
                helps |= self.estimate.resources[r].kind != ResourceKind::Lock && self.late.waiting[r];
                let net_ns = (u.gain_ns - task.rollback_ns as f64).max(u.gain_ns * LEAST_NET_GAIN);
                gains[r] = net_ns / 1e9 * part(freed_ns[r], self.estimate.resources[r].lost_ns);
                worth_ns[r] = freed_ns[r];
            }
        }
        let relief_share = self.estimate.relief_share(&worth_ns);
        let why_not = if !frees && settling {
            Some(WhyNot::Settling)
        } else if !frees {
            Some(WhyNot::FreesNobody)
        } else if task.protected {
            Some(WhyNot::Protected)
        } else if task.cancelled {
            Some(WhyNot::Cancelled)
        } else if !task.cancellable {
            Some(WhyNot::Uncancellable)
        } else if !task.in_request && task.idle_ns < self.late.idle_ns {
            Some(WhyNot::HardlyIdle)
        } else if !contended {
            Some(WhyNot::NotContended)
        } else if !used {
            Some(if starved { WhyNot::Starved } else { WhyNot::HardlyUsed })
        } else if !lasts {
            Some(WhyNot::SoonDone)
        } else if !helps {
            Some(WhyNot::NobodyLate)
        } else if relief_share < self.params.min_relief * MEMBER_SHARE {
            Some(WhyNot::SmallShare)
        } else {
            None
        };
        Rated { candidate, score: score(&self.levels, &gains), gains, relief_share, why_not }
    }

    /// The one to take: highest score; near-ties by priority, then by work lost, then by id.
    fn best_of(&self, rated: &[Rated]) -> Option<usize> {
        let near_tie = self.params.near_tie.clamp(0.0, 0.99);
        let top = rated.iter().filter(|r| r.why_not.is_none()).map(|r| r.score).max_by(f64::total_cmp)?;
        // A dominated task is beaten by more than a near-tie on every resource, so its score lies below all of these.
        let near = (0..rated.len()).filter(|&i| rated[i].why_not.is_none() && rated[i].score >= top * (1.0 - near_tie));
        near.min_by_key(|&i| {
            let r = &rated[i];
            let task = &self.window.tasks[r.candidate.index];
            let lost_ns = r.candidate.work_lost_ns.saturating_add(task.rollback_ns);
            (task.priority, lost_ns, std::cmp::Reverse(OrderedScore(r.score)), r.candidate.task)
        })
    }

    fn take(&mut self, rated: &Rated, earlier: Option<&[(u32, Pick)]>) -> Pick {
        self.set.push(rated.candidate.index as u32);
        let joint = self.estimate.joint_relief(&self.set, &mut self.scratch);
        let mut victims = self.estimate.all_victims(&joint, self.window, &self.set);
        // Whom earlier picks free already are not its victims.
        victims.retain(|v| !earlier.unwrap_or_default().iter().any(|p| p.1.victims.contains(v)));
        self.freed_ns = joint.freed_ns;
        self.left = self.levels_left(&self.freed_ns);
        self.pick(rated, victims)
    }

    fn pick(&self, rated: &Rated, victims: Vec<TaskId>) -> Pick {
        let c = rated.candidate;
        let weight = |u: &Use| self.place(u).map_or(0.0, |r| self.levels[r] * rated.gains[r]);
        // What it holds itself names the cause; what it frees through others is only a consequence.
        let best = c
            .uses
            .iter()
            .filter(|u| weight(u) > 0.0)
            .max_by(|a, b| {
                (a.role != Role::Through).cmp(&(b.role != Role::Through)).then(weight(a).total_cmp(&weight(b)))
            })
            .expect("a candidate without a use that counts is never taken");
        let task = &self.window.tasks[c.index];
        let resource = self.estimate.resource(best.resource).expect("uses name resources of the window");
        let counted = c.uses.iter().filter(|u| weight(u) > 0.0).filter_map(|u| self.place(u));
        let untracked_waiting =
            counted.fold(0u64, |sum, r| sum.saturating_add(self.window.resources[r].untracked_waiting));
        let mut pick = Pick {
            task: c.task,
            scope: task.scope,
            resource: best.resource,
            instance: best.instance,
            role: best.role,
            score: rated.score,
            relief_share: rated.relief_share,
            usage: best.usage,
            gain: best.gain,
            usage_ns: best.usage_ns,
            gain_ns: best.gain_ns,
            progress: c.progress,
            work_lost_ns: c.work_lost_ns,
            reason: String::new(),
            victims,
            untracked_waiting,
        };
        pick.reason = reason(resource, best, c, task, pick.waiting(), rated.relief_share);
        pick
    }

    /// Takes back later picks without which contention falls all the same: the smallest set.
    fn give_back(&mut self, picks: &mut Vec<(u32, Pick)>) {
        if self.needs_more() {
            return; // all of them are needed, and more
        }
        for i in (1..picks.len()).rev() {
            let without: Vec<u32> = picks.iter().map(|p| p.0).filter(|&t| t != picks[i].0).collect();
            let freed_ns = self.estimate.joint_relief(&without, &mut self.scratch).freed_ns;
            let (all, without_it) = (self.estimate.relief_share(&self.freed_ns), self.estimate.relief_share(&freed_ns));
            let equal = self.equals(&picks[0].1, picks[i].1.score, all - without_it);
            let enough = without_it >= self.params.min_relief && !equal;
            if enough && !self.levels_left(&freed_ns).iter().any(|&l| self.over(l)) {
                picks.remove(i);
                self.set_to(without);
            }
        }
    }

    /// The best of those rated, with the reason against each.
    fn explain(&self, rated: &[Rated]) -> Vec<Rejected> {
        let first = self.best_of(rated).map(|i| &rated[i]);
        let against = |r: &Rated| match (r.why_not, first) {
            (None, Some(first)) if dominated(&r.gains, &first.gains, self.params.near_tie) => WhyNot::Dominated,
            (why, _) => why.unwrap_or(WhyNot::NotNeeded),
        };
        let mut best: Vec<&Rated> = rated.iter().collect();
        best.sort_by(|a, b| {
            b.score
                .total_cmp(&a.score)
                .then(b.candidate.relief_share.total_cmp(&a.candidate.relief_share))
                .then(a.candidate.task.cmp(&b.candidate.task))
        });
        best.truncate(MAX_REJECTED + MAX_PICKS);
        best.into_iter()
            .map(|r| Rejected {
                task: r.candidate.task,
                score: r.score,
                relief_share: r.candidate.relief_share,
                why: against(r).words(r.candidate).to_string(),
            })
            .collect()
    }
}

/// Of at least one; of two in the middle the shorter.
fn median(mut times: Vec<u64>) -> u64 {
    times.sort_unstable();
    times[(times.len() - 1) / 2]
}

/// `part / whole` within 0..=1.
fn part(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        (part as f64 / whole as f64).min(1.0)
    }
}

#[derive(PartialEq)]
struct OrderedScore(f64);
impl Eq for OrderedScore {}
impl PartialOrd for OrderedScore {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for OrderedScore {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

fn percent(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}

/// A duration for people: three digits are enough.
fn duration(ns: f64) -> String {
    match ns {
        ns if ns < 1e6 => format!("{:.0} us", ns / 1e3),
        ns if ns < 1e9 => format!("{:.0} ms", ns / 1e6),
        ns if ns < 1e11 => format!("{:.1} s", ns / 1e9),
        ns => format!("{:.0} s", ns / 1e9),
    }
}

fn bytes(n: u64) -> String {
    match n {
        n if n < 1 << 20 => format!("{} KiB", n >> 10),
        n => format!("{} MiB", n >> 20),
    }
}

fn reason(r: &ResourceEstimate, u: &Use, c: &Candidate, task: &TaskView, waiting: usize, relief_share: f64) -> String {
    let what = match u.instance {
        0 => r.name.clone(),
        instance => format!("{} {instance}", r.name),
    };
    let others = if waiting == 1 { "1 other waits".to_string() } else { format!("{waiting} others wait") };
    let since = duration(u.usage_ns as f64);
    let does = match (u.role, r.kind) {
        (Role::Holds, ResourceKind::Memory) => {
            format!(
                "holds {} units of {what}, {} of the relievable contention, while {others}",
                u.usage,
                percent(u.share)
            )
        }
        (Role::Holds, ResourceKind::System) => {
            // Short: with what follows it is to fit the mailbox.
            let share = percent(u.share);
            match r.id {
                CPU => format!("has used {since} of CPU time, {share} of the delays, while {others} for {what}"),
                _ => {
                    let lately = bytes(u.usage);
                    format!("has done I/O for {since} ({lately} lately), {share} of the delays, while {others}")
                }
            }
        }
        (Role::Holds, _) => format!("has held {what} for {since} while {others} for it"),
        (Role::Bars, _) => format!("has waited for {what} for {since} and bars the queue: {others} behind it"),
        (Role::Occupies, _) => {
            format!("has occupied a server of {what} for {since} while {others}")
        }
        (Role::Through, _) => {
            format!("has blocked those who occupy {what} for {since} while {others}")
        }
    };
    let ahead = match (c.progress, task.in_request) {
        (_, false) => "idle, its client may never end it".to_string(),
        (Some(done), _) if u.role != Role::Bars => {
            format!("{} done, about {} to come", percent(done), duration(u.gain_ns))
        }
        _ => format!("about {} to come", duration(u.gain_ns)),
    };
    format!("{does}; {ahead}; its end gives back {} of all execution time", percent(relief_share))
}
