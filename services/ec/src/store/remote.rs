//! The client of an `EcObjects` server ([`crate::server`]): a store that lives in another process.
//!
//! Objects travel in frames of 1 MiB without copies on this side. HTTP/2 keep-alive finds dead peers; a channel on
//! which several operations in a row timed out is dropped all the same, since a connection can stay wedged after
//! a partition.

use super::lease::{Acquired, EncodeLease};
use super::{EcStore, Listed, Op, PutOutcome, StoreKind, check_size};
use crate::error::EcError;
use crate::object::{self, ObjectError};
use crate::wire;
use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures::{StreamExt, stream};
use parking_lot::{Mutex, MutexGuard};
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use triptych_core::limits::Limits;
use triptych_core::{ContentKey, EncodedItem};
use triptych_proto::v1::ec_objects_client::EcObjectsClient;
use triptych_proto::v1::head_response::Entry;
use triptych_proto::v1::lease_request::{Acquire, Ask, Release, Renew};
use triptych_proto::v1::list_response::Entry as ListEntry;
use triptych_proto::v1::put_frame::{Kind, Start};
use triptych_proto::v1::{
    DeleteRequest, GetRequest, HeadRequest, LeaseRequest, LeaseResponse, ListRequest, PutFrame, WaitRequest,
};

/// Timeouts of a remote store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteTuning {
    /// Timeout of an operation. Default 10 s.
    pub op_timeout: Duration,
    /// Timeout of connecting. Default 1 s.
    pub connect_timeout: Duration,
    /// Consecutive timeouts after which the channel is replaced. Default 3; 0 is read as 1.
    pub timeouts_to_reconnect: u32,
}

impl Default for RemoteTuning {
    fn default() -> Self {
        Self {
            op_timeout: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(1),
            timeouts_to_reconnect: 3,
        }
    }
}

/// Opens a channel to `host:port` that connects on first use. It decides the transport: plain TCP, TLS, or a simulated
/// network.
pub type Dial = Arc<dyn Fn(&str) -> Result<Channel, tonic::transport::Error> + Send + Sync>;

/// Writes the trace context of the current span into a call.
pub type Inject = fn(Request<()>) -> Result<Request<()>, Status>;

/// A store behind gRPC.
pub struct RemoteStore {
    limits: Limits,
    tuning: RemoteTuning,
    /// `host:port`.
    authority: String,
    dial: Dial,
    inject: Inject,
    link: Mutex<LinkState>,
}

struct LinkState {
    channel: Channel,
    timeouts_in_a_row: u32,
}

impl fmt::Debug for RemoteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteStore").field("server", &self.describe()).finish_non_exhaustive()
    }
}

impl RemoteStore {
    /// A store at `host:port`. Connects at the first operation, and again whenever the connection was lost. Must
    /// be called inside a tokio runtime.
    ///
    /// # Errors
    /// [`EcError::Config`] if `authority` is not a host and a port.
    pub fn new(authority: &str, tuning: RemoteTuning, limits: &Limits) -> Result<Self, EcError> {
        let connect_timeout = tuning.connect_timeout;
        let dial = move |authority: &str| Ok(endpoint(authority, connect_timeout)?.connect_lazy());
        Self::with_dial(authority, tuning, limits, Arc::new(dial))
    }

    /// As [`Self::new`], with channels from `dial`, which sets the timeout of connecting.
    ///
    /// # Errors
    /// [`EcError::Config`] if `dial` does not take the address.
    pub fn with_dial(
        authority: &str,
        tuning: RemoteTuning,
        limits: &Limits,
        dial: Dial,
    ) -> Result<Self, EcError> {
        let channel = dial(authority)
            .map_err(|e| EcError::Config { setting: format!("grpc://{authority}"), reason: e.to_string() })?;
        let link = Mutex::new(LinkState { channel, timeouts_in_a_row: 0 });
        Ok(Self { limits: limits.clone(), tuning, authority: authority.to_owned(), dial, inject: Ok, link })
    }

    /// Writes a trace context into each call; `None`: none.
    pub fn injecting(self, inject: Option<Inject>) -> Self {
        Self { inject: inject.unwrap_or(Ok), ..self }
    }

    fn client(&self) -> EcObjectsClient<InterceptedService<Channel, Inject>> {
        EcObjectsClient::with_interceptor(self.link().channel.clone(), self.inject)
            .max_decoding_message_size(wire::MAX_MESSAGE_BYTES)
            .max_encoding_message_size(wire::MAX_MESSAGE_BYTES)
    }

    fn link(&self) -> MutexGuard<'_, LinkState> {
        self.link.lock()
    }

    /// Runs a call with the timeout and counts consecutive timeouts.
    async fn within<T>(&self, op: Op, call: impl Future<Output = Result<T, EcError>>) -> Result<T, EcError> {
        self.within_limit(op, self.tuning.op_timeout, call).await
    }

    async fn within_limit<T>(
        &self,
        op: Op,
        limit: Duration,
        call: impl Future<Output = Result<T, EcError>>,
    ) -> Result<T, EcError> {
        let ended = tokio::time::timeout(limit, call).await;
        let mut link = self.link();
        if let Ok(result) = ended {
            link.timeouts_in_a_row = 0;
            return result;
        }
        link.timeouts_in_a_row += 1;
        if link.timeouts_in_a_row >= self.tuning.timeouts_to_reconnect {
            link.timeouts_in_a_row = 0;
            // The address was accepted when the store was made.
            if let Ok(channel) = (self.dial)(&self.authority) {
                link.channel = channel;
            }
        }
        Err(EcError::TimedOut { store: StoreKind::Remote, op, limit })
    }

    fn refine(&self, op: Op, key: Option<&ContentKey>, len: usize, status: Status) -> EcError {
        if let Some(limit) = wire::limit_of(&status) {
            return EcError::TooLarge { limit, actual: len };
        }
        match (status.code(), key) {
            (Code::DataLoss, Some(key)) => {
                let reason = "the server found it corrupt";
                EcError::Corrupt { key: *key, source: ObjectError::Frame { reason } }
            }
            (Code::Unimplemented, _) => EcError::Unsupported { store: StoreKind::Remote, op },
            _ => EcError::unavailable(StoreKind::Remote, op, status),
        }
    }

    async fn put(&self, key: &ContentKey, object: Bytes) -> Result<PutOutcome, EcError> {
        // A check costs a round trip of a few hundred bytes; without it, the whole object may be sent in vain.
        if object.len() > wire::FRAME_BYTES && matches!(self.ask(&[*key]).await?.as_slice(), [Some(_)]) {
            return Ok(PutOutcome::AlreadyThere);
        }
        let len = object.len();
        let result = self.client().put(stream::iter(put_frames(key, object))).await;
        match result.map_err(|s| self.refine(Op::Put, Some(key), len, s))?.into_inner().stored {
            true => Ok(PutOutcome::Stored),
            false => Ok(PutOutcome::AlreadyThere),
        }
    }

    async fn fetch(&self, key: &ContentKey) -> Result<Option<Bytes>, EcError> {
        let request = GetRequest { key: Bytes::copy_from_slice(key.as_bytes()) };
        let mut frames = match self.client().get(request).await {
            Ok(response) => response.into_inner(),
            Err(s) if s.code() == Code::NotFound => return Ok(None),
            Err(s) => return Err(self.refine(Op::Get, Some(key), 0, s)),
        };
        let corrupt = |source| EcError::Corrupt { key: *key, source };
        let mut expected = None;
        let mut object = BytesMut::new();
        while let Some(frame) = frames.next().await {
            let frame = frame.map_err(|s| self.refine(Op::Get, Some(key), 0, s))?;
            let len = match expected {
                Some(len) => len,
                None => {
                    let (len, limit) =
                        (usize::try_from(frame.len).unwrap_or(usize::MAX), self.limits.max_object_bytes);
                    if len > limit {
                        return Err(corrupt(ObjectError::TooLarge { limit, actual: len }));
                    }
                    object.reserve(len);
                    *expected.insert(len)
                }
            };
            if frame.data.len() > len - object.len() {
                return Err(corrupt(ObjectError::Frame { reason: "more bytes than the server announced" }));
            }
            object.extend_from_slice(&frame.data);
        }
        match expected {
            Some(len) if object.len() == len => Ok(Some(object.freeze())),
            len => Err(corrupt(ObjectError::Truncated {
                expected: len.unwrap_or_default(),
                actual: object.len(),
            })),
        }
    }

    async fn ask(&self, keys: &[ContentKey]) -> Result<Vec<Option<EncodedItem>>, EcError> {
        let mut heads = Vec::with_capacity(keys.len());
        for keys in keys.chunks(wire::MAX_KEYS) {
            let wire_keys = keys.iter().map(|key| Bytes::copy_from_slice(key.as_bytes())).collect();
            let answer = self.client().head(HeadRequest { keys: wire_keys }).await;
            let entries = answer.map_err(|s| self.refine(Op::Heads, None, 0, s))?.into_inner().entries;
            if entries.len() != keys.len() {
                let reason = format!("{} heads for {} keys", entries.len(), keys.len());
                return Err(EcError::unavailable(StoreKind::Remote, Op::Heads, reason));
            }
            heads.extend(keys.iter().zip(&entries).map(|(key, entry)| self.read_entry(key, entry)));
        }
        Ok(heads)
    }

    async fn ask_lease(&self, key: &ContentKey, ask: Ask) -> Result<LeaseResponse, EcError> {
        let request = LeaseRequest { key: Bytes::copy_from_slice(key.as_bytes()), ask: Some(ask) };
        self.within(Op::Lease, async {
            let answer = self.client().lease(request).await;
            Ok(answer.map_err(|s| self.refine(Op::Lease, Some(key), 0, s))?.into_inner())
        })
        .await
    }

    fn read_entry(&self, key: &ContentKey, entry: &Entry) -> Option<EncodedItem> {
        if !entry.found {
            return None;
        }
        object::probe(&entry.head, usize::try_from(entry.len).ok()?, key, &self.limits).ok()
    }
}

#[async_trait]
impl EcStore for RemoteStore {
    fn kind(&self) -> StoreKind {
        StoreKind::Remote
    }

    fn describe(&self) -> String {
        format!("grpc://{}", self.authority)
    }

    async fn put_if_absent(&self, key: &ContentKey, object: Bytes) -> Result<PutOutcome, EcError> {
        check_size(&self.limits, object.len())?;
        self.within(Op::Put, self.put(key, object)).await
    }

    async fn get(&self, key: &ContentKey) -> Result<Option<Bytes>, EcError> {
        self.within(Op::Get, self.fetch(key)).await
    }

    async fn heads(&self, keys: &[ContentKey]) -> Result<Vec<Option<EncodedItem>>, EcError> {
        self.within(Op::Heads, self.ask(keys)).await
    }

    async fn delete(&self, key: &ContentKey) -> Result<bool, EcError> {
        let request = DeleteRequest { key: Bytes::copy_from_slice(key.as_bytes()) };
        self.within(Op::Delete, async {
            let answer = self.client().delete(request).await;
            Ok(answer.map_err(|s| self.refine(Op::Delete, Some(key), 0, s))?.into_inner().deleted)
        })
        .await
    }

    async fn ping(&self) -> Result<(), EcError> {
        self.within(Op::Ping, async {
            let answer = self.client().head(HeadRequest { keys: Vec::new() }).await;
            answer.map(drop).map_err(|s| self.refine(Op::Ping, None, 0, s))
        })
        .await
    }

    async fn acquire(&self, key: &ContentKey, ttl: Duration) -> Result<Acquired, EcError> {
        let answer = self.ask_lease(key, Ask::Acquire(Acquire { ttl_ms: millis(ttl) })).await?;
        Ok(match answer.done {
            true => Acquired::Granted(EncodeLease { key: *key, token: answer.token }),
            false => Acquired::Held { left: Duration::from_millis(answer.left_ms) },
        })
    }

    async fn renew(&self, lease: &EncodeLease, ttl: Duration) -> Result<bool, EcError> {
        let ask = Ask::Renew(Renew { token: lease.token, ttl_ms: millis(ttl) });
        Ok(self.ask_lease(&lease.key, ask).await?.done)
    }

    async fn release(&self, lease: &EncodeLease) -> Result<bool, EcError> {
        let ask = Ask::Release(Release { token: lease.token });
        Ok(self.ask_lease(&lease.key, ask).await?.done)
    }

    async fn wait(&self, key: &ContentKey, patience: Duration) -> Result<Option<EncodedItem>, EcError> {
        let request =
            WaitRequest { key: Bytes::copy_from_slice(key.as_bytes()), patience_ms: millis(patience) };
        self.within_limit(Op::Wait, patience + self.tuning.op_timeout, async {
            let answer = self.client().wait(request).await;
            let entries = answer.map_err(|s| self.refine(Op::Wait, Some(key), 0, s))?.into_inner().entries;
            Ok(entries.first().and_then(|entry| self.read_entry(key, entry)))
        })
        .await
    }

    async fn list(&self, after: Option<&ContentKey>, limit: usize) -> Result<Vec<Listed>, EcError> {
        let after = after.map_or_else(Bytes::new, |key| Bytes::copy_from_slice(key.as_bytes()));
        let limit = u32::try_from(limit).unwrap_or(u32::MAX);
        self.within(Op::List, async {
            let answer = self.client().list(ListRequest { after, limit }).await;
            let entries = answer.map_err(|s| self.refine(Op::List, None, 0, s))?.into_inner().entries;
            let listed = |e: ListEntry| {
                let stored = (e.stored_ms > 0).then(|| UNIX_EPOCH + Duration::from_millis(e.stored_ms));
                Some(Listed { key: ContentKey::from_slice(&e.key)?, len: e.len, stored })
            };
            Ok(entries.into_iter().filter_map(listed).collect())
        })
        .await
    }
}

/// The settings that objects need, for both directions.
fn endpoint(authority: &str, connect_timeout: Duration) -> Result<Endpoint, tonic::transport::Error> {
    Ok(Endpoint::from_shared(format!("http://{authority}"))?
        .connect_timeout(connect_timeout)
        .tcp_nodelay(true)
        .initial_stream_window_size(wire::STREAM_WINDOW)
        .initial_connection_window_size(wire::CONNECTION_WINDOW)
        .http2_keep_alive_interval(wire::KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(wire::KEEP_ALIVE_TIMEOUT)
        .keep_alive_while_idle(true))
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The head and the data frames of an upload; slices of the object, not copies.
fn put_frames(key: &ContentKey, mut object: Bytes) -> Vec<PutFrame> {
    let start = Start { key: Bytes::copy_from_slice(key.as_bytes()), len: object.len() as u64 };
    let mut frames = vec![PutFrame { kind: Some(Kind::Start(start)) }];
    while !object.is_empty() {
        let data = object.split_to(object.len().min(wire::FRAME_BYTES));
        frames.push(PutFrame { kind: Some(Kind::Data(data)) });
    }
    frames
}
