//! Every key of `generation_config.json`, and its treatment.
//!
//! The list is that of transformers' `GenerationConfig`
//! (<https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/generation/configuration_utils.py>);
//! `tests/golden/generation/keys.json` holds it with its defaults, and a test compares. Keys that neither that class nor
//! Whisper knows have no effect there, and none here. In a `config.json` of before that file the same keys are read.

use crate::error::ModelError;
use crate::files::JsonFile;
use serde_json::Value;

/// Treatment of a key.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Use {
    /// Read, by [`super::GenerationFiles`] or by the prompt layout of a family.
    Served,
    /// Changes no answer here, whatever its value.
    NoEffect(Reason),
    /// Refused unless it is off: it would change answers, and is not built.
    Refused(Off),
}

/// Reason for which a key changes no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    /// The form in which a Python call returns its result.
    FormOfResult,
    /// The memory of keys and values, which are in pages here.
    Cache,
    /// Compilation, batches and memory of a Python process.
    Execution,
    /// Speculation changes the time, not the tokens; `--draft` and prompt lookup are the worker's settings.
    Speculation,
    /// A request says it: how many answers, until when.
    OfRequest,
    /// Inputs are not padded, so no token stands for padding.
    NoPadding,
    /// Logits that are not finite fail the request.
    BrokenLogits,
    /// A record of the writer.
    Record,
}

/// The values, beside `null` and no key, that leave a key off.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Off {
    Null,
    False,
    Number(f64),
}

impl Off {
    fn holds(self, value: &Value) -> bool {
        match self {
            Self::Null => value.is_null(),
            Self::False => *value == Value::Bool(false),
            Self::Number(off) => value.as_f64() == Some(off),
        }
    }

    fn text(self) -> String {
        match self {
            Self::Null => "no such key: it is not served".into(),
            Self::False => "false: it is not served".into(),
            Self::Number(off) => format!("{off}: nothing else is served"),
        }
    }
}

use Off::{False, Null, Number};
use Reason::*;
use Use::{NoEffect, Refused, Served};

/// Keys of `GenerationConfig`.
const KEYS: [(&str, Use); 73] = [
    // Length.
    ("max_length", Served),
    ("max_new_tokens", Served),
    ("min_length", Served),
    ("min_new_tokens", Served),
    ("early_stopping", Served),
    ("max_time", NoEffect(OfRequest)),
    ("stop_strings", Refused(Null)),
    // Strategy.
    ("do_sample", Served),
    ("num_beams", Served),
    ("num_beam_groups", Refused(Number(1.0))),
    ("diversity_penalty", Refused(Number(0.0))),
    ("length_penalty", Served),
    ("constraints", Refused(Null)),
    ("force_words_ids", Refused(Null)),
    ("penalty_alpha", Refused(Null)),
    ("dola_layers", Refused(Null)),
    // Sampling.
    ("temperature", Served),
    ("top_k", Served),
    ("top_p", Served),
    ("min_p", Served),
    ("top_h", Refused(Null)),
    ("typical_p", Refused(Number(1.0))),
    ("epsilon_cutoff", Refused(Number(0.0))),
    ("eta_cutoff", Refused(Number(0.0))),
    // Logits.
    ("repetition_penalty", Served),
    ("encoder_repetition_penalty", Refused(Number(1.0))),
    ("no_repeat_ngram_size", Served),
    ("encoder_no_repeat_ngram_size", Served),
    ("bad_words_ids", Served),
    ("renormalize_logits", Served),
    ("forced_bos_token_id", Served),
    ("forced_eos_token_id", Served),
    ("suppress_tokens", Served),
    ("begin_suppress_tokens", Served),
    ("exponential_decay_length_penalty", Refused(Null)),
    ("sequence_bias", Refused(Null)),
    ("token_healing", Refused(False)),
    ("guidance_scale", Refused(Number(1.0))),
    ("watermarking_config", Refused(Null)),
    ("remove_invalid_values", NoEffect(BrokenLogits)),
    // Tokens.
    ("bos_token_id", Served),
    ("eos_token_id", Served),
    ("pad_token_id", NoEffect(NoPadding)),
    ("decoder_start_token_id", Served),
    // Speculation.
    ("is_assistant", NoEffect(Speculation)),
    ("num_assistant_tokens", NoEffect(Speculation)),
    ("num_assistant_tokens_schedule", NoEffect(Speculation)),
    ("assistant_confidence_threshold", NoEffect(Speculation)),
    ("assistant_early_exit", NoEffect(Speculation)),
    ("assistant_lookbehind", NoEffect(Speculation)),
    ("target_lookbehind", NoEffect(Speculation)),
    ("prompt_lookup_num_tokens", NoEffect(Speculation)),
    ("max_matching_ngram_size", NoEffect(Speculation)),
    ("speculation_type", NoEffect(Speculation)),
    ("use_mtp", NoEffect(Speculation)),
    // The one kind of speculation that changes the distribution.
    ("assistant_ensemble_weight", Refused(Null)),
    // Cache and execution.
    ("use_cache", NoEffect(Cache)),
    ("cache_implementation", NoEffect(Cache)),
    ("cache_config", NoEffect(Cache)),
    ("max_cache_len", NoEffect(Cache)),
    ("compile_config", NoEffect(Execution)),
    ("disable_compile", NoEffect(Execution)),
    ("continuous_batching_config", NoEffect(Execution)),
    ("prefill_chunk_size", NoEffect(Execution)),
    ("low_memory", NoEffect(Execution)),
    // Results.
    ("num_return_sequences", NoEffect(OfRequest)),
    ("output_attentions", NoEffect(FormOfResult)),
    ("output_hidden_states", NoEffect(FormOfResult)),
    ("output_scores", NoEffect(FormOfResult)),
    ("output_logits", NoEffect(FormOfResult)),
    ("return_dict_in_generate", NoEffect(FormOfResult)),
    ("transformers_version", NoEffect(Record)),
    ("_from_model_config", NoEffect(Record)),
];

/// Keys that Whisper's `generate` reads beside those.
const WHISPER_KEYS: [(&str, Use); 19] = [
    ("alignment_heads", Served),
    ("is_multilingual", Served),
    ("lang_to_id", Served),
    ("task_to_id", Served),
    ("language", Served),
    ("max_initial_timestamp_index", Served),
    ("no_timestamps_token_id", Served),
    ("prev_sot_token_id", Served),
    ("task", NoEffect(OfRequest)),
    ("forced_decoder_ids", NoEffect(OfRequest)),
    ("return_timestamps", NoEffect(OfRequest)),
    ("return_token_timestamps", NoEffect(OfRequest)),
    ("condition_on_prev_tokens", NoEffect(OfRequest)),
    ("prompt_condition_type", NoEffect(OfRequest)),
    ("num_frames", NoEffect(OfRequest)),
    ("force_unique_generate_call", NoEffect(OfRequest)),
    ("no_speech_threshold", Refused(Null)),
    ("logprob_threshold", Refused(Null)),
    ("compression_ratio_threshold", Refused(Null)),
];

/// Refuses a file that sets a key which is not served to anything but its default.
///
/// # Errors
/// [`ModelError::Config`] with the key, its value, and the value that is served.
pub(super) fn check(file: &JsonFile) -> Result<(), ModelError> {
    for (key, of_key) in KEYS.iter().chain(&WHISPER_KEYS) {
        let Some(value) = file.get(key) else { continue };
        match of_key {
            Refused(off) if !off.holds(value) => return Err(file.wrong(key, &off.text())),
            NoEffect(reason) => tracing::debug!(key, %value, ?reason, "generation setting without effect"),
            Served | Refused(_) => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::path::Path;

    fn golden() -> serde_json::Map<String, Value> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/generation/keys.json");
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        serde_json::from_slice(&bytes).expect("golden JSON")
    }

    #[test]
    fn every_key_of_the_reference_has_its_use_and_its_default_is_served() {
        let golden = golden();
        let [reference, whisper] =
            ["generation_config", "whisper"].map(|of| golden[of].as_object().expect(of));
        for (table, keys) in [(&KEYS[..], reference), (&WHISPER_KEYS[..], whisper)] {
            let ours: BTreeSet<&str> = table.iter().map(|(key, _)| *key).collect();
            assert_eq!(ours.len(), table.len(), "a key is there twice");
            assert_eq!(ours, keys.keys().map(String::as_str).collect::<BTreeSet<_>>());
            for (key, of_key) in table {
                let default = &keys[*key];
                if let Refused(off) = of_key {
                    assert!(default.is_null() || off.holds(default), "{key}: {default}");
                }
            }
        }
    }

    #[test]
    fn a_file_of_defaults_is_served_and_a_key_that_is_set_is_refused_by_name() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let read = |json: &Value| {
            std::fs::write(dir.path().join("generation_config.json"), json.to_string()).expect("a file");
            check(&JsonFile::read(dir.path(), "generation_config.json").expect("a file"))
        };
        read(&golden()["generation_config"]).expect("defaults");
        for (key, _) in KEYS.iter().chain(&WHISPER_KEYS).filter(|(_, of_key)| matches!(of_key, Refused(_))) {
            for value in [serde_json::json!(0.7), serde_json::json!([1, 2]), serde_json::json!(true)] {
                let error = read(&serde_json::json!({ *key: value })).expect_err(key).to_string();
                assert!(
                    error.starts_with(&format!("generation_config.json: {key} is {value}, expected ")),
                    "{error}"
                );
            }
        }
        let error = read(&serde_json::json!({ "typical_p": 0.9 })).expect_err("refused").to_string();
        assert_eq!(error, "generation_config.json: typical_p is 0.9, expected 1: nothing else is served");
    }
}
