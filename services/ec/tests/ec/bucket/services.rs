//! Differences between services: ones that ignore conditions, ones that lose answers, objects that are
//! replaced while they are read; and clients of Google's and Azure's, as far as they go without the services.

use async_trait::async_trait;
use futures::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyMode, CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use triptych_core::limits::Limits;
use triptych_ec::conformance::{self, fresh_key, sample_output, sample_variant};
use triptych_ec::error::chain;
use triptych_ec::object::encode;
use triptych_ec::store::bucket::{BucketStore, BucketTuning};
use triptych_ec::store::lease::Acquired;
use triptych_ec::testing::free_port;
use triptych_ec::{EcError, EcStore, PutOutcome};

use super::{MIB, in_parts, tuning};

/// Deviation of a service.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Quirk {
    /// Writes whatever the condition is.
    IgnoresConditions,
    /// Cannot copy on a condition.
    HasNoConditionalCopy,
    /// Does the write, but the client is told that what it asked for again was there.
    LosesAnswers,
    /// Puts another object there while one is read.
    Replaces,
}

#[derive(Debug)]
struct Odd {
    bucket: InMemory,
    quirk: Quirk,
    n_replaced: AtomicUsize,
}

impl fmt::Display for Odd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a service that {:?}", self.quirk)
    }
}

#[async_trait]
impl ObjectStore for Odd {
    async fn put_opts(&self, name: &Path, bytes: PutPayload, mut options: PutOptions) -> Result<PutResult> {
        if self.quirk == Quirk::IgnoresConditions {
            options.mode = PutMode::Overwrite;
        }
        let in_probe = name.as_ref().contains("probe/");
        let done = self.bucket.put_opts(name, bytes, options).await?;
        if self.quirk == Quirk::LosesAnswers && !in_probe {
            return Err(Error::AlreadyExists { path: name.to_string(), source: "asked again".into() });
        }
        Ok(done)
    }

    async fn put_multipart_opts(
        &self,
        name: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        assert_ne!(self.quirk, Quirk::HasNoConditionalCopy, "it has to go in one piece");
        self.bucket.put_multipart_opts(name, options).await
    }

    async fn get_opts(&self, name: &Path, options: GetOptions) -> Result<GetResult> {
        let got = self.bucket.get_opts(name, options).await?;
        let take = |n: usize| n.checked_sub(1);
        if self.n_replaced.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_ok() {
            let again = self.bucket.get(name).await?.bytes().await?;
            self.bucket.put(name, PutPayload::from(again)).await?;
        }
        Ok(got)
    }

    fn delete_stream(&self, names: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.bucket.delete_stream(names)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.bucket.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.bucket.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        if self.quirk == Quirk::HasNoConditionalCopy && options.mode == CopyMode::Create {
            return Err(Error::NotSupported { source: "no such header".into() });
        }
        self.bucket.copy_opts(from, to, options).await
    }
}

fn odd(quirk: Quirk, n_replaced: usize, tuning: BucketTuning) -> BucketStore {
    let bucket = Odd { bucket: InMemory::new(), quirk, n_replaced: n_replaced.into() };
    BucketStore::new(Arc::new(bucket), "ec", tuning, &Limits::default())
}

/// Behaviour of Google's and Azure's services, tested over a backend of the same library.
#[tokio::test(flavor = "multi_thread")]
async fn any_backend_conforms_whole_and_in_parts() {
    for tuning in [tuning(), BucketTuning { part_bytes: 300_000, ..in_parts() }] {
        let bucket = Arc::new(InMemory::new());
        conformance::run(Arc::new(BucketStore::new(bucket, "", tuning, &conformance::limits()))).await;
    }
}

#[tokio::test]
async fn a_service_that_ignores_conditions_is_refused_for_writing_and_may_be_read() {
    let store = odd(Quirk::IgnoresConditions, 0, tuning());
    let key = fresh_key();
    let e = store.put_if_absent(&key, encode(&sample_output(key, 64))).await.unwrap_err();
    assert!(matches!(e, EcError::Config { .. }), "{e:?}");
    assert!(chain(&e).contains("ignores conditional writes") && !e.is_retryable(), "{e}");
    assert!(matches!(store.acquire(&key, super::LIMIT).await, Err(EcError::Config { .. })));
    assert_eq!(store.get(&key).await.unwrap(), None);
}

#[tokio::test]
async fn without_conditional_copies_a_large_object_is_one_request() {
    let store = odd(Quirk::HasNoConditionalCopy, 0, in_parts());
    let key = fresh_key();
    let object = encode(&sample_output(key, 3 * MIB));
    assert_eq!(store.put_if_absent(&key, object.clone()).await.unwrap(), PutOutcome::Stored);
    assert_eq!(store.put_if_absent(&key, object.clone()).await.unwrap(), PutOutcome::AlreadyThere);
    assert!(store.get(&key).await.unwrap() == Some(object));
}

/// The client asks again when an answer is lost, and the service says that the object, or the lease, is there already.
#[tokio::test]
async fn a_writer_whose_answer_was_lost_knows_its_own() {
    let store = odd(Quirk::LosesAnswers, 0, tuning());
    let key = fresh_key();
    assert_eq!(store.put_if_absent(&key, encode(&sample_output(key, 64))).await.unwrap(), PutOutcome::Stored);
    let second = store.put_if_absent(&key, encode(&sample_variant(key, 64, 1))).await.unwrap();
    assert_eq!(second, PutOutcome::AlreadyThere);
    let Acquired::Granted(lease) = store.acquire(&key, super::LIMIT).await.unwrap() else {
        panic!("its own")
    };
    assert!(store.renew(&lease, super::LIMIT).await.unwrap());
    assert!(matches!(store.acquire(&key, super::LIMIT).await.unwrap(), Acquired::Held { .. }));
    assert!(store.release(&lease).await.unwrap());
}

#[tokio::test]
async fn an_object_that_is_replaced_while_it_is_read_is_read_again() {
    let store = odd(Quirk::Replaces, 1, BucketTuning { part_bytes: MIB, ..tuning() });
    let key = fresh_key();
    let object = encode(&sample_output(key, 5 * MIB / 2));
    store.put_if_absent(&key, object.clone()).await.unwrap();
    assert!(store.get(&key).await.unwrap() == Some(object.clone()));
    let restless = odd(Quirk::Replaces, usize::MAX / 2, BucketTuning { part_bytes: MIB, ..tuning() });
    restless.put_if_absent(&key, object).await.unwrap();
    assert!(matches!(restless.get(&key).await, Err(EcError::Unavailable { .. })));
}

#[tokio::test]
async fn clients_of_every_service_are_made_from_settings_and_the_environment() {
    let endpoint = format!("endpoint=http://127.0.0.1:{}&allow_http=true", free_port());
    let cases = [
        ("s3", vec![("AWS_ACCESS_KEY_ID", "id"), ("AWS_SECRET_ACCESS_KEY", "s3cret")]),
        ("gs", vec![("GOOGLE_SKIP_SIGNATURE", "true"), ("UNRELATED", "x")]),
        ("az", vec![("AZURE_STORAGE_ACCOUNT_NAME", "account"), ("AZURE_STORAGE_ACCOUNT_KEY", "czNjcmV0")]),
    ];
    for (scheme, environment) in cases {
        let setting = format!("{scheme}://my-bucket/ec?{endpoint}").parse().unwrap();
        let environment = environment.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned()));
        let store = BucketStore::open(&setting, environment, BucketTuning::default(), &Limits::default())
            .await
            .unwrap();
        let e = store.get(&fresh_key()).await.unwrap_err();
        assert!(matches!(e, EcError::Unavailable { .. }), "{scheme}: {e:?}");
        for text in [chain(&e), store.describe(), format!("{store:?}")] {
            assert!(!text.contains("s3cret") && !text.contains("czNjcmV0"), "{text}");
        }
        assert!(store.describe().starts_with(&format!("{scheme}://my-bucket/ec")), "{store:?}");
    }
}

#[tokio::test]
async fn an_environment_that_makes_no_sense_is_refused_at_start() {
    let half = [("AWS_ACCESS_KEY_ID".to_owned(), "id".to_owned())];
    let setting = "s3://b".parse().unwrap();
    let e = BucketStore::open(&setting, half, BucketTuning::default(), &Limits::default()).await.unwrap_err();
    assert!(matches!(e, EcError::Config { .. }), "{e:?}");
}
