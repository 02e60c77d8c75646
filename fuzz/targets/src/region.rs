//! A region file of any bytes: refused with words, or read and used without harm, whatever its fields say.
//! SPDX-License-Identifier: MIT OR Apache-2.0

use crate::input::{own_file, Input};
use atropos::cancel::mailbox::Request;
use atropos::config::{Config, Mode};
use atropos::control::controller::Controller;
use atropos::control::window::ResourceKind;
use atropos::error::Code;
use atropos::primitive::Ordering::Relaxed;
use atropos::region::layout::*;
use atropos::region::owner::ProcessId;
use atropos::region::Region;
use atropos::report::{decision, stats};
use std::mem::{offset_of, size_of};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::OnceLock;

/// The first byte chooses: a file of just these bytes, or a real region with some of its fields overwritten by them.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let mut bytes = if input.bool() { base().clone() } else { input.0.to_vec() };
    if bytes.len() == base().len() && input.0.len() != bytes.len() {
        damage(&mut bytes, &mut input);
    }
    let path = own_file("region");
    write(&path, &bytes);
    if let Some(region) = accepted(Region::open_readonly(&path)) {
        watch(&region);
    }
    if let Some(region) = accepted(Region::create_or_join(&path, 16, 16)) {
        take_part(&region);
        watch(&region);
        region.unlink();
    }
}

fn write(path: &Path, bytes: &[u8]) {
    use std::io::Write;
    let file = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path);
    file.and_then(|mut file| file.write_all(bytes)).expect("the folder is writable");
}

fn accepted(opened: atropos::error::Result<Region>) -> Option<Region> {
    match opened {
        Ok(region) => Some(region),
        Err(e) => {
            assert!(e.code == Code::Region && e.text.contains("region file"), "{e}");
            None
        }
    }
}

/// A region in the middle of its life: an overload with its culprit, its victims, a worker, a cancel on its way.
fn base() -> &'static Vec<u8> {
    static BASE: OnceLock<Vec<u8>> = OnceLock::new();
    BASE.get_or_init(|| {
        let path = own_file("base");
        let region = Region::create_or_join(&path, 16, 16).expect("a region of our own");
        let (h, me) = (region.header(), ProcessId::current());
        if h.clock.use_tsc.load(Relaxed) != 1 {
            // The kernel does not trust the counter here: time passes by `pass` only.
            h.clock.ns_base.store(region.now_ns(), Relaxed);
            h.clock.use_tsc.store(1, Relaxed);
        }
        let config = Config { mode: Mode::Enforce, slo_ms: 1.0, window_ms: 20, ..Config::default() };
        h.publish_settings(&config).expect("nobody else writes");
        let lock = h.register("lock", ResourceKind::Lock).expect("room");
        let pool = h.register("pool", ResourceKind::Memory).expect("room");
        h.register("queue", ResourceKind::Queue).expect("room");
        let now = region.now_ns();
        let tasks: Vec<u64> = (0..8).map(|key| region.begin_task(me, key, 0).expect("room")).collect();
        for (i, task) in tasks.iter().enumerate() {
            let slot = region.task(*task).expect("alive");
            region.begin_request(slot, i as u32);
            slot.trace.acquire(now, 0, pool, 0, 100);
            match i {
                0 => slot.trace.acquire(now, 0, lock, 7, 1),
                1 => slot.trace.progress(5, 100),
                _ => slot.trace.wait_begin(now, lock, 7),
            }
        }
        region.attach(me, tasks[2]).expect("room");
        region.register_agent(me).expect("room");
        let mut controller = Controller::new(me, &config);
        for _ in 0..40 {
            pass(&region, 5_000_000);
            controller.tick(&region, None);
        }
        let slot = region.task(tasks[0]).expect("alive");
        let request =
            Request { scope: slot.scope.load(Relaxed), decision_id: 1, rung: 1, resource: lock, ..Request::default() };
        slot.mailbox.post(&request, h.lease.term());
        let bytes = std::fs::read(&path).expect("just written");
        region.unlink();
        bytes
    })
}

/// Time passes for the whole region at once.
fn pass(region: &Region, ns: u64) {
    let clock = &region.header().clock;
    clock.ns_base.store(clock.ns_base.load(Relaxed).wrapping_add(ns), Relaxed);
}

/// Overwrites fields; the parts that decide most are hit most.
fn damage(bytes: &mut Vec<u8>, input: &mut Input) {
    while !input.is_empty() {
        let (kind, a, b) = (input.byte(), input.byte() as usize, input.byte() as usize);
        let slots = size_of::<Header>();
        let workers = slots + 16 * size_of::<TaskSlot>();
        let at = match kind & 7 {
            0 => a << 16 | b << 8 | input.byte() as usize,
            1 => a % 2 * 256 + b,
            2 => offset_of!(Header, resources) + (a << 8 | b) % (MAX_RESOURCES * size_of::<ResourceEntry>()),
            3 => offset_of!(Header, agents) + (a << 8 | b) % 1024,
            4 => slots + a % 16 * size_of::<TaskSlot>() + b * 4,
            5 => slots + a % 16 * size_of::<TaskSlot>() + offset_of!(TaskSlot, trace) + b * 8,
            6 => workers + a % 16 * size_of::<WorkerSlot>() + b * 4,
            _ => {
                // Another length than its header says.
                bytes.resize(a << 12 | b << 4, kind);
                continue;
            }
        };
        let word = if kind & 8 == 0 { input.number() } else { input.word() };
        let width = [8, 4, 1, 8][(kind >> 4 & 3) as usize];
        let at = at / width * width;
        if let Some(place) = bytes.get_mut(at..at + width) {
            place.copy_from_slice(&word.to_le_bytes()[..width]);
        }
    }
}

/// What a watcher reads.
fn watch(region: &Region) {
    let json = stats::json(region);
    assert!(serde_json::from_str::<serde_json::Value>(&json).is_ok(), "not JSON: {json}");
    let _ = decision::recorded(region);
    let _ = region.header().handed_on().count();
    let _ = region.header().mode();
}

/// What a process that joined it does: read the settings, work, lead, clean up.
fn take_part(region: &Region) {
    let (h, me) = (region.header(), ProcessId::current());
    let (mut config, mut seen) = (Config::default(), u64::MAX);
    h.read_settings(&mut config, &mut seen);
    let mended = {
        let mut c = config.clone();
        c.mend();
        c
    };
    assert_eq!(config, mended, "the region's numbers were believed");
    let _ = h.register("lock", ResourceKind::Lock);
    let _ = h.register("fresh", ResourceKind::Queue);
    let mut mine: Vec<u64> = (0..3).filter_map(|key| region.begin_task(me, key, 0)).collect();
    mine.extend(region.live_tasks().map(|(task, _)| task).take(16).collect::<Vec<_>>());
    for (i, task) in mine.iter().enumerate() {
        let Some(slot) = region.own_task(me.pid, *task) else { continue };
        let now = h.clock.event_ns();
        slot.trace.acquire(now, h.clock.tracing_since_ns(), 1, 7, 1 + i as u64);
        slot.trace.wait_begin(now, 1 + i as u32 % 3, 7);
        slot.trace.release(now, 2, 0, 1);
        h.client_wait(slot, i % 2 == 0);
        region.begin_request(slot, i as u32);
        let _ = slot.standing_request(&h.lease);
        let _ = region.attach(me, *task).is_some_and(|worker| region.detach(worker));
    }
    let mut controller = Controller::new(me, &config);
    for step in 0..24 {
        pass(region, 7_000_000);
        // A lease that somebody else seems to hold runs out.
        if step == 2 {
            pass(region, 400_000_000);
        }
        controller.tick(region, None);
    }
    let _ = region.run_pending(me);
    region.reap(true);
    for task in mine {
        region.end_task(me, task, false);
    }
    let _ = h.publish_settings(&Config { mode: Mode::Off, ..config });
    controller.tick(region, None);
}
