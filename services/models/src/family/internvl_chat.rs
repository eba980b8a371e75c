//! InternVL 2 to 3.5 in the layout of its authors: the same model under other names, with decoders of the Llama line or InternLM2.
//!
//! After <https://huggingface.co/OpenGVLab/InternVL2_5-8B/blob/e9e4c0dc1db56bfab10458671519b7fa3dc29463/modeling_internvl_chat.py>
//! and the files beside it. Quirks: `config.json` has the settings of the processor; an item is a line of a message's string;
//! InternLM2 has queries, keys and values of each key head together.

use super::Config;
use super::causal::{self, CausalKind, CausalPlace};
use super::internvl::{Tower, joined_side, projector, tower};
use crate::error::ModelError;
use crate::preprocess::image::MAX_TILES;
use crate::spec::*;

static VISION: EncoderNames = EncoderNames {
    prefixes: &["vision_model."],
    stem: &["embeddings.patch_embedding", "embeddings.class_embedding"],
    tokens: &[],
    positions: "embeddings.position_embedding",
    stack: StackNames {
        input_norm: "",
        layers: "encoder.layers",
        attention: AttentionNames { norm: "norm1", qkv: QkvNames::Fused("attn.qkv"), out: "attn.proj" },
        cross: None,
        feed_forward_norm: "norm2",
        feed_forward_inner: &["mlp.fc1"],
        feed_forward_outer: "mlp.fc2",
        final_norm: "",
    },
};

static PROJECTOR: ProjectorNames =
    ProjectorNames { prefixes: Some(&["mlp1."]), norm: "0", layers: &["1", "3"] };

const SCALES: [&str; 2] = ["ls1", "ls2"];
const ROW_NORMS: [&str; 2] = ["attn.q_norm", "attn.k_norm"];

static INTERNLM2: DecoderNames = DecoderNames {
    prefixes: &["language_model.model."],
    tokens: &["language_model.model.tok_embeddings"],
    positions: "",
    stack: StackNames {
        input_norm: "",
        layers: "layers",
        attention: AttentionNames {
            norm: "attention_norm",
            qkv: QkvNames::Grouped("attention.wqkv"),
            out: "attention.wo",
        },
        cross: None,
        feed_forward_norm: "ffn_norm",
        feed_forward_inner: &["feed_forward.w1", "feed_forward.w3"],
        feed_forward_outer: "feed_forward.w2",
        final_norm: "norm",
    },
    head: &["language_model.output"],
    head_bias: None,
};

/// The spec of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>) -> Result<ModelSpec, ModelError> {
    // With what the class has where a configuration is silent.
    let keys = [("select_layer", "-1", "-1"), ("ps_version", "v2", "v1"), ("use_thumbnail", "true", "false")];
    for (key, expected, default) in keys {
        let value = config.get(key).map_or_else(|| default.to_owned(), ToString::to_string);
        if value.trim_matches('"') != expected {
            return Err(config.unsupported(key, value, expected));
        }
    }
    config.must_be_off("pad2square")?;
    let decoder = decoder(&config.section("llm_config", "llm_config.")?)?;
    let mut encoder = vision(&config.section("vision_config", "vision_config.")?)?;
    check_tile(config, &encoder.stem)?;
    let side = joined_side(config, &encoder.stem)?;
    encoder.projector = Some(projector(side, decoder.stack.hidden, &PROJECTOR));
    encoder.extras.tiling = Some(TilingSpec::AspectRatioWithin { tiles: tiles(config)? });
    Ok(ModelSpec { encoder: Some(encoder), decoder })
}

/// The decoder. InternLM2 is a Llama whose projections are together.
fn decoder(config: &Config<'_>) -> Result<DecoderSpec, ModelError> {
    let tied_head = config.flag_or("tie_word_embeddings", false)?;
    let place = CausalPlace { items: ItemsSpec::Embedded { levels: 0, is_mutual: false }, tied_head };
    if config.text("model_type")? != "internlm2" {
        return causal::spec(config, CausalKind::of_section(config)?, place);
    }
    let mut decoder = causal::spec(config, CausalKind::Llama, place)?;
    let bias = config.flag_or("bias", true)?;
    decoder.stack.attention.bias = AttentionBias { q: bias, k: bias, v: bias, out: bias };
    decoder.names = &INTERNLM2;
    Ok(decoder)
}

fn vision(config: &Config<'_>) -> Result<EncoderSpec, ModelError> {
    match config.text("model_type")? {
        "intern_vit_6b" => {}
        other => return Err(config.unsupported("model_type", other, "intern_vit_6b")),
    }
    // The class's defaults are the largest tower's.
    for key in ["hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "image_size"]
    {
        config.size(key)?;
    }
    config.required("norm_type")?;
    let eps = if config.get("layer_norm_eps").is_some() { config.number("layer_norm_eps")? } else { 1e-6 };
    let row_norms = HeadNormsSpec { norm: NormSpec::rms(eps), part: NormedPart::Row, names: ROW_NORMS };
    tower(
        config,
        Tower {
            has_bias: config.flag_or("qkv_bias", false)?,
            row_norms: config.flag_or("qk_normalization", true)?.then_some(row_norms),
            has_positions: true,
            final_norm: false,
            scales: SCALES,
            names: &VISION,
        },
    )
}

/// Refuses tiles of another size than the tower's.
fn check_tile(config: &Config<'_>, stem: &StemSpec) -> Result<(), ModelError> {
    const KEY: &str = "force_image_size";
    let StemSpec::PrefixedPatches { patch: [.., side], grid, .. } = stem else { return Ok(()) };
    let pixels = grid[0] * side;
    match config.size_or(KEY, pixels)? {
        size if size == pixels => Ok(()),
        size => Err(config.unsupported(KEY, size, format!("{pixels}, as the vision_config has it"))),
    }
}

/// The least and the most tiles of an image.
fn tiles(config: &Config<'_>) -> Result<[u32; 2], ModelError> {
    const MOST: &str = "max_dynamic_patch";
    if !config.flag_or("dynamic_image_size", false)? {
        return Ok([1, 1]);
    }
    let least = config.size_or("min_dynamic_patch", 1)?;
    let most = config.size_or(MOST, 6)?;
    match most <= MAX_TILES as usize && least <= most {
        true => Ok([least as u32, most as u32]),
        false => Err(config.unsupported(MOST, most, format!("from min_dynamic_patch to {MAX_TILES}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn published() -> Value {
        json!({
            "downsample_ratio": 0.5, "dynamic_image_size": true, "force_image_size": 448, "max_dynamic_patch": 12,
            "min_dynamic_patch": 1, "model_type": "internvl_chat", "pad2square": false, "ps_version": "v2", "select_layer": -1,
            "use_thumbnail": true,
            "llm_config": {
                "model_type": "internlm2", "bias": false, "hidden_size": 2048, "intermediate_size": 8192,
                "num_attention_heads": 16, "num_hidden_layers": 24, "num_key_value_heads": 8, "vocab_size": 92_553,
            },
            "vision_config": {
                "model_type": "intern_vit_6b", "hidden_size": 1024, "image_size": 448, "intermediate_size": 4096,
                "layer_norm_eps": 1e-6, "norm_type": "layer_norm", "num_attention_heads": 16, "num_hidden_layers": 24,
                "patch_size": 14, "qk_normalization": false, "qkv_bias": true,
            },
        })
    }

    #[test]
    fn what_the_configuration_says_of_tiles_is_read() {
        let tiling = |key: &str, value: Value| {
            let mut json = published();
            json[key] = value;
            spec(&Config::new("config.json", &json))
                .expect("a spec")
                .encoder
                .expect("an encoder")
                .extras
                .tiling
        };
        let within = |tiles| Some(TilingSpec::AspectRatioWithin { tiles });
        assert_eq!(tiling("max_dynamic_patch", json!(6)), within([1, 6]));
        assert_eq!(tiling("min_dynamic_patch", json!(4)), within([4, 12]));
        assert_eq!(tiling("dynamic_image_size", json!(false)), within([1, 1]));
    }

    #[test]
    fn what_is_not_served_is_refused_by_name() {
        for (pointer, value, expected) in [
            ("/select_layer", json!(-4), "select_layer is -4, expected -1"),
            ("/ps_version", json!("v1"), "expected v2"),
            ("/ps_version", Value::Null, "ps_version is v1, expected v2"),
            ("/use_thumbnail", json!(false), "use_thumbnail is false, expected true"),
            ("/pad2square", json!(true), "pad2square is true, expected false"),
            ("/force_image_size", json!(224), "force_image_size is 224, expected 448"),
            (
                "/max_dynamic_patch",
                json!(100),
                "max_dynamic_patch is 100, expected from min_dynamic_patch to 64",
            ),
            ("/llm_config/model_type", json!("phi3"), "llm_config.model_type is phi3, expected"),
            ("/vision_config/model_type", json!("siglip"), "expected intern_vit_6b"),
            ("/vision_config/hidden_size", Value::Null, "vision_config.hidden_size"),
        ] {
            let mut json = published();
            *json.pointer_mut(pointer).expect("a key") = value;
            let error = spec(&Config::new("config.json", &json)).expect_err(pointer).to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
