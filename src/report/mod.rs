//! What people and tools read: decisions, counters, snapshots.

pub mod decision;
pub mod json;
pub mod stats;
pub mod window;
