//! An item is encoded once: repeated requests hit the cache, concurrent ones share the encode.

use std::path::Path;
use std::process::Command;
use triptych_proto::v1::ItemSource;
use triptych_tests::client::{about_images, connect, generate};
use triptych_tests::cluster::Cluster;
use triptych_tests::process::{eventually, signal};
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

/// Free bytes of shared memory.
fn free_shared_memory() -> u64 {
    let df = Command::new("df").args(["--block-size=1", "--output=avail", "/dev/shm"]).output().expect("df");
    String::from_utf8_lossy(&df.stdout).lines().nth(1).map_or(0, |n| n.trim().parse().expect("bytes"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_has_a_slab_of_its_own_that_outlives_its_workers_and_not_itself() {
    let mut cluster = Cluster::start(&[]).await;
    let shown = eventually("the addresses of the cluster", async || {
        let log = cluster.up.log();
        log.lines().find_map(|line| Some(line.trim().strip_prefix("EC store")?.trim().to_owned()))
    });
    let chosen = shown.await;
    if free_shared_memory() < 6 << 30 {
        assert!(chosen.starts_with("grpc:") || chosen.starts_with("shm:"), "{chosen}");
    } else {
        assert!(chosen.starts_with("shm:") && cluster.pids("store").is_empty(), "{chosen}");
    }
    let mut client = connect(&cluster.grpc).await;
    let request = about_images("What is in this picture?", vec![heldout("scene.png")]);
    let first = generate(&mut client, request.clone()).await.expect("an answer");
    assert_eq!(first.summary.item_sources, [i32::from(ItemSource::Encoded)]);
    for role in ["encoder", "pd"] {
        let old = cluster.pid(role);
        signal(old, "KILL");
        cluster.wait_replaced(role, old).await;
    }
    let again = generate(&mut client, request).await.expect("an answer");
    assert_eq!((again.text, again.summary.item_sources), (first.text, vec![i32::from(ItemSource::Cached)]));
    assert_eq!(cluster.metric("encoder-0", ENCODES).await, 0.0);
    let slab = chosen.strip_prefix("shm:").and_then(|path| path.split('?').next());
    assert!(slab.is_none_or(|slab| Path::new(slab).is_file()), "{chosen}");
    signal(cluster.up.pid(), "INT");
    assert!(cluster.up.wait().await.success());
    let dir = slab.and_then(|slab| Path::new(slab).parent());
    assert!(dir.is_none_or(|dir| !dir.exists()), "{chosen}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_that_may_have_tenants_has_a_store_process() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("empty");
    std::fs::write(&file, "").expect("a file");
    let settings = Cluster::start(&["--config", file.to_str().expect("UTF-8")]).await;
    let keys = dir.path().join("keys");
    std::fs::write(&keys, "tenant a requests_per_s=5\n").expect("a file");
    let tenants = Cluster::start_with(&[], &[("TRIPTYCH_API_KEYS", keys.into())]).await;
    for cluster in [settings, tenants] {
        assert_eq!(cluster.pids("store").len(), 1, "{}", cluster.up.log());
    }
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
