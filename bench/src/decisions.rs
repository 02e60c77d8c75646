//! The library's decision log (JSON lines): whom it chose, when, and what came of it.
use anyhow::{Context, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// One decision; later lines about the same one (acknowledged, ended) are folded in.
#[derive(Clone, Debug)]
pub struct Decision {
    pub id: u64,
    /// When it was first logged, on CLOCK_MONOTONIC.
    pub time_ns: i64,
    /// The task's key, as in `cases::Actor`.
    pub key: i64,
    pub resource: String,
    pub instance: u64,
    pub reason: String,
    /// Every result it went through: would_cancel | requested, acknowledged, ended, escalated, unresponsive.
    pub results: Vec<String>,
    pub acknowledged_ms: Option<f64>,
    /// The last line as it stands.
    pub json: Value,
}

impl Decision {
    /// Whether the task was told to stop, as opposed to observe mode's would-be act.
    pub fn acted(&self) -> bool {
        self.results.iter().any(|r| r != "would_cancel")
    }
}

/// Reads the log; a file that does not exist means no decision. `run_ns` bounds the run on CLOCK_MONOTONIC, and
/// `wall_offset_ns` is what wall time is ahead of it: a time outside the run is taken from the wall clock instead.
pub fn read(path: &Path, run_ns: (i64, i64), wall_offset_ns: i64) -> Result<Vec<Decision>> {
    match std::fs::read_to_string(path) {
        Ok(text) => parse(&text, run_ns, wall_offset_ns).with_context(|| format!("read {}", path.display())),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(vec![]),
        Err(e) => Err(e).with_context(|| format!("read {}", path.display())),
    }
}

/// As `read`, of a log's text.
pub fn parse(text: &str, run_ns: (i64, i64), wall_offset_ns: i64) -> Result<Vec<Decision>> {
    let mut found: BTreeMap<u64, Decision> = BTreeMap::new();
    for (number, line) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
        let json: Value = serde_json::from_str(line).with_context(|| format!("line {}: {line}", number + 1))?;
        let id = json["id"].as_u64().with_context(|| format!("line {}: no \"id\"", number + 1))?;
        let result = json["result"].as_str().with_context(|| format!("line {}: no \"result\"", number + 1))?.to_owned();
        let mut time_ns = json["time_ns"].as_i64().unwrap_or(0);
        if !(run_ns.0..=run_ns.1).contains(&time_ns) {
            let wall_ms = json["wall_ms"]
                .as_f64()
                .with_context(|| format!("line {}: neither a usable \"time_ns\" nor \"wall_ms\"", number + 1))?;
            time_ns = ((wall_ms * 1e6) as i64).saturating_sub(wall_offset_ns);
        }
        let key = json["task"]["key"].as_i64().with_context(|| format!("line {}: no task.key", number + 1))?;
        let d = found.entry(id).or_insert_with(|| Decision {
            id,
            time_ns,
            key,
            resource: json["resource"]["name"].as_str().unwrap_or_default().to_owned(),
            instance: json["resource"]["instance"].as_u64().unwrap_or(0),
            reason: json["reason"].as_str().unwrap_or_default().to_owned(),
            results: vec![],
            acknowledged_ms: None,
            json: Value::Null,
        });
        d.time_ns = d.time_ns.min(time_ns);
        d.acknowledged_ms = json["acknowledged_ms"].as_f64().filter(|ms| *ms > 0.0).or(d.acknowledged_ms);
        d.results.push(result);
        d.json = json;
    }
    Ok(found.into_values().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_about_one_decision_are_folded() {
        let text = r#"{"id":1,"time_ns":150,"wall_ms":9,"result":"requested","task":{"key":77},"resource":{"name":"l","instance":5},"reason":"r"}
{"id":1,"time_ns":180,"result":"acknowledged","task":{"key":77},"acknowledged_ms":1.5}
{"id":2,"time_ns":5,"wall_ms":2,"result":"would_cancel","task":{"key":78}}"#;
        let d = parse(text, (100, 200), 1_999_900).unwrap();
        assert_eq!(d.len(), 2);
        assert_eq!((d[0].key, d[0].time_ns, d[0].acted(), d[0].acknowledged_ms), (77, 150, true, Some(1.5)));
        assert_eq!((d[1].key, d[1].time_ns, d[1].acted()), (78, 100, false));
        assert!(parse("{\"id\":1}", (0, 1), 0).is_err());
    }
}
