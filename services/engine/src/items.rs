//! Encoder outputs in use: one slot per content key, shared by the sequences that read it.
//!
//! A slot is Pending until the first delivery, then Ready or Failed for good. Sequences hold it; its rows are
//! dropped with the last of them. A use may be released before its sequence ends, once the rows were read, and joined again
//! when they are needed again ([`crate::config::RowRetention`]). The module does not know where outputs come from.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};
use triptych_core::{ContentKey, EncodedItem, EncoderOutput, Failure, FailureClass};

/// Encoder output of one key, once it is delivered.
#[derive(Debug, Default)]
pub struct ItemSlot {
    /// Set once, by the first delivery.
    outcome: OnceLock<Result<EncoderOutput, Failure>>,
}

/// Slots of all keys that live sequences need.
#[derive(Debug, Default)]
pub struct ItemTable {
    slots: HashMap<ContentKey, Weak<ItemSlot>>,
}

impl ItemTable {
    /// A sequence's use of an item. A slot that failed earlier is not reused, so that the item may be loaded
    /// again.
    pub fn join(&mut self, declared: &EncodedItem) -> ItemUse {
        ItemUse { slot: Some(self.slot(&declared.key)), declared: declared.clone() }
    }

    fn slot(&mut self, key: &ContentKey) -> Arc<ItemSlot> {
        self.slots.retain(|_, slot| slot.strong_count() > 0);
        let live = self.slots.get(key).and_then(Weak::upgrade);
        let slot = live.filter(|slot| !matches!(slot.outcome.get(), Some(Err(_)))).unwrap_or_default();
        self.slots.insert(*key, Arc::downgrade(&slot));
        slot
    }

    /// Delivers rows. No effect when no sequence needs them.
    pub fn deliver(&self, key: &ContentKey, output: EncoderOutput) {
        self.settle(key, Ok(output));
    }

    /// Delivers a failure. No effect when no sequence needs the item, or rows came first.
    pub fn fail(&self, key: &ContentKey, failure: Failure) {
        self.settle(key, Err(failure));
    }

    /// Numbers of keys that are loaded, and that are pending.
    pub fn counts(&self) -> (usize, usize) {
        let live = self.slots.values().filter_map(Weak::upgrade);
        live.fold((0, 0), |(ready, pending), slot| match slot.outcome.get() {
            Some(Ok(_)) => (ready + 1, pending),
            Some(Err(_)) => (ready, pending),
            None => (ready, pending + 1),
        })
    }

    fn settle(&self, key: &ContentKey, outcome: Result<EncoderOutput, Failure>) {
        if let Some(slot) = self.slots.get(key).and_then(Weak::upgrade) {
            // A second delivery has the same rows, or comes too late to matter.
            let _ = slot.outcome.set(outcome);
        }
    }
}

/// An item with the metadata that one sequence expects.
#[derive(Clone, Debug)]
pub struct ItemUse {
    declared: EncodedItem,
    /// `None`: released.
    slot: Option<Arc<ItemSlot>>,
}

/// State of an item for one sequence.
#[derive(Debug)]
pub enum ItemState<'a> {
    /// Not delivered yet, or released.
    Pending,
    /// Delivered and as declared.
    Ready(&'a EncoderOutput),
    /// Failed, or not as declared.
    Failed(Failure),
}

impl ItemUse {
    /// Metadata that the sequence was laid out with.
    pub fn declared(&self) -> &EncodedItem {
        &self.declared
    }

    /// Gives the rows back; they are dropped with their last use.
    pub fn release(&mut self) {
        self.slot = None;
    }

    /// True until [`Self::release`].
    pub fn is_joined(&self) -> bool {
        self.slot.is_some()
    }

    /// Ends [`Self::release`]: the rows are pending, unless another use has them.
    pub fn rejoin(&mut self, table: &mut ItemTable) {
        if self.slot.is_none() {
            self.slot = Some(table.slot(&self.declared.key));
        }
    }

    /// Ready only if the delivered output matches the declared metadata.
    pub fn state(&self) -> ItemState<'_> {
        match self.slot.as_ref().and_then(|slot| slot.outcome.get()) {
            None => ItemState::Pending,
            Some(Err(failure)) => ItemState::Failed(failure.clone()),
            Some(Ok(output)) => match mismatch(&self.declared, output.item()) {
                None => ItemState::Ready(output),
                Some(failure) => ItemState::Failed(failure),
            },
        }
    }
}

/// Compares all but `dtype` and `checksum`: a second run of an encoder gives the same rows only up to rounding.
fn mismatch(declared: &EncodedItem, arrived: &EncodedItem) -> Option<Failure> {
    let identity =
        |i: &EncodedItem| (i.key, i.fingerprint, i.modality, i.n_tokens, i.hidden, i.extent.clone());
    if identity(declared) == identity(arrived) {
        return None;
    }
    let text = "an item's encoder output does not match its metadata";
    let detail = format!("declared {declared:?}, arrived {arrived:?}");
    Some(Failure::new(FailureClass::Mismatch, text).with_detail(detail))
}

#[cfg(test)]
mod tests {
    use super::*;
    use triptych_core::{DType, Extent, Fingerprint, Modality};

    fn output(n_tokens: u32) -> EncoderOutput {
        let item = EncodedItem {
            key: ContentKey::from_bytes([1; 32]),
            fingerprint: Fingerprint::from_bytes([2; 32]),
            modality: Modality::Image,
            n_tokens,
            hidden: 1,
            dtype: DType::F32,
            extent: Extent::Tokens,
            checksum: [0; 32],
        };
        EncoderOutput::seal(item, vec![0; n_tokens as usize * 4].into()).unwrap()
    }

    #[test]
    fn rows_are_shared_by_key_and_go_with_their_last_user() {
        let (mut table, rows) = (ItemTable::default(), output(2));
        let key = rows.item().key;
        let (first, second) = (table.join(rows.item()), table.join(rows.item()));
        assert_eq!(table.counts(), (0, 1));
        table.deliver(&key, rows.clone());
        assert!(matches!((first.state(), second.state()), (ItemState::Ready(_), ItemState::Ready(_))));
        drop(first);
        assert_eq!((table.counts(), Arc::strong_count(rows.rows())), ((1, 0), 2));
        drop(second);
        assert_eq!((table.counts(), Arc::strong_count(rows.rows())), ((0, 0), 1));
    }

    #[test]
    fn a_released_use_drops_its_rows_and_waits_for_them_when_it_joins_again() {
        let (mut table, rows) = (ItemTable::default(), output(2));
        let mut item = table.join(rows.item());
        table.deliver(&rows.item().key, rows.clone());
        item.release();
        assert!(matches!(item.state(), ItemState::Pending) && !item.is_joined());
        assert_eq!((table.counts(), Arc::strong_count(rows.rows())), ((0, 0), 1));
        item.rejoin(&mut table);
        assert_eq!(table.counts(), (0, 1));
        table.deliver(&rows.item().key, rows.clone());
        assert!(matches!(item.state(), ItemState::Ready(_)));
    }

    #[test]
    fn rows_of_another_size_fail_only_the_sequence_that_expects_this_one() {
        let (mut table, rows) = (ItemTable::default(), output(2));
        let (wrong, right) = (table.join(output(3).item()), table.join(rows.item()));
        table.deliver(&rows.item().key, rows.clone());
        assert!(matches!(right.state(), ItemState::Ready(_)));
        assert!(matches!(wrong.state(), ItemState::Failed(f) if f.class == FailureClass::Mismatch));
    }

    #[test]
    fn a_failed_key_may_be_tried_again_by_the_next_sequence() {
        let (mut table, rows) = (ItemTable::default(), output(2));
        let first = table.join(rows.item());
        table.fail(&rows.item().key, Failure::unavailable("gone"));
        let second = table.join(rows.item());
        table.deliver(&rows.item().key, rows.clone());
        assert!(matches!(first.state(), ItemState::Failed(_)));
        assert!(matches!(second.state(), ItemState::Ready(_)));
    }
}
