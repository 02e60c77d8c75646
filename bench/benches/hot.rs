//! What a host pays for the library: hot calls with the gate closed, with the coarse and with the precise clock, a task's
//! begin and end, on one thread and on several at once. Measured in C through the shared library (`host.c`), beside what
//! a store, a call and a clock cost on the same machine in the same run, and what two peers cost that a host could use
//! instead. The controller's side is in `tick.rs`.
//! SPDX-License-Identifier: MIT OR Apache-2.0
use criterion::measurement::WallTime;
use criterion::{criterion_group, BenchmarkGroup, BenchmarkId, Criterion};
use std::{
    env,
    ffi::{c_char, c_int, c_uint, CStr, CString},
    fs,
    os::unix::fs::symlink,
    path::PathBuf,
    process::Command,
    time::Duration,
};

type Loop = unsafe extern "C" fn(u64);

/// `bench_loop` of host.h.
#[repr(C)]
struct RawLoop {
    group: *const c_char,
    name: *const c_char,
    run: Option<Loop>,
    calls: u64,
}

/// One thing that host.c repeats.
#[derive(Clone, Copy)]
struct Repeated {
    group: &'static str,
    name: &'static str,
    run: Loop,
    /// In each round; times are given per call.
    calls: u64,
}

/// `host.c` as a loaded module.
struct Host {
    handle: *mut libc::c_void,
}

impl Host {
    fn build() -> Host {
        let root = atropos_link::checkout();
        // target/<profile>/deps/hot-…
        let exe = env::current_exe().expect("a bench knows its own path");
        let target = exe.ancestors().nth(3).expect("target/<profile>/deps");
        let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(["build", "--quiet", "--release", "--package", "atropos", "--lib", "--target-dir"]);
        run(cargo.arg(target).current_dir(root));
        let dir = target.join("release/hot-host");
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).expect("the target folder is writable");
        for name in ["libatropos.so", "libatropos.so.0"] {
            symlink(target.join("release/libatropos.so"), dir.join(name)).expect("a fresh folder takes a link");
        }
        let (benches, include) = (root.join("bench/benches"), root.join("include"));
        let flags = ["-D_GNU_SOURCE", "-O2", "-fPIC", "-Wall", "-Wextra", "-Werror", "-pthread", "-c"];
        let mut objects = Vec::new();
        for (compiler, standard, source) in [("cc", "-std=c11", "host.c"), ("c++", "-std=c++17", "peer.cpp")] {
            let object = dir.join(source).with_extension("o");
            run(Command::new(compiler)
                .arg(standard)
                .args(flags)
                .arg("-I")
                .arg(&include)
                .arg(benches.join(source))
                .arg("-o")
                .arg(&object));
            objects.push(object);
        }
        let module = dir.join("host.so");
        let mut link = Command::new("c++");
        link.args(["-shared", "-pthread"]).args(&objects).arg("-o").arg(&module);
        run(link.arg("-L").arg(&dir).arg("-latropos").arg(format!("-Wl,-rpath,{}", dir.display())));
        Host::load(module)
    }

    fn load(module: PathBuf) -> Host {
        let path = CString::new(module.display().to_string()).expect("no NUL in a path");
        // SAFETY: loads a module we just built; its initialisers are the library's (none).
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "cannot load {}", module.display());
        Host { handle }
    }

    /// The function `name` of host.c as type `F`.
    fn get<F: Copy>(&self, name: &str) -> F {
        assert_eq!(size_of::<F>(), size_of::<*mut libc::c_void>());
        let symbol = CString::new(name).expect("no NUL in a name");
        // SAFETY: the handle is open for good.
        let found = unsafe { libc::dlsym(self.handle, symbol.as_ptr()) };
        assert!(!found.is_null(), "host.c has no {name}");
        // SAFETY: a function pointer has the size of a pointer, and callers name host.c's types.
        unsafe { std::mem::transmute_copy(&found) }
    }

    fn loops(&self, group: &str) -> impl Iterator<Item = Repeated> {
        let symbol = c"bench_loops";
        // SAFETY: the handle is open for good.
        let found = unsafe { libc::dlsym(self.handle, symbol.as_ptr()) } as *const RawLoop;
        assert!(!found.is_null(), "host.c has no {symbol:?}");
        let text = |at: *const c_char| -> &'static str {
            // SAFETY: a string constant of a module that stays loaded.
            unsafe { CStr::from_ptr(at) }.to_str().expect("names are ASCII")
        };
        let mut all = Vec::new();
        for i in 0.. {
            // SAFETY: the array is as host.h declares it and ends with a NULL name, where we stop.
            let raw = unsafe { &*found.add(i) };
            let (false, Some(run)) = (raw.name.is_null(), raw.run) else { break };
            all.push(Repeated { group: text(raw.group), name: text(raw.name), run, calls: raw.calls });
        }
        let group = group.to_string();
        all.into_iter().filter(move |l| l.group == group)
    }

    fn init(&self, text: &str) {
        let text = CString::new(text).expect("no NUL");
        let init: unsafe extern "C" fn(*const c_char) -> c_int = self.get("bench_init");
        let error: unsafe extern "C" fn(*mut c_char, usize) -> usize = self.get("bench_error");
        // SAFETY: as host.c declares them; the buffer has the size given.
        unsafe {
            let code = init(text.as_ptr());
            let mut why: [c_char; 512] = [0; 512];
            error(why.as_mut_ptr(), why.len());
            assert_eq!(code, 0, "init failed: {}", CStr::from_ptr(why.as_ptr()).to_string_lossy());
        }
    }

    fn call(&self, name: &str) -> c_int {
        let f: unsafe extern "C" fn() -> c_int = self.get(name);
        // SAFETY: as host.c declares it.
        unsafe { f() }
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

fn run(command: &mut Command) {
    let done = command.output().unwrap_or_else(|e| panic!("cannot run {:?}: {e}", command.get_program()));
    assert!(done.status.success(), "{command:?} failed:\n{}", String::from_utf8_lossy(&done.stderr));
}

/// `threads` = 1: on this thread, which has a task.
fn one(group: &mut BenchmarkGroup<'_, WallTime>, host: &Host, what: Repeated, threads: u32) {
    let on_threads: unsafe extern "C" fn(Loop, c_uint, u64) -> f64 = host.get("bench_on_threads");
    let id = match threads {
        1 => BenchmarkId::from_parameter(what.name),
        n => BenchmarkId::new(what.name, format!("{n} threads")),
    };
    group.bench_function(id, |b| {
        b.iter_custom(|n| {
            // At least one round; whole rounds only, so scale what was taken to the calls asked for.
            let rounds = n.div_ceil(what.calls);
            let scale = n as f64 / (rounds * what.calls) as f64;
            if threads == 1 {
                let begin = cpu_time();
                // SAFETY: as host.h declares it.
                unsafe { (what.run)(rounds) };
                return (cpu_time() - begin).mul_f64(scale);
            }
            // SAFETY: as host.c declares it.
            let ns = unsafe { on_threads(what.run, threads, rounds) };
            assert!(ns >= 0.0, "no {threads} threads");
            Duration::from_secs_f64(ns / 1e9).mul_f64(scale)
        })
    });
}

fn quick(group: &mut BenchmarkGroup<'_, WallTime>) {
    group.sample_size(30).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_millis(600));
}

fn hot_calls(c: &mut Criterion) {
    let host = Host::build();
    for group_name in ["base", "peer"] {
        let mut group = c.benchmark_group(group_name);
        quick(&mut group);
        host.loops(group_name).for_each(|what| one(&mut group, &host, what, 1));
        group.finish();
    }
    for (group_name, text, on) in [
        ("off", "mode = off", false),
        ("coarse", "mode = observe\nclock = coarse", true),
        ("precise", "mode = observe\nclock = precise", true),
    ] {
        host.init(text);
        assert_eq!(host.call("bench_is_tracked") != 0, on, "{group_name}: the gate");
        // Leads once, so that the clock chosen is the one in force.
        assert_eq!(host.call("bench_tick"), 0);
        let mut group = c.benchmark_group(group_name);
        quick(&mut group);
        host.loops("hot").for_each(|what| one(&mut group, &host, what, 1));
        group.finish();
        assert_eq!(host.call("bench_shutdown"), 0);
    }
}

/// All processors at once: what the calls of several threads cost each other, and what they would with a lock.
fn threads(c: &mut Criterion) {
    let host = Host::build();
    let most = std::thread::available_parallelism().map_or(1, |n| n.get() as u32).min(64);
    let mut counts: Vec<u32> = (1..).map(|i| 1 << i).take_while(|&n| n < most).collect();
    counts.push(most);
    host.init("mode = observe\nclock = coarse");
    assert_eq!(host.call("bench_tick"), 0);
    let mut group = c.benchmark_group("threads");
    quick(&mut group);
    let hot = ["get_free", "get_free_on", "wait_get_free", "request", "create_free", "task_create_free"];
    let compared: Vec<Repeated> =
        host.loops("base").filter(|l| l.name == "fetch_add").chain(host.loops("peer")).collect();
    for what in compared.into_iter().chain(host.loops("hot").filter(|l| hot.contains(&l.name))) {
        counts.iter().filter(|&&n| n > 1).for_each(|&n| one(&mut group, &host, what, n));
    }
    group.finish();
    assert_eq!(host.call("bench_shutdown"), 0);
}

criterion_group!(benches, hot_calls, threads);

fn main() {
    // `cargo test --all-targets` runs benches with --test: there is nothing to assert about times, and building the
    // release library for it would only cost minutes.
    if env::args().any(|a| a == "--test") {
        return;
    }
    benches();
    Criterion::default().configure_from_args().final_summary();
}
