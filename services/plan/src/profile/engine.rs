//! Overhead of an engine step beside the decoder's forward: scheduling, sampling, detokenization. Measured in a real
//! engine whose decoder is timed.

use super::error::ProfileError;
use super::progress::{Progress, micros};
use super::settings::{Extent, ProfileSettings};
use crate::curves::{PipeliningSaves, Spread};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use triptych_core::clock::SystemClock;
use triptych_core::item::from_f32;
use triptych_core::prompt::{Prompt, TextOrTokens};
use triptych_core::sampling::SamplingParams;
use triptych_core::{DType, EncodedItem, EncodedRows, EncoderOutput, TenantId};
use triptych_engine::{
    Engine, EngineConfig, Event, KvBudget, Output, Pipelining, PrefixCache, SequenceId, SequenceRequest,
};
use triptych_models::decoder::{AlignInput, Decoder, DecoderInfo, StepInput};
use triptych_models::sampling::Choices;
use triptych_models::{Model, ModelError};

/// Overhead of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Overhead {
    line: Line,
    /// From the end of a step to the start of the next one, while outputs go to another thread, which they wake.
    pub between_us: f64,
    /// Medians of whole steps of one sequence and of many, in microseconds.
    steps_us: [f64; 2],
}

impl Overhead {
    /// Overhead in microseconds.
    pub fn of(&self, n_sequences: u32) -> f64 {
        self.line.fixed_us + self.line.each_us * f64::from(n_sequences)
    }
}

/// A straight line over the sequences that choose a token in the step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Line {
    fixed_us: f64,
    each_us: f64,
}

impl Line {
    /// The line through two measured places; never a negative cost.
    fn through((n, few): (usize, f64), (m, many): (usize, f64)) -> Self {
        let each_us = ((many - few) / (m.saturating_sub(n)).max(1) as f64).max(0.0);
        Self { fixed_us: (few - each_us * n as f64).max(0.0), each_us }
    }
}

/// Runs of an engine with one sequence, and with many.
pub struct EngineRun<'a> {
    pub model: &'a Model,
    /// Outputs of the item that each sequence has, if there are any.
    pub outputs: Vec<EncoderOutput>,
    pub settings: &'a ProfileSettings,
    pub progress: Progress<'a>,
}

impl EngineRun<'_> {
    /// Overhead of steps that are not pipelined.
    pub fn overhead(&self, decoder: Box<dyn Decoder>) -> Result<Overhead, ProfileError> {
        let (many, n_tokens) = self.extent();
        let forward_ns = Arc::new(AtomicU64::new(0));
        let decoder = Box::new(Timed { decoder, forward_ns: Arc::clone(&forward_ns) });
        let mut run = self.run(decoder, Pipelining::Off)?;
        let progress = self.progress;
        progress("engine", 0, 2);
        let few = run.steps(1, n_tokens, &forward_ns)?;
        progress("engine", 1, 2);
        let all = run.steps(many, n_tokens, &forward_ns)?;
        progress("engine", 2, 2);
        Ok(Overhead {
            line: Line::through((1, few.beside_us), (many, all.beside_us)),
            between_us: Spread::of(run.between).p50_us,
            steps_us: [few.whole_us, all.whole_us],
        })
    }

    /// Time that pipelining saves of the same steps.
    pub fn pipelining_saves(
        &self,
        decoder: Box<dyn Decoder>,
        overhead: &Overhead,
    ) -> Result<PipeliningSaves, ProfileError> {
        let (many, n_tokens) = self.extent();
        let mut run = self.run(decoder, Pipelining::On)?;
        let progress = self.progress;
        progress("pipelined engine", 0, 2);
        let few = run.pipelined_steps(1, n_tokens)?;
        progress("pipelined engine", 1, 2);
        let all = run.pipelined_steps(many, n_tokens)?;
        progress("pipelined engine", 2, 2);
        Ok(saves(many, overhead.steps_us, [few, all]))
    }

    /// Sequences of the run with many, and the tokens that each writes.
    fn extent(&self) -> (usize, u32) {
        match self.settings.extent {
            Extent::Quick => (4, 8),
            Extent::Full => (32, 48),
        }
    }

    fn run(&self, decoder: Box<dyn Decoder>, pipelining: Pipelining) -> Result<Run<'_>, ProfileError> {
        let (many, _) = self.extent();
        let half = self.settings.kv_bytes / 2;
        let config = EngineConfig {
            kv: KvBudget::Bytes { self_attention: half, cross_attention: half, host: 0 },
            token_budget: 512,
            max_sequences: many,
            max_waiting: many,
            prefix_cache: PrefixCache::Off,
            pipelining,
            ..EngineConfig::default()
        };
        let engine = Engine::new(decoder, self.model.tokenizer().clone(), config)?;
        Ok(Run { engine, model: self.model, outputs: &self.outputs, between: Vec::new(), next_id: 0 })
    }
}

/// Times of steps of one sequence and of many, less times from a step to the next one where they are pipelined.
fn saves(many: usize, steps_us: [f64; 2], pipelined_us: [f64; 2]) -> PipeliningSaves {
    let [one, all] = [0, 1].map(|i| steps_us[i] - pipelined_us[i]);
    let Line { fixed_us, each_us } = Line::through((1, one), (many, all));
    PipeliningSaves { fixed_us, each_us }
}

/// Rows of zeros for each item, for a decoder that must have some.
pub fn sealed(items: Vec<EncodedItem>) -> Result<Vec<EncoderOutput>, ProfileError> {
    let sealed = |item: EncodedItem| {
        let rows = vec![0.0; item.n_tokens as usize * item.hidden as usize];
        EncoderOutput::seal(item, from_f32(&rows, DType::F32))
            .map_err(|e| ProfileError::Sequence(e.to_string()))
    };
    items.into_iter().map(sealed).collect()
}

/// Medians of steps, in microseconds.
struct StepTimes {
    /// Whole steps.
    whole_us: f64,
    /// Their time beside the forward.
    beside_us: f64,
}

struct Run<'a> {
    engine: Engine,
    model: &'a Model,
    /// Outputs of the item that each sequence must have; none: it needs no item.
    outputs: &'a [EncoderOutput],
    /// Times from a step to the next one, in microseconds.
    between: Vec<f64>,
    next_id: u64,
}

impl Run<'_> {
    /// Steps in which `n` sequences write `n_tokens` each.
    fn steps(&mut self, n: usize, n_tokens: u32, forward_ns: &AtomicU64) -> Result<StepTimes, ProfileError> {
        self.arrive(n, n_tokens)?;
        let (mut beside, mut whole) = (Vec::new(), Vec::new());
        let reader = Reader::start();
        let mut ended: Option<Instant> = None;
        while !self.engine.is_idle() {
            forward_ns.store(0, Ordering::Relaxed);
            let start = Instant::now();
            self.between.extend(ended.map(|ended| micros(start - ended)));
            let outputs = self.engine.step(&SystemClock);
            ended = Some(Instant::now());
            let all = micros(start.elapsed());
            refused(&outputs)?;
            reader.give(outputs);
            let forward = forward_ns.load(Ordering::Relaxed) as f64 / 1e3;
            if forward == 0.0 {
                return Err(ProfileError::Sequence("a step with sequences computed nothing".into()));
            }
            beside.push((all - forward).max(0.0));
            whole.push(all);
        }
        Ok(StepTimes { whole_us: Spread::of(whole).p50_us, beside_us: Spread::of(beside).p50_us })
    }

    /// Median time from a pipelined step's start to the next one's, in microseconds, while `n` sequences write `n_tokens` each.
    fn pipelined_steps(&mut self, n: usize, n_tokens: u32) -> Result<f64, ProfileError> {
        self.arrive(n, n_tokens)?;
        let mut apart = Vec::new();
        let reader = Reader::start();
        let mut began: Option<Instant> = None;
        while !self.engine.is_idle() {
            let start = Instant::now();
            apart.extend(began.map(|began| micros(start - began)));
            began = Some(start);
            let outputs = self.engine.step(&SystemClock);
            refused(&outputs)?;
            reader.give(outputs);
        }
        Ok(Spread::of(apart).p50_us)
    }

    /// Sequences arrive that write `n_tokens` each.
    fn arrive(&mut self, n: usize, n_tokens: u32) -> Result<(), ProfileError> {
        let now = Instant::now();
        for _ in 0..n {
            let arrival = self.arrival(n_tokens, now)?;
            refused(&self.engine.handle(Event::Add(Box::new(arrival)), now))?;
            for output in self.outputs {
                let ready = Event::ItemReady { key: output.item().key, output: output.clone() };
                refused(&self.engine.handle(ready, now))?;
            }
        }
        Ok(())
    }

    fn arrival(&mut self, n_tokens: u32, now: Instant) -> Result<SequenceRequest, ProfileError> {
        let failed = |e: &dyn std::fmt::Display| ProfileError::Sequence(e.to_string());
        let items: Vec<EncodedItem> = self.outputs.iter().map(|o| o.item().clone()).collect();
        // The family lays out its own start.
        let tokens = if items.is_empty() { (10..26).collect() } else { Vec::new() };
        let prompt = Prompt::Singleton(TextOrTokens::Tokens(tokens));
        let prepared = self.model.prompts().prepare(&prompt, &items).map_err(|e| failed(&e))?;
        let prepared = prepared.into_iter().next().ok_or_else(|| failed(&"a prompt became no sequence"))?;
        let sampling = SamplingParams {
            temperature: 0.0,
            max_tokens: Some(n_tokens),
            ignore_eos: true,
            ..SamplingParams::default()
        };
        self.next_id += 1;
        Ok(SequenceRequest {
            ids: vec![SequenceId(self.next_id)],
            prepared,
            encoder_tokens: [].into(),
            items,
            sampling,
            constraint: None,
            priority: 0,
            adapter: None,
            tenant: TenantId::SHARED,
            deadline: now + Duration::from_secs(3600),
            resumed: None,
        })
    }
}

/// A thread that reads outputs, as a worker's streams do.
struct Reader(UnboundedSender<Output>);

impl Reader {
    fn start() -> Self {
        let (outputs, mut given) = unbounded_channel();
        // It ends with the sender.
        std::thread::spawn(move || while given.blocking_recv().is_some() {});
        Self(outputs)
    }

    fn give(&self, outputs: Vec<Output>) {
        for output in outputs {
            // The reader lives as long as this.
            let _ = self.0.send(output);
        }
    }
}

fn refused(outputs: &[Output]) -> Result<(), ProfileError> {
    outputs.iter().try_for_each(|output| match output {
        Output::Failed(_, failure) => Err(ProfileError::Sequence(failure.to_string())),
        _ => Ok(()),
    })
}

/// Adds up how long the decoder computes.
struct Timed {
    decoder: Box<dyn Decoder>,
    forward_ns: Arc<AtomicU64>,
}

impl Timed {
    fn time<T>(&mut self, work: impl FnOnce(&mut dyn Decoder) -> T) -> T {
        let start = Instant::now();
        let done = work(self.decoder.as_mut());
        let ns = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.forward_ns.fetch_add(ns, Ordering::Relaxed);
        done
    }
}

impl Decoder for Timed {
    fn info(&self) -> DecoderInfo {
        self.decoder.info()
    }

    fn allocate_kv(&mut self, self_blocks: usize, cross_blocks: usize) -> Result<(), ModelError> {
        self.decoder.allocate_kv(self_blocks, cross_blocks)
    }

    fn allocate_host(&mut self, n_blocks: usize) -> Result<(), ModelError> {
        self.decoder.allocate_host(n_blocks)
    }

    fn allocate_states(&mut self, n_slots: usize) -> Result<(), ModelError> {
        self.decoder.allocate_states(n_slots)
    }

    fn copy_states(&mut self, pairs: &[(u32, u32)]) -> Result<(), ModelError> {
        self.decoder.copy_states(pairs)
    }

    fn reset_states(&mut self, slots: &[u32]) -> Result<(), ModelError> {
        self.decoder.reset_states(slots)
    }

    fn project_cross(&mut self, rows: &[EncodedRows<'_>], slots: &[u32]) -> Result<(), ModelError> {
        self.time(|decoder| decoder.project_cross(rows, slots))
    }

    fn forward(&mut self, step: &StepInput<'_>) -> Result<Choices, ModelError> {
        self.time(|decoder| decoder.forward(step))
    }

    fn begin_align(&mut self, input: &AlignInput<'_>) -> Result<(), ModelError> {
        self.decoder.begin_align(input)
    }

    fn align_layer(&mut self) -> Result<Option<Vec<f32>>, ModelError> {
        self.decoder.align_layer()
    }

    fn copy_blocks(&mut self, pairs: &[(u32, u32)]) -> Result<(), ModelError> {
        self.decoder.copy_blocks(pairs)
    }

    fn swap_out(&mut self, pairs: &[(u32, u32)]) -> Result<(), ModelError> {
        self.decoder.swap_out(pairs)
    }

    fn swap_in(&mut self, pairs: &[(u32, u32)]) -> Result<(), ModelError> {
        self.decoder.swap_in(pairs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_goes_through_both_places_and_is_never_negative() {
        let of = |line, n| Overhead { line, ..Overhead::default() }.of(n);
        let line = Line::through((1, 30.0), (11, 130.0));
        assert_eq!((of(line, 1), of(line, 11), of(line, 0)), (30.0, 130.0, 20.0));
        assert_eq!(of(Line::through((1, 30.0), (11, 10.0)), 100), 30.0);
    }

    #[test]
    fn pipelining_saves_what_a_step_takes_longer_than_the_next_one_is_away() {
        let found = saves(11, [300.0, 900.0], [270.0, 770.0]);
        assert_eq!(found, PipeliningSaves { fixed_us: 20.0, each_us: 10.0 });
        assert_eq!(
            saves(11, [300.0, 900.0], [310.0, 950.0]),
            PipeliningSaves::default(),
            "no less than it takes"
        );
    }
}
