//! The projection to logits: a matrix of its own, or the token table as one.

use crate::error::ModelError;
use crate::spec::DecoderSpec;
use crate::weights::{TensorRole, Weights};
use triptych_kernels::Backend;
use triptych_kernels::ops::LinearPart;

/// Loads the head of a decoder. A head that is stored is used even where the spec ties it to the token table:
/// some checkpoints say that theirs are tied and hold two that differ.
///
/// # Errors
/// [`ModelError`] for a tensor that is missing or has another shape.
pub(super) fn load_head<B: Backend>(
    backend: &B,
    spec: &DecoderSpec,
    weights: &Weights,
) -> Result<B::Linear, ModelError> {
    let weight_names =
        |names: &[&str]| -> Vec<String> { names.iter().map(|name| format!("{name}.weight")).collect() };
    let own = weight_names(spec.names.head);
    let names = if spec.head.tied && !weights.has(&own) { weight_names(spec.names.tokens) } else { own };
    let weight = weights.tensor(&names, &[spec.vocab, spec.stack.hidden], TensorRole::Matrix)?;
    let stored_bias = spec.names.head_bias.map(|name| [name.to_owned()]).filter(|name| weights.has(name));
    let bias = match stored_bias {
        Some(name) => Some(weights.tensor(&name, &[1, spec.vocab], TensorRole::Bias)?.squeezed()),
        None => None,
    };
    let Some(bias) = bias else {
        // The back end scales as it packs, which needs no copy of what may be the largest weight.
        let part = LinearPart { scale: spec.head.scale, ..LinearPart::new(weight.view(), None) };
        return Ok(backend.load_logits(&[part])?);
    };
    // A bias is not scaled.
    let weight = weight.scaled(spec.head.scale);
    Ok(backend.load_logits(&[LinearPart::new(weight.view(), Some(bias.view()))])?)
}
