//! The token table, and the projection to logits: a matrix of its own, or the table itself where the two are tied.

use crate::error::ModelError;
use crate::spec::DecoderSpec;
use crate::weights::{Tensor, TensorRole, Weights};
use triptych_kernels::Backend;
use triptych_kernels::ops::LinearPart;

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
        None => None,
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
