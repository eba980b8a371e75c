//! The gRPC service: checks a request, lays its prompt out, admits it.

use crate::answer::{Parts, Prepared, Running};
use crate::driver::Driver;
use crate::loads::Loads;
use crate::meters::Meters;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use tracing::Instrument;
use triptych_core::limits::Limits;
use triptych_core::prompt::Prompt;
use triptych_core::{EncodedItem, Failure, FailureClass, Fingerprint, Modality, RequestId, WorkerId};
use triptych_ec::store::EcStore;
use triptych_models::prompt::{PreparedSequence, PromptBuilder};
use triptych_models::tokenization::Tokenizer;
use triptych_proto::convert::{SamplingFields, sampling_from_wire};
use triptych_proto::v1;
use triptych_proto::v1::prefill_decode_worker_server::PrefillDecodeWorker;
use triptych_runtime::{Drain, status, trace_context};

/// Answers that wait for a slow client before the task that writes them waits too.
const STREAM_BUFFER: usize = 64;

/// A model as this worker serves it.
pub struct ServedModel {
    /// Hugging Face's `model_type`.
    pub family: String,
    /// Lays prompts out.
    pub prompts: Arc<dyn PromptBuilder>,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The engine.
    pub driver: Driver,
    /// Counts.
    pub meters: Meters,
    /// The encoders whose outputs it takes.
    pub encoders: BTreeMap<Modality, Fingerprint>,
    /// Tokens the context holds.
    pub max_context: usize,
    /// When it was loaded.
    pub created: SystemTime,
}

/// What the service works with.
pub struct Worker {
    /// Name of the worker.
    pub worker_id: WorkerId,
    /// By served name.
    pub models: HashMap<String, ServedModel>,
    /// The connector.
    pub loads: Loads,
    /// For its description.
    pub store: Arc<dyn EcStore>,
    /// Limits on requests.
    pub limits: Limits,
    /// Requests admitted at once.
    pub places: Arc<Semaphore>,
    /// Stops what runs.
    pub drain: Drain,
}

/// The service.
pub struct Service(Arc<Worker>);

impl Service {
    /// Wraps the worker's parts.
    pub fn new(worker: Worker) -> Self {
        Self(Arc::new(worker))
    }
}

impl Worker {
    fn admit(&self) -> Result<OwnedSemaphorePermit, Failure> {
        let full = |_| Failure::new(FailureClass::Overloaded, "this worker has as many requests as it takes");
        self.places.clone().try_acquire_owned().map_err(full)
    }

    fn model(&self, name: &str) -> Result<&ServedModel, Failure> {
        self.models.get(name).ok_or_else(|| {
            let message = format!("model {name:?} is not served by this worker");
            Failure::new(FailureClass::NotFound, message).with_param("model")
        })
    }

    async fn start(&self, request: v1::PdGenerateRequest, deadline: Instant) -> Result<Running, Failure> {
        let arrived = Instant::now();
        let model = self.model(&request.model)?;
        let id = RequestId::parse(&request.request_id).ok_or_else(|| {
            Failure::invalid("request_id is not req- and 32 hex digits").with_param("request_id")
        })?;
        let items = model.items(request.items, &self.limits)?;
        let defaults = model.prompts.sampling_defaults();
        let defaults = SamplingFields {
            temperature: defaults.temperature,
            top_p: defaults.top_p,
            top_k: defaults.top_k,
        };
        let sampling = sampling_from_wire(request.sampling.unwrap_or_default(), defaults)?;
        let prompt =
            request.prompt.ok_or_else(|| Failure::invalid("prompt is missing").with_param("prompt"))?;
        let prompt = Prompt::try_from(prompt)?;
        let windows = model.lay_out(prompt.clone(), items.clone()).await?;
        let prepared = Prepared { request: id, prompt, items, windows, sampling, arrived, deadline };
        let parts = Parts {
            driver: model.driver.clone(),
            loads: self.loads.clone(),
            tokenizer: model.tokenizer.clone(),
            meters: model.meters.clone(),
            abort: self.drain.abort_token(),
        };
        Running::start(prepared, parts)
    }

    fn describe(&self) -> v1::DescribeResponse {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let encoder = |(modality, fingerprint): (&Modality, &Fingerprint)| v1::worker_model::Encoder {
            modality: v1::Modality::from(*modality).into(),
            fingerprint: fingerprint.as_bytes().to_vec().into(),
        };
        let model = |(name, m): (&String, &ServedModel)| v1::WorkerModel {
            name: name.clone(),
            family: m.family.clone(),
            encoders: m.encoders.iter().map(encoder).collect(),
            max_context: count(m.max_context),
            max_items: count(self.limits.max_items),
            created_s: m.created.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        };
        v1::DescribeResponse {
            worker_id: self.worker_id.to_string(),
            models: self.models.iter().map(model).collect(),
            ec_store: self.store.describe(),
        }
    }
}

impl ServedModel {
    /// Reads the items, and refuses those of another encoder before anything is loaded.
    fn items(&self, wire: Vec<v1::EncodedItem>, limits: &Limits) -> Result<Vec<EncodedItem>, Failure> {
        if wire.len() > limits.max_items {
            let message = format!("{} items, the limit is {}", wire.len(), limits.max_items);
            return Err(Failure::new(FailureClass::TooLarge, message).with_param("items"));
        }
        let items = wire.into_iter().map(EncodedItem::try_from).collect::<Result<Vec<_>, _>>()?;
        for item in &items {
            let expected = self.encoders.get(&item.modality);
            if expected != Some(&item.fingerprint) {
                let detail = format!("item of encoder {}, this worker takes {expected:?}", item.fingerprint);
                return Err(
                    Failure::new(FailureClass::Mismatch, "encoder fingerprints differ").with_detail(detail)
                );
            }
        }
        Ok(items)
    }

    /// Tokenizes and lays out, beside the async workers: a long prompt takes milliseconds.
    async fn lay_out(
        &self,
        prompt: Prompt,
        items: Vec<EncodedItem>,
    ) -> Result<Vec<PreparedSequence>, Failure> {
        let prompts = self.prompts.clone();
        let work = tokio::task::spawn_blocking(move || prompts.prepare(&prompt, &items));
        let windows = work.await.map_err(|e| Failure::internal(format!("laying out a prompt: {e}")))??;
        if windows.is_empty() {
            return Err(Failure::internal("a prompt was laid out as no sequence"));
        }
        Ok(windows)
    }
}

/// The time a caller gives a request, from gRPC's own header.
fn timeout_of(metadata: &tonic::metadata::MetadataMap) -> Option<Duration> {
    let text = metadata.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let n: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(n.checked_mul(3600)?),
        "M" => Duration::from_secs(n.checked_mul(60)?),
        "S" => Duration::from_secs(n),
        "m" => Duration::from_millis(n),
        "u" => Duration::from_micros(n),
        "n" => Duration::from_nanos(n),
        _ => return None,
    })
}

#[tonic::async_trait]
impl PrefillDecodeWorker for Service {
    type GenerateStream = ReceiverStream<Result<v1::PdGenerateResponse, Status>>;

    async fn describe(
        &self,
        _: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::DescribeResponse>, Status> {
        Ok(Response::new(self.0.describe()))
    }

    async fn generate(
        &self,
        request: Request<v1::PdGenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let span = tracing::info_span!("generate", request_id = %request.get_ref().request_id);
        trace_context::adopt(&span, request.metadata());
        let limit = self.0.limits.max_request_time;
        let deadline = Instant::now() + timeout_of(request.metadata()).map_or(limit, |t| t.min(limit));
        let started = async {
            let place = self.0.admit()?;
            let running = self.0.start(request.into_inner(), deadline).await?;
            Ok((place, running))
        };
        let (place, running) = started.instrument(span.clone()).await.map_err(|failure: Failure| {
            span.in_scope(|| {
                tracing::warn!(class = failure.class.as_str(), detail = failure.detail, "refused")
            });
            status::to_status(&failure)
        })?;
        let (client, stream) = mpsc::channel(STREAM_BUFFER);
        let answer = async move {
            running.stream(client).await;
            drop(place);
        };
        self.0.drain.tasks().spawn(answer.instrument(span));
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grpc_timeouts_are_read_in_every_unit_and_garbage_is_none() {
        let cases = [
            ("1S", Some(Duration::from_secs(1))),
            ("250m", Some(Duration::from_millis(250))),
            ("7u", Some(Duration::from_micros(7))),
            ("2H", Some(Duration::from_secs(7200))),
            ("", None),
            ("S", None),
            ("5x", None),
            ("99999999999999999999S", None),
        ];
        for (text, expect) in cases {
            let mut metadata = tonic::metadata::MetadataMap::new();
            metadata.insert("grpc-timeout", text.parse().unwrap());
            assert_eq!(timeout_of(&metadata), expect, "{text}");
        }
    }
}
