//! The token table, and the projection to logits: a matrix of its own, or the table itself where the two are tied; and what stands
//! before the projection.

use crate::error::ModelError;
use crate::layers::{LinearShape, Loader};
use crate::spec::{DecoderSpec, HeadTransformSpec};
use crate::weights::{Tensor, TensorRole, Weights};
use triptych_kernels::ops::{Activation, LinearPart};
use triptych_kernels::{Backend, KernelError};

/// The layers before the projection to logits, with their weights.
pub(super) struct HeadTransform<B: Backend> {
    dense: B::Linear,
    norm: B::Norm,
    activation: Activation,
}

impl<B: Backend> HeadTransform<B> {
    /// Loads the layers of rows of `hidden`.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(
        backend: &B,
        weights: &Weights,
        spec: &HeadTransformSpec,
        hidden: usize,
    ) -> Result<Self, ModelError> {
        let loader = Loader::new(backend, weights, &[""]);
        let [dense, norm] = spec.names;
        Ok(Self {
            dense: loader.linear(&[LinearShape { name: dense, shape: &[hidden, hidden], bias: true }])?,
            norm: loader.norm(norm, spec.norm, hidden)?,
            activation: spec.activation,
        })
    }

    /// `norm(act(W x + b))` of rows `x: [n_rows, hidden]`.
    ///
    /// # Errors
    /// [`KernelError`] for a wrong width.
    pub fn forward(&self, backend: &B, x: &B::Tensor) -> Result<B::Tensor, KernelError> {
        let x = backend.linear(x, &self.dense, self.activation, None)?;
        backend.norm(&x, &self.norm)
    }
}

/// The bias of logits behind a transform, `[vocab]`, where it is stored.
fn transform_bias<'a>(spec: &DecoderSpec, weights: &'a Weights) -> Result<Option<Tensor<'a>>, ModelError> {
    let biases = spec.head.transform.map_or(&[][..], |transform| transform.biases);
    let names: Vec<String> = biases.iter().map(|name| (*name).to_owned()).collect();
    match weights.has(&names) {
        true => weights.tensor(&names, &[spec.vocab], TensorRole::Bias).map(Some),
        false => Ok(None),
    }
}

/// Loads the token table `[n_embeddings, hidden]` and the head `[vocab, hidden]`. A stored head is used even where the
/// spec ties it to the table: some checkpoints say that theirs are tied and hold two that differ.
///
/// # Errors
/// [`ModelError`] for a tensor that is missing or has another shape.
pub(super) fn load_ends<B: Backend>(
    backend: &B,
    spec: &DecoderSpec,
    weights: &Weights,
) -> Result<(B::Table, B::Linear), ModelError> {
    let weight_names =
        |names: &[&str]| -> Vec<String> { names.iter().map(|name| format!("{name}.weight")).collect() };
    let own = weight_names(spec.names.head);
    let of_tokens = weight_names(spec.names.tokens);
    let hidden = spec.stack.hidden;
    let scale = spec.head.scale;
    let is_tied = spec.head.tied && !weights.has(&own);
    let names = if is_tied { &of_tokens } else { &own };
    let weight = weights.tensor(names, &[spec.vocab, hidden], TensorRole::Matrix)?;
    let stored_bias = spec.names.head_bias.map(|name| [name.to_owned()]).filter(|name| weights.has(name));
    let bias = match stored_bias {
        Some(name) => Some(weights.tensor(&name, &[1, spec.vocab], TensorRole::Bias)?.squeezed()),
        None => transform_bias(spec, weights)?,
    };
    // A bias is not scaled. Where there is none the back end scales as it packs, which needs no copy of what may be the
    // largest weight.
    let is_copied = bias.is_some() && scale != 1.0;
    if is_tied && !is_copied {
        let part = LinearPart { weight: weight.view(), bias: bias.as_ref().map(Tensor::view), scale };
        let (head, tokens) = backend.load_tied(part, spec.embedding_scale)?;
        return Ok((tokens, head));
    }
    let n_tokens = spec.vocab + spec.head.input_only;
    let table = weights.tensor(&of_tokens, &[n_tokens, hidden], TensorRole::Matrix)?;
    let tokens = backend.load_table(table.view(), spec.embedding_scale)?;
    let (weight, scale) = if is_copied { (weight.scaled(scale), 1.0) } else { (weight, scale) };
    let part = LinearPart { weight: weight.view(), bias: bias.as_ref().map(Tensor::view), scale };
    Ok((tokens, backend.load_logits(&[part])?))
}
