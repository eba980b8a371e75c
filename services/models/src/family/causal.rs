//! Causal text decoders of the Llama line: Llama, Mistral, Qwen2, Qwen3, and those of them whose layers have experts; by themselves,
//! or as the decoder of a model of several modalities.
//!
//! After <https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/llama/modeling_llama.py> and
//! `mistral`, `qwen2`, `qwen3` beside it. Quirks: Qwen2 has a bias on queries, keys and values; Qwen3 a norm of each head; a
//! configuration leaves out what its class has as a default. All layers of Mistral attend to a window, of Qwen2 and Qwen3 those
//! behind a number of layers, where a configuration has one, and of Qwen2-MoE every second one before it.

use super::Config;
use super::experts::ExpertsKind;
use crate::error::ModelError;
use crate::spec::*;
use std::num::NonZeroU32;
use triptych_kernels::ops::{Activation, AttentionShape};

/// A kind of decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CausalKind {
    /// Llama 1 to 3, Vicuna.
    Llama,
    /// Mistral.
    Mistral,
    /// Qwen2, and the decoders of Qwen2-VL and Qwen2.5-VL.
    Qwen2,
    /// Qwen3, and the decoder of Qwen3-VL.
    Qwen3,
    /// Qwen3.5; what its layers have beside those of Qwen3 is in `qwen3_5`.
    Qwen35,
    /// Qwen3.5 with experts.
    Qwen35Moe,
    /// Mistral with experts.
    Mixtral,
    /// Qwen2 with experts.
    Qwen2Moe,
    /// Qwen3 with experts.
    Qwen3Moe,
    /// The decoder of Qwen3-VL with experts.
    Qwen3VlMoe,
    /// The decoder of DeepSeek-OCR-2: that of Llama with experts.
    DeepseekOcr2,
}

/// Values that a class has where a configuration is silent.
struct Defaults {
    vocab: usize,
    hidden: usize,
    width: usize,
    n_layers: usize,
    n_heads: usize,
    n_kv_heads: usize,
    max_context: usize,
}

const LLAMA: Defaults = Defaults {
    vocab: 32_000,
    hidden: 4096,
    width: 11_008,
    n_layers: 32,
    n_heads: 32,
    n_kv_heads: 32,
    max_context: 2048,
};
const MISTRAL: Defaults = Defaults { width: 14_336, n_kv_heads: 8, max_context: 131_072, ..LLAMA };
const MIXTRAL: Defaults = MISTRAL;
const DEEPSEEK: Defaults = Defaults { vocab: 102_400, ..LLAMA };
const QWEN_MOE: Defaults =
    Defaults { hidden: 2048, width: 5632, n_layers: 24, n_heads: 16, n_kv_heads: 16, ..QWEN };
const QWEN_3_MOE: Defaults = Defaults { width: 6144, n_heads: 32, n_kv_heads: 4, ..QWEN_MOE };
const QWEN: Defaults = Defaults { vocab: 151_936, width: 22_016, max_context: 32_768, ..LLAMA };

/// Names of the norms of queries and of keys.
pub(super) const HEAD_NORMS: [&str; 2] = ["self_attn.q_norm", "self_attn.k_norm"];

static NAMES: DecoderNames = names("post_attention_layernorm");

/// By prefix: of a model by itself, and inside one of several modalities. `feed_forward_norm` is the norm before feed-forward.
pub(super) const fn names(feed_forward_norm: &'static str) -> DecoderNames {
    DecoderNames {
        prefixes: &[
            "model.",
            "model.language_model.",
            "language_model.model.",
            "language_model.",
            "model.text_model.",
            "thinker.model.",
        ],
        tokens: &[
            "model.embed_tokens",
            "model.language_model.embed_tokens",
            "language_model.model.embed_tokens",
            "language_model.embed_tokens",
            "model.text_model.embed_tokens",
            "thinker.model.embed_tokens",
        ],
        positions: "",
        stack: StackNames {
            input_norm: "",
            layers: "layers",
            attention: AttentionNames {
                norm: "input_layernorm",
                qkv: QkvNames::Split(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
                out: "self_attn.o_proj",
            },
            cross: None,
            feed_forward_norm,
            feed_forward_inner: &["mlp.gate_proj", "mlp.up_proj"],
            feed_forward_outer: "mlp.down_proj",
            final_norm: "norm",
        },
        head: &["lm_head", "language_model.lm_head", "thinker.lm_head"],
        head_bias: None,
    }
}

impl CausalKind {
    /// The kind of a section, by its `model_type`; `None` for one that is not of this line.
    pub(super) fn of(model_type: &str) -> Option<Self> {
        match model_type {
            "llama" => Some(Self::Llama),
            "mistral" => Some(Self::Mistral),
            "qwen2" => Some(Self::Qwen2),
            "qwen3" => Some(Self::Qwen3),
            "mixtral" => Some(Self::Mixtral),
            "qwen2_moe" => Some(Self::Qwen2Moe),
            "qwen3_moe" => Some(Self::Qwen3Moe),
            _ => None,
        }
    }

    /// The kind of a configuration's section.
    ///
    /// # Errors
    /// [`ModelError::Config`] naming the kinds that are served.
    pub(super) fn of_section(config: &Config<'_>) -> Result<Self, ModelError> {
        // The section of early files is Llama's without saying so.
        let name = if config.get("model_type").is_some() { config.text("model_type")? } else { "llama" };
        Self::of(name).ok_or_else(|| {
            config.unsupported(
                "model_type",
                name,
                "llama, mistral, mixtral, qwen2, qwen2_moe, qwen3 or qwen3_moe",
            )
        })
    }

    /// The class of a model by itself.
    fn architecture(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
            Self::Qwen35 => "Qwen3_5ForCausalLM",
            Self::Qwen35Moe => "Qwen3_5MoeForCausalLM",
            Self::Mixtral => "MixtralForCausalLM",
            Self::Qwen2Moe => "Qwen2MoeForCausalLM",
            Self::Qwen3Moe | Self::Qwen3VlMoe => "Qwen3MoeForCausalLM",
            Self::DeepseekOcr2 => "DeepseekOcr2ForConditionalGeneration",
        }
    }

    fn defaults(self) -> Defaults {
        match self {
            Self::Llama => LLAMA,
            Self::Mistral => MISTRAL,
            Self::Qwen2 | Self::Qwen3 | Self::Qwen35 | Self::Qwen35Moe => QWEN,
            Self::Mixtral => MIXTRAL,
            Self::Qwen2Moe | Self::Qwen3VlMoe => QWEN_MOE,
            Self::Qwen3Moe => QWEN_3_MOE,
            Self::DeepseekOcr2 => DEEPSEEK,
        }
    }

    /// The mixture that its layers have.
    fn experts(self) -> Option<ExpertsKind> {
        match self {
            Self::Llama | Self::Mistral | Self::Qwen2 | Self::Qwen3 | Self::Qwen35 => None,
            Self::Mixtral => Some(ExpertsKind::Mixtral),
            Self::Qwen2Moe => Some(ExpertsKind::Qwen2),
            Self::Qwen3Moe => Some(ExpertsKind::Qwen3),
            Self::Qwen3VlMoe => Some(ExpertsKind::Qwen3Vl),
            Self::Qwen35Moe => Some(ExpertsKind::Qwen35),
            Self::DeepseekOcr2 => Some(ExpertsKind::Deepseek),
        }
    }

    /// Projections with a bias.
    fn bias(self, config: &Config<'_>) -> Result<AttentionBias, ModelError> {
        let all = config.flag_or("attention_bias", false)?;
        Ok(match self {
            Self::Mistral | Self::Mixtral => AttentionBias { q: false, k: false, v: false, out: false },
            Self::Qwen2 => AttentionBias { q: true, k: true, v: true, out: false },
            Self::Qwen2Moe => {
                let qkv = config.flag_or("qkv_bias", true)?;
                AttentionBias { q: qkv, k: qkv, v: qkv, out: false }
            }
            Self::Llama
            | Self::Qwen3
            | Self::Qwen35
            | Self::Qwen35Moe
            | Self::Qwen3Moe
            | Self::Qwen3VlMoe
            | Self::DeepseekOcr2 => AttentionBias { q: all, k: all, v: all, out: all },
        })
    }

    /// The layers that attend to a window or have experts, and those that do not; empty if none does.
    fn layers(self, config: &Config<'_>, n_layers: usize) -> Result<Vec<LayerSpec>, ModelError> {
        let mut layers = self.windows(config, n_layers)?;
        if let Some(kind) = self.experts() {
            let experts = kind.spec(config, silu(config)?)?;
            layers.resize(n_layers, LayerSpec::default());
            for (layer, has_experts) in layers.iter_mut().zip(kind.layers(config, n_layers)?) {
                layer.experts = has_experts.then(|| experts.clone());
            }
        }
        Ok(layers)
    }

    /// The layers that attend to a window, and those that do not; empty if none does.
    fn windows(self, config: &Config<'_>, n_layers: usize) -> Result<Vec<LayerSpec>, ModelError> {
        const QWEN_FULL_LAYERS: usize = 28;
        let is_windowed = match self {
            Self::Llama | Self::Qwen35 | Self::Qwen35Moe | Self::Qwen3VlMoe | Self::DeepseekOcr2 => {
                return Ok(Vec::new());
            }
            Self::Mistral if config.is_null(WINDOW) => return Ok(Vec::new()),
            Self::Mixtral if config.get(WINDOW).is_none() => return Ok(Vec::new()),
            Self::Mistral | Self::Mixtral => vec![true; n_layers],
            _ if !config.flag_or("use_sliding_window", false)? => return Ok(Vec::new()),
            Self::Qwen3Moe => vec![true; n_layers],
            Self::Qwen2Moe => {
                let n = config.size_or("max_window_layers", QWEN_FULL_LAYERS)?;
                windowed_layers(config, n_layers, |layer| layer % 2 == 0 && layer < n)?
            }
            Self::Qwen2 | Self::Qwen3 => {
                // Zero is a number of layers too.
                let n_full = match config.get("max_window_layers").and_then(|n| n.as_u64()) {
                    Some(n) => n as usize,
                    None => QWEN_FULL_LAYERS,
                };
                windowed_layers(config, n_layers, |layer| layer >= n_full)?
            }
        };
        let window = window(config, 4096)?;
        let of =
            |is_windowed: bool| LayerSpec { window: window.filter(|_| is_windowed), ..LayerSpec::default() };
        Ok(is_windowed.into_iter().map(of).collect())
    }
}

const WINDOW: &str = "sliding_window";

/// Keys of a window, where the configuration may be silent.
///
/// # Errors
/// [`ModelError::Config`] for a number that is no size.
pub(super) fn window(config: &Config<'_>, default: usize) -> Result<Option<NonZeroU32>, ModelError> {
    Ok(NonZeroU32::new(config.size_or(WINDOW, default)? as u32))
}

/// The layers that attend to a window: by the list of a configuration, or by `default` of their index.
///
/// # Errors
/// [`ModelError::Config`] for a list of other lengths or kinds.
pub(super) fn windowed_layers(
    config: &Config<'_>,
    n_layers: usize,
    default: impl Fn(usize) -> bool,
) -> Result<Vec<bool>, ModelError> {
    const KEY: &str = "layer_types";
    let Some(list) = config.get(KEY) else { return Ok((0..n_layers).map(default).collect()) };
    let kind = |kind: &serde_json::Value| match kind.as_str() {
        Some("sliding_attention") => Some(true),
        Some("full_attention") => Some(false),
        _ => None,
    };
    let kinds: Option<Vec<bool>> = list.as_array().and_then(|list| list.iter().map(kind).collect());
    kinds.filter(|kinds| kinds.len() == n_layers).ok_or_else(|| {
        config.unsupported(KEY, list, format!("{n_layers} of full_attention and sliding_attention"))
    })
}

/// The spec of a decoder by itself.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported, and for a model of the same layers that writes no text.
pub(super) fn text_spec(config: &Config<'_>, kind: CausalKind) -> Result<ModelSpec, ModelError> {
    check_class(config, kind.architecture())?;
    let tied_head = config.flag_or("tie_word_embeddings", false)?;
    let place = CausalPlace { items: ItemsSpec::Embedded { levels: 0, is_mutual: false }, tied_head };
    Ok(ModelSpec { encoder: None, decoder: spec(config, kind, place)? })
}

/// Refuses a model of the same layers that is of another class than `expected`, and so writes no text.
///
/// # Errors
/// [`ModelError::Config`] naming both classes.
pub(super) fn check_class(config: &Config<'_>, expected: &str) -> Result<(), ModelError> {
    const KEY: &str = "architectures";
    match config.get(KEY) {
        Some(architectures)
            if !architectures.as_array().is_some_and(|list| list.iter().any(|name| name == expected)) =>
        {
            Err(config.unsupported(KEY, architectures, expected))
        }
        _ => Ok(()),
    }
}

/// Place of a decoder in its model.
pub(super) struct CausalPlace {
    /// Path of encoder rows into it.
    pub(super) items: ItemsSpec,
    /// True if the token table serves as the head.
    pub(super) tied_head: bool,
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
    let defaults = kind.defaults();
    let max_context = config.size_or("max_position_embeddings", defaults.max_context)?;
    let n_layers = config.size_or("num_hidden_layers", defaults.n_layers)?;
    let hidden = config.size_or("hidden_size", defaults.hidden)?;
    let n_heads = config.size_or("num_attention_heads", defaults.n_heads)?;
    // Llama's default is one for each head, whatever their number.
    let n_kv_heads = match kind {
        CausalKind::Llama | CausalKind::DeepseekOcr2 => n_heads,
        _ => defaults.n_kv_heads.min(n_heads),
    };
    let n_kv_heads = config.size_or("num_key_value_heads", n_kv_heads)?;
    config.share("num_key_value_heads", n_heads, n_kv_heads)?;
    let head_dim = match config.get("head_dim") {
        Some(_) => config.size("head_dim")?,
        None => config.share("num_attention_heads", hidden, n_heads)?,
    };
    let eps = match (config.get("rms_norm_eps"), kind) {
        (Some(_), _) => config.number("rms_norm_eps")?,
        (None, CausalKind::Mixtral) => 1e-5,
        (None, _) => 1e-6,
    };
    let norm = NormSpec::rms(eps);
    if config.flag_or("mlp_bias", false)? {
        return Err(config.unsupported("mlp_bias", true, "false"));
    }
    let scale = 1.0 / (head_dim as f32).sqrt();
    let has_head_norms = matches!(
        kind,
        CausalKind::Qwen3
            | CausalKind::Qwen35
            | CausalKind::Qwen35Moe
            | CausalKind::Qwen3Moe
            | CausalKind::Qwen3VlMoe
    );
    let head_norms =
        has_head_norms.then_some(HeadNormsSpec { norm, part: NormedPart::Head, names: HEAD_NORMS });
    Ok(DecoderSpec {
        vocab: config.size_or("vocab_size", defaults.vocab)?,
        max_context,
        positions: Positions::Rotary(match kind {
            CausalKind::Qwen35 | CausalKind::Qwen35Moe => partial_rotary(config, head_dim)?,
            _ => rotary(config, head_dim)?,
        }),
        stack: StackSpec {
            hidden,
            n_layers,
            attention: AttentionSpec {
                shape: AttentionShape { n_heads, n_kv_heads, head_dim, scale, softcap: None },
                bias: kind.bias(config)?,
                head_norms,
            },
            feed_forward: FeedForwardSpec {
                width: config.size_or("intermediate_size", defaults.width)?,
                kind: FeedForwardKind::Gated,
                activation: silu(config)?,
                bias: false,
            },
            norm,
            input_norm: InputNorm::Absent,
            placement: NormPlacement::Pre,
            final_norm: true,
            layers: kind.layers(config, n_layers)?,
        },
        items: place.items,
        embedding_scale: 1.0,
        head: HeadSpec::plain(place.tied_head),
        names: &NAMES,
    })
}

/// Rotation of heads of `head_dim`. The newer key holds the base as well; before it, the base was beside the scaling.
///
/// # Errors
/// [`ModelError::Config`] for a kind of scaling that is not served.
pub(crate) fn rotary(config: &Config<'_>, head_dim: usize) -> Result<RotarySpec, ModelError> {
    let rope = config.or_section(&["rope_parameters", "rope_scaling"]);
    let key = if rope.get("rope_type").is_some() { "rope_type" } else { "type" };
    let kind = rope.get(key).map_or("default", |kind| kind.as_str().unwrap_or_default());
    let scaling = match kind {
        // What is dynamic changes past the trained context alone, which is not served.
        "default" | "mrope" | "dynamic" => RotaryScaling::Absent,
        "llama3" => RotaryScaling::Llama3 {
            factor: rope.number("factor")?,
            low: rope.number("low_freq_factor")?,
            high: rope.number("high_freq_factor")?,
            context: rope.size("original_max_position_embeddings")? as f32,
        },
        "linear" => RotaryScaling::Linear { factor: rope.number("factor")? },
        "yarn" => RotaryScaling::Yarn(yarn(&rope, config)?),
        other => return Err(rope.unsupported(key, other, "default, dynamic, mrope, linear, yarn or llama3")),
    };
    let theta = if rope.get("rope_theta").is_some() { rope.number("rope_theta")? } else { 10_000.0 };
    let axes = match rope.get("mrope_section") {
        Some(_) => sections(&rope, head_dim)?,
        None => RotaryAxes::Single,
    };
    Ok(RotarySpec { scaling, ..RotarySpec::new(theta, axes) })
}

/// Rotation of a part of each head, a quarter by default, with interleaved frequencies where there are sections.
fn partial_rotary(config: &Config<'_>, head_dim: usize) -> Result<RotarySpec, ModelError> {
    const FACTOR: &str = "partial_rotary_factor";
    let rope = config.or_section(&["rope_parameters", "rope_scaling"]);
    let factor = rope.get(FACTOR).map_or(Some(0.25), |f| f.as_f64());
    // As the reference computes it: in f64, truncated.
    let rotary_dim = factor.map(|f| (head_dim as f64 * f) as usize);
    let Some(rotary_dim) = rotary_dim.filter(|d| d.is_multiple_of(2) && (2..=head_dim).contains(d)) else {
        let found = rope.get(FACTOR).map_or_else(|| "0.25".to_owned(), ToString::to_string);
        return Err(rope.unsupported(FACTOR, found, format!("an even part of head width {head_dim}")));
    };
    let spec = rotary(config, rotary_dim)?;
    let axes = match spec.axes {
        RotaryAxes::Sections(sections) => RotaryAxes::Interleaved(sections),
        axes => axes,
    };
    Ok(RotarySpec { rotary_dim: Some(rotary_dim), axes, ..spec })
}

/// YaRN by its section; `config` has the context.
fn yarn(rope: &Config<'_>, config: &Config<'_>) -> Result<YarnSpec, ModelError> {
    let number = |key: &str, default: f32| match rope.get(key) {
        None => Ok(default),
        Some(_) => rope.number(key),
    };
    let context = match rope.get("original_max_position_embeddings") {
        Some(_) => rope.size("original_max_position_embeddings")?,
        None => config.size("max_position_embeddings")?,
    };
    let factor = rope.number("factor")?;
    let magnitude = |scale: f32| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
    let attention_factor = match (rope.get("mscale"), rope.get("mscale_all_dim")) {
        _ if rope.get("attention_factor").is_some() => rope.number("attention_factor")?,
        (Some(_), Some(_)) => magnitude(rope.number("mscale")?) / magnitude(rope.number("mscale_all_dim")?),
        _ => magnitude(1.0),
    };
    Ok(YarnSpec {
        factor,
        fast: number("beta_fast", 32.0)?,
        slow: number("beta_slow", 1.0)?,
        context: context as f32,
        truncate: rope.flag_or("truncate", true)?,
        attention_factor,
    })
}

/// The frequencies of temporal, height and width (M-RoPE).
fn sections(rope: &Config<'_>, head_dim: usize) -> Result<RotaryAxes, ModelError> {
    let axes = match rope.flag_or("mrope_interleaved", false)? {
        true => RotaryAxes::Interleaved,
        false => RotaryAxes::Sections,
    };
    let sections = rope.sizes("mrope_section")?;
    match <[usize; 3]>::try_from(sections.as_slice()) {
        Ok(s) if s.iter().sum::<usize>() == head_dim / 2 => Ok(axes(s)),
        _ => {
            let expected = format!("three numbers that add up to {}", head_dim / 2);
            Err(rope.unsupported("mrope_section", format!("{sections:?}"), expected))
        }
    }
}

/// The gate's activation: SiLU, which is also the default.
///
/// # Errors
/// [`ModelError::Config`] for another.
pub(super) fn silu(config: &Config<'_>) -> Result<Activation, ModelError> {
    match config.get("hidden_act").map(|act| act.as_str()) {
        None | Some(Some("silu")) => Ok(Activation::Silu),
        Some(other) => Err(config.unsupported("hidden_act", format!("{other:?}"), "silu")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_attend_to_windows_as_the_configuration_says() {
        let check = |kind, window: serde_json::Value, expect: [Option<u32>; 3]| {
            let mut json = serde_json::json!({ "num_hidden_layers": 3 });
            json.as_object_mut().expect("an object").extend(window.as_object().expect("an object").clone());
            let place =
                CausalPlace { items: ItemsSpec::Embedded { levels: 0, is_mutual: false }, tied_head: false };
            let spec = spec(&Config::new("config.json", &json), kind, place).expect("a decoder");
            let windows = [0, 1, 2].map(|i| spec.stack.layer(i).window.map(NonZeroU32::get));
            assert_eq!(windows, expect, "{kind:?} {json}");
        };
        use serde_json::json;
        check(CausalKind::Mistral, json!({}), [Some(4096); 3]);
        check(CausalKind::Mistral, json!({ "sliding_window": null }), [None; 3]);
        check(CausalKind::Mistral, json!({ "sliding_window": 1024 }), [Some(1024); 3]);
        check(CausalKind::Llama, json!({ "sliding_window": 1024 }), [None; 3]);
        let off = json!({ "sliding_window": 1024, "max_window_layers": 0 });
        check(CausalKind::Qwen2, off, [None; 3]);
        let after_one = json!({ "sliding_window": 64, "use_sliding_window": true, "max_window_layers": 1 });
        check(CausalKind::Qwen2, after_one, [None, Some(64), Some(64)]);
        let none = json!({ "sliding_window": 64, "use_sliding_window": true });
        check(CausalKind::Qwen3, none, [None; 3]);
        let kinds = ["sliding_attention", "full_attention", "sliding_attention"];
        let listed = json!({ "sliding_window": 64, "use_sliding_window": true, "layer_types": kinds });
        check(CausalKind::Qwen3, listed, [Some(64), None, Some(64)]);
    }

    #[test]
    fn a_model_that_writes_no_text_is_refused_by_its_class() {
        let check = |json: serde_json::Value| {
            let config = Config::new("config.json", &json);
            text_spec(&config, CausalKind::Llama).map_err(|e| e.to_string()).err()
        };
        assert_eq!(check(serde_json::json!({})), None);
        assert_eq!(check(serde_json::json!({ "architectures": ["LlamaForCausalLM"] })), None);
        let error = check(serde_json::json!({ "architectures": ["LlamaForSequenceClassification"] }));
        let error = error.expect("refused");
        assert!(
            error.contains("LlamaForSequenceClassification") && error.contains("expected LlamaForCausalLM"),
            "{error}"
        );
    }
}
