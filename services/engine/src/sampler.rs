//! Sampling settings of a completion, and the random number of each of its tokens.
//!
//! A choice is a function of logits, settings, seed, choice index and token index, and of nothing else. Neither
//! the rest of the batch nor a preemption can change it. The choice itself is the back end's
//! (`triptych_kernels::sampling` where it is the host's); `tests/choosing` holds the distribution against the reference.
//! It knows no tokenizer.
//!
//! The random number of a token is 53 bits of BLAKE3 over seed, choice index and token index. A hash is
//! specified for good, as generators of libraries are not: a seed gives the same completion in every version.

use triptych_core::sampling::SamplingParams;
use triptych_models::sampling::{SampleError, Sampling, choose};

/// Context of the hash, so that these numbers are independent of its other uses. A change of it changes every
/// completion.
const DRAW: &str = "triptych 2026-11 draw of a token";

/// Sampling settings of one completion.
#[derive(Clone, Debug)]
pub struct Sampler {
    /// The settings without a random number.
    settings: Sampling,
    seed: u64,
    choice: u32,
}

impl Sampler {
    /// A sampler; without a seed it draws one, once.
    pub fn new(params: &SamplingParams, choice: u32) -> Self {
        Self {
            settings: Sampling {
                temperature: params.temperature,
                top_k: params.top_k,
                top_p: params.top_p,
                min_p: params.min_p,
                draw: 0,
            },
            seed: params.seed.unwrap_or_else(rand::random),
            choice,
        }
    }

    /// Settings of the choice of token number `n_generated` of the completion.
    pub fn settings(&self, n_generated: usize) -> Sampling {
        // A greedy choice reads no random number.
        let draw = if self.settings.is_greedy() { 0 } else { self.draw(n_generated) };
        Sampling { draw, ..self.settings }
    }

    /// Chooses token number `n_generated` of the completion from `logits [vocab]`; `-inf` rules a token out.
    ///
    /// # Errors
    /// [`SampleError`] if the logits allow no choice.
    pub fn choose(&self, logits: &[f32], n_generated: usize) -> Result<u32, SampleError> {
        choose(logits, &self.settings(n_generated))
    }

    /// 53 random bits. Stateless, so that a preempted sequence loses nothing.
    fn draw(&self, n_generated: usize) -> u64 {
        let mut hash = blake3::Hasher::new_derive_key(DRAW);
        hash.update(&self.seed.to_le_bytes());
        hash.update(&self.choice.to_le_bytes());
        hash.update(&(n_generated as u64).to_le_bytes());
        let mut bits = [0; 8];
        hash.finalize_xof().fill(&mut bits);
        u64::from_le_bytes(bits) >> 11
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn seed_choice_and_token_index_each_change_the_draw() {
        let logits = [0.0; 50];
        let run = |seed, choice| {
            let params = SamplingParams { seed: Some(seed), ..SamplingParams::default() };
            let sampler = Sampler::new(&params, choice);
            (0..20).map(|i| sampler.choose(&logits, i).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(run(1, 0), run(1, 0));
        assert_ne!(run(1, 0), run(2, 0));
        assert_ne!(run(1, 0), run(1, 1));
        assert!(run(1, 0).iter().collect::<BTreeSet<_>>().len() > 5);
    }

    /// Seeds are a contract with clients: the numbers drawn must be the same in every version.
    #[test]
    fn a_seed_draws_the_same_numbers_for_good() {
        let sampler = Sampler::new(&SamplingParams { seed: Some(42), ..SamplingParams::default() }, 3);
        let drawn = [0, 1, 1000].map(|i| sampler.settings(i).share());
        assert_eq!(drawn, [0.186_036_954_736_514_27, 0.790_548_816_205_038_9, 0.610_218_415_386_439_2]);
    }
}
