//! Fencing tokens: the newest lease seen for each item, so that a job of an older lease is refused.
//!
//! Bounded to the latest items. A forgotten item costs a duplicate encode, and nothing else.

use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use triptych_core::{ContentKey, Failure};

/// Most items.
const N_KEPT: usize = 4096;

/// Newest fencing token of the latest items.
#[derive(Debug, Default)]
pub struct FenceTable(Mutex<FenceEntries>);

#[derive(Debug, Default)]
struct FenceEntries {
    newest: HashMap<ContentKey, u64>,
    /// The same keys in order of their first job.
    order: VecDeque<ContentKey>,
}

impl FenceTable {
    /// Accepts or refuses a job by its fencing token; a job without a lease (0) is always accepted.
    ///
    /// # Errors
    /// Unavailable with param `fence`, if a job of a newer lease was seen.
    pub fn check(&self, key: &ContentKey, fence: u64) -> Result<(), Failure> {
        if fence == 0 {
            return Ok(());
        }
        let mut entries = self.0.lock();
        match entries.newest.get_mut(key) {
            Some(newest) if fence < *newest => {
                let message = "the item is being encoded under a newer lease";
                return Err(Failure::unavailable(message).with_param("fence"));
            }
            Some(newest) => *newest = fence,
            None => {
                if entries.order.len() == N_KEPT
                    && let Some(oldest) = entries.order.pop_front()
                {
                    entries.newest.remove(&oldest);
                }
                entries.order.push_back(*key);
                entries.newest.insert(*key, fence);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_lease_is_refused_and_the_memory_is_bounded() {
        let (fences, key) = (FenceTable::default(), ContentKey::from_bytes([1; 32]));
        assert!(fences.check(&key, 7).is_ok() && fences.check(&key, 7).is_ok(), "a hedge has the same");
        let refused = fences.check(&key, 6).unwrap_err();
        assert_eq!((refused.class.is_retryable(), refused.param.as_deref()), (true, Some("fence")));
        assert!(fences.check(&key, 0).is_ok(), "without a lease");
        assert!(fences.check(&key, 8).is_ok() && fences.check(&key, 7).is_err());
        for n in 0..N_KEPT as u32 {
            let mut bytes = [2; 32];
            bytes[..4].copy_from_slice(&n.to_le_bytes());
            assert!(fences.check(&ContentKey::from_bytes(bytes), 1).is_ok());
        }
        let entries = fences.0.lock();
        assert_eq!((entries.newest.len(), entries.order.len()), (N_KEPT, N_KEPT));
        assert!(!entries.newest.contains_key(&key));
    }
}
