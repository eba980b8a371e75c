//! Stages alone, beside neighbours that compute or copy memory, and with a thread too many on their own cores.
//!
//! All conditions take turns, round after round, so that a machine that slows down slows each of them.

use super::encode_stage::EncodeStage;
use super::error::ProfileError;
use super::grid::{Arrays, Grid, StepCase};
use super::items::{Sample, item_file, read};
use super::neighbour::{Neighbours, OtherCores, Pass, copies, sums};
use super::progress::{Progress, micros};
use super::settings::{Extent, ProfileSettings};
use crate::curves::{Interference, Spread, Stage, StageInterference};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use triptych_core::Modality;
use triptych_models::compute::{Compute, ComputeConfig};
use triptych_models::decoder::Decoder;
use triptych_models::preprocess::EncoderInput;
use triptych_models::{Model, ModelSource};

/// Fewest repeats of a stage in a round.
const FEWEST: usize = 3;
/// Loss of the copying neighbour below which it says nothing about who else copies.
const LEAST_LOSS: f64 = 0.02;

/// The measured worker.
pub struct Worker<'a> {
    /// The model.
    pub model: &'a Model,
    /// Its encoders, and their items: of several towers one each; none for a model without an encoder.
    pub encoders: &'a mut [EncodeStage],
    /// Its decoder, with caches that hold the grid.
    pub decoder: &'a mut dyn Decoder,
    /// The decoder's steps.
    pub grid: &'a Grid,
}

/// A stage's work, once.
type Work<'a> = Box<dyn FnMut() -> Result<(), ProfileError> + 'a>;

/// Load beside the stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Condition {
    Alone,
    Compute,
    Copies,
    Shared,
}

const CONDITIONS: [Condition; 4] =
    [Condition::Alone, Condition::Compute, Condition::Copies, Condition::Shared];

/// Samples of one stage.
#[derive(Clone, Debug, Default)]
struct Samples {
    us: [Vec<f64>; CONDITIONS.len()],
    /// Passes a second of the copying neighbour meanwhile.
    copies: Vec<f64>,
}

/// Rates of the copying neighbour while nothing else runs, and beside further copies.
#[derive(Clone, Debug, Default)]
struct CopyRates {
    alone: Vec<f64>,
    beside_copies: Vec<f64>,
}

/// Measures every stage under every condition.
pub fn measure(
    worker: Worker<'_>,
    settings: &ProfileSettings,
    progress: Progress<'_>,
) -> Result<Interference, ProfileError> {
    let threads = match settings.compute.threads {
        0 => super::host::threads(0, &[]),
        n => n,
    };
    let (n_rounds, slice) = match settings.extent {
        Extent::Quick => (1, Duration::from_millis(5)),
        Extent::Full => (3, Duration::from_millis(250)),
    };
    let crowd = Crowd::new(&worker, settings.compute, OtherCores::beside(threads));
    let mut stages = stages(worker)?;
    let mut found = vec![Samples::default(); stages.len()];
    let mut rates = CopyRates::default();
    for round in 0..n_rounds {
        for (i, condition) in CONDITIONS.into_iter().enumerate() {
            progress("neighbours", round * CONDITIONS.len() + i, n_rounds * CONDITIONS.len());
            let Some(neighbours) = crowd.start(condition) else { continue };
            if condition == Condition::Copies {
                rates.record(&neighbours, slice)?;
            }
            for ((_, work), found) in stages.iter_mut().zip(&mut found) {
                let rate = neighbours.rate_during(|| repeat(work, slice, &mut found.us[i]))?;
                if condition == Condition::Copies {
                    found.copies.push(rate);
                }
            }
        }
    }
    progress("neighbours", 1, 1);
    let mut measured = Interference { neighbour_cores: crowd.cores.n, ..Interference::default() };
    for ((stage, _), samples) in stages.iter().zip(found) {
        // An item is read by one thread.
        let threads = if matches!(stage, Stage::Preprocess(_)) { 1 } else { threads };
        measured.set(*stage, samples.times(threads, &rates));
    }
    Ok(measured)
}

/// Repeats work for the length of a slice.
fn repeat(work: &mut Work<'_>, slice: Duration, us: &mut Vec<f64>) -> Result<(), ProfileError> {
    let began = Instant::now();
    for i in 0.. {
        if i >= FEWEST && began.elapsed() >= slice {
            break;
        }
        let start = Instant::now();
        work()?;
        us.push(micros(start.elapsed()));
    }
    Ok(())
}

impl CopyRates {
    fn record(&mut self, neighbours: &Neighbours, slice: Duration) -> Result<(), ProfileError> {
        // Nobody sends: it is a wait for the slice to end.
        let (_sender, nothing) = mpsc::channel::<()>();
        let idle = || {
            let _ = nothing.recv_timeout(slice);
            Ok::<_, ProfileError>(())
        };
        self.alone.push(neighbours.rate_during(idle)?);
        let mut work: Work<'_> = copies();
        let mut ignored = Vec::new();
        self.beside_copies.push(neighbours.rate_during(|| repeat(&mut work, slice, &mut ignored))?);
        Ok(())
    }

    /// Loss of the copying neighbour beside a stage over its loss beside further copies.
    fn traffic(&self, beside_stage: &[f64]) -> f64 {
        let median = |rates: &[f64]| Spread::of(rates.to_vec()).p50_us;
        let alone = median(&self.alone);
        let loss = |rate: f64| 1.0 - rate / alone.max(1e-9);
        let most = loss(median(&self.beside_copies));
        if beside_stage.is_empty() || most < LEAST_LOSS {
            return 0.0;
        }
        (loss(median(beside_stage)) / most).clamp(0.0, 1.0)
    }
}

impl Samples {
    fn times(self, threads: usize, rates: &CopyRates) -> StageInterference {
        let traffic = rates.traffic(&self.copies);
        let [alone, compute, copies, shared] = self.us;
        let median = |us: Vec<f64>| (!us.is_empty()).then(|| Spread::of(us).p50_us.max(1e-3));
        let alone_us = median(alone).unwrap_or(1e-3);
        StageInterference {
            alone_us,
            beside_compute_us: median(compute),
            beside_copies_us: median(copies),
            // Where the thread could not run nothing is known beyond its share.
            shared_us: median(shared).unwrap_or(alone_us),
            threads,
            traffic,
        }
    }
}

/// Neighbours that can be started.
struct Crowd {
    cores: OtherCores,
    /// Model, kind and a middling item, with which a neighbour computes, in the first tower; without an encoder it adds numbers.
    encode: Option<(ModelSource, Modality, Arc<EncoderInput>)>,
    compute: ComputeConfig,
}

impl Crowd {
    fn new(worker: &Worker<'_>, compute: ComputeConfig, cores: OtherCores) -> Self {
        let encode = worker.encoders.first().and_then(|first| {
            let input = Arc::new(middle(&first.samples)?.input.clone());
            Some((worker.model.source().clone(), first.modality, input))
        });
        Self { encode, compute: ComputeConfig { threads: cores.n.max(1), ..compute }, cores }
    }

    /// Neighbours of a condition; `None`: there is no core for them.
    fn start(&self, condition: Condition) -> Option<Neighbours> {
        type Maker = Box<dyn FnOnce() -> Result<Pass, ProfileError> + Send>;
        let many = |n: usize, work: fn() -> Pass| -> Vec<Maker> {
            (0..n).map(|_| Box::new(move || Ok(work())) as Maker).collect()
        };
        let others = Some(&self.cores).filter(|cores| cores.n > 0);
        match (condition, others, self.encode.clone()) {
            (Condition::Alone, ..) => Neighbours::start(None, many(0, sums)),
            (Condition::Shared, ..) => Neighbours::start(None, many(self.cores.n_crowding(), sums)),
            (_, None, _) => None,
            (Condition::Copies, Some(cores), _) => Neighbours::start(Some(cores), many(cores.n, copies)),
            (Condition::Compute, Some(cores), None) => Neighbours::start(Some(cores), many(cores.n, sums)),
            (Condition::Compute, Some(cores), Some((source, modality, input))) => {
                let config = self.compute;
                let make: Maker = Box::new(move || {
                    let model = Model::open(&source)?;
                    let mut encoder = Compute::new(config)?.load_encoder(&model, modality)?;
                    Ok(Box::new(move || Ok(encoder.encode(&[&*input]).map(drop)?)))
                });
                Neighbours::start(Some(cores), vec![make])
            }
        }
    }
}

fn middle(samples: &[Sample]) -> Option<&Sample> {
    samples.get(samples.len() / 2)
}

/// The stages of a worker: a middling item of each tower, the longest chunk of a prompt's start, and steps of about eight sequences.
fn stages(worker: Worker<'_>) -> Result<Vec<(Stage, Work<'_>)>, ProfileError> {
    let Worker { encoders, decoder, grid, .. } = worker;
    let mut stages: Vec<(Stage, Work<'_>)> = Vec::new();
    for EncodeStage { modality, encoder, samples, preprocess, id, .. } in encoders {
        let Some(sample) = middle(samples) else { continue };
        let (modality, preprocess) = (*modality, Arc::clone(preprocess));
        let file = item_file(modality, sample.side);
        let source = move |source| ProfileError::Item { what: modality.to_string(), source };
        let once = move || read(preprocess.as_ref(), modality, &file).map(drop).map_err(source);
        stages.push((Stage::Preprocess(id.tower), Box::new(once)));
        let once = move || Ok(encoder.encode(&[&sample.input]).map(drop)?);
        stages.push((Stage::Encode(id.tower), Box::new(once)));
    }
    let info = decoder.info();
    let decoder = std::cell::RefCell::new(decoder);
    let decoder = std::rc::Rc::new(decoder);
    let of = |pick: &dyn Fn(&&StepCase) -> bool, size: fn(&StepCase) -> u32| {
        grid.cases.iter().filter(pick).max_by_key(|case| size(case))
    };
    let plain = |case: &&StepCase| case.projected == 0;
    let prefill =
        of(&|case| plain(case) && case.decodes == 0 && case.before == 0, |case| case.prefill.min(256));
    let decode = of(&|case| plain(case) && case.prefill == 0, |case| case.decodes.min(8));
    for (stage, case) in [(Stage::Prefill, prefill), (Stage::Decode, decode)] {
        let Some(case) = case else { continue };
        let (arrays, info) = (Arrays::new(&info, case, grid.cross_rows), info);
        let decoder = std::rc::Rc::clone(&decoder);
        let once = move || {
            let groups = arrays.groups();
            Ok(decoder.borrow_mut().forward(&arrays.input(&info, &groups)).map(drop)?)
        };
        stages.push((stage, Box::new(once)));
    }
    Ok(stages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traffic_is_the_loss_of_copies_beside_a_stage_over_that_beside_copies() {
        let rates = CopyRates { alone: vec![100.0], beside_copies: vec![60.0] };
        assert!((rates.traffic(&[80.0]) - 0.5).abs() < 1e-9);
        assert_eq!((rates.traffic(&[120.0]), rates.traffic(&[10.0])), (0.0, 1.0));
        let idle = CopyRates { alone: vec![100.0], beside_copies: vec![99.0] };
        assert_eq!((idle.traffic(&[50.0]), rates.traffic(&[])), (0.0, 0.0));
    }
}
