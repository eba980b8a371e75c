//! A span for each operation of a store, within the trace of a request.
//!
//! Attributes are those of OpenTelemetry's conventions for databases, RPC and S3, and our own: store, outcome, bytes, the
//! first digits of the content key. What no request waits for (readiness probes, renewals of leases) has no span.

use crate::error::EcError;
use crate::metered::Outcome;
use crate::store::lease::{Acquired, EncodeLease};
use crate::store::{EcStore, Leftovers, Listed, PutOutcome, StoreKind, Tidy};
use async_trait::async_trait;
use bytes::Bytes;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tracing::{Instrument, Span, field};
use triptych_core::timeline::STORE;
use triptych_core::{ContentKey, EncodedItem};

/// Digits of a content key in a span. Its last digits, which are the tenant's, are not among them.
const KEY_DIGITS: usize = 12;

/// A store whose operations have spans.
pub struct Traced {
    store: Arc<dyn EcStore>,
    place: Place,
}

/// The store's place, as attributes name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Kind of the back end.
    pub kind: StoreKind,
    /// Host of its server, if it has one.
    pub host: Option<String>,
    /// Port of its server.
    pub port: Option<u16>,
    /// Its S3 bucket.
    pub bucket: Option<String>,
}

impl Place {
    /// A store without a server.
    pub const fn local(kind: StoreKind) -> Self {
        Self { kind, host: None, port: None, bucket: None }
    }

    /// A process at `host:port`.
    pub fn at(kind: StoreKind, authority: &str) -> Self {
        let (host, port) = authority.rsplit_once(':').unwrap_or((authority, ""));
        Self { host: Some(host.to_owned()), port: port.parse().ok(), ..Self::local(kind) }
    }

    /// A span of the operation `name`, on one key or several; none outside of a trace.
    pub fn span(&self, name: &'static str, keys: &[ContentKey]) -> Span {
        if Span::current().is_none() {
            return Span::none();
        }
        let is_local = matches!(self.kind, StoreKind::Memory | StoreKind::Disk | StoreKind::Shm);
        let is_redis = self.kind == StoreKind::Redis;
        let is_rpc = matches!(self.kind, StoreKind::Remote | StoreKind::Peer);
        let key = match keys {
            [key] => Some(digits(key)),
            _ => None,
        };
        tracing::info_span!(
            target: STORE,
            "ec",
            otel.kind = if is_local { "internal" } else { "client" },
            otel.name = format!("ec {name}"),
            otel.status_code = field::Empty,
            triptych.ec.store = self.kind.as_str(),
            triptych.ec.operation = name,
            triptych.ec.outcome = field::Empty,
            triptych.ec.bytes = field::Empty,
            triptych.ec.keys = count(keys.len()),
            triptych.ec.hits = field::Empty,
            triptych.item = key,
            db.system.name = is_redis.then_some("redis"),
            db.operation.name = is_redis.then_some(name),
            rpc.system = is_rpc.then_some("grpc"),
            rpc.service = is_rpc.then_some(triptych_proto::v1::ec_objects_server::SERVICE_NAME),
            aws.s3.bucket = self.bucket.as_deref(),
            server.address = self.host.as_deref(),
            server.port = self.port.map(i64::from),
            "error.type" = field::Empty,
        )
    }
}

/// A span of work that goes on beside a request, such as a load that others share; none outside of a trace.
pub fn beside(name: &'static str) -> Span {
    match Span::current().is_none() {
        true => Span::none(),
        false => tracing::info_span!(target: STORE, "ec", otel.name = name),
    }
}

/// A number as OpenTelemetry has it.
fn count(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

fn digits(key: &ContentKey) -> String {
    key.to_string().chars().take(KEY_DIGITS).collect()
}

/// Notes how an operation ended, and the bytes that it moved.
pub fn ended<T>(span: &Span, result: &Result<T, EcError>, outcome: impl Fn(&T) -> (Outcome, Option<usize>)) {
    match result {
        Ok(answer) => {
            let (outcome, bytes) = outcome(answer);
            span.record("triptych.ec.outcome", outcome.as_str());
            if let Some(bytes) = bytes {
                span.record("triptych.ec.bytes", count(bytes));
            }
        }
        Err(e) => {
            let outcome = Outcome::of_error(e).as_str();
            span.record("triptych.ec.outcome", outcome);
            span.record("error.type", outcome);
            span.record("otel.status_code", "ERROR");
        }
    }
}

fn found(found: &bool) -> (Outcome, Option<usize>) {
    (if *found { Outcome::Ok } else { Outcome::Miss }, None)
}

/// The outcome of a read.
pub fn read(object: &Option<Bytes>) -> (Outcome, Option<usize>) {
    match object {
        Some(object) => (Outcome::Ok, Some(object.len())),
        None => (Outcome::Miss, None),
    }
}

impl Traced {
    /// Traces the operations of `store`, which is at `place`.
    pub fn new(store: Arc<dyn EcStore>, place: Place) -> Self {
        Self { store, place }
    }

    /// Runs an operation on one key inside its span.
    async fn one<T>(
        &self,
        (name, key): (&'static str, &ContentKey),
        operation: impl Future<Output = Result<T, EcError>>,
        outcome: impl Fn(&T) -> (Outcome, Option<usize>),
    ) -> Result<T, EcError> {
        let span = self.place.span(name, std::slice::from_ref(key));
        let result = operation.instrument(span.clone()).await;
        ended(&span, &result, outcome);
        result
    }
}

#[async_trait]
impl EcStore for Traced {
    fn kind(&self) -> StoreKind {
        self.store.kind()
    }

    fn describe(&self) -> String {
        self.store.describe()
    }

    async fn put_if_absent(&self, key: &ContentKey, object: Bytes) -> Result<PutOutcome, EcError> {
        let bytes = Some(object.len());
        let outcome = |put: &PutOutcome| match put {
            PutOutcome::Stored => (Outcome::Ok, bytes),
            PutOutcome::AlreadyThere => (Outcome::AlreadyThere, None),
        };
        self.one(("put", key), self.store.put_if_absent(key, object), outcome).await
    }

    async fn get(&self, key: &ContentKey) -> Result<Option<Bytes>, EcError> {
        self.one(("get", key), self.store.get(key), read).await
    }

    async fn heads(&self, keys: &[ContentKey]) -> Result<Vec<Option<EncodedItem>>, EcError> {
        let span = self.place.span("exists", keys);
        let heads = self.store.heads(keys).instrument(span.clone()).await;
        ended(&span, &heads, |heads| {
            let hits = heads.iter().flatten().count();
            span.record("triptych.ec.hits", count(hits));
            (if hits == heads.len() { Outcome::Ok } else { Outcome::Miss }, None)
        });
        heads
    }

    async fn delete(&self, key: &ContentKey) -> Result<bool, EcError> {
        self.one(("delete", key), self.store.delete(key), found).await
    }

    async fn quarantine(&self, key: &ContentKey) -> Result<bool, EcError> {
        self.one(("quarantine", key), self.store.quarantine(key), found).await
    }

    async fn disown(&self, key: &ContentKey, object: &Bytes) -> Result<bool, EcError> {
        self.one(("quarantine", key), self.store.disown(key, object), found).await
    }

    async fn ping(&self) -> Result<(), EcError> {
        self.store.ping().await
    }

    async fn acquire(&self, key: &ContentKey, ttl: Duration) -> Result<Acquired, EcError> {
        let outcome = |acquired: &Acquired| match acquired {
            Acquired::Granted(_) => (Outcome::Ok, None),
            Acquired::Held { .. } => (Outcome::Held, None),
        };
        self.one(("acquire lease", key), self.store.acquire(key, ttl), outcome).await
    }

    async fn renew(&self, lease: &EncodeLease, ttl: Duration) -> Result<bool, EcError> {
        self.one(("renew lease", &lease.key), self.store.renew(lease, ttl), found).await
    }

    async fn release(&self, lease: &EncodeLease) -> Result<bool, EcError> {
        self.one(("release lease", &lease.key), self.store.release(lease), found).await
    }

    async fn wait(&self, key: &ContentKey, patience: Duration) -> Result<Option<EncodedItem>, EcError> {
        let outcome = |item: &Option<EncodedItem>| found(&item.is_some());
        self.one(("wait", key), self.store.wait(key, patience), outcome).await
    }

    async fn list(&self, after: Option<&ContentKey>, limit: usize) -> Result<Vec<Listed>, EcError> {
        self.store.list(after, limit).await
    }

    async fn leftovers(&self, tidy: Tidy) -> Result<Leftovers, EcError> {
        self.store.leftovers(tidy).await
    }

    async fn flush(&self, patience: Duration) -> bool {
        self.store.flush(patience).await
    }
}
