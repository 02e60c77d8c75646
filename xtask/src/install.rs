//! `cargo xtask install`: the library, its headers, and what CMake and pkg-config need to find them.

use crate::progress::Step;
use crate::{dirs, server};
use anyhow::{bail, Context, Result};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

#[derive(clap::Args)]
pub struct InstallArgs {
    /// Where programs look for the library at run time.
    #[arg(long, default_value = "/usr/local", value_name = "DIR")]
    pub prefix: PathBuf,
    /// A root put before the prefix, for packages.
    #[arg(long, value_name = "DIR")]
    pub destdir: Option<PathBuf>,
    /// Afterwards build and run a C program against what was installed, by CMake and by pkg-config.
    #[arg(long, conflicts_with = "destdir")]
    pub verify: bool,
}

const HEADERS: &[&str] = &["atropos.h", "atropos_trace.h"];

pub fn install(args: &InstallArgs) -> Result<()> {
    let prefix = std::path::absolute(&args.prefix)?;
    let archive = server::build_library()?;
    let soname = atropos_link::SONAME;
    let shared = archive.with_file_name(soname);
    atropos_link::shared(&archive, &shared).map_err(anyhow::Error::msg)?;
    let version = version()?;
    let root = match &args.destdir {
        Some(root) => std::path::absolute(root)?.join(prefix.strip_prefix("/").expect("made absolute")),
        None => prefix.clone(),
    };
    let lib = dirs::make(root.join("lib"))?;
    let real = format!("libatropos.so.{version}");
    place(&shared, &lib.join(&real))?;
    place(&archive, &lib.join("libatropos.a"))?;
    link(&real, &lib.join(soname))?;
    link(soname, &lib.join("libatropos.so"))?;
    for header in HEADERS {
        place(&dirs::workspace().join("include").join(header), &root.join("include").join(header))?;
    }
    for (template, to) in [
        ("AtroposConfig.cmake.in", "lib/cmake/Atropos/AtroposConfig.cmake"),
        ("AtroposConfigVersion.cmake.in", "lib/cmake/Atropos/AtroposConfigVersion.cmake"),
        ("atropos.pc.in", "lib/pkgconfig/atropos.pc"),
    ] {
        let text = std::fs::read_to_string(dirs::workspace().join("cmake").join(template))?;
        let prefix = prefix.to_str().context("the prefix is not UTF-8, which CMake and pkg-config need")?;
        let text = text.replace("@VERSION@", &version).replace("@SONAME@", soname).replace("@PREFIX@", prefix);
        let to = root.join(to);
        dirs::make(to.parent().expect("has a parent").to_path_buf())?;
        std::fs::write(&to, text).with_context(|| format!("cannot write {}", to.display()))?;
    }
    println!("libatropos {version} ({soname}) is installed in {}", root.display());
    if args.destdir.is_none() && !args.verify {
        println!(
            "programs find it at run time when {} is among ldconfig's folders (then run `ldconfig`), or by rpath",
            lib.display()
        );
    }
    if args.verify {
        verify(&prefix, &version)
    } else {
        Ok(())
    }
}

/// Written beside and renamed: a program that runs with the old library keeps its file.
fn place(from: &Path, to: &Path) -> Result<()> {
    dirs::make(to.parent().expect("has a parent").to_path_buf())?;
    let fresh = to.with_extension("new");
    std::fs::copy(from, &fresh).with_context(|| format!("cannot copy {} to {}", from.display(), fresh.display()))?;
    std::fs::rename(&fresh, to)?;
    Ok(())
}

fn link(target: &str, at: &Path) -> Result<()> {
    if at.symlink_metadata().is_ok() {
        std::fs::remove_file(at)?;
    }
    symlink(target, at).with_context(|| format!("cannot link {}", at.display()))
}

fn version() -> Result<String> {
    let out = dirs::cargo().args(["metadata", "--no-deps", "--format-version", "1"]).output()?;
    let meta: serde_json::Value = serde_json::from_slice(&out.stdout).context("cargo metadata")?;
    let packages = meta["packages"].as_array().context("cargo metadata lists no packages")?;
    let ours = packages.iter().find(|package| package["name"] == "atropos").context("no package `atropos` here")?;
    Ok(ours["version"].as_str().context("package `atropos` has no version")?.to_string())
}

/// A user's view: only what lies under the prefix, found by the two usual ways.
fn verify(prefix: &Path, version: &str) -> Result<()> {
    let work = dirs::target()?.join("install-verify");
    if work.exists() {
        std::fs::remove_dir_all(&work)?;
    }
    dirs::make(work.clone())?;
    let log = work.join("verify.log");
    let step = |label: &str, command: Command| {
        Step { label, log: &log, expected: None, limit: Some(Duration::from_secs(120)), watch: &mut |_| None }
            .run(command)
    };
    let program = dirs::workspace().join("cmake/test");
    let mut cmake = Command::new("cmake");
    cmake.arg("-S").arg(&program).arg("-B").arg(&work).arg(format!("-DCMAKE_PREFIX_PATH={}", prefix.display()));
    cmake.arg(format!("-DWANTED_VERSION={version}"));
    step("CMake finds the package", cmake)?;
    let mut build = Command::new("cmake");
    build.arg("--build").arg(&work);
    step("CMake builds a program on it", build)?;
    step("it runs, shared library", Command::new(work.join("use_shared")))?;
    step("it runs, static library", Command::new(work.join("use_static")))?;

    let flags = |more: &[&str]| -> Result<Vec<String>> {
        let mut command = Command::new("pkg-config");
        command.env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig")).args(more);
        let out =
            command.arg("--cflags").arg("--libs").arg(format!("atropos = {version}")).output().context("pkg-config")?;
        if !out.status.success() {
            bail!("pkg-config does not find atropos {version}: {}", String::from_utf8_lossy(&out.stderr));
        }
        Ok(String::from_utf8(out.stdout)?.split_whitespace().map(String::from).collect())
    };
    let (main, exe) = (program.join("main.c"), work.join("by_pkg_config"));
    let mut cc = Command::new("cc");
    cc.arg(&main).arg("-o").arg(&exe).args(flags(&[])?);
    step("pkg-config builds a program on it", cc)?;
    let mut run = Command::new(&exe);
    run.env("LD_LIBRARY_PATH", prefix.join("lib"));
    step("it runs", run)
}
