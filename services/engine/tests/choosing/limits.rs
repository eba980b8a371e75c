//! The cost of settings: memory of the order of the prompt, whatever the settings are.

use triptych_core::sampling::SamplingParams;
use triptych_engine::logits_processors::{GivenTokens, LogitsProcessors};

/// Bytes of this process that are in memory.
fn resident_bytes() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").expect("Linux has /proc");
    let pages = text.split(' ').nth(1).and_then(|n| n.parse::<usize>().ok());
    pages.expect("the second number") * 4096
}

/// Each token of the prompt once took the whole run before it, 32 kB, in each of 16 answers: 4.2 GB.
#[test]
fn long_ngrams_over_a_long_prompt_take_a_few_words_for_each_token() {
    for scale in [1, 10] {
        let params = SamplingParams {
            no_repeat_ngram_size: 8000 * scale,
            encoder_no_repeat_ngram_size: 8000 * scale,
            repetition_penalty: 1.1,
            ..SamplingParams::default()
        };
        let prompt: Vec<u32> = (0..16_000 * scale).map(|i| i * 7919 % 30_011).collect();
        let written: Vec<u32> = (0..64).collect();
        let mut logits = vec![0.0; 32_000];
        let before = resident_bytes();
        let given = GivenTokens { prompt: &prompt, encoder: &prompt };
        let first = LogitsProcessors::new(&params, Vec::new(), Vec::new(), given);
        let mut answers = vec![first; 16];
        for answer in &mut answers {
            (0..written.len()).for_each(|n| answer.apply(&written[..n], &mut logits));
        }
        let grown = resident_bytes().saturating_sub(before);
        let limit = scale as usize * (64 << 20);
        println!("{scale} times: {} MiB", grown >> 20);
        assert!(grown < limit, "{scale} times: {} MiB", grown >> 20);
    }
}

/// A text that is one token over and over is found at all of its places, and each is compared once at most.
#[test]
fn a_prompt_of_one_token_rules_it_out() {
    let params = SamplingParams { no_repeat_ngram_size: 8000, ..SamplingParams::default() };
    let prompt = vec![1; 16_000];
    let given = GivenTokens { prompt: &prompt, encoder: &[] };
    let mut answer = LogitsProcessors::new(&params, Vec::new(), Vec::new(), given);
    let written = [1; 50];
    for n in 0..written.len() {
        let mut logits = [0.0; 3];
        answer.apply(&written[..n], &mut logits);
        assert_eq!(logits, [0.0, f32::NEG_INFINITY, 0.0]);
    }
    let mut logits = [0.0; 3];
    answer.apply(&[1, 1, 2], &mut logits);
    assert_eq!(logits, [0.0; 3]);
}
