//! Where `cargo xtask server build httpd` puts its builds.
use crate::dirs::cache_dir;
use crate::host::Variant;
use anyhow::{bail, Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(Clone, Debug)]
pub struct Install {
    pub prefix: PathBuf,
    pub variant: Variant,
    /// "2.4.68", as the server says it.
    pub version: String,
    /// "8.2.32", as PHP's build says it.
    pub php_version: String,
    /// Where PHP looks for extensions.
    extensions: PathBuf,
}

fn output(program: &Path, arg: &str) -> Result<String> {
    let out = Command::new(program).arg(arg).output().with_context(|| format!("run {}", program.display()))?;
    Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned())
}

impl Install {
    /// Finds the build of `variant`; `prefix` (`--prefix`) overrides the place.
    pub fn find(variant: Variant, prefix: Option<&Path>) -> Result<Install> {
        let name = variant.name();
        let prefix = match prefix {
            Some(p) => p.to_path_buf(),
            None => cache_dir()?.join("install/httpd-2.4").join(name),
        };
        let missing = |what: &Path| {
            format!("there is no {}: build it with `cargo xtask server build httpd --variant {name}`", what.display())
        };
        let httpd = prefix.join("bin/httpd");
        let libphp = prefix.join("modules/libphp.so");
        for file in [&httpd, &libphp] {
            if !file.exists() {
                bail!(missing(file));
            }
        }
        // "Server version: Apache/2.4.68 (Unix)"
        let said = output(&httpd, "-v")?;
        let version = said.split("Apache/").nth(1).and_then(|r| r.split_whitespace().next()).unwrap_or("unknown");
        let config = prefix.join("bin/php-config");
        let (php_version, extensions) = (output(&config, "--version")?, output(&config, "--extension-dir")?);
        Ok(Install { version: version.to_owned(), php_version, extensions: extensions.into(), prefix, variant })
    }

    pub fn httpd(&self) -> PathBuf {
        self.prefix.join("bin/httpd")
    }

    /// The file of a loadable module; `None`: it is linked into the server, or not built.
    pub fn module(&self, name: &str) -> Option<PathBuf> {
        Some(self.prefix.join("modules").join(format!("{name}.so"))).filter(|p| p.exists())
    }

    /// Our module and our PHP extension.
    pub fn atropos(&self) -> Result<(PathBuf, PathBuf)> {
        let module = self.module("mod_atropos").with_context(|| {
            format!("{} has no mod_atropos.so: run `cargo xtask server build httpd`", self.prefix.display())
        })?;
        let extension = self.extensions.join("atropos.so");
        if !extension.exists() {
            bail!("there is no {}: run `cargo xtask server build httpd`", extension.display());
        }
        Ok((module, extension))
    }

    /// "httpd 2.4.68", "PHP 8.2.32".
    pub fn versions(&self) -> Vec<String> {
        vec![format!("httpd {}", self.version), format!("PHP {}", self.php_version)]
    }
}
