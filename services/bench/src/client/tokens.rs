//! Arrival times of tokens, from the messages of a stream.
//!
//! A piece says how many tokens it has, or a count up to it, or nothing. Where pieces say nothing, the total at the
//! end says how many tokens there were, and they are spread over the pieces with text in proportion: the first token
//! is in the first piece, the last in the last. An answer of special tokens alone has no text, and is no shorter for that: its
//! tokens are spread over the pieces without.

use std::time::Duration;

/// A piece of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TokenMessage {
    /// Arrival time.
    pub(super) at: Duration,
    /// Its tokens, if it reports them.
    pub(super) n_tokens: Option<u32>,
    /// True if it has text.
    pub(super) has_text: bool,
}

/// Most tokens of an answer with times.
const MAX_TOKENS: u32 = 1 << 20;

/// The time of each token.
pub(super) fn times(pieces: &[TokenMessage], total: Option<u32>) -> Vec<Duration> {
    let exact: Option<u64> =
        pieces.iter().filter(|p| p.has_text || p.n_tokens.is_some()).map(|p| p.n_tokens.map(u64::from)).sum();
    // Pieces that claim more than the whole are not believed.
    let plausible = exact.filter(|n| *n > 0 && *n <= u64::from(total.unwrap_or(MAX_TOKENS)));
    if plausible.is_some() {
        let times = pieces.iter().flat_map(|p| (0..p.n_tokens.unwrap_or(0)).map(|_| p.at));
        return times.collect();
    }
    let is_silent = total.is_some() && !pieces.iter().any(|p| p.has_text);
    let texts: Vec<Duration> = pieces.iter().filter(|p| p.has_text || is_silent).map(|p| p.at).collect();
    let m = texts.len() as u64;
    let n = u64::from(total.unwrap_or(m as u32).min(MAX_TOKENS));
    if m == 0 {
        return Vec::new();
    }
    // After the i-th of m pieces, ⌈i·n/m⌉ tokens were there.
    let up_to = |i: u64| (i * n).div_ceil(m);
    let times = texts.iter().zip(0u64..).flat_map(|(at, i)| (up_to(i)..up_to(i + 1)).map(|_| *at));
    times.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn piece(at: u64, n_tokens: Option<u32>, has_text: bool) -> TokenMessage {
        TokenMessage { at: Duration::from_millis(at), n_tokens, has_text }
    }

    fn millis(pieces: &[TokenMessage], total: Option<u32>) -> Vec<u128> {
        times(pieces, total).iter().map(Duration::as_millis).collect()
    }

    #[test]
    fn tokens_arrive_with_their_pieces() {
        let texts = [piece(1, None, true), piece(2, None, true), piece(3, None, true)];
        assert_eq!(millis(&texts, None), [1, 2, 3]);
        assert_eq!(millis(&texts, Some(3)), [1, 2, 3]);
        assert_eq!(millis(&texts, Some(6)), [1, 1, 2, 2, 3, 3]);
        assert_eq!(millis(&texts, Some(4)), [1, 1, 2, 3]);
        assert_eq!(millis(&texts, Some(2)), [1, 2], "three pieces of two tokens: a piece was a part of one");
        let exact = [piece(1, Some(1), true), piece(2, Some(3), false), piece(4, Some(0), true)];
        assert_eq!(millis(&exact, Some(4)), [1, 2, 2, 2]);
        let empty = [piece(1, None, false), piece(2, None, true)];
        assert_eq!(millis(&empty, Some(2)), [2, 2], "a piece without text is no token");
        let silent = [piece(1, None, false), piece(5, None, false)];
        assert_eq!(millis(&silent, Some(4)), [1, 1, 5, 5], "special tokens have no text");
        assert_eq!(millis(&silent, None), [] as [u128; 0]);
        assert_eq!(millis(&[], Some(9)), [] as [u128; 0]);
        let boastful = [piece(1, Some(4_000_000_000), true), piece(2, Some(1), true)];
        assert_eq!(millis(&boastful, Some(2)), [1, 2]);
    }

    proptest! {
        #[test]
        fn there_are_as_many_times_as_tokens(m in 1u64..50, n in 1u32..500) {
            let texts: Vec<_> = (0..m).map(|i| piece(i, None, true)).collect();
            let found = millis(&texts, Some(n));
            prop_assert_eq!(found.len() as u32, n);
            prop_assert_eq!(found[0], 0);
            prop_assert!(found.is_sorted());
        }
    }
}
