//! The committed header: fresh, clean in every dialect, complete, and of the same layout as the library.
use atropos_ffi_tests::{
    build::{compile, root, scratch},
    header, sys,
};
use std::{fs, mem, process::Command};

#[test]
fn committed_header_equals_a_fresh_generation() {
    let fresh = header::generate().expect("cbindgen reads src/capi");
    if std::env::var_os("UPDATE_HEADER").is_some() {
        fs::write(header::path(), &fresh).expect("include/ is writable");
    }
    let committed = fs::read_to_string(header::path()).expect("include/atropos.h is committed");
    let differing = committed.lines().zip(fresh.lines()).enumerate().find(|(_, (old, new))| old != new);
    assert!(
        committed == fresh,
        "include/atropos.h is not what src/capi generates; rewrite it with `cargo run -p atropos-ffi-tests --bin \
         header`. First difference (line, (committed, fresh)): {differing:?}"
    );
}

#[test]
fn committed_symbol_map_equals_a_fresh_generation() {
    let fresh = header::generate_map().unwrap_or_else(|why| panic!("{why}"));
    let committed = fs::read_to_string(atropos_link::version_map()).expect("src/capi/libatropos.map is committed");
    assert!(
        committed == fresh,
        "src/capi/libatropos.map lacks names that src/capi exports; rewrite it with `cargo run -p atropos-ffi-tests --bin \
         header`. It should be:\n{fresh}"
    );
}

/// Compiles `text` for syntax and warnings only.
fn is_clean(name: &str, text: &str, language: &str, standard: &str) {
    let source = scratch("header").join(name);
    fs::write(&source, text).expect("the scratch folder is writable");
    let mut cc = Command::new(if language == "c" { "cc" } else { "c++" });
    cc.args(["-x", language, &format!("-std={standard}"), "-Wall", "-Wextra", "-Wpedantic", "-Wundef", "-Werror"]);
    cc.args(if language == "c" { &["-Wstrict-prototypes"][..] } else { &["-Wold-style-cast"][..] });
    cc.args(["-fsyntax-only", "-I"]).arg(root().join("include")).arg(&source);
    compile(cc, &format!("{name} as {standard}"));
}

const DIALECTS: [(&str, &str); 4] = [("c", "c11"), ("c", "c17"), ("c++", "c++17"), ("c++", "c++20")];

#[test]
fn each_header_is_clean_alone_and_twice_in_c_and_cpp() {
    for (language, standard) in DIALECTS {
        for header in ["atropos.h", "atropos_trace.h"] {
            let include = format!("#include <{header}>\n");
            // `use` keeps the unit from being empty, which pedantic C refuses.
            let unit = "extern int atropos_header_unit;\n";
            is_clean("alone", &format!("{include}{unit}"), language, standard);
            is_clean("twice", &format!("{include}{include}{unit}"), language, standard);
            is_clean("hidden", &format!("#define ATROPOS_NO_PAPER_NAMES\n{include}{unit}"), language, standard);
        }
        is_clean("both", "#include <atropos_trace.h>\n#include <atropos.h>\nextern int unit;\n", language, standard);
    }
}

#[test]
fn codes_and_versions_work_in_the_preprocessor() {
    let text = "#include <atropos.h>\n#if ATROPOS_VERSION_NUMBER < ((0 << 16) | (1 << 8)) || ATROPOS_OK != 0 \
                || ATROPOS_E_UNSUPPORTED != -12 || ATROPOS_MODE_ENFORCE != 3\n#error wrong\n#endif\nextern int unit;\n";
    is_clean("macros", text, "c", "c11");
}

#[test]
fn error_codes_are_never_renumbered() {
    let codes = [
        (sys::ATROPOS_OK as i32, 0),
        (sys::ATROPOS_E_INVALID, -1),
        (sys::ATROPOS_E_NOT_INIT, -2),
        (sys::ATROPOS_E_ALREADY, -3),
        (sys::ATROPOS_E_CONFIG, -4),
        (sys::ATROPOS_E_IO, -5),
        (sys::ATROPOS_E_REGION, -6),
        (sys::ATROPOS_E_FULL, -7),
        (sys::ATROPOS_E_STALE, -8),
        (sys::ATROPOS_E_NOT_LEADER, -9),
        (sys::ATROPOS_E_FORKED, -10),
        (sys::ATROPOS_E_PANIC, -11),
        (sys::ATROPOS_E_UNSUPPORTED, -12),
    ];
    for (at, (code, number)) in codes.into_iter().enumerate() {
        assert_eq!(code, number, "error {at} was renumbered");
    }
}

/// bindgen's own layout assertions compile with the crate; here what C sees is compared with what Rust has.
#[test]
fn structs_have_the_layout_of_the_library() {
    macro_rules! same {
        ($name:ident { $($field:ident),+ $(,)? }) => {
            assert_eq!(mem::size_of::<sys::$name>(), mem::size_of::<atropos::capi::$name>(), stringify!($name));
            $(assert_eq!(
                mem::offset_of!(sys::$name, $field),
                mem::offset_of!(atropos::capi::$name, $field),
                concat!(stringify!($name), ".", stringify!($field))
            );)+
        };
    }
    same!(atropos_config {
        size,
        region_path,
        file,
        text,
        decision_log,
        mode,
        max_tasks,
        max_workers,
        window_ms,
        trigger_windows,
        verify_ms,
        slo_ms,
        slo_tolerance,
        contention_threshold,
        min_relief,
        cancel_rate_per_s,
        cancel_burst,
        cancel_share,
        retry_calm_ms,
        retry_background_max_ms,
        retry_load_share,
    });
    same!(atropos_edge { waiter, blocker, resource, kind, instance });
    same!(atropos_cancel_request { size, task, key, scope, owner_pid, rung, decision_id, resource, instance, reason });
    same!(atropos_cancel_info {
        size,
        scope,
        decision_id,
        resource,
        rung,
        instance,
        held_ns,
        victims,
        resource_name,
        reason,
    });
}
