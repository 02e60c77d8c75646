//! Where `cargo xtask server build postgresql` puts its builds.
use super::cluster::{base_settings, Cluster};
use super::{session, template};
use crate::dirs::cache_dir;
use crate::guard::Guarded;
use crate::host::{setting, Dataset, Host, HostId, Server, Setting, Variant, DECISION_LOG};
use crate::record::Mode;
use anyhow::{bail, Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(Clone, Debug)]
pub struct Install {
    pub prefix: PathBuf,
    pub variant: Variant,
    /// "15.18", as the server says it.
    pub version: String,
}

impl Install {
    /// Finds the build of `variant`; `prefix` (`--prefix`) overrides the place.
    pub fn find(variant: Variant, prefix: Option<&Path>) -> Result<Install> {
        let name = variant.name();
        let prefix = match prefix {
            Some(p) => p.to_path_buf(),
            None => cache_dir()?.join("install/postgresql-15").join(name),
        };
        let postgres = prefix.join("bin/postgres");
        if !postgres.exists() {
            bail!(
                "no PostgreSQL at {}: build it with `cargo xtask server build postgresql --variant {name}`",
                prefix.display()
            );
        }
        let out =
            Command::new(&postgres).arg("--version").output().with_context(|| format!("run {}", postgres.display()))?;
        let text = String::from_utf8_lossy(&out.stdout);
        let version = text.split_whitespace().nth(2).unwrap_or("unknown").to_owned();
        Ok(Install { prefix, variant, version })
    }

    pub fn bin(&self, program: &str) -> PathBuf {
        self.prefix.join("bin").join(program)
    }
}

/// The settings that load the module in `mode`, writing decisions to the run's folder.
fn module_settings(mode: Mode, dir: &Path) -> Vec<Setting> {
    vec![
        setting("shared_preload_libraries", "'atropos'"),
        setting("atropos.mode", format!("'{}'", mode.atropos())),
        setting("atropos.decision_log", format!("'{}'", dir.join(DECISION_LOG).display())),
    ]
}

impl Install {
    /// As `Host::start`, for those who need more of the server than a case does.
    pub fn start_cluster(
        &self,
        dataset: &Dataset,
        mode: Option<Mode>,
        settings: &[Setting],
        name: &str,
    ) -> Result<Cluster> {
        let template = template::data_dir(self, dataset)?;
        let dir = crate::dirs::new_run_dir()?;
        let mut all = mode.filter(|_| self.loaded()).map(|m| module_settings(m, &dir)).unwrap_or_default();
        all.extend(settings.iter().cloned());
        Cluster::start_copy(self, dir, &template, &all, name)
    }
}

impl Host for Install {
    fn id(&self) -> HostId {
        HostId::Postgresql
    }

    fn version(&self) -> &str {
        &self.version
    }

    fn variant(&self) -> Variant {
        self.variant
    }

    fn base_settings(&self) -> Vec<Setting> {
        base_settings()
    }

    fn start(
        &self,
        dataset: &Dataset,
        mode: Option<Mode>,
        settings: &[Setting],
        name: &str,
    ) -> Result<Box<dyn Server>> {
        Ok(Box::new(self.start_cluster(dataset, mode, settings, name)?))
    }

    fn peers(&self) -> &'static [Mode] {
        &[]
    }

    fn means(&self, _peer: Mode) -> String {
        String::new()
    }

    fn peer(&self, _server: &dyn Server, _mode: Mode) -> Result<Option<Guarded>> {
        Ok(None)
    }

    fn schema(&self) -> &'static str {
        session::SCHEMA
    }

    fn sysbench(&self, dir: &Path, schema: &str) -> Command {
        session::sysbench(dir, schema)
    }
}
