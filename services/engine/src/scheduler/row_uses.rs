//! Rows of items that were read are dropped, and asked for again by a sequence that lost its KV.

use super::Scheduler;
use crate::config::RowRetention;
use crate::output::RowUse;
use crate::request::SequenceId;
use crate::sequence::QueueKey;

impl Scheduler {
    /// Uses of rows since the last call, of sequences that live.
    pub fn take_row_uses(&mut self) -> Vec<(SequenceId, RowUse)> {
        let mut uses = std::mem::take(&mut self.row_uses);
        uses.retain(|(id, _)| self.queue_keys.contains_key(id));
        uses
    }

    /// Drops the rows of a sequence that has read them.
    pub(super) fn release_read_rows(&mut self, id: SequenceId) {
        if self.config.rows == RowRetention::UntilEnd {
            return;
        }
        let Some(sequence) = self.get_mut(id).filter(|s| s.reads_items() && s.has_read_items()) else {
            return;
        };
        sequence.release_items();
        let name = sequence.id();
        self.row_uses.push((name, RowUse::Read));
    }

    /// Asks for the rows of a sequence that dropped them and has to compute what they are among.
    pub(super) fn ask_for_rows(&mut self, queue_key: QueueKey) {
        if self.config.rows == RowRetention::UntilEnd {
            return;
        }
        let Self { sequences, cross, items, row_uses, .. } = self;
        let Some(sequence) = sequences.get_mut(&queue_key).filter(|s| !s.reads_items()) else { return };
        let readable = sequence.readable(sequence.n_computed(), cross);
        if readable.is_ok_and(|readable| readable < sequence.n_tokens()) {
            sequence.rejoin_items(items);
            row_uses.push((sequence.id(), RowUse::Needed));
        }
    }
}
