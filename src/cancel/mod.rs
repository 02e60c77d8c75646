//! Telling a task to stop: the mailbox, the host's actions, and the agents that run them in the owner's process.

#[cfg(not(loom))]
pub mod action;
#[cfg(not(loom))]
pub mod agent;
pub mod mailbox;
