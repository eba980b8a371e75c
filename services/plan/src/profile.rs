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
mod encode_stage;
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
pub use encode_stage::ProfiledTower;
pub use error::ProfileError;
pub use progress::Progress;
pub use rounds::Rounds;
pub use settings::{Extent, ProfileSettings};

use crate::curves::{
    ColocationSlowdown, EncodePoint, Interference, ItemPoint, KvSizes, PipeliningSaves, Point, PromptSpec,
    StepPoint,
};
use encode_stage::EncodeStage;
use triptych_models::Model;
use triptych_models::compute::Compute;
use triptych_models::decoder::Decoder;

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
    /// Time that pipelining saves of a step; `None` without a device.
    pub pipelining: Option<PipeliningSaves>,
    /// Width of the encoder's rows; without an encoder the decoder's.
    pub hidden: usize,
    /// Name of the tower that items, preprocessing and forwards are of; empty: no other reads the item.
    pub tower: String,
    /// The other towers, in the model's order.
    pub more_towers: Vec<ProfiledTower>,
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
    let compute = Compute::new(settings.compute)?;
    let mut stages = EncodeStage::measure_all(model, &compute, settings, progress)?;
    let hidden = stages.first().map_or(model.spec().decoder.stack.hidden, |stage| stage.encoder.hidden());
    let described: Vec<_> = stages.iter().filter_map(EncodeStage::described).collect();
    let layout = prompt::layout(model, &described);
    let mut decoder = compute.load_decoder(model)?;
    let info = decoder.info();
    // The rows that are cross-attended to; of a decoder that does not, any.
    let read = stages.get(layout.cross.unwrap_or(0)).map_or(&[][..], |stage| &stage.samples);
    let largest = read.iter().map(|s| s.input.n_tokens as usize).max().unwrap_or(0);
    let grid = grid::Grid::new(&info, settings, largest)?;
    let forwards = step::forwards(decoder.as_mut(), &grid, settings, progress)?;
    let (colocated, interference) =
        beside(model, &mut stages, (decoder.as_mut(), &grid), settings, progress)?;
    let needs_items = info.cross_attention && !info.cross_optional;
    let outputs = if needs_items { described } else { Vec::new() };
    let engine_run = engine::EngineRun { model, outputs: engine::sealed(outputs)?, settings, progress };
    let overhead = engine_run.overhead(decoder)?;
    let pipelining = match compute.is_on_device() {
        true => Some(engine_run.pipelining_saves(compute.load_decoder(model)?, &overhead)?),
        false => None,
    };
    let added = |point: &StepPoint, n: f64| {
        let us = overhead.of(point.decodes + u32::from(point.prefill_tokens > 0));
        n + us
    };
    let step = forwards
        .into_iter()
        .map(|p| StepPoint { p50_us: added(&p, p.p50_us), p95_us: added(&p, p.p95_us), ..p })
        .collect();
    let mut towers = stages.into_iter().zip(0..).map(|(stage, i)| stage.profiled(layout.cross == Some(i)));
    let first = towers.next().unwrap_or_else(|| ProfiledTower {
        name: String::new(),
        items: Vec::new(),
        preprocess: Vec::new(),
        encode: Vec::new(),
        encode_parts: 1,
        hidden,
        is_cross_attended: false,
    });
    Ok(Profiled {
        items: first.items,
        preprocess: first.preprocess,
        encode: first.encode,
        encode_parts: first.encode_parts,
        step,
        kv: KvSizes::of(&info, model.max_cross_rows()),
        prompt: layout.spec,
        colocated,
        interference,
        between_steps_us: overhead.between_us,
        pipelining,
        hidden,
        tower: first.name,
        more_towers: towers.collect(),
    })
}

/// The first encoder beside the engine, and the stages of all beside neighbours.
fn beside(
    model: &Model,
    stages: &mut [EncodeStage],
    (decoder, grid): (&mut dyn Decoder, &grid::Grid),
    settings: &ProfileSettings,
    progress: Progress<'_>,
) -> Result<(ColocationSlowdown, Interference), ProfileError> {
    let colocated = match stages.first_mut() {
        Some(EncodeStage { encoder, samples, .. }) => {
            colocation::measure(encoder.as_mut(), decoder, samples, grid, settings)?
        }
        None => ColocationSlowdown::default(),
    };
    let worker = interference::Worker { model, encoders: stages, decoder, grid };
    Ok((colocated, interference::measure(worker, settings, progress)?))
}
