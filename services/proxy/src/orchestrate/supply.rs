//! The items of one request on their way to READY.
//!
//! A PD worker can begin as soon as it knows what every item will be: it lays the prompt out and reads up to the first
//! item whose rows are not there. So the request waits here only until all are announced, and what becomes of those
//! that are still being encoded is heard while the answer is awaited.

use super::{Work, at_item};
use crate::encode::{Announced, Encoded, Flight, Job};
use crate::fleet::home::{Home, Homeless};
use crate::observe::{Size, wire_source};
use futures::future::{pending, select_all, try_join_all};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;
use triptych_core::lifetime::StageTimes;
use triptych_core::{ContentKey, Failure, ItemIdx, WorkerId};
use triptych_proto::v1;

/// Times one item is encoded again because a PD worker did not find it.
const AGAIN_PER_ITEM: u32 = 2;
/// How long a finished answer waits for what the encoder says of an item that was read already.
const LAST_NEWS: Duration = Duration::from_millis(250);

/// The items of a request.
pub(super) struct Supply<'a> {
    work: &'a Work,
    places: Vec<Place>,
}

/// One item.
struct Place {
    job: Job,
    flight: Flight,
    known: Announced,
    /// Set when it is READY.
    encoded: Option<Encoded>,
    /// How often it was encoded again.
    n_again: u32,
}

/// The PD worker that encodes the items and answers, where PD workers encode.
fn home(work: &Work, jobs: &[Job]) -> Option<Arc<Home>> {
    let item =
        |job: &Job| Homeless { key: job.wanted.key, want: job.encoder(), bytes: job.bytes.len() as u64 };
    let items: Vec<_> = jobs.iter().map(item).collect();
    work.orchestrator.fleet.home(&work.decoder(), &items)
}

impl<'a> Supply<'a> {
    /// Looks for the outputs or has them made; waits until each is announced.
    ///
    /// # Errors
    /// Of the first item that fails; the others go on for whoever asks again.
    pub(super) async fn begin(work: &'a Work, mut jobs: Vec<Job>) -> Result<Self, Failure> {
        let encodes = &work.orchestrator.encodes;
        let home = home(work, &jobs);
        jobs.iter_mut().for_each(|job| job.home.clone_from(&home));
        let mut flights = encodes.begin(&jobs);
        let waits = flights.iter_mut().enumerate();
        let waits = waits.map(|(i, flight)| async move {
            let known = flight.announced().await.map_err(|failure| at_item(failure, i))?;
            // What is not pending has ended, so this does not wait.
            let encoded = if known.pending { None } else { Some(flight.ready().await?) };
            Ok::<_, Failure>((known, encoded))
        });
        let known = match try_join_all(waits).await {
            Ok(known) => known,
            Err(failure) => {
                encodes.leave_behind(flights);
                return Err(failure);
            }
        };
        // What had to be encoded was given to somebody.
        if let Some(home) = &home {
            home.settle();
        }
        let places = jobs.into_iter().zip(flights).zip(known);
        let place = |((job, flight), (known, encoded))| Place { job, flight, known, encoded, n_again: 0 };
        let supply = Self { work, places: places.map(place).collect() };
        supply.places.iter().filter_map(|place| place.encoded.as_ref()).for_each(|one| supply.count(one));
        Ok(supply)
    }

    /// Whether any item is still being encoded.
    pub(super) fn is_pending(&self) -> bool {
        self.places.iter().any(|place| place.known.pending)
    }

    /// What a PD worker is told of the items.
    pub(super) fn items(&self) -> Vec<v1::EncodedItem> {
        self.places.iter().map(|place| (&place.known.item).into()).collect()
    }

    /// Their keys, and the bytes that a worker loads which does not hold them.
    pub(super) fn sizes(&self) -> Vec<(ContentKey, u64)> {
        let items = self.places.iter().map(|place| &place.known.item);
        items.map(|item| (item.key, item.payload_len().unwrap_or(0) as u64)).collect()
    }

    /// PD workers that hold items which nobody else is known to have, or have them encoded for this request.
    pub(super) fn holders(&self) -> Vec<WorkerId> {
        let encoded = self.places.iter().filter_map(|place| place.encoded.as_ref());
        let held = encoded.map(|one| &one.holders).find(|holders| !holders.is_empty()).cloned();
        // Without such, where its items were encoded, if that was chosen for it.
        held.unwrap_or_else(|| {
            let home = self.places.iter().find_map(|place| place.job.home.as_ref());
            home.map(|home| home.id().clone()).into_iter().collect()
        })
    }

    /// Where a PD worker finds them.
    pub(super) fn hints(&self) -> Vec<v1::ItemHint> {
        let hint = |known: &Announced| v1::ItemHint { peers: known.peers.clone(), pending: known.pending };
        self.places.iter().map(|place| hint(&place.known)).collect()
    }

    /// Ends when one more item is READY; never, when all are. Loses nothing when it is dropped.
    ///
    /// # Errors
    /// Of an item that failed for good.
    pub(super) async fn landed(&mut self) -> Result<(), Failure> {
        let flying = self.places.iter_mut().enumerate().filter(|(_, place)| place.known.pending);
        let waits: Vec<_> =
            flying.map(|(i, place)| Box::pin(async move { (i, place.flight.ready().await) })).collect();
        if waits.is_empty() {
            return pending().await;
        }
        let ((i, outcome), ..) = select_all(waits).await;
        self.set(i, outcome.map_err(|failure| at_item(failure, i))?);
        Ok(())
    }

    /// Has an item encoded again that a PD worker did not find; one that is still being encoded is waited for.
    ///
    /// # Errors
    /// `failure`, if that happened too often; otherwise the item's.
    pub(super) async fn renew(&mut self, idx: ItemIdx, failure: Failure) -> Result<(), Failure> {
        let (i, n) = (idx.0 as usize, self.places.len());
        let Some(place) = self.places.get_mut(i) else {
            return Err(Failure::internal(format!("a PD worker misses item {i} of {n}")));
        };
        if place.n_again == AGAIN_PER_ITEM {
            return Err(failure);
        }
        place.n_again += 1;
        tracing::warn!(item = i, key = ?place.job.wanted.key, "encoder output is gone, encoding again");
        if let Some(lost) = &place.encoded {
            place.flight = self.work.orchestrator.encodes.begin_again(&place.job, lost);
        }
        let encoded = place.flight.ready().await.map_err(|failure| at_item(failure, i))?;
        let key = encoded.item.key;
        // The same item may stand in the request twice; both places must announce the object that is there now.
        for other in (0..n).filter(|other| *other != i) {
            if self.places[other].known.item.key == key {
                self.places[other].known = encoded.announced();
                self.places[other].encoded = Some(encoded.clone());
            }
        }
        self.set(i, encoded);
        Ok(())
    }

    /// The answer is complete: what is still to be heard of its items is at hand, or not worth waiting for.
    pub(super) async fn settle(&mut self) {
        let all = async { while self.is_pending() && self.landed().await.is_ok() {} };
        // Without it an item's source is not known.
        let _ = timeout(LAST_NEWS, all).await;
    }

    /// The request failed: what is being encoded for it goes on, for whoever asks again.
    pub(super) fn leave_behind(self) {
        self.work.orchestrator.encodes.leave_behind(self.places.into_iter().map(|place| place.flight));
    }

    /// The stages before the PD worker, for the slowest item of those that were encoded for this request.
    pub(super) fn times(&self) -> StageTimes {
        let encoded = self.places.iter().filter_map(|place| place.encoded.as_ref());
        let slowest = encoded.max_by_key(|one| one.times.queue + one.times.encode + one.times.publish);
        slowest.map(|one| one.times).unwrap_or_default()
    }

    /// Where each item came from.
    pub(super) fn sources(&self) -> Vec<i32> {
        let unknown = v1::ItemSource::Unspecified.into();
        let source = |place: &Place| place.encoded.as_ref().map_or(unknown, |one| wire_source(one.source));
        self.places.iter().map(source).collect()
    }

    /// How many items there are, and how many tokens they became.
    pub(super) fn size(&self) -> Size {
        let encoded = self.places.iter().filter_map(|place| place.encoded.as_ref());
        let item_tokens = encoded.map(|one| one.item.n_tokens).fold(0, u32::saturating_add);
        Size { n_items: self.places.len(), item_tokens }
    }

    fn set(&mut self, i: usize, encoded: Encoded) {
        self.count(&encoded);
        if let Some(place) = self.places.get_mut(i) {
            place.known = encoded.announced();
            place.encoded = Some(encoded);
        }
    }

    fn count(&self, encoded: &Encoded) {
        self.work.orchestrator.observer.item(encoded);
    }
}
