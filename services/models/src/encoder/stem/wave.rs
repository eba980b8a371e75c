//! Raw samples to rows: three convolutions, with a norm of the whole unit after the first.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/moonshine/modeling_moonshine.py>
//! (`MoonshineEncoder`). Pieces are computed one by one, since each has its own length.

use super::join::{joined, stage_places};
use crate::encoder::layout::Room;
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

/// Units of a captured forward, which lie one after another in one signal: each starts where an output row does, and the
/// rows of windows that reach past a unit are left out.
pub(crate) struct PackedWave {
    /// Rows after the first convolution: of what precedes a unit, then of the unit, for each; then the rest.
    normed: Offsets,
    /// Output rows of the units, and any row for padding.
    rows: Indices,
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
        self.convolve(backend, step, backend.upload(samples.to_vec(), samples.len(), 1)?, normed)
    }

    /// Samples of the signal of a captured forward.
    pub fn n_packed(&self, room: Room) -> usize {
        let stride = self.spec.samples_per_row().max(1);
        let least = self.spec.min_samples();
        // Samples of a unit past those that start its rows.
        let beyond = room.max_units * least.div_ceil(stride);
        (room.n_rows + beyond) * stride + least
    }

    /// The signal, without the zeros after the last unit.
    pub fn packed_samples(&self, units: &[EncodeUnit<'_>]) -> Vec<f32> {
        let stride = self.spec.samples_per_row().max(1);
        let mut signal = Vec::new();
        for unit in units {
            signal.extend_from_slice(unit.values.floats());
            signal.resize(signal.len().next_multiple_of(stride), 0.0);
        }
        signal
    }

    /// Adds the rows of units of a captured forward to a step.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if there is no room for them.
    pub fn stage_packed(
        &self,
        builder: &mut StageBuilder,
        units: &[EncodeUnit<'_>],
        room: Room,
    ) -> Result<PackedWave, KernelError> {
        let n_samples = self.n_packed(room);
        let stride = self.spec.samples_per_row().max(1);
        let [taps, first_stride] = self.spec.convs[0];
        let after_first = |n: usize| n.checked_sub(taps).map_or(0, |n| n / first_stride.max(1) + 1);
        let mut normed = vec![0];
        let mut rows = Vec::with_capacity(room.n_rows);
        let mut start = 0;
        for unit in units {
            let n = unit.values.floats().len();
            let first = start / first_stride.max(1);
            normed.extend([first as u32, (first + after_first(n)) as u32]);
            let first = (start / stride) as u32;
            rows.extend(first..first + unit.n_rows() as u32);
            start = (start + n).next_multiple_of(stride);
        }
        if start > n_samples || units.len() > room.max_units || rows.len() > room.n_rows {
            let expected = vec![n_samples, room.max_units];
            let actual = vec![start, units.len()];
            return Err(KernelError::Shape { op: "encode", what: "samples and units", expected, actual });
        }
        normed.resize(2 * room.max_units + 2, after_first(n_samples) as u32);
        rows.resize(room.n_rows, self.spec.n_rows(n_samples).saturating_sub(1) as u32);
        Ok(PackedWave { normed: builder.offsets(&normed)?, rows: builder.indices(&rows)? })
    }

    /// Rows of the units of a captured forward, from its signal `x: [n_packed, 1]`: `[n_rows, hidden]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if a back end refuses the shapes.
    pub fn forward_packed(
        &self,
        backend: &B,
        step: &B::Step,
        x: &B::Tensor,
        packed: &PackedWave,
    ) -> Result<B::Tensor, ModelError> {
        let x = self.convolve(backend, step, x.clone(), packed.normed)?;
        Ok(backend.gather_rows(step, &x, packed.rows)?)
    }

    /// The convolutions over one signal, `x: [n_samples, 1]`, with the norm of each sequence of rows after the first.
    fn convolve(
        &self,
        backend: &B,
        step: &B::Step,
        mut x: B::Tensor,
        normed: Offsets,
    ) -> Result<B::Tensor, ModelError> {
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
