//! The command lines of the cases and the overhead on httpd.
use super::cases::{self, Case};
use super::count;
use super::install::Install;
use super::overhead;
use super::run::{self, Setup, WebRecord};
use super::server::{base_settings, Mpm};
use crate::callgrind;
use crate::host::Variant;
use crate::record::{self, Mode};
use crate::results::{self, JsonLines, Recorded};
use crate::runner;
use anyhow::{ensure, Context, Result};
use std::path::{Path, PathBuf};

pub struct CaseOptions {
    pub case: String,
    pub modes: Vec<Mode>,
    /// Empty: event and prefork.
    pub mpms: Vec<Mpm>,
    /// Ways to make the noise; empty: the case's default, "all": each.
    pub noise: Vec<String>,
    pub slots: Option<u32>,
    pub runs: u32,
    pub json: Option<PathBuf>,
    pub duration_s: Option<f64>,
    pub seed: u64,
    pub set: Vec<String>,
    pub record: bool,
    pub build: Variant,
    pub prefix: Option<PathBuf>,
}

fn variants(case: &'static Case, wanted: &[String]) -> Result<Vec<&'static str>> {
    if wanted.is_empty() {
        return Ok(vec![case.variants[0]]);
    }
    if wanted == ["all"] {
        return Ok(case.variants.to_vec());
    }
    let known = || case.variants.join(", ");
    let find = |w: &String| {
        let found = case.variants.iter().copied().find(|v| v == w);
        found.with_context(|| format!("{} has no noise {w:?}; it has {} (or all)", case.id, known()))
    };
    wanted.iter().map(find).collect()
}

/// Runs a case on every MPM and in every variant asked for; true when all is as it must be.
pub fn case(o: &CaseOptions) -> Result<bool> {
    let case = cases::find(&o.case)?;
    let install = Install::find(o.build, o.prefix.as_deref())?;
    ensure!(o.slots.is_none_or(|s| (1..=64).contains(&s)), "--slots must be 1 to 64");
    let mpms = if o.mpms.is_empty() { vec![Mpm::Event, Mpm::Prefork] } else { o.mpms.clone() };
    let mut json = JsonLines::append_to(o.json.as_deref())?;
    let mut text = format!("{}: {}\n", case.id, case.title);
    let mut records: Vec<WebRecord> = vec![];
    let mut all_hold = true;
    for &mpm in &mpms {
        for variant in variants(case, &o.noise)? {
            let setup = Setup {
                mpm,
                variant,
                slots: o.slots.unwrap_or(case.slots),
                seed: o.seed,
                duration_s: o.duration_s,
                set: o.set.clone(),
            };
            let names: Vec<_> = o.modes.iter().map(|m| m.name()).collect();
            eprintln!(
                "{} on {}, {} slots, noise {variant}: {} rounds of {} ({})",
                case.id,
                mpm.name(),
                setup.slots,
                o.runs,
                names.join(", "),
                install.versions().join(", ")
            );
            let once = |mode, run, clean| run::run_once(&install, case, mode, run, clean, &setup);
            let of = runner::run_rounds(&o.modes, o.runs, once, |r: &WebRecord| {
                println!("{}", run::summary(r));
                json.add(r)
            })?;
            let plain: Vec<_> = of.iter().map(|w| w.record.clone()).collect();
            text += &format!(
                "\n## {}, {} slots, noise: {variant}\n\nMedians (smallest..largest); \"first cancel\" of observe is the \
                 would-be decision.\n\n{}\n",
                mpm.name(),
                setup.slots,
                record::table(&plain)
            );
            for peer in o.modes.iter().filter(|m| m.peer()) {
                text += &format!("{}: {}.\n\n", peer.name(), cases::means(*peer, setup.slots));
            }
            for (holds, said) in record::judge(run::expected(case, &setup), &plain) {
                all_hold &= holds;
                text += &format!("- {} {said}\n", if holds { "holds:" } else { "FALLS SHORT:" });
            }
            records.extend(of);
        }
    }
    println!("\n{text}");
    if o.record {
        let prefork = format!("MaxKeepAliveRequests {} under prefork", cases::PREFORK_KEEP_ALIVE_REQUESTS);
        let prefork = mpms.contains(&Mpm::Prefork).then_some(prefork);
        let settings = base_settings().into_iter().chain(prefork).chain(o.set.iter().cloned()).collect();
        let recorded = Recorded::of(&records, install.versions(), settings);
        results::record(&format!("{}-httpd", case.id), &recorded, &text)?;
    }
    Ok(all_hold)
}

/// What a comparison of both builds is recorded with.
fn settings_of(o: &overhead::Options) -> Vec<String> {
    base_settings().into_iter().chain(o.set.iter().cloned()).chain([o.second.told(o.mode)]).collect()
}

/// Counts the instructions of a request on both builds.
pub fn count(o: &overhead::Options, json: Option<&Path>, record: bool) -> Result<()> {
    let vanilla = Install::find(Variant::Vanilla, None)?;
    let patched = Install::find(Variant::Patched, None)?;
    let mut json = JsonLines::append_to(json)?;
    let counts = count::run(&vanilla, &patched, o, |c| {
        println!("{}", c.line());
        json.add_or_say(c);
    })?;
    let text = callgrind::report(&counts);
    println!("\n{text}");
    if record {
        results::record("instructions-httpd", &Recorded::of(&counts, patched.versions(), settings_of(o)), &text)?;
    }
    Ok(())
}

/// Compares the builds; true when the median throughput ratio is at least `floor`.
pub fn overhead(o: &overhead::Options, json: Option<&Path>, record: bool, floor: f64) -> Result<bool> {
    let vanilla = Install::find(Variant::Vanilla, None)?;
    let patched = Install::find(Variant::Patched, None)?;
    let mut json = JsonLines::append_to(json)?;
    let pairs = overhead::run(&vanilla, &patched, o, |p| {
        println!(
            "{} pair {}: vanilla {:.0} requests/s, patched {:.0}, ratio {:.4}, CPU for each request {:.4}",
            p.mpm.name(),
            p.pair,
            p.vanilla_rps,
            p.patched_rps,
            p.rps_ratio,
            p.cpu_ratio
        );
        json.add_or_say(p);
    })?;
    let (ok, text) = overhead::report(&pairs, floor);
    println!("\n{text}");
    if record {
        let versions = patched.versions().into_iter().chain([overhead::wrk_version()]).collect();
        results::record(
            &format!("overhead-httpd{}", o.second.suffix()),
            &Recorded::of(&pairs, versions, settings_of(o)),
            &text,
        )?;
    }
    Ok(ok)
}
