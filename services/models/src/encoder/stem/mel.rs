//! Log-mel to rows: two convolutions with GELU. Windows of units lie one after another, each filled up with silence.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.52.4/src/transformers/models/whisper/modeling_whisper.py>
//! (`WhisperEncoder`). Where silence is not attended to its rows are dropped here: no later layer sees them.

use super::input::StemInput;
use crate::encoder::units::EncodeUnit;
use crate::error::ModelError;
use crate::layers::{LinearShape, Loader};
use crate::spec::MelWindows;
use triptych_kernels::ops::{Activation, Indices, StageBuilder, Unfold};
use triptych_kernels::{Backend, KernelError};

const TAPS: usize = 3;

/// Sizes of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MelShape {
    /// Mel bins.
    pub n_mels: usize,
    /// Frames.
    pub n_frames: usize,
    /// Windows of an audio.
    pub windows: MelWindows,
}

/// The stem of [`StemSpec::Mel`](crate::spec::StemSpec::Mel).
pub(crate) struct MelStem<B: Backend> {
    convs: [B::Linear; 2],
    shape: MelShape,
}

/// Rows of whole windows that are kept; `None`: all, in their order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MelRows(Option<Indices>);

impl<B: Backend> MelStem<B> {
    /// Loads both convolutions, named in this order.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(
        loader: &Loader<'_, B>,
        names: &[&str],
        shape: MelShape,
        hidden: usize,
    ) -> Result<Self, ModelError> {
        let conv = |i: usize, channels: usize| {
            let name = names.get(i).copied().unwrap_or_default();
            loader.linear(&[LinearShape { name, shape: &[hidden, channels, TAPS], bias: true }])
        };
        Ok(Self { convs: [conv(0, shape.n_mels)?, conv(1, hidden)?], shape })
    }

    /// Adds the kept rows of units to a step, and any rows for padding up to `n_rows`.
    ///
    /// # Errors
    /// [`KernelError`] if the step has no room for them.
    pub fn stage(
        &self,
        builder: &mut StageBuilder,
        units: &[EncodeUnit<'_>],
        n_rows: Option<usize>,
    ) -> Result<MelRows, KernelError> {
        if self.shape.windows != MelWindows::Masked {
            return Ok(MelRows(None));
        }
        let of_window = self.shape.n_frames / 2;
        let kept = |(i, unit): (usize, &EncodeUnit<'_>)| (i * of_window..).take(unit.n_rows());
        let mut rows: Vec<u32> = units.iter().enumerate().flat_map(kept).map(|row| row as u32).collect();
        rows.resize(n_rows.unwrap_or(0).max(rows.len()), 0);
        Ok(MelRows(Some(builder.indices(&rows)?)))
    }

    /// Frames of units, and zeros up to `max_units` windows: `[n_rows, n_mels]`, and `(n_rows, n_mels)`.
    pub fn features(&self, units: &[EncodeUnit<'_>], max_units: usize) -> (Vec<f32>, (usize, usize)) {
        (self.frames(units), (max_units * self.shape.n_frames, self.shape.n_mels))
    }

    /// Rows of all units, concatenated: `[Σ n_rows, hidden]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if a back end refuses the shapes.
    pub fn forward(
        &self,
        backend: &B,
        step: &B::Step,
        input: StemInput<'_, B>,
        rows: MelRows,
    ) -> Result<B::Tensor, ModelError> {
        let MelShape { n_mels, n_frames, .. } = self.shape;
        let mut x = match input {
            StemInput::Rows(x) => x.clone(),
            StemInput::Units(units) => backend.upload(self.frames(units), units.len() * n_frames, n_mels)?,
        };
        let n_seqs = backend.dims(&x).0 / n_frames.max(1);
        for (conv, stride) in self.convs.iter().zip([1, 2]) {
            let unfold = Unfold { n_seqs, kernel: TAPS, stride, padding: 1 };
            x = backend.linear(&backend.unfold(&x, unfold)?, conv, Activation::Gelu, None)?;
        }
        match rows.0 {
            Some(kept) => Ok(backend.gather_rows(step, &x, kept)?),
            None => Ok(x),
        }
    }

    /// Frames of units, one's under another's: `[n_units · n_frames, n_mels]`.
    fn frames(&self, units: &[EncodeUnit<'_>]) -> Vec<f32> {
        let MelShape { n_mels, n_frames, .. } = self.shape;
        let mut frames = Vec::with_capacity(units.len() * n_mels * n_frames);
        for unit in units {
            transpose_into(&mut frames, unit.values.floats(), n_frames);
        }
        frames
    }
}

/// Appends the transpose of `values: [rows, n_columns]`.
fn transpose_into(out: &mut Vec<f32>, values: &[f32], n_columns: usize) {
    for column in 0..n_columns {
        out.extend(values.iter().skip(column).step_by(n_columns));
    }
}
