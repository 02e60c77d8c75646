//! Programs of released versions, built with the headers of then (both frozen in `old/<version>`), run with this library.
use atropos_ffi_tests::build::{root, run_with, Link};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// What a host built then would do: its whole life, an overload with its cancel, a cancel by hand.
const PROGRAMS: [(&str, &[&str]); 7] = [
    ("life.c", &[]),
    ("life.cpp", &[]),
    ("paper_names.c", &[]),
    ("gate.c", &[]),
    ("stall.c", &["enforce"]),
    ("poll.c", &[]),
    ("by_hand.c", &[]),
];

fn old_headers() -> Vec<PathBuf> {
    let entries = fs::read_dir(root().join("ffi-tests/old")).expect("ffi-tests/old exists");
    let mut found: Vec<PathBuf> = entries.map(|e| e.expect("readable").path()).collect();
    found.sort();
    assert!(!found.is_empty(), "ffi-tests/old holds no frozen headers");
    found
}

/// The frozen program, from the folder of the present ones.
fn source(headers: &Path, file: &str) -> String {
    let version = headers.file_name().and_then(|name| name.to_str()).expect("a version's folder");
    format!("../old/{version}/c/{file}")
}

#[test]
fn programs_of_old_headers_run_with_the_shared_library() {
    for headers in old_headers() {
        for (file, args) in PROGRAMS {
            run_with(&headers, &source(&headers, file), Link::Shared, args);
        }
    }
}

#[test]
fn programs_of_old_headers_link_the_static_library() {
    for headers in old_headers() {
        run_with(&headers, &source(&headers, "life.c"), Link::Static, &[]);
    }
}
