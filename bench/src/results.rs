//! Recorded results: `bench/results/<name>-<date>.json` and a short table beside it.
use crate::clock;
use crate::machine::Machine;
use anyhow::{Context, Result};
use serde::Serialize;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

#[derive(Serialize)]
pub struct Recorded<'a, T: Serialize> {
    pub date: String,
    pub command: String,
    pub machine: Machine,
    pub versions: Vec<String>,
    pub settings: Vec<String>,
    pub results: &'a T,
}

impl<'a, T: Serialize> Recorded<'a, T> {
    /// What this command has found here and now.
    pub fn of(results: &'a T, versions: Vec<String>, settings: Vec<String>) -> Self {
        let (date, command, machine) = (clock::today(), command_line(), Machine::here());
        Recorded { date, command, machine, versions, settings, results }
    }
}

/// The file of `--json`, if there is one: a line for each result, as soon as it is there.
pub struct JsonLines(Option<File>);

impl JsonLines {
    pub fn append_to(path: Option<&Path>) -> Result<JsonLines> {
        let open = |p: &Path| {
            File::options().create(true).append(true).open(p).with_context(|| format!("open {}", p.display()))
        };
        Ok(JsonLines(path.map(open).transpose()?))
    }

    pub fn add(&mut self, result: &impl Serialize) -> Result<()> {
        let Some(file) = &mut self.0 else { return Ok(()) };
        writeln!(file, "{}", serde_json::to_string(result)?).context("write to the file of --json")
    }

    /// For results that are kept and shown at the end anyway: it is said, and a run of half an hour goes on.
    pub fn add_or_say(&mut self, result: &impl Serialize) {
        if let Err(e) = self.add(result) {
            eprintln!("{e:#}");
        }
    }
}

/// This command, without what is the machine's own: paths, and that it was recorded.
fn command_line() -> String {
    let mut words = vec!["cargo xtask".to_string()];
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--record" => {}
            "--json" | "--prefix" => drop(args.next()),
            "overhead" => words.push("bench overhead".into()),
            _ => words.push(arg),
        }
    }
    words.join(" ")
}

fn folder() -> PathBuf {
    atropos_link::checkout().join("bench/results")
}

/// Writes both files; says where. A second record of the same day gets a number.
pub fn record<T: Serialize>(name: &str, recorded: &Recorded<T>, text: &str) -> Result<PathBuf> {
    let dir = folder();
    fs::create_dir_all(&dir)?;
    let stem = (1..)
        .map(|n| if n == 1 { format!("{name}-{}", clock::today()) } else { format!("{name}-{}-{n}", clock::today()) })
        .find(|s| !dir.join(format!("{s}.json")).exists())
        .context("no free name")?;
    let json = dir.join(format!("{stem}.json"));
    fs::write(&json, serde_json::to_string_pretty(recorded)? + "\n")
        .with_context(|| format!("write {}", json.display()))?;
    let m = &recorded.machine;
    let mut head = format!(
        "# {name}, {}\n\n{}, {} cores, {} GiB, {}, kernel {}{}. {}.\n\n    {}\n\n",
        recorded.date,
        m.cpu,
        m.cores,
        m.memory_gib,
        m.os,
        m.kernel,
        if m.virtualised { ", virtual machine" } else { "" },
        recorded.versions.join(", "),
        recorded.command
    );
    if !recorded.settings.is_empty() {
        head += &format!("Server settings: {}.\n\n", recorded.settings.join(", "));
    }
    fs::write(json.with_extension("md"), head + text)?;
    eprintln!("recorded in {} and .md", json.display());
    Ok(json)
}
