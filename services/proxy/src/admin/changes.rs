//! Changes of models on workers: those under way, and the last that ended.

use parking_lot::Mutex;
use serde::Serialize;
use std::collections::VecDeque;
use std::sync::Arc;
use tokio::time::Instant;
use triptych_core::Failure;

/// Most changes that are remembered.
const MAX_CHANGES: usize = 64;

/// Changes, the newest last. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct ModelChanges(Arc<Mutex<ChangeLog>>);

#[derive(Debug, Default)]
struct ChangeLog {
    next: u64,
    changes: VecDeque<Change>,
}

#[derive(Debug)]
struct Change {
    id: u64,
    what: ChangeOrder,
    since: Instant,
    outcome: ChangeOutcome,
}

/// A change of one worker.
#[derive(Clone, Debug, Serialize)]
pub struct ChangeOrder {
    /// `load` or `unload`.
    pub action: &'static str,
    /// Name of the model.
    pub model: String,
    /// The worker.
    pub worker: String,
}

/// Progress of a change on one worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", content = "message", rename_all = "snake_case")]
pub enum ChangeOutcome {
    /// The worker has not answered.
    Running,
    /// It is as ordered.
    Done,
    /// The model has no stage for the worker.
    NotNeeded,
    /// The worker is as it was, or as the message says.
    Failed(String),
}

/// A change as it is shown.
#[derive(Debug, Serialize)]
pub(super) struct ShownChange {
    #[serde(flatten)]
    order: ChangeOrder,
    #[serde(flatten)]
    outcome: ChangeOutcome,
    /// Since it was ordered.
    age_ms: u64,
}

impl ModelChanges {
    /// Records an order; the result names it.
    pub(super) fn begin(&self, what: ChangeOrder) -> u64 {
        let mut log = self.0.lock();
        let id = log.next;
        log.next += 1;
        log.changes.push_back(Change { id, what, since: Instant::now(), outcome: ChangeOutcome::Running });
        while log.changes.len() > MAX_CHANGES {
            log.changes.pop_front();
        }
        id
    }

    /// Records the end of an order. Returns it with its outcome.
    pub(super) fn end(&self, id: u64, result: &Result<bool, Failure>) -> ChangeOutcome {
        let outcome = match result {
            Ok(true) => ChangeOutcome::Done,
            Ok(false) => ChangeOutcome::NotNeeded,
            Err(failure) => ChangeOutcome::Failed(failure.message.clone()),
        };
        if let Some(change) = self.0.lock().changes.iter_mut().find(|change| change.id == id) {
            change.outcome = outcome.clone();
        }
        outcome
    }

    /// All that are remembered, the newest first.
    pub(super) fn shown(&self) -> Vec<ShownChange> {
        let shown = |change: &Change| ShownChange {
            order: change.what.clone(),
            outcome: change.outcome.clone(),
            age_ms: u64::try_from(change.since.elapsed().as_millis()).unwrap_or(u64::MAX),
        };
        self.0.lock().changes.iter().rev().map(shown).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[tokio::test]
    async fn changes_are_shown_with_their_outcome_and_the_oldest_are_forgotten() {
        let changes = ModelChanges::default();
        let order =
            |n: usize| ChangeOrder { action: "load", model: format!("m{n}"), worker: "pd@a:1".into() };
        let first = changes.begin(order(0));
        let failed = changes.end(first, &Err(Failure::invalid("no such directory")));
        assert_eq!(failed, ChangeOutcome::Failed("no such directory".into()));
        let shown = serde_json::to_value(changes.shown()).unwrap();
        assert_eq!(shown[0]["message"], json!("no such directory"));
        assert_eq!((&shown[0]["state"], &shown[0]["model"]), (&json!("failed"), &json!("m0")));
        for n in 1..=MAX_CHANGES {
            changes.begin(order(n));
        }
        let shown = serde_json::to_value(changes.shown()).unwrap();
        assert_eq!(shown.as_array().unwrap().len(), MAX_CHANGES);
        assert_eq!((&shown[0]["model"], &shown[0]["state"]), (&json!("m64"), &json!("running")));
        assert_eq!(changes.end(first, &Ok(true)), ChangeOutcome::Done, "one that is forgotten still ends");
    }
}
