//! How many requests may be in the house at once. Whoever does not get in is told so at once, and when to try again.

use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use triptych_core::{Failure, FailureClass};

/// The bound on requests in flight. Taken before a body is read, so that it bounds memory too.
#[derive(Clone, Debug)]
pub struct Gate {
    places: Arc<Semaphore>,
    n_places: usize,
}

/// A place; given back when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct Permit(#[allow(dead_code, reason = "held, not read")] Arc<OwnedSemaphorePermit>);

impl Gate {
    /// A gate with this many places.
    pub fn new(n_places: usize) -> Self {
        let n_places = n_places.clamp(1, Semaphore::MAX_PERMITS);
        Self { places: Arc::new(Semaphore::new(n_places)), n_places }
    }

    /// Takes a place.
    ///
    /// # Errors
    /// Overloaded, with the number of places.
    pub fn enter(&self) -> Result<Permit, Failure> {
        let permit = Arc::clone(&self.places).try_acquire_owned().map_err(|_| {
            Failure::new(
                FailureClass::Overloaded,
                format!("the server works on {} requests already, its limit; try again", self.n_places),
            )
        })?;
        Ok(Permit(Arc::new(permit)))
    }

    /// Requests inside.
    pub fn n_inside(&self) -> usize {
        self.n_places - self.places.available_permits()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_free_again_when_its_permit_is_dropped() {
        let gate = Gate::new(1);
        let permit = gate.enter().unwrap();
        let failure = gate.enter().unwrap_err();
        assert_eq!(failure.class, FailureClass::Overloaded);
        assert!(failure.message.contains("1 requests"), "{failure}");
        drop(permit);
        assert!(gate.enter().is_ok());
    }
}
