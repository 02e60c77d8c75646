//! PostgreSQL under the bench: where a build is installed, clusters that live as long as a run, noise sessions.
pub mod cluster;
pub mod install;
pub mod session;
pub mod template;
