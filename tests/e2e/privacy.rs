//! No byte of an item reaches a PD worker, and no credentials or content of clients reach a log.

use triptych_tests::client::{about_images, connect, generate};
use triptych_tests::cluster::reqwest_client;
use triptych_tests::process::{Process, binary, eventually, free_port};
use triptych_tests::samples::{ask_images, data_url, heldout, models_dir};
use triptych_tests::tap::Tap;

/// Bytes of an image chunk that must not be found: too long for chance, shorter than any frame.
const CHUNK: usize = 24;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_bytes_of_an_image_never_reach_a_pd_worker() {
    let address = |port: u16| format!("127.0.0.1:{port}");
    let [store, encoder, pd, http, grpc] = std::array::from_fn(|_| address(free_port()));
    let model = models_dir().join("shapes-qwen2-vl");
    let model = model.to_str().expect("UTF-8");
    let store_tap = Tap::start(store.clone()).await;
    let ec = format!("grpc://{store}");
    let tapped_ec = format!("grpc://{}", store_tap.address);
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
    let client = reqwest_client();
    let url = format!("http://{http}/readyz");
    eventually("the proxy is ready", async || {
        client.get(&url).send().await.ok().filter(|r| r.status().is_success())
    })
    .await;

    let image = heldout("scene.png");
    let mut client = connect(&format!("http://{grpc}")).await;
    let request = about_images("What is in this picture?", vec![image.clone()]);
    let answer = generate(&mut client, request).await.expect("an answer");
    assert!(!answer.text.is_empty());

    let asked = pd_tap.recorded();
    let loaded = store_tap.recorded();
    for (wire, sign) in [(&asked, b"What is in this picture?".as_slice()), (&loaded, b"ec_cache")] {
        assert!(wire.windows(sign.len()).any(|w| w == sign), "the relay recorded no traffic");
    }
    for wire in [asked, loaded] {
        let pieces: std::collections::HashSet<&[u8]> = image.chunks_exact(CHUNK).collect();
        assert!(!wire.windows(CHUNK).any(|w| pieces.contains(w)), "a chunk of the image was sent");
    }
}

/// Client data that must not be in a log or a metric: the tenant, and (below) the question.
const TENANT: &str = "tenant-of-the-privacy-test";
const QUESTION: &str = "Is the quick brown zebra in this picture?";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_tenants_and_questions_reach_no_log() {
    let dir = tempfile::tempdir().expect("a folder");
    let keys = dir.path().join("keys");
    let secret = dir.path().join("jwt");
    let key = make_key(&keys);
    std::fs::write(&secret, "the secret of this test, longer than 32 bytes")
        .expect("the folder can be written");
    let keys = keys.to_str().expect("UTF-8");
    let secret = secret.to_str().expect("UTF-8");
    let [store, encoder, pd, http, grpc] = std::array::from_fn(|_| format!("127.0.0.1:{}", free_port()));
    let model = models_dir().join("shapes-qwen2-vl");
    let model = model.to_str().expect("UTF-8");
    let ec = format!("grpc://{store}");
    let log = ["--log", "debug,h2=info,hyper=info"];
    let start = |args: &[&str]| Process::start(&[args, &log].concat());
    let proxy = format!(
        "proxy --http {http} --grpc {grpc} --encoder {encoder} --pd {pd} --ec {ec} --api-keys {keys} \
         --jwt-keys {secret} --jwt-issuer me --jwt-audience you"
    );
    let processes = [
        start(&["store", "--grpc", &store]),
        start(&["encoder", "--grpc", &encoder, "--model", model, "--ec", &ec]),
        start(&["pd", "--grpc", &pd, "--model", model, "--ec", &ec]),
        start(&proxy.split(' ').collect::<Vec<_>>()),
    ];
    let client = reqwest_client();
    let url = |path: &str| format!("http://{http}{path}");
    eventually("the proxy is ready", async || {
        client.get(url("/readyz")).send().await.ok().filter(|r| r.status().is_success())
    })
    .await;
    let image = heldout("scene.png");
    let ask = async |key: &str, question: &str, image: &[u8]| {
        let body = ask_images("shapes-qwen2-vl", question, &[image]);
        let request = client.post(url("/v1/chat/completions")).bearer_auth(key).json(&body);
        request.send().await.expect("the proxy answers").status().as_u16()
    };
    let jwt = "eyJhbGciOiJIUzI1NiJ9.eyJ0ZW5hbnQiOiJ4In0.c2lnbmF0dXJlLXRoYXQtaXMtbm9uZQ";
    assert_eq!(ask(&key, QUESTION, &image).await, 200);
    assert_eq!(ask(&key, QUESTION, b"no image, but these words").await, 400);
    assert_eq!(ask(&key[1..], QUESTION, &image).await, 401);
    assert_eq!(ask(jwt, QUESTION, &image).await, 401);
    let metrics = client.get(url("/metrics")).send().await.expect("metrics").text().await.expect("text");
    let base64 = data_url(&image);
    let secrets = [
        &key[1..],
        jwt,
        &jwt[jwt.len() - 20..],
        TENANT,
        QUESTION,
        "quick brown zebra",
        "no image, but these words",
        "the secret of this test",
        &base64[100..140],
    ];
    let logs = processes.iter().map(Process::log).chain([metrics]);
    for (log, of) in logs.zip(["store", "encoder", "pd", "proxy", "metrics"]) {
        has_none_of(&secrets, &log, of);
    }
}

fn has_none_of(secrets: &[&str], log: &str, of: &str) {
    for secret in secrets {
        assert!(!log.contains(secret), "{secret:?} is in the log of the {of}:\n{log}");
    }
}

/// A key for the tenant of this test, and a file with its hash.
fn make_key(file: &std::path::Path) -> String {
    let made = std::process::Command::new(binary()).args(["keys", "new", "--tenant", TENANT]).output();
    let made = made.expect("keys are made");
    std::fs::write(file, made.stdout).expect("the folder can be written");
    let stderr = String::from_utf8(made.stderr).expect("UTF-8");
    stderr.lines().last().expect("a key").trim().to_owned()
}
