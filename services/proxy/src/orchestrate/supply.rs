//! The encoder outputs of one request on their way to READY: one of each item, or of each tower that reads it.
//!
//! Outputs are counted as the request machine and PD workers count them; [`Supply::at_item`] names the item to the client.

use super::work::Work;
use crate::encode::Subscription;
use crate::encode::job::EncodeJob;
use crate::fleet::placement::{Placement, UnplacedItem};
use crate::observe::{ReadyItem, Size, wire_source};
use crate::request::{item_of_param, param_of_item};
use crate::request_machine::event::RequestEvent;
use crate::request_machine::output::{Announced, Encoded};
use futures::future::{pending, select_all};
use std::sync::Arc;
use triptych_core::lifetime::{ItemSource, StageTimes};
use triptych_core::{ContentKey, Failure, ItemForm, ItemIdx, Modality, WorkerId};
use triptych_proto::v1;

/// The items of a request.
pub(super) struct Supply<'a> {
    work: &'a Work,
    placement: Option<Arc<Placement>>,
    /// One for each output.
    items: Vec<SuppliedItem>,
    /// True if all were announced: an item of a request that failed before is not counted.
    is_supplied: bool,
}

/// One output of an item.
struct SuppliedItem {
    job: EncodeJob,
    subscription: Subscription,
    /// Description of its output, once it is announced.
    known: Option<Announced>,
    /// Set when it is READY.
    encoded: Option<Encoded>,
    /// True if its description alone is of use: a worker of another engine holds a request back until all its items are there, and
    /// gives it up if that takes long.
    is_early: bool,
    /// True if it failed: nothing more is heard of it.
    has_failed: bool,
}

/// The PD worker that encodes the items and answers, if PD workers encode.
fn place(work: &Work, jobs: &[EncodeJob]) -> Option<Arc<Placement>> {
    let item = |job: &EncodeJob| UnplacedItem {
        key: job.wanted.key,
        want: job.encoder(),
        bytes: (!job.is_stored).then_some(job.bytes.len() as u64),
    };
    let items: Vec<_> = jobs.iter().map(item).collect();
    work.orchestrator.fleet.place(&work.decoder(), &items)
}

impl<'a> Supply<'a> {
    /// Looks for the outputs or has them made.
    pub(super) fn begin(work: &'a Work, mut jobs: Vec<EncodeJob>) -> Self {
        let placement = place(work, &jobs);
        jobs.iter_mut().for_each(|job| job.placement.clone_from(&placement));
        let subscriptions = work.orchestrator.encodes.begin(&jobs);
        let is_early = work.route.served.foreign.is_none();
        let item = |(job, subscription)| SuppliedItem {
            job,
            subscription,
            known: None,
            encoded: None,
            is_early,
            has_failed: false,
        };
        let items = jobs.into_iter().zip(subscriptions).map(item).collect();
        Self { work, placement, items, is_supplied: false }
    }

    /// Number of outputs.
    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    /// Keys of the outputs, in the order of the items.
    pub(super) fn keys(&self) -> Vec<ContentKey> {
        self.items.iter().map(|item| item.job.wanted.key).collect()
    }

    /// The outputs of each item.
    fn by_item(&self) -> impl Iterator<Item = &[SuppliedItem]> {
        self.items.chunk_by(|a, b| a.job.item == b.job.item)
    }

    /// A key for each item, of the first of its outputs.
    pub(super) fn item_keys(&self) -> Vec<ContentKey> {
        self.by_item().filter_map(<[_]>::first).map(|item| item.job.wanted.key).collect()
    }

    /// The worker at which its items are encoded, if one was chosen for it.
    pub(super) fn placed(&self) -> Option<WorkerId> {
        self.placement.as_ref().map(|placement| placement.id().clone())
    }

    /// All are announced: what had to be encoded was given to somebody.
    pub(super) fn supplied(&mut self) {
        self.is_supplied = true;
        let ready = self.by_item().filter_map(ready_item);
        ready.for_each(|one| self.work.orchestrator.observer.item(one));
        if let Some(placement) = &self.placement {
            placement.settle();
        }
    }

    /// True if any item is still being encoded.
    pub(super) fn is_pending(&self) -> bool {
        self.items.iter().any(|item| item.encoded.is_none())
    }

    /// Descriptions of the outputs that are known.
    pub(super) fn announced(&self) -> Vec<Announced> {
        self.known().cloned().collect()
    }

    /// The items as a PD worker is given them.
    pub(super) fn items(&self) -> Vec<v1::EncodedItem> {
        self.known().map(|known| (&known.item).into()).collect()
    }

    /// The items as clients sent them, those of a kind whose bytes are read; nothing of others.
    pub(super) fn originals(&self, reads_bytes: impl Fn(Modality) -> bool) -> Vec<v1::OriginalItem> {
        let original = |job: &EncodeJob| v1::OriginalItem {
            data: job.bytes.clone(),
            is_embeddings: job.options.form == ItemForm::Embeddings,
            options: Some(job.options.clone().into()),
        };
        let jobs = self.items.iter().filter(|item| item.known.is_some()).map(|item| &item.job);
        jobs.map(|job| match reads_bytes(job.wanted.modality) {
            true => original(job),
            false => v1::OriginalItem::default(),
        })
        .collect()
    }

    /// Their keys, and the bytes that a worker loads which does not hold them.
    pub(super) fn sizes(&self) -> Vec<(ContentKey, u64)> {
        let items = self.known().map(|known| &known.item);
        items.map(|item| (item.key, item.payload_len().unwrap_or(0) as u64)).collect()
    }

    /// Places at which a PD worker finds them.
    pub(super) fn hints(&self) -> Vec<v1::ItemHint> {
        let hint = |known: &Announced| v1::ItemHint { peers: known.peers.clone(), pending: known.pending };
        self.known().map(hint).collect()
    }

    fn known(&self) -> impl Iterator<Item = &Announced> {
        self.items.iter().filter_map(|item| item.known.as_ref())
    }

    /// The next report on an item; never, when all are READY. Loses nothing when it is dropped.
    pub(super) async fn next(&mut self) -> RequestEvent {
        let is_awaited = |item: &SuppliedItem| item.encoded.is_none() && !item.has_failed;
        let awaited = self.items.iter_mut().enumerate().filter(|(_, item)| is_awaited(item));
        let waits: Vec<_> =
            awaited.map(|(i, item)| Box::pin(async move { (i, item.next().await) })).collect();
        if waits.is_empty() {
            return pending().await;
        }
        let ((i, report), ..) = select_all(waits).await;
        let idx = ItemIdx(i as u32);
        match report {
            Ok(Report::Announced(known)) => {
                self.items[i].known = Some(known);
                RequestEvent::ItemAnnounced(idx)
            }
            Ok(Report::Ready(encoded)) => {
                let holders = encoded.holders.clone();
                self.set_ready(i, *encoded);
                RequestEvent::ItemReady { item: idx, holders }
            }
            Err(failure) => {
                self.items[i].has_failed = true;
                RequestEvent::ItemFailed { item: idx, failure }
            }
        }
    }

    /// Has an item encoded again that a PD worker did not find, if it was READY.
    pub(super) fn renew(&mut self, idx: ItemIdx) {
        let Some(item) = self.items.get_mut(idx.0 as usize) else { return };
        tracing::warn!(item = idx.0, key = ?item.job.wanted.key, "encoder output is gone, encoding again");
        if let Some(lost) = item.encoded.take() {
            item.subscription = self.work.orchestrator.encodes.begin_again(&item.job, &lost);
        }
    }

    /// The request failed: what is being encoded for it goes on, for the next request.
    pub(super) fn leave_behind(self) {
        self.items.into_iter().for_each(|item| item.subscription.leave_behind());
    }

    /// The stages before the PD worker, for the slowest item of those that were encoded for this request.
    pub(super) fn times(&self) -> StageTimes {
        let encoded = self.items.iter().filter_map(|item| item.encoded.as_ref());
        let slowest = encoded.max_by_key(|one| one.times.queue + one.times.encode + one.times.publish);
        slowest.map(|one| one.times).unwrap_or_default()
    }

    /// The source of each item; of several outputs that which took longest.
    pub(super) fn sources(&self) -> Vec<i32> {
        let unknown = v1::ItemSource::Unspecified.into();
        self.by_item().map(|outputs| source_of(outputs).map_or(unknown, wire_source)).collect()
    }

    /// Number of items, and of the tokens that they became. Rows of further towers are no tokens of the prompt: the first tower's are
    /// (CogAgent).
    pub(super) fn size(&self) -> Size {
        let tokens = |outputs: &[SuppliedItem]| Some(outputs.first()?.encoded.as_ref()?.item.n_tokens);
        let item_tokens = self.by_item().filter_map(tokens).fold(0, u32::saturating_add);
        Size { n_items: self.by_item().count(), item_tokens }
    }

    /// A failure of the request, or of one of its outputs. An encoder that refuses an item names it, unless it names a setting; a
    /// PD worker names an output.
    pub(super) fn at_item(&self, failure: Failure, output: Option<ItemIdx>) -> Failure {
        let named = failure.param.as_deref().map(item_of_param);
        let output = match named {
            None => output,
            Some(named) => named,
        };
        match output.and_then(|idx| self.items.get(idx.0 as usize)) {
            Some(item) => failure.with_param(param_of_item(item.job.item)),
            None => failure,
        }
    }

    fn set_ready(&mut self, i: usize, encoded: Encoded) {
        let is_renewed = self.items[i].known.as_ref().is_some_and(|known| !known.pending);
        // The same item may stand in the request twice; both must announce the object that is there now.
        if is_renewed {
            let same = |item: &&mut SuppliedItem| {
                item.encoded.as_ref().is_some_and(|one| one.item.key == encoded.item.key)
            };
            for other in self.items.iter_mut().filter(same) {
                other.known = Some(encoded.announced());
                other.encoded = Some(encoded.clone());
            }
        }
        self.items[i].known = Some(encoded.announced());
        self.items[i].encoded = Some(encoded);
        let item = self.items[i].job.item;
        let ready = self.by_item().find(|outputs| outputs[0].job.item == item).and_then(ready_item);
        if let Some(ready) = ready.filter(|_| self.is_supplied) {
            self.work.orchestrator.observer.item(ready);
        }
    }
}

/// The source of an item by those of its outputs: that which took longest. `None` before any is READY.
fn source_of(outputs: &[SuppliedItem]) -> Option<ItemSource> {
    let cost = |source: &ItemSource| match source {
        ItemSource::Cached => 0,
        ItemSource::Shared => 1,
        ItemSource::Encoded => 2,
    };
    outputs.iter().filter_map(|one| Some(one.encoded.as_ref()?.source)).max_by_key(cost)
}

/// An item by its outputs; `None` before all are READY.
fn ready_item(outputs: &[SuppliedItem]) -> Option<ReadyItem> {
    if outputs.iter().any(|one| one.encoded.is_none()) {
        return None;
    }
    let first = &outputs.first()?.encoded.as_ref()?.item;
    Some(ReadyItem { modality: first.modality, source: source_of(outputs)?, n_tokens: first.n_tokens })
}

/// News of an item.
enum Report {
    Announced(Announced),
    Ready(Box<Encoded>),
}

impl SuppliedItem {
    async fn next(&mut self) -> Result<Report, Failure> {
        if self.known.is_none() && self.is_early {
            let known = self.subscription.announced().await?;
            if known.pending {
                return Ok(Report::Announced(known));
            }
        }
        Ok(Report::Ready(Box::new(self.subscription.ready().await?)))
    }
}
