//! Leases in a bucket, on a clock that the tests move.

use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, advance};
use triptych_ec::conformance::{self, fresh_key, sample_output};
use triptych_ec::object::encode;
use triptych_ec::store::bucket::{BucketStore, BucketTuning};
use triptych_ec::store::lease::{Acquired, EncodeLease};
use triptych_ec::testing::S3Server;
use triptych_ec::{EcStore, PutOutcome};

use super::{open, tuning};

const TTL: Duration = Duration::from_secs(10);

/// Processes that share a bucket.
fn two() -> (BucketStore, BucketStore, Arc<InMemory>) {
    let bucket = Arc::new(InMemory::new());
    let open = || BucketStore::new(bucket.clone(), "ec", BucketTuning::default(), &conformance::limits());
    (open(), open(), bucket)
}

fn granted(acquired: Acquired) -> EncodeLease {
    match acquired {
        Acquired::Granted(lease) => lease,
        Acquired::Held { left } => panic!("held for {left:?}"),
    }
}

fn left(acquired: Acquired) -> Duration {
    match acquired {
        Acquired::Held { left } => left,
        Acquired::Granted(lease) => panic!("granted {lease:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_not_renewed_is_taken_over_with_a_larger_token() {
    let (a, b, _) = two();
    let key = fresh_key();
    let first = granted(a.acquire(&key, TTL).await.unwrap());
    assert_eq!(left(b.acquire(&key, TTL).await.unwrap()), TTL);
    advance(TTL / 2).await;
    assert_eq!(left(b.acquire(&key, TTL).await.unwrap()), TTL / 2, "b counts from when it saw it first");
    advance(TTL / 2).await;
    let second = granted(b.acquire(&key, TTL).await.unwrap());
    assert!(second.token > first.token && first.token > 0);
    assert!(!a.renew(&first, TTL).await.unwrap(), "a was away too long");
    assert!(!a.release(&first).await.unwrap());
    assert!(b.renew(&second, TTL).await.unwrap(), "nothing that a did touched it");
    assert!(b.release(&second).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_renewed_is_never_taken_over() {
    let (a, b, _) = two();
    let key = fresh_key();
    let lease = granted(a.acquire(&key, TTL).await.unwrap());
    for _ in 0..20 {
        left(b.acquire(&key, TTL).await.unwrap());
        advance(TTL * 3 / 4).await;
        assert!(a.renew(&lease, TTL).await.unwrap());
        assert_eq!(left(b.acquire(&key, TTL).await.unwrap()), TTL, "each renewal starts its time again");
    }
}

#[tokio::test(start_paused = true)]
async fn a_holder_whose_time_is_over_knows_it_before_anyone_takes_over() {
    let (a, b, _) = two();
    let key = fresh_key();
    let lease = granted(a.acquire(&key, TTL).await.unwrap());
    advance(TTL).await;
    left(b.acquire(&key, TTL).await.unwrap());
    assert!(!a.renew(&lease, TTL).await.unwrap());
    assert!(!a.release(&lease).await.unwrap(), "it was not a's any more");
    granted(b.acquire(&key, TTL).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn tokens_grow_over_lives_of_a_lease_and_over_its_expiry_in_the_bucket() {
    let (a, b, bucket) = two();
    let key = fresh_key();
    let mut last = 0;
    for n in 0..6 {
        let store = if n % 2 == 0 { &a } else { &b };
        let lease = granted(store.acquire(&key, TTL).await.unwrap());
        assert!(lease.token > last);
        last = lease.token;
        assert!(store.release(&lease).await.unwrap());
        assert!(!store.release(&lease).await.unwrap(), "once");
    }
    let name = Path::from(format!("ec/leases/{}/{key}", &key.to_string()[..2]));
    bucket.delete(&name).await.unwrap();
    // Counted up six times in less than as many milliseconds, it would be below; days lie in between.
    assert!(granted(a.acquire(&key, TTL).await.unwrap()).token + 6 > last);
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_none_may_be_taken() {
    let (a, _, bucket) = two();
    let key = fresh_key();
    let name = Path::from(format!("ec/leases/{}/{key}", &key.to_string()[..2]));
    for garbage in ["", "{", r#"{"token":1}"#, &"x".repeat(5000)] {
        bucket.put(&name, PutPayload::from(garbage.to_owned())).await.unwrap();
        if garbage.is_empty() {
            // An empty object: its removal frees the name.
            left(a.acquire(&key, TTL).await.unwrap());
            continue;
        }
        let lease = granted(a.acquire(&key, TTL).await.unwrap());
        assert!(a.release(&lease).await.unwrap());
    }
}

#[tokio::test(start_paused = true)]
async fn of_sixteen_that_ask_at_once_one_is_granted() {
    let bucket: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let key = fresh_key();
    for round in 1..=3u32 {
        let mut askers = JoinSet::new();
        for _ in 0..16 {
            let store =
                BucketStore::new(bucket.clone(), "ec", BucketTuning::default(), &conformance::limits());
            askers.spawn(async move { store.acquire(&key, TTL).await.unwrap() });
        }
        let answers = askers.join_all().await;
        let granted = answers.iter().filter(|a| matches!(a, Acquired::Granted(_))).count();
        assert_eq!(granted, usize::from(round == 1), "round {round}: the first one's still holds");
    }
}

#[tokio::test(start_paused = true)]
async fn waiting_ends_with_the_object_or_with_the_lease() {
    let (a, b, _) = two();
    let (a, b) = (Arc::new(a), Arc::new(b));
    let key = fresh_key();
    assert_eq!(b.wait(&key, TTL).await.unwrap(), None, "nobody makes it");
    let lease = granted(a.acquire(&key, TTL).await.unwrap());
    let wait = |store: Arc<BucketStore>| {
        tokio::spawn(async move {
            let start = Instant::now();
            (store.wait(&key, 10 * TTL).await.unwrap(), start.elapsed())
        })
    };
    let waiting = wait(b.clone());
    advance(TTL / 2).await;
    assert!(a.release(&lease).await.unwrap());
    let (item, waited) = waiting.await.unwrap();
    assert!(item.is_none() && waited < TTL, "given back without an object: {waited:?}");
    let lease = granted(b.acquire(&key, TTL).await.unwrap());
    let waiting = wait(a.clone());
    advance(TTL / 2).await;
    let output = sample_output(key, 64);
    assert_eq!(b.put_if_absent(&key, encode(&output)).await.unwrap(), PutOutcome::Stored);
    assert!(b.release(&lease).await.unwrap());
    assert_eq!(waiting.await.unwrap().0.as_ref(), Some(output.item()));
}

/// The same by a real server's entity tags and a real clock.
#[tokio::test]
async fn leases_on_s3_are_one_holders_are_taken_over_and_given_back() {
    let server = S3Server::shared();
    let (a, b) = (
        open(&server, tuning(), &conformance::limits()).await,
        open(&server, tuning(), &conformance::limits()).await,
    );
    let (key, short) = (fresh_key(), Duration::from_millis(700));
    let first = granted(a.acquire(&key, super::LIMIT).await.unwrap());
    left(b.acquire(&key, TTL).await.unwrap());
    assert!(a.renew(&first, short).await.unwrap());
    let deadline = Instant::now() + super::LIMIT;
    let second = loop {
        match b.acquire(&key, super::LIMIT).await.unwrap() {
            Acquired::Granted(lease) => break lease,
            Acquired::Held { left } => {
                assert!(left <= short && Instant::now() < deadline);
                tokio::time::sleep(left).await;
            }
        }
    };
    assert!(second.token > first.token);
    assert!(!a.renew(&first, TTL).await.unwrap() && !a.release(&first).await.unwrap());
    assert!(b.release(&second).await.unwrap());
    granted(a.acquire(&key, TTL).await.unwrap());
}
