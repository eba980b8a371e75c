//! The contract of [`EcStore`] as a suite: every implementation and every decorator runs it in `tests/`.
//!
//! It panics where the contract is broken, and is here rather than in `tests/` so that other crates can hold
//! their own stores and wrappers to it.

mod leases;
mod lists;
mod samples;

pub use samples::{fresh_key, sample_output, sample_variant};

use crate::error::EcError;
use crate::object::{self, decode, encode};
use crate::store::{EcStore, PutOutcome};
use bytes::Bytes;
use samples::put;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use triptych_core::ContentKey;
use triptych_core::limits::Limits;

/// Timeout of a case; generous, since test machines are busy.
const CASE_LIMIT: Duration = Duration::from_secs(120);
const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// Limits to open a store under test with: small enough that refusing an object is cheap.
pub fn limits() -> Limits {
    Limits { max_object_bytes: 4 * MIB, ..Limits::default() }
}

/// Optional abilities of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// [`EcStore::acquire`] and its kin; without it they answer [`EcError::Unsupported`].
    pub leases: bool,
    /// [`EcStore::list`]; the same.
    pub list: bool,
}

impl Abilities {
    /// All abilities, which a shared store must have.
    pub const ALL: Self = Self { leases: true, list: true };
}

/// Runs every case on a store with all abilities. The store must have been opened with [`limits`] and room for 64 MiB;
/// what else it holds is not touched.
///
/// # Panics
/// If the store breaks the contract.
pub async fn run(store: Arc<dyn EcStore>) {
    run_with(store, Abilities::ALL).await;
}

/// Runs every case on a store with these abilities, and checks that it reports the others as unsupported.
///
/// # Panics
/// If the store breaks the contract.
pub async fn run_with(store: Arc<dyn EcStore>, can: Abilities) {
    let mut cases: Vec<(&str, Case)> = vec![
        ("a key without an object is a miss", |s| Box::pin(misses(s))),
        ("objects of any size come back byte for byte", |s| Box::pin(sizes(s))),
        ("the first put wins", |s| Box::pin(first_wins(s))),
        ("of sixteen writers one stores", |s| Box::pin(many_writers(s))),
        ("a put that is dropped took place or did not", |s| Box::pin(dropped_puts(s))),
        ("heads are in order, with misses between", |s| Box::pin(heads(s))),
        ("a deleted object is gone and can be put again", |s| Box::pin(delete(s))),
        ("a quarantined object is gone and can be put again", |s| Box::pin(quarantine(s))),
        ("a copy that a reader disowns is gone and can be put again", |s| Box::pin(disown(s))),
        ("garbage is no object", |s| Box::pin(garbage(s))),
        ("an object over the limit is refused", |s| Box::pin(refusals(s))),
    ];
    cases.extend(match can.leases {
        true => vec![
            (
                "of sixteen that ask one holds a key, and its tokens grow",
                (|s| Box::pin(leases::one_holder(s))) as Case,
            ),
            ("a lease that is not kept ends", |s| Box::pin(leases::expiry(s))),
            ("a lease that is kept lasts", |s| Box::pin(leases::renewal(s))),
            ("a put wakes who waits", |s| Box::pin(leases::waiting(s, true))),
            ("waiting ends with one's patience, or with the lease", |s| Box::pin(leases::patience(s, true))),
        ],
        false => vec![
            ("leases are refused in words", (|s| Box::pin(leases::unsupported(s))) as Case),
            ("what is there is not waited for", |s| Box::pin(leases::waiting(s, false))),
            ("waiting ends with one's patience", |s| Box::pin(leases::patience(s, false))),
        ],
    });
    cases.push(match can.list {
        true => ("lists come in pages and in order", |s| Box::pin(lists::pages(s))),
        false => ("lists are refused in words", |s| Box::pin(lists::unsupported(s))),
    });
    store.ping().await.expect("the store under test answers");
    for (name, case) in cases {
        let ended = tokio::time::timeout(CASE_LIMIT, case(store.clone())).await;
        assert!(ended.is_ok(), "{store:?}: {name}: did not end within {CASE_LIMIT:?}");
    }
    assert!(store.flush(CASE_LIMIT).await, "{store:?}: everything is where it is to stay");
}

type Case = fn(Arc<dyn EcStore>) -> futures::future::BoxFuture<'static, ()>;

async fn get(store: &dyn EcStore, key: &ContentKey) -> Option<Bytes> {
    store.get(key).await.expect("a get takes place")
}

async fn misses(store: Arc<dyn EcStore>) {
    let key = fresh_key();
    assert_eq!(get(&*store, &key).await, None);
    assert_eq!(store.heads(&[key]).await.unwrap(), [None]);
    assert!(!store.delete(&key).await.unwrap());
    assert!(!store.quarantine(&key).await.unwrap());
}

async fn sizes(store: Arc<dyn EcStore>) {
    for n_bytes in [0, 16, 512 * KIB, MIB - 16, MIB, 5 * MIB / 2] {
        let output = sample_output(fresh_key(), n_bytes);
        let object = encode(&output);
        assert_eq!(put(&*store, &output).await, PutOutcome::Stored);
        assert!(get(&*store, &output.item().key).await == Some(object), "{n_bytes} bytes of rows");
        store.delete(&output.item().key).await.unwrap();
    }
    // Whole objects at and around the size of a chunk and of a frame.
    let head = object::encode_head(sample_output(fresh_key(), MIB).item()).len();
    for n_bytes in [MIB - head - 16, MIB - head, MIB - head + 16, 2 * MIB - head] {
        let output = sample_output(fresh_key(), n_bytes / 16 * 16);
        put(&*store, &output).await;
        let object = get(&*store, &output.item().key).await.unwrap();
        let read = decode(object, &output.item().key, &limits()).unwrap();
        assert_eq!(read.item(), output.item());
        store.delete(&output.item().key).await.unwrap();
    }
}

async fn first_wins(store: Arc<dyn EcStore>) {
    let key = fresh_key();
    let (first, second) = (sample_variant(key, 3 * KIB, 1), sample_variant(key, 3 * KIB, 2));
    assert_eq!(put(&*store, &first).await, PutOutcome::Stored);
    assert_eq!(put(&*store, &second).await, PutOutcome::AlreadyThere);
    assert_eq!(get(&*store, &key).await, Some(encode(&first)));
}

/// Each writer has other rows, so a mix of two would not verify; a reader looks on all the while.
async fn many_writers(store: Arc<dyn EcStore>) {
    let key = fresh_key();
    let (stop, stopped) = tokio::sync::watch::channel(());
    let reader = tokio::spawn({
        let store = store.clone();
        async move {
            while stopped.has_changed().is_ok() {
                if let Some(object) = get(&*store, &key).await {
                    decode(object, &key, &limits()).expect("a reader sees a whole object");
                }
                tokio::task::yield_now().await;
            }
        }
    });
    let mut writers = JoinSet::new();
    for variant in 0..16 {
        let store = store.clone();
        writers.spawn(async move {
            let output = sample_variant(key, 5 * MIB / 4, variant);
            (put(&*store, &output).await, output)
        });
    }
    let mut stored = Vec::new();
    while let Some(writer) = writers.join_next().await {
        let (outcome, output) = writer.expect("no writer panics");
        if outcome == PutOutcome::Stored {
            stored.push(output);
        }
    }
    drop(stop);
    reader.await.expect("the reader never sees half an object");
    assert_eq!(stored.len(), 1, "exactly one writer stores");
    let object = get(&*store, &key).await.expect("it is there");
    assert_eq!(decode(object, &key, &limits()).unwrap().item(), stored[0].item());
    store.delete(&key).await.unwrap();
}

/// Drops puts at whatever point they have reached after a few pauses; where that is does not matter.
async fn dropped_puts(store: Arc<dyn EcStore>) {
    for pause_us in [0, 50, 200, 500, 1000, 2000, 4000] {
        let output = sample_output(fresh_key(), 5 * MIB / 2);
        let (key, object) = (output.item().key, encode(&output));
        let pause = Duration::from_micros(pause_us);
        drop(tokio::time::timeout(pause, store.put_if_absent(&key, object.clone())).await);
        if let Some(seen) = get(&*store, &key).await {
            assert!(seen == object, "dropped after {pause:?}");
        }
        put(&*store, &output).await;
        assert!(get(&*store, &key).await == Some(object), "dropped after {pause:?}");
        store.delete(&key).await.unwrap();
    }
}

async fn heads(store: Arc<dyn EcStore>) {
    let outputs: Vec<_> = [0, 16, 3 * KIB, MIB].map(|n| sample_output(fresh_key(), n)).into();
    let mut keys = vec![fresh_key()];
    let mut expect = vec![None];
    for output in &outputs {
        put(&*store, output).await;
        keys.extend([output.item().key, fresh_key()]);
        expect.extend([Some(output.item().clone()), None]);
    }
    assert_eq!(store.heads(&keys).await.unwrap(), expect);
    assert_eq!(store.heads(&[]).await.unwrap(), []);
    let many: Vec<_> = (0..300).map(|_| fresh_key()).chain([keys[1]]).collect();
    let heads = store.heads(&many).await.unwrap();
    assert_eq!((heads.len(), heads.last()), (301, Some(&expect[1])));
}

async fn delete(store: Arc<dyn EcStore>) {
    let output = sample_output(fresh_key(), MIB);
    let key = output.item().key;
    put(&*store, &output).await;
    assert!(store.delete(&key).await.unwrap());
    assert!(!store.delete(&key).await.unwrap());
    assert_eq!(get(&*store, &key).await, None);
    assert_eq!(put(&*store, &output).await, PutOutcome::Stored);
    assert_eq!(get(&*store, &key).await, Some(encode(&output)));
}

async fn quarantine(store: Arc<dyn EcStore>) {
    let key = fresh_key();
    put(&*store, &sample_variant(key, 2 * MIB, 1)).await;
    assert!(store.quarantine(&key).await.unwrap());
    assert_eq!(get(&*store, &key).await, None);
    assert_eq!(store.heads(&[key]).await.unwrap(), [None]);
    let second = sample_variant(key, 2 * MIB, 2);
    assert_eq!(put(&*store, &second).await, PutOutcome::Stored);
    assert_eq!(get(&*store, &key).await, Some(encode(&second)));
    // The same key twice: what was kept aside of the first time is no obstacle.
    assert!(store.quarantine(&key).await.unwrap());
    assert_eq!(get(&*store, &key).await, None);
}

async fn disown(store: Arc<dyn EcStore>) {
    let key = fresh_key();
    let output = sample_output(key, 2 * KIB);
    assert!(!store.disown(&key, &encode(&output)).await.unwrap(), "there is none");
    put(&*store, &output).await;
    let object = get(&*store, &key).await.expect("it is there");
    assert!(store.disown(&key, &object).await.unwrap());
    assert_eq!(get(&*store, &key).await, None);
    assert_eq!(put(&*store, &output).await, PutOutcome::Stored);
    store.delete(&key).await.unwrap();
}

async fn garbage(store: Arc<dyn EcStore>) {
    let other = encode(&sample_output(fresh_key(), 64));
    let whole = |key| encode(&sample_output(key, 4 * KIB));
    let make: [fn(Bytes) -> Bytes; 4] = [
        |_| Bytes::new(),
        |_| Bytes::from_static(b"not an object at all"),
        |whole| whole.slice(..whole.len() - 1),
        |whole| Bytes::from([&whole[..], b"x"].concat()),
    ];
    for n in 0..=make.len() {
        let key = fresh_key();
        let bytes = make.get(n).map_or_else(|| other.clone(), |make| make(whole(key)));
        store.put_if_absent(&key, bytes).await.expect("stores do not look inside");
        assert_eq!(store.heads(&[key]).await.unwrap(), [None], "garbage {n}");
        match store.get(&key).await {
            Ok(Some(object)) => assert!(decode(object, &key, &limits()).is_err(), "garbage {n}"),
            Ok(None) | Err(EcError::Corrupt { .. }) => {}
            Err(e) => panic!("garbage {n}: {e}"),
        }
        store.quarantine(&key).await.unwrap();
        assert_eq!(store.put_if_absent(&key, whole(key)).await.unwrap(), PutOutcome::Stored);
    }
}

async fn refusals(store: Arc<dyn EcStore>) {
    let limit = limits().max_object_bytes;
    let key = fresh_key();
    let e = store.put_if_absent(&key, Bytes::from(vec![0; limit + 1])).await.unwrap_err();
    assert!(
        matches!(e, EcError::TooLarge { limit: l, actual } if (l, actual) == (limit, limit + 1)),
        "{e:?}"
    );
    assert_eq!(get(&*store, &key).await, None);
    assert_eq!(store.put_if_absent(&key, Bytes::from(vec![0; limit])).await.unwrap(), PutOutcome::Stored);
    assert!(store.delete(&key).await.unwrap());
}
