"""Tensor names and shapes of the published checkpoints, from meta-device models of the real sizes."""

import torch
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from common import ROOT, write_compact
from qwen import published_name

TEXT = dict(max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=True,
            rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}, vocab_size=151936)


def whisper(d, layers, heads, mels, vocab):
    return WhisperForConditionalGeneration, WhisperConfig(
        d_model=d, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads,
        decoder_attention_heads=heads, encoder_ffn_dim=4 * d, decoder_ffn_dim=4 * d, num_mel_bins=mels, vocab_size=vocab)


def models():
    return {
        "whisper-tiny.en": whisper(384, 4, 6, 80, 51864),
        "whisper-large-v3": whisper(1280, 32, 20, 128, 51866),
        "qwen2-vl-2b": (Qwen2VLForConditionalGeneration, Qwen2VLConfig(
            hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
            num_key_value_heads=2, vision_config=dict(depth=32, embed_dim=1280, mlp_ratio=4, num_heads=16,
                                                      hidden_size=1536), **TEXT)),
        "qwen2.5-vl-3b": (Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig(
            hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
            num_key_value_heads=2, vision_config=dict(depth=32, hidden_size=1280, intermediate_size=3420,
                                                      num_heads=16, out_hidden_size=2048), **TEXT)),
    }


def make():
    print("names", flush=True)
    for name, (kind, config) in models().items():
        with torch.device("meta"):
            state = kind(config).state_dict()
        # Heads tied to the embedding are not in the published files.
        tied = {"proj_out.weight", "lm_head.weight"}
        shapes = {published_name(k): list(v.shape) for k, v in state.items() if k not in tied}
        write_compact(ROOT / "names" / f"{name}.json", dict(sorted(shapes.items())))
        print(" ", name, len(shapes), sum(torch.Size(s).numel() for s in shapes.values()))
