//! A window as JSON: what a decision saw, so that it can be replayed through the pure stages later.

use super::json::Json;
use crate::control::window::{EdgeKind, ResourceKind, TaskView, Window};

/// Name of a resource type, as in the C API.
pub fn kind_name(kind: ResourceKind) -> &'static str {
    match kind {
        ResourceKind::Lock => "LOCK",
        ResourceKind::Memory => "MEMORY",
        ResourceKind::Queue => "QUEUE",
        ResourceKind::System => "SYSTEM",
    }
}

fn list<T>(items: impl IntoIterator<Item = T>, json: impl Fn(T) -> String) -> String {
    items.into_iter().fold(Json::array(), |a, item| a.push(&json(item))).end()
}

fn task_json(t: &TaskView) -> String {
    let waits = list(&t.waits, |w| {
        Json::object().int("resource", w.resource).int("instance", w.instance).int("waited_ns", w.waited_ns).end()
    });
    let holdings = list(&t.holdings, |h| {
        Json::object()
            .int("resource", h.resource)
            .int("instance", h.instance)
            .int("amount", h.amount)
            .int("held_ns", h.held_ns)
            .int("waited_ns", h.waited_ns)
            .end()
    });
    let progress = t.progress.map_or("null".into(), |(done, total)| format!("[{done},{total}]"));
    Json::object()
        .int("id", t.id)
        .int("key", t.key)
        .text("label", &t.label)
        .int("class", t.class)
        .int("priority", t.priority)
        .bool("background", t.background)
        .bool("protected", t.protected)
        .bool("cancellable", t.cancellable)
        .bool("cancelled", t.cancelled)
        .int("scope", t.scope)
        .bool("in_request", t.in_request)
        .int("age_ns", t.age_ns)
        .int("idle_ns", t.idle_ns)
        .int("work_ns", t.work_ns)
        .int("work_waited_ns", t.work_waited_ns)
        .int("rollback_ns", t.rollback_ns)
        .int("starved_ns", t.starved_ns)
        .raw("progress", &progress)
        .raw("waits", &waits)
        .raw("holdings", &holdings)
        .int("exec_ns", t.exec_ns)
        .end()
}

/// Everything the estimator and the policy read of a window (latencies belong to the detector and are left out).
pub fn json(window: &Window) -> String {
    let resources = list(&window.resources, |r| {
        Json::object()
            .int("id", r.id)
            .text("type", kind_name(r.kind))
            .text("name", &r.name)
            .int("wait_ns", r.wait_ns)
            .int("hold_ns", r.hold_ns)
            .int("usual_hold_ns", r.usual_hold_ns)
            .int("turnover_ns", r.turnover_ns)
            .int("servers", r.servers)
            .int("acquired", r.acquired)
            .int("evicted", r.evicted)
            .int("untracked_waiting", r.untracked_waiting)
            .int("untracked_oldest_wait_ns", r.untracked_oldest_wait_ns)
            .end()
    });
    let edges = list(&window.edges, |e| {
        Json::object()
            .int("waiter", e.waiter)
            .int("blocker", e.blocker)
            .text("kind", if e.kind == EdgeKind::Queued { "queued" } else { "holds" })
            .int("resource", e.resource)
            .int("instance", e.instance)
            .end()
    });
    Json::object()
        .int("now_ns", window.now_ns)
        .int("length_ns", window.length_ns)
        .int("exec_ns", window.exec_ns)
        .raw("resources", &resources)
        .raw("tasks", &list(&window.tasks, task_json))
        .raw("edges", &edges)
        .optional_float("pressure_cpu", window.pressure.cpu)
        .optional_float("pressure_io", window.pressure.io)
        .end()
}
