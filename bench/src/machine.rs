//! What a result was measured on.
use serde::Serialize;
use std::fs;

#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    pub cpu: String,
    pub cores: usize,
    pub memory_gib: f64,
    pub kernel: String,
    pub os: String,
    pub virtualised: bool,
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines()
        .find_map(|l| l.strip_prefix(name))
        .map(|v| v.trim_start_matches([' ', '\t', ':', '=']).trim().trim_matches('"'))
}

impl Machine {
    pub fn here() -> Machine {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let (cpu, memory) = (read("/proc/cpuinfo"), read("/proc/meminfo"));
        let kib: f64 =
            field(&memory, "MemTotal").and_then(|v| v.split_whitespace().next()?.parse().ok()).unwrap_or(0.0);
        Machine {
            cpu: field(&cpu, "model name").unwrap_or("unknown").to_owned(),
            cores: std::thread::available_parallelism().map_or(0, |n| n.get()),
            memory_gib: (kib / 1024.0 / 1024.0 * 10.0).round() / 10.0,
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            os: field(&read("/etc/os-release"), "PRETTY_NAME").unwrap_or("unknown").to_owned(),
            virtualised: cpu.contains("hypervisor"),
        }
    }
}
