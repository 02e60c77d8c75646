//! Tests of the C ABI: C and C++ programs against the public header (`c/`, run by `tests/programs.rs`), the
//! header itself (`tests/header.rs`), and what the shared library exports (`tests/symbols.rs`).
pub mod build;
pub mod header;
pub mod watch;

/// `atropos.h` and `atropos_trace.h` as bindgen reads them; its layout assertions are part of this module.
#[allow(non_camel_case_types, non_upper_case_globals, non_snake_case, dead_code)]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks)]
pub mod sys {
    include!(concat!(env!("OUT_DIR"), "/header.rs"));
    /// The same as text, to list what the header declares.
    pub const TEXT: &str = include_str!(concat!(env!("OUT_DIR"), "/header.rs"));
}
