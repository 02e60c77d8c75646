//! Decide who is cancelled.
pub mod budget;
pub mod estimator;
mod graph;
pub mod histogram;
pub mod policy;
pub mod window;
