//! What a worker does now, read by others at one moment.

use crate::primitive::Ordering::{Acquire, Relaxed};
use crate::region::layout::{waited_mark, Trace, MAX_RESOURCES, WAITED_SHIFT};

/// A writer that is still at it after so many looks was descheduled half-way.
const LOOKS: u32 = if cfg!(loom) { 2 } else { 16 };

/// A wait that goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunningWait {
    pub resource: u32,
    pub instance: u64,
    pub since_ns: u64,
    /// As the host said; 0 = it did not.
    pub blocked_by: u64,
}

/// Something held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    pub resource: u32,
    pub instance: u64,
    pub amount: u64,
    pub since_ns: u64,
    /// Part of the time since then in ended waits of the holder itself.
    pub waited_ns: u64,
}

/// What workers did with one resource in all, over the life of their slots.
#[derive(Clone, Copy, Debug, Default)]
pub struct ResourceTotals {
    pub wait_ns: u64,
    pub hold_ns: u64,
    pub acquired: u64,
    pub evicted: u64,
}

/// By resource number.
pub type Totals = [ResourceTotals; MAX_RESOURCES];

#[derive(Clone, Debug, Default)]
pub struct TraceView {
    pub wait: Option<RunningWait>,
    pub held: Vec<Held>,
    /// (done, total)
    pub progress: (u64, u64),
    /// Time in ended waits, in units of 2^WAITED_SHIFT ns, modulo 2^32.
    pub waited: u32,
}

impl TraceView {
    /// How long it waited since `start_ns`, when `waited` read `before`; the wait that runs counts too.
    pub fn waited_since(&self, before: u32, start_ns: u64, now_ns: u64) -> u64 {
        let ended = (self.waited.wrapping_sub(before) as u64) << WAITED_SHIFT;
        let running = self.wait.map_or(0, |w| now_ns.saturating_sub(w.since_ns.max(start_ns)));
        ended.saturating_add(running).min(now_ns.saturating_sub(start_ns))
    }
}

impl Trace {
    /// A consistent view without what was noted before `since_ns`. The second value is false when the writer never paused
    /// long enough: then every value by itself was true once, but they may not belong together.
    pub fn view(&self, since_ns: u64) -> (TraceView, bool) {
        match self.seq.read(LOOKS, || self.look(since_ns)) {
            Some(view) => (view, true),
            None => (self.look(since_ns), false),
        }
    }

    /// Adds what this worker did.
    pub fn add_totals(&self, totals: &mut Totals) {
        let mut rest = self.touched.load(Acquire);
        while rest != 0 {
            let r = rest.trailing_zeros() as usize % MAX_RESOURCES;
            let (cell, total) = (&self.cells[r], &mut totals[r]);
            total.wait_ns = total.wait_ns.wrapping_add(cell.wait_ns.load(Relaxed));
            total.hold_ns = total.hold_ns.wrapping_add(cell.hold_ns.load(Relaxed));
            total.acquired = total.acquired.wrapping_add(cell.acquired.load(Relaxed));
            total.evicted = total.evicted.wrapping_add(cell.evicted.load(Relaxed));
            rest &= rest - 1;
        }
    }

    fn look(&self, since_ns: u64) -> TraceView {
        let mut view = TraceView {
            waited: waited_mark(self.waited_ns.load(Relaxed)),
            progress: (self.progress_done.load(Relaxed), self.progress_total.load(Relaxed)),
            ..TraceView::default()
        };
        let resource = self.wait_resource.load(Relaxed);
        let wait_since_ns = self.wait_start_ns.load(Relaxed);
        if resource != 0 && (resource as usize) < MAX_RESOURCES && wait_since_ns >= since_ns {
            let (instance, blocked_by) = (self.wait_instance.load(Relaxed), self.blocked_by.load(Relaxed));
            view.wait = Some(RunningWait { resource, instance, since_ns: wait_since_ns, blocked_by });
        }
        let mut rest = self.occupied.load(Relaxed);
        view.held.reserve_exact(rest.count_ones() as usize);
        while rest != 0 {
            let cell = &self.held[rest.trailing_zeros() as usize];
            let (resource, held_since_ns) = (cell.resource.load(Relaxed), cell.since_ns.load(Relaxed));
            if held_since_ns >= since_ns && (resource as usize) < MAX_RESOURCES {
                view.held.push(Held {
                    resource,
                    instance: cell.instance.load(Relaxed),
                    amount: cell.amount.load(Relaxed),
                    since_ns: held_since_ns,
                    waited_ns: (view.waited.wrapping_sub(cell.waited.load(Relaxed)) as u64) << WAITED_SHIFT,
                });
            }
            rest &= rest - 1;
        }
        view
    }
}
