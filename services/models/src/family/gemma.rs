//! Gemma 2 and Gemma 3. Both: decoders whose layers partly see a window. Gemma 3 with images: a SigLIP tower before it, the
//! mean of each square of its rows, and one projection.
//!
//! After <https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/gemma3/modeling_gemma3.py> and
//! `gemma2` beside it. Quirks: norms stand before and behind attention and feed-forward and store their factors less 1; queries
//! are scaled by a number of the configuration; rows of an image see each other; the projection is a bare parameter. Gemma 2:
//! every other layer attends to a window, scores and logits are capped. Gemma 3: five layers of six, with a rotary base of
//! their own, and queries and keys are normalised. Token embeddings are scaled by `√hidden` in f32: models in bf16 round it.

use super::Config;
use super::causal::{self, CausalPlace};
use super::towers::{self, TowerOutput};
use crate::error::ModelError;
use crate::spec::*;
use triptych_kernels::ops::{Activation, AttentionShape};

static PROJECTOR: ProjectorNames = ProjectorNames {
    prefixes: Some(&["multi_modal_projector.", "model.multi_modal_projector."]),
    norm: "mm_soft_emb_norm",
    layers: &["mm_input_projection_weight"],
};

static NAMES: DecoderNames = causal::names("pre_feedforward_layernorm");

const SECOND_NORMS: [&str; 2] = ["post_attention_layernorm", "post_feedforward_layernorm"];

/// Bases of the rotation in layers that see everything and in those that see a window.
const THETAS: [f32; 2] = [1_000_000.0, 10_000.0];

/// A version of the decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GemmaVersion {
    /// Gemma 2.
    Two,
    /// Gemma 3.
    Three,
}

impl GemmaVersion {
    /// The class of a model by itself.
    fn architecture(self) -> &'static str {
        match self {
            Self::Two => "Gemma2ForCausalLM",
            Self::Three => "Gemma3ForCausalLM",
        }
    }

    /// Tokens of the vocabulary and of the context, where a configuration is silent.
    fn sizes(self) -> [usize; 2] {
        match self {
            Self::Two => [256_000, 8192],
            Self::Three => [262_208, 131_072],
        }
    }

    /// Bounds on scores and on logits, where a configuration is silent.
    fn softcaps(self) -> [Option<f32>; 2] {
        match self {
            Self::Two => [Some(50.0), Some(30.0)],
            Self::Three => [None; 2],
        }
    }

    /// True of the layers that see a window, where a configuration has no list: every other one from the first, or all but
    /// each last of `pattern`.
    fn is_windowed(self, layer: usize, pattern: usize) -> bool {
        match self {
            Self::Two => layer.is_multiple_of(2),
            Self::Three => !(layer + 1).is_multiple_of(pattern),
        }
    }
}

/// The spec of a decoder by itself.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported, and for a model of the same layers that writes no text.
pub(super) fn text_spec(config: &Config<'_>, version: GemmaVersion) -> Result<ModelSpec, ModelError> {
    causal::check_class(config, version.architecture())?;
    let tied_head = config.flag_or("tie_word_embeddings", true)?;
    let items = ItemsSpec::Embedded { levels: 0, is_mutual: false };
    Ok(ModelSpec { encoder: None, decoder: decoder(config, version, CausalPlace { items, tied_head })? })
}

/// The spec of a configuration of Gemma 3 with images.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>) -> Result<ModelSpec, ModelError> {
    let text = config.section("text_config", "text_config.")?;
    let tied_head = match text.get("tie_word_embeddings") {
        Some(_) => text.flag_or("tie_word_embeddings", true)?,
        None => config.flag_or("tie_word_embeddings", true)?,
    };
    let items = ItemsSpec::Embedded { levels: 0, is_mutual: true };
    let decoder = decoder(&text, GemmaVersion::Three, CausalPlace { items, tied_head })?;
    let vision = config.section("vision_config", "vision_config.")?;
    let mut encoder = towers::spec(&vision, TowerOutput::Normed)?;
    let eps = if vision.get("layer_norm_eps").is_some() { vision.number("layer_norm_eps")? } else { 1e-6 };
    let norm = NormSpec { unit_offset: true, ..NormSpec::rms(eps) };
    encoder.projector = Some(ProjectorSpec {
        rows: ProjectedRows::Patches,
        side: pooled_side(config, &encoder.stem)?,
        merge: RowMerge::Average,
        norm: Some(ProjectorNorm { norm, of_joined: true }),
        widths: vec![decoder.stack.hidden],
        bias: false,
        transposed: true,
        activation: Activation::None,
        names: &PROJECTOR,
        merging: None,
        gated: None,
    });
    encoder.extras.tiling = Some(TilingSpec::PanAndScan);
    Ok(ModelSpec { encoder: Some(encoder), decoder })
}

/// Side of the square of rows whose mean is an output row.
fn pooled_side(config: &Config<'_>, stem: &StemSpec) -> Result<usize, ModelError> {
    const KEY: &str = "mm_tokens_per_image";
    let n_rows = config.size_or(KEY, 256)?;
    let side = n_rows.isqrt();
    let n_patches = match stem {
        StemSpec::PrefixedPatches { grid, .. } => grid[0],
        _ => 0,
    };
    match side * side == n_rows && n_patches.is_multiple_of(side) && n_patches > 0 {
        true => Ok(n_patches / side),
        false => Err(config.unsupported(KEY, n_rows, format!("the square of a divisor of {n_patches}"))),
    }
}

/// The decoder of a section, or of a model by itself.
fn decoder(
    config: &Config<'_>,
    version: GemmaVersion,
    place: CausalPlace,
) -> Result<DecoderSpec, ModelError> {
    config.must_be_off("use_bidirectional_attention")?;
    let hidden = config.size_or("hidden_size", 2304)?;
    let n_layers = config.size_or("num_hidden_layers", 26)?;
    let eps = if config.get("rms_norm_eps").is_some() { config.number("rms_norm_eps")? } else { 1e-6 };
    let norm = NormSpec { unit_offset: true, ..NormSpec::rms(eps) };
    let [vocab, max_context] = version.sizes();
    let attention = attention(config, version, norm)?;
    let head_dim = attention.shape.head_dim;
    let (full, windowed) = match version {
        GemmaVersion::Two => (causal::rotary(config, head_dim)?, None),
        GemmaVersion::Three => {
            let [full, windowed] = rotations(config, head_dim)?;
            (full, Some(windowed))
        }
    };
    Ok(DecoderSpec {
        vocab: config.size_or("vocab_size", vocab)?,
        max_context: config.size_or("max_position_embeddings", max_context)?,
        positions: Positions::Rotary(full),
        stack: StackSpec {
            hidden,
            n_layers,
            attention,
            feed_forward: FeedForwardSpec {
                width: config.size_or("intermediate_size", 9216)?,
                kind: FeedForwardKind::Gated,
                activation: config.activation("hidden_activation", "gelu_pytorch_tanh")?,
                bias: false,
            },
            norm,
            input_norm: InputNorm::Absent,
            placement: NormPlacement::Sandwich { names: SECOND_NORMS },
            final_norm: true,
            layers: layers(config, version, windowed.as_ref())?,
        },
        items: place.items,
        embedding_scale: (hidden as f32).sqrt(),
        head: HeadSpec {
            softcap: softcap(config, "final_logit_softcapping", version.softcaps()[1])?,
            ..HeadSpec::plain(place.tied_head)
        },
        names: &NAMES,
    })
}

/// Heads, their scale, and what is normalised or capped.
fn attention(
    config: &Config<'_>,
    version: GemmaVersion,
    norm: NormSpec,
) -> Result<AttentionSpec, ModelError> {
    const SCALAR: &str = "query_pre_attn_scalar";
    const SOFTCAP: &str = "attn_logit_softcapping";
    let n_heads = config.size_or("num_attention_heads", 8)?;
    let n_kv_heads = config.size_or("num_key_value_heads", 4)?;
    config.share("num_key_value_heads", n_heads, n_kv_heads)?;
    let head_dim = config.size_or("head_dim", 256)?;
    let scalar = if config.get(SCALAR).is_some() { config.number(SCALAR)? } else { 256.0 };
    let softcap = softcap(config, SOFTCAP, version.softcaps()[0])?;
    if let (GemmaVersion::Three, Some(softcap)) = (version, softcap) {
        // The reference reads the key and caps nothing.
        return Err(config.unsupported(SOFTCAP, softcap, "null"));
    }
    let has_bias = config.flag_or("attention_bias", false)?;
    let head_norms = HeadNormsSpec { norm, part: NormedPart::Head, names: causal::HEAD_NORMS };
    Ok(AttentionSpec {
        shape: AttentionShape { n_heads, n_kv_heads, head_dim, scale: scalar.powf(-0.5), softcap },
        bias: AttentionBias { q: has_bias, k: has_bias, v: has_bias, out: has_bias },
        head_norms: (version == GemmaVersion::Three).then_some(head_norms),
    })
}

/// A bound on scores or logits: null is none, and so is a missing key where `default` is none.
fn softcap(config: &Config<'_>, key: &str, default: Option<f32>) -> Result<Option<f32>, ModelError> {
    match config.get(key) {
        Some(_) => config.number(key).map(Some),
        None if config.is_null(key) => Ok(None),
        None => Ok(default),
    }
}

/// Rotations of layers that see everything and of those that see a window. The newer key has a section for each; before it,
/// the scaling was that of the former alone.
fn rotations(config: &Config<'_>, head_dim: usize) -> Result<[RotarySpec; 2], ModelError> {
    const KEY: &str = "rope_parameters";
    let of = |kind: &str, base: &str, theta: f32| -> Result<RotarySpec, ModelError> {
        let of_kind = config.get(KEY).and_then(|all| all.get(kind)).filter(|v| v.is_object());
        let rope = match of_kind {
            Some(object) => Config::new("config.json", object),
            None => config.clone(),
        };
        let is_scaled = of_kind.is_some() || base == "rope_theta";
        let spec = if is_scaled {
            causal::rotary(&rope, head_dim)?
        } else {
            RotarySpec::new(theta, RotaryAxes::Single)
        };
        let key = if of_kind.is_some() { "rope_theta" } else { base };
        Ok(RotarySpec { theta: if rope.get(key).is_some() { rope.number(key)? } else { theta }, ..spec })
    };
    Ok([
        of("full_attention", "rope_theta", THETAS[0])?,
        of("sliding_attention", "rope_local_base_freq", THETAS[1])?,
    ])
}

/// The layers: by their list, or as their version has them. `rotary` is that of layers that see a window, where it differs.
fn layers(
    config: &Config<'_>,
    version: GemmaVersion,
    rotary: Option<&RotarySpec>,
) -> Result<Vec<LayerSpec>, ModelError> {
    let n_layers = config.size_or("num_hidden_layers", 26)?;
    let window = causal::window(config, 4096)?;
    let pattern = config.size_or("sliding_window_pattern", 6)?;
    let default = |layer| version.is_windowed(layer, pattern);
    let is_windowed = causal::windowed_layers(config, n_layers, default)?;
    let layer = |is_windowed: &bool| match is_windowed {
        true => LayerSpec { window, rotary: rotary.cloned(), ..LayerSpec::default() },
        false => LayerSpec::default(),
    };
    Ok(is_windowed.iter().map(layer).collect())
}
