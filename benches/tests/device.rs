//! The benches of a device run where it stands in: every way of submitting work, and none that is not there.

use serde_json::Value;
use std::path::Path;
use std::process::Command;
use triptych_cuda_standin::Standin;

/// The lines of JSON of a bench on the stand-in.
fn told(program: &str, args: &str) -> Vec<Value> {
    let mut command = Command::new(program);
    command.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("..")).args(args.split_whitespace());
    command
        .env("LD_LIBRARY_PATH", std::env::join_paths(Standin::folders()).expect("folders without a colon"));
    let output = command.output().expect("the bench starts");
    assert!(output.status.success(), "{args}: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("lines of text");
    text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

/// Entries of a list as `name mode`, each with a number that is more than nothing.
#[track_caller]
fn entries(told: &Value, list: &str, name: &str, number: &str) -> Vec<String> {
    let all = told[list].as_array().expect("a list");
    assert!(all.iter().all(|entry| entry[number].as_f64().is_some_and(|n| n > 0.0)), "{told}");
    all.iter().map(|entry| format!("{} {}", entry[name], entry["mode"].as_str().expect("a mode"))).collect()
}

#[test]
fn a_model_of_random_weights_is_timed_eager_and_as_graphs() {
    let args = "tests/golden/whisper_en_odd_heads/model --item 0 --load-format dummy --device cuda --precision bf16 --repeats 1 \
        --encode-batches 1,2 --batches 1,3 --new-tokens 3 --modes eager,graphs --from-first-token";
    let lines = told(env!("CARGO_BIN_EXE_throughput"), args);
    let last = lines.last().expect("a line");
    let encodes = entries(last, "encode", "batch", "ms");
    assert_eq!(encodes, ["1 eager", "2 eager", "1 graphs", "2 graphs"]);
    let decodes = entries(last, "decode", "batch", "tokens_per_s");
    assert_eq!(decodes, ["1 eager", "3 eager", "1 graphs", "3 graphs"]);
    // A run that is cut off has told what it had.
    assert!(lines.len() > 2 && lines[0]["encode"] == last["encode"], "{lines:?}");
}

#[test]
fn ops_are_timed_and_have_graphs_where_they_can_be_captured() {
    let cases = [
        "linear:5x64x48",
        "logits:2x64x90",
        "attention:2x9x2x2x32",
        "causal:1x9x4x2x32",
        "decode:2x20x4x2x32",
    ];
    let lines = told(env!("CARGO_BIN_EXE_ops"), &format!("--ms 1 {}", cases.join(" ")));
    let ops = entries(lines.last().expect("a line"), "ops", "op", "ms");
    for case in cases {
        assert!(ops.contains(&format!("\"{case}\" eager")), "{ops:?}");
    }
    for case in &cases[..4] {
        assert!(ops.contains(&format!("\"{case}\" graphs")), "{ops:?}");
    }
}
