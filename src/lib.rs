//! libatropos (skeleton; see the contract in include/atropos.h)
pub mod control;
