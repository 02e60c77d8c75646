//! Debian packages that must be there, and upstream sources out of Debian's source packages.

use crate::dirs;
use crate::progress::Step;
use anyhow::{bail, Context, Result};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// What building any of the servers needs; each recipe names the rest.
pub const BUILD: &[&str] = &["gcc", "libc6-dev", "make", "patch", "bzip2", "xz-utils", "ccache"];
/// What the overload cases of each server need beside it: load, and the tools that Atropos is compared to.
pub const LOAD_POSTGRESQL: &[&str] = &["sysbench"];
pub const LOAD_MYSQL: &[&str] = &["sysbench", "percona-toolkit"];
pub const LOAD_HTTPD: &[&str] = &["wrk", "libapache2-mod-qos"];
/// What the library's own tests need: C and C++ compilers, libclang for bindgen, the demo's SQLite, cmake and
/// pkg-config for the installed package.
pub const TEST: &[&str] =
    &["gcc", "g++", "libc6-dev", "binutils", "libclang-dev", "libsqlite3-dev", "cmake", "pkg-config"];

/// For counting instructions.
pub const COUNT: &[&str] = &["gcc", "g++", "libc6-dev", "valgrind"];

/// For the micro-benchmarks: the probes they compare with.
pub const BENCH: &[&str] = &["systemtap-sdt-dev"];

/// Installs those of `packages` that are missing (as root), or says which command does it.
pub fn ensure(packages: &[&str]) -> Result<()> {
    let mut missing = Vec::new();
    for package in packages {
        if !installed(package)? {
            missing.push(*package);
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    let command = format!("apt-get install --no-install-recommends {}", missing.join(" "));
    if !dirs::is_root() {
        bail!(
            "these packages are missing: {}\ninstall them, then run this again:\n    sudo {command}",
            missing.join(" ")
        );
    }
    println!("installing what is missing: {command}");
    // Lists may be absent (fresh image) or stale (a version in them is gone): one update, then once more.
    if install(&missing).is_err() {
        update_system_lists()?;
        install(&missing)?;
    }
    Ok(())
}

fn installed(package: &str) -> Result<bool> {
    let query = Command::new("dpkg-query").args(["-W", "-f=${db:Status-Status}", package]).output();
    let out = query.with_context(|| {
        format!("dpkg-query is not here: this is no Debian system. Install the equivalent of `{package}` and build with --source")
    })?;
    Ok(out.status.success() && out.stdout == b"installed")
}

fn install(packages: &[&str]) -> Result<()> {
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive").args(["install", "-y", "--no-install-recommends"]).args(packages);
    logged("install packages", command)
}

fn update_system_lists() -> Result<()> {
    let mut command = Command::new("apt-get");
    command.arg("update");
    logged("refresh package lists", command)
}

fn logged(label: &str, command: Command) -> Result<()> {
    let log = dirs::logs()?.join("apt.log");
    let limit = Some(Duration::from_secs(900));
    Step { label, log: &log, expected: None, limit, watch: &mut |_| None }.run(command)
}

/// A Debian source package, and the suite it is in if that is not one of the system's own release.
pub struct SourcePackage {
    pub name: &'static str,
    pub suite: Option<&'static str>,
}

/// Downloads the newest version of the source package that can still be had and returns its upstream tarball and
/// version (`15.18`). Debian's own patches are not applied: `patches/` is made against upstream.
pub fn source_tarball(package: &SourcePackage) -> Result<(PathBuf, String)> {
    let lists = PrivateLists::update(package.suite)?;
    let package = package.name;
    let mut versions = lists.versions(package)?;
    if versions.is_empty() {
        bail!("no source package {package} in {}; give the sources with --source", lists.about);
    }
    sort_newest_first(&mut versions)?;
    let dir = dirs::make(dirs::cache()?.join("download").join(package))?;
    let mut failures = String::new();
    // Point releases move: a version can stand in the lists and yet be gone from the archive.
    for version in &versions {
        match lists.download(package, version, &dir) {
            Ok(tarball) => return Ok((tarball, upstream(version).to_string())),
            Err(error) => {
                eprintln!("  {package} {version} is listed but cannot be had, trying the next older one");
                writeln!(failures, "{version}: {error:#}")?;
            }
        }
    }
    bail!(
        "no listed version of {package} could be downloaded (network? or give the sources with --source):\n{failures}"
    )
}

/// Package lists of our own that hold the Debian suites' sources: the system's are not touched and need no deb-src.
struct PrivateLists {
    options: Vec<String>,
    /// Which suites they are of, in words.
    about: String,
}

impl PrivateLists {
    /// Of the system's own release, or of another suite from the same mirror.
    fn update(suite: Option<&str>) -> Result<Self> {
        let folder = suite.map_or("apt".into(), |suite| format!("apt-{suite}"));
        let dir = dirs::make(dirs::cache()?.join(folder))?;
        dirs::make(dir.join("lists/partial"))?;
        let list = dir.join("sources.list");
        std::fs::write(&list, deb_src_lines(&system_sources()?, &codename()?, suite)?)?;
        let options = [
            format!("Dir::Etc::SourceList={}", list.display()),
            "Dir::Etc::SourceParts=/dev/null".into(),
            format!("Dir::State::Lists={}", dir.join("lists").display()),
            // No binary caches: they would be the system's, and wrong for these lists.
            "Dir::Cache::pkgcache=".into(),
            "Dir::Cache::srcpkgcache=".into(),
            // The cache lies in a home that apt's sandbox user cannot enter.
            format!("APT::Sandbox::User={}", whoami()?),
        ];
        let about = suite.map_or("the suites that this system's apt configuration names".into(), |suite| {
            format!("Debian's suite {suite} on the mirror that this system uses")
        });
        let lists = PrivateLists { options: options.into_iter().flat_map(|o| ["-o".into(), o]).collect(), about };
        let mut command = lists.apt("apt-get");
        command.arg("update");
        logged("read the source package lists", command).with_context(|| format!("of {}", lists.about))?;
        Ok(lists)
    }

    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.args(&self.options);
        command
    }

    fn versions(&self, package: &str) -> Result<Vec<String>> {
        let out = self.apt("apt-cache").args(["showsrc", "--only-source", package]).output().context("apt-cache")?;
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        Ok(text.lines().filter_map(|line| line.strip_prefix("Version: ")).map(|v| v.trim().to_string()).collect())
    }

    /// apt checks the lists' signature and the files' sha256.
    fn download(&self, package: &str, version: &str, dir: &Path) -> Result<PathBuf> {
        let mut command = self.apt("apt-get");
        command.current_dir(dir).args(["source", "--download-only", "--only-source", &format!("{package}={version}")]);
        logged(&format!("download {package} {version}"), command)?;
        let prefix = format!("{package}_{}.orig.tar.", upstream(version));
        for entry in std::fs::read_dir(dir)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with(&prefix) && !name.ends_with(".asc") {
                return Ok(path);
            }
        }
        bail!("apt-get succeeded but left no {prefix}* in {}", dir.display())
    }
}

fn whoami() -> Result<String> {
    let out = Command::new("id").arg("-un").output()?;
    Ok(String::from_utf8(out.stdout)?.trim().to_string())
}

fn codename() -> Result<String> {
    let text = std::fs::read_to_string("/etc/os-release").context("/etc/os-release tells which Debian this is")?;
    let line = text.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    Ok(line
        .context("/etc/os-release has no VERSION_CODENAME; give the sources with --source")?
        .trim_matches('"')
        .into())
}

fn system_sources() -> Result<Vec<(String, String)>> {
    let mut paths = vec![PathBuf::from("/etc/apt/sources.list")];
    if let Ok(entries) = std::fs::read_dir("/etc/apt/sources.list.d") {
        paths.extend(entries.filter_map(|entry| Some(entry.ok()?.path())));
    }
    let read = paths.into_iter().filter_map(|path| {
        let text = std::fs::read_to_string(&path).ok()?;
        Some((path.to_string_lossy().into_owned(), text))
    });
    Ok(read.collect())
}

/// `deb-src` lines for the distribution's own suites, with the mirrors, keys and components the system uses for its
/// binaries. `sources`: file name and content, in the one-line (`.list`) or deb822 (`.sources`) format. With `other`
/// that suite instead, from where the distribution's main one comes.
fn deb_src_lines(sources: &[(String, String)], codename: &str, other: Option<&str>) -> Result<String> {
    let own = ["", "-updates", "-security"].map(|pocket| format!("{codename}{pocket}"));
    // `bookworm/updates` was the old spelling of the security suite.
    let is_own = |suite: &str| own.iter().any(|o| o == suite) || suite.strip_suffix("/updates") == Some(codename);
    let mut lines: Vec<String> = Vec::new();
    for (name, text) in sources {
        let entries = if name.ends_with(".sources") { parse_deb822(text) } else { parse_one_line(text) };
        let wanted = |suite: &str| if other.is_some() { suite == codename } else { is_own(suite) };
        for entry in entries.iter().filter(|entry| wanted(&entry.suite)) {
            let suite = other.unwrap_or(&entry.suite);
            let line = format!("deb-src {}{} {suite} {}\n", entry.options, entry.uri, entry.components);
            if !lines.contains(&line) {
                lines.push(line);
            }
        }
    }
    if lines.is_empty() {
        bail!("no apt source of this system carries the suite {codename}: add one, or give the sources with --source");
    }
    Ok(lines.concat())
}

struct Entry {
    /// `[signed-by=…] ` or empty.
    options: String,
    uri: String,
    suite: String,
    components: String,
}

fn parse_one_line(text: &str) -> Vec<Entry> {
    let mut entries = Vec::new();
    for line in text.lines().map(|line| line.split('#').next().unwrap_or("").trim()) {
        let Some(rest) = line.strip_prefix("deb ").or_else(|| line.strip_prefix("deb-src ")) else {
            continue;
        };
        let mut rest = rest.trim();
        let mut options = String::new();
        if rest.starts_with('[') {
            let Some(end) = rest.find(']') else { continue };
            let key = rest[1..end].split_whitespace().find(|o| o.starts_with("signed-by="));
            options = key.map_or(String::new(), |key| format!("[{key}] "));
            rest = rest[end + 1..].trim();
        }
        let words: Vec<&str> = rest.split_whitespace().collect();
        if let [uri, suite, components @ ..] = words.as_slice() {
            entries.push(Entry {
                options,
                uri: uri.to_string(),
                suite: suite.to_string(),
                components: components.join(" "),
            });
        }
    }
    entries
}

fn parse_deb822(text: &str) -> Vec<Entry> {
    let mut entries = Vec::new();
    let text: String = text.lines().filter(|line| !line.starts_with('#')).map(|line| format!("{line}\n")).collect();
    for stanza in text.split("\n\n") {
        let field = |name: &str| -> String {
            let mut value = String::new();
            let mut inside = false;
            for line in stanza.lines() {
                if line.starts_with([' ', '\t']) {
                    if inside {
                        value.push(' ');
                        value.push_str(line.trim());
                    }
                } else if let Some((key, first)) = line.split_once(':') {
                    inside = key.eq_ignore_ascii_case(name);
                    if inside {
                        value.push_str(first.trim());
                    }
                }
            }
            value.trim().to_string()
        };
        if field("Enabled").eq_ignore_ascii_case("no") {
            continue;
        }
        let key = field("Signed-By");
        // A key written into the stanza itself has no one-line form; apt then falls back on its trusted keys.
        let options =
            if key.starts_with('/') { format!("[signed-by={}] ", key.replace(' ', ",")) } else { String::new() };
        for uri in field("URIs").split_whitespace() {
            for suite in field("Suites").split_whitespace() {
                let entry = Entry {
                    options: options.clone(),
                    uri: uri.into(),
                    suite: suite.into(),
                    components: field("Components"),
                };
                entries.push(entry);
            }
        }
    }
    entries
}

/// `1:15.18-0+deb12u1` -> `15.18`
fn upstream(version: &str) -> &str {
    let version = version.split_once(':').map_or(version, |(_, v)| v);
    version.rsplit_once('-').map_or(version, |(v, _)| v)
}

/// Debian's order of versions is dpkg's to know.
fn sort_newest_first(versions: &mut Vec<String>) -> Result<()> {
    let mut sorted: Vec<String> = Vec::new();
    for version in versions.drain(..) {
        let mut at = sorted.len();
        for (i, other) in sorted.iter().enumerate() {
            if Command::new("dpkg").args(["--compare-versions", &version, "gt", other]).status()?.success() {
                at = i;
                break;
            }
        }
        if !sorted.contains(&version) {
            sorted.insert(at, version);
        }
    }
    *versions = sorted;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEB822: &str = "Types: deb\n# a comment between fields\nURIs: http://mirror.example/debian\n\
        Suites: bookworm bookworm-updates\nComponents: main\n contrib\nSigned-By: /k/debian.gpg\n\n\
        Types: deb\nURIs: http://other.example/\nSuites: nodistro\nComponents: main\n\n\
        Enabled: no\nTypes: deb\nURIs: http://off.example/\nSuites: bookworm\nComponents: main\n";

    fn lines(name: &str, text: &str) -> String {
        deb_src_lines(&[(name.into(), text.into())], "bookworm", None).unwrap()
    }

    #[test]
    fn another_suite_comes_once_from_the_mirror_of_the_main_one() {
        assert_eq!(
            deb_src_lines(&[("a.sources".into(), DEB822.into())], "bookworm", Some("sid")).unwrap(),
            "deb-src [signed-by=/k/debian.gpg] http://mirror.example/debian sid main contrib\n"
        );
    }

    #[test]
    fn deb822_gives_one_line_per_own_suite() {
        assert_eq!(
            lines("a.sources", DEB822),
            "deb-src [signed-by=/k/debian.gpg] http://mirror.example/debian bookworm main contrib\n\
             deb-src [signed-by=/k/debian.gpg] http://mirror.example/debian bookworm-updates main contrib\n"
        );
    }

    #[test]
    fn one_line_format_keeps_the_key_and_drops_foreign_suites() {
        let text = "deb [arch=amd64 signed-by=/k/d.gpg] http://m.example/d bookworm main # why\n\
                    deb http://cloud.example cloud-sdk-bookworm main\n#deb http://m.example/d bookworm-updates main\n\
                    deb-src http://s.example/d bookworm-security main contrib\n";
        assert_eq!(
            lines("sources.list", text),
            "deb-src [signed-by=/k/d.gpg] http://m.example/d bookworm main\n\
             deb-src http://s.example/d bookworm-security main contrib\n"
        );
    }

    #[test]
    fn a_system_without_its_own_suite_is_an_error_that_offers_source() {
        let error = deb_src_lines(&[("a.sources".into(), DEB822.into())], "trixie", None).unwrap_err();
        assert!(error.to_string().contains("--source"), "{error}");
    }

    #[test]
    fn upstream_versions() {
        assert_eq!(upstream("15.18-0+deb12u1"), "15.18");
        assert_eq!(upstream("2:1.0-rc1-3"), "1.0-rc1");
    }

    #[test]
    fn newest_first_without_doubles() {
        let mut versions: Vec<String> =
            ["15.9-1", "15.20-0+deb12u1", "15.18-0+deb12u1", "15.9-1"].map(String::from).to_vec();
        sort_newest_first(&mut versions).unwrap();
        assert_eq!(versions, ["15.20-0+deb12u1", "15.18-0+deb12u1", "15.9-1"]);
    }
}
