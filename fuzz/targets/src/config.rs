//! Settings as text, as a file and as the C struct: refused with words, or inside their ranges.
//! SPDX-License-Identifier: MIT OR Apache-2.0

use crate::input::{number, own_file, Input};
use atropos::capi::{atropos_config, atropos_init, atropos_last_error, atropos_reload};
use atropos::config::{Config, KEYS};
use std::ffi::CString;
use std::sync::Once;

/// The first byte chooses the way in, the rest is what comes in.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    match input.below(3) {
        0 => text(input.0),
        1 => file(input.0),
        _ => fields(input),
    }
}

fn text(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let mut config = Config::default();
    let before = config.clone();
    match config.apply_text("fuzz", &text) {
        Ok(()) => holds_its_ranges(&config),
        Err(e) => {
            assert_eq!(config, before, "a refused text must change nothing");
            let names_line =
                e.text.split_once("fuzz, line ").is_some_and(|(_, rest)| rest.starts_with(char::is_numeric));
            assert!(names_line, "no line in: {}", e.text);
        }
    }
}

fn holds_its_ranges(config: &Config) {
    let mut mended = config.clone();
    mended.mend();
    assert_eq!(*config, mended, "a text set a number out of its range");
}

fn file(bytes: &[u8]) {
    let path = own_file("conf");
    std::fs::write(&path, bytes).expect("the folder is writable");
    let name = path.to_str().expect("our own name");
    let (mut by_file, mut by_text) = (Config::default(), Config::default());
    let result = by_file.apply_file(name);
    match std::str::from_utf8(bytes) {
        Ok(text) => {
            assert_eq!(result, by_text.apply_text(name, text));
            assert_eq!(by_file, by_text);
        }
        Err(_) => assert!(result.expect_err("not UTF-8").text.contains(name)),
    }
}

/// The C struct, of any size that its bytes have.
fn fields(mut input: Input) {
    static INIT: Once = Once::new();
    INIT.call_once(|| {
        // SAFETY: NULL asks for the defaults.
        assert_eq!(unsafe { atropos_init(std::ptr::null()) }, 0);
    });
    let known = std::mem::size_of::<atropos_config>();
    // SAFETY: zero is a valid value of every field.
    let mut c: atropos_config = unsafe { std::mem::zeroed() };
    for field in [&mut c.mode, &mut c.max_tasks, &mut c.max_workers, &mut c.window_ms, &mut c.trigger_windows] {
        *field = input.number() as u32;
    }
    (c.verify_ms, c.cancel_burst) = (input.number() as u32, input.number() as u32);
    for field in [&mut c.slo_ms, &mut c.slo_tolerance, &mut c.contention_threshold, &mut c.min_relief] {
        *field = f64::from_bits(input.word());
    }
    (c.cancel_rate_per_s, c.cancel_share) = (f64::from_bits(input.word()), f64::from_bits(input.number()));
    // What a newer header's struct would have behind, and a size that may have nothing to do with it.
    let tail: Vec<u8> = (0..input.below(64)).map(|_| input.byte()).collect();
    c.size = if input.bool() { known + tail.len() } else { number(input.byte()) as usize };
    let text = CString::new(input.0.split(|byte| *byte == 0).next().unwrap_or(&[])).expect("cut at its first NUL");
    c.text = if text.is_empty() { std::ptr::null() } else { text.as_ptr() };
    // As many bytes as the largest size that the library may believe.
    let mut memory = vec![0u64; 4096 / 8 + 1];
    // SAFETY: the vector has room for the struct and its tail, and is aligned for it; both are plain bytes.
    let code = unsafe {
        let to = memory.as_mut_ptr().cast::<u8>();
        to.cast::<atropos_config>().write(c);
        std::ptr::copy_nonoverlapping(tail.as_ptr(), to.add(known), tail.len());
        atropos_reload(to.cast())
    };
    let process = atropos::process::active().expect("initialised above");
    if code == 0 {
        let unknown_is_zero = c.size <= known || tail.iter().take(c.size - known).all(|byte| *byte == 0);
        assert!(c.size <= 4096 && unknown_is_zero, "accepted fields that it does not know");
    } else {
        let mut words = [0; 256];
        // SAFETY: the buffer has the size given.
        assert!(unsafe { atropos_last_error(words.as_mut_ptr(), words.len()) } > 0, "refused ({code}) without a word");
        assert_ne!(code, atropos::capi::ATROPOS_E_PANIC);
    }
    holds_its_ranges(&process.config());
    assert!(!KEYS.is_empty());
}
