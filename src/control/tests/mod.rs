//! The stages after the detector on whole windows: the paper's examples and the cases of the bench, one test each,
//! and what must hold for any window.
mod machines;
mod properties;
mod scenarios;

use super::estimator::{estimate, Estimate, EstimatorParams};
use super::policy::{choose, Choice, PolicyParams};
use super::window::{
    Edge, EdgeKind, Holding, ResourceId, ResourceKind, ResourceWindow, TaskId, TaskView, Wait, Window,
};

pub const MS: u64 = 1_000_000;
pub const S: u64 = 1_000_000_000;

/// Windows told in a few words.
#[derive(Clone, Debug)]
pub struct Story {
    pub window: Window,
}

impl Story {
    /// A window of 100 ms with these resources, numbered from 1.
    pub fn new(resources: &[(&str, ResourceKind)]) -> Self {
        let resources = resources.iter().enumerate().map(|(i, (name, kind))| ResourceWindow {
            id: i as u32 + 1,
            kind: *kind,
            name: name.to_string(),
            wait_ns: 0,
            hold_ns: 0,
            usual_hold_ns: 0,
            turnover_ns: 0,
            servers: 0,
            acquired: 0,
            evicted: 0,
            untracked_waiting: 0,
            untracked_oldest_wait_ns: 0,
        });
        let window =
            Window { now_ns: 60 * S, length_ns: 100 * MS, resources: resources.collect(), ..Window::default() };
        Story { window }
    }

    /// A task that runs: in a request of this age, executing all through the window.
    pub fn task(&mut self, id: TaskId, age_ms: u64) -> &mut TaskView {
        let exec_ns = (age_ms * MS).min(self.window.length_ns);
        self.window.exec_ns += exec_ns;
        self.window.tasks.push(TaskView {
            id,
            key: id,
            cancellable: true,
            scope: id * 10,
            in_request: true,
            age_ns: age_ms * MS,
            work_ns: age_ms * MS,
            exec_ns,
            ..TaskView::default()
        });
        self.window.tasks.last_mut().unwrap()
    }

    pub fn get(&mut self, id: TaskId) -> &mut TaskView {
        self.window.tasks.iter_mut().find(|t| t.id == id).unwrap()
    }

    pub fn holds(&mut self, id: TaskId, resource: ResourceId, instance: u64, held_ms: u64) -> &mut Self {
        self.holds_units(id, resource, instance, 1, held_ms)
    }

    pub fn holds_units(&mut self, id: TaskId, resource: ResourceId, instance: u64, amount: u64, ms: u64) -> &mut Self {
        self.get(id).holdings.push(Holding { resource, instance, amount, held_ns: ms * MS, waited_ns: 0 });
        self.window.resources[resource as usize - 1].hold_ns += (ms * MS).min(100 * MS);
        self
    }

    pub fn waits(&mut self, id: TaskId, resource: ResourceId, instance: u64, ms: u64) -> &mut Self {
        self.get(id).waits.push(Wait { resource, instance, waited_ns: ms * MS });
        self.window.resources[resource as usize - 1].wait_ns += (ms * MS).min(100 * MS);
        self
    }

    pub fn edge(&mut self, waiter: TaskId, blocker: TaskId, kind: EdgeKind, resource: ResourceId, instance: u64) {
        self.window.edges.push(Edge { waiter, blocker, kind, resource, instance });
    }

    pub fn estimate(&self) -> Estimate {
        estimate(&self.window, &EstimatorParams::default())
    }

    pub fn choose(&self) -> Choice {
        choose(&self.estimate(), &self.window, &PolicyParams::default(), 4)
    }

    /// The tasks picked, in order.
    pub fn picked(&self) -> Vec<TaskId> {
        self.choose().picks.iter().map(|p| p.task).collect()
    }
}
