//! `cargo run -p atropos-ffi-tests --bin header` rewrites include/atropos.h and src/capi/libatropos.map from src/capi.
use atropos_ffi_tests::header;
use std::process::ExitCode;

fn main() -> ExitCode {
    let write = |path: std::path::PathBuf, text: String| {
        std::fs::write(&path, text).map_err(|e| format!("cannot write {}: {e}", path.display()))
    };
    let written = header::generate_map().and_then(|map| write(atropos_link::version_map(), map));
    let written = written.and_then(|()| header::generate()).and_then(|text| write(header::path(), text));
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(cause) => {
            eprintln!("the header or the symbol map could not be made: {cause}");
            ExitCode::FAILURE
        }
    }
}
