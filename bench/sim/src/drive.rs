//! The real pipeline on the modelled host.
//!
//! A private region stands in for the server's shared memory, and its clock for time: the counter's scale is set to
//! nothing, so that the clock reads what the model says. The host's tracepoints write into it through the library's own
//! hot path, and either the library's own [`Controller`] ticks on it, or a copy of the controller's loop around the
//! same stages in which single ideas can be taken away. Without anything taken away the copy decides as the original
//! does; the report checks that decision by decision.

use crate::host::{Host, Res, Tap, MS, SECOND};
use crate::rng::Rng;
use atropos::cancel::action::EDGES;
use atropos::cancel::mailbox::Request;
use atropos::capi::{atropos_edge, ATROPOS_EDGE_HOLDS, ATROPOS_EDGE_QUEUED};
use atropos::config::{Config, Mode};
use atropos::control::budget::{Budget, BudgetParams};
use atropos::control::collect::{Collector, STRIDES};
use atropos::control::controller::Controller;
use atropos::control::detector::{Detector, Objective, State};
use atropos::control::estimator::{estimate, Estimate, EstimatorParams};
use atropos::control::policy::{choose, PolicyParams};
use atropos::control::window::{Edge, EdgeKind, ResourceKind, Window};
use atropos::primitive::Ordering::{Acquire, Relaxed};
use atropos::region::layout::{FLAG_IMPLICIT_REQUEST, WAITED_SHIFT};
use atropos::region::owner::ProcessId;
use atropos::region::tasks::index_of;
use atropos::region::Region;
use std::cell::RefCell;
use std::sync::Once;

/// The model's time 0 on the region's clock: a clock that reads 0 would mean "not yet".
const EPOCH_NS: u64 = 1000 * SECOND;
const LONGEST_PAUSE_NS: u64 = 25 * MS;
const BUSY_PAUSE_NS: u64 = 5 * MS;

/// What hosts say of how far their long tasks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    Exact,
    Missing,
    /// Stuck at a twentieth.
    FrozenLow,
    /// Stuck at 19 twentieths.
    FrozenHigh,
    /// The total is taken for this many times as large, or as small, at random.
    Off(u32),
    /// Says how much is left.
    Reversed,
}

/// An idea taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ablation {
    Nothing,
    /// Only the most contended resource counts.
    OneResource,
    /// What a task has used counts, not what it will use.
    CurrentUsage,
    NoInstances,
    /// One cancel, then none for ten seconds.
    FixedPause,
    NoInFlightAge,
}

/// Whose loop it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loop {
    Library,
    Copy(Ablation),
}

struct RegionTap<'a> {
    region: &'a Region,
    handles: Vec<u64>,
}

impl RegionTap<'_> {
    fn event_ns(&self) -> u64 {
        self.region.header().clock.event_ns()
    }

    fn slot(&self, session: usize) -> &atropos::region::layout::TaskSlot {
        self.region.task(self.handles[session]).expect("sessions live as long as the run")
    }
}

impl Tap for RegionTap<'_> {
    fn at(&mut self, now_ns: u64) {
        self.region.header().clock.ns_base.store(EPOCH_NS + now_ns, Relaxed);
    }

    fn begin(&mut self, session: usize, class: u16, waited_ns: u64) {
        let slot = self.slot(session);
        self.region.begin_request(slot, class as u32);
        if waited_ns > 0 {
            slot.began_earlier(waited_ns);
            slot.trace.waited(Res::Workers as u32, waited_ns);
        }
    }

    fn end(&mut self, session: usize, ok: bool) {
        self.region.end_request(self.slot(session), !ok as i32);
    }

    fn wait(&mut self, session: usize, res: Res, instance: u64) {
        self.slot(session).trace.wait_begin(self.event_ns(), res as u32, instance);
    }

    fn abandon(&mut self, session: usize, res: Res) {
        self.slot(session).trace.wait_abandoned(self.event_ns(), res as u32);
    }

    fn acquire(&mut self, session: usize, res: Res, instance: u64, amount: u64) {
        self.slot(session).trace.acquire(self.event_ns(), 0, res as u32, instance, amount);
    }

    fn release(&mut self, session: usize, res: Res, instance: u64, amount: u64) {
        self.slot(session).trace.release(self.event_ns(), res as u32, instance, amount);
    }

    fn evicted(&mut self, session: usize, amount: u64) {
        self.slot(session).trace.evicted(Res::Pool as u32, amount);
    }

    fn work(&mut self, session: usize, on: bool) {
        let slot = self.slot(session);
        slot.work_waited.store((slot.trace.waited_ns.load(Relaxed) >> WAITED_SHIFT) as u32, Relaxed);
        slot.work_start_ns.store(if on { self.event_ns() } else { 0 }, Relaxed);
        slot.trace.progress(0, 0);
    }

    fn acknowledge(&mut self, session: usize) {
        let slot = self.slot(session);
        slot.acknowledged_scope.store(slot.scope.load(Relaxed), Relaxed);
    }
}

thread_local! {
    /// What the host of this thread answers when its controller asks who blocks whom.
    static EDGES_NOW: RefCell<Vec<atropos_edge>> = const { RefCell::new(Vec::new()) };
}

unsafe extern "C" fn edges_now(buffer: *mut atropos_edge, max: usize, _: *mut core::ffi::c_void) -> usize {
    EDGES_NOW.with_borrow(|edges| {
        for (i, edge) in edges.iter().take(max).enumerate() {
            // SAFETY: the library gives a buffer of `max` places, and i < max.
            unsafe { buffer.add(i).write(*edge) };
        }
        edges.len()
    })
}

/// Somebody was told to stop.
#[derive(Clone, Debug, PartialEq)]
pub struct Cancel {
    pub at_ns: u64,
    pub session: usize,
    pub reason: String,
    /// What the latency signal was, ns.
    pub p99_ns: u64,
}

/// What the controller did in one run.
#[derive(Clone, Debug, Default)]
pub struct Acts {
    pub cancels: Vec<Cancel>,
    /// An overload was declared.
    pub overload: bool,
    /// The objective as last used, ns; 0 = never known.
    pub slo_ns: u64,
}

/// What the library is told beside the host itself.
#[derive(Clone, Debug)]
pub struct Terms {
    pub config: Config,
    pub progress: Progress,
    /// The host answers who blocks whom (else it is inferred from what is held).
    pub edges: bool,
    pub seed: u64,
}

/// Runs `host` to `end_ns` under the loop. `look` sees the host at every tick, before anything is done about the
/// sessions told to stop in it.
pub fn run(
    host: &mut Host,
    end_ns: u64,
    terms: &Terms,
    which: Loop,
    mut look: impl FnMut(&Host, &[Cancel]),
) -> Result<Acts, String> {
    let region = Region::anonymous(host.sessions().max(16) as u32, 16).map_err(|e| e.text)?;
    let h = region.header();
    h.clock.mult.store(0, Relaxed);
    h.clock.use_tsc.store(1, Relaxed);
    h.clock.ns_base.store(EPOCH_NS, Relaxed);
    h.clock.coarse_ns.store(EPOCH_NS, Relaxed);
    for (res, name, kind) in [
        (Res::Lock, "table lock", ResourceKind::Lock),
        (Res::Pool, "buffer pool", ResourceKind::Memory),
        (Res::Workers, "worker", ResourceKind::Queue),
    ] {
        let id = h.register(name, kind).map_err(|e| e.text)?;
        assert_eq!(id, res as u32, "a fresh region numbers from 1");
    }
    if let Some(entry) = h.resource(Res::Workers as u32) {
        entry.servers.store(host.spec.workers as u64, Relaxed);
    }
    let mut config = terms.config.clone();
    config.mode = Mode::Enforce;
    h.publish_settings(&config).expect("nobody else writes settings");
    let me = ProcessId::current();
    let handles = (0..host.sessions()).map(|s| {
        let handle = region.begin_task(me, s as u64 + 1, 0).expect("the table has a place for every session");
        // Idle until its first request.
        let slot = region.task(handle).expect("just begun");
        slot.set_flag(FLAG_IMPLICIT_REQUEST, false);
        slot.request_start_ns.store(0, Relaxed);
        slot.request_end_ns.store(EPOCH_NS, Relaxed);
        handle
    });
    let mut tap = RegionTap { region: &region, handles: handles.collect() };
    // Once: other threads' controllers ask at any time.
    static SET: Once = Once::new();
    SET.call_once(|| EDGES.set(edges_now as *const () as usize, std::ptr::null_mut(), 0));
    let mut controller = match which {
        Loop::Library => Either::Library(Box::new(Controller::new(me, &config))),
        Loop::Copy(ablation) => Either::Copy(Box::new(Copy::new(config, ablation))),
    };
    let teller = Teller::new(terms, host.sessions());
    let mut acts = Acts::default();
    let mut told = vec![0u64; host.sessions()];
    while host.now_ns < end_ns {
        let pause_ns = controller.pause_ns();
        host.run(host.now_ns + pause_ns, &mut tap);
        let now_ns = region.now_ns();
        teller.tell(host, &tap);
        let (waiting, oldest_ns) = host.backlog();
        if host.spec.hidden_backlog {
            if let Some(entry) = h.resource(Res::Workers as u32) {
                entry.queue_waiting.store(waiting, Relaxed);
                entry.queue_oldest_wait_ns.store(oldest_ns, Relaxed);
                entry.queue_observed_ns.store(now_ns, Relaxed);
            }
        }
        let edges = if terms.edges && pause_ns == BUSY_PAUSE_NS { edges_of(host, &tap.handles) } else { Vec::new() };
        EDGES_NOW.set(edges);
        controller.tick(&region);
        acts.overload |= controller.overloaded(&region);
        acts.slo_ns = controller.slo_ns(&region).max(acts.slo_ns);
        let first = acts.cancels.len();
        for (s, told) in told.iter_mut().enumerate() {
            let slot = tap.slot(s);
            let scope = slot.mailbox.scope.load(Acquire);
            if scope != 0 && scope != *told && scope == slot.scope.load(Relaxed) {
                *told = scope;
                let reason = slot.standing_request(&h.lease).map_or(String::new(), |r| r.reason);
                let p99_ns = controller.p99_ns(&region);
                acts.cancels.push(Cancel { at_ns: host.now_ns, session: s, reason, p99_ns });
            }
        }
        look(host, &acts.cancels[first..]);
        for cancel in &acts.cancels[first..] {
            host.cancel(cancel.session);
        }
    }
    EDGES_NOW.take();
    Ok(acts)
}

fn edges_of(host: &Host, handles: &[u64]) -> Vec<atropos_edge> {
    let edge = |e: crate::host::WhoBlocks| atropos_edge {
        waiter: handles[e.waiter],
        blocker: handles[e.blocker],
        resource: Res::Lock as u32,
        kind: if e.holds { ATROPOS_EDGE_HOLDS } else { ATROPOS_EDGE_QUEUED },
        instance: e.table as u64 + 1,
    };
    host.who_blocks().into_iter().map(edge).collect()
}

/// Tells the library how far the long tasks are, as well as the host knows.
struct Teller {
    progress: Progress,
    /// Per session: what it takes the total for, as a factor.
    factor: Vec<f64>,
}

/// Units that a long task counts its work in.
const TOTAL: f64 = 1e6;

impl Teller {
    fn new(terms: &Terms, sessions: usize) -> Teller {
        let mut rng = Rng::new(terms.seed ^ 0x0ff);
        let factor = |_| match terms.progress {
            Progress::Off(n) if rng.chance(0.5) => n as f64,
            Progress::Off(n) => 1.0 / n as f64,
            _ => 1.0,
        };
        Teller { progress: terms.progress, factor: (0..sessions).map(factor).collect() }
    }

    fn tell(&self, host: &Host, tap: &RegionTap) {
        if self.progress == Progress::Missing {
            return;
        }
        for s in host.long_sessions() {
            let done = host.progress(s);
            let (done, total) = match self.progress {
                Progress::FrozenLow => (0.05, 1.0),
                Progress::FrozenHigh => (0.95, 1.0),
                Progress::Reversed => (1.0 - done, 1.0),
                _ => (done, self.factor[s]),
            };
            tap.slot(s).trace.progress((done * TOTAL) as u64, (total * TOTAL) as u64);
        }
    }
}

enum Either {
    Library(Box<Controller>),
    Copy(Box<Copy>),
}

impl Either {
    fn pause_ns(&self) -> u64 {
        match self {
            Either::Library(c) => c.pause().as_nanos() as u64,
            Either::Copy(c) if c.watching || !c.pending.is_empty() => BUSY_PAUSE_NS,
            Either::Copy(_) => LONGEST_PAUSE_NS,
        }
    }

    fn tick(&mut self, region: &Region) {
        match self {
            Either::Library(c) => {
                c.tick(region, None);
            }
            Either::Copy(c) => c.tick(region),
        }
    }

    fn overloaded(&self, region: &Region) -> bool {
        match self {
            Either::Library(_) => region.header().controller_state.load(Relaxed) == 3,
            Either::Copy(c) => c.state == State::Overload,
        }
    }

    fn p99_ns(&self, region: &Region) -> u64 {
        match self {
            Either::Library(_) => region.header().p99_ns.load(Relaxed),
            Either::Copy(c) => c.p99_ns,
        }
    }

    fn slo_ns(&self, region: &Region) -> u64 {
        match self {
            Either::Library(_) => region.header().slo_ns.load(Relaxed),
            Either::Copy(c) => c.slo_ns,
        }
    }
}

/// The controller's loop again, for one process, without records, with one idea less.
struct Copy {
    config: Config,
    ablation: Ablation,
    collector: Collector,
    detector: Detector,
    budget: Budget,
    completions: u64,
    watching: bool,
    next_stride_ns: u64,
    pending: Vec<Told>,
    state: State,
    p99_ns: u64,
    slo_ns: u64,
    last_cancel_ns: Option<u64>,
}

/// A cancel whose effect is awaited.
struct Told {
    task: u64,
    scope: u64,
    sent_ns: u64,
    acknowledged_ns: Option<u64>,
    ended_ns: Option<u64>,
    overdue: bool,
}

impl Copy {
    fn new(config: Config, ablation: Ablation) -> Copy {
        let budget = Budget::new(BudgetParams {
            rate_per_s: config.cancel_rate_per_s,
            burst: config.cancel_burst,
            share: config.cancel_share,
        });
        Copy {
            config,
            ablation,
            collector: Collector::default(),
            detector: Detector::default(),
            budget,
            completions: 0,
            watching: false,
            next_stride_ns: 0,
            pending: Vec::new(),
            state: State::Learning,
            p99_ns: 0,
            slo_ns: 0,
            last_cancel_ns: None,
        }
    }

    fn window_ns(&self) -> u64 {
        self.config.window_ms as u64 * MS
    }

    fn tick(&mut self, region: &Region) {
        let now_ns = region.now_ns();
        region.header().clock.refresh(now_ns, self.watching);
        self.follow(region, now_ns, None);
        if now_ns >= self.next_stride_ns {
            self.next_stride_ns = now_ns + self.window_ns() / STRIDES;
            self.stride(region, now_ns);
        }
    }

    fn awaits_effect(&self) -> bool {
        self.pending.iter().any(|p| p.ended_ns.is_none() && !p.overdue)
    }

    fn stride(&mut self, region: &Region, now_ns: u64) {
        let detailed = self.watching;
        let mut window = self.collector.window(region, now_ns, self.window_ns(), detailed);
        if window.length_ns == 0 {
            return;
        }
        let completions = self.collector.completions();
        self.budget.refill(now_ns, completions.saturating_sub(self.completions));
        self.completions = completions;
        if self.ablation == Ablation::NoInFlightAge {
            window.classes.iter_mut().for_each(|c| c.in_flight_age_ns.clear());
        }
        let objective = Objective {
            slo_ns: (self.config.slo_ms > 0.0).then_some((self.config.slo_ms * 1e6) as u64),
            tolerance: self.config.slo_tolerance,
            trigger_windows: self.config.trigger_windows,
        };
        let signal = self.detector.step(&window, &objective);
        (self.state, self.p99_ns, self.slo_ns) = (signal.state, signal.p99_ns, signal.slo_ns);
        self.watching = signal.watch || self.awaits_effect();
        if self.watching && !detailed {
            self.collector.measure_resources(region);
        }
        self.collector.learn_usual(region, now_ns, signal.state == State::Overload);
        if !detailed || self.collector.measured_ns() == 0 {
            return;
        }
        window.length_ns = self.collector.measured_ns();
        if signal.watch {
            EDGES_NOW.with_borrow(|edges| {
                window.edges.extend(edges.iter().take(4096).map(|e| Edge {
                    waiter: e.waiter,
                    blocker: e.blocker,
                    kind: if e.kind == ATROPOS_EDGE_QUEUED { EdgeKind::Queued } else { EdgeKind::Holds },
                    resource: e.resource,
                    instance: e.instance,
                }))
            });
        }
        if self.ablation == Ablation::NoInstances {
            forget_instances(&mut window);
        }
        let params = EstimatorParams {
            contention_threshold: self.config.contention_threshold,
            class_duration_ns: self.detector.class_durations_ns(),
        };
        let mut estimate = estimate(&window, &params);
        self.follow(region, now_ns, Some(&estimate));
        if signal.state != State::Overload || self.awaits_effect() || !signal.breached {
            return;
        }
        let policy = PolicyParams {
            contention_threshold: self.config.contention_threshold,
            min_relief: self.config.min_relief,
            min_gain_ns: signal.slo_ns.max(self.window_ns()),
            min_occupation_ns: 2 * self.window_ns(),
            ..PolicyParams::default()
        };
        match self.ablation {
            Ablation::OneResource => {
                let top = estimate.resources.iter().map(|r| r.level).fold(0.0, f64::max);
                estimate.resources.iter_mut().filter(|r| r.level < top).for_each(|r| r.level = 0.0);
            }
            Ablation::CurrentUsage => {
                let uses = estimate.candidates.iter_mut().flat_map(|c| &mut c.uses);
                uses.for_each(|u| (u.gain, u.gain_ns) = (u.usage as f64, u.usage_ns as f64));
            }
            Ablation::FixedPause if self.last_cancel_ns.is_some_and(|last| now_ns < last + 10 * SECOND) => return,
            _ => {}
        }
        let mut choice = choose(&estimate, &window, &policy, self.budget.left());
        if self.ablation == Ablation::FixedPause {
            choice.picks.truncate(1);
        }
        for pick in choice.picks {
            let Some(slot) = region.task(pick.task) else { continue };
            if self.budget.take(1) == 0 {
                return;
            }
            self.last_cancel_ns = Some(now_ns);
            let request = Request { scope: pick.scope, rung: 1, reason: pick.reason, ..Request::default() };
            slot.mailbox.post(&request, region.header().lease.term());
            self.pending.push(Told {
                task: pick.task,
                scope: pick.scope,
                sent_ns: now_ns,
                acknowledged_ns: None,
                ended_ns: None,
                overdue: false,
            });
        }
    }

    /// What `verify` does, as far as later choices depend on it.
    fn follow(&mut self, region: &Region, now_ns: u64, estimate: Option<&Estimate>) {
        let (verify_ns, window_ns) = (self.config.verify_ms as u64 * MS, self.window_ns());
        self.pending.retain_mut(|p| {
            if let Some(ended_ns) = p.ended_ns {
                let settled = now_ns >= ended_ns + window_ns + window_ns / 2;
                return !(estimate.is_some() && settled || estimate.is_none() && now_ns >= ended_ns + 2 * window_ns);
            }
            let slot = region.task(p.task);
            let over = slot.is_none_or(|s| {
                let idle = s.request_start_ns.load(Acquire) == 0 && s.trace.occupied.load(Acquire) == 0;
                s.scope.load(Acquire) != p.scope || idle
            });
            let acknowledged = slot.is_some_and(|s| s.acknowledged_scope.load(Acquire) == p.scope);
            if (acknowledged || over) && p.acknowledged_ns.is_none() {
                p.acknowledged_ns = Some(now_ns);
            }
            if over {
                p.ended_ns = Some(now_ns);
                if let Some(slot) = slot {
                    slot.mailbox.withdraw(p.scope);
                }
            } else if let Some(acknowledged_ns) = p.acknowledged_ns {
                p.overdue = now_ns.saturating_sub(acknowledged_ns) > verify_ns;
            } else if now_ns.saturating_sub(p.sent_ns) > verify_ns {
                p.overdue = true;
            }
            true
        });
    }
}

/// One lock, one pool, one queue: whoever has any of it is as good as another.
fn forget_instances(window: &mut Window) {
    window.edges.clear();
    for task in &mut window.tasks {
        task.waits.iter_mut().for_each(|w| w.instance = 0);
        task.holdings.iter_mut().for_each(|h| h.instance = 0);
    }
    window.tasks.sort_by_key(|t| index_of(t.id));
}
