//! Programs of C API calls from up to three threads: any order, stale, foreign and invented handles, NULL, callbacks that
//! call back. Nothing may crash, hang, or answer with an unknown code.
//! SPDX-License-Identifier: MIT OR Apache-2.0
//!
//! One call is six bytes: code (the two high bits choose the thread), then its arguments. Time passes by calls too, so a
//! program of a few bytes can be an overload with its cancel. Handles are shared by all threads, which no host would do:
//! the answers are then anybody's, the memory must stay sound.

use crate::input::{number, own_file};
use atropos::capi::*;
use atropos::error::Code;
use atropos::primitive::Ordering::Relaxed;
use atropos::region::clock::monotonic_ns;
use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU32, AtomicU64};

const CALL_BYTES: usize = 6;
/// More calls only make a run longer.
const MOST_CALLS: usize = 400;
const THREADS: usize = 3;

static TASKS: [AtomicU64; 16] = [const { AtomicU64::new(0) }; 16];
static WORKERS: [AtomicU64; 8] = [const { AtomicU64::new(0) }; 8];
static RESOURCES: [AtomicU32; 4] = [const { AtomicU32::new(0) }; 4];
/// What the next callback does.
static MISCHIEF: AtomicU32 = AtomicU32::new(0);

#[derive(Clone, Copy)]
struct Call {
    code: u8,
    a: u8,
    b: u8,
    c: u8,
    d: u8,
    e: u8,
}

pub fn run(data: &[u8]) {
    let Some((how, program)) = data.split_first() else { return };
    let mut threads: [Vec<Call>; THREADS] = Default::default();
    for call in program.chunks_exact(CALL_BYTES).take(MOST_CALLS) {
        let &[code, a, b, c, d, e] = call else { unreachable!("chunks are of this size") };
        threads[(code >> 6) as usize % THREADS].push(Call { code: code & 63, a, b, c, d, e });
    }
    for handle in TASKS.iter().chain(&WORKERS) {
        handle.store(0, Relaxed);
    }
    MISCHIEF.store(0, Relaxed);
    init(*how);
    let others = threads[1..].iter().any(|calls| !calls.is_empty());
    if others {
        std::thread::scope(|scope| {
            for calls in &threads {
                scope.spawn(|| calls.iter().for_each(|call| call.make()));
            }
        });
    } else {
        threads[0].iter().for_each(|call| call.make());
    }
    // As many as a program can have begun one inside the other.
    while atropos::process::active().is_some() {
        known(atropos_shutdown());
    }
    // SAFETY: NULL takes the callback away.
    unsafe { set_callbacks(0) };
}

/// No answer is a panic caught at the boundary.
fn known(code: c_int) {
    let listed = code == ATROPOS_OK || Code::ALL.iter().any(|c| *c as c_int == code);
    assert!(listed && code != ATROPOS_E_PANIC, "code {code}");
    // SAFETY: it never answers NULL.
    assert!(!unsafe { CStr::from_ptr(atropos_strerror(code)) }.is_empty());
}

fn init(how: u8) {
    let text = settings(how);
    let path = CString::new(own_file("calls").into_os_string().into_encoded_bytes()).expect("no NUL in a path");
    // SAFETY: zero is a valid value of every field.
    let mut config: atropos_config = unsafe { std::mem::zeroed() };
    config.size = std::mem::size_of::<atropos_config>();
    config.text = text.as_ptr();
    config.region_path = if how & 64 != 0 { path.as_ptr() } else { null() };
    // SAFETY: the struct and its strings live through the call.
    known(unsafe { atropos_init(&config) });
}

fn settings(how: u8) -> CString {
    let mode = ["enforce", "enforce", "observe", "off"][how as usize & 3];
    let clock = ["auto", "precise", "coarse", "auto"][(how >> 2) as usize & 3];
    let text = format!(
        "mode = {mode}\nclock = {clock}\nmax_tasks = 16\nmax_workers = 16\nwindow_ms = 20\ntrigger_windows = 1\n\
         verify_ms = 10\nslo_ms = 0.001\nretry_background_max_ms = 1\nretry_calm_ms = 10\n\
         cancel_share = 1\ncancel_rate_per_s = 1000\ncancel_burst = 1000\n"
    );
    CString::new(text).expect("no NUL")
}

/// A handle: one given out, the same with a bit wrong, 0, or an invented one.
fn handle(of: &[AtomicU64], byte: u8) -> u64 {
    let given = of[byte as usize % of.len()].load(Relaxed);
    match byte >> 4 {
        0..=11 => given,
        12 => given ^ 1 << (byte & 15),
        13 => given ^ 1 << (20 + (byte & 15)),
        14 => 0,
        _ => number(byte).wrapping_mul(0x1_0001),
    }
}

fn resource(byte: u8) -> u32 {
    match byte >> 5 {
        0..=5 => RESOURCES[byte as usize % RESOURCES.len()].load(Relaxed),
        6 => byte as u32 & 31,
        _ => number(byte) as u32,
    }
}

fn words(byte: u8) -> (*const c_char, usize) {
    const TEXTS: [&CStr; 4] = [
        c"",
        c"a",
        c"a longer text, in which an \xc3\xa4 may be cut \xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac",
        c"\xff\xfe",
    ];
    match byte % 5 {
        4 => (null(), 0),
        i => (TEXTS[i as usize].as_ptr(), TEXTS[i as usize].count_bytes()),
    }
}

impl Call {
    fn task(&self) -> u64 {
        handle(&TASKS, self.a)
    }

    fn make(self) {
        let Call { code, a, b, c, d, e } = self;
        let (task, r, instance, amount) = (self.task(), resource(b), number(c), number(d));
        match code {
            0 => TASKS[a as usize % 16].store(atropos_create_cancel(number(b)), Relaxed),
            1 => atropos_free_cancel(task),
            2 => TASKS[a as usize % 16].store(atropos_task_create(number(b)), Relaxed),
            3 => known(atropos_task_bind(task)),
            4 => WORKERS[b as usize % 8].store(atropos_task_attach(task), Relaxed),
            5 => atropos_task_detach(handle(&WORKERS, a)),
            6 => known(atropos_task_child(task, handle(&TASKS, b))),
            7 => {
                let what = b as u32 % 10;
                let value = if what == ATROPOS_TASK_LABEL { words(c).0 as i64 } else { number(c) as i64 };
                known(atropos_task_set(task, what, value));
            }
            8 => drop(atropos_task_scope(task)),
            9 => {
                let scope = [0, atropos_task_scope(task), number(c)][b as usize % 3];
                // SAFETY: NULL or NUL-terminated.
                known(unsafe { atropos_task_cancel(task, scope, words(d).0) });
            }
            10 => cancel_info(task, b),
            11 => atropos_task_cancel_acknowledge(task, if b & 1 == 0 { atropos_task_scope(task) } else { number(c) }),
            12 => atropos_get_resource_on(r, instance, amount),
            13 => atropos_free_resource_on(r, instance, amount),
            14 => atropos_slow_by_resource_on(r, instance, amount),
            15 => atropos_wait_abandoned(r),
            16 => atropos_evicted(r, amount),
            17 => atropos_progress(instance, amount),
            18 => drop(atropos_cancel_requested()),
            19 => atropos_blocked_by(r, task),
            20 => atropos_request_begin(number(b) as u32),
            21 => atropos_request_end(b as i8 as i32),
            22 => atropos_task_get_resource(task, r, instance, amount),
            23 => atropos_task_free_resource(task, r, instance, amount),
            24 => atropos_task_slow_by_resource(task, r, instance, amount),
            25 => atropos_task_wait_abandoned(task, r),
            26 => atropos_task_blocked_by(task, r, handle(&TASKS, e)),
            27 => atropos_task_waited(task, r, amount),
            28 => atropos_task_progress(task, instance, amount),
            29 => drop(atropos_task_cancel_requested(task)),
            30 => atropos_task_release_all(task),
            31 => atropos_task_request_begin(task, number(b) as u32),
            32 => atropos_task_request_end(task, b as i8 as i32),
            33 => atropos_task_client_wait(task, b as i32 & 1),
            34 => {
                let names = [c"lock".as_ptr(), c"pool".as_ptr(), c"queue".as_ptr(), words(c).0];
                // SAFETY: NULL or NUL-terminated.
                let id = unsafe { atropos_resource_register(names[b as usize % 4], d as u32 % 5) };
                RESOURCES[a as usize % 4].store(id, Relaxed);
            }
            35 => atropos_queue_capacity(r, amount),
            36 => atropos_queue_observed(r, instance, amount),
            // SAFETY: the callbacks below stay callable.
            37 => unsafe { set_callbacks(a) },
            38 => MISCHIEF.store(a as u32, Relaxed),
            39 => reload(a),
            40..=42 => tick(a, b),
            43 => pass(number(a)),
            44 => known(atropos_controller_start()),
            45 => known(atropos_controller_stop()),
            46 => known(atropos_agent_start()),
            47 => known(atropos_agent_poll().min(0)),
            48 => drop(atropos_controller_pause_ms()),
            49 => reports(a),
            50 => known(atropos_shutdown()),
            51 => init(a),
            52 => known(atropos_after_fork()),
            53 => drop(atropos_current_task()),
            // The paper's names.
            54 => TASKS[a as usize % 16].store(createCancel(number(b)), Relaxed),
            55 => freeCancel(task),
            56 => getResource(r, amount),
            57 => freeResource(r, amount),
            58 => slowByResource(r, amount),
            59 => drop(atropos_task_enter(task, number(c) as u32, r)),
            60 => atropos_task_leave(task, d as i8 as i32),
            61 => known(atropos_retry_poll(task, number(b)).min(0)),
            // Soon over: an input must not wait for as long as a client might.
            62 => known(atropos_retry_wait(task, monotonic_ns() + 1_000_000).min(0)),
            _ => atropos_retry_give_up(task),
        }
    }
}

/// The struct in any size that some header may have; nothing beyond it is touched.
fn cancel_info(task: u64, byte: u8) {
    let known_bytes = std::mem::size_of::<atropos_cancel_info>();
    let size = match byte % 4 {
        0 => known_bytes,
        1 => known_bytes + byte as usize,
        2 => number(byte) as usize,
        _ => {
            // SAFETY: NULL only asks.
            unsafe { atropos_task_cancel_info(task, null_mut()) };
            return;
        }
    };
    let mut memory = vec![u64::MAX; 4096 / 8 + 1];
    memory[0] = size as u64;
    // SAFETY: no size that the library believes is larger than the memory.
    let answer = unsafe { atropos_task_cancel_info(task, memory.as_mut_ptr().cast()) };
    assert!(answer == 0 || answer == 1, "answer {answer}");
    let written = if answer == 1 { size.div_ceil(8) } else { 1 };
    assert!(memory[written..].iter().all(|word| *word == u64::MAX), "written beyond {size} bytes");
}

fn reload(how: u8) {
    let text = settings(how);
    // SAFETY: zero is a valid value of every field.
    let mut config: atropos_config = unsafe { std::mem::zeroed() };
    config.size = std::mem::size_of::<atropos_config>() + (how >> 7) as usize;
    config.text = text.as_ptr();
    let memory = [config; 2];
    // SAFETY: two structs have room for one that is a byte longer.
    known(unsafe { atropos_reload(memory.as_ptr()) });
}

/// A few steps of the controller, each after a pause.
fn tick(steps: u8, pause: u8) {
    for _ in 0..=steps % 8 {
        pass((pause as u64 % 16) * 2_000_000);
        known(atropos_controller_tick());
    }
}

/// Time passes, for the clock that this process's region reads.
fn pass(ns: u64) {
    if let Some(process) = atropos::process::active() {
        // A year at most: the clock itself never jumps further.
        process.header.clock.ns_base.fetch_add(ns % (1 << 55), Relaxed);
    }
}

fn reports(how: u8) {
    let size = [0, 1, 7, 300, 65536][how as usize % 5];
    let mut text: Vec<c_char> = vec![1; size];
    // SAFETY: the buffer has the size given, or is NULL.
    unsafe {
        let at = if size == 0 { null_mut() } else { text.as_mut_ptr() };
        atropos_last_error(at, size);
        atropos_stats(at, size);
        if size > 0 {
            assert!(text.contains(&0), "not terminated");
        }
        let seen = atropos_decisions(if how & 128 == 0 { Some(on_decision) } else { None }, null_mut());
        known(seen.min(0));
    }
    known(ATROPOS_OK);
    assert!(atropos_version() > 0);
}

/// Sets each callback whose bit is set and takes the others away.
///
/// SAFETY: the functions live for ever and use no argument.
unsafe fn set_callbacks(which: u8) {
    let on = |bit: u8| which >> bit & 1 == 1;
    let flags = if on(6) { ATROPOS_ACTION_ANYWHERE } else { 0 };
    // SAFETY: the caller's promise.
    unsafe {
        known(atropos_set_cancel_action_ex(if on(0) { Some(on_cancel) } else { None }, null_mut(), flags));
        known(atropos_set_terminate_action(if on(1) { Some(on_cancel) } else { None }, null_mut(), flags));
        known(atropos_edge_source(if on(2) { Some(on_edges) } else { None }, null_mut()));
        known(atropos_set_progress_source(if on(3) { Some(on_progress) } else { None }, null_mut()));
        known(atropos_set_rollback_cost(if on(4) { Some(on_cost) } else { None }, null_mut()));
        known(atropos_set_describe(if on(5) { Some(on_describe) } else { None }, null_mut()));
        known(atropos_set_log(if on(7) { Some(on_log) } else { None }, null_mut()));
    }
}

/// What a host might do inside a callback, once per call of number 38.
fn mischief() {
    let what = MISCHIEF.swap(0, Relaxed) as u8;
    let task = handle(&TASKS, what >> 4);
    match what & 15 {
        0 => {}
        1 => atropos_free_cancel(task),
        2 => known(atropos_controller_tick()),
        3 => drop(atropos_controller_pause_ms()),
        4 => known(atropos_shutdown()),
        5 => {
            known(atropos_shutdown());
            init(what >> 4);
        }
        6 => known(atropos_controller_stop()),
        7 => reload(what >> 4),
        8 => known(atropos_agent_poll().min(0)),
        9 => reports(what >> 4),
        10 => TASKS[what as usize >> 4].store(atropos_create_cancel(1), Relaxed),
        11 => atropos_task_request_end(task, 1),
        12 => atropos_task_release_all(task),
        13 => known(atropos_controller_start()),
        14 => known(atropos_agent_start()),
        _ => atropos_task_cancel_acknowledge(task, atropos_task_scope(task)),
    }
}

unsafe extern "C" fn on_cancel(request: *const atropos_cancel_request, _: *mut c_void) -> c_int {
    // SAFETY: the library's promise: it lives through the call.
    let request = unsafe { &*request };
    assert_eq!(request.size, std::mem::size_of::<atropos_cancel_request>());
    // SAFETY: as above.
    let _ = unsafe { CStr::from_ptr(request.reason) }.count_bytes();
    mischief();
    atropos_task_cancel_acknowledge(request.task, request.scope);
    (request.scope % 3 == 0) as c_int
}

unsafe extern "C" fn on_edges(edges: *mut atropos_edge, max: usize, _: *mut c_void) -> usize {
    mischief();
    let all = TASKS.iter().enumerate().map(|(i, waiter)| atropos_edge {
        waiter: waiter.load(Relaxed),
        blocker: TASKS[(i * 7 + 3) % 16].load(Relaxed),
        resource: RESOURCES[i % 4].load(Relaxed),
        kind: i as u32 % 4,
        instance: i as u64 % 3,
    });
    let mut n = 0;
    for edge in all.take(max) {
        // SAFETY: the library's promise: there is room for `max`.
        unsafe { edges.add(n).write(edge) };
        n += 1;
    }
    // Some hosts will count more than they wrote.
    if RESOURCES[0].load(Relaxed) == 2 {
        max + 1
    } else {
        n
    }
}

unsafe extern "C" fn on_progress(_: u64, key: u64, done: *mut u64, total: *mut u64, _: *mut c_void) -> c_int {
    mischief();
    // SAFETY: the library's promise: both are there.
    unsafe { (*done, *total) = (key, key / 2) };
    key as c_int
}

unsafe extern "C" fn on_cost(_: u64, key: u64, _: *mut c_void) -> u64 {
    mischief();
    number(key as u8)
}

unsafe extern "C" fn on_describe(r: u32, instance: u64, buf: *mut c_char, size: usize, _: *mut c_void) -> usize {
    mischief();
    // SAFETY: the library's promise: there is room for `size`.
    unsafe { std::ptr::write_bytes(buf, instance as u8, size) };
    [0, size, size + 100, usize::MAX][r as usize % 4]
}

unsafe extern "C" fn on_log(level: c_int, message: *const c_char, _: *mut c_void) {
    // SAFETY: the library's promise.
    assert!((1..=4).contains(&level) && !unsafe { CStr::from_ptr(message) }.is_empty());
    mischief();
}

unsafe extern "C" fn on_decision(json: *const c_char, _: *mut c_void) {
    // SAFETY: the library's promise.
    let text = unsafe { CStr::from_ptr(json) }.to_str().expect("UTF-8");
    assert!(serde_json::from_str::<serde_json::Value>(text).is_ok(), "not JSON: {text}");
    mischief();
}
