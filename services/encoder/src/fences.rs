//! The newest lease that was seen for each item, so that a job which was asked for under an older one is refused.
//!
//! Bounded: of many items only the latest are remembered. What is forgotten costs an encode that somebody else makes
//! too, and nothing else.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};
use triptych_core::{ContentKey, Failure};

/// Items that are remembered.
const N_KEPT: usize = 4096;

/// The memory.
#[derive(Debug, Default)]
pub struct Fences(Mutex<Seen>);

#[derive(Debug, Default)]
struct Seen {
    newest: HashMap<ContentKey, u64>,
    /// The same keys, in the order in which they were first seen.
    order: VecDeque<ContentKey>,
}

impl Fences {
    /// Lets a job pass, or refuses it; a job without a lease (0) always passes.
    ///
    /// # Errors
    /// Unavailable that names `fence`, if a job with a newer lease was seen.
    pub fn check(&self, key: &ContentKey, fence: u64) -> Result<(), Failure> {
        if fence == 0 {
            return Ok(());
        }
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match seen.newest.get_mut(key) {
            Some(newest) if fence < *newest => {
                let message = "the item is being encoded under a newer lease";
                return Err(Failure::unavailable(message).with_param("fence"));
            }
            Some(newest) => *newest = fence,
            None => {
                if seen.order.len() == N_KEPT
                    && let Some(oldest) = seen.order.pop_front()
                {
                    seen.newest.remove(&oldest);
                }
                seen.order.push_back(*key);
                seen.newest.insert(*key, fence);
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
        let (fences, key) = (Fences::default(), ContentKey::from_bytes([1; 32]));
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
        let seen = fences.0.lock().unwrap();
        assert_eq!((seen.newest.len(), seen.order.len()), (N_KEPT, N_KEPT));
        assert!(!seen.newest.contains_key(&key));
    }
}
