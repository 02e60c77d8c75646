//! httpd with PHP as a host: server control, a load of our own, cases, checks and overhead.
pub mod cases;
pub mod checks;
pub mod cli;
pub mod client;
pub mod count;
pub mod install;
pub mod load;
pub mod overhead;
pub mod run;
pub mod server;
