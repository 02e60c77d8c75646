//! Decide who is cancelled: pure stages (`Window -> Signal -> Estimate -> Choice`), and the controller around them.

mod actuator;
pub mod baseline;
pub mod budget;
pub mod collect;
pub mod controller;
pub mod detector;
pub mod estimator;
mod graph;
pub mod histogram;
pub mod policy;
mod verify;
pub mod window;
