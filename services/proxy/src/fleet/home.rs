//! Where a request lives whose items only PD workers can encode: it is chosen before its items are, so that they are
//! encoded where the answer is written and nothing crosses.
//!
//! The score is that of the PD worker's choice, in the same microseconds, with what is to be encoded there before this
//! request and for it: on such a worker steps and forwards take turns on the same cores. Between the choice and the first
//! job the store is asked, and meanwhile others choose: what a request will have encoded is reserved at once, or all that
//! arrive together would live at the same worker.

use super::catalog::{Catalog, Want};
use super::choice::{item_of, now};
use super::score::choose_home;
use super::worker::Worker;
use super::{Fleet, Shared};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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

/// Where a request lives, and what is reserved there. Dropping it ends what is left of that.
pub struct Home {
    worker: Arc<Worker>,
    /// Predicted cost of items that are neither given nor known to need no encoding, in microseconds.
    reserved: Mutex<Vec<(ContentKey, u64)>>,
}

impl Home {
    fn new(worker: Arc<Worker>, reserved: Vec<(ContentKey, u64)>) -> Self {
        let mut view = worker.view();
        reserved.iter().for_each(|(_, us)| view.reserve(*us));
        drop(view);
        Self { worker, reserved: Mutex::new(reserved) }
    }

    /// Which worker.
    pub fn id(&self) -> &WorkerId {
        &self.worker.id
    }

    /// This item was given to a worker, which counts it from now on.
    pub fn given(&self, key: &ContentKey) {
        let mut reserved = self.reserved();
        let Some(at) = reserved.iter().position(|(one, _)| one == key) else { return };
        let (_, us) = reserved.swap_remove(at);
        self.worker.view().release(us);
    }

    /// All that had to be given was.
    pub fn settle(&self) {
        let left = std::mem::take(&mut *self.reserved());
        let mut view = self.worker.view();
        left.iter().for_each(|(_, us)| view.release(*us));
    }

    fn reserved(&self) -> MutexGuard<'_, Vec<(ContentKey, u64)>> {
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        self.settle();
    }
}

impl fmt::Debug for Home {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Home").field(self.id()).finish()
    }
}

impl Fleet {
    /// The PD worker that should encode these items and answer the request; `None` if it has no items, or if encoder
    /// workers serve them.
    pub fn home(&self, pd: &Want, items: &[Homeless]) -> Option<Arc<Home>> {
        self.shared.home(&self.catalog(), pd, items).map(Arc::new)
    }
}

impl Shared {
    pub(super) fn home(&self, catalog: &Catalog, pd: &Want, items: &[Homeless]) -> Option<Home> {
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
        let open = able.iter().filter(|(known, worker)| {
            items.iter().all(|item| known.can_do(&item.want)) && !worker.view().is_full()
        });
        let open: Vec<_> = open.map(|(_, worker)| worker).collect();
        // Held until it is reserved: who chooses next sees it.
        let mut rng = self.rng.lock().unwrap_or_else(PoisonError::into_inner);
        let loads: Vec<_> = open.iter().map(|worker| worker.view().home_load(&sizes, now)).collect();
        let worker = open.get(choose_home(&loads, &mut *rng)?)?;
        let missing = worker.view().missing_us(&sizes);
        Some(Home::new(Arc::clone(worker), missing))
    }
}
