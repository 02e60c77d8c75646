//! Building a server: sources, patches, compilation, installation, and our modules in it. Every part is skipped when
//! the stamp of what went into it stands, so an interrupted build goes on where it stopped. What is particular to one
//! server is in its own file, as a `Recipe`.

mod httpd;
pub mod mysql;
mod postgresql;

use crate::patches::Series;
use crate::progress::{self, Step};
use crate::source::Source;
use crate::stamp::{self, Stamp};
use crate::{apt, dirs};
use anyhow::{bail, Context, Result};
use clap::ValueEnum;
use serde_json::{json, Value};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Server {
    Postgresql,
    Mysql,
    /// with PHP in it
    Httpd,
}

impl Server {
    pub const ALL: [Server; 3] = [Server::Postgresql, Server::Mysql, Server::Httpd];

    pub fn recipe(self) -> &'static Recipe {
        match self {
            Server::Postgresql => &postgresql::RECIPE,
            Server::Mysql => &mysql::RECIPE,
            Server::Httpd => &httpd::RECIPE,
        }
    }

    /// As on the command line, and as its folders in `patches/` and `hosts/` are called.
    pub fn name(self) -> &'static str {
        match self {
            Server::Postgresql => "postgresql",
            Server::Mysql => "mysql",
            Server::Httpd => "httpd",
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Variant {
    /// with our patches and module
    Patched,
    /// as upstream made it, with the same options: what the patched one is measured against
    Vanilla,
}

impl Variant {
    pub fn name(self) -> &'static str {
        match self {
            Variant::Patched => "patched",
            Variant::Vanilla => "vanilla",
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Variants {
    Patched,
    Vanilla,
    All,
}

impl Variants {
    pub fn list(self) -> &'static [Variant] {
        match self {
            Variants::Patched => &[Variant::Patched],
            Variants::Vanilla => &[Variant::Vanilla],
            Variants::All => &[Variant::Vanilla, Variant::Patched],
        }
    }
}

#[derive(clap::Args)]
pub struct BuildArgs {
    pub server: Server,
    #[arg(long, value_enum, default_value = "patched")]
    pub variant: Variants,
    /// Sources of your own, a folder or a tarball, instead of Debian's source package. (PHP, which belongs to httpd,
    /// is always Debian's.)
    #[arg(long, value_name = "DIR|TARBALL")]
    pub source: Option<PathBuf>,
    /// Parallel compilers; all cores if not given.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub jobs: Option<u16>,
    /// Look for a newer point release instead of using the sources downloaded before.
    #[arg(long, conflicts_with = "source")]
    pub refresh: bool,
    /// MySQL only: patch the sources, compile just the files that the patches touch, and the plugin; install nothing.
    #[arg(long, conflicts_with = "variant")]
    pub touched: bool,
}

/// What one server's build does in its own way.
pub struct Recipe {
    pub server: Server,
    /// Folder of its trees and of its prefixes, and its name in messages.
    pub package: &'static str,
    pub source: apt::SourcePackage,
    /// The release series that the patches are made for, and the folder they lie in.
    pub release: &'static str,
    /// At most so many lines may the patches add.
    pub max_added_lines: usize,
    /// Debian packages that building it needs, beside `apt::BUILD`.
    pub packages: &'static [&'static str],
    /// What decides about the compiled files; shown in `atropos-build.json`, part of the stamp.
    pub options: &'static [&'static str],
    /// A file below the prefix without which the installation is none.
    pub witness: &'static str,
    /// The build system finds by itself what a changed patch touches, so the tree need not be made anew.
    pub repatch: bool,
    pub version: fn(&Path) -> Result<String>,
    /// Configures and compiles in `job.tree`; goes on where an interrupted one stopped.
    pub compile: fn(&Job) -> Result<()>,
    /// Puts the files into the folder given, as they shall lie below the prefix.
    pub install: fn(&Job, &Path) -> Result<()>,
    /// What is built against the installed server: our modules, PHP. Called with every build, so it looks first.
    pub finish: fn(&Job, &mut Value) -> Result<()>,
}

impl Recipe {
    pub fn patches(&self) -> PathBuf {
        dirs::workspace().join("patches").join(self.server.name()).join(self.release)
    }

    /// `<install>/postgresql-15/<variant>`
    pub fn prefix(&self, variant: Variant) -> Result<PathBuf> {
        Ok(dirs::install()?.join(self.package).join(variant.name()))
    }

    /// The tree that the variant is built in.
    pub fn tree(&self, variant: Variant) -> Result<PathBuf> {
        Ok(dirs::cache()?.join("build").join(self.package).join(variant.name()))
    }

    /// The finished installation of `variant`, whatever it was made of.
    pub fn installed(&self, variant: Variant) -> Option<Value> {
        let prefix = self.prefix(variant).ok()?;
        read_info(&prefix).filter(|_| prefix.join(self.witness).is_file())
    }

    fn ensure_packages(&self) -> Result<()> {
        apt::ensure(&[apt::BUILD, self.packages].concat())?;
        dirs::ensure_server_user()
    }

    /// Two builds in one tree would spoil each other; the second waits.
    fn lock(&self) -> Result<File> {
        let path = dirs::make(dirs::cache()?.join("build"))?.join(format!("{}.lock", self.package));
        let file = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        if file.try_lock().is_err() {
            println!("another build of {} runs; waiting for it to end", self.package);
            file.lock()?;
        }
        Ok(file)
    }
}

/// One variant's build under way.
pub struct Job<'a> {
    pub recipe: &'static Recipe,
    pub source: &'a Source,
    pub variant: Variant,
    pub series: Option<Series>,
    pub tree: PathBuf,
    pub prefix: PathBuf,
    pub jobs: usize,
    pub log: PathBuf,
    /// Look for newer releases.
    pub refresh: bool,
    /// Hash of all that goes into the tree but the patches, and with them.
    base: String,
    pub stamp: String,
}

pub fn build(args: &BuildArgs) -> Result<()> {
    let recipe = args.server.recipe();
    if args.touched && args.server != Server::Mysql {
        bail!("--touched is for MySQL, whose build takes an hour; {} is built whole", recipe.package);
    }
    recipe.ensure_packages()?;
    let _only_one = recipe.lock()?;
    let source = match &args.source {
        Some(path) => Source::given(path, recipe.version)?,
        None => Source::debian(&recipe.source, args.refresh)?,
    };
    let job = |variant| -> Result<Job> {
        let job = Job::new(recipe, &source, variant)?;
        Ok(Job { jobs: args.jobs.map_or(job.jobs, usize::from), refresh: args.refresh, ..job })
    };
    if args.touched {
        return mysql::compile_touched(&job(Variant::Patched)?);
    }
    args.variant.list().iter().try_for_each(|variant| job(*variant)?.run())
}

/// Builds what is missing or out of date of `variants`, from the sources that were used last.
pub fn ensure(server: Server, variants: Variants) -> Result<()> {
    let recipe = server.recipe();
    recipe.ensure_packages()?;
    let _only_one = recipe.lock()?;
    for variant in variants.list() {
        Job::new(recipe, &last_source(recipe, *variant)?, *variant)?.run()?;
    }
    Ok(())
}

/// The sources that the variant was built from; Debian's if it was not built.
fn last_source(recipe: &Recipe, variant: Variant) -> Result<Source> {
    let info = read_info(&recipe.prefix(variant)?);
    match info.and_then(|info| info["given"].as_str().map(PathBuf::from)) {
        Some(path) => Source::given(&path, recipe.version).with_context(|| {
            format!(
                "this server was built from sources that are gone; build it anew: cargo xtask server build {}",
                recipe.server.name()
            )
        }),
        None => Source::debian(&recipe.source, false),
    }
}

fn read_info(prefix: &Path) -> Option<Value> {
    serde_json::from_slice(&std::fs::read(prefix.join("atropos-build.json")).ok()?).ok()
}

impl<'a> Job<'a> {
    fn new(recipe: &'static Recipe, source: &'a Source, variant: Variant) -> Result<Self> {
        let prefix = recipe.prefix(variant)?;
        let series = match variant {
            Variant::Patched => Some(Series::read(&recipe.patches())?),
            Variant::Vanilla => None,
        };
        let mut stamp = Stamp::default();
        stamp.add(&source.id).add(variant.name()).add(prefix.as_os_str().as_encoded_bytes()).add(compiler()?);
        for option in recipe.options {
            stamp.add(option);
        }
        let base = stamp.hex();
        if let Some(series) = &series {
            series.add_to(&mut stamp)?;
        }
        Ok(Job {
            recipe,
            source,
            variant,
            series,
            tree: recipe.tree(variant)?,
            prefix,
            jobs: cores(),
            refresh: false,
            log: dirs::logs()?.join(format!("{}-{}.log", recipe.package, variant.name())),
            base,
            stamp: stamp.hex(),
        })
    }

    fn run(&self) -> Result<()> {
        let (recipe, stamp) = (self.recipe, self.stamp.as_str());
        let mut info = match recipe.installed(self.variant).filter(|info| info["stamp"] == stamp) {
            Some(info) => info,
            None => {
                println!("building {} {} from {}", recipe.package, self.variant.name(), self.source.origin);
                File::create(&self.log)?;
                self.prepare()?;
                let version = (recipe.version)(&self.tree)?;
                (recipe.compile)(self)?;
                let staging = self.prefix.with_extension("staging");
                remove(&staging)?;
                (recipe.install)(self, &staging)?;
                self.swap_in(&staging)?;
                let info = json!({
                    "version": version, "variant": self.variant.name(), "source": self.source.origin,
                    "given": self.source.given, "stamp": stamp, "configure": recipe.options, "modules": {},
                });
                self.write_info(&info)?;
                info
            }
        };
        (recipe.finish)(self, &mut info)?;
        let version = info["version"].as_str().unwrap_or_default();
        println!("{} {} ({version}) is ready in {}", recipe.package, self.variant.name(), self.prefix.display());
        Ok(())
    }

    pub fn write_info(&self, info: &Value) -> Result<()> {
        let path = self.prefix.join("atropos-build.json");
        std::fs::write(&path, serde_json::to_string_pretty(info)? + "\n")
            .with_context(|| format!("cannot write {}", path.display()))
    }

    /// A tree that holds exactly this stamp's sources and patches; one that is half done or of another stamp goes,
    /// unless it differs in our patches only and the build system can cope with that.
    pub fn prepare(&self) -> Result<()> {
        let marker = self.tree.join(".atropos-stamp");
        let found = std::fs::read_to_string(&marker).unwrap_or_default();
        if found == self.stamp {
            return Ok(());
        }
        if self.recipe.repatch && !found.is_empty() && self.repatch(&marker).is_ok() {
            return Ok(());
        }
        let fresh = self.tree.with_extension("new");
        for old in [&self.tree, &fresh] {
            remove(old)?;
        }
        let label = format!("unpack {}", self.recipe.package);
        progress::during(&label, || self.source.unpack(&fresh))?;
        let version = (self.recipe.version)(&fresh)?;
        if !version.starts_with(&format!("{}.", self.recipe.release)) {
            bail!("{} is release {version}; there are patches for {} only", self.source.origin, self.recipe.package);
        }
        if let Some(series) = &self.series {
            series.apply(&fresh, &self.log)?;
            series.copy_to(&fresh.join(APPLIED))?;
        }
        std::fs::write(fresh.join(".atropos-base"), &self.base)?;
        std::fs::write(fresh.join(".atropos-stamp"), &self.stamp)?;
        std::fs::rename(&fresh, &self.tree)?;
        Ok(())
    }

    /// Takes the patches back that are in the tree and puts the present ones in. After a failure the tree is unmarked.
    fn repatch(&self, marker: &Path) -> Result<()> {
        let series = self.series.as_ref().context("no patches")?;
        if std::fs::read_to_string(self.tree.join(".atropos-base"))? != self.base {
            bail!("other sources or options");
        }
        let applied = self.tree.join(APPLIED);
        let old = Series::read(&applied)?;
        std::fs::remove_file(marker)?;
        old.take_back(&self.tree, &self.log)?;
        series.apply(&self.tree, &self.log)?;
        remove(&applied)?;
        series.copy_to(&applied)?;
        std::fs::write(marker, &self.stamp)?;
        Ok(())
    }

    /// Servers that run from the old prefix meet the new files all at once.
    fn swap_in(&self, staging: &Path) -> Result<()> {
        let old = self.prefix.with_extension("old");
        remove(&old)?;
        if self.prefix.exists() {
            std::fs::rename(&self.prefix, &old)?;
        }
        std::fs::rename(staging, &self.prefix)?;
        remove(&old)
    }

    pub fn label(&self, what: &str) -> String {
        format!("{what} {} {}", self.recipe.package, self.variant.name())
    }

    /// One step of the build, logged; `expected_s` on 2 cores.
    pub fn step(&self, what: &str, expected_s: u64, command: Command) -> Result<()> {
        self.watched(what, expected_s, &mut |_| None, command)
    }

    pub fn watched(
        &self,
        what: &str,
        expected_s: u64,
        watch: &mut dyn FnMut(&str) -> Option<String>,
        command: Command,
    ) -> Result<()> {
        let expected = Some(Duration::from_secs(expected_s));
        Step { label: &self.label(what), log: &self.log, expected, limit: None, watch }.run(command)
    }

    /// For compilations of `seconds` on 2 cores.
    pub fn expected_s(&self, seconds: u64) -> u64 {
        seconds * 2 / self.jobs.max(1) as u64
    }

    /// `make install` into a folder below which it repeats the whole prefix; afterwards `staging` is that prefix.
    pub fn make_install(&self, target: &str, staging: &Path) -> Result<()> {
        let root = staging.with_extension("root");
        remove(&root)?;
        let mut make = Command::new("make");
        // One job: the parts of these trees install into the same folders.
        make.current_dir(&self.tree).arg(target).arg(format!("DESTDIR={}", root.display()));
        self.step("install", 10, make)?;
        let inside = root.join(self.prefix.strip_prefix("/").context("an install prefix is absolute")?);
        std::fs::rename(inside, staging)?;
        remove(&root)
    }

    /// Builds `hosts/<host>` with its Makefile when it, the library or the server changed, and puts the module that
    /// comes out into the prefix.
    pub fn module(&self, info: &mut Value, host: &Module) -> Result<()> {
        let sources = dirs::workspace().join("hosts").join(host.name);
        if !sources.join("Makefile").is_file() {
            bail!("{} has no Makefile: the patched server cannot load its module", sources.display());
        }
        let library = build_library()?;
        let include = dirs::workspace().join("include");
        let mut stamp = Stamp::default();
        stamp.add(&self.stamp).tree(&sources)?.tree(&include)?.file(&library)?;
        for folder in host.includes {
            stamp.tree(&dirs::workspace().join(folder))?;
        }
        let stamp = stamp.hex();
        let installed = self.prefix.join(&host.to);
        if info["modules"][host.name] == stamp.as_str() && installed.is_file() {
            return Ok(());
        }
        (host.before)(self)?;
        let (folder, log) = self.make_module(host, &library)?;
        if let Some(built) = host.built {
            place(&folder.join(built), &installed)?;
        }
        if !installed.is_file() {
            bail!("the module was built, but is not at {}\n{}", installed.display(), progress::tail(&log));
        }
        info["modules"][host.name] = stamp.into();
        self.write_info(info)
    }

    /// Returns the folder in which it was made, and the log.
    pub fn make_module(&self, host: &Module, library: &Path) -> Result<(PathBuf, PathBuf)> {
        let folder = self.copy_host(host)?;
        let log = dirs::logs()?.join(format!("{}-module-{}.log", self.recipe.package, host.name));
        File::create(&log)?;
        let include = dirs::workspace().join("include");
        let mut make = Command::new("make");
        make.current_dir(&folder).arg(format!("-j{}", self.jobs)).args(&host.make_args);
        make.arg(format!("LIBATROPOS={}", library.display())).arg(format!("ATROPOS_INCLUDE={}", include.display()));
        if host.built.is_none() {
            make.arg("install");
        }
        let label = format!("build the module of hosts/{} for {}", host.name, self.recipe.package);
        let expected = Some(Duration::from_secs(10));
        Step { label: &label, log: &log, expected, limit: None, watch: &mut |_| None }.run(make)?;
        Ok((folder, log))
    }

    /// A copy: objects of one server's headers must not lie around in the checkout. Files of neighbours that it
    /// includes lie beside it as they do there.
    fn copy_host(&self, host: &Module) -> Result<PathBuf> {
        let hosts = dirs::cache()?.join("build").join(self.recipe.package).join("hosts");
        for folder in std::iter::once(&host.name).chain(host.includes) {
            let folder = folder.trim_start_matches("hosts/");
            let (from_dir, to_dir) = (dirs::workspace().join("hosts").join(folder), hosts.join(folder));
            remove(&to_dir)?;
            for from in stamp::files(&from_dir)? {
                if !matches!(from.extension().and_then(|e| e.to_str()), Some("o" | "so" | "bc" | "lo" | "la" | "slo")) {
                    place(&from, &to_dir.join(from.strip_prefix(&from_dir).expect("listed under it")))?;
                }
            }
        }
        Ok(hosts.join(host.name))
    }
}

/// What hosts/<name> is to its server.
pub struct Module {
    pub name: &'static str,
    /// Other folders of the workspace, all below hosts/, whose files it uses.
    pub includes: &'static [&'static str],
    /// What its Makefile wants beside LIBATROPOS and ATROPOS_INCLUDE.
    pub make_args: Vec<String>,
    /// The file that its Makefile makes; none if that installs by itself.
    pub built: Option<&'static str>,
    /// The module's place, below the prefix if relative.
    pub to: PathBuf,
    /// Makes sure of what it is built against.
    pub before: fn(&Job) -> Result<()>,
}

/// Where the patches that are in a tree are kept.
const APPLIED: &str = ".atropos-series";

fn cores() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from)
}

fn compiler() -> Result<Vec<u8>> {
    Ok(Command::new("gcc").arg("--version").output().context("cannot start gcc")?.stdout)
}

/// ccache would tell the variants' trees apart by their path: sharing the objects halves a cold build of both.
pub fn share_objects(command: &mut Command, tree: &Path) {
    command.env("CCACHE_BASEDIR", tree).env("CCACHE_NOHASHDIR", "1");
}

/// `target/release/libatropos.a`, fresh.
pub fn build_library() -> Result<PathBuf> {
    let log = dirs::logs()?.join("libatropos.log");
    File::create(&log)?;
    let mut cargo = dirs::cargo();
    cargo.args(["build", "--release", "-p", "atropos"]);
    Step {
        label: "build libatropos",
        log: &log,
        expected: Some(Duration::from_secs(30)),
        limit: None,
        watch: &mut |_| None,
    }
    .run(cargo)?;
    Ok(dirs::target()?.join("release/libatropos.a"))
}

/// Written beside and renamed: a server that runs with the old file keeps it.
fn place(from: &Path, to: &Path) -> Result<()> {
    dirs::make(to.parent().expect("has a parent").to_path_buf())?;
    let mut name = to.file_name().expect("is a file's path").to_os_string();
    name.push(".new");
    let fresh = to.with_file_name(name);
    std::fs::copy(from, &fresh).with_context(|| format!("cannot copy {} to {}", from.display(), fresh.display()))?;
    std::fs::rename(&fresh, to)?;
    Ok(())
}

pub fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}
