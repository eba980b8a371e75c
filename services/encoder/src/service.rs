//! The gRPC service: description, jobs as streams of events, and load.

use crate::adapters::ServedAdapter;
use crate::job::{EncoderWorkerState, JobProgress};
use crate::served::ServedEncoder;
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use std::sync::Arc;
use std::time::UNIX_EPOCH;
use tonic::{Request, Response, Status};
use triptych_core::{EncodedItem, EncoderId, Fingerprint};
use triptych_proto::v1;
use triptych_proto::v1::encode_event::Kind;
use triptych_proto::v1::encoder_worker_server::EncoderWorker;
use triptych_runtime::single_flight::{CallRole, Subscription};
use triptych_runtime::{spans, status, trace_context};

/// gRPC service of an encoder worker.
pub struct EncoderService(Arc<EncoderWorkerState>);

impl EncoderService {
    /// Wraps the worker's state.
    pub fn new(encoders: Arc<EncoderWorkerState>) -> Self {
        Self(encoders)
    }

    fn describe(&self) -> v1::DescribeResponse {
        let encoder =
            |m: &ServedEncoder, id: &EncoderId, fingerprint: &Fingerprint| v1::worker_model::Encoder {
                modality: v1::Modality::from(id.modality).into(),
                fingerprint: fingerprint.as_bytes().to_vec().into(),
                takes_prompt: m.encoders.get(id).is_some_and(|tower| tower.preprocess.takes_prompt()),
                tower: None,
                tower_index: id.tower.0.into(),
                tower_name: m.tower_name(*id).to_owned(),
            };
        let model = |name: &String, m: &ServedEncoder| v1::WorkerModel {
            name: name.clone(),
            family: m.family.clone(),
            encoders: m.encoders.iter().map(|(id, tower)| encoder(m, id, &tower.fingerprint)).collect(),
            max_context: 0,
            max_items: 0,
            reads_encoder_prompt: false,
            chat: None,
            parent: String::new(),
            adapter: Vec::new().into(),
            adapts_encoder: false,
            foreign_encoders: None,
            not_resumable: false,
            created_s: m.created.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        };
        let of_adapter =
            |m: &ServedEncoder, (name, of): (String, Arc<ServedAdapter>), base: &v1::WorkerModel| {
                let encoders = of.encoders.iter().map(|(id, f)| encoder(m, id, f));
                v1::WorkerModel {
                    name,
                    encoders: encoders.collect(),
                    parent: base.name.clone(),
                    adapter: of.id.as_bytes().to_vec().into(),
                    adapts_encoder: true,
                    created_s: of.created.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
                    ..base.clone()
                }
            };
        let with_adapters = |(name, m): &(String, Arc<ServedEncoder>)| {
            let base = model(name, m);
            let adapters: Vec<_> = m.adapters.all().into_iter().map(|of| of_adapter(m, of, &base)).collect();
            std::iter::once(base).chain(adapters)
        };
        v1::DescribeResponse {
            worker_id: self.0.worker_id.to_string(),
            models: self.0.models.all().iter().flat_map(with_adapters).collect(),
            ec_store: self.0.store.describe(),
            encodes: true,
            instance: self.0.journal.instance(),
            suspects: self.0.journal.suspects_to_wire(),
        }
    }
}

#[tonic::async_trait]
impl EncoderWorker for EncoderService {
    type EncodeStream = BoxStream<'static, Result<v1::EncodeEvent, Status>>;
    type WatchStream = BoxStream<'static, Result<v1::WorkerState, Status>>;

    async fn describe(
        &self,
        _: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::DescribeResponse>, Status> {
        Ok(Response::new(self.describe()))
    }

    async fn encode(
        &self,
        request: Request<v1::EncodeRequest>,
    ) -> Result<Response<Self::EncodeStream>, Status> {
        let id = trace_context::id_for_span(&request.get_ref().request_id);
        let span = tracing::info_span!("encode", request_id = %id);
        let request = request.into_inner();
        let model = request.model.clone();
        let started = span.in_scope(|| {
            let started = self.0.begin(request);
            started.inspect_err(|failure| {
                spans::failed(&span, failure.class);
                self.0.count(&model, failure.class.as_str(), Some(failure));
            })
        });
        let (subscription, role) = started.map_err(|failure| status::to_status(&failure))?;
        Ok(Response::new(events(subscription, role)))
    }

    async fn load_encoder_adapter(
        &self,
        request: Request<v1::LoadAdapterRequest>,
    ) -> Result<Response<v1::LoadAdapterResponse>, Status> {
        let loaded = self.0.load_adapter(request.into_inner()).await;
        Ok(Response::new(loaded.map_err(|failure| status::to_status(&failure))?))
    }

    async fn unload_encoder_adapter(
        &self,
        request: Request<v1::UnloadAdapterRequest>,
    ) -> Result<Response<v1::UnloadAdapterResponse>, Status> {
        let unloaded = self.0.unload_adapter(&request.into_inner().name).await;
        unloaded.map_err(|failure| status::to_status(&failure))?;
        Ok(Response::new(v1::UnloadAdapterResponse {}))
    }

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Ok(Response::new(self.0.pool.load().watch(self.0.drain.clone())))
    }
}

/// Events of a job that a caller has not received yet. A caller that goes away drops it, and with the last one
/// the job.
enum EventCursor {
    Both(Subscription<JobProgress>),
    End(Subscription<JobProgress>),
    Nothing,
}

/// Events of a job for one of its callers.
fn events(
    subscription: Subscription<JobProgress>,
    role: CallRole,
) -> BoxStream<'static, Result<v1::EncodeEvent, Status>> {
    stream::unfold(EventCursor::Both(subscription), move |cursor| async move {
        match cursor {
            EventCursor::Both(mut subscription) => {
                let progress = subscription.until(|p| p.announced.is_some() || p.ended.is_some()).await;
                match progress {
                    Some(JobProgress { announced: Some(item), .. }) => {
                        Some((Ok(announced(&item)), EventCursor::End(subscription)))
                    }
                    _ => Some((end(subscription, role).await, EventCursor::Nothing)),
                }
            }
            EventCursor::End(subscription) => Some((end(subscription, role).await, EventCursor::Nothing)),
            EventCursor::Nothing => None,
        }
    })
    .boxed()
}

fn announced(item: &EncodedItem) -> v1::EncodeEvent {
    v1::EncodeEvent { kind: Some(Kind::Announced(item.into())) }
}

/// The last event of a job: its end, or why it has none.
async fn end(mut subscription: Subscription<JobProgress>, role: CallRole) -> Result<v1::EncodeEvent, Status> {
    let progress = subscription.until(|p| p.ended.is_some()).await;
    let response = match progress.and_then(|p| p.ended) {
        Some(ended) => ended,
        None => Err(subscription.lost("a job").await),
    };
    let mut response = response.map_err(|failure| status::to_status(&failure))?;
    response.shared |= role == CallRole::Follower;
    Ok(v1::EncodeEvent { kind: Some(Kind::Ready(response)) })
}
