//! Memory of a device: what is kept until it is dropped, and a pool from which a stream's activations come.
//!
//! A pool belongs to one stream. Memory that is given back may be handed out again at once, since whatever is submitted later
//! runs later. So a step allocates nothing once the sizes of its activations have been seen.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::driver::result;
use parking_lot::Mutex;

use super::device::Device;
use super::error::InOp;
use crate::ops::{KernelError, Result};

/// The smallest piece of a pool, bytes. A power of two.
const SMALLEST: usize = 512;

/// Sizes of pieces between a power of two and the next.
const SIZES_OF_A_POWER: usize = 8;

/// Memory that is allocated once: weights, caches.
#[derive(Debug)]
pub(super) struct Fixed {
    address: u64,
    n_bytes: usize,
    device: Arc<Device>,
}

impl Fixed {
    /// So many bytes, undefined. None at all have address 0.
    pub(super) fn new(op: &'static str, device: &Arc<Device>, n_bytes: usize) -> Result<Self> {
        let mut fixed = Self { address: 0, n_bytes, device: Arc::clone(device) };
        if n_bytes > 0 {
            device.bind(op)?;
            // SAFETY: the bytes are freed when this is dropped, and written before they are read.
            fixed.address = unsafe { result::malloc_sync(n_bytes) }.op(op)?;
        }
        Ok(fixed)
    }

    /// Address on the device.
    pub(super) fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    pub(super) fn n_bytes(&self) -> usize {
        self.n_bytes
    }
}

impl Drop for Fixed {
    fn drop(&mut self) {
        if self.address != 0 && self.device.bind("free").is_ok() {
            // SAFETY: allocated by `new`, freed once; the driver waits for what still reads it.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Memory of a stream's activations.
#[derive(Debug)]
pub(super) struct Pool {
    device: Arc<Device>,
    /// Pieces that nobody has, by their size.
    free: Mutex<BTreeMap<usize, Vec<u64>>>,
    /// Bytes of all pieces.
    n_bytes: AtomicUsize,
}

/// A piece of a pool, which goes back when it is dropped.
#[derive(Debug)]
pub(super) struct Piece {
    address: u64,
    size: usize,
    pool: Arc<Pool>,
}

impl Pool {
    /// An empty one.
    pub(super) fn new(device: &Arc<Device>) -> Arc<Self> {
        let free = Mutex::new(BTreeMap::new());
        let n_bytes = AtomicUsize::new(0);
        Arc::new(Self { device: Arc::clone(device), free, n_bytes })
    }

    /// So many bytes, undefined. None at all have address 0.
    pub(super) fn take(self: &Arc<Self>, op: &'static str, n_bytes: usize) -> Result<Piece> {
        if let Some(kept) = self.take_kept(n_bytes) {
            return Ok(kept);
        }
        let size = piece_size(n_bytes);
        Ok(Piece { address: self.allocate(op, size)?, size, pool: Arc::clone(self) })
    }

    /// The same without a call of the driver: `None` if there is no piece that nobody has.
    pub(super) fn take_kept(self: &Arc<Self>, n_bytes: usize) -> Option<Piece> {
        let pool = Arc::clone(self);
        if n_bytes == 0 {
            return Some(Piece { address: 0, size: 0, pool });
        }
        let size = piece_size(n_bytes);
        let address = self.free.lock().get_mut(&size).and_then(Vec::pop)?;
        Some(Piece { address, size, pool })
    }

    /// Bytes of all its pieces.
    pub(super) fn n_bytes(&self) -> usize {
        self.n_bytes.load(Ordering::Relaxed)
    }

    /// Addresses and bytes of the pieces that nobody has.
    pub(super) fn kept(&self) -> Vec<(u64, usize)> {
        let free = self.free.lock();
        free.iter().flat_map(|(size, pieces)| pieces.iter().map(|piece| (*piece, *size))).collect()
    }

    /// A new piece. Where the device has no room, pieces of other sizes are freed first.
    fn allocate(&self, op: &'static str, size: usize) -> Result<u64> {
        self.device.bind(op)?;
        // SAFETY: the piece is freed when the pool is trimmed or dropped, and written before it is read.
        let allocate = || unsafe { result::malloc_sync(size) }.op(op);
        let address = match allocate() {
            Err(KernelError::OutOfMemory { .. }) => {
                self.trim();
                allocate()?
            }
            other => other?,
        };
        self.n_bytes.fetch_add(size, Ordering::Relaxed);
        Ok(address)
    }

    /// Frees the pieces that nobody has.
    fn trim(&self) {
        let kept = std::mem::take(&mut *self.free.lock());
        let n_bytes = kept.iter().map(|(size, pieces)| size * pieces.len()).sum();
        self.n_bytes.fetch_sub(n_bytes, Ordering::Relaxed);
        if self.device.bind("free").is_ok() {
            for address in kept.into_values().flatten() {
                // SAFETY: nobody has the piece; the driver waits for what still uses it.
                let _ = unsafe { result::free_sync(address) };
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.trim();
    }
}

impl Piece {
    /// Address on the device.
    pub(super) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        if self.address != 0 {
            self.pool.free.lock().entry(self.size).or_default().push(self.address);
        }
    }
}

/// The size of the piece for so many bytes: at most an eighth more.
fn piece_size(n_bytes: usize) -> usize {
    let power = n_bytes.max(SMALLEST).checked_next_power_of_two().unwrap_or(n_bytes);
    let step = (power / 2 / SIZES_OF_A_POWER).max(SMALLEST);
    n_bytes.max(SMALLEST).div_ceil(step).saturating_mul(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_is_at_most_an_eighth_larger_than_what_is_asked_for() {
        for n_bytes in (1..10_000).chain([1 << 20, (1 << 20) + 1, 3_000_000_000, usize::MAX]) {
            let size = piece_size(n_bytes);
            assert!(size >= n_bytes, "{n_bytes}");
            assert!(size - n_bytes < SMALLEST.max(n_bytes / 4), "{n_bytes}: {size}");
        }
        let sizes: std::collections::BTreeSet<usize> = (1..=1 << 20).map(piece_size).collect();
        assert!(sizes.len() < 100, "{} sizes up to a mebibyte", sizes.len());
    }
}
