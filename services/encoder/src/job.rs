//! One job from its bytes to a READY object, shared by all who ask for its key at the same time.

use crate::batcher::Batcher;
use crate::fences::Fences;
use crate::meters::{JobTimes, Meters};
use crate::pool::{Place, PreprocessPool};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::watch;
use tracing::Instrument;
use triptych_core::item::rows_from_f32;
use triptych_core::{
    ContentKey, DType, EncodedItem, EncoderOutput, Failure, FailureClass, Fingerprint, Modality, WorkerId,
};
use triptych_ec::connector::{Published, WorkerRole};
use triptych_ec::store::EcStore;
use triptych_ec::store::peer::Shelf;
use triptych_models::preprocess::Preprocess;
use triptych_proto::{convert, v1};
use triptych_runtime::Drain;
use triptych_runtime::flights::{Boarding, Flights, Seat};

/// How long the store may take to say whether it has what this worker holds.
const STORE_PATIENCE: Duration = Duration::from_secs(2);

/// A model as this worker serves it.
pub struct ServedModel {
    /// Hugging Face's `model_type`.
    pub family: String,
    /// Its processor.
    pub preprocess: Arc<dyn Preprocess>,
    /// Its encoders.
    pub encoders: BTreeMap<Modality, (Fingerprint, Batcher)>,
    /// Element type of its published rows.
    pub dtype: DType,
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
    /// Counts.
    pub meters: Arc<Meters>,
    /// Waits for what is being published.
    pub drain: Drain,
    /// Jobs under way.
    pub flights: Flights<ContentKey, Progress>,
    /// Leases that were seen.
    pub fences: Fences,
    /// What PD workers read straight from this worker's memory, and the address at which they do; `None`: nothing.
    pub shelf: Option<(Arc<Shelf>, String)>,
}

/// How far a job is.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// What its output will be.
    pub announced: Option<EncodedItem>,
    /// Its end.
    pub ended: Option<Result<v1::EncodeResponse, Failure>>,
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
    /// Joins the job of the request's key, or begins it.
    ///
    /// # Errors
    /// [`Failure`] of a request that no job can come of.
    pub fn begin(
        self: &Arc<Self>,
        request: v1::EncodeRequest,
    ) -> Result<(Seat<Progress>, Boarding), Failure> {
        let key = self.check(&request)?.key;
        self.fences.check(&key, request.fence)?;
        let encoders = Arc::clone(self);
        let (seat, boarding) = self.flights.board(key, Progress::default(), |state| async move {
            let model = request.model.clone();
            let ended = encoders.encode(request, &state).await;
            let outcome = ended.as_ref().map_or_else(|f| f.class.as_str(), |_| "ok");
            encoders.count(&model, outcome, ended.as_ref().err());
            state.send_modify(|progress| progress.ended = Some(ended));
        });
        if boarding == Boarding::Joined {
            self.meters.shared();
        }
        Ok((seat, boarding))
    }

    /// A job ended.
    pub fn count(&self, model: &str, outcome: &'static str, failure: Option<&Failure>) {
        // What a client wrote is no label.
        self.meters.job(if self.models.contains_key(model) { model } else { "unknown" }, outcome);
        if let Some(failure) = failure {
            tracing::warn!(class = failure.class.as_str(), detail = failure.detail, "job failed");
        }
    }

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
        state: &watch::Sender<Progress>,
    ) -> Result<v1::EncodeResponse, Failure> {
        let job = self.check(&request)?;
        if let Some(output) = self.kept(&job) {
            return self.give_kept(output, state).await;
        }
        let place = self.pool.admit(&request.model, job.modality, request.item.len())?;
        let options = convert::options(request.options.unwrap_or_default(), request.item_is_token_ids);
        let preprocess = job.model.preprocess.clone();
        let preprocessed = self.pool.preprocess(preprocess, job.modality, request.item, options);
        let (input, preprocess) = preprocessed.instrument(tracing::info_span!("preprocess")).await?;
        place.ticket().sized(input.n_tokens);
        let item = EncodedItem {
            key: job.key,
            fingerprint: job.fingerprint,
            modality: job.modality,
            n_tokens: input.n_tokens,
            hidden: u32::try_from(job.batcher.hidden()).map_err(Failure::internal)?,
            dtype: job.model.dtype,
            extent: input.extent.clone(),
            checksum: [0; 32],
        };
        let n_tokens = input.n_tokens;
        state.send_modify(|progress| progress.announced = Some(item.clone()));
        let encoded =
            job.batcher.encode(input, &place).instrument(tracing::info_span!("forward", n_tokens)).await?;
        let rows = rows_from_f32(&encoded.rows, job.batcher.hidden(), job.model.dtype);
        let output = EncoderOutput::seal(item, rows).map_err(Failure::internal)?;
        let start = Instant::now();
        let publish = self.publish(output, Some(Arc::clone(&place)));
        let published = publish.instrument(tracing::info_span!("publish")).await?;
        let times =
            JobTimes { queue: encoded.queue, preprocess, encode: encoded.encode, publish: start.elapsed() };
        let beside = preprocess + times.publish;
        place.ticket().done(n_tokens, beside + encoded.share, beside + encoded.encode);
        self.meters.item(job.modality, times);
        Ok(self.response(&published.item, times))
    }

    /// The rows of an earlier job for the same key.
    fn kept(&self, job: &Job<'_>) -> Option<EncoderOutput> {
        self.connector.rows(&job.key).filter(|output| {
            let item = output.item();
            item.fingerprint == job.fingerprint && item.modality == job.modality
        })
    }

    /// Answers with rows that are here; the store may have lost them since.
    async fn give_kept(
        &self,
        output: EncoderOutput,
        state: &watch::Sender<Progress>,
    ) -> Result<v1::EncodeResponse, Failure> {
        let item = output.item().clone();
        state.send_modify(|progress| {
            progress.announced = Some(EncodedItem { checksum: [0; 32], ..item.clone() });
        });
        let keys = [item.key];
        let found = tokio::time::timeout(STORE_PATIENCE, self.store.heads(&keys)).await;
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

    /// Publishes, also when the caller goes away meanwhile; then too the job keeps its place until it is done, or
    /// callers that come and go before a slow store would pile up outputs without a bound.
    async fn publish(&self, output: EncoderOutput, place: Option<Arc<Place>>) -> Result<Published, Failure> {
        let connector = self.connector.clone();
        let work = async move {
            let published = connector.save_caches(output).await;
            drop(place);
            published
        };
        let published = self.drain.tasks().spawn(work).await;
        Ok(published.map_err(|e| Failure::internal(format!("publishing: {e}")))??)
    }

    fn response(&self, item: &EncodedItem, times: JobTimes) -> v1::EncodeResponse {
        let us = |d: Duration| u64::try_from(d.as_micros()).unwrap_or(u64::MAX);
        let here = self.shelf.as_ref().filter(|(shelf, _)| shelf.object(&item.key).is_some());
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
