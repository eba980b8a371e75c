//! The rows of a request's items on this worker: room is waited for, then they are held while a sequence of the request
//! reads them, and given back.
//!
//! The engine tells when a sequence has read its rows and when it needs them again ([`Output::Rows`]). A request holds all its
//! rows or none, so that two requests never wait for each other's.

use crate::driver::Driver;
use crate::loads::{EcLoads, ItemHolds, NeededItems};
use futures::future::BoxFuture;
use std::collections::BTreeSet;
use std::sync::Arc;
use triptych_core::Failure;
use triptych_engine::{Output, RowUse, SequenceId};

/// Time for which a request holds its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retention {
    /// While a sequence reads them.
    WhileRead,
    /// To its end: windows of speech are decoded again, and aligned, after they were read.
    ToTheEnd,
}

/// Rows of a request.
pub struct RequestRows {
    loads: EcLoads,
    driver: Driver,
    needed: Arc<NeededItems>,
    retention: Retention,
    /// Sequences that have not read their rows.
    readers: BTreeSet<SequenceId>,
    state: HoldState,
}

/// Progress of a request's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowProgress {
    /// There is room for them.
    Room,
    /// All are loaded.
    Loaded,
}

enum HoldState {
    /// Others hold too much.
    Waiting(BoxFuture<'static, ItemHolds>),
    Held(ItemHolds),
    Released,
}

impl RequestRows {
    /// Asks for the items of sequences that `driver` has already.
    ///
    /// # Errors
    /// The items are larger than everything that this worker may hold.
    pub fn start(
        loads: &EcLoads,
        driver: &Driver,
        needed: NeededItems,
        retention: Retention,
    ) -> Result<Self, Failure> {
        let mut rows = Self {
            loads: loads.clone(),
            driver: driver.clone(),
            needed: Arc::new(needed),
            retention,
            readers: BTreeSet::new(),
            state: HoldState::Released,
        };
        if !rows.needed.items.is_empty() {
            rows.ask()?;
        }
        Ok(rows)
    }

    /// Names sequences that are to read the rows.
    pub fn read_by(&mut self, sequences: impl IntoIterator<Item = SequenceId>) {
        self.readers.extend(sequences);
    }

    fn ask(&mut self) -> Result<(), Failure> {
        self.state = match self.loads.try_start(&self.needed, &self.driver)? {
            Some(holds) => HoldState::Held(holds),
            None => {
                let (loads, needed, driver) =
                    (self.loads.clone(), Arc::clone(&self.needed), self.driver.clone());
                HoldState::Waiting(Box::pin(async move { loads.start_when_room(&needed, &driver).await }))
            }
        };
        Ok(())
    }

    /// True while it waits for room.
    pub fn is_waiting(&self) -> bool {
        matches!(self.state, HoldState::Waiting(_))
    }

    /// The next state: room, then all items loaded. Never, if there is no other, or an item is not loaded. Cancel-safe.
    pub async fn advance(&mut self) -> RowProgress {
        match &mut self.state {
            HoldState::Waiting(waiting) => {
                let holds = waiting.await;
                self.state = HoldState::Held(holds);
                RowProgress::Room
            }
            HoldState::Held(holds) => {
                holds.all_ready().await;
                RowProgress::Loaded
            }
            HoldState::Released => std::future::pending().await,
        }
    }

    /// Follows the use of the rows by an output of the engine.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn observe(&mut self, output: &Output) -> Result<(), Failure> {
        match output {
            Output::Rows(id, RowUse::Needed) => {
                self.readers.insert(*id);
                match self.state {
                    HoldState::Released => self.ask()?,
                    HoldState::Held(_) => self.loads.deliver(&self.needed.items, &self.driver),
                    HoldState::Waiting(_) => {}
                }
            }
            Output::Rows(id, RowUse::Read) => drop(self.readers.remove(id)),
            last if last.is_last() => drop(self.readers.remove(&last.id())),
            _ => return Ok(()),
        }
        if self.readers.is_empty() && self.retention == Retention::WhileRead {
            self.state = HoldState::Released;
        }
        Ok(())
    }
}
