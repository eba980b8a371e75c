//! Idefics3 and SmolVLM: a SigLIP tower over tiles, a square of rows joined and projected, and a Llama decoder.
//!
//! After <https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/idefics3/modeling_idefics3.py> and
//! `smolvlm/modeling_smolvlm.py` beside it. Quirks: an image is brought to whole tiles, which are read beside the whole image;
//! each has its place written before its rows. Positions of patches go by fractions of a side, which for whole tiles are their
//! numbers. Videos are not served.

use super::Config;
use super::causal::{self, CausalKind, CausalPlace};
use super::towers::{self, TowerOutput};
use crate::error::ModelError;
use crate::spec::*;
use triptych_kernels::ops::Activation;

static CONNECTOR: ProjectorNames = ProjectorNames {
    prefixes: Some(&["model.connector.", "connector."]),
    norm: "",
    layers: &["modality_projection.proj"],
};

/// The spec of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>) -> Result<ModelSpec, ModelError> {
    let text = config.section("text_config", "text_config.")?;
    let tied_head = config.flag_or("tie_word_embeddings", false)?;
    let place = CausalPlace { items: ItemsSpec::Embedded { levels: 0, is_mutual: false }, tied_head };
    let decoder = causal::spec(&text, CausalKind::of_section(&text)?, place)?;
    let mut encoder = towers::spec(&config.section("vision_config", "vision_config.")?, TowerOutput::Normed)?;
    let side = config.size_or("scale_factor", 2)?;
    if let StemSpec::PrefixedPatches { grid, .. } = &encoder.stem
        && !grid[0].is_multiple_of(side)
    {
        return Err(config.unsupported("scale_factor", side, format!("a divisor of {}", grid[0])));
    }
    encoder.projector = Some(ProjectorSpec {
        rows: ProjectedRows::Patches,
        side,
        merge: RowMerge::Concatenate,
        norm: None,
        widths: vec![decoder.stack.hidden],
        bias: false,
        transposed: false,
        activation: Activation::None,
        names: &CONNECTOR,
        merging: None,
        gated: None,
    });
    encoder.extras.tiling = Some(TilingSpec::Split);
    Ok(ModelSpec { encoder: Some(encoder), decoder })
}
