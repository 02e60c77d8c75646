//! Decide who is cancelled: pure stages (`Window -> Signal -> Estimate -> Choice`), and the controller around them.

#[cfg(not(loom))]
mod actuator;
pub mod baseline;
pub mod budget;
#[cfg(not(loom))]
pub mod collect;
#[cfg(not(loom))]
pub mod controller;
pub mod detector;
pub mod estimator;
mod graph;
pub mod histogram;
pub mod policy;
#[cfg(not(loom))]
mod progress;
pub mod retry;
#[cfg(not(loom))]
pub mod sample;
#[cfg(not(loom))]
mod starved;
pub mod system;
#[cfg(not(loom))]
mod verify;
pub mod window;

#[cfg(test)]
mod tests;
