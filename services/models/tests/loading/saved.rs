//! Directories as `save_pretrained` of transformers 5 writes them: one `processor_config.json`, a template of its own file.

use super::golden;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use triptych_core::limits::Limits;
use triptych_core::{ItemOptions, Modality};
use triptych_models::preprocess::EncoderInput;
use triptych_models::{LoadFormat, Model, ModelError, ModelSource};

const RANDOM: LoadFormat = LoadFormat::Dummy { seed: 1 };
const CASES: [&str; 8] = [
    "whisper_multilingual",
    "moonshine_deep_f16",
    "qwen2_vl_two_images",
    "qwen2_5_vl_window112",
    "mllama_small_f32",
    "trocr_vit",
    "donut_shifted",
    "florence_windows",
];

fn saved(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/saved").join(case)
}

fn open(dir: &Path) -> Result<Model, ModelError> {
    Model::open(&ModelSource { dir: dir.to_owned(), name: None, format: RANDOM, packed: None })
}

/// An item as the model's processor prepares it.
fn prepared(model: &Model) -> EncoderInput {
    let modality = model.modalities()[0];
    let file = match modality {
        Modality::Audio => "../../tests/golden/inputs/speech.wav",
        _ => "../../tests/golden/preprocess/images/rgb.png",
    };
    let bytes = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).expect("an item");
    let processor = model.preprocess();
    processor.preprocess(modality, &bytes, &ItemOptions::default(), &Limits::default()).expect("an input")
}

#[test]
fn what_transformers_5_saves_is_the_same_model() {
    for case in CASES {
        assert!(!saved(case).join("preprocessor_config.json").exists(), "{case}");
        let new = open(&saved(case)).unwrap_or_else(|e| panic!("{case}: {e}"));
        let old = open(&golden(case)).expect("the case");
        assert_eq!(format!("{:?}", new.spec()), format!("{:?}", old.spec()), "{case}");
        assert!(prepared(&new) == prepared(&old), "{case}: another encoder input");
        assert_eq!(new.prompts().sampling_defaults(), old.prompts().sampling_defaults(), "{case}");
        for text in ["The quick brown fox", " 12 3456, 你好", ""] {
            let [new, old] = [&new, &old].map(|model| model.tokenizer().encode(text).expect("tokens"));
            assert_eq!(new, old, "{case}: {text:?}");
        }
    }
}

/// A copy of the saved directory of a case, with a file more.
fn with_file(case: &str, name: &str, json: &Value) -> tempfile::TempDir {
    let copy = tempfile::tempdir().expect("a temporary directory");
    for entry in std::fs::read_dir(saved(case)).expect("a saved directory") {
        let from = entry.expect("an entry").path();
        std::fs::copy(&from, copy.path().join(from.file_name().expect("a file"))).expect("a copy");
    }
    std::fs::write(copy.path().join(name), json.to_string()).expect("a written file");
    copy
}

#[test]
fn a_nested_processor_wins_over_a_file_of_its_own_and_loses_to_none() {
    const WHOLE: &str = "preprocessor_config.json";
    const NESTED: &str = "processor_config.json";
    let broken = json!({ "patch_size": 999, "feature_size": 999, "sampling_rate": 1 });
    for case in ["whisper_multilingual", "moonshine_deep_f16", "qwen2_vl_two_images"] {
        let both = with_file(case, WHOLE, &broken);
        open(both.path()).unwrap_or_else(|e| panic!("{case}: {e}"));
        // Version 4 wrote a file without parts beside the processor's.
        let flat = json!({ "processor_class": "SomeProcessor" });
        std::fs::write(both.path().join(NESTED), flat.to_string()).expect("a written file");
        let error = open(both.path()).expect_err("the whole file is read").to_string();
        assert!(error.starts_with(WHOLE), "{case}: {error}");
        std::fs::remove_file(both.path().join(WHOLE)).expect("the file was there");
        let error = open(both.path()).expect_err("no processor").to_string();
        assert!(
            error.contains("is missing, expected an object, or preprocessor_config.json beside it"),
            "{error}"
        );
    }
}

#[test]
fn a_value_of_a_nested_processor_is_refused_by_its_place() {
    let check = |case: &str, part: &str, key: &str, expect: &str| {
        let path = saved(case).join("processor_config.json");
        let mut json: Value = serde_json::from_slice(&std::fs::read(path).expect("a file")).expect("JSON");
        json[part][key] = json!(7);
        let dir = with_file(case, "processor_config.json", &json);
        let error = open(dir.path()).expect_err("refused").to_string();
        assert_eq!(error, format!("processor_config.json: {part}.{key} is 7, expected {expect}"));
    };
    check("whisper_multilingual", "feature_extractor", "feature_size", "128, as in config.json");
    check("moonshine_deep_f16", "feature_extractor", "sampling_rate", "16000, the encoder's");
    check("qwen2_vl_two_images", "image_processor", "patch_size", "14, as in config.json");
    check("mllama_small_f32", "image_processor", "max_image_tiles", "4, as in config.json");
}
