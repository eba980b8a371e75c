//! The engine's part: how fast prompts are read and answers written, at several batch sizes.
//!
//! Where a model cross-attends to the item, an answer is timed whole: its prompt is a token or two, and projecting the
//! item's rows belongs to it. Where the item's rows are part of the prompt, reading the prompt (prefill) is told apart,
//! and writing is timed from when every sequence of the batch has its first token. It knows no files.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::collections::HashMap;
use std::time::{Duration, Instant};
use triptych_core::clock::SystemClock;
use triptych_core::item::from_f32;
use triptych_core::prompt::{Prompt, TextOrTokens};
use triptych_core::sampling::{BeamParams, EarlyStopping, SamplingParams};
use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_core::{ContentKey, DType, EncodedItem, EncoderOutput, Fingerprint, Modality, TenantId};
use triptych_engine::{
    Engine, EngineConfig, Event, KvBudget, NextStep, Output, Pipelining, PrefixCache, SequenceId,
    SequenceRequest,
};
use triptych_models::Model;
use triptych_models::compute::Compute;
use triptych_models::decoder::{DecodeGraphConfig, Decoder};
use triptych_models::preprocess::EncoderInput;
use triptych_models::prompt::PreparedSequence;

/// Most rows of a step, the engine's own default.
const TOKEN_BUDGET: usize = 2048;

/// Inputs and settings of a measurement.
pub struct Generation<'a> {
    /// Lays prompts out, and has the decoder's weights.
    pub model: &'a Model,
    /// Computes them.
    pub compute: &'a Compute,
    /// Loaded already, for the first engine; those after it load their own.
    pub decoder: RefCell<Option<Box<dyn Decoder>>>,
    /// Tokens of text behind the item.
    pub text_tokens: u32,
    /// Tokens that each sequence writes.
    pub new_tokens: u32,
    /// Of the draw of each token; 0: the most probable one.
    pub temperature: f32,
    /// Runs of each, of which the best counts.
    pub repeats: usize,
    /// Beginning of the time that counts for models that cross-attend; others begin with their first tokens.
    pub from: Begin,
    /// Ways of submitting a step.
    pub modes: Vec<Mode>,
    /// Called with the rates of decoding so far.
    pub after_each: &'a dyn Fn(&[Value]),
}

/// Beginning of the time that counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    /// The arrival of the questions.
    Arrival,
    /// The first token of every sequence.
    FirstToken,
}

/// Way of submitting work to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// Each launch by itself.
    Eager,
    /// Captured graphs.
    Graphs,
}

impl Mode {
    /// The name in settings and results.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Eager => "eager",
            Self::Graphs => "graphs",
        }
    }
}

/// Decoding of a batch.
#[derive(Clone, Copy)]
struct Answers {
    /// Questions.
    batch: usize,
    /// Beams that each answer is the best of; 1: no search.
    beams: u32,
    /// Of the draw of each token.
    temperature: f32,
}

impl Answers {
    /// Rows of a step of decoding.
    fn n_rows(self) -> usize {
        self.batch * self.beams as usize
    }

    /// Options of the engine.
    fn sampling(self, max_tokens: u32) -> SamplingParams {
        let beams =
            BeamParams { width: self.beams, length_penalty: 1.0, early_stopping: EarlyStopping::default() };
        SamplingParams {
            temperature: self.temperature,
            max_tokens: Some(max_tokens),
            ignore_eos: true,
            beams: (self.beams > 1).then_some(beams),
            ..SamplingParams::default()
        }
    }
}

/// An encoded item, before it has a key.
pub struct Item {
    /// The encoded item.
    pub input: EncoderInput,
    /// Its kind.
    pub modality: Modality,
    /// Encoder output, `[n_tokens, hidden]`.
    pub rows: Vec<f32>,
    /// Width of a row.
    pub hidden: usize,
}

/// A prompt and the item that it names.
struct Question {
    prepared: PreparedSequence,
    output: EncoderOutput,
}

/// Work and its time.
struct Done {
    took: Duration,
    n_tokens: usize,
}

impl Generation<'_> {
    /// `{"decode": […], "beams_tokens_per_s": … or null, "prefill": {…} or null}`, rates in tokens per second; of a beam
    /// search those of the answer, if `beams` is more than 1.
    pub fn measure(&self, item: &Item, batches: &[usize], beams: u32) -> Result<Value> {
        let one = self.questions(item, 1, 0)?;
        let within = one.iter().all(|q| q.prepared.cross.is_empty());
        let most = batches.iter().copied().max().unwrap_or(1);
        let answers = Answers { batch: most, beams: 1, temperature: self.temperature };
        let mut bench = Bench::new(self, &self.questions(item, most, 0)?, answers)?;
        let prefill = if within { Some(self.prefill(&mut bench, &one)?) } else { None };
        let mut decode = Vec::new();
        for &mode in &self.modes {
            if !bench.has(mode) {
                continue;
            }
            for &batch in batches {
                let done = self.fastest(|run| {
                    let questions = self.questions(item, batch, run)?;
                    match within || self.from == Begin::FirstToken {
                        true => bench.after_first(&questions, self.new_tokens),
                        false => bench.whole(&questions, self.new_tokens),
                    }
                })?;
                decode.push(
                    json!({"batch": batch, "mode": mode.as_str(), "tokens_per_s": done.tokens_per_s()}),
                );
                (self.after_each)(&decode);
            }
        }
        let beams = if beams > 1 { Some(self.search(item, beams)?.tokens_per_s()) } else { None };
        let prefill =
            prefill.map(|done| json!({"tokens": done.n_tokens, "tokens_per_s": done.tokens_per_s()}));
        Ok(json!({"decode": decode, "beams_tokens_per_s": beams, "prefill": prefill}))
    }

    /// One answer that is the best of so many beams, timed whole.
    fn search(&self, item: &Item, beams: u32) -> Result<Done> {
        let answers = Answers { batch: 1, beams, temperature: 0.0 };
        let mut bench = Bench::new(self, &self.questions(item, 1, 0)?, answers)?;
        self.fastest(|run| bench.whole(&self.questions(item, 1, run)?, self.new_tokens))
    }

    fn prefill(&self, bench: &mut Bench, question: &[Question]) -> Result<Done> {
        // The first touches memory.
        bench.first(question)?;
        self.fastest(|_| bench.first(question))
    }

    /// Of runs that know their number.
    fn fastest(&self, run: impl FnMut(usize) -> Result<Done>) -> Result<Done> {
        let runs = (0..self.repeats).map(run).collect::<Result<Vec<_>>>()?;
        runs.into_iter().max_by(|a, b| a.tokens_per_s().total_cmp(&b.tokens_per_s())).context("no run")
    }

    /// A batch of run number `run`.
    fn questions(&self, item: &Item, batch: usize, run: usize) -> Result<Vec<Question>> {
        (0..batch).map(|i| self.question(item, [batch, run, i])).collect()
    }

    /// The same rows under a key of their own: no two sequences of a batch, and no two runs, share what a rival could
    /// not, the rows' projection for cross-attention above all.
    fn question(&self, item: &Item, number: [usize; 3]) -> Result<Question> {
        let mut key = [0; 32];
        for (bytes, number) in key.chunks_exact_mut(8).zip(number) {
            bytes.copy_from_slice(&(number as u64).to_le_bytes());
        }
        let encoded = EncodedItem {
            key: ContentKey::from_bytes(key),
            fingerprint: Fingerprint::from_bytes([0; 32]),
            modality: item.modality,
            n_tokens: item.input.n_tokens,
            hidden: u32::try_from(item.hidden)?,
            dtype: DType::F32,
            extent: item.input.extent.clone(),
            checksum: [0; 32],
        };
        let output = EncoderOutput::seal(encoded, from_f32(&item.rows, DType::F32))?;
        // Small ids exist in every vocabulary; the first few are special.
        let text = (0..self.text_tokens).map(|i| 10 + i % 80).collect();
        let prompt = Prompt::Singleton(TextOrTokens::Tokens(text));
        let prepared = self.model.prompts().prepare(&prompt, &[output.item().clone()])?;
        Ok(Question { prepared: prepared.into_iter().next().context("a prompt became no sequence")?, output })
    }
}

impl Done {
    fn tokens_per_s(&self) -> f64 {
        self.n_tokens as f64 / self.took.as_secs_f64()
    }
}

/// Most tokens that a sequence whose prompt is read first has written when the last prompt is read: each step reads a
/// budget of rows, those of items included, less those of the sequences that write already.
fn ahead(questions: &[Question]) -> usize {
    let n_rows = |q: &Question| q.prepared.cross.first().map_or(0, |cross| cross.n_rows as usize);
    let n_prompts: usize = questions.iter().map(|q| 1 + q.prepared.tokens.len() + n_rows(q)).sum();
    n_prompts.div_ceil(TOKEN_BUDGET.saturating_sub(questions.len()).max(1))
}

/// An engine with room for the largest batch.
struct Bench {
    engine: Engine,
    graphs: DecodeGraphConfig,
    /// True on a device that captures graphs.
    captures: bool,
    answers: Answers,
    clock: SystemClock,
    next_id: u64,
    /// Tokens of each sequence of the batch that has any.
    written: HashMap<SequenceId, usize>,
}

impl Bench {
    fn new(of: &Generation<'_>, questions: &[Question], answers: Answers) -> Result<Self> {
        let loaded = of.decoder.take();
        let mut decoder = loaded.map_or_else(|| of.compute.load_decoder(of.model), Ok)?;
        let max_sequences = answers.n_rows().next_power_of_two();
        let graphs = DecodeGraphConfig { max_sequences, ..DecodeGraphConfig::default() };
        // The caches have room for their padding; `has` turns them on and off.
        decoder.use_graphs(Some(graphs));
        let n_written = of.new_tokens as usize + ahead(questions) + 1;
        let blocks = |n_tokens: usize| n_tokens.div_ceil(KV_BLOCK_TOKENS);
        // A beam that is about to part from another has both their last blocks for a moment.
        let beams = if answers.beams > 1 { 2 * answers.beams as usize } else { 1 };
        let own = |q: &Question| beams * blocks(q.prepared.tokens.len() + n_written);
        let cross = |q: &Question| q.prepared.cross.first().map_or(0, |cross| blocks(cross.n_rows as usize));
        let captures = matches!(of.compute, Compute::Cuda(_));
        let config = EngineConfig {
            // As much as the batch takes: what a peer, too, holds of it.
            kv: KvBudget::Blocks {
                self_attention: questions.iter().map(own).sum(),
                cross_attention: questions.iter().map(cross).sum(),
                host: 0,
            },
            token_budget: TOKEN_BUDGET.max(answers.n_rows()),
            max_sequences: answers.n_rows(),
            max_waiting: answers.batch,
            // Else decoding alone between prompts puts the first sequences farther ahead than [`ahead`] says.
            decode_share: if of.from == Begin::FirstToken { 0 } else { EngineConfig::default().decode_share },
            pipelining: if captures { Pipelining::On } else { Pipelining::Off },
            // Every request is computed whole, as the other side does.
            prefix_cache: PrefixCache::Off,
            ..EngineConfig::default()
        };
        let mut engine = Engine::new(decoder, of.model.tokenizer().clone(), config)?;
        engine.use_graphs(None);
        Ok(Self {
            engine,
            graphs,
            captures,
            answers,
            clock: SystemClock,
            next_id: 0,
            written: HashMap::new(),
        })
    }

    /// Steps are submitted in this way from now on; `false` if the device has no such way, and nothing is timed of it.
    fn has(&mut self, mode: Mode) -> bool {
        self.engine.use_graphs((mode == Mode::Graphs).then_some(self.graphs));
        mode == Mode::Eager || self.captures
    }

    /// Answers to all at once, from their arrival to their end.
    fn whole(&mut self, questions: &[Question], new_tokens: u32) -> Result<Done> {
        let start = Instant::now();
        self.arrive(questions, new_tokens)?;
        while !self.engine.is_idle() {
            self.step()?;
        }
        Ok(Done { took: start.elapsed(), n_tokens: self.n_written() })
    }

    /// From arrival to the first token of each: what is counted are tokens of prompts.
    fn first(&mut self, questions: &[Question]) -> Result<Done> {
        let start = Instant::now();
        self.arrive(questions, 2)?;
        self.first_tokens(questions.len())?;
        let took = start.elapsed();
        self.abort()?;
        Ok(Done { took, n_tokens: questions.iter().map(|q| q.prepared.tokens.len()).sum() })
    }

    /// Tokens after the first, from when each has its first. A sequence whose prompt was read early is ahead of the
    /// others, and goes on until they are done: every step that counts has the whole batch in it.
    fn after_first(&mut self, questions: &[Question], new_tokens: u32) -> Result<Done> {
        ensure!(new_tokens > 1, "--new-tokens is {new_tokens}, a rate after the first token takes 2 or more");
        self.arrive(questions, new_tokens + u32::try_from(ahead(questions))? + 1)?;
        self.first_tokens(questions.len())?;
        let (start, before) = (Instant::now(), self.n_written());
        let wanted = before + questions.len() * (new_tokens as usize - 1);
        while self.n_written() < wanted {
            self.step()?;
        }
        let done = Done { took: start.elapsed(), n_tokens: self.n_written() - before };
        self.abort()?;
        Ok(done)
    }

    fn arrive(&mut self, questions: &[Question], max_tokens: u32) -> Result<()> {
        let now = Instant::now();
        self.written.clear();
        for question in questions {
            let arrival = self.arrival(question, max_tokens, now);
            let outputs = self.engine.handle(Event::Add(Box::new(arrival)), now);
            ensure!(outputs.is_empty(), "the engine refused: {outputs:?}");
            let output = question.output.clone();
            self.engine.handle(Event::ItemReady { key: output.item().key, output }, now);
        }
        Ok(())
    }

    fn arrival(&mut self, question: &Question, max_tokens: u32, now: Instant) -> SequenceRequest {
        self.next_id += 1;
        SequenceRequest {
            ids: vec![SequenceId(self.next_id)],
            prepared: question.prepared.clone(),
            encoder_tokens: [].into(),
            items: vec![question.output.item().clone()],
            sampling: self.answers.sampling(max_tokens),
            constraint: None,
            priority: 0,
            adapter: None,
            tenant: TenantId::SHARED,
            deadline: now + Duration::from_secs(3600),
            resumed: None,
        }
    }

    fn step(&mut self) -> Result<()> {
        ensure!(self.engine.next_step() == NextStep::Now, "the engine stopped before the end");
        for output in self.engine.step(&self.clock) {
            match output {
                Output::Delta(id, delta) if !delta.token_ids.is_empty() => {
                    *self.written.entry(id).or_default() += delta.token_ids.len();
                }
                Output::Failed(_, failure) => anyhow::bail!("a sequence failed: {failure}"),
                _ => {}
            }
        }
        Ok(())
    }

    fn first_tokens(&mut self, batch: usize) -> Result<()> {
        while self.written.len() < batch {
            self.step()?;
        }
        Ok(())
    }

    fn n_written(&self) -> usize {
        self.written.values().sum()
    }

    fn abort(&mut self) -> Result<()> {
        for &id in self.written.keys() {
            self.engine.handle(Event::Abort(id), Instant::now());
        }
        // A step may be under way.
        if !self.engine.is_idle() {
            self.engine.step(&self.clock);
        }
        ensure!(self.engine.is_idle(), "a sequence was not aborted");
        Ok(())
    }
}
