//! Measures [`CostCurves`](crate::curves::CostCurves) with the components that serve: the model's own preprocessor and
//! encoder, the decoder under chosen steps, the engine around it.
//!
//! It measures compute only; publishing, loading and the proxy need a network, and the caller adds them. Every
//! point of a curve is measured once a round, all points in turn, so that a machine which slows down for a second slows
//! all of them a little and none of them wholly.

pub mod api;
mod busy;
mod colocation;
mod encode;
mod engine;
mod error;
mod grid;
pub mod host;
mod interference;
mod items;
pub mod markdown;
mod neighbour;
mod progress;
mod prompt;
mod rounds;
mod settings;
mod step;
pub mod store;

pub use busy::{Busy, BusyWatch};
pub use error::ProfileError;
pub use progress::Progress;
pub use rounds::Rounds;
pub use settings::{Extent, ProfileSettings};

use crate::curves::{
    ColocationSlowdown, EncodePoint, Interference, ItemPoint, KvSizes, Point, PromptSpec, StepPoint,
};
use triptych_core::Modality;
use triptych_models::Model;
use triptych_models::compute::Compute;
use triptych_models::encoder::Encoder;

/// Compute curves of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Profiled {
    /// Output tokens of items by size.
    pub items: Vec<ItemPoint>,
    /// Preprocessing, by output tokens.
    pub preprocess: Vec<Point>,
    /// Forwards of the encoder.
    pub encode: Vec<EncodePoint>,
    /// Parts of a forward, after each of which an engine on the same cores may run.
    pub encode_parts: usize,
    /// Engine steps.
    pub step: Vec<StepPoint>,
    /// Sizes of the KV cache.
    pub kv: KvSizes,
    /// Template tokens of a prompt.
    pub prompt: PromptSpec,
    /// Encoder and engine on the same threads.
    pub colocated: ColocationSlowdown,
    /// Stages beside neighbours.
    pub interference: Interference,
    /// From the end of an engine step to the start of the next one, in microseconds.
    pub between_steps_us: f64,
    /// Width of the encoder's rows; without an encoder the decoder's.
    pub hidden: usize,
}

/// The encoder of a model and what is measured of it.
struct EncodeStage {
    encoder: Box<dyn Encoder>,
    samples: Vec<items::Sample>,
    points: Vec<EncodePoint>,
    n_parts: usize,
}

impl EncodeStage {
    fn measure(
        model: &Model,
        (modality, compute): (Modality, &Compute),
        settings: &ProfileSettings,
        progress: Progress<'_>,
    ) -> Result<Self, ProfileError> {
        let samples = items::samples(model, modality, settings, progress)?;
        let mut encoder = compute.load_encoder(model, modality)?;
        let points = encode::points(encoder.as_mut(), &samples, settings, progress)?;
        let n_parts = encode::n_parts(encoder.as_mut(), &samples)?;
        Ok(Self { encoder, samples, points, n_parts })
    }
}

/// Measures everything that is compute. A model without an encoder has no items and no points of one.
///
/// # Errors
/// [`ProfileError`].
pub fn measure(
    model: &Model,
    settings: &ProfileSettings,
    progress: Progress<'_>,
) -> Result<Profiled, ProfileError> {
    let towers: Vec<_> = model.towers().map(|(_, name)| name).filter(|name| !name.is_empty()).collect();
    if !towers.is_empty() {
        return Err(ProfileError::Towers { towers: towers.join(" and ") });
    }
    let compute = Compute::new(settings.compute)?;
    let mut stage = match model.modalities().first() {
        Some(&modality) => Some(EncodeStage::measure(model, (modality, &compute), settings, progress)?),
        None => None,
    };
    let samples = stage.as_mut().map(|stage| std::mem::take(&mut stage.samples)).unwrap_or_default();
    let hidden = stage.as_ref().map_or(model.spec().decoder.stack.hidden, |stage| stage.encoder.hidden());
    let mut decoder = compute.load_decoder(model)?;
    let info = decoder.info();
    let largest = samples.iter().map(|s| s.input.n_tokens as usize).max().unwrap_or(0);
    let grid = grid::Grid::new(&info, settings, largest)?;
    let forwards = step::forwards(decoder.as_mut(), &grid, settings, progress)?;
    let colocated = match &mut stage {
        Some(stage) => {
            colocation::measure(stage.encoder.as_mut(), decoder.as_mut(), &samples, &grid, settings)?
        }
        None => ColocationSlowdown::default(),
    };
    let beside = interference::Worker {
        model,
        items: model.modalities().first().map(|modality| (*modality, &samples[..])),
        encoder: stage.as_mut().map(|stage| &mut *stage.encoder as _),
        decoder: decoder.as_mut(),
        grid: &grid,
    };
    let interference = interference::measure(beside, settings, progress)?;
    let described = |sample: &items::Sample| Some(sample.described(*model.modalities().first()?, hidden));
    let prompt = prompt::layout(model, samples.first().and_then(described));
    let (encode, encode_parts) = stage.map_or((Vec::new(), 1), |stage| (stage.points, stage.n_parts));
    let overhead = engine::overhead(model, decoder, &samples, settings, progress)?;
    let added = |point: &StepPoint, n: f64| {
        let us = overhead.of(point.decodes + u32::from(point.prefill_tokens > 0));
        n + us
    };
    let step = forwards
        .into_iter()
        .map(|p| StepPoint { p50_us: added(&p, p.p50_us), p95_us: added(&p, p.p95_us), ..p })
        .collect();
    let items = samples.iter().map(items::Sample::point).collect();
    let preprocess = samples.iter().map(items::Sample::preprocess).collect();
    Ok(Profiled {
        items,
        preprocess,
        encode,
        encode_parts,
        step,
        kv: KvSizes::of(&info, model.max_cross_rows()),
        prompt,
        colocated,
        interference,
        between_steps_us: overhead.between_us,
        hidden,
    })
}
