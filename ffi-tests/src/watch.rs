//! Watchers: the C programs under AddressSanitizer, ThreadSanitizer, or valgrind's memcheck.
//!
//! `ATROPOS_WATCH=address|thread|memcheck cargo test -p atropos-ffi-tests --test programs`, or `cargo xtask sanitize`.
//!
//! The library is built with `-Zsanitizer` (which a stable compiler does under `RUSTC_BOOTSTRAP=1`), the C program with
//! the C compiler's `-fsanitize`; both call the same run-time functions, and the program is linked to the run time that
//! comes with the Rust compiler. Rust's own standard library comes without instrumentation: what ThreadSanitizer does
//! not see of it is in `suppressions/thread.txt`, each with its reason.
use crate::build::root;
use std::{env, path::PathBuf, process::Command, sync::OnceLock, time::Duration};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Watch {
    None,
    Address,
    Thread,
    Memcheck,
}

/// Exit status of a program in which something was found; no program uses it itself.
const FOUND: i32 = 97;

/// What the environment asks for.
pub fn watch() -> Watch {
    match env::var("ATROPOS_WATCH").as_deref() {
        Err(_) | Ok("") => Watch::None,
        Ok("address") => Watch::Address,
        Ok("thread") => Watch::Thread,
        Ok("memcheck") => Watch::Memcheck,
        Ok(other) => panic!("ATROPOS_WATCH={other}: there are address, thread and memcheck"),
    }
}

impl Watch {
    /// Name of the sanitizer, for compilers.
    pub fn sanitizer(self) -> Option<&'static str> {
        match self {
            Watch::Address => Some("address"),
            Watch::Thread => Some("thread"),
            Watch::None | Watch::Memcheck => None,
        }
    }

    /// Programs wait for things to happen, and things happen more slowly.
    pub fn bound(self, plain: Duration) -> Duration {
        match self {
            Watch::None => plain,
            Watch::Address => plain * 2,
            Watch::Thread | Watch::Memcheck => plain * 4,
        }
    }

    /// For the compiler of the C program, when it makes the object file.
    pub fn compile_flags(self) -> Vec<String> {
        let Some(name) = self.sanitizer() else { return Vec::new() };
        vec![format!("-fsanitize={name}"), "-fno-omit-frame-pointer".into()]
    }

    /// For linking. Not `-fsanitize`: that would bring the C compiler's run time, of another version than the library's
    /// instrumentation. Exported, so that a library loaded later finds it.
    pub fn link_flags(self) -> Vec<String> {
        if self.sanitizer().is_none() {
            return Vec::new();
        }
        let archive = runtime(self).unwrap_or_else(|why| panic!("{why}"));
        let archive = archive.display();
        vec![
            format!("-Wl,--whole-archive,{archive},--no-whole-archive"),
            "-rdynamic".into(),
            "-lrt".into(),
            "-lm".into(),
        ]
    }

    /// How `exe` is started.
    pub fn command(self, exe: PathBuf) -> Command {
        let mut command = match self {
            Watch::Memcheck => {
                let mut valgrind = Command::new("valgrind");
                // Quiet: whatever it says is a finding. Memory that is still reachable at the end is no leak: threads of
                // the host may be inside the library until then.
                valgrind.args(["--quiet", "--leak-check=full", "--show-leak-kinds=definite", "--num-callers=24"]);
                // Turns: valgrind runs one thread at a time, and one that spins must not keep the others from going on.
                valgrind.args(["--errors-for-leak-kinds=definite", "--fair-sched=yes"]);
                let known = root().join("ffi-tests/suppressions/memcheck.supp");
                valgrind.arg(format!("--suppressions={}", known.display()));
                valgrind.arg(format!("--error-exitcode={FOUND}")).arg(exe);
                valgrind
            }
            _ => Command::new(exe),
        };
        let thread = root().join("ffi-tests/suppressions/thread.txt");
        match self {
            Watch::Address => command.env(
                "ASAN_OPTIONS",
                format!("exitcode={FOUND}:detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1"),
            ),
            // Children of a program with threads start threads of their own: the programs do so on purpose.
            Watch::Thread => command.env(
                "TSAN_OPTIONS",
                format!("exitcode={FOUND}:die_after_fork=0:history_size=4:suppressions='{}'", thread.display()),
            ),
            Watch::None | Watch::Memcheck => &mut command,
        };
        command
    }

    /// The first finding in what a program and its children wrote. The exit status alone does not do: a child that ends
    /// by `_exit` or a signal keeps its own.
    pub fn finding(self, output: &str) -> Option<&str> {
        let is_finding = |line: &&str| match self {
            Watch::None => false,
            Watch::Address => line.contains("AddressSanitizer") || line.contains("LeakSanitizer"),
            Watch::Thread => line.contains("ThreadSanitizer"),
            Watch::Memcheck => line.starts_with("=="),
        };
        output.lines().find(is_finding)
    }
}

fn rustc(args: &[&str]) -> Result<String, String> {
    let program = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let done = Command::new(&program).args(args).output().map_err(|e| format!("cannot run {program:?}: {e}"))?;
    if !done.status.success() {
        return Err(format!("{program:?} {args:?} failed:\n{}", String::from_utf8_lossy(&done.stderr)));
    }
    Ok(String::from_utf8_lossy(&done.stdout).trim().into())
}

/// The sanitizer's run time among the Rust compiler's libraries.
fn runtime(watch: Watch) -> Result<PathBuf, String> {
    let short = if watch == Watch::Thread { "tsan" } else { "asan" };
    let dir = PathBuf::from(rustc(&["--print", "target-libdir"])?);
    let entries = std::fs::read_dir(&dir).map_err(|e| format!("cannot list {}: {e}", dir.display()))?;
    let ending = format!("_rt.{short}.a");
    let found = entries.filter_map(|e| Some(e.ok()?.path())).find(|p| p.to_string_lossy().ends_with(&ending));
    found.ok_or_else(|| {
        format!("this Rust compiler comes without a run time for -Zsanitizer: no *{ending} in {}", dir.display())
    })
}

/// The machine's own target: named for cargo, so that the flags do not reach build scripts.
pub fn host() -> &'static str {
    static HOST: OnceLock<String> = OnceLock::new();
    HOST.get_or_init(|| {
        let about = rustc(&["-vV"]).unwrap_or_else(|why| panic!("{why}"));
        let host = about.lines().find_map(|line| line.strip_prefix("host: "));
        host.unwrap_or_else(|| panic!("rustc -vV names no host: {about}")).into()
    })
}

/// For the Rust compiler.
pub fn rust_flags(sanitizer: &str) -> String {
    let mut flags = format!("-Zsanitizer={sanitizer} -Cforce-frame-pointers=yes");
    if sanitizer == "thread" {
        flags += " --cfg atropos_tsan";
    }
    // Compilers that know this flag refuse to mix; older ones have neither the flag nor the check.
    if rustc(&["-C", "help"]).is_ok_and(|help| help.contains("unsafe-allow-abi-mismatch")) {
        flags += " -Cunsafe-allow-abi-mismatch=sanitizer";
    }
    flags
}
