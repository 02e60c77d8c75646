//! Faults, each as one scenario with real processes: killed, stopped, forked, out of room, out of step.
//! SPDX-License-Identifier: MIT OR Apache-2.0
//!
//! A scenario is a program of `c/` whose name begins with `fault_`, with an argument for the case. `cargo xtask faults
//! --times 50` runs each of them so often and says what failed; `--long` gives them the time that a test has not.

use atropos_ffi_tests::build::{root, Link, Program};
use std::collections::BTreeSet;
use std::time::Duration;

/// One test per line: `name: program "argument"`; `{lib}` stands for the library's path, `{seconds}` for a short or long run.
macro_rules! scenarios {
    ($($name:ident: $program:ident $argument:literal;)+) => {
        const PROGRAMS: &[&str] = &[$(stringify!($program)),+];
        $(#[test]
        fn $name() { run(stringify!($program), $argument) })+
    };
}

scenarios! {
    owner_killed_while_waiting: fault_owner_killed "waiting";
    owner_killed_while_holding: fault_owner_killed "holding";
    owner_killed_inside_begin: fault_owner_killed "begin";
    owner_killed_inside_attach: fault_owner_killed "attach";
    killed_inside_reload: fault_owner_killed "reload";
    killed_inside_register: fault_owner_killed "register";
    killed_inside_init: fault_owner_killed "init";
    leader_killed: fault_leader "killed";
    leader_stopped_and_continued: fault_leader "stopped";
    agent_that_hangs: fault_agent_hangs "";
    more_agents_than_places: fault_agents_full "";
    cancel_action_that_fails: fault_action "fails";
    cancel_action_that_blocks: fault_action "blocks";
    cancel_action_that_ends_its_thread: fault_action "crashes";
    fork_with_a_bound_waiting_task: fault_fork "waiting";
    fork_inside_the_controller: fault_fork "controller";
    fork_with_an_agent: fault_fork "agent";
    fork_twice: fault_fork "double";
    fork_among_busy_threads: fault_fork "threads";
    fork_and_exec: fault_fork "exec";
    no_room_for_the_region: fault_shm "full";
    region_on_a_read_only_file_system: fault_shm "readonly";
    no_room_for_the_decision_log: fault_shm "log";
    wall_clock_jumps: fault_clock "wall";
    monotonic_clock_steps: fault_clock "steps";
    host_stands_still: fault_clock "gap";
    tasks_come_and_go: fault_churn "{seconds}";
    loaded_and_unloaded_a_thousand_times: fault_dlopen "{lib}";
    ways_to_exit: fault_exit "ways";
    main_thread_exits: fault_exit "main-thread";
    two_hosts: fault_hosts "two";
    second_start_on_a_living_region: fault_hosts "living-region";
    many_starts_on_a_dead_region: fault_hosts "dead-region";
}

/// A number from the environment, which `cargo xtask faults` sets.
fn asked(name: &str, default: u64) -> u64 {
    let Ok(text) = std::env::var(name) else { return default };
    text.parse().unwrap_or_else(|_| panic!("{name}={text}: a number is expected"))
}

/// Runs all that was asked for, whatever fails, and says how many of them did.
fn run(program: &str, argument: &str) {
    let (times, seconds) = (asked("ATROPOS_FAULT_TIMES", 1), asked("ATROPOS_FAULT_SECONDS", 20));
    let link = if argument == "{lib}" { Link::None } else { Link::Shared };
    let argument = argument.replace("{seconds}", &seconds.to_string());
    let args: Vec<&str> = Some(argument.as_str()).filter(|a| !a.is_empty()).into_iter().collect();
    let program = Program::build(&root().join("include"), &format!("{program}.c"), link, &args);
    let bound = Duration::from_secs(90 + seconds);
    let failed: Vec<(u64, String)> = (1..=times).filter_map(|n| Some((n, program.output(bound).err()?))).collect();
    if let Some((first, why)) = failed.first() {
        panic!("{} of {times} runs failed, first number {first}:\n{why}", failed.len());
    }
}

#[test]
fn every_scenario_is_run() {
    let there = std::fs::read_dir(root().join("ffi-tests/c")).expect("ffi-tests/c exists");
    let there: BTreeSet<String> = there
        .map(|e| e.expect("readable").file_name().into_string().expect("ASCII"))
        .filter_map(|n| n.strip_suffix(".c").filter(|n| n.starts_with("fault_")).map(String::from))
        .collect();
    let run: BTreeSet<String> = PROGRAMS.iter().map(|s| s.to_string()).collect();
    assert_eq!(there, run, "left: the fault_ files of c/; right: those listed here");
}
