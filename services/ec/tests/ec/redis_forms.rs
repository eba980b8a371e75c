//! The Redis store over every form of Redis: TLS with a user who may little, sentinels, a cluster.

use redis::Commands;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use triptych_core::ContentKey;
use triptych_ec::conformance::{self, sample_output};
use triptych_ec::error::chain;
use triptych_ec::object::encode;
use triptych_ec::store::redis::{RedisSetting, RedisStore, RedisTuning};
use triptych_ec::testing::{RedisCluster, RedisOptions, RedisSentinel, RedisServer, TlsClients};
use triptych_ec::{EcError, EcStore, PutOutcome};

use crate::key;

/// Exactly the permissions that the store's documentation lists.
const USER: &str = "user ec on >s3cret ~triptych:ec:* &triptych:ec:* +get +set +getrange +strlen +unlink +exists +scan \
    +eval +time +pttl +pexpire +publish +subscribe +ping\nuser default off\n";

/// With times for a busy machine.
pub fn store(url: &str) -> RedisStore {
    let (response_timeout, connection_timeout) = (Duration::from_secs(10), Duration::from_secs(10));
    let tuning = RedisTuning {
        response_timeout,
        head_timeout: response_timeout,
        connection_timeout,
        ..RedisTuning::default()
    };
    RedisStore::new(url, tuning, &conformance::limits()).unwrap()
}

/// Certificates of a server at `localhost` and of a client, and who signed both, as files.
struct Certificates {
    folder: tempfile::TempDir,
}

impl Certificates {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let ca_key = rcgen::KeyPair::generate().unwrap();
        let mut ca = rcgen::CertificateParams::new(Vec::<String>::new()).unwrap();
        // Subjects that differ: OpenSSL takes a certificate whose issuer is its subject for one that signed itself.
        ca.distinguished_name.push(rcgen::DnType::CommonName, "authority");
        ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        std::fs::write(folder.path().join("ca.pem"), ca.self_signed(&ca_key).unwrap().pem()).unwrap();
        let issuer = rcgen::Issuer::new(ca, ca_key);
        for name in ["localhost", "client"] {
            let key = rcgen::KeyPair::generate().unwrap();
            let mut params = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
            params.distinguished_name.push(rcgen::DnType::CommonName, name);
            std::fs::write(folder.path().join(format!("{name}.key")), key.serialize_pem()).unwrap();
            let cert = params.signed_by(&key, &issuer).unwrap();
            std::fs::write(folder.path().join(format!("{name}.pem")), cert.pem()).unwrap();
        }
        Self { folder }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn server(&self, options: RedisOptions, clients: TlsClients) -> RedisServer {
        let [cert, key, ca] = ["localhost.pem", "localhost.key", "ca.pem"].map(|name| self.file(name));
        RedisServer::start_with(&options.with_tls(&cert, &key, &ca, clients))
    }
}

fn with_user(options: RedisOptions, folder: &Path) -> RedisOptions {
    let file = folder.join("users.acl");
    std::fs::write(&file, USER).unwrap();
    options.with("aclfile", &[&file.display().to_string()])
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_with_a_user_of_few_permissions_conforms() {
    let certificates = Certificates::new();
    let options = with_user(RedisOptions::default(), certificates.folder.path());
    let server = certificates.server(options, TlsClients::Anyone);
    let ca = certificates.file("ca.pem");
    let url = server.url().replace("://", "://ec:s3cret@");
    let store = store(&format!("{url}?ca={}", ca.display()));
    conformance::run(Arc::new(store)).await;
}

#[tokio::test]
async fn a_server_with_an_untrusted_certificate_is_unavailable_and_so_is_one_that_requires_one() {
    let certificates = Certificates::new();
    let server = certificates.server(RedisOptions::default(), TlsClients::WithCertificate);
    let file = |name| certificates.file(name).display().to_string();
    let (ca, cert, key) = (file("ca.pem"), file("client.pem"), file("client.key"));
    let mut outcomes = Vec::new();
    for query in
        [format!("ca={ca}&cert={cert}&key={key}"), format!("ca={ca}"), format!("cert={cert}&key={key}")]
    {
        outcomes.push(store(&format!("{}?{query}", server.url())).ping().await);
    }
    assert!(outcomes[0].is_ok(), "{:?}", outcomes[0]);
    for outcome in &outcomes[1..] {
        assert!(
            matches!(outcome, Err(EcError::Unavailable { .. } | EcError::TimedOut { .. })),
            "{outcome:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_master_that_sentinels_name_conforms() {
    let sentinel = RedisSentinel::start().without_failover();
    conformance::run(Arc::new(store(&sentinel.url()))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_conforms() {
    let cluster = RedisCluster::start().without_failover();
    conformance::run(Arc::new(store(&cluster.url()))).await;
}

#[tokio::test]
async fn in_a_cluster_everything_of_a_key_is_on_one_node_and_keys_are_on_all() {
    let cluster = RedisCluster::start().without_failover();
    // Any one node tells of the others.
    let url = cluster.url();
    let store = store(url.split_once(',').unwrap().0);
    let keys: Vec<ContentKey> = (1..=24).map(key).collect();
    let mut nodes = BTreeSet::new();
    for key in &keys {
        let object = encode(&sample_output(*key, 5 << 18));
        assert_eq!(store.put_if_absent(key, object).await.unwrap(), PutOutcome::Stored);
        store.acquire(key, Duration::from_secs(60)).await.unwrap();
        let name = RedisStore::manifest_key(key);
        let port = cluster.primary_of(&name);
        nodes.insert(port);
        let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).unwrap();
        let there: Vec<String> = client.get_connection().unwrap().keys(format!("{name}*")).unwrap();
        assert_eq!(there.len(), 1 + 2 + 2, "manifest, chunks, lease and fence: {there:?}");
    }
    assert_eq!(nodes.len(), 3);
    let heads = store.heads(&keys).await.unwrap();
    assert!(heads.iter().zip(&keys).all(|(head, key)| head.as_ref().is_some_and(|head| head.key == *key)));
    let mut listed = Vec::new();
    while let page @ [_, ..] = &store.list(listed.last(), 7).await.unwrap()[..] {
        assert!(page.len() <= 7);
        listed.extend(page.iter().map(|listed| listed.key));
    }
    assert_eq!(listed, keys, "pages over all nodes, in order, each once");
}

#[tokio::test]
async fn sentinels_that_do_not_know_the_name_or_are_no_sentinels_are_unavailable() {
    let sentinel = RedisSentinel::start().without_failover();
    let other = sentinel.url().replace("/main", "/other");
    let server = RedisServer::start();
    let none = format!("redis+sentinel://127.0.0.1:{}/main", server.port());
    let plain = format!("redis+cluster://127.0.0.1:{}", server.port());
    for url in [other, none, plain] {
        let e = store(&url).ping().await.unwrap_err();
        assert!(matches!(e, EcError::Unavailable { .. }), "{url}: {}", chain(&e));
    }
}

#[tokio::test]
async fn certificates_that_are_none_are_refused_when_opened() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ca.pem");
    std::fs::write(&file, "-----BEGIN CERTIFICATE-----\nbm90IG9uZQ==\n-----END CERTIFICATE-----\n").unwrap();
    let setting: RedisSetting = format!("rediss://:s3cret@h?ca={}", file.display()).parse().unwrap();
    let e = RedisStore::open(&setting, RedisTuning::default(), &conformance::limits()).unwrap_err();
    assert!(matches!(e, EcError::Config { .. }) && !chain(&e).contains("s3cret"), "{}", chain(&e));
}

#[tokio::test]
async fn sentinels_and_servers_may_want_a_password() {
    let mut sentinel = RedisSentinel::start_with_password("s3cret");
    let with = store(&sentinel.url());
    let object = encode(&sample_output(key(1), 64));
    assert_eq!(with.put_if_absent(&key(1), object.clone()).await.unwrap(), PutOutcome::Stored);
    for who in ["", ":wr0ng@"] {
        let e = store(&sentinel.url().replace(":s3cret@", who)).ping().await.unwrap_err();
        assert!(matches!(e, EcError::Unavailable { .. }) && !chain(&e).contains("wr0ng"), "{}", chain(&e));
    }
    let dead = sentinel.kill_primary();
    sentinel.wait_for_another_than(dead);
    let until = tokio::time::Instant::now() + crate::LIMIT;
    while let Err(e) = with.put_if_absent(&key(2), object.clone()).await {
        assert!(e.is_retryable() && tokio::time::Instant::now() < until, "{}", chain(&e));
    }
}

/// MOVED, ASK and TRYAGAIN: followed, or a retryable error, and never a wrong answer.
#[tokio::test]
async fn a_slot_that_moves_to_another_node_is_followed() {
    let cluster = RedisCluster::start().without_failover();
    let store = store(&cluster.url());
    let object = encode(&sample_output(key(1), 5 << 18));
    store.put_if_absent(&key(1), object.clone()).await.unwrap();
    let name = RedisStore::manifest_key(&key(1));
    let before = cluster.primary_of(&name);
    let moved = cluster.begin_move(&name);
    assert_eq!(store.get(&key(1)).await.unwrap(), Some(object.clone()), "what was there is still there");
    assert!(store.delete(&key(1)).await.unwrap());
    assert_eq!(store.put_if_absent(&key(1), object.clone()).await.unwrap(), PutOutcome::Stored);
    assert_eq!(store.get(&key(1)).await.unwrap(), Some(object.clone()), "what is new is at the other node");
    assert!(store.heads(&[key(1)]).await.unwrap()[0].is_some());
    if let Err(e) = store.acquire(&key(1), Duration::from_secs(60)).await {
        assert!(e.is_retryable(), "two keys may be on two nodes for the moment: {}", chain(&e));
    }
    cluster.finish_move(&moved);
    assert_ne!(cluster.primary_of(&name), before);
    assert_eq!(store.get(&key(1)).await.unwrap(), Some(object.clone()));
    assert_eq!(store.put_if_absent(&key(1), object).await.unwrap(), PutOutcome::AlreadyThere);
    store.acquire(&key(1), Duration::from_secs(60)).await.unwrap();
    assert!(store.delete(&key(1)).await.unwrap());
}
