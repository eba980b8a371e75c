//! Accuracy of trained models on held-out samples, through the whole cluster, in each precision of weights, KV cache and
//! encoder outputs.

use futures::StreamExt;
use std::collections::BTreeMap;
use triptych_proto::v1;
use triptych_tests::client::{about_audio, about_images, about_text, connect, generate};
use triptych_tests::cluster::Cluster;
use triptych_tests::samples::{Clips, heldout, list, models_dir, whisper_tiny_en};
use triptych_tests::words::word_errors;

/// Requests in flight: enough for batches of encoder and engine.
const IN_FLIGHT: usize = 8;

/// Models, and the share that each has right in f32 at least: of exact answers, and of words for Whisper tiny.en.
const LEAST_SHARES: [(&str, f64); 5] = [
    ("shapes-qwen2-vl", 0.98),
    ("digits-whisper", 0.98),
    ("numbers-t5", 0.96),
    ("plates-trocr", 0.96),
    ("whisper-tiny.en", 0.8),
];

/// Answers or words that fewer bits may cost, in a hundred. Of fewer than a hundred it is one.
const MOST_LOST: f64 = 0.01;

/// Precision of weights, element type of the KV cache, and element type of encoder outputs.
const SETTINGS: [[&str; 3]; 4] =
    [["f32", "f32", "f32"], ["bf16", "bf16", "f16"], ["int8", "int8", "int8"], ["int4", "int8", "f8"]];

/// The samples of a model.
type Samples = fn() -> Vec<Sample>;

/// Right parts of an answer beside the expected one, and all parts.
type Score = fn(&str, &str) -> (usize, usize);

/// A request, and its answer.
type Sample = (v1::GenerateRequest, String);

fn text(value: &serde_json::Value) -> String {
    value.as_str().expect("a string").to_owned()
}

/// Samples of the model that describes images.
fn shapes() -> Vec<Sample> {
    let scenes = list("scenes.jsonl").into_iter();
    let scenes = scenes.map(|s| (text(&s["question"]), vec![heldout(&text(&s["file"]))], text(&s["answer"])));
    let pairs = list("pairs.jsonl").into_iter().map(|p| {
        let files = p["files"].as_array().expect("files").iter().map(|f| heldout(&text(f))).collect();
        (text(&p["question"]), files, text(&p["answer"]))
    });
    let chat = list("chat.jsonl").into_iter();
    let chat = chat.map(|c| (text(&c["question"]), Vec::new(), text(&c["answer"])));
    scenes
        .chain(pairs)
        .chain(chat)
        .map(|(question, images, answer)| (about_images(&question, images), answer))
        .collect()
}

/// Samples of the model that transcribes digits.
fn digits() -> Vec<Sample> {
    let sample = |c: serde_json::Value| {
        (about_audio(heldout(&text(&c["file"])), v1::SpeechTask::default()), text(&c["text"]))
    };
    list("digits.jsonl").into_iter().map(sample).collect()
}

/// Samples of the model that writes spelled numbers as digits.
fn numbers() -> Vec<Sample> {
    let sample = |n: serde_json::Value| (about_text(&text(&n["text"])), text(&n["answer"]));
    list("numbers.jsonl").into_iter().map(sample).collect()
}

/// Samples of the model that reads printed numbers.
fn plates() -> Vec<Sample> {
    let sample = |p: serde_json::Value| {
        let image = about_images("", vec![heldout(&text(&p["file"]))]);
        (v1::GenerateRequest { prompt: about_text("").prompt, ..image }, text(&p["text"]))
    };
    list("plates.jsonl").into_iter().map(sample).collect()
}

/// Samples of Whisper tiny.en: clips of one window.
fn speech() -> Vec<Sample> {
    let clips = Clips::read();
    let short = clips.rows.iter().filter(|row| row["written"].is_string());
    short.map(|row| (about_audio(clips.audio(row), v1::SpeechTask::default()), text(&row["said"]))).collect()
}

/// One of one if the answer is exact.
fn exact(expected: &str, answer: &str) -> (usize, usize) {
    (usize::from(expected.trim() == answer.trim()), 1)
}

/// Right words, and all.
fn words(expected: &str, answer: &str) -> (usize, usize) {
    let (wrong, n) = word_errors(expected, answer);
    (n.saturating_sub(wrong), n)
}

/// Right answers or words of a model, and all.
async fn right(cluster: &Cluster, model: &str, samples: Vec<Sample>, score: Score) -> (usize, usize) {
    let client = connect(&cluster.grpc).await;
    let asked = futures::stream::iter(samples).map(|(request, expected)| {
        let mut client = client.clone();
        let request = v1::GenerateRequest { model: model.to_owned(), ..request };
        async move {
            let answer = generate(&mut client, request).await.expect("an answer");
            score(&expected, &answer.text)
        }
    });
    let add = |sum: (usize, usize), one: (usize, usize)| async move { (sum.0 + one.0, sum.1 + one.1) };
    asked.buffer_unordered(IN_FLIGHT).fold((0, 0), add).await
}

/// Right answers or words of each model, and all, with a setting.
async fn measure([precision, kv, rows]: [&str; 3]) -> BTreeMap<&'static str, (usize, usize)> {
    let dir = |name: &str| models_dir().join(name).display().to_string();
    let (numbers_t5, plates_trocr) = (dir("numbers-t5"), dir("plates-trocr"));
    let tiny_en = whisper_tiny_en().display().to_string();
    let models = ["sample:shapes-qwen2-vl", "sample:digits-whisper", &numbers_t5, &plates_trocr, &tiny_en];
    let mut args = vec!["--precision", precision, "--kv-cache-dtype", kv, "--ec-rows", rows];
    args.extend(models.iter().flat_map(|model| ["--model", model]));
    let cluster = Cluster::start(&args).await;
    let all: [(&str, Samples, Score); 5] = [
        ("shapes-qwen2-vl", shapes, exact),
        ("digits-whisper", digits, exact),
        ("numbers-t5", numbers, exact),
        ("plates-trocr", plates, exact),
        ("whisper-tiny.en", speech, words),
    ];
    let mut found = BTreeMap::new();
    for (model, samples, score) in all {
        found.insert(model, right(&cluster, model, samples(), score).await);
    }
    found
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fewer_bits_cost_at_most_one_in_a_hundred() {
    let in_f32 = measure(SETTINGS[0]).await;
    for (model, least) in LEAST_SHARES {
        let (right, n) = in_f32[model];
        println!("{model} f32: {right} of {n}");
        assert!(right as f64 / n as f64 >= least, "{model}: {right} of {n}");
    }
    for setting in &SETTINGS[1..] {
        for (model, (right, n)) in measure(*setting).await {
            println!("{model} {setting:?}: {right} of {n}");
            let allowed = (MOST_LOST * n as f64).max(1.0) as usize;
            let least = in_f32[model].0 - allowed;
            assert!(right >= least, "{model} with {setting:?}: {right} of {n}, {} in f32", in_f32[model].0);
        }
    }
}
