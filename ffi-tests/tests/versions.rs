//! Programs built with the headers of released versions (`old/`, frozen) run with this library.
use atropos_ffi_tests::build::{root, run_with, Link};
use std::{fs, path::PathBuf};

/// What a host built then would do: its whole life, settings, an overload with its cancel, a cancel by hand, and structs.
const PROGRAMS: [(&str, &[&str]); 8] = [
    ("life.c", &[]),
    ("life.cpp", &[]),
    ("paper_names.c", &[]),
    ("gate.c", &[]),
    ("stall.c", &["enforce"]),
    ("poll.c", &[]),
    ("by_hand.c", &[]),
    ("versions.c", &[]),
];

fn old_headers() -> Vec<PathBuf> {
    let entries = fs::read_dir(root().join("ffi-tests/old")).expect("ffi-tests/old exists");
    let mut found: Vec<PathBuf> = entries.map(|e| e.expect("readable").path()).collect();
    found.sort();
    assert!(!found.is_empty(), "ffi-tests/old holds no frozen headers");
    found
}

#[test]
fn programs_of_old_headers_run_with_the_shared_library() {
    for headers in old_headers() {
        for (file, args) in PROGRAMS {
            run_with(&headers, file, Link::Shared, args);
        }
    }
}

#[test]
fn programs_of_old_headers_link_the_static_library() {
    for headers in old_headers() {
        run_with(&headers, "life.c", Link::Static, &[]);
    }
}
