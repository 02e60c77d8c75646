//! `atropos-bench`: runs overload cases, the overhead comparison and the integration checks on real servers.
use anyhow::{bail, Context, Result};
use atropos_bench::host::{self, HostId, Setting, Variant};
use atropos_bench::record::{self, Mode, Record};
use atropos_bench::results::{self, JsonLines, Recorded};
use atropos_bench::{
    callgrind, cases, guard, http, integration, load, micro, mysql, overhead, pairs, pg, race, replay, runner,
};
use clap::{Args, Parser, Subcommand, ValueEnum};
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
    /// Show what `cargo bench` found, beside the budgets, and what a task costs in memory
    Micro {
        /// Criterion's folder
        #[arg(long)]
        criterion: PathBuf,
        /// Leave out what was measured before this time, in seconds since 1970
        #[arg(long, default_value_t = 0)]
        since: u64,
        /// Write bench/results/hot-<date>.json and .md
        #[arg(long)]
        record: bool,
    },
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
    Timeouts,
    PtKill,
    ModQos,
    All,
    Peers,
}

impl ModeArg {
    fn modes(self, peers: &[Mode]) -> Vec<Mode> {
        match self {
            ModeArg::Clean => vec![Mode::Clean],
            ModeArg::Off => vec![Mode::Off],
            ModeArg::Observe => vec![Mode::Observe],
            ModeArg::Enforce => vec![Mode::Enforce],
            ModeArg::Timeouts => vec![Mode::Timeouts],
            ModeArg::PtKill => vec![Mode::PtKill],
            ModeArg::ModQos => vec![Mode::ModQos],
            ModeArg::All => vec![Mode::Clean, Mode::Off, Mode::Observe, Mode::Enforce],
            ModeArg::Peers => peers.to_vec(),
        }
    }
}

#[derive(Args)]
struct CaseArgs {
    /// c1, c2, c6, c9, x1, x3, x4, x5, x9, x10, n1 or n2
    case: Option<String>,
    /// The server [default: postgresql where the case exists there]
    #[arg(long, value_enum)]
    host: Option<HostId>,
    /// Say what the cases are and stop
    #[arg(long)]
    list: bool,
    /// clean: no noise, Atropos off; off: noise, Atropos off; all: these, observe and enforce, interleaved round by
    /// round; timeouts (the server's own limits), pt_kill and mod_qos are peers, Atropos off, shown beside it and not
    /// judged; peers: all that the host has. May be given several times [default: enforce]
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
    /// A server setting, e.g. atropos.slo=50 (MySQL: atropos_slo_ms=50, httpd: AtroposSLO=50ms); may be given several
    /// times
    #[arg(long, value_parser = parse_setting)]
    set: Vec<Setting>,
    /// Write bench/results/<case>-<date>.json and .md
    #[arg(long)]
    record: bool,
    /// httpd: the MPM; may be given several times [default: event and prefork]
    #[arg(long, value_enum)]
    mpm: Vec<http::server::Mpm>,
    /// httpd: how the noise is made (c9: blocking, busy, flock), or all; may be given several times [default: the
    /// first]
    #[arg(long)]
    variant: Vec<String>,
    /// httpd: worker slots [default: the case's own]
    #[arg(long)]
    slots: Option<u32>,
    /// vanilla: only for modes clean and off, to see the case itself
    #[arg(long, value_enum, default_value = "patched", hide = true)]
    build: Variant,
    /// Another installation of the server
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
    #[arg(long, value_enum, default_value = "postgresql")]
    host: HostId,
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pairs: u32,
    /// Measured seconds for each server in each pair
    #[arg(long, default_value_t = 20.0)]
    seconds: f64,
    #[arg(long, value_enum, default_value = "both")]
    workload: WorkloadArg,
    /// Client threads (httpd: connections): few enough that nothing is overloaded. Default 8, httpd 4
    #[arg(long)]
    threads: Option<u32>,
    /// httpd: the MPM
    #[arg(long, value_enum, default_value = "event")]
    mpm: http::server::Mpm,
    /// What the vanilla server is compared with
    #[arg(long, value_enum, default_value = "loaded", conflicts_with = "instructions")]
    second: pairs::Second,
    /// The module's mode on the patched server
    #[arg(long, value_enum, default_value = "enforce")]
    mode: Mode,
    #[arg(long)]
    json: Option<PathBuf>,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// A setting of both servers
    #[arg(long, value_parser = parse_setting)]
    set: Vec<Setting>,
    #[arg(long)]
    record: bool,
    /// httpd, MySQL: count the instructions of a request, by callgrind, instead of loading the servers; a round for each pair
    #[arg(long)]
    instructions: bool,
}

#[derive(Args)]
struct IntegrationArgs {
    #[arg(long, value_enum, default_value = "postgresql")]
    host: HostId,
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
    #[arg(long, value_enum, default_value = "postgresql")]
    host: HostId,
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

fn parse_setting(text: &str) -> Result<Setting, String> {
    let (name, value) = text.split_once('=').ok_or_else(|| format!("{text:?}: it must be name=value"))?;
    let name = name.trim();
    if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '.') {
        return Err(format!("{name:?} is no name of a setting"));
    }
    if value.contains('\n') {
        return Err(format!("{name}: a value is one line"));
    }
    Ok((name.to_owned(), value.trim().trim_matches('\'').to_owned()))
}

/// `settings` as the host's configuration file wants them.
fn written_for(host: HostId, settings: &[Setting]) -> Vec<Setting> {
    let quoted = |v: &str| match host {
        HostId::Postgresql => format!("'{}'", v.replace('\'', "''")),
        _ => v.to_owned(),
    };
    settings.iter().map(|(name, value)| host::setting(name, quoted(value))).collect()
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = guard::install_handler().and_then(|()| match cli.command {
        Command::Case(a) => case(a),
        Command::Overhead(a) => overhead_command(a),
        Command::Integration(a) => integration_command(a).map(|()| true),
        Command::Race(a) => race_command(a),
        Command::Micro { criterion, since, record } => micro::report(&criterion, since, record).map(|()| true),
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

fn case(a: CaseArgs) -> Result<bool> {
    if a.list {
        for c in cases::all() {
            println!("{:3} {} ({})\n    stands for: {}", c.id, c.title, c.host.title(), c.stands_for);
        }
        for c in http::cases::CASES {
            println!("{:3} {} ({})\n    stands for: {}", c.id, c.title, HostId::Httpd.title(), c.stands_for);
        }
        return Ok(true);
    }
    let Some(id) = a.case.as_deref() else { bail!("which case? `--list` tells them") };
    if a.duration.is_some_and(|d| !(1.0..=86_400.0).contains(&d)) {
        bail!("--duration must be 1 to 86400 seconds");
    }
    let modes = |peers: &[Mode]| {
        let mut modes: Vec<Mode> =
            if a.mode.is_empty() { vec![Mode::Enforce] } else { a.mode.iter().flat_map(|m| m.modes(peers)).collect() };
        modes.sort_unstable();
        modes.dedup();
        modes
    };
    let only_there = http::cases::find(id).is_ok() && cases::all().all(|c| c.id != id);
    if a.host == Some(HostId::Httpd) || (a.host.is_none() && only_there) {
        return http::cli::case(&http::cli::CaseOptions {
            case: id.to_owned(),
            modes: modes(http::cases::PEERS),
            mpms: a.mpm,
            noise: a.variant,
            slots: a.slots,
            runs: a.runs,
            json: a.json,
            duration_s: a.duration,
            seed: a.seed,
            set: a.set.iter().map(|(name, value)| format!("{name} {value}")).collect(),
            record: a.record,
            build: a.build,
            prefix: a.prefix,
        });
    }
    let case = cases::find(id, a.host)?;
    let host = &*host::find(case.host, a.build, a.prefix.as_deref())?;
    let modes = modes(host.peers());
    let options = runner::Options { seed: a.seed, duration_s: a.duration, set: written_for(case.host, &a.set) };
    let mut json = JsonLines::append_to(a.json.as_deref())?;
    eprintln!(
        "{}: {} ({} {}, {} rounds of {})",
        case.id,
        case.title,
        host.id().title(),
        host.version(),
        a.runs,
        modes.iter().map(|m| m.name()).collect::<Vec<_>>().join(", ")
    );
    let once = |mode, run, clean| runner::run_once(host, case, mode, run, clean, &options);
    let records = runner::run_rounds(&modes, a.runs, once, |r: &Record| {
        println!("{}", runner::summary(r));
        json.add(r)
    })?;
    let judged = record::judge(case.expect, &records);
    let mut text = format!(
        "{}: {}\n\nMedians (smallest..largest); \"first cancel\" of observe is the would-be decision.\n\n{}\n",
        case.id,
        case.title,
        record::table(&records)
    );
    for peer in modes.iter().filter(|m| m.peer()) {
        text += &format!("{}: {}.\n\n", peer.name(), host.means(*peer));
    }
    for (holds, said) in &judged {
        text += &format!("- {} {said}\n", if *holds { "holds:" } else { "FALLS SHORT:" });
    }
    println!("\n{text}");
    if a.record {
        let settings = host
            .base_settings()
            .into_iter()
            .chain((case.settings)())
            .chain(options.set)
            .map(|(n, v)| format!("{n} = {v}"))
            .collect();
        let versions = vec![format!("{} {}", host.id().title(), host.version()), load::version()];
        results::record(&recorded_name(case.id, case.host), &Recorded::of(&records, versions, settings), &text)?;
    }
    Ok(judged.iter().all(|(holds, _)| *holds))
}

/// What is asked of a host: what the patched server keeps of the vanilla one's throughput.
const OVERHEAD_FLOOR: f64 = 0.996;

fn overhead_command(a: OverheadArgs) -> Result<bool> {
    if !(1.0..=3600.0).contains(&a.seconds) {
        bail!("--seconds must be 1 to 3600");
    }
    if a.host == HostId::Httpd {
        let options = http::overhead::Options {
            pairs: a.pairs,
            seconds: a.seconds,
            connections: a.threads.unwrap_or(4),
            mpm: a.mpm,
            second: a.second,
            mode: a.mode,
            set: a.set.iter().map(|(name, value)| format!("{name} {value}")).collect(),
        };
        if a.instructions {
            return http::cli::count(&options, a.json.as_deref(), a.record).map(|()| true);
        }
        return http::cli::overhead(&options, a.json.as_deref(), a.record, OVERHEAD_FLOOR);
    }
    let vanilla = &*host::find(a.host, Variant::Vanilla, None)?;
    let patched = &*host::find(a.host, Variant::Patched, None)?;
    let workloads = match a.workload {
        WorkloadArg::ReadOnly => vec![overhead::Workload::ReadOnly],
        WorkloadArg::ReadWrite => vec![overhead::Workload::ReadWrite],
        WorkloadArg::Both => vec![overhead::Workload::ReadOnly, overhead::Workload::ReadWrite],
    };
    let options = overhead::Options {
        pairs: a.pairs,
        seconds: a.seconds,
        // With half as many the scheduler goes back and forth between two rhythms a fifth apart.
        threads: a.threads.unwrap_or(8),
        second: a.second,
        mode: a.mode,
        seed: a.seed,
        set: written_for(a.host, &a.set),
    };
    let mut json = JsonLines::append_to(a.json.as_deref())?;
    if a.instructions {
        return count_command(&a, &workloads, &options, &mut json).map(|()| true);
    }
    let mut pairs = vec![];
    for workload in workloads {
        pairs.extend(overhead::run(vanilla, patched, workload, &options, |p| {
            println!(
                "{} pair {}: vanilla {:.0} tps, patched {:.0} tps, ratio {:.4}, CPU for each transaction {:.4}",
                p.workload, p.pair, p.vanilla_tps, p.patched_tps, p.tps_ratio, p.cpu_ratio
            );
            json.add_or_say(p);
        })?);
    }
    let (ok, text) = overhead::report(&pairs, OVERHEAD_FLOOR);
    println!("\n{text}");
    if a.record {
        let versions = vec![format!("{} {}", a.host.title(), patched.version()), load::version()];
        let recorded = Recorded::of(&pairs, versions, settings_of(patched, &options));
        results::record(&(recorded_name("overhead", a.host) + a.second.suffix()), &recorded, &text)?;
    }
    Ok(ok)
}

fn settings_of(patched: &dyn host::Host, options: &overhead::Options) -> Vec<String> {
    let all = patched.base_settings().into_iter().chain(options.set.iter().cloned());
    all.map(|(n, v)| format!("{n} = {v}")).chain([options.second.told(options.mode)]).collect()
}

/// Counts the instructions of a transaction on both builds.
fn count_command(
    a: &OverheadArgs,
    workloads: &[overhead::Workload],
    options: &overhead::Options,
    json: &mut JsonLines,
) -> Result<()> {
    if a.host != HostId::Mysql {
        bail!("--instructions: only what httpd and MySQL execute for a request can be counted (--host httpd | mysql)");
    }
    let vanilla = mysql::install::Install::find(Variant::Vanilla, None)?;
    let patched = mysql::install::Install::find(Variant::Patched, None)?;
    let counts = mysql::count::run(&vanilla, &patched, workloads, options, |c| {
        println!("{}", c.line());
        json.add_or_say(c);
    })?;
    let text = callgrind::report(&counts);
    println!("\n{text}");
    if a.record {
        let versions = vec![format!("{} {}", a.host.title(), host::Host::version(&patched))];
        let recorded = Recorded::of(&counts, versions, settings_of(&patched, options));
        results::record(&recorded_name("instructions", a.host), &recorded, &text)?;
    }
    Ok(())
}

/// Results on other hosts than the first one carry its name.
fn recorded_name(what: &str, host: HostId) -> String {
    match host {
        HostId::Postgresql => what.to_owned(),
        other => format!("{what}-{}", other.name()),
    }
}

fn integration_command(a: IntegrationArgs) -> Result<()> {
    let (prefix, only) = (a.prefix.as_deref(), a.only.as_deref());
    match a.host {
        HostId::Postgresql => {
            let install = pg::install::Install::find(Variant::Patched, prefix)?;
            integration::run(pg::integration::CHECKS, &install, a.seed, only)
        }
        HostId::Mysql => {
            let install = mysql::install::Install::find(Variant::Patched, prefix)?;
            integration::run(mysql::integration::CHECKS, &install, a.seed, only)
        }
        HostId::Httpd => {
            let install = http::install::Install::find(Variant::Patched, prefix)?;
            integration::run(http::checks::CHECKS, &install, a.seed, only)
        }
    }
}

/// Statements, seed and the longest time.
type Run<'a> = Box<dyn Fn(u64, u64, Duration) -> Result<race::Report> + 'a>;

fn race_command(a: RaceArgs) -> Result<bool> {
    let prefix = a.prefix.as_deref();
    let (contention, aimed): (Run, Run) = match a.host {
        HostId::Postgresql => {
            let install = pg::install::Install::find(Variant::Patched, prefix)?;
            let other = install.clone();
            (
                Box::new(move |n, seed, limit| pg::race::contention(&install, n, seed, limit)),
                Box::new(move |n, seed, limit| pg::race::aimed(&other, n, seed, limit)),
            )
        }
        HostId::Mysql => {
            let install = mysql::install::Install::find(Variant::Patched, prefix)?;
            let other = install.clone();
            (
                Box::new(move |n, seed, limit| mysql::race::contention(&install, n, seed, limit)),
                Box::new(move |n, seed, limit| mysql::race::aimed(&other, n, seed, limit)),
            )
        }
        HostId::Httpd => bail!("httpd has no race: its requests are cancelled by their own checks"),
    };
    let mut json = JsonLines::append_to(a.json.as_deref())?;
    let limit = Duration::from_secs(a.limit);
    let mut ok = true;
    for (kind, name, race) in [(RaceKind::Contention, "contention", contention), (RaceKind::Aimed, "aimed", aimed)] {
        if a.kind != kind && a.kind != RaceKind::Both {
            continue;
        }
        let report = race(a.statements, a.seed, limit)?;
        println!("{}", report.text(name));
        json.add(&serde_json::json!({"race": name, "report": report}))?;
        ok &= report.holds();
    }
    Ok(ok)
}
