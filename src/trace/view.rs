//! What a worker does now, read by others at one moment.

use crate::primitive::Ordering::{Acquire, Relaxed};
use crate::region::layout::{waited_mark, TaskSlot, Trace, MAX_RESOURCES, WAITED_SHIFT};

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
    /// What is held now; no sum over the slots' lives, and filled in by whoever reads their holdings.
    pub held: u64,
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
        let mut view = TraceView::default();
        let stable = self.view_into(since_ns, &mut view);
        (view, stable)
    }

    /// The same, in the room of an earlier view.
    pub fn view_into(&self, since_ns: u64, view: &mut TraceView) -> bool {
        let mut held = std::mem::take(&mut view.held);
        let (seen, stable) = self.view_as(since_ns, &mut held, |_, h| h);
        *view = TraceView { held, ..seen };
        stable
    }

    /// The same with each holding made into something else at once, `held`; the view's own list stays empty. What `make` is
    /// given of the view is complete but for the holdings.
    #[inline(always)]
    pub fn view_as<T>(
        &self,
        since_ns: u64,
        held: &mut Vec<T>,
        make: impl Fn(&TraceView, Held) -> T,
    ) -> (TraceView, bool) {
        match self.seq.read(LOOKS, || self.look(since_ns, held, &make)) {
            Some(view) => (view, true),
            None => (self.look(since_ns, held, &make), false),
        }
    }

    /// Adds what this worker did.
    pub fn add_totals(&self, totals: &mut Totals) {
        let mut rest = self.touched.load(Acquire) & !1;
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

    #[inline(always)]
    fn look<T>(&self, since_ns: u64, held: &mut Vec<T>, make: &impl Fn(&TraceView, Held) -> T) -> TraceView {
        let mut view = TraceView { waited: waited_mark(self.waited_ns.load(Relaxed)), ..TraceView::default() };
        // Lines that say nothing are not read.
        if self.touched.load(Relaxed) & 1 != 0 {
            view.progress = (self.progress_done.load(Relaxed), self.progress_total.load(Relaxed));
        }
        let resource = self.wait_resource.load(Relaxed);
        if resource != 0 && (resource as usize) < MAX_RESOURCES {
            let wait_since_ns = self.wait_start_ns.load(Relaxed);
            let (instance, blocked_by) = (self.wait_instance.load(Relaxed), self.blocked_by.load(Relaxed));
            let wait = RunningWait { resource, instance, since_ns: wait_since_ns, blocked_by };
            view.wait = (wait_since_ns >= since_ns).then_some(wait);
        }
        let mut rest = self.occupied.load(Relaxed);
        held.clear();
        while rest != 0 {
            let cell = &self.held[rest.trailing_zeros() as usize];
            let (resource, held_since_ns) = (cell.resource.load(Relaxed), cell.since_ns.load(Relaxed));
            if held_since_ns >= since_ns && (resource as usize) < MAX_RESOURCES {
                let found = Held {
                    resource,
                    instance: cell.instance.load(Relaxed),
                    amount: cell.amount.load(Relaxed),
                    since_ns: held_since_ns,
                    waited_ns: (view.waited.wrapping_sub(cell.waited.load(Relaxed)) as u64) << WAITED_SHIFT,
                };
                held.push(make(&view, found));
            }
            rest &= rest - 1;
        }
        view
    }
}

/// So many slots before it is read a slot's first lines are asked for, and those that the first ones lead to.
const FIRST_LINES_AHEAD: usize = 8;
const OTHER_LINES_AHEAD: usize = 4;

/// All of `slots`, with the memory of the next ones asked for: `first` and then `others` are called for each slot some
/// time before it comes.
///
/// Slots lie pages apart, so the processor does not guess which line comes next, and whoever reads 1,000 of them would
/// wait for memory most of the time.
pub fn ahead<'a, S>(slots: &'a [S], first: impl Fn(&S) + 'a, others: impl Fn(&S) + 'a) -> impl Iterator<Item = &'a S> {
    slots.iter().enumerate().map(move |(i, slot)| {
        if let Some(later) = slots.get(i + FIRST_LINES_AHEAD) {
            first(later);
        }
        if let Some(later) = slots.get(i + OTHER_LINES_AHEAD) {
            others(later);
        }
        slot
    })
}

impl TaskSlot {
    /// For a look at its request; `detailed`: at everything.
    pub fn ask_for_first_lines(&self, detailed: bool) {
        ask_for(&self.state);
        ask_for(&self.exec_ns);
        if detailed {
            ask_for(&self.priority);
            ask_for(&self.mailbox.scope);
            self.trace.ask_for_first_line();
        }
    }
}

impl Trace {
    pub fn ask_for_first_line(&self) {
        ask_for(&self.seq);
    }

    /// For a view and for totals; the first line must be there, and names the others.
    pub fn ask_for_other_lines(&self) {
        let touched = self.touched.load(Relaxed);
        if touched & 1 != 0 {
            ask_for(&self.progress_done);
        }
        if self.wait_resource.load(Relaxed) != 0 {
            ask_for(&self.wait_start_ns);
        }
        // The first holding is in the first line; of the others two stand in one, and so do two cells.
        let lines = |bits: u64| (bits | bits >> 1) & 0x5555_5555_5555_5555;
        let mut held = lines(self.occupied.load(Relaxed) >> 1);
        while held != 0 {
            ask_for(&self.held[1 + held.trailing_zeros() as usize]);
            held &= held - 1;
        }
        let mut cells = lines(touched as u64 & !1);
        while cells != 0 {
            ask_for(&self.cells[cells.trailing_zeros() as usize % MAX_RESOURCES]);
            cells &= cells - 1;
        }
    }
}

/// Asks the processor for the line of `at`. A hint: it changes nothing, and cannot fail.
#[inline(always)]
fn ask_for<T>(at: &T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch reads nothing that the program could see, and every x86-64 processor has it.
    unsafe {
        use core::arch::x86_64::{_mm_prefetch, _MM_HINT_T0};
        _mm_prefetch::<_MM_HINT_T0>((at as *const T).cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = at;
}
