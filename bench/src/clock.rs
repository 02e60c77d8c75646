//! The clock shared with the load's log and the decision log: CLOCK_MONOTONIC in nanoseconds.

fn read(clock: libc::clockid_t) -> i64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is valid for writing; the clocks named below always exist on Linux.
    unsafe { libc::clock_gettime(clock, &mut t) };
    t.tv_sec * 1_000_000_000 + t.tv_nsec
}

pub fn now_ns() -> i64 {
    read(libc::CLOCK_MONOTONIC)
}

/// Nanoseconds to add to the monotonic clock to get wall time, now.
pub fn wall_offset_ns() -> i64 {
    read(libc::CLOCK_REALTIME) - now_ns()
}

pub fn ms(ns: i64) -> f64 {
    ns as f64 / 1e6
}

/// "2026-01-31" in UTC.
pub fn today() -> String {
    let seconds = read(libc::CLOCK_REALTIME) / 1_000_000_000;
    // SAFETY: both pointers are valid for the call.
    let t = unsafe {
        let mut t: libc::tm = std::mem::zeroed();
        libc::gmtime_r(&seconds, &mut t);
        t
    };
    format!("{:04}-{:02}-{:02}", t.tm_year + 1900, t.tm_mon + 1, t.tm_mday)
}

pub fn sleep_until(when_ns: i64) {
    let left = when_ns - now_ns();
    if left > 0 {
        std::thread::sleep(std::time::Duration::from_nanos(left as u64));
    }
}
