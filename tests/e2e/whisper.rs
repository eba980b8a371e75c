//! The real Whisper tiny.en transcribes as transformers does: word for word, with its segments and the times of words, in
//! one window, in sequential windows, and in parallel windows.

use serde_json::Value;
use triptych_proto::v1;
use triptych_tests::client::{about_audio, connect, generate};
use triptych_tests::cluster::Cluster;
use triptych_tests::samples::{Clips, whisper_tiny_en};
use triptych_tests::words::word_error_rate;

/// Tolerance of times in seconds: one step of the vocabulary.
const STEP_S: f64 = 0.02 + 1e-6;

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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_real_tiny_en_transcribes_as_transformers_does() {
    let model = whisper_tiny_en();
    let cluster = Cluster::start(&["--model", model.to_str().expect("UTF-8")]).await;
    let mut client = connect(&cluster.grpc).await;
    let clips = Clips::read();
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
