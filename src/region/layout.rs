//! The region's memory, field by field. Everything is an atomic, zero is every field's valid first state, and
//! offsets stand in for pointers, so processes may map it anywhere.
//!
//! Who writes what: a `Trace` and the owner part of a `TaskSlot` by the task's own thread; the mailbox, clock, lease
//! heartbeat and decisions by the leading controller; the rest by compare-and-swap.

use super::seqcount::SeqCount;
use crate::control::histogram::BUCKETS;
use crate::primitive::{AtomicI32, AtomicU32, AtomicU64, AtomicU8};
use core::mem::size_of;

pub const MAGIC: u64 = u64::from_le_bytes(*b"atroposR");
/// Raised with every change of this file that moves a field.
pub const LAYOUT_VERSION: u32 = 4;

/// For loom, which keeps and explores every atomic, a small table shows what a large one does.
const fn sized(real: usize, model: usize) -> usize {
    if cfg!(loom) {
        model
    } else {
        real
    }
}

pub const MAX_RESOURCES: usize = sized(32, 3);
pub const MAX_CLASSES: usize = sized(16, 1);
/// Completions of one class are counted in this many places, so that cores do not share a line.
pub const SHARDS: usize = sized(8, 1);
pub const MAX_AGENTS: usize = sized(256, 2);
pub const NAME_BYTES: usize = sized(32, 3);
pub const LABEL_WORDS: usize = sized(6, 1);
pub const REASON_WORDS: usize = sized(20, 1);
/// About a millisecond: the unit in which a holding remembers how long its worker had waited before.
pub const WAITED_SHIFT: u32 = 20;
/// A worker's `waited_ns` as holdings and units of work note it: in units of 2^WAITED_SHIFT ns, modulo 2^32.
#[inline(always)]
pub const fn waited_mark(waited_ns: u64) -> u32 {
    (waited_ns >> WAITED_SHIFT) as u32
}
/// Holdings a worker can have at once.
pub const HOLDINGS: usize = sized(64, 8);
pub const DECISIONS: usize = sized(64, 1);
pub const DECISION_BYTES: usize = sized(4096, 8);
/// Cancelled tasks that may run again, at once.
pub const RETRIES: usize = sized(128, 1);

/// Process-independent identity: a pid alone is reused.
#[derive(Default)]
#[repr(C)]
pub struct Owner {
    pub pid: AtomicU32,
    /// The thread that works for the slot, as its process knows it; 0 = not known. It stands in what was padding.
    pub tid: AtomicU32,
    pub start_ticks: AtomicU64,
}

/// The same in all versions: a later library must be able to tell whose file it finds.
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(64))]
pub struct Identity {
    pub magic: AtomicU64,
    pub layout_version: AtomicU32,
    pub header_bytes: AtomicU32,
    pub total_bytes: AtomicU64,
    pub max_tasks: AtomicU32,
    pub max_workers: AtomicU32,
    pub creator: Owner,
    /// Stored last (Release), read first (Acquire).
    pub ready: AtomicU32,
}

/// Read by every hot call; written by the leader only.
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(64))]
pub struct Clock {
    /// The cached time; 0 = hot calls read the precise clock.
    pub coarse_ns: AtomicU64,
    /// Time tracing was last turned on: older records are leftovers.
    pub tracing_since_ns: AtomicU64,
    /// The last refresh, kept also while `coarse_ns` is 0.
    pub refreshed_ns: AtomicU64,
    /// 1 = time stamp counter with the scale below, 0 = clock_gettime.
    pub use_tsc: AtomicU32,
    /// What `atropos_gate` points to: 0 = closed. Here because whoever finds it open reads the time next.
    pub open: AtomicU32,
    pub tsc_base: AtomicU64,
    pub ns_base: AtomicU64,
    /// ns = ns_base + ((tsc - tsc_base) * mult >> 32)
    pub mult: AtomicU64,
    /// 1 = requests name the thread that begins them, for whoever samples threads. Where nobody does they save a look into
    /// the thread's own storage, which is cold where many threads take turns: of all that a begin reads it costs most.
    pub threads_named: AtomicU32,
}

/// The numbers of the configuration, as all processes of the region see them.
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(64))]
pub struct Settings {
    pub version: AtomicU64,
    /// pid of the process that writes; 0 = nobody.
    pub writer: AtomicU32,
    pub seq: SeqCount,
    pub words: [AtomicU64; 16],
}

/// Controller leadership.
#[derive(Default)]
#[repr(C, align(64))]
pub struct Lease {
    /// term << 32 | pid; pid 0 = nobody.
    pub word: AtomicU64,
    pub heartbeat_ns: AtomicU64,
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters of the whole region.
        #[cfg_attr(loom, derive(Default))]
        #[repr(C, align(64))]
        pub struct Counters { $($(#[$doc])* pub $name: AtomicU64),* }
        impl Counters {
            /// Every counter by name, for reports.
            pub fn all(&self) -> Vec<(&'static str, &AtomicU64)> {
                vec![$((stringify!($name), &self.$name)),*]
            }
        }
    };
}
counters! {
    /// Tasks that run untracked because the table was full.
    tasks_untracked,
    workers_untracked,
    resources_refused,
    /// Slots taken back from dead processes.
    slots_reaped,
    ticks,
    windows,
    /// Ticks that found a gap in the clock (a controller that had paused).
    clock_gaps,
    lease_changes,
    suspected,
    overloads_resource,
    overloads_regular,
    decisions,
    cancels_requested,
    cancels_acknowledged,
    cancels_escalated,
    cancels_unresponsive,
    cancels_over_budget,
    would_cancel,
    actions_failed,
    agents_refused,
    /// Snapshots given up because their writer never paused.
    unstable_reads,
    edges_truncated,
    logs_failed,
    /// Threads whose CPU and I/O were not sampled since more ran than one look may cost.
    system_threads_skipped,
    /// Threads that the kernel would not tell about.
    system_threads_unreadable,
    /// Cancelled tasks whose host asked whether they may run again.
    retries_asked,
    /// Of those: told to run again, or not to.
    retried,
    retries_dropped,
    /// Retried requests that ended, by their status.
    retries_succeeded,
    retries_failed,
    /// Cancels that found no room among those that may run again.
    retries_refused,
    /// Time that those told either way had waited.
    retry_waited_ns,
    /// Work of cancelled tasks that was thrown away: from the begin of their unit of work to their end.
    work_wasted_ns,
}

#[cfg_attr(loom, derive(Default))]
#[repr(C, align(64))]
pub struct ResourceEntry {
    /// 0 empty, pid << 2 | 1 claimed, 2 ready.
    pub state: AtomicU64,
    pub kind: AtomicU32,
    pub name: [AtomicU8; NAME_BYTES],
    pub queue_waiting: AtomicU64,
    pub queue_oldest_wait_ns: AtomicU64,
    pub queue_observed_ns: AtomicU64,
    /// Servers of the queue; 0 = not told.
    pub servers: AtomicU64,
    /// What the leader has learnt of it, for its successor: the average hold. 0 = not yet.
    pub usual_hold_ns: AtomicU64,
}

/// A process that runs cancel actions for its own tasks.
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(64))]
pub struct Agent {
    /// pid << 1 | 1; 0 = free.
    pub word: AtomicU64,
    pub start_ticks: AtomicU64,
    /// Rung (incremented) when a mailbox of this process was filled; a futex word.
    pub doorbell: AtomicU32,
}

#[cfg_attr(loom, derive(Default))]
#[repr(C, align(64))]
pub struct ClassShard {
    pub buckets: [AtomicU32; sized(BUCKETS, 1)],
}

/// What the leader has learnt of a class, for its successor; 0 = not yet. Each value is plausible by itself, so a reader
/// needs no consistent set.
#[cfg_attr(loom, derive(Default))]
#[repr(C)]
pub struct ClassLearnt {
    pub p99_ns: AtomicU64,
    pub spread_ns: AtomicU64,
    pub throughput_milli_per_s: AtomicU64,
    pub duration_ns: AtomicU64,
}

/// A recorded decision, as JSON text.
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(64))]
pub struct DecisionEntry {
    pub seq: SeqCount,
    /// Decision id; 0 = empty.
    pub id: AtomicU64,
    pub length: AtomicU32,
    pub text: [AtomicU8; DECISION_BYTES],
}

/// A cancelled task that may run again: noted by the leader with its cancel, waited on by the task's own process.
#[derive(Default)]
#[repr(C, align(64))]
pub struct RetryEntry {
    /// turn << RETRY_STATE_BITS | state; changed by compare-and-swap only. Turns ascend and are never used twice.
    pub word: AtomicU64,
    // Written by the leader while the state is FILLING.
    pub task: AtomicU64,
    pub scope: AtomicU64,
    pub decision_id: AtomicU64,
    /// Requests completed per 1,000 s before the overload; 0 = not known.
    pub load_milli_per_s: AtomicU64,
    /// The resources it was cancelled for, see `control::retry::bit_of`.
    pub resources: AtomicU64,
    pub owner_pid: AtomicU32,
    /// The task's flags when it was cancelled.
    pub flags: AtomicU32,
    /// A futex word: changes with what the waiter must see.
    pub bell: AtomicU32,
    // Written by the waiter, `since_ns` last.
    /// When it began to wait; 0 = not filled in yet.
    pub since_ns: AtomicU64,
    pub deadline_ns: AtomicU64,
    /// The waiter's last sign of life.
    pub seen_ns: AtomicU64,
    /// When it was set free.
    pub released_ns: AtomicU64,
}

#[cfg_attr(loom, derive(Default))]
#[repr(C)]
pub struct ResourceCell {
    pub wait_ns: AtomicU64,
    pub hold_ns: AtomicU64,
    pub acquired: AtomicU64,
    pub evicted: AtomicU64,
}

/// One thing a worker holds; half a cache line.
#[cfg_attr(loom, derive(Default))]
#[repr(C)]
pub struct HoldingCell {
    pub instance: AtomicU64,
    pub since_ns: AtomicU64,
    pub amount: AtomicU64,
    pub resource: AtomicU32,
    /// The worker's `waited_ns` when it was acquired, in units of 2^WAITED_SHIFT ns, modulo 2^32.
    pub waited: AtomicU32,
}

/// What one worker does: written by its own thread only.
///
/// Laid out by the cost of a cold call: a host does much between two calls, so each line touched is a cache miss. Whoever
/// holds one thing at a time touches the first line and one cell; of several things each further one its holding and the
/// tags; a wait one line more.
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(64))]
pub struct Trace {
    pub seq: SeqCount,
    /// Bit per holding in use.
    pub occupied: AtomicU64,
    /// Resource waited for; 0 = none.
    pub wait_resource: AtomicU32,
    /// Bit per resource with a non-zero cell; bit 0, which is no resource's: progress was told.
    pub touched: AtomicU32,
    /// Time in ended waits, for anything.
    pub waited_ns: AtomicU64,
    pub held: [HoldingCell; HOLDINGS],
    pub wait_instance: AtomicU64,
    pub wait_start_ns: AtomicU64,
    pub blocked_by: AtomicU64,
    /// Holdings that found no place; their holder cannot be blamed for them.
    pub holdings_lost: AtomicU32,
    /// Releases of something not held.
    pub releases_unmatched: AtomicU32,
    /// A byte per holding: part of the hash of what is held, eight compared at once. While the first is the only one its
    /// tag is not kept.
    pub tags: [AtomicU64; HOLDINGS / 8],
    pub progress_done: AtomicU64,
    pub progress_total: AtomicU64,
    _progress_line: [u64; 6],
    pub cells: [ResourceCell; MAX_RESOURCES],
}

/// A cancel request: written by the leader, read by the owner.
#[derive(Default)]
#[repr(C, align(64))]
pub struct Mailbox {
    pub seq: SeqCount,
    /// The scope it is for; stored last. 0 = empty.
    pub scope: AtomicU64,
    pub decision_id: AtomicU64,
    pub instance: AtomicU64,
    pub held_ns: AtomicU64,
    pub resource: AtomicU32,
    pub rung: AtomicU32,
    pub victims: AtomicU32,
    /// The leadership that posted it: what a deposed leader posts late does not stand.
    pub term: AtomicU32,
    /// Over all of the above and the reason: two leaders' posts that mixed do not pass for one.
    pub seal: AtomicU64,
    pub reason: [AtomicU64; REASON_WORDS],
}

/// A task. Beginning and ending a request touch the first two lines.
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(64))]
pub struct TaskSlot {
    /// generation << STATE_BITS | state
    pub state: AtomicU64,
    pub owner: Owner,
    /// Scope sequence: only the owner changes it, it never goes back, not even for the slot's next task.
    pub scope: AtomicU64,
    /// Begin of the request in flight; 0 = idle.
    pub request_start_ns: AtomicU64,
    pub client_wait_start_ns: AtomicU64,
    /// Client time inside the request in flight.
    pub client_wait_ns: AtomicU64,
    pub class: AtomicU32,
    pub flags: AtomicU32,
    // The second line.
    /// Total execution time of ended requests, over the slot's life.
    pub exec_ns: AtomicU64,
    pub completions: AtomicU64,
    pub failures: AtomicU64,
    /// The last scope whose cancel the host acted on.
    pub acknowledged_scope: AtomicU64,
    pub work_start_ns: AtomicU64,
    pub key: AtomicU64,
    pub parent: AtomicU64,
    /// End of the last request.
    pub request_end_ns: AtomicU64,
    // Seldom written.
    /// A scope that somebody asked to cancel by hand; 0 = none.
    pub manual_scope: AtomicU64,
    pub manual_reason: [AtomicU64; 8],
    pub label: [AtomicU64; LABEL_WORDS],
    pub priority: AtomicI32,
    /// The first worker's `waited_ns` when the unit of work began, as [`HoldingCell::waited`].
    pub work_waited: AtomicU32,
    pub mailbox: Mailbox,
    pub trace: Trace,
}

#[cfg_attr(loom, derive(Default))]
#[repr(C, align(64))]
pub struct WorkerSlot {
    pub state: AtomicU64,
    pub owner: Owner,
    pub task: AtomicU64,
    pub trace: Trace,
}

#[cfg_attr(loom, derive(Default))]
#[repr(C)]
pub struct Header {
    pub identity: Identity,
    pub clock: Clock,
    pub settings: Settings,
    pub lease: Lease,
    pub counters: Counters,
    /// Next place to look for a free slot.
    pub task_hint: AtomicU32,
    pub worker_hint: AtomicU32,
    /// One past the highest slot ever used.
    pub tasks_used: AtomicU32,
    pub workers_used: AtomicU32,
    pub next_decision: AtomicU64,
    /// Bit per request class that ever completed a request.
    pub classes_used: AtomicU32,
    /// Raised by every manual cancel request; the leader then looks for them.
    pub manual_requests: AtomicU32,
    /// What the controller thinks now: 0 learning, 1 normal, 2 suspected, 3 overload.
    pub controller_state: AtomicU32,
    pub p99_ns: AtomicU64,
    pub slo_ns: AtomicU64,
    pub throughput_milli_per_s: AtomicU64,
    pub resources: [ResourceEntry; MAX_RESOURCES],
    pub agents: [Agent; MAX_AGENTS],
    pub classes: [[ClassShard; SHARDS]; MAX_CLASSES],
    pub learnt: [ClassLearnt; MAX_CLASSES],
    pub decisions: [DecisionEntry; DECISIONS],
    /// The last turn given to a retry.
    pub retry_turn: AtomicU64,
    /// Raised by everybody who begins to wait for a retry; the leader then looks for them.
    pub retry_requests: AtomicU32,
    pub retries: [RetryEntry; RETRIES],
}

// States of a task or worker slot.
pub const STATE_BITS: u32 = 2;
pub const FREE: u64 = 0;
/// Being filled in by its new owner.
pub const CLAIMED: u64 = 1;
pub const ACTIVE: u64 = 2;
/// Ended, but kept by its thread for its next task; anybody may take it when no slot is free.
pub const CACHED: u64 = 3;

// Flags of a task.
pub const FLAG_BACKGROUND: u32 = 1;
pub const FLAG_PROTECTED: u32 = 2;
/// The request in flight runs again after a cancel: not cancelled a second time.
pub const FLAG_RETRIED: u32 = 4;
pub const FLAG_UNCANCELLABLE: u32 = 8;
/// The request in flight is the one that creating the task began.
pub const FLAG_IMPLICIT_REQUEST: u32 = 16;
/// The header knows that requests of the task's class complete.
pub const FLAG_CLASS_KNOWN: u32 = 32;
/// The task's next request is the retry of its last one.
pub const FLAG_RETRY_NEXT: u32 = 64;

// States of a retry's entry.
pub const RETRY_STATE_BITS: u32 = 3;
pub const RETRY_EMPTY: u64 = 0;
/// Being filled in by the leader.
pub const RETRY_FILLING: u64 = 1;
/// Told to stop; its host has not asked whether it may run again.
pub const RETRY_OPEN: u64 = 2;
pub const RETRY_WAITING: u64 = 3;
/// Set free; its waiter has not seen it yet.
pub const RETRY_RELEASED: u64 = 4;

/// Bytes of a region with these table sizes.
pub const fn region_bytes(max_tasks: u32, max_workers: u32) -> usize {
    size_of::<Header>() + max_tasks as usize * size_of::<TaskSlot>() + max_workers as usize * size_of::<WorkerSlot>()
}

// loom's atomics have other sizes.
// The layout is an ABI between processes that may run different builds: a moved field must raise LAYOUT_VERSION.
#[cfg(not(loom))]
const _: () = {
    assert!(core::mem::offset_of!(Identity, ready) == 48);
    assert!(core::mem::offset_of!(Clock, coarse_ns) == 0);
    assert!(size_of::<Identity>() == 64 && size_of::<Clock>() == 64);
    assert!(core::mem::offset_of!(Header, clock) == 64 && core::mem::offset_of!(Header, settings) == 128);
    assert!(size_of::<HoldingCell>() == 32 && size_of::<ResourceCell>() == 32);
    assert!(core::mem::offset_of!(Trace, held) == 32, "the first holding shares the first line");
    assert!(core::mem::offset_of!(Trace, wait_instance) / 64 == core::mem::offset_of!(Trace, blocked_by) / 64);
    assert!(core::mem::offset_of!(Trace, tags) % 64 == 0);
    assert!(core::mem::offset_of!(Trace, cells) % 64 == 0 && size_of::<Trace>() == 3264);
    assert!(size_of::<Mailbox>() == 256);
    assert!(core::mem::offset_of!(TaskSlot, exec_ns) == 64);
    assert!(size_of::<TaskSlot>() == 3776);
    assert!(size_of::<WorkerSlot>() == 3328);
    assert!(size_of::<RetryEntry>() == 128);
    assert!(size_of::<Header>() % 64 == 0);
    assert!(MAX_RESOURCES <= 32, "`touched` has a bit each; resource numbers fit u8");
    assert!(HOLDINGS == 64, "`occupied` has a bit each");
};
