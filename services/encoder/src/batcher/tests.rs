//! Batches, adapters, and weights that come and go, with encoders that are made by hand.

use super::*;
use crate::meters::EncoderLabels;
use crate::order::JobOwner;
use crate::pool::{PoolConfig, PreprocessPool};
use crate::slot::LazyEncoder;
use crate::weights::LazyRules;
use std::sync::mpsc as blocking;
use tokio_util::task::TaskTracker;
use triptych_core::clock::ManualClock;
use triptych_core::{Extent, Modality};
use triptych_models::encoder::Encoder;
use triptych_models::preprocess::Features;
use triptych_runtime::MetricsRegistry;
use triptych_runtime::compute_arbiter::{ComputeArbiter, EncoderBudget};
use triptych_runtime::memory_budget::MemoryBudget;

fn input(n_tokens: u32) -> EncoderInput {
    EncoderInput { extent: Extent::Tokens, n_tokens, features: Features::Tokens(vec![7; n_tokens as usize]) }
}

pub(crate) fn item(n_tokens: u32) -> BatchItem {
    BatchItem { input: input(n_tokens), adapter: None }
}

fn queue(sizes: &[u32]) -> VecDeque<WaitingJob> {
    let job = |&n| {
        let (permit, reply) = (Weak::new(), oneshot::channel().0);
        let job = BatchJob { item: item(n), permit, since: Instant::now(), activations: 0, reply };
        WaitingJob { activations: n as usize * 10, ..WaitingJob::new(job) }
    };
    sizes.iter().map(job).collect()
}

#[test]
fn a_batch_is_the_longest_prefix_that_fits() {
    let limits = BatchLimits { max_tokens: 10, max_items: 3, order: JobOrder::default() };
    let cases: [(&[u32], usize); 6] =
        [(&[], 0), (&[11, 1], 1), (&[4, 6, 1], 2), (&[1, 1, 1, 1], 3), (&[10], 1), (&[9, 2], 1)];
    for (sizes, expect) in cases {
        assert_eq!(take_batch(&mut queue(sizes), limits, usize::MAX).len(), expect, "{sizes:?}");
    }
}

#[test]
fn a_batch_ends_before_its_activations_do_not_fit() {
    let limits = BatchLimits { max_tokens: 100, ..BatchLimits::default() };
    for (most, expect) in [(99, 2), (40, 1), (100, 3), (1, 1)] {
        assert_eq!(take_batch(&mut queue(&[4, 5, 1]), limits, most).len(), expect, "{most} bytes");
    }
}

#[test]
fn a_job_whose_caller_went_away_frees_its_item_and_is_in_no_batch() {
    let mut waiting = queue(&[4, 5, 1]);
    let [gone, left] = [1, 2].map(|i| waiting[i].job.other());
    drop(gone);
    assert!(waiting[1].job.is_gone(), "its item is freed while the forward before it runs");
    let batch = take_batch(&mut waiting, BatchLimits::default(), usize::MAX);
    let taken: Vec<_> = batch.iter().map(|job| (job.item.input.n_tokens, job.activations)).collect();
    assert_eq!(taken, [(4, 40), (1, 10)]);
    drop(left);
    assert_eq!(batch.len(), 2, "a batch has its items to the end");
}

/// An encoder of rows of one value, which fails with 13 tokens.
pub(crate) struct Fake;

impl Encoder for Fake {
    fn hidden(&self) -> usize {
        1
    }

    fn encode_in_parts(
        &mut self,
        batch: &[&EncoderInput],
        _: &mut dyn FnMut(usize),
    ) -> Result<Vec<Vec<f32>>, ModelError> {
        assert!(batch.iter().all(|i| i.n_tokens != 13), "13 is unlucky");
        Ok(batch.iter().map(|i| vec![0.5; i.n_tokens as usize]).collect())
    }
}

/// Notes the adapters that are loaded and dropped.
struct Adapting(Arc<Mutex<Vec<&'static str>>>);

impl Encoder for Adapting {
    fn hidden(&self) -> usize {
        1
    }

    fn encode_in_parts(
        &mut self,
        batch: &[&EncoderInput],
        before: &mut dyn FnMut(usize),
    ) -> Result<Vec<Vec<f32>>, ModelError> {
        Fake.encode_in_parts(batch, before)
    }

    fn encode_adapted(
        &mut self,
        batch: &[&EncoderInput],
        _: &[Option<AdapterId>],
        before: &mut dyn FnMut(usize),
    ) -> Result<Vec<Vec<f32>>, ModelError> {
        self.0.lock().push("encode");
        Fake.encode_in_parts(batch, before)
    }

    fn load_adapter(&mut self, _: &LoraAdapter) -> Result<(), ModelError> {
        self.0.lock().push("load");
        Ok(())
    }

    fn unload_adapter(&mut self, _: AdapterId) {
        self.0.lock().push("unload");
    }
}

/// Two names of one adapter are two parts; a job that waits has the part that it began with.
#[tokio::test]
async fn an_adapter_is_dropped_with_its_last_part_and_after_its_last_job() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/lora_t5_encoder/encoder");
    let adapter = || LoraAdapter::open(dir.as_ref(), 8).unwrap();
    let seen = Arc::<Mutex<Vec<&'static str>>>::default();
    let meters = Arc::new(EncoderMeters::new(&MetricsRegistry::default()));
    let slot = EncoderSlot::Held(Box::new(Adapting(Arc::clone(&seen))));
    let batcher = Batcher::spawn("test".into(), slot, BatcherConfig::default(), Arc::clone(&meters));
    let [one, two] = [batcher.load_adapter(adapter()).await, batcher.load_adapter(adapter()).await]
        .map(|loaded| loaded.unwrap().unwrap());
    drop(one);
    let pool = PoolConfig { threads: 1, max_jobs: 1, ..PoolConfig::default() };
    let pool = PreprocessPool::new(pool, meters, TaskTracker::new());
    let permit = pool.admit("m", Modality::Image, 1, JobOwner::default()).unwrap();
    // The only part is the job's.
    let item = BatchItem { adapter: Some(Arc::new(two)), ..item(3) };
    batcher.encode(item, &permit).await.unwrap();
    // Any order lets the thread look.
    batcher.encode(self::item(1), &permit).await.unwrap();
    assert_eq!(*seen.lock(), ["load", "load", "encode", "unload", "encode"]);
}

#[test]
fn an_item_that_fails_its_batch_fails_alone() {
    let meters = Arc::new(EncoderMeters::new(&MetricsRegistry::default()));
    let slot = EncoderSlot::Held(Box::new(Fake));
    let (limits, watchdog) = (BatchLimits::default(), Watchdog::default());
    let (arbiter, cores, is_computing, waiting) = (None, None, false, VecDeque::new());
    let graphs = GraphStats::default();
    let (adapters, unused) = (HashMap::new(), Arc::default());
    let mut thread = BatcherThread {
        bound: None,
        slot,
        limits,
        arbiter,
        cores,
        is_computing,
        meters,
        watchdog,
        waiting,
        graphs,
        adapters,
        unused,
    };
    let (jobs, answers): (Vec<_>, Vec<_>) = [3, 13, 5]
        .map(|n| {
            let (reply, answer) = oneshot::channel();
            let (permit, since) = (Weak::new(), Instant::now());
            (BatchJob { item: item(n), permit, since, activations: 0, reply }, answer)
        })
        .into_iter()
        .unzip();
    thread.encode(jobs);
    let ended: Vec<_> = answers.into_iter().map(|mut answer| answer.try_recv().unwrap().is_ok()).collect();
    assert_eq!(ended, [true, false, true]);
}

#[tokio::test]
async fn a_panicking_forward_fails_its_batch_and_the_thread_goes_on() {
    let meters = Arc::new(EncoderMeters::new(&MetricsRegistry::default()));
    let config = PoolConfig { threads: 1, max_jobs: 1, ..PoolConfig::default() };
    let pool = PreprocessPool::new(config, Arc::clone(&meters), TaskTracker::new());
    let permit = pool.admit("m", Modality::Image, 1, JobOwner::default()).unwrap();
    let slot = EncoderSlot::Held(Box::new(Fake));
    let batcher = Batcher::spawn("test".into(), slot, BatcherConfig::default(), meters);
    let failed = batcher.encode(item(13), &permit).await.unwrap_err();
    assert_eq!(failed.class, triptych_core::FailureClass::Internal);
    assert_eq!(batcher.encode(item(3), &permit).await.unwrap().rows, [0.5; 3]);
}

/// A batcher whose weights come and go after a minute; its loads wait for a word each.
struct LazyBed {
    batcher: Batcher,
    pool: PreprocessPool,
    clock: Arc<ManualClock>,
    /// Each load begins, then takes its result from here: true if it succeeds.
    words: blocking::Sender<bool>,
    seen: Arc<Mutex<Vec<&'static str>>>,
}

impl LazyBed {
    fn new() -> Self {
        let meters = Arc::new(EncoderMeters::new(&MetricsRegistry::default()));
        let clock = Arc::new(ManualClock::default());
        let memory = MemoryBudget::counted_by(None, || None);
        let rules = LazyRules { idle: Some(Duration::from_secs(60)), memory, clock: clock.clone() };
        let labels = EncoderLabels { model: "m".into(), encoder: "image".into() };
        let weights = Arc::new(LazyWeights::new(rules, 1 << 20, labels, Arc::clone(&meters)));
        let seen = Arc::<Mutex<Vec<&'static str>>>::default();
        let (words, orders) = blocking::channel();
        let notes = Arc::clone(&seen);
        let load = Box::new(move || {
            notes.lock().push("weights");
            let encoder: Box<dyn Encoder> = Box::new(Adapting(Arc::clone(&notes)));
            match orders.recv() {
                Ok(true) => Ok(encoder),
                _ => Err(ModelError::Format { path: "model".into(), message: "torn".into() }),
            }
        });
        let slot = EncoderSlot::Lazy(LazyEncoder { hidden: 1, load, weights, encoder: None });
        let batcher = Batcher::spawn("test".into(), slot, BatcherConfig::default(), Arc::clone(&meters));
        let pool = PoolConfig { threads: 1, max_jobs: 8, ..PoolConfig::default() };
        Self { batcher, pool: PreprocessPool::new(pool, meters, TaskTracker::new()), clock, words, seen }
    }

    /// A job as the worker runs it.
    async fn job(&self) -> Result<Vec<f32>, Failure> {
        let permit = self.pool.admit("m", Modality::Image, 1, JobOwner::default()).unwrap();
        let _weights = self.batcher.hold_weights()?;
        Ok(self.batcher.encode(item(3), &permit).await?.rows)
    }

    /// Lets the thread look, and waits until it has dropped the weights.
    async fn dropped(&self) {
        self.batcher.look();
        while self.batcher.cold().is_none() {
            tokio::task::yield_now().await;
        }
    }

    fn seen(&self) -> Vec<&'static str> {
        std::mem::take(&mut *self.seen.lock())
    }
}

#[tokio::test]
async fn jobs_that_come_at_a_time_wait_for_one_load_and_idle_weights_are_loaded_again() {
    let bed = LazyBed::new();
    assert_eq!((bed.batcher.hidden(), bed.seen()), (1, vec![]), "nothing is loaded at the start");
    bed.words.send(true).unwrap();
    let (one, two, three) = tokio::join!(bed.job(), bed.job(), bed.job());
    for rows in [one, two, three] {
        assert_eq!(rows.unwrap(), [0.5; 3]);
    }
    let seen = bed.seen();
    assert_eq!(seen[0], "weights");
    assert!(seen.len() > 1 && seen[1..].iter().all(|what| *what == "encode"), "{seen:?}");
    assert_eq!(bed.batcher.cold(), None);
    // Not yet, then idle for long enough.
    bed.batcher.look();
    bed.job().await.unwrap();
    assert_eq!(bed.seen(), ["encode"]);
    bed.clock.advance(Duration::from_secs(60));
    bed.dropped().await;
    bed.words.send(true).unwrap();
    bed.job().await.unwrap();
    assert_eq!(bed.seen(), ["weights", "encode"]);
}

#[tokio::test]
async fn a_load_that_fails_fails_its_jobs_and_the_thread_goes_on() {
    let bed = LazyBed::new();
    bed.words.send(false).unwrap();
    let failed = bed.job().await.unwrap_err();
    assert_eq!(failed.class, triptych_core::FailureClass::Overloaded, "{failed:?}");
    let refused = bed.job().await.unwrap_err();
    assert_eq!((refused.class, bed.seen()), (failed.class, vec!["weights"]), "no load before its time");
    bed.clock.advance(Duration::from_secs(1));
    bed.words.send(true).unwrap();
    assert_eq!(bed.job().await.unwrap(), [0.5; 3]);
    assert_eq!(bed.seen(), ["weights", "encode"]);
}

#[tokio::test]
async fn weights_that_are_wanted_ahead_are_loaded_without_a_job() {
    let bed = LazyBed::new();
    assert!(bed.batcher.prepare());
    bed.words.send(true).unwrap();
    bed.job().await.unwrap();
    assert!(!bed.batcher.prepare(), "they are there");
    assert_eq!(bed.seen(), ["weights", "encode"]);
}

#[tokio::test]
async fn adapters_come_back_with_the_weights() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/lora_t5_encoder/encoder");
    let bed = LazyBed::new();
    bed.words.send(true).unwrap();
    let adapter = LoraAdapter::open(dir.as_ref(), 8).unwrap();
    let part = bed.batcher.load_adapter(adapter).await.unwrap().unwrap();
    assert_eq!(bed.seen(), ["weights", "load"], "the encoder judges whether it fits");
    bed.clock.advance(Duration::from_secs(60));
    bed.dropped().await;
    bed.words.send(true).unwrap();
    bed.job().await.unwrap();
    assert_eq!(bed.seen(), ["weights", "load", "encode"]);
    drop(part);
    bed.job().await.unwrap();
    assert_eq!(bed.seen(), ["unload", "encode"]);
}

/// An encoder of two chunks a forward.
struct Chunked;

impl Encoder for Chunked {
    fn hidden(&self) -> usize {
        1
    }

    fn encode_in_parts(
        &mut self,
        batch: &[&EncoderInput],
        before: &mut dyn FnMut(usize),
    ) -> Result<Vec<Vec<f32>>, ModelError> {
        before(1);
        before(1);
        Fake.encode_in_parts(batch, before)
    }
}

#[tokio::test]
async fn the_time_of_engine_steps_is_not_an_items_compute_time() {
    const STEP: Duration = Duration::from_millis(20);
    let arbiter = ComputeArbiter::new(EncoderBudget::Automatic);
    let meters = Arc::new(EncoderMeters::new(&MetricsRegistry::default()));
    let config = BatcherConfig { arbiter: Some(arbiter.encoder()), ..BatcherConfig::default() };
    let slot = EncoderSlot::Held(Box::new(Chunked));
    let batcher = Batcher::spawn("test".into(), slot, config, Arc::clone(&meters));
    let config = PoolConfig { threads: 1, max_jobs: 1, ..PoolConfig::default() };
    let pool = PreprocessPool::new(config, meters, TaskTracker::new());
    let permit = pool.admit("m", Modality::Image, 1, JobOwner::default()).unwrap();
    let (engine, gate) = (arbiter.engine(), arbiter.clone());
    let (started, has_started) = blocking::channel();
    let stepping = std::thread::spawn(move || {
        let step = engine.step();
        started.send(()).unwrap();
        while gate.n_waiting() == 0 {
            std::thread::yield_now();
        }
        std::thread::sleep(STEP);
        drop(step);
    });
    has_started.recv().unwrap();
    let encoded = batcher.encode(item(3), &permit).await.unwrap();
    stepping.join().unwrap();
    assert!(encoded.encode >= encoded.share + STEP, "{:?} of {:?}", encoded.share, encoded.encode);
}

/// Notes the sizes of its batches; its first forward ends with a word.
struct Held {
    began: blocking::Sender<()>,
    word: blocking::Receiver<()>,
    sizes: Arc<Mutex<Vec<u32>>>,
}

impl Encoder for Held {
    fn hidden(&self) -> usize {
        1
    }

    fn encode_in_parts(
        &mut self,
        batch: &[&EncoderInput],
        before: &mut dyn FnMut(usize),
    ) -> Result<Vec<Vec<f32>>, ModelError> {
        let is_first = self.sizes.lock().is_empty();
        self.sizes.lock().extend(batch.iter().map(|input| input.n_tokens));
        if is_first {
            self.began.send(()).unwrap();
            self.word.recv().unwrap();
        }
        Fake.encode_in_parts(batch, before)
    }
}

/// As many wait as a worker admits, not as many as a batch holds.
#[tokio::test]
async fn the_most_urgent_of_all_that_wait_is_encoded_next() {
    const N_WAITING: i32 = 60;
    let meters = Arc::new(EncoderMeters::new(&MetricsRegistry::default()));
    let ((began, has_begun), (end, word)) = (blocking::channel(), blocking::channel());
    let sizes = Arc::<Mutex<Vec<u32>>>::default();
    let slot = EncoderSlot::Held(Box::new(Held { began, word, sizes: Arc::clone(&sizes) }));
    let limits = BatchLimits { max_items: 1, ..BatchLimits::default() };
    let config = BatcherConfig { limits, ..BatcherConfig::default() };
    let batcher = Batcher::spawn("test".into(), slot, config, Arc::clone(&meters));
    let pool = PoolConfig { threads: 1, max_jobs: 100, ..PoolConfig::default() };
    let pool = PreprocessPool::new(pool, meters, TaskTracker::new());
    let job = |n_tokens: u32, priority: i32| {
        let owner = JobOwner { priority, ..JobOwner::default() };
        let permit = pool.admit("m", Modality::Image, 1, owner).unwrap();
        let batcher = batcher.clone();
        tokio::spawn(async move { batcher.encode(item(n_tokens), &permit).await.map(|_| ()) })
    };
    let first = job(1, 0);
    while has_begun.try_recv().is_err() {
        tokio::task::yield_now().await;
    }
    // Each is more urgent than those before it.
    let jobs: Vec<_> = (1..=N_WAITING).map(|i| job(100 + i.unsigned_abs(), -i)).collect();
    // The thread reads nothing before its forward ends.
    while batcher.orders.max_capacity() - batcher.orders.capacity() < jobs.len() {
        tokio::task::yield_now().await;
    }
    end.send(()).unwrap();
    for job in std::iter::once(first).chain(jobs) {
        job.await.unwrap().unwrap();
    }
    let backwards = (1..=N_WAITING.unsigned_abs()).rev().map(|i| 100 + i);
    assert_eq!(*sizes.lock(), std::iter::once(1).chain(backwards).collect::<Vec<_>>());
}
