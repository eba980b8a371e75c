//! Faults that a request plants in a worker of the tests, and the limits of those workers.

use std::time::Duration;

/// The longest engine step or preprocessing of such a worker: far more than an honest one takes on a busy machine.
pub const STEP_TIMEOUT: Duration = Duration::from_secs(6);
/// Most memory that such a worker may allocate, in bytes.
pub const MEMORY_LIMIT: u64 = 512 << 20;

/// The way in which a worker fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A thread panics.
    Panic,
    /// The process aborts.
    Abort,
    /// A thread never comes back.
    Loop,
    /// Memory is taken without end.
    Memory,
}

impl Fault {
    /// Every way.
    pub const ALL: [Self; 4] = [Self::Panic, Self::Abort, Self::Loop, Self::Memory];
    /// Seeds from here on ask for one each.
    const FIRST_SEED: u64 = 0xfa17_0000;

    /// The seed of a request that asks for it.
    pub const fn seed(self) -> u64 {
        Self::FIRST_SEED + self as u64
    }

    /// The fault that a seed asks for.
    pub fn of_seed(seed: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|fault| fault.seed() == seed)
    }

    /// An item that asks for it: bytes after the end of an image are no part of what is decoded.
    pub fn item(self, mut item: Vec<u8>) -> Vec<u8> {
        item.extend(self.seed().to_le_bytes());
        item
    }

    /// The fault that an item asks for.
    pub fn of_item(item: &[u8]) -> Option<Self> {
        item.last_chunk().and_then(|last| Self::of_seed(u64::from_le_bytes(*last)))
    }
}
