//! What the shared library exports is what the header declares, no more and no less. (How, is in tests/elf.rs.)
use atropos_ffi_tests::{build::library, sys};
use std::{collections::BTreeSet, process::Command};

fn tool(name: &str, args: &[&str]) -> String {
    let mut command = Command::new(name);
    command.args(args).arg(&library().shared);
    let done = command.output().unwrap_or_else(|e| panic!("cannot run {name}: {e} (Debian: apt-get install binutils)"));
    assert!(done.status.success(), "{name} failed: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).expect("symbol names are ASCII")
}

fn exported() -> BTreeSet<String> {
    let text = tool("nm", &["--dynamic", "--defined-only", "--format=posix"]);
    // The versions' own names are absolute symbols; a name's version stands behind its @.
    let named = text.lines().map(|l| l.split_whitespace().collect::<Vec<_>>()).filter(|fields| fields[1] != "A");
    named.map(|fields| fields[0].split('@').next().unwrap_or(fields[0]).into()).collect()
}

fn declared() -> BTreeSet<String> {
    ["pub fn ", "pub static mut "]
        .iter()
        .flat_map(|start| sys::TEXT.split(start).skip(1))
        .map(|rest| rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect())
        // Inline functions have no symbol; bindgen lists only what has linkage.
        .collect()
}

#[test]
fn header_and_exports_agree() {
    let (exported, declared) = (exported(), declared());
    assert!(declared.len() > 50, "bindgen found only {} declarations", declared.len());
    let missing: Vec<_> = declared.difference(&exported).collect();
    let extra: Vec<_> = exported.difference(&declared).collect();
    assert!(
        missing.is_empty() && extra.is_empty(),
        "declared in the header but not exported: {missing:?}; exported but not declared: {extra:?}"
    );
}

#[test]
fn the_gate_is_one_pointer() {
    let text = tool("readelf", &["--dyn-syms", "--wide"]);
    let line = text
        .lines()
        .find(|l| l.split('@').next().is_some_and(|l| l.ends_with(" atropos_gate")))
        .expect("atropos_gate is exported");
    let fields: Vec<_> = line.split_whitespace().collect();
    assert_eq!((fields[2], fields[3], fields[5]), ("8", "OBJECT", "DEFAULT"), "a copy relocation copies this: {line}");
}
