//! The real Whisper tiny.en writes down speech word for word as transformers does.

use triptych_proto::v1;
use triptych_tests::client::{about_sound, connect, generate};
use triptych_tests::cluster::Cluster;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_real_tiny_en_writes_what_transformers_writes() {
    let repository =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests is a folder of it");
    let model = repository.join(".cache/whisper-tiny.en");
    assert!(model.is_dir(), "{} is missing: run `cargo xtask whisper`", model.display());
    let cluster = Cluster::start(&["--model", model.to_str().expect("UTF-8")]).await;
    let mut client = connect(&cluster.grpc).await;
    let clips = repository.join("tests/golden/tiny_en");
    let expected = std::fs::read_to_string(clips.join("expected.json")).expect("the expected texts");
    let expected: Vec<serde_json::Value> = serde_json::from_str(&expected).expect("JSON");
    assert!(!expected.is_empty());
    for row in expected {
        let sound = std::fs::read(clips.join(row["file"].as_str().expect("a file"))).expect("a clip");
        let answer =
            generate(&mut client, about_sound(sound, v1::SpeechTask::default())).await.expect("an answer");
        assert_eq!(Some(answer.text.trim()), row["written"].as_str(), "{row}");
    }
}
