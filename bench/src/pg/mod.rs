//! PostgreSQL: builds, servers, data, sessions, and what only it has of cases, races and checks.
pub mod cases;
pub mod cluster;
pub mod install;
pub mod integration;
pub mod race;
pub mod session;
pub mod template;
