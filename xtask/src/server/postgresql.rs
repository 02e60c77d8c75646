//! PostgreSQL: autoconf and make, the extension by its own PGXS Makefile.

use super::{Job, Module, Recipe, Server, Variant};
use crate::{apt, source};
use anyhow::Result;
use serde_json::Value;
use std::path::Path;
use std::process::Command;

pub const RECIPE: Recipe = Recipe {
    server: Server::Postgresql,
    package: "postgresql-15",
    source: apt::SourcePackage { name: "postgresql-15", suite: None },
    release: "15",
    max_added_lines: 79,
    packages: &["bison", "flex", "perl", "libreadline-dev", "zlib1g-dev"],
    // Debian's readline and zlib are small; ICU, TLS and the rest play no part in what is measured.
    options: &["--without-icu", "--without-openssl", "CC=ccache gcc", "CFLAGS=-O2 -g"],
    witness: "bin/postgres",
    repatch: false,
    version: source::autoconf_version,
    compile,
    install,
    finish,
};

/// On 2 cores with an empty ccache.
const COMPILE_EXPECTED_S: u64 = 240;

fn compile(job: &Job) -> Result<()> {
    // config.status is configure's last product, made when all checks have passed; GNUmakefile is made by it.
    if !job.tree.join("GNUmakefile").is_file() {
        let mut configure = Command::new("./configure");
        configure.current_dir(&job.tree).arg(format!("--prefix={}", job.prefix.display())).args(RECIPE.options);
        job.step("configure", 25, configure)?;
    }
    let mut make = Command::new("make");
    make.current_dir(&job.tree).env("CCACHE_NOHASHDIR", "1").arg(format!("-j{}", job.jobs)).arg("world-bin");
    let mut compiled = 0;
    let mut watch = |line: &str| {
        compiled += usize::from(line.contains(" -c -o "));
        Some(format!("{compiled} files compiled"))
    };
    job.watched("compile", job.expected_s(COMPILE_EXPECTED_S), &mut watch, make)
}

fn install(job: &Job, staging: &Path) -> Result<()> {
    job.make_install("install-world-bin", staging)
}

fn finish(job: &Job, info: &mut Value) -> Result<()> {
    if job.variant == Variant::Vanilla {
        return Ok(());
    }
    let module = Module {
        name: "postgresql",
        includes: &[],
        make_args: vec![format!("PG_CONFIG={}", job.prefix.join("bin/pg_config").display())],
        built: None,
        to: "lib/atropos.so".into(),
        before: |_| Ok(()),
    };
    job.module(info, &module)
}
