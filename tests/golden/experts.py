"""Golden files of decoders with experts: Mixtral, Qwen2-MoE and Qwen3-MoE. All but shapes and names is that of `text_decoders`."""

import re

import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from common import ROOT, expert_gains, write_compact
from text_decoders import CLASSES, WORDS, Shape, make_case, sizes

CLASSES.update({
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
})
WORDS.update({"mixtral": WORDS["mistral"], "qwen2_moe": WORDS["qwen2"], "qwen3_moe": WORDS["qwen3"]})


def shape(case, kind, config, disk, seed, width, left_out=(), more=()):
    return Shape(case, kind, config, disk, seed, left_out, (*expert_gains(config["hidden_size"], width), *more))


SHAPES = [
    shape("mixtral_windowed", "mixtral", sizes(48, 4, 2, 2, 40, sliding_window=24, rope_theta=1e6, num_local_experts=5,
          num_experts_per_tok=2, rms_norm_eps=1e-5, tie_word_embeddings=False), torch.float32, 7000, 40, ("rms_norm_eps",)),
    # Layer 1 is dense; the weights of a token's experts do not add up to one.
    shape("qwen2_moe_shared", "qwen2_moe", sizes(60, 3, 1, 3, 56, rope_theta=1e6, rms_norm_eps=1e-6, decoder_sparse_step=1,
          mlp_only_layers=[1], num_experts=6, num_experts_per_tok=2, moe_intermediate_size=28, norm_topk_prob=False,
          shared_expert_intermediate_size=44, tie_word_embeddings=False, use_sliding_window=False), torch.bfloat16, 7100, 28),
    shape("qwen3_moe_renormalised", "qwen3_moe", sizes(48, 4, 2, 3, 64, head_dim=16, rope_theta=1e6, rms_norm_eps=1e-6,
          num_experts=9, num_experts_per_tok=3, moe_intermediate_size=20, norm_topk_prob=True, mlp_only_layers=[],
          decoder_sparse_step=1, tie_word_embeddings=False, use_sliding_window=False, attention_bias=False), torch.float16, 7200, 20,
          more=(("experts.down_proj", 1.6),)),
]


def make():
    for one in SHAPES:
        make_case(one)


def published_sizes():
    """Sizes as published, but for the number of layers, which are alike."""
    text = dict(num_hidden_layers=2, tie_word_embeddings=False)
    return {
        "mixtral-8x7b": (MixtralForCausalLM, MixtralConfig(**text)),
        "qwen1.5-moe-a2.7b": (Qwen2MoeForCausalLM, Qwen2MoeConfig(num_key_value_heads=16, **text)),
        "qwen3-30b-a3b": (Qwen3MoeForCausalLM, Qwen3MoeConfig(head_dim=128, norm_topk_prob=True, **text)),
        "qwen3-vl-30b-a3b": (Qwen3VLMoeForConditionalGeneration, Qwen3VLMoeConfig(
            tie_word_embeddings=False,
            text_config=dict(
                hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_attention_heads=32, head_dim=128,
                num_key_value_heads=4, num_experts=128, num_experts_per_tok=8, vocab_size=151936, rope_parameters={
                    "rope_theta": 5e6, "rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
                **{**text, "num_hidden_layers": 3}),
            vision_config=dict(depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16, out_hidden_size=2048,
                               deepstack_visual_indexes=[8, 16, 24]))),
        "qwen3.5-35b-a3b": (Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeConfig(
            tie_word_embeddings=False,
            text_config=dict(rope_parameters={
                "rope_theta": 1e7, "rope_type": "default", "mrope_section": [11, 11, 10], "mrope_interleaved": True,
                "partial_rotary_factor": 0.25}, **{**text, "num_hidden_layers": 4}),
            vision_config=dict(depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16, out_hidden_size=2048))),
    }


def published(kind, name, shape):
    """Names and shapes of a tensor in the published files: stacked experts one by one, or inputs first."""
    found = re.fullmatch(r"(.*)\.mlp\.experts\.(gate_up|down)_proj", name)
    if not found:
        router = name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
        return {router if kind is MixtralForCausalLM else name: shape}
    if kind is Qwen3_5MoeForConditionalGeneration:
        return {name: shape}
    layer, part = found.groups()
    n, out, width = shape
    if kind is Qwen3VLMoeForConditionalGeneration:
        return {name: [n, width, out]}
    parts = {"gate_up": ["gate_proj", "up_proj"], "down": ["down_proj"]}[part]
    experts = f"{layer}.mlp.experts"
    if kind is MixtralForCausalLM:
        parts = {"gate_up": ["w1", "w3"], "down": ["w2"]}[part]
        experts = f"{layer}.block_sparse_moe.experts"
    return {f"{experts}.{i}.{p}.weight": [out // len(parts), width] for i in range(n) for p in parts}


def make_names():
    for name, (kind, config) in published_sizes().items():
        with torch.device("meta"):
            state = kind(config).state_dict()
        shapes = {}
        for k, v in state.items():
            shapes.update(published(kind, k, list(v.shape)))
        write_compact(ROOT / "names" / f"{name}.json", dict(sorted(shapes.items())))
        print(" ", name, len(shapes))
