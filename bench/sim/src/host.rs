//! The modelled host: sessions that run requests on processors, behind table locks, a buffer pool and a queue of
//! workers, as a discrete-event simulation. It knows nothing of the controller: whoever wants to know what happens
//! gives it a [`Tap`], as a real server gives its library the tracepoints.
//!
//! A `Host` can be copied at any moment, its future included; that is how the judge finds out what would have happened
//! without some task. Requests that arrive draw all their numbers from one stream that nothing else uses, so that two
//! copies see the same arrivals whatever else differs.

use crate::rng::{exponential, log_normal, whole, Rng};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;

pub const MS: u64 = 1_000_000;
pub const SECOND: u64 = 1_000_000_000;
/// Arrivals are counted in buckets of this length.
pub const BUCKET_NS: u64 = 50 * MS;
/// A task that fills the pool takes its pages in pieces this far apart.
const SCAN_STEP_NS: u64 = 10 * MS;

/// What the library is told about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Res {
    Lock = 1,
    Pool = 2,
    Workers = 3,
    Log = 4,
}

/// The tracepoints of the model. `session` is a number from 0.
pub trait Tap {
    fn at(&mut self, _now_ns: u64) {}
    /// A request begins, or was seen only now after it had waited for a worker for `waited_ns`.
    fn begin(&mut self, _session: usize, _class: u16, _waited_ns: u64) {}
    fn end(&mut self, _session: usize, _ok: bool) {}
    fn wait(&mut self, _session: usize, _res: Res, _instance: u64) {}
    fn abandon(&mut self, _session: usize, _res: Res) {}
    fn acquire(&mut self, _session: usize, _res: Res, _instance: u64, _amount: u64) {}
    fn release(&mut self, _session: usize, _res: Res, _instance: u64, _amount: u64) {}
    fn evicted(&mut self, _session: usize, _amount: u64) {}
    /// A unit of work (a transaction) begins or is over.
    fn work(&mut self, _session: usize, _on: bool) {}
    /// It begins or ends to wait for the log.
    fn commit(&mut self, _session: usize, _waits: bool) {}
    /// A cancel has been noticed.
    fn acknowledge(&mut self, _session: usize) {}
}

/// Nobody listens.
pub struct NoTap;
impl Tap for NoTap {}

/// How the rate of arrivals changes over time; factors multiply.
#[derive(Clone, Copy, Debug)]
pub enum Shape {
    /// From 1 to `factor` between two times, and on.
    Ramp { from_ns: u64, to_ns: u64, factor: f64 },
    /// `factor` between two times.
    Surge { from_ns: u64, to_ns: u64, factor: f64 },
    /// `factor` for `length_ns` in every period.
    Bursts { period_ns: u64, length_ns: u64, factor: f64 },
    /// A sine around 1.
    Wave { period_ns: u64, amplitude: f64 },
}

impl Shape {
    fn factor(&self, now_ns: u64) -> f64 {
        match *self {
            Shape::Ramp { from_ns, to_ns, factor } => {
                let part = now_ns.saturating_sub(from_ns) as f64 / (to_ns - from_ns) as f64;
                1.0 + (factor - 1.0) * part.min(1.0)
            }
            Shape::Surge { from_ns, to_ns, factor } if (from_ns..to_ns).contains(&now_ns) => factor,
            Shape::Bursts { period_ns, length_ns, factor } if now_ns % period_ns < length_ns => factor,
            Shape::Wave { period_ns, amplitude } => {
                1.0 + amplitude * (now_ns as f64 / period_ns as f64 * std::f64::consts::TAU).sin()
            }
            _ => 1.0,
        }
    }

    fn peak(&self) -> f64 {
        match *self {
            Shape::Ramp { factor, .. } | Shape::Surge { factor, .. } | Shape::Bursts { factor, .. } => factor.max(1.0),
            Shape::Wave { amplitude, .. } => 1.0 + amplitude,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct PoolSpec {
    pub capacity: u64,
    /// Pages that ordinary requests use, all alike.
    pub hot: u64,
    /// Pages one ordinary request needs.
    pub touch: u32,
    /// Time to read a page, with at most `disks` requests reading.
    pub io_ns: u64,
    pub disks: u32,
}

/// A class of ordinary requests.
#[derive(Clone, Copy, Debug)]
pub struct ClassSpec {
    pub share: f64,
    /// Mean processor time, and its log-normal deviation.
    pub cpu_ns: f64,
    pub sigma: f64,
    /// Mean of an exponential delay that needs no processor.
    pub delay_ns: f64,
    /// Later than this is late: set by [`crate::scenario`] from a clean run.
    pub late_ns: u64,
}

/// How a table is locked. Reading and writing rows are compatible with each other; locks on rows are not modelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    ReadRows,
    WriteRows,
    /// Nobody may write meanwhile (a backup, a report that wants to see one state).
    ReadAll,
    Exclusive,
}

impl Mode {
    fn conflicts(self, other: Mode) -> bool {
        use Mode::*;
        match (self, other) {
            (Exclusive, _) | (_, Exclusive) => true,
            (ReadAll, WriteRows) | (WriteRows, ReadAll) => true,
            (ReadRows | WriteRows, _) | (ReadAll, ReadRows | ReadAll) => false,
        }
    }
}

/// What a long task does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Act {
    /// Holds a table for its whole duration.
    Lock { table: u32, mode: Mode },
    /// Wants a table for itself for `work_ns`.
    Alter { table: u32, work_ns: u64 },
    /// Takes a table, ends its request and leaves the transaction open.
    Idle { table: u32, mode: Mode },
    /// Holds table `own` and then wants `other`.
    Middle { own: u32, other: u32 },
    /// Pins `pages` of the pool within `fill_ns`.
    Pool { pages: u64, fill_ns: u64 },
    /// Goes through the queue of workers and occupies one.
    Worker,
    /// Uses a processor.
    Cpu,
    /// Runs beside all others and takes nothing from them.
    Harmless,
}

#[derive(Clone, Copy, Debug)]
pub struct LongTask {
    pub act: Act,
    pub start_ns: u64,
    pub duration_ns: u64,
    /// It needs a processor all the time (else it waits for a disk).
    pub busy: bool,
    pub class: u16,
    /// From being told to its noticing.
    pub reaction_ns: u64,
    /// Time to undo, as a part of the time it has run.
    pub undo: f64,
    /// How often its client sends it again after a cancel.
    pub resubmits: u32,
    /// Instead the host itself runs it again, once, when it is told that it may: see [`Host::undone`].
    pub again: bool,
}

#[derive(Clone, Debug)]
pub struct Spec {
    pub seed: u64,
    pub cores: f64,
    /// Sessions for ordinary requests; an arrival that finds none is turned away.
    pub sessions: usize,
    /// Workers; 0 = a session needs none.
    pub workers: usize,
    /// Requests that wait for a worker are no tasks yet (a kernel's backlog).
    pub hidden_backlog: bool,
    pub tables: u32,
    /// Part of the requests that use table 0; the rest is spread evenly.
    pub hot_share: f64,
    /// Part of the requests that write, and how they lock their table; the others read rows.
    pub write_share: f64,
    pub write_mode: Mode,
    pub classes: Vec<ClassSpec>,
    pub pool: Option<PoolSpec>,
    pub rate_per_s: f64,
    pub shapes: Vec<Shape>,
    /// Ordinary requests need this many times as long between two times.
    pub slow: Option<(u64, u64, f64)>,
    /// From, to: nobody who has written can commit meanwhile.
    pub log_stalls: Vec<(u64, u64)>,
    /// Clients give up after this and send again, at most twice; 0 = never.
    pub timeout_ns: u64,
    pub long: Vec<LongTask>,
}

impl Spec {
    /// Does a long task share a table with another, or with one that wants it for itself?
    pub fn shared_locks(&self) -> bool {
        let table = |l: &LongTask| match l.act {
            Act::Lock { table, .. } | Act::Alter { table, .. } | Act::Idle { table, .. } => vec![table],
            Act::Middle { own, other } => vec![own, other],
            _ => Vec::new(),
        };
        let shares = |l: &LongTask| matches!(l.act, Act::Lock { mode: Mode::ReadRows | Mode::ReadAll, .. });
        (0..self.long.len()).any(|i| {
            let (mine, others) = (table(&self.long[i]), self.long.iter().enumerate().filter(|(k, _)| *k != i));
            shares(&self.long[i]) && others.flat_map(|(_, l)| table(l)).any(|t| mine.contains(&t))
        })
    }
}

/// Steps of an ordinary request, at most.
const SCRIPT: usize = 7;

#[derive(Clone, Copy, Debug)]
enum Step {
    Worker,
    Cpu(f64),
    Delay(u64),
    Lock(u32, Mode),
    Touch(u32),
    /// Waits for the log, where that stands still.
    Commit,
    Scan {
        pages: u64,
        fill_ns: u64,
    },
    EndRequest,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Doing {
    #[default]
    Nothing,
    Cpu {
        from: f64,
        to: f64,
    },
    Timer {
        from_ns: u64,
        to_ns: u64,
    },
    Reading(u32),
    WaitLock(u32),
    WaitWorker,
    Undo,
}

#[derive(Clone, Debug, Default)]
struct Session {
    script: Vec<Step>,
    at: usize,
    doing: Doing,
    /// Raised whenever what it does ends; events that name an older one are void.
    epoch: u32,
    /// Raised with every request.
    request: u32,
    busy: bool,
    in_request: bool,
    arrived_ns: u64,
    class: u16,
    attempts: u8,
    locks: Vec<u32>,
    pages: u64,
    scanned: u64,
    worker: bool,
    /// Its cancel has been noticed.
    stopping: bool,
    /// When it got what it monopolises; 0 = not yet.
    active_ns: u64,
    /// Times it was sent (long tasks).
    sent: u32,
    /// It ran to its end after it had been cancelled.
    made_good: bool,
}

#[derive(Clone, Debug, Default)]
struct Lock {
    holders: Vec<(usize, Mode)>,
    queue: VecDeque<(usize, Mode)>,
}

impl Lock {
    /// May a request in this mode pass, if it stands behind the first `ahead` of the queue? Nobody overtakes those whom
    /// it would keep waiting.
    fn admits(&self, mode: Mode, ahead: usize) -> bool {
        let free = |&(_, other): &(usize, Mode)| !mode.conflicts(other);
        self.holders.iter().all(free) && self.queue.iter().take(ahead).all(free)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Retry { attempts: u8 },
    Timer { session: u32, epoch: u32 },
    Timeout { session: u32, request: u32 },
    React { session: u32, request: u32 },
    Long { index: u32 },
}

/// What an ordinary request will be, each evenly in 0..1. They are thrown for every request, so that all copies of a host throw
/// the same; what they mean is worked out only for those that are taken.
struct Dice {
    class: f64,
    cpu: (f64, f64),
    delay: f64,
    hot: f64,
    table: f64,
    write: f64,
}

impl Dice {
    fn throw(rng: &mut Rng) -> Dice {
        Dice {
            class: rng.unit(),
            cpu: (rng.unit(), rng.unit()),
            delay: rng.unit(),
            hot: rng.unit(),
            table: rng.unit(),
            write: rng.unit(),
        }
    }
}

/// `ceil` for what is at most 2^53, 0 below it: a call of the library's for each event is dear.
fn rounded_up(x: f64) -> u64 {
    let whole = x as u64;
    whole + ((whole as f64) < x) as u64
}

/// Who waits for whom, as the host itself would answer.
#[derive(Clone, Copy, Debug)]
pub struct WhoBlocks {
    pub waiter: usize,
    pub blocker: usize,
    pub holds: bool,
    pub table: u32,
}

#[derive(Clone)]
pub struct Host {
    pub spec: Arc<Spec>,
    pub now_ns: u64,
    sessions: Vec<Session>,
    free: Vec<usize>,
    locks: Vec<Lock>,
    worker_queue: VecDeque<usize>,
    workers_free: usize,
    cached_hot: u64,
    cold: u64,
    reading: u32,
    /// Processor sharing: service each running task has had since the beginning.
    service: f64,
    running: usize,
    cpu: BinaryHeap<Reverse<(u64, u32, u32)>>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    /// The next arrival (time, sequence): there is always just one, which need not wait in the heap.
    arrival: (u64, u64),
    sequence: u64,
    ready: VecDeque<usize>,
    arrivals: Rng,
    other: Rng,
    peak_per_s: f64,
    /// No long task begins any more (in a counterfactual).
    closed: bool,
    /// (arrived, late) by time of arrival.
    buckets: Vec<(u32, u32)>,
    /// Work thrown away by cancels, ns.
    pub lost_ns: u64,
    /// Cancelled long tasks whose work is undone and which the host would run again, by session.
    pub undone: Vec<usize>,
    /// Latencies by class, where somebody wants them.
    pub latencies: Option<Vec<Vec<u64>>>,
}

impl Host {
    pub fn new(spec: Arc<Spec>) -> Host {
        let total = spec.sessions + spec.long.len();
        let pool = spec.pool.unwrap_or(PoolSpec { capacity: 0, hot: 0, touch: 0, io_ns: 0, disks: 1 });
        let peak_per_s = spec.rate_per_s * spec.shapes.iter().map(Shape::peak).product::<f64>();
        let mut host = Host {
            now_ns: 0,
            sessions: vec![Session::default(); total],
            free: (0..spec.sessions).rev().collect(),
            locks: vec![Lock::default(); spec.tables as usize],
            worker_queue: VecDeque::new(),
            workers_free: spec.workers,
            cached_hot: pool.hot,
            cold: pool.capacity - pool.hot,
            reading: 0,
            service: 0.0,
            running: 0,
            cpu: BinaryHeap::new(),
            events: BinaryHeap::new(),
            arrival: (0, 0),
            sequence: 0,
            ready: VecDeque::new(),
            arrivals: Rng::new(spec.seed ^ 0xa11),
            other: Rng::new(spec.seed ^ 0x07e),
            peak_per_s,
            closed: false,
            buckets: Vec::new(),
            lost_ns: 0,
            undone: Vec::new(),
            latencies: None,
            spec,
        };
        host.next_arrival();
        for (index, long) in host.spec.clone().long.iter().enumerate() {
            host.post(long.start_ns, Event::Long { index: index as u32 });
        }
        host
    }

    pub fn sessions(&self) -> usize {
        self.sessions.len()
    }

    /// The session of a long task.
    pub fn session_of(&self, long: usize) -> usize {
        self.spec.sessions + long
    }

    fn post(&mut self, at_ns: u64, event: Event) {
        self.sequence += 1;
        self.events.push(Reverse((at_ns, self.sequence, event)));
    }

    fn next_arrival(&mut self) {
        let gap = self.arrivals.exponential(1e9 / self.peak_per_s);
        self.sequence += 1;
        self.arrival = (self.now_ns + gap as u64, self.sequence);
    }

    /// Runs up to and including `until_ns`.
    pub fn run<T: Tap>(&mut self, until_ns: u64, tap: &mut T) {
        loop {
            // First: taking a task out may have set others free.
            while let Some(s) = self.ready.pop_front() {
                self.advance(s, tap);
            }
            while let Some(&Reverse((_, s, epoch))) = self.cpu.peek() {
                if self.sessions[s as usize].epoch == epoch {
                    break;
                }
                self.cpu.pop();
            }
            let speed = self.speed();
            let done_ns = self.cpu.peek().map_or(u64::MAX, |&Reverse((to, ..))| {
                let service = f64::from_bits(to) - self.service;
                self.now_ns + rounded_up(if speed == 1.0 { service } else { service / speed })
            });
            let event = self.events.peek().map_or((u64::MAX, u64::MAX), |&Reverse((at, sequence, _))| (at, sequence));
            let event_ns = event.0.min(self.arrival.0);
            let at_ns = done_ns.min(event_ns);
            if at_ns > until_ns {
                self.pass(until_ns, speed);
                tap.at(until_ns);
                return;
            }
            self.pass(at_ns, speed);
            tap.at(at_ns);
            if done_ns <= event_ns {
                if let Some(Reverse((to, s, _))) = self.cpu.pop() {
                    self.service = self.service.max(f64::from_bits(to));
                    self.leave(s as usize);
                    self.step_on(s as usize);
                }
            } else if self.arrival < event {
                self.arrive_if_due(tap);
            } else if let Some(Reverse((_, _, event))) = self.events.pop() {
                self.handle(event, tap);
            }
        }
    }

    fn speed(&self) -> f64 {
        let running = self.running as f64;
        if running <= self.spec.cores {
            1.0
        } else {
            self.spec.cores / running
        }
    }

    /// Those who run do so at `speed` until then.
    fn pass(&mut self, to_ns: u64, speed: f64) {
        self.service += (to_ns - self.now_ns) as f64 * speed;
        self.now_ns = to_ns;
    }

    /// Ends what session `s` does.
    fn leave(&mut self, s: usize) {
        let session = &mut self.sessions[s];
        session.epoch = session.epoch.wrapping_add(1);
        match std::mem::take(&mut session.doing) {
            Doing::Cpu { .. } => self.running -= 1,
            Doing::Reading(_) => self.reading -= 1,
            _ => {}
        }
    }

    fn step_on(&mut self, s: usize) {
        self.sessions[s].at += 1;
        self.ready.push_back(s);
    }

    /// Requests come at the peak's rate, and of them so many are taken as are due now.
    fn arrive_if_due<T: Tap>(&mut self, tap: &mut T) {
        self.next_arrival();
        let spec = &*self.spec;
        let rate = spec.rate_per_s * spec.shapes.iter().map(|s| s.factor(self.now_ns)).product::<f64>();
        let dice = Dice::throw(&mut self.arrivals);
        if self.arrivals.chance(rate / self.peak_per_s) {
            let script = Host::ordinary(spec, &dice, self.now_ns);
            self.arrive(script, 0, tap);
        }
    }

    fn handle<T: Tap>(&mut self, event: Event, tap: &mut T) {
        match event {
            Event::Retry { attempts } => {
                let script = Host::ordinary(&self.spec, &Dice::throw(&mut self.other), self.now_ns);
                self.arrive(script, attempts, tap);
            }
            Event::Timer { session, epoch } => self.timer(session as usize, epoch, tap),
            Event::Timeout { session, request } => {
                let s = session as usize;
                let session = &self.sessions[s];
                if session.busy && session.request == request && session.doing != Doing::Undo {
                    let attempts = session.attempts;
                    self.stop(s, tap);
                    self.finish(s, false, tap);
                    if attempts < 2 {
                        self.post(self.now_ns + 10 * MS, Event::Retry { attempts: attempts + 1 });
                    }
                }
            }
            Event::React { session, request } => self.react(session as usize, request, tap),
            Event::Long { index } if !self.closed => self.begin_long(index as usize, tap),
            Event::Long { .. } => {}
        }
    }

    fn ordinary(spec: &Spec, dice: &Dice, now_ns: u64) -> (u16, [Option<Step>; SCRIPT]) {
        let mut class = 0;
        let mut u = dice.class;
        while class + 1 < spec.classes.len() && u >= spec.classes[class].share {
            u -= spec.classes[class].share;
            class += 1;
        }
        let c = &spec.classes[class];
        let slow = spec.slow.filter(|s| (s.0..s.1).contains(&now_ns)).map_or(1.0, |s| s.2);
        let cpu = log_normal(c.cpu_ns, c.sigma, dice.cpu) * slow;
        let delay = exponential(1.0, dice.delay) * c.delay_ns * slow;
        let table = if dice.hot < spec.hot_share { 0 } else { whole(0, spec.tables as u64 - 1, dice.table) as u32 };
        let write = dice.write < spec.write_share;
        let script = [
            (spec.workers > 0).then_some(Step::Worker),
            Some(Step::Cpu(cpu * 0.3)),
            Some(Step::Lock(table, if write { spec.write_mode } else { Mode::ReadRows })),
            spec.pool.map(|p| Step::Touch(p.touch)),
            Some(Step::Cpu(cpu * 0.7)),
            (delay >= 1.0).then_some(Step::Delay(delay as u64)),
            (write && !spec.log_stalls.is_empty()).then_some(Step::Commit),
        ];
        (class as u16, script)
    }

    fn bucket(&mut self, arrived_ns: u64) -> &mut (u32, u32) {
        let index = (arrived_ns / BUCKET_NS) as usize;
        if self.buckets.len() <= index {
            self.buckets.resize(index + 1, (0, 0));
        }
        &mut self.buckets[index]
    }

    fn arrive<T: Tap>(&mut self, (class, script): (u16, [Option<Step>; SCRIPT]), attempts: u8, tap: &mut T) {
        let now_ns = self.now_ns;
        self.bucket(now_ns).0 += 1;
        let Some(s) = self.free.pop() else {
            self.bucket(now_ns).1 += 1;
            return;
        };
        let session = &mut self.sessions[s];
        session.script.clear();
        session.script.extend(script.into_iter().flatten());
        session.attempts = attempts;
        self.open(s, class, tap);
        if self.spec.timeout_ns > 0 {
            let request = self.sessions[s].request;
            self.post(now_ns + self.spec.timeout_ns, Event::Timeout { session: s as u32, request });
        }
    }

    fn open<T: Tap>(&mut self, s: usize, class: u16, tap: &mut T) {
        let hidden = self.spec.hidden_backlog && matches!(self.sessions[s].script[0], Step::Worker);
        let session = &mut self.sessions[s];
        session.at = 0;
        session.busy = true;
        session.stopping = false;
        session.request = session.request.wrapping_add(1);
        session.arrived_ns = self.now_ns;
        session.class = class;
        session.active_ns = 0;
        session.scanned = 0;
        session.in_request = !hidden;
        if !hidden {
            tap.begin(s, class, 0);
        }
        self.ready.push_back(s);
    }

    fn begin_long<T: Tap>(&mut self, index: usize, tap: &mut T) {
        let (s, long) = (self.session_of(index), self.spec.long[index]);
        let main = if long.busy { Step::Cpu(long.duration_ns as f64) } else { Step::Delay(long.duration_ns) };
        let script = match long.act {
            Act::Lock { table, mode } => vec![Step::Lock(table, mode), main],
            Act::Alter { table, work_ns } => vec![Step::Lock(table, Mode::Exclusive), Step::Cpu(work_ns as f64)],
            Act::Idle { table, mode } => {
                vec![Step::Lock(table, mode), Step::Cpu(1e6), Step::EndRequest, Step::Delay(long.duration_ns)]
            }
            Act::Middle { own, other } => {
                let (own, other) = (Step::Lock(own, Mode::Exclusive), Step::Lock(other, Mode::Exclusive));
                vec![own, Step::Delay(50 * MS), other, Step::Cpu(5e6)]
            }
            Act::Pool { pages, fill_ns } => vec![Step::Scan { pages, fill_ns }, main],
            Act::Worker => vec![Step::Worker, main],
            Act::Cpu => vec![Step::Cpu(long.duration_ns as f64)],
            Act::Harmless => vec![main],
        };
        let session = &mut self.sessions[s];
        session.script = script;
        session.sent += 1;
        self.open(s, long.class, tap);
        if self.sessions[s].in_request && !matches!(long.act, Act::Worker | Act::Cpu | Act::Pool { .. }) {
            tap.work(s, true);
        }
    }

    fn sleep(&mut self, s: usize, ns: u64) {
        let to_ns = self.now_ns + ns;
        self.sessions[s].doing = Doing::Timer { from_ns: self.now_ns, to_ns };
        let epoch = self.sessions[s].epoch;
        self.post(to_ns, Event::Timer { session: s as u32, epoch });
    }

    /// Goes on with session `s` until it has to wait for something.
    fn advance<T: Tap>(&mut self, s: usize, tap: &mut T) {
        if !self.sessions[s].busy || self.sessions[s].doing != Doing::Nothing {
            return;
        }
        let Some(&step) = self.sessions[s].script.get(self.sessions[s].at) else {
            return self.finish(s, true, tap);
        };
        match step {
            Step::Worker if self.workers_free > 0 => {
                self.workers_free -= 1;
                self.got_worker(s, tap);
            }
            Step::Worker => {
                self.sessions[s].doing = Doing::WaitWorker;
                self.worker_queue.push_back(s);
                if self.sessions[s].in_request {
                    tap.wait(s, Res::Workers, 0);
                }
            }
            Step::Cpu(ns) => {
                let session = &mut self.sessions[s];
                let to = self.service + ns;
                session.doing = Doing::Cpu { from: self.service, to };
                session.active_ns = if session.active_ns == 0 { self.now_ns } else { session.active_ns };
                self.cpu.push(Reverse((to.to_bits(), s as u32, session.epoch)));
                self.running += 1;
            }
            Step::Delay(ns) => {
                if self.sessions[s].active_ns == 0 {
                    self.sessions[s].active_ns = self.now_ns;
                }
                self.sleep(s, ns);
            }
            Step::Commit => match self.spec.log_stalls.iter().find(|s| (s.0..s.1).contains(&self.now_ns)) {
                Some(stall) => {
                    tap.commit(s, true);
                    self.sleep(s, stall.1 - self.now_ns);
                }
                None => self.step_on(s),
            },
            Step::Lock(table, mode) => {
                let lock = &mut self.locks[table as usize];
                if lock.admits(mode, lock.queue.len()) {
                    self.got_lock(s, table, mode, tap);
                } else {
                    lock.queue.push_back((s, mode));
                    self.sessions[s].doing = Doing::WaitLock(table);
                    tap.wait(s, Res::Lock, table as u64 + 1);
                }
            }
            Step::Touch(pages) => self.touch(s, pages, tap),
            Step::Scan { .. } => {
                self.sessions[s].active_ns = self.now_ns;
                self.sleep(s, SCAN_STEP_NS);
            }
            Step::EndRequest => {
                self.sessions[s].in_request = false;
                tap.end(s, true);
                self.step_on(s);
            }
        }
    }

    fn got_worker<T: Tap>(&mut self, s: usize, tap: &mut T) {
        self.leave(s);
        let session = &mut self.sessions[s];
        session.worker = true;
        if !std::mem::replace(&mut session.in_request, true) {
            tap.begin(s, session.class, self.now_ns - session.arrived_ns);
        }
        tap.acquire(s, Res::Workers, 0, 1);
        self.step_on(s);
    }

    fn got_lock<T: Tap>(&mut self, s: usize, table: u32, mode: Mode, tap: &mut T) {
        self.leave(s);
        self.locks[table as usize].holders.push((s, mode));
        let session = &mut self.sessions[s];
        session.locks.push(table);
        session.active_ns = if session.active_ns == 0 { self.now_ns } else { session.active_ns };
        tap.acquire(s, Res::Lock, table as u64 + 1, 1);
        self.step_on(s);
    }

    fn admit<T: Tap>(&mut self, table: u32, tap: &mut T) {
        let mut i = 0;
        while let Some(&(s, mode)) = self.locks[table as usize].queue.get(i) {
            if self.locks[table as usize].admits(mode, i) {
                self.locks[table as usize].queue.remove(i);
                self.got_lock(s, table, mode, tap);
            } else if mode == Mode::Exclusive {
                return; // nobody passes it
            } else {
                i += 1;
            }
        }
    }

    /// Takes up to `n` pages, those first that nobody needs; pinned ones cannot be taken.
    fn take_pages(&mut self, n: u64) -> u64 {
        let cold = n.min(self.cold);
        let hot = (n - cold).min(self.cached_hot);
        self.cold -= cold;
        self.cached_hot -= hot;
        cold + hot
    }

    fn touch<T: Tap>(&mut self, s: usize, pages: u32, tap: &mut T) {
        let Some(pool) = self.spec.pool else { return self.step_on(s) };
        let hit = self.cached_hot as f64 / pool.hot as f64;
        let misses = if hit >= 1.0 { 0 } else { (0..pages).filter(|_| self.other.unit() >= hit).count() as u32 };
        if misses == 0 {
            self.sessions[s].pages += pages as u64;
            tap.acquire(s, Res::Pool, 0, pages as u64);
            return self.step_on(s);
        }
        tap.wait(s, Res::Pool, 0);
        self.reading += 1;
        let crowd = (self.reading as f64 / pool.disks as f64).max(1.0);
        self.sleep(s, (misses as f64 * pool.io_ns as f64 * crowd) as u64);
        self.sessions[s].doing = Doing::Reading(misses);
    }

    fn timer<T: Tap>(&mut self, s: usize, epoch: u32, tap: &mut T) {
        if self.sessions[s].epoch != epoch {
            return;
        }
        let doing = self.sessions[s].doing;
        self.leave(s);
        match (doing, self.sessions[s].script.get(self.sessions[s].at).copied()) {
            (Doing::Undo, _) => self.finish(s, false, tap),
            (Doing::Reading(misses), Some(Step::Touch(pages))) => {
                let pool = self.spec.pool.expect("only with a pool");
                let taken = self.take_pages(misses as u64);
                // Two may have read the same page: then one frame is left over.
                let wanted = taken.min(pool.hot - self.cached_hot);
                self.cached_hot += wanted;
                self.cold += taken - wanted;
                self.sessions[s].pages += pages as u64;
                tap.acquire(s, Res::Pool, 0, pages as u64);
                tap.evicted(s, misses as u64);
                self.step_on(s);
            }
            (_, Some(Step::Scan { pages, fill_ns })) => {
                let session = &self.sessions[s];
                let piece = (pages * SCAN_STEP_NS / fill_ns.max(SCAN_STEP_NS)).max(1).min(pages - session.scanned);
                let piece = self.take_pages(piece);
                let session = &mut self.sessions[s];
                session.scanned += piece;
                session.pages += piece;
                if piece > 0 {
                    tap.acquire(s, Res::Pool, 0, piece);
                    tap.evicted(s, piece);
                }
                if session.scanned >= pages || piece == 0 {
                    self.step_on(s);
                } else {
                    self.sleep(s, SCAN_STEP_NS);
                }
            }
            _ => self.step_on(s),
        }
    }

    /// Takes session `s` out of whatever it does or waits for; it keeps what it holds.
    fn stop<T: Tap>(&mut self, s: usize, tap: &mut T) {
        let doing = self.sessions[s].doing;
        self.leave(s);
        match doing {
            Doing::WaitLock(table) => {
                self.locks[table as usize].queue.retain(|w| w.0 != s);
                tap.abandon(s, Res::Lock);
                self.admit(table, tap);
            }
            Doing::WaitWorker => {
                self.worker_queue.retain(|&w| w != s);
                if self.sessions[s].in_request {
                    tap.abandon(s, Res::Workers);
                }
            }
            Doing::Reading(_) => tap.abandon(s, Res::Pool),
            _ => {}
        }
    }

    /// The request (or transaction) is over; everything it holds comes back.
    fn finish<T: Tap>(&mut self, s: usize, ok: bool, tap: &mut T) {
        self.leave(s);
        if !self.spec.log_stalls.is_empty() {
            tap.commit(s, false);
        }
        self.sessions[s].busy = false;
        let locks = std::mem::take(&mut self.sessions[s].locks);
        for &table in &locks {
            self.locks[table as usize].holders.retain(|h| h.0 != s);
            tap.release(s, Res::Lock, table as u64 + 1, 1);
        }
        let pages = std::mem::take(&mut self.sessions[s].pages);
        if pages > 0 {
            tap.release(s, Res::Pool, 0, pages);
            self.cold += std::mem::take(&mut self.sessions[s].scanned);
        }
        let worker = std::mem::take(&mut self.sessions[s].worker);
        if worker {
            tap.release(s, Res::Workers, 0, 1);
        }
        tap.work(s, false);
        if std::mem::take(&mut self.sessions[s].in_request) {
            tap.end(s, ok);
        }
        for &table in &locks {
            self.admit(table, tap);
        }
        // The list's room, for the session's next request.
        self.sessions[s].locks = locks;
        self.sessions[s].locks.clear();
        if worker {
            match self.worker_queue.pop_front() {
                Some(next) => self.got_worker(next, tap),
                None => self.workers_free += 1,
            }
        }
        let session = &self.sessions[s];
        if s >= self.spec.sessions {
            let index = s - self.spec.sessions;
            let long = self.spec.long[index];
            if session.stopping && session.sent <= long.resubmits {
                self.post(self.now_ns + 500 * MS, Event::Long { index: index as u32 });
            } else if session.stopping && session.sent == 1 && long.again {
                self.undone.push(s);
            }
            self.sessions[s].made_good = ok && self.sessions[s].sent > 1;
            return;
        }
        let (arrived_ns, class) = (session.arrived_ns, session.class as usize);
        let latency_ns = self.now_ns - arrived_ns;
        if !ok || latency_ns > self.spec.classes[class].late_ns {
            self.bucket(arrived_ns).1 += 1;
        }
        if let Some(latencies) = &mut self.latencies {
            latencies[class].push(latency_ns);
        }
        self.free.push(s);
    }

    // What the controller and the judge do.

    /// Runs a cancelled long task again.
    pub fn run_again(&mut self, s: usize) {
        self.post(self.now_ns, Event::Long { index: (s - self.spec.sessions) as u32 });
    }

    /// Long tasks that were cancelled and have run to their end since.
    pub fn made_good(&self) -> usize {
        self.sessions.iter().filter(|s| s.made_good).count()
    }

    /// Session `s` was told to stop: it notices after its reaction time.
    pub fn cancel(&mut self, s: usize) {
        let reaction_ns = s.checked_sub(self.spec.sessions).map_or(5 * MS, |i| self.spec.long[i].reaction_ns);
        let request = self.sessions[s].request;
        self.post(self.now_ns + reaction_ns, Event::React { session: s as u32, request });
    }

    fn react<T: Tap>(&mut self, s: usize, request: u32, tap: &mut T) {
        let session = &mut self.sessions[s];
        if !session.busy || session.request != request || std::mem::replace(&mut session.stopping, true) {
            return;
        }
        let ran_ns = self.now_ns - session.arrived_ns;
        let undo = s.checked_sub(self.spec.sessions).map_or(0.0, |i| self.spec.long[i].undo);
        let undo_ns = (ran_ns as f64 * undo) as u64;
        self.lost_ns += ran_ns + undo_ns;
        tap.acknowledge(s);
        self.stop(s, tap);
        if undo_ns == 0 {
            return self.finish(s, false, tap);
        }
        self.sleep(s, undo_ns);
        self.sessions[s].doing = Doing::Undo;
    }

    /// The same host without these sessions' present work, and without any long task that has yet to begin.
    pub fn without(&self, gone: &[usize]) -> Host {
        let mut host = self.clone();
        host.closed = true;
        for &s in gone.iter().filter(|&&s| self.sessions[s].busy) {
            host.stop(s, &mut NoTap);
            host.sessions[s].stopping = false; // gone for good: its client does not come back
            host.finish(s, false, &mut NoTap);
        }
        host
    }

    /// Part of the requests that arrived between the two times and are late, or will be. Times round to buckets.
    pub fn late_share(&self, from_ns: u64, to_ns: u64) -> f64 {
        let range = (from_ns / BUCKET_NS) as usize..((to_ns / BUCKET_NS) as usize).min(self.buckets.len());
        let counted = self.buckets.get(range.clone()).unwrap_or_default();
        let arrived: u64 = counted.iter().map(|b| b.0 as u64).sum();
        let mut late: u64 = counted.iter().map(|b| b.1 as u64).sum();
        for session in self.sessions[..self.spec.sessions].iter().filter(|s| s.busy) {
            let overdue = self.now_ns - session.arrived_ns > self.spec.classes[session.class as usize].late_ns;
            late += (overdue && range.contains(&((session.arrived_ns / BUCKET_NS) as usize))) as u64;
        }
        late as f64 / arrived.max(1) as f64
    }

    /// Late requests of all that arrived from `from_ns` on.
    pub fn late_since(&self, from_ns: u64) -> u64 {
        let counted = self.buckets.get((from_ns / BUCKET_NS) as usize..).unwrap_or_default();
        let arrived: u64 = counted.iter().map(|b| b.0 as u64).sum();
        let share = self.late_share(from_ns, self.buckets.len() as u64 * BUCKET_NS);
        (share * arrived as f64).round() as u64
    }

    /// Long tasks that run, idle or wait and have not noticed a cancel, as sessions.
    pub fn long_sessions(&self) -> Vec<usize> {
        let long = self.spec.sessions..self.sessions.len();
        long.filter(|&s| self.sessions[s].busy && !self.sessions[s].stopping).collect()
    }

    /// Identifies what session `s` does now: a later request of it is another task.
    pub fn task_of(&self, s: usize) -> (usize, u32) {
        (s, self.sessions[s].request)
    }

    /// When session `s` got what it monopolises; None = not yet.
    pub fn active_since_ns(&self, s: usize) -> Option<u64> {
        Some(self.sessions[s].active_ns).filter(|&ns| ns > 0)
    }

    /// How far the long task in session `s` is: 0..=1.
    pub fn progress(&self, s: usize) -> f64 {
        let session = &self.sessions[s];
        let last = session.script.len().saturating_sub(1);
        if session.at < last {
            let Some(Step::Scan { pages, .. }) = session.script.get(session.at) else { return 0.0 };
            let long = self.spec.long[s - self.spec.sessions];
            let Act::Pool { fill_ns, .. } = long.act else { return 0.0 };
            let filled = session.scanned as f64 / (*pages).max(1) as f64;
            return filled * fill_ns as f64 / (fill_ns + long.duration_ns) as f64;
        }
        let part = match session.doing {
            Doing::Cpu { from, to } => (self.service - from) / (to - from).max(1.0),
            Doing::Timer { from_ns, to_ns } => (self.now_ns - from_ns) as f64 / (to_ns - from_ns).max(1) as f64,
            _ => 0.0,
        };
        match self.spec.long[s - self.spec.sessions].act {
            Act::Pool { fill_ns, .. } => {
                let long = self.spec.long[s - self.spec.sessions].duration_ns;
                (fill_ns as f64 + part * long as f64) / (fill_ns + long) as f64
            }
            _ => part,
        }
    }

    /// Requests that wait for a worker and are no tasks yet: how many, and since when the oldest, ns.
    pub fn backlog(&self) -> (u64, u64) {
        if !self.spec.hidden_backlog {
            return (0, 0);
        }
        let oldest = self.worker_queue.front().map_or(0, |&s| self.now_ns - self.sessions[s].arrived_ns);
        (self.worker_queue.len() as u64, oldest)
    }

    /// Who waits for whom at the table locks.
    pub fn who_blocks(&self) -> Vec<WhoBlocks> {
        let mut edges = Vec::new();
        for (table, lock) in self.locks.iter().enumerate() {
            for (i, &(waiter, mode)) in lock.queue.iter().enumerate() {
                let table = table as u32;
                let conflicts = |other: &&(usize, Mode)| mode.conflicts(other.1);
                let edge = |blocker, holds| WhoBlocks { waiter, blocker, holds, table };
                edges.extend(lock.holders.iter().filter(conflicts).map(|h| edge(h.0, true)));
                edges.extend(lock.queue.iter().take(i).filter(conflicts).map(|q| edge(q.0, false)));
            }
        }
        edges
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No request arrives as long as the tests last: only what the test puts in.
    fn spec(cores: f64, long: Vec<(Act, u64, u64)>) -> Arc<Spec> {
        let class = ClassSpec { share: 1.0, cpu_ns: 1e6, sigma: 0.0, delay_ns: 0.0, late_ns: MS };
        let long = long.into_iter().map(|(act, start_ms, duration_ms)| LongTask {
            act,
            start_ns: start_ms * MS,
            duration_ns: duration_ms * MS,
            busy: false,
            class: 0,
            reaction_ns: 0,
            undo: 0.0,
            resubmits: 0,
            again: false,
        });
        Arc::new(Spec {
            seed: 1,
            cores,
            sessions: 4,
            workers: 1,
            hidden_backlog: false,
            tables: 2,
            hot_share: 0.0,
            write_share: 0.0,
            write_mode: Mode::WriteRows,
            classes: vec![class],
            pool: Some(PoolSpec { capacity: 1000, hot: 600, touch: 10, io_ns: MS, disks: 1 }),
            rate_per_s: 1e-4,
            shapes: Vec::new(),
            slow: None,
            log_stalls: Vec::new(),
            timeout_ns: 0,
            long: long.collect(),
        })
    }

    fn busy_at(host: &mut Host, ms: u64) -> Vec<usize> {
        host.run(ms * MS, &mut NoTap);
        host.long_sessions().into_iter().map(|s| s - 4).collect()
    }

    #[test]
    fn times_are_rounded_up() {
        for x in [-3.5, -0.0, 0.0, 1e-9, 0.5, 1.0, 1.5, 1e9 + 0.25, (1u64 << 53) as f64] {
            assert_eq!(rounded_up(x), x.ceil().max(0.0) as u64, "{x}");
        }
    }

    #[test]
    fn processors_are_shared() {
        let two = || vec![(Act::Cpu, 0, 100), (Act::Cpu, 0, 100)];
        assert_eq!(busy_at(&mut Host::new(spec(2.0, two())), 101), [] as [usize; 0]);
        let mut one = Host::new(spec(1.0, two()));
        assert_eq!(busy_at(&mut one, 199), [0, 1]);
        assert_eq!(busy_at(&mut one, 201), [] as [usize; 0]);
    }

    #[test]
    fn nobody_passes_a_waiting_exclusive_and_writers_pass_each_other() {
        let lock = |mode| Act::Lock { table: 0, mode };
        let long = vec![
            (lock(Mode::WriteRows), 0, 100),
            (lock(Mode::WriteRows), 10, 20),
            (lock(Mode::Exclusive), 40, 50),
            (lock(Mode::ReadRows), 50, 10),
            (Act::Lock { table: 1, mode: Mode::Exclusive }, 50, 10),
        ];
        let mut host = Host::new(spec(4.0, long));
        assert_eq!(busy_at(&mut host, 35), [0], "the second writer did not wait");
        assert_eq!(busy_at(&mut host, 70), [0, 2, 3], "the reader waits behind the exclusive one");
        let edges: Vec<_> = host.who_blocks().iter().map(|e| (e.waiter - 4, e.blocker - 4, e.holds)).collect();
        assert_eq!(edges, [(2, 0, true), (3, 2, false)]);
        assert_eq!(busy_at(&mut host, 140), [2, 3]);
        assert_eq!(busy_at(&mut host, 155), [3]);
        assert_eq!(busy_at(&mut host, 165), [] as [usize; 0]);
    }

    #[test]
    fn a_copy_without_the_holder_goes_on_and_the_original_does_not() {
        let lock = Act::Lock { table: 0, mode: Mode::Exclusive };
        let mut host = Host::new(spec(4.0, vec![(lock, 0, 100), (lock, 1, 10)]));
        host.run(20 * MS, &mut NoTap);
        let mut copy = host.without(&[4]);
        assert_eq!(busy_at(&mut copy, 31), [] as [usize; 0]);
        assert_eq!(busy_at(&mut host, 31), [0, 1]);
        host.cancel(4);
        assert_eq!(busy_at(&mut host, 42), [] as [usize; 0]);
    }

    #[test]
    fn pages_are_neither_lost_nor_made() {
        let pages = |h: &Host| h.cold + h.cached_hot + h.sessions.iter().map(|s| s.scanned).sum::<u64>();
        let fill = |pages| Act::Pool { pages, fill_ns: 50 * MS };
        let mut host = Host::new(spec(4.0, vec![(fill(500), 0, 100), (fill(700), 0, 50)]));
        host.run(60 * MS, &mut NoTap);
        assert_eq!((pages(&host), host.cached_hot), (1000, 0), "both together want more than there is");
        assert_eq!(busy_at(&mut host, 200), [] as [usize; 0]);
        assert_eq!((pages(&host), host.cold), (1000, 1000));
    }

    #[test]
    fn a_worker_serves_one_at_a_time() {
        let mut host = Host::new(spec(4.0, vec![(Act::Worker, 0, 100), (Act::Worker, 1, 100)]));
        assert_eq!(busy_at(&mut host, 150), [1]);
        assert!(host.progress(5) > 0.4 && host.progress(5) < 0.6);
        assert_eq!(busy_at(&mut host, 201), [] as [usize; 0]);
    }
}
