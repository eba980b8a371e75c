//! The real Whisper tiny.en transcribes as transformers does: word for word, with its segments and the times of words, in
//! one window, in sequential windows, and in parallel windows.

use serde_json::Value;
use triptych_proto::v1;
use triptych_tests::client::{about_audio, connect, generate};
use triptych_tests::cluster::Cluster;

/// Tolerance of times in seconds: one step of the vocabulary.
const STEP_S: f64 = 0.02 + 1e-6;

struct Clips {
    folder: std::path::PathBuf,
    rows: Vec<Value>,
}

impl Clips {
    fn read(repository: &std::path::Path) -> Self {
        let folder = repository.join("tests/golden/tiny_en");
        let expected = std::fs::read_to_string(folder.join("expected.json")).expect("the expected texts");
        let rows: Vec<Value> = serde_json::from_str(&expected).expect("JSON");
        assert!(rows.len() >= 20, "{} clips", rows.len());
        Self { folder, rows }
    }

    fn audio(&self, row: &Value) -> Vec<u8> {
        std::fs::read(self.folder.join(row["file"].as_str().expect("a file"))).expect("a clip")
    }
}

/// Text and times of the segments, and of their words if `words`.
fn check_segments(file: &Value, found: &[v1::Segment], expected: &Value, words: bool) {
    let expected = expected.as_array().expect("segments");
    let texts: Vec<&str> = found.iter().map(|s| s.text.as_str()).collect();
    let wanted: Vec<&str> = expected.iter().map(|s| s["text"].as_str().expect("text")).collect();
    assert_eq!(texts, wanted, "{file}");
    for (f, e) in found.iter().zip(expected) {
        let near = |found: f64, expected: &Value| {
            let expected = expected.as_f64().expect("a time");
            assert!(
                (found - expected).abs() <= STEP_S,
                "{file} {:?}: {found} s, expected {expected} s",
                f.text
            );
        };
        near(f.start_s, &e["start"]);
        near(f.end_s, &e["end"]);
        let all = e["words"].as_array().filter(|_| words);
        for (word, wanted) in f.words.iter().zip(all.into_iter().flatten()) {
            assert_eq!(Some(word.text.as_str()), wanted[0].as_str(), "{file}");
            near(word.start_s, &wanted[1]);
            near(word.end_s, &wanted[2]);
        }
        assert_eq!(f.words.len(), all.map_or(0, Vec::len), "{file}");
    }
}

/// Words without case and punctuation.
fn bare(text: &str) -> Vec<String> {
    let kept = text.chars().map(|c| if c.is_alphanumeric() { c.to_ascii_lowercase() } else { ' ' });
    kept.collect::<String>().split_whitespace().map(str::to_owned).collect()
}

/// Word error rate: edit distance over the number of spoken words.
fn word_error_rate(spoken: &str, written: &str) -> f64 {
    let spoken = bare(spoken);
    let written = bare(written);
    let mut row: Vec<usize> = (0..=written.len()).collect();
    for (i, s) in spoken.iter().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, w) in written.iter().enumerate() {
            let change = diagonal + usize::from(s != w);
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[written.len()] as f64 / spoken.len().max(1) as f64
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_real_tiny_en_transcribes_as_transformers_does() {
    let repository =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests is a folder of it");
    let model = repository.join(".cache/whisper-tiny.en");
    assert!(model.is_dir(), "{} is missing: run `cargo xtask whisper`", model.display());
    let cluster = Cluster::start(&["--model", model.to_str().expect("UTF-8")]).await;
    let mut client = connect(&cluster.grpc).await;
    let clips = Clips::read(repository);
    let in_sequence = v1::SpeechTask {
        timestamps: true,
        word_timestamps: true,
        long_form: v1::LongForm::Sequential.into(),
        ..Default::default()
    };
    for row in &clips.rows {
        let audio = clips.audio(row);
        let file = &row["file"];
        if let Some(written) = row["written"].as_str() {
            let plain = about_audio(audio.clone(), v1::SpeechTask::default());
            let answer = generate(&mut client, plain).await.expect("an answer");
            assert_eq!(answer.text.trim(), written, "{file}");
        }
        let timed = about_audio(audio.clone(), in_sequence.clone());
        let answer = generate(&mut client, timed).await.expect("an answer");
        check_segments(file, &answer.segments, &row["segments"], true);
        let spoken = row["said"].as_str().expect("a text");
        println!("{file} sequential: word error rate {:.3}", word_error_rate(spoken, &answer.text));
        if row["conditioned"].is_null() {
            continue;
        }
        let task =
            v1::SpeechTask { condition_on_previous: true, word_timestamps: false, ..in_sequence.clone() };
        let conditioned = generate(&mut client, about_audio(audio.clone(), task)).await.expect("an answer");
        check_segments(file, &conditioned.segments, &row["conditioned"], false);

        // In parallel no word is lost or repeated at the border of two windows.
        let task = v1::SpeechTask { timestamps: true, word_timestamps: true, ..Default::default() };
        let parallel = generate(&mut client, about_audio(audio, task)).await.expect("an answer");
        let differs = word_error_rate(&answer.text, &parallel.text);
        let wrong = word_error_rate(spoken, &parallel.text);
        println!("{file} in parallel: word error rate {wrong:.3}, {differs:.3} against sequential");
        // A model this small may stop before the end of a full window, which only sequential decoding recovers.
        assert!(differs <= 0.25, "{file}: {:?} {:?}", answer.text, parallel.text);
        let words: Vec<&v1::Word> = parallel.segments.iter().flat_map(|s| &s.words).collect();
        assert!(words.is_sorted_by(|a, b| a.start_s <= b.start_s + STEP_S), "{file}: {words:?}");
    }
}
