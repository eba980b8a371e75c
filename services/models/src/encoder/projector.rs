//! From rows of the stack to output rows: one level of them, or several side by side.

mod gated;

use super::stem::joined;
use crate::error::ModelError;
use crate::layers::{Adapted, AdaptedLinear, LinearShape, Loader};
use crate::spec::{LevelsSpec, MergingForm, MergingSpec, NormSpec, ProjectorSpec, RowMerge};
use gated::Gated;
pub(super) use gated::StagedGate;
use triptych_kernels::ops::{Activation, Indices, StageBuilder};
use triptych_kernels::{Backend, KernelError};

/// The projector of a stack.
pub(super) struct Projector<B: Backend> {
    norm: Option<ProjectorNorm<B>>,
    merging: Option<B::Linear>,
    linears: Vec<AdaptedLinear<B>>,
    gated: Option<Gated<B>>,
    activation: Activation,
    /// Rows that become one.
    group: usize,
    merge: RowMerge,
    /// Width of a row before it is merged.
    hidden: usize,
}

struct ProjectorNorm<B: Backend> {
    norm: B::Norm,
    of_joined: bool,
}

impl<B: Backend> Projector<B> {
    /// Loads the projector of rows of `hidden`, under its own prefixes or those of `encoder`.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(encoder: &Loader<'_, B>, spec: &ProjectorSpec, hidden: usize) -> Result<Self, ModelError> {
        match spec.names.prefixes {
            Some(prefixes) => Self::at(&encoder.beside(prefixes), spec, hidden),
            None => Self::at(encoder, spec, hidden),
        }
    }

    fn at(loader: &Loader<'_, B>, spec: &ProjectorSpec, hidden: usize) -> Result<Self, ModelError> {
        let joined = spec.joined(hidden);
        let merging = match spec.merging {
            Some(merging) => Some(load_merging(loader, merging, [hidden, spec.side])?),
            None => None,
        };
        let mut width = spec.merged(hidden);
        let mut linears = Vec::with_capacity(spec.widths.len());
        for (name, &out) in spec.names.layers.iter().zip(&spec.widths) {
            linears.push(match spec.transposed {
                // A bare parameter is no module that an adapter could name.
                true => AdaptedLinear::fixed(loader.transposed_linear(name, [out, width])?),
                false => loader.adapted(&[LinearShape { name, shape: &[out, width], bias: spec.bias }])?,
            });
            width = out;
        }
        let gated = match &spec.gated {
            Some(gated) => Some(Gated::load(loader, gated, width)?),
            None => None,
        };
        let norm = match &spec.norm {
            Some(norm) => Some(ProjectorNorm {
                norm: loader.norm(
                    spec.names.norm,
                    of_sums(spec, norm.norm),
                    if norm.of_joined { joined } else { hidden },
                )?,
                of_joined: norm.of_joined,
            }),
            None => None,
        };
        let (group, merge) = (spec.group(), spec.merge);
        Ok(Self { norm, merging, linears, gated, activation: spec.activation, group, merge, hidden })
    }

    /// Adds what a gated feed-forward of `n_rows` output rows indexes with to a step; `None` without one.
    ///
    /// # Errors
    /// [`KernelError`] if the step has no room for it.
    pub fn stage(
        &self,
        builder: &mut StageBuilder,
        n_rows: usize,
    ) -> Result<Option<StagedGate>, KernelError> {
        self.gated.as_ref().map(|_| StagedGate::new(builder, n_rows)).transpose()
    }

    /// Output rows of `x: [n_rows, hidden]`: `[n_rows / side², out]`, by what was staged for them.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_staged(
        &self,
        on: Adapted<'_, B>,
        step: &B::Step,
        x: &B::Tensor,
        staged: Option<&StagedGate>,
    ) -> Result<B::Tensor, ModelError> {
        let x = self.forward(on, x)?;
        match (&self.gated, staged) {
            (Some(gated), Some(staged)) => gated.forward(on, step, x, staged),
            _ => Ok(x),
        }
    }

    /// Output rows of `x: [n_rows, hidden]` before a gated feed-forward: `[n_rows / side², out]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a wrong width, or rows that make no whole squares.
    fn forward(&self, on: Adapted<'_, B>, x: &B::Tensor) -> Result<B::Tensor, ModelError> {
        let Adapted { backend, .. } = on;
        let mut x = match &self.norm {
            Some(ProjectorNorm { norm, of_joined: false }) => backend.norm(x, norm)?,
            _ => x.clone(),
        };
        if self.group > 1 {
            x = backend.merge_rows(x, self.group)?;
            if self.merge == RowMerge::Average {
                x = self.sum(backend, x)?;
            }
        }
        if let Some(ProjectorNorm { norm, of_joined: true }) = &self.norm {
            x = backend.norm(&x, norm)?;
        }
        if let Some(merging) = &self.merging {
            x = backend.linear(&x, merging, Activation::None, None)?;
        }
        for (i, linear) in self.linears.iter().enumerate() {
            let is_last = i + 1 == self.linears.len();
            let activation = if is_last { Activation::None } else { self.activation };
            x = on.linear(&x, linear, activation, None)?;
        }
        Ok(x)
    }
}

impl<B: Backend> Projector<B> {
    /// Sums of the rows that `x: [n_rows, group · hidden]` has side by side, `[n_rows, hidden]`: halves are added until one is
    /// left, so that a sum has few roundings.
    fn sum(&self, backend: &B, mut x: B::Tensor) -> Result<B::Tensor, ModelError> {
        let mut n = self.group;
        let mut odd: Option<B::Tensor> = None;
        while n > 1 {
            if n % 2 == 1 {
                let mut last = backend.columns(&x, (n - 1) * self.hidden, self.hidden)?;
                if let Some(odd) = &odd {
                    backend.add(&mut last, odd)?;
                }
                odd = Some(last);
            }
            n /= 2;
            let mut low = backend.columns(&x, 0, n * self.hidden)?;
            backend.add(&mut low, &backend.columns(&x, n * self.hidden, n * self.hidden)?)?;
            x = low;
        }
        if let Some(odd) = &odd {
            backend.add(&mut x, odd)?;
        }
        Ok(x)
    }
}

/// The norm of sums that gives what `norm` gives of their means: `eps` grows as the square.
fn of_sums(spec: &ProjectorSpec, norm: NormSpec) -> NormSpec {
    match spec.merge {
        RowMerge::Concatenate => norm,
        RowMerge::Average => NormSpec { eps: norm.eps * (spec.side as f32).powi(4), ..norm },
    }
}

/// Loads the linear layer of squares of `side · side` joined rows of `hidden`. Stored columns go channel by channel, joined rows
/// row by row.
fn load_merging<B: Backend>(
    loader: &Loader<'_, B>,
    merging: MergingSpec,
    [hidden, side]: [usize; 2],
) -> Result<B::Linear, ModelError> {
    let MergingSpec { width, form, name } = merging;
    let group = side * side;
    let (shape, bias) = match form {
        MergingForm::Matrix => (vec![width, hidden * group], false),
        MergingForm::Convolution => (vec![width, hidden, side, side], true),
    };
    let stored = loader.stored(&LinearShape { name, shape: &shape, bias })?;
    let of_row = |row: usize| (0..hidden).map(move |channel| channel * group + row);
    loader.pack(&[stored.inputs((0..group).flat_map(of_row))])
}

/// Projectors of layers within a stack.
pub(super) struct Levels<B: Backend> {
    /// Indices of the layers, and what projects their output.
    projectors: Vec<(usize, Projector<B>)>,
}

impl<B: Backend> Levels<B> {
    /// Loads the projectors of rows of `hidden`.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(
        encoder: &Loader<'_, B>,
        spec: Option<&LevelsSpec>,
        hidden: usize,
    ) -> Result<Self, ModelError> {
        let Some(LevelsSpec { layers, projector, list }) = spec else {
            return Ok(Self { projectors: Vec::new() });
        };
        let load = |(i, layer): (usize, &usize)| {
            Ok((*layer, Projector::at(&encoder.layer(list, i), projector, hidden)?))
        };
        Ok(Self { projectors: layers.iter().enumerate().map(load).collect::<Result<_, ModelError>>()? })
    }

    /// Adds the rows of each level, the first included, among those of all: `n_rows` output rows. None for one level.
    ///
    /// # Errors
    /// [`KernelError`] if the step has no room for them.
    pub fn stage(&self, builder: &mut StageBuilder, n_rows: usize) -> Result<Vec<Indices>, KernelError> {
        let n_levels = 1 + self.projectors.len();
        if n_levels == 1 {
            return Ok(Vec::new());
        }
        let rows = |level: usize| (0..n_rows).map(|row| (row * n_levels + level) as u32).collect::<Vec<_>>();
        (0..n_levels).map(|level| builder.indices(&rows(level))).collect()
    }

    /// The level of the output `x` of layer `layer`; `None` if it has none.
    ///
    /// # Errors
    /// As [`Projector::forward`].
    pub fn of_layer(
        &self,
        on: Adapted<'_, B>,
        layer: usize,
        x: &B::Tensor,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let found = self.projectors.iter().find(|(of, _)| *of == layer);
        found.map(|(_, projector)| projector.forward(on, x)).transpose()
    }

    /// Rows of several levels, `[n_rows, width]` each, as one row of all: `[n_rows, n_levels · width]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for levels of other sizes than were staged.
    pub fn side_by_side(
        &self,
        backend: &B,
        step: &B::Step,
        levels: Vec<B::Tensor>,
        places: &[Indices],
    ) -> Result<B::Tensor, ModelError> {
        let n_levels = levels.len();
        let rows = joined(backend, step, levels, places)?;
        Ok(if n_levels == 1 { rows } else { backend.merge_rows(rows, n_levels)? })
    }
}
