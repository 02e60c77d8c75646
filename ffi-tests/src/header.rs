//! Generates `include/atropos.h` and `src/capi/libatropos.map` from `src/capi`.
use crate::build::root;
use std::{fs, path::PathBuf};

/// The SOSP paper's names; each is the `atropos_` function of the same meaning and can be hidden.
pub const PAPER_NAMES: [&str; 6] =
    ["createCancel", "freeCancel", "setCancelAction", "getResource", "freeResource", "slowByResource"];

/// The committed header.
pub fn path() -> PathBuf {
    root().join("include/atropos.h")
}

/// The header as it should be now, or why it cannot be made.
pub fn generate() -> Result<String, String> {
    let sources = capi_sources()?;
    let mut config = cbindgen::Config::from_file(root().join("cbindgen.toml"))?;
    let before = config.after_includes.take().unwrap_or_default();
    config.after_includes = Some(format!("{}\n{before}", version_macros()));

    let mut paper = config.clone();
    config.export.exclude.extend(PAPER_NAMES.map(String::from));

    // The paper's names go into a part of their own: all else is excluded, nothing is included.
    paper
        .export
        .exclude
        .extend(exported_functions(&sources)?.into_iter().filter(|f| !PAPER_NAMES.contains(&f.as_str())));
    paper.export.item_types = vec![cbindgen::ItemType::Functions];
    (paper.include_guard, paper.header, paper.after_includes, paper.trailer) = (None, None, None, None);
    paper.sys_includes.clear();
    let paper = bindings(paper)?;
    for name in PAPER_NAMES {
        if !paper.contains(&format!("{name}(")) {
            return Err(format!("src/capi exports no {name}: the paper's six names are part of the contract"));
        }
    }
    let main = bindings(config)?;
    let (main, end) =
        main.rsplit_once("#endif").ok_or("cbindgen wrote no include guard: cbindgen.toml must set include_guard")?;
    Ok(format!(
        "{}\n\n#ifndef ATROPOS_NO_PAPER_NAMES\n{}\n#endif /* ATROPOS_NO_PAPER_NAMES */\n\n#endif{end}",
        main.trim_end(),
        paper.trim()
    ))
}

/// The symbol map as it should be now: what is in it stays as it is, new names come with the present version.
pub fn generate_map() -> Result<String, String> {
    let path = atropos_link::version_map();
    let old = fs::read_to_string(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    let mut nodes = atropos_link::parse(&old)?;
    let mut exported = exported_functions(&capi_sources()?)?;
    exported.push("atropos_gate".into());
    exported.sort();
    if let Some(gone) = nodes.iter().flat_map(|n| &n.names).find(|name| !exported.contains(name)) {
        return Err(format!(
            "{gone} has a symbol version but src/capi does not export it any more: programs that call it would no longer \
             start. Keep it; or, with a new SONAME (xtask/link), take it out of {}",
            path.display()
        ));
    }
    let [major, minor, _] = crate_version();
    let present = format!("ATROPOS_{major}.{minor}");
    if nodes.last().map(|node| &node.version) != Some(&present) {
        nodes.push(atropos_link::Node { version: present, names: Vec::new() });
    }
    exported.retain(|name| !nodes.iter().any(|node| node.names.contains(name)));
    let last = nodes.last_mut().expect("one was pushed where there was none");
    last.names.extend(exported);
    last.names.sort();
    let mut text = String::from(
        "# What libatropos.so exports, by the version it came with. A released version never changes.\n\
         # Add names with `cargo run -p atropos-ffi-tests --bin header`.\n# SPDX-License-Identifier: MIT OR Apache-2.0\n",
    );
    let mut before = String::new();
    for node in &nodes {
        let names: String = node.names.iter().map(|name| format!("    {name};\n")).collect();
        let local = if before.is_empty() { "  local:\n    *;\n" } else { "" };
        text += &format!("{} {{\n  global:\n{names}{local}}}{before};\n", node.version);
        before = format!(" {}", node.version);
    }
    Ok(text)
}

fn bindings(config: cbindgen::Config) -> Result<String, String> {
    // Follows `mod` lines from here on.
    let builder = cbindgen::Builder::new().with_config(config).with_src(root().join("src/capi/mod.rs"));
    let mut text = Vec::new();
    builder.generate().map_err(|e| format!("cbindgen cannot read src/capi: {e}"))?.write(&mut text);
    String::from_utf8(text).map(|t| for_c_readers(&t)).map_err(|e| e.to_string())
}

/// Comments of one line on one line, and rustdoc's headings as plain words.
fn for_c_readers(text: &str) -> String {
    let mut out: Vec<String> = Vec::new();
    let lines: Vec<&str> = text.lines().collect();
    let mut at = 0;
    while at < lines.len() {
        let (open, indent) = (lines[at].trim_start(), &lines[at][..lines[at].len() - lines[at].trim_start().len()]);
        let short = open == "/**" && lines.get(at + 2).is_some_and(|l| l.trim() == "*/");
        if short {
            out.push(format!("{indent}/** {} */", lines[at + 1].trim().trim_start_matches('*').trim()));
            at += 3;
        } else if let Some(indent) = lines[at].strip_suffix("* # Safety") {
            let next = lines.get(at + 1).map_or("", |l| l.trim_start().trim_start_matches('*'));
            out.push(format!("{indent}* Memory:{next}"));
            at += 2;
        } else {
            let doubled = lines[at].is_empty() && out.last().is_some_and(|l| l.is_empty());
            if !doubled {
                out.push(lines[at].into());
            }
            at += 1;
        }
    }
    out.join("\n") + "\n"
}

/// `src/capi/*.rs`.
fn capi_sources() -> Result<Vec<PathBuf>, String> {
    let dir = root().join("src/capi");
    let entries = fs::read_dir(&dir).map_err(|e| format!("cannot list {}: {e}", dir.display()))?;
    Ok(entries.filter_map(|e| e.ok().map(|e| e.path())).filter(|p| p.extension().is_some_and(|e| e == "rs")).collect())
}

fn exported_functions(sources: &[PathBuf]) -> Result<Vec<String>, String> {
    let mut names = Vec::new();
    for source in sources {
        let text = fs::read_to_string(source).map_err(|e| format!("cannot read {}: {e}", source.display()))?;
        names.extend(text.split("extern \"C\" fn ").skip(1).filter_map(|rest| {
            let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            (!name.is_empty()).then_some(name)
        }));
    }
    Ok(names)
}

fn version_macros() -> String {
    // The library's own version, so that header and library cannot disagree.
    let version = crate_version();
    format!(
        "\n/** Version of this header; compare with atropos_version(), the version of the library that runs. */\n\
         #define ATROPOS_VERSION_MAJOR {}\n#define ATROPOS_VERSION_MINOR {}\n#define ATROPOS_VERSION_PATCH {}\n\
         #define ATROPOS_VERSION_NUMBER \\\n  ((ATROPOS_VERSION_MAJOR << 16) | (ATROPOS_VERSION_MINOR << 8) | ATROPOS_VERSION_PATCH)\n\
         #define ATROPOS_VERSION_STRING \"{}.{}.{}\"\n",
        version[0], version[1], version[2], version[0], version[1], version[2]
    )
}

/// `version` of the root package.
fn crate_version() -> [u32; 3] {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).expect("the workspace has a manifest");
    let line = manifest.lines().find(|l| l.starts_with("version")).expect("the root package has a version");
    let mut parts = line.trim_start_matches(|c: char| !c.is_ascii_digit()).trim_end_matches('"').split('.');
    std::array::from_fn(|_| parts.next().and_then(|p| p.parse().ok()).expect("version = \"major.minor.patch\""))
}
