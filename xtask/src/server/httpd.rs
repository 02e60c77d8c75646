//! httpd with its three MPMs as modules, and PHP with threads in it, both under one prefix.

use super::{Job, Module, Recipe, Server, Variant};
use crate::progress::Step;
use crate::source::{self, Source};
use crate::stamp::Stamp;
use crate::{apt, dirs, progress};
use anyhow::{bail, Context, Result};
use serde_json::{json, Value};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

pub const RECIPE: Recipe = Recipe {
    server: Server::Httpd,
    package: "httpd-2.4",
    source: apt::SourcePackage { name: "apache2", suite: None },
    release: "2.4",
    max_added_lines: 39,
    packages: &["perl", "libapr1-dev", "libaprutil1-dev", "libpcre2-dev", "zlib1g-dev"],
    // Most modules, as by default; what would depend on further libraries plays no part here.
    options: &[
        "--enable-so",
        "--enable-mpms-shared=event worker prefork",
        "--with-mpm=event",
        "--disable-ssl",
        "--disable-http2",
        "--disable-md",
        "--disable-lua",
        "--disable-brotli",
        "CC=ccache gcc",
        "CFLAGS=-O2 -g",
    ],
    witness: "bin/httpd",
    repatch: false,
    version,
    compile,
    install,
    finish,
};

const PHP: apt::SourcePackage = apt::SourcePackage { name: "php8.2", suite: None };
const PHP_RELEASE: &str = "8.2.";
/// zend signals take the signals over by which the threaded MPMs wake their own main thread, and graceful restarts
/// hang; without per-thread timers max_execution_time would be the whole process's.
const PHP_OPTIONS: &[&str] = &[
    "--disable-all",
    "--enable-zts",
    "--disable-zend-signals",
    "--enable-zend-max-execution-timers",
    "--enable-session",
    "--disable-cgi",
    "--disable-phpdbg",
    "CC=ccache gcc",
    "CFLAGS=-O2 -g",
];

/// On 2 cores with an empty ccache.
const COMPILE_EXPECTED_S: u64 = 60;
const PHP_COMPILE_EXPECTED_S: u64 = 200;

/// `2.4.68` out of include/ap_release.h.
fn version(tree: &Path) -> Result<String> {
    let path = tree.join("include/ap_release.h");
    let text =
        std::fs::read_to_string(&path).with_context(|| format!("{}: these are no sources of httpd", path.display()))?;
    let part = |name: &str| -> Result<&str> {
        let define = format!("#define AP_SERVER_{name}_NUMBER ");
        let value = text.lines().find_map(|line| line.strip_prefix(&define));
        value.map(str::trim).with_context(|| format!("{} states no AP_SERVER_{name}_NUMBER", path.display()))
    };
    Ok(format!("{}.{}.{}", part("MAJORVERSION")?, part("MINORVERSION")?, part("PATCHLEVEL")?))
}

fn compile(job: &Job) -> Result<()> {
    let configured = job.tree.join(".atropos-configured");
    if !configured.is_file() {
        let mut configure = Command::new("./configure");
        configure.current_dir(&job.tree).arg(format!("--prefix={}", job.prefix.display())).args(RECIPE.options);
        job.step("configure", 20, configure)?;
        std::fs::write(&configured, "")?;
    }
    let mut make = Command::new("make");
    make.current_dir(&job.tree).arg(format!("-j{}", job.jobs));
    super::share_objects(&mut make, &job.tree);
    job.watched("compile", job.expected_s(COMPILE_EXPECTED_S), &mut count_compilations(), make)
}

/// libtool's own lines: one for each object.
fn count_compilations() -> impl FnMut(&str) -> Option<String> {
    let mut compiled = 0;
    move |line| {
        compiled += usize::from(line.contains("--mode=compile"));
        Some(format!("{compiled} files compiled"))
    }
}

fn install(job: &Job, staging: &Path) -> Result<()> {
    job.make_install("install", staging)
}

fn finish(job: &Job, info: &mut Value) -> Result<()> {
    php(job, info)?;
    if job.variant == Variant::Vanilla {
        return Ok(());
    }
    let apxs = format!("APXS={}", job.prefix.join("bin/apxs").display());
    let httpd = Module {
        name: "httpd",
        includes: &[],
        // `check` tries the parts that need no server.
        make_args: vec![apxs.clone(), "mod_atropos.so".into(), "check".into()],
        built: Some("mod_atropos.so"),
        to: "modules/mod_atropos.so".into(),
        before: |_| Ok(()),
    };
    job.module(info, &httpd)?;
    let php_config = job.prefix.join("bin/php-config");
    let php = Module {
        name: "php",
        includes: &["hosts/httpd"],
        make_args: vec![apxs, format!("PHP_CONFIG={}", php_config.display())],
        built: Some("atropos.so"),
        to: extension_dir(&php_config)?.join("atropos.so"),
        before: |_| Ok(()),
    };
    job.module(info, &php)
}

fn extension_dir(php_config: &Path) -> Result<PathBuf> {
    let out = Command::new(php_config).arg("--extension-dir").output();
    let out = out.with_context(|| format!("cannot start {}", php_config.display()))?;
    Ok(PathBuf::from(String::from_utf8(out.stdout)?.trim()))
}

/// PHP as a module of this httpd, installed into the same prefix.
fn php(job: &Job, info: &mut Value) -> Result<()> {
    let source = Source::debian(&PHP, job.refresh)?;
    let mut stamp = Stamp::default();
    stamp.add(&source.id).add(job.prefix.as_os_str().as_encoded_bytes()).add(super::compiler()?);
    for option in PHP_OPTIONS {
        stamp.add(option);
    }
    let base = stamp.hex();
    let stamp = stamp.add(&job.stamp).hex();
    let module = job.prefix.join("modules/libphp.so");
    if info["php"]["stamp"] == stamp.as_str() && module.is_file() {
        return Ok(());
    }
    let php = Php {
        job,
        tree: dirs::cache()?.join("build/php-8.2").join(job.variant.name()),
        log: dirs::logs()?.join(format!("php-8.2-{}.log", job.variant.name())),
    };
    println!("building PHP for {} {} from {}", RECIPE.package, job.variant.name(), source.origin);
    File::create(&php.log)?;
    let version = php.prepare(&source, &base)?;
    php.compile()?;
    let mut make = Command::new("make");
    make.current_dir(&php.tree).arg("install");
    php.run("install PHP for", 10, &mut |_| None, make)?;
    if !module.is_file() {
        bail!("PHP was installed, but {} is not there\n{}", module.display(), progress::tail(&php.log));
    }
    info["php"] = json!({ "version": version, "source": source.origin, "configure": PHP_OPTIONS, "stamp": stamp });
    job.write_info(info)
}

struct Php<'a> {
    job: &'a Job<'a>,
    tree: PathBuf,
    log: PathBuf,
}

impl Php<'_> {
    /// A configured tree of these sources; returns their version.
    fn prepare(&self, source: &Source, base: &str) -> Result<String> {
        let marker = self.tree.join(".atropos-stamp");
        if !std::fs::read_to_string(&marker).is_ok_and(|found| found == base) {
            super::remove(&self.tree)?;
            source.unpack(&self.tree)?;
            std::fs::write(&marker, base)?;
        }
        let version = source::autoconf_version(&self.tree)?;
        if !version.starts_with(PHP_RELEASE) {
            bail!("{} is release {version}, not {PHP_RELEASE}x", source.origin);
        }
        let configured = self.tree.join(".atropos-configured");
        if !configured.is_file() {
            let mut configure = Command::new("./configure");
            let prefix = &self.job.prefix;
            configure.current_dir(&self.tree).arg(format!("--prefix={}", prefix.display()));
            configure.arg(format!("--with-apxs2={}", prefix.join("bin/apxs").display())).args(PHP_OPTIONS);
            self.run("configure PHP for", 40, &mut |_| None, configure)?;
            std::fs::write(&configured, "")?;
        }
        Ok(version)
    }

    fn compile(&self) -> Result<()> {
        // Its Makefile does not know that these few files depend on httpd's headers.
        let handler = self.tree.join("sapi/apache2handler");
        for entry in std::fs::read_dir(&handler).with_context(|| format!("cannot list {}", handler.display()))? {
            let path = entry?.path();
            if matches!(path.extension().and_then(|e| e.to_str()), Some("lo" | "o")) {
                std::fs::remove_file(path)?;
            }
        }
        let mut make = Command::new("make");
        make.current_dir(&self.tree).arg(format!("-j{}", self.job.jobs));
        super::share_objects(&mut make, &self.tree);
        self.run("compile PHP for", self.job.expected_s(PHP_COMPILE_EXPECTED_S), &mut count_compilations(), make)
    }

    fn run(
        &self,
        what: &str,
        expected_s: u64,
        watch: &mut dyn FnMut(&str) -> Option<String>,
        command: Command,
    ) -> Result<()> {
        let expected = Some(Duration::from_secs(expected_s));
        Step { label: &self.job.label(what), log: &self.log, expected, limit: None, watch }.run(command)
    }
}
