//! A convolution over the projected rows of each image, then a linear layer.
//!
//! After `vit_downsampler2` and `vit_large_projector` of `Step3VLForConditionalGeneration` of vLLM 0.32
//! (<https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/step3_vl.py>).

use super::stem::joined;
use super::units::EncodeUnit;
use crate::error::ModelError;
use crate::layers::{LinearShape, Loader};
use crate::spec::{EncoderSpec, ReductionSpec};
use triptych_kernels::ops::{Activation, Conv2d, Indices, StageBuilder};
use triptych_kernels::{Backend, KernelError};

/// The layers of a [`ReductionSpec`].
pub(super) struct Reduction<B: Backend> {
    convolution: B::Linear,
    linear: B::Linear,
    /// Side of the square of patches that became a projected row.
    merged_side: usize,
}

/// Runs of images of one size in a step.
pub(super) struct StagedReduction {
    runs: Vec<StagedImages>,
    /// Output rows of each run among those of all.
    places: Vec<Indices>,
}

struct StagedImages {
    rows: Indices,
    grid: [usize; 2],
    n_images: usize,
}

impl<B: Backend> Reduction<B> {
    /// Loads the layers of an encoder that has them.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(loader: &Loader<'_, B>, spec: &EncoderSpec) -> Result<Option<Self>, ModelError> {
        let (Some(reduction), Some(projector)) = (&spec.extras.reduction, &spec.projector) else {
            return Ok(None);
        };
        const TAPS: usize = ReductionSpec::TAPS;
        let ReductionSpec { channels, out, bias, prefixes: [convolution, linear] } = *reduction;
        let shape = [channels, projector.out(spec.stack.hidden), TAPS, TAPS];
        let convolution =
            loader.beside(convolution).linear(&[LinearShape { name: "", shape: &shape, bias: true }])?;
        let shape = [out, channels];
        let linear = loader.beside(linear).linear(&[LinearShape { name: "", shape: &shape, bias }])?;
        Ok(Some(Self { convolution, linear, merged_side: spec.merged_side() }))
    }

    /// Adds the projected rows of units to a step.
    ///
    /// # Errors
    /// [`KernelError`] if the step has no room for them.
    pub fn stage(
        &self,
        builder: &mut StageBuilder,
        units: &[EncodeUnit<'_>],
    ) -> Result<StagedReduction, KernelError> {
        let [mut first, mut first_output] = [0; 2];
        let mut staged = StagedReduction { runs: Vec::new(), places: Vec::new() };
        for images in units.chunk_by(|a, b| a.patches == b.patches) {
            let Some(grid) = images.first().map(|unit| unit.patches.map(|n| n / self.merged_side)) else {
                continue;
            };
            let n_images = images.len();
            let n_rows = (n_images * grid[0] * grid[1]) as u32;
            let n_outputs = (n_images * grid.map(ReductionSpec::reduced).iter().product::<usize>()) as u32;
            let range = |first: &mut u32, n: u32| {
                let rows: Vec<u32> = (*first..*first + n).collect();
                *first += n;
                rows
            };
            let rows = builder.indices(&range(&mut first, n_rows))?;
            staged.runs.push(StagedImages { rows, grid, n_images });
            staged.places.push(builder.indices(&range(&mut first_output, n_outputs))?);
        }
        Ok(staged)
    }

    /// Output rows of `x: [n_projected_rows, width]`: `[n_tokens, out]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for rows that were not staged.
    pub fn forward(
        &self,
        (backend, step): (&B, &B::Step),
        x: &B::Tensor,
        staged: &StagedReduction,
    ) -> Result<B::Tensor, ModelError> {
        let run = |images: &StagedImages| {
            let conv = Conv2d {
                n_images: images.n_images,
                size: images.grid,
                kernel: [ReductionSpec::TAPS; 2],
                stride: [ReductionSpec::STRIDE; 2],
                padding: [ReductionSpec::TAPS / 2; 2],
            };
            let taps = backend.unfold2d(&backend.gather_rows(step, x, images.rows)?, conv)?;
            let rows = backend.linear(&taps, &self.convolution, Activation::None, None)?;
            backend.linear(&rows, &self.linear, Activation::None, None)
        };
        let parts = staged.runs.iter().map(run).collect::<Result<_, KernelError>>()?;
        joined(backend, step, parts, &staged.places)
    }
}
