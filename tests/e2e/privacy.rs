//! No byte of an item reaches a PD worker.

use triptych_tests::client::{about_images, connect, generate};
use triptych_tests::cluster::reqwest_client;
use triptych_tests::process::{Process, eventually, free_port};
use triptych_tests::samples::{heldout, models_dir};
use triptych_tests::tap::Tap;

/// Length of a piece of the image that must not be seen: longer than chance, shorter than any frame.
const PIECE: usize = 24;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_bytes_of_an_image_never_reach_a_pd_worker() {
    let address = |port: u16| format!("127.0.0.1:{port}");
    let [store, encoder, pd, http, grpc] = std::array::from_fn(|_| address(free_port()));
    let model = models_dir().join("shapes-qwen2-vl");
    let model = model.to_str().expect("UTF-8");
    let store_tap = Tap::start(store.clone()).await;
    let (ec, tapped_ec) = (format!("grpc://{store}"), format!("grpc://{}", store_tap.address));
    let _store = Process::start(&["store", "--grpc", &store]);
    let _encoder = Process::start(&["encoder", "--grpc", &encoder, "--model", model, "--ec", &ec]);
    let _pd = Process::start(&["pd", "--grpc", &pd, "--model", model, "--ec", &tapped_ec]);
    let pd_tap = Tap::start(pd).await;
    let _proxy = Process::start(&[
        "proxy",
        "--http",
        &http,
        "--grpc",
        &grpc,
        "--encoder",
        &encoder,
        "--pd",
        &pd_tap.address,
        "--ec",
        &ec,
    ]);
    let (client, url) = (reqwest_client(), format!("http://{http}/readyz"));
    eventually("the proxy is ready", async || {
        client.get(&url).send().await.ok().filter(|r| r.status().is_success())
    })
    .await;

    let image = heldout("scene.png");
    let mut client = connect(&format!("http://{grpc}")).await;
    let request = about_images("What is in this picture?", vec![image.clone()]);
    let answer = generate(&mut client, request).await.expect("an answer");
    assert!(!answer.text.is_empty());

    let (asked, loaded) = (pd_tap.seen(), store_tap.seen());
    for (wire, sign) in [(&asked, b"What is in this picture?".as_slice()), (&loaded, b"ec_cache")] {
        assert!(wire.windows(sign.len()).any(|w| w == sign), "the tap is not on the line");
    }
    for wire in [asked, loaded] {
        let pieces: std::collections::HashSet<&[u8]> = image.chunks_exact(PIECE).collect();
        assert!(!wire.windows(PIECE).any(|w| pieces.contains(w)), "a piece of the image was on the line");
    }
}
