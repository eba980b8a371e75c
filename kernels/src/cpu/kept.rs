//! Memory of tensors that are gone, which a thread keeps for the next ones.
//!
//! A layer makes the same few sizes again and again, and fresh memory of some megabytes costs a page fault for every four
//! kilobytes of it. The rule is the same for memory and for sizes alone, by which memory is foretold.

use std::collections::VecDeque;

/// Values of the smallest tensor that is worth keeping: 64 KiB.
pub(super) const WORTH_KEEPING: usize = 16 << 10;

/// Values that a thread keeps at most: 64 MiB.
pub(super) const KEPT_VALUES: usize = 16 << 20;

/// Bytes that a thread keeps at most.
pub const KEPT_BYTES: usize = KEPT_VALUES * size_of::<f32>();

/// Memory of one tensor, or its size alone.
pub trait Room {
    /// Values that there is room for.
    fn n_values(&self) -> usize;
}

impl Room for Vec<f32> {
    fn n_values(&self) -> usize {
        self.capacity()
    }
}

/// Rooms that are kept, oldest first.
#[derive(Debug)]
pub struct Kept<T>(VecDeque<T>);

impl<T: Room> Kept<T> {
    /// Nothing.
    pub const fn new() -> Self {
        Self(VecDeque::new())
    }

    /// The newest room that `n` values fit into and fill at least half of.
    pub fn take(&mut self, n: usize) -> Option<T> {
        let fits = |room: &T| (n..=n.saturating_mul(2)).contains(&room.n_values());
        let at = self.0.iter().rposition(fits)?;
        self.0.remove(at)
    }

    /// Keeps what a later tensor can use, and returns what is let go of: the oldest, or the room itself if it is not worth keeping.
    pub fn keep(&mut self, room: T) -> Vec<T> {
        if !(WORTH_KEEPING..=KEPT_VALUES).contains(&room.n_values()) {
            return vec![room];
        }
        self.0.push_back(room);
        let mut total = self.n_values();
        let mut gone = Vec::new();
        while total > KEPT_VALUES
            && let Some(oldest) = self.0.pop_front()
        {
            total -= oldest.n_values();
            gone.push(oldest);
        }
        gone
    }

    /// Values that there is room for in all.
    pub fn n_values(&self) -> usize {
        self.0.iter().map(Room::n_values).sum()
    }
}

impl<T: Room> Default for Kept<T> {
    fn default() -> Self {
        Self::new()
    }
}
