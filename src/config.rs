//! Configuration: one table of keys gives parsing, ranges, error texts and the documentation.

use crate::error::{Code, Error, Result};
use std::io::Read;

/// A configuration file is a page of text: a device or a log given by mistake must not be read without end.
const MOST_FILE_BYTES: u64 = 1 << 20;

/// What the library may do about a culprit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Mode {
    /// Nothing is traced: every gate is closed.
    Off = 1,
    /// Decide and record, cancel nobody (the default).
    #[default]
    Observe = 2,
    /// Decide, record and cancel.
    Enforce = 3,
}

impl Mode {
    pub fn from_u32(n: u32) -> Option<Mode> {
        [Mode::Off, Mode::Observe, Mode::Enforce].into_iter().find(|m| *m as u32 == n)
    }

    pub fn name(self) -> &'static str {
        match self {
            Mode::Off => "off",
            Mode::Observe => "observe",
            Mode::Enforce => "enforce",
        }
    }
}

/// Which clock hot calls read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ClockChoice {
    /// Coarse normally, precise while an overload is suspected (the default).
    Auto = 1,
    Coarse = 2,
    Precise = 3,
}

/// All settings, with their defaults.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub mode: Mode,
    pub max_tasks: u32,
    pub max_workers: u32,
    pub window_ms: u32,
    pub trigger_windows: u32,
    pub verify_ms: u32,
    /// 0 = relative to the learned baseline.
    pub slo_ms: f64,
    pub slo_tolerance: f64,
    pub contention_threshold: f64,
    pub min_relief: f64,
    pub cancel_rate_per_s: f64,
    pub cancel_burst: u32,
    pub cancel_share: f64,
    pub retry_calm_ms: u32,
    pub retry_background_max_ms: u32,
    pub retry_load_share: f64,
    pub clock: ClockChoice,
    /// Is the CPU a resource? Sampled from the kernel while an overload is suspected, for running tasks only.
    pub system_cpu: bool,
    /// The same for block I/O.
    pub system_io: bool,
    pub region_path: Option<String>,
    pub decision_log: Option<String>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            mode: Mode::Observe,
            max_tasks: 1024,
            max_workers: 256,
            window_ms: 100,
            trigger_windows: 3,
            verify_ms: 200,
            slo_ms: 0.0,
            slo_tolerance: 0.20,
            contention_threshold: 0.30,
            min_relief: 0.25,
            cancel_rate_per_s: 2.0,
            cancel_burst: 4,
            cancel_share: 0.01,
            retry_calm_ms: 1000,
            retry_background_max_ms: 600_000,
            retry_load_share: 0.5,
            clock: ClockChoice::Auto,
            // Off until a host's own cases were measured with it: a busy CPU is the rule in an overload, and a host that ran
            // well without must get neither a new reason to cancel nor descriptors of its own taken by an upgrade.
            system_cpu: false,
            system_io: false,
            region_path: None,
            decision_log: None,
        }
    }
}

/// One key of the text form.
pub struct Key {
    pub name: &'static str,
    /// What a value may be, in words; part of the error text.
    pub allowed: &'static str,
    set: fn(&mut Config, &str) -> Option<()>,
    /// Puts the default in the place of a number that is out of range.
    mend: fn(&mut Config),
}

fn number<T: std::str::FromStr + PartialOrd>(value: &str, low: T, high: T) -> Option<T> {
    // A range test with >= and <= also refuses NaN.
    value.parse().ok().filter(|n| *n >= low && *n <= high)
}

fn path(value: &str) -> Option<Option<String>> {
    (!value.contains('\0')).then(|| (!value.is_empty()).then(|| value.to_string()))
}

macro_rules! key {
    ($name:ident, $low:expr, $high:expr, $unit:literal) => {
        Key {
            name: stringify!($name),
            allowed: concat!("a number from ", stringify!($low), " to ", stringify!($high), $unit),
            set: |c, v| {
                c.$name = number(v, $low, $high)?;
                Some(())
            },
            mend: |c| {
                if !($low..=$high).contains(&c.$name) {
                    c.$name = Config::default().$name;
                }
            },
        }
    };
}

fn switch(value: &str) -> Option<bool> {
    match value {
        "on" => Some(true),
        "off" => Some(false),
        _ => None,
    }
}

/// Every key of the text form, the same names as the fields of the C struct.
pub const KEYS: &[Key] = &[
    Key {
        name: "mode",
        allowed: "off, observe or enforce",
        set: |c, v| {
            c.mode = [Mode::Off, Mode::Observe, Mode::Enforce].into_iter().find(|m| m.name() == v)?;
            Some(())
        },
        mend: |_| (),
    },
    key!(max_tasks, 16, 65536, " (tasks)"),
    key!(max_workers, 16, 65536, " (workers)"),
    key!(window_ms, 20, 10000, " (milliseconds)"),
    key!(trigger_windows, 1, 100, " (windows in a row)"),
    key!(verify_ms, 10, 60000, " (milliseconds)"),
    key!(slo_ms, 0.0, 3600000.0, " (milliseconds; 0 = relative to the learned baseline)"),
    key!(slo_tolerance, 0.01, 10.0, " (share of the baseline)"),
    key!(contention_threshold, 0.0, 1.0, " (share of execution time)"),
    key!(min_relief, 0.0, 1.0, " (share of execution time)"),
    key!(cancel_rate_per_s, 0.001, 1000.0, " (cancels per second)"),
    key!(cancel_burst, 1, 1000, " (cancels)"),
    key!(cancel_share, 0.0, 1.0, " (share of completions)"),
    key!(retry_calm_ms, 10, 600000, " (milliseconds)"),
    key!(retry_background_max_ms, 1, 86400000, " (milliseconds)"),
    key!(retry_load_share, 0.0, 1.0, " (share of the throughput before the cancel; 1 = at any)"),
    Key {
        name: "clock",
        allowed: "auto, coarse or precise",
        set: |c, v| {
            c.clock = match v {
                "auto" => ClockChoice::Auto,
                "coarse" => ClockChoice::Coarse,
                "precise" => ClockChoice::Precise,
                _ => return None,
            };
            Some(())
        },
        mend: |_| (),
    },
    Key {
        name: "system_cpu",
        allowed: "on or off",
        set: |c, v| {
            c.system_cpu = switch(v)?;
            Some(())
        },
        mend: |_| (),
    },
    Key {
        name: "system_io",
        allowed: "on or off",
        set: |c, v| {
            c.system_io = switch(v)?;
            Some(())
        },
        mend: |_| (),
    },
    Key {
        name: "region_path",
        allowed: "a file's path",
        set: |c, v| {
            c.region_path = path(v)?;
            Some(())
        },
        mend: |_| (),
    },
    Key {
        name: "decision_log",
        allowed: "a file's path",
        set: |c, v| {
            c.decision_log = path(v)?;
            Some(())
        },
        mend: |_| (),
    },
];

impl Config {
    /// Sets one key; `place` says where the value stands, for the error text.
    pub fn set(&mut self, place: &str, name: &str, value: &str) -> Result<()> {
        let Some(key) = KEYS.iter().find(|k| k.name == name) else {
            let names: Vec<&str> = KEYS.iter().map(|k| k.name).collect();
            return Err(Error::new(
                Code::Config,
                format!("{place}: unknown key `{name}`; known keys: {}", names.join(", ")),
            ));
        };
        (key.set)(self, value).ok_or_else(|| {
            Error::new(Code::Config, format!("{place}: bad value `{value}` for `{name}`; allowed: {}", key.allowed))
        })
    }

    /// Puts the default in the place of every number that no text could have set.
    pub fn mend(&mut self) {
        KEYS.iter().for_each(|key| (key.mend)(self));
    }

    /// Applies `key = value` lines. `#` begins a comment; a value may stand in double quotes. `source` is named in
    /// errors. Nothing is changed unless every line is good.
    pub fn apply_text(&mut self, source: &str, text: &str) -> Result<()> {
        let mut next = self.clone();
        for (number, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or("").trim();
            if line.is_empty() {
                continue;
            }
            let place = format!("{source}, line {}", number + 1);
            let Some((name, value)) = line.split_once('=') else {
                return Err(Error::new(Code::Config, format!("{place}: `{line}` is not of the form `key = value`")));
            };
            let value = value.trim();
            let value = value.strip_prefix('"').and_then(|v| v.strip_suffix('"')).unwrap_or(value);
            next.set(&place, name.trim(), value)?;
        }
        *self = next;
        Ok(())
    }

    /// Applies a file of `key = value` lines.
    pub fn apply_file(&mut self, file: &str) -> Result<()> {
        let fail = |why: &dyn std::fmt::Display| Error::new(Code::Config, format!("configuration file {file}: {why}"));
        let mut text = String::new();
        let opened = std::fs::File::open(file).map_err(|e| fail(&e))?;
        opened.take(MOST_FILE_BYTES + 1).read_to_string(&mut text).map_err(|e| fail(&e))?;
        if text.len() as u64 > MOST_FILE_BYTES {
            return Err(fail(&format_args!(
                "longer than {MOST_FILE_BYTES} bytes, so it is not one; give another path"
            )));
        }
        self.apply_text(file, &text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_of(text: &str) -> String {
        let mut c = Config::default();
        let e = c.apply_text("text", text).unwrap_err();
        assert_eq!(e.code, Code::Config);
        assert_eq!(c, Config::default(), "a bad text must change nothing");
        e.text
    }

    #[test]
    fn good_text_sets_what_it_names() {
        let mut c = Config::default();
        c.apply_text("text", "# all\nmode = enforce\n\nslo_ms=12.5 # ms\nregion_path = \"/tmp/a b\"\n").unwrap();
        assert_eq!((c.mode, c.slo_ms, c.region_path.as_deref()), (Mode::Enforce, 12.5, Some("/tmp/a b")));
        assert_eq!(c.window_ms, 100);
    }

    #[test]
    fn errors_name_line_key_and_what_is_allowed() {
        let e = error_of("mode = observe\n\nspeed = 3\n");
        assert!(e.contains("line 3") && e.contains("`speed`") && e.contains("window_ms"), "{e}");
        let e = error_of("mode = on");
        assert!(e.contains("line 1") && e.contains("`on`") && e.contains("off, observe or enforce"), "{e}");
        let e = error_of("window_ms = 5");
        assert!(e.contains("`window_ms`") && e.contains("from 20 to 10000 (milliseconds)"), "{e}");
        let e = error_of("mode enforce");
        assert!(e.contains("key = value"), "{e}");
    }

    #[test]
    fn a_file_without_end_is_refused() {
        let e = Config::default().apply_file("/dev/zero").unwrap_err();
        assert!(e.text.contains("/dev/zero") && e.text.contains("longer than 1048576 bytes"), "{e}");
    }

    #[test]
    fn numbers_refuse_nan_infinity_and_rubbish() {
        for v in ["NaN", "inf", "-1", "1e9", "", "0x10", "1 2"] {
            error_of(&format!("slo_tolerance = {v}"));
        }
    }

    #[test]
    fn every_default_is_inside_its_own_range() {
        let c = Config::default();
        for (name, value) in [
            ("max_tasks", c.max_tasks as f64),
            ("max_workers", c.max_workers as f64),
            ("window_ms", c.window_ms as f64),
            ("trigger_windows", c.trigger_windows as f64),
            ("verify_ms", c.verify_ms as f64),
            ("slo_ms", c.slo_ms),
            ("slo_tolerance", c.slo_tolerance),
            ("contention_threshold", c.contention_threshold),
            ("min_relief", c.min_relief),
            ("cancel_rate_per_s", c.cancel_rate_per_s),
            ("cancel_burst", c.cancel_burst as f64),
            ("cancel_share", c.cancel_share),
            ("retry_calm_ms", c.retry_calm_ms as f64),
            ("retry_background_max_ms", c.retry_background_max_ms as f64),
            ("retry_load_share", c.retry_load_share),
        ] {
            Config::default().set("default", name, &value.to_string()).unwrap();
        }
    }
}
