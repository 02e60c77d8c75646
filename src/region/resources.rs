//! The registry of resources: the same name has the same number in all processes.

use super::layout::{Header, ResourceEntry, MAX_RESOURCES, NAME_BYTES};
use super::owner::{Patience, ProcessId};
use super::text;
use crate::control::window::{ResourceKind, BLOCK_IO, CPU};
use crate::error::{Code, Error, Result};
use crate::primitive::Ordering::{AcqRel, Acquire, Relaxed, Release};

const READY: u64 = 2;

fn claimed_by(pid: u32) -> u64 {
    (pid as u64) << 2 | 1
}

/// What a host may register: SYSTEM resources are the library's own.
pub fn kind_from(n: u32) -> Option<ResourceKind> {
    match n {
        1 => Some(ResourceKind::Lock),
        2 => Some(ResourceKind::Memory),
        3 => Some(ResourceKind::Queue),
        _ => None,
    }
}

impl Header {
    /// Registers a resource or finds it by name. Numbers start at 1.
    ///
    /// Everybody walks up from the first entry and claims the first empty one, so a name is never registered twice; an
    /// entry whose claimer died before finishing is taken over. One that is stopped there is waited for, but not for ever.
    pub fn register(&self, name: &str, kind: ResourceKind) -> Result<u32> {
        if name.is_empty() || name.len() >= NAME_BYTES || name.chars().any(char::is_control) {
            return Err(Error::new(
                Code::Invalid,
                format!("resource name {name:?}: 1 to {} bytes without control characters are allowed", NAME_BYTES - 1),
            ));
        }
        let pid = std::process::id();
        let mut patience = Patience::new();
        for (index, entry) in self.resources.iter().enumerate().skip(1) {
            loop {
                match entry.state.load(Acquire) {
                    READY if text::load_bytes(&entry.name) == name => {
                        let have = entry.kind();
                        if have == Some(kind) {
                            return Ok(index as u32);
                        }
                        return Err(Error::new(
                            Code::Invalid,
                            format!("resource {name:?} is registered as {have:?} already, not {kind:?}"),
                        ));
                    }
                    READY => break,
                    0 if self.claim(entry, 0, pid) => {
                        entry.fill(name, kind);
                        return Ok(index as u32);
                    }
                    0 => {}
                    word => {
                        let claimer = ProcessId { pid: (word >> 2) as u32, start_ticks: 0 };
                        if !claimer.is_alive() && self.claim(entry, word, pid) {
                            entry.fill(name, kind);
                            return Ok(index as u32);
                        }
                        if !patience.wait() {
                            return Err(Error::new(
                                Code::Region,
                                format!(
                                    "resource {name:?}: process {} has been registering place {index} for over {:?}; is \
                                     it stopped, or the region damaged? Continue it, or restart the host",
                                    claimer.pid,
                                    Patience::LIMIT
                                ),
                            ));
                        }
                    }
                }
            }
        }
        self.counters.resources_refused.fetch_add(1, Relaxed);
        Err(Error::new(Code::Full, format!("resource {name:?}: all {} places are taken", MAX_RESOURCES - 1)))
    }

    fn claim(&self, entry: &ResourceEntry, seen: u64, pid: u32) -> bool {
        entry.state.compare_exchange(seen, claimed_by(pid), AcqRel, Relaxed).is_ok()
    }

    /// The registered resource `id`.
    pub fn resource(&self, id: u32) -> Option<&ResourceEntry> {
        self.resources.get(id as usize).filter(|e| e.state.load(Acquire) == READY)
    }

    /// The name of a resource, registered or the machine's; empty for a number that names none.
    pub fn resource_name(&self, id: u32) -> String {
        match id {
            CPU => "CPU".into(),
            BLOCK_IO => "block I/O".into(),
            _ => self.resource(id).map_or(String::new(), |entry| entry.name()),
        }
    }

    /// The kind of a resource, registered or the machine's.
    pub fn resource_kind(&self, id: u32) -> Option<ResourceKind> {
        match id {
            CPU | BLOCK_IO => Some(ResourceKind::System),
            _ => self.resource(id).and_then(|entry| entry.kind()),
        }
    }

    /// All registered resources with their numbers.
    pub fn registered(&self) -> impl Iterator<Item = (u32, &ResourceEntry)> {
        (1..MAX_RESOURCES as u32).filter_map(|id| self.resource(id).map(|e| (id, e)))
    }
}

impl ResourceEntry {
    fn fill(&self, name: &str, kind: ResourceKind) {
        text::store_bytes(&self.name, name.as_bytes());
        self.kind.store(kind as u32 + 1, Relaxed);
        self.state.store(READY, Release);
    }

    pub fn kind(&self) -> Option<ResourceKind> {
        kind_from(self.kind.load(Relaxed))
    }

    pub fn name(&self) -> String {
        text::load_bytes(&self.name)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::region::Region;

    #[test]
    fn same_name_same_number_and_kinds_must_agree() {
        let r = Region::anonymous(16, 16).unwrap();
        let h = r.header();
        let a = h.register("table lock", ResourceKind::Lock).unwrap();
        let b = h.register("buffer pool", ResourceKind::Memory).unwrap();
        assert_eq!((a, b), (1, 2));
        assert_eq!(h.register("table lock", ResourceKind::Lock), Ok(1));
        assert_eq!(h.register("table lock", ResourceKind::Queue).unwrap_err().code, Code::Invalid);
        for bad in ["", "a\nb", &"x".repeat(NAME_BYTES)] {
            assert_eq!(h.register(bad, ResourceKind::Lock).unwrap_err().code, Code::Invalid);
        }
        for i in 2..MAX_RESOURCES - 1 {
            h.register(&format!("r{i}"), ResourceKind::Lock).unwrap();
        }
        assert_eq!(h.register("one more", ResourceKind::Lock).unwrap_err().code, Code::Full);
        assert_eq!(h.counters.resources_refused.load(Relaxed), 1);
    }

    #[test]
    fn a_claim_of_a_dead_process_does_not_block() {
        let r = Region::anonymous(16, 16).unwrap();
        r.header().resources[1].state.store(claimed_by(u32::MAX >> 2), Relaxed);
        assert_eq!(r.header().register("x", ResourceKind::Lock), Ok(1));
    }

    #[test]
    fn a_claim_that_never_ends_does_not_wedge() {
        let r = Region::anonymous(16, 16).unwrap();
        // This process lives, and will not finish.
        r.header().resources[1].state.store(claimed_by(std::process::id()), Relaxed);
        let e = r.header().register("x", ResourceKind::Lock).unwrap_err();
        assert!(e.code == Code::Region && e.text.contains("place 1"), "{e}");
    }

    #[test]
    fn racing_threads_agree() {
        let r = Region::anonymous(16, 16).unwrap();
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for i in 0..20 {
                        r.header().register(&format!("r{i}"), ResourceKind::Lock).unwrap();
                    }
                });
            }
        });
        let names: std::collections::BTreeSet<_> = r.header().registered().map(|(_, e)| e.name()).collect();
        assert_eq!((names.len(), r.header().registered().count()), (20, 20));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::region::Region;
    use loom::sync::Arc;

    fn register_both(first: &'static str, second: &'static str, before: fn(&Region)) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(move || {
            let r = Arc::new(Region::model(1, 1));
            before(&r);
            let other = r.clone();
            let thread = loom::thread::spawn(move || other.header().register(second, ResourceKind::Queue).unwrap());
            let mine = r.header().register(first, ResourceKind::Queue).unwrap();
            // Whoever sees an entry sees its name.
            for (id, entry) in r.header().registered() {
                assert_eq!(
                    (entry.name().as_str(), entry.kind()),
                    (if id == mine { first } else { second }, Some(ResourceKind::Queue))
                );
            }
            let theirs = thread.join().unwrap();
            assert_eq!(mine == theirs, first == second);
            assert_eq!(r.header().registered().count(), if first == second { 1 } else { 2 });
        });
    }

    #[test]
    fn one_name_registered_twice_at_once_gets_one_number() {
        register_both("a", "a", |_| ());
    }

    #[test]
    fn two_names_registered_at_once_get_two_numbers() {
        register_both("a", "b", |_| ());
    }

    /// The first entry's claimer died half-way: one of the two takes it over.
    #[test]
    fn a_dead_claimers_entry_is_taken_over_once() {
        register_both("a", "a", |r| r.header().resources[1].state.store(claimed_by(u32::MAX >> 2), Relaxed));
    }
}
