//! Building a server: sources, patches, configure, make, install, and our module in it. Every part is skipped when
//! the stamp of what went into it stands, so an interrupted build goes on where it stopped.

use crate::patches::Series;
use crate::progress::{self, Step};
use crate::source::{self, Source};
use crate::stamp::{self, Stamp};
use crate::{apt, dirs};
use anyhow::{bail, Context, Result};
use clap::ValueEnum;
use serde_json::{json, Value};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Server {
    Postgresql,
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
    fn list(self) -> &'static [Variant] {
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
    /// Sources of your own, a folder or a tarball, instead of Debian's source package.
    #[arg(long, value_name = "DIR|TARBALL")]
    pub source: Option<PathBuf>,
    /// Parallel compilers; all cores if not given.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub jobs: Option<u16>,
    /// Look for a newer point release instead of using the sources downloaded before.
    #[arg(long, conflicts_with = "source")]
    pub refresh: bool,
}

/// The PostgreSQL release series that the patches are made for.
const MAJOR: &str = "15";
const PACKAGE: &str = "postgresql-15";
/// Both variants alike. Debian's readline and zlib are small; ICU, TLS and the rest play no part in what is measured.
const CONFIGURE: &[&str] = &["--without-icu", "--without-openssl", "CC=ccache gcc", "CFLAGS=-O2 -g"];
/// On 2 cores with an empty ccache.
const COMPILE_EXPECTED: Duration = Duration::from_secs(240);

/// `<install>/postgresql-15/<variant>`
pub fn prefix(variant: Variant) -> Result<PathBuf> {
    Ok(dirs::install()?.join(PACKAGE).join(variant.name()))
}

/// The tree that the installed variant was built in.
pub fn tree(variant: Variant) -> Result<PathBuf> {
    Ok(dirs::cache()?.join("build").join(PACKAGE).join(variant.name()))
}

pub fn build(args: &BuildArgs) -> Result<()> {
    let Server::Postgresql = args.server;
    apt::ensure(apt::BUILD)?;
    dirs::ensure_server_user()?;
    let _only_one = lock()?;
    let source = match &args.source {
        Some(path) => Source::given(path)?,
        None => Source::debian(PACKAGE, args.refresh)?,
    };
    args.variant.list().iter().try_for_each(|variant| build_variant(&source, *variant, args.jobs))
}

/// Builds what is missing or out of date of `variants`, from the sources that were used last.
pub fn ensure(variants: Variants) -> Result<()> {
    apt::ensure(apt::BUILD)?;
    dirs::ensure_server_user()?;
    let _only_one = lock()?;
    for variant in variants.list() {
        let given = read_info(&prefix(*variant)?).and_then(|info| info["given"].as_str().map(PathBuf::from));
        let source = match given {
            Some(path) => Source::given(&path).context(
                "this server was built from sources that are gone; build it anew: cargo xtask server build postgresql",
            )?,
            None => Source::debian(PACKAGE, false)?,
        };
        build_variant(&source, *variant, None)?;
    }
    Ok(())
}

/// Two builds in one tree would spoil each other; the second waits.
fn lock() -> Result<File> {
    let path = dirs::cache()?.join("build.lock");
    let file = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
    if file.try_lock().is_err() {
        println!("another build runs; waiting for it to end");
        file.lock()?;
    }
    Ok(file)
}

fn read_info(prefix: &Path) -> Option<Value> {
    serde_json::from_slice(&std::fs::read(prefix.join("atropos-build.json")).ok()?).ok()
}

fn build_variant(source: &Source, variant: Variant, jobs: Option<u16>) -> Result<()> {
    let prefix = prefix(variant)?;
    let series = match variant {
        Variant::Patched => Some(Series::read(&dirs::workspace().join("patches/postgresql").join(MAJOR))?),
        Variant::Vanilla => None,
    };
    let mut stamp = Stamp::default();
    stamp.add(&source.id).add(variant.name()).add(prefix.as_os_str().as_encoded_bytes()).add(compiler()?);
    for option in CONFIGURE {
        stamp.add(option);
    }
    if let Some(series) = &series {
        series.add_to(&mut stamp)?;
    }
    let stamp = stamp.hex();
    let jobs = jobs.map_or_else(cores, usize::from);
    let mut info =
        read_info(&prefix).filter(|info| info["stamp"] == stamp.as_str() && prefix.join("bin/postgres").is_file());
    if info.is_none() {
        println!("building {PACKAGE} {} from {}", variant.name(), source.origin);
        let log = dirs::logs()?.join(format!("{PACKAGE}-{}.log", variant.name()));
        File::create(&log)?;
        let tree = tree(variant)?;
        prepare(source, series.as_ref(), &tree, &stamp, &log)?;
        let version = source::version(&tree)?;
        compile(&tree, &prefix, variant, jobs, &log)?;
        install(&tree, &prefix, variant, &log)?;
        let new = json!({
            "version": version, "variant": variant.name(), "source": source.origin, "given": source.given, "stamp": stamp,
            "configure": CONFIGURE, "module": null,
        });
        write_info(&prefix, &new)?;
        info = Some(new);
    }
    let mut info = info.expect("set above");
    if variant == Variant::Patched {
        install_module(&prefix, &mut info)?;
    }
    let version = info["version"].as_str().unwrap_or_default().to_string();
    println!("{PACKAGE} {} ({version}) is ready in {}", variant.name(), prefix.display());
    Ok(())
}

fn write_info(prefix: &Path, info: &Value) -> Result<()> {
    let path = prefix.join("atropos-build.json");
    std::fs::write(&path, serde_json::to_string_pretty(info)? + "\n")
        .with_context(|| format!("cannot write {}", path.display()))
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from)
}

fn compiler() -> Result<Vec<u8>> {
    Ok(Command::new("gcc").arg("--version").output().context("cannot start gcc")?.stdout)
}

/// A tree that holds exactly this stamp's sources and patches; one that is half done or of another stamp goes.
fn prepare(source: &Source, series: Option<&Series>, tree: &Path, stamp: &str, log: &Path) -> Result<()> {
    let marker = tree.join(".atropos-stamp");
    if std::fs::read_to_string(&marker).is_ok_and(|found| found == stamp) {
        return Ok(());
    }
    let fresh = tree.with_extension("new");
    for old in [tree, &fresh] {
        remove(old)?;
    }
    source.unpack(&fresh)?;
    let version = source::version(&fresh)?;
    if version.split('.').next() != Some(MAJOR) {
        bail!("{} is release {version}; there are patches for PostgreSQL {MAJOR} only", source.origin);
    }
    if let Some(series) = series {
        series.apply(&fresh, log)?;
    }
    std::fs::write(fresh.join(".atropos-stamp"), stamp)?;
    std::fs::rename(&fresh, tree)?;
    Ok(())
}

fn compile(tree: &Path, prefix: &Path, variant: Variant, jobs: usize, log: &Path) -> Result<()> {
    // config.status is configure's last product, made when all checks have passed; GNUmakefile is made by it.
    if !tree.join("GNUmakefile").is_file() {
        let mut configure = Command::new("./configure");
        configure.current_dir(tree).arg(format!("--prefix={}", prefix.display())).args(CONFIGURE);
        let label = format!("configure {PACKAGE} {}", variant.name());
        Step { label: &label, log, expected: Some(Duration::from_secs(25)), limit: None, watch: &mut |_| None }
            .run(configure)?;
    }
    let mut make = Command::new("make");
    // ccache would tell the two variants' trees apart by the folder named in their debug information; sharing halves
    // a cold build of both.
    make.current_dir(tree).env("CCACHE_NOHASHDIR", "1").arg(format!("-j{jobs}")).arg("world-bin");
    let label = format!("compile {PACKAGE} {}", variant.name());
    let mut compiled = 0;
    let mut watch = |line: &str| {
        compiled += usize::from(line.contains(" -c -o "));
        Some(format!("{compiled} files compiled"))
    };
    let expected = COMPILE_EXPECTED * 2 / jobs.max(1) as u32;
    Step { label: &label, log, expected: Some(expected), limit: None, watch: &mut watch }.run(make)
}

/// Installs beside the old prefix and swaps, so that servers that run from it meet the new files all at once.
fn install(tree: &Path, prefix: &Path, variant: Variant, log: &Path) -> Result<()> {
    let staging = prefix.with_extension("staging");
    remove(&staging)?;
    let mut make = Command::new("make");
    // One job: the parts of this tree install into the same folders.
    make.current_dir(tree).arg("install-world-bin").arg(format!("DESTDIR={}", staging.display()));
    let label = format!("install {PACKAGE} {}", variant.name());
    Step { label: &label, log, expected: Some(Duration::from_secs(10)), limit: None, watch: &mut |_| None }
        .run(make)?;
    let installed = staging.join(prefix.strip_prefix("/").context("an install prefix is absolute")?);
    let old = prefix.with_extension("old");
    remove(&old)?;
    if prefix.exists() {
        std::fs::rename(prefix, &old)?;
    }
    std::fs::rename(&installed, prefix)?;
    remove(&staging)?;
    remove(&old)
}

/// Builds the library and, when it or the module's sources changed, the module `atropos` of the patched server.
fn install_module(prefix: &Path, info: &mut Value) -> Result<()> {
    let sources = dirs::workspace().join("hosts/postgresql");
    if !sources.join("Makefile").is_file() {
        bail!("{} has no Makefile: the patched server cannot load its module", sources.display());
    }
    let library = build_library()?;
    let include = dirs::workspace().join("include");
    let mut stamp = Stamp::default();
    stamp.add(info["stamp"].as_str().unwrap_or_default()).tree(&sources)?.tree(&include)?.file(&library)?;
    let stamp = stamp.hex();
    if info["module"] == stamp.as_str() && prefix.join("lib/atropos.so").is_file() {
        return Ok(());
    }
    // A copy: objects of one server's headers must not lie around in the checkout.
    let copy = dirs::cache()?.join("build").join(PACKAGE).join("module");
    remove(&copy)?;
    for from in stamp::files(&sources)? {
        let name = from.strip_prefix(&sources).expect("listed under it");
        if !matches!(from.extension().and_then(|e| e.to_str()), Some("o" | "so" | "bc")) {
            let to = copy.join(name);
            dirs::make(to.parent().expect("has a parent").to_path_buf())?;
            std::fs::copy(&from, &to)?;
        }
    }
    let log = dirs::logs()?.join(format!("{PACKAGE}-module.log"));
    File::create(&log)?;
    let mut make = Command::new("make");
    make.current_dir(&copy).arg(format!("PG_CONFIG={}", prefix.join("bin/pg_config").display()));
    make.arg(format!("LIBATROPOS={}", library.display()))
        .arg(format!("ATROPOS_INCLUDE={}", include.display()))
        .arg("install");
    let label = format!("build the module for {PACKAGE}");
    Step { label: &label, log: &log, expected: Some(Duration::from_secs(5)), limit: None, watch: &mut |_| None }
        .run(make)?;
    if !prefix.join("lib/atropos.so").is_file() {
        bail!(
            "the module was built, but is not at {}\n{}",
            prefix.join("lib/atropos.so").display(),
            progress::tail(&log)
        );
    }
    info["module"] = stamp.into();
    write_info(prefix, info)
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

fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}
