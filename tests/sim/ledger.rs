//! What really happened, written down by everyone and read at the end.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use triptych_core::ContentKey;

/// The books of one simulation. Cheap to clone.
#[derive(Clone, Default)]
pub struct Ledger(Arc<Mutex<Books>>);

/// What is in them.
#[derive(Clone, Debug, Default)]
pub struct Books {
    /// Forwards begun, for each key.
    pub encodes: BTreeMap<ContentKey, u32>,
    /// Answers that were right and whole.
    pub answered: u32,
    /// Requests that ended with a typed error, by its code.
    pub refused: BTreeMap<String, u32>,
    /// Streams that went on at another worker.
    pub resumed: u32,
    /// Requests that wait or run.
    pub open: i64,
    /// What must not happen, in words.
    pub violations: Vec<String>,
    /// Everything that was told, in order: two runs of one seed must tell the same.
    pub history: Vec<String>,
}

impl Ledger {
    /// Writes something down.
    pub fn note(&self, write: impl FnOnce(&mut Books)) {
        write(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Adds a line to the history, with the time of the simulation.
    pub fn tell(&self, line: &str) {
        let at = turmoil::sim_elapsed().unwrap_or_default().as_millis();
        self.note(|books| books.history.push(format!("{at:>6} {line}")));
    }

    /// Writes down what must not happen.
    pub fn violation(&self, what: String) {
        self.tell(&format!("VIOLATION {what}"));
        self.note(|books| books.violations.push(what));
    }

    /// The books as they are.
    pub fn read(&self) -> Books {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
