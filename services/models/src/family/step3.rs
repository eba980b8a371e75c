//! Step3: a vision tower whose grid two convolutions make smaller, and a decoder with experts whose queries have a low rank.
//!
//! After `step3_vl.py` and `step3_text.py` of vLLM 0.32
//! (<https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/step3_vl.py>): transformers has no class of the
//! model, and the code beside its weights (<https://huggingface.co/stepfun-ai/step3>) was not run. Quirks: the tower's norms are of
//! what a sub-layer adds; its class row is there four times, and all patches attend to it; an image is read as a whole and in
//! windows, which are smaller, so that positions are resampled; one key head serves all query heads; experts are stored as one
//! tensor each of gate, up and down. The sizes of windows are in no configuration: they are 9/13 of an image's, as published.

use super::Config;
use super::causal::{self, silu};
use super::image_keys;
use crate::error::ModelError;
use crate::spec::*;
use serde_json::{Value, json};
use std::sync::LazyLock;
use triptych_core::Modality;
use triptych_kernels::ops::{Activation, AttentionShape, RouterScores, Routing};

/// Patches on a side of a window and of a whole image have this ratio: 504 and 728 pixels as published.
const SIDES: [usize; 2] = [9, 13];

/// Copies of the class row.
const N_CLASS_ROWS: usize = 4;

/// Side of the squares of rows that the first convolution joins, and its stride.
const JOINED: usize = 2;

const NO_BIAS: AttentionBias = AttentionBias { q: false, k: false, v: false, out: false };
const ALL_BIAS: AttentionBias = AttentionBias { q: true, k: true, v: true, out: true };

/// Value of the class where a configuration is silent.
static TEXT_DEFAULTS: LazyLock<Value> = LazyLock::new(|| json!({ "rope_theta": 500_000.0 }));

static TOWER: EncoderNames = EncoderNames {
    prefixes: &["vision_model."],
    stem: &["embeddings.patch_embedding", "embeddings.class_embedding", "embeddings.position_embedding"],
    tokens: &[],
    positions: "",
    stack: StackNames {
        input_norm: "",
        layers: "transformer.layers",
        attention: AttentionNames {
            norm: "layer_norm1",
            qkv: QkvNames::Fused("self_attn.qkv_proj"),
            out: "self_attn.out_proj",
        },
        cross: None,
        feed_forward_norm: "layer_norm2",
        feed_forward_inner: &["mlp.fc1"],
        feed_forward_outer: "mlp.fc2",
        final_norm: "",
    },
};

static PROJECTOR: ProjectorNames =
    ProjectorNames { prefixes: Some(&["vit_downsampler."]), norm: "", layers: &[] };

const REDUCTION: [&[&str]; 2] = [&["vit_downsampler2."], &["vit_large_projector."]];

static DECODER: DecoderNames = DecoderNames {
    prefixes: &["model."],
    tokens: &["model.embed_tokens"],
    ..causal::names("post_attention_layernorm")
};

const QUERY: [&str; 2] = ["self_attn.inter_norm", "self_attn.wq"];

static EXPERTS: ExpertsNames = ExpertsNames {
    router: "moe.gate",
    storage: ExpertStorage::StackedParts { parts: ["moe.gate_proj", "moe.up_proj", "moe.down_proj"] },
    shared: Some(SharedExpertNames {
        gate: None,
        parts: ["share_expert.gate_proj", "share_expert.up_proj", "share_expert.down_proj"],
    }),
};

/// The spec of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>) -> Result<ModelSpec, ModelError> {
    let text = config.section("text_config", "text_config.")?;
    let vision = config.section("vision_config", "vision_config.")?;
    let decoder = decoder(&text)?;
    let encoder = encoder(config, &vision, decoder.stack.hidden)?;
    let StemSpec::SquareViews(stem) = &encoder.stem else {
        return Ok(ModelSpec { encoder: Some(encoder), decoder });
    };
    for (key, side) in ["patch_token_len", "image_token_len"].into_iter().zip(stem.sides) {
        let n_rows = encoder.image_tokens([side; 2]).unwrap_or_default();
        if config.size_or(key, n_rows)? != n_rows {
            let expected = format!("{n_rows}, the rows of {side} by {side} patches");
            return Err(config.unsupported(key, config.size(key)?, expected));
        }
    }
    Ok(ModelSpec { encoder: Some(encoder), decoder })
}

/// The tower and what projects its rows to `out` values; `top` has the keys of the projector.
fn encoder(top: &Config<'_>, config: &Config<'_>, out: usize) -> Result<EncoderSpec, ModelError> {
    const STRIDE: &str = "understand_projector_stride";
    match top.size(STRIDE)? {
        JOINED => {}
        stride => return Err(top.unsupported(STRIDE, stride, JOINED.to_string())),
    }
    if !config.flag_or("enable_patch", true)? {
        return Err(config.unsupported("enable_patch", false, "true"));
    }
    let hidden = config.size("hidden_size")?;
    let channels = config.size("output_hidden_size")?;
    let eps = if config.get("layer_norm_eps").is_some() { config.number("layer_norm_eps")? } else { 1e-5 };
    let activation = match config.get("hidden_act").map(|act| act.as_str()) {
        None | Some(Some("quick_gelu")) => Activation::QuickGelu,
        Some(other) => return Err(config.unsupported("hidden_act", format!("{other:?}"), "quick_gelu")),
    };
    let side = image_keys::patch_side(config)?;
    Ok(EncoderSpec {
        modality: Modality::Image,
        stem: StemSpec::SquareViews(SquareViewsSpec {
            patch: [image_keys::channels(config, "num_channels")?, side, side],
            sides: sides(config, side)?,
            n_prefix: N_CLASS_ROWS,
        }),
        positions: Positions::Absent,
        stack: StackSpec {
            hidden,
            n_layers: config.size("num_hidden_layers")?,
            attention: image_keys::attention(config, hidden, "num_attention_heads", ALL_BIAS)?,
            feed_forward: FeedForwardSpec {
                width: config.size("intermediate_size")?,
                kind: FeedForwardKind::Plain,
                activation,
                bias: true,
            },
            norm: NormSpec::layer(eps),
            input_norm: InputNorm::Absent,
            placement: NormPlacement::ResPost,
            final_norm: false,
            layers: Vec::new(),
        },
        windows: None,
        extras: EncoderExtras {
            tiling: Some(TilingSpec::SlidingWindows),
            reduction: Some(ReductionSpec {
                channels: 2 * channels,
                out,
                bias: top.flag_or("projector_bias", true)?,
                prefixes: REDUCTION,
            }),
            ..EncoderExtras::default()
        },
        projector: Some(ProjectorSpec {
            rows: ProjectedRows::Patches,
            side: JOINED,
            merge: RowMerge::Concatenate,
            norm: None,
            widths: Vec::new(),
            bias: false,
            transposed: false,
            activation: Activation::None,
            names: &PROJECTOR,
            merging: Some(MergingSpec { width: channels, form: MergingForm::Convolution, name: "" }),
            gated: None,
        }),
        names: &TOWER,
    })
}

/// Patches on a side of a window and of a whole image.
fn sides(config: &Config<'_>, patch: usize) -> Result<[usize; 2], ModelError> {
    const KEY: &str = "image_size";
    let [part, whole] = SIDES;
    let image = config.size(KEY)?;
    match image.is_multiple_of(patch * whole) {
        true => Ok([part, whole].map(|n| n * (image / patch / whole))),
        false => {
            Err(config.unsupported(KEY, image, format!("a multiple of {whole} patches of {patch} pixels")))
        }
    }
}

fn decoder(config: &Config<'_>) -> Result<DecoderSpec, ModelError> {
    const GROUPS: &str = "num_attention_groups";
    let config = &config.with_defaults(&TEXT_DEFAULTS);
    match config.size_or(GROUPS, 1)? {
        1 => {}
        n => return Err(config.unsupported(GROUPS, n, "1")),
    }
    let hidden = config.size("hidden_size")?;
    let n_layers = config.size("num_hidden_layers")?;
    let n_heads = config.size("num_attention_heads")?;
    let head_dim = config.size("head_dim")?;
    let rank = config.size("share_q_dim")?;
    let scale = 1.0 / (head_dim as f32).sqrt();
    let eps = if config.get("rms_norm_eps").is_some() { config.number("rms_norm_eps")? } else { 1e-5 };
    let experts = experts(config)?;
    let layer = |has_experts: bool| LayerSpec {
        experts: has_experts.then(|| experts.clone()),
        low_rank_query: Some(LowRankQuerySpec { rank, names: QUERY }),
        ..LayerSpec::default()
    };
    Ok(DecoderSpec {
        vocab: config.size("vocab_size")?,
        max_context: config.size("max_position_embedding")?,
        positions: Positions::Rotary(causal::rotary(config, head_dim)?),
        stack: StackSpec {
            hidden,
            n_layers,
            attention: AttentionSpec {
                shape: AttentionShape { n_heads, n_kv_heads: 1, head_dim, scale, softcap: None },
                bias: NO_BIAS,
                head_norms: None,
            },
            feed_forward: FeedForwardSpec {
                width: config.size("intermediate_size")?,
                kind: FeedForwardKind::Gated,
                activation: silu(config)?,
                bias: false,
            },
            norm: NormSpec::rms(eps),
            input_norm: InputNorm::Absent,
            placement: NormPlacement::Pre,
            final_norm: true,
            layers: sparse_layers(config, n_layers)?.into_iter().map(layer).collect(),
        },
        items: ItemsSpec::Embedded { levels: 0, is_mutual: false },
        embedding_scale: 1.0,
        head: HeadSpec::plain(config.flag_or("tie_word_embeddings", false)?),
        names: &DECODER,
    })
}

/// The experts of a layer that has them.
fn experts(config: &Config<'_>) -> Result<ExpertsSpec, ModelError> {
    const TOP_K: &str = "moe_top_k";
    let n_experts = config.size("moe_num_experts")?;
    let top_k = config.size(TOP_K)?;
    let most = n_experts.min(Routing::MAX_TOP_K);
    if top_k > most {
        return Err(config.unsupported(TOP_K, top_k, format!("{most} or less")));
    }
    let renormalize = config.flag_or("norm_expert_weight", false)?;
    Ok(ExpertsSpec {
        n_experts,
        width: config.size("moe_intermediate_size")?,
        routing: Routing { top_k, scores: RouterScores::Softmax, renormalize, scale: 1.0 },
        activation: silu(config)?,
        shared_width: Some(config.size("share_expert_dim")?),
        names: &EXPERTS,
    })
}

/// The layers that have experts: numbers in a text between commas, or in a list.
fn sparse_layers(config: &Config<'_>, n_layers: usize) -> Result<Vec<bool>, ModelError> {
    const KEY: &str = "moe_layers_enum";
    let value = config.required(KEY)?;
    let numbers: Option<Vec<usize>> = match value {
        Value::String(text) => text.split(',').map(|n| n.trim().parse().ok()).collect(),
        Value::Array(list) => list.iter().map(|n| n.as_u64().and_then(|n| usize::try_from(n).ok())).collect(),
        _ => None,
    };
    let numbers = numbers.filter(|numbers| numbers.iter().all(|n| *n < n_layers));
    let numbers = numbers.ok_or_else(|| {
        config.unsupported(KEY, value, format!("numbers of layers, from 0 to {}", n_layers - 1))
    })?;
    Ok((0..n_layers).map(|layer| numbers.contains(&layer)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(section: &str, changes: Value) -> Result<ModelSpec, String> {
        let mut config = json!({
            "understand_projector_stride": 2,
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 48, "output_hidden_size": 16, "num_hidden_layers": 1,
                "num_attention_heads": 2, "image_size": 728, "patch_size": 14,
            },
            "text_config": {
                "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
                "head_dim": 16, "share_q_dim": 24, "max_position_embedding": 64, "vocab_size": 99,
                "moe_num_experts": 4, "moe_top_k": 2, "moe_intermediate_size": 8, "share_expert_dim": 8,
                "moe_layers_enum": "1, 2",
            },
        });
        let object = if section.is_empty() { &mut config } else { &mut config[section] };
        object.as_object_mut().expect("an object").extend(changes.as_object().expect("an object").clone());
        spec(&Config::new("config.json", &config)).map_err(|e| e.to_string())
    }

    #[test]
    fn a_window_and_a_whole_image_have_the_published_numbers_of_rows() {
        let encoder = read("", json!({})).expect("a model").encoder.expect("an encoder");
        assert_eq!([36, 52].map(|side| encoder.image_tokens([side; 2])), [Some(81), Some(169)]);
        assert_eq!(encoder.output_width(), 32);
    }

    #[test]
    fn layers_have_experts_by_a_text_or_a_list() {
        let check = |layers: Value, expect: [bool; 3]| {
            let stack =
                read("text_config", json!({ "moe_layers_enum": layers })).expect("a model").decoder.stack;
            assert_eq!([0, 1, 2].map(|i| stack.layer(i).experts.is_some()), expect);
        };
        check(json!("1,2"), [false, true, true]);
        check(json!([0]), [true, false, false]);
    }

    #[test]
    fn what_is_not_served_is_refused_by_its_key() {
        let check = |section: &str, changes: Value, key: &str| {
            let error = read(section, changes).expect_err(key);
            assert!(error.contains(key), "{error}");
        };
        check("", json!({ "understand_projector_stride": 1 }), "understand_projector_stride");
        check("", json!({ "image_token_len": 196 }), "image_token_len");
        check("", json!({ "patch_token_len": 80 }), "patch_token_len");
        check("vision_config", json!({ "image_size": 720 }), "image_size");
        check("vision_config", json!({ "hidden_act": "gelu" }), "hidden_act");
        check("vision_config", json!({ "enable_patch": false }), "enable_patch");
        check("text_config", json!({ "num_attention_groups": 2 }), "num_attention_groups");
        check("text_config", json!({ "moe_top_k": 5 }), "moe_top_k");
        check("text_config", json!({ "moe_layers_enum": "1,3" }), "moe_layers_enum");
        check("text_config", json!({ "moe_layers_enum": "one" }), "moe_layers_enum");
        check("text_config", json!({ "moe_layers_enum": null }), "moe_layers_enum");
        check("text_config", json!({ "share_q_dim": null }), "share_q_dim");
        check("text_config", json!({ "hidden_act": "gelu" }), "hidden_act");
    }
}
