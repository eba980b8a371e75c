//! Raw samples to rows: three convolutions, with a norm of the whole unit after the first.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/moonshine/modeling_moonshine.py>
//! (`MoonshineEncoder`). Pieces are computed one by one, since each has its own length.

use crate::encoder::units::EncodeUnit;
use crate::error::ModelError;
use crate::layers::{LinearShape, Loader};
use crate::spec::{NormSpec, WaveSpec};
use triptych_kernels::Backend;
use triptych_kernels::ops::{Activation, Unfold};

/// The stem of [`StemSpec::Wave`](crate::spec::StemSpec::Wave).
pub(crate) struct WaveStem<B: Backend> {
    convs: [B::Linear; 3],
    norm: B::Norm,
    spec: WaveSpec,
    hidden: usize,
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
            hidden,
        })
    }

    /// Rows of all units, concatenated: `[Σ n_rows, hidden]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if a back end refuses the shapes.
    pub fn forward(&self, backend: &B, units: &[EncodeUnit<'_>]) -> Result<B::Tensor, ModelError> {
        if let [unit] = units {
            return self.unit(backend, unit);
        }
        let n_rows: usize = units.iter().map(EncodeUnit::n_rows).sum();
        let mut x = backend.upload(vec![0.0; n_rows * self.hidden], n_rows, self.hidden)?;
        let mut first = 0;
        for unit in units {
            let end = first + unit.n_rows() as u32;
            let rows: Vec<u32> = (first..end).collect();
            backend.scatter_rows(&mut x, &rows, &self.unit(backend, unit)?)?;
            first = end;
        }
        Ok(x)
    }

    fn unit(&self, backend: &B, unit: &EncodeUnit<'_>) -> Result<B::Tensor, ModelError> {
        let samples = unit.values.floats();
        let mut x = backend.upload(samples.to_vec(), samples.len(), 1)?;
        for (i, (conv, [kernel, stride])) in self.convs.iter().zip(self.spec.convs).enumerate() {
            let windows = backend.unfold(&x, Unfold { n_seqs: 1, kernel, stride, padding: 0 })?;
            let activation = if i == 0 { Activation::Tanh } else { Activation::Gelu };
            x = backend.linear(&windows, conv, activation, None)?;
            if i == 0 {
                let n_rows = backend.dims(&x).0 as u32;
                x = backend.group_norm(&x, &self.norm, &[0, n_rows])?;
            }
        }
        Ok(x)
    }
}
