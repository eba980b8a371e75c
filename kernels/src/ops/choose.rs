//! Choosing tokens: what is asked of rows of logits, and what comes back.
//!
//! A row of logits is changed token by token, then masked, then chosen from. Rows that a caller must see whole (beams,
//! grammars) are asked for as such, and no others leave a device.

use std::sync::Arc;

use thiserror::Error;

/// Bits of a uniform random number.
const DRAW_BITS: u32 = 53;

/// Sampling settings of one choice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divisor of logits; 0: the most probable token is chosen.
    pub temperature: f32,
    /// Number of most probable tokens that stay, equals of the last included; `None`: all.
    pub top_k: Option<u32>,
    /// Share of the probability that stays, most probable first, up to 1, which is all.
    pub top_p: f32,
    /// Least probability that stays, relative to the most probable token; 0: any.
    pub min_p: f32,
    /// A uniform random number below 2⁵³.
    pub draw: u64,
}

impl Sampling {
    /// The most probable token.
    pub const GREEDY: Self = Self { temperature: 0.0, top_k: None, top_p: 1.0, min_p: 0.0, draw: 0 };

    /// True if the most probable token is chosen, whatever the random number.
    pub fn is_greedy(&self) -> bool {
        self.temperature <= 0.0 || self.top_k == Some(1)
    }

    /// The random number as one in `[0, 1)`.
    pub fn share(&self) -> f64 {
        self.draw as f64 / (1_u64 << DRAW_BITS) as f64
    }
}

/// A change of one token's logit: `logit + bias`, divided by `repetition` if positive and multiplied otherwise, less
/// `subtract`. A bias of minus infinity rules the token out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Edit {
    /// The token; one past the vocabulary is ignored.
    pub token: u32,
    /// Term that is added first; 0: none.
    pub bias: f32,
    /// Repetition penalty, above 0; 1: none.
    pub repetition: f32,
    /// Term that is subtracted last; 0: none.
    pub subtract: f32,
}

impl Edit {
    /// A term added to a logit.
    pub fn bias(token: u32, bias: f32) -> Self {
        Self { token, bias, repetition: 1.0, subtract: 0.0 }
    }

    /// A repetition penalty, and a term that is subtracted after it.
    pub fn penalty(token: u32, repetition: f32, subtract: f32) -> Self {
        Self { token, bias: 0.0, repetition, subtract }
    }

    /// A token ruled out.
    pub fn forbid(token: u32) -> Self {
        Self::bias(token, f32::NEG_INFINITY)
    }

    /// True if it rules its token out.
    pub fn forbids(&self) -> bool {
        self.bias == f32::NEG_INFINITY
    }

    /// Changes `logits: [vocab]`.
    pub fn apply(&self, logits: &mut [f32]) {
        let Some(logit) = logits.get_mut(self.token as usize) else { return };
        if self.forbids() {
            *logit = f32::NEG_INFINITY;
            return;
        }
        if self.bias != 0.0 {
            *logit += self.bias;
        }
        let repeated = if *logit < 0.0 { *logit * self.repetition } else { *logit / self.repetition };
        *logit = repeated - self.subtract;
    }
}

/// One choice of a batch.
#[derive(Clone, Debug, PartialEq)]
pub struct ChooseRow {
    /// Row of logits. Several choices may be of one row; none sees the changes of another.
    pub row: u32,
    /// Sampling settings.
    pub sampling: Sampling,
    /// Changes of logits, in their order.
    pub edits: Vec<Edit>,
    /// A bit for each token, `[vocab / 32]` rounded up, the lowest first: 1 for those that stay. `None`: all.
    pub mask: Option<Arc<[u32]>>,
    /// Number of most probable tokens to report; `None`: no log-probabilities at all.
    pub n_top: Option<u32>,
}

impl ChooseRow {
    /// A greedy choice from logits as they are.
    pub fn greedy(row: u32) -> Self {
        Self { row, sampling: Sampling::GREEDY, edits: Vec::new(), mask: None, n_top: None }
    }

    /// True if it changes logits.
    pub fn is_changed(&self) -> bool {
        !self.edits.is_empty() || self.mask.is_some()
    }
}

/// A mask that leaves the tokens of a list; see [`ChooseRow::mask`].
pub fn mask_of(allowed: &[u32], vocab: usize) -> Arc<[u32]> {
    let mut words = vec![0_u32; vocab.div_ceil(u32::BITS as usize)];
    for token in allowed.iter().filter(|token| (**token as usize) < vocab) {
        if let Some(word) = words.get_mut((token / u32::BITS) as usize) {
            *word |= 1 << (token % u32::BITS);
        }
    }
    words.into()
}

/// Everything that is asked of the logits of a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChooseBatch {
    /// Choices.
    pub choices: Vec<ChooseRow>,
    /// Rows of logits to hand over whole, ascending, none twice.
    pub whole: Vec<u32>,
}

impl ChooseBatch {
    /// Whole rows only: `n_rows` of them.
    pub fn whole(n_rows: usize) -> Self {
        Self { choices: Vec::new(), whole: (0..n_rows as u32).collect() }
    }

    /// A greedy choice of each of `n_rows` rows.
    pub fn greedy(n_rows: usize) -> Self {
        Self { choices: (0..n_rows as u32).map(ChooseRow::greedy).collect(), whole: Vec::new() }
    }
}

/// A chosen token.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The token.
    pub token: u32,
    /// Log-probabilities of logits after their changes, before temperature and cuts; `None`: not asked for.
    pub logprobs: Option<TokenLogprobs>,
}

/// Natural logarithms of token probabilities.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Log-probability of the chosen token.
    pub chosen: f32,
    /// Most probable tokens that are not ruled out, best first.
    pub top: Vec<(u32, f32)>,
}

/// Logits that allow no choice. Only their sequence fails.
#[derive(Clone, Copy, Debug, Error, PartialEq)]
pub enum SampleError {
    /// NaN or positive infinity.
    #[error("the logit of token {token} is {value}")]
    NotFinite {
        /// Token id.
        token: usize,
        /// Its logit.
        value: f32,
    },
    /// Every token is ruled out.
    #[error("none of {vocab} tokens is allowed")]
    NothingAllowed {
        /// Size of the vocabulary.
        vocab: usize,
    },
}

/// Result of a batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Choices {
    /// One for each choice of the batch, in its order.
    pub choices: Vec<Result<Choice, SampleError>>,
    /// The rows that were asked for whole.
    pub rows: WholeRows,
}

/// Rows of logits in host memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WholeRows {
    values: Vec<f32>,
    vocab: usize,
    /// Rows that were asked for, ascending.
    asked: Vec<u32>,
    /// True if `values` has all rows of the step, asked for or not.
    has_all: bool,
}

impl WholeRows {
    /// Rows `asked` among all rows of a step, `values: [n_rows, vocab]`.
    pub fn among_all(values: Vec<f32>, vocab: usize, asked: &[u32]) -> Self {
        Self { values, vocab, asked: asked.to_vec(), has_all: true }
    }

    /// Rows `asked` alone, `values: [asked.len(), vocab]`.
    pub fn alone(values: Vec<f32>, vocab: usize, asked: &[u32]) -> Self {
        Self { values, vocab, asked: asked.to_vec(), has_all: false }
    }

    /// Rows `first .. first + n`, `[n, vocab]`; `None` if one of them was not asked for.
    pub fn get_mut(&mut self, first: usize, n: usize) -> Option<&mut [f32]> {
        let Some(last) = n.checked_sub(1) else { return Some(&mut []) };
        let place = self.asked.binary_search(&u32::try_from(first).ok()?).ok()?;
        if *self.asked.get(place + last)? as usize != first + last {
            return None;
        }
        let start = if self.has_all { first } else { place };
        self.values.get_mut(start * self.vocab..(start + n) * self.vocab)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_were_not_asked_for_are_not_given() {
        let all = (0..8).map(|i| i as f32).collect::<Vec<_>>();
        let among = WholeRows::among_all(all.clone(), 2, &[0, 2, 3]);
        let alone = WholeRows::alone([&all[..2], &all[4..]].concat(), 2, &[0, 2, 3]);
        for mut rows in [among, alone] {
            assert_eq!(rows.get_mut(0, 1), Some(&mut [0.0, 1.0][..]));
            assert_eq!(rows.get_mut(2, 2), Some(&mut [4.0, 5.0, 6.0, 7.0][..]));
            assert_eq!(rows.get_mut(1, 1), None);
            assert_eq!(rows.get_mut(0, 2), None);
            assert_eq!(rows.get_mut(3, 2), None);
            assert_eq!(rows.get_mut(usize::MAX, 1), None);
            assert_eq!(rows.get_mut(1, 0), Some(&mut [][..]));
        }
    }

    #[test]
    fn a_change_is_bias_then_repetition_then_subtraction() {
        let change = |edit: Edit, logit: f32| {
            let mut logits = [7.0, logit];
            edit.apply(&mut logits);
            assert_eq!(logits[0], 7.0);
            logits[1]
        };
        assert_eq!(change(Edit { token: 1, bias: 5.0, repetition: 2.0, subtract: 0.5 }, 1.0), 2.5);
        assert_eq!(change(Edit { token: 1, bias: -5.0, repetition: 2.0, subtract: 0.5 }, 1.0), -8.5);
        assert_eq!(change(Edit::forbid(1), f32::NAN), f32::NEG_INFINITY);
        assert_eq!(change(Edit::penalty(2, 2.0, 1.0), 1.0), 1.0);
        assert_eq!(mask_of(&[0, 33, 70, 99], 70).to_vec(), [1, 2, 0]);
    }
}
