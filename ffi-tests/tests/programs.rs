//! Runs the C and C++ programs of `c/`, each linked to the static and to the shared library.
use atropos_ffi_tests::build::{self, root, Link, Program};
use atropos_ffi_tests::watch::{watch, Watch};
use std::{collections::BTreeSet, fs, time::Duration};

/// What valgrind (file, arguments) cannot show, which runs one thread at a time and stands between the program and the kernel.
const NOT_UNDER_MEMCHECK: &[(&str, &str)] = &[
    ("hot_pure.c", "it steps through its own child, which would be valgrind"),
    ("region_file.c", "it starts its own file again, which is valgrind's"),
    ("retry.c busy", "its threads complete too few requests to keep a server busy"),
    ("system_cpu.c hog", "no two threads use a processor at once"),
    ("system_cpu.c equals", "no two threads use a processor at once"),
];

fn run(file: &str, link: Link, args: &[&str]) {
    let name = [&[file], args].concat().join(" ");
    if let (Watch::Memcheck, Some((_, why))) = (watch(), NOT_UNDER_MEMCHECK.iter().find(|n| n.0 == name)) {
        println!("SKIPPED {name} under memcheck: {why}");
        return;
    }
    build::run(file, link, args);
}

/// One module per line: `name: file [arguments]`.
macro_rules! programs {
    ($($name:ident: $file:literal $args:tt $(+ $link:ident)*;)+) => {
        const FILES: &[&str] = &[$($file),+];
        $(mod $name {
            use super::*;
            #[test]
            fn linked_static() { run($file, Link::Static, &$args) }
            #[test]
            fn linked_shared() { run($file, Link::Shared, &$args) }
            $(programs!(@more $link $file $args);)*
        })+
    };
    (@more no_pie $file:literal $args:tt) => {
        #[test]
        fn linked_shared_no_pie() { run($file, Link::SharedNoPie, &$args) }
    };
}

programs! {
    life: "life.c" [];
    life_cpp: "life.cpp" [];
    paper_names: "paper_names.c" [];
    no_paper_names: "no_paper_names.c" [];
    gate: "gate.c" [] + no_pie;
    stall_enforce: "stall.c" ["enforce"];
    stall_observe: "stall.c" ["observe"];
    poll: "poll.c" [];
    escalate: "escalate.c" [];
    edges: "edges.c" [];
    agent_poll: "agent.c" ["poll"];
    agent_thread: "agent.c" ["thread"];
    agent_anywhere: "agent.c" ["anywhere"];
    by_hand: "by_hand.c" [];
    misuse_null: "misuse_null.c" [];
    misuse_handles: "misuse_handles.c" [];
    misuse_counters: "misuse_counters.c" [];
    misuse_order: "misuse_order.c" [];
    tables_full: "tables_full.c" [];
    config: "config.c" [];
    region_file: "region_file.c" [];
    errno_kept: "errno.c" [];
    hot_pure: "hot_pure.c" [];
    fork: "fork.c" [];
    restart: "restart.c" [];
    reap: "reap.c" [];
    failover: "failover.c" [];
    takeover: "takeover.c" [];
    storm: "storm.c" [];
    retry_again: "retry.c" ["again"];
    retry_session: "retry.c" ["session"];
    retry_busy: "retry.c" ["busy"];
    retry_nobody_leads: "retry.c" ["nobody_leads"];
    retry_in_turn: "retry.c" ["in_turn"];
    versions: "versions.c" [];
    system_cpu_hog: "system_cpu.c" ["hog"];
    system_cpu_equals: "system_cpu.c" ["equals"];
}

/// Loading at run time makes sense for the shared library only; the program links nothing.
#[test]
fn dlopen_and_dlclose_with_live_threads() {
    run("dlopen.c", Link::None, &["{lib}"]);
}

/// A watcher that finds nothing anywhere might not look: the library itself is made to do what it must find.
#[test]
fn linked_static_watchers_find_what_is_planted() {
    let planted = match watch() {
        Watch::None => "nothing",
        Watch::Address | Watch::Memcheck => "freed",
        Watch::Thread => "race",
    };
    let program = Program::build(&root().join("include"), "planted.c", Link::Static, &[planted]);
    let done = program.output(Duration::from_secs(90));
    match watch() {
        Watch::None => assert!(done.is_ok(), "{done:?}"),
        watch => {
            let why = done.expect_err("the planted fault must be found");
            let in_library = watch.finding(&why).is_some() && why.contains("atropos_last_error");
            assert!(in_library, "it failed, but not by a finding in the library: {why}");
        }
    }
}

/// What the loader does for a library that was there at the start it does not do for one that comes later.
#[test]
fn late_threads() {
    run("late_threads.c", Link::None, &["{lib}"]);
}

#[test]
fn every_program_is_run() {
    let there = fs::read_dir(root().join("ffi-tests/c")).expect("ffi-tests/c exists");
    let there: BTreeSet<String> = there
        .map(|e| e.expect("readable").file_name().into_string().expect("ASCII"))
        .filter(|n| !n.ends_with(".h") && !n.starts_with("fault_")) // those are in faults.rs
        .collect();
    let others = ["dlopen.c", "late_threads.c", "planted.c"];
    let run: BTreeSet<String> = FILES.iter().chain(&others).map(|s| s.to_string()).collect();
    assert_eq!(there, run, "left: the files of c/; right: those listed here");
}
