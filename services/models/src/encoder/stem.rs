//! Features to the first rows: convolutions over log-mel, a projection of patches, or rows of a token table. Larger
//! stems have files of their own.

mod captioned;
mod davit;
mod join;
mod prefixed;
mod swin;
mod wave;
mod windows;

use super::units::EncodeUnit;
use crate::error::ModelError;
use crate::layers::{LinearShape, Loader};
use crate::spec::{EncoderSpec, StemSpec};
use crate::weights::Weights;
use captioned::{CaptionedRows, CaptionedStem, TokenTable};
use prefixed::{PrefixedPatchStem, PrefixedRows};
use swin::{SwinRows, SwinStem};
use triptych_kernels::ops::{Activation, Indices, StageBuilder, Unfold};
use triptych_kernels::{Backend, KernelError};
use wave::{WaveRows, WaveStem};

const TAPS: usize = 3;

/// The stem of an encoder, with its weights.
pub(super) enum Stem<B: Backend> {
    Mel { convs: [B::Linear; 2], n_mels: usize, n_frames: usize },
    Patches { projection: B::Linear, patch_dim: usize },
    Wave(WaveStem<B>),
    Tokens(B::Table),
    Prefixed(PrefixedPatchStem<B>),
    Shifted(SwinStem<B>),
    Captioned(Box<CaptionedStem<B>>),
}

/// A stem whose arrays for a run are in a step.
pub(super) enum StagedStem<'a, B: Backend> {
    Mel { convs: &'a [B::Linear; 2], n_mels: usize, n_frames: usize },
    Patches { projection: &'a B::Linear, patch_dim: usize },
    Wave(&'a WaveStem<B>, WaveRows),
    Tokens(&'a B::Table, Indices),
    Prefixed(&'a PrefixedPatchStem<B>, PrefixedRows),
    Shifted(&'a SwinStem<B>, SwinRows),
    Captioned(&'a CaptionedStem<B>, CaptionedRows),
}

impl<B: Backend> Stem<B> {
    /// Loads the stem of an encoder.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(loader: &Loader<'_, B>, spec: &EncoderSpec, weights: &Weights) -> Result<Self, ModelError> {
        let hidden = spec.stack.hidden;
        let linear = |i: usize, shape: &[usize], bias| {
            let name = spec.names.stem.get(i).copied().unwrap_or_default();
            loader.linear(&[LinearShape { name, shape, bias }])
        };
        match spec.stem {
            StemSpec::Mel { n_mels, n_frames } => {
                let first = linear(0, &[hidden, n_mels, TAPS], true)?;
                let second = linear(1, &[hidden, hidden, TAPS], true)?;
                Ok(Self::Mel { convs: [first, second], n_mels, n_frames })
            }
            StemSpec::Patches { patch } => {
                let [channels, frames, height, width] = patch;
                let projection = linear(0, &[hidden, channels, frames, height, width], false)?;
                Ok(Self::Patches { projection, patch_dim: patch.iter().product() })
            }
            StemSpec::Tiles(_) => {
                Err(ModelError::missing_key("config.json", "vision_config", "an encoder without tiles"))
            }
            StemSpec::Wave(wave) => Ok(Self::Wave(WaveStem::load(loader, spec.names.stem, wave, hidden)?)),
            StemSpec::Tokens { vocab, scale, .. } => {
                let tables = Loader::new(loader.backend(), weights, spec.names.tokens);
                Ok(Self::Tokens(tables.scaled_table("", [vocab, hidden], scale)?))
            }
            StemSpec::PrefixedPatches { patch, .. } => {
                Ok(Self::Prefixed(PrefixedPatchStem::load(loader, spec.names.stem, patch, hidden)?))
            }
            StemSpec::Captioned(ref captioned) => {
                let tokens = TokenTable { names: spec.names.tokens, hidden };
                let stem = CaptionedStem::load(loader.backend(), weights, captioned, tokens)?;
                Ok(Self::Captioned(Box::new(stem)))
            }
            StemSpec::Swin(ref pyramid) => {
                Ok(Self::Shifted(SwinStem::load(loader, pyramid, &spec.names.stack)?))
            }
        }
    }

    /// Adds what the stem indexes with to a step.
    ///
    /// # Errors
    /// [`KernelError`] if the step has no room for it.
    pub fn stage(
        &self,
        builder: &mut StageBuilder,
        units: &[EncodeUnit<'_>],
    ) -> Result<StagedStem<'_, B>, KernelError> {
        Ok(match self {
            &Self::Mel { ref convs, n_mels, n_frames } => StagedStem::Mel { convs, n_mels, n_frames },
            &Self::Patches { ref projection, patch_dim } => StagedStem::Patches { projection, patch_dim },
            Self::Wave(stem) => StagedStem::Wave(stem, stem.stage(builder, units)?),
            Self::Tokens(table) => {
                let ids: Vec<u32> = units.iter().flat_map(|p| p.values.tokens()).copied().collect();
                StagedStem::Tokens(table, builder.indices(&ids)?)
            }
            Self::Prefixed(stem) => StagedStem::Prefixed(stem, stem.stage(builder, units)?),
            Self::Shifted(stem) => StagedStem::Shifted(stem, stem.stage(builder, units)?),
            Self::Captioned(stem) => StagedStem::Captioned(stem, stem.stage(builder, units)?),
        })
    }
}

impl<B: Backend> StagedStem<'_, B> {
    /// Rows of all units, concatenated: `[Σ n_rows, hidden]`. The units are those that were staged.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if a back end refuses the shapes.
    pub fn forward(
        &self,
        backend: &B,
        step: &B::Step,
        units: &[EncodeUnit<'_>],
    ) -> Result<B::Tensor, ModelError> {
        match self {
            Self::Mel { convs, n_mels, n_frames } => {
                let mut frames = Vec::with_capacity(units.len() * n_mels * n_frames);
                for unit in units {
                    transpose_into(&mut frames, unit.values.floats(), *n_frames);
                }
                let mut x = backend.upload(frames, units.len() * n_frames, *n_mels)?;
                for (conv, stride) in convs.iter().zip([1, 2]) {
                    let unfold = Unfold { n_seqs: units.len(), kernel: TAPS, stride, padding: 1 };
                    x = backend.linear(&backend.unfold(&x, unfold)?, conv, Activation::Gelu, None)?;
                }
                Ok(x)
            }
            Self::Patches { projection, patch_dim } => {
                let values: Vec<f32> = units.iter().flat_map(|p| p.values.floats()).copied().collect();
                let n_patches = values.len() / patch_dim;
                let x = backend.upload(values, n_patches, *patch_dim)?;
                Ok(backend.linear(&x, projection, Activation::None, None)?)
            }
            Self::Wave(stem, rows) => stem.forward(backend, step, units, rows),
            Self::Tokens(table, ids) => Ok(backend.embed(step, table, *ids)?),
            Self::Prefixed(stem, rows) => stem.forward(backend, step, units, rows),
            Self::Shifted(stem, rows) => stem.forward(backend, step, units, rows),
            Self::Captioned(stem, rows) => stem.forward(backend, step, units, rows),
        }
    }
}

/// Appends the transpose of `values: [rows, n_columns]`.
fn transpose_into(out: &mut Vec<f32>, values: &[f32], n_columns: usize) {
    for column in 0..n_columns {
        out.extend(values.iter().skip(column).step_by(n_columns));
    }
}
