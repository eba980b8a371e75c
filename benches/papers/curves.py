"""Curve files of accelerators from published figures: `python benches/papers/curves.py` writes them beside this file.

Each number below has its source; where nothing was published it says `assumed`. A time is a sum of terms (a step that is fixed,
tokens, keys that they attend to), and the points of a file are that sum at a grid of inputs.

Sources:
[blog]     vLLM, Encoder Disaggregation for Scalable Multimodal Model Serving, 2025-12-15, text and plots:
           https://github.com/vllm-project/vllm-project.github.io/blob/5ffe2dd543a30f34309d71d8374803612223e9fb/_posts/2025-12-15-vllm-epd.md
[gemma]    gemma-3-4b-it on an A100 with vLLM, a dense model of the same size:
           https://github.com/tenstorrent/tt-inference-server/issues/521 (comment of 2025-09-03)
[a100]     NVIDIA A100 80 GB: 312 TFLOP/s bf16, 2039 GB/s, https://www.nvidia.com/en-us/data-center/a100/
[qwen3vl]  config.json of Qwen/Qwen3-VL-4B-Instruct and -235B-A22B-Instruct-FP8: layers, heads, widths
[sglang]   SGLang, EPD Disaggregation, 2026-01-12:
           https://github.com/lm-sys/lm-sys.github.io/blob/4000fedda62d01dd548699dbd226d20313a3a186/blog/2026-01-12-epd.md
[pr12263]  https://github.com/sgl-project/sglang/pull/12263, description, Qwen3-VL-235B-A22B (FP8) on H20
[h20]      H20: 148 TFLOP/s bf16, 296 FP8, 4.0 TB/s, as vendors list it
"""

import json
from pathlib import Path

VERSION = 4
# Shapes of steps: prompt tokens, tokens read before them, sequences that decode, context of each.
STEPS = [(0, 0, b, c) for b in (1, 8, 32, 64, 128, 256) for c in (512, 2048, 4096)]
STEPS += [(n, before, 0, 0) for n in (64, 512, 1024, 2048) for before in (0, 2048)]
STEPS += [(2048 - b, 0, b, c) for b in (8, 64, 128) for c in (512, 2048)]
# Images of a batch of the encoder.
BATCHES = (1, 2, 4, 8)


def p95(us):
    """A tenth above the median: assumed, no publication tells how times vary."""
    return round(us * 1.1, 1)


def timed(us):
    return {"p50_us": round(us, 1), "p95_us": p95(us)}


def step(shape, t):
    prefill, before, decodes, context = shape
    prefill_context = prefill * before + prefill * (prefill + 1) // 2
    decode_context = decodes * context
    us = (t["step_us"] + prefill * t["prefill_token_us"] + prefill_context * t["prefill_key_us"]
          + decodes * t["decode_us"] + decode_context * t["decode_key_us"])
    return {"prefill_tokens": prefill, "prefill_context": prefill_context, "decodes": decodes,
            "decode_context": decode_context, "projected_rows": 0, **timed(us)}


def encode(n, t):
    tokens = t["image_tokens"]
    us = t["encode_us"] + n * t["encode_image_us"]
    return {"items": n, "tokens": n * tokens, "squares": n * tokens * tokens, **timed(us)}


def curves(t):
    rows = t["image_tokens"] * t["row_bytes"]
    return {
        "version": VERSION, "model": t["model"], "precision": t["precision"], "threads": 1, "on_device": True,
        "measured": {"host": t["host"], "n_cores": 1, "cores": [], "commit": "", "at_s": 0, "rounds": 0,
                     "busy": 0.0, "store": "published figures"},
        "encode": [encode(n, t) for n in BATCHES],
        "encode_parts": t["encode_parts"],
        "preprocess": [{"of": t["image_pixels"], **timed(t["preprocess_us"])}],
        "items": [{"size": t["image_pixels"], "tokens": t["image_tokens"], "bytes": t["image_bytes"]}],
        "step": [step(shape, t) for shape in STEPS],
        "publish": [{"of": rows, **timed(t["publish_us"])}],
        "load": [{"of": rows, **timed(t["load_us"])}],
        "row_bytes": t["row_bytes"],
        "kv": {"token_bytes": t["kv_token_bytes"], "cross_row_bytes": 0, "max_context": 32768,
               "device_bytes": t["device_bytes"]},
        "prompt": {"before": 4, "around_item": 2, "after": 5, "items": "front"},
        "proxy": {"request_us": 1000.0, "item_us": 500.0, "item_byte_us": 0.0, "token_us": 0.0},  # assumed
        "frontend": {"request_us": 0.0, "item_us": 0.0, "item_byte_us": 0.0, "step_us": 0.0, "token_us": 0.0},
        "colocated": {"encode": 2.0, "step": 2.0},
    }


A100 = {
    "model": "Qwen3-VL-4B-Instruct", "precision": "bf16",
    "host": "A100 80 GB, of the vLLM blog and vendors' figures",
    # [qwen3vl] 640x640 in patches of 16, merged by 2: 20x20. [blog] "~400 visual tokens each".
    "image_tokens": 400, "image_pixels": 640 * 640, "image_bytes": 400_000,
    # [blog] plots: 1E3PD, three and four images, ends 15 and 11 requests/s: one encoder gives 45 images/s, 22 ms each with its
    # preprocessing. 2 ms of it fixed: assumed.
    "encode_us": 2_000.0, "encode_image_us": 20_000.0, "preprocess_us": 100.0,
    # [qwen3vl] 24 layers of the vision tower.
    "encode_parts": 24,
    # [blog] plots: 1E3PD, one image, 4 requests/s, TPOT p99 27 ms at 1 to 2 sequences in a step; less what their prompts take.
    # [gemma] has 8 to 11 ms for a sequence alone, without images.
    "step_us": 18_000.0,
    # [gemma] 2048 tokens in 108 ms, 4096 in 208 ms: 49 us a token behind the fixed part; [a100] 46 us at half of the peak.
    "prefill_token_us": 46.0,
    # [qwen3vl] 36 layers of 32 heads of 128: 0.59 MFLOP for a token and key, at 40 % of [a100].
    "prefill_key_us": 0.0047,
    # [blog] plots: 1E3PD, one image, 400 against 2000 text tokens, ends above 22 and at 13 requests/s; what prompts leave.
    "decode_us": 200.0,
    # [qwen3vl] 36 layers, 8 KV heads of 128, bf16: 147 456 bytes a token; at 80 % of [a100].
    # [a100] 80 GB less 9 GB of weights, [qwen3vl] 4.4 G parameters.
    "device_bytes": 71_000_000_000, "kv_token_bytes": 147_456, "decode_key_us": 0.09,
    # [qwen3vl] width 2560, three deepstack levels beside the output, bf16. Transfers at 2 GB/s: assumed, [blog] tells nothing.
    "row_bytes": 2560 * 4 * 2, "publish_us": 4_000.0, "load_us": 4_000.0,
}

# [blog] plots: data parallelism with a short text ends 17.5, 13.2, 10.7 and 9 requests/s with 1 to 4 images: on each of four cards an
# image takes 72 ms more, of which 20 ms are its 400 prompt tokens. What the 52 ms are besides an encode of 22 ms it does not tell.
A100_DP = {**A100, "host": "A100 80 GB, with the 52 ms that an image costs vLLM's data parallelism", "encode_us": 0.0,
           "encode_image_us": 52_000.0}

# 1080p: [qwen3vl] 1920x1080 in units of 32 is 60x34 = 2040 tokens. [pr12263] 650 034 vision tokens of 64 requests agree with five
# such images a request.
H20 = {
    "model": "Qwen3-VL-235B-A22B-Instruct-FP8", "precision": "int8",
    "host": "four H20 with tensor parallelism, of SGLang's blog and pull request",
    "image_tokens": 2040, "image_pixels": 1920 * 1080, "image_bytes": 500_000,
    # [pr12263] colocate ends 0.26 requests/s of five images: 3.85 s a request, less 1.6 s of prompt and answer by what is below:
    # 0.45 s an image, its preprocessing with it.
    "encode_us": 0.0, "encode_image_us": 450_000.0, "preprocess_us": 100.0, "encode_parts": 27,
    # [sglang] no figure. 22 GB of active weights in FP8 at 60 % of four [h20], and 94 layers' reductions: assumed.
    "step_us": 15_000.0,
    # 22 G active weights, 44 GFLOP a token at 60 % of four [h20] in FP8.
    "prefill_token_us": 62.0,
    # [qwen3vl] 94 layers of 64 heads of 128: 3.1 MFLOP for a token and key at 40 % of four [h20] in bf16.
    "prefill_key_us": 0.013,
    "decode_us": 300.0,  # assumed
    # [qwen3vl] 94 layers, 4 KV heads of 128, bf16: 192 512 bytes a token, over four cards.
    # Four of 96 GB, less 240 GB of weights.
    "device_bytes": 144_000_000_000, "kv_token_bytes": 192_512, "decode_key_us": 0.015,
    # [qwen3vl] width 4096, three deepstack levels beside the output, bf16. RDMA at 10 GB/s: assumed.
    "row_bytes": 4096 * 4 * 2, "publish_us": 3_000.0, "load_us": 7_000.0,
}

# An encoder on a card of its own. [sglang] the tower gains nothing from tensor parallelism: 466 ms on four cards, 492 on two.
H20_ENCODER = {**H20, "host": "one H20, of SGLang's blog and pull request"}

if __name__ == "__main__":
    here = Path(__file__).parent
    for name, terms in {"a100-qwen3-vl-4b": A100, "a100-qwen3-vl-4b-dp": A100_DP, "h20x4-qwen3-vl-235b": H20, "h20-qwen3-vl-235b": H20_ENCODER}.items():
        (here / f"{name}.json").write_text(json.dumps(curves(terms), indent=1) + "\n")
