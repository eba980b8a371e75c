//! A cluster over mutual TLS, as an operator sets it up across machines.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use std::path::Path;
use triptych_tests::client::{about_images, connect, generate};
use triptych_tests::cluster::reqwest_client;
use triptych_tests::process::{Process, eventually, free_port};
use triptych_tests::samples::{heldout, models_dir};

/// Writes a CA, and a certificate for this machine's loopback address.
fn certificates(dir: &Path) {
    let mut params = CertificateParams::new(Vec::new()).expect("parameters");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("a CA");
    let key = KeyPair::generate().expect("a key");
    let part = CertificateParams::new(vec!["127.0.0.1".to_owned()]).expect("parameters");
    let part = part.signed_by(&key, &ca).expect("a certificate");
    for (name, text) in [("ca.pem", ca.pem()), ("part.pem", part.pem()), ("part.key", key.serialize_pem())] {
        std::fs::write(dir.join(name), text).expect("the folder can be written");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_over_mutual_tls_answers_and_refuses_plaintext() {
    let dir = tempfile::tempdir().expect("a folder");
    certificates(dir.path());
    let file = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_owned();
    let cert = file("part.pem");
    let key = file("part.key");
    let ca = file("ca.pem");
    let tls = ["--tls-cert", &cert, "--tls-key", &key, "--tls-ca", &ca];
    let [store, encoder, pd, http, grpc] = std::array::from_fn(|_| format!("127.0.0.1:{}", free_port()));
    let model = models_dir().join("shapes-qwen2-vl");
    let model = model.to_str().expect("UTF-8");
    let ec = format!("grpc://{store}");
    let start = |args: &[&str]| Process::start(&[args, &tls].concat());
    let _store = start(&["store", "--grpc", &store]);
    let encoder_process = start(&["encoder", "--grpc", &encoder, "--model", model, "--ec", &ec]);
    let _pd = start(&["pd", "--grpc", &pd, "--model", model, "--ec", &ec]);
    let _proxy =
        start(&["proxy", "--http", &http, "--grpc", &grpc, "--encoder", &encoder, "--pd", &pd, "--ec", &ec]);
    let client = reqwest_client();
    let url = format!("http://{http}/readyz");
    eventually("the proxy is ready", async || {
        client.get(&url).send().await.ok().filter(|r| r.status().is_success())
    })
    .await;
    let mut client = connect(&format!("http://{grpc}")).await;
    let request = about_images("What is in this picture?", vec![heldout("scene.png")]);
    let answer = generate(&mut client, request).await.expect("an answer");
    assert!(!answer.text.is_empty());
    for part in [&store, &encoder, &pd] {
        let answer = reqwest_client().get(format!("http://{part}/")).send().await;
        assert!(answer.is_err(), "{part} answers plaintext");
    }
    eventually("the log has the refused peer", async || {
        encoder_process.log().contains("TLS handshake refused").then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plaintext_beyond_this_machine_is_refused_at_the_start() {
    let address = format!("0.0.0.0:{}", free_port());
    let mut store = Process::start(&["store", "--grpc", &address]);
    assert_eq!(store.wait().await.code(), Some(2));
    let log =
        eventually("the cause is printed", async || Some(store.log()).filter(|log| log.contains("error:")))
            .await;
    assert!(log.contains("--insecure-plaintext") && log.contains("--tls-cert"), "{log}");
    let mut asked = Process::start(&["store", "--grpc", &address, "--insecure-plaintext"]);
    eventually("it is ready", async || asked.log().contains("store ready").then_some(())).await;
    assert!(asked.exited().is_none());
}
