//! Mixtures of experts of back ends in host memory.
//!
//! Rows are grouped by expert, so that an expert's weights are read once for all its rows. A token's sum is over its experts in
//! the order of their numbers, whatever else is in the batch.

use std::ops::Range;

use crate::check::{self, Dims};
use crate::ops::{Activation, Backend, ExpertLayers, Result, Routed, RouterScores, Routing};

/// The experts of a layer.
#[derive(Debug)]
pub struct HostExperts<L> {
    /// `[n_experts]`.
    layers: Vec<ExpertLayers<L>>,
}

impl<L> HostExperts<L> {
    /// Experts whose layers have dimensions `(n_in, n_out)`.
    pub(crate) fn new(layers: Vec<ExpertLayers<L>>, dims: impl Fn(&L) -> Dims) -> Result<Self> {
        check::experts(layers.iter().map(|expert| [dims(&expert.gate_up), dims(&expert.down)]))?;
        Ok(Self { layers })
    }
}

/// The experts that a batch of tokens goes to.
#[derive(Debug, PartialEq)]
pub(crate) struct Routes {
    /// Tokens of each expert, one expert after another, tokens ascending: `[n_tokens · top_k]`.
    tokens: Vec<u32>,
    /// Weights beside them.
    weights: Vec<f32>,
    /// Offsets of the experts in both, `[n_experts + 1]`.
    offsets: Vec<usize>,
}

impl Routes {
    /// Routes by `logits: [n_tokens, n_experts]`.
    pub(crate) fn new(logits: &[f32], n_experts: usize, routing: Routing) -> Self {
        let rows = logits.chunks_exact(n_experts.max(1));
        let mut chosen: Vec<(usize, u32, f32)> = Vec::with_capacity(rows.len() * routing.top_k);
        for (token, row) in rows.enumerate() {
            let experts = choose(row, routing);
            chosen.extend(experts.into_iter().map(|(expert, weight)| (expert, token as u32, weight)));
        }
        chosen.sort_by_key(|(expert, token, _)| (*expert, *token));
        let offsets = (0..=n_experts).map(|expert| chosen.partition_point(|(e, ..)| *e < expert)).collect();
        let (tokens, weights) = chosen.into_iter().map(|(_, token, weight)| (token, weight)).unzip();
        Self { tokens, weights, offsets }
    }

    /// Places of an expert's tokens.
    fn of(&self, expert: usize) -> Range<usize> {
        self.offsets[expert]..self.offsets[expert + 1]
    }
}

/// The experts of a token and their weights, by its logits. Logits that are no numbers count as the lowest.
fn choose(logits: &[f32], routing: Routing) -> Vec<(usize, f32)> {
    let Routing { top_k, scores, renormalize, scale } = routing;
    let mut chosen: Vec<(usize, f32)> = logits.iter().copied().enumerate().collect();
    let key = |logit: f32| if logit.is_nan() { f32::NEG_INFINITY } else { logit };
    // Both functions keep the order of logits. The sort is stable: of equal logits the first is chosen.
    chosen.sort_by(|a, b| key(b.1).total_cmp(&key(a.1)));
    let highest = chosen.first().map_or(0.0, |(_, logit)| *logit);
    let score = |logit: f32| match scores {
        RouterScores::Softmax => (logit - highest).exp(),
        RouterScores::Sigmoid => 1.0 / (1.0 + (-logit).exp()),
    };
    let all: f32 = match scores {
        RouterScores::Softmax if !renormalize => logits.iter().map(|logit| score(*logit)).sum(),
        _ => 1.0,
    };
    chosen.truncate(top_k);
    chosen.iter_mut().for_each(|(_, logit)| *logit = score(*logit));
    let sum = if renormalize { chosen.iter().map(|(_, score)| score).sum() } else { all };
    chosen.iter_mut().for_each(|(_, score)| *score = *score / sum * scale);
    chosen
}

/// [`Backend::fused_experts`] by the other ops of a back end for which uploads and downloads are free.
pub(crate) fn fused_experts<B: Backend>(
    backend: &B,
    experts: &HostExperts<B::Linear>,
    Routed { x, logits, routing, activation, residual }: Routed<'_, B::Tensor>,
) -> Result<B::Tensor> {
    let (n_tokens, hidden) = backend.dims(x);
    let n_experts = experts.layers.len();
    let top_k = [routing.top_k, Routing::MAX_TOP_K];
    check::fused_experts(backend.dims(x), backend.dims(logits), n_experts, top_k)?;
    let routes = Routes::new(&backend.download(logits)?, n_experts, routing);
    let rows = backend.download(x)?;
    let mut sums: Vec<f32> = Vec::new();
    for (expert, layers) in experts.layers.iter().enumerate() {
        let of = routes.of(expert);
        if of.is_empty() {
            continue;
        }
        let (tokens, weights) = (&routes.tokens[of.clone()], &routes.weights[of]);
        let own = tokens.iter().flat_map(|token| &rows[*token as usize * hidden..][..hidden]).copied();
        let own = backend.upload(own.collect(), tokens.len(), hidden)?;
        let inner = backend.linear(&own, &layers.gate_up, Activation::None, None)?;
        let inner = backend.gate(&inner, activation)?;
        let outer = backend.linear(&inner, &layers.down, Activation::None, None)?;
        let n_out = backend.dims(&outer).1;
        sums.resize(n_tokens * n_out, 0.0);
        let outer = backend.take_values(outer)?;
        for ((token, weight), row) in tokens.iter().zip(weights).zip(outer.chunks_exact(n_out.max(1))) {
            let sum = &mut sums[*token as usize * n_out..][..n_out];
            sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += weight * value);
        }
    }
    sums.resize(n_tokens * hidden, 0.0);
    let mut sums = backend.upload(sums, n_tokens, hidden)?;
    if let Some(residual) = residual {
        backend.add(&mut sums, residual)?;
    }
    Ok(sums)
}
