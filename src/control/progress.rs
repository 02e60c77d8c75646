//! Reported progress is believed while it moves.
//!
//! A report that stands at 95% for good would make its task look done soon, and so safe; one that stands at 5% would make
//! its gain twenty times too large. A host that reports seldom looks the same for a while: then nothing is known of its
//! progress until the next report, which costs little (see the simulation, "progress missing").

use super::window::{TaskId, TaskView};

/// Whoever runs and reports nothing new for so long has no known progress.
const STANDS_NS: u64 = 300_000_000;
/// Whoever was not looked at for so long is forgotten.
const FORGOTTEN_NS: u64 = 2_000_000_000;
/// Tasks followed; of more the rest is believed.
const MOST: usize = 256;

#[derive(Clone, Copy, Debug)]
struct Seen {
    task: TaskId,
    scope: u64,
    done: u64,
    /// Since when it stands there, and when it was last looked at.
    since_ns: u64,
    at_ns: u64,
}

/// What candidates reported when they were last looked at.
#[derive(Debug, Default)]
pub struct Reports {
    seen: Vec<Seen>,
}

impl Reports {
    /// Forgets who was not looked at lately.
    pub fn tidy(&mut self, now_ns: u64) {
        self.seen.retain(|s| now_ns.saturating_sub(s.at_ns) < FORGOTTEN_NS);
    }

    /// Takes the progress away from a task that stands still; true = it did.
    pub fn distrust(&mut self, task: &mut TaskView, now_ns: u64) -> bool {
        let Some((done, _)) = task.progress else { return false };
        let fresh = Seen { task: task.id, scope: task.scope, done, since_ns: now_ns, at_ns: now_ns };
        let Some(seen) = self.seen.iter_mut().find(|s| s.task == task.id) else {
            if self.seen.len() < MOST {
                self.seen.push(fresh);
            }
            return false;
        };
        // Whoever waits, or sits idle, gets no further and says so.
        if (seen.scope, seen.done) != (task.scope, done) || !task.waits.is_empty() || !task.in_request {
            *seen = fresh;
            return false;
        }
        seen.at_ns = now_ns;
        let stands = now_ns.saturating_sub(seen.since_ns) >= STANDS_NS;
        if stands {
            task.progress = None;
        }
        stands
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::window::Wait;

    const MS: u64 = 1_000_000;

    fn task(done: u64) -> TaskView {
        TaskView { id: 7, scope: 1, in_request: true, progress: Some((done, 100)), ..TaskView::default() }
    }

    #[test]
    fn what_stands_still_is_not_believed_until_it_moves() {
        let mut reports = Reports::default();
        let mut look = |at_ms: u64, done: u64| {
            let mut t = task(done);
            let gone = reports.distrust(&mut t, at_ms * MS);
            assert_eq!(gone, t.progress.is_none());
            gone
        };
        assert!(!look(0, 95) && !look(299, 95));
        assert!(look(300, 95) && look(325, 95));
        assert!(!look(350, 96), "it moved");
        assert!(!look(649, 96) && look(650, 96));
    }

    #[test]
    fn a_new_scope_a_wait_and_an_idle_session_are_no_standstill() {
        let mut reports = Reports::default();
        let mut look = |at_ms: u64, change: fn(&mut TaskView)| {
            let mut t = task(50);
            change(&mut t);
            reports.distrust(&mut t, at_ms * MS)
        };
        assert!(!look(0, |_| {}));
        assert!(!look(400, |t| t.scope = 2));
        assert!(!look(800, |t| t.scope = 3));
        assert!(!look(1200, |t| {
            t.scope = 3;
            t.waits.push(Wait { resource: 1, instance: 1, waited_ns: 1 });
        }));
        assert!(!look(1600, |t| (t.scope, t.in_request) = (3, false)));
        assert!(!look(1700, |t| t.scope = 3) && look(1900, |t| t.scope = 3));
        assert!(!look(2000, |t| t.progress = None));
    }

    #[test]
    fn the_forgotten_make_room() {
        let mut reports = Reports::default();
        for id in 0..MOST as u64 + 10 {
            assert!(!reports.distrust(&mut TaskView { id, ..task(1) }, 0));
        }
        assert_eq!(reports.seen.len(), MOST);
        reports.tidy(FORGOTTEN_NS);
        assert!(reports.seen.is_empty());
    }
}
