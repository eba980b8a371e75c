//! Our side of the bench beside peers runs: every kind of item, every precision, from packed weights too.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// One run of as little as there is, and what it told.
fn measured(model: &str, item: &str, further: &[&str]) -> Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_throughput"));
    command.env("STARTED_AT", "0").current_dir(root()).arg(model).args(["--item", item]);
    command.args("--batches 1,2 --new-tokens 3 --repeats 1 --threads 2".split(' ')).args(further);
    let output = command.output().expect("the bench starts");
    assert!(output.status.success(), "{model}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one line of JSON")
}

/// Everything that was measured is there, and is a time, a rate or a size.
#[track_caller]
fn is_whole(told: &Value, fields: &[&str]) {
    let numbers = fields.iter().map(|field| &told[*field]);
    let rates = [0, 1].map(|i| &told["decode"][i]["tokens_per_s"]);
    for number in numbers.chain(rates) {
        assert!(number.as_f64().is_some_and(|n| n > 0.0 && n.is_finite()), "{told}");
    }
    assert_eq!((&told["decode"][0]["batch"], &told["decode"][1]["batch"]), (&1.into(), &2.into()));
}

const FIELDS: [&str; 5] = ["ready_ms", "encode_ms", "peak_mb", "multiply_adds_per_s", "bytes_per_s"];

#[test]
fn audio_images_and_texts_are_measured() {
    let audio = ["tests/golden/inputs/speech.wav", "--preprocess=tests/golden/inputs/speech.wav"];
    is_whole(&measured("tests/models/digits-whisper", audio[0], &audio[1..]), &FIELDS);
    let image =
        measured("tests/models/shapes-qwen2-vl", "tests/models/heldout/scene.png", &["--text-tokens", "4"]);
    is_whole(&image, &FIELDS);
    assert!(image["prefill"]["tokens_per_s"].as_f64().is_some_and(|rate| rate > 0.0), "{image}");
    is_whole(&measured("tests/golden/bart_odd_heads/model", "5", &[]), &FIELDS);
}

#[test]
fn every_precision_starts_from_its_packed_weights() {
    let dir = tempfile::tempdir().expect("a folder");
    let packed = format!("--packed={}", dir.path().display());
    // What is not quantized is not kept, and an encoder in int4 is one in int8.
    for (precision, n_files) in [("f32", 0), ("bf16", 0), ("int8", 2), ("int4", 3)] {
        for _ in 0..2 {
            let further = ["--precision", precision, &packed];
            is_whole(
                &measured("tests/models/digits-whisper", "tests/golden/inputs/speech.wav", &further),
                &FIELDS,
            );
            assert_eq!(dir.path().read_dir().expect("a folder").count(), n_files, "{precision}");
        }
    }
}

#[test]
fn a_beam_search_draws_and_an_older_instruction_set_are_measured() {
    let further = ["--beams", "2", "--temperature", "1", "--isa", "portable"];
    let told = measured("tests/golden/bart_odd_heads/model", "5", &further);
    is_whole(&told, &FIELDS);
    assert!(told["beams_tokens_per_s"].as_f64().is_some_and(|rate| rate > 0.0), "{told}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_throughput"));
    let refused = command.args(["model", "--item", "5", "--isa", "mmx"]).output().expect("the bench starts");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("which has portable"), "{said}");
}
