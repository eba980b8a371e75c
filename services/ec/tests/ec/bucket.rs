//! The bucket store against a real S3 server: the conformance suite, and what only a server can do wrong.

mod leases;
mod services;
mod signed;

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::aws::AmazonS3Builder;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};
use std::sync::Arc;
use std::time::Instant;
use tokio::task::JoinSet;
use triptych_core::limits::Limits;
use triptych_ec::conformance::{self, fresh_key, sample_output, sample_variant};
use triptych_ec::object::{decode, encode};
use triptych_ec::store::bucket::{BucketStore, BucketTuning};
use triptych_ec::testing::{S3Server, free_port};
use triptych_ec::{EcError, EcStore, PutOutcome};

use crate::LIMIT;

const MIB: usize = 1 << 20;

/// Patient, since test machines are busy.
fn tuning() -> BucketTuning {
    BucketTuning { response_timeout: LIMIT, transfer_timeout: LIMIT, ..BucketTuning::default() }
}

/// A tuning under which objects of more than 1 MiB go in parts.
fn in_parts() -> BucketTuning {
    BucketTuning { whole_bytes: MIB, part_bytes: 5 * MIB, ..tuning() }
}

async fn open(server: &S3Server, tuning: BucketTuning, limits: &Limits) -> BucketStore {
    let setting = server.url().parse().unwrap();
    BucketStore::open(&setting, server.environment(), tuning, limits).await.unwrap()
}

/// For looking and breaking things behind the store's back.
fn by_hand(server: &S3Server, bucket: &str) -> impl ObjectStore {
    // An error: another test was first.
    let _ = rustls::crypto::ring::default_provider().install_default();
    AmazonS3Builder::new()
        .with_endpoint(server.endpoint())
        .with_allow_http(true)
        .with_skip_signature(true)
        .with_bucket_name(bucket)
        .build()
        .unwrap()
}

async fn names_under(bucket: &impl ObjectStore, prefix: &str) -> Vec<String> {
    let prefix = Path::from(prefix);
    bucket.list(Some(&prefix)).map_ok(|meta| meta.location.to_string()).try_collect().await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn s3_conforms() {
    let server = S3Server::shared();
    conformance::run(Arc::new(open(&server, tuning(), &conformance::limits()).await)).await;
}

/// Every object over 1 MiB takes the way in parts: through a name of its own and a copy on a condition.
#[tokio::test(flavor = "multi_thread")]
async fn s3_conforms_in_parts_and_leaves_nothing_on_the_way() {
    let server = S3Server::start();
    conformance::run(Arc::new(open(&server, in_parts(), &conformance::limits()).await)).await;
    // A put that was dropped in the middle may leave its own: that is the lifecycle rule's.
    let left = names_under(&by_hand(&server, server.bucket()), "ec/tmp").await;
    assert!(left.len() <= 7, "{left:?}");
    assert_eq!(names_under(&by_hand(&server, server.bucket()), "ec/probe").await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_object_is_written_in_parts_and_read_in_ranges() {
    let server = S3Server::shared();
    let store = open(&server, in_parts(), &Limits::default()).await;
    let key = fresh_key();
    let object = encode(&sample_output(key, 21 * MIB));
    assert_eq!(store.put_if_absent(&key, object.clone()).await.unwrap(), PutOutcome::Stored);
    assert_eq!(store.put_if_absent(&key, object.clone()).await.unwrap(), PutOutcome::AlreadyThere);
    for part_bytes in [MIB, 7 * MIB, 21 * MIB, 64 * MIB, object.len(), object.len() - 1] {
        let ranges = BucketTuning { part_bytes, ..tuning() };
        let reader = open(&server, ranges, &Limits::default()).await;
        assert!(reader.get(&key).await.unwrap() == Some(object.clone()), "ranges of {part_bytes}");
    }
    let head = store.heads(&[key]).await.unwrap().remove(0);
    assert_eq!(head.as_ref(), Some(sample_output(key, 21 * MIB).item()));
    assert!(store.delete(&key).await.unwrap());
}

/// Sixteen processes publish the same item at once, each with other rows: one object wins, and it is whole.
#[tokio::test(flavor = "multi_thread")]
async fn of_sixteen_stores_that_put_in_parts_one_wins() {
    let server = S3Server::shared();
    let key = fresh_key();
    let mut writers = JoinSet::new();
    for variant in 0..16 {
        let store = open(&server, in_parts(), &conformance::limits()).await;
        writers.spawn(async move {
            let object = encode(&sample_variant(key, 2 * MIB, variant));
            (store.put_if_absent(&key, object.clone()).await.unwrap(), object)
        });
    }
    let outcomes = writers.join_all().await;
    let stored: Vec<_> = outcomes.into_iter().filter(|(outcome, _)| *outcome == PutOutcome::Stored).collect();
    assert_eq!(stored.len(), 1);
    let store = open(&server, tuning(), &conformance::limits()).await;
    assert!(store.get(&key).await.unwrap().as_ref() == Some(&stored[0].1));
}

#[tokio::test]
async fn a_server_that_hangs_times_out_and_is_used_again_when_it_recovers() {
    let server = S3Server::start();
    let hasty =
        BucketTuning { response_timeout: std::time::Duration::from_millis(500), ..BucketTuning::default() };
    let patient = open(&server, tuning(), &conformance::limits()).await;
    let key = fresh_key();
    let object = encode(&sample_output(key, 64));
    patient.put_if_absent(&key, object.clone()).await.unwrap();
    let store = open(&server, hasty, &conformance::limits()).await;
    server.pause();
    let ended = tokio::time::timeout(LIMIT, async {
        let timed_out = |e: EcError| assert!(matches!(e, EcError::TimedOut { .. }), "{e:?}");
        timed_out(store.get(&key).await.unwrap_err());
        timed_out(store.heads(&[key]).await.unwrap_err());
        timed_out(store.put_if_absent(&fresh_key(), object.clone()).await.unwrap_err());
        timed_out(store.acquire(&key, LIMIT).await.unwrap_err());
        timed_out(store.ping().await.unwrap_err());
    });
    ended.await.expect("none of them may hang");
    server.resume();
    assert_eq!(until_available(&store, &key).await, Some(object));
}

/// The server dies between publish and load: an error in bounded time, and its disk has what was published.
#[tokio::test]
async fn a_dead_server_is_unavailable_and_its_objects_are_there_after_a_restart() {
    let mut server = S3Server::start();
    let store = open(&server, tuning(), &conformance::limits()).await;
    let key = fresh_key();
    let object = encode(&sample_output(key, 3 * MIB));
    assert_eq!(store.put_if_absent(&key, object.clone()).await.unwrap(), PutOutcome::Stored);
    server.kill();
    let started = Instant::now();
    for _ in 0..3 {
        assert!(matches!(store.get(&key).await, Err(EcError::Unavailable { .. })));
    }
    assert!(matches!(store.heads(&[key]).await, Err(EcError::Unavailable { .. })));
    let put = store.put_if_absent(&fresh_key(), object.clone()).await;
    assert!(matches!(put, Err(EcError::Unavailable { .. })), "{put:?}");
    assert!(matches!(store.ping().await, Err(EcError::Unavailable { .. })));
    assert!(matches!(store.list(None, 1).await, Err(EcError::Unavailable { .. })));
    assert!(started.elapsed() < LIMIT);
    server.restart();
    assert_eq!(until_available(&store, &key).await, Some(object));
}

/// The first get that is answered at all.
async fn until_available(store: &BucketStore, key: &triptych_core::ContentKey) -> Option<Bytes> {
    let deadline = Instant::now() + LIMIT;
    loop {
        match store.get(key).await {
            Ok(object) => return object,
            Err(e) => assert!(e.is_retryable() && Instant::now() < deadline, "{e:?}"),
        }
    }
}

#[tokio::test]
async fn a_store_opens_before_its_server_and_finds_it_later() {
    let setting = format!("s3://b?endpoint=http://127.0.0.1:{}&allow_http=true", free_port());
    let environment = [("AWS_SKIP_SIGNATURE".to_owned(), "true".to_owned())];
    let (setting, limits) = (setting.parse().unwrap(), conformance::limits());
    let store = BucketStore::open(&setting, environment, BucketTuning::default(), &limits).await.unwrap();
    assert!(matches!(store.ping().await, Err(EcError::Unavailable { .. })));
}

#[tokio::test]
async fn poison_of_any_length_is_no_object_and_is_kept_aside() {
    let server = S3Server::shared();
    let store = open(&server, tuning(), &conformance::limits()).await;
    let bucket = by_hand(&server, server.bucket());
    let whole = |key| encode(&sample_output(key, 3 * MIB / 2));
    let poisons: [fn(Bytes) -> Bytes; 4] = [
        |_| Bytes::from_static(b"no object"),
        |object| object.slice(..object.len() / 2),
        |object| {
            let mut bytes = object.to_vec();
            bytes[MIB] ^= 1;
            bytes.into()
        },
        |object| [&object[..], &object[..]].concat().into(),
    ];
    for (n, poison) in poisons.into_iter().enumerate() {
        let key = fresh_key();
        let bytes = poison(whole(key));
        let name = Path::from(store.name_of(&key));
        bucket.put(&name, PutPayload::from(bytes.clone())).await.unwrap();
        let read = store.get(&key).await.unwrap().unwrap();
        assert!(decode(read, &key, &conformance::limits()).is_err(), "poison {n}");
        assert_eq!(store.put_if_absent(&key, whole(key)).await.unwrap(), PutOutcome::AlreadyThere);
        assert!(store.quarantine(&key).await.unwrap());
        assert_eq!(store.put_if_absent(&key, whole(key)).await.unwrap(), PutOutcome::Stored);
        let aside = Path::from(format!("ec/quarantine/{key}"));
        assert!(bucket.get(&aside).await.unwrap().bytes().await.unwrap() == bytes, "poison {n}");
        store.delete(&key).await.unwrap();
    }
}

#[tokio::test]
async fn an_object_over_the_limit_is_corrupt_and_is_not_read() {
    let server = S3Server::shared();
    let store = open(&server, tuning(), &conformance::limits()).await;
    let key = fresh_key();
    let long = vec![0; conformance::limits().max_object_bytes + 1];
    by_hand(&server, server.bucket())
        .put(&Path::from(store.name_of(&key)), PutPayload::from(long))
        .await
        .unwrap();
    assert!(matches!(store.get(&key).await, Err(EcError::Corrupt { .. })));
    assert_eq!(store.heads(&[key]).await.unwrap(), [None]);
    assert!(store.quarantine(&key).await.unwrap());
}

#[tokio::test]
async fn lists_are_in_the_order_of_the_keys_page_by_page_without_foreign_names() {
    let server = S3Server::shared();
    let setting = format!("{}&tenant=lists", server.url()).parse().unwrap();
    let limits = conformance::limits();
    let store = BucketStore::open(&setting, server.environment(), tuning(), &limits).await.unwrap();
    let mut keys: Vec<_> = (0..7).map(|_| fresh_key()).collect();
    for key in &keys {
        store.put_if_absent(key, encode(&sample_output(*key, 64))).await.unwrap();
    }
    keys.sort();
    let bucket = by_hand(&server, server.bucket());
    for name in ["v1/00/foreign", "v1/foreign", "v2/x", "leases/00/x"] {
        let name = Path::from(format!("ec/tenant=lists/{name}"));
        bucket.put(&name, PutPayload::from("x")).await.unwrap();
    }
    let mut listed = Vec::new();
    loop {
        let page = store.list(listed.last().map(|l: &triptych_ec::store::Listed| &l.key), 3).await.unwrap();
        if page.is_empty() {
            break;
        }
        assert!(page.len() <= 3);
        listed.extend(page);
    }
    assert_eq!(listed.iter().map(|l| l.key).collect::<Vec<_>>(), keys);
    let len = encode(&sample_output(keys[0], 64)).len() as u64;
    assert!(listed.iter().all(|l| l.len == len && l.stored.is_some()));
}

/// A bucket that is not there answers with the status of an object that is not there; it is no miss.
#[tokio::test]
async fn a_bucket_that_is_not_there_is_unavailable() {
    let server = S3Server::shared();
    let limits = conformance::limits();
    // Not opened, since the server makes a bucket at the first write to it.
    let store = BucketStore::new(Arc::new(by_hand(&server, "no-such-bucket")), "ec", tuning(), &limits);
    let e = store.get(&fresh_key()).await.unwrap_err();
    assert!(matches!(e, EcError::Unavailable { .. }), "{e:?}");
    assert!(triptych_ec::error::chain(&e).contains("NoSuchBucket"), "{e:?}");
    assert!(store.heads(&[fresh_key()]).await.is_err());
    assert!(store.ping().await.is_err());
}

#[tokio::test]
async fn tenants_of_one_bucket_do_not_see_each_other() {
    let server = S3Server::shared();
    let limits = conformance::limits();
    let open = async |tenant| {
        let setting = format!("{}&tenant={tenant}", server.url()).parse().unwrap();
        BucketStore::open(&setting, server.environment(), tuning(), &limits).await.unwrap()
    };
    let (a, b) = (open("a").await, open("b").await);
    let key = fresh_key();
    a.put_if_absent(&key, encode(&sample_output(key, 64))).await.unwrap();
    assert_eq!(b.get(&key).await.unwrap(), None);
    assert_eq!(b.list(None, 10).await.unwrap(), []);
    assert_eq!(a.list(None, 10).await.unwrap().len(), 1);
}
