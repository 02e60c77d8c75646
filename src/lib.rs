//! libatropos (skeleton; see the contract in include/atropos.h)
pub mod config;
pub mod control;
pub mod error;
pub mod primitive;
pub mod region;
pub mod trace;
