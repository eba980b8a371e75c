//! The cost of items that a request will have encoded at its placed worker, until they are given to it.

use triptych_core::ContentKey;

/// Items that are neither given nor known to need no encoding, and their predicted cost in microseconds.
#[derive(Clone, Debug, Default)]
pub struct Reservation(Vec<(ContentKey, u64)>);

impl Reservation {
    /// Of these items.
    pub fn new(items: Vec<(ContentKey, u64)>) -> Self {
        Self(items)
    }

    /// Cost of all that is left.
    pub fn left_us(&self) -> u64 {
        self.0.iter().fold(0, |sum, (_, us)| sum.saturating_add(*us))
    }

    /// Takes an item out that was given to a worker, which counts it from now on; its cost.
    pub fn given(&mut self, key: &ContentKey) -> u64 {
        let at = self.0.iter().position(|(one, _)| one == key);
        at.map_or(0, |at| self.0.swap_remove(at).1)
    }

    /// Takes everything out: all that had to be given was. The cost of what was left.
    pub fn settle(&mut self) -> u64 {
        let left = self.left_us();
        self.0.clear();
        left
    }
}
