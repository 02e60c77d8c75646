//! libatropos keeps a loaded server inside its latency objective when one request monopolises what every other request
//! needs: it finds that culprit and cancels it through the server's own cancel function.
//!
//! Data flows one way:
//!
//! ```text
//! host thread --trace--> its own worker slot in the region
//! controller: window -> detector -> estimator -> policy -> actuator -> the host's cancel action
//!                ^                                 |
//!                +------------- verify <-----------+--> decision log, counters
//! ```
//!
//! Under `--cfg loom` only the lock-free parts are built, for loom's model checker.
//!
//! C hosts use `include/atropos.h`; its functions are in [`capi`]. The pure stages are in [`control`].

pub mod cancel;
#[cfg(not(loom))]
pub mod capi;
pub mod config;
pub mod control;
pub mod error;
pub mod primitive;
#[cfg(not(loom))]
pub mod process;
pub mod region;
#[cfg(not(loom))]
pub mod report;
pub mod trace;
