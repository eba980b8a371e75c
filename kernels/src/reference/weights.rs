//! Weights in the layout of the reference.

use candle_core::Tensor;

use crate::ops::NormKind;
use crate::stored::{Decays, Taps};

/// A linear layer as stored, transposed.
#[derive(Debug)]
pub struct ReferenceLinear {
    pub(super) n_in: usize,
    pub(super) n_out: usize,
    /// `[n_in, n_out]`.
    pub(super) weight: Tensor,
    /// `[n_out]`.
    pub(super) bias: Option<Tensor>,
}

/// Scale and bias of a norm, `[width]` each.
#[derive(Debug)]
pub struct ReferenceNorm {
    pub(super) kind: NormKind,
    pub(super) scale: Tensor,
    pub(super) bias: Option<Tensor>,
    pub(super) eps: f32,
}

/// Taps of a depthwise convolution.
#[derive(Debug)]
pub struct ReferenceDepthwise(pub(super) Taps);

/// Taps of a causal convolution.
#[derive(Debug)]
pub struct ReferenceCausalConv(pub(super) Taps);

/// Decays of the heads of the gated delta rule.
#[derive(Debug)]
pub struct ReferenceDecay(pub(super) Decays);
