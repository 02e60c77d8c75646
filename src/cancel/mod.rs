//! Telling a task to stop: the mailbox, the host's actions, and the agents that run them in the owner's process.

pub mod action;
pub mod agent;
pub mod mailbox;
