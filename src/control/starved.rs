//! Whoever is ready to run and gets no processor is held up by the machine, and not at work at its own pace.
//!
//! On a machine with more work than processors a thread may stand still for hundreds of milliseconds with a lock in its
//! hands. To those who wait for it it looks like a culprit; a cancel would reach it no sooner than the processor does. The
//! kernel knows: such a thread is runnable, and its CPU time stands still (on a processor without ticks that of a running one
//! does so, too, for up to a second: then it is judged so much later). Only the few are asked about who might be
//! cancelled, and only while an overload lasts.

use super::sample::ThreadState;
use super::window::TaskId;

/// Whoever was not looked at for so long may have slept meanwhile: nothing is known of it.
const OUT_OF_DATE_NS: u64 = 150_000_000;

#[derive(Clone, Copy, Debug)]
struct Seen {
    task: TaskId,
    scope: u64,
    cpu_ns: u64,
    /// When it was last known to run, or not to be ready.
    since_ns: u64,
    at_ns: u64,
}

/// What the kernel said of candidates when they were last looked at.
#[derive(Debug, Default)]
pub struct Starvation {
    seen: Vec<Seen>,
}

impl Starvation {
    /// Forgets who was not looked at lately.
    pub fn tidy(&mut self, now_ns: u64) {
        self.seen.retain(|s| now_ns.saturating_sub(s.at_ns) < OUT_OF_DATE_NS);
    }

    /// For how long the task's thread has been ready without a processor, ns; 0 = it is not, or it is looked at for the first
    /// time.
    pub fn look(&mut self, task: TaskId, scope: u64, thread: ThreadState, now_ns: u64) -> u64 {
        let fresh = Seen { task, scope, cpu_ns: thread.cpu_ns, since_ns: now_ns, at_ns: now_ns };
        let Some(seen) = self.seen.iter_mut().find(|s| s.task == task) else {
            self.seen.push(fresh);
            return 0;
        };
        let known = seen.scope == scope && now_ns.saturating_sub(seen.at_ns) < OUT_OF_DATE_NS;
        if !known || !thread.ready || thread.cpu_ns != seen.cpu_ns {
            *seen = fresh;
        }
        seen.at_ns = now_ns;
        now_ns.saturating_sub(seen.since_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

    const MS: u64 = 1_000_000;

    #[test]
    fn who_is_ready_and_gets_no_processor_starves_until_it_runs() {
        let mut starvation = Starvation::default();
        let mut look = |at_ms: u64, ready: bool, cpu_ms: u64| {
            starvation.look(7, 1, ThreadState { ready, cpu_ns: cpu_ms * MS }, at_ms * MS) / MS
        };
        assert_eq!(look(1000, true, 5), 0, "seen for the first time");
        assert_eq!((look(1025, true, 5), look(1050, true, 5)), (25, 50));
        assert_eq!(look(1075, true, 6), 0, "it has run");
        assert_eq!(look(1100, true, 6), 25);
        assert_eq!(look(1125, false, 6), 0, "it sleeps of its own accord");
        assert_eq!(look(1150, true, 6), 25);
        assert_eq!(look(1400, true, 6), 0, "it may have slept while nobody looked");
    }

    /// A thread of the lowest kind, and one that uses up its only processor.
    #[test]
    fn the_kernel_shows_who_starves() {
        let pin = |policy: i32| {
            // SAFETY: the sets and the parameters are valid for the calls; both concern the calling thread only.
            unsafe {
                let mut set: libc::cpu_set_t = std::mem::zeroed();
                let bytes = std::mem::size_of_val(&set);
                assert_eq!(libc::sched_getaffinity(0, bytes, &mut set), 0);
                let first =
                    (0..libc::CPU_SETSIZE as usize).find(|&cpu| libc::CPU_ISSET(cpu, &set)).expect("a processor");
                libc::CPU_ZERO(&mut set);
                libc::CPU_SET(first, &mut set);
                assert_eq!(libc::sched_setaffinity(0, bytes, &set), 0);
                let param: libc::sched_param = std::mem::zeroed();
                assert_eq!(libc::sched_setscheduler(0, policy, &param), 0);
            }
        };
        let (tid, done) = (AtomicU32::new(0), AtomicBool::new(false));
        let spin = || {
            while !done.load(Relaxed) {
                std::hint::spin_loop();
            }
        };
        std::thread::scope(|scope| {
            let idle = scope.spawn(|| {
                pin(libc::SCHED_IDLE);
                // SAFETY: gettid has no arguments and cannot fail.
                tid.store(unsafe { libc::syscall(libc::SYS_gettid) } as u32, Relaxed);
                spin();
            });
            while tid.load(Relaxed) == 0 && !idle.is_finished() {
                std::thread::yield_now();
            }
            let busy = scope.spawn(|| {
                pin(libc::SCHED_OTHER);
                spin();
            });
            let (mut starvation, begin) = (Starvation::default(), std::time::Instant::now());
            let mut starved_ns = 0;
            while starved_ns < 30 * MS && !idle.is_finished() && !busy.is_finished() {
                std::thread::sleep(std::time::Duration::from_millis(5));
                let thread = ThreadState::read(std::process::id(), tid.load(Relaxed)).expect("a thread that lives");
                starved_ns = starvation.look(1, 1, thread, begin.elapsed().as_nanos() as u64);
            }
            done.store(true, Relaxed);
            // If either has ended before, it has failed: the scope says so.
        });
    }

    #[test]
    fn another_request_begins_anew() {
        let mut starvation = Starvation::default();
        let thread = ThreadState { ready: true, cpu_ns: 5 };
        let mut look = |task: u64, scope: u64, at_ms: u64| starvation.look(task, scope, thread, at_ms * MS) / MS;
        assert_eq!((look(7, 1, 0), look(8, 1, 0)), (0, 0));
        assert_eq!((look(7, 1, 100), look(8, 2, 100)), (100, 0));
        starvation.tidy(300 * MS);
        assert!(starvation.seen.is_empty());
    }
}
