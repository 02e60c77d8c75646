//! One step of the controller by the size of the server: 10, 1,000 and 10,000 tasks x 31 resources.
//!
//! The region's own tasks and the real controller, without the C shell (a lock and a few branches). Each step is measured
//! twice: `warm`, with the region in the caches as the last step left it, and `cold`, after something else has used them,
//! as on a server that does work of its own between two steps. Times are CPU times of the thread.
//! SPDX-License-Identifier: MIT OR Apache-2.0
use atropos::config::{Config, Mode};
use atropos::control::collect::{Collector, STRIDES};
use atropos::control::controller::Controller;
use atropos::control::estimator::{estimate, EstimatorParams};
use atropos::control::policy::{choose, PolicyParams};
use atropos::control::window::{ResourceKind, Window};
use atropos::primitive::Ordering::Relaxed;
use atropos::region::layout::TaskSlot;
use atropos::region::lease::Role;
use atropos::region::owner::ProcessId;
use atropos::region::Region;
use criterion::{criterion_group, BenchmarkId, Criterion, SamplingMode};
use std::cell::{Cell, OnceCell, RefCell};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Shortest window there is: a step is due every quarter of it.
const WINDOW_MS: u32 = 20;
const STRIDE: Duration = Duration::from_millis(WINDOW_MS as u64 / STRIDES);
const MS: u64 = 1_000_000;
/// More than the caches of any machine this runs on.
const CACHES_BYTES: usize = 96 << 20;

/// What the tasks do.
#[derive(Clone, Copy, PartialEq)]
enum Scene {
    /// All run, and each holds things.
    Calm,
    /// All but one wait for what that one holds.
    Stalled,
    /// As stalled, but every other task's slot has changed since the last step: nothing can be known from before.
    Busy,
    /// Each waits for what the one ten before it holds: ten chains through all tasks.
    Chains,
}

impl Scene {
    const ALL: [(Scene, &'static str); 4] =
        [(Scene::Calm, "calm"), (Scene::Stalled, "stalled"), (Scene::Busy, "busy"), (Scene::Chains, "chains")];
}

/// Things that each task holds.
const HELD: u64 = 8;

struct Server {
    region: Region,
    scene: Scene,
    locks: Vec<u32>,
    tasks: Vec<u64>,
}

impl Server {
    fn new(tasks: u32, scene: Scene) -> Server {
        let slo_ms = if scene == Scene::Calm { 3_600_000.0 } else { 1.0 };
        let region = Region::anonymous((tasks + 16).max(16), 16).expect("memory for the region");
        let config =
            Config { mode: Mode::Observe, max_tasks: tasks + 16, window_ms: WINDOW_MS, slo_ms, ..Config::default() };
        region.header().publish_settings(&config).expect("nobody else has this region");
        let kinds = [ResourceKind::Lock, ResourceKind::Memory, ResourceKind::Queue];
        let register = |i: usize| region.header().register(&format!("resource {i}"), kinds[i % 3]);
        let ids: Vec<u32> = (0..31).map(|i| register(i).expect("31 resources fit")).collect();
        let begin = |key| region.begin_task(ProcessId::current(), key, 0).expect("the table has room");
        let tasks = (0..tasks as u64).map(begin).collect();
        Server { region, scene, locks: ids, tasks }
    }

    fn slot(&self, task: u64) -> &TaskSlot {
        self.region.task(task).expect("tasks of the bench live on")
    }

    /// Requests come and go for a while, as without them no stall is one: nothing would be missing. Then the scene begins,
    /// and the controller sees it.
    fn begin(&self, controller: &mut Controller) {
        for _ in 0..24 {
            for (key, &task) in self.tasks.iter().enumerate().take(100) {
                self.region.begin_request(self.slot(task), key as u32 % 4);
                self.region.end_request(self.slot(task), 0);
            }
            std::thread::sleep(STRIDE);
            controller.tick(&self.region, None);
        }
        self.set();
        let overload = || self.region.header().controller_state.load(Relaxed) == 3;
        for _ in 0..200 {
            std::thread::sleep(STRIDE);
            controller.tick(&self.region, None);
            if overload() || self.scene == Scene::Calm {
                break;
            }
        }
        assert_eq!(overload(), self.scene != Scene::Calm, "the controller sees another scene than was set");
    }

    fn set(&self) {
        let lock = self.locks[0];
        for (key, &task) in (0..).zip(&self.tasks) {
            let slot = self.slot(task);
            self.region.begin_request(slot, key as u32 % 4);
            let now_ns = self.region.now_ns();
            for i in 0..HELD {
                let r = self.locks[(key + i) as usize % self.locks.len()];
                slot.trace.acquire(now_ns, 0, r, 1 + key % 64, 1);
            }
            match self.scene {
                Scene::Calm => {}
                Scene::Stalled | Scene::Busy if key == 0 => slot.trace.acquire(now_ns, 0, lock, 4711, 1),
                Scene::Stalled | Scene::Busy => slot.trace.wait_begin(now_ns, lock, 4711),
                Scene::Chains => {
                    slot.trace.acquire(now_ns, 0, lock, 10_000 + key, 1);
                    if key >= 10 {
                        slot.trace.wait_begin(now_ns, lock, 10_000 + key - 10);
                    }
                }
            }
        }
    }

    /// What happens between two steps.
    fn go_on(&self) {
        if self.scene != Scene::Busy {
            return;
        }
        let now_ns = self.region.now_ns();
        for &task in self.tasks.iter().step_by(2) {
            let slot = self.slot(task);
            slot.trace.acquire(now_ns, 0, self.locks[3], 99, 1);
            slot.trace.release(now_ns, self.locks[3], 99, 1);
        }
    }
}

/// CPU time of this thread: what other processes take from it is not the library's cost.
fn cpu_time() -> Duration {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is valid for writing; the clock always exists on Linux.
    let code = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t) };
    assert_eq!(code, 0, "this system has no CPU clock per thread");
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

/// Drives what the region left in the caches out of them.
fn use_caches(other: &mut [u64]) {
    for word in other.iter_mut().step_by(8) {
        *word = word.wrapping_add(1);
    }
    black_box(other);
}

fn ticks(c: &mut Criterion) {
    let mut other = vec![1u64; CACHES_BYTES / 8];
    for (scene, scene_name) in Scene::ALL {
        let mut group = c.benchmark_group(format!("tick {scene_name}"));
        group.sample_size(10).sampling_mode(SamplingMode::Flat);
        group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(2));
        for tasks in [10, 1_000, 10_000] {
            for (cold, name) in [(false, "warm"), (true, "cold")] {
                // Made by the first of them that is not filtered out: a profile shows nothing else.
                let mut made = None;
                let make = || {
                    let server = Server::new(tasks, scene);
                    let mut controller = Controller::new(ProcessId::current(), &Config::default());
                    server.begin(&mut controller);
                    (server, controller)
                };
                group.bench_function(BenchmarkId::new(name, tasks), |b| {
                    let (server, controller) = made.get_or_insert_with(make);
                    b.iter_custom(|n| {
                        let mut spent = Duration::ZERO;
                        for _ in 0..n {
                            // A step that is not due yet does nothing.
                            let due = Instant::now() + STRIDE;
                            server.go_on();
                            if cold {
                                use_caches(&mut other);
                            }
                            std::thread::sleep(due.saturating_duration_since(Instant::now()));
                            let begin = cpu_time();
                            let role = controller.tick(&server.region, None);
                            spent += cpu_time() - begin;
                            assert!(role != Role::Follower, "nobody else leads this region");
                        }
                        spent
                    })
                });
            }
        }
        group.finish();
    }
}

/// A server whose windows are looked at one after the other.
struct Stage {
    server: Server,
    now_ns: Cell<u64>,
    collector: RefCell<Collector>,
    seen: RefCell<Window>,
}

impl Stage {
    fn new(tasks: u32, scene: Scene) -> Stage {
        let server = Server::new(tasks, scene);
        server.set();
        let now_ns = Cell::new(server.region.now_ns());
        let stage = Stage { server, now_ns, collector: RefCell::default(), seen: RefCell::default() };
        (0..10).for_each(|_| stage.again());
        stage
    }

    /// The next window, in the last one's room.
    fn again(&self) {
        self.now_ns.set(self.now_ns.get() + 25 * MS);
        let (mut collector, mut seen) = (self.collector.borrow_mut(), self.seen.borrow_mut());
        collector.reuse(std::mem::take(&mut seen));
        *seen = collector.window(&self.server.region, self.now_ns.get(), 100 * MS, true);
    }
}

/// The parts of a step that looks at tasks, one by one and warm. `window`: the region's part; `choose`: only in a step in
/// which somebody is to be cancelled.
fn stages(c: &mut Criterion) {
    for (scene, scene_name) in &Scene::ALL[1..] {
        let mut group = c.benchmark_group(format!("stage {scene_name}"));
        group.warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1)).sample_size(20);
        for tasks in [1_000, 10_000] {
            let made = OnceCell::new();
            let stage = || made.get_or_init(|| Stage::new(tasks, *scene));
            let (estimator, policy) = (EstimatorParams::default(), PolicyParams::default());
            group.bench_function(BenchmarkId::new("window", tasks), |b| b.iter(|| stage().again()));
            group.bench_function(BenchmarkId::new("estimate", tasks), |b| {
                let seen = stage().seen.borrow();
                b.iter(|| estimate(black_box(&seen), &estimator))
            });
            group.bench_function(BenchmarkId::new("choose", tasks), |b| {
                let seen = stage().seen.borrow();
                let found = estimate(&seen, &estimator);
                b.iter(|| choose(&found, &seen, &policy, 4))
            });
        }
        group.finish();
    }
}

criterion_group!(benches, ticks, stages);

fn main() {
    // `cargo test --all-targets` runs benches with --test: there is nothing to assert about times.
    if std::env::args().any(|a| a == "--test") {
        return;
    }
    benches();
    Criterion::default().configure_from_args().final_summary();
}
