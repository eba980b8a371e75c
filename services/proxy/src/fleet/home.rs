//! Where a request lives whose items only PD workers can encode: it is chosen before its items are, so that they are
//! encoded where the answer is written and nothing crosses.
//!
//! The score is that of the PD worker's choice, in the same microseconds, with what is to be encoded there before this
//! request and for it: on such a worker steps and forwards take turns on the same cores.

use super::catalog::{Catalog, Want};
use super::choice::{item_of, now};
use super::{Fleet, Shared};
use rand::RngExt;
use std::sync::PoisonError;
use triptych_core::{ContentKey, WorkerId};
use triptych_runtime::discovery::Role;

/// An item that may have to be encoded.
pub struct Homeless {
    /// Its output.
    pub key: ContentKey,
    /// The encoder.
    pub want: Want,
    /// The item's length.
    pub bytes: u64,
}

impl Fleet {
    /// The PD worker that should encode these items and answer the request; `None` if it has no items, or if encoder
    /// workers serve them.
    pub fn home(&self, pd: &Want, items: &[Homeless]) -> Option<WorkerId> {
        self.shared.home(&self.catalog(), pd, items)
    }
}

impl Shared {
    pub(super) fn home(&self, catalog: &Catalog, pd: &Want, items: &[Homeless]) -> Option<WorkerId> {
        let serves = |item: &Homeless| {
            catalog.workers.iter().any(|known| known.role == Role::Encoder && known.serves(&item.want))
        };
        if items.is_empty() || items.iter().any(serves) {
            return None;
        }
        let (able, _) = self.able(catalog, pd, &[])?;
        let now = now();
        let sizes = items.iter().filter_map(|item| Some((item.key, item_of(&item.want, item.bytes)?)));
        let sizes: Vec<_> = sizes.collect();
        let scored = able.iter().filter(|(known, _)| items.iter().all(|item| known.can_do(&item.want)));
        let scored = scored.filter_map(|(known, worker)| {
            let view = worker.view();
            (!view.is_full()).then(|| (view.home_us(&sizes, now), known))
        });
        let scored: Vec<_> = scored.collect();
        let best = scored.iter().map(|(score, _)| *score).min()?;
        let best: Vec<_> = scored.into_iter().filter(|(score, _)| *score == best).collect();
        let lot = self.rng.lock().unwrap_or_else(PoisonError::into_inner).random_range(0..best.len());
        best.get(lot).map(|(_, known)| known.id.clone())
    }
}
