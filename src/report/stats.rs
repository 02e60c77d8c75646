//! A snapshot of the region as JSON: state, counters, resources, tasks. Any process of the region may take it.

use super::json::Json;
use crate::cancel::retry::state_of;
use crate::primitive::Ordering::Relaxed;
use crate::region::layout::*;
use crate::region::{text, Region};
use crate::trace::view::Totals;
use std::collections::HashMap;

/// Names of the controller's states, by number.
pub const STATES: [&str; 4] = ["learning", "normal", "suspected", "overload"];

/// The whole snapshot.
pub fn json(region: &Region) -> String {
    let h = region.header();
    let now_ns = region.now_ns();
    let counters = h.counters.all().into_iter().fold(Json::object(), |j, (name, n)| j.int(name, n.load(Relaxed))).end();
    let state = h.controller_state.load(Relaxed) as usize;
    let millis = |ns: u64| ns as f64 / 1e6;
    let controller = Json::object()
        .int("pid", h.lease.leader_pid())
        .text("state", STATES.get(state).copied().unwrap_or("unknown"))
        .float("heartbeat_age_ms", millis(now_ns.saturating_sub(h.lease.heartbeat_ns.load(Relaxed))))
        .float("p99_ms", millis(h.p99_ns.load(Relaxed)))
        .float("slo_ms", millis(h.slo_ns.load(Relaxed)))
        .float("throughput_per_s", h.throughput_milli_per_s.load(Relaxed) as f64 / 1e3)
        .bool("precise_clock", h.clock.coarse_ns.load(Relaxed) == 0)
        .end();

    let since_ns = h.clock.tracing_since_ns();
    let mut totals = Totals::default();
    let (mut holders, mut waiters) = ([0u32; MAX_RESOURCES], [0u32; MAX_RESOURCES]);
    let mut tasks = Json::array();
    let mut lost = 0u64;
    let mut unmatched = 0u64;
    let traces = region.used_tasks().iter().map(|t| &t.trace);
    let workers = region.used_workers().iter().map(|w| &w.trace);
    for trace in traces.chain(workers) {
        trace.add_totals(&mut totals);
        lost += trace.holdings_lost.load(Relaxed) as u64;
        unmatched += trace.releases_unmatched.load(Relaxed) as u64;
    }
    // Gathered first: looking through all workers for each task would take minutes where both tables are large and full.
    let mut workers_of: HashMap<u64, Vec<&Trace>> = HashMap::new();
    for worker in region.live_workers() {
        workers_of.entry(worker.task.load(Relaxed)).or_default().push(&worker.trace);
    }
    for (id, slot) in region.live_tasks() {
        let mut holds = Json::array();
        let mut waits = Json::array();
        for trace in std::iter::once(&slot.trace).chain(workers_of.remove(&id).unwrap_or_default()) {
            let (view, _) = trace.view(since_ns);
            for held in view.held {
                holders[held.resource as usize] += 1;
                let item = Json::object()
                    .text("resource", &name(h, held.resource))
                    .int("instance", held.instance)
                    .int("amount", held.amount)
                    .float("held_ms", millis(now_ns.saturating_sub(held.since_ns)));
                holds = holds.push(&item.end());
            }
            if let Some(wait) = view.wait {
                waiters[wait.resource as usize] += 1;
                let item = Json::object()
                    .text("resource", &name(h, wait.resource))
                    .int("instance", wait.instance)
                    .float("waited_ms", millis(now_ns.saturating_sub(wait.since_ns)));
                waits = waits.push(&item.end());
            }
        }
        let start = slot.request_start_ns.load(Relaxed);
        let label = text::load_words(&slot.label);
        let (holds, waits) = (holds.end(), waits.end());
        // A task that a host keeps for its next request: there is nothing to say of it.
        if start == 0 && label.is_empty() && holds == "[]" && waits == "[]" {
            continue;
        }
        let age = if start == 0 { None } else { Some(millis(now_ns.saturating_sub(start))) };
        let flags = slot.flags.load(Relaxed);
        let task = Json::object()
            .int("id", id)
            .int("key", slot.key.load(Relaxed))
            .text("label", &label)
            .int("pid", slot.owner.pid.load(Relaxed))
            .int("tid", slot.owner.tid.load(Relaxed))
            .int("class", slot.class.load(Relaxed))
            .int("priority", slot.priority.load(Relaxed))
            .int("scope", slot.scope.load(Relaxed))
            .optional_float("age_ms", age)
            .bool("background", flags & FLAG_BACKGROUND != 0)
            .bool("protected", flags & FLAG_PROTECTED != 0)
            .bool("cancellable", flags & FLAG_UNCANCELLABLE == 0)
            .bool("cancel_standing", slot.cancel_requested(&h.lease))
            .int("progress_done", slot.trace.progress_done.load(Relaxed))
            .int("progress_total", slot.trace.progress_total.load(Relaxed))
            .raw("holds", &holds)
            .raw("waits", &waits);
        tasks = tasks.push(&task.end());
    }
    let resources = h
        .registered()
        .fold(Json::array(), |list, (id, entry)| {
            let t = &totals[id as usize];
            let kind = entry.kind().map_or("", super::window::kind_name);
            let item = Json::object()
                .int("id", id)
                .text("name", &entry.name())
                .text("type", kind)
                .float("wait_ms", millis(t.wait_ns))
                .float("hold_ms", millis(t.hold_ns))
                .int("acquired", t.acquired)
                .int("evicted", t.evicted)
                .int("holders", holders[id as usize])
                .int("waiters", waiters[id as usize])
                .int("queue_waiting", entry.queue_waiting.load(Relaxed));
            list.push(&item.end())
        })
        .end();
    Json::object()
        .text("version", env!("CARGO_PKG_VERSION"))
        .text("mode", h.mode().name())
        .raw("controller", &controller)
        .raw("counters", &counters)
        .int("holdings_lost", lost)
        .int("releases_unmatched", unmatched)
        .int("max_tasks", region.tasks().len() as u64)
        .int("retries_waiting", waiting_retries(h))
        .raw("resources", &resources)
        .raw("tasks", &tasks.end())
        .end()
}

fn waiting_retries(h: &Header) -> u64 {
    h.retries.iter().filter(|e| state_of(e.word.load(Relaxed)) == RETRY_WAITING).count() as u64
}

fn name(h: &Header, resource: u32) -> String {
    h.resource(resource).map_or(String::new(), |e| e.name())
}
