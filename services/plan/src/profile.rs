//! Measures [`CostCurves`](crate::curves::CostCurves) with the components that serve: the model's own preprocessor and
//! encoder, the decoder under chosen steps, the engine around it.
//!
//! It measures compute only; publishing, loading and the proxy need a network, and the caller adds them. Every
//! point of a curve is measured once a round, all points in turn, so that a machine which slows down for a second slows
//! all of them a little and none of them wholly.

mod busy;
mod colocation;
mod encode;
mod engine;
mod error;
mod grid;
pub mod host;
mod items;
pub mod markdown;
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

use crate::curves::{ColocationSlowdown, EncodePoint, ItemPoint, KvSizes, Point, PromptSpec, StepPoint};
use triptych_core::Modality;
use triptych_models::Model;
use triptych_models::compute::Compute;

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
    /// Width of the encoder's rows.
    pub hidden: usize,
}

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
    let grid = grid::Grid::new(&info, settings, largest)?;
    let forwards = step::forwards(decoder.as_mut(), &grid, settings, progress)?;
    let colocated = colocation::measure(encoder.as_mut(), decoder.as_mut(), &samples, &grid, settings)?;
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
        kv: grid::kv_sizes(&info, model.max_cross_rows()),
        prompt: prompt::layout(model, samples.first().map(|sample| sample.described(modality, hidden))),
        colocated,
        hidden,
    })
}
