//! An engine's thread beside an encoder: whose turn it is, by a decoder that tells when it computes.

use super::*;
use crate::meters::MetricFamilies;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;
use triptych_core::item::from_f32;
use triptych_core::sampling::SamplingParams;
use triptych_core::{
    ContentKey, DType, EncodedItem, EncodedRows, EncoderOutput, Extent, Fingerprint, Modality, TenantId,
};
use triptych_engine::EngineConfig;
use triptych_models::ModelError;
use triptych_models::decoder::{AlignInput, Decoder, DecoderInfo, KvCacheGroups, StepInput};
use triptych_models::prompt::{OutputKind, PreparedSequence};
use triptych_models::rules::LogitRules;
use triptych_models::sampling::{Choices, choose_rows};
use triptych_models::tokenization::Tokenizer;
use triptych_runtime::MetricsRegistry;
use triptych_runtime::compute_arbiter::EncoderBudget;

/// Layers of an alignment.
const N_LAYERS: usize = 40;

/// Work that computes at this moment, and work that has.
#[derive(Default)]
struct Cores {
    users: AtomicUsize,
    overlapped: AtomicBool,
    /// Layers of alignments that have begun.
    layers: AtomicUsize,
    /// Forwards that have begun.
    forwards: AtomicUsize,
    /// Forwards wait for no one any more.
    free: AtomicBool,
}

impl Cores {
    fn enter(&self) {
        if self.users.fetch_add(1, Ordering::SeqCst) > 0 {
            self.overlapped.store(true, Ordering::SeqCst);
        }
    }

    fn leave(&self) {
        self.users.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Computes nothing but alignments, and those by taking the cores for a moment. From the third forward on each waits until someone
/// else waits for a permit.
struct WaitingDecoder(Arc<Cores>, ComputeArbiter);

impl Decoder for WaitingDecoder {
    fn info(&self) -> DecoderInfo {
        DecoderInfo {
            vocab: 2,
            n_readable: 2,
            encoder_hidden: 1,
            embedded_hidden: 1,
            max_context: 64,
            cross_attention: true,
            cross_optional: true,
            mutual_items: false,
            kv_groups: KvCacheGroups::FULL,
            self_block_bytes: 1 << 20,
            cross_block_bytes: 1 << 20,
            state_slot_bytes: None,
            cross_rows_per_token: 1,
        }
    }

    fn begin_align(&mut self, _: &AlignInput<'_>) -> Result<(), ModelError> {
        Ok(())
    }

    fn align_layer(&mut self) -> Result<Option<Vec<f32>>, ModelError> {
        self.0.enter();
        let n = self.0.layers.fetch_add(1, Ordering::SeqCst) + 1;
        std::thread::yield_now();
        self.0.leave();
        Ok((n == N_LAYERS).then(|| vec![1.0]))
    }

    fn allocate_kv(&mut self, _: usize, _: usize) -> Result<(), ModelError> {
        Ok(())
    }

    fn allocate_host(&mut self, _: usize) -> Result<(), ModelError> {
        Ok(())
    }

    fn project_cross(&mut self, _: &[EncodedRows<'_>], _: &[u32]) -> Result<(), ModelError> {
        Ok(())
    }

    fn forward(&mut self, step: &StepInput<'_>) -> Result<Choices, ModelError> {
        let waits = self.0.forwards.fetch_add(1, Ordering::SeqCst) >= 2;
        while waits && self.1.n_waiting() == 0 && !self.0.free.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        Ok(choose_rows(vec![0.0; 2 * step.logit_rows.len()], 2, step.choose))
    }

    fn copy_blocks(&mut self, _: &[(u32, u32)]) -> Result<(), ModelError> {
        Ok(())
    }

    fn swap_out(&mut self, _: &[(u32, u32)]) -> Result<(), ModelError> {
        Ok(())
    }

    fn swap_in(&mut self, _: &[(u32, u32)]) -> Result<(), ModelError> {
        Ok(())
    }
}

fn driver(arbiter: &ComputeArbiter, cores: &Arc<Cores>, config: EngineConfig) -> Driver {
    sharing_driver(arbiter, cores, config, None)
}

/// A driver whose worker shares the cores of a host.
fn sharing_driver(
    arbiter: &ComputeArbiter,
    cores: &Arc<Cores>,
    config: EngineConfig,
    share: Option<CoreShare>,
) -> Driver {
    let json = r#"{"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0, "b": 1}}}"#;
    let tokenizer = Arc::new(Tokenizer::from_bytes(json.as_bytes()).unwrap());
    let decoder = Box::new(WaitingDecoder(Arc::clone(cores), arbiter.clone()));
    let metrics = MetricsRegistry::default();
    let setup = DriverSetup {
        engine: Engine::new(decoder, tokenizer, config).unwrap(),
        adapter_names: std::collections::HashMap::new(),
        meters: MetricFamilies::new(&metrics).of_model("m"),
        cores: share,
        arbitration: Some(Arbitration::new(arbiter, &ArbiterMeters::new(&metrics))),
        watchdog: Watchdog::default(),
        fault: None,
        ended: CancellationToken::new(),
    };
    Driver::spawn("m", setup, CancellationToken::new()).unwrap()
}

fn job(id: SequenceId) -> AlignJob {
    let item = EncodedItem {
        key: ContentKey::from_bytes([1; 32]),
        fingerprint: Fingerprint::from_bytes([1; 32]),
        modality: Modality::Audio,
        n_tokens: 2,
        hidden: 1,
        dtype: DType::F32,
        extent: Extent::Tokens,
        checksum: [0; 32],
    };
    let output = EncoderOutput::seal(item, from_f32(&[1.0, 2.0], DType::F32)).unwrap();
    AlignJob {
        id,
        tokens: vec![0, 1],
        output,
        first_row: 0,
        n_rows: 2,
        heads: [(0, 0)].into(),
        adapter: None,
    }
}

#[test]
fn an_alignment_computes_only_while_no_encoder_forward_does() {
    let arbiter = ComputeArbiter::new(EncoderBudget::Automatic);
    let cores = Arc::<Cores>::default();
    let encoder = arbiter.encoder();
    let mut forward = encoder.forward();
    forward.part(1);
    cores.enter();
    let driver = driver(&arbiter, &cores, EngineConfig::default());
    let (sender, mut outputs) = tokio::sync::mpsc::unbounded_channel();
    let running = driver.align(job(driver.next_id()), sender).unwrap();
    // The engine's thread takes the job up: it waits for its turn, or computes beside the forward.
    while arbiter.n_waiting() == 0 && cores.layers.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    assert_eq!(cores.layers.load(Ordering::SeqCst), 0, "it waits while the forward computes");
    cores.leave();
    drop(forward);
    // From here on both take turns: a step that waits runs between two chunks.
    let aligned = loop {
        let mut forward = encoder.forward();
        forward.part(1);
        cores.enter();
        std::thread::yield_now();
        cores.leave();
        if let Ok(output) = outputs.try_recv() {
            break output;
        }
    };
    assert!(matches!(aligned, Output::Aligned(_, weights) if weights == [1.0]));
    assert!(!cores.overlapped.load(Ordering::SeqCst), "an alignment ran beside a forward");
    drop(running);
}

/// A text of two tokens that is answered with as many as fit.
fn text(id: SequenceId) -> SequenceRequest {
    let prepared = PreparedSequence {
        tokens: vec![0, 1],
        positions: vec![[0; 3], [1; 3]],
        next_position: 2,
        spans: Vec::new(),
        cross: Vec::new(),
        rules: LogitRules::default(),
        end_tokens: Vec::new(),
        output: OutputKind::Text,
    };
    SequenceRequest {
        ids: vec![id],
        prepared,
        encoder_tokens: [].into(),
        items: Vec::new(),
        sampling: SamplingParams { ignore_eos: true, ..SamplingParams::default() },
        constraint: None,
        priority: 0,
        adapter: None,
        tenant: TenantId::SHARED,
        deadline: Instant::now() + Duration::from_secs(100),
        resumed: None,
    }
}

#[test]
fn an_encoder_computes_while_decodes_are_ahead_of_their_slo() {
    for (tpot_slo, tokens_in_slack) in [(None, 0), (Some(Duration::from_secs(50)), 7)] {
        let arbiter = ComputeArbiter::new(EncoderBudget::Automatic);
        let cores = Arc::<Cores>::default();
        let encoder = arbiter.encoder();
        // What a token of output takes is known from a forward before.
        encoder.forward().part(1);
        let driver = driver(&arbiter, &cores, EngineConfig { tpot_slo, ..EngineConfig::default() });
        let (sender, _outputs) = tokio::sync::mpsc::unbounded_channel();
        let running = driver.start(text(driver.next_id()), sender).unwrap();
        // The third forward has begun, and waits for the encoder.
        while cores.forwards.load(Ordering::SeqCst) < 3 {
            std::thread::yield_now();
        }
        let mut forward = encoder.forward();
        forward.part(7);
        drop(forward);
        let usage = arbiter.usage();
        assert_eq!((usage.tokens, usage.tokens_in_slack), (7, tokens_in_slack), "{tpot_slo:?}");
        // A step or two have decoded; nine tenths of the SLO are aimed at.
        let slo_us = driver.stats().step_slo_us;
        assert_eq!((slo_us > 0, slo_us % 45_000_000), (tpot_slo.is_some(), 0), "{tpot_slo:?} {slo_us}");
        cores.free.store(true, Ordering::SeqCst);
        drop(running);
    }
}

#[test]
fn decodes_that_are_ahead_of_their_slo_wait_while_another_worker_of_the_host_encodes() {
    let dir = tempfile::tempdir().unwrap();
    let open = |place| CoreShare::open(&dir.path().join("cores"), place, 2).unwrap();
    let arbiter = ComputeArbiter::new(EncoderBudget::Automatic);
    let cores = Arc::<Cores>::default();
    cores.free.store(true, Ordering::SeqCst);
    let config = EngineConfig { tpot_slo: Some(Duration::from_secs(5000)), ..EngineConfig::default() };
    let other = open(1);
    let mut forward = other.begin(ComputationKind::Encode);
    forward.share(0, Instant::now());
    let driver = sharing_driver(&arbiter, &cores, config, Some(open(0)));
    let (sender, _outputs) = tokio::sync::mpsc::unbounded_channel();
    let running = driver.start(text(driver.next_id()), sender).unwrap();
    while cores.forwards.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    // Commands are heard meanwhile; each would come after a step if steps followed one another.
    for _ in 0..20 {
        let (sender, mut refused) = tokio::sync::mpsc::unbounded_channel();
        let unknown =
            SequenceRequest { adapter: Some(AdapterId::from_bytes([7; 32])), ..text(driver.next_id()) };
        let _refused = driver.start(unknown, sender).unwrap();
        assert!(matches!(refused.blocking_recv(), Some(Output::Failed(..))));
    }
    assert_eq!(cores.forwards.load(Ordering::SeqCst), 1, "the prompt alone");
    drop(forward);
    while cores.forwards.load(Ordering::SeqCst) < 3 {
        std::thread::yield_now();
    }
    drop(running);
}
