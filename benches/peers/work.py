"""What a model's encode multiplies, and what a decode step at batch 1 reads at least: over the measured peaks these are
shares of what the machine can do.

Multiply-adds are those of linear layers, convolutions and attention. Bytes are the decoder's weights in their precision,
the table of the logits, and the cross-attention keys and values of the item, in the precision too, in int8 with an f32 for
each head of a token, and with int4 as with int8; self-attention and norms are left out, they are small. A Qwen2-VL attends to the item among the
tokens of its prompt: it is the prompt's keys and values that count.
"""

import json
from pathlib import Path

#: Bytes of a weight, of one of the logits' layer, and of a cached value; heads are 64 wide in all of these models.
BYTES = {"f32": (4, 4, 4), "bf16": (2, 2, 2), "int8": (1, 1, 1 + 4 / 64), "int4": (4.5 / 8, 1, 1 + 4 / 64)}


def shapes(directory):
    """`d, ffn, encoder layers, decoder layers, vocabulary, products of a feed-forward layer` of a config."""
    config = json.loads((Path(directory) / "config.json").read_text())
    if config["model_type"] == "t5":
        gated = 3 if config.get("feed_forward_proj", "relu").startswith("gated") else 2
        inner = config["num_heads"] * config["d_kv"]
        layers = config["num_layers"], config.get("num_decoder_layers") or config["num_layers"]
        return config, config["d_model"], inner, config["d_ff"] * gated // 2, *layers
    d = config["d_model"]
    return config, d, d, config["encoder_ffn_dim"], config["encoder_layers"], config["decoder_layers"]


def qwen2vl(directory):
    """`vision config, text config, weights of the decoder's layers and of its logits, width of keys`; None for others."""
    config = json.loads((Path(directory) / "config.json").read_text())
    if config["model_type"] != "qwen2_vl":
        return None
    text = config["text_config"]
    d, heads = text["hidden_size"], text["num_attention_heads"]
    keys = d // heads * text["num_key_value_heads"]
    layers = text["num_hidden_layers"] * (2 * d * d + 2 * d * keys + 3 * d * text["intermediate_size"])
    return config["vision_config"], text, layers, d * text["vocab_size"], keys


def image_multiply_adds(vision, n_tokens):
    """Of a vision encoder that makes so many rows."""
    d, merged = vision["embed_dim"], vision["spatial_merge_size"] ** 2
    n_patches, patch = n_tokens * merged, vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    layer = n_patches * (4 * d * d + 2 * d * d * vision["mlp_ratio"]) + 2 * n_patches * n_patches * d
    merger = n_tokens * merged * d * (merged * d + vision["hidden_size"])
    return n_patches * patch * d + vision["depth"] * layer + merger


def prefill_multiply_adds(directory, n_tokens):
    """Of a prompt of a Qwen2-VL, its image encoded before: attention to what is there already, logits of the last token."""
    _, text, layers, logits, _ = qwen2vl(directory)
    attention = text["num_hidden_layers"] * n_tokens * (n_tokens + 1) * text["hidden_size"]
    return n_tokens * layers + attention + logits


def encode_multiply_adds(directory, n_tokens):
    """Of one item: 30 s of audio for Whisper, so many tokens or rows for the others."""
    if found := qwen2vl(directory):
        return image_multiply_adds(found[0], n_tokens)
    config, d, inner, ffn, layers, _ = shapes(directory)
    stem = 0
    if config["model_type"] == "whisper":
        frames, n_tokens = 2 * config["max_source_positions"], config["max_source_positions"]
        stem = 3 * d * (frames * config["num_mel_bins"] + n_tokens * d)
    layer = n_tokens * (4 * d * inner + 2 * d * ffn) + 2 * n_tokens * n_tokens * inner
    return stem + layers * layer


def decode_bytes(directory, precision, n_tokens):
    """Of a token at batch 1, after so many tokens of the item, or of the prompt that has it."""
    of_weight, of_logit, of_value = BYTES[precision]
    if found := qwen2vl(directory):
        _, text, weights, logits, keys = found
        return weights * of_weight + logits * of_logit + text["num_hidden_layers"] * 2 * n_tokens * keys * of_value
    config, d, inner, ffn, _, layers = shapes(directory)
    if config["model_type"] == "whisper":
        n_tokens = config["max_source_positions"]
    weights = layers * (4 * d * inner + 2 * d * inner + 2 * d * ffn)
    logits = config["vocab_size"] * d
    return weights * of_weight + logits * of_logit + layers * 2 * n_tokens * inner * of_value
