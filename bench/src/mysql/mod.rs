//! MySQL: builds, servers, data, sessions, peers, and what only it has of cases, races and checks.
pub mod cases;
pub mod count;
pub mod install;
pub mod integration;
pub mod race;
pub mod server;
pub mod session;
pub mod template;
