"""Writes a Hugging Face Whisper as a file of whisper.cpp, quantized: write(directory, path, "q8_0" or "q4_0").

The format is that of whisper.cpp's `models/convert-h5-to-ggml.py` and `ggml-quants.c`: header, mel filters, vocabulary,
tensors; blocks of 32 values with one f16 scale, quantized along the rows of matrices. The vocabulary is that of the model's
tokenizer, or of made-up words where that has words.
"""

import json
import struct

import numpy as np
from safetensors.numpy import load_file

MAGIC = 0x67676D6C
F32, F16, Q4_0, Q8_0 = 0, 1, 2, 8
#: `ftype` of the header, which names the type of most tensors.
FTYPES = {"q4_0": (2, Q4_0), "q8_0": (7, Q8_0)}
BLOCK = 32

LAYER = {
    "self_attn.q_proj": "attn.query", "self_attn.k_proj": "attn.key", "self_attn.v_proj": "attn.value",
    "self_attn.out_proj": "attn.out", "self_attn_layer_norm": "attn_ln", "encoder_attn.q_proj": "cross_attn.query",
    "encoder_attn.k_proj": "cross_attn.key", "encoder_attn.v_proj": "cross_attn.value",
    "encoder_attn.out_proj": "cross_attn.out", "encoder_attn_layer_norm": "cross_attn_ln", "fc1": "mlp.0",
    "fc2": "mlp.2", "final_layer_norm": "mlp_ln",
}
WHOLE = {
    "encoder.embed_positions.weight": "encoder.positional_embedding",
    "decoder.embed_positions.weight": "decoder.positional_embedding",
    "decoder.embed_tokens.weight": "decoder.token_embedding.weight",
    "encoder.layer_norm.weight": "encoder.ln_post.weight", "encoder.layer_norm.bias": "encoder.ln_post.bias",
    "decoder.layer_norm.weight": "decoder.ln.weight", "decoder.layer_norm.bias": "decoder.ln.bias",
}


def renamed(name):
    """The name of a tensor there; None for what is not stored."""
    name = name.removeprefix("model.")
    if name in WHOLE:
        return WHOLE[name]
    if name.startswith("encoder.conv"):
        return name
    side, layers, rest = name.partition(".layers.")
    if not layers:
        return None
    number, _, rest = rest.partition(".")
    part, _, ending = rest.rpartition(".")
    return f"{side}.blocks.{number}.{LAYER[part]}.{ending}"


def scaled_blocks(values, to_scale):
    """Blocks of 32 and their f16 scales, as f32 and as stored."""
    blocks = values.astype(np.float32).reshape(-1, BLOCK)
    scales = to_scale(blocks).astype(np.float32)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    return blocks * inverse[:, None], scales.astype(np.float16)


def q8_0(values):
    blocks, scales = scaled_blocks(values, lambda b: np.abs(b).max(1) / 127)
    return np.concatenate([scales[:, None].view(np.uint8), np.rint(blocks).astype(np.int8).view(np.uint8)], 1).tobytes()


def q4_0(values):
    # The value of largest size, with its sign, becomes -8.
    blocks, scales = scaled_blocks(values, lambda b: np.take_along_axis(b, np.abs(b).argmax(1)[:, None], 1)[:, 0] / -8)
    nibbles = np.clip(np.floor(blocks + 8.5), 0, 15).astype(np.uint8)
    packed = nibbles[:, : BLOCK // 2] | nibbles[:, BLOCK // 2 :] << 4
    return np.concatenate([scales[:, None].view(np.uint8), packed], 1).tobytes()


def byte_of_char():
    """Bytes by the characters that stand for them in a vocabulary of bytes (GPT-2's)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def vocabulary(directory, n):
    """The first `n` tokens, as bytes."""
    tokenizer = json.loads((directory / "tokenizer.json").read_text())["model"]
    if tokenizer.get("type", "BPE") != "BPE":
        return [f"w{i}".encode() for i in range(n)]
    of_char, by_id = byte_of_char(), {i: token for token, i in tokenizer["vocab"].items()}

    def as_bytes(token):
        plain = all(char in of_char for char in token)
        return bytes(of_char[char] for char in token) if plain else token.encode()

    return [as_bytes(by_id.get(i, f"w{i}")) for i in range(n)]


def mel_filters(n_mels):
    import transformers

    filters = transformers.WhisperFeatureExtractor(feature_size=n_mels).mel_filters
    return np.ascontiguousarray(filters.T.astype(np.float32))


def write(directory, path, dtype):
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    ftype, kind = FTYPES[dtype]
    with open(path, "wb") as out:
        keys = ["vocab_size", "max_source_positions", "d_model", "encoder_attention_heads", "encoder_layers",
                "max_target_positions", "d_model", "decoder_attention_heads", "decoder_layers", "num_mel_bins"]
        out.write(struct.pack("<12i", MAGIC, *(config[key] for key in keys), ftype))
        filters = mel_filters(config["num_mel_bins"])
        out.write(struct.pack("<2i", *filters.shape) + filters.tobytes())
        words = vocabulary(directory, 50_257 if config["vocab_size"] >= 51_865 else 50_256)
        out.write(struct.pack("<i", len(words)))
        for word in words:
            out.write(struct.pack("<i", len(word)) + word)
        for name, values in tensors.items():
            name = renamed(name)
            if name is not None:
                tensor(out, name, values, kind)


def tensor(out, name, values, kind):
    """One tensor: matrices quantized, convolutions f16, the rest f32."""
    if name.endswith(("conv1.bias", "conv2.bias")):
        values = values.reshape(-1, 1)
    quantized = values.ndim == 2 and "positional" not in name and "conv" not in name and values.shape[1] % BLOCK == 0
    if quantized:
        dtype, data = kind, {Q8_0: q8_0, Q4_0: q4_0}[kind](values)
    elif values.ndim == 3:
        dtype, data = F16, values.astype(np.float16).tobytes()
    else:
        dtype, data = F32, values.astype(np.float32).tobytes()
    encoded = name.encode()
    out.write(struct.pack("<3i", values.ndim, len(encoded), dtype))
    out.write(struct.pack(f"<{values.ndim}i", *reversed(values.shape)) + encoded + data)
