//! What the micro-benchmarks found, beside the budgets; and what a task costs in memory.
//!
//! Criterion measures (`cargo bench`) and leaves its estimates in files; here they become one table.
//! SPDX-License-Identifier: MIT OR Apache-2.0
use crate::clock;
use crate::machine::Machine;
use crate::results::{self, Recorded};
use anyhow::{bail, Context, Result};
use atropos::config::{Config, Mode};
use atropos::control::controller::Controller;
use atropos::control::window::ResourceKind;
use atropos::region::owner::ProcessId;
use atropos::region::Region;
use serde::Serialize;
use std::fmt::Write;
use std::path::Path;
use std::time::{Duration, SystemTime};
use std::{fs, thread};

/// One thing measured. Times in ns.
#[derive(Debug, PartialEq, Serialize)]
pub struct Row {
    pub name: String,
    pub median_ns: f64,
    /// 95% confidence interval of the median.
    pub low_ns: f64,
    pub high_ns: f64,
    /// Median absolute deviation of the samples.
    pub spread_ns: f64,
    pub budget_ns: Option<f64>,
}

#[derive(Serialize)]
pub struct Memory {
    pub what: String,
    pub bytes_per_task: f64,
}

#[derive(Serialize)]
struct All<'a> {
    times: &'a [Row],
    memory: &'a [Memory],
}

/// DESIGN section 12. Requests have no budget of their own: a task with one request has.
fn budget_ns(name: &str) -> Option<f64> {
    let (group, what) = name.split_once('/')?;
    match group {
        "off" => Some(1.0),
        "coarse" | "precise" if what.ends_with("create_free") => Some(60.0),
        "coarse" | "precise" if what == "request" => None,
        "coarse" => Some(5.0),
        "precise" => Some(20.0),
        _ if group.starts_with("tick ") && what.ends_with("/1000") => Some(200_000.0),
        _ => None,
    }
}

/// What the limits took where the budgets were set (DESIGN section 12), ns.
const ANCHORS: [(&str, f64); 5] = [
    ("base/relaxed_store", 0.3),
    ("base/library_call", 2.5),
    ("base/fetch_add", 2.3),
    ("base/rdtsc", 11.0),
    ("base/clock_gettime", 28.0),
];

/// How many times as long the limits take here (the median), if they were measured.
fn pace(rows: &[Row]) -> Option<f64> {
    let times = |(name, ns): &(&str, f64)| Some(rows.iter().find(|r| r.name == *name)?.median_ns / ns);
    let mut times: Vec<f64> = ANCHORS.iter().map(times).collect::<Option<_>>()?;
    times.sort_by(f64::total_cmp);
    Some(times[times.len() / 2])
}

/// Every estimate under `criterion` that is not older than `since`: leftovers of benchmarks that no longer exist stay out.
fn read(criterion: &Path, since: SystemTime) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let mut open = vec![criterion.to_path_buf()];
    while let Some(dir) = open.pop() {
        let estimates = dir.join("new/estimates.json");
        let fresh = fs::metadata(&estimates).and_then(|m| m.modified()).is_ok_and(|at| at >= since);
        if fresh {
            let json = |file: &str| -> Result<serde_json::Value> {
                let path = dir.join("new").join(file);
                let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
                serde_json::from_str(&text).with_context(|| format!("{} is not JSON", path.display()))
            };
            rows.push(row(&json("benchmark.json")?, &json("estimates.json")?).with_context(|| {
                format!("{}: another version of criterion than this program knows wrote it", dir.display())
            })?);
        }
        let folders = fs::read_dir(&dir).with_context(|| format!("read {}", dir.display()))?;
        open.extend(folders.filter_map(|e| e.ok()).map(|e| e.path()).filter(|p| p.is_dir()));
    }
    rows.sort_by_key(|row| order(&row.name));
    Ok(rows)
}

fn row(benchmark: &serde_json::Value, estimates: &serde_json::Value) -> Option<Row> {
    let name = benchmark["full_id"].as_str()?.to_string();
    let median = &estimates["median"];
    Some(Row {
        median_ns: median["point_estimate"].as_f64()?,
        low_ns: median["confidence_interval"]["lower_bound"].as_f64()?,
        high_ns: median["confidence_interval"]["upper_bound"].as_f64()?,
        spread_ns: estimates["median_abs_dev"]["point_estimate"].as_f64()?,
        budget_ns: budget_ns(&name),
        name,
    })
}

/// Groups as a reader wants them; within one by name, numbers by size.
fn order(name: &str) -> (usize, Vec<(u64, String)>) {
    const GROUPS: [&str; 7] = ["base", "peer", "off", "coarse", "precise", "threads", "tick"];
    let group = GROUPS.iter().position(|g| name.starts_with(g)).unwrap_or(GROUPS.len());
    let part = |p: &str| match p.parse() {
        Ok(number) => (number, String::new()),
        Err(_) => (0, p.to_string()),
    };
    (group, name.split('/').map(part).collect())
}

fn time(ns: f64) -> String {
    match ns {
        ns if ns < 1e3 => format!("{ns:.2} ns"),
        ns if ns < 1e6 => format!("{:.1} us", ns / 1e3),
        ns => format!("{:.2} ms", ns / 1e6),
    }
}

fn table(rows: &[Row], memory: &[Memory]) -> String {
    let pace = pace(rows);
    let mut text = String::new();
    if let Some(times) = pace {
        let limits: Vec<String> = ANCHORS.iter().map(|(name, ns)| format!("{} {ns}", &name["base/".len()..])).collect();
        let _ = writeln!(
            text,
            "The budgets were set on a machine with these limits, in ns: {}. Here they take {times:.2} times as long (the \
             median): where a budget is met at that machine's pace it says so.\n",
            limits.join(", ")
        );
    }
    text.push_str("| what | median | 95% of it | spread | budget | |\n|---|--:|---|--:|--:|---|\n");
    for r in rows {
        let (budget, verdict) = match r.budget_ns {
            None => (String::new(), ""),
            Some(b) if r.median_ns <= b => (time(b), "met"),
            Some(b) if pace.is_some_and(|times| r.median_ns <= b * times) => (time(b), "over; met at that pace"),
            Some(b) => (time(b), "**over**"),
        };
        let interval = format!("{} .. {}", time(r.low_ns), time(r.high_ns));
        let (median, spread) = (time(r.median_ns), time(r.spread_ns));
        let _ = writeln!(text, "| {} | {median} | {interval} | {spread} | {budget} | {verdict} |", r.name);
    }
    text += "\n| memory | bytes a task |\n|---|--:|\n";
    for m in memory {
        let _ = writeln!(text, "| {} | {:.0} |", m.what, m.bytes_per_task);
    }
    text
}

/// A line of /proc/self/status in bytes.
fn status_bytes(name: &str) -> Result<f64> {
    let text = fs::read_to_string("/proc/self/status").context("read /proc/self/status")?;
    let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'));
    let kib: Option<f64> = line.and_then(|l| l.trim().strip_suffix("kB")?.trim().parse().ok());
    Ok(kib.with_context(|| format!("/proc/self/status has no {name}"))? * 1024.0)
}

const TASKS: u32 = 10_000;
const MS: u64 = 1_000_000;

/// What 10,000 tasks take: room in the region, what of it is really used, and what the controller keeps of them once it has
/// looked at them in an overload.
fn memory() -> Result<Vec<Memory>> {
    let without = status_bytes("RssShmem")?;
    let region = Region::anonymous(TASKS, 16)?;
    let config = Config { mode: Mode::Observe, max_tasks: TASKS, window_ms: 20, slo_ms: 1.0, ..Config::default() };
    region.header().publish_settings(&config)?;
    let kinds = [ResourceKind::Lock, ResourceKind::Memory, ResourceKind::Queue];
    let resources: Vec<u32> =
        (0..31).map(|i| region.header().register(&format!("resource {i}"), kinds[i % 3])).collect::<Result<_, _>>()?;
    let (shared, private) = (status_bytes("RssShmem")?, status_bytes("RssAnon")?);
    let tasks: Vec<u64> = (0..TASKS as u64)
        .map(|key| region.begin_task(ProcessId::current(), key, 0).context("the table has room"))
        .collect::<Result<_>>()?;
    for (i, &task) in tasks.iter().enumerate() {
        let (slot, now_ns) = (region.task(task).context("begun just now")?, region.now_ns());
        for n in 0..8 {
            slot.trace.acquire(now_ns, 0, resources[(i + n) % resources.len()], 1 + i as u64 % 64, 1);
        }
        if i > 0 {
            slot.trace.wait_begin(now_ns, resources[0], 4711);
        } else {
            slot.trace.acquire(now_ns.saturating_sub(MS), 0, resources[0], 4711, 1);
        }
    }
    let busy = status_bytes("RssShmem")?;
    let before = status_bytes("RssAnon")?.max(private);
    let mut controller = Controller::new(ProcessId::current(), &config);
    for _ in 0..12 {
        controller.tick(&region, None);
        thread::sleep(Duration::from_millis(6));
    }
    let per_task = |bytes: f64| bytes.max(0.0) / TASKS as f64;
    let entry = |what: &str, bytes: f64| Memory { what: what.to_string(), bytes_per_task: per_task(bytes) };
    Ok(vec![
        entry("a slot's room in the region", (region_bytes(2) - region_bytes(1)) * TASKS as f64),
        // All of it is reserved and written at once: a full /dev/shm is an error then, and no surprise later.
        entry("resident from the region's creation on", shared - without),
        entry("resident besides, once it holds 8 things and waits", busy - shared),
        entry("kept by the controller after a look at it", status_bytes("RssAnon")? - before),
    ])
}

fn region_bytes(tasks: u32) -> f64 {
    atropos::region::layout::region_bytes(tasks, 0) as f64
}

/// Shows what `cargo bench` found since `since` (seconds of 1970), and writes it down if asked to.
pub fn report(criterion: &Path, since: u64, record: bool) -> Result<()> {
    let rows = read(criterion, SystemTime::UNIX_EPOCH + Duration::from_secs(since))?;
    if rows.is_empty() {
        bail!("{}: no result since then; `cargo xtask bench hot` measures first", criterion.display());
    }
    let memory = memory()?;
    let text = table(&rows, &memory);
    println!("\n{text}");
    if record {
        let about = "Hot calls: through the C ABI as a host pays them, in CPU time of the thread and per call; `create_free`: \
            begin and end of a task together. base: what there is to compare with. peer: what a host could use instead, a \
            USDT probe without a listener (sys/sdt.h) and a hash map behind a mutex; per event. threads: that many at once, \
            CPU time of one. A tick is one step of the controller with 10, 1,000 or 10,000 tasks x 31 resources, 8 things held \
            by each; cold: after something else has used the caches. stage: the parts of a tick, warm. Median, its 95% \
            interval, median absolute deviation of the samples.\n\n";
        let recorded = Recorded {
            date: clock::today(),
            command: "cargo xtask bench hot --record".into(),
            machine: Machine::here(),
            versions: vec![format!("libatropos {}", env!("CARGO_PKG_VERSION"))],
            settings: Vec::new(),
            results: &All { times: &rows, memory: &memory },
        };
        results::record("hot", &recorded, &(about.to_string() + &text))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_those_of_the_design() {
        for (name, budget) in [
            ("off/get_free", Some(1.0)),
            ("coarse/get_free", Some(5.0)),
            ("coarse/task_create_free", Some(60.0)),
            ("precise/create_free", Some(60.0)),
            ("precise/progress", Some(20.0)),
            ("coarse/request", None),
            ("base/rdtsc", None),
            ("threads/get_free/2 threads", None),
            ("tick stalled/cold/1000", Some(200_000.0)),
            ("tick stalled/cold/10000", None),
        ] {
            assert_eq!(budget_ns(name), budget, "{name}");
        }
    }

    #[test]
    fn a_slower_machine_is_no_excuse_but_shown() {
        let row = |name: &str, median_ns: f64| Row {
            name: name.into(),
            median_ns,
            low_ns: median_ns,
            high_ns: median_ns,
            spread_ns: 0.0,
            budget_ns: budget_ns(name),
        };
        let mut rows: Vec<Row> = ANCHORS.iter().map(|(name, ns)| row(name, ns * 2.0)).collect();
        assert_eq!(pace(&rows), Some(2.0));
        rows.extend([row("coarse/a", 5.0), row("coarse/b", 9.9), row("coarse/c", 10.1)]);
        let text = table(&rows, &[]);
        assert!(text.contains("2.00 times as long"));
        let verdict = |name: &str| text.lines().find(|l| l.contains(name)).unwrap().rsplit('|').nth(1).unwrap().trim();
        assert_eq!(["coarse/a", "coarse/b", "coarse/c"].map(verdict), ["met", "over; met at that pace", "**over**"]);
        assert_eq!(pace(&rows[1..]), None, "not all limits were measured");
    }

    #[test]
    fn criterions_files_are_read_and_old_ones_left_out() {
        let dir = std::env::temp_dir().join(format!("atropos-micro-{}", std::process::id()));
        let write = |name: &str, id: &str| {
            let new = dir.join(name).join("new");
            fs::create_dir_all(&new).unwrap();
            fs::write(new.join("benchmark.json"), format!("{{\"full_id\": \"{id}\"}}")).unwrap();
            let estimates = r#"{"median": {"confidence_interval": {"confidence_level": 0.95, "lower_bound": 3.0,
                "upper_bound": 5.5}, "point_estimate": 4.0, "standard_error": 0.1},
                "median_abs_dev": {"point_estimate": 0.25}}"#;
            fs::write(new.join("estimates.json"), estimates).unwrap();
        };
        write("tick/warm/10000", "tick calm/warm/10000");
        write("tick/warm/1000", "tick calm/warm/1000");
        write("coarse/get", "coarse/get_free");
        let rows = read(&dir, SystemTime::UNIX_EPOCH).unwrap();
        let names: Vec<&str> = rows.iter().map(|r| r.name.as_str()).collect();
        assert_eq!(names, ["coarse/get_free", "tick calm/warm/1000", "tick calm/warm/10000"]);
        assert_eq!((rows[0].median_ns, rows[0].low_ns, rows[0].high_ns, rows[0].spread_ns), (4.0, 3.0, 5.5, 0.25));
        assert!(
            table(&rows, &[]).contains("| coarse/get_free | 4.00 ns | 3.00 ns .. 5.50 ns | 0.25 ns | 5.00 ns | met |")
        );
        assert!(read(&dir, SystemTime::now() + Duration::from_secs(60)).unwrap().is_empty());
        fs::remove_dir_all(dir).unwrap();
    }
}
