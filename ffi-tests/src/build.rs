//! The library under test, the C compiler, and bounded runs of what it built.
use crate::watch::{host, rust_flags, watch};
use std::{
    env, fs,
    os::unix::{fs::symlink, process::CommandExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        atomic::{AtomicU32, Ordering},
        OnceLock,
    },
    time::{Duration, Instant},
};

/// The checkout's root.
pub fn root() -> &'static Path {
    atropos_link::checkout()
}

/// A folder of this process for what a test builds; kept for a look after a failure, replaced by the next run.
pub fn scratch(name: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    let dir = profile_dir().join("ffi-scratch").join(format!("{name}-{n}"));
    // Absent on the first run; anything worse shows in the next line.
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap_or_else(|e| panic!("cannot create {}: {e}", dir.display()));
    dir
}

/// `target/<profile>`, where the running test lies in `deps/`.
fn profile_dir() -> PathBuf {
    let exe = env::current_exe().expect("a test knows its own path");
    let deps = exe.parent().expect("lies in a folder");
    if deps.ends_with("deps") {
        deps.parent().expect("deps lies in a folder").into()
    } else {
        deps.into()
    }
}

/// `libatropos.so.0` and `libatropos.a`, built once per test process in the profile of the tests themselves.
pub struct Library {
    /// Holds `libatropos.so.0` and the link `libatropos.so`.
    pub dir: PathBuf,
    pub shared: PathBuf,
    pub archive: PathBuf,
}

pub fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let mut out = profile_dir();
        let target = out.parent().expect("target/<profile>").to_path_buf();
        let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(["build", "--quiet", "--package", "atropos", "--lib"]).current_dir(root());
        if out.ends_with("release") {
            cargo.arg("--release");
        }
        if let Some(sanitizer) = watch().sanitizer() {
            // A target folder of its own: the flags must not throw the others' work away.
            let own = target.join(format!("sanitize-{sanitizer}"));
            out = own.join(host()).join(out.file_name().expect("target/<profile>"));
            cargo.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", rust_flags(sanitizer));
            cargo.args(["--target", host(), "--target-dir"]).arg(own);
        } else {
            cargo.arg("--target-dir").arg(target);
        }
        let done = cargo.output().expect("cargo starts");
        assert!(done.status.success(), "building the library failed:\n{}", String::from_utf8_lossy(&done.stderr));
        let archive = out.join("libatropos.a");
        let shared = out.join(atropos_link::SONAME);
        let link = match watch().sanitizer() {
            Some(_) => atropos_link::shared_for_sanitizer,
            None => atropos_link::shared,
        };
        link(&archive, &shared).unwrap_or_else(|why| panic!("{why}"));
        let dir = scratch("lib");
        for name in ["libatropos.so", atropos_link::SONAME] {
            symlink(&shared, dir.join(name)).expect("a fresh folder takes a link");
        }
        Library { dir, shared, archive }
    })
}

/// How a program is linked to the library.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Link {
    Static,
    /// Position-independent executable, the distributions' default.
    Shared,
    /// `-no-pie`: the exported gate is reached through a copy relocation in the executable.
    SharedNoPie,
    /// Not at all: the program loads it.
    None,
}

/// The compiler with the flags under which the headers must be clean.
pub fn compiler(source: &Path, headers: &Path) -> Command {
    let mut cc = language(source, headers);
    cc.arg(source);
    cc
}

/// The same without a file: for `source`'s language.
fn language(source: &Path, headers: &Path) -> Command {
    let cpp = source.extension().is_some_and(|e| e == "cpp");
    let mut cc = if cpp { Command::new("c++") } else { Command::new("cc") };
    cc.arg(if cpp { "-std=c++17" } else { "-std=c11" });
    cc.args(["-D_GNU_SOURCE", "-O2", "-g", "-pthread", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I"]);
    cc.arg(headers);
    cc
}

/// Runs a compiler command; its messages are the failure text.
pub fn compile(mut cc: Command, what: &str) {
    let done = cc.output().unwrap_or_else(|e| {
        panic!(
            "cannot run {:?}: {e}; a C and a C++ compiler are needed (Debian: apt-get install gcc g++)",
            cc.get_program()
        )
    });
    assert!(done.status.success(), "{what} does not compile:\n{}", String::from_utf8_lossy(&done.stderr));
}

/// Compiles `c/<file>`, links it as asked, runs it with `args` in a folder of its own, and panics with what it
/// wrote unless it ends with 0 in time. `{lib}` in an argument becomes the path of the shared library.
pub fn run(file: &str, link: Link, args: &[&str]) {
    run_with(&root().join("include"), file, link, args);
}

/// The same with the headers in `headers` instead of this checkout's.
pub fn run_with(headers: &Path, file: &str, link: Link, args: &[&str]) {
    let output = Program::build(headers, file, link, args).output(BOUND).unwrap_or_else(|why| panic!("{why}"));
    // Measured times (onset to cancel, failover) are worth a look in a passing run, too: shown with --nocapture.
    print!("{output}");
}

/// A program of `c/` with its arguments, compiled and linked, to be run in a folder of its own.
pub struct Program {
    exe: PathBuf,
    args: Vec<String>,
    dir: PathBuf,
    shown: String,
}

impl Program {
    pub fn build(headers: &Path, file: &str, link: Link, args: &[&str]) -> Program {
        let lib = library();
        let source = root().join("ffi-tests/c").join(file);
        let name = format!("{file}-{link:?}-{}", args.join("-"));
        let dir = scratch(&name.replace(['/', '{', '}'], ""));
        let exe = dir.join("program");
        let mut cc = compiler(&source, headers);
        if watch().sanitizer().is_some() {
            let object = dir.join("program.o");
            cc.args(watch().compile_flags()).args(["-fPIE", "-c", "-o"]).arg(&object);
            compile(cc, file);
            cc = language(&source, headers);
            cc.arg(object);
        }
        match link {
            Link::Static => {
                cc.arg(&lib.archive).args(atropos_link::SYSTEM);
            }
            Link::Shared | Link::SharedNoPie => {
                cc.arg(if link == Link::Shared { "-pie" } else { "-no-pie" });
                cc.arg(if link == Link::Shared { "-fPIE" } else { "-fno-pie" });
                cc.arg("-L").arg(&lib.dir).arg("-latropos").arg(format!("-Wl,-rpath,{}", lib.dir.display()));
                cc.arg("-ldl");
            }
            Link::None => {
                cc.arg("-ldl");
            }
        }
        cc.args(watch().link_flags()).arg("-o").arg(&exe);
        compile(cc, file);
        let shown = format!("{file} ({link:?}, {args:?})");
        let text = lib.shared.display().to_string();
        let args: Vec<String> = args.iter().map(|a| a.replace("{lib}", &text)).collect();
        Program { exe, args, dir, shown }
    }

    /// What it wrote, or, unless it ended with 0 within `bound` (unwatched) and a watcher found nothing, what went wrong.
    pub fn output(&self, bound: Duration) -> Result<String, String> {
        let mut command = watch().command(self.exe.clone());
        command.args(&self.args).current_dir(&self.dir);
        let output = run_bounded(&mut command, &self.dir.join("output"), &self.shown, watch().bound(bound))?;
        match watch().finding(&output) {
            Some(finding) => Err(format!("{}: {:?} found: {finding}\n{output}", self.shown, watch())),
            None => Ok(output),
        }
    }
}

/// Far over what any scenario takes on a busy machine; a hang is a failure with the output so far.
const BOUND: Duration = Duration::from_secs(90);

fn run_bounded(command: &mut Command, output: &Path, shown: &str, bound: Duration) -> Result<String, String> {
    // A file, not a pipe: a grandchild that outlives the program would keep a pipe open.
    let file = fs::File::create(output).expect("the scratch folder is writable");
    command.stdin(Stdio::null()).stdout(file.try_clone().expect("dup")).stderr(file);
    // A group of its own, so that children it forked end with it.
    let mut child = command.process_group(0).spawn().unwrap_or_else(|e| panic!("{shown} does not start: {e}"));
    let group = child.id() as libc::pid_t;
    let begin = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("our own child") {
            break Some(status);
        }
        if begin.elapsed() > bound {
            break None;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    // SAFETY: the group was made above by us and holds only this program and its children.
    unsafe { libc::kill(-group, libc::SIGKILL) };
    let _ = child.wait();
    let written = String::from_utf8_lossy(&fs::read(output).unwrap_or_default()).into_owned();
    match status {
        Some(status) if status.success() => Ok(written),
        Some(status) => Err(format!("{shown} failed with {status}; it wrote:\n{written}")),
        None => Err(format!("{shown} did not end within {bound:?}; it wrote:\n{written}")),
    }
}
