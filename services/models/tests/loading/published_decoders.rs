//! Decoders of text alone in the real sizes: every tensor of a published model is found, in its shape, and used.

use super::published::hollow;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::num::NonZeroU32;
use triptych_kernels::Precision;
use triptych_models::decoder::TransformerDecoder;
use triptych_models::family::{Config, Family};
use triptych_models::model::FootprintBackend;
use triptych_models::spec::{DecoderSpec, Positions};
use triptych_models::weights::Weights;

fn check(name: &str, config: &Value, max_context: usize) {
    let spec = checked(name, config, max_context);
    assert!(spec.stack.layers.iter().all(|layer| layer.window.is_none()), "{name}");
}

/// The spec of a published configuration, all of whose tensors were found.
fn checked(name: &str, config: &Value, max_context: usize) -> DecoderSpec {
    let (dir, shapes) = hollow(name);
    let config = Config::new("config.json", config);
    let spec = Family::of(&config).and_then(|f| f.spec(&config)).expect("a published configuration");
    assert!(spec.encoder.is_none());
    assert_eq!(spec.decoder.max_context, max_context, "{name}");
    let weights = Weights::survey(dir.path()).expect("a header");
    let backend = FootprintBackend::new(Precision::F32).expect("a CPU");
    TransformerDecoder::load(&spec.decoder, &weights, &backend).expect("decoder tensors");
    let Weights::Stored(stored) = &weights else { panic!("a survey is of stored weights") };
    let taken: BTreeSet<String> = stored.taken();
    assert!(taken.iter().eq(shapes.keys()), "{name}");
    spec.decoder
}

/// Windows of the first layers.
fn windows<const N: usize>(spec: &DecoderSpec) -> [Option<u32>; N] {
    std::array::from_fn(|i| spec.stack.layer(i).window.map(NonZeroU32::get))
}

#[test]
fn llama_3_2_1b() {
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 128_000, "eos_token_id": 128_001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131_072, "mlp_bias": false,
        "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "use_cache": true, "vocab_size": 128_256,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
    });
    check("llama-3.2-1b", &config, 131_072);
}

#[test]
fn mistral_7b_v0_3() {
    let config = json!({
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14_336, "max_position_embeddings": 32_768, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0,
        "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true,
        "vocab_size": 32_768,
    });
    check("mistral-7b-v0.3", &config, 32_768);
}

#[test]
fn qwen2_5_0_5b() {
    let config = json!({
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_dropout": 0.0, "bos_token_id": 151_643,
        "eos_token_id": 151_645, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
        "intermediate_size": 4864, "max_position_embeddings": 32_768, "max_window_layers": 21,
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0, "sliding_window": 32_768, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "use_cache": true, "use_sliding_window": false, "vocab_size": 151_936,
    });
    check("qwen2.5-0.5b", &config, 32_768);
}

#[test]
fn qwen3_0_6b() {
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 151_643, "eos_token_id": 151_645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
        "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40_960,
        "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6, "rope_scaling": null, "rope_theta": 1_000_000, "sliding_window": null,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true, "use_sliding_window": false,
        "vocab_size": 151_936,
    });
    check("qwen3-0.6b", &config, 40_960);
}

/// As published, but with two of its layers, which are alike.
#[test]
fn mixtral_8x7b() {
    let config = json!({
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14_336, "max_position_embeddings": 32_768, "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": false, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0,
        "router_aux_loss_coef": 0.02, "sliding_window": null, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 32_000,
    });
    check("mixtral-8x7b", &config, 32_768);
}

/// As published, but with two of its layers, which are alike.
#[test]
fn qwen1_5_moe_a2_7b() {
    let config = json!({
        "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "attention_dropout": 0.0,
        "bos_token_id": 151_643, "decoder_sparse_step": 1, "eos_token_id": 151_643, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5632, "max_position_embeddings": 8192,
        "max_window_layers": 21, "moe_intermediate_size": 1408, "norm_topk_prob": false, "num_attention_heads": 16,
        "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 2, "num_key_value_heads": 16,
        "output_router_logits": false, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 5632, "sliding_window": 32_768,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "use_sliding_window": false,
        "vocab_size": 151_936,
    });
    check("qwen1.5-moe-a2.7b", &config, 8192);
}

/// As published, but with two of its layers, which are alike.
#[test]
fn qwen3_30b_a3b() {
    let config = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": false,
        "attention_dropout": 0.0, "bos_token_id": 151_643, "decoder_sparse_step": 1, "eos_token_id": 151_645,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 6144, "max_position_embeddings": 40_960, "max_window_layers": 48, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 2, "num_key_value_heads": 4, "output_router_logits": false,
        "rms_norm_eps": 1e-6, "rope_scaling": null, "rope_theta": 1_000_000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true,
        "use_sliding_window": false, "vocab_size": 151_936,
    });
    check("qwen3-30b-a3b", &config, 40_960);
}

#[test]
fn gemma_3_1b() {
    let config = json!({
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attention_bias": false,
        "attention_dropout": 0.0, "attn_logit_softcapping": null, "bos_token_id": 2, "cache_implementation": "hybrid",
        "eos_token_id": [1, 106], "final_logit_softcapping": null, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
        "intermediate_size": 6912, "max_position_embeddings": 32_768, "num_attention_heads": 4,
        "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6, "rope_local_base_freq": 10_000, "rope_scaling": null, "rope_theta": 1_000_000,
        "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16", "use_cache": true,
        "vocab_size": 262_144,
    });
    let spec = checked("gemma-3-1b", &config, 32_768);
    let window = Some(512);
    assert_eq!(windows(&spec), [window, window, window, window, window, None, window]);
    let Positions::Rotary(full) = &spec.positions else { panic!("it has rotary positions") };
    let local = spec.stack.layer(0).rotary.expect("a rotation of its own");
    assert_eq!([full.theta, local.theta], [1e6, 1e4]);
    assert_eq!((spec.stack.attention.shape.softcap, spec.head.softcap), (None, None));
    let mut capped = config.clone();
    capped["attn_logit_softcapping"] = 50.0.into();
    let config = Config::new("config.json", &capped);
    let error = Family::Gemma3Text.spec(&config).expect_err("the reference caps nothing");
    assert!(error.to_string().contains("attn_logit_softcapping is 50, expected null"), "{error}");
}

#[test]
fn gemma_2_2b() {
    let config = json!({
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": false, "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 107],
        "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02,
        "intermediate_size": 9216, "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26,
        "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0, "sliding_window": 4096, "torch_dtype": "bfloat16", "use_cache": true,
        "vocab_size": 256_000,
    });
    let spec = checked("gemma-2-2b", &config, 8192);
    assert_eq!(windows(&spec), [Some(4096), None, Some(4096), None]);
    assert_eq!((spec.stack.attention.shape.softcap, spec.head.softcap), (Some(50.0), Some(30.0)));
    assert_eq!(spec.stack.attention.head_norms, None);
}
