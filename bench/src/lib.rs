//! The overload cases, the load and the report.
pub mod cases;
pub mod clock;
pub mod decisions;
pub mod guard;
pub mod integration;
pub mod load;
pub mod machine;
pub mod measure;
pub mod overhead;
pub mod pg;
pub mod race;
pub mod record;
pub mod replay;
pub mod results;
pub mod runner;
