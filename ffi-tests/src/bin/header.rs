//! `cargo run -p atropos-ffi-tests --bin header` rewrites include/atropos.h from src/capi.
use atropos_ffi_tests::header;
use std::process::ExitCode;

fn main() -> ExitCode {
    let written = header::generate()
        .and_then(|text| std::fs::write(header::path(), text).map_err(|e| format!("cannot write: {e}")));
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(cause) => {
            eprintln!("include/atropos.h is unchanged: {cause}");
            ExitCode::FAILURE
        }
    }
}
