//! A sequence counter whose writer pays two plain stores.
//!
//! One writer (the owner of the slot), any number of readers in any process. The writer never waits; a reader that
//! meets a write in progress tries again and, after a bound, gives up. (The classic seqlock; the fences follow Boehm,
//! "Can seqlocks get along with programming language memory models?", MSPC 2012.)

use crate::primitive::{fence, AtomicU64, Ordering};

/// Even = stable, odd = a write is in progress.
#[repr(transparent)]
pub struct SeqCount(AtomicU64);

impl SeqCount {
    pub fn new() -> Self {
        SeqCount(AtomicU64::new(0))
    }

    /// A write begins; give the result to `end`. In between only Relaxed stores to what the counter guards. Owner only.
    #[inline(always)]
    pub fn begin(&self) -> u64 {
        // A writer that died half-way leaves an odd count; its slot's next owner starts from the next even one.
        let seq = self.0.load(Ordering::Relaxed) & !1;
        self.0.store(seq + 1, Ordering::Relaxed);
        fence(Ordering::Release);
        seq
    }

    #[inline(always)]
    pub fn end(&self, seq: u64) {
        self.0.store(seq.wrapping_add(2), Ordering::Release);
    }

    /// `end` for a caller that did not keep what `begin` gave.
    #[inline(always)]
    pub fn end_running(&self) {
        self.end(self.0.load(Ordering::Relaxed) & !1);
    }

    /// No write is in progress, nor was one left half-done. Owner only.
    #[inline(always)]
    pub fn is_settled(&self) -> bool {
        self.0.load(Ordering::Relaxed) & 1 == 0
    }

    /// Runs `write` between `begin` and `end`.
    pub fn write<R>(&self, write: impl FnOnce() -> R) -> R {
        let seq = self.begin();
        let result = write();
        self.end(seq);
        result
    }

    /// Runs `read` until it saw no write, at most `tries` times; None = never stable.
    pub fn read<R>(&self, tries: u32, mut read: impl FnMut() -> R) -> Option<R> {
        for _ in 0..tries {
            let before = self.0.load(Ordering::Acquire);
            if before & 1 == 0 {
                let result = read();
                fence(Ordering::Acquire);
                if self.0.load(Ordering::Relaxed) == before {
                    return Some(result);
                }
            }
            std::hint::spin_loop();
            #[cfg(loom)]
            crate::primitive::yield_now();
        }
        None
    }
}

impl Default for SeqCount {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;

    #[test]
    fn a_reader_never_sees_half_a_write() {
        loom::model(|| {
            let shared = Arc::new((SeqCount::new(), AtomicU64::new(0), AtomicU64::new(0)));
            let writer = {
                let s = shared.clone();
                loom::thread::spawn(move || {
                    for n in 1..=2 {
                        s.0.write(|| {
                            s.1.store(n, Ordering::Relaxed);
                            s.2.store(n, Ordering::Relaxed);
                        });
                    }
                })
            };
            let pair = shared.0.read(2, || (shared.1.load(Ordering::Relaxed), shared.2.load(Ordering::Relaxed)));
            if let Some((a, b)) = pair {
                assert_eq!(a, b);
            }
            writer.join().unwrap();
        });
    }

    /// A writer died between begin and end; the slot's next owner writes while somebody reads.
    #[test]
    fn what_a_dead_writer_left_is_never_read_as_whole() {
        loom::model(|| {
            let shared = Arc::new((SeqCount::new(), AtomicU64::new(0), AtomicU64::new(0)));
            shared.0.begin();
            shared.1.store(7, Ordering::Relaxed);
            let writer = {
                let s = shared.clone();
                loom::thread::spawn(move || {
                    s.0.write(|| {
                        s.1.store(2, Ordering::Relaxed);
                        s.2.store(2, Ordering::Relaxed);
                    });
                })
            };
            let read = || (shared.1.load(Ordering::Relaxed), shared.2.load(Ordering::Relaxed));
            if let Some(pair) = shared.0.read(2, read) {
                assert_eq!(pair, (2, 2));
            }
            writer.join().unwrap();
            assert_eq!(shared.0.read(1, read), Some((2, 2)));
        });
    }
}
