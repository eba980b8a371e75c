//! The sample models answer their held-out samples through the whole cluster, alone and in batches.

use futures::StreamExt;
use triptych_proto::v1;
use triptych_tests::client::{about_audio, about_images, connect, generate};
use triptych_tests::cluster::Cluster;
use triptych_tests::samples::{heldout, list};

/// Requests in flight: enough for batches of encoder and engine.
const IN_FLIGHT: usize = 8;

/// Share of exact answers among `cases`, each a request and its answer.
async fn exact_share(cluster: &Cluster, cases: Vec<(v1::GenerateRequest, String)>) -> f64 {
    let n = cases.len();
    let client = connect(&cluster.grpc).await;
    let asked = futures::stream::iter(cases).map(|(request, expect)| {
        let mut client = client.clone();
        async move {
            let answer = generate(&mut client, request).await.expect("an answer");
            let is_exact = answer.text.trim() == expect.trim();
            if !is_exact {
                eprintln!("answer {:?}, expected {expect:?}", answer.text);
            }
            is_exact
        }
    });
    let right =
        asked.buffer_unordered(IN_FLIGHT).filter(|right| futures::future::ready(*right)).count().await;
    right as f64 / n as f64
}

fn text(value: &serde_json::Value) -> String {
    value.as_str().expect("a string").to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn held_out_samples_are_answered_exactly_at_98_percent() {
    let cluster = Cluster::start(&[]).await;
    let scenes = list("scenes.jsonl");
    let scenes =
        scenes.iter().map(|s| (text(&s["question"]), vec![heldout(&text(&s["file"]))], text(&s["answer"])));
    let pairs = list("pairs.jsonl");
    let files = |p: &serde_json::Value| {
        p["files"].as_array().expect("files").iter().map(|f| heldout(&text(f))).collect()
    };
    let pairs = pairs.iter().map(|p| (text(&p["question"]), files(p), text(&p["answer"])));
    let chat = list("chat.jsonl");
    let chat = chat.iter().map(|c| (text(&c["question"]), Vec::new(), text(&c["answer"])));
    let ask = |(question, images, answer): (String, Vec<Vec<u8>>, String)| {
        let request =
            v1::GenerateRequest { model: "shapes-qwen2-vl".into(), ..about_images(&question, images) };
        (request, answer)
    };
    let cases: Vec<_> = scenes.chain(pairs).chain(chat).map(ask).collect();
    let share = exact_share(&cluster, cases).await;
    assert!(share >= 0.98, "{share} of the images");

    let clips = list("digits.jsonl");
    let listen = |c: &serde_json::Value| {
        (about_audio(heldout(&text(&c["file"])), v1::SpeechTask::default()), text(&c["text"]))
    };
    let share = exact_share(&cluster, clips.iter().map(listen).collect()).await;
    assert!(share >= 0.98, "{share} of the clips");
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
