//! Where a server's sources come from: Debian's source package, or a folder or tarball that the user gives.

use crate::stamp::Stamp;
use crate::{apt, dirs};
use anyhow::{bail, Context, Result};
use serde_json::{json, Value};
use std::path::{Path, PathBuf};
use std::process::Command;

pub struct Source {
    path: PathBuf,
    /// Hash of the content.
    pub id: String,
    /// Debian's package and version, or the path given; for people and for `atropos-build.json`.
    pub origin: String,
    /// The path the user gave, if it did not come from Debian.
    pub given: Option<PathBuf>,
}

impl Source {
    /// `version` reads the release out of a tree, and so tells whether a folder is one.
    pub fn given(path: &Path, version: fn(&Path) -> Result<String>) -> Result<Self> {
        let path = path.canonicalize().with_context(|| format!("--source {}", path.display()))?;
        let mut stamp = Stamp::default();
        if path.is_dir() {
            version(&path)
                .with_context(|| format!("--source {}: give the top folder of the server's sources", path.display()))?;
            stamp.tree(&path)?;
        } else {
            stamp.file(&path)?;
        }
        Ok(Source { id: stamp.hex(), origin: path.display().to_string(), given: Some(path.clone()), path })
    }

    /// The tarball downloaded earlier, unless `refresh` asks for the newest point release.
    pub fn debian(package: &apt::SourcePackage, refresh: bool) -> Result<Self> {
        let record = dirs::cache()?.join("download").join(package.name).join("chosen.json");
        if !refresh {
            if let Some(source) = Self::recorded(package.name, &record) {
                return Ok(source);
            }
        }
        let (path, version) = apt::source_tarball(package)?;
        let id = Stamp::default().file(&path)?.hex();
        std::fs::write(&record, json!({ "version": version, "path": path, "id": id }).to_string())?;
        Self::recorded(package.name, &record).context("the download does not match its own record: is the disk full?")
    }

    fn recorded(package: &str, record: &Path) -> Option<Self> {
        let record: Value = serde_json::from_slice(&std::fs::read(record).ok()?).ok()?;
        let path = PathBuf::from(record["path"].as_str()?);
        let id = Stamp::default().file(&path).ok()?.hex();
        let origin = format!("Debian source package {package}, upstream {}", record["version"].as_str()?);
        (record["id"].as_str()? == id).then_some(Source { path, id, origin, given: None })
    }

    /// Puts the pristine tree into `dir`, which must not exist yet.
    pub fn unpack(&self, dir: &Path) -> Result<()> {
        dirs::make(dir.to_path_buf())?;
        let mut command = if self.path.is_dir() {
            let mut command = Command::new("cp");
            command.arg("-a").arg(self.path.join(".")).arg(dir);
            command
        } else {
            let mut command = Command::new("tar");
            command.args(["--strip-components=1", "--no-same-owner", "-xf"]).arg(&self.path).arg("-C").arg(dir);
            command
        };
        let out = command.output().context("cannot start tar or cp")?;
        if !out.status.success() {
            bail!("cannot unpack {}: {}", self.path.display(), String::from_utf8_lossy(&out.stderr));
        }
        // A folder that was built in place brings objects made with other options.
        if dir.join("config.status").is_file() {
            let out = Command::new("make").arg("distclean").current_dir(dir).output()?;
            if !out.status.success() {
                bail!("cannot clean the copy of {}: {}", self.path.display(), String::from_utf8_lossy(&out.stderr));
            }
        }
        Ok(())
    }
}

/// `15.18` out of an autoconf `configure`.
pub fn autoconf_version(tree: &Path) -> Result<String> {
    let path = tree.join("configure");
    let text = std::fs::read(&path).with_context(|| format!("{}: these are no server sources", path.display()))?;
    let text = String::from_utf8_lossy(&text);
    let value = text.lines().find_map(|line| line.strip_prefix("PACKAGE_VERSION='")?.strip_suffix('\''));
    Ok(value.with_context(|| format!("{} states no PACKAGE_VERSION", path.display()))?.to_string())
}
