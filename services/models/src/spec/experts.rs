//! Mixtures of experts in the place of a layer's feed-forward block.

use triptych_kernels::ops::{Activation, Routing};

/// A mixture of experts: gated feed-forward blocks of which each token goes to a few.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsSpec {
    /// Number of experts.
    pub n_experts: usize,
    /// Inner width of an expert, in values.
    pub width: usize,
    /// Choice of a token's experts.
    pub routing: Routing,
    /// Activation of the gates.
    pub activation: Activation,
    /// Inner width of the expert that all tokens share; `None`: there is none.
    pub shared_width: Option<usize>,
    /// Names of its tensors, relative to the layer.
    pub names: &'static ExpertsNames,
}

impl ExpertsSpec {
    /// Weights of the layer's experts that a token does not meet, between rows of `hidden` values.
    pub fn n_idle_weights(&self, hidden: usize) -> usize {
        self.n_experts.saturating_sub(self.routing.top_k) * 3 * self.width * hidden
    }
}

/// Names of the tensors of a mixture of experts.
#[derive(Debug, PartialEq)]
pub struct ExpertsNames {
    /// Router, `[n_experts, hidden]`.
    pub router: &'static str,
    /// The experts.
    pub storage: ExpertStorage,
    /// The expert that all tokens share.
    pub shared: Option<SharedExpertNames>,
}

/// Tensors that the experts of a layer are stored as.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ExpertStorage {
    /// Layers of each element of a list.
    List {
        /// The list.
        list: &'static str,
        /// Gate, up and down of an element.
        parts: [&'static str; 3],
    },
    /// Bare parameters of all experts, inputs first or outputs first, the first half of `gate_up`'s outputs the gate.
    Stacked {
        /// `[n_experts, hidden, 2·width]`.
        gate_up: &'static str,
        /// `[n_experts, width, hidden]`.
        down: &'static str,
    },
    /// Weights of all experts, outputs first.
    StackedParts {
        /// Gate and up, `[n_experts, width, hidden]`, and down, `[n_experts, hidden, width]`.
        parts: [&'static str; 3],
    },
    /// As [`Self::Stacked`] where that is stored, else as [`Self::List`].
    StackedOrList {
        /// `[n_experts, hidden, 2·width]`.
        gate_up: &'static str,
        /// `[n_experts, width, hidden]`.
        down: &'static str,
        /// The list.
        list: &'static str,
        /// Gate, up and down of an element.
        parts: [&'static str; 3],
    },
}

/// Names of the expert that all tokens share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SharedExpertNames {
    /// Gate on the whole expert, `[1, hidden]`; `None`: it weighs 1.
    pub gate: Option<&'static str>,
    /// Gate, up and down.
    pub parts: [&'static str; 3],
}
