"""Rotary frequencies of every kind of scaling, as transformers computes them."""

from transformers import Qwen2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common import ROOT, write_compact

CASES = [
    (128, dict(max_position_embeddings=131072, rope_theta=1e6, rope_scaling={
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768})),
    (64, dict(max_position_embeddings=4096, rope_theta=1e4, rope_scaling={
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 16.0, "beta_slow": 2.0,
        "mscale": 0.8, "mscale_all_dim": 0.4, "truncate": False})),
    (64, dict(max_position_embeddings=4096, rope_theta=1e4, rope_scaling={
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "attention_factor": 1.25})),
    (32, dict(max_position_embeddings=4096, rope_theta=5e5, rope_scaling={
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512})),
    (48, dict(max_position_embeddings=4096, rope_theta=1e4, rope_scaling={"rope_type": "linear", "factor": 2.5})),
]


def make():
    print("rotary", flush=True)
    cases = []
    for head_dim, config in CASES:
        parsed = Qwen2Config(hidden_size=2 * head_dim, num_attention_heads=2, **config)
        frequencies, factor = ROPE_INIT_FUNCTIONS[config["rope_scaling"]["rope_type"]](parsed, device="cpu")
        cases.append({"config": config, "head_dim": head_dim, "attention_factor": float(factor),
                      "frequencies": [float(f"{f:.9g}") for f in frequencies.tolist()]})
    write_compact(ROOT / "rotary.json", cases)
