//! The gRPC service: validates a request, lays out its prompt, and admits it.

use crate::accepted::AcceptedEncoders;
use crate::adapters::ServedAdapter;
use crate::blocking::BlockingWork;
use crate::generation::RunningRequest;
use crate::loads::hint_from_wire;
use crate::request::{AdmittedRequest, RequestContext, RequestPermits};
use crate::served::{self, ServedDecoder};
use crate::state::PdWorkerState;
use crate::truncation::{Truncation, TruncationRoom};
use crate::{resume, watch};
use futures::FutureExt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Instant, UNIX_EPOCH};
use tokio::sync::{OwnedSemaphorePermit, TryAcquireError, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use tracing::Instrument;
use triptych_core::limits::Limits;
use triptych_core::prompt::{Prompt, TextOrTokens};
use triptych_core::sampling::SamplingParams;
use triptych_core::timeline::COMPUTE;
use triptych_core::{EncodedItem, Extent, Failure, FailureClass, RequestId, TenantId, TowerIdx};
use triptych_engine::constraint::CompiledConstraint;
use triptych_models::prompt::{OutputKind, PreparedSequence, SamplingDefaults};
use triptych_proto::convert::sampling_from_wire;
use triptych_proto::v1;
use triptych_proto::v1::prefill_decode_worker_server::PrefillDecodeWorker;
use triptych_runtime::deadline::deadline;
use triptych_runtime::{spans, status, trace_context};

/// Messages buffered for a slow client before its task waits.
const STREAM_BUFFER: usize = 64;

/// gRPC service of a PD worker.
pub struct PdService(Arc<PdWorkerState>);

impl PdService {
    /// Wraps the worker's state.
    pub fn new(state: Arc<PdWorkerState>) -> Self {
        Self(state)
    }
}

/// Part of the places of requests, and of sequences, that requests whose items are still being encoded leave to others: an
/// eighth. However many wait for an encoder, requests of text alone have room.
const LEFT_BY_PENDING: usize = 8;

impl PdWorkerState {
    /// Admits a request; one that waits for its items if others have places left then.
    fn admit(&self, wait: ItemWait) -> Result<OwnedSemaphorePermit, Failure> {
        if self.drain.is_stopping() {
            // The proxy retries on another worker.
            return Err(Failure::unavailable("this worker is stopping"));
        }
        let full = |_| Failure::new(FailureClass::Overloaded, "this worker has as many requests as it takes");
        let permit = self.request_permits.clone().try_acquire_owned().map_err(full)?;
        if self.request_permits.available_permits() < wait.places_left(self.max_requests) {
            let message = "this worker has as many requests that wait for their items as it takes";
            return Err(Failure::new(FailureClass::Overloaded, message));
        }
        Ok(permit)
    }

    /// Admits a request without items, for whose CPU work its permit is held.
    pub(crate) fn blocking_work(&self) -> Result<BlockingWork, Failure> {
        self.work_of(ItemWait::None)
    }

    fn work_of(&self, wait: ItemWait) -> Result<BlockingWork, Failure> {
        let permit = Arc::new(self.admit(wait)?);
        Ok(BlockingWork { permit, tasks: self.drain.tasks().clone(), watchdog: self.watchdog.clone() })
    }

    /// Validates a request, lays out its prompt, takes its permits, and starts it.
    async fn start(
        &self,
        request: v1::PdGenerateRequest,
        deadline: Instant,
    ) -> Result<RunningRequest, Failure> {
        let (arrived, wait) = (Instant::now(), ItemWait::of(&request));
        let work = self.work_of(wait)?;
        let permit = Arc::clone(&work.permit);
        let (model, adapter) = self.model(&request.model)?;
        let id = RequestId::parse(&request.request_id).ok_or_else(|| {
            Failure::invalid("request_id is not req- and 32 hex digits").with_param("request_id")
        })?;
        let starting = Some(self.journal.begin(id));
        let takes = model.encoders.with(adapter.as_ref());
        let items = pending(model.items(request.items, &takes, &self.limits)?, &request.hints);
        let hints = request.hints.into_iter().take(items.len());
        let hints = hints.map(|hint| hint_from_wire(hint, deadline)).collect();
        let prompt =
            request.prompt.ok_or_else(|| Failure::invalid("prompt is missing").with_param("prompt"))?;
        let prompt = Prompt::try_from(prompt)?;
        let settings = request.sampling.unwrap_or_default();
        let room = TruncationRoom { max_context: model.max_context, max_tokens: settings.max_tokens };
        let truncation = settings.truncate_prompt_tokens.map(|n| Truncation::new(n, room)).transpose()?;
        let windows = model.lay_out(prompt.clone(), items.clone(), truncation, &work).await?;
        // The model's lengths count the decoder's prompt, so they are known only when it is laid out.
        let n_prompt = windows.first().map_or(0, |w| w.tokens.len());
        let defaults = defaults(model.prompts.sampling_defaults(), n_prompt);
        let sampling = sampling_from_wire(settings, &defaults)?;
        check_scored(&sampling, &windows)?;
        let most = model.max_context.saturating_mul(windows.len());
        let encoder_tokens = model.encoder_tokens(&sampling, request.encoder_prompt, &windows, &work).await?;
        let prior = resume::read(request.resume, sampling.n, most)?;
        let tenant = tenant(&request.tenant)?;
        let constraint = model.constrain(&sampling, tenant, &work).await?;
        let sequences = model.admit_sequences(windows.len(), sampling.n, wait)?;
        let _permits = RequestPermits { _request: permit, _sequences: sequences };
        let prepared = AdmittedRequest {
            request: id,
            prompt,
            items,
            encoder_tokens,
            hints,
            windows,
            sampling,
            constraint,
            prior,
            adapter: adapter.map(|adapter| adapter.id),
            tenant,
            priority: request.priority,
            arrived,
            deadline,
            starting,
            _permits,
        };
        let context = RequestContext {
            driver: model.driver.clone(),
            loads: self.loads.clone(),
            tokenizer: model.tokenizer.clone(),
            speech: model.prompts.speech(),
            reasoning_tokens: model.reasoning_tokens(),
            meters: model.meters.clone(),
            stream_ticks: self.stream_ticks,
            abort: model.abort.clone(),
        };
        RunningRequest::start(prepared, context)
    }

    fn describe(&self) -> v1::DescribeResponse {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let base = |(name, m): (&String, &Arc<ServedDecoder>)| v1::WorkerModel {
            name: name.clone(),
            family: m.family.clone(),
            encoders: m.encoders.announced(m.encoder_takes_prompt),
            max_context: count(m.max_context),
            max_items: count(self.limits.max_items),
            created_s: m.created.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
            reads_encoder_prompt: m.reads_encoder_prompt(),
            chat: m.chat.map(Into::into),
            parent: String::new(),
            adapter: Vec::new().into(),
            adapts_encoder: false,
            foreign_encoders: None,
            not_resumable: false,
        };
        let of_adapter = |m: &ServedDecoder, (name, of): (String, ServedAdapter), base: &v1::WorkerModel| {
            v1::WorkerModel {
                name,
                encoders: m.encoders.with(Some(&of)).announced(m.encoder_takes_prompt),
                adapts_encoder: of.encoder_part.is_some(),
                parent: base.name.clone(),
                adapter: of.id.as_bytes().to_vec().into(),
                created_s: of.created.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
                ..base.clone()
            }
        };
        let with_adapters = |(name, m): &(String, Arc<ServedDecoder>)| {
            let model = base((name, m));
            let adapters: Vec<_> = m.adapters.all().into_iter().map(|of| of_adapter(m, of, &model)).collect();
            std::iter::once(model).chain(adapters)
        };
        v1::DescribeResponse {
            worker_id: self.worker_id.to_string(),
            models: self.models.all().iter().flat_map(with_adapters).collect(),
            ec_store: self.store.describe(),
            encodes: self.encodes,
            instance: self.journal.instance(),
            suspects: self.journal.suspects_to_wire(),
        }
    }
}

/// The wait of a request for its items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ItemWait {
    /// It has none, or they are encoded.
    None,
    /// They are being encoded, which may take as long as encoders have others before them.
    Pending,
}

impl ItemWait {
    fn of(request: &v1::PdGenerateRequest) -> Self {
        if request.hints.iter().any(|hint| hint.pending) { Self::Pending } else { Self::None }
    }

    /// Places of so many that have to be free beside it.
    fn places_left(self, n_places: usize) -> usize {
        match self {
            Self::None => 0,
            Self::Pending => n_places / LEFT_BY_PENDING,
        }
    }
}

/// Sampling defaults of the model after a prompt of `n_prompt` tokens.
fn defaults(of_model: SamplingDefaults, n_prompt: usize) -> SamplingParams {
    let max_tokens = of_model.max_length.map(|length| length.after(n_prompt).max(1));
    let min_tokens = of_model.min_length.map_or(0, |length| length.after(n_prompt));
    let open = SamplingParams::default();
    SamplingParams {
        temperature: of_model.temperature,
        top_p: of_model.top_p,
        top_k: of_model.top_k,
        min_p: of_model.min_p,
        beams: of_model.beams,
        repetition_penalty: of_model.repetition_penalty.unwrap_or(open.repetition_penalty),
        no_repeat_ngram_size: of_model.no_repeat_ngram_size.unwrap_or(open.no_repeat_ngram_size),
        encoder_no_repeat_ngram_size: of_model.encoder_no_repeat_ngram_size.unwrap_or(0),
        renormalize_logits: of_model.renormalize_logits,
        max_tokens,
        min_tokens: max_tokens.map_or(min_tokens, |max| min_tokens.min(max)),
        ..open
    }
}

/// Refuses log-probabilities of a prompt that is not the client's.
fn check_scored(sampling: &SamplingParams, windows: &[PreparedSequence]) -> Result<(), Failure> {
    let is_text = matches!(windows, [one] if matches!(one.output, OutputKind::Text));
    if sampling.prompt_logprobs.is_none() || is_text {
        return Ok(());
    }
    Err(Failure::invalid("prompt_logprobs are for prompts of text, not for speech")
        .with_param("prompt_logprobs"))
}

/// Clears the checksums of pending items: their outputs do not exist yet.
fn pending(mut items: Vec<EncodedItem>, hints: &[v1::ItemHint]) -> Vec<EncodedItem> {
    for (item, _) in items.iter_mut().zip(hints).filter(|(_, hint)| hint.pending) {
        item.checksum = [0; 32];
    }
    items
}

/// Tenant of a request; without one it is the shared tenant.
fn tenant(bytes: &[u8]) -> Result<TenantId, Failure> {
    if bytes.is_empty() {
        return Ok(TenantId::SHARED);
    }
    TenantId::from_slice(bytes).ok_or_else(|| {
        Failure::invalid(format!("tenant has {} bytes, allowed are 32 or none", bytes.len()))
            .with_param("tenant")
    })
}

impl ServedDecoder {
    /// Reads the items, and refuses those of another encoder before anything is loaded.
    fn items(
        &self,
        wire: Vec<v1::EncodedItem>,
        takes: &AcceptedEncoders,
        limits: &Limits,
    ) -> Result<Vec<EncodedItem>, Failure> {
        // Each tower has an output of an item.
        let n_towers = takes.n_towers();
        if wire.len() > limits.max_items.saturating_mul(n_towers) {
            let n_items = wire.len().div_ceil(n_towers);
            let message = format!("{n_items} items, the limit is {}", limits.max_items);
            return Err(Failure::new(FailureClass::TooLarge, message).with_param("items"));
        }
        let items = wire.into_iter().map(EncodedItem::try_from).collect::<Result<Vec<_>, _>>()?;
        for (i, item) in items.iter().enumerate() {
            // The tokens and sequences made below are bounded by these checks of the metadata.
            if item.payload_len().is_none_or(|len| len > limits.max_object_bytes) {
                let message =
                    format!("{} rows are more than {} bytes", item.n_tokens, limits.max_object_bytes);
                let failure = Failure::new(FailureClass::TooLarge, message);
                return Err(failure.with_param(format!("items[{i}]")));
            }
            if let Extent::Windows { n_windows, .. } = item.extent {
                self.check_live(n_windows as usize)?;
            }
            let tower = TowerIdx((i % n_towers) as u8);
            if !takes.accepts(item, tower) {
                let detail = format!("item of encoder {}, this worker takes {takes:?}", item.fingerprint);
                return Err(
                    Failure::new(FailureClass::Mismatch, "encoder fingerprints differ").with_detail(detail)
                );
            }
        }
        if !items.len().is_multiple_of(n_towers) {
            let message = format!("{} encoder outputs for items that each have {n_towers}", items.len());
            return Err(Failure::invalid(message).with_param("items"));
        }
        Ok(items)
    }

    /// Compiles the constraint, if there is one, or waits for its turn.
    async fn constrain(
        &self,
        sampling: &SamplingParams,
        tenant: TenantId,
        work: &BlockingWork,
    ) -> Result<Option<CompiledConstraint>, Failure> {
        let Some(constraint) = sampling.constraint.clone() else { return Ok(None) };
        let compiled = self.grammars.compile(constraint, tenant).await?;
        work.run("copying a grammar", move || Ok(compiled.fork())).await.map(Some)
    }

    /// Tokenizes a prompt and lays it out; a long one takes milliseconds.
    async fn lay_out(
        &self,
        prompt: Prompt,
        items: Vec<EncodedItem>,
        truncation: Option<Truncation>,
        work: &BlockingWork,
    ) -> Result<Vec<PreparedSequence>, Failure> {
        let (prompts, tokenizer) = (self.prompts.clone(), Arc::clone(&self.tokenizer));
        let layout = move || {
            let _span = tracing::trace_span!(target: COMPUTE, "tokenize").entered();
            match truncation {
                Some(truncation) => truncation.prepare(&*prompts, &tokenizer, &prompt, &items),
                None => Ok(prompts.prepare(&prompt, &items)?),
            }
        };
        let windows = work.run("laying out a prompt", layout).await?;
        if windows.is_empty() {
            return Err(Failure::internal("a prompt was laid out as no sequence"));
        }
        Ok(windows)
    }

    /// The tokens that begin and end the model's reasoning, if it thinks.
    fn reasoning_tokens(&self) -> Option<[u32; 2]> {
        let [begin, end] = self.chat?.reasoning?.marks();
        Some([self.tokenizer.token_id(begin)?, self.tokenizer.token_id(end)?])
    }

    /// True if its own defaults rule out n-grams of the encoder's text.
    fn reads_encoder_prompt(&self) -> bool {
        self.prompts.sampling_defaults().encoder_no_repeat_ngram_size.is_some()
    }

    /// Tokens of the encoder's text, or of the prompt of a model without an encoder, where n-grams of them are
    /// ruled out.
    async fn encoder_tokens(
        &self,
        sampling: &SamplingParams,
        prompt: Option<v1::TextOrTokens>,
        windows: &[PreparedSequence],
        work: &BlockingWork,
    ) -> Result<Arc<[u32]>, Failure> {
        if sampling.encoder_no_repeat_ngram_size == 0 {
            return Ok([].into());
        }
        match prompt.map(TextOrTokens::try_from).transpose()? {
            Some(TextOrTokens::Tokens(ids)) => Ok(ids.into()),
            Some(TextOrTokens::Text(text)) => {
                let tokenizer = Arc::clone(&self.tokenizer);
                let encode = move || Ok(tokenizer.encode_input(&text)?.into());
                work.run("tokenizing the encoder's text", encode).await
            }
            // As transformers: a model without an encoder has its prompt, one that reads no text has nothing.
            None => Ok(match windows {
                [one] if one.cross.is_empty() => one.tokens.as_slice().into(),
                _ => [].into(),
            }),
        }
    }

    /// Permits for `n` completions over `n_windows` windows, all or none. Those of a request that waits for its items leave some
    /// to others, but for one that has the worker to itself.
    fn admit_sequences(
        &self,
        n_windows: usize,
        n: u32,
        wait: ItemWait,
    ) -> Result<OwnedSemaphorePermit, Failure> {
        let wanted = n_windows.saturating_mul(n as usize);
        self.check_live(wanted)?;
        let full = || {
            let message = format!("the request makes {wanted} sequences, more than there is room for now");
            Failure::new(FailureClass::Overloaded, message)
        };
        let free = self.sequence_permits.available_permits();
        if free < self.max_live && free.saturating_sub(wanted) < wait.places_left(self.max_live) {
            return Err(full());
        }
        let wanted = u32::try_from(wanted).map_err(|_| full())?;
        self.sequence_permits.clone().try_acquire_many_owned(wanted).map_err(|e| match e {
            TryAcquireError::NoPermits => full(),
            TryAcquireError::Closed => Failure::unavailable("the model is being unloaded from this worker"),
        })
    }

    /// Refuses more sequences than an idle worker holds.
    fn check_live(&self, wanted: usize) -> Result<(), Failure> {
        if wanted <= self.max_live {
            return Ok(());
        }
        let message = format!("the request makes {wanted} sequences, this worker holds {}", self.max_live);
        Err(Failure::new(FailureClass::TooLarge, message).with_param("n"))
    }
}

#[tonic::async_trait]
impl PrefillDecodeWorker for PdService {
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
        let deadline = deadline(request.metadata(), Instant::now(), self.0.limits.max_request_time);
        let deadline = deadline.map_err(|failure| status::to_status(&failure))?;
        let request = request.into_inner();
        let found = served::find(&self.0.models, &request.model);
        let meters = found.map_or_else(|| self.0.unknown.clone(), |(m, _)| m.meters.clone());
        // A panic here would end the connection, and with it every other request of its proxy.
        let start = AssertUnwindSafe(self.0.start(request, deadline)).catch_unwind();
        let started = start.instrument(span.clone()).await;
        let panicked = |_| Err(Failure::internal("starting a request panicked"));
        let started = started.unwrap_or_else(panicked);
        let running = started.map_err(|failure| {
            meters.request(failure.class.as_str());
            spans::failed(&span, failure.class);
            span.in_scope(|| {
                tracing::warn!(class = failure.class.as_str(), detail = failure.detail, "refused")
            });
            status::to_status(&failure)
        })?;
        let (client, stream) = mpsc::channel(STREAM_BUFFER);
        self.0.drain.tasks().spawn(running.stream(client).instrument(span));
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn load_adapter(
        &self,
        request: Request<v1::LoadAdapterRequest>,
    ) -> Result<Response<v1::LoadAdapterResponse>, Status> {
        let loaded = self.0.load_adapter(request.into_inner()).await;
        loaded.map(Response::new).map_err(|failure| status::to_status(&failure))
    }

    async fn unload_adapter(
        &self,
        request: Request<v1::UnloadAdapterRequest>,
    ) -> Result<Response<v1::UnloadAdapterResponse>, Status> {
        let unloaded = self.0.unload_adapter(&request.into_inner().name).await;
        unloaded
            .map(|()| Response::new(v1::UnloadAdapterResponse {}))
            .map_err(|failure| status::to_status(&failure))
    }

    async fn tokenize(
        &self,
        request: Request<v1::TokenizeRequest>,
    ) -> Result<Response<v1::TokenizeResponse>, Status> {
        let tokens = self.0.tokenize(request.into_inner()).await;
        tokens.map(Response::new).map_err(|failure| status::to_status(&failure))
    }

    async fn detokenize(
        &self,
        request: Request<v1::DetokenizeRequest>,
    ) -> Result<Response<v1::DetokenizeResponse>, Status> {
        let text = self.0.detokenize(request.into_inner()).await;
        text.map(Response::new).map_err(|failure| status::to_status(&failure))
    }

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let (watcher, states) = mpsc::channel(1);
        self.0.drain.tasks().spawn(watch::report_changes(Arc::clone(&self.0), watcher));
        Ok(Response::new(ReceiverStream::new(states)))
    }
}
