//! Qwen3.5, dense and with experts: a Qwen3 decoder of whose layers three in four recur over tokens; by itself, or as the decoder of a
//! vision-language model (`qwen_vl`).
//!
//! After <https://github.com/huggingface/transformers/blob/v5.2.0/src/transformers/models/qwen3_5/modeling_qwen3_5.py> and
//! `qwen3_5_moe/modeling_qwen3_5_moe.py` beside it, whose layers all have experts. Quirks: norms
//! store their factor less 1, but for the one inside linear attention; full attention has a gate beside each head's query, and
//! rotates a quarter of a head unless the configuration says otherwise; M-RoPE is interleaved also where the configuration does not
//! say so. The layers for multi-token prediction (`mtp.*`) are not read.

use super::Config;
use super::causal::{self, CausalKind, CausalPlace};
use crate::error::ModelError;
use crate::spec::*;
use serde_json::{Value, json};
use std::sync::LazyLock;
use triptych_kernels::ops::StateLayout;

/// Values of the class where a configuration is silent.
static DEFAULTS: LazyLock<Value> = LazyLock::new(|| {
    json!({
        "vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32_768,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "full_attention_interval": 4,
    })
});

/// Other values of the class with experts.
static MOE_DEFAULTS: LazyLock<Value> =
    LazyLock::new(|| json!({ "hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2 }));

static NAMES: DecoderNames = {
    let mut names = causal::names("post_attention_layernorm");
    names.stack.attention.qkv =
        QkvNames::SplitGated(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]);
    names
};

static DELTA: GatedDeltaNames = GatedDeltaNames {
    qkv: "linear_attn.in_proj_qkv",
    gate: "linear_attn.in_proj_z",
    beta_decay: ["linear_attn.in_proj_b", "linear_attn.in_proj_a"],
    conv: "linear_attn.conv1d",
    a_log: "linear_attn.A_log",
    dt_bias: "linear_attn.dt_bias",
    norm: "linear_attn.norm",
    out: "linear_attn.out_proj",
};

/// The spec of a decoder by itself.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported, and for a model of the same layers that writes no text.
pub(super) fn text_spec(config: &Config<'_>) -> Result<ModelSpec, ModelError> {
    causal::check_class(config, "Qwen3_5ForCausalLM")?;
    let tied_head = config.flag_or("tie_word_embeddings", false)?;
    let place = CausalPlace { items: ItemsSpec::Embedded { levels: 0, is_mutual: false }, tied_head };
    Ok(ModelSpec { encoder: None, decoder: spec(config, CausalKind::Qwen35, place)? })
}

/// The decoder of a section of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(
    config: &Config<'_>,
    kind: CausalKind,
    place: CausalPlace,
) -> Result<DecoderSpec, ModelError> {
    let config = match kind {
        CausalKind::Qwen35Moe => &config.with_defaults(&MOE_DEFAULTS).with_defaults(&DEFAULTS),
        _ => &config.with_defaults(&DEFAULTS),
    };
    if !config.flag_or("attn_output_gate", true)? {
        return Err(config.unsupported("attn_output_gate", false, "true"));
    }
    let mut spec = causal::spec(config, kind, place)?;
    let stack = &mut spec.stack;
    let experts = std::mem::take(&mut stack.layers).into_iter().map(|layer| layer.experts);
    let recurring = layers(config, stack)?;
    let experts = experts.chain(std::iter::repeat(None));
    stack.layers =
        recurring.into_iter().zip(experts).map(|(layer, experts)| LayerSpec { experts, ..layer }).collect();
    stack.norm.unit_offset = true;
    if let Some(norms) = &mut stack.attention.head_norms {
        norms.norm.unit_offset = true;
    }
    spec.names = &NAMES;
    Ok(spec)
}

/// The layers: by their list, or every one but each of a number.
fn layers(config: &Config<'_>, stack: &StackSpec) -> Result<Vec<LayerSpec>, ModelError> {
    const KEY: &str = "layer_types";
    let n_layers = stack.n_layers;
    let is_recurrent = match config.get(KEY) {
        None => {
            let interval = config.size("full_attention_interval")?;
            (1..=n_layers).map(|layer| !layer.is_multiple_of(interval)).collect()
        }
        Some(list) => {
            let kind = |kind: &Value| match kind.as_str() {
                Some("linear_attention") => Some(true),
                Some("full_attention") => Some(false),
                _ => None,
            };
            let kinds: Option<Vec<bool>> = list.as_array().and_then(|list| list.iter().map(kind).collect());
            kinds.filter(|kinds| kinds.len() == n_layers).ok_or_else(|| {
                config.unsupported(KEY, list, format!("{n_layers} of linear_attention and full_attention"))
            })?
        }
    };
    if is_recurrent.iter().all(|is_recurrent| *is_recurrent) {
        let key = if config.get(KEY).is_some() { KEY } else { "full_attention_interval" };
        return Err(config.unsupported(key, "linear_attention alone", "full_attention in one layer or more"));
    }
    let recurrent = delta(config, stack)?;
    let layer = |is_recurrent: bool| LayerSpec {
        recurrent: is_recurrent.then(|| recurrent.clone()),
        ..LayerSpec::default()
    };
    Ok(is_recurrent.into_iter().map(layer).collect())
}

/// The linear attention of its layers.
fn delta(config: &Config<'_>, stack: &StackSpec) -> Result<GatedDeltaSpec, ModelError> {
    let at_most = |key: &str, most: usize| match config.size(key)? {
        n if n <= most => Ok(n),
        n => Err(config.unsupported(key, n, format!("{most} or less"))),
    };
    let n_key_heads = config.size("linear_num_key_heads")?;
    let n_value_heads = config.size("linear_num_value_heads")?;
    config.share("linear_num_key_heads", n_value_heads, n_key_heads)?;
    Ok(GatedDeltaSpec {
        n_key_heads,
        n_value_heads,
        key_dim: at_most("linear_key_head_dim", StateLayout::MAX_KEY_DIM)?,
        value_dim: config.size("linear_value_head_dim")?,
        conv_kernel: at_most("linear_conv_kernel_dim", StateLayout::MAX_CONV_KERNEL)?,
        activation: causal::silu(config)?,
        eps: stack.norm.eps,
        names: &DELTA,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(changes: Value) -> Result<DecoderSpec, String> {
        read_as(CausalKind::Qwen35, changes)
    }

    fn read_as(kind: CausalKind, changes: Value) -> Result<DecoderSpec, String> {
        let mut config = json!({ "num_hidden_layers": 4 });
        config.as_object_mut().expect("an object").extend(changes.as_object().expect("an object").clone());
        let place =
            CausalPlace { items: ItemsSpec::Embedded { levels: 0, is_mutual: false }, tied_head: false };
        spec(&Config::new("config.json", &config), kind, place).map_err(|e| e.to_string())
    }

    #[test]
    fn layers_recur_as_the_configuration_says() {
        let check = |changes: Value, expect: [bool; 4]| {
            let stack = read(changes.clone()).expect("a decoder").stack;
            assert_eq!([0, 1, 2, 3].map(|i| stack.layer(i).recurrent.is_some()), expect, "{changes}");
        };
        check(json!({}), [true, true, true, false]);
        check(json!({ "full_attention_interval": 2 }), [true, false, true, false]);
        let kinds = ["full_attention", "linear_attention", "full_attention", "linear_attention"];
        check(json!({ "layer_types": kinds, "full_attention_interval": 2 }), [false, true, false, true]);
    }

    #[test]
    fn all_layers_have_experts_where_the_class_says_so() {
        let stack = read_as(CausalKind::Qwen35Moe, json!({})).expect("a decoder").stack;
        let has_experts =
            |i| stack.layer(i).experts.is_some_and(|e| (e.n_experts, e.routing.top_k) == (256, 8));
        assert!((0..4).all(has_experts));
        assert_eq!([0, 1, 2, 3].map(|i| stack.layer(i).recurrent.is_some()), [true, true, true, false]);
        assert_eq!((stack.hidden, stack.attention.shape.n_kv_heads), (2048, 2));
        let error = read_as(CausalKind::Qwen35Moe, json!({ "mlp_only_layers": [1] })).expect_err("refused");
        assert!(error.contains("mlp_only_layers"), "{error}");
    }

    #[test]
    fn a_quarter_of_a_head_is_rotated_unless_the_configuration_says_otherwise() {
        let check = |rope: Value, expect: (usize, RotaryAxes)| {
            let spec = read(json!({ "rope_parameters": rope })).expect("a decoder");
            let Positions::Rotary(rotary) = spec.positions else { panic!("a rotation") };
            assert_eq!((rotary.rotary_dim, rotary.axes), (Some(expect.0), expect.1));
        };
        check(json!({ "rope_theta": 1e7 }), (64, RotaryAxes::Single));
        let sections = json!({ "rope_theta": 1e7, "mrope_section": [11, 11, 10] });
        check(sections, (64, RotaryAxes::Interleaved([11, 11, 10])));
        let half = json!({ "rope_theta": 1e7, "mrope_section": [22, 21, 21], "partial_rotary_factor": 0.5 });
        check(half, (128, RotaryAxes::Interleaved([22, 21, 21])));
    }

    #[test]
    fn what_is_not_served_is_refused_by_its_key() {
        let check = |changes: Value, key: &str| {
            let error = read(changes).expect_err(key);
            assert!(error.contains(key), "{error}");
        };
        check(json!({ "attn_output_gate": false }), "attn_output_gate");
        check(json!({ "layer_types": vec!["linear_attention"; 3] }), "layer_types");
        check(json!({ "layer_types": vec!["sliding_attention"; 4] }), "layer_types");
        check(json!({ "layer_types": vec!["linear_attention"; 4] }), "full_attention in one layer or more");
        check(json!({ "full_attention_interval": 5 }), "full_attention_interval");
        check(json!({ "full_attention_interval": 0 }), "full_attention_interval");
        check(json!({ "linear_num_key_heads": 5 }), "linear_num_key_heads");
        check(json!({ "linear_key_head_dim": 512 }), "256 or less");
        check(json!({ "linear_conv_kernel_dim": 65 }), "64 or less");
        check(json!({ "linear_value_head_dim": 0 }), "linear_value_head_dim");
        check(json!({ "hidden_act": "gelu" }), "hidden_act");
        check(json!({ "rope_parameters": { "partial_rotary_factor": 0.001 } }), "partial_rotary_factor");
        check(json!({ "rope_parameters": { "partial_rotary_factor": 1.5 } }), "partial_rotary_factor");
        check(json!({ "rope_parameters": { "mrope_section": [16, 24, 24] } }), "mrope_section");
    }
}
