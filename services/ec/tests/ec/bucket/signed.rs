//! Services that check who asks: SeaweedFS with a key (SigV4) and Azurite (SharedKey).

use std::sync::Arc;
use triptych_core::limits::Limits;
use triptych_ec::conformance::{self, fresh_key, sample_output};
use triptych_ec::error::chain;
use triptych_ec::object::encode;
use triptych_ec::store::Listed;
use triptych_ec::store::bucket::{BucketStore, BucketTuning};
use triptych_ec::testing::{Azurite, S3Server};
use triptych_ec::{EcError, EcStore, PutOutcome};

use super::{MIB, in_parts, tuning};

/// A service with one bucket.
struct Service {
    url: String,
    environment: Vec<(String, String)>,
    /// The variable with the secret.
    secret: &'static str,
}

impl Service {
    fn s3(server: &S3Server) -> Self {
        Self { url: server.url(), environment: server.environment(), secret: "AWS_SECRET_ACCESS_KEY" }
    }

    fn azure(server: &Azurite) -> Self {
        Self { url: server.url(), environment: server.environment(), secret: "AZURE_STORAGE_ACCOUNT_KEY" }
    }

    async fn open(&self, tuning: BucketTuning) -> BucketStore {
        self.open_as(&self.url, self.environment.clone(), tuning).await.unwrap()
    }

    async fn open_as(
        &self,
        url: &str,
        environment: Vec<(String, String)>,
        tuning: BucketTuning,
    ) -> Result<BucketStore, EcError> {
        BucketStore::open(&url.parse().unwrap(), environment, tuning, &conformance::limits()).await
    }
}

/// Names with what signatures escape: a `=`, dots, and every other mark that a setting may have.
async fn lists_under_names_with_marks(service: &Service) {
    let url = format!("{}&tenant=a.b-c_D", service.url).replace("/ec?", "/p.q/r_s-T?");
    let store = service.open_as(&url, service.environment.clone(), tuning()).await.unwrap();
    let mut keys: Vec<_> = (0..5).map(|_| fresh_key()).collect();
    keys.sort();
    for key in &keys {
        let object = encode(&sample_output(*key, 64));
        assert_eq!(store.put_if_absent(key, object).await.unwrap(), PutOutcome::Stored);
        assert!(store.name_of(key).starts_with("p.q/r_s-T/tenant=a.b-c_D/"), "{}", store.name_of(key));
    }
    let mut listed: Vec<Listed> = Vec::new();
    loop {
        let page = store.list(listed.last().map(|l| &l.key), 2).await.unwrap();
        if page.is_empty() {
            break;
        }
        listed.extend(page);
    }
    assert_eq!(listed.iter().map(|l| l.key).collect::<Vec<_>>(), keys);
    assert!(store.heads(&keys).await.unwrap().iter().all(Option::is_some));
    assert!(store.delete(&keys[0]).await.unwrap());
}

async fn reads_and_writes_in_parts(service: &Service) {
    let key = fresh_key();
    let object = encode(&sample_output(key, 12 * MIB));
    let (url, environment) = (service.url.parse().unwrap(), service.environment.clone());
    let limits = Limits::default();
    let large = BucketStore::open(&url, environment, in_parts(), &limits).await.unwrap();
    assert_eq!(large.put_if_absent(&key, object.clone()).await.unwrap(), PutOutcome::Stored);
    assert_eq!(large.put_if_absent(&key, object.clone()).await.unwrap(), PutOutcome::AlreadyThere);
    assert!(large.get(&key).await.unwrap() == Some(object));
    assert!(large.delete(&key).await.unwrap());
}

/// Refused at start, with what is wrong and where it is set, and without what it is.
async fn refuses(service: &Service, name: &str, value: &str) {
    let mut environment = service.environment.clone();
    let variable = environment.iter_mut().find(|(known, _)| known == name).unwrap();
    value.clone_into(&mut variable.1);
    let e = service.open_as(&service.url, environment, tuning()).await.unwrap_err();
    assert!(matches!(e, EcError::Config { .. }), "{e:?}");
    let text = chain(&e);
    assert!(text.contains("refuses the credentials") && text.contains(service.secret), "{text}");
    assert!(!text.contains(value), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn s3_with_signatures_conforms_and_refuses_other_keys() {
    let server = S3Server::start_signed();
    let service = Service::s3(&server);
    conformance::run(Arc::new(service.open(tuning()).await)).await;
    conformance::run(Arc::new(service.open(in_parts()).await)).await;
    lists_under_names_with_marks(&service).await;
    reads_and_writes_in_parts(&service).await;
    refuses(&service, service.secret, "b4d/secret+").await;
    refuses(&service, "AWS_ACCESS_KEY_ID", "somebody-else").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn azure_with_signatures_conforms_and_refuses_another_key() {
    let server = Azurite::start();
    let service = Service::azure(&server);
    conformance::run(Arc::new(service.open(tuning()).await)).await;
    conformance::run(Arc::new(service.open(in_parts()).await)).await;
    lists_under_names_with_marks(&service).await;
    reads_and_writes_in_parts(&service).await;
    refuses(&service, service.secret, "YjRkL3NlY3JldCs=").await;
}

/// A bucket that is not there is not taken for wrong credentials, nor for an empty one.
#[tokio::test(flavor = "multi_thread")]
async fn a_container_that_is_not_there_is_unavailable() {
    let server = Azurite::start();
    let service = Service::azure(&server);
    let url = service.url.replace("az://triptych/", "az://not-there/");
    let store = service.open_as(&url, service.environment.clone(), tuning()).await.unwrap();
    for e in [store.get(&fresh_key()).await.unwrap_err(), store.ping().await.unwrap_err()] {
        assert!(matches!(e, EcError::Unavailable { .. }), "{e:?}");
    }
}
