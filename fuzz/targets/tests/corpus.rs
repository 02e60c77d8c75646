//! Replays the committed corpus, every input that once failed among it, without libFuzzer.
//! SPDX-License-Identifier: MIT OR Apache-2.0

use atropos_fuzz_targets::TARGETS;
use std::path::Path;
use std::{fs, process::Command};

/// A target in a process of its own: they share the library's state, and a panic that the library catches at its boundary
/// must count.
const CHILD: &str = "ATROPOS_REPLAY";

#[test]
fn every_input_of_the_corpus_passes() {
    if let Ok(target) = std::env::var(CHILD) {
        return replay(&target);
    }
    for (target, _) in TARGETS {
        let exe = std::env::current_exe().expect("a test knows its own path");
        let mut again = Command::new(exe);
        again.args(["--exact", "every_input_of_the_corpus_passes", "--nocapture"]).env(CHILD, target);
        let done = again.output().expect("it starts again");
        let text = String::from_utf8_lossy(&done.stdout) + String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{target}: {}\n{text}", done.status);
        println!("{}", text.lines().find(|line| line.contains("inputs of")).expect("it says how many it replayed"));
    }
}

fn replay(target: &str) {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        default(panic);
        std::process::abort();
    }));
    let (_, run) = TARGETS.into_iter().find(|(name, _)| *name == target).expect("one of the targets");
    // Not as compiled in: that may be another checkout's, with which this one shares a target folder.
    let here = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo runs this test");
    let dir = Path::new(&here).join("../corpus").join(target);
    let entries = fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let mut files: Vec<_> = entries.map(|entry| entry.expect("readable").path()).collect();
    files.sort();
    assert!(files.len() >= 10, "only {} inputs in {}", files.len(), dir.display());
    for file in &files {
        eprintln!("{}", file.display());
        run(&fs::read(file).expect("readable"));
    }
    println!("{} inputs of {target} replayed", files.len());
}
