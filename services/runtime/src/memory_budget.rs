//! Memory of this process beside its limit: room for something large before it is loaded, and pressure.
//!
//! The limit is the watchdog's, at which the process ends itself: the stated memory, or a part of the machine's or the
//! container's. What is counted is anonymous memory, as there.

use crate::watchdog::anonymous_bytes;
use std::fmt;
use std::sync::Arc;

/// Part of the limit that is left when memory is short, as a divisor: that of a memory plan's reserve.
const SHORT_SHARE: u64 = 16;

/// Source of the bytes that the process has; `None`: not known.
type TakenBytes = Arc<dyn Fn() -> Option<u64> + Send + Sync>;

/// Memory of the process and its limit. Clones share the source.
#[derive(Clone)]
pub struct MemoryBudget {
    limit: Option<u64>,
    taken: TakenBytes,
}

/// Room that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} MiB are needed beside {} MiB of memory in use, the limit is {} MiB", mib(*needed), mib(*taken), mib(*limit))]
pub struct MemoryShortage {
    /// Bytes that were asked for.
    pub needed: u64,
    /// Bytes in use.
    pub taken: u64,
    /// Bytes allowed.
    pub limit: u64,
}

fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

impl MemoryBudget {
    /// Memory of this process, with a limit in bytes; `None`: no limit.
    pub fn of_process(limit: Option<u64>) -> Self {
        Self::counted_by(limit, anonymous_bytes)
    }

    /// The same with another source of the bytes in use.
    pub fn counted_by(limit: Option<u64>, taken: impl Fn() -> Option<u64> + Send + Sync + 'static) -> Self {
        Self { limit, taken: Arc::new(taken) }
    }

    /// Bytes in use and allowed; `None` without a limit, or where the system does not tell.
    fn known(&self) -> Option<(u64, u64)> {
        Some(((self.taken)()?, self.limit?))
    }

    /// Room for so many bytes more.
    ///
    /// # Errors
    /// [`MemoryShortage`] if the process would pass its limit.
    pub fn check_room(&self, needed: u64) -> Result<(), MemoryShortage> {
        match self.known() {
            Some((taken, limit)) if taken.saturating_add(needed) > limit => {
                Err(MemoryShortage { needed, taken, limit })
            }
            _ => Ok(()),
        }
    }

    /// True if less than a sixteenth of the limit is left.
    pub fn is_short(&self) -> bool {
        self.known().is_some_and(|(taken, limit)| taken > limit - limit / SHORT_SHARE)
    }
}

impl fmt::Debug for MemoryBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryBudget").field("limit", &self.limit).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn budget(limit: Option<u64>, taken: Option<u64>) -> MemoryBudget {
        MemoryBudget::counted_by(limit, move || taken)
    }

    #[test]
    fn room_and_shortage_are_by_the_limit() {
        let budget = budget(Some(160 * MIB), Some(100 * MIB));
        assert_eq!(budget.check_room(60 * MIB), Ok(()));
        let short = budget.check_room(60 * MIB + 1).unwrap_err();
        assert_eq!((short.taken, short.limit), (100 * MIB, 160 * MIB));
        assert_eq!(
            short.to_string(),
            "61 MiB are needed beside 100 MiB of memory in use, the limit is 160 MiB"
        );
        assert!(budget.check_room(u64::MAX).is_err());
    }

    #[test]
    fn memory_is_short_when_a_sixteenth_of_the_limit_is_left() {
        for (taken, expect) in [(0, false), (150, false), (151, true), (200, true)] {
            assert_eq!(budget(Some(160 * MIB), Some(taken * MIB)).is_short(), expect, "{taken}");
        }
    }

    #[test]
    fn without_a_limit_or_a_count_there_is_always_room() {
        for budget in [budget(None, Some(u64::MAX)), budget(Some(0), None)] {
            assert!(budget.check_room(u64::MAX).is_ok() && !budget.is_short());
        }
        assert!(
            MemoryBudget::of_process(Some(1)).check_room(0).is_err(),
            "this process takes more than a byte"
        );
    }
}
