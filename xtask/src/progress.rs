//! One line that shows what runs, for how long and how long it took last time; and running a command behind it.

use crate::dirs;
use anyhow::{bail, Context, Result};
use std::fs::File;
use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Without a terminal a plain line is enough this often.
const PLAIN_EVERY: Duration = Duration::from_secs(30);
const REDRAW_EVERY: Duration = Duration::from_millis(300);
const WORTH_AN_ESTIMATE: Duration = Duration::from_secs(2);
const TAIL_LINES: usize = 30;

/// A labelled line on stderr: redrawn in place on a terminal, else printed now and then.
pub struct Progress {
    label: String,
    started: Instant,
    expected: Option<Duration>,
    /// Work that was found done before tells nothing about the next time.
    worth_remembering: Duration,
    tty: bool,
    drawn: Instant,
}

impl Progress {
    /// `expected_default`: what a 2-core machine needs; replaced by the time this machine took last.
    pub fn start(label: &str, expected_default: Option<Duration>) -> Self {
        let expected = last_duration(label).or(expected_default);
        let tty = std::io::stderr().is_terminal();
        let worth_remembering = expected_default.map_or(WORTH_AN_ESTIMATE, |e| WORTH_AN_ESTIMATE.max(e / 20));
        let (started, drawn) = (Instant::now(), Instant::now());
        let progress = Progress { label: label.into(), started, expected, worth_remembering, tty, drawn };
        progress.draw("");
        progress
    }

    pub fn tick(&mut self, detail: &str) {
        let every = if self.tty { REDRAW_EVERY } else { PLAIN_EVERY };
        if self.drawn.elapsed() >= every {
            self.drawn = Instant::now();
            self.draw(detail);
        }
    }

    fn draw(&self, detail: &str) {
        let elapsed = self.started.elapsed();
        let about = self.expected.map_or(String::new(), |e| format!(" of about {}", clock(e)));
        let line = format!("  {} … {}{about}  {detail}", self.label, clock(elapsed));
        let mut err = std::io::stderr().lock();
        // A closed stderr must not stop the work that is being reported.
        let _ = if self.tty {
            let line: String = line.chars().take(terminal_columns().saturating_sub(1)).collect();
            write!(err, "\r\x1b[K{line}").and_then(|()| err.flush())
        } else {
            writeln!(err, "{}", line.trim_end())
        };
    }

    pub fn finish(self, ok: bool, detail: &str) {
        let elapsed = self.started.elapsed();
        if ok && elapsed > self.worth_remembering {
            remember_duration(&self.label, elapsed);
        }
        let mark = if ok { "ok" } else { "FAILED" };
        let clear = if self.tty { "\r\x1b[K" } else { "" };
        eprintln!(
            "{clear}  {} {mark} ({}){}{detail}",
            self.label,
            clock(elapsed),
            if detail.is_empty() { "" } else { "  " }
        );
    }
}

/// Work without output of its own, behind a line that is drawn once and tells the time it took.
pub fn during<T>(label: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let progress = Progress::start(label, None);
    let done = work();
    progress.finish(done.is_ok(), "");
    done
}

/// `m:ss`
pub fn clock(duration: Duration) -> String {
    let s = duration.as_secs();
    format!("{}:{:02}", s / 60, s % 60)
}

fn terminal_columns() -> usize {
    // SAFETY: winsize is plain data, and the kernel fills it only when the call returns 0.
    let columns = unsafe {
        let mut size: libc::winsize = std::mem::zeroed();
        if libc::ioctl(libc::STDERR_FILENO, libc::TIOCGWINSZ, &mut size) == 0 {
            size.ws_col
        } else {
            0
        }
    };
    if columns == 0 {
        80
    } else {
        columns as usize
    }
}

fn timings_file() -> Result<PathBuf> {
    Ok(dirs::cache()?.join("timings.json"))
}

fn last_duration(label: &str) -> Option<Duration> {
    let timings: serde_json::Value = serde_json::from_slice(&std::fs::read(timings_file().ok()?).ok()?).ok()?;
    timings[label].as_f64().map(Duration::from_secs_f64)
}

/// Best effort: a lost entry only makes the next estimate poorer.
fn remember_duration(label: &str, took: Duration) {
    let Ok(path) = timings_file() else { return };
    let old = std::fs::read(&path).ok().and_then(|text| serde_json::from_slice(&text).ok());
    let mut timings: serde_json::Map<String, serde_json::Value> = old.unwrap_or_default();
    timings.insert(label.into(), took.as_secs_f64().into());
    let _ = std::fs::write(path, serde_json::Value::Object(timings).to_string());
}

/// A command behind a progress line; its output goes to `log`, whose tail is shown when it fails.
pub struct Step<'a> {
    pub label: &'a str,
    pub log: &'a Path,
    pub expected: Option<Duration>,
    /// After this it is ended, with all it started in its process group.
    pub limit: Option<Duration>,
    /// Makes the detail shown beside the clock from each line of output; called with every line.
    pub watch: &'a mut dyn FnMut(&str) -> Option<String>,
}

impl Step<'_> {
    /// Runs the command and fails, naming the log and showing its tail, unless it exits with 0.
    pub fn run(self, command: Command) -> Result<()> {
        let (label, log) = (self.label.to_string(), self.log.to_path_buf());
        match self.run_unchecked(command)? {
            Ended::Code(0) => Ok(()),
            ended => bail!("{label}: {ended}\n{}", tail(&log)),
        }
    }

    pub fn run_unchecked(self, mut command: Command) -> Result<Ended> {
        let mut log = File::options()
            .create(true)
            .append(true)
            .open(self.log)
            .with_context(|| format!("cannot write the log {}", self.log.display()))?;
        writeln!(log, "\n$ {}", shown(&command))?;
        let (reader, writer) = std::io::pipe()?;
        command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
        let mut child = group::spawn(&mut command)?;
        // The parent's copies of the pipe would keep it open past the child's end.
        drop(command);
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(reader).split(b'\n').map_while(Result::ok) {
                if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                    return;
                }
            }
        });
        let mut progress = Progress::start(self.label, self.expected);
        let (mut detail, mut open, mut status) = (String::new(), true, None);
        let ended = loop {
            match lines.recv_timeout(Duration::from_millis(100)) {
                Ok(line) => {
                    writeln!(log, "{line}")?;
                    if let Some(new) = (self.watch)(&line) {
                        detail = new;
                    }
                    progress.tick(&detail);
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => open = false,
                Err(RecvTimeoutError::Timeout) => {}
            }
            progress.tick(&detail);
            // A daemon left behind by the command may hold the pipe: its exit and one quiet interval suffice.
            if let Some(status) = status {
                break Ended::from_status(status);
            }
            status = child.try_wait()?;
            if !open && status.is_none() {
                // It closed its output and goes on; nothing but its end is left to wait for.
                std::thread::sleep(Duration::from_millis(50));
            }
            if let Some(limit) = self.limit.filter(|limit| status.is_none() && progress.started.elapsed() > *limit) {
                group::end(&mut child);
                child.wait()?;
                break Ended::TimedOut(limit);
            }
        };
        group::forget();
        progress.finish(ended == Ended::Code(0), &detail);
        Ok(ended)
    }
}

#[derive(Debug, PartialEq, Eq)]
pub enum Ended {
    Code(i32),
    Signal(i32),
    TimedOut(Duration),
}

impl Ended {
    fn from_status(status: std::process::ExitStatus) -> Self {
        use std::os::unix::process::ExitStatusExt;
        status.code().map_or_else(|| Ended::Signal(status.signal().unwrap_or(0)), Ended::Code)
    }
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Ended::Code(code) => write!(f, "ended with exit code {code}"),
            Ended::Signal(signal) => write!(f, "was ended by signal {signal}"),
            Ended::TimedOut(limit) => {
                write!(f, "did not end within {} and was stopped", clock(*limit))
            }
        }
    }
}

/// The command as one would type it.
pub fn shown(command: &Command) -> String {
    let set = command.get_envs().filter_map(|(name, value)| Some((name.to_string_lossy(), value?.to_string_lossy())));
    let set = set.map(|(name, value)| format!("{name}='{value}'"));
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    set.chain(words.map(|w| w.to_string_lossy().into_owned())).collect::<Vec<_>>().join(" ")
}

/// The last lines of a log, under its name.
pub fn tail(log: &Path) -> String {
    let text = std::fs::read(log).map(|t| String::from_utf8_lossy(&t).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let last = &lines[lines.len().saturating_sub(TAIL_LINES)..];
    format!("the whole log is {}; it ends:\n    {}", log.display(), last.join("\n    "))
}

/// The running command has its own process group, so that a limit ends all it started. The terminal's Ctrl-C does
/// not reach such a group: a handler passes it on.
pub mod group {
    use super::*;
    use std::os::unix::process::CommandExt;
    use std::process::Child;
    use std::sync::atomic::{AtomicI32, Ordering};

    static RUNNING: AtomicI32 = AtomicI32::new(0);
    /// After TERM, before KILL.
    const GRACE: Duration = Duration::from_secs(10);

    extern "C" fn pass_on(signal: libc::c_int) {
        let group = RUNNING.load(Ordering::Relaxed);
        // SAFETY: kill and _exit are async-signal-safe; the group is one that we made.
        unsafe {
            if group > 0 {
                libc::kill(-group, libc::SIGTERM);
            }
            libc::_exit(128 + signal);
        }
    }

    pub fn spawn(command: &mut Command) -> Result<Child> {
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            // SAFETY: pass_on makes only async-signal-safe calls.
            unsafe { libc::signal(signal, pass_on as *const () as libc::sighandler_t) };
        }
        let child = command.process_group(0).spawn().with_context(|| format!("cannot start `{}`", shown(command)))?;
        RUNNING.store(child.id() as i32, Ordering::Relaxed);
        Ok(child)
    }

    /// For a command in the terminal's own group: Ctrl-C is its to handle, and we stay until it has cleaned up.
    pub fn leave_interrupts_to_child() {
        extern "C" fn nothing(_: libc::c_int) {}
        // SAFETY: the handler does nothing. A handler, unlike SIG_IGN, is not inherited by the command.
        unsafe { libc::signal(libc::SIGINT, nothing as *const () as libc::sighandler_t) };
    }

    pub fn forget() {
        RUNNING.store(0, Ordering::Relaxed);
    }

    /// TERM to the whole group, KILL after a grace. The caller reaps the child.
    pub fn end(child: &mut Child) {
        let group = child.id() as i32;
        // SAFETY: signals go to the group that `spawn` made; its leader is not reaped yet, so the id is still ours.
        unsafe { libc::kill(-group, libc::SIGTERM) };
        let asked = Instant::now();
        while asked.elapsed() < GRACE && matches!(child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(50));
        }
        // SAFETY: as above; members that outlived the leader keep the id taken, and without any this is ESRCH.
        unsafe { libc::kill(-group, libc::SIGKILL) };
    }
}
