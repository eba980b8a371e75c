//! The placement of a request whose items only PD workers can encode: one worker encodes them and answers, so that
//! nothing crosses the network. It is chosen before the items are encoded.
//!
//! The score is that of the PD worker's choice, in the same microseconds, with what is to be encoded there before this
//! request and for it: on such a worker steps and forwards take turns on the same cores. Between the choice and the first
//! job the store is asked, and meanwhile others choose: what a request will have encoded is reserved at once, or all that
//! arrive together would be placed at the same worker.

use super::Fleet;
use super::catalog::{Catalog, Want};
use super::choice::{Able, item_of, now, prefill_time};
use super::elastic::place_elastic;
use super::reservation::Reservation;
use super::roles::Roles;
use super::score::choose_placement;
use super::state::FleetState;
use super::worker::Worker;
use parking_lot::{Mutex, MutexGuard};
use std::fmt;
use std::sync::Arc;
use triptych_core::{ContentKey, WorkerId};
use triptych_runtime::discovery::Role;

/// An item that may have to be encoded.
pub struct UnplacedItem {
    /// Its output.
    pub key: ContentKey,
    /// The encoder.
    pub want: Want,
    /// The item's length; `None`: its output is in the store, or nowhere, and nobody encodes it.
    pub bytes: Option<u64>,
}

/// A request's placement, and the reservation there. Dropping it ends what is left of that.
pub struct Placement {
    worker: Arc<Worker>,
    reservation: Mutex<Reservation>,
}

impl Placement {
    fn new(worker: Arc<Worker>, reservation: Reservation) -> Self {
        worker.view().reserve(reservation.left_us());
        Self { worker, reservation: Mutex::new(reservation) }
    }

    /// Name of the worker.
    pub fn id(&self) -> &WorkerId {
        &self.worker.id
    }

    /// This item was given to a worker, which counts it from now on.
    pub fn given(&self, key: &ContentKey) {
        let us = self.reservation().given(key);
        self.worker.view().release(us);
    }

    /// All that had to be given was.
    pub fn settle(&self) {
        let us = self.reservation().settle();
        self.worker.view().release(us);
    }

    fn reservation(&self) -> MutexGuard<'_, Reservation> {
        self.reservation.lock()
    }
}

impl Drop for Placement {
    fn drop(&mut self) {
        self.settle();
    }
}

impl fmt::Debug for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Placement").field(self.id()).finish()
    }
}

impl Fleet {
    /// The PD worker that should encode these items and answer the request; `None` if there is nothing to encode, or if
    /// encoder workers serve them.
    pub fn place(&self, pd: &Want, items: &[UnplacedItem]) -> Option<Arc<Placement>> {
        self.shared.place(&self.catalog(), pd, items).map(Arc::new)
    }
}

impl FleetState {
    pub(super) fn place(&self, catalog: &Catalog, pd: &Want, items: &[UnplacedItem]) -> Option<Placement> {
        let serves = |item: &UnplacedItem| {
            catalog.workers.iter().any(|known| known.role == Role::Encoder && known.serves(&item.want))
        };
        if items.iter().all(|item| item.bytes.is_none()) || items.iter().any(serves) {
            return None;
        }
        self.divide(catalog);
        let (able, _) = self.able(catalog, pd, &[])?;
        let (now, prefill) = (now(), prefill_time(&able, pd));
        let sizes = items.iter().map(|item| {
            let size = item.bytes.and_then(|bytes| item_of(&item.want, bytes));
            (item.key, size)
        });
        let sizes: Vec<_> = sizes.collect();
        let open = able.iter().filter(|(known, worker)| {
            items.iter().all(|item| known.can_do(&item.want)) && !worker.view().is_full()
        });
        let open: Vec<_> = open.collect();
        // Held until it is reserved: who chooses next sees it.
        let mut rng = self.rng.lock();
        let placed = match self.roles {
            Roles::Auto => {
                let sites = open
                    .iter()
                    .map(|(known, worker)| worker.view().placement_site(&known.id, &sizes, prefill, now));
                let sites: Vec<_> = sites.collect();
                place_elastic(&sites, &mut *rng)
            }
            Roles::Fixed => {
                let load = |(_, worker): &&Able<'_>| worker.view().placement_load(&sizes, prefill, now);
                let loads: Vec<_> = open.iter().map(load).collect();
                choose_placement(&loads, &mut *rng)
            }
        };
        let (_, worker) = open.get(placed?)?;
        let missing = worker.view().missing_us(&sizes);
        Some(Placement::new(Arc::clone(worker), Reservation::new(missing)))
    }
}
