//! The gRPC service: one job from its bytes to a READY object.

use crate::batcher::Batcher;
use crate::meters::{JobTimes, Meters};
use crate::pool::{Place, PreprocessPool};
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc;
use tonic::{Request, Response, Status};
use tracing::Instrument;
use triptych_core::item::rows_from_f32;
use triptych_core::{
    ContentKey, DType, EncodedItem, EncoderOutput, Failure, FailureClass, Fingerprint, Modality, WorkerId,
};
use triptych_ec::connector::{Published, WorkerRole};
use triptych_ec::store::EcStore;
use triptych_models::preprocess::Preprocess;
use triptych_proto::v1::encode_event::Kind;
use triptych_proto::v1::encoder_worker_server::EncoderWorker;
use triptych_proto::{convert, v1};
use triptych_runtime::{Drain, status, trace_context};

/// What a job tells: what it will be, and its end.
const EVENTS: usize = 2;

/// Where a job tells it.
type Events = mpsc::Sender<Result<v1::EncodeEvent, Status>>;

/// A model as this worker serves it.
pub struct ServedModel {
    /// Hugging Face's `model_type`.
    pub family: String,
    /// Its processor.
    pub preprocess: Arc<dyn Preprocess>,
    /// Its encoders.
    pub encoders: BTreeMap<Modality, (Fingerprint, Batcher)>,
    /// When it was loaded.
    pub created: SystemTime,
}

/// What the service works with.
pub struct Encoders {
    /// Name of the worker.
    pub worker_id: WorkerId,
    /// By served name.
    pub models: HashMap<String, ServedModel>,
    /// Admission and preprocessing.
    pub pool: PreprocessPool,
    /// Publishes.
    pub connector: WorkerRole,
    /// For its description.
    pub store: Arc<dyn EcStore>,
    /// Element type of published rows.
    pub dtype: DType,
    /// Counts.
    pub meters: Arc<Meters>,
    /// Waits for what is being published.
    pub drain: Drain,
}

/// The service.
pub struct Service(Arc<Encoders>);

impl Service {
    /// Wraps the worker's parts.
    pub fn new(encoders: Encoders) -> Self {
        Self(Arc::new(encoders))
    }
}

/// A job after its message was checked.
struct Job<'a> {
    model: &'a ServedModel,
    modality: Modality,
    key: ContentKey,
    fingerprint: Fingerprint,
    batcher: &'a Batcher,
}

impl Encoders {
    fn check(&self, request: &v1::EncodeRequest) -> Result<Job<'_>, Failure> {
        let model = self.models.get(&request.model).ok_or_else(|| {
            let message = format!("model {:?} is not served by this encoder", request.model);
            Failure::new(FailureClass::NotFound, message).with_param("model")
        })?;
        let modality = convert::modality(request.modality)?;
        let key = convert::key(&request.key, "key")?;
        let wanted = convert::fingerprint(&request.fingerprint, "fingerprint")?;
        let (fingerprint, batcher) = model.encoders.get(&modality).ok_or_else(|| {
            let reads: Vec<_> = model.encoders.keys().map(|m| m.as_str()).collect();
            Failure::invalid(format!(
                "model {:?} reads {}, not {modality}",
                request.model,
                reads.join(" and ")
            ))
        })?;
        if wanted != *fingerprint {
            let detail = format!("asked for encoder {wanted}, this worker has {fingerprint}");
            return Err(
                Failure::new(FailureClass::Mismatch, "encoder fingerprints differ").with_detail(detail)
            );
        }
        Ok(Job { model, modality, key, fingerprint: wanted, batcher })
    }

    async fn encode(
        &self,
        request: v1::EncodeRequest,
        events: &Events,
    ) -> Result<v1::EncodeResponse, Failure> {
        let job = self.check(&request)?;
        let place = self.pool.admit()?;
        let options = convert::options(request.options.unwrap_or_default(), request.item_is_token_ids);
        let (input, preprocess) =
            self.pool.preprocess(job.model.preprocess.clone(), job.modality, request.item, options).await?;
        let item = EncodedItem {
            key: job.key,
            fingerprint: job.fingerprint,
            modality: job.modality,
            n_tokens: input.n_tokens,
            hidden: u32::try_from(job.batcher.hidden()).map_err(Failure::internal)?,
            dtype: self.dtype,
            extent: input.extent.clone(),
            checksum: [0; 32],
        };
        // Nobody who listens is no obstacle: the work goes with its stream.
        let _ = events.try_send(Ok(event(Kind::Announced((&item).into()))));
        let encoded = job.batcher.encode(input).await?;
        let rows = rows_from_f32(&encoded.rows, job.batcher.hidden(), self.dtype);
        let output = EncoderOutput::seal(item, rows).map_err(Failure::internal)?;
        let start = Instant::now();
        let published = self.publish(output, place).await?;
        let times =
            JobTimes { queue: encoded.queue, preprocess, encode: encoded.encode, publish: start.elapsed() };
        self.meters.item(job.modality, times);
        Ok(response(&published.item, times))
    }

    /// A job to its last event, counted and logged.
    async fn job(&self, request: v1::EncodeRequest, events: &Events) -> Result<v1::EncodeEvent, Status> {
        let model = request.model.clone();
        match self.encode(request, events).await {
            Ok(response) => {
                self.meters.job(&model, "ok");
                Ok(event(Kind::Ready(response)))
            }
            Err(failure) => {
                let known = self.models.contains_key(&model);
                self.meters.job(if known { &model } else { "unknown" }, failure.class.as_str());
                tracing::warn!(class = failure.class.as_str(), detail = failure.detail, "job failed");
                Err(status::to_status(&failure))
            }
        }
    }

    /// Publishes, also when the caller goes away meanwhile; then too the job keeps its place until it is done, or
    /// callers that come and go before a slow store would pile up outputs without a bound.
    async fn publish(&self, output: EncoderOutput, place: Place) -> Result<Published, Failure> {
        let connector = self.connector.clone();
        let work = async move {
            let published = connector.save_caches(output).await;
            drop(place);
            published
        };
        let published = self.drain.tasks().spawn(work).await;
        Ok(published.map_err(|e| Failure::internal(format!("publishing: {e}")))??)
    }

    fn describe(&self) -> v1::DescribeResponse {
        let encoder =
            |m: &ServedModel, modality: &Modality, fingerprint: &Fingerprint| v1::worker_model::Encoder {
                modality: v1::Modality::from(*modality).into(),
                fingerprint: fingerprint.as_bytes().to_vec().into(),
                takes_prompt: m.preprocess.takes_prompt(),
            };
        let model = |(name, m): (&String, &ServedModel)| v1::WorkerModel {
            name: name.clone(),
            family: m.family.clone(),
            encoders: m.encoders.iter().map(|(modality, (f, _))| encoder(m, modality, f)).collect(),
            max_context: 0,
            max_items: 0,
            created_s: m.created.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        };
        v1::DescribeResponse {
            worker_id: self.worker_id.to_string(),
            models: self.models.iter().map(model).collect(),
            ec_store: self.store.describe(),
            encodes: true,
        }
    }
}

fn event(kind: Kind) -> v1::EncodeEvent {
    v1::EncodeEvent { kind: Some(kind) }
}

fn response(item: &EncodedItem, times: JobTimes) -> v1::EncodeResponse {
    let us = |d: Duration| u64::try_from(d.as_micros()).unwrap_or(u64::MAX);
    v1::EncodeResponse {
        item: Some(item.into()),
        queue_us: us(times.queue),
        preprocess_us: us(times.preprocess),
        encode_us: us(times.encode),
        publish_us: us(times.publish),
        peer: String::new(),
        shared: false,
    }
}

#[tonic::async_trait]
impl EncoderWorker for Service {
    type EncodeStream = BoxStream<'static, Result<v1::EncodeEvent, Status>>;
    type WatchStream = BoxStream<'static, Result<v1::WorkerState, Status>>;

    async fn describe(
        &self,
        _: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::DescribeResponse>, Status> {
        Ok(Response::new(self.0.describe()))
    }

    async fn encode(
        &self,
        request: Request<v1::EncodeRequest>,
    ) -> Result<Response<Self::EncodeStream>, Status> {
        let id = trace_context::id_for_span(&request.get_ref().request_id);
        let span = tracing::info_span!("encode", request_id = %id);
        trace_context::adopt(&span, request.metadata());
        let (events, mut told) = mpsc::channel(EVENTS);
        let (encoders, request) = (Arc::clone(&self.0), request.into_inner());
        let work = async move {
            let end = encoders.job(request, &events).await;
            let _ = events.send(end).await;
        };
        let mut work = Some(Box::pin(work.instrument(span)));
        // The work lives in the stream: a caller that goes away takes it along.
        let stream = stream::poll_fn(move |cx| {
            if let Some(running) = &mut work
                && running.as_mut().poll(cx).is_ready()
            {
                work = None;
            }
            told.poll_recv(cx)
        });
        Ok(Response::new(stream.boxed()))
    }

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Err(Status::unimplemented("not yet"))
    }
}
