//! Measures [`CostCurves`](crate::curves::CostCurves) with the components that serve: the model's own preprocessor and
//! encoder, the decoder under chosen steps, the engine around it.
//!
//! It measures compute only; publishing, loading and the proxy need a network, and whoever calls it adds them. Every
//! place of a curve is measured once a round, all places in turn, so that a machine which slows down for a second slows
//! all of them a little and none of them wholly.

mod busy;
mod encode;
mod engine;
mod grid;
mod items;
mod prompt;
mod rounds;
mod step;
mod together;

pub use busy::{Busy, BusyWatch};
pub use rounds::{Rounds, Spread};

use crate::curves::{EncodePoint, ItemPoint, KvSizes, Point, PromptSpec, StepPoint, Together};
use std::time::Duration;
use thiserror::Error;
use triptych_core::Modality;
use triptych_engine::EngineError;
use triptych_models::compute::{Compute, ComputeConfig};
use triptych_models::error::ItemError;
use triptych_models::{Model, ModelError};

/// What to measure with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProfileSettings {
    /// How the workers will compute.
    pub compute: ComputeConfig,
    /// How often each place is measured.
    pub rounds: Rounds,
    /// How many places.
    pub extent: Extent,
    /// Memory for keys and values, in bytes; places that need more are left out.
    pub kv_bytes: usize,
}

/// How many places of each curve are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Enough to see that everything runs.
    Quick,
    /// Enough to plan by.
    Full,
}

/// Compute curves of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Profiled {
    /// What items become.
    pub items: Vec<ItemPoint>,
    /// Preprocessing, by output tokens.
    pub preprocess: Vec<Point>,
    /// Forwards of the encoder.
    pub encode: Vec<EncodePoint>,
    /// Parts of a forward, after each of which an engine on the same cores may have its turn.
    pub encode_parts: usize,
    /// Engine steps.
    pub step: Vec<StepPoint>,
    /// What the decoder keeps.
    pub kv: KvSizes,
    /// What its template adds to a prompt.
    pub prompt: PromptSpec,
    /// Encoder and engine on the same threads.
    pub together: Together,
    /// Width of the encoder's rows.
    pub hidden: usize,
}

/// Why nothing was measured.
#[derive(Debug, Error)]
pub enum ProfileError {
    /// The model cannot be loaded or computed.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// An item that was made for the measurement is not one that the model reads.
    #[error("the model does not read {what}: {source}")]
    Item {
        /// The item.
        what: String,
        /// Why.
        source: ItemError,
    },
    /// The engine does not start.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The engine refused what it was given.
    #[error("the engine failed a sequence that was made for the measurement: {0}")]
    Sequence(String),
    /// There is nothing to measure.
    #[error("the model has no encoder")]
    NoEncoder,
    /// Not one place fits.
    #[error("keys and values of {needed} bytes are needed for the smallest step, {given} are given")]
    Memory {
        /// For one sequence of the shortest context.
        needed: usize,
        /// As set.
        given: usize,
    },
    /// A thread that computed beside this one died.
    #[error("a measuring thread panicked")]
    Panicked,
}

/// How far it is: the part, places measured, places in the part.
pub type Progress<'a> = &'a dyn Fn(&'static str, usize, usize);

/// Measures everything that is compute.
///
/// # Errors
/// [`ProfileError`].
pub fn measure(
    model: &Model,
    settings: &ProfileSettings,
    progress: Progress<'_>,
) -> Result<Profiled, ProfileError> {
    let modality: Modality = *model.modalities().first().ok_or(ProfileError::NoEncoder)?;
    let compute = Compute::new(settings.compute)?;
    let samples = items::samples(model, modality, settings, progress)?;
    let mut encoder = compute.load_encoder(model, modality)?;
    let hidden = encoder.hidden();
    let encode = encode::points(encoder.as_mut(), &samples, settings, progress)?;
    let encode_parts = encode::n_parts(encoder.as_mut(), &samples)?;
    let mut decoder = compute.load_decoder(model)?;
    let info = decoder.info();
    let largest = samples.iter().map(|s| s.input.n_tokens as usize).max().unwrap_or(0);
    let places = grid::Grid::new(&info, settings, largest)?;
    let forwards = step::forwards(decoder.as_mut(), &places, settings, progress)?;
    let together = together::measure(encoder.as_mut(), decoder.as_mut(), &samples, &places, settings)?;
    drop(encoder);
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
        kv: grid::kv_sizes(&info),
        prompt: prompt::layout(model, samples.first().map(|sample| sample.described(modality, hidden))),
        together,
        hidden,
    })
}

/// In microseconds.
fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
