//! Mixtures of experts: the choice of experts for a token, and the layers of one expert.

use super::Activation;

/// Scores of experts from a router's logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterScores {
    /// Softmax over all experts.
    Softmax,
    /// The logistic function of each logit.
    Sigmoid,
}

/// The choice of experts for a token, and their weights in its sum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// Experts of a token: those with the highest scores, of equal ones the first. From 1 to [`Self::MAX_TOP_K`].
    pub top_k: usize,
    /// Scores.
    pub scores: RouterScores,
    /// True if the weights of a token's experts are its scores over their sum, false if they are the scores.
    pub renormalize: bool,
    /// Factor on all weights.
    pub scale: f32,
}

impl Routing {
    /// Largest number of experts of a token.
    pub const MAX_TOP_K: usize = 32;
}

/// Layers of an expert, which is a gated feed-forward.
#[derive(Clone, Debug)]
pub struct ExpertLayers<L> {
    /// Gate and up side by side, `[2·width, hidden]`.
    pub gate_up: L,
    /// `[hidden, width]`.
    pub down: L,
}

/// Arguments of [`fused_experts`](super::Backend::fused_experts) beside the weights.
#[derive(Debug)]
pub struct Routed<'a, T> {
    /// Rows, `[n_tokens, hidden]`.
    pub x: &'a T,
    /// Logits of the router, `[n_tokens, n_experts]`.
    pub logits: &'a T,
    /// The choice by them.
    pub routing: Routing,
    /// Activation of the gate.
    pub activation: Activation,
    /// Added last, `[n_tokens, hidden]`.
    pub residual: Option<&'a T>,
}
