//! The real sizes of text models: each stage finds its tensors, and nothing but what is named here is left over.

use super::published::hollow;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use triptych_core::Modality;
use triptych_kernels::Precision;
use triptych_models::decoder::TransformerDecoder;
use triptych_models::encoder::TransformerEncoder;
use triptych_models::family::{Config, Family};
use triptych_models::model::FootprintBackend;
use triptych_models::weights::Weights;

/// A published configuration of BART's line.
fn bart(model_type: &str, [d, encoder, decoder, heads, ffn]: [u64; 5], more: Value) -> Value {
    let mut config = json!({
        "model_type": model_type, "d_model": d, "encoder_layers": encoder, "decoder_layers": decoder,
        "encoder_attention_heads": heads, "decoder_attention_heads": heads, "encoder_ffn_dim": ffn,
        "decoder_ffn_dim": ffn,
    });
    merge(&mut config, more);
    config
}

/// A published configuration of T5's line.
fn t5(model_type: &str, [d, encoder, decoder, heads, ffn, vocab]: [u64; 6], more: Value) -> Value {
    let mut config = json!({
        "model_type": model_type, "d_model": d, "d_kv": 64, "d_ff": ffn, "num_layers": encoder,
        "num_decoder_layers": decoder, "num_heads": heads, "vocab_size": vocab,
        "relative_attention_num_buckets": 32, "layer_norm_epsilon": 1e-6,
    });
    merge(&mut config, more);
    config
}

fn merge(config: &mut Value, more: Value) {
    let (Value::Object(config), Value::Object(more)) = (config, more) else { panic!("two objects") };
    config.extend(more);
}

fn check(name: &str, config: &Value, shared: &[&str], unread: &[&str]) {
    check_stages((name, Modality::Text), config, shared, unread);
}

/// Loads both stages; `shared` is what both read, `unread` what neither does.
fn check_stages((name, modality): (&str, Modality), config: &Value, shared: &[&str], unread: &[&str]) {
    let (dir, shapes) = hollow(name);
    let config = Config::new("config.json", config);
    let spec = Family::of(&config).and_then(|f| f.spec(&config)).expect("a published configuration");
    let encoder_spec = spec.encoder.as_ref().expect("an encoder");
    assert_eq!(encoder_spec.modality, modality);
    let taken = |load: &dyn Fn(&Weights, &FootprintBackend)| -> BTreeSet<String> {
        let weights = Weights::survey(dir.path()).expect("a header");
        load(&weights, &FootprintBackend::new(Precision::F32).expect("a CPU"));
        let Weights::Stored(stored) = &weights else { panic!("a survey is of stored weights") };
        stored.taken()
    };
    let encoder = taken(&|weights, backend| {
        TransformerEncoder::load(encoder_spec, weights, backend).expect("encoder tensors");
    });
    let decoder = taken(&|weights, backend| {
        TransformerDecoder::load(&spec.decoder, weights, backend).expect("decoder tensors");
    });
    let both: Vec<&String> = encoder.intersection(&decoder).collect();
    assert_eq!(both, shared, "{name}");
    let read: BTreeSet<&String> = encoder.union(&decoder).collect();
    let left: Vec<&String> = shapes.keys().filter(|stored| !read.contains(stored)).collect();
    assert_eq!(left, unread, "{name}");
}

const SHARED: [&str; 1] = ["model.shared.weight"];

#[test]
fn bart_base() {
    let config = bart(
        "bart",
        [768, 6, 6, 12, 3072],
        json!({
            "vocab_size": 50265, "max_position_embeddings": 1024, "activation_function": "gelu",
        }),
    );
    check("bart-base", &config, &["shared.weight"], &[]);
}

#[test]
fn bart_large_cnn() {
    let config = bart(
        "bart",
        [1024, 12, 12, 16, 4096],
        json!({
            "vocab_size": 50264, "max_position_embeddings": 1024, "activation_function": "gelu",
        }),
    );
    check("bart-large-cnn", &config, &SHARED, &[]);
}

#[test]
fn mbart_large_50() {
    let config = bart(
        "mbart",
        [1024, 12, 12, 16, 4096],
        json!({
            "vocab_size": 250_054, "max_position_embeddings": 1024, "activation_function": "relu",
            "scale_embedding": true,
        }),
    );
    check("mbart-large-50", &config, &SHARED, &[]);
}

#[test]
fn nllb_200_distilled_600m() {
    let config = bart(
        "m2m_100",
        [1024, 12, 12, 16, 4096],
        json!({
            "vocab_size": 256_206, "max_position_embeddings": 1024, "activation_function": "relu",
            "scale_embedding": true, "pad_token_id": 1,
        }),
    );
    check("nllb-200-distilled-600M", &config, &SHARED, &[]);
}

#[test]
fn pegasus_xsum() {
    let config = bart(
        "pegasus",
        [1024, 16, 16, 16, 4096],
        json!({
            "vocab_size": 96103, "max_position_embeddings": 512, "activation_function": "relu",
            "scale_embedding": true,
        }),
    );
    check("pegasus-xsum", &config, &SHARED, &[]);
}

#[test]
fn opus_mt_en_de() {
    let config = bart(
        "marian",
        [512, 6, 6, 8, 2048],
        json!({
            "vocab_size": 58101, "max_position_embeddings": 512, "activation_function": "swish",
            "scale_embedding": true,
        }),
    );
    check("opus-mt-en-de", &config, &SHARED, &[]);
}

#[test]
fn blenderbot_400m() {
    let config = bart(
        "blenderbot",
        [1280, 2, 12, 32, 5120],
        json!({
            "vocab_size": 8008, "max_position_embeddings": 128, "activation_function": "gelu",
            "scale_embedding": true,
        }),
    );
    check("blenderbot-400M-distill", &config, &SHARED, &[]);
}

#[test]
fn t5_small() {
    let unread = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight";
    check("t5-small", &t5("t5", [512, 6, 6, 8, 2048, 32128], json!({})), &["shared.weight"], &[unread]);
}

const GATED: &str = "gated-gelu";

#[test]
fn flan_t5_base() {
    let more = json!({ "feed_forward_proj": GATED, "tie_word_embeddings": false });
    check("flan-t5-base", &t5("t5", [768, 12, 12, 12, 2048, 32128], more), &["shared.weight"], &[]);
}

#[test]
fn madlad400_3b_mt() {
    let more = json!({ "d_kv": 128, "feed_forward_proj": GATED, "tie_word_embeddings": false });
    check("madlad400-3b-mt", &t5("t5", [1024, 32, 32, 16, 8192, 256_000], more), &["shared.weight"], &[]);
}

#[test]
fn mt5_small() {
    let more = json!({ "feed_forward_proj": GATED, "tie_word_embeddings": false });
    check("mt5-small", &t5("mt5", [512, 8, 8, 6, 1024, 250_112], more), &["shared.weight"], &[]);
}

#[test]
fn umt5_small() {
    let more = json!({ "feed_forward_proj": GATED, "tie_word_embeddings": false });
    check("umt5-small", &t5("umt5", [512, 8, 8, 6, 1024, 256_384], more), &["shared.weight"], &[]);
}

#[test]
fn byt5_small() {
    let more = json!({ "feed_forward_proj": GATED, "tie_word_embeddings": false });
    check("byt5-small", &t5("t5", [1472, 12, 4, 6, 3584, 384], more), &["shared.weight"], &[]);
}

/// A section of BERT-base's shape.
fn bert(model_type: &str, more: Value) -> Value {
    let mut config = json!({
        "model_type": model_type, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "vocab_size": 30522,
        "max_position_embeddings": 512, "type_vocab_size": 2, "pad_token_id": 0, "position_embedding_type": "absolute",
    });
    merge(&mut config, more);
    config
}

fn roberta(more: Value) -> Value {
    let mut config = bert("roberta", more);
    merge(
        &mut config,
        json!({
            "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1,
            "layer_norm_eps": 1e-5,
        }),
    );
    config
}

fn of_decoders() -> Value {
    json!({ "is_decoder": true, "add_cross_attention": true })
}

#[test]
fn bert2bert_base() {
    let sections = [bert("bert", json!({})), bert("bert", of_decoders())];
    let config = json!({ "model_type": "encoder-decoder", "encoder": sections[0], "decoder": sections[1] });
    check("bert2bert-base", &config, &[], &[]);
}

#[test]
fn roberta2roberta_base() {
    let sections = [roberta(json!({})), roberta(of_decoders())];
    let config = json!({ "model_type": "encoder-decoder", "encoder": sections[0], "decoder": sections[1] });
    check("roberta2roberta-base", &config, &[], &[]);
}

#[test]
fn dinov2_with_registers_base_and_roberta() {
    let encoder = json!({
        "model_type": "dinov2_with_registers", "hidden_act": "gelu", "hidden_size": 768, "image_size": 518,
        "layer_norm_eps": 1e-6, "layerscale_value": 1.0, "mlp_ratio": 4, "num_attention_heads": 12, "num_channels": 3,
        "num_hidden_layers": 12, "num_register_tokens": 4, "patch_size": 14, "qkv_bias": true, "use_swiglu_ffn": false,
    });
    let decoder = roberta(of_decoders());
    let config = json!({ "model_type": "vision-encoder-decoder", "encoder": encoder, "decoder": decoder });
    let mask = ["encoder.embeddings.mask_token"];
    check_stages(("dinov2-with-registers-base-roberta", Modality::Image), &config, &[], &mask);
}
