//! The atomics every lock-free part uses, so that loom can put its own in their place.

#[cfg(not(loom))]
pub use core::sync::atomic::{
    fence, AtomicI32, AtomicI64, AtomicPtr, AtomicU32, AtomicU64, AtomicU8, AtomicUsize, Ordering,
};

/// For loops that wait for another thread's store.
#[cfg(not(loom))]
pub use std::thread::yield_now;

#[cfg(loom)]
pub use loom::thread::yield_now;

#[cfg(loom)]
pub use loom::sync::atomic::{
    fence, AtomicI32, AtomicI64, AtomicPtr, AtomicU32, AtomicU64, AtomicU8, AtomicUsize, Ordering,
};
