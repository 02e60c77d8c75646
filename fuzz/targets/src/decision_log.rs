//! Decision logs: lines of any text are refused or read, and what the library wrote replays to the same choice.
//! SPDX-License-Identifier: MIT OR Apache-2.0

use crate::input::Input;
use atropos::control::controller::replay_json;
use atropos::control::estimator::{estimate, EstimatorParams};
use atropos::control::policy::{choose, PolicyParams};
use atropos::control::window::*;
use std::collections::BTreeMap;

// The two readers of the log, compiled in here: the crate that they are of needs two database clients.
#[allow(dead_code)]
#[path = "../../../bench/src/decisions.rs"]
mod decisions;
#[allow(dead_code)]
#[path = "../../../bench/src/replay.rs"]
mod replay;

/// The first byte chooses: lines of text, or evidence made of the bytes, written and read back.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    if input.bool() {
        evidence(input);
    } else {
        text(&String::from_utf8_lossy(input.0));
    }
}

fn text(text: &str) {
    for line in text.lines() {
        let _ = replay::replay(line);
    }
    for run_ns in [(0, i64::MAX), (100, 200)] {
        let _ = decisions::parse(text, run_ns, 1_999_900);
        let _ = decisions::parse(text, run_ns, i64::MIN);
    }
}

fn evidence(mut input: Input) {
    let estimator = EstimatorParams {
        contention_threshold: (input.below(101) as f64) / 100.0,
        class_duration_ns: (0..input.below(3) as u16).map(|class| (class, input.number())).collect::<BTreeMap<_, _>>(),
    };
    // Whatever other parameters the policy will have: their defaults are as good as any.
    #[allow(clippy::needless_update)]
    let policy = PolicyParams {
        contention_threshold: estimator.contention_threshold,
        min_relief: input.below(101) as f64 / 100.0,
        min_gain_ns: input.number(),
        min_idle_ns: input.number(),
        min_occupation_ns: input.number(),
        near_tie: input.below(101) as f64 / 100.0,
        ..PolicyParams::default()
    };
    let (budget, window) = (input.below(6), window(&mut input));
    let estimated = estimate(&window, &estimator);
    for r in &estimated.resources {
        assert!(r.level.is_finite() && (0.0..=1.0).contains(&r.level), "level {}", r.level);
    }
    for c in &estimated.candidates {
        assert!(c.relief_share.is_finite() && c.uses.iter().all(|u| u.gain_ns.is_finite()), "{c:?}");
    }
    let choice = choose(&estimated, &window, &policy, budget);
    assert!(choice.picks.len() <= budget, "over the budget");
    for pick in &choice.picks {
        let task = window.tasks.iter().find(|t| t.id == pick.task).expect("a task of the window");
        assert!(task.cancellable && !task.protected && !task.cancelled, "{task:?}");
    }
    let Some(first) = choice.picks.first() else { return };
    let replay = replay_json(&window, &estimator, &policy, budget);
    let line = format!(
        "{{\"id\":1,\"result\":\"requested\",\"time_ns\":1,\"task\":{{\"id\":{},\"key\":1}},\"replay\":{replay}}}",
        first.task
    );
    let again = replay::replay(&line).expect("what the library wrote is read").expect("it has its evidence");
    let who = |picks: &[atropos::control::policy::Pick]| picks.iter().map(|p| p.task).collect::<Vec<_>>();
    assert!(again.same && who(&again.choice.picks) == who(&choice.picks), "{:?}, then {:?}", choice, again.choice);
    decisions::parse(&line, (0, 2), 0).expect("what the library wrote is read");
}

fn window(input: &mut Input) -> Window {
    let kinds = [ResourceKind::Lock, ResourceKind::Memory, ResourceKind::Queue];
    let resources = (1..=input.below(4) as u32).map(|id| ResourceWindow {
        id,
        kind: kinds[input.below(3)],
        name: format!("r{id}"),
        wait_ns: input.number(),
        hold_ns: input.number(),
        usual_hold_ns: input.number(),
        turnover_ns: input.number(),
        servers: input.number(),
        acquired: input.number(),
        evicted: input.number(),
        untracked_waiting: input.number(),
        untracked_oldest_wait_ns: input.number(),
    });
    let resources: Vec<ResourceWindow> = resources.collect();
    let (now_ns, length_ns, exec_ns) = (input.number(), input.number(), input.number());
    let tasks = (0..input.below(12) as u64).map(|i| {
        let flags = input.byte();
        let waits = (0..flags as usize % 3).map(|_| Wait {
            resource: input.below(5) as u32,
            instance: input.below(3) as u64,
            waited_ns: input.number(),
        });
        let waits = waits.collect();
        let holdings = (0..flags as usize / 3 % 4).map(|_| Holding {
            resource: input.below(5) as u32,
            instance: input.below(3) as u64,
            amount: input.number(),
            held_ns: input.number(),
            waited_ns: input.number(),
        });
        let holdings = holdings.collect();
        // Every flag has its own bit of a second byte: `flags` says how much it waits for and holds.
        let what = input.byte();
        TaskView {
            id: (i + 1) << 20 | (i + 1),
            key: i,
            class: what as u16 % 16,
            priority: input.byte() as i8 as i32,
            background: what & 1 != 0,
            protected: what & 6 == 6,
            cancellable: what & 24 != 24,
            cancelled: what & 96 == 96,
            scope: i,
            in_request: what & 128 == 0,
            age_ns: input.number(),
            idle_ns: input.number(),
            work_ns: input.number(),
            work_waited_ns: input.number(),
            rollback_ns: input.number(),
            progress: input.bool().then(|| (input.number(), input.number())),
            waits,
            holdings,
            exec_ns: input.number(),
            starved_ns: input.number(),
            ..TaskView::default()
        }
    });
    let tasks: Vec<TaskView> = tasks.collect();
    let id = |input: &mut Input| tasks.get(input.below(14)).map_or(0, |t| t.id);
    let edges = (0..input.below(8)).map(|_| Edge {
        waiter: id(input),
        blocker: id(input),
        kind: if input.bool() { EdgeKind::Queued } else { EdgeKind::Holds },
        resource: input.below(5) as u32,
        instance: input.below(3) as u64,
    });
    let edges = edges.collect();
    Window { now_ns, length_ns, exec_ns, resources, tasks, edges, ..Window::default() }
}
