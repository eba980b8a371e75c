//! An item is encoded once: repeated requests hit the cache, concurrent ones share the encode.

use triptych_proto::v1::ItemSource;
use triptych_tests::client::{about_images, connect, generate};
use triptych_tests::cluster::Cluster;
use triptych_tests::samples::heldout;

const ENCODES: &str = "triptych_encodes_total";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_image_again_costs_no_encode() {
    let cluster = Cluster::start(&[]).await;
    let mut client = connect(&cluster.grpc).await;
    let request = about_images("What is in this picture?", vec![heldout("scene.png")]);
    let first = generate(&mut client, request.clone()).await.expect("an answer");
    let second = generate(&mut client, request).await.expect("an answer");
    assert_eq!(first.text, second.text);
    assert_eq!(first.summary.item_sources, [i32::from(ItemSource::Encoded)]);
    assert_eq!(second.summary.item_sources, [i32::from(ItemSource::Cached)]);
    assert_eq!(cluster.metric("encoder-0", ENCODES).await, 1.0);
    // The prompt is cached too, except for its last partial block.
    let cached =
        |answer: &triptych_tests::client::Answer| answer.summary.usage.unwrap_or_default().cached_tokens;
    let n_prompt = second.summary.usage.unwrap_or_default().prompt_tokens;
    assert_eq!((cached(&first), cached(&second)), (0, (n_prompt - 1) / 32 * 32));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_image_many_times_at_once_costs_one_encode() {
    let cluster = Cluster::start(&["--encoders", "2"]).await;
    let client = connect(&cluster.grpc).await;
    let ask = || {
        let mut client = client.clone();
        let request = about_images("What is in this picture?", vec![heldout("scene.png")]);
        async move { generate(&mut client, request).await.expect("an answer").text }
    };
    let answers = futures::future::join_all((0..8).map(|_| ask())).await;
    assert!(answers.iter().all(|a| *a == answers[0]), "{answers:?}");
    let encodes = cluster.metric("encoder-0", ENCODES).await + cluster.metric("encoder-1", ENCODES).await;
    assert_eq!(encodes, 1.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn text_goes_directly_to_the_decoder() {
    let cluster = Cluster::start(&[]).await;
    let mut client = connect(&cluster.grpc).await;
    let mut request = about_images("Hello", Vec::new());
    request.model = "shapes-qwen2-vl".into();
    assert!(!generate(&mut client, request).await.expect("an answer").text.is_empty());
    assert_eq!(cluster.metric("encoder-0", ENCODES).await, 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_store_outlives_the_cluster() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = format!("disk:{}", dir.path().display());
    let request = about_images("What is in this picture?", vec![heldout("scene.png")]);
    for expect in [ItemSource::Encoded, ItemSource::Cached] {
        let cluster = Cluster::start(&["--ec", &store]).await;
        let mut client = connect(&cluster.grpc).await;
        let answer = generate(&mut client, request.clone()).await.expect("an answer");
        assert_eq!(answer.summary.item_sources, [i32::from(expect)]);
    }
}
