//! The demonstration's report: one HTML file without any outside reference, readable on a phone and in a dark room.

use crate::demo::{in_words, retry_in_words, rows, MODES};
use anyhow::{Context, Result};
use plotters::prelude::*;
use serde_json::Value;

/// The drawing's own units; the page scales it to the width that there is. Small, so that text stays readable on a phone.
const WIDTH: u32 = 420;
const HEIGHT: u32 = 290;

/// plotters writes plain colours; each stands for a CSS variable of the page, so that dark and light both have contrast.
const INK: RGBColor = RGBColor(1, 1, 1);
const GRID: RGBColor = RGBColor(2, 2, 2);
const SERIES: [RGBColor; 4] = [RGBColor(3, 3, 3), RGBColor(4, 4, 4), RGBColor(5, 5, 5), RGBColor(6, 6, 6)];
const VARIABLES: [(&str, &str); 6] = [
    ("#010101", "var(--ink)"),
    ("#020202", "var(--grid)"),
    ("#030303", "var(--clean)"),
    ("#040404", "var(--off)"),
    ("#050505", "var(--observe)"),
    ("#060606", "var(--enforce)"),
];

const STYLE: &str = r#"
:root{color-scheme:light dark;--paper:#fdfdfb;--ink:#1b1b1b;--soft:#55585c;--grid:#d9d9d4;--card:#f1f1ec;
--clean:#6b7075;--off:#c23b00;--observe:#8a3d9e;--enforce:#00659e}
@media(prefers-color-scheme:dark){:root{--paper:#14161a;--ink:#e7e7e3;--soft:#a9adb3;--grid:#353a42;--card:#1e2127;
--clean:#a3a9b0;--off:#ff8a4c;--observe:#d99bee;--enforce:#5cc0ff}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:64rem;padding:1rem;background:var(--paper);color:var(--ink);
font:1rem/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;line-height:1.2;margin:.5rem 0}h2{font-size:1.15rem;margin:1.8rem 0 .4rem}
.lead{font-size:1.08rem}.soft{color:var(--soft);font-size:.88rem}
.legend{display:flex;flex-wrap:wrap;gap:.3rem 1.1rem;padding:0;list-style:none}
.legend b{display:inline-block;width:1.6rem;height:0;border-top:.22rem solid;vertical-align:middle;margin-right:.4rem}
.legend .observe b{border-top-style:dashed}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr));gap:1rem}
figure{margin:0;display:flex;flex-direction:column;justify-content:space-between}figcaption{font-weight:600}figcaption span{font-weight:400;color:var(--soft);font-size:.88rem}
svg{display:block;width:100%;height:auto}
polyline[stroke="var(--observe)"]{stroke-dasharray:7 4}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:clamp(.72rem,2.9vw,1rem)}
th,td{padding:.28rem .3rem;text-align:right;border-bottom:1px solid var(--grid)}
th:first-child{text-align:left;font-weight:400}thead th{font-weight:600}
.decision{background:var(--card);border-radius:.5rem;padding:.7rem .9rem;margin:.6rem 0}
.decision p{margin:.2rem 0}pre{overflow-x:auto;white-space:pre-wrap;font-size:.78rem}
"#;

/// `runs`: the result of each mode that was run, in the order of the table.
pub fn html(runs: &[Value]) -> Result<String> {
    let clean_writes = runs.iter().find(|r| r["mode"] == "clean").and_then(|r| r["writes_per_s"].as_f64());
    let clean_reads = runs.iter().find(|r| r["mode"] == "clean").and_then(|r| r["reads_per_s"].as_f64());
    let charts = [
        (
            "Writes answered per second",
            "higher is better; the burst after a stall is cut off",
            "writes_per_s",
            Scale::Linear(clean_writes.map(|w| w * 1.6)),
        ),
        (
            "p99 latency in ms",
            "lower is better; each line up is ten times slower; requests still waiting count with their age",
            "p99_ms",
            Scale::Log,
        ),
        ("Writers that wait for the lock", "lower is better", "waiting_writers", Scale::Linear(None)),
        (
            "Reads answered per second",
            "readers do not need the lock: nothing to see here is right",
            "reads_per_s",
            Scale::Linear(clean_reads.map(|r| r * 1.3)),
        ),
    ];
    let mut figures = String::new();
    for (title, note, field, scale) in charts {
        let svg = chart(runs, field, scale).with_context(|| format!("drawing \"{title}\""))?;
        figures += &format!("<figure><figcaption>{title} <span>{note}</span></figcaption>{svg}</figure>\n");
    }
    let legend: String = runs
        .iter()
        .filter_map(|r| r["mode"].as_str())
        .map(|mode| {
            format!("<li class={mode}><b style=\"border-color:var(--{mode})\"></b>{mode}: {}</li>", meaning(mode))
        })
        .collect();
    let heads: String =
        runs.iter().map(|r| format!("<th>{}</th>", escape(r["mode"].as_str().unwrap_or("?")))).collect();
    let lines: String = rows(runs)
        .into_iter()
        .map(|(name, cells)| {
            format!(
                "<tr><th>{name}</th>{}</tr>\n",
                cells.iter().map(|c| format!("<td>{}</td>", escape(c))).collect::<String>()
            )
        })
        .collect();
    let first = runs.first().unwrap_or(&Value::Null);
    Ok(format!(
        r#"<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Atropos on SQLite</title><style>{STYLE}</style></head><body>
<h1>One huge write, and everybody else</h1>
<p class="lead">At {onset:.0} s one client asks for a huge transaction that holds SQLite's only write lock; without help
(<em>off</em>) every other writer stands still until it has ended{stall}. With Atropos (<em>enforce</em>) the library sees who
holds what the others wait for, tells exactly that request to stop{told}, and the writers go on.</p>
<ul class="legend">{legend}</ul>
<div class="charts">{figures}</div>
<h2>From the onset to the end of the run</h2>
<table><thead><tr><th></th>{heads}</tr></thead><tbody>{lines}</tbody></table>
<p class="soft">Latency counts from when a request was due. A stall is time in which fewer than half as many writes are answered
as before the onset. A user gives up when a request could not be sent for a second.</p>
<h2>What was decided, and why</h2>
{decisions}
<p class="soft">SQLite {sqlite}, {cpus} CPUs, seed {seed}, {seconds:.0} s a run; the huge request writes {rows} rows.
Made by <code>cargo xtask demo</code>.</p>
</body></html>
"#,
        onset = first["onset_ms"].as_f64().unwrap_or(0.0) / 1e3,
        stall = of(runs, "off", "stall_s").map_or(String::new(), |s| {
            let ended = runs.iter().any(|r| r["mode"] == "off" && r["huge"]["finished"] == true);
            format!(", here for {s:.1} s{}", if ended { "" } else { " and beyond the end of the run" })
        }),
        told = of(runs, "enforce", "first_cancel_ms").map_or(String::new(), |ms| format!(" after {ms:.0} ms")),
        decisions = decisions(runs)?,
        sqlite = escape(first["host_version"].as_str().unwrap_or("?")),
        cpus = std::thread::available_parallelism().map_or(0, usize::from),
        seed = first["seed"],
        seconds = first["duration_s"].as_f64().unwrap_or(0.0),
        rows = crate::demo::grouped(first["huge"]["rows"].as_f64().unwrap_or(0.0)),
    ))
}

fn of(runs: &[Value], mode: &str, field: &str) -> Option<f64> {
    runs.iter().find(|r| r["mode"] == mode)?[field].as_f64()
}

fn meaning(mode: &str) -> &'static str {
    match mode {
        "clean" => "no huge request",
        "off" => "the library does nothing",
        "observe" => "it decides and records, cancels nobody",
        _ => "it cancels the culprit",
    }
}

fn decisions(runs: &[Value]) -> Result<String> {
    let mut text = String::new();
    for run in runs {
        let mode = escape(run["mode"].as_str().unwrap_or("?"));
        for decision in run["decisions"].as_array().into_iter().flatten() {
            text += &format!("<div class=\"decision\"><p><strong>{mode}</strong>: {}</p>", escape(&in_words(decision)));
            if let Some(reply) = run["huge"]["reply"].as_str().filter(|r| r.starts_with("ERR cancelled ")) {
                text += &format!("<p>Its client was told: <code>{}</code></p>", escape(reply));
            }
            if let Some(words) = retry_in_words(run) {
                text += &format!("<p>{}</p>", escape(&words));
            }
            text += &format!(
                "<details><summary>the record</summary><pre>{}</pre></details></div>\n",
                escape(&serde_json::to_string_pretty(decision)?)
            );
        }
    }
    Ok(if text.is_empty() { "<p>No decision was recorded.</p>".into() } else { text })
}

enum Scale {
    /// From 0 to this value, or to the largest.
    Linear(Option<f64>),
    /// Decades.
    Log,
}

/// A line per run over its time, with the onset marked.
fn chart(runs: &[Value], field: &str, scale: Scale) -> Result<String> {
    let lines: Vec<(RGBColor, Vec<(f64, f64)>)> = runs
        .iter()
        .map(|run| {
            let color = MODES.iter().position(|m| run["mode"] == *m).map_or(INK, |i| SERIES[i]);
            let points = run["timeline"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(|line| Some((line["t_s"].as_f64()?, line[field].as_f64()?)))
                .collect();
            (color, points)
        })
        .collect();
    let values = || lines.iter().flat_map(|(_, points)| points.iter());
    let end_s = values().map(|p| p.0).fold(1.0, f64::max);
    let highest = values().map(|p| p.1).fold(1.0, f64::max);
    let onset_s = runs.first().and_then(|r| r["onset_ms"].as_f64()).unwrap_or(0.0) / 1e3;
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, HEIGHT)).into_drawing_area();
        let mut builder = ChartBuilder::on(&area);
        builder.margin(8).margin_right(14).x_label_area_size(40).y_label_area_size(60);
        // The two scales are two types, hence the macro: what is drawn is the same.
        macro_rules! draw {
            ($y:expr, $low:expr, $high:expr, $labels:expr) => {{
                let mut chart = builder.build_cartesian_2d(0.0..end_s, $y)?;
                let text = ("sans-serif", 16).into_font().color(&INK);
                chart
                    .configure_mesh()
                    .disable_x_mesh()
                    .light_line_style(TRANSPARENT)
                    .bold_line_style(GRID)
                    .axis_style(GRID)
                    .x_labels(7)
                    .y_labels($labels)
                    .x_label_style(text.clone())
                    .y_label_style(text.clone())
                    .x_desc("seconds")
                    .axis_desc_style(text)
                    .x_label_formatter(&|s| format!("{s:.0}"))
                    .y_label_formatter(&|v| label(*v))
                    .draw()?;
                chart.draw_series(LineSeries::new([(onset_s, $low), (onset_s, $high)], INK.stroke_width(1)))?;
                for (color, points) in &lines {
                    let points = points.iter().map(|(t, v)| (*t, v.clamp($low, $high)));
                    chart.draw_series(LineSeries::new(points, color.stroke_width(2)))?;
                }
            }};
        }
        match scale {
            Scale::Linear(top) => {
                let high = top.unwrap_or(highest * 1.1);
                draw!(0.0..high, 0.0, high, 5)
            }
            Scale::Log => {
                let high = 10f64.powf(highest.log10().ceil());
                draw!((0.1..high).log_scale(), 0.1, high, 6)
            }
        }
        area.present()?;
    }
    for (color, variable) in VARIABLES {
        svg = svg.replace(color, variable);
    }
    Ok(svg)
}

fn label(value: f64) -> String {
    if value > 0.0 && value < 1.0 {
        format!("{value:.1}")
    } else {
        crate::demo::grouped(value)
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn run(mode: &str, label: &str) -> Value {
        let timeline: Vec<Value> = (1..=20).map(|i| json!({
            "t_s": f64::from(i) / 10.0, "reads_per_s": 3000, "writes_per_s": if i > 10 { 0 } else { 500 }, "p99_ms": 0.3 * f64::from(i), "waiting_writers": i % 9})).collect();
        json!({"mode": mode, "onset_ms": 1000.0, "writes_per_s": 500.0, "reads_per_s": 3000.0, "tps": 3500.0, "timeline": timeline,
               "decisions": [{"task": {"label": label}, "result": "ended"}]})
    }

    #[test]
    fn the_page_needs_nothing_from_outside_and_follows_the_colour_scheme() {
        let page = html(&[run("clean", "a"), run("enforce", "b")]).unwrap();
        assert_eq!(page.matches("<svg").count(), 4);
        assert!(page.contains("name=\"viewport\"") && page.contains("prefers-color-scheme:dark"));
        // The SVG's namespace is a name, not a reference.
        let without_names = page.replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
        for outside in ["http:", "https:", "src=", "href=", "url(", "@import"] {
            assert!(!without_names.contains(outside), "{outside}");
        }
        assert!(page.contains("stroke=\"var(--enforce)\"") && !page.contains("#060606"), "colours must be the page's");
    }

    #[test]
    fn labels_of_requests_cannot_become_markup() {
        let page = html(&[run("enforce", "<script>alert(1)</script>")]).unwrap();
        assert!(!page.contains("<script") && page.contains("&lt;script&gt;"));
    }

    #[test]
    fn an_empty_timeline_still_gives_a_page() {
        assert!(html(&[json!({"mode": "off"})]).unwrap().contains("No decision"));
    }
}
