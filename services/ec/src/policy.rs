//! What an object is worth keeping, for every place that has to choose.
//!
//! GreedyDual-Size-Frequency (Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching
//! Policy", HPL-98-69R1, 1998): an object's worth is a clock plus, for each use, what getting it again would cost by
//! the byte; the least worth goes first, and the clock then moves up to it, so that what was used often long ago does
//! not stay for ever. Two things are different. A use counts until the clock has passed it, so worth is one number
//! and there is no count beside it; and the clock may be time of day, where processes share nothing but files.
//!
//! Encoding an item costs a part that every job has, and a part that grows with its rows: so a byte of a small object
//! is worth more. What was stored last is about to be asked for by whoever had it encoded: a place that is full spares
//! what is [`is_young`], whatever its worth, as long as there is anything else.

/// Rows that take as long to encode as a job takes besides, in bytes.
const JOB_BYTES: u64 = 256 << 10;
/// No object counts as smaller: a place for it costs too.
const LEAST_BYTES: u64 = 4 << 10;
/// Uses beyond these add nothing.
const MAX_USES: u64 = 8;
/// The part of a budget that was stored last and is spared, as a divisor.
const YOUNG_SHARE: u64 = 4;

/// How worth is counted in a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Policy {
    /// What a use of a large object adds to its worth, in steps of the clock.
    unit: u64,
}

/// The clock is the largest worth that was evicted.
pub(crate) const BY_EVICTIONS: Policy = Policy { unit: 1024 };

/// The clock is time in milliseconds: a use keeps a large object ten minutes ahead of one that was not used.
pub(crate) const BY_TIME: Policy = Policy { unit: 10 * 60 * 1000 };

impl Policy {
    /// Worth of an object of `bytes` that was just stored.
    pub(crate) fn stored(self, clock: u64, bytes: u64) -> u64 {
        clock.saturating_add(self.of_a_use(bytes))
    }

    /// Worth of an object that was just used and was worth `before`.
    pub(crate) fn used(self, clock: u64, before: u64, bytes: u64) -> u64 {
        let one = self.of_a_use(bytes);
        let ahead = before.saturating_sub(clock).saturating_add(one).min(one.saturating_mul(MAX_USES));
        clock.saturating_add(ahead)
    }

    /// What a use adds: the cost of encoding it again, by the byte.
    fn of_a_use(self, bytes: u64) -> u64 {
        self.unit + self.unit * JOB_BYTES / bytes.max(LEAST_BYTES)
    }
}

/// Whether an object is one of the newest. `bytes_since`: how much was stored after it.
pub(crate) fn is_young(budget: u64, bytes_since: u64) -> bool {
    bytes_since <= budget / YOUNG_SHARE
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_byte_of_a_small_object_is_worth_more_and_a_use_adds_worth() {
        let p = BY_EVICTIONS;
        assert!(p.stored(0, 64 << 10) > p.stored(0, MIB));
        assert_eq!(p.stored(0, 1), p.stored(0, 4 << 10), "no object counts as smaller than its place");
        let stored = p.stored(0, MIB);
        assert_eq!(p.used(0, stored, MIB), 2 * stored);
    }

    #[test]
    fn uses_of_long_ago_count_for_nothing_and_many_count_as_eight() {
        for p in [BY_EVICTIONS, BY_TIME] {
            let one = p.stored(0, MIB);
            let often = (0..100).fold(one, |worth, _| p.used(0, worth, MIB));
            assert_eq!(often, 8 * one);
            assert_eq!(p.used(9 * one, often, MIB), 10 * one, "the clock has passed it");
        }
    }
}
