//! Content hashes, by which finished work is recognised.

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

/// A hash over labelled parts; the lengths keep neighbouring parts apart.
#[derive(Default)]
pub struct Stamp(Sha256);

impl Stamp {
    pub fn add(&mut self, part: impl AsRef<[u8]>) -> &mut Self {
        let part = part.as_ref();
        self.0.update((part.len() as u64).to_le_bytes());
        self.0.update(part);
        self
    }

    pub fn file(&mut self, path: &Path) -> Result<&mut Self> {
        let content = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(self.add(content))
    }

    /// Names and contents of all files under `dir`, version control aside.
    pub fn tree(&mut self, dir: &Path) -> Result<&mut Self> {
        for path in files(dir)? {
            let name = path.strip_prefix(dir).expect("listed under dir");
            self.add(name.as_os_str().as_encoded_bytes());
            self.file(&path)?;
        }
        Ok(self)
    }

    pub fn hex(&self) -> String {
        self.0.clone().finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// All regular files under `dir`, sorted; `.git` is left out, links are not followed.
pub fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut pending = vec![dir.to_path_buf()];
    while let Some(dir) = pending.pop() {
        for entry in std::fs::read_dir(&dir).with_context(|| format!("cannot list {}", dir.display()))? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() && entry.file_name() != ".git" {
                pending.push(entry.path());
            } else if kind.is_file() {
                found.push(entry.path());
            }
        }
    }
    found.sort();
    Ok(found)
}
