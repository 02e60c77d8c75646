//! Many short statements on 16 connections while cancels fly: a cancel must hit the statement it was meant for or
//! nobody. What the races on each host share; the statements are the host's.
use anyhow::{ensure, Result};
use serde::Serialize;
use std::time::Duration;

pub const CONNECTIONS: usize = 16;
/// What the integration tests run of each: aimed cancels take seconds for it. Under contention that would take minutes, so it
/// is a part there, and all of it in the `race` command.
pub const AIMED_STATEMENTS: u64 = 100_000;
pub const CONTENTION_STATEMENTS: u64 = 20_000;
pub const AT_MOST: Duration = Duration::from_secs(240);

#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    pub statements: u64,
    /// Cancels posted (aimed) or decided (contention).
    pub requested: u64,
    /// Statements that ended in a cancel that was meant for them.
    pub hits: u64,
    /// Statements that ended in a cancel that was not.
    pub wrong_hits: u64,
    /// Sessions ended by the server: nobody is idle in a transaction here, so none may be.
    pub lost_sessions: u64,
    pub examples: Vec<String>,
    pub seconds: f64,
}

impl Report {
    pub fn add(&mut self, other: Report) {
        self.statements += other.statements;
        self.hits += other.hits;
        self.wrong_hits += other.wrong_hits;
        self.lost_sessions += other.lost_sessions;
        self.examples.extend(other.examples);
    }

    pub fn text(&self, what: &str) -> String {
        let mut text = format!(
            "race, {what}: {} statements on {CONNECTIONS} connections in {:.1} s, {} cancels requested, {} hit their statement, {} wrong hits, {} sessions lost",
            self.statements, self.seconds, self.requested, self.hits, self.wrong_hits, self.lost_sessions
        );
        for e in self.examples.iter().take(5) {
            text += &format!("\n  {e}");
        }
        text
    }

    /// The words of a race that held and ran `statements` or more; an error if it did not.
    pub fn passed(&self, what: &str, statements: u64) -> Result<String> {
        ensure!(self.holds() && self.statements >= statements, "{}", self.text(what));
        Ok(self.text(what))
    }

    /// Holds when nothing was hit wrongly and the test had a chance to fail: cancels flew and some arrived.
    pub fn holds(&self) -> bool {
        self.wrong_hits == 0 && self.lost_sessions == 0 && self.requested > 0 && self.hits > 0
    }
}

/// A small generator (SplitMix64): seeded, so a failing run can be repeated.
pub struct Rng(pub u64);

impl Rng {
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.draw() % n.max(1)
    }
}
