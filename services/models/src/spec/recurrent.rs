//! Layers that recur over tokens in the place of self-attention.

use triptych_kernels::ops::{Activation, StateLayout};

/// Linear attention by the gated delta rule (<https://arxiv.org/abs/2412.06464>), behind a causal convolution of its queries, keys
/// and values.
#[derive(Clone, Debug, PartialEq)]
pub struct GatedDeltaSpec {
    /// Heads of queries and keys.
    pub n_key_heads: usize,
    /// Heads of values, a multiple of those of keys.
    pub n_value_heads: usize,
    /// Width of a head's queries and keys.
    pub key_dim: usize,
    /// Width of a head's values.
    pub value_dim: usize,
    /// Taps of the convolution.
    pub conv_kernel: usize,
    /// Activation behind the convolution, and of the output's gate.
    pub activation: Activation,
    /// Added to the variance of a head's output, which is normalised before its gate.
    pub eps: f32,
    /// Names of its tensors, relative to the layer.
    pub names: &'static GatedDeltaNames,
}

impl GatedDeltaSpec {
    /// Width of queries, keys and values side by side.
    pub fn qkv_width(&self) -> usize {
        2 * self.n_key_heads * self.key_dim + self.value_width()
    }

    /// Width of all heads' values.
    pub fn value_width(&self) -> usize {
        self.n_value_heads * self.value_dim
    }

    /// Layout of a cache of states of so many layers.
    pub fn layout(&self, n_layers: usize, n_slots: usize) -> StateLayout {
        StateLayout {
            n_layers,
            n_slots,
            conv_channels: self.qkv_width(),
            conv_kernel: self.conv_kernel,
            n_heads: self.n_value_heads,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
        }
    }
}

/// Names of the tensors of a gated delta rule.
#[derive(Debug, PartialEq)]
pub struct GatedDeltaNames {
    /// Projection to queries, keys and values.
    pub qkv: &'static str,
    /// Projection to the output's gate.
    pub gate: &'static str,
    /// Projections to the update's weight and to the decay's input.
    pub beta_decay: [&'static str; 2],
    /// The convolution.
    pub conv: &'static str,
    /// Full name of the logarithms of the decays' rates.
    pub a_log: &'static str,
    /// Full name of the biases of the decays' inputs.
    pub dt_bias: &'static str,
    /// Norm of a head's output.
    pub norm: &'static str,
    /// Output projection.
    pub out: &'static str,
}
