//! Answers of the sample models through the whole cluster, alone and in batches.

use triptych_proto::v1;
use triptych_tests::client::{about_audio, about_images, connect, generate};
use triptych_tests::cluster::Cluster;
use triptych_tests::samples::{heldout, list};

fn text(value: &serde_json::Value) -> String {
    value.as_str().expect("a string").to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batching_does_not_change_an_answer() {
    let cluster = Cluster::start(&[]).await;
    let mut client = connect(&cluster.grpc).await;
    let scenes = list("scenes.jsonl");
    let mut requests: Vec<_> = scenes
        .iter()
        .take(5)
        .map(|s| about_images(&text(&s["question"]), vec![heldout(&text(&s["file"]))]))
        .collect();
    requests.push(v1::GenerateRequest {
        model: "shapes-qwen2-vl".into(),
        ..about_images("What can you do?", Vec::new())
    });
    requests.push(about_audio(heldout("digits.wav"), v1::SpeechTask::default()));
    requests
        .push(about_audio(heldout("digits.wav"), v1::SpeechTask { timestamps: true, ..Default::default() }));
    let mut alone = Vec::new();
    for request in &requests {
        alone.push(generate(&mut client, request.clone()).await.expect("an answer").text);
    }
    let batched = requests.into_iter().map(|request| {
        let mut client = client.clone();
        async move { generate(&mut client, request).await.expect("an answer").text }
    });
    assert_eq!(futures::future::join_all(batched).await, alone);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_clip_is_transcribed_window_by_window_with_times() {
    let cluster = Cluster::start(&[]).await;
    let mut client = connect(&cluster.grpc).await;
    // Three clips, each in a window of 8 s of its own: 16 kHz mono, 16 bit.
    let clips = list("digits.jsonl");
    let clips: Vec<_> = clips.iter().filter(|c| text(&c["text"]).len() >= 5).take(3).collect();
    let mut samples = Vec::new();
    for clip in &clips {
        let mut window = triptych_tests::samples::decode_16k(&text(&clip["file"]));
        window.resize(8 * 16_000, 0);
        samples.extend(window);
    }
    let task = v1::SpeechTask { timestamps: true, ..Default::default() };
    let audio = triptych_tests::samples::wav_16k(&samples);
    let answer = generate(&mut client, about_audio(audio, task)).await.expect("an answer");
    let spoken: Vec<String> = clips.iter().map(|c| text(&c["text"])).collect();
    assert_eq!(answer.text.split_whitespace().collect::<Vec<_>>().join(" "), spoken.join(" "));
    assert_eq!(answer.summary.duration_s, 24.0);
    let mut last = 0.0;
    for segment in &answer.segments {
        assert!(
            segment.start_s >= last && segment.end_s >= segment.start_s && segment.end_s <= 24.0,
            "{segment:?}"
        );
        last = segment.end_s;
    }
    for window in 0..3 {
        let inside = |s: &&v1::Segment| {
            s.start_s >= 8.0 * f64::from(window) && s.start_s < 8.0 * f64::from(window + 1)
        };
        assert!(answer.segments.iter().any(|s| inside(&s)), "window {window} of {:?}", answer.segments);
    }
}
