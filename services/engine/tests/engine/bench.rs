//! An engine on the fake decoder, a hand-moved clock, and everything it emitted so far.

use crate::fake::{FakeDecoder, HIDDEN, StepLog, VOCAB, info};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use triptych_core::clock::{Clock, ManualClock};
use triptych_core::item::from_f32;
use triptych_core::sampling::SamplingParams;
use triptych_core::{
    ContentKey, DType, EncodedItem, EncoderOutput, Extent, Failure, FailureClass, Fingerprint, ItemIdx,
    Modality, TenantId,
};
use triptych_engine::{
    Delta, Engine, EngineConfig, Event, Finished, KvBudget, NextStep, Output, RowUse, SequenceId,
    SequenceRequest,
};
use triptych_models::decoder::DecoderInfo;
use triptych_models::prompt::{CrossInput, ItemSpan, OutputKind, PreparedSequence};
use triptych_models::rules::LogitRules;
use triptych_models::tokenization::Tokenizer;

/// Ends a fake completion.
pub const END: u32 = 63;
/// A placeholder; deliberately no token of the vocabulary.
pub const PLACEHOLDER: u32 = 9999;

/// Token `i` is spelled `<i>`.
pub fn tokenizer() -> Arc<Tokenizer> {
    let vocab: Vec<String> = (0..VOCAB).map(|i| format!("\"<{i}>\": {i}")).collect();
    let json = format!(
        r#"{{"version": "1.0", "added_tokens": [], "model": {{"type": "WordLevel", "unk_token": "<0>", "vocab": {{{}}}}},
            "decoder": {{"type": "Fuse"}}}}"#,
        vocab.join(",")
    );
    Arc::new(Tokenizer::from_bytes(json.as_bytes()).unwrap())
}

/// Roomy; a test narrows what it is about.
pub fn config() -> EngineConfig {
    EngineConfig {
        kv: KvBudget::Blocks { self_attention: 64, cross_attention: 16, host: 0 },
        token_budget: 512,
        max_sequences: 16,
        max_waiting: 16,
        ..EngineConfig::default()
    }
}

pub fn with_blocks(self_attention: usize, cross_attention: usize) -> EngineConfig {
    EngineConfig { kv: KvBudget::Blocks { self_attention, cross_attention, host: 0 }, ..config() }
}

/// An encoder output whose rows depend on `n` alone.
pub fn item(n: u8, n_tokens: u32) -> EncoderOutput {
    let values: Vec<f32> =
        (0..n_tokens as usize * HIDDEN).map(|i| f32::from(n) * 1000.0 + i as f32).collect();
    let item = EncodedItem {
        key: ContentKey::from_bytes([n; 32]),
        fingerprint: Fingerprint::from_bytes([1; 32]),
        modality: Modality::Image,
        n_tokens,
        hidden: HIDDEN as u32,
        dtype: DType::F32,
        extent: Extent::Tokens,
        checksum: [0; 32],
    };
    EncoderOutput::seal(item, from_f32(&values, DType::F32)).unwrap()
}

/// A greedy sequence of `n_prompt` tokens that generates `n_generated` tokens. Its first token is its id, by
/// which the log names it.
pub fn arrival(id: u64, n_prompt: usize, n_generated: u32, now: std::time::Instant) -> SequenceRequest {
    let filler = (1..n_prompt as u32).map(|i| (i * 7 + id as u32) % 61);
    let prepared = PreparedSequence {
        tokens: std::iter::once(id as u32).chain(filler).collect(),
        positions: (0..n_prompt as u32).map(|p| [p; 3]).collect(),
        next_position: n_prompt as u32,
        spans: Vec::new(),
        cross: Vec::new(),
        rules: LogitRules::default(),
        end_tokens: vec![END],
        output: OutputKind::Text,
    };
    let sampling = SamplingParams {
        temperature: 0.0,
        max_tokens: Some(n_generated),
        ignore_eos: true,
        seed: Some(id),
        ..SamplingParams::default()
    };
    let deadline = now + Duration::from_secs(100);
    SequenceRequest {
        ids: vec![SequenceId(id)],
        prepared,
        encoder_tokens: [].into(),
        items: Vec::new(),
        sampling,
        constraint: None,
        priority: 0,
        adapter: None,
        tenant: TenantId::SHARED,
        deadline,
        resumed: None,
    }
}

/// Puts an item's rows at `first_token` of the prompt.
pub fn embed(mut arrival: SequenceRequest, output: &EncoderOutput, first_token: u32) -> SequenceRequest {
    let n_tokens = output.item().n_tokens;
    let end = first_token + n_tokens;
    arrival.prepared.tokens[first_token as usize..end as usize].fill(PLACEHOLDER);
    let item = ItemIdx(arrival.items.len() as u32);
    arrival.prepared.spans.push(ItemSpan { item, first_row: 0, first_token, n_tokens });
    arrival.items.push(output.item().clone());
    arrival
}

/// Makes a sequence cross-attend to `rows` of an item.
pub fn cross(mut arrival: SequenceRequest, output: &EncoderOutput, rows: Range<u32>) -> SequenceRequest {
    let item = ItemIdx(arrival.items.len() as u32);
    let n_rows = rows.end - rows.start;
    arrival.prepared.cross.push(CrossInput { item, first_row: rows.start, n_rows, first_token: 0 });
    arrival.items.push(output.item().clone());
    arrival
}

/// Makes tokens from `first_token` on attend to all rows of an item.
pub fn seen_from(mut arrival: SequenceRequest, first_token: u32, output: &EncoderOutput) -> SequenceRequest {
    arrival = cross(arrival, output, 0..output.item().n_tokens);
    arrival.prepared.cross.last_mut().unwrap().first_token = first_token;
    arrival
}

/// Output of one sequence.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seen {
    pub deltas: Vec<Delta>,
    pub end: Option<Result<Finished, Failure>>,
}

impl Seen {
    pub fn text(&self) -> String {
        self.deltas.iter().map(|d| d.text.as_str()).collect()
    }

    pub fn tokens(&self) -> Vec<u32> {
        self.deltas.iter().flat_map(|d| d.token_ids.clone()).collect()
    }

    pub fn finished(&self) -> &Finished {
        self.end.as_ref().expect("it ended").as_ref().expect("it ended well")
    }

    pub fn failure(&self) -> FailureClass {
        self.end.as_ref().expect("it ended").as_ref().expect_err("it failed").class
    }
}

pub struct Bench {
    pub engine: Engine,
    pub clock: Arc<ManualClock>,
    log: Arc<Mutex<StepLog>>,
    seen: BTreeMap<u64, Seen>,
    /// Weights of alignments, in the order they ended.
    pub aligned: Vec<(u64, Vec<f32>)>,
    /// Uses of rows, in order.
    pub row_uses: Vec<(u64, RowUse)>,
}

impl Bench {
    /// A decoder-only model.
    pub fn decoder_only(config: EngineConfig) -> Self {
        Self::new(config, false, 4096)
    }

    /// An encoder-decoder model.
    pub fn with_cross(config: EngineConfig) -> Self {
        Self::new(config, true, 4096)
    }

    pub fn new(config: EngineConfig, cross_attention: bool, max_context: usize) -> Self {
        Self::of(info(cross_attention, max_context), config)
    }

    /// A model of these sizes.
    pub fn of(info: DecoderInfo, config: EngineConfig) -> Self {
        let log = Arc::new(Mutex::new(StepLog::default()));
        let decoder = FakeDecoder { info, log: Arc::clone(&log) };
        let engine = Engine::new(Box::new(decoder), tokenizer(), config).unwrap();
        Self {
            engine,
            clock: Arc::default(),
            log,
            seen: BTreeMap::new(),
            aligned: Vec::new(),
            row_uses: Vec::new(),
        }
    }

    /// The same with its engine changed.
    pub fn map_engine(self, change: impl FnOnce(Engine) -> Engine) -> Self {
        Self { engine: change(self.engine), ..self }
    }

    /// As [`Self::sequence`], over all rows of an item.
    pub fn sequence_with_cross(
        &self,
        id: u64,
        n_prompt: usize,
        n_generated: u32,
        output: &EncoderOutput,
    ) -> SequenceRequest {
        cross(self.sequence(id, n_prompt, n_generated), output, 0..output.item().n_tokens)
    }

    /// Lets rows and steps take time on the bench's clock.
    pub fn set_costs(&self, row: Duration, step: Duration) {
        self.log().costs = Some((Arc::clone(&self.clock), row, step));
    }

    pub fn log(&self) -> MutexGuard<'_, StepLog> {
        self.log.lock().unwrap()
    }

    /// A sequence as [`arrival`] makes it, at this bench's time.
    pub fn sequence(&self, id: u64, n_prompt: usize, n_generated: u32) -> SequenceRequest {
        arrival(id, n_prompt, n_generated, self.clock.now())
    }

    pub fn add(&mut self, arrival: SequenceRequest) {
        self.event(Event::Add(Box::new(arrival)));
    }

    pub fn ready(&mut self, output: &EncoderOutput) {
        self.event(Event::ItemReady { key: output.item().key, output: output.clone() });
    }

    pub fn event(&mut self, event: Event) {
        let outputs = self.engine.handle(event, self.clock.now());
        self.note(outputs);
    }

    /// One step; what it computed, as (first token, tokens) for each sequence. Empty if nothing ran.
    pub fn step(&mut self) -> Vec<(u32, Range<usize>)> {
        let n_steps = self.log().steps.len();
        let outputs = self.engine.step(&*self.clock);
        self.note(outputs);
        let mut steps = self.log().steps.split_off(n_steps);
        assert!(steps.len() <= 1, "one forward a step");
        let last = steps.pop().unwrap_or_default();
        self.log().steps.push(last.clone());
        last
    }

    /// Steps while something can run.
    pub fn settle(&mut self) {
        for _ in 0..10_000 {
            if self.engine.next_step() != NextStep::Now {
                return;
            }
            self.step();
        }
        panic!("the engine does not come to rest");
    }

    pub fn seen(&self, id: u64) -> Seen {
        self.seen.get(&id).cloned().unwrap_or_default()
    }

    /// Every block is free, or kept for reuse.
    pub fn assert_books_balance(&self) {
        let stats = self.engine.stats();
        assert!(self.engine.is_idle());
        assert_eq!(
            (
                stats.running,
                stats.waiting,
                stats.self_used,
                stats.host_used,
                stats.cross_used,
                stats.states_used
            ),
            (0, 0, 0, 0, 0, 0),
            "{stats:?}"
        );
        assert_eq!((stats.items_ready, stats.items_pending), (0, 0), "{stats:?}");
        assert_eq!(self.engine.next_step(), NextStep::OnEvent);
    }

    fn note(&mut self, outputs: Vec<Output>) {
        for output in outputs {
            let id = output.id().0;
            let seen = self.seen.entry(id).or_default();
            assert!(seen.end.is_none(), "nothing follows the end: {output:?}");
            match output {
                Output::Delta(_, delta) => seen.deltas.push(delta),
                Output::Finished(_, finished) => seen.end = Some(Ok(finished)),
                Output::Failed(_, failure) => seen.end = Some(Err(failure)),
                Output::Aligned(_, weights) => self.aligned.push((id, weights)),
                Output::Rows(_, rows) => self.row_uses.push((id, rows)),
            }
        }
    }
}
