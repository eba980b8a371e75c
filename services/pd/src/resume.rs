//! Answers that another worker began: what their caller has of them, and what of ours it has already.
//!
//! An answer of one sequence whose text streams goes on in the engine: its tokens are read after the prompt. Anything
//! else (windows of speech, beams) is written again from its start, which gives the same tokens, and what the caller
//! has is left out. Both depend on every draw being a function of seed, answer and place.

use std::collections::{HashMap, VecDeque};
use triptych_core::Failure;
use triptych_engine::Resumed;
use triptych_proto::v1;

/// An answer as far as its caller has it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Begun {
    /// Its tokens, those of an echoed prompt included.
    pub tokens: Vec<u32>,
    /// Bytes of its text.
    pub text_len: usize,
    /// Its segments.
    pub n_segments: usize,
    /// It had ended.
    pub is_ended: bool,
}

/// The answers of a request that were begun, by their place.
pub type BegunAnswers = HashMap<u32, Begun>;

/// Reads what a request says of its answers.
///
/// # Errors
/// For a place past `n_choices`, one that is named twice, or more than `max_tokens` tokens.
pub fn read(
    wire: Vec<v1::ResumedChoice>,
    n_choices: u32,
    max_tokens: usize,
) -> Result<BegunAnswers, Failure> {
    let refuse = |message: String| Err(Failure::invalid(message).with_param("resume"));
    let mut answers = BegunAnswers::new();
    for one in wire {
        let choice = one.choice;
        if choice >= n_choices {
            return refuse(format!("answer {choice} is resumed, the request has {n_choices}"));
        }
        if one.token_ids.len() > max_tokens {
            let n = one.token_ids.len();
            return refuse(format!("answer {choice} is resumed after {n} tokens, it can have {max_tokens}"));
        }
        let begun = Begun {
            tokens: one.token_ids,
            text_len: usize::try_from(one.text_len).unwrap_or(usize::MAX),
            n_segments: usize::try_from(one.segments).unwrap_or(usize::MAX),
            is_ended: one.ended,
        };
        if answers.insert(choice, begun).is_some() {
            return refuse(format!("answer {choice} is resumed twice"));
        }
    }
    Ok(answers)
}

impl Begun {
    /// What the engine goes on with; `echo` is the prompt, if the answer starts with it.
    ///
    /// # Errors
    /// For tokens that do not start with the prompt that they must start with.
    pub fn resumed(&self, choice: u32, echo: Option<&[u32]>) -> Result<Resumed, Failure> {
        let is_echoed = echo.is_some() && !self.tokens.is_empty();
        let tokens = match echo.filter(|_| is_echoed) {
            None => self.tokens.clone(),
            Some(prompt) => self.tokens.strip_prefix(prompt).map(<[u32]>::to_vec).ok_or_else(|| {
                let message = format!("answer {choice} does not start with the prompt that it echoes");
                Failure::invalid(message).with_param("resume")
            })?,
        };
        Ok(Resumed { choice, tokens, text_len: self.text_len, is_echoed, is_ended: self.is_ended })
    }
}

/// Leaves out what the caller has.
#[derive(Debug, Default)]
pub struct Skip(HashMap<u32, Left>);

/// What is still to be left out of one answer.
#[derive(Debug, Default)]
struct Left {
    tokens: VecDeque<u32>,
    text_len: usize,
    n_segments: usize,
    /// Nothing of it goes out.
    is_ended: bool,
}

impl Skip {
    /// Of answers that the engine goes on with: only what had ended is left out.
    pub fn ended(answers: &BegunAnswers) -> Self {
        let left = |begun: &Begun| Left { is_ended: begun.is_ended, ..Left::default() };
        Self(answers.iter().map(|(choice, begun)| (*choice, left(begun))).collect())
    }

    /// Of answers that are written again from their start.
    pub fn said(answers: BegunAnswers) -> Self {
        let left = |begun: Begun| Left {
            tokens: begun.tokens.into(),
            text_len: begun.text_len,
            n_segments: begun.n_segments,
            is_ended: begun.is_ended,
        };
        Self(answers.into_iter().map(|(choice, begun)| (choice, left(begun))).collect())
    }

    /// What of a piece its caller does not have; `None`: nothing.
    ///
    /// # Errors
    /// If what is written is not what was written before: the two cannot be joined.
    pub fn pass(&mut self, mut delta: v1::Delta) -> Result<Option<v1::Delta>, Failure> {
        let Some(left) = self.0.get_mut(&delta.choice) else { return Ok(Some(delta)) };
        let n_tokens = left.tokens.len().min(delta.token_ids.len());
        if !left.tokens.drain(..n_tokens).eq(delta.token_ids.drain(..n_tokens)) {
            return Err(differs(delta.choice));
        }
        // Tokens of an echoed prompt have no log-probabilities: the last ones of both belong together.
        let n_logprobs = delta.logprobs.len().saturating_sub(delta.token_ids.len());
        delta.logprobs.drain(..n_logprobs);
        let n_bytes = left.text_len.min(delta.text.len());
        if !delta.text.is_char_boundary(n_bytes) {
            return Err(differs(delta.choice));
        }
        left.text_len -= n_bytes;
        delta.text.drain(..n_bytes);
        let n_segments = left.n_segments.min(delta.segments.len());
        left.n_segments -= n_segments;
        delta.segments.drain(..n_segments);
        let is_end = delta.finish_reason != v1::FinishReason::Unspecified as i32;
        if is_end && !(left.tokens.is_empty() && left.text_len == 0 && left.n_segments == 0) {
            return Err(differs(delta.choice));
        }
        let says =
            is_end || !(delta.text.is_empty() && delta.token_ids.is_empty() && delta.segments.is_empty());
        Ok(Some(delta).filter(|_| says && !left.is_ended))
    }
}

fn differs(choice: u32) -> Failure {
    let message = "the answer cannot be resumed: what is written now differs from what was written before";
    Failure::unavailable(message).with_detail(format!("answer {choice}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delta(token_ids: &[u32], text: &str) -> v1::Delta {
        let logprobs = token_ids.iter().map(|_| v1::ChosenToken::default()).collect();
        v1::Delta { token_ids: token_ids.to_vec(), text: text.into(), logprobs, ..v1::Delta::default() }
    }

    fn said(tokens: &[u32], text_len: usize) -> Begun {
        Begun { tokens: tokens.to_vec(), text_len, ..Begun::default() }
    }

    #[test]
    fn what_the_caller_has_is_left_out_and_the_rest_goes_on() {
        let mut skip = Skip::said([(0, said(&[1, 2, 3], 4))].into());
        assert_eq!(skip.pass(delta(&[1, 2], "abc")), Ok(None));
        let rest = skip.pass(delta(&[3, 4], "def")).unwrap().unwrap();
        assert_eq!((rest.token_ids.as_slice(), rest.text.as_str(), rest.logprobs.len()), (&[4][..], "ef", 1));
        assert_eq!(skip.pass(delta(&[5], "g")), Ok(Some(delta(&[5], "g"))));
        let other = v1::Delta { choice: 1, ..delta(&[9], "x") };
        assert_eq!(skip.pass(other.clone()), Ok(Some(other)));
    }

    #[test]
    fn segments_are_counted_and_an_end_alone_goes_out() {
        let begun = Begun { n_segments: 1, ..said(&[1], 1) };
        let mut skip = Skip::said([(0, begun)].into());
        let mut whole = delta(&[1], "a");
        whole.segments = vec![v1::Segment { text: "one".into(), ..Default::default() }; 2];
        whole.segments[1].text = "two".into();
        let rest = skip.pass(whole).unwrap().unwrap();
        assert_eq!((rest.segments.len(), rest.segments[0].text.as_str()), (1, "two"));
        let end = v1::Delta { finish_reason: v1::FinishReason::Stop.into(), ..v1::Delta::default() };
        assert_eq!(skip.pass(end.clone()), Ok(Some(end)));
    }

    #[test]
    fn what_had_ended_stays_ended() {
        let begun = Begun { is_ended: true, ..said(&[1], 1) };
        let end = v1::Delta { finish_reason: v1::FinishReason::Stop.into(), ..delta(&[1], "a") };
        assert_eq!(Skip::said([(0, begun.clone())].into()).pass(end.clone()), Ok(None));
        assert_eq!(Skip::ended(&[(0, begun)].into()).pass(end), Ok(None));
    }

    #[test]
    fn another_text_is_no_continuation() {
        let mut skip = Skip::said([(0, said(&[1, 2], 2))].into());
        assert!(skip.pass(delta(&[1, 3], "ab")).is_err());
        let mut skip = Skip::said([(0, said(&[1], 1))].into());
        assert!(skip.pass(delta(&[1], "é")).is_err());
        let mut skip = Skip::said([(0, said(&[1, 2], 2))].into());
        let end = v1::Delta { finish_reason: v1::FinishReason::Stop.into(), ..delta(&[1], "a") };
        assert!(skip.pass(end).is_err(), "it ended earlier than before");
    }

    #[test]
    fn places_and_lengths_are_held_against_the_request() {
        let one = |choice, n| v1::ResumedChoice { choice, token_ids: vec![1; n], ..Default::default() };
        assert_eq!(read(vec![one(0, 3), one(1, 0)], 2, 3).unwrap().len(), 2);
        for (wire, text) in [
            (vec![one(2, 0)], "answer 2 is resumed, the request has 2"),
            (vec![one(0, 4)], "after 4 tokens, it can have 3"),
            (vec![one(1, 0), one(1, 0)], "answer 1 is resumed twice"),
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
        let resumed = |tokens: &[u32], echo: Option<&[u32]>| said(tokens, 9).resumed(0, echo);
        assert_eq!(resumed(&[1, 2, 3], Some(&[1, 2])).unwrap().tokens, [3]);
        assert!(resumed(&[1, 2], Some(&[1, 2])).unwrap().is_echoed);
        assert!(!resumed(&[], Some(&[1, 2])).unwrap().is_echoed);
        assert_eq!(resumed(&[1, 2, 3], None).unwrap().tokens, [1, 2, 3]);
        assert!(resumed(&[1, 3], Some(&[1, 2])).is_err());
    }
}
