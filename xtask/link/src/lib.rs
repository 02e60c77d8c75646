//! `libatropos.so.0` out of `libatropos.a`: with symbol versions, which rustc cannot give.
//! SPDX-License-Identifier: MIT OR Apache-2.0
//!
//! rustc links a cdylib with a version script of its own whose symbols have no version, and a second one beside it is
//! refused by one linker and has no effect with the other. So the archive is linked anew, by the C compiler, with
//! `src/capi/libatropos.map`. The code is the same; `cargo build`'s own libatropos.so differs in the versions only.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::{env, fs, process};

/// The name that programs ask for at run time. Its number changes when a symbol or a struct's field goes or changes.
pub const SONAME: &str = "libatropos.so.0";

/// What `libatropos.a` asks of the system (`rustc --print native-static-libs` on Linux with glibc).
pub const SYSTEM: [&str; 6] = ["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl"];

/// Hardened as distributions do it; never unloaded, for threads may be inside.
const FLAGS: [&str; 8] = [
    "-Wl,--gc-sections",
    "-Wl,--no-undefined-version",
    "-Wl,--build-id",
    "-Wl,-z,defs",
    "-Wl,-z,relro,-z,now",
    "-Wl,-z,noexecstack",
    "-Wl,-z,separate-code",
    "-Wl,-z,nodelete",
];

const MAP: &str = "src/capi/libatropos.map";

/// The root of the checkout that is worked in.
///
/// Where two checkouts share a target folder, cargo takes a program that one of them has built for the other's, too: the
/// path that was compiled in may be the other one's. What cargo says as it starts a program comes first.
pub fn checkout() -> &'static Path {
    static ROOT: OnceLock<PathBuf> = OnceLock::new();
    ROOT.get_or_init(|| {
        let told = env::var_os("CARGO_MANIFEST_DIR");
        let root = told.and_then(|dir| root_above(Path::new(&dir)));
        root.or_else(|| root_above(Path::new(env!("CARGO_MANIFEST_DIR")))).expect("this crate lies in a checkout")
    })
}

fn root_above(dir: &Path) -> Option<PathBuf> {
    dir.ancestors().find(|d| d.join(MAP).is_file()).map(Path::to_owned)
}

/// `src/capi/libatropos.map` of this checkout.
pub fn version_map() -> PathBuf {
    checkout().join(MAP)
}

/// A version of the map and the names that came with it.
#[derive(Debug, PartialEq)]
pub struct Node {
    pub version: String,
    pub names: Vec<String>,
}

/// The versions of a map, oldest first.
pub fn parse(map: &str) -> Result<Vec<Node>, String> {
    let mut nodes: Vec<Node> = Vec::new();
    let mut global = false;
    for (number, line) in map.lines().enumerate() {
        let line = line.split('#').next().unwrap_or("").trim();
        if let Some(version) = line.strip_suffix('{') {
            nodes.push(Node { version: version.trim().into(), names: Vec::new() });
        } else if line == "global:" || line == "local:" {
            global = line == "global:";
        } else if line.starts_with('}') {
            global = false;
        } else if let (true, Some(name), Some(node)) = (global, line.strip_suffix(';'), nodes.last_mut()) {
            node.names.push(name.into());
        } else if !(line.is_empty() || line == "*;") {
            return Err(format!("line {} of the symbol map: `{line}` is not understood", number + 1));
        }
    }
    Ok(nodes)
}

/// Links `archive` to `out`, unless `out` is newer than all that it is made of.
pub fn shared(archive: &Path, out: &Path) -> Result<(), String> {
    link(archive, out, &[])
}

/// The same of an archive that calls a sanitizer's run time, which the program brings.
pub fn shared_for_sanitizer(archive: &Path, out: &Path) -> Result<(), String> {
    link(archive, out, &["-Wl,-z,undefs"])
}

fn link(archive: &Path, out: &Path, more: &[&str]) -> Result<(), String> {
    let map = version_map();
    let changed = |path: &Path| fs::metadata(path).and_then(|meta| meta.modified());
    if let (Ok(made), Ok(a), Ok(m)) = (changed(out), changed(archive), changed(&map)) {
        if made > a && made > m {
            return Ok(());
        }
    }
    let text = fs::read_to_string(&map).map_err(|e| format!("cannot read {}: {e}", map.display()))?;
    // Beside and renamed: several tests may link at once, and a program that runs keeps its file.
    let fresh = out.with_extension(format!("new-{}", process::id()));
    let mut cc = Command::new(env::var_os("CC").unwrap_or_else(|| "cc".into()));
    cc.arg("-shared").arg("-o").arg(&fresh).arg(format!("-Wl,-soname,{SONAME}"));
    cc.arg(format!("-Wl,--version-script={}", map.display()));
    // Nothing else asks for the members of the archive.
    cc.args(parse(&text)?.into_iter().flat_map(|node| node.names).map(|name| format!("-Wl,-u,{name}")));
    cc.arg(archive).args(FLAGS).args(more).arg("-Wl,--as-needed").args(SYSTEM);
    let done = cc.output().map_err(|e| {
        format!("cannot run {:?}: {e}; a C compiler is needed (Debian: apt-get install gcc)", cc.get_program())
    })?;
    if !done.status.success() {
        let why = String::from_utf8_lossy(&done.stderr);
        return Err(format!("linking {} to {} failed:\n{why}", archive.display(), out.display()));
    }
    fs::rename(&fresh, out).map_err(|e| format!("cannot name {}: {e}", out.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checkout_is_the_one_that_cargo_works_in() {
        let told = env::var_os("CARGO_MANIFEST_DIR").expect("cargo runs the tests");
        assert_eq!(Some(checkout().to_owned()), root_above(Path::new(&told)));
        assert_eq!(root_above(&checkout().join("bench/sim")).as_deref(), Some(checkout()));
        assert!(version_map().is_file() && root_above(Path::new("/")).is_none());
    }

    #[test]
    fn a_map_is_read_and_its_rubbish_refused() {
        let text = "# why\nV_1 {\n  global:\n    a;\n    b;\n  local:\n    *;\n};\nV_2 {\n  global:\n    c;\n} V_1;\n";
        let node = |version: &str, names: &[&str]| Node {
            version: version.into(),
            names: names.iter().map(|n| n.to_string()).collect(),
        };
        assert_eq!(parse(text), Ok(vec![node("V_1", &["a", "b"]), node("V_2", &["c"])]));
        assert!(parse("V_1 {\n  globl:\n").unwrap_err().contains("line 2"));
    }
}
