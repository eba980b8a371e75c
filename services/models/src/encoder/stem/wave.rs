//! Raw samples to rows: three convolutions, with a norm of the whole unit after the first.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/moonshine/modeling_moonshine.py>
//! (`MoonshineEncoder`). Pieces are computed one by one, since each has its own length.

use super::join::{joined, stage_places};
use crate::encoder::units::EncodeUnit;
use crate::error::ModelError;
use crate::layers::{LinearShape, Loader};
use crate::spec::{NormSpec, WaveSpec};
use triptych_kernels::ops::{Activation, Indices, Offsets, StageBuilder, Unfold};
use triptych_kernels::{Backend, KernelError};

/// The stem of [`StemSpec::Wave`](crate::spec::StemSpec::Wave).
pub(crate) struct WaveStem<B: Backend> {
    convs: [B::Linear; 3],
    norm: B::Norm,
    spec: WaveSpec,
}

/// Rows of the units of a run.
pub(crate) struct WaveRows {
    /// Of each unit after the first convolution: one sequence.
    normed: Vec<Offsets>,
    /// Of each unit's output among those of all.
    places: Vec<Indices>,
}

impl<B: Backend> WaveStem<B> {
    /// Loads the first convolution, the norm and the other convolutions, named in this order.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(
        loader: &Loader<'_, B>,
        names: &[&str],
        spec: WaveSpec,
        hidden: usize,
    ) -> Result<Self, ModelError> {
        let name = |i: usize| names.get(i).copied().unwrap_or_default();
        let conv =
            |name, shape: [usize; 3], bias| loader.linear(&[LinearShape { name, shape: &shape, bias }]);
        let [first, second, third] = spec.convs.map(|[taps, _]| taps);
        Ok(Self {
            convs: [
                conv(name(0), [hidden, 1, first], false)?,
                conv(name(2), [2 * hidden, hidden, second], true)?,
                conv(name(3), [hidden, 2 * hidden, third], true)?,
            ],
            norm: loader.norm(name(1), NormSpec::layer(spec.norm_eps), hidden)?,
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
    ) -> Result<WaveRows, KernelError> {
        let [taps, stride] = self.spec.convs[0];
        let of_unit = |unit: &EncodeUnit<'_>| {
            let windows = unit.values.floats().len().checked_sub(taps).map_or(0, |n| n / stride + 1);
            builder.offsets(&[0, windows as u32])
        };
        let normed = units.iter().map(of_unit).collect::<Result<_, _>>()?;
        Ok(WaveRows { normed, places: stage_places(builder, units.iter().map(EncodeUnit::n_rows))? })
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
        rows: &WaveRows,
    ) -> Result<B::Tensor, ModelError> {
        let each =
            units.iter().zip(&rows.normed).map(|(unit, normed)| self.unit(backend, step, unit, *normed));
        joined(backend, step, each.collect::<Result<_, _>>()?, &rows.places)
    }

    fn unit(
        &self,
        backend: &B,
        step: &B::Step,
        unit: &EncodeUnit<'_>,
        normed: Offsets,
    ) -> Result<B::Tensor, ModelError> {
        let samples = unit.values.floats();
        let mut x = backend.upload(samples.to_vec(), samples.len(), 1)?;
        for (i, (conv, [kernel, stride])) in self.convs.iter().zip(self.spec.convs).enumerate() {
            let windows = backend.unfold(&x, Unfold { n_seqs: 1, kernel, stride, padding: 0 })?;
            let activation = if i == 0 { Activation::Tanh } else { Activation::Gelu };
            x = backend.linear(&windows, conv, activation, None)?;
            if i == 0 {
                x = backend.group_norm(step, &x, &self.norm, normed)?;
            }
        }
        Ok(x)
    }
}
