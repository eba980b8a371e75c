//! Keys of `generation_config.json` in every family: what is served is in the prompt or the defaults, what is not is
//! refused when the directory is opened.

use super::golden;
use super::{item, speech, task, text, user};
use serde_json::{Value, json};
use triptych_core::prompt::{Prompt, TextOrTokens};
use triptych_core::{EncodedItem, Extent, Modality};
use triptych_models::prompt::{PreparedSequence, SamplingDefaults};
use triptych_models::{LoadFormat, Model, ModelError, ModelSource};

const FAMILIES: [&str; 7] = [
    "bart_large_cnn",
    "t5_small",
    "whisper_multilingual",
    "moonshine_deep_f16",
    "qwen2_vl_two_images",
    "mllama_small_f32",
    "llama_tied",
];

/// A golden directory whose `generation_config.json` has more keys.
fn open(case: &str, more: &Value) -> Result<Model, ModelError> {
    let copy = tempfile::tempdir().expect("a temporary directory");
    for entry in std::fs::read_dir(golden::path(&format!("{case}/model"))).expect("a golden directory") {
        let from = entry.expect("an entry").path();
        std::fs::copy(&from, copy.path().join(from.file_name().expect("a file"))).expect("a copy");
    }
    let mut json = golden::json(&format!("{case}/model/generation_config.json"));
    json.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    std::fs::write(copy.path().join("generation_config.json"), json.to_string()).expect("a written file");
    let format = LoadFormat::Dummy { seed: 1 };
    Model::open(&ModelSource { dir: copy.path().to_owned(), name: None, format, packed: None })
}

fn defaults(case: &str, more: &Value) -> SamplingDefaults {
    open(case, more).unwrap_or_else(|e| panic!("{case}: {e}")).prompts().sampling_defaults()
}

/// The sequence of the shortest prompt of a family.
fn sequence(model: &Model) -> PreparedSequence {
    let open = TextOrTokens::Tokens(Vec::new());
    let (prompt, items): (Prompt, Vec<EncodedItem>) = match model.modalities().first() {
        None | Some(Modality::Image | Modality::Video) => (user(vec![text("hi")]), Vec::new()),
        Some(Modality::Audio) => (Prompt::Speech(task(None, false)), vec![speech(1, 900)]),
        Some(Modality::Text) => {
            (Prompt::Explicit { encoder: None, decoder: open }, vec![item(Modality::Text, Extent::Tokens, 9)])
        }
    };
    model.prompts().prepare(&prompt, &items).expect("a prompt").remove(0)
}

#[test]
fn a_key_that_is_not_served_is_refused_in_every_family() {
    for case in FAMILIES {
        for (key, value, expect) in [
            ("typical_p", json!(0.9), "1: nothing else is served"),
            ("guidance_scale", json!(1.5), "1: nothing else is served"),
            ("sequence_bias", json!([[[5], 1.5]]), "no such key: it is not served"),
            ("token_healing", json!(true), "false: it is not served"),
        ] {
            let error = open(case, &json!({ key: value })).expect_err("refused").to_string();
            assert_eq!(
                error,
                format!("generation_config.json: {key} is {value}, expected {expect}"),
                "{case}"
            );
        }
        let off =
            json!({ "typical_p": 1.0, "guidance_scale": null, "num_beam_groups": 1, "use_cache": false });
        open(case, &off).unwrap_or_else(|e| panic!("{case}: {e}"));
    }
}

#[test]
fn settings_of_sampling_become_defaults() {
    let more = json!({
        "encoder_no_repeat_ngram_size": 3, "renormalize_logits": true, "do_sample": true, "num_beams": 1, "min_p": 0.1,
    });
    for case in FAMILIES {
        let got = defaults(case, &more);
        assert_eq!((got.encoder_no_repeat_ngram_size, got.renormalize_logits), (Some(3), true), "{case}");
        assert!((got.min_p - 0.1).abs() < 1e-6, "{case}");
        let off =
            json!({ "encoder_no_repeat_ngram_size": 0, "renormalize_logits": false, "do_sample": false });
        let got = defaults(case, &off);
        assert_eq!((got.encoder_no_repeat_ngram_size, got.renormalize_logits), (None, false), "{case}");
        let drawn = json!({ "do_sample": true, "num_beams": 4 });
        let error = open(case, &drawn).expect_err("refused").to_string();
        assert!(error.contains("num_beams is 4, expected 1 beside do_sample"), "{case}: {error}");
    }
}

#[test]
fn rules_on_tokens_hold_in_every_family() {
    let more = json!({
        "suppress_tokens": [9, 7], "begin_suppress_tokens": [11], "bad_words_ids": [[5], [6, 8]],
        "forced_eos_token_id": 3,
    });
    for case in FAMILIES {
        let rules = sequence(&open(case, &more).unwrap_or_else(|e| panic!("{case}: {e}"))).rules;
        assert_eq!(*rules.suppress, [5, 7, 9], "{case}");
        assert_eq!(*rules.begin_suppress, [11], "{case}");
        assert_eq!(*rules.bad_words, [vec![6, 8]], "{case}");
        assert_eq!(*rules.last, [3], "{case}");
    }
    let first = json!({ "forced_bos_token_id": 17 });
    for case in ["bart_large_cnn", "moonshine_deep_f16"] {
        assert_eq!(sequence(&open(case, &first).expect(case)).rules.steps, [[17].into()], "{case}");
    }
}

#[test]
fn a_language_of_the_directory_is_the_one_that_is_found() {
    let case = "whisper_multilingual";
    let steps = |more: Value| sequence(&open(case, &more).expect("a model")).rules.steps;
    let all = steps(json!({}));
    assert!(all[0].len() > 1);
    let german =
        golden::json(&format!("{case}/model/generation_config.json"))["lang_to_id"]["<|de|>"].clone();
    let german = u32::try_from(german.as_u64().expect("a token")).expect("a token");
    for name in ["de", "<|de|>", "german", "German"] {
        let got = steps(json!({ "language": name }));
        assert_eq!(*got[0], [german], "{name}");
        assert_eq!(got[1..], all[1..], "{name}");
    }
    let error = open(case, &json!({ "language": "klingon" })).expect_err("refused").to_string();
    assert!(
        error.starts_with("generation_config.json: language is \"klingon\", expected a language"),
        "{error}"
    );
    open("whisper_en_odd_heads", &json!({ "language": "klingon" })).expect("a model of one language");
}
