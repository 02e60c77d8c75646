//! Telling a task to stop: the mailbox, the host's actions, the agents that run them in the owner's process,
//! and the queue of those that may run again.

#[cfg(not(loom))]
pub mod action;
#[cfg(not(loom))]
pub mod agent;
pub mod mailbox;
pub mod retry;
