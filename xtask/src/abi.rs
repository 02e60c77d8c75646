//! `cargo xtask abi`: the library's binary interface against the committed one, by libabigail. See abi/README.md.

use crate::{apt, dirs};
use anyhow::{bail, Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(clap::Args)]
pub struct AbiArgs {
    /// Make the present interface the committed one.
    #[arg(long)]
    pub accept: bool,
}

/// Debian's packages.
pub const PACKAGES: &[&str] = &["abigail-tools"];

/// Structs that say their size, which may grow at their end; named in abi/sized.suppr, too.
const SIZED: [&str; 3] = ["atropos_config", "atropos_cancel_info", "atropos_cancel_request"];

/// abidiff's exit status is a set of bits (its manual): these two are failures of the tool itself.
const TOOL_FAILED: i32 = 1 | 2;

pub fn run(args: &AbiArgs) -> Result<()> {
    apt::ensure(PACKAGES)?;
    let folder = dirs::workspace().join("abi");
    // One architecture's, for sizes differ.
    let baseline = folder.join(format!("libatropos.{}.abi", std::env::consts::ARCH));
    let work = dirs::make(dirs::target()?.join("abi"))?;
    let present = interface(&dirs::workspace().join("include"), &work)?;
    if args.accept {
        std::fs::copy(&present, &baseline).with_context(|| format!("cannot write {}", baseline.display()))?;
        println!("{} is the interface from now on; commit it", baseline.display());
        return Ok(());
    }
    if !baseline.exists() {
        bail!("{} is missing: make it on this architecture with `cargo xtask abi --accept`", baseline.display());
    }
    match compare(&baseline, &present, &folder.join("sized.suppr"))? {
        Verdict::Same => println!("the binary interface is the committed one"),
        Verdict::Added(what) => println!("nothing that was there has changed; new:\n{what}"),
        Verdict::Broken(why) => bail!(
            "the binary interface changed: programs built before may break.\n{why}\nIf that is intended: a new SONAME \
             (xtask/link), and `cargo xtask abi --accept`"
        ),
    }
    Ok(())
}

#[derive(Debug, PartialEq)]
enum Verdict {
    Same,
    Added(String),
    Broken(String),
}

fn compare(old: &Path, new: &Path, allowed: &Path) -> Result<Verdict> {
    let diff = |more: &[&str]| {
        let mut abidiff = Command::new("abidiff");
        abidiff.arg("--no-show-locs").arg("--suppressions").arg(allowed).args(more).arg(old).arg(new);
        output(abidiff)
    };
    let (broken, why) = diff(&["--no-added-syms"])?;
    if broken != 0 {
        return Ok(Verdict::Broken(why));
    }
    let (old, new) = (std::fs::read_to_string(old)?, std::fs::read_to_string(new)?);
    let mut appended = String::new();
    for name in SIZED {
        let (old, new) = (fields(&old, name), fields(&new, name));
        if old.is_empty() || !new.starts_with(&old) {
            return Ok(Verdict::Broken(format!("fields of {name}, then:\n{old:#?}\nnow:\n{new:#?}")));
        }
        for field in &new[old.len()..] {
            appended += &format!("field {} of {name}\n", field.name);
        }
    }
    let (changed, what) = diff(&[])?;
    Ok(if changed == 0 && appended.is_empty() { Verdict::Same } else { Verdict::Added(appended + &what) })
}

#[derive(Debug, PartialEq)]
struct Field {
    name: String,
    bit: String,
    /// As it is declared; of a pointer or an array what kind it is.
    type_: String,
}

/// The fields of a struct in libabigail's XML, which has an element a line.
fn fields(abi: &str, name: &str) -> Vec<Field> {
    let attribute = |line: &str, name: &str| -> String {
        let found = line.split_once(&format!(" {name}='")).and_then(|(_, rest)| rest.split_once('\''));
        found.map_or(String::new(), |(value, _)| value.to_string())
    };
    let type_of = |id: &str| {
        let declared = abi.lines().find(|line| line.contains(&format!(" id='{id}'"))).unwrap_or("").trim();
        let kind = declared.split(' ').next().unwrap_or("").trim_start_matches('<');
        format!("{kind} {}{}", attribute(declared, "name"), attribute(declared, "size-in-bits"))
    };
    let of = |line: &&str| line.trim().starts_with("<class-decl") && attribute(line, "name") == name;
    let inside = abi.lines().skip_while(|line| !of(line)).take_while(|line| line.trim() != "</class-decl>");
    let (mut found, mut bit) = (Vec::new(), String::new());
    for line in inside {
        if line.trim().starts_with("<data-member") {
            bit = attribute(line, "layout-offset-in-bits");
        } else if line.trim().starts_with("<var-decl") {
            let type_ = type_of(&attribute(line, "type-id"));
            found.push(Field { name: attribute(line, "name"), bit: bit.clone(), type_ });
        }
    }
    found
}

/// The interface in `headers`, written down in `work`: a library of empty functions carries its types and versions.
fn interface(headers: &Path, work: &Path) -> Result<PathBuf> {
    let mut preprocess = Command::new("cc");
    preprocess.args(["-E", "-P"]).arg(headers.join("atropos.h"));
    let mut source = String::from("#include <atropos_trace.h>\nconst uint32_t *atropos_gate;\n");
    for prototype in prototypes(&output(preprocess)?.1) {
        source += &format!("{prototype} {{ __builtin_trap(); }}\n");
    }
    std::fs::write(work.join("interface.c"), source)?;
    let mut cc = Command::new("cc");
    // By relative names: no path of this machine gets into what is committed.
    cc.current_dir(work).args(["-shared", "-fPIC", "-g", "-w", "interface.c", "-o", "interface.so"]);
    cc.arg("-I").arg(headers).arg(format!("-Wl,-soname,{}", atropos_link::SONAME));
    cc.arg(format!("-Wl,--version-script={},--no-undefined-version", atropos_link::version_map().display()));
    if output(cc)?.0 != 0 {
        bail!("the interface of {} could not be compiled in {}", headers.display(), work.display());
    }
    let mut abidw = Command::new("abidw");
    abidw.current_dir(work).args(["--no-show-locs", "--no-comp-dir-path", "--no-corpus-path", "--out-file"]);
    abidw.args(["interface.abi", "interface.so"]);
    output(abidw)?;
    Ok(work.join("interface.abi"))
}

/// The function declarations of a preprocessed header.
fn prototypes(text: &str) -> Vec<String> {
    let (mut found, mut statement, mut depth) = (Vec::new(), String::new(), 0);
    for c in text.chars() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ';' if depth == 0 => {
                let one = std::mem::take(&mut statement).split_whitespace().collect::<Vec<_>>().join(" ");
                if one.ends_with(')') && !one.starts_with("typedef") && !one.starts_with("struct") {
                    found.push(one);
                }
                continue;
            }
            _ => {}
        }
        statement.push(c);
    }
    found
}

/// (exit code, what it printed)
fn output(mut command: Command) -> Result<(i32, String)> {
    let out = command.output().with_context(|| format!("cannot start {:?}", command.get_program()))?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    match out.status.code() {
        Some(code) if code & TOOL_FAILED == 0 => Ok((code, text)),
        _ => bail!("{:?} failed ({}):\n{text}", command.get_program(), out.status),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What counts as broken: each case is a change to the public header.
    #[test]
    fn additions_pass_and_changes_do_not() {
        if Command::new("abidiff").arg("--version").output().is_err() {
            println!("test ... ignored: abidiff is not here (Debian: apt-get install abigail-tools)");
            return;
        }
        let header = std::fs::read_to_string(dirs::workspace().join("include/atropos.h")).unwrap();
        let trace = dirs::workspace().join("include/atropos_trace.h");
        let work = std::env::temp_dir().join(format!("atropos-abi-{}", std::process::id()));
        let interface_with = |name: &str, from: &str, to: &str| {
            let (headers, out) = (work.join(name).join("include"), work.join(name));
            dirs::make(headers.clone()).unwrap();
            assert!(header.contains(from), "{name}");
            std::fs::write(headers.join("atropos.h"), header.replacen(from, to, 1)).unwrap();
            std::fs::copy(&trace, headers.join("atropos_trace.h")).unwrap();
            interface(&headers, &out).unwrap()
        };
        let (version, edge) = ("uint32_t atropos_version(void);", "} atropos_edge;");
        let base = interface_with("same", version, version);
        let verdict = |name: &str, from: &str, to: &str| {
            let changed = interface_with(name, from, to);
            compare(&base, &changed, &dirs::workspace().join("abi/sized.suppr")).unwrap()
        };
        assert_eq!(verdict("same again", version, version), Verdict::Same);
        let last = header.split("} atropos_config;").next().unwrap().rsplit('\n').nth(1).unwrap();
        let longer = format!("{last}\n  uint64_t later;");
        let added = verdict("appended", last, &longer);
        assert!(matches!(&added, Verdict::Added(what) if what.contains("later of atropos_config")), "{added:?}");
        for (name, from, to) in [
            ("field", "  uint32_t mode;", "  uint64_t mode;"),
            ("field type", "  double slo_ms;", "  uint64_t slo_ms;"),
            ("inserted", "  uint32_t mode;", "  uint32_t early;\n  uint32_t mode;"),
            ("parameter", "int atropos_after_fork(void);", "int atropos_after_fork(int x);"),
            ("grown", edge, "  uint64_t more;\n} atropos_edge;"),
        ] {
            assert!(matches!(verdict(name, from, to), Verdict::Broken(_)), "{name}");
        }
        std::fs::remove_dir_all(work).unwrap();
    }

    #[test]
    fn only_functions_are_prototypes() {
        let text = "typedef unsigned t;\ntypedef struct a { int x; } a;\ntypedef int (*f)(int);\n\
                    int one(const struct a *x,\n  void *y);\nvoid two(void);\nextern const int gate;\n";
        assert_eq!(prototypes(text), ["int one(const struct a *x, void *y)", "void two(void)"]);
    }
}
