//! What the fuzzers call, one function per target: any bytes in, no panic, no hang, no broken promise out.
//! SPDX-License-Identifier: MIT OR Apache-2.0
//!
//! `fuzz/fuzz_targets` hands them to libFuzzer (`cargo xtask fuzz`); `tests/corpus.rs` replays `fuzz/corpus` through
//! them, where every input that ever failed stays.

pub mod calls;
pub mod config;
pub mod decision_log;
mod input;
pub mod region;

/// Runs a target on one input; it must come back, whatever the bytes.
pub type Run = fn(&[u8]);

/// Every target by the name of its folder in `fuzz/corpus`.
pub const TARGETS: [(&str, Run); 4] =
    [("config", config::run), ("region", region::run), ("decision_log", decision_log::run), ("calls", calls::run)];
