//! The configuration's numbers as all processes of the region see them, and the gate that follows the mode.

use super::layout::Header;
use super::owner::{Patience, ProcessId};
use crate::config::{ClockChoice, Config, Mode};
use crate::error::{Code, Error, Result};
use crate::primitive::Ordering::{AcqRel, Acquire, Relaxed, Release};

const WORDS: usize = 16;

/// The reloadable numbers of a `Config`, in the order of the shared words.
fn words_of(c: &Config) -> [u64; WORDS] {
    [
        c.mode as u64,
        c.window_ms as u64,
        c.trigger_windows as u64,
        c.verify_ms as u64,
        c.slo_ms.to_bits(),
        c.slo_tolerance.to_bits(),
        c.contention_threshold.to_bits(),
        c.min_relief.to_bits(),
        c.cancel_rate_per_s.to_bits(),
        c.cancel_burst as u64,
        c.cancel_share.to_bits(),
        c.clock as u64,
        c.retry_calm_ms as u64,
        c.retry_background_max_ms as u64,
        c.retry_load_share.to_bits(),
        c.system_cpu as u64 | (c.system_io as u64) << 1,
    ]
}

fn apply_words(w: [u64; WORDS], c: &mut Config) {
    c.mode = Mode::from_u32(w[0] as u32).unwrap_or(Mode::Observe);
    c.window_ms = w[1] as u32;
    c.trigger_windows = w[2] as u32;
    c.verify_ms = w[3] as u32;
    c.slo_ms = f64::from_bits(w[4]);
    c.slo_tolerance = f64::from_bits(w[5]);
    c.contention_threshold = f64::from_bits(w[6]);
    c.min_relief = f64::from_bits(w[7]);
    c.cancel_rate_per_s = f64::from_bits(w[8]);
    c.cancel_burst = w[9] as u32;
    c.cancel_share = f64::from_bits(w[10]);
    c.clock = match w[11] {
        2 => ClockChoice::Coarse,
        3 => ClockChoice::Precise,
        _ => ClockChoice::Auto,
    };
    c.retry_calm_ms = w[12] as u32;
    c.retry_background_max_ms = w[13] as u32;
    c.retry_load_share = f64::from_bits(w[14]);
    (c.system_cpu, c.system_io) = (w[15] & 1 != 0, w[15] & 2 != 0);
}

impl Header {
    /// Publishes the reloadable part of `config` to all processes and opens or closes the gate.
    pub fn publish_settings(&self, config: &Config) -> Result<()> {
        let s = &self.settings;
        let me = std::process::id();
        let mut patience = Patience::new();
        loop {
            let holder = s.writer.load(Acquire);
            let dead = holder != 0 && !ProcessId { pid: holder, start_ticks: 0 }.is_alive();
            if (holder == 0 || dead) && s.writer.compare_exchange(holder, me, AcqRel, Relaxed).is_ok() {
                break;
            }
            if !patience.wait() {
                return Err(Error::new(
                    Code::Region,
                    format!(
                        "process {holder} has been changing the settings for over {:?}; is it stopped, or the region \
                         damaged? Continue it, or restart the host",
                        Patience::LIMIT
                    ),
                ));
            }
        }
        let words = words_of(config);
        s.seq.write(|| {
            for (cell, word) in s.words.iter().zip(words) {
                cell.store(word, Relaxed);
            }
        });
        let open = config.mode != Mode::Off;
        if open && self.clock.open.load(Relaxed) == 0 {
            // What was noted before the gate was closed may have ended unseen since: it is void from here on.
            self.clock.tracing_since_ns.store(self.clock.precise_ns(), Release);
            if self.clock.coarse_ns.load(Relaxed) != 0 {
                // The cached time may be old: nobody refreshed it for a closed gate.
                self.clock.coarse_ns.store(self.clock.precise_ns(), Relaxed);
            }
        }
        if config.clock == ClockChoice::Precise {
            self.clock.coarse_ns.store(0, Relaxed);
        } else if self.clock.coarse_ns.load(Relaxed) == 0 {
            self.clock.coarse_ns.store(self.clock.precise_ns(), Relaxed);
        }
        self.clock.threads_named.store((config.system_cpu || config.system_io) as u32, Relaxed);
        self.clock.open.store(open as u32, Release);
        s.version.fetch_add(1, AcqRel);
        s.writer.store(0, Release);
        Ok(())
    }

    /// Brings `config` up to date; true if it was not.
    pub fn read_settings(&self, config: &mut Config, seen_version: &mut u64) -> bool {
        let s = &self.settings;
        let version = s.version.load(Acquire);
        if version == *seen_version {
            return false;
        }
        let read = s.seq.read(64, || std::array::from_fn(|i| s.words[i].load(Relaxed)));
        if let Some(words) = read {
            apply_words(words, config);
            // They come out of memory that others write: what no reload could have set is not believed.
            config.mend();
            *seen_version = version;
        }
        read.is_some()
    }

    /// Longest wait of a background task to run again; for those that do not read all settings.
    pub fn retry_background_max_ms(&self) -> u64 {
        // A day is the most that the configuration allows.
        self.settings.words[13].load(Relaxed).min(86_400_000)
    }

    pub fn mode(&self) -> Mode {
        Mode::from_u32(self.settings.words[0].load(Relaxed) as u32).unwrap_or(Mode::Off)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::region::layout::Owner;
    use crate::region::Region;

    #[test]
    fn every_reloadable_number_arrives() {
        let r = Region::anonymous(16, 16).unwrap();
        let mut sent = Config::default();
        sent.apply_text(
            "t",
            "mode=enforce\nwindow_ms=50\ntrigger_windows=4\nverify_ms=77\nslo_ms=1.5\nslo_tolerance=0.5\ncontention_threshold=0.4\n\
             min_relief=0.1\ncancel_rate_per_s=9\ncancel_burst=8\ncancel_share=0.25\nclock=precise\nretry_calm_ms=70\n\
             retry_background_max_ms=9000\nretry_load_share=0.75\nsystem_cpu=on\nsystem_io=on",
        )
        .unwrap();
        r.header().publish_settings(&sent).unwrap();
        let (mut got, mut seen) = (Config::default(), 0);
        assert!(r.header().read_settings(&mut got, &mut seen));
        assert_eq!(got, sent);
        assert!(!r.header().read_settings(&mut got, &mut seen));
        assert_eq!((r.header().clock.open.load(Relaxed), r.header().clock.coarse_ns.load(Relaxed)), (1, 0));
        r.header().publish_settings(&Config { mode: Mode::Off, ..sent }).unwrap();
        assert_eq!(r.header().clock.open.load(Relaxed), 0);
    }

    #[test]
    fn requests_name_their_threads_while_threads_are_sampled() {
        let r = Region::anonymous(16, 16).unwrap();
        let sample = |system_cpu, system_io| {
            r.header().publish_settings(&Config { system_cpu, system_io, ..Config::default() }).unwrap();
            let owner = Owner::default();
            owner.tid.store(4711, Relaxed);
            crate::process::request_works_for(r.header(), &owner);
            owner.tid.load(Relaxed)
        };
        assert_eq!(sample(false, false), 0, "the thread of an earlier request does not stand for this one");
        // SAFETY: no arguments.
        let me = unsafe { libc::syscall(libc::SYS_gettid) } as u32;
        assert_eq!((sample(true, false), sample(false, true), sample(false, false)), (me, me, 0));
    }

    #[test]
    fn numbers_out_of_range_become_defaults() {
        let r = Region::anonymous(16, 16).unwrap();
        r.header().publish_settings(&Config { cancel_burst: 9, ..Config::default() }).unwrap();
        for (word, value) in [(0, 77), (1, 0), (2, u64::MAX), (4, f64::NAN.to_bits()), (8, f64::INFINITY.to_bits())] {
            r.header().settings.words[word].store(value, Relaxed);
        }
        let (mut got, mut seen) = (Config::default(), 0);
        assert!(r.header().read_settings(&mut got, &mut seen));
        assert_eq!(got, Config { cancel_burst: 9, ..Config::default() });
    }

    #[test]
    fn a_writer_that_never_ends_does_not_wedge() {
        let r = Region::anonymous(16, 16).unwrap();
        // This process lives, and will not finish.
        r.header().settings.writer.store(std::process::id(), Relaxed);
        let e = r.header().publish_settings(&Config::default()).unwrap_err();
        assert!(e.code == Code::Region && e.text.contains(&std::process::id().to_string()), "{e}");
    }

    #[test]
    fn a_dead_writer_blocks_nobody() {
        let r = Region::anonymous(16, 16).unwrap();
        let (s, config) = (&r.header().settings, Config { window_ms: 77, ..Config::default() });
        s.writer.store(0x003f_fff0, Relaxed);
        let _half_written = s.seq.begin();
        r.header().publish_settings(&config).unwrap();
        let mut got = Config::default();
        assert!(r.header().read_settings(&mut got, &mut 0) && got == config);
    }
}
