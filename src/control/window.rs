//! What the controller sees of one window: plain data, the only input of the pure stages.
//!
//! `Window -> Signal -> Estimate -> Choice`. A recorded window can be replayed through the stages.

use super::histogram::Histogram;

/// A task's handle (index + generation); 0 = somebody the library does not track.
pub type TaskId = u64;
/// A registered resource's number; 0 = unknown.
pub type ResourceId = u32;
/// The SYSTEM resources: nobody registers them, so their numbers lie above all that can be.
pub const CPU: ResourceId = u32::MAX - 1;
pub const BLOCK_IO: ResourceId = u32::MAX;

/// Is it one that the library samples from the kernel?
pub fn is_system(resource: ResourceId) -> bool {
    resource >= CPU
}

/// What kind of thing a resource is; decides how contention and usage are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ResourceKind {
    Lock,
    Memory,
    Queue,
    /// The machine's: CPU or block I/O, sampled from the kernel.
    System,
}

/// One request class's completions in the window.
#[derive(Clone, Debug, Default)]
pub struct ClassWindow {
    pub class: u16,
    /// Latencies of the requests that completed in the window.
    pub latency: Histogram,
    /// Ages of the requests of this class that are still in flight (client waits excluded).
    pub in_flight_age_ns: Vec<u64>,
}

/// One resource's totals over the window; running waits and holds are counted up to now.
#[derive(Clone, Debug)]
pub struct ResourceWindow {
    pub id: ResourceId,
    pub kind: ResourceKind,
    pub name: String,
    /// Time tasks spent waiting for it, clipped to the window. SYSTEM: run-queue or block-I/O delay.
    pub wait_ns: u64,
    /// Time tasks held it, clipped to the window (LOCK, QUEUE).
    pub hold_ns: u64,
    /// For how long it is held on average in calm times (LOCK, QUEUE); 0 = not known.
    pub usual_hold_ns: u64,
    /// For how long those held it in the window who gave it back in it, on average (LOCK, QUEUE); 0 = nobody did, or (LOCK) too
    /// few to say.
    pub turnover_ns: u64,
    /// QUEUE: how many servers it has; CPU: processors the host may use. 0 = not told.
    pub servers: u64,
    /// Units acquired in the window (MEMORY); CPU time or bytes used in it (SYSTEM).
    pub acquired: u64,
    /// Units whose acquisition evicted somebody else's (MEMORY).
    pub evicted: u64,
    /// Waiters that are not tasks yet (a kernel backlog), as the host observed them.
    pub untracked_waiting: u64,
    pub untracked_oldest_wait_ns: u64,
}

/// A wait that goes on now; of a SYSTEM resource, the task's delays in the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    pub resource: ResourceId,
    pub instance: u64,
    pub waited_ns: u64,
}

/// Something held now; of a SYSTEM resource, what the task used of it in the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holding {
    pub resource: ResourceId,
    pub instance: u64,
    /// Units held (MEMORY), how many times acquired (LOCK), CPU time in ns or bytes in the window (SYSTEM).
    pub amount: u64,
    /// CPU: CPU time of the request so far, as far as it was seen. Block I/O: for how long it was seen to do any.
    pub held_ns: u64,
    /// Part of `held_ns` in which the task itself waited for something: not its own doing, so no usage of its.
    pub waited_ns: u64,
}

/// One live task.
#[derive(Clone, Debug, Default)]
pub struct TaskView {
    pub id: TaskId,
    pub key: u64,
    pub label: String,
    pub class: u16,
    pub priority: i32,
    pub background: bool,
    /// Never cancelled, by the host's word.
    pub protected: bool,
    /// False while cancelling it is impossible (a commit in progress, no cancel action).
    pub cancellable: bool,
    /// Cancelled once already (this scope or, as a retry, an earlier one).
    pub cancelled: bool,
    /// The scope sequence.
    pub scope: u64,
    /// A request is in flight (false: idle between requests, perhaps holding things).
    pub in_request: bool,
    /// Age of the request in flight, client waits excluded; 0 when idle.
    pub age_ns: u64,
    /// Time since its last request ended; 0 while one is in flight.
    pub idle_ns: u64,
    /// Time since its present unit of work (a transaction, else the request) began: what a cancel would lose.
    pub work_ns: u64,
    /// Part of `work_ns` in which it waited itself; 0 where no unit of work was told.
    pub work_waited_ns: u64,
    /// What undoing its work would take, as the host estimates it; asked of candidates only. 0 = none or unknown.
    pub rollback_ns: u64,
    /// For how long it has been ready to run without getting a processor, as the kernel says of candidates; 0 = it is not, or
    /// not known.
    pub starved_ns: u64,
    /// (done, total); None = never reported.
    pub progress: Option<(u64, u64)>,
    pub waits: Vec<Wait>,
    pub holdings: Vec<Holding>,
    /// Execution time inside the window (waits for resources included, client waits excluded).
    pub exec_ns: u64,
}

/// Why a blocker blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EdgeKind {
    /// The blocker holds what the waiter wants.
    Holds,
    /// The blocker only stands before the waiter in the queue with a request that bars it.
    Queued,
}

/// The host knows: `waiter` waits for `blocker`. Where a waiter has edges they replace inference from holdings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edge {
    pub waiter: TaskId,
    /// 0: somebody untracked, whom nobody can cancel.
    pub blocker: TaskId,
    pub kind: EdgeKind,
    pub resource: ResourceId,
    pub instance: u64,
}

/// Everything the stages may know about one window.
#[derive(Clone, Debug, Default)]
pub struct Window {
    /// Monotonic time of the window's end.
    pub now_ns: u64,
    pub length_ns: u64,
    pub classes: Vec<ClassWindow>,
    /// Execution time of all tasks in the window, completed requests included.
    pub exec_ns: u64,
    pub resources: Vec<ResourceWindow>,
    /// Live tasks; filled only while an overload is suspected (empty otherwise).
    pub tasks: Vec<TaskView>,
    pub edges: Vec<Edge>,
    pub pressure: Pressure,
}

/// The kernel's own word (PSI): the part of the window, 0..=1, in which somebody on the machine (or in the container)
/// stood still for want of the resource. None = the kernel does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pressure {
    pub cpu: Option<f64>,
    pub io: Option<f64>,
}
