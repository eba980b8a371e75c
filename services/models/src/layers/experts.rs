//! Mixtures of experts: a router, the experts that it chooses among for each token, and one that all tokens share.

use super::{Adapted, FeedForward, LinearShape, Loader, StoredLinear};
use crate::error::ModelError;
use crate::spec::{ExpertStorage, ExpertsSpec, StackNames, StackSpec};
use triptych_kernels::Backend;
use triptych_kernels::ops::{Activation, ExpertLayers, Routed, RouterScores, Routing};

/// The feed-forward of one layer: one block for all tokens, or a mixture of experts.
pub enum FeedForwardLayer<B: Backend> {
    /// One block.
    Dense(FeedForward<B>),
    /// A mixture.
    Experts(Experts<B>),
}

/// A mixture of experts with its weights.
pub struct Experts<B: Backend> {
    router: B::Linear,
    experts: B::Experts,
    shared: Option<SharedExpert<B>>,
    routing: Routing,
    activation: Activation,
}

/// The expert that all tokens share.
enum SharedExpert<B: Backend> {
    /// A gate of one output, and a mixture of one expert.
    Gated(B::Linear, B::Experts),
    /// Gate and up side by side, and down.
    Plain(ExpertLayers<B::Linear>),
}

/// Every token goes to the one expert, weighted by the logistic function of its gate.
const SHARED: Routing = Routing { top_k: 1, scores: RouterScores::Sigmoid, renormalize: false, scale: 1.0 };

impl<B: Backend> FeedForwardLayer<B> {
    /// Loads layer `idx` of a stack, whose output a gate multiplies with `factor`.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(
        loader: &Loader<'_, B>,
        names: &StackNames,
        stack: &StackSpec,
        (idx, factor): (usize, f32),
    ) -> Result<Self, ModelError> {
        Ok(match &stack.layer(idx).experts {
            Some(experts) => Self::Experts(Experts::load(loader, experts, stack.hidden)?),
            None => Self::Dense(FeedForward::load_gated(loader, names, stack, factor)?),
        })
    }

    /// The layer applied to `x`, plus `residual` if there is one. All are `[n_tokens, hidden]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a wrong width.
    pub fn forward<'a>(
        &self,
        on: impl Into<Adapted<'a, B>>,
        x: &B::Tensor,
        residual: Option<&B::Tensor>,
    ) -> Result<B::Tensor, ModelError> {
        match self {
            Self::Dense(block) => block.forward(on, x, residual),
            Self::Experts(experts) => experts.forward(on.into().backend, x, residual),
        }
    }
}

impl<B: Backend> Experts<B> {
    fn load(loader: &Loader<'_, B>, spec: &ExpertsSpec, hidden: usize) -> Result<Self, ModelError> {
        let names = spec.names;
        let layers = load_experts(loader, spec, hidden)?;
        let shared = match (&names.shared, spec.shared_width) {
            (Some(names), Some(width)) => {
                let sizes = [hidden, width];
                Some(match names.gate {
                    None => SharedExpert::Plain(listed(loader, names.parts, sizes, Loader::pack)?),
                    Some(gate) => {
                        let expert = listed(loader, names.parts, sizes, Loader::expert)?;
                        let experts = loader.backend().load_experts(vec![expert])?;
                        SharedExpert::Gated(loader.router(gate, [1, hidden])?, experts)
                    }
                })
            }
            _ => None,
        };
        Ok(Self {
            router: loader.router(names.router, [spec.n_experts, hidden])?,
            experts: loader.backend().load_experts(layers)?,
            shared,
            routing: spec.routing,
            activation: spec.activation,
        })
    }

    fn forward(
        &self,
        backend: &B,
        x: &B::Tensor,
        residual: Option<&B::Tensor>,
    ) -> Result<B::Tensor, ModelError> {
        let (routing, activation) = (self.routing, self.activation);
        let logits = &backend.linear(x, &self.router, Activation::None, None)?;
        let sum =
            backend.fused_experts(&self.experts, Routed { x, logits, routing, activation, residual })?;
        let residual = Some(&sum);
        match &self.shared {
            None => Ok(sum),
            Some(SharedExpert::Plain(ExpertLayers { gate_up, down })) => {
                let inner = backend.linear(x, gate_up, Activation::None, None)?;
                Ok(backend.linear(&backend.gate(&inner, activation)?, down, Activation::None, residual)?)
            }
            Some(SharedExpert::Gated(gate, expert)) => {
                let logits = &backend.linear(x, gate, Activation::None, None)?;
                let routed = Routed { x, logits, routing: SHARED, activation, residual };
                Ok(backend.fused_experts(expert, routed)?)
            }
        }
    }
}

/// The experts of a layer, as they are stored.
fn load_experts<B: Backend>(
    loader: &Loader<'_, B>,
    spec: &ExpertsSpec,
    hidden: usize,
) -> Result<Vec<ExpertLayers<B::Linear>>, ModelError> {
    let &ExpertsSpec { n_experts, width, .. } = spec;
    let one_by_one = |list: &str, parts| {
        let expert = |idx| listed(&loader.layer(list, idx), parts, [hidden, width], Loader::expert);
        (0..n_experts).map(expert).collect::<Result<_, _>>()
    };
    let (gate_up, down) = match spec.names.storage {
        ExpertStorage::List { list, parts } => return one_by_one(list, parts),
        ExpertStorage::StackedOrList { gate_up, list, parts, .. } if !loader.has_bare(gate_up) => {
            return one_by_one(list, parts);
        }
        ExpertStorage::StackedParts { parts: [gate, up, down] } => {
            let stacked =
                |name, [n_in, n_out]: [usize; 2]| loader.stacked_weight(name, [n_experts, n_in, n_out]);
            let inner = [stacked(gate, [hidden, width])?, stacked(up, [hidden, width])?];
            let down = stacked(down, [width, hidden])?;
            let expert = |idx: usize| {
                let gate_up = loader.expert(&[inner[0].element(idx), inner[1].element(idx)])?;
                let down = loader.expert(&[down.element(idx)])?;
                Ok(ExpertLayers { gate_up, down })
            };
            return (0..n_experts).map(expert).collect();
        }
        ExpertStorage::Stacked { gate_up, down } | ExpertStorage::StackedOrList { gate_up, down, .. } => {
            (gate_up, down)
        }
    };
    let gate_up = loader.stacked(gate_up, [n_experts, hidden, 2 * width])?;
    let down = loader.stacked(down, [n_experts, width, hidden])?;
    let expert = |idx: usize| {
        let gate_up = loader.expert(&[gate_up.element(idx)])?;
        let down = loader.expert(&[down.element(idx)])?;
        Ok(ExpertLayers { gate_up, down })
    };
    (0..n_experts).map(expert).collect()
}

/// Packing of layers that read the same input: as those of an expert, or as any.
type Pack<'a, B> = fn(&Loader<'a, B>, &[StoredLinear<'_>]) -> Result<<B as Backend>::Linear, ModelError>;

/// An expert whose gate, up and down are layers of their own.
fn listed<'a, B: Backend>(
    loader: &Loader<'a, B>,
    [gate, up, down]: [&'static str; 3],
    [hidden, width]: [usize; 2],
    pack: Pack<'a, B>,
) -> Result<ExpertLayers<B::Linear>, ModelError> {
    let stored = |name, shape: &[usize]| loader.stored(&LinearShape { name, shape, bias: false });
    let gate_up = [stored(gate, &[width, hidden])?, stored(up, &[width, hidden])?];
    let down = stored(down, &[hidden, width])?;
    Ok(ExpertLayers { gate_up: pack(loader, &gate_up)?, down: pack(loader, &[down])? })
}
