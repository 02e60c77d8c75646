//! Bytes taken one by one, and turned into numbers at which code breaks.
//! SPDX-License-Identifier: MIT OR Apache-2.0

use std::path::PathBuf;

/// What is left of an input; past its end everything is 0, so that any prefix of an input is one too.
pub struct Input<'a>(pub &'a [u8]);

impl Input<'_> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn byte(&mut self) -> u8 {
        match self.0.split_first() {
            Some((first, rest)) => {
                self.0 = rest;
                *first
            }
            None => 0,
        }
    }

    pub fn below(&mut self, n: usize) -> usize {
        self.byte() as usize % n
    }

    pub fn bool(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    pub fn word(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    pub fn number(&mut self) -> u64 {
        number(self.byte())
    }
}

/// A number for a byte: small ones as they are, powers of two and their neighbours, times, extremes, rubbish.
pub fn number(byte: u8) -> u64 {
    match byte {
        0..=31 => byte as u64,
        32..=95 => 1 << (byte - 32),
        96..=127 => (1u64 << (2 * (byte - 96) + 1)) - 1,
        128..=143 => 1_000_000 << (byte - 128),
        144..=159 => u64::MAX - (byte - 144) as u64,
        160..=167 => i64::MAX as u64 - 3 + (byte as u64 - 160),
        168..=171 => [f64::NAN, f64::INFINITY, -1.0, 0.5][byte as usize - 168].to_bits(),
        _ => (byte as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15),
    }
}

/// A file of this process that no other fuzzer or test writes.
pub fn own_file(name: &str) -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    let dir = if memory.is_dir() { memory } else { std::env::temp_dir() };
    dir.join(format!("atropos-fuzz-{}-{name}", std::process::id()))
}
