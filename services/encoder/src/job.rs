//! Encode jobs: from item bytes to a READY object, one for all concurrent requests of a key.

use crate::batcher::{BatchItem, LoadedPart};
use crate::fences::FenceTable;
use crate::load::EncodeTimes;
use crate::memory::{job_bytes, rows_bytes};
use crate::meters::{EncoderMeters, JobTimes};
use crate::pool::{JobPermit, PreprocessPool, RawItem};
use crate::served::{ServedEncoder, ServedEncoders, ServedTower};
use crate::updates::ModelUpdates;
use bytes::Bytes;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Mutex, watch};
use tracing::{Instrument, Span};
use triptych_core::item::rows_from_f32;
use triptych_core::timeline::COMPUTE;
use triptych_core::{
    ContentKey, EncodedItem, EncoderId, EncoderOutput, Extent, Failure, FailureClass, Fingerprint, ItemForm,
    Modality, RequestId, WorkerId,
};
use triptych_ec::connector::{Published, WorkerRole};
use triptych_ec::store::EcStore;
use triptych_ec::store::peer::PeerCache;
use triptych_models::lora::LoraSettings;
use triptych_models::preprocess::embeddings;
use triptych_proto::{convert, v1};
use triptych_runtime::single_flight::{CallRole, SingleFlight, Subscription};
use triptych_runtime::start_journal::StartJournal;
use triptych_runtime::status::from_join_error;
use triptych_runtime::trace_context::REQUEST_TARGET;
use triptych_runtime::{Drain, spans};

/// Limit on the store's lookup of an output that is cached here.
const STORE_TIMEOUT: Duration = Duration::from_secs(2);

/// State shared by the requests of the service.
pub struct EncoderWorkerState {
    /// Name of the worker.
    pub worker_id: WorkerId,
    /// Models by served name.
    pub models: ServedEncoders,
    /// Loading of others.
    pub updates: ModelUpdates,
    /// Limits on adapters.
    pub lora: LoraSettings,
    /// Held while an adapter is loaded or unloaded.
    pub adapter_updates: Mutex<()>,
    /// Admission and preprocessing.
    pub pool: PreprocessPool,
    /// Connector that publishes outputs.
    pub connector: WorkerRole,
    /// Store, for the worker's description.
    pub store: Arc<dyn EcStore>,
    /// Metrics.
    pub meters: Arc<EncoderMeters>,
    /// Task group for publishing and sealing.
    pub drain: Drain,
    /// Running jobs.
    pub in_flight: SingleFlight<ContentKey, JobProgress>,
    /// Fencing tokens of recent jobs.
    pub fences: FenceTable,
    /// Outputs that PD workers read from this worker's memory, and its address for them; `None`: from the store
    /// only.
    pub peer_cache: Option<(Arc<PeerCache>, String)>,
    /// Requests whose items are being encoded, for this process's successor.
    pub journal: StartJournal,
}

/// Progress of a job.
#[derive(Clone, Debug, Default)]
pub struct JobProgress {
    /// Metadata of its output, known after preprocessing.
    pub announced: Option<EncodedItem>,
    /// Result.
    pub ended: Option<Result<v1::EncodeResponse, Failure>>,
}

/// A validated request.
struct CheckedJob {
    model: Arc<ServedEncoder>,
    encoder: EncoderId,
    key: ContentKey,
    fingerprint: Fingerprint,
    tower: ServedTower,
    adapter: Option<Arc<LoadedPart>>,
}

impl CheckedJob {
    /// Metadata of its output, before it is sealed.
    fn item(&self, n_tokens: u32, extent: Extent) -> Result<EncodedItem, Failure> {
        Ok(EncodedItem {
            key: self.key,
            fingerprint: self.fingerprint,
            modality: self.encoder.modality,
            n_tokens,
            hidden: u32::try_from(self.tower.batcher.hidden()).map_err(Failure::internal)?,
            dtype: self.model.dtype,
            extent,
            checksum: [0; 32],
        })
    }
}

impl EncoderWorkerState {
    /// Joins the running job of the request's key, or starts one.
    ///
    /// # Errors
    /// [`Failure`] of an invalid request.
    pub fn begin(
        self: &Arc<Self>,
        request: v1::EncodeRequest,
    ) -> Result<(Subscription<JobProgress>, CallRole), Failure> {
        let key = self.check(&request)?.key;
        self.fences.check(&key, request.fence)?;
        let encoders = Arc::clone(self);
        let (subscription, role) =
            self.in_flight.subscribe(key, JobProgress::default(), |state| async move {
                let model = request.model.clone();
                let ended = encoders.encode(request, &state).await;
                let outcome = ended.as_ref().map_or_else(|f| f.class.as_str(), |_| "ok");
                encoders.count(&model, outcome, ended.as_ref().err());
                if let Err(failure) = &ended {
                    spans::failed(&Span::current(), failure.class);
                }
                let encode_us = ended.as_ref().ok().map(|response| response.encode_us);
                tracing::debug!(target: REQUEST_TARGET, outcome, encode_us, "encoder job ended");
                state.send_modify(|progress| progress.ended = Some(ended));
            });
        if role == CallRole::Follower {
            self.meters.shared();
            tracing::debug!(target: REQUEST_TARGET, "joined the job of another request");
        }
        Ok((subscription, role))
    }

    /// Counts a finished job.
    pub fn count(&self, model: &str, outcome: &'static str, failure: Option<&Failure>) {
        // The name is the client's text, which must not become a label.
        self.meters.job(if self.models.get(model).is_some() { model } else { "unknown" }, outcome);
        if let Some(failure) = failure {
            tracing::warn!(class = failure.class.as_str(), detail = failure.detail, "job failed");
        }
    }

    fn check(&self, request: &v1::EncodeRequest) -> Result<CheckedJob, Failure> {
        let model = self.models.get(&request.model).ok_or_else(|| self.models.missing(&request.model))?;
        let encoder = convert::encoder_id(request.modality, request.tower_index)?;
        let key = convert::key(&request.key, "key")?;
        let wanted = convert::fingerprint(&request.fingerprint, "fingerprint")?;
        let found = model.encoders.get(&encoder).cloned();
        let tower = found.ok_or_else(|| not_here(&request.model, &model, encoder))?;
        let adapter = model.adapters.of_fingerprint(encoder, &wanted);
        if wanted != tower.fingerprint && adapter.is_none() {
            let detail = format!("asked for encoder {wanted}, this worker has {}", tower.fingerprint);
            return Err(
                Failure::new(FailureClass::Mismatch, "encoder fingerprints differ").with_detail(detail)
            );
        }
        Ok(CheckedJob { model, encoder, key, fingerprint: wanted, tower, adapter })
    }

    async fn encode(
        &self,
        request: v1::EncodeRequest,
        state: &watch::Sender<JobProgress>,
    ) -> Result<v1::EncodeResponse, Failure> {
        let job = self.check(&request)?;
        if let Some(output) = self.cached_output(&job) {
            return self.respond_cached(output, state).await;
        }
        let asker = RequestId::parse(&request.request_id);
        let owner = self.pool.owner(asker, request.priority);
        let permit = self.pool.admit(&request.model, job.encoder, request.item.len(), owner)?;
        let starting = asker.map(|id| self.journal.begin(id));
        let form = convert::item_form(&request)?;
        if form == ItemForm::Embeddings {
            return self.take_rows(&job, request.item, state, permit).await;
        }
        let options = convert::options(request.options.unwrap_or_default(), form)?;
        // They are loaded while the item is preprocessed.
        let _weights = job.tower.batcher.hold_weights()?;
        let (preprocess, modality) = (job.tower.preprocess.clone(), job.encoder.modality);
        let raw = RawItem { modality, bytes: request.item, options };
        let preprocessed = self.pool.preprocess(&permit, preprocess, raw);
        let (input, preprocess) = preprocessed.instrument(tracing::info_span!("preprocess")).await?;
        permit.load().sized(input.n_tokens);
        self.pool.sized(&permit, job_bytes(&input, job.tower.batcher.hidden(), job.model.dtype))?;
        let item = job.item(input.n_tokens, input.extent.clone())?;
        let n_tokens = input.n_tokens;
        state.send_modify(|progress| progress.announced = Some(item.clone()));
        let encoded = job
            .tower
            .batcher
            .encode(BatchItem { input, adapter: job.adapter.clone() }, &permit)
            .instrument(tracing::info_span!("forward", n_tokens = i64::from(n_tokens)))
            .await?;
        drop(starting);
        let output = self.seal(item, encoded.rows, Arc::clone(&permit)).await?;
        let start = Instant::now();
        let publish = self.publish(output, Some(Arc::clone(&permit)));
        let published = publish.instrument(tracing::info_span!("publish")).await?;
        let times =
            JobTimes { queue: encoded.queue, preprocess, encode: encoded.encode, publish: start.elapsed() };
        let (forward, encode) = (encoded.share, encoded.encode);
        let n_threads = self.pool.n_threads();
        let of_job = EncodeTimes { forward, encode, preprocess, publish: times.publish, n_threads };
        permit.load().done(n_tokens, of_job);
        self.meters.item(modality, times);
        Ok(self.response(&published.item, times))
    }

    /// Publishes rows that the client computed, as if they had been encoded from an image.
    async fn take_rows(
        &self,
        job: &CheckedJob,
        item: Bytes,
        state: &watch::Sender<JobProgress>,
        permit: Arc<JobPermit>,
    ) -> Result<v1::EncodeResponse, Failure> {
        let modality = job.encoder.modality;
        if modality != Modality::Image {
            return Err(Failure::invalid(format!("rows are read in the place of images, not of {modality}")));
        }
        if job.model.has_towers() {
            let towers = job.model.tower_names.join(" and ");
            let text = format!("rows are read in the place of images of one tower, this model has {towers}");
            return Err(Failure::invalid(text));
        }
        let hidden = job.tower.batcher.hidden();
        let read = self.pool.read(&permit, item, move |item, limits| embeddings::read(item, hidden, limits));
        let (given, preprocess) = read.await?;
        permit.load().sized(given.n_tokens);
        self.pool.sized(&permit, rows_bytes(given.rows.len(), job.model.dtype))?;
        let item = job.item(given.n_tokens, given.extent)?;
        state.send_modify(|progress| progress.announced = Some(item.clone()));
        let output = self.seal(item, given.rows, Arc::clone(&permit)).await?;
        let start = Instant::now();
        let published = self.publish(output, Some(Arc::clone(&permit))).await?;
        let times = JobTimes { preprocess, publish: start.elapsed(), ..JobTimes::default() };
        let n_threads = self.pool.n_threads();
        let of_job = EncodeTimes { preprocess, publish: times.publish, n_threads, ..EncodeTimes::default() };
        permit.load().done(given.n_tokens, of_job);
        self.meters.item(modality, times);
        Ok(self.response(&published.item, times))
    }

    /// Converts rows `[n_tokens, hidden]` to the published element type and seals them, on a blocking thread: both
    /// read every byte of the output. The work holds the job's permit, so that it counts against the bound on jobs
    /// even when the caller is gone.
    async fn seal(
        &self,
        item: EncodedItem,
        rows: Vec<f32>,
        permit: Arc<JobPermit>,
    ) -> Result<EncoderOutput, Failure> {
        let work = self.drain.tasks().spawn_blocking(move || {
            let _permit = permit;
            let _span = tracing::trace_span!(target: COMPUTE, "seal").entered();
            let payload = rows_from_f32(&rows, item.hidden as usize, item.dtype);
            EncoderOutput::seal(item, payload).map_err(Failure::internal)
        });
        work.await.unwrap_or_else(|e| Err(from_join_error("sealing", &e)))
    }

    /// Cached output of an earlier job for the key.
    fn cached_output(&self, job: &CheckedJob) -> Option<EncoderOutput> {
        self.connector.rows(&job.key).filter(|output| {
            let item = output.item();
            item.fingerprint == job.fingerprint && item.modality == job.encoder.modality
        })
    }

    /// Responds with a cached output; publishes it again if the store has lost it.
    async fn respond_cached(
        &self,
        output: EncoderOutput,
        state: &watch::Sender<JobProgress>,
    ) -> Result<v1::EncodeResponse, Failure> {
        let item = output.item().clone();
        state.send_modify(|progress| {
            progress.announced = Some(EncodedItem { checksum: [0; 32], ..item.clone() });
        });
        let keys = [item.key];
        let found = tokio::time::timeout(STORE_TIMEOUT, self.store.heads(&keys)).await;
        let found = found.ok().and_then(Result::ok).and_then(|mut heads| heads.pop().flatten());
        let same = |found: &EncodedItem| EncodedItem { checksum: item.checksum, ..found.clone() } == item;
        let start = Instant::now();
        let item = match found.filter(same) {
            Some(found) => found,
            None => self.publish(output, None).await?.item,
        };
        self.meters.shared();
        let times = JobTimes { publish: start.elapsed(), ..JobTimes::default() };
        Ok(v1::EncodeResponse { shared: true, ..self.response(&item, times) })
    }

    /// Publishes in a task of its own, so that it ends also when the caller goes away. The task holds the job's
    /// permit: otherwise callers that come and go before a slow store would pile up outputs without bound.
    async fn publish(
        &self,
        output: EncoderOutput,
        permit: Option<Arc<JobPermit>>,
    ) -> Result<Published, Failure> {
        let connector = self.connector.clone();
        let work = async move {
            let published = connector.save_caches(output).await;
            drop(permit);
            published
        };
        let published = self.drain.tasks().spawn(work.in_current_span()).await;
        Ok(published.map_err(|e| from_join_error("publishing", &e))??)
    }

    fn response(&self, item: &EncodedItem, times: JobTimes) -> v1::EncodeResponse {
        let us = |d: Duration| u64::try_from(d.as_micros()).unwrap_or(u64::MAX);
        let here = self.peer_cache.as_ref().filter(|(peer_cache, _)| peer_cache.object(&item.key).is_some());
        v1::EncodeResponse {
            item: Some(item.into()),
            queue_us: us(times.queue),
            preprocess_us: us(times.preprocess),
            encode_us: us(times.encode),
            publish_us: us(times.publish),
            peer: here.map(|(_, address)| address.clone()).unwrap_or_default(),
            shared: false,
        }
    }
}

/// The failure of a job for an encoder that is not here. A tower may be elsewhere.
fn not_here(name: &str, model: &ServedEncoder, wanted: EncoderId) -> Failure {
    let reads = |id: &&EncoderId| id.modality == wanted.modality;
    let here: Vec<_> = model.encoders.keys().filter(reads).map(|id| model.tower_name(*id)).collect();
    if here.is_empty() {
        let kinds: BTreeSet<_> = model.encoders.keys().map(|id| id.modality.as_str()).collect();
        let kinds = kinds.into_iter().collect::<Vec<_>>().join(" and ");
        return Failure::invalid(format!("model {name:?} reads {kinds}, not {}", wanted.modality));
    }
    let detail = match model.tower_name(wanted) {
        "" => format!("asked for {wanted}, this worker has one tower"),
        tower => format!("asked for tower {tower}, this worker has {}", here.join(" and ")),
    };
    let text = format!("this encoder worker does not hold the tower of model {name:?} that is asked for");
    Failure::new(FailureClass::Mismatch, text).with_detail(detail)
}
