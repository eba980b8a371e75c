//! Recurrent states of sequences: slots of a cache, and what the ops of a linear-attention layer take.
//!
//! A slot holds the state of one sequence in all layers: the last rows that a causal convolution saw, and for each head the matrix of
//! the gated delta rule (Yang et al., <https://arxiv.org/abs/2412.06464>). Its size does not depend on how long the sequence is.

use super::Activation;
use super::stage::RecurrentSequences;

/// Size of a cache of recurrent states. Values are f32 on every back end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateLayout {
    /// Layers, each with its own states.
    pub n_layers: usize,
    /// Slots, one for each sequence.
    pub n_slots: usize,
    /// Channels of the causal convolution.
    pub conv_channels: usize,
    /// Its taps, from 1 to [`Self::MAX_CONV_KERNEL`]; all but one of them reach back.
    pub conv_kernel: usize,
    /// Value heads.
    pub n_heads: usize,
    /// Width of a head's keys, at most [`Self::MAX_KEY_DIM`].
    pub key_dim: usize,
    /// Width of a head's values.
    pub value_dim: usize,
}

impl StateLayout {
    /// Most taps of a causal convolution.
    pub const MAX_CONV_KERNEL: usize = 64;
    /// Widest keys of a head.
    pub const MAX_KEY_DIM: usize = 256;

    /// Values of the convolution's state in a layer, `[conv_kernel - 1, conv_channels]`.
    pub(crate) fn conv_values(self) -> usize {
        self.conv_kernel.saturating_sub(1).saturating_mul(self.conv_channels)
    }

    /// Values of the matrices in a layer, `[n_heads, key_dim, value_dim]`.
    pub(crate) fn matrix_values(self) -> usize {
        self.n_heads.saturating_mul(self.key_dim).saturating_mul(self.value_dim)
    }

    /// Values of a slot in a layer.
    pub(crate) fn layer_values(self) -> usize {
        self.conv_values().saturating_add(self.matrix_values())
    }

    /// Values of a slot in all layers.
    pub(crate) fn slot_values(self) -> usize {
        self.layer_values().saturating_mul(self.n_layers)
    }

    /// Bytes of a slot in all layers.
    pub(crate) fn slot_bytes(self) -> usize {
        self.slot_values().saturating_mul(size_of::<f32>())
    }
}

/// States of one layer for the sequences of a step, to read and to write.
#[derive(Debug)]
pub struct StateSlots<'a, C> {
    /// The cache.
    pub cache: &'a mut C,
    /// Index of the layer.
    pub layer: usize,
    /// The sequences and their slots.
    pub seqs: RecurrentSequences,
}

/// Rows of [`Backend::causal_conv`](super::Backend::causal_conv), and what becomes of them.
#[derive(Debug)]
pub struct ConvRows<'a, T, W> {
    /// `[n_tokens, channels]`.
    pub x: &'a T,
    /// The taps.
    pub taps: &'a W,
    /// The activation of the sums.
    pub activation: Activation,
}

/// Rows of [`Backend::gated_delta_rule`](super::Backend::gated_delta_rule).
#[derive(Debug)]
pub struct DeltaRows<'a, T> {
    /// Queries, keys and values side by side, `[n_tokens, 2·n_key_heads·key_dim + n_heads·value_dim]`.
    pub qkv: &'a T,
    /// Logits of the update's weight, then the input of the decay, `[n_tokens, 2·n_heads]`: `b` before `a`.
    pub beta_decay: &'a T,
    /// Heads of queries and keys; each serves `n_heads / n_key_heads` value heads that follow one another.
    pub n_key_heads: usize,
}
