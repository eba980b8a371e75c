"""Three families of this engine and of Hugging Face transformers, in turn, in one run: LLaVA, Gemma 3, Qwen3-VL with experts.

    python -m venv venv && venv/bin/pip install -r tests/golden/requirements.txt
    venv/bin/python benches/families.py              # or: llava gemma3 qwen3_vl_moe, --new-tokens N, --threads N, --help

Models have the parts of the published ones in smaller sizes, and random weights: what they write is noise, and how fast they
write it is not. Configurations, tokenizers and processors are those of the golden models of `tests/golden`, with other sizes.
Both sides read one image and the same number of text tokens, and write the same number of tokens greedily. `encode` is the
image's tower and projector, `prefill` what a prompt with its rows takes beside that, `decode` counts the tokens after the first.
Rounds alternate, and the best of each side counts. The result is Markdown, on the screen and in benches/results/families.md.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRECISIONS = ["f32", "bf16", "int8"]
REPEATS = 3
"""Runs of each in a round, of which the fastest counts."""


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(MODELS)}; all by default")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--text-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--built", action="store_true", help="target/release/throughput is there and up to date")
    args = parser.parse_args()
    args.models = args.models or list(MODELS)
    unknown = set(args.models) - set(MODELS)
    if unknown:
        parser.error(f"unknown models {sorted(unknown)}, there are {', '.join(MODELS)}")
    return args


# By name: title, golden model, side of the image, keys of its configuration that become others.
MODELS = {
    "llava": ("LLaVA (CLIP, Llama)", "llava_clip_llama", 224, {
        "text_config": dict(hidden_size=768, num_attention_heads=12, num_hidden_layers=8, intermediate_size=2048, vocab_size=32_000),
        "vision_config": dict(hidden_size=512, num_attention_heads=8, intermediate_size=2048, num_hidden_layers=8, image_size=224,
                              projection_dim=512),
    }),
    "gemma3": ("Gemma 3 (SigLIP, windows)", "gemma3_narrow_window", 224, {
        "mm_tokens_per_image": 64,
        "text_config": dict(hidden_size=640, num_attention_heads=4, num_key_value_heads=1, head_dim=256, num_hidden_layers=6,
                            intermediate_size=2048, vocab_size=65_536, sliding_window=512, query_pre_attn_scalar=256,
                            layer_types=["sliding_attention"] * 5 + ["full_attention"]),
        "vision_config": dict(hidden_size=384, num_attention_heads=6, intermediate_size=1536, num_hidden_layers=6, image_size=224,
                              patch_size=14, projection_dim=384),
    }),
    "qwen3_vl_moe": ("Qwen3-VL (16 experts, 4 a token)", "qwen3_vl_moe_wide_heads", 256, {
        "text_config": dict(hidden_size=768, num_attention_heads=12, num_key_value_heads=4, head_dim=64, num_hidden_layers=6,
                            intermediate_size=2048, vocab_size=65_536, num_experts=16, num_experts_per_tok=4,
                            moe_intermediate_size=384, rope_scaling={
                                "mrope_interleaved": True, "mrope_section": [12, 10, 10], "rope_type": "default"}),
        "vision_config": dict(hidden_size=384, intermediate_size=1536, num_heads=6, depth=6, out_hidden_size=768,
                              num_position_embeddings=256, deepstack_visual_indexes=[1, 3]),
    }),
}
ARGS = arguments()
os.environ["OMP_NUM_THREADS"] = str(ARGS.threads)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from PIL import Image  # noqa: E402

torch.set_num_threads(ARGS.threads)
torch.set_grad_enabled(False)


def make(name, folder):
    """The model, in memory and in a directory, and its image."""
    _, golden, side, changes = MODELS[name]
    shutil.copytree(ROOT / "tests/golden" / golden / "model", folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    for key, change in changes.items():
        config[key] = {**config[key], **change} if isinstance(change, dict) else change
    (folder / "config.json").write_text(json.dumps(config))
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    for key in ("size", "crop_size"):
        size = processor.get(key, {})
        size.update({edge: side for edge in size if edge in ("height", "width") or name == "llava"})
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    torch.manual_seed(0)
    kinds = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_config(kinds).eval()
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    # As it was written, not as transformers writes it anew.
    (folder / "config.json").write_text(json.dumps(config))
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "image.png")
    return model


def timed(work):
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def fastest(work):
    return min((timed(work) for _ in range(REPEATS)), key=lambda run: run[0])


def theirs(model, folder, batches):
    """Milliseconds of encode and prefill, and tokens per second at each batch size."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    seen = dict(processor(Image.open(folder / "image.png").convert("RGB"), return_tensors="pt"))
    seen = {k: v for k, v in seen.items() if k in ("pixel_values", "image_grid_thw")}
    model.get_image_features(**seen)
    encode, features = fastest(lambda: model.get_image_features(**seen).pooler_output)
    n_rows = sum(rows.reshape(-1, rows.shape[-1]).shape[0] for rows in features)
    token = getattr(model.config, "image_token_id", None) or model.config.image_token_index
    ids = torch.tensor([[token] * n_rows + [10 + i % 80 for i in range(ARGS.text_tokens)]])

    def read(batch):
        inputs = {k: v.repeat(batch, *[1] * (v.dim() - 1)) for k, v in seen.items()}
        inputs["input_ids"] = ids.repeat(batch, 1)
        kinds = (inputs["input_ids"] == token).int()
        if "image_grid_thw" in seen:
            inputs["mm_token_type_ids"] = kinds
        elif model.config.model_type == "gemma3":
            inputs["token_type_ids"] = kinds
        return model(**inputs, use_cache=True, logits_to_keep=1)

    read(1)
    first, _ = fastest(lambda: read(1))
    rates = []
    for batch in batches:
        out = read(batch)
        cache, token_ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)

        def rest():
            at = token_ids
            for _ in range(ARGS.new_tokens - 1):
                logits = model(input_ids=at, past_key_values=cache, use_cache=True).logits
                at = logits[:, -1].argmax(-1, keepdim=True)

        took, _ = timed(rest)
        rates.append(batch * (ARGS.new_tokens - 1) / took)
    return [encode * 1e3, (first - encode) * 1e3], rates


def ours(folder, batches, precision):
    command = [str(ROOT / "target/release/throughput"), str(folder), "--item", str(folder / "image.png"), "--repeats", str(REPEATS),
               "--batches", ",".join(map(str, batches)), "--new-tokens", str(ARGS.new_tokens), "--text-tokens", str(ARGS.text_tokens),
               "--threads", str(ARGS.threads), "--precision", precision]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    prefill = result["prefill"]
    return [result["encode_ms"], 1e3 * prefill["tokens"] / prefill["tokens_per_s"]], [d["tokens_per_s"] for d in result["decode"]]


def merge(best, new):
    if best is None:
        return new
    return [min(pair) for pair in zip(best[0], new[0])], [max(pair) for pair in zip(best[1], new[1])]


def cpu():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def rows_of(title, best, batches):
    their = best["theirs"]
    for i, work in enumerate(["encode", "prefill"]):
        cells = " | ".join(f"{best[p][0][i]:.0f} | {their[0][i] / best[p][0][i]:.2f}" for p in PRECISIONS)
        yield f"| {title} | {work}, ms | {their[0][i]:.0f} | {cells} |"
    for i, batch in enumerate(batches):
        cells = " | ".join(f"{best[p][1][i]:.0f} | {best[p][1][i] / their[1][i]:.2f}" for p in PRECISIONS)
        yield f"| {title} | decode at batch {batch}, tokens/s | {their[1][i]:.0f} | {cells} |"


def main():
    if not ARGS.built:
        subprocess.run(["cargo", "build", "--release", "--package", "triptych-benches"], cwd=ROOT, check=True)
    batches = [int(b) for b in ARGS.batches.split(",")]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    lines = [
        f"# Three families beside transformers {transformers.__version__}, torch {torch.__version__}",
        "",
        f"{cpu()}, {ARGS.threads} threads, commit {commit}, {datetime.date.today()}; an image and {ARGS.text_tokens} tokens of text, "
        f"{ARGS.new_tokens} tokens written, best of {ARGS.rounds} alternating rounds. `benches/families.py`.",
        "",
        "| model | work | transformers f32 | ours f32 | ratio | ours bf16 | ratio | ours int8 | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in ARGS.models:
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder) / name
            model = make(name, folder)
            best = {"theirs": None} | {p: None for p in PRECISIONS}
            for _ in range(ARGS.rounds):
                best["theirs"] = merge(best["theirs"], theirs(model, folder, batches))
                for precision in PRECISIONS:
                    best[precision] = merge(best[precision], ours(folder, batches, precision))
        lines.extend(rows_of(MODELS[name][0], best, batches))
        print("\n".join(lines[-2 - len(batches):]), flush=True)
    text = "\n".join(lines) + "\n"
    (ROOT / "benches/results/families.md").write_text(text)
    print("\n" + text)


if __name__ == "__main__":
    main()
