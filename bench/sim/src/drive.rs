//! The real pipeline on the modelled host.
//!
//! A private region stands in for the server's shared memory, and its clock for time: the counter's scale is set to
//! nothing, so that the clock reads what the model says. The host's tracepoints write into it through the library's own
//! hot path, and the library's own [`Controller`] ticks on it. To see what an idea is worth it can be taken away: what
//! one stage hands to the next is changed on its way.

use crate::host::{Host, Res, Tap, SECOND};
use crate::rng::Rng;
use atropos::cancel::action::EDGES;
use atropos::cancel::retry::Answer;
use atropos::capi::{atropos_edge, ATROPOS_EDGE_HOLDS, ATROPOS_EDGE_QUEUED};
use atropos::config::{Config, Mode};
use atropos::control::controller::{Change, Controller};
use atropos::control::estimator::Estimate;
use atropos::control::policy::Choice;
use atropos::control::sample::ThreadState;
use atropos::control::window::{ResourceKind, Window};
use atropos::primitive::Ordering::{Acquire, Relaxed};
use atropos::region::layout::{FLAG_IMPLICIT_REQUEST, FLAG_UNCANCELLABLE, WAITED_SHIFT};
use atropos::region::owner::ProcessId;
use atropos::region::tasks::index_of;
use atropos::region::Region;
use std::cell::RefCell;
use std::sync::Once;

/// The model's time 0 on the region's clock: a clock that reads 0 would mean "not yet".
const EPOCH_NS: u64 = 1000 * SECOND;
/// The region's numbers for the controller's states.
const SUSPECTED: u32 = 2;
const OVERLOAD: u32 = 3;

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

/// What a host says of a session that waits for the log, and holds its locks meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Commits {
    /// That it waits, and for nobody.
    Wait,
    /// That nothing can cancel it just now.
    Uncancellable,
    Untold,
}

struct RegionTap<'a> {
    region: &'a Region,
    commits: Commits,
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

    fn commit(&mut self, session: usize, waits: bool) {
        match self.commits {
            Commits::Wait if waits => self.wait(session, Res::Log, 0),
            Commits::Wait => self.abandon(session, Res::Log),
            Commits::Uncancellable => self.slot(session).set_flag(FLAG_UNCANCELLABLE, waits),
            Commits::Untold => {}
        }
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
    /// Cancelled tasks that asked to run again, and for how long those that may have waited, ns.
    pub asked: usize,
    pub waited_ns: Vec<u64>,
}

/// What the library is told beside the host itself.
#[derive(Clone, Debug)]
pub struct Terms {
    pub config: Config,
    pub progress: Progress,
    /// The host answers who blocks whom (else it is inferred from what is held).
    pub edges: bool,
    pub commits: Commits,
    pub seed: u64,
}

/// Runs `host` to `end_ns` under the controller. `look` sees the host at every tick, before anything is done about the
/// sessions told to stop in it.
pub fn run(
    host: &mut Host,
    end_ns: u64,
    terms: &Terms,
    ablation: Ablation,
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
        (Res::Log, "log", ResourceKind::Lock),
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
    let mut tap = RegionTap { region: &region, commits: terms.commits, handles: handles.collect() };
    // Once: other threads' controllers ask at any time.
    static SET: Once = Once::new();
    SET.call_once(|| EDGES.set(edges_now as *const () as usize, std::ptr::null_mut(), 0));
    let mut controller = Controller::new(me, &config);
    let mut less = Less { ablation, last_cancel_ns: None };
    let teller = Teller::new(terms, host.sessions());
    let mut acts = Acts::default();
    let mut told = vec![0u64; host.sessions()];
    // Cancelled tasks that wait to run again, and since when.
    let mut asking: Vec<(usize, u64)> = Vec::new();
    while host.now_ns < end_ns {
        let pause_ns = controller.pause().as_nanos() as u64;
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
        // The library asks for them only then.
        let watched = h.controller_state.load(Relaxed) >= SUSPECTED;
        let edges = if terms.edges && watched { edges_of(host, &tap.handles) } else { Vec::new() };
        EDGES_NOW.set(edges);
        controller.tick_changed(&region, None, &mut less);
        acts.overload |= h.controller_state.load(Relaxed) == OVERLOAD;
        acts.slo_ns = h.slo_ns.load(Relaxed).max(acts.slo_ns);
        let first = acts.cancels.len();
        for (s, told) in told.iter_mut().enumerate() {
            let slot = tap.slot(s);
            let scope = slot.mailbox.scope.load(Acquire);
            if scope != 0 && scope != *told && scope == slot.scope.load(Relaxed) {
                *told = scope;
                let reason = slot.standing_request(&h.lease).map_or(String::new(), |r| r.reason);
                let p99_ns = h.p99_ns.load(Relaxed);
                acts.cancels.push(Cancel { at_ns: host.now_ns, session: s, reason, p99_ns });
            }
        }
        look(host, &acts.cancels[first..]);
        for cancel in &acts.cancels[first..] {
            host.cancel(cancel.session);
        }
        let asks = std::mem::take(&mut host.undone);
        acts.asked += asks.len();
        asking.extend(asks.into_iter().map(|s| (s, host.now_ns)));
        asking.retain(|&(s, since_ns)| match region.poll_retry(me, tap.handles[s], 0) {
            Ok(Answer::Later) => true,
            Ok(Answer::Run) => {
                acts.waited_ns.push(host.now_ns - since_ns);
                host.run_again(s);
                false
            }
            Err(_) => false,
        });
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

/// The library's loop with that idea taken away.
struct Less {
    ablation: Ablation,
    last_cancel_ns: Option<u64>,
}

impl Change for Less {
    fn window(&mut self, window: &mut Window) {
        if self.ablation == Ablation::NoInFlightAge {
            window.classes.iter_mut().for_each(|c| c.in_flight_age_ns.clear());
        }
    }

    /// The model's sessions are no threads of the kernel's.
    fn thread(&mut self, _pid: u32, _tid: u32) -> Option<ThreadState> {
        None
    }

    fn evidence(&mut self, window: &mut Window) {
        if self.ablation == Ablation::NoInstances {
            forget_instances(window);
        }
    }

    fn estimate(&mut self, estimate: &mut Estimate) {
        match self.ablation {
            Ablation::OneResource => {
                let top = estimate.resources.iter().map(|r| r.level).fold(0.0, f64::max);
                estimate.resources.iter_mut().filter(|r| r.level < top).for_each(|r| r.level = 0.0);
            }
            Ablation::CurrentUsage => {
                let uses = estimate.candidates.iter_mut().flat_map(|c| &mut c.uses);
                uses.for_each(|u| (u.gain, u.gain_ns) = (u.usage as f64, u.usage_ns as f64));
            }
            _ => {}
        }
    }

    fn choice(&mut self, choice: &mut Choice, now_ns: u64) {
        if self.ablation != Ablation::FixedPause {
            return;
        }
        let pauses = self.last_cancel_ns.is_some_and(|last| now_ns < last + 10 * SECOND);
        choice.picks.truncate(if pauses { 0 } else { 1 });
        self.last_cancel_ns = if choice.picks.is_empty() { self.last_cancel_ns } else { Some(now_ns) };
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
