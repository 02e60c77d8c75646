//! MySQL: cmake and ninja in a folder inside the tree, an hour's compilation on 2 cores. Only what is needed to run the
//! server gets built and copied into the prefix.

use super::{Job, Module, Recipe, Server, Variant};
use crate::{apt, patches};
use anyhow::{bail, Context, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

pub const RECIPE: Recipe = Recipe {
    server: Server::Mysql,
    package: "mysql-9.7",
    // The LTS series is in no Debian release of this age.
    source: apt::SourcePackage { name: "mysql-9.7", suite: Some("sid") },
    release: "9.7",
    max_added_lines: 99,
    packages: &[
        "g++",
        "cmake",
        "ninja-build",
        "bison",
        "perl",
        "pkg-config",
        "libaio-dev",
        "libedit-dev",
        "libevent-dev",
        "libicu-dev",
        "liblz4-dev",
        "libncurses-dev",
        "libnuma-dev",
        "libprotobuf-dev",
        "libprotoc-dev",
        "libssl-dev",
        "libtirpc-dev",
        "libzstd-dev",
        "protobuf-compiler",
        "rpcsvc-proto",
        "zlib1g-dev",
    ],
    // What a server under OLTP load needs; the libraries are Debian's. Without debug information the trees take 3 GB
    // and not 15.
    options: &[
        "-DCMAKE_BUILD_TYPE=Release",
        "-DCMAKE_C_FLAGS=-g0",
        "-DCMAKE_CXX_FLAGS=-g0",
        "-DCMAKE_C_COMPILER_LAUNCHER=ccache",
        "-DCMAKE_CXX_COMPILER_LAUNCHER=ccache",
        "-DWITH_UNIT_TESTS=OFF",
        "-DWITH_ROUTER=OFF",
        "-DWITH_MYSQLX=OFF",
        "-DWITH_SYSTEMD=OFF",
        "-DWITH_LTO=OFF",
        "-DWITHOUT_GROUP_REPLICATION=1",
        "-DWITH_SSL=system",
        "-DWITH_ICU=system",
        "-DWITH_ZLIB=system",
        "-DWITH_LZ4=system",
        "-DWITH_ZSTD=system",
        "-DWITH_LIBEVENT=system",
        "-DWITH_EDITLINE=system",
        "-DWITH_PROTOBUF=system",
        "-DWITH_CURL=none",
        "-DWITH_FIDO=none",
        "-DWITHOUT_FEDERATED_STORAGE_ENGINE=1",
        "-DWITHOUT_EXAMPLE_STORAGE_ENGINE=1",
        "-DWITHOUT_BLACKHOLE_STORAGE_ENGINE=1",
        "-DWITHOUT_ARCHIVE_STORAGE_ENGINE=1",
        "-DWITHOUT_NDBCLUSTER_STORAGE_ENGINE=1",
        "-DWITH_NDB=OFF",
    ],
    witness: "bin/mysqld",
    repatch: true,
    version,
    compile,
    install,
    finish,
};

const PROGRAMS: &[&str] = &["mysqld", "mysql", "mysqladmin", "mysqldump"];
/// The server looks for it at each start, and complains and runs slower without it.
const COMPONENT: &str = "component_reference_cache";
/// What the plugin is linked with; no part of the server itself.
const SERVICES: &str = "libservices/libmysqlservices.a";

/// On 2 cores with an empty ccache; with one that has seen the other variant; and of the touched files alone.
const COLD_EXPECTED_S: u64 = 60 * 60;
const WARM_EXPECTED_S: u64 = 5 * 60;
const TOUCHED_EXPECTED_S: u64 = 3 * 60;
const TEST_PROGRAMS_EXPECTED_S: u64 = 4 * 60;

/// Where the compiled files of `tree` are.
pub fn build_folder(tree: &Path) -> PathBuf {
    tree.join("bld")
}

/// `9.7.2` out of MYSQL_VERSION.
fn version(tree: &Path) -> Result<String> {
    let path = tree.join("MYSQL_VERSION");
    let text =
        std::fs::read_to_string(&path).with_context(|| format!("{}: these are no sources of MySQL", path.display()))?;
    let part = |name: &str| -> Result<&str> {
        let value = text.lines().find_map(|line| line.strip_prefix("MYSQL_VERSION_")?.strip_prefix(name));
        let value = value.and_then(|rest| rest.strip_prefix('='));
        value.map(str::trim).with_context(|| format!("{} states no MYSQL_VERSION_{name}", path.display()))
    };
    Ok(format!("{}.{}.{}", part("MAJOR")?, part("MINOR")?, part("PATCH")?))
}

fn configure(job: &Job) -> Result<()> {
    let bld = build_folder(&job.tree);
    // cmake's last product.
    if bld.join("build.ninja").is_file() {
        return Ok(());
    }
    // Sources of the user's own may bring a build of theirs along.
    super::remove(&bld)?;
    let mut cmake = Command::new("cmake");
    cmake.arg("-S").arg(&job.tree).arg("-B").arg(&bld).args(["-G", "Ninja"]).args(RECIPE.options);
    super::share_objects(&mut cmake, &job.tree);
    job.step("configure", 90, cmake)
}

fn compile(job: &Job) -> Result<()> {
    configure(job)?;
    println!(
        "  about {} minutes on 2 cores, {} where ccache knows the files; an interrupted build goes on where it stopped",
        COLD_EXPECTED_S / 60,
        WARM_EXPECTED_S / 60
    );
    ninja(job, "compile", job.expected_s(COLD_EXPECTED_S), &[PROGRAMS, &[COMPONENT, SERVICES]].concat())
}

/// Has ninja make `targets`; nothing that is up to date is made again.
pub fn ninja(job: &Job, what: &str, expected_s: u64, targets: &[impl AsRef<std::ffi::OsStr>]) -> Result<()> {
    let mut command = Command::new("ninja");
    command.arg("-C").arg(build_folder(&job.tree)).arg(format!("-j{}", job.jobs)).args(targets);
    super::share_objects(&mut command, &job.tree);
    job.watched(what, expected_s, &mut |line| steps_done(line).map(String::from), command)
}

/// `[12/1536]` at a line's start.
fn steps_done(line: &str) -> Option<&str> {
    let end = line.strip_prefix('[')?.find(']')? + 2;
    let (done, all) = line[1..end - 1].split_once('/')?;
    (done.parse::<u32>().is_ok() && all.parse::<u32>().is_ok()).then_some(&line[..end])
}

/// MySQL's own installation wants everything built: copied is what the server needs to run.
fn install(job: &Job, staging: &Path) -> Result<()> {
    let bld = build_folder(&job.tree);
    for program in PROGRAMS {
        super::place(&bld.join("runtime_output_directory").join(program), &staging.join("bin").join(program))?;
    }
    let component = format!("{COMPONENT}.so");
    super::place(&bld.join("plugin_output_directory").join(&component), &staging.join("lib/plugin").join(component))?;
    let charsets = job.tree.join("share/charsets");
    let entry = |entry: std::io::Result<std::fs::DirEntry>| Ok::<_, anyhow::Error>(entry?.path());
    for path in std::fs::read_dir(&charsets)?.map(entry) {
        let path = path?;
        super::place(&path, &staging.join("share/charsets").join(path.file_name().expect("listed")))?;
    }
    // Error messages, one folder a language.
    for path in std::fs::read_dir(bld.join("share"))?.map(entry) {
        let path = path?;
        let messages = path.join("errmsg.sys");
        if messages.is_file() {
            super::place(&messages, &staging.join("share").join(path.file_name().expect("listed")).join("errmsg.sys"))?;
        }
    }
    if !staging.join("share/english/errmsg.sys").is_file() {
        bail!("{} holds no English error messages: is the build whole?", bld.join("share").display());
    }
    Ok(())
}

fn plugin(job: &Job) -> Module {
    Module {
        name: "mysql",
        includes: &[],
        make_args: vec![
            format!("MYSQL_SOURCE={}", job.tree.display()),
            format!("MYSQL_BUILD={}", build_folder(&job.tree).display()),
        ],
        built: Some("atropos.so"),
        to: "lib/plugin/atropos.so".into(),
        // The headers are the tree's, and some of them are generated; the prefix has none.
        before: |job| {
            job.prepare()?;
            if build_folder(&job.tree).join("runtime_output_directory/mysqld").is_file() {
                return Ok(());
            }
            compile(job)
        },
    }
}

fn finish(job: &Job, info: &mut Value) -> Result<()> {
    match job.variant {
        Variant::Vanilla => Ok(()),
        Variant::Patched => job.module(info, &plugin(job)),
    }
}

/// Whether the whole build is a matter of minutes: one of the variants is there, compiled or installed.
pub fn is_warm() -> bool {
    [Variant::Vanilla, Variant::Patched].into_iter().any(|variant| {
        let compiled = RECIPE.tree(variant).map(|tree| build_folder(&tree).join("runtime_output_directory/mysqld"));
        RECIPE.installed(variant).is_some() || compiled.is_ok_and(|mysqld| mysqld.is_file())
    })
}

/// Builds further programs in the patched tree that is built already, in runtime_output_directory of its build folder.
pub fn build_programs(targets: &[&str]) -> Result<()> {
    let _only_one = RECIPE.lock()?;
    let source = super::last_source(&RECIPE, Variant::Patched)?;
    let job = Job::new(&RECIPE, &source, Variant::Patched)?;
    job.prepare()?;
    configure(&job)?;
    ninja(&job, "compile the test programs of", job.expected_s(TEST_PROGRAMS_EXPECTED_S), targets)
}

/// Patches the sources and compiles only the files that the patches touch, with the headers that are generated for
/// them, and the plugin against that tree.
pub fn compile_touched(job: &Job) -> Result<()> {
    std::fs::File::create(&job.log)?;
    job.prepare()?;
    configure(job)?;
    let files = job.series.as_ref().context("this variant has no patches")?.touched()?;
    let mut targets = objects_of(job, &files)?;
    let touched = targets.len();
    targets.push(SERVICES.into());
    ninja(job, "compile what the patches touch in", job.expected_s(TOUCHED_EXPECTED_S), &targets)?;
    job.make_module(&plugin(job), &super::build_library()?)?;
    println!(
        "{}: the patches apply, the {touched} files that they touch compile, and so does the plugin",
        job.source.origin
    );
    Ok(())
}

/// The objects that ninja makes of the source files among `files`.
fn objects_of(job: &Job, files: &[String]) -> Result<Vec<String>> {
    let out = Command::new("ninja").arg("-C").arg(build_folder(&job.tree)).args(["-t", "compdb"]).output();
    let out = out.context("cannot start ninja")?;
    let commands: Vec<Value> = serde_json::from_slice(&out.stdout).context("ninja -t compdb")?;
    let mut objects = Vec::new();
    for file in files.iter().filter(|file| patches::is_source(file)) {
        let path = job.tree.join(file);
        let made = commands.iter().filter(|c| c["file"].as_str().is_some_and(|f| Path::new(f) == path));
        let before = objects.len();
        objects.extend(made.filter_map(|c| Some(c["output"].as_str().filter(|o| o.ends_with(".o"))?.to_string())));
        if objects.len() == before {
            bail!("the patches touch {file}, which is no part of this configuration of MySQL");
        }
    }
    Ok(objects)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ninja_says_how_far_it_is() {
        assert_eq!(steps_done("[12/1536] Building CXX object sql/x.o"), Some("[12/1536]"));
        for other in ["[-Wall] x", "no", "[a/b] c", "[12/", "ninja: Entering directory `bld'"] {
            assert_eq!(steps_done(other), None, "{other}");
        }
    }

    #[test]
    fn version_is_put_together_and_a_foreign_tree_refused() {
        let dir = std::env::temp_dir().join(format!("atropos-xtask-{}-mysql-version", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        assert!(version(&dir).unwrap_err().to_string().contains("no sources of MySQL"));
        let text = "MYSQL_VERSION_MAJOR=9\nMYSQL_VERSION_MINOR=7\nMYSQL_VERSION_PATCH=2\nMYSQL_VERSION_EXTRA=\n";
        std::fs::write(dir.join("MYSQL_VERSION"), text).unwrap();
        assert_eq!(version(&dir).unwrap(), "9.7.2");
        std::fs::remove_dir_all(dir).unwrap();
    }
}
