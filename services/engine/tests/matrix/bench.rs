//! An engine over a golden model, and everything it emitted.

use crate::case::{Case, Request};
use std::collections::BTreeMap;
use triptych_core::ContentKey;
use triptych_core::clock::SystemClock;
use triptych_core::sampling::FinishReason;
use triptych_cuda_standin::Standin;
use triptych_engine::{
    Delta, Engine, EngineConfig, Event, Finished, KvBudget, NextStep, Output, Pipelining, PrefixCache,
    RowUse, SequenceRequest, StateBudget, Stats,
};
use triptych_models::compute::{Compute, ComputeConfig, Device};
use triptych_models::decoder::{DecodeGraphConfig, Decoder, DecoderInfo};

/// One thread of our own kernels.
pub fn cpu() -> Compute {
    Compute::new(ComputeConfig { threads: 1, ..ComputeConfig::default() }).expect("a back end")
}

/// The plain back end.
pub fn reference() -> Compute {
    let config = ComputeConfig { device: Device::Reference, threads: 1, ..ComputeConfig::default() };
    Compute::new(config).expect("a back end")
}

/// CUDA on a device of the stand-in that no other test uses.
pub fn cuda() -> Compute {
    let device = Device::Cuda(Standin::fast().new_device(3));
    Compute::new(ComputeConfig { device, ..ComputeConfig::default() }).expect("a device of the stand-in")
}

/// Room for everything at once; a test narrows what it is about.
pub fn roomy() -> EngineConfig {
    EngineConfig {
        kv: KvBudget::Blocks { self_attention: 256, cross_attention: 256, host: 0 },
        states: StateBudget::Slots(80),
        token_budget: 1024,
        max_sequences: 64,
        max_waiting: 1024,
        prefix_cache: PrefixCache::Off,
        ..EngineConfig::default()
    }
}

/// The same with each step planned while the one before it computes, as PD workers run on a device.
pub fn ahead() -> EngineConfig {
    EngineConfig { pipelining: Pipelining::On, ..roomy() }
}

/// Output of one completion.
#[derive(Default)]
pub struct Seen {
    pub deltas: Vec<Delta>,
    pub finished: Option<Finished>,
}

impl Seen {
    pub fn tokens(&self) -> Vec<u32> {
        self.deltas.iter().flat_map(|d| d.token_ids.clone()).collect()
    }

    pub fn finished(&self) -> &Finished {
        self.finished.as_ref().expect("it ended")
    }
}

pub struct Bench<'a> {
    case: &'a Case,
    engine: Engine,
    pub info: DecoderInfo,
    pub seen: BTreeMap<u64, Seen>,
    /// The most of each count at any step.
    pub most_cross_used: usize,
    /// Items of each sequence, which it may ask for again.
    keys: BTreeMap<u64, Vec<ContentKey>>,
    /// Sequences that read their rows, and that asked for them again.
    pub n_read: usize,
    pub n_asked: usize,
}

impl<'a> Bench<'a> {
    pub fn new(case: &'a Case, config: EngineConfig) -> Self {
        Self::on(&cpu(), case, config)
    }

    pub fn on(compute: &Compute, case: &'a Case, config: EngineConfig) -> Self {
        let mut decoder = compute.load_decoder(&case.model).unwrap_or_else(|e| panic!("{}: {e}", case.name));
        // On CUDA alone.
        decoder.use_graphs(Some(DecodeGraphConfig::default()));
        Self::of(decoder, case, config)
    }

    /// An engine over a decoder of the case's model.
    pub fn of(decoder: Box<dyn Decoder>, case: &'a Case, config: EngineConfig) -> Self {
        let info = decoder.info();
        let engine = Engine::new(decoder, case.model.tokenizer().clone(), config).expect("an engine");
        Self {
            case,
            engine,
            info,
            seen: BTreeMap::new(),
            most_cross_used: 0,
            keys: BTreeMap::new(),
            n_read: 0,
            n_asked: 0,
        }
    }

    /// Adds a request with all its items loaded.
    pub fn add(&mut self, arrival: SequenceRequest) {
        let keys: Vec<_> = arrival.items.iter().map(|i| i.key).collect();
        self.keys.extend(arrival.ids.iter().map(|id| (id.0, keys.clone())));
        self.handle(Event::Add(Box::new(arrival)));
        self.deliver(&keys);
    }

    fn deliver(&mut self, keys: &[ContentKey]) {
        for output in self.case.outputs.iter().filter(|o| keys.contains(&o.item().key)) {
            self.handle(Event::ItemReady { key: output.item().key, output: output.clone() });
        }
    }

    fn handle(&mut self, event: Event) {
        let outputs = self.engine.handle(event, std::time::Instant::now());
        self.note(outputs);
    }

    pub fn step(&mut self) {
        let outputs = self.engine.step(&SystemClock);
        self.note(outputs);
        self.most_cross_used = self.most_cross_used.max(self.engine.stats().cross_used);
    }

    /// Steps until everything is emitted; then nothing may be held.
    pub fn settle(&mut self) -> Stats {
        self.settle_with(|_| {})
    }

    /// The same, with a look at the engine after each step.
    pub fn settle_with(&mut self, mut look: impl FnMut(Stats)) -> Stats {
        for _ in 0..100_000 {
            if self.engine.next_step() != NextStep::Now {
                break;
            }
            self.step();
            look(self.engine.stats());
        }
        let stats = self.engine.stats();
        let held = (stats.running, stats.waiting, stats.self_used, stats.host_used, stats.cross_used);
        assert!(self.engine.is_idle() && held == (0, 0, 0, 0, 0), "{}: {stats:?}", self.case.name);
        stats
    }

    /// Adds a request and runs it to its end; the tokens of its first completion.
    pub fn alone(&mut self, arrival: SequenceRequest) -> Vec<u32> {
        let id = arrival.ids[0].0;
        self.add(arrival);
        self.settle();
        self.seen[&id].tokens()
    }

    /// Fails unless completion `id` is the reference's greedy completion to `request`.
    pub fn assert_golden(&self, id: u64, request: &Request) {
        let (seen, (tokens, ended)) = (&self.seen[&id], request.completion());
        assert_eq!(seen.tokens(), tokens, "{} request {id}", self.case.name);
        let reason = if ended { FinishReason::Stop } else { FinishReason::Length };
        let finished = seen.finished();
        assert_eq!(
            (finished.reason, finished.n_generated),
            (reason, request.greedy.len()),
            "{}",
            self.case.name
        );
    }

    fn note(&mut self, outputs: Vec<Output>) {
        for output in outputs {
            let seen = self.seen.entry(output.id().0).or_default();
            match output {
                Output::Delta(_, delta) => seen.deltas.push(delta),
                Output::Finished(_, finished) => seen.finished = Some(finished),
                Output::Failed(id, failure) => panic!("{} {id:?}: {failure}", self.case.name),
                Output::Aligned(id, _) => panic!("{} {id:?}: no alignment was requested", self.case.name),
                Output::Rows(_, RowUse::Read) => self.n_read += 1,
                Output::Rows(id, RowUse::Needed) => {
                    self.n_asked += 1;
                    let keys = self.keys[&id.0].clone();
                    self.deliver(&keys);
                }
            }
        }
    }
}
