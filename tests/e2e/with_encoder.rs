//! A PD worker with its own encoders: their outputs are resident at once, and published for other workers.

use tonic::transport::{Channel, Endpoint};
use triptych_proto::v1;
use triptych_proto::v1::encode_event::Kind as Event;
use triptych_proto::v1::encoder_worker_client::EncoderWorkerClient;
use triptych_proto::v1::pd_generate_response::Kind;
use triptych_proto::v1::prefill_decode_worker_client::PrefillDecodeWorkerClient;
use triptych_tests::client::{about_images, connect, generate};
use triptych_tests::cluster::{Cluster, reqwest_client, sum_series};
use triptych_tests::process::{Process, eventually, free_port, signal};
use triptych_tests::samples::{heldout, models_dir};

const MODEL: &str = "shapes-qwen2-vl";
const KEY: [u8; 32] = [7; 32];

/// Starts a worker; with its channel and the URL of its metrics.
async fn start(ec: &str, flags: &[&str]) -> (Process, Channel, String) {
    let grpc = format!("127.0.0.1:{}", free_port());
    let admin = format!("127.0.0.1:{}", free_port());
    let model = format!("{MODEL}={}", models_dir().join(MODEL).display());
    let args = ["pd", "--with-encoder", "--grpc", &grpc, "--admin", &admin, "--ec", ec, "--model", &model];
    let mut worker = Process::start(&[&args[..], flags].concat());
    let url = format!("http://{admin}");
    let client = reqwest_client();
    eventually("the worker is ready", async || {
        assert!(worker.exited().is_none(), "it ended early:\n{}", worker.log());
        client.get(format!("{url}/readyz")).send().await.ok().filter(|r| r.status().is_success())
    })
    .await;
    let channel = Endpoint::from_shared(format!("http://{grpc}")).expect("an address");
    (worker, channel.connect().await.expect("it listens"), url)
}

/// An encode job for an image.
async fn job(encoder: &mut EncoderWorkerClient<Channel>) -> v1::EncodeRequest {
    let described = encoder.describe(v1::DescribeRequest {}).await.expect("it answers").into_inner();
    assert!(described.encodes);
    v1::EncodeRequest {
        request_id: format!("req-{:032x}", 1),
        model: MODEL.into(),
        key: KEY.to_vec().into(),
        modality: v1::Modality::Image.into(),
        item: heldout("scene.png").into(),
        fingerprint: described.models[0].encoders[0].fingerprint.clone(),
        ..v1::EncodeRequest::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_item_encoded_on_the_pd_worker_is_not_loaded_from_the_store() {
    let dir = tempfile::tempdir().expect("a directory");
    let (mut worker, channel, admin) = start(&format!("disk:{}", dir.path().display()), &[]).await;
    let mut encoder = EncoderWorkerClient::new(channel.clone());
    let mut pd = PrefillDecodeWorkerClient::new(channel.clone());
    let described = pd.describe(v1::DescribeRequest {}).await.expect("it answers").into_inner();
    assert!(described.encodes);

    let job = job(&mut encoder).await;
    let mut events = encoder.encode(job).await.expect("a job").into_inner();
    let first = events.message().await.expect("no failure").expect("an event").kind;
    let Some(Event::Announced(item)) = first else { panic!("{first:?}") };
    let question = about_images("What is in this picture?", vec![Vec::new()]);
    let request = v1::PdGenerateRequest {
        request_id: format!("req-{:032x}", 2),
        model: MODEL.into(),
        prompt: question.prompt,
        items: vec![item],
        sampling: question.sampling,
        hints: vec![v1::ItemHint { pending: true, peers: Vec::new() }],
        ..v1::PdGenerateRequest::default()
    };
    let mut stream = pd.generate(request).await.expect("admitted").into_inner();
    let mut text = String::new();
    loop {
        match stream.message().await.expect("no failure").expect("a summary ends it").kind {
            Some(Kind::Delta(delta)) => text.push_str(&delta.text),
            Some(Kind::Summary(_)) => break,
            None => {}
        }
    }
    assert!(!text.is_empty());
    let ready = events.message().await.expect("no failure").expect("an end").kind;
    assert!(matches!(ready, Some(Event::Ready(_))), "{ready:?}");

    let metrics = reqwest_client().get(format!("{admin}/metrics")).send().await.expect("metrics");
    let metrics = metrics.text().await.expect("text");
    assert_eq!(sum_series(&metrics, "triptych_encodes_total"), 1.0);
    assert!(!metrics.contains("triptych_ec_hits_total{tier=\"disk\"}"), "{metrics}");
    let files = std::fs::read_dir(dir.path()).expect("a directory").count();
    assert!(files > 0, "it is published");

    let mut states = pd.watch(v1::WatchRequest {}).await.expect("a stream of states").into_inner();
    let state = states.message().await.expect("no failure").expect("a state");
    assert_eq!(state.resident_added, [KEY.to_vec()]);
    signal(worker.pid(), "TERM");
    assert!(worker.wait().await.success());
}

/// The worker's current metrics.
async fn counts(admin: &str) -> impl Fn(&str) -> f64 {
    let metrics = reqwest_client().get(format!("{admin}/metrics")).send().await.expect("metrics");
    let metrics = metrics.text().await.expect("text");
    move |name: &str| sum_series(&metrics, name)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decoding_continues_between_the_layers_of_a_colocated_encode() {
    const N_ITEMS: u8 = 16;
    const N_TOKENS: u32 = 800;
    // Less than a layer's share of any image: one layer between two steps, never two.
    let dir = tempfile::tempdir().expect("a directory");
    let ec = format!("disk:{}", dir.path().display());
    let (mut worker, channel, admin) = start(&ec, &["--encoder-token-budget", "1"]).await;
    let mut encoder = EncoderWorkerClient::new(channel.clone());
    let mut pd = PrefillDecodeWorkerClient::new(channel);
    let question = about_images("What is in this picture?", Vec::new());
    let request = v1::PdGenerateRequest {
        request_id: format!("req-{:032x}", 3),
        model: MODEL.into(),
        prompt: question.prompt,
        sampling: Some(v1::Sampling {
            temperature: Some(0.0),
            ignore_eos: true,
            max_tokens: Some(N_TOKENS),
            ..v1::Sampling::default()
        }),
        ..v1::PdGenerateRequest::default()
    };
    let mut stream = pd.generate(request).await.expect("admitted").into_inner();
    stream.message().await.expect("no failure").expect("it writes");
    let one = job(&mut encoder).await;
    let jobs = (0..N_ITEMS).map(|i| {
        let mut encoder = encoder.clone();
        let one = one.clone();
        let job = v1::EncodeRequest { key: vec![i; 32].into(), request_id: format!("req-{i:032x}"), ..one };
        tokio::spawn(async move {
            let mut events = encoder.encode(job).await.expect("a job").into_inner();
            while let Some(event) = events.message().await.expect("no failure") {
                if let Some(Event::Ready(_)) = event.kind {
                    return;
                }
            }
            panic!("a job ended without an end");
        })
    });
    let jobs: Vec<_> = jobs.collect();
    let summary = loop {
        match stream.message().await.expect("no failure").expect("a summary ends it").kind {
            Some(Kind::Summary(summary)) => break summary,
            _ => continue,
        }
    };
    assert_eq!(summary.usage.expect("usage").completion_tokens, N_TOKENS);
    for job in jobs {
        job.await.expect("it is encoded");
    }
    let of = counts(&admin).await;
    let tokens = of("triptych_encoder_while_decoding_tokens_total");
    let steps = of("triptych_engine_steps_after_encode_total");
    let most = of("triptych_encoder_between_steps_max_tokens");
    let budget = of("triptych_encoder_between_steps_budget_tokens");
    assert_eq!(budget, 1.0);
    assert!(
        tokens > 0.0 && steps > 1.0,
        "{tokens} tokens were encoded during decoding, before {steps} steps"
    );
    assert!(tokens <= most * steps, "{tokens} tokens, at most {most} before a step, before {steps} steps");
    // Four layers and the projector: five parts. A batch has at most all images.
    let all = of("triptych_encode_batch_tokens_sum");
    assert!(most <= (all / 5.0).ceil(), "{most} tokens between two steps, where all images have {all}");
    signal(worker.pid(), "TERM");
    assert!(worker.wait().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_without_encoder_workers_answers_about_images_if_its_pd_workers_encode() {
    let cluster = Cluster::start(&["--encoders", "0", "--with-encoder", "--drain-grace", "5"]).await;
    assert!(cluster.pids("encoder").is_empty());
    let mut request = about_images("What is in this picture?", vec![heldout("scene.png")]);
    request.model = MODEL.into();
    let answer = generate(&mut connect(&cluster.grpc).await, request).await.expect("an answer");
    assert!(!answer.text.is_empty());
    assert_eq!(cluster.metric("pd-0", "triptych_encodes_total").await, 1.0);
}
