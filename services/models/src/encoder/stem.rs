//! Features to the first rows: convolutions over log-mel, a projection of patches, or rows of a token table. Larger
//! stems have files of their own.

mod captioned;
mod cosine;
mod davit;
mod input;
mod join;
mod mel;
mod mel_chunks;
mod offsets;
mod prefixed;
mod sam;
mod square_views;
mod swin;
mod tiles;
mod wave;
mod windows;

use super::layout::Room;
use super::units::{EncodeUnit, filled};
use crate::error::ModelError;
use crate::layers::{LinearShape, Loader};
use crate::spec::{EncoderSpec, StemSpec};
use crate::weights::Weights;
use captioned::{CaptionedRows, CaptionedStem, TokenTable};
pub(super) use input::StemInput;
use input::patch_rows;
pub(super) use join::joined;
use mel::{MelRows, MelShape, MelStem};
use mel_chunks::{MelChunkRows, MelChunkStem};
use prefixed::{PrefixedPatchStem, PrefixedRows, PrefixedShape};
use sam::{SamRows, SamStem};
use square_views::{SquareViewRows, SquareViewsStem};
use swin::{SwinRows, SwinStem};
use tiles::{StagedTiles, TileStem};
pub(super) use tiles::{gated_tiles, table_of};
use triptych_kernels::ops::{Activation, Indices, StageBuilder};
use triptych_kernels::{Backend, KernelError};
use wave::{PackedWave, WaveRows, WaveStem};

/// The stem of an encoder, with its weights.
pub(super) enum Stem<B: Backend> {
    Mel(MelStem<B>),
    MelChunks(MelChunkStem<B>),
    Patches { projection: B::Linear, patch_dim: usize },
    Wave(WaveStem<B>),
    Tokens(B::Table),
    Prefixed(PrefixedPatchStem<B>),
    Shifted(SwinStem<B>),
    Captioned(Box<CaptionedStem<B>>),
    Tiles(Box<TileStem<B>>),
    Sam(Box<SamStem<B>>),
    SquareViews(SquareViewsStem<B>),
}

/// A stem whose arrays for a run are in a step.
pub(super) enum StagedStem<'a, B: Backend> {
    Mel(&'a MelStem<B>, MelRows),
    MelChunks(&'a MelChunkStem<B>, MelChunkRows),
    Patches { projection: &'a B::Linear, patch_dim: usize },
    Wave(&'a WaveStem<B>, WaveRows),
    PackedWave(&'a WaveStem<B>, PackedWave),
    Tokens(&'a B::Table, Indices),
    Prefixed(&'a PrefixedPatchStem<B>, PrefixedRows),
    Shifted(&'a SwinStem<B>, SwinRows),
    Captioned(&'a CaptionedStem<B>, CaptionedRows),
    Tiles(&'a TileStem<B>, StagedTiles),
    Sam(&'a SamStem<B>, Box<SamRows>),
    SquareViews(&'a SquareViewsStem<B>, SquareViewRows),
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
            StemSpec::Mel { n_mels, n_frames, windows } => {
                let shape = MelShape { n_mels, n_frames, windows };
                Ok(Self::Mel(MelStem::load(loader, spec.names.stem, shape, hidden)?))
            }
            StemSpec::MelChunks(chunks) => {
                Ok(Self::MelChunks(MelChunkStem::load(loader, spec.names.stem, chunks, hidden)?))
            }
            StemSpec::Patches { patch, bias } => {
                let [channels, frames, height, width] = patch;
                // One frame is not stored as a dimension.
                let projection = match frames {
                    1 => linear(0, &[hidden, channels, height, width], bias)?,
                    _ => linear(0, &[hidden, channels, frames, height, width], bias)?,
                };
                Ok(Self::Patches { projection, patch_dim: patch.iter().product() })
            }
            StemSpec::Tiles(ref tiles) => {
                let name = spec.names.stem.first().copied().unwrap_or_default();
                Ok(Self::Tiles(Box::new(TileStem::load(loader, name, (tiles, hidden))?)))
            }
            StemSpec::Wave(wave) => Ok(Self::Wave(WaveStem::load(loader, spec.names.stem, wave, hidden)?)),
            StemSpec::Tokens { vocab, scale, .. } => {
                let tables = Loader::new(loader.backend(), weights, spec.names.tokens);
                Ok(Self::Tokens(tables.scaled_table("", [vocab, hidden], scale)?))
            }
            StemSpec::PrefixedPatches { patch, bias, n_registers, flat_prefix, .. } => {
                let shape = PrefixedShape { patch, bias, n_registers, flat_prefix, hidden };
                Ok(Self::Prefixed(PrefixedPatchStem::load(loader, spec.names.stem, shape)?))
            }
            StemSpec::Captioned(ref captioned) => {
                let tokens = TokenTable { names: spec.names.tokens, hidden };
                let stem = CaptionedStem::load(loader.backend(), weights, captioned, tokens)?;
                Ok(Self::Captioned(Box::new(stem)))
            }
            StemSpec::Sam(ref sam) => {
                Ok(Self::Sam(Box::new(SamStem::load(loader.backend(), weights, (sam, hidden))?)))
            }
            StemSpec::SquareViews(ref sizes) => {
                Ok(Self::SquareViews(SquareViewsStem::load(loader, spec.names.stem, (sizes, hidden))?))
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
            Self::Mel(stem) => StagedStem::Mel(stem, stem.stage(builder, units, None)?),
            Self::MelChunks(stem) => StagedStem::MelChunks(stem, stem.stage(builder, units)?),
            &Self::Patches { ref projection, patch_dim } => StagedStem::Patches { projection, patch_dim },
            Self::Wave(stem) => StagedStem::Wave(stem, stem.stage(builder, units)?),
            Self::Tokens(table) => {
                let ids: Vec<u32> = units.iter().flat_map(|p| p.values.tokens()).copied().collect();
                StagedStem::Tokens(table, builder.indices(&ids)?)
            }
            Self::Prefixed(stem) => StagedStem::Prefixed(stem, stem.stage(builder, units)?),
            Self::Shifted(stem) => StagedStem::Shifted(stem, stem.stage(builder, units)?),
            Self::Captioned(stem) => StagedStem::Captioned(stem, stem.stage(builder, units)?),
            Self::Tiles(stem) => StagedStem::Tiles(stem, stem.stage(builder, units)?),
            Self::Sam(stem) => StagedStem::Sam(stem, Box::new(stem.stage(builder, units)?)),
            Self::SquareViews(stem) => StagedStem::SquareViews(stem, stem.stage(builder, units)?),
        })
    }

    /// The same for units, and padding, of a captured forward.
    ///
    /// # Errors
    /// As [`Self::stage`], and for a stem that cannot be captured.
    pub fn stage_in(
        &self,
        builder: &mut StageBuilder,
        units: &[EncodeUnit<'_>],
        room: Room,
    ) -> Result<StagedStem<'_, B>, KernelError> {
        match self {
            Self::Mel(stem) => Ok(StagedStem::Mel(stem, stem.stage(builder, units, Some(room.n_rows))?)),
            Self::MelChunks(_)
            | Self::Patches { .. }
            | Self::Shifted(_)
            | Self::Captioned(_)
            | Self::Sam(_)
            | Self::SquareViews(_) => self.stage(builder, units),
            Self::Prefixed(_) => self.stage(builder, &filled(units, room.max_units)),
            Self::Tiles(stem) => Ok(StagedStem::Tiles(stem, stem.stage_in(builder, units, room.max_units)?)),
            Self::Wave(stem) => Ok(StagedStem::PackedWave(stem, stem.stage_packed(builder, units, room)?)),
            Self::Tokens(table) => {
                let mut ids: Vec<u32> = units.iter().flat_map(|p| p.values.tokens()).copied().collect();
                ids.resize(room.n_rows, 0);
                Ok(StagedStem::Tokens(table, builder.indices(&ids)?))
            }
        }
    }

    /// Features of units, and zeros for padding, of a captured forward: `[n_rows, width]`, and `(n_rows, width)`.
    pub fn features(&self, units: &[EncodeUnit<'_>], room: Room) -> (Vec<f32>, (usize, usize)) {
        let concatenated = || units.iter().flat_map(|p| p.values.floats()).copied().collect();
        let n_patches = units.first().map_or(0, |unit| unit.patches[0] * unit.patches[1]);
        let (mut values, dims): (Vec<f32>, _) = match self {
            Self::Mel(stem) => stem.features(units, room.max_units),
            Self::Patches { patch_dim, .. } => (concatenated(), (room.n_rows, *patch_dim)),
            Self::Prefixed(stem) => (concatenated(), (room.max_units * n_patches, stem.patch_values())),
            Self::Shifted(stem) => (concatenated(), (n_patches, stem.patch_values())),
            Self::Wave(stem) => (stem.packed_samples(units), (stem.n_packed(room), 1)),
            Self::Captioned(stem) => (concatenated(), (n_patches, stem.channels())),
            Self::Tiles(stem) => stem.features(units, room.max_units),
            // Tokens are staged; the others' forwards are not captured.
            Self::MelChunks(_) | Self::Tokens(_) | Self::Sam(_) | Self::SquareViews(_) => {
                (Vec::new(), (0, 0))
            }
        };
        values.resize(dims.0 * dims.1, 0.0);
        (values, dims)
    }
}

impl<B: Backend> StagedStem<'_, B> {
    /// Rows of all units, concatenated: `[Σ n_rows, hidden]`. The input is of the units that were staged.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if a back end refuses the shapes.
    pub fn forward(
        &self,
        backend: &B,
        step: &B::Step,
        input: StemInput<'_, B>,
    ) -> Result<B::Tensor, ModelError> {
        match (self, input) {
            (Self::Mel(stem, rows), input) => stem.forward(backend, step, input, *rows),
            (Self::MelChunks(stem, rows), StemInput::Units(units)) => {
                stem.forward(backend, step, units, rows)
            }
            (Self::Patches { projection, patch_dim }, input) => {
                let x = patch_rows(backend, input, *patch_dim)?;
                Ok(backend.linear(&x, projection, Activation::None, None)?)
            }
            (Self::Tokens(table, ids), _) => Ok(backend.embed(step, table, *ids)?),
            (Self::Prefixed(stem, rows), input) => stem.forward(backend, step, input, rows),
            (Self::Shifted(stem, rows), input) => stem.forward(backend, step, input, rows),
            (Self::PackedWave(stem, packed), StemInput::Rows(x)) => {
                stem.forward_packed(backend, step, x, packed)
            }
            (Self::Wave(stem, rows), StemInput::Units(units)) => stem.forward(backend, step, units, rows),
            (Self::Captioned(stem, rows), input) => stem.forward(backend, step, input, rows),
            (Self::Tiles(stem, rows), input) => stem.forward(backend, step, input, *rows),
            (Self::Sam(stem, rows), StemInput::Units(units)) => stem.forward(backend, step, units, rows),
            (Self::SquareViews(stem, rows), StemInput::Units(units)) => {
                stem.forward(backend, step, units, rows)
            }
            (
                Self::MelChunks(..) | Self::Wave(..) | Self::Sam(..) | Self::SquareViews(..),
                StemInput::Rows(_),
            )
            | (Self::PackedWave(..), StemInput::Units(_)) => {
                Err(KernelError::NotCapturable { op: "encode" }.into())
            }
        }
    }
}
