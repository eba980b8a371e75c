//! Output of choices that another worker began, and the filter of output that the client has already.
//!
//! A choice of one sequence whose text streams resumes in the engine: its tokens are prefilled after the prompt.
//! Anything else (windows of speech, beams) is generated again from the start, which gives the same tokens, and
//! the part that the client has is dropped. Both rely on every draw being a function of seed, choice and token
//! index.

use std::collections::{HashMap, VecDeque};
use triptych_core::Failure;
use triptych_engine::Resumed;
use triptych_proto::v1;

/// Output of one choice that the client has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PriorOutput {
    /// Tokens, those of an echoed prompt included.
    pub tokens: Vec<u32>,
    /// Length of the text in bytes.
    pub text_len: usize,
    /// Number of segments.
    pub n_segments: usize,
    /// True if the choice had ended.
    pub is_ended: bool,
}

/// Prior outputs of a request, by choice.
pub type PriorOutputs = HashMap<u32, PriorOutput>;

/// Reads the prior outputs of a request.
///
/// # Errors
/// A choice past `n_choices`, one that is named twice, or one with more than `max_tokens` tokens.
pub fn read(
    wire: Vec<v1::ResumedChoice>,
    n_choices: u32,
    max_tokens: usize,
) -> Result<PriorOutputs, Failure> {
    let refuse = |message: String| Err(Failure::invalid(message).with_param("resume"));
    let mut choices = PriorOutputs::new();
    for one in wire {
        let choice = one.choice;
        if choice >= n_choices {
            return refuse(format!("choice {choice} is resumed, the request has {n_choices}"));
        }
        if one.token_ids.len() > max_tokens {
            let n = one.token_ids.len();
            return refuse(format!("choice {choice} is resumed after {n} tokens, it can have {max_tokens}"));
        }
        let prior = PriorOutput {
            tokens: one.token_ids,
            text_len: usize::try_from(one.text_len).unwrap_or(usize::MAX),
            n_segments: usize::try_from(one.segments).unwrap_or(usize::MAX),
            is_ended: one.ended,
        };
        if choices.insert(choice, prior).is_some() {
            return refuse(format!("choice {choice} is resumed twice"));
        }
    }
    Ok(choices)
}

impl PriorOutput {
    /// State for the engine to resume; `echo` is the prompt, if the choice starts with it.
    ///
    /// # Errors
    /// Tokens that do not start with the echoed prompt.
    pub fn resumed(&self, choice: u32, echo: Option<&[u32]>) -> Result<Resumed, Failure> {
        let is_echoed = echo.is_some() && !self.tokens.is_empty();
        let tokens = match echo.filter(|_| is_echoed) {
            None => self.tokens.clone(),
            Some(prompt) => self.tokens.strip_prefix(prompt).map(<[u32]>::to_vec).ok_or_else(|| {
                let message = format!("choice {choice} does not start with the prompt that it echoes");
                Failure::invalid(message).with_param("resume")
            })?,
        };
        Ok(Resumed { choice, tokens, text_len: self.text_len, is_echoed, is_ended: self.is_ended })
    }
}

/// Drops output that the client has already.
#[derive(Debug, Default)]
pub struct ReplayFilter(HashMap<u32, RemainingSkip>);

/// Output of one choice that is still to be dropped.
#[derive(Debug, Default)]
struct RemainingSkip {
    tokens: VecDeque<u32>,
    text_len: usize,
    n_segments: usize,
    /// True if nothing of the choice is sent.
    is_ended: bool,
}

impl ReplayFilter {
    /// Filter for choices that the engine resumes: drops only what follows an end.
    pub fn ended(choices: &PriorOutputs) -> Self {
        let remaining =
            |prior: &PriorOutput| RemainingSkip { is_ended: prior.is_ended, ..RemainingSkip::default() };
        Self(choices.iter().map(|(choice, prior)| (*choice, remaining(prior))).collect())
    }

    /// Filter for choices that are generated again from the start.
    pub fn replayed(choices: PriorOutputs) -> Self {
        let remaining = |prior: PriorOutput| RemainingSkip {
            tokens: prior.tokens.into(),
            text_len: prior.text_len,
            n_segments: prior.n_segments,
            is_ended: prior.is_ended,
        };
        Self(choices.into_iter().map(|(choice, prior)| (choice, remaining(prior))).collect())
    }

    /// Part of a delta that the client does not have; `None`: nothing.
    ///
    /// # Errors
    /// The output differs from the earlier one, so the two cannot be joined.
    pub fn pass(&mut self, mut delta: v1::Delta) -> Result<Option<v1::Delta>, Failure> {
        let Some(remaining) = self.0.get_mut(&delta.choice) else { return Ok(Some(delta)) };
        let n_tokens = remaining.tokens.len().min(delta.token_ids.len());
        if !remaining.tokens.drain(..n_tokens).eq(delta.token_ids.drain(..n_tokens)) {
            return Err(differs(delta.choice));
        }
        // Tokens of an echoed prompt have no log-probabilities, so both lists are aligned at their ends.
        let n_logprobs = delta.logprobs.len().saturating_sub(delta.token_ids.len());
        delta.logprobs.drain(..n_logprobs);
        let n_bytes = remaining.text_len.min(delta.text.len());
        if !delta.text.is_char_boundary(n_bytes) {
            return Err(differs(delta.choice));
        }
        remaining.text_len -= n_bytes;
        delta.text.drain(..n_bytes);
        let n_segments = remaining.n_segments.min(delta.segments.len());
        remaining.n_segments -= n_segments;
        delta.segments.drain(..n_segments);
        let is_end = delta.finish_reason != v1::FinishReason::Unspecified as i32;
        if is_end && !(remaining.tokens.is_empty() && remaining.text_len == 0 && remaining.n_segments == 0) {
            return Err(differs(delta.choice));
        }
        let has_text = !(delta.text.is_empty() && delta.token_ids.is_empty() && delta.segments.is_empty());
        let has_output = is_end || has_text || !delta.prompt_logprobs.is_empty();
        Ok(Some(delta).filter(|_| has_output && !remaining.is_ended))
    }
}

fn differs(choice: u32) -> Failure {
    let message = "the stream cannot be resumed: the output differs from the output before";
    Failure::unavailable(message).with_detail(format!("choice {choice}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delta(token_ids: &[u32], text: &str) -> v1::Delta {
        let logprobs = token_ids.iter().map(|_| v1::ChosenToken::default()).collect();
        v1::Delta { token_ids: token_ids.to_vec(), text: text.into(), logprobs, ..v1::Delta::default() }
    }

    fn prior(tokens: &[u32], text_len: usize) -> PriorOutput {
        PriorOutput { tokens: tokens.to_vec(), text_len, ..PriorOutput::default() }
    }

    #[test]
    fn what_the_caller_has_is_left_out_and_the_rest_goes_on() {
        let mut filter = ReplayFilter::replayed([(0, prior(&[1, 2, 3], 4))].into());
        assert_eq!(filter.pass(delta(&[1, 2], "abc")), Ok(None));
        let rest = filter.pass(delta(&[3, 4], "def")).unwrap().unwrap();
        assert_eq!((rest.token_ids.as_slice(), rest.text.as_str(), rest.logprobs.len()), (&[4][..], "ef", 1));
        assert_eq!(filter.pass(delta(&[5], "g")), Ok(Some(delta(&[5], "g"))));
        let other = v1::Delta { choice: 1, ..delta(&[9], "x") };
        assert_eq!(filter.pass(other.clone()), Ok(Some(other)));
    }

    #[test]
    fn segments_are_counted_and_an_end_alone_goes_out() {
        let prior = PriorOutput { n_segments: 1, ..prior(&[1], 1) };
        let mut filter = ReplayFilter::replayed([(0, prior)].into());
        let mut whole = delta(&[1], "a");
        whole.segments = vec![v1::Segment { text: "one".into(), ..Default::default() }; 2];
        whole.segments[1].text = "two".into();
        let rest = filter.pass(whole).unwrap().unwrap();
        assert_eq!((rest.segments.len(), rest.segments[0].text.as_str()), (1, "two"));
        let end = v1::Delta { finish_reason: v1::FinishReason::Stop.into(), ..v1::Delta::default() };
        assert_eq!(filter.pass(end.clone()), Ok(Some(end)));
    }

    #[test]
    fn what_had_ended_stays_ended() {
        let prior = PriorOutput { is_ended: true, ..prior(&[1], 1) };
        let end = v1::Delta { finish_reason: v1::FinishReason::Stop.into(), ..delta(&[1], "a") };
        assert_eq!(ReplayFilter::replayed([(0, prior.clone())].into()).pass(end.clone()), Ok(None));
        assert_eq!(ReplayFilter::ended(&[(0, prior)].into()).pass(end), Ok(None));
    }

    #[test]
    fn another_text_is_no_continuation() {
        let mut filter = ReplayFilter::replayed([(0, prior(&[1, 2], 2))].into());
        assert!(filter.pass(delta(&[1, 3], "ab")).is_err());
        let mut filter = ReplayFilter::replayed([(0, prior(&[1], 1))].into());
        assert!(filter.pass(delta(&[1], "é")).is_err());
        let mut filter = ReplayFilter::replayed([(0, prior(&[1, 2], 2))].into());
        let end = v1::Delta { finish_reason: v1::FinishReason::Stop.into(), ..delta(&[1], "a") };
        assert!(filter.pass(end).is_err(), "it ended earlier than before");
    }

    #[test]
    fn places_and_lengths_are_held_against_the_request() {
        let one = |choice, n| v1::ResumedChoice { choice, token_ids: vec![1; n], ..Default::default() };
        assert_eq!(read(vec![one(0, 3), one(1, 0)], 2, 3).unwrap().len(), 2);
        for (wire, text) in [
            (vec![one(2, 0)], "choice 2 is resumed, the request has 2"),
            (vec![one(0, 4)], "after 4 tokens, it can have 3"),
            (vec![one(1, 0), one(1, 0)], "choice 1 is resumed twice"),
        ] {
            let failure = read(wire, 2, 3).unwrap_err();
            assert!(
                failure.message.contains(text) && failure.param.as_deref() == Some("resume"),
                "{failure}"
            );
        }
    }

    #[test]
    fn an_echo_is_no_part_of_what_was_written() {
        let resumed = |tokens: &[u32], echo: Option<&[u32]>| prior(tokens, 9).resumed(0, echo);
        assert_eq!(resumed(&[1, 2, 3], Some(&[1, 2])).unwrap().tokens, [3]);
        assert!(resumed(&[1, 2], Some(&[1, 2])).unwrap().is_echoed);
        assert!(!resumed(&[], Some(&[1, 2])).unwrap().is_echoed);
        assert_eq!(resumed(&[1, 2, 3], None).unwrap().tokens, [1, 2, 3]);
        assert!(resumed(&[1, 3], Some(&[1, 2])).is_err());
    }
}
