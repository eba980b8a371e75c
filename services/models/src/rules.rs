//! Rules of a family on its logits, applied before sampling.
//!
//! Whisper needs most of them: forced task tokens, suppressed tokens, and the grammar of timestamps
//! ([`crate::speech::timestamps`]). The order is that of transformers' logits processors
//! (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/generation/logits_process.py>).
//! It knows no sampler and no sequence: it is handed the tokens generated so far.

use crate::speech::timestamps::{NoSpeech, TimestampRule};
use std::sync::Arc;
use triptych_kernels::logits::forbid;

/// The tokens that may be chosen next.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct LogitRules {
    /// Tokens that are never chosen.
    pub suppress: Arc<[u32]>,
    /// Tokens that are not chosen as the first free token.
    pub begin_suppress: Arc<[u32]>,
    /// For generated token `i`, the only ones allowed: forced tokens have one, language detection many.
    /// Free generation starts after these.
    pub steps: Vec<Arc<[u32]>>,
    /// Token sequences that are never completed; each has two tokens or more.
    pub bad_words: Arc<[Vec<u32>]>,
    /// Tokens allowed as the last one within the maximum length; empty: any.
    pub last: Arc<[u32]>,
    /// The grammar of times.
    pub timestamps: Option<TimestampRule>,
    /// Token whose probability is reported as "no speech".
    pub no_speech: Option<NoSpeech>,
}

impl LogitRules {
    /// True if the rules never change a logit.
    pub fn is_empty(&self) -> bool {
        self.suppress.is_empty()
            && self.begin_suppress.is_empty()
            && self.steps.is_empty()
            && self.bad_words.is_empty()
            && self.last.is_empty()
            && self.timestamps.is_none()
    }

    /// Sets the logits of tokens that may not follow `generated`, the sequence without its prompt, to minus infinity.
    ///
    /// `logits: [vocab]`. Ids past the end of either side are ignored. O(vocab).
    pub fn apply(&self, generated: &[u32], logits: &mut [f32]) {
        if let Some(allowed) = self.steps.get(generated.len()) {
            return keep_only(allowed, logits);
        }
        for id in self.forbidden(generated) {
            forbid(&[id], logits);
        }
        if let Some(rule) = &self.timestamps {
            rule.apply(self.free(generated), logits);
        }
    }

    /// Tokens that may not follow `generated`, whatever the logits: all of the rules but the grammar of times, outside of
    /// [`Self::steps`].
    pub fn forbidden(&self, generated: &[u32]) -> impl Iterator<Item = u32> {
        let is_first = self.free(generated).is_empty();
        let begin = if is_first { &*self.begin_suppress } else { &[] };
        let completed = move |run: &Vec<u32>| {
            let (last, before) = run.split_last()?;
            generated.ends_with(before).then_some(*last)
        };
        begin.iter().chain(self.suppress.iter()).copied().chain(self.bad_words.iter().filter_map(completed))
    }

    /// Tokens of `generated` that were freely chosen.
    fn free<'a>(&self, generated: &'a [u32]) -> &'a [u32] {
        generated.get(self.steps.len()..).unwrap_or_default()
    }

    /// Replaces [`Self::apply`] for the last token within the maximum length: if the model forces a last token, no other is
    /// allowed, and its logit is 0. Returns false, and changes nothing, if there is no such rule.
    ///
    /// `logits: [vocab]`.
    pub fn apply_last(&self, logits: &mut [f32]) -> bool {
        if self.last.is_empty() {
            return false;
        }
        logits.fill(f32::NEG_INFINITY);
        for id in self.last.iter() {
            if let Some(logit) = logits.get_mut(*id as usize) {
                *logit = 0.0;
            }
        }
        true
    }
}

fn keep_only(allowed: &[u32], logits: &mut [f32]) {
    let kept: Vec<(usize, f32)> =
        allowed.iter().filter_map(|id| logits.get(*id as usize).map(|l| (*id as usize, *l))).collect();
    logits.fill(f32::NEG_INFINITY);
    for (id, logit) in kept {
        logits[id] = logit;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_come_before_every_other_rule() {
        let rules = LogitRules {
            suppress: [1].into(),
            begin_suppress: [2].into(),
            steps: vec![[1, 3].into(), [2].into()],
            ..LogitRules::default()
        };
        let check = |generated: &[u32], allowed: &[u32]| {
            let mut logits = [0.5; 5];
            rules.apply(generated, &mut logits);
            let left: Vec<u32> = (0..5).filter(|i| logits[*i as usize].is_finite()).collect();
            assert_eq!(left, allowed, "{generated:?}");
        };
        check(&[], &[1, 3]);
        check(&[3], &[2]);
        check(&[3, 2], &[0, 3, 4]);
        check(&[3, 2, 0], &[0, 2, 3, 4]);
    }

    #[test]
    fn a_run_is_never_completed_and_the_last_token_may_be_forced() {
        let rules = LogitRules {
            bad_words: vec![vec![1, 2], vec![2, 1, 3]].into(),
            last: [4].into(),
            ..LogitRules::default()
        };
        let check = |generated: &[u32], forbidden: &[u32]| {
            let mut logits = [0.5; 5];
            rules.apply(generated, &mut logits);
            let gone: Vec<u32> = (0..5).filter(|i| logits[*i as usize].is_infinite()).collect();
            assert_eq!(gone, forbidden, "{generated:?}");
        };
        check(&[], &[]);
        check(&[1], &[2]);
        check(&[2, 1], &[2, 3]);
        check(&[2, 1, 0], &[]);
        let mut logits = [0.5; 5];
        assert!(rules.apply_last(&mut logits));
        assert_eq!(logits, [f32::NEG_INFINITY, f32::NEG_INFINITY, f32::NEG_INFINITY, f32::NEG_INFINITY, 0.0]);
        assert!(!LogitRules::default().apply_last(&mut logits));
    }

    #[test]
    fn ids_past_the_vocabulary_are_ignored() {
        let rule = TimestampRule { first: 90, no_timestamps: 89, end: 80, max_initial: Some(u32::MAX) };
        let rules = LogitRules {
            suppress: [99].into(),
            begin_suppress: [u32::MAX].into(),
            bad_words: vec![vec![1, 98], vec![u32::MAX, 99]].into(),
            timestamps: Some(rule),
            ..LogitRules::default()
        };
        for generated in [&[][..], &[90], &[90, 90], &[1, u32::MAX]] {
            rules.apply(generated, &mut [0.0; 4]);
            rules.apply(generated, &mut []);
        }
    }
}
