"""Models at the widths of published ones, with seeded weights that are not stored, and what is stored of their outputs.

A weight's values follow from its published name and its place in the tensor; the test draws the same. Stored are the
configuration, names and shapes, and some rows of the outputs."""

import dataclasses
import gc
import os
import tempfile
from collections.abc import Callable

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3ForConditionalGeneration,
    MT5ForConditionalGeneration,
    T5ForConditionalGeneration,
    UMT5ForConditionalGeneration,
)

from common import ROOT, write_compact, write_tensors

# Rows of a token table: its width is that of one row, and more of them are more of the same.
VOCAB = 2048
ITEM_TOKEN = 2000
# Every so many values of a stored row.
STRIDE = 8
GAMMA = np.uint64(0x9E3779B97F4A7C15)
# Values that are drawn at once.
PART = 1 << 22


def uniform_parts(name, n):
    """`n` values in [-1, 1) of SplitMix64, whose state starts with FNV-1a of the name; in parts, each with its place."""
    start = 0xCBF29CE484222325
    for byte in name.encode():
        start = (start ^ byte) * 0x100000001B3 & (1 << 64) - 1
    # Integers of 64 bits take more room than the values.
    for at in range(0, n, PART):
        with np.errstate(over="ignore"):
            z = np.uint64(start) + GAMMA * np.arange(at + 1, min(n, at + PART) + 1, dtype=np.uint64)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z ^= z >> np.uint64(31)
        yield slice(at, at + PART), 2 * ((z >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)) - 1


def uniform(name, n):
    """The same in one."""
    out = np.empty(n, np.float32)
    for at, values in uniform_parts(name, n):
        out[at] = values
    return out


def gain(name):
    """T5 does not scale scores: its queries are small. A router is sure of its choice, so that rounding seldom decides it."""
    return 0.125 if name.endswith("Attention.q.weight") else 4 if name.endswith(".gate.weight") else 1


def fan_in(name, shape):
    """Of stacked experts the lesser side, whichever of both comes first."""
    is_stacked = len(shape) == 3 and ("experts." in name or ".moe." in name)
    return min(shape[1:]) if is_stacked else np.prod(shape[1:])


def weight(name, shape):
    """A weight in bf16: a matrix of variance 1 / fan-in, a scale about 1, a bias about 0."""
    n = int(np.prod(shape))
    drawn = torch.empty(n, dtype=torch.bfloat16)
    for at, values in uniform_parts(name, n):
        values = torch.from_numpy(values)
        if len(shape) > 1:
            values *= torch.tensor(gain(name) * np.sqrt(3 / fan_in(name, shape)), dtype=torch.float32)
        elif name.endswith("bias"):
            values *= 0.0625
        else:
            values = 1 + values * 0.125
        drawn[at] = values.to(torch.bfloat16)
    return drawn.reshape(shape)


def features(shape):
    """Values of an item, of variance 1."""
    values = uniform("features", int(np.prod(shape))) * np.float32(np.sqrt(3))
    return torch.from_numpy(values).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Wide:
    """A model, its published names, and how it is run."""

    name: str
    kind: type
    config: object
    run: Callable
    rename: Callable = lambda name: name
    # Ends of names that are not in a published file.
    left_out: tuple = ()
    # Its tensors in a file are not those in memory: experts.
    by_file: bool = False
    # Published experts are `[n, in, out]`, those in a file of transformers 5 `[n, out, in]`.
    inputs_first: bool = False
    # Fills a model whose published tensors are not one each in memory, and returns their shapes.
    fill: Callable | None = None


def ids(n, seed):
    return torch.tensor([[(7 * i * i + 31 * i + seed) % 1900 + 20 for i in range(n)]])


def sampled(rows, at):
    return rows[at][:, ::STRIDE].float()


def with_items(model, rows, given, **inputs):
    """The outputs of a prompt with `rows` of an item in its middle."""
    n = len(rows)
    tokens = torch.cat([ids(6, 5), torch.full((1, n), ITEM_TOKEN), ids(8, 9)], dim=1)
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = (tokens == ITEM_TOKEN).int()
        positions, _ = model.model.get_rope_index(tokens, **{k: inputs[k] for k in ("mm_token_type_ids", "image_grid_thw")})
        model.model.rope_deltas = None
        given["positions"] = positions[:, 0].tolist()
    if isinstance(model, Gemma3ForConditionalGeneration):
        inputs["token_type_ids"] = (tokens == ITEM_TOKEN).int()
    logits = model(input_ids=tokens, **inputs).logits[0]
    at, seen = [0, n // 3, n - 1], [3, 6 + n // 2, n + 13]
    given |= {"prompt": tokens[0].tolist(), "item": [6, n], "rows": at, "logit_rows": seen}
    return given, {"rows": sampled(rows, at), "logits": sampled(logits, seen)}


def decoder(hidden, ffn, heads, kv_heads, **more):
    return dict(hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=2, num_attention_heads=heads,
                num_key_value_heads=kv_heads, vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more)


TWO = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_bos_token_id=None,
           forced_eos_token_id=None)
SEQ2SEQ = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight", "final_logits_bias")


def filled_by_file(case):
    """The same, through a file of the model."""
    with tempfile.TemporaryDirectory() as folder:
        case.kind(case.config).to(torch.bfloat16).save_pretrained(folder)
        path = os.path.join(folder, "model.safetensors")
        state, shapes = {}, {}
        for name, value in load_file(path).items():
            if not value.is_floating_point() or name.endswith("pos_idx_to_embed"):
                # Sinusoids are stored beside weights.
                state[name] = value
                continue
            is_turned = case.inputs_first and value.dim() == 3 and "experts." in name
            shape = [value.shape[0], *value.shape[:0:-1]] if is_turned else list(value.shape)
            drawn = weight(name, shape)
            if not (case.left_out and name.endswith(case.left_out)):
                shapes[name] = shape
            state[name] = drawn.transpose(1, 2).contiguous() if is_turned else drawn
        save_file(state, path, metadata={"format": "pt"})
        model = case.kind.from_pretrained(folder, dtype=torch.float32).eval()
    has_experts = any("experts" in name for name in shapes)
    if has_experts:
        # One after another.
        model.set_experts_implementation("eager")
    return model, shapes


def filled(case):
    """The model with its weights, and shapes by published name."""
    if case.by_file:
        return filled_by_file(case)
    torch.manual_seed(0)
    model = case.kind(case.config).eval()
    if isinstance(model, (T5ForConditionalGeneration, MT5ForConditionalGeneration, UMT5ForConditionalGeneration)):
        # As published; transformers 5 ties it whatever the configuration says.
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    if case.fill is not None:
        with torch.no_grad():
            return model, case.fill(model)
    shapes = {}
    with torch.no_grad():
        for name, value in model.state_dict().items():
            published = case.rename(name)
            if name.endswith(case.left_out) and case.left_out:
                continue
            shapes[published] = list(value.shape)
            value.copy_(weight(published, value.shape))
    return model, shapes


@torch.no_grad()
def make_case(case):
    model, shapes = filled(case)
    given, tensors = case.run(model)
    narrow = model.to(torch.bfloat16)
    tensors |= {f"{name}_bf16": values for name, values in case.run(narrow)[1].items()}
    folder = ROOT / "real_widths" / case.name
    config = {k: v for k, v in case.config.to_dict().items() if v is not None}
    write_compact(folder / "expected.json", given | {"stride": STRIDE, "config": config, "shapes": dict(sorted(shapes.items()))})
    write_tensors(folder / "expected.safetensors", tensors)
    sizes = {name: (float(v.square().mean().sqrt()), float((v - tensors[name.removesuffix("_bf16")]).square().mean().sqrt()))
             for name, v in tensors.items()}
    n_weights = sum(int(np.prod(s)) for s in shapes.values())
    print(" ", case.name, f"{n_weights / 1e6:.0f} M", {k: tuple(round(x, 5) for x in v) for k, v in sizes.items()}, flush=True)
    del model, narrow
    gc.collect()
