//! Image towers of vision-language models: CLIP, SigLIP, and that of Idefics3 and SmolVLM, which is SigLIP by another name.
//!
//! After <https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/clip/modeling_clip.py> and
//! `siglip/modeling_siglip.py` beside it. Quirks: CLIP has a class row, a norm before its layers (misspelt in its checkpoints)
//! and no bias on patches, SigLIP none of them; what follows the layers is left alone, for models read the output of a layer.
//! Tensors are stored with `vision_model.` in their names and without, as one version of transformers or another writes them.

use super::Config;
use super::image_keys;
use crate::error::ModelError;
use crate::spec::*;
use triptych_core::Modality;

/// In models that have a tower and a projector.
const TOWER: &[&str] = &[
    "vision_tower.vision_model.",
    "model.vision_tower.vision_model.",
    "vision_tower.",
    "model.vision_tower.",
];
/// In models of an image encoder and a text decoder.
const ENCODER: &[&str] = &["encoder.vision_model.", "encoder."];
/// In Idefics3 and SmolVLM.
const VISION_MODEL: &[&str] = &["model.vision_model.", "vision_model."];

const fn names(
    prefixes: &'static [&'static str],
    stem: &'static [&'static str],
    input_norm: &'static str,
) -> EncoderNames {
    EncoderNames {
        prefixes,
        stem,
        tokens: &[],
        positions: "embeddings.position_embedding",
        stack: StackNames {
            input_norm,
            layers: "encoder.layers",
            attention: AttentionNames {
                norm: "layer_norm1",
                qkv: QkvNames::Split(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
                out: "self_attn.out_proj",
            },
            cross: None,
            feed_forward_norm: "layer_norm2",
            feed_forward_inner: &["mlp.fc1"],
            feed_forward_outer: "mlp.fc2",
            final_norm: "post_layernorm",
        },
    }
}

const CLIP_STEM: &[&str] = &["embeddings.patch_embedding", "embeddings.class_embedding"];

static CLIP: EncoderNames = names(TOWER, CLIP_STEM, "pre_layrnorm");
static CLIP_ENCODER: EncoderNames = names(ENCODER, CLIP_STEM, "pre_layrnorm");
static SIGLIP: EncoderNames = names(TOWER, &["embeddings.patch_embedding"], "");
static IDEFICS: EncoderNames = names(VISION_MODEL, &["embeddings.patch_embedding"], "");

/// Rows of a tower that a model reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TowerOutput {
    /// The output of a layer: `hidden_states[layer]` of transformers, negative from the end.
    Layer(i64),
    /// The output of all layers, normalised.
    Normed,
}

/// Differences between towers.
struct TowerKind {
    names: &'static EncoderNames,
    has_class: bool,
    eps: f32,
    activation: &'static str,
    /// Values where a configuration is silent: width of rows, of the feed-forward, heads, side of a patch.
    defaults: [usize; 4],
}

impl TowerKind {
    fn of(config: &Config<'_>) -> Result<Self, ModelError> {
        let siglip = |names, defaults| Self {
            names,
            has_class: false,
            eps: 1e-6,
            activation: "gelu_pytorch_tanh",
            defaults,
        };
        match config.text("model_type")? {
            "clip_vision_model" => Ok(Self {
                names: &CLIP,
                has_class: true,
                eps: 1e-5,
                activation: "quick_gelu",
                defaults: [768, 3072, 12, 32],
            }),
            "siglip_vision_model" => Ok(siglip(&SIGLIP, [768, 3072, 12, 16])),
            "idefics3" | "idefics3_vision" | "smolvlm" | "smolvlm_vision" => {
                Ok(siglip(&IDEFICS, [1152, 3072, 16, 32]))
            }
            other => {
                let expected = "clip_vision_model, siglip_vision_model, idefics3_vision or smolvlm_vision";
                Err(config.unsupported("model_type", other, expected))
            }
        }
    }
}

/// The tower of a section.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>, output: TowerOutput) -> Result<EncoderSpec, ModelError> {
    let kind = TowerKind::of(config)?;
    let [hidden, width, n_heads, side] = kind.defaults;
    let is_clip = kind.has_class;
    let hidden = config.size_or("hidden_size", hidden)?;
    let side = if config.get("patch_size").is_some() { image_keys::patch_side(config)? } else { side };
    let pixels = config.size_or("image_size", 224)?;
    if pixels < side {
        return Err(config.unsupported("image_size", pixels, format!("{side}, patch_size, or more")));
    }
    let grid = [pixels / side; 2];
    let n_prefix = usize::from(is_clip);
    let bias = AttentionBias { q: true, k: true, v: true, out: true };
    let all_layers = config.size_or("num_hidden_layers", 12)?;
    let n_layers = match output {
        TowerOutput::Layer(layer) => n_layers(config, all_layers, layer)?,
        TowerOutput::Normed => all_layers,
    };
    let eps =
        if config.get("layer_norm_eps").is_some() { config.number("layer_norm_eps")? } else { kind.eps };
    Ok(EncoderSpec {
        modality: Modality::Image,
        stem: StemSpec::PrefixedPatches {
            patch: [image_keys::channels(config, "num_channels")?, side, side],
            grid,
            bias: !is_clip,
            n_prefix,
            n_registers: 0,
            flat_prefix: true,
        },
        positions: Positions::Table { n_rows: grid[0] * grid[1] + n_prefix, offset: 0 },
        stack: StackSpec {
            hidden,
            n_layers,
            attention: image_keys::attention_of(
                config,
                hidden,
                config.size_or("num_attention_heads", n_heads)?,
                bias,
            )?,
            feed_forward: FeedForwardSpec {
                width: config.size_or("intermediate_size", width)?,
                kind: FeedForwardKind::Plain,
                activation: config.activation("hidden_act", kind.activation)?,
                bias: true,
            },
            norm: NormSpec::layer(eps),
            input_norm: if is_clip { InputNorm::AfterPositions } else { InputNorm::Absent },
            placement: NormPlacement::Pre,
            final_norm: output == TowerOutput::Normed,
            layers: Vec::new(),
        },
        windows: None,
        extras: EncoderExtras::default(),
        projector: None,
        names: kind.names,
    })
}

/// CLIP's tower as the encoder of a model with a text decoder, which reads the output of its last layer.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn clip_encoder(config: &Config<'_>) -> Result<EncoderSpec, ModelError> {
    Ok(EncoderSpec { names: &CLIP_ENCODER, ..spec(config, TowerOutput::Layer(-1))? })
}

/// Layers that are computed for the output of one: 0 is the input of the first.
///
/// # Errors
/// [`ModelError::Config`] for a layer that the tower has not.
pub(super) fn n_layers(config: &Config<'_>, all: usize, layer: i64) -> Result<usize, ModelError> {
    let index = if layer < 0 { layer + all as i64 + 1 } else { layer };
    match usize::try_from(index) {
        Ok(n) if (1..=all).contains(&n) => Ok(n),
        _ => Err(config.unsupported("vision_feature_layer", layer, format!("one of {all} layers"))),
    }
}
