//! The record of a simulation: every host writes to it, and it is checked at the end.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use triptych_core::ContentKey;

/// Shared access to the record of one simulation. Cheap to clone.
#[derive(Clone, Default)]
pub struct Recorder(Arc<Mutex<SimRecord>>);

/// Counts and history of one simulation.
#[derive(Clone, Debug, Default)]
pub struct SimRecord {
    /// Forward passes started, by key.
    pub encodes: BTreeMap<ContentKey, u32>,
    /// Correct and complete answers.
    pub answered: u32,
    /// Requests that ended with a typed error, by its code.
    pub refused: BTreeMap<String, u32>,
    /// Streams that resumed on another worker.
    pub resumed: u32,
    /// Requests that wait or run.
    pub open: i64,
    /// Violated invariants.
    pub violations: Vec<String>,
    /// Log lines, in order.
    pub history: Vec<String>,
}

impl Recorder {
    /// Updates the record.
    pub fn update(&self, write: impl FnOnce(&mut SimRecord)) {
        write(&mut self.0.lock());
    }

    /// Adds a line to the history, with the time of the simulation.
    pub fn log(&self, line: &str) {
        let at = turmoil::sim_elapsed().unwrap_or_default().as_millis();
        self.update(|record| record.history.push(format!("{at:>6} {line}")));
    }

    /// Records a violated invariant.
    pub fn violation(&self, what: String) {
        self.log(&format!("VIOLATION {what}"));
        self.update(|record| record.violations.push(what));
    }

    /// A copy of the record.
    pub fn snapshot(&self) -> SimRecord {
        self.0.lock().clone()
    }
}
