//! What a host pays for the library: hot calls with the gate closed, with the coarse and with the precise clock; a
//! task's begin and end; the controller's tick. Measured in C through the shared library (`host.c`), beside what a
//! call and a clock cost on the same machine in the same run.
use criterion::{criterion_group, BenchmarkGroup, Criterion, SamplingMode};
use std::{
    env,
    ffi::{c_char, c_int, CStr, CString},
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

type Loop = unsafe extern "C" fn(u64);

/// `host.c` as a loaded module.
struct Host {
    handle: *mut libc::c_void,
}

impl Host {
    fn build() -> Host {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("bench lies in the workspace");
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
        let module = dir.join("host.so");
        let mut cc = Command::new("cc");
        cc.args(["-std=c11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-I"]);
        cc.arg(root.join("include")).arg(root.join("bench/benches/host.c")).arg("-o").arg(&module);
        run(cc.arg("-L").arg(&dir).arg("-latropos").arg(format!("-Wl,-rpath,{}", dir.display())));
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

/// Function of host.c, and how many hot calls one round makes: times are given per call.
const HOT: [(&str, u64); 11] = [
    ("hot_get_free", 2),
    ("hot_get_free_on", 2),
    ("hot_wait_get_free", 3),
    ("hot_wait_abandoned", 2),
    ("hot_progress", 1),
    ("hot_cancel_requested", 1),
    ("hot_request", 2),
    ("hot_task_get_free", 2),
    ("hot_task_wait_get_free", 3),
    ("hot_task_progress", 1),
    ("hot_task_cancel_requested", 1),
];
/// Begin and end together are one.
const TASKS: [&str; 2] = ["hot_create_free", "hot_task_create_free"];

fn one<M: criterion::measurement::Measurement<Value = Duration>>(
    group: &mut BenchmarkGroup<'_, M>,
    host: &Host,
    name: &str,
    calls: u64,
) {
    let f: Loop = host.get(name);
    let shown = name.trim_start_matches("hot_").trim_start_matches("base_");
    group.bench_function(shown, |b| {
        b.iter_custom(|n| {
            // At least one round; whole rounds only, so scale what was taken to the calls asked for.
            let rounds = n.div_ceil(calls);
            let begin = cpu_time();
            // SAFETY: as host.c declares it.
            unsafe { f(rounds) };
            (cpu_time() - begin).mul_f64(n as f64 / (rounds * calls) as f64)
        })
    });
}

fn quick(group: &mut BenchmarkGroup<'_, criterion::measurement::WallTime>) {
    group.sample_size(30).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_millis(600));
}

fn hot_calls(c: &mut Criterion) {
    let host = Host::build();
    let mut group = c.benchmark_group("base");
    quick(&mut group);
    for name in ["base_loop", "base_call", "base_clock_gettime"] {
        one(&mut group, &host, name, 1);
    }
    #[cfg(target_arch = "x86_64")]
    one(&mut group, &host, "base_rdtsc", 1);
    group.finish();

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
        for (name, calls) in HOT {
            one(&mut group, &host, name, calls);
        }
        for name in TASKS {
            one(&mut group, &host, name, 1);
        }
        group.finish();
        assert_eq!(host.call("bench_shutdown"), 0);
    }
}

/// Shorter than any step of a 20 ms window, so that each tick measured has work to do.
const WINDOW_MS: u64 = 20;

fn controller(c: &mut Criterion) {
    let host = Host::build();
    let begin: unsafe extern "C" fn(u32, u32, u32, c_int) -> u32 = host.get("crowd_begin");
    let end: unsafe extern "C" fn() = host.get("crowd_end");
    let tick: unsafe extern "C" fn() -> c_int = host.get("bench_tick");
    let mut group = c.benchmark_group("controller tick, 1000 tasks");
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    group.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(4));
    // The requests never end: under the largest objective they are calm, under the smallest an overload, and every
    // tick estimates and chooses.
    for (name, stalled, slo_ms, held) in
        [("calm", 0, 3_600_000, 2), ("stalled", 1, 1, 2), ("calm", 0, 3_600_000, 8), ("stalled", 1, 1, 8)]
    {
        host.init(&format!("mode = observe\nmax_tasks = 1200\nwindow_ms = {WINDOW_MS}\nslo_ms = {slo_ms}"));
        // SAFETY: as host.c declares it. 32 asked for; the bench's own lock is one of the table's places.
        let resources = unsafe { begin(1000, 32, held, stalled) };
        assert!(resources >= 30, "the library took {resources} resources");
        group.bench_function(format!("{name}, {} resources, {held} held by each", resources + 1), |b| {
            b.iter_custom(|n| {
                let mut spent = Duration::ZERO;
                for _ in 0..n {
                    // Only ticks that are due do work: pace them as a host does, and count the ticks alone.
                    std::thread::sleep(Duration::from_millis(WINDOW_MS));
                    let begin = cpu_time();
                    // SAFETY: as host.c declares it.
                    let code = unsafe { tick() };
                    spent += cpu_time() - begin;
                    assert_eq!(code, 0, "this process leads");
                }
                spent
            })
        });
        // SAFETY: as host.c declares it.
        unsafe { end() };
        assert_eq!(host.call("bench_shutdown"), 0);
    }
    group.finish();
}

criterion_group!(benches, hot_calls, controller);

fn main() {
    // `cargo test --all-targets` runs benches with --test: there is nothing to assert about times, and building the
    // release library for it would only cost minutes.
    if env::args().any(|a| a == "--test") {
        return;
    }
    benches();
    Criterion::default().configure_from_args().final_summary();
}
