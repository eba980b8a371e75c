//! Batches of waiting items, one thread for each encoder: takes items in the order of [`crate::order`] up to a budget of
//! output tokens, and runs them as one forward. It takes what waits: no item waits for others to fill a batch up.
//!
//! Where the worker's memory is stated, what a forward takes is foretold: a batch ends before it would not fit, an item that never
//! does is refused, and forwards of several encoders wait for each other's room.
//!
//! Synchronous, since compute never runs on an async worker. Whoever waits for an item holds it until its forward begins, and
//! takes it along when it goes away, at whatever moment. A panic in a forward is our bug; the items of that batch are encoded one
//! by one then, and it fails the one that causes it.

use crate::bound::{BoundedEncoder, ForwardBound};
use crate::load::JobRanks;
use crate::meters::EncoderMeters;
use crate::order::JobOrder;
use crate::pool::JobPermit;
use crate::room::ByteRoom;
use crate::slot::{EncoderSlot, SlotChange};
use crate::weights::{LazyWeights, WeightsHold};
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use triptych_core::graph_stats::GraphStats;
use triptych_core::timeline::COMPUTE;
use triptych_core::{AdapterId, Failure};
use triptych_models::ModelError;
use triptych_models::compute::{Cores, share_cores, stop_sharing_cores};
use triptych_models::lora::LoraAdapter;
use triptych_models::preprocess::EncoderInput;
use triptych_runtime::compute_arbiter::EncoderRegistration;
use triptych_runtime::core_share::{ComputationKind, CoreShare};
use triptych_runtime::watchdog::Watchdog;

/// Most orders that the thread has not read: more than jobs are admitted, since all of them are to be in [`crate::order`]. One of a
/// caller that went away is a few words until the running forward ends.
const MAX_ORDERS: usize = 4096;

/// Bounds of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLimits {
    /// Most output tokens; a single larger item runs alone. Default 128: a CPU has its full rate from there on,
    /// and all items of a batch are done only when the last one is.
    pub max_tokens: usize,
    /// Most items. Default 16.
    pub max_items: usize,
    /// Order in which they are taken. Default: by request, the least work left first.
    pub order: JobOrder,
}

impl Default for BatchLimits {
    fn default() -> Self {
        Self { max_tokens: 128, max_items: 16, order: JobOrder::default() }
    }
}

/// Settings of a batcher.
#[derive(Clone, Debug, Default)]
pub struct BatcherConfig {
    /// Bounds of a batch.
    pub limits: BatchLimits,
    /// Compute arbiter handle that interleaves forwards with the engines of this process; `None`: no engines.
    pub arbiter: Option<EncoderRegistration>,
    /// Share of the host's cores; `None`: all of them.
    pub cores: Option<CoreShare>,
    /// Watches the forwards.
    pub watchdog: Watchdog,
    /// Room for activations, which all encoders of the worker share; `None`: as much as they take.
    pub room: Option<ByteRoom>,
}

/// Rows of an item and the times of its job.
#[derive(Debug)]
pub struct ForwardResult {
    /// `[n_tokens, hidden]`, row-major.
    pub rows: Vec<f32>,
    /// Time in the queue of the batcher.
    pub queue: Duration,
    /// Time of the batch's forward, with the steps of engines between its chunks.
    pub encode: Duration,
    /// This item's share of the forward's compute time, by output tokens.
    pub share: Duration,
}

/// An item to encode, with an adapter or without.
pub struct BatchItem {
    /// The item, preprocessed.
    pub input: EncoderInput,
    /// Its adapter, which stays loaded as long as the item waits.
    pub adapter: Option<Arc<LoadedPart>>,
}

/// An adapter's part that is loaded on the thread. Dropping it lets the thread drop the adapter, unless another part of the same
/// identity is left.
pub struct LoadedPart {
    id: AdapterId,
    batcher: Batcher,
}

impl Drop for LoadedPart {
    fn drop(&mut self) {
        self.batcher.unused.lock().push(self.id);
        // Where the queue is full the thread looks soon enough.
        let _ = self.batcher.orders.try_send(Order::Tidy);
    }
}

/// Orders to the thread.
enum Order {
    /// Encode an item.
    Encode(WaitingJob),
    /// Load an adapter.
    Load(Box<LoraAdapter>, LoadedPart, oneshot::Sender<AdapterLoaded>),
    /// Load the encoder's weights, for a job that is on its way.
    Prepare,
    /// Drop the encoder's weights if it is time.
    Look,
    /// Drop adapters that are not used any more.
    Tidy,
}

/// Result of loading an adapter, or the failure of loading the encoder for it.
type AdapterLoaded = Result<Result<LoadedPart, ModelError>, Failure>;

/// An adapter that parts are in use of.
struct HeldAdapter {
    n_parts: usize,
    /// For weights that are loaded again.
    adapter: Box<LoraAdapter>,
}

struct BatchJob {
    item: BatchItem,
    /// Marked as started when the forward begins; dangling when the caller is gone.
    permit: Weak<JobPermit>,
    since: Instant,
    /// Most bytes of its activations; 0 without a bound on them.
    activations: usize,
    reply: oneshot::Sender<Result<ForwardResult, Failure>>,
}

/// A job that waits, as the thread has it.
struct WaitingJob {
    job: JobEnd,
    permit: Weak<JobPermit>,
    /// Output tokens.
    n_tokens: usize,
    /// Most bytes of its activations; 0 without a bound on them.
    activations: usize,
}

impl WaitingJob {
    fn new(job: BatchJob) -> Self {
        let (n_tokens, permit) = (job.item.input.n_tokens as usize, job.permit.clone());
        Self { job: JobEnd(Arc::new(Mutex::new(Some(job)))), permit, n_tokens, activations: 0 }
    }

    fn take(&self) -> Option<BatchJob> {
        Some(BatchJob { activations: self.activations, ..self.job.take()? })
    }
}

/// One of the two ends of a job that waits, the caller's or the thread's: dropping it drops the job, unless its forward has begun.
struct JobEnd(Arc<Mutex<Option<BatchJob>>>);

impl JobEnd {
    fn other(&self) -> Self {
        Self(Arc::clone(&self.0))
    }

    fn take(&self) -> Option<BatchJob> {
        self.0.lock().take()
    }

    fn is_gone(&self) -> bool {
        self.0.lock().is_none()
    }
}

impl Drop for JobEnd {
    fn drop(&mut self) {
        // Not under the lock: an adapter may be dropped with it.
        let job = self.take();
        drop(job);
    }
}

/// Handle of the thread, which ends when the last handle is dropped.
#[derive(Clone)]
pub struct Batcher {
    orders: mpsc::Sender<Order>,
    /// Adapters whose parts were dropped, once for each. At most as many as were loaded.
    unused: Arc<Mutex<Vec<AdapterId>>>,
    hidden: usize,
    /// Weights that come and go; `None`: they are held.
    weights: Option<Arc<LazyWeights>>,
    ended: CancellationToken,
}

impl Batcher {
    /// Starts the thread.
    pub fn spawn(
        name: String,
        encoder: impl Into<BoundedEncoder>,
        config: BatcherConfig,
        meters: Arc<EncoderMeters>,
    ) -> Self {
        let BatcherConfig { limits, arbiter, cores, watchdog, room } = config;
        let BoundedEncoder { slot, forecast } = encoder.into();
        let (orders, inbox) = mpsc::channel(MAX_ORDERS);
        let (hidden, weights) = (slot.hidden(), slot.weights().cloned());
        let thread = std::thread::Builder::new().name(format!("encode-{name}"));
        let unused = Arc::<Mutex<Vec<AdapterId>>>::default();
        let ended = CancellationToken::new();
        let guard = ended.clone().drop_guard();
        let mut batches = BatcherThread {
            slot,
            bound: ForwardBound::new(forecast, room),
            limits,
            arbiter,
            cores,
            is_computing: false,
            meters,
            watchdog,
            waiting: VecDeque::new(),
            graphs: GraphStats::default(),
            adapters: HashMap::new(),
            unused: Arc::clone(&unused),
        };
        let work = move || {
            let _ended = guard;
            batches.report_graphs();
            batches.run(inbox);
        };
        if let Err(e) = thread.spawn(work) {
            // The receiver is gone with the closure: every job is answered Unavailable.
            tracing::error!(error = %e, "cannot start an encode thread");
        }
        Self { orders, unused, hidden, weights, ended }
    }

    /// Holds the encoder's weights for a job, and has them loaded if they are not there; `None`: they always are.
    ///
    /// # Errors
    /// As [`LazyWeights::hold`].
    pub fn hold_weights(&self) -> Result<Option<WeightsHold>, Failure> {
        let Some(weights) = &self.weights else { return Ok(None) };
        let hold = weights.hold()?;
        self.prepare();
        Ok(Some(hold))
    }

    /// Has the encoder's weights loaded for jobs to come. False: they are there.
    pub fn prepare(&self) -> bool {
        let is_cold = self.cold().is_some();
        if is_cold {
            // Where the queue is full, a job in it has them loaded.
            let _ = self.orders.try_send(Order::Prepare);
        }
        is_cold
    }

    /// Predicted time until the encoder's weights are there if a job came now; `None`: they are.
    pub fn cold(&self) -> Option<Duration> {
        self.weights.as_ref()?.cold()
    }

    /// True if the encoder's weights come and go.
    pub fn is_lazy(&self) -> bool {
        self.weights.is_some()
    }

    /// Lets the thread drop weights that nobody has needed for a while.
    pub fn look(&self) {
        if self.weights.is_some() {
            // A thread with a full queue has work.
            let _ = self.orders.try_send(Order::Look);
        }
    }

    /// Cancelled when the thread has ended and the encoder's memory is free.
    pub fn ended(&self) -> CancellationToken {
        self.ended.clone()
    }

    /// Width of the rows.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Encodes one item in the next batch that it fits.
    ///
    /// # Errors
    /// [`Failure`] Unavailable when the thread is gone, Internal when the forward failed, TooLarge for an item that there is no room
    /// for.
    pub async fn encode(&self, item: BatchItem, permit: &Arc<JobPermit>) -> Result<ForwardResult, Failure> {
        let (reply, answer) = oneshot::channel();
        let (permit, since) = (Arc::downgrade(permit), Instant::now());
        let job = WaitingJob::new(BatchJob { item, permit, since, activations: 0, reply });
        let _own_end = job.job.other();
        self.orders.send(Order::Encode(job)).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }

    /// Loads an adapter between two batches; it stays until the result is dropped.
    ///
    /// # Errors
    /// [`Failure`] Unavailable when the thread is gone, Overloaded when the encoder cannot be loaded; the result is that of
    /// [`Encoder::load_adapter`](triptych_models::encoder::Encoder::load_adapter).
    pub async fn load_adapter(
        &self,
        adapter: LoraAdapter,
    ) -> Result<Result<LoadedPart, ModelError>, Failure> {
        let part = LoadedPart { id: adapter.id(), batcher: self.clone() };
        let (done, loaded) = oneshot::channel();
        self.orders.send(Order::Load(Box::new(adapter), part, done)).await.map_err(|_| gone())?;
        loaded.await.map_err(|_| gone())?
    }
}

fn gone() -> Failure {
    Failure::unavailable("the encoder is stopping")
}

struct BatcherThread {
    slot: EncoderSlot,
    /// Bound on what a forward takes.
    bound: Option<ForwardBound>,
    limits: BatchLimits,
    arbiter: Option<EncoderRegistration>,
    cores: Option<CoreShare>,
    /// Set while forwards follow one another.
    is_computing: bool,
    meters: Arc<EncoderMeters>,
    watchdog: Watchdog,
    waiting: VecDeque<WaitingJob>,
    /// The encoder's graphs at the last report.
    graphs: GraphStats,
    /// Loaded adapters.
    adapters: HashMap<AdapterId, HeldAdapter>,
    unused: Arc<Mutex<Vec<AdapterId>>>,
}

impl BatcherThread {
    /// Reports what its graphs have done since the last report.
    fn report_graphs(&mut self) {
        let stats = self.slot.loaded().map_or_else(GraphStats::default, |encoder| encoder.graph_stats());
        self.meters.graphs(self.graphs, stats);
        self.graphs = stats;
    }

    /// Loads the encoder with its adapters unless it is there.
    fn make_ready(&mut self) -> Result<(), Failure> {
        let adapters = self.adapters.values().map(|held| &*held.adapter);
        if self.slot.make_ready(adapters)? == SlotChange::Changed {
            self.report_graphs();
        }
        Ok(())
    }

    fn run(mut self, mut orders: mpsc::Receiver<Order>) {
        loop {
            if self.waiting.is_empty() {
                if std::mem::take(&mut self.is_computing) {
                    stop_sharing_cores();
                }
                match orders.blocking_recv() {
                    Some(order) => self.take(order),
                    None => return,
                }
            }
            while let Ok(order) = orders.try_recv() {
                self.take(order);
            }
            self.waiting.retain(|waiting| !waiting.job.is_gone());
            self.drop_unused_adapters();
            self.sort();
            let most = self.bound.as_ref().map_or(usize::MAX, ForwardBound::most);
            let batch = take_batch(&mut self.waiting, self.limits, most);
            if !batch.is_empty() {
                self.encode(batch);
            }
        }
    }

    /// Puts what waits in order. A job without a place lost its caller just then.
    fn sort(&mut self) {
        let Some(permit) = self.waiting.iter().find_map(|job| job.permit.upgrade()) else { return };
        if self.waiting.len() > 1 {
            let ranks: JobRanks = permit.load().ranks(self.limits.order);
            let rank = |job: &WaitingJob| job.permit.upgrade().and_then(|permit| ranks.of(permit.load()));
            self.waiting.make_contiguous().sort_by_cached_key(rank);
        }
    }

    fn take(&mut self, order: Order) {
        match order {
            Order::Encode(waiting) => self.add(waiting),
            // A part that was not loaded, or that nobody waits for, is dropped here.
            Order::Load(adapter, part, done) => {
                let _ = done.send(self.load_adapter(adapter, part));
            }
            // A failure is in the log, and in the job's answer.
            Order::Prepare => {
                let _ = self.make_ready();
            }
            Order::Look => {
                if self.slot.drop_if_due() == SlotChange::Changed {
                    self.report_graphs();
                }
            }
            Order::Tidy => {}
        }
    }

    /// Adds a job to those that wait, or refuses it if it never fits.
    fn add(&mut self, waiting: WaitingJob) {
        let job = waiting.job.0.lock();
        let Some(input) = job.as_ref().map(|job| &job.item.input) else { return };
        let activations = self.bound.as_mut().map_or(Ok(0), |bound| bound.of_item(input));
        drop(job);
        match activations {
            Ok(activations) => self.waiting.push_back(WaitingJob { activations, ..waiting }),
            Err(failure) => reply(waiting.take().into_iter().collect(), &failure),
        }
    }

    fn load_adapter(&mut self, adapter: Box<LoraAdapter>, part: LoadedPart) -> AdapterLoaded {
        let ready = self.make_ready();
        let loaded = match self.slot.loaded() {
            Some(encoder) => encoder.load_adapter(&adapter),
            None => Ok(()),
        };
        self.adapters.entry(part.id).or_insert(HeldAdapter { n_parts: 0, adapter }).n_parts += 1;
        ready.map(|()| loaded.map(|()| part))
    }

    /// Drops adapters whose last part was dropped.
    fn drop_unused_adapters(&mut self) {
        for id in std::mem::take(&mut *self.unused.lock()) {
            let Some(held) = self.adapters.get_mut(&id) else { continue };
            held.n_parts -= 1;
            if held.n_parts == 0 {
                self.adapters.remove(&id);
                if let Some(encoder) = self.slot.loaded() {
                    encoder.unload_adapter(id);
                }
            }
        }
    }

    /// Runs a forward, through the compute arbiter if there is one; adds to `blocked` the time for which engines had the cores.
    fn forward(&mut self, batch: &[BatchJob], blocked: &mut Duration) -> Result<Vec<Vec<f32>>, ModelError> {
        let inputs: Vec<&EncoderInput> = batch.iter().map(|job| &job.item.input).collect();
        let adapters: Vec<Option<AdapterId>> =
            batch.iter().map(|job| job.item.adapter.as_ref().map(|part| part.id)).collect();
        let watched = self.watchdog.begin("an encoder forward");
        let mut turns = self.arbiter.as_ref().map(EncoderRegistration::forward);
        if let (false, Some(cores)) = (self.is_computing, &self.cores) {
            let mut computing = cores.begin(ComputationKind::Encode);
            share_cores(move |core| {
                let share = computing.share(core, Instant::now())?;
                Some(Cores { n_threads: share.n_cores, avoided: share.avoided })
            });
            self.is_computing = true;
        }
        // Without an encoder there are no rows, and the batch fails by their number.
        let Some(encoder) = self.slot.loaded() else { return Ok(Vec::new()) };
        encoder.encode_adapted(&inputs, &adapters, &mut |tokens| {
            if let Some(turns) = &mut turns {
                *blocked += turns.part(tokens);
                watched.progress();
            }
        })
    }

    fn encode(&mut self, batch: Vec<BatchJob>) {
        if let Err(failure) = self.make_ready() {
            return reply(batch, &failure);
        }
        let activations = batch.iter().map(|job| job.activations).fold(0, usize::saturating_add);
        let room = self.bound.as_ref().map(|bound| bound.take(activations));
        for permit in batch.iter().filter_map(|job| job.permit.upgrade()) {
            permit.load().started();
        }
        let start = Instant::now();
        let n_tokens: usize = batch.iter().map(|job| job.item.input.n_tokens as usize).sum();
        let span = tracing::trace_span!(target: COMPUTE, "forward", items = batch.len(), tokens = n_tokens);
        let mut blocked = Duration::ZERO;
        let result = span.in_scope(|| catch_unwind(AssertUnwindSafe(|| self.forward(&batch, &mut blocked))));
        let encode = start.elapsed();
        // Items that are encoded one by one take it again.
        drop(room);
        self.meters.batch(batch.len(), n_tokens, encode);
        self.report_graphs();
        let rows = match result {
            Ok(Ok(rows)) if rows.len() == batch.len() => rows,
            Ok(Err(error)) if error.is_device_lost() => {
                tracing::error!(%error, "no item can be encoded any more");
                self.watchdog.device_lost();
                return reply(batch, &Failure::unavailable("the encoder's device is lost"));
            }
            // One item may fail a batch: the others are encoded without it.
            _ if batch.len() > 1 => return batch.into_iter().for_each(|job| self.encode(vec![job])),
            Ok(Ok(rows)) => return fail(batch, &format!("{} results", rows.len())),
            Ok(Err(e)) => return fail(batch, &e.to_string()),
            Err(_) => return fail(batch, "the forward panicked"),
        };
        let computed = encode.saturating_sub(blocked);
        for (job, rows) in batch.into_iter().zip(rows) {
            let queue = start.saturating_duration_since(job.since);
            let share = computed.mul_f64(f64::from(job.item.input.n_tokens) / n_tokens.max(1) as f64);
            // The send fails if the caller went away meanwhile.
            let _ = job.reply.send(Ok(ForwardResult { rows, queue, encode, share }));
        }
    }
}

fn fail(batch: Vec<BatchJob>, cause: &str) {
    tracing::error!(items = batch.len(), cause, "encoder forward failed");
    reply(batch, &Failure::internal(cause));
}

/// Answers every job with a failure.
fn reply(batch: Vec<BatchJob>, failure: &Failure) {
    for job in batch {
        let _ = job.reply.send(Err(failure.clone()));
    }
}

/// Number of waiting items that the next batch takes: the longest prefix that fits the limits, and at least one
/// if any. `sizes` are their output tokens.
pub fn n_in_batch(sizes: impl Iterator<Item = usize>, limits: BatchLimits) -> usize {
    let mut tokens = 0_usize;
    let fits = |(i, n): (usize, usize)| {
        tokens = tokens.saturating_add(n);
        (i == 0 || tokens <= limits.max_tokens).then_some(())
    };
    sizes.take(limits.max_items.max(1)).enumerate().map_while(fits).count()
}

/// Takes the next batch, with at most so many bytes of activations unless one item has more. A job whose caller has just gone
/// is left out.
fn take_batch(waiting: &mut VecDeque<WaitingJob>, limits: BatchLimits, most_bytes: usize) -> Vec<BatchJob> {
    let n = n_in_batch(waiting.iter().map(|job| job.n_tokens), limits);
    let mut n_bytes = 0_usize;
    let fits = |(i, job): &(usize, &WaitingJob)| {
        n_bytes = n_bytes.saturating_add(job.activations);
        *i == 0 || n_bytes <= most_bytes
    };
    let n = waiting.iter().take(n).enumerate().take_while(fits).count();
    waiting.drain(..n).filter_map(|job| job.take()).collect()
}

#[cfg(test)]
pub(crate) mod tests;
