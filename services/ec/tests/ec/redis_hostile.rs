//! Data that an attacker with access to Redis can put under the store's keys: manifests that lie, chunks that are too
//! long, empty strings. Nothing of it is believed, costs more than the limits, or stays in the way.

use bytes::Bytes;
use redis::Commands;
use std::time::Duration;
use triptych_ec::conformance::{limits, sample_output};
use triptych_ec::object::{decode, encode};
use triptych_ec::store::redis::{CHUNK_BYTES, RedisStore, RedisTuning};
use triptych_ec::testing::RedisServer;
use triptych_ec::{EcError, EcStore, PutOutcome};

use crate::key;

fn store(server: &RedisServer) -> RedisStore {
    let tuning = RedisTuning { response_timeout: Duration::from_secs(10), ..RedisTuning::default() };
    RedisStore::new(&server.url(), tuning, &limits()).unwrap()
}

fn by_hand(server: &RedisServer) -> redis::Connection {
    redis::Client::open(server.url()).unwrap().get_connection().unwrap()
}

fn manifest(len: u64, n_first: u32, first: &[u8]) -> Vec<u8> {
    [b"TEC1".as_slice(), &len.to_le_bytes(), &7u128.to_le_bytes(), &n_first.to_le_bytes(), first].concat()
}

#[tokio::test]
async fn a_poisoned_manifest_is_corrupt_or_a_miss_and_makes_room() {
    let server = RedisServer::start();
    let store = store(&server);
    let object = encode(&sample_output(key(1), 64));
    let first = vec![0; 16 << 10];
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("a length over every limit", manifest(u64::MAX, 16 << 10, &first)),
        ("a length just over the limit", manifest(limits().max_object_bytes as u64 + 1, 16 << 10, &first)),
        ("chunks that were never written", manifest(4 << 20, 16 << 10, &first)),
        ("first bytes that are not there", manifest(100, u32::MAX, &[])),
        ("fewer first bytes than it says", manifest(100, 100, &[0; 99])),
        ("more first bytes than the object", manifest(10, 100, &[0; 100])),
        ("no first bytes", manifest(100, 0, &[])),
        ("more first bytes than a head has", manifest(1 << 20, 17 << 10, &vec![0; 17 << 10])),
        ("no length of an object", manifest(0, 0, &[])),
        ("something after the end", manifest(100, 100, &[0; 101])),
        ("a hundred megabytes", vec![b'x'; 100 << 20]),
        ("a manifest and a hundred megabytes", [manifest(100, 100, &[0; 100]), vec![0; 100 << 20]].concat()),
        ("cut off", b"TEC1\xff".to_vec()),
    ];
    for (what, raw) in cases {
        by_hand(&server).set::<_, _, ()>(RedisStore::manifest_key(&key(1)), raw).unwrap();
        assert_eq!(store.heads(&[key(1), key(2)]).await.unwrap(), [None, None], "{what}");
        match store.get(&key(1)).await {
            Ok(None) | Err(EcError::Corrupt { .. }) => {}
            Ok(Some(bytes)) => assert!(decode(bytes, &key(1), &limits()).is_err(), "{what}"),
            Err(e) => panic!("{what}: {e}"),
        }
        store.quarantine(&key(1)).await.unwrap();
        assert_eq!(store.put_if_absent(&key(1), object.clone()).await.unwrap(), PutOutcome::Stored, "{what}");
        assert_eq!(store.get(&key(1)).await.unwrap(), Some(object.clone()), "{what}");
        store.delete(&key(1)).await.unwrap();
    }
}

#[tokio::test]
async fn a_chunk_that_is_too_long_or_of_another_kind_is_corrupt() {
    let server = RedisServer::start();
    let store = store(&server);
    let output = sample_output(key(1), 5 << 19);
    store.put_if_absent(&key(1), encode(&output)).await.unwrap();
    let mut redis = by_hand(&server);
    let chunks: Vec<String> = redis.keys(format!("{}:*:c1", RedisStore::manifest_key(&key(1)))).unwrap();
    for len in [CHUNK_BYTES - 1, CHUNK_BYTES + 1, 100 << 20] {
        redis.set::<_, _, ()>(&chunks[0], vec![0; len]).unwrap();
        assert!(matches!(store.get(&key(1)).await, Err(EcError::Corrupt { .. })), "{len}");
    }
    redis.del::<_, ()>(&chunks[0]).unwrap();
    redis.rpush::<_, _, ()>(&chunks[0], "x").unwrap();
    assert!(matches!(store.get(&key(1)).await, Err(EcError::Corrupt { .. })));
    assert!(store.quarantine(&key(1)).await.unwrap());
    assert_eq!(store.get(&key(1)).await.unwrap(), None);
}

#[tokio::test]
async fn an_empty_string_is_no_manifest_and_gives_way() {
    let server = RedisServer::start();
    let store = store(&server);
    by_hand(&server).set::<_, _, ()>(RedisStore::manifest_key(&key(1)), "").unwrap();
    assert_eq!(store.get(&key(1)).await.unwrap(), None);
    let object = encode(&sample_output(key(1), 64));
    assert_eq!(store.put_if_absent(&key(1), object.clone()).await.unwrap(), PutOutcome::Stored);
    assert_eq!(store.get(&key(1)).await.unwrap(), Some(object));
}

#[tokio::test]
async fn objects_expire() {
    let server = RedisServer::start();
    let store =
        RedisStore::new(&format!("{}?ttl_s=1", server.url()), RedisTuning::default(), &limits()).unwrap();
    let object = encode(&sample_output(key(1), 5 << 19));
    store.put_if_absent(&key(1), object).await.unwrap();
    let until = tokio::time::Instant::now() + crate::LIMIT;
    while store.get(&key(1)).await.unwrap().is_some() {
        assert!(tokio::time::Instant::now() < until, "it never expires");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(store.heads(&[key(1)]).await.unwrap(), [None]);
    assert_eq!(store.list(None, 1).await.unwrap(), []);
}

/// Errors that a server gives for an answer are errors of the operation, and leave the connection usable.
#[tokio::test]
async fn a_server_that_refuses_a_command_is_unavailable() {
    let server = RedisServer::start();
    let store = store(&server);
    let object = encode(&sample_output(key(1), 64));
    store.put_if_absent(&key(1), object.clone()).await.unwrap();
    let acl = |rule: &str| {
        redis::cmd("ACL").arg(&["SETUSER", "default", rule]).exec(&mut by_hand(&server)).unwrap();
    };
    acl("-eval");
    assert!(matches!(store.put_if_absent(&key(2), object.clone()).await, Err(EcError::Unavailable { .. })));
    assert!(matches!(store.acquire(&key(2), Duration::from_secs(1)).await, Err(EcError::Unavailable { .. })));
    assert_eq!(store.get(&key(1)).await.unwrap(), Some(object.clone()));
    acl("+eval");
    acl("-getrange");
    assert!(matches!(store.get(&key(1)).await, Err(EcError::Unavailable { .. })));
    acl("+getrange");
    // A user without permission to publish can still store.
    acl("-publish");
    assert_eq!(store.put_if_absent(&key(3), object).await.unwrap(), PutOutcome::Stored);
}

#[tokio::test]
async fn a_replica_is_read_only_and_unavailable_for_puts() {
    let (primary, replica) = (RedisServer::start(), RedisServer::start());
    let args = ["127.0.0.1".to_owned(), primary.port().to_string()];
    redis::cmd("REPLICAOF").arg(&args).exec(&mut by_hand(&replica)).unwrap();
    let store = store(&replica);
    let e = store.put_if_absent(&key(1), Bytes::from_static(b"x")).await.unwrap_err();
    assert!(matches!(e, EcError::Unavailable { .. }), "{e:?}");
    redis::cmd("REPLICAOF").arg(&["NO", "ONE"]).exec(&mut by_hand(&replica)).unwrap();
    assert_eq!(store.put_if_absent(&key(1), Bytes::from_static(b"x")).await.unwrap(), PutOutcome::Stored);
}
