//! The patch series of a host: applying it, and the lint that keeps it small, complete and documented.

use crate::stamp::Stamp;
use anyhow::{bail, Context, Result};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// DEP-3 fields; each group needs one of its names.
const HEADERS: &[&[&str]] =
    &[&["Description", "Subject"], &["Author", "From", "Origin"], &["Forwarded"], &["Last-Update"]];

pub struct Series {
    dir: PathBuf,
    names: Vec<String>,
}

impl Series {
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join("series");
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("{} is missing: it names the patches in order", path.display()))?;
        let names =
            text.lines().map(|line| line.split('#').next().unwrap_or("").trim()).filter(|line| !line.is_empty());
        Ok(Series { dir: dir.to_path_buf(), names: names.map(String::from).collect() })
    }

    pub fn len(&self) -> usize {
        self.names.len()
    }

    pub fn add_to(&self, stamp: &mut Stamp) -> Result<()> {
        for name in &self.names {
            stamp.add(name).file(&self.dir.join(name))?;
        }
        Ok(())
    }

    /// Applies all in order. Point releases move lines: an offset and a little fuzz pass, a failed hunk does not.
    pub fn apply(&self, tree: &Path, log: &Path) -> Result<()> {
        for name in &self.names {
            if let Err(output) = self.patch(name, "--forward", tree, log)? {
                bail!(
                    "{} does not apply to these sources:\n{output}refresh the patch for this release, or use the release that {} is made for",
                    self.dir.join(name).display(),
                    self.dir.display()
                );
            }
        }
        Ok(())
    }

    /// The reverse of `apply`, on a tree that it was applied to.
    pub fn take_back(&self, tree: &Path, log: &Path) -> Result<()> {
        for name in self.names.iter().rev() {
            if let Err(output) = self.patch(name, "--reverse", tree, log)? {
                bail!("{name} cannot be taken back from {}:\n{output}", tree.display());
            }
        }
        Ok(())
    }

    /// The inner error is what `patch` said when a hunk failed.
    fn patch(&self, name: &str, direction: &str, tree: &Path, log: &Path) -> Result<std::result::Result<(), String>> {
        let out = Command::new("patch")
            .current_dir(tree)
            .args(["-p1", direction, "--batch", "--fuzz=2", "--no-backup-if-mismatch", "-i"])
            .arg(self.dir.join(name))
            .output()
            .context("cannot start `patch`")?;
        std::fs::File::options().create(true).append(true).open(log)?.write_all(&out.stdout)?;
        Ok(if out.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&out.stdout).into_owned()) })
    }

    /// The series with its patches, into a new folder.
    pub fn copy_to(&self, dir: &Path) -> Result<()> {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        std::fs::write(dir.join("series"), self.names.join("\n") + "\n")?;
        for name in &self.names {
            std::fs::copy(self.dir.join(name), dir.join(name))?;
        }
        Ok(())
    }

    /// The files that the patches change or add, each once.
    pub fn touched(&self) -> Result<Vec<String>> {
        let mut files: Vec<String> = Vec::new();
        for name in &self.names {
            let path = self.dir.join(name);
            let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            let changed = text.lines().filter_map(|line| line.strip_prefix("+++ b/"));
            files.extend(changed.map(|rest| rest.split('\t').next().unwrap_or(rest).trim().to_string()));
        }
        files.sort();
        files.dedup();
        Ok(files)
    }

    /// What is wrong with the series, one line each, and how many lines it adds.
    pub fn lint(&self, max_added_lines: usize) -> Result<(Vec<String>, usize)> {
        let mut problems = Vec::new();
        let mut added = 0;
        for (i, name) in self.names.iter().enumerate() {
            if self.names[..i].contains(name) {
                problems.push(format!("series names {name} twice"));
            }
            match std::fs::read_to_string(self.dir.join(name)) {
                Err(error) => problems.push(format!("series names {name}, but: {error}")),
                Ok(text) => {
                    added += added_lines(&text).count();
                    problems.extend(lint_patch(&text).into_iter().map(|problem| format!("{name}: {problem}")));
                }
            }
        }
        if self.names.is_empty() {
            problems.push("series names no patch".into());
        }
        for entry in std::fs::read_dir(&self.dir)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name.ends_with(".patch") && !self.names.contains(&name) {
                problems.push(format!("{name} lies beside the series, which does not name it"));
            }
        }
        // A series holds tracepoints only; whoever needs more lines is putting logic into the core.
        if added > max_added_lines {
            problems.push(format!(
                "{added} lines added, at most {max_added_lines} may be: move what is no tracepoint into hosts/"
            ));
        }
        Ok((problems, added))
    }
}

/// Compiled by itself, unlike a header.
pub fn is_source(file: &str) -> bool {
    [".c", ".cc", ".cpp"].iter().any(|end| file.ends_with(end))
}

fn added_lines(patch: &str) -> impl Iterator<Item = &str> {
    patch.lines().filter(|line| line.starts_with('+') && !line.starts_with("+++ ")).map(|line| &line[1..])
}

fn lint_patch(text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    let header_end = text.lines().position(|l| l.starts_with("--- ") || l.starts_with("diff ")).unwrap_or(0);
    let header: Vec<&str> = text.lines().take(header_end).collect();
    let filled = |name: &str| {
        let value = header.iter().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        value.is_some_and(|value| !value.trim().is_empty())
    };
    for names in HEADERS {
        if !names.iter().any(|name| filled(name)) {
            problems.push(format!("no DEP-3 header `{}`", names.join("` or `")));
        }
    }
    if !text.lines().any(|line| line.starts_with("+++ b/")) {
        problems.push("no file to patch in -p1 form (`+++ b/…`)".into());
    }
    for line in added_lines(text).filter(|line| line.ends_with([' ', '\t'])) {
        problems.push(format!("added line ends in white space: `{line}`"));
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "Description: a tracepoint\nAuthor: A\nForwarded: not-needed\nLast-Update: 2026-01-01\n---\n\
        --- a/f.c\n+++ b/f.c\n@@ -1,6 +1,7 @@\n a\n b\n one\n+two\n three\n c\n d\n";

    fn temp(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("atropos-xtask-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        dir
    }

    fn series(dir: &Path, files: &[(&str, &str)]) -> Series {
        for (name, text) in files {
            std::fs::write(dir.join(name), text).unwrap();
        }
        Series::read(dir).unwrap()
    }

    #[test]
    fn a_clean_series_passes_and_counts_added_lines_only() {
        let dir = temp("clean");
        let lint = series(&dir, &[("series", "# order\na.patch\n"), ("a.patch", GOOD)]).lint(1).unwrap();
        assert_eq!(lint, (vec![], 1));
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn each_fault_is_named() {
        let dir = temp("faults");
        let bad = GOOD.replace("Author: A\n", "").replace("+two", "+two ");
        let long = format!("{GOOD}{}", "+x\n".repeat(9));
        let files = [
            ("series", "a.patch\nb.patch\nb.patch\ngone.patch"),
            ("a.patch", bad.as_str()),
            ("b.patch", &long),
            ("c.patch", GOOD),
        ];
        let problems = series(&dir, &files).lint(9).unwrap().0.join("\n");
        for what in [
            "a.patch: no DEP-3 header `Author`",
            "a.patch: added line ends",
            "b.patch twice",
            "gone.patch, but",
            "c.patch lies beside",
            "lines added, at most",
        ] {
            assert!(problems.contains(what), "{what} not in:\n{problems}");
        }
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn moved_lines_apply_and_a_failed_hunk_names_patch_and_file() {
        let dir = temp("apply");
        let one = series(&dir, &[("series", "a.patch"), ("a.patch", GOOD), ("f.c", "0\n0\nA\nb\none\nthree\nc\nd\n")]);
        one.apply(&dir, &dir.join("log")).unwrap();
        assert_eq!(std::fs::read_to_string(dir.join("f.c")).unwrap(), "0\n0\nA\nb\none\ntwo\nthree\nc\nd\n");
        assert_eq!(one.touched().unwrap(), ["f.c"]);
        one.take_back(&dir, &dir.join("log")).unwrap();
        assert_eq!(std::fs::read_to_string(dir.join("f.c")).unwrap(), "0\n0\nA\nb\none\nthree\nc\nd\n");
        std::fs::write(dir.join("f.c"), "a\nb\nONE\nTHREE\nc\nd\n").unwrap();
        let error = one.apply(&dir, &dir.join("log")).unwrap_err().to_string();
        assert!(error.contains("a.patch does not apply") && error.contains("f.c"), "{error}");
        std::fs::remove_dir_all(dir).unwrap();
    }
}
