//! Whisper's grammar of times among generated tokens, and its token for windows without speech.
//!
//! The rules are those of transformers' `WhisperTimeStampLogitsProcessor`
//! (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/generation/logits_process.py>).

use triptych_kernels::logits::{forbid, largest, log_sum_exp};

/// Time tokens: `<|0.00|>` is `first`, each next one 20 ms later, to the end of the vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimestampRule {
    /// Token of 0.00 s.
    pub first: u32,
    /// `<|notimestamps|>`.
    pub no_timestamps: u32,
    /// End of text.
    pub end: u32,
    /// Latest first timestamp, as an index; `None`: any.
    pub max_initial: Option<u32>,
}

/// The token for windows without speech, and the step at which its probability is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoSpeech {
    /// The token.
    pub token: u32,
    /// The generated token, from 0, for which its probability is read.
    pub step: usize,
}

impl TimestampRule {
    /// Applies the grammar to `logits: [vocab]`: times come in pairs, never go back, and one comes first. A time is forced
    /// if all times in sum are more probable than any other token. `free` are the freely generated tokens.
    pub(crate) fn apply(&self, free: &[u32], logits: &mut [f32]) {
        let vocab = logits.len();
        let at = |id: u32| (id as usize).min(vocab);
        let first = at(self.first);
        forbid(&[self.no_timestamps], logits);

        let is_time = |id: &u32| *id >= self.first;
        let last_is_time = free.last().is_some_and(is_time);
        // With fewer than two tokens the one before last counts as a time, as in the reference.
        let one_before_is_time = free.len() < 2 || free.get(free.len() - 2).is_some_and(is_time);
        if last_is_time && one_before_is_time {
            logits[first..].fill(f32::NEG_INFINITY);
        } else if last_is_time {
            logits[..at(self.end)].fill(f32::NEG_INFINITY);
        }
        if let Some(last) = free.iter().copied().rfind(|id| is_time(id)) {
            // A time that opens a segment may repeat the one that closed the segment before; no other may.
            let repeats = last_is_time && !one_before_is_time;
            let next = if repeats { last } else { last.saturating_add(1) };
            logits[first..at(next).max(first)].fill(f32::NEG_INFINITY);
        }
        if free.is_empty() {
            logits[..first].fill(f32::NEG_INFINITY);
            if let Some(max) = self.max_initial {
                let past = at(self.first.saturating_add(max).saturating_add(1));
                logits[past..].fill(f32::NEG_INFINITY);
            }
        }
        let (text, times) = logits.split_at_mut(first);
        // Comparing it with a logit is comparing probabilities, since the normaliser is the same on both sides.
        if log_sum_exp(times) > f64::from(largest(text)) {
            text.fill(f32::NEG_INFINITY);
        }
    }
}
