//! The gRPC service: checks a request, lays its prompt out, admits it.

use crate::answer::{Admission, Parts, Prepared, Running};
use crate::driver::Driver;
use crate::loads::{Loads, hint_from_wire};
use crate::meters::Meters;
use crate::{resume, watching};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use tracing::Instrument;
use triptych_core::limits::Limits;
use triptych_core::prompt::Prompt;
use triptych_core::sampling::SamplingParams;
use triptych_core::timeline::COMPUTE;
use triptych_core::{
    EncodedItem, Extent, Failure, FailureClass, Fingerprint, Modality, RequestId, TenantId, WorkerId,
};
use triptych_ec::store::EcStore;
use triptych_engine::constraint::{CompiledConstraint, Constraints};
use triptych_models::prompt::{PreparedSequence, PromptBuilder, SamplingDefaults};
use triptych_models::tokenization::Tokenizer;
use triptych_proto::convert::sampling_from_wire;
use triptych_proto::v1;
use triptych_proto::v1::prefill_decode_worker_server::PrefillDecodeWorker;
use triptych_runtime::deadline::deadline;
use triptych_runtime::serve::BesideLoad;
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
    /// Compiles what answers are to look like.
    pub constraints: Arc<Constraints>,
    /// The engine.
    pub driver: Driver,
    /// Counts.
    pub meters: Meters,
    /// The encoders whose outputs it takes.
    pub encoders: BTreeMap<Modality, Fingerprint>,
    /// Whether its encoder reads text together with an item.
    pub encoder_takes_prompt: bool,
    /// Tokens the context holds.
    pub max_context: usize,
    /// When it was loaded.
    pub created: SystemTime,
    /// Room for sequences: those that run and those that wait. The engine's line holds as many, so that it never
    /// has to refuse one of a request's sequences after it took others.
    pub sequences: Arc<Semaphore>,
    /// How many that is.
    pub max_live: usize,
}

/// What the service works with.
pub struct Worker {
    /// Name of the worker.
    pub worker_id: WorkerId,
    /// Whether the process holds encoders too.
    pub encodes: bool,
    /// How busy those are.
    pub beside_load: Option<BesideLoad>,
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
    /// How many that is.
    pub max_requests: usize,
    /// Counts requests for models that are not here.
    pub unknown: Meters,
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
        if self.drain.is_stopping() {
            // The proxy asks another one.
            return Err(Failure::unavailable("this worker is stopping"));
        }
        let full = |_| Failure::new(FailureClass::Overloaded, "this worker has as many requests as it takes");
        self.places.clone().try_acquire_owned().map_err(full)
    }

    fn model(&self, name: &str) -> Result<&ServedModel, Failure> {
        self.models.get(name).ok_or_else(|| {
            let message = format!("model {name:?} is not served by this worker");
            Failure::new(FailureClass::NotFound, message).with_param("model")
        })
    }

    /// Lays a request out, finds room for it, and starts it.
    async fn start(&self, request: v1::PdGenerateRequest, deadline: Instant) -> Result<Running, Failure> {
        let arrived = Instant::now();
        let place = Arc::new(self.admit()?);
        let model = self.model(&request.model)?;
        let id = RequestId::parse(&request.request_id).ok_or_else(|| {
            Failure::invalid("request_id is not req- and 32 hex digits").with_param("request_id")
        })?;
        let items = pending(model.items(request.items, &self.limits)?, &request.hints);
        let hints = request.hints.into_iter().take(items.len());
        let hints = hints.map(|hint| hint_from_wire(hint, deadline)).collect();
        let prompt =
            request.prompt.ok_or_else(|| Failure::invalid("prompt is missing").with_param("prompt"))?;
        let prompt = Prompt::try_from(prompt)?;
        let windows = model.lay_out(prompt.clone(), items.clone(), place.clone()).await?;
        // The model's lengths count the decoder's prompt, so they are known only when it is laid out.
        let n_prompt = windows.first().map_or(0, |w| w.tokens.len());
        let defaults = defaults(model.prompts.sampling_defaults(), n_prompt);
        let sampling = sampling_from_wire(request.sampling.unwrap_or_default(), &defaults)?;
        let most = model.max_context.saturating_mul(windows.len());
        let begun = resume::read(request.resume, sampling.n, most)?;
        let constraint = model.constrain(&sampling, place.clone()).await?;
        let sequences = model.seat(windows.len(), sampling.n)?;
        let _admission = Admission { _request: place, _sequences: sequences };
        let prepared = Prepared {
            request: id,
            prompt,
            items,
            hints,
            windows,
            sampling,
            constraint,
            begun,
            tenant: tenant(&request.tenant)?,
            priority: request.priority,
            arrived,
            deadline,
            _admission,
        };
        let parts = Parts {
            driver: model.driver.clone(),
            loads: self.loads.clone(),
            tokenizer: model.tokenizer.clone(),
            speech: model.prompts.speech(),
            meters: model.meters.clone(),
            abort: self.drain.abort_token(),
        };
        Running::start(prepared, parts)
    }

    fn describe(&self) -> v1::DescribeResponse {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let encoder =
            |m: &ServedModel, modality: &Modality, fingerprint: &Fingerprint| v1::worker_model::Encoder {
                modality: v1::Modality::from(*modality).into(),
                fingerprint: fingerprint.as_bytes().to_vec().into(),
                takes_prompt: m.encoder_takes_prompt,
            };
        let model = |(name, m): (&String, &ServedModel)| v1::WorkerModel {
            name: name.clone(),
            family: m.family.clone(),
            encoders: m.encoders.iter().map(|(modality, f)| encoder(m, modality, f)).collect(),
            max_context: count(m.max_context),
            max_items: count(self.limits.max_items),
            created_s: m.created.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        };
        v1::DescribeResponse {
            worker_id: self.worker_id.to_string(),
            models: self.models.iter().map(model).collect(),
            ec_store: self.store.describe(),
            encodes: self.encodes,
        }
    }
}

/// What the model itself would do after a prompt of so many tokens.
fn defaults(of_model: SamplingDefaults, n_prompt: usize) -> SamplingParams {
    let max_tokens = of_model.max_length.map(|length| length.after(n_prompt).max(1));
    let min_tokens = of_model.min_length.map_or(0, |length| length.after(n_prompt));
    let open = SamplingParams::default();
    SamplingParams {
        temperature: of_model.temperature,
        top_p: of_model.top_p,
        top_k: of_model.top_k,
        beams: of_model.beams,
        repetition_penalty: of_model.repetition_penalty.unwrap_or(open.repetition_penalty),
        no_repeat_ngram_size: of_model.no_repeat_ngram_size.unwrap_or(open.no_repeat_ngram_size),
        max_tokens,
        min_tokens: max_tokens.map_or(min_tokens, |max| min_tokens.min(max)),
        ..open
    }
}

/// Items that are still being encoded have no checksum, whatever was said of them before.
fn pending(mut items: Vec<EncodedItem>, hints: &[v1::ItemHint]) -> Vec<EncodedItem> {
    for (item, _) in items.iter_mut().zip(hints).filter(|(_, hint)| hint.pending) {
        item.checksum = [0; 32];
    }
    items
}

/// Nobody in particular is the tenant that all share.
fn tenant(bytes: &[u8]) -> Result<TenantId, Failure> {
    if bytes.is_empty() {
        return Ok(TenantId::SHARED);
    }
    TenantId::from_slice(bytes).ok_or_else(|| {
        Failure::invalid(format!("tenant has {} bytes, allowed are 32 or none", bytes.len()))
            .with_param("tenant")
    })
}

impl ServedModel {
    /// Reads the items, and refuses those of another encoder before anything is loaded.
    fn items(&self, wire: Vec<v1::EncodedItem>, limits: &Limits) -> Result<Vec<EncodedItem>, Failure> {
        if wire.len() > limits.max_items {
            let message = format!("{} items, the limit is {}", wire.len(), limits.max_items);
            return Err(Failure::new(FailureClass::TooLarge, message).with_param("items"));
        }
        let items = wire.into_iter().map(EncodedItem::try_from).collect::<Result<Vec<_>, _>>()?;
        for (i, item) in items.iter().enumerate() {
            // What follows makes as many tokens and sequences as the description says.
            if item.payload_len().is_none_or(|len| len > limits.max_object_bytes) {
                let message =
                    format!("{} rows are more than {} bytes", item.n_tokens, limits.max_object_bytes);
                let failure = Failure::new(FailureClass::TooLarge, message);
                return Err(failure.with_param(format!("items[{i}]")));
            }
            if let Extent::Windows { n_windows, .. } = item.extent {
                self.check_live(n_windows as usize)?;
            }
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

    /// Compiles the constraint, if there is one, beside the async workers: a large one takes a fraction of a
    /// second. It keeps the request's place to its end, as laying out does.
    async fn constrain(
        &self,
        sampling: &SamplingParams,
        place: Arc<OwnedSemaphorePermit>,
    ) -> Result<Option<CompiledConstraint>, Failure> {
        let Some(constraint) = sampling.constraint.clone() else { return Ok(None) };
        let constraints = Arc::clone(&self.constraints);
        let work = tokio::task::spawn_blocking(move || {
            let _place = place;
            constraints.compile(&constraint)
        });
        work.await.map_err(|e| Failure::internal(format!("compiling a constraint: {e}")))?.map(Some)
    }

    /// Tokenizes and lays out, beside the async workers: a long prompt takes milliseconds. It keeps the request's
    /// place to its end, also when the caller goes away meanwhile, so that the place bounds this work too.
    async fn lay_out(
        &self,
        prompt: Prompt,
        items: Vec<EncodedItem>,
        place: Arc<OwnedSemaphorePermit>,
    ) -> Result<Vec<PreparedSequence>, Failure> {
        let prompts = self.prompts.clone();
        let work = tokio::task::spawn_blocking(move || {
            let _place = place;
            let _span = tracing::trace_span!(target: COMPUTE, "tokenize").entered();
            prompts.prepare(&prompt, &items)
        });
        let windows = work.await.map_err(|e| Failure::internal(format!("laying out a prompt: {e}")))??;
        if windows.is_empty() {
            return Err(Failure::internal("a prompt was laid out as no sequence"));
        }
        Ok(windows)
    }

    /// Room for `n` answers over so many windows, all or none.
    fn seat(&self, n_windows: usize, n: u32) -> Result<OwnedSemaphorePermit, Failure> {
        let wanted = n_windows.saturating_mul(n as usize);
        self.check_live(wanted)?;
        let full = || {
            let message = format!("the request makes {wanted} sequences, more than there is room for now");
            Failure::new(FailureClass::Overloaded, message)
        };
        let wanted = u32::try_from(wanted).map_err(|_| full())?;
        self.sequences.clone().try_acquire_many_owned(wanted).map_err(|_| full())
    }

    /// Refuses what would not fit an idle worker.
    fn check_live(&self, wanted: usize) -> Result<(), Failure> {
        if wanted <= self.max_live {
            return Ok(());
        }
        let message = format!("the request makes {wanted} sequences, this worker holds {}", self.max_live);
        Err(Failure::new(FailureClass::TooLarge, message).with_param("n"))
    }
}

#[tonic::async_trait]
impl PrefillDecodeWorker for Service {
    type GenerateStream = ReceiverStream<Result<v1::PdGenerateResponse, Status>>;
    type WatchStream = ReceiverStream<Result<v1::WorkerState, Status>>;

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
        let id = trace_context::id_for_span(&request.get_ref().request_id);
        let span = tracing::info_span!("generate", request_id = %id);
        trace_context::adopt(&span, request.metadata());
        let deadline = deadline(request.metadata(), Instant::now(), self.0.limits.max_request_time);
        let deadline = deadline.map_err(|failure| status::to_status(&failure))?;
        let request = request.into_inner();
        let meters = self.0.models.get(&request.model).map_or(&self.0.unknown, |m| &m.meters);
        let started = self.0.start(request, deadline).instrument(span.clone()).await;
        let running = started.map_err(|failure| {
            meters.request(failure.class.as_str());
            span.in_scope(|| {
                tracing::warn!(class = failure.class.as_str(), detail = failure.detail, "refused")
            });
            status::to_status(&failure)
        })?;
        let (client, stream) = mpsc::channel(STREAM_BUFFER);
        self.0.drain.tasks().spawn(running.stream(client).instrument(span));
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let (watcher, states) = mpsc::channel(1);
        self.0.drain.tasks().spawn(watching::tell(Arc::clone(&self.0), watcher));
        Ok(Response::new(ReceiverStream::new(states)))
    }
}
