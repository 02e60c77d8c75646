//! A snapshot of the region as JSON: state, counters, resources, tasks. Any process of the region may take it.

use super::json::Json;
use crate::primitive::Ordering::{Acquire, Relaxed};
use crate::region::layout::*;
use crate::region::{text, Region};

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
    let mut totals = [(0u64, 0u64, 0u64, 0u64, 0u32, 0u32); MAX_RESOURCES];
    let mut tasks = Json::array();
    let mut lost = 0u64;
    let mut unmatched = 0u64;
    let used = h.tasks_used.load(Acquire) as usize;
    let traces = region.tasks().iter().take(used).map(|t| &t.trace);
    let workers = region.workers().iter().take(h.workers_used.load(Acquire) as usize).map(|w| &w.trace);
    for trace in traces.chain(workers) {
        for (cell, total) in trace.cells.iter().zip(&mut totals) {
            total.0 = total.0.wrapping_add(cell.wait_ns.load(Relaxed));
            total.1 = total.1.wrapping_add(cell.hold_ns.load(Relaxed));
            total.2 = total.2.wrapping_add(cell.acquired.load(Relaxed));
            total.3 = total.3.wrapping_add(cell.evicted.load(Relaxed));
        }
        lost += trace.holdings_lost.load(Relaxed) as u64;
        unmatched += trace.releases_unmatched.load(Relaxed) as u64;
    }
    for (id, slot) in region.live_tasks() {
        let mut holds = Json::array();
        let mut waits = Json::array();
        let mut families = vec![&slot.trace];
        let own_workers = region.live_workers().filter(|w| w.task.load(Relaxed) == id);
        families.extend(own_workers.map(|w| &w.trace));
        for trace in families {
            let (held, wait) = read(trace, since_ns);
            for (resource, instance, since, amount) in held {
                totals[resource].4 += 1;
                let item = Json::object()
                    .text("resource", &name(h, resource))
                    .int("instance", instance)
                    .int("amount", amount)
                    .float("held_ms", millis(now_ns.saturating_sub(since)));
                holds = holds.push(&item.end());
            }
            if let Some((resource, instance, start)) = wait {
                totals[resource].5 += 1;
                let item = Json::object()
                    .text("resource", &name(h, resource))
                    .int("instance", instance)
                    .float("waited_ms", millis(now_ns.saturating_sub(start)));
                waits = waits.push(&item.end());
            }
        }
        let start = slot.request_start_ns.load(Relaxed);
        let age = if start == 0 { None } else { Some(millis(now_ns.saturating_sub(start))) };
        let flags = slot.flags.load(Relaxed);
        let task = Json::object()
            .int("id", id)
            .int("key", slot.key.load(Relaxed))
            .text("label", &text::load_words(&slot.label))
            .int("pid", slot.owner.pid.load(Relaxed))
            .int("class", slot.class.load(Relaxed))
            .int("priority", slot.priority.load(Relaxed))
            .int("scope", slot.scope.load(Relaxed))
            .optional_float("age_ms", age)
            .bool("background", flags & FLAG_BACKGROUND != 0)
            .bool("protected", flags & FLAG_PROTECTED != 0)
            .bool("cancellable", flags & FLAG_UNCANCELLABLE == 0)
            .bool("cancel_standing", slot.cancel_requested())
            .int("progress_done", slot.trace.progress_done.load(Relaxed))
            .int("progress_total", slot.trace.progress_total.load(Relaxed))
            .raw("holds", &holds.end())
            .raw("waits", &waits.end());
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
                .float("wait_ms", millis(t.0))
                .float("hold_ms", millis(t.1))
                .int("acquired", t.2)
                .int("evicted", t.3)
                .int("holders", t.4)
                .int("waiters", t.5)
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
        .raw("resources", &resources)
        .raw("tasks", &tasks.end())
        .end()
}

fn name(h: &Header, resource: usize) -> String {
    h.resource(resource as u32).map_or(String::new(), |e| e.name())
}

type Held = (usize, u64, u64, u64);

fn read(trace: &Trace, since_ns: u64) -> (Vec<Held>, Option<(usize, u64, u64)>) {
    let attempt = || {
        let occupied = trace.occupied.load(Relaxed);
        let held = (0..HOLDINGS)
            .filter(|i| occupied >> i & 1 == 1)
            .map(|i| &trace.held[i])
            .filter(|h| h.since_ns.load(Relaxed) >= since_ns)
            .map(|h| {
                let resource = h.resource.load(Relaxed) as usize % MAX_RESOURCES;
                (resource, h.instance.load(Relaxed), h.since_ns.load(Relaxed), h.amount.load(Relaxed))
            })
            .collect();
        let resource = trace.wait_resource.load(Relaxed) as usize;
        let start = trace.wait_start_ns.load(Relaxed);
        let waits = resource != 0 && resource < MAX_RESOURCES && start >= since_ns;
        (held, waits.then(|| (resource, trace.wait_instance.load(Relaxed), start)))
    };
    trace.seq.read(16, attempt).unwrap_or_else(attempt)
}
