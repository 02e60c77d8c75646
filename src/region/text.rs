//! Short texts in shared memory, as atomics. Torn reads give a wrong text, never a wrong length.

use crate::primitive::{AtomicU64, AtomicU8, Ordering::Relaxed};

/// Stores `text`, cut at a character's boundary, NUL-padded; the last byte stays 0.
pub fn store_words(words: &[AtomicU64], text: &str) {
    let bytes = cut(text, words.len() * 8 - 1).as_bytes();
    for (i, word) in words.iter().enumerate() {
        let mut buf = [0u8; 8];
        if i * 8 < bytes.len() {
            let part = &bytes[i * 8..bytes.len().min(i * 8 + 8)];
            buf[..part.len()].copy_from_slice(part);
        }
        word.store(u64::from_le_bytes(buf), Relaxed);
    }
}

pub fn load_words(words: &[AtomicU64]) -> String {
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.load(Relaxed).to_le_bytes()).collect();
    until_nul(&bytes)
}

pub fn store_bytes(cells: &[AtomicU8], text: &[u8]) {
    for (cell, byte) in cells.iter().zip(text.iter().copied().chain(std::iter::repeat(0))) {
        cell.store(byte, Relaxed);
    }
}

pub fn load_bytes(cells: &[AtomicU8]) -> String {
    let bytes: Vec<u8> = cells.iter().map(|c| c.load(Relaxed)).collect();
    until_nul(&bytes)
}

fn until_nul(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// At most `max` bytes of `text`, whole characters only.
pub fn cut(text: &str, max: usize) -> &str {
    let mut end = text.len().min(max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn round_trip_and_cut_at_a_character() {
        let words: [AtomicU64; 2] = Default::default();
        for (text, want) in
            [("", ""), ("lock", "lock"), ("0123456789abcdefgh", "0123456789abcde"), ("äöüäöüäöü", "äöüäöüä")]
        {
            store_words(&words, text);
            assert_eq!(load_words(&words), want);
        }
    }
}
