//! `atropos-bench`: runs overload cases, the overhead comparison and the integration checks on real servers.
use anyhow::{bail, Context, Result};
use atropos_bench::pg::cluster::{base_settings, guc, Guc};
use atropos_bench::pg::install::{Install, Variant};
use atropos_bench::record::{self, Mode, Record};
use atropos_bench::results::{self, Recorded};
use atropos_bench::{cases, clock, guard, integration, load, machine, overhead, race, replay, runner};
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

#[derive(Parser)]
#[command(name = "atropos-bench", about = "Overload cases, overhead and integration checks on real servers")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run an overload case and judge it
    Case(CaseArgs),
    /// Compare the patched server with the module loaded to the vanilla one, without any overload
    Overhead(OverheadArgs),
    /// Fast assertions on a real server
    Integration(IntegrationArgs),
    /// Short statements on 16 connections while cancels fly
    Race(RaceArgs),
    /// Replay a decision log through the library's stages: each decision must come out as it was recorded
    Replay {
        /// The file that atropos.decision_log (or decision_log) named
        file: PathBuf,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ModeArg {
    Clean,
    Off,
    Observe,
    Enforce,
    All,
}

impl ModeArg {
    fn modes(self) -> Vec<Mode> {
        match self {
            ModeArg::Clean => vec![Mode::Clean],
            ModeArg::Off => vec![Mode::Off],
            ModeArg::Observe => vec![Mode::Observe],
            ModeArg::Enforce => vec![Mode::Enforce],
            ModeArg::All => Mode::ALL.to_vec(),
        }
    }
}

#[derive(Args)]
struct CaseArgs {
    /// c6, x1, x3, x4, x5, x9, n1 or n2
    case: Option<String>,
    /// Say what the cases are and stop
    #[arg(long)]
    list: bool,
    /// clean: no noise, Atropos off; off: noise, Atropos off; all: these and the others, interleaved round by round.
    /// May be given several times [default: enforce]
    #[arg(long, value_enum)]
    mode: Vec<ModeArg>,
    /// Rounds
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Append one JSON object for each run to this file
    #[arg(long)]
    json: Option<PathBuf>,
    /// Measured seconds from the onset [default: the case's own]
    #[arg(long)]
    duration: Option<f64>,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// A server setting, e.g. atropos.slo=50; may be given several times
    #[arg(long, value_parser = parse_guc)]
    set: Vec<Guc>,
    /// Write bench/results/<case>-<date>.json and .md
    #[arg(long)]
    record: bool,
    /// vanilla: only for modes clean and off, to see the case itself
    #[arg(long, value_enum, default_value = "patched", hide = true)]
    variant: Variant,
    /// Another installation of PostgreSQL 15
    #[arg(long, hide = true)]
    prefix: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum WorkloadArg {
    ReadOnly,
    ReadWrite,
    Both,
}

#[derive(Args)]
struct OverheadArgs {
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pairs: u32,
    /// Measured seconds for each server in each pair
    #[arg(long, default_value_t = 20.0)]
    seconds: f64,
    #[arg(long, value_enum, default_value = "both")]
    workload: WorkloadArg,
    /// Client threads: few enough that nothing is overloaded
    #[arg(long, default_value_t = 4)]
    threads: u32,
    /// The module's mode on the patched server
    #[arg(long, value_enum, default_value = "enforce")]
    mode: Mode,
    #[arg(long)]
    json: Option<PathBuf>,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// A setting of both servers
    #[arg(long, value_parser = parse_guc)]
    set: Vec<Guc>,
    #[arg(long)]
    record: bool,
}

#[derive(Args)]
struct IntegrationArgs {
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only checks whose name contains this
    #[arg(long)]
    only: Option<String>,
    #[arg(long, hide = true)]
    prefix: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum RaceKind {
    Contention,
    Aimed,
    Both,
}

#[derive(Args)]
struct RaceArgs {
    #[arg(long, default_value_t = 100_000)]
    statements: u64,
    #[arg(long, value_enum, default_value = "both")]
    kind: RaceKind,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Seconds after which each race ends, whatever the count
    #[arg(long, default_value_t = 600)]
    limit: u64,
    #[arg(long)]
    json: Option<PathBuf>,
    #[arg(long, hide = true)]
    prefix: Option<PathBuf>,
}

fn parse_guc(text: &str) -> Result<Guc, String> {
    let (name, value) = text.split_once('=').ok_or_else(|| format!("{text:?}: it must be name=value"))?;
    let name = name.trim();
    if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '.') {
        return Err(format!("{name:?} is no name of a setting"));
    }
    Ok(guc(name, format!("'{}'", value.trim().trim_matches('\'').replace('\'', "''"))))
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = guard::install_handler().and_then(|()| match cli.command {
        Command::Case(a) => case(a),
        Command::Overhead(a) => overhead_command(a),
        Command::Integration(a) => {
            integration::run(&Install::find(Variant::Patched, a.prefix.as_deref())?, a.seed, a.only.as_deref())
                .map(|()| true)
        }
        Command::Race(a) => race_command(a),
        Command::Replay { file } => std::fs::read_to_string(&file)
            .with_context(|| format!("read {}", file.display()))
            .and_then(|text| replay::replay_log(&text))
            .map(|n| {
                println!("{n} decisions replayed, all as recorded");
                true
            }),
    });
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("error: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn json_lines(path: Option<&PathBuf>) -> Result<Option<File>> {
    path.map(|p| File::options().create(true).append(true).open(p).with_context(|| format!("open {}", p.display())))
        .transpose()
}

fn case(a: CaseArgs) -> Result<bool> {
    if a.list {
        for c in cases::CASES {
            println!("{:3} {}\n    stands for: {}", c.id, c.title, c.stands_for);
        }
        return Ok(true);
    }
    let Some(id) = a.case.as_deref() else { bail!("which case? `--list` tells them") };
    let case = cases::find(id)?;
    let install = Install::find(a.variant, a.prefix.as_deref())?;
    let mut modes: Vec<Mode> =
        if a.mode.is_empty() { vec![Mode::Enforce] } else { a.mode.iter().flat_map(|m| m.modes()).collect() };
    modes.sort_unstable();
    modes.dedup();
    if a.duration.is_some_and(|d| !(1.0..=86_400.0).contains(&d)) {
        bail!("--duration must be 1 to 86400 seconds");
    }
    let options = runner::Options { seed: a.seed, duration_s: a.duration, set: a.set.clone() };
    let mut json = json_lines(a.json.as_ref())?;
    eprintln!(
        "{}: {} (PostgreSQL {}, {} rounds of {})",
        case.id,
        case.title,
        install.version,
        a.runs,
        modes.iter().map(|m| m.name()).collect::<Vec<_>>().join(", ")
    );
    let records = runner::run_rounds(&install, case, &modes, a.runs, &options, |r: &Record| {
        println!("{}", runner::summary(r));
        if let Some(file) = &mut json {
            writeln!(file, "{}", serde_json::to_string(r)?)?;
        }
        Ok(())
    })?;
    let judged = record::judge(case, &records);
    let mut text = format!(
        "{}: {}\n\nMedians (smallest..largest); \"first cancel\" of observe is the would-be decision.\n\n{}\n",
        case.id,
        case.title,
        record::table(&records)
    );
    for (holds, said) in &judged {
        text += &format!("- {} {said}\n", if *holds { "holds:" } else { "FALLS SHORT:" });
    }
    println!("\n{text}");
    if a.record {
        let settings = base_settings()
            .into_iter()
            .chain((case.settings)())
            .chain(a.set)
            .map(|(n, v)| format!("{n} = {v}"))
            .collect();
        let recorded = Recorded {
            date: clock::today(),
            command: &results::command_line(),
            machine: machine::Machine::here(),
            versions: vec![format!("PostgreSQL {}", install.version), load::version()],
            settings,
            results: &records,
        };
        results::record(case.id, &recorded, &text)?;
    }
    Ok(judged.iter().all(|(holds, _)| *holds))
}

/// The floor of the issue: what the patched server keeps of the vanilla one's throughput.
const OVERHEAD_FLOOR: f64 = 0.996;

fn overhead_command(a: OverheadArgs) -> Result<bool> {
    let vanilla = Install::find(Variant::Vanilla, None)?;
    let patched = Install::find(Variant::Patched, None)?;
    let workloads = match a.workload {
        WorkloadArg::ReadOnly => vec![overhead::Workload::ReadOnly],
        WorkloadArg::ReadWrite => vec![overhead::Workload::ReadWrite],
        WorkloadArg::Both => vec![overhead::Workload::ReadOnly, overhead::Workload::ReadWrite],
    };
    if !(1.0..=3600.0).contains(&a.seconds) {
        bail!("--seconds must be 1 to 3600");
    }
    let options = overhead::Options {
        pairs: a.pairs,
        seconds: a.seconds,
        threads: a.threads,
        mode: a.mode,
        seed: a.seed,
        set: a.set.clone(),
    };
    let mut json = json_lines(a.json.as_ref())?;
    let mut pairs = vec![];
    for workload in workloads {
        pairs.extend(overhead::run(&vanilla, &patched, workload, &options, |p| {
            println!(
                "{} pair {}: vanilla {:.0} tps, patched {:.0} tps, ratio {:.4}, CPU for each transaction {:.4}",
                p.workload, p.pair, p.vanilla_tps, p.patched_tps, p.tps_ratio, p.cpu_ratio
            );
            if let (Some(file), Ok(line)) = (&mut json, serde_json::to_string(p)) {
                let _ = writeln!(file, "{line}");
            }
        })?);
    }
    let (ok, text) = overhead::report(&pairs, OVERHEAD_FLOOR);
    println!("\n{text}");
    if a.record {
        let recorded = Recorded {
            date: clock::today(),
            command: &results::command_line(),
            machine: machine::Machine::here(),
            versions: vec![format!("PostgreSQL {}", patched.version), load::version()],
            settings: base_settings()
                .into_iter()
                .chain(a.set)
                .map(|(n, v)| format!("{n} = {v}"))
                .chain([format!("atropos.mode = {}", a.mode.name())])
                .collect(),
            results: &pairs,
        };
        results::record("overhead", &recorded, &text)?;
    }
    Ok(ok)
}

fn race_command(a: RaceArgs) -> Result<bool> {
    let install = Install::find(Variant::Patched, a.prefix.as_deref())?;
    let mut json = json_lines(a.json.as_ref())?;
    let limit = Duration::from_secs(a.limit);
    let mut ok = true;
    for (kind, name) in [(RaceKind::Contention, "contention"), (RaceKind::Aimed, "aimed")] {
        if a.kind != kind && a.kind != RaceKind::Both {
            continue;
        }
        let report = match kind {
            RaceKind::Aimed => race::aimed(&install, a.statements, a.seed, limit)?,
            _ => race::contention(&install, a.statements, a.seed, limit)?,
        };
        println!("{}", report.text(name));
        if let Some(file) = &mut json {
            writeln!(file, "{}", serde_json::to_string(&serde_json::json!({"race": name, "report": report}))?)?;
        }
        ok &= report.holds();
    }
    Ok(ok)
}
