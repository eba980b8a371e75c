//! A layer of linear attention by the gated delta rule.

use super::{LinearShape, Loader};
use crate::error::ModelError;
use crate::spec::{GatedDeltaSpec, NormSpec};
use triptych_kernels::Backend;
use triptych_kernels::ops::{Activation, ConvRows, DeltaRows, RecurrentSequences, StateSlots};

/// Projections, convolution and decays of a layer. The states are the caller's.
pub struct GatedDelta<B: Backend> {
    qkv: B::Linear,
    gate: B::Linear,
    // Side by side: weight of the update, input of the decay.
    beta_decay: B::Linear,
    conv: B::CausalConv,
    decay: B::Decay,
    norm: B::Norm,
    out: B::Linear,
    spec: GatedDeltaSpec,
}

/// States of a layer, and the sequences of a step that have them.
pub struct LayerStates<'a, C> {
    /// The cache.
    pub cache: &'a mut C,
    /// Index of the layer in it.
    pub layer: usize,
    /// The sequences.
    pub seqs: RecurrentSequences,
}

impl<B: Backend> GatedDelta<B> {
    /// Loads a layer that reads and writes rows of `hidden` values.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(loader: &Loader<'_, B>, spec: &GatedDeltaSpec, hidden: usize) -> Result<Self, ModelError> {
        let names = spec.names;
        let into = |width: usize| [width, hidden];
        let linear = |name, shape: &[usize]| loader.linear(&[LinearShape { name, shape, bias: false }]);
        let each = into(spec.n_value_heads);
        Ok(Self {
            qkv: linear(names.qkv, &into(spec.qkv_width()))?,
            gate: linear(names.gate, &into(spec.value_width()))?,
            beta_decay: loader.linear(&names.beta_decay.map(|name| LinearShape {
                name,
                shape: &each,
                bias: false,
            }))?,
            conv: loader.causal_conv(names.conv, spec.qkv_width(), spec.conv_kernel)?,
            decay: loader.decay([names.a_log, names.dt_bias], spec.n_value_heads)?,
            norm: loader.norm(names.norm, NormSpec::rms(spec.eps), spec.value_dim)?,
            out: linear(names.out, &[hidden, spec.value_width()])?,
            spec: spec.clone(),
        })
    }

    /// The layer on `x: [n_tokens, hidden]`, plus `residual` if there is one: `[n_tokens, hidden]`. Advances the states.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a wrong width, or slots that do not fit.
    pub fn forward(
        &self,
        backend: &B,
        step: &B::Step,
        x: (&B::Tensor, Option<&B::Tensor>),
        states: LayerStates<'_, B::StateCache>,
    ) -> Result<B::Tensor, ModelError> {
        let (x, residual) = x;
        let LayerStates { cache, layer, seqs } = states;
        let GatedDeltaSpec { n_key_heads, n_value_heads, activation, .. } = self.spec;
        let qkv = backend.linear(x, &self.qkv, Activation::None, None)?;
        let at = StateSlots { cache: &mut *cache, layer, seqs };
        let rows = ConvRows { x: &qkv, taps: &self.conv, activation };
        let qkv = &backend.causal_conv(step, at, rows)?;
        let beta_decay = &backend.linear(x, &self.beta_decay, Activation::None, None)?;
        let rows = DeltaRows { qkv, beta_decay, n_key_heads };
        let heads = backend.gated_delta_rule(step, StateSlots { cache, layer, seqs }, rows, &self.decay)?;
        let heads = backend.norm(&backend.split_rows(heads, n_value_heads)?, &self.norm)?;
        let mut heads = backend.merge_rows(heads, n_value_heads)?;
        let gate = backend.linear(x, &self.gate, Activation::None, None)?;
        backend.multiply_gated(&mut heads, &gate, activation)?;
        Ok(backend.linear(&heads, &self.out, Activation::None, residual)?)
    }
}
