//! LLaVA-1.5, LLaVA-NeXT, LLaVA-OneVision: a CLIP or SigLIP tower, two linear layers, and a decoder of the Llama line.
//!
//! After <https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/llava/modeling_llava.py> and
//! `llava_next/modeling_llava_next.py` and `llava_onevision/modeling_llava_onevision.py` beside it. Quirks: the tower is read at its last layer but one, without its class row;
//! LLaVA-NeXT reads an image small and as tiles, leaves out the patches of padding, and ends each line with a learned row;
//! LLaVA-OneVision does so too, up to a number of tiles, and with each of several images of a conversation, where transformers
//! may read several without tiles. Its videos are not served.

use super::Config;
use super::causal::{self, CausalKind, CausalPlace};
use super::pixtral::{self, PixtralKind};
use super::towers::{self, TowerOutput};
use crate::error::ModelError;
use crate::spec::*;

static PROJECTOR: ProjectorNames = ProjectorNames {
    prefixes: Some(&["multi_modal_projector.", "model.multi_modal_projector."]),
    norm: "",
    layers: &["linear_1", "linear_2"],
};
const NEWLINE: &[&str] = &["image_newline", "model.image_newline"];

/// A model of the line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LlavaKind {
    /// LLaVA-1.5.
    One,
    /// LLaVA-NeXT (LLaVA-1.6).
    Next,
    /// LLaVA-OneVision.
    OneVision,
}

/// The spec of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>, kind: LlavaKind) -> Result<ModelSpec, ModelError> {
    let vision = config.section("vision_config", "vision_config.")?;
    if kind == LlavaKind::One && vision.text("model_type")? == pixtral::TOWER {
        return pixtral::spec(config, PixtralKind::One);
    }
    let text = config.section("text_config", "text_config.")?;
    let tied_head =
        config.flag_or("tie_word_embeddings", false)? || text.flag_or("tie_word_embeddings", false)?;
    let place = CausalPlace { items: ItemsSpec::Embedded { levels: 0, is_mutual: false }, tied_head };
    let decoder = causal::spec(&text, CausalKind::of_section(&text)?, place)?;
    let hidden = decoder.stack.hidden;
    let layer = layer(config, if kind == LlavaKind::OneVision { -1 } else { -2 })?;
    let mut encoder = towers::spec(&vision, TowerOutput::Layer(layer))?;
    let strategy = if kind == LlavaKind::OneVision { "full" } else { "default" };
    let rows = rows(config, &encoder.stem, strategy)?;
    encoder.projector = Some(ProjectorSpec {
        rows,
        side: 1,
        merge: RowMerge::Concatenate,
        norm: None,
        widths: vec![hidden, hidden],
        bias: true,
        transposed: false,
        activation: config.activation("projector_hidden_act", "gelu")?,
        names: &PROJECTOR,
        merging: None,
        gated: None,
    });
    if !config.flag_or("multimodal_projector_bias", true)? {
        return Err(config.unsupported("multimodal_projector_bias", false, "true"));
    }
    if kind != LlavaKind::One {
        if rows == ProjectedRows::All {
            return Err(config.unsupported("vision_feature_select_strategy", "full", "default"));
        }
        let max_tiles = if kind == LlavaKind::OneVision { Some(max_tiles(config)?) } else { None };
        encoder.extras.learned_rows = vec![NEWLINE];
        encoder.extras.tiling = Some(TilingSpec::AnyResolution { sizes: sizes(config, kind)?, max_tiles });
    }
    Ok(ModelSpec { encoder: Some(encoder), decoder })
}

fn layer(config: &Config<'_>, default: i64) -> Result<i64, ModelError> {
    const KEY: &str = "vision_feature_layer";
    let Some(value) = config.get(KEY) else { return Ok(default) };
    value.as_i64().ok_or_else(|| config.unsupported(KEY, value, "one layer"))
}

/// Rows of the tower that become output rows.
fn rows(config: &Config<'_>, stem: &StemSpec, default: &str) -> Result<ProjectedRows, ModelError> {
    const KEY: &str = "vision_feature_select_strategy";
    let has_class = matches!(stem, StemSpec::PrefixedPatches { n_prefix: 1.., .. });
    match if config.get(KEY).is_some() { config.text(KEY)? } else { default } {
        "default" if has_class => Ok(ProjectedRows::Patches),
        "full" if has_class => Ok(ProjectedRows::All),
        "full" => Ok(ProjectedRows::Patches),
        // It would leave out the first patch.
        "default" => Err(config.unsupported(KEY, "default", "full, for a tower without a class row")),
        other => Err(config.unsupported(KEY, other, "default or full")),
    }
}

/// Tiles of `anyres_max_N`.
fn max_tiles(config: &Config<'_>) -> Result<u32, ModelError> {
    const KEY: &str = "vision_aspect_ratio";
    let Some(value) = config.get(KEY) else { return Ok(9) };
    let number =
        value.as_str().and_then(|text| text.strip_prefix("anyres_max_")).and_then(|n| n.parse().ok());
    number
        .filter(|n| (1..=256).contains(n))
        .ok_or_else(|| config.unsupported(KEY, value, "anyres_max_N, N from 1 to 256"))
}

/// Sizes that an image may be brought to, down and across.
fn sizes(config: &Config<'_>, kind: LlavaKind) -> Result<Vec<[u32; 2]>, ModelError> {
    const KEY: &str = "image_grid_pinpoints";
    let Some(value) = config.get(KEY) else {
        let squares = || (1..=6).map(|n| 384 * n);
        return Ok(match kind {
            LlavaKind::OneVision => squares().flat_map(|h| squares().map(move |w| [h, w])).collect(),
            LlavaKind::One | LlavaKind::Next => {
                vec![[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
            }
        });
    };
    let sizes: Option<Vec<[u32; 2]>> = serde_json::from_value(value.clone()).ok();
    let fits = |sizes: &Vec<[u32; 2]>| {
        (1..=256).contains(&sizes.len()) && sizes.iter().flatten().all(|n| (1..=8192).contains(n))
    };
    sizes.filter(fits).ok_or_else(|| {
        config.unsupported(KEY, value, "a list of up to 256 pairs of sides, each from 1 to 8192")
    })
}
