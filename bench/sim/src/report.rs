//! Runs the studies and writes what they come to: markdown with plots beside it.

use crate::drive::{Ablation, Commits};
use crate::judge::Kind;
use crate::scenario::Family;
use crate::study::{self, again, main_study, quantile, Run, Sums, ABLATIONS, AGAIN_SWEEPS, PROGRESS, SWEEPS};
use anyhow::{anyhow, Context, Result};
use atropos::config::Config;
use plotters::prelude::*;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Each cell of the lesser studies takes this part of the scenarios.
const PART: usize = 6;
const SWEEP_PART: usize = 20;
/// Wrong decisions that the report tells one by one.
const TOLD: usize = 12;

pub fn write(seed: u64, scenarios: u64, out: &Path) -> Result<PathBuf> {
    let begun = Instant::now();
    let stage = |what: &str| eprintln!("{:4.0} s  {what}", begun.elapsed().as_secs_f64());
    let study = |r: Result<Vec<Run>, String>| r.map_err(|e| anyhow!(e));
    stage("main study");
    let indices: Vec<u64> = (0..scenarios).collect();
    let runs = study(main_study(seed, &indices))?;
    let all = Sums::of(&runs);
    let first: Vec<&Run> = runs.iter().filter(|r| r.family != Family::Processors).take(runs.len() / PART).collect();
    let whole = Sums::of(first.iter().copied());
    let mut ablations = vec![("the library", whole.clone())];
    for (name, ablation) in ABLATIONS {
        stage(name);
        ablations.push((name, Sums::of(&study(again(seed, &first, ablation, |_| {}))?)));
    }
    // Progress matters where there are long tasks in the way.
    let aggressive: Vec<&Run> = runs.iter().filter(|r| r.family.blamable()).take(runs.len() / PART).collect();
    let mut progress = Vec::new();
    for (name, kind) in PROGRESS {
        stage(&format!("progress {name}"));
        let runs = study(again(seed, &aggressive, Ablation::Nothing, |s| s.terms.progress = kind))?;
        progress.push((name, Sums::of(&runs)));
    }
    stage("edges");
    let blind = study(again(seed, &aggressive, Ablation::Nothing, |s| s.terms.edges = false))?;
    let blind = [("exact, and nobody says who blocks whom", Sums::of(&blind))];
    stage("commits");
    let commits = commits_note(seed, &runs)?;
    let few: Vec<&Run> = first.iter().copied().take(runs.len() / SWEEP_PART).collect();
    let mut sweeps = Vec::new();
    for sweep in &SWEEPS {
        stage(sweep.name);
        let mut rows = Vec::new();
        for &value in sweep.values {
            let runs = study(again(seed, &few, Ablation::Nothing, |s| (sweep.set)(&mut s.terms.config, value)))?;
            rows.push((value, Sums::of(&runs)));
        }
        sweeps.push((sweep, rows));
    }
    stage("running again");
    let evenings =
        again_tables(seed, &aggressive.iter().map(|r| r.index).take(runs.len() / SWEEP_PART).collect::<Vec<_>>())?;
    stage("writing");

    let date = today();
    let stem = (1..)
        .map(|n| if n == 1 { format!("sim-{date}") } else { format!("sim-{date}-{n}") })
        .find(|s| !out.join(format!("{s}.md")).exists())
        .context("no free name")?;
    let mut text = head(seed, &date, &all, runs.len(), &progress);
    text += &confusion(&all);
    text += &families(&runs);
    text += &format!("![Time to the first right cancel]({stem}-time.svg)\n\n");
    text += &ablation_table(&ablations);
    text += &format!("![Late requests that are left]({stem}-ablations.svg)\n\n");
    text += &progress_table(&progress, &blind);
    text += &format!("![Precision and recall by what is known of progress]({stem}-progress.svg)\n\n");
    text += &commits;
    text += &sweep_tables(&sweeps);
    text += &evenings;
    text += &wrong(&runs, TOLD);
    let seconds = begun.elapsed().as_secs_f64();
    eprintln!("{seconds:.0} s in all");
    std::fs::create_dir_all(out).with_context(|| format!("make {}", out.display()))?;
    let put = |name: String, text: &str| {
        let path = out.join(name);
        std::fs::write(&path, text).with_context(|| format!("write {}", path.display())).map(|()| path)
    };
    put(format!("{stem}-time.svg"), &time_plot(&runs)?)?;
    let bars: Vec<(&str, Vec<f64>)> = ablations.iter().map(|(n, s)| (*n, vec![s.late_part() * 100.0])).collect();
    put(format!("{stem}-ablations.svg"), &bar_plot(&bars, &["late requests, % of those without a controller"])?)?;
    let bars: Vec<(&str, Vec<f64>)> =
        progress.iter().map(|(n, s)| (*n, vec![s.precision() * 100.0, s.recall() * 100.0])).collect();
    put(format!("{stem}-progress.svg"), &bar_plot(&bars, &["precision, %", "recall, %"])?)?;
    put(format!("{stem}.md"), &text)
}

/// What the main study alone shows.
pub fn main_tables(runs: &[Run]) -> String {
    confusion(&Sums::of(runs))
        + &columns("all")
        + &line("library", &Sums::of(runs))
        + "\n"
        + &families(runs)
        + &wrong(runs, usize::MAX)
}

fn mark(met: bool) -> &'static str {
    if met {
        "met"
    } else {
        "**not met**"
    }
}

fn head(seed: u64, date: &str, all: &Sums, scenarios: usize, progress: &[(&str, Sums)]) -> String {
    let missing = &progress[1].1;
    let mut t = format!(
        "# sim, {date}\n\n\
         {scenarios} random scenarios (seed {seed}) on a modelled host under the library's own controller; what was \
         really the matter comes from the model's counterfactuals, see `bench/sim/README.md`.\n\n    \
         cargo run --release -p atropos-sim -- report{}\n\n",
        if seed == study::SEED { String::new() } else { format!(" --seed {seed}") }
    );
    t += "| what | target | found | |\n|---|---|---|---|\n";
    let rate = all.false_rate();
    let _ = writeln!(
        t,
        "| scenarios without a resource overload in which somebody was cancelled | <= 0.1% | {:.2}% ({} of {}) | {} |",
        rate * 100.0,
        all.false_positives,
        all.negatives,
        mark(rate <= 0.001)
    );
    for (what, sums, precision, recall) in [("exact progress", all, 0.98, 0.95), ("no progress", missing, 0.90, 0.90)] {
        let (p, r) = (sums.precision(), sums.recall());
        let _ = writeln!(t, "| precision, {what} | >= {precision:.2} | {p:.3} | {} |", mark(p >= precision));
        let _ = writeln!(t, "| recall, {what} | >= {recall:.2} | {r:.3} | {} |", mark(r >= recall));
    }
    let _ = writeln!(
        t,
        "\nIn {} incidents: {:.2} cancels each; the first right one {:.0} ms (median; p95 {:.0} ms) after the culprit \
         had got what it monopolised; time in overload {:.0} ms (median; p95 {:.0} ms) instead of {:.0} ms (p95 \
         {:.0} ms); {:.1}% of the late requests of a run without a controller were left; {:.2} s of work lost each.\n",
        all.incidents,
        all.cancels as f64 / all.incidents.max(1) as f64,
        quantile(&all.first_ms, 0.5),
        quantile(&all.first_ms, 0.95),
        quantile(&all.over_ms, 0.5),
        quantile(&all.over_ms, 0.95),
        quantile(&all.over_off_ms, 0.5),
        quantile(&all.over_off_ms, 0.95),
        all.late_part() * 100.0,
        all.lost_per_incident_s(),
    );
    t
}

fn confusion(all: &Sums) -> String {
    let mut t = "## What was it, and what was said\n\n\
         Said: resource = somebody was cancelled; regular = an overload was declared at least once, and nobody \
         cancelled.\n\n| really \\ said | none | regular | resource |\n|---|---|---|---|\n"
        .to_string();
    for (name, row) in ["none", "regular", "resource"].iter().zip(all.confusion) {
        let _ = writeln!(t, "| {name} | {} | {} | {} |", row[0], row[1], row[2]);
    }
    t + "\n"
}

fn families(runs: &[Run]) -> String {
    let mut t = "## By family\n\n\
         | family | runs | resource | false pos. | cancels | right | missed | precision | recall | first ms (p95) | \
         overload ms, without -> with | late left |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n"
        .to_string();
    for family in Family::ALL.iter().filter(|&&f| f != Family::Processors) {
        let s = Sums::of(runs.iter().filter(|r| r.family == *family));
        if s.runs == 0 {
            continue;
        }
        let dash = |some: bool, text: String| if some { text } else { "-".into() };
        let _ = writeln!(
            t,
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            family.words(),
            s.runs,
            s.incidents,
            s.false_positives,
            s.picks,
            s.right,
            s.missed,
            dash(s.picks > 0, format!("{:.3}", s.precision())),
            dash(s.right + s.missed > 0, format!("{:.3}", s.recall())),
            dash(
                !s.first_ms.is_empty(),
                format!("{:.0} ({:.0})", quantile(&s.first_ms, 0.5), quantile(&s.first_ms, 0.95))
            ),
            dash(s.incidents > 0, format!("{:.0} -> {:.0}", quantile(&s.over_off_ms, 0.5), quantile(&s.over_ms, 0.5))),
            dash(s.incidents > 0, format!("{:.1}%", s.late_part() * 100.0)),
        );
    }
    let blind: Vec<&Run> = runs.iter().filter(|r| r.family == Family::Processors).collect();
    let cancelled = blind.iter().filter(|r| !r.verdict.picks.is_empty()).count();
    let real = blind.iter().filter(|r| r.truth.kind == Kind::Resource).count();
    let _ = writeln!(
        t,
        "\nNot in any figure: {} scenarios with {}, {real} of them resource overloads by the model. What a thread uses of \
         the processors the library asks the kernel, and the model has no threads; it cancelled somebody in {cancelled} \
         of them.\n",
        blind.len(),
        Family::Processors.words()
    );
    t
}

fn line(name: &str, s: &Sums) -> String {
    format!(
        "| {name} | {:.2}% | {:.3} | {:.3} | {:.2} | {:.0} | {:.0} | {:.1}% | {:.2} |\n",
        s.false_rate() * 100.0,
        s.precision(),
        s.recall(),
        s.cancels as f64 / s.incidents.max(1) as f64,
        quantile(&s.first_ms, 0.5),
        s.over_ms.iter().sum::<f64>() / s.over_ms.len().max(1) as f64,
        s.late_part() * 100.0,
        s.lost_per_incident_s()
    )
}

fn columns(first: &str) -> String {
    format!(
        "| {first} | false pos. | precision | recall | cancels | first ms | overload ms, mean | late left | lost s |\n\
         |---|---|---|---|---|---|---|---|---|\n"
    )
}

fn ablation_table(rows: &[(&str, Sums)]) -> String {
    let n = rows[0].1.runs;
    let mut t = format!("## One idea less\n\nThe first {n} scenarios.\n\n{}", columns("taken away"));
    rows.iter().for_each(|(name, s)| t += &line(name, s));
    t + "\n"
}

fn progress_table(rows: &[(&str, Sums)], blind: &[(&str, Sums)]) -> String {
    let n = rows[0].1.runs;
    let mut t = format!(
        "## What is known of progress\n\nThe first {n} scenarios in which somebody is meant to be in the way.\n\n{}",
        columns("progress")
    );
    rows.iter().chain(blind).for_each(|(name, s)| t += &line(name, s));
    t + "\n"
}

/// What becomes of log stalls where a host tells nothing of them; a limit of what can be known, so in no other figure.
pub fn commits_note(seed: u64, runs: &[Run]) -> Result<String> {
    let told: Vec<&Run> = runs.iter().filter(|r| r.family == Family::LogStalls).collect();
    let untold =
        again(seed, &told, Ablation::Nothing, |s| s.terms.commits = Commits::Untold).map_err(|e| anyhow!(e))?;
    let hit = |run: &Run| !run.verdict.picks.is_empty();
    let with = told.iter().filter(|r| hit(r)).count();
    let without = untold.iter().filter(|r| hit(r)).count();
    Ok(format!(
        "## Whoever commits\n\n{} scenarios in which {}. Hosts that say that a session waits for the log, or that \
         nothing can cancel it just now: somebody was cancelled in {with}. The same hosts if they say neither (the commits \
         look like work, and in no other figure): in {without}.\n\n",
        told.len(),
        Family::LogStalls.words()
    ))
}

fn sweep_tables(sweeps: &[(&study::Sweep, Vec<(f64, Sums)>)]) -> String {
    let n = sweeps[0].1[0].1.runs;
    let mut t = format!("## Thresholds\n\nThe first {n} scenarios; * is the default.\n\n");
    for (sweep, rows) in sweeps {
        let default = (sweep.default)(&Config::default());
        t += &columns(&format!("`{}`", sweep.name));
        for (value, s) in rows {
            let star = if (value - default).abs() < 1e-9 { " *" } else { "" };
            t += &line(&format!("{value}{star}"), s);
        }
        let right = |s: &Sums| s.precision() * s.recall();
        let order = |a: &Sums, b: &Sums| {
            b.false_positives.cmp(&a.false_positives).then(right(a).total_cmp(&right(b))).then(b.late.cmp(&a.late))
        };
        let best = rows.iter().max_by(|a, b| order(&a.1, &b.1));
        if let Some((best, sums)) = best {
            let as_good = |(value, s): &&(f64, Sums)| value != best && order(s, sums).is_eq();
            let others = rows.iter().filter(as_good).map(|(value, _)| format!(" and {value}")).collect::<String>();
            let _ = writeln!(
                t,
                "\nFewest false positives, then highest precision x recall, then fewest late: {best}{others}; default \
                 {default}."
            );
        }
        t += "\n";
    }
    t
}

/// What becomes of cancelled tasks that may run again, and of everybody else meanwhile.
pub fn again_tables(seed: u64, indices: &[u64]) -> Result<String> {
    let study = |again: bool, change: &(dyn Fn(&mut Config) + Sync)| {
        study::evenings(seed, indices, again, change).map_err(|e| anyhow!(e))
    };
    let (n, none) = study(false, &|_| {})?;
    let mut t = format!(
        "## Running again\n\n{n} scenarios with an evening: 2 to 4 s after the last one who is meant to be in the way has \
         begun, fewer requests come (5 to 100% of what came before, a random part), and the next 20 s are looked at. \
         Cancelled tasks whose work is undone ask whether they may run again, and do so once. If none does, {} requests \
         of these evenings are late. * is the default.\n\n",
        none.late
    );
    for sweep in &AGAIN_SWEEPS {
        let default = (sweep.default)(&Config::default());
        let _ = writeln!(
            t,
            "| `{}` | asked | ran again | at their end | waited s (p95) | late for each that ran | overload s |\n\
             |---|---|---|---|---|---|---|",
            sweep.name
        );
        for &value in sweep.values {
            let (_, a) = study(true, &|c| (sweep.set)(c, value))?;
            let _ = writeln!(
                t,
                "| {value}{} | {} | {} | {} | {:.1} ({:.1}) | {:.2} | {:.1} |",
                if (value - default).abs() < 1e-9 { " *" } else { "" },
                a.asked,
                a.ran,
                a.finished,
                quantile(&a.waited_ms, 0.5) / 1e3,
                quantile(&a.waited_ms, 0.95) / 1e3,
                (a.late as f64 - none.late as f64) / a.ran.max(1) as f64,
                (a.overload_ns as f64 - none.overload_ns as f64) / 1e9,
            );
        }
        t += "\n";
    }
    Ok(t)
}

fn wrong(runs: &[Run], most: usize) -> String {
    let mut t = "## Wrong decisions, one by one\n\n`atropos-sim one INDEX` runs one of them again.\n\n".to_string();
    let mut told = 0;
    for run in runs.iter().filter(|r| r.family != Family::Processors) {
        let picks: Vec<_> = run.verdict.picks.iter().filter(|p| !p.right).collect();
        if picks.is_empty() && run.verdict.missed.is_empty() {
            continue;
        }
        told += 1;
        if told > most {
            continue;
        }
        let _ = write!(t, "- {} ({:?}, really {:?})", run.index, run.family, run.truth.kind);
        if !run.verdict.missed.is_empty() {
            let _ = write!(t, ": {} missed", run.verdict.missed.len());
        }
        if let Some(p) = picks.first() {
            let _ = write!(
                t,
                ": {} wrong, the first at {:.2} s, p99 {:.1} of {:.1} ms: {}",
                picks.len(),
                p.at_ns as f64 / 1e9,
                p.p99_ns as f64 / 1e6,
                run.verdict.acts.slo_ns as f64 / 1e6,
                p.reason
            );
        }
        t += "\n";
    }
    let _ = writeln!(t, "\n{told} scenarios in all.");
    t
}

const INK: RGBColor = RGBColor(60, 60, 60);
const SERIES: [RGBColor; 2] = [RGBColor(0, 101, 158), RGBColor(194, 59, 0)];
const SIZE: (u32, u32) = (760, 360);

/// Part of the incidents in which the first right cancel came within a time.
fn time_plot(runs: &[Run]) -> Result<String> {
    let s = Sums::of(runs);
    let n = s.incidents.max(1) as f64;
    let most_ms = 1000.0;
    let mut points = vec![(0.0, 0.0)];
    points.extend(s.first_ms.iter().enumerate().map(|(i, &ms)| (ms.min(most_ms), (i + 1) as f64 / n * 100.0)));
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&area)
            .margin(10)
            .x_label_area_size(42)
            .y_label_area_size(56)
            .build_cartesian_2d(0.0..most_ms, 0.0..100.0)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .x_desc("ms from getting what it monopolised to being told to stop")
            .y_desc("% of incidents")
            .draw()?;
        chart.draw_series(LineSeries::new(points, SERIES[0].stroke_width(2)))?;
        area.present()?;
    }
    Ok(svg)
}

/// Groups of horizontal bars, one colour per series, with their numbers.
fn bar_plot(groups: &[(&str, Vec<f64>)], series: &[&str]) -> Result<String> {
    let highest = groups.iter().flat_map(|g| &g.1).copied().fold(1.0, f64::max).min(100.0);
    let row = 26 * series.len() as i32 + 14;
    let (left, top) = (230, 34);
    let size = (SIZE.0, (top + row * groups.len() as i32 + 10) as u32);
    let scale = (SIZE.0 as i32 - left - 80) as f64 / highest;
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        area.fill(&WHITE)?;
        let font = |color: &RGBColor| ("sans-serif", 15).into_font().color(color);
        let mut x = left;
        for (name, color) in series.iter().zip(&SERIES) {
            area.draw_text(name, &font(color), (x, 10))?;
            x += 150;
        }
        for (i, (name, values)) in groups.iter().enumerate() {
            let y = top + row * i as i32;
            area.draw_text(name, &font(&INK), (8, y + row / 2 - 14))?;
            for (k, (value, color)) in values.iter().zip(&SERIES).enumerate() {
                let (y, x) = (y + 26 * k as i32, left + (value * scale) as i32);
                area.draw(&Rectangle::new([(left, y), (x.max(left + 1), y + 20)], color.filled()))?;
                area.draw_text(&format!("{value:.1}"), &font(&INK), (x + 6, y + 3))?;
            }
        }
        area.present()?;
    }
    Ok(svg)
}

/// Today's date (UTC) as year-month-day.
fn today() -> String {
    let days = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs() / 86_400) as i64;
    // Days to a civil date, counted from March of year 0 so that leap days come last.
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let day_of_era = z.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, year) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    format!("{:04}-{month:02}-{day:02}", year_of_era + era * 400 + year)
}
