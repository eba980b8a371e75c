//! A bound on the log-probabilities of an answer that is collected before it is sent.
//!
//! A short request may ask for hundreds of megabytes: answers × tokens × alternatives. A stream holds none of them.

use triptych_core::{Failure, FailureClass};
use triptych_proto::v1;

/// Most log-probabilities of one response, alternatives included. About 200 bytes each.
const MAX_LOGPROBS: usize = 1 << 20;

/// The log-probabilities collected so far.
#[derive(Debug, Default)]
pub(super) struct CollectedLogprobs(usize);

impl CollectedLogprobs {
    /// Counts those of a delta.
    ///
    /// # Errors
    /// Too large: the limit is exceeded.
    pub(super) fn add(&mut self, delta: &v1::Delta) -> Result<(), Failure> {
        self.0 += delta.logprobs.iter().map(|token| 1 + token.top.len()).sum::<usize>();
        self.0 += delta.prompt_logprobs.iter().map(|token| token.tokens.len()).sum::<usize>();
        if self.0 <= MAX_LOGPROBS {
            return Ok(());
        }
        let message = format!(
            "the response has {} log-probabilities or more, the limit is {MAX_LOGPROBS}; a stream of chat or completions has none",
            self.0
        );
        Err(Failure::new(FailureClass::TooLarge, message).with_param("top_logprobs"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_holds_so_many_log_probabilities_and_no_more() {
        let token = v1::ChosenToken { chosen: None, top: vec![v1::TokenLogprob::default(); 15] };
        let delta = |n: usize| v1::Delta { logprobs: vec![token.clone(); n], ..Default::default() };
        let add = |n: usize| {
            let mut collected = CollectedLogprobs::default();
            let thousand = delta(1024);
            (0..n / 1024)
                .try_for_each(|_| collected.add(&thousand))
                .and_then(|()| collected.add(&delta(n % 1024)))
        };
        assert_eq!(add(MAX_LOGPROBS / 16), Ok(()));
        for n in [MAX_LOGPROBS / 16 + 1, 10 * MAX_LOGPROBS / 16] {
            let refused = add(n).unwrap_err();
            assert_eq!(
                (refused.class, refused.param.as_deref()),
                (FailureClass::TooLarge, Some("top_logprobs"))
            );
        }
    }
}
