//! Reads the committed header back with bindgen: a header that bindgen cannot parse, or whose layout
//! assertions fail to compile, stops the build of the tests.
use std::{env, path::PathBuf, process::exit};

fn main() {
    let include = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("set by cargo")).join("../include");
    for name in ["atropos.h", "atropos_trace.h"] {
        println!("cargo:rerun-if-changed={}", include.join(name).display());
    }
    // bindgen panics deep inside clang-sys when the library is absent: say what to do instead.
    if let Err(cause) = bindgen_libclang() {
        eprintln!("error: bindgen needs libclang to read include/atropos.h back, and it was not found: {cause}");
        eprintln!("       install it (Debian: apt-get install libclang-dev) or set LIBCLANG_PATH to its folder");
        exit(1);
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("set by cargo")).join("header.rs");
    let written = bindgen::Builder::default()
        .header(include.join("atropos_trace.h").display().to_string())
        .allowlist_item(
            "(atropos|ATROPOS).*|createCancel|freeCancel|setCancelAction|getResource|freeResource|slowByResource",
        )
        .layout_tests(true)
        .merge_extern_blocks(true)
        .generate()
        .map_err(|e| e.to_string())
        .and_then(|b| b.write_to_file(&out).map_err(|e| e.to_string()));
    if let Err(cause) = written {
        eprintln!("error: bindgen could not read include/atropos_trace.h and atropos.h back: {cause}");
        exit(1);
    }
}

fn bindgen_libclang() -> Result<(), String> {
    std::panic::set_hook(Box::new(|_| ()));
    let found = std::panic::catch_unwind(|| bindgen::clang_version().full)
        .map_err(|cause| cause.downcast_ref::<String>().cloned().unwrap_or_else(|| "no reason given".into()));
    drop(std::panic::take_hook());
    found.map(drop)
}
