//! Replays recorded decisions through the library's pure stages: the same evidence must give the same choice.
//!
//! The decision log holds, with the first line of each decision, what estimator and policy were given.

use anyhow::{bail, Context, Result};
use atropos::control::estimator::{estimate, EstimatorParams};
use atropos::control::policy::{choose, Choice, PolicyParams};
use atropos::control::window::{Edge, EdgeKind, Holding, ResourceKind, ResourceWindow, TaskView, Wait, Window};
use serde::Deserialize;
use std::collections::BTreeMap;

#[derive(Deserialize)]
struct Line {
    id: u64,
    task: Subject,
    replay: Option<Evidence>,
}

#[derive(Deserialize)]
struct Subject {
    id: u64,
    key: u64,
}

#[derive(Deserialize)]
struct Evidence {
    contention_threshold: f64,
    min_relief: f64,
    min_gain_ns: u64,
    min_idle_ns: u64,
    min_occupation_ns: u64,
    /// Older logs have none of these five.
    #[serde(default)]
    min_remaining_ns: u64,
    #[serde(default)]
    min_untold_ns: u64,
    #[serde(default)]
    late_ns: u64,
    #[serde(default = "whole")]
    late_share: f64,
    #[serde(default)]
    settles: bool,
    near_tie: f64,
    class_duration_ns: BTreeMap<u16, u64>,
    budget: usize,
    window: WindowJson,
}

fn whole() -> f64 {
    1.0
}

#[derive(Deserialize)]
struct WindowJson {
    now_ns: u64,
    length_ns: u64,
    exec_ns: u64,
    resources: Vec<ResourceJson>,
    tasks: Vec<TaskJson>,
    edges: Vec<EdgeJson>,
}

#[derive(Deserialize)]
struct ResourceJson {
    id: u32,
    r#type: String,
    name: String,
    wait_ns: u64,
    hold_ns: u64,
    usual_hold_ns: u64,
    turnover_ns: u64,
    servers: u64,
    acquired: u64,
    evicted: u64,
    untracked_waiting: u64,
    untracked_oldest_wait_ns: u64,
}

#[derive(Deserialize)]
struct TaskJson {
    id: u64,
    key: u64,
    label: String,
    class: u16,
    priority: i32,
    background: bool,
    protected: bool,
    cancellable: bool,
    cancelled: bool,
    scope: u64,
    in_request: bool,
    age_ns: u64,
    idle_ns: u64,
    work_ns: u64,
    work_waited_ns: u64,
    rollback_ns: u64,
    /// Older logs do not tell.
    #[serde(default)]
    starved_ns: u64,
    progress: Option<(u64, u64)>,
    waits: Vec<WaitJson>,
    holdings: Vec<HoldingJson>,
    exec_ns: u64,
}

#[derive(Deserialize)]
struct WaitJson {
    resource: u32,
    instance: u64,
    waited_ns: u64,
}

#[derive(Deserialize)]
struct HoldingJson {
    resource: u32,
    instance: u64,
    amount: u64,
    held_ns: u64,
    waited_ns: u64,
}

#[derive(Deserialize)]
struct EdgeJson {
    waiter: u64,
    blocker: u64,
    kind: String,
    resource: u32,
    instance: u64,
}

impl WindowJson {
    fn window(self) -> Result<Window> {
        let resources = self.resources.into_iter().map(|r| {
            let kind = match r.r#type.as_str() {
                "LOCK" => ResourceKind::Lock,
                "MEMORY" => ResourceKind::Memory,
                "QUEUE" => ResourceKind::Queue,
                "SYSTEM" => ResourceKind::System,
                other => bail!("resource {}: unknown type {other:?}", r.name),
            };
            Ok(ResourceWindow {
                id: r.id,
                kind,
                name: r.name,
                wait_ns: r.wait_ns,
                hold_ns: r.hold_ns,
                usual_hold_ns: r.usual_hold_ns,
                turnover_ns: r.turnover_ns,
                servers: r.servers,
                acquired: r.acquired,
                evicted: r.evicted,
                untracked_waiting: r.untracked_waiting,
                untracked_oldest_wait_ns: r.untracked_oldest_wait_ns,
            })
        });
        let tasks = self.tasks.into_iter().map(|t| TaskView {
            id: t.id,
            key: t.key,
            label: t.label,
            class: t.class,
            priority: t.priority,
            background: t.background,
            protected: t.protected,
            cancellable: t.cancellable,
            cancelled: t.cancelled,
            scope: t.scope,
            in_request: t.in_request,
            age_ns: t.age_ns,
            idle_ns: t.idle_ns,
            work_ns: t.work_ns,
            work_waited_ns: t.work_waited_ns,
            rollback_ns: t.rollback_ns,
            starved_ns: t.starved_ns,
            progress: t.progress,
            waits: t
                .waits
                .into_iter()
                .map(|w| Wait { resource: w.resource, instance: w.instance, waited_ns: w.waited_ns })
                .collect(),
            holdings: t
                .holdings
                .into_iter()
                .map(|h| Holding {
                    resource: h.resource,
                    instance: h.instance,
                    amount: h.amount,
                    held_ns: h.held_ns,
                    waited_ns: h.waited_ns,
                })
                .collect(),
            exec_ns: t.exec_ns,
        });
        let edges = self.edges.into_iter().map(|e| {
            let kind = match e.kind.as_str() {
                "holds" => EdgeKind::Holds,
                "queued" => EdgeKind::Queued,
                other => bail!("edge of task {}: unknown kind {other:?}", e.waiter),
            };
            Ok(Edge { waiter: e.waiter, blocker: e.blocker, kind, resource: e.resource, instance: e.instance })
        });
        Ok(Window {
            now_ns: self.now_ns,
            length_ns: self.length_ns,
            exec_ns: self.exec_ns,
            resources: resources.collect::<Result<_>>()?,
            tasks: tasks.collect(),
            edges: edges.collect::<Result<_>>()?,
            ..Window::default()
        })
    }
}

/// One decision, recorded and replayed.
pub struct Replayed {
    pub id: u64,
    pub key: u64,
    /// Did the stages choose the recorded task again?
    pub same: bool,
    pub choice: Choice,
}

/// Replays one line of a decision log; None for lines without evidence (outcomes, cancels by hand).
pub fn replay(line: &str) -> Result<Option<Replayed>> {
    let line: Line = serde_json::from_str(line).context("not a decision record")?;
    let Some(evidence) = line.replay else { return Ok(None) };
    let window = evidence.window.window()?;
    let estimator = EstimatorParams {
        contention_threshold: evidence.contention_threshold,
        class_duration_ns: evidence.class_duration_ns,
    };
    let policy = PolicyParams {
        contention_threshold: evidence.contention_threshold,
        min_relief: evidence.min_relief,
        min_gain_ns: evidence.min_gain_ns,
        min_idle_ns: evidence.min_idle_ns,
        min_occupation_ns: evidence.min_occupation_ns,
        min_remaining_ns: evidence.min_remaining_ns,
        min_untold_ns: evidence.min_untold_ns,
        late_ns: evidence.late_ns,
        late_share: evidence.late_share,
        settles: evidence.settles,
        near_tie: evidence.near_tie,
    };
    let choice = choose(&estimate(&window, &estimator), &window, &policy, evidence.budget);
    let same = choice.picks.iter().any(|p| p.task == line.task.id);
    Ok(Some(Replayed { id: line.id, key: line.task.key, same, choice }))
}

/// Replays a whole log; the number of decisions replayed. Any that comes out otherwise is an error that names it.
pub fn replay_log(text: &str) -> Result<usize> {
    let mut replayed = 0;
    for (number, line) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
        let Some(r) = replay(line).with_context(|| format!("line {}", number + 1))? else { continue };
        let now = r.choice.picks.first().map_or(r.choice.nobody_because.clone(), |p| p.reason.clone());
        if !r.same {
            bail!("line {}: decision {} chose task {}, its replay: {now}", number + 1, r.id, r.key);
        }
        println!("decision {}: task {} again: {now}", r.id, r.key);
        replayed += 1;
    }
    Ok(replayed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use atropos::config::Config;
    use atropos::control::controller::{replay_json, Controller};
    use atropos::region::owner::ProcessId;
    use atropos::region::Region;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::strategy::ValueTree;
    use std::time::{Duration, Instant};

    /// A stall, decided by the real controller on a real region, and replayed from its log.
    #[test]
    fn a_recorded_decision_replays_to_the_same_choice() {
        let mut config = Config::default();
        config.apply_text("test", "slo_ms = 5\nwindow_ms = 20\nmode = observe").unwrap();
        let region = Region::anonymous(16, 16).unwrap();
        region.header().publish_settings(&config).unwrap();
        let lock = region.header().register("lock", ResourceKind::Lock).unwrap();
        let me = ProcessId::current();
        let now = || region.header().clock.event_ns();
        let culprit = region.begin_task(me, 7, 0).unwrap();
        region.task(culprit).unwrap().trace.acquire(now(), 0, lock, 1, 1);
        for key in 100..105 {
            let victim = region.begin_task(me, key, 0).unwrap();
            region.task(victim).unwrap().trace.wait_begin(now(), lock, 1);
        }
        let log = std::env::temp_dir().join(format!("atropos-replay-{}.jsonl", std::process::id()));
        let _ = std::fs::remove_file(&log);
        let mut controller = Controller::new(me, &config);
        let end = Instant::now() + Duration::from_secs(10);
        while !log.exists() && Instant::now() < end {
            controller.tick(&region, log.to_str());
            std::thread::sleep(Duration::from_millis(2));
        }
        let text = std::fs::read_to_string(&log).expect("a decision within ten seconds");
        let _ = std::fs::remove_file(&log);
        let r = replay(text.lines().next().unwrap()).unwrap().expect("the first line has its evidence");
        assert!(r.same && r.key == 7, "{:?}", r.choice);
        // Without the culprit's holding the evidence blames nobody.
        let innocent = text.replace("\"holdings\":[{", "\"holdings\":[],\"was\":[{");
        let r = replay(innocent.lines().next().unwrap()).unwrap().unwrap();
        assert!(!r.same && r.choice.picks.is_empty());
        assert!(replay_log(&innocent).is_err());
    }

    const MS: u64 = 1_000_000;

    prop_compose! {
        fn any_task()(
            flags in proptest::array::uniform5(proptest::bool::weighted(0.1)), priority in -2..3i32,
            times in proptest::array::uniform5(0..5000 * MS), progress in proptest::option::of((0..100u64, 0..100u64)),
            waits in vec((0..4u32, 0..2u64, 0..3000 * MS), 0..2), holdings in vec((0..4u32, 0..2u64, 1..9u64, 0..5000 * MS), 0..3),
            label in "[ -~\u{1}-\u{1f}ä]{0,8}",
        ) -> TaskView {
            TaskView {
                protected: flags[0], cancellable: !flags[1], cancelled: flags[2], in_request: !flags[3], background: flags[4],
                priority, label, age_ns: times[0], idle_ns: times[1], work_ns: times[2], work_waited_ns: times[3] / 8,
                exec_ns: times[4].min(100 * MS), rollback_ns: times[3] / 16, starved_ns: times[4] / 8, progress,
                waits: waits.into_iter().map(|(resource, instance, waited_ns)| Wait { resource, instance, waited_ns }).collect(),
                holdings: holdings.into_iter().map(|(resource, instance, amount, held_ns)| {
                    Holding { resource, instance, amount, held_ns, waited_ns: held_ns / 7 }
                }).collect(),
                ..TaskView::default()
            }
        }
    }

    prop_compose! {
        fn any_resource()(
            kind in 0..3usize, times in proptest::array::uniform4(0..400 * MS), counts in proptest::array::uniform4(0..20u64),
        ) -> ResourceWindow {
            ResourceWindow {
                id: 0, kind: [ResourceKind::Lock, ResourceKind::Memory, ResourceKind::Queue][kind], name: "a \"name\"".into(),
                wait_ns: times[0], hold_ns: times[1], usual_hold_ns: times[2] / 100, turnover_ns: times[3] / 100,
                servers: counts[0] / 3, acquired: counts[1], evicted: counts[2], untracked_waiting: counts[3] / 8,
                untracked_oldest_wait_ns: times[3],
            }
        }
    }

    prop_compose! {
        fn any_window()(
            mut tasks in vec(any_task(), 1..12), mut resources in vec(any_resource(), 3),
            edges in vec((1..12u64, 0..12u64, any::<bool>(), 0..4u32, 0..2u64), 0..8),
        ) -> Window {
            (1..).zip(&mut tasks).for_each(|(id, t)| (t.id, t.key, t.scope) = (id << 20 | id, id, id + u64::MAX / 2));
            (1..).zip(&mut resources).for_each(|(id, r)| r.id = id);
            let edges = edges.into_iter().map(|(w, b, queued, resource, instance)| {
                let kind = if queued { EdgeKind::Queued } else { EdgeKind::Holds };
                Edge { waiter: w << 20 | w, blocker: if b == 0 { 0 } else { b << 20 | b }, kind, resource, instance }
            });
            Window { now_ns: 1 << 40, length_ns: 100 * MS, exec_ns: 0, resources, tasks, edges: edges.collect(), ..Window::default() }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

        /// Whatever was decided, on whatever thresholds: read back from its record it is decided again, to the last digit.
        #[test]
        fn every_recorded_decision_replays_to_the_same_choice(
            window in any_window(), shares in (0.0..0.6f64, 0.0..0.3f64, 0.0..0.5f64),
            times in proptest::array::uniform4(0..100 * MS), budget in 1..5usize,
            class_duration_ns in proptest::collection::btree_map(0..3u16, 0..1000 * MS, 0..3),
        ) {
            let estimator = EstimatorParams { contention_threshold: shares.0, class_duration_ns };
            let policy = PolicyParams {
                contention_threshold: shares.0, min_relief: shares.1, near_tie: shares.2, min_gain_ns: times[0],
                min_idle_ns: times[1], min_occupation_ns: times[2],
                min_untold_ns: times[3], ..PolicyParams::default()
            };
            let choice = choose(&estimate(&window, &estimator), &window, &policy, budget);
            if let Some(pick) = choice.picks.first() {
                let evidence = replay_json(&window, &estimator, &policy, budget);
                let line = format!("{{\"id\":1,\"task\":{{\"id\":{},\"key\":1}},\"replay\":{evidence}}}", pick.task);
                let again = replay(&line).unwrap().expect("it has its evidence");
                prop_assert!(again.same);
                prop_assert_eq!(again.choice, choice);
            }
        }
    }

    /// The generated windows must be worth it: enough of them end in a pick, some in several.
    #[test]
    fn the_generated_windows_decide_something() {
        let mut runner = proptest::test_runner::TestRunner::deterministic();
        let (mut picked, mut several) = (0, 0);
        for _ in 0..500 {
            let w = any_window().new_tree(&mut runner).unwrap().current();
            let e = estimate(&w, &EstimatorParams::default());
            let c = choose(&e, &w, &PolicyParams { min_relief: 0.02, ..PolicyParams::default() }, 4);
            picked += (!c.picks.is_empty()) as u32;
            several += (c.picks.len() > 1) as u32;
        }
        assert!(picked >= 50 && several >= 5, "{picked} {several}");
    }
}
