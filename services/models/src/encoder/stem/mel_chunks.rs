//! Chunks of log-mel to rows: three convolutions over each chunk as an image, then one linear layer over bins and channels.
//!
//! After <https://github.com/huggingface/transformers/blob/v5.13.0/src/transformers/models/qwen3_asr/modeling_qwen3_asr.py>
//! (`Qwen3ASREncoder`). Units are computed one by one: the windows of their convolutions are large. Rows of the silence that fills
//! up the last chunk are dropped here, for no later layer sees them.

use super::join::{joined, stage_places};
use crate::encoder::units::EncodeUnit;
use crate::error::ModelError;
use crate::layers::{LinearShape, Loader};
use crate::spec::MelChunksSpec;
use triptych_kernels::ops::{Activation, Conv2d, Indices, StageBuilder};
use triptych_kernels::{Backend, KernelError};

/// Taps of a convolution, down and across.
const TAPS: usize = 3;

/// The stem of [`StemSpec::MelChunks`](crate::spec::StemSpec::MelChunks).
pub(crate) struct MelChunkStem<B: Backend> {
    convs: [B::Linear; MelChunksSpec::N_CONVS],
    projection: B::Linear,
    spec: MelChunksSpec,
}

/// Rows of the units of a run.
pub(crate) struct MelChunkRows {
    /// Of each unit, those that are kept.
    kept: Vec<Indices>,
    /// Of each unit's among those of all.
    places: Vec<Indices>,
}

impl<B: Backend> MelChunkStem<B> {
    /// Loads the convolutions and the linear layer, named in this order.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(
        loader: &Loader<'_, B>,
        names: &[&str],
        spec: MelChunksSpec,
        hidden: usize,
    ) -> Result<Self, ModelError> {
        let name = |i: usize| names.get(i).copied().unwrap_or_default();
        let conv = |i: usize, channels: usize| {
            let shape = [spec.n_channels, channels, TAPS, TAPS];
            loader.linear(&[LinearShape { name: name(i), shape: &shape, bias: true }])
        };
        let width = spec.n_channels * MelChunksSpec::reduced(spec.n_mels);
        let projection = LinearShape { name: name(3), shape: &[hidden, width], bias: false };
        Ok(Self {
            convs: [conv(0, 1)?, conv(1, spec.n_channels)?, conv(2, spec.n_channels)?],
            projection: loader.linear(&[projection])?,
            spec,
        })
    }

    /// Adds the rows of units to a step.
    ///
    /// # Errors
    /// [`KernelError`] if the step has no room for them.
    pub fn stage(
        &self,
        builder: &mut StageBuilder,
        units: &[EncodeUnit<'_>],
    ) -> Result<MelChunkRows, KernelError> {
        let mut kept = |unit: &EncodeUnit<'_>| {
            // Only the last chunk has rows of silence.
            let rows: Vec<u32> = (0..unit.n_rows() as u32).collect();
            builder.indices(&rows)
        };
        let kept = units.iter().map(&mut kept).collect::<Result<_, _>>()?;
        Ok(MelChunkRows { kept, places: stage_places(builder, units.iter().map(EncodeUnit::n_rows))? })
    }

    /// Rows of all units, concatenated: `[Σ n_rows, hidden]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if a back end refuses the shapes.
    pub fn forward(
        &self,
        backend: &B,
        step: &B::Step,
        units: &[EncodeUnit<'_>],
        rows: &MelChunkRows,
    ) -> Result<B::Tensor, ModelError> {
        let of_unit = |(unit, kept): (&EncodeUnit<'_>, &Indices)| {
            let x = self.convolve(backend, unit.values.floats())?;
            Ok::<_, ModelError>(backend.gather_rows(step, &x, *kept)?)
        };
        let parts = units.iter().zip(&rows.kept).map(of_unit).collect::<Result<_, _>>()?;
        joined(backend, step, parts, &rows.places)
    }

    /// Rows of whole chunks, `values: [n_chunks, n_mels, n_frames]`: `[n_chunks · chunk_rows, hidden]`.
    fn convolve(&self, backend: &B, values: &[f32]) -> Result<B::Tensor, ModelError> {
        let mut size = [self.spec.n_mels, self.spec.n_frames];
        let n_images = values.len() / (size[0] * size[1]).max(1);
        let mut x = backend.upload(values.to_vec(), values.len(), 1)?;
        for conv in &self.convs {
            let unfold = Conv2d { n_images, size, kernel: [TAPS; 2], stride: [2; 2], padding: [1; 2] };
            x = backend.linear(&backend.unfold2d(&x, unfold)?, conv, Activation::Gelu, None)?;
            size = size.map(|n| n.div_ceil(2));
        }
        // Bins and channels of a frame are the taps of a convolution that is as tall as the image.
        let unfold = Conv2d { n_images, size, kernel: [size[0], 1], stride: [1; 2], padding: [0; 2] };
        let frames = backend.unfold2d(&x, unfold)?;
        Ok(backend.linear(&frames, &self.projection, Activation::None, None)?)
    }
}
