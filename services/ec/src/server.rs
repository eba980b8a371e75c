//! The server of the `EcObjects` service: any store, offered to other processes.
//!
//! `triptych store` runs one over a memory store, and `triptych up` where shared memory has no room. The announced length of an
//! upload is checked against the limits first, and all uploads hold a bounded number of bytes. Has no authentication: it
//! belongs on the cluster's internal network.

use crate::error::{EcError, chain};
use crate::object;
use crate::store::lease::EncodeLease;
use crate::store::{EcStore, PutOutcome};
use crate::wire;
use bytes::{Bytes, BytesMut};
use futures::stream::{self, Iter};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};
use triptych_core::EncodedItem;
use triptych_core::limits::Limits;
use triptych_proto::v1::ec_objects_server::{EcObjects, EcObjectsServer};
use triptych_proto::v1::head_response::Entry;
use triptych_proto::v1::lease_request::Ask;
use triptych_proto::v1::put_frame::Kind;
use triptych_proto::v1::{
    DeleteRequest, DeleteResponse, GetFrame, GetRequest, HeadRequest, HeadResponse, LeaseRequest,
    LeaseResponse, ListRequest, ListResponse, PutFrame, PutResult, WaitRequest,
};

/// Timeout between two frames of an upload.
const FRAME_TIMEOUT: Duration = Duration::from_secs(10);
/// Capacity of concurrent uploads, in objects of the largest size.
const UPLOADS_OF_LARGEST: usize = 4;
const MIB: usize = 1 << 20;

/// The service over a store.
pub struct EcObjectsService {
    store: Arc<dyn EcStore>,
    limits: Limits,
    /// One permit for each MiB that uploads may hold.
    upload_mib: Semaphore,
}

impl EcObjectsService {
    /// The service, ready to be added to a tonic router.
    pub fn into_server(store: Arc<dyn EcStore>, limits: &Limits) -> EcObjectsServer<Self> {
        let largest = limits.max_object_bytes.div_ceil(MIB).max(1);
        let permits = largest.saturating_mul(UPLOADS_OF_LARGEST).min(Semaphore::MAX_PERMITS);
        let service = Self { store, limits: limits.clone(), upload_mib: Semaphore::new(permits) };
        EcObjectsServer::new(service)
            .max_decoding_message_size(wire::MAX_MESSAGE_BYTES)
            .max_encoding_message_size(wire::MAX_MESSAGE_BYTES)
    }

    async fn receive(&self, len: usize, frames: &mut Streaming<PutFrame>) -> Result<Bytes, Status> {
        let mut object = BytesMut::new();
        while let Some(frame) = next_frame(frames).await? {
            let Some(Kind::Data(data)) = frame.kind else {
                return Err(Status::invalid_argument("only data may follow the start of an upload"));
            };
            if data.len() > len - object.len() {
                return Err(Status::invalid_argument(format!("more than the {len} bytes announced")));
            }
            if object.is_empty() {
                // No more than the permits, and no growth by doubling, which the store would keep.
                object.reserve(len);
            }
            object.extend_from_slice(&data);
        }
        if object.len() < len {
            let actual = object.len();
            return Err(Status::invalid_argument(format!("{actual} of the {len} bytes announced")));
        }
        Ok(object.freeze())
    }
}

/// Serves a store on a listener until `shutdown` ends, then lets calls in flight finish.
///
/// # Errors
/// A transport error of the listener.
pub async fn serve(
    listener: TcpListener,
    store: Arc<dyn EcStore>,
    limits: &Limits,
    shutdown: impl Future<Output = ()>,
) -> Result<(), tonic::transport::Error> {
    // The builder's own setting does not reach a listener that was made elsewhere.
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    tuned_server()
        .add_service(EcObjectsService::into_server(store, limits))
        .serve_with_incoming_shutdown(incoming, shutdown)
        .await
}

/// A tonic server with the windows and keep-alive that objects need.
pub fn tuned_server() -> Server {
    Server::builder()
        .initial_stream_window_size(wire::STREAM_WINDOW)
        .initial_connection_window_size(wire::CONNECTION_WINDOW)
        .http2_keepalive_interval(Some(wire::KEEP_ALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(wire::KEEP_ALIVE_TIMEOUT))
        .tcp_nodelay(true)
}

#[tonic::async_trait]
impl EcObjects for EcObjectsService {
    type GetStream = Iter<std::vec::IntoIter<Result<GetFrame, Status>>>;

    async fn put(&self, request: Request<Streaming<PutFrame>>) -> Result<Response<PutResult>, Status> {
        let mut frames = request.into_inner();
        let Some(PutFrame { kind: Some(Kind::Start(start)) }) = next_frame(&mut frames).await? else {
            return Err(Status::invalid_argument("an upload begins with its start"));
        };
        let key = wire::key_of(&start.key).map_err(|s| *s)?;
        let len = usize::try_from(start.len).unwrap_or(usize::MAX);
        let limit = self.limits.max_object_bytes;
        if len > limit {
            return Err(wire::too_large(limit, len));
        }
        let permits = u32::try_from(len.div_ceil(MIB)).unwrap_or(u32::MAX);
        let _held = timeout(FRAME_TIMEOUT, self.upload_mib.acquire_many(permits))
            .await
            .map_err(|_| Status::resource_exhausted("too many bytes are being uploaded"))?
            .map_err(|_| Status::unavailable("the store is stopping"))?;
        let object = self.receive(len, &mut frames).await?;
        let outcome = self.store.put_if_absent(&key, object).await.map_err(|e| status_of(&e))?;
        Ok(Response::new(PutResult { stored: outcome == PutOutcome::Stored }))
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<Self::GetStream>, Status> {
        let key = wire::key_of(&request.get_ref().key).map_err(|s| *s)?;
        let object = self.store.get(&key).await.map_err(|e| status_of(&e))?;
        let object = object.ok_or_else(|| Status::not_found("no object under this key"))?;
        Ok(Response::new(stream::iter(get_frames(object))))
    }

    async fn head(&self, request: Request<HeadRequest>) -> Result<Response<HeadResponse>, Status> {
        let keys = &request.get_ref().keys;
        if keys.len() > wire::MAX_KEYS {
            let n = keys.len();
            return Err(Status::invalid_argument(format!("{n} keys, at most {} at once", wire::MAX_KEYS)));
        }
        let keys = keys.iter().map(|k| wire::key_of(k)).collect::<Result<Vec<_>, _>>().map_err(|s| *s)?;
        if keys.is_empty() {
            self.store.ping().await.map_err(|e| status_of(&e))?;
        }
        let heads = self.store.heads(&keys).await.map_err(|e| status_of(&e))?;
        Ok(Response::new(HeadResponse { entries: heads.into_iter().map(entry).collect() }))
    }

    async fn lease(&self, request: Request<LeaseRequest>) -> Result<Response<LeaseResponse>, Status> {
        let key = wire::key_of(&request.get_ref().key).map_err(|s| *s)?;
        let ask = request.into_inner().ask.ok_or_else(|| Status::invalid_argument("nothing is asked"))?;
        let held = |token| EncodeLease { key, token };
        let (answered, token) = match ask {
            Ask::Acquire(a) => {
                let acquired = self.store.acquire(&key, wire::lease_ttl(a.ttl_ms)).await;
                return Ok(Response::new(acquired.map(wire::acquired).map_err(|e| status_of(&e))?));
            }
            Ask::Renew(r) => (self.store.renew(&held(r.token), wire::lease_ttl(r.ttl_ms)).await, r.token),
            Ask::Release(r) => (self.store.release(&held(r.token)).await, 0),
        };
        let done = answered.map_err(|e| status_of(&e))?;
        Ok(Response::new(LeaseResponse { done, token: if done { token } else { 0 }, left_ms: 0 }))
    }

    async fn wait(&self, request: Request<WaitRequest>) -> Result<Response<HeadResponse>, Status> {
        let key = wire::key_of(&request.get_ref().key).map_err(|s| *s)?;
        let patience = Duration::from_millis(request.get_ref().patience_ms).min(wire::MAX_PATIENCE);
        let item = self.store.wait(&key, patience).await.map_err(|e| status_of(&e))?;
        Ok(Response::new(HeadResponse { entries: vec![entry(item)] }))
    }

    async fn list(&self, request: Request<ListRequest>) -> Result<Response<ListResponse>, Status> {
        let ListRequest { after, limit } = request.into_inner();
        let after = if after.is_empty() { None } else { Some(wire::key_of(&after).map_err(|s| *s)?) };
        let limit = (limit as usize).clamp(1, wire::MAX_PAGE);
        let page = self.store.list(after.as_ref(), limit).await.map_err(|e| status_of(&e))?;
        Ok(Response::new(ListResponse { entries: page.iter().map(wire::listed).collect() }))
    }

    async fn delete(&self, request: Request<DeleteRequest>) -> Result<Response<DeleteResponse>, Status> {
        let key = wire::key_of(&request.get_ref().key).map_err(|s| *s)?;
        let deleted = self.store.delete(&key).await.map_err(|e| status_of(&e))?;
        Ok(Response::new(DeleteResponse { deleted }))
    }
}

/// Heads are canonical, so encoding the item gives the first bytes of the object.
fn entry(item: Option<EncodedItem>) -> Entry {
    match item {
        Some(item) => {
            let len = object::object_len(&item).map_or(u64::MAX, |n| n as u64);
            Entry { found: true, head: object::encode_head(&item), len }
        }
        None => Entry::default(),
    }
}

async fn next_frame(frames: &mut Streaming<PutFrame>) -> Result<Option<PutFrame>, Status> {
    timeout(FRAME_TIMEOUT, frames.message())
        .await
        .map_err(|_| Status::deadline_exceeded(format!("no frame for {FRAME_TIMEOUT:?}")))?
}

/// Slices of the object, not copies; at least one frame, so that the length arrives.
fn get_frames(mut object: Bytes) -> Vec<Result<GetFrame, Status>> {
    let first = object.split_to(object.len().min(wire::FRAME_BYTES));
    let mut frames = vec![Ok(GetFrame { len: (first.len() + object.len()) as u64, data: first })];
    while !object.is_empty() {
        let data = object.split_to(object.len().min(wire::FRAME_BYTES));
        frames.push(Ok(GetFrame { len: 0, data }));
    }
    frames
}

/// Codes of the internal network; clients of the cluster get those of the proxy's table.
fn status_of(e: &EcError) -> Status {
    match e {
        EcError::TooLarge { limit, actual } => wire::too_large(*limit, *actual),
        EcError::Corrupt { .. } => Status::data_loss(chain(e)),
        EcError::TimedOut { .. } | EcError::Unavailable { .. } | EcError::CircuitOpen { .. } => {
            Status::unavailable(chain(e))
        }
        EcError::Overloaded { .. } => Status::resource_exhausted(chain(e)),
        EcError::Unsupported { .. } | EcError::ReadOnly { .. } => Status::unimplemented(chain(e)),
        EcError::Config { .. } | EcError::NoStore { .. } => Status::internal(chain(e)),
    }
}
