//! Decide who is cancelled.
pub mod histogram;
pub mod window;
