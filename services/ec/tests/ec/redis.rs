//! The Redis store against a real server: the conformance suite, and what only a server can do wrong.

use bytes::Bytes;
use redis::Commands;
use std::sync::Arc;
use std::time::{Duration, Instant};
use triptych_core::ContentKey;
use triptych_ec::conformance::{self, sample_output, sample_variant};
use triptych_ec::object::{decode, encode};
use triptych_ec::store::redis::{RedisStore, RedisTuning};
use triptych_ec::testing::{RedisServer, free_port};
use triptych_ec::{EcError, EcSetting, EcStore, PutOutcome, open};

use crate::{LIMIT, key};

fn store(server: &RedisServer) -> RedisStore {
    let tuning = RedisTuning { response_timeout: Duration::from_secs(10), ..RedisTuning::default() };
    RedisStore::new(&server.url(), tuning, &conformance::limits()).unwrap()
}

/// For asking about and breaking things behind the store's back.
fn by_hand(server: &RedisServer) -> redis::Connection {
    redis::Client::open(server.url()).unwrap().get_connection().unwrap()
}

fn keys_like(server: &RedisServer, pattern: String) -> Vec<String> {
    let mut keys: Vec<String> = by_hand(server).keys(pattern).unwrap();
    keys.sort();
    keys
}

async fn put(store: &RedisStore, key: ContentKey, n_bytes: usize) -> Bytes {
    let object = encode(&sample_output(key, n_bytes));
    assert_eq!(store.put_if_absent(&key, object.clone()).await.unwrap(), PutOutcome::Stored);
    object
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_conforms() {
    let server = RedisServer::start();
    conformance::run(Arc::new(store(&server))).await;
}

#[tokio::test]
async fn chunks_are_of_one_mebibyte_and_everything_expires_the_manifest_first() {
    let server = RedisServer::start();
    put(&store(&server), key(1), 5 << 19).await;
    let manifest = RedisStore::manifest_key(&key(1));
    let keys = keys_like(&server, format!("{manifest}*"));
    assert_eq!(keys.len(), 1 + 3, "{keys:?}");
    let mut redis = by_hand(&server);
    let manifest_len: usize = redis.strlen(&manifest).unwrap();
    assert!(manifest_len < 1 << 10, "a manifest is as large as its object's head: {manifest_len}");
    let manifest_ttl: i64 = redis.ttl(&manifest).unwrap();
    for chunk in keys.iter().filter(|k| **k != manifest) {
        let len: usize = redis.strlen(chunk).unwrap();
        assert!(len <= 1 << 20, "{len}");
        assert!(redis.ttl::<_, i64>(chunk).unwrap() > manifest_ttl);
    }
    assert!((1..=3600).contains(&manifest_ttl), "{manifest_ttl}");
}

#[tokio::test]
async fn an_object_whose_chunk_is_gone_is_a_miss_and_can_be_put_again() {
    let server = RedisServer::start();
    let store = store(&server);
    for n in 0..3 {
        let object = put(&store, key(1), 5 << 19).await;
        let chunk = keys_like(&server, format!("{}:*:c{n}", RedisStore::manifest_key(&key(1))));
        assert_eq!(by_hand(&server).del::<_, i64>(&chunk).unwrap(), 1, "{chunk:?}");
        assert!(store.heads(&[key(1)]).await.unwrap()[0].is_some(), "heads cannot know");
        assert_eq!(store.get(&key(1)).await.unwrap(), None);
        let left = keys_like(&server, format!("{}*", RedisStore::manifest_key(&key(1))));
        assert!(left.is_empty(), "the rest was removed: {left:?}");
        assert_eq!(store.put_if_absent(&key(1), object.clone()).await.unwrap(), PutOutcome::Stored);
        assert_eq!(store.get(&key(1)).await.unwrap(), Some(object));
        store.delete(&key(1)).await.unwrap();
    }
}

#[tokio::test]
async fn a_chunk_of_the_wrong_length_is_corrupt() {
    let server = RedisServer::start();
    let store = store(&server);
    put(&store, key(1), 5 << 19).await;
    let chunk = keys_like(&server, format!("{}:*:c1", RedisStore::manifest_key(&key(1)))).remove(0);
    by_hand(&server).set::<_, _, ()>(chunk, "short").unwrap();
    assert!(matches!(store.get(&key(1)).await, Err(EcError::Corrupt { .. })));
}

#[tokio::test]
async fn foreign_values_under_a_key_are_corrupt_and_make_room_by_quarantine() {
    let server = RedisServer::start();
    let store = store(&server);
    let mut redis = by_hand(&server);
    let object = encode(&sample_output(key(1), 64));
    let name = RedisStore::manifest_key(&key(1));
    for kind in ["text", "cut manifest", "list"] {
        match kind {
            "text" => redis.set::<_, _, ()>(&name, "hello").unwrap(),
            "cut manifest" => redis.set::<_, _, ()>(&name, b"TEC1\x01\x02").unwrap(),
            _ => redis.rpush::<_, _, ()>(&name, "hello").unwrap(),
        }
        assert!(matches!(store.get(&key(1)).await, Err(EcError::Corrupt { .. })), "{kind}");
        assert_eq!(store.heads(&[key(2), key(1)]).await.unwrap(), [None, None], "{kind}");
        assert_eq!(
            store.put_if_absent(&key(1), object.clone()).await.unwrap(),
            PutOutcome::AlreadyThere,
            "{kind}"
        );
        assert!(store.quarantine(&key(1)).await.unwrap(), "{kind}");
        assert_eq!(store.put_if_absent(&key(1), object.clone()).await.unwrap(), PutOutcome::Stored, "{kind}");
        store.delete(&key(1)).await.unwrap();
    }
}

/// A slow writer has put its chunks when another one stores: the chunks do not mix, and the loser's are removed.
#[tokio::test(flavor = "multi_thread")]
async fn chunks_of_two_writers_never_mix() {
    let server = RedisServer::start();
    let (a, b) = (Arc::new(store(&server)), Arc::new(store(&server)));
    for round in 0..8 {
        let key = key(round);
        let writer = |store: Arc<RedisStore>, variant| {
            tokio::spawn(async move {
                store.put_if_absent(&key, encode(&sample_variant(key, 5 << 19, variant))).await.unwrap()
            })
        };
        let outcomes = [writer(a.clone(), 1), writer(b.clone(), 2)];
        let mut stored = 0;
        for outcome in outcomes {
            stored += usize::from(outcome.await.unwrap() == PutOutcome::Stored);
        }
        assert_eq!(stored, 1);
        let object = a.get(&key).await.unwrap().unwrap();
        decode(object, &key, &conformance::limits()).unwrap();
        let keys = keys_like(&server, format!("{}*", RedisStore::manifest_key(&key)));
        assert_eq!(keys.len(), 1 + 3, "only the winner's chunks are left: {keys:?}");
    }
}

#[tokio::test]
async fn chunks_without_a_manifest_are_invisible() {
    let server = RedisServer::start();
    let store = store(&server);
    let object = put(&store, key(1), 5 << 19).await;
    by_hand(&server).del::<_, ()>(RedisStore::manifest_key(&key(1))).unwrap();
    assert_eq!(store.get(&key(1)).await.unwrap(), None);
    assert_eq!(store.put_if_absent(&key(1), object.clone()).await.unwrap(), PutOutcome::Stored);
    assert_eq!(store.get(&key(1)).await.unwrap(), Some(object));
}

/// The server dies between publish and load: an error in bounded time, then a miss, then work as before.
#[tokio::test]
async fn a_server_that_dies_is_unavailable_and_a_new_one_is_used() {
    let mut server = RedisServer::start();
    let store = store(&server);
    let object = put(&store, key(1), 5 << 19).await;
    server.kill();
    let started = Instant::now();
    for _ in 0..3 {
        assert!(matches!(store.get(&key(1)).await, Err(EcError::Unavailable { .. })));
    }
    assert!(matches!(store.heads(&[key(1)]).await, Err(EcError::Unavailable { .. })));
    assert!(matches!(store.put_if_absent(&key(2), object.clone()).await, Err(EcError::Unavailable { .. })));
    assert!(matches!(store.ping().await, Err(EcError::Unavailable { .. })));
    assert!(started.elapsed() < LIMIT);
    server.restart();
    assert_eq!(until_available(&store).await, None, "nothing outlives the server");
    assert_eq!(store.put_if_absent(&key(1), object.clone()).await.unwrap(), PutOutcome::Stored);
    assert_eq!(store.get(&key(1)).await.unwrap(), Some(object));
}

/// A server that takes connections and never answers: a timeout, and no connection that stays wedged.
#[tokio::test]
async fn a_server_that_hangs_times_out_and_is_used_again_when_it_recovers() {
    let server = RedisServer::start();
    let object = put(&store(&server), key(1), 64).await;
    let tuning = RedisTuning { response_timeout: Duration::from_millis(300), ..RedisTuning::default() };
    let store = RedisStore::new(&server.url(), tuning, &conformance::limits()).unwrap();
    assert!(until_available(&store).await.is_some());
    server.pause();
    let e = tokio::time::timeout(LIMIT, store.get(&key(1))).await.expect("it must not hang").unwrap_err();
    assert!(matches!(e, EcError::TimedOut { .. }), "{e:?}");
    server.resume();
    assert_eq!(until_available(&store).await, Some(object));
}

/// The first get that is answered at all.
async fn until_available(store: &RedisStore) -> Option<Bytes> {
    let deadline = Instant::now() + LIMIT;
    loop {
        match store.get(&key(1)).await {
            Ok(object) => return object,
            Err(e) => assert!(e.is_retryable() && Instant::now() < deadline, "{e:?}"),
        }
    }
}

#[tokio::test]
async fn a_full_server_is_unavailable_with_a_reason() {
    let server = RedisServer::start();
    redis::cmd("CONFIG").arg(&["SET", "maxmemory", "1"]).exec(&mut by_hand(&server)).unwrap();
    let store = store(&server);
    let e = store.put_if_absent(&key(1), encode(&sample_output(key(1), 64))).await.unwrap_err();
    assert!(matches!(e, EcError::Unavailable { .. }));
    assert!(triptych_ec::error::chain(&e).contains("maxmemory"), "{e:?}");
    assert_eq!(store.get(&key(1)).await.unwrap(), None);
}

#[tokio::test]
async fn a_store_opens_before_its_server_and_finds_it_later() {
    let setting: EcSetting = format!("redis://127.0.0.1:{}", free_port()).parse().unwrap();
    let store = open(&setting, &conformance::limits()).await.unwrap();
    assert!(matches!(store.ping().await, Err(EcError::Unavailable { .. })));
}

#[tokio::test]
async fn passwords_are_used_and_not_shown() {
    let server = RedisServer::start();
    redis::cmd("CONFIG").arg(&["SET", "requirepass", "s3cret"]).exec(&mut by_hand(&server)).unwrap();
    let open_with = |user: &str| {
        let url = format!("redis://{user}127.0.0.1:{}", server.port());
        RedisStore::new(&url, RedisTuning::default(), &conformance::limits()).unwrap()
    };
    let store = open_with(":s3cret@");
    put(&store, key(1), 64).await;
    assert_eq!(store.describe(), format!("redis://***@127.0.0.1:{}", server.port()));
    assert!(!format!("{store:?}").contains("s3cret"));
    for user in ["", ":wr0ng@"] {
        let e = open_with(user).get(&key(1)).await.unwrap_err();
        assert!(matches!(e, EcError::Unavailable { .. }), "{e:?}");
        assert!(!triptych_ec::error::chain(&e).contains("wr0ng"));
    }
}
