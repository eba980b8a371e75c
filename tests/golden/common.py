"""Shared by all golden makers: random weights, a small byte-level BPE, and writing files."""

import json
import os
import pathlib
import shutil
import tempfile
import types
import zlib

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

ROOT = pathlib.Path(__file__).parent
STEPS = 64
MIN_GAP = 1e-3

CORPUS = """
The quick brown fox jumps over the lazy dog. How many people are there in this picture?
Describe the image. What is the colour of the sky? It is blue, and the grass is green.
There are two cats and three dogs in the garden; the red one is sleeping near the wall.
She had your dark suit in greasy wash water all year. Please write down what you hear.
The weather in the north is cold and in the south it is warm. 12 3456 2024 0.5 100%
Der schnelle braune Fuchs springt. Le renard brun saute. 你好，世界。 مرحبا भाषा привет мир
""" * 3

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def generator(seed, name=""):
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def randomise(model, seed, gain=1.0, embed_std=0.5, pos_std=0.5, quiet_rows=(), gains=(),
              fixed=("encoder.embed_positions",), embeddings=("embed_tokens",)):
    """Overwrites every parameter, each from its own stream so that a name decides its values.

    `quiet_rows` are token ids whose embedding (and head) rows are made small, so that a special
    token never wins a greedy step and no caller has to suppress it. `gains` holds pairs of a part
    of a name and a factor. `fixed` and `embeddings` are parts of names: of what stays as it is, and
    of token tables.
    """
    with torch.no_grad():
        for name, p in model.named_parameters():
            x = generator(seed, name).standard_normal(p.shape, dtype=np.float32)
            if any(part in name for part in fixed):
                continue
            if "embed_positions" in name:
                x *= pos_std
            elif any(part in name for part in embeddings):
                x *= embed_std
            elif name.endswith("bias"):
                x *= 0.1
            elif "norm" in name or ".ln_" in name:
                x = 1 + 0.1 * x
            else:
                x *= gain / np.sqrt(np.prod(p.shape[1:]))
                for part, factor in gains:
                    if part in name:
                        x *= factor
            is_table = any(table in name for table in ("embed_tokens", "lm_head", ".wte."))
            if is_table and len(x) > max(quiet_rows, default=0):
                for row in quiet_rows:
                    x[row] *= 0.05
            p.copy_(torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)))
    return model.eval()


def bert_head(model):
    """The norm before the projection of BERT's or RoBERTa's decoder, which others do not have."""
    decoder = getattr(model, "decoder", None)
    if hasattr(decoder, "cls"):
        return decoder.cls.predictions.transform.LayerNorm
    return decoder.lm_head.layer_norm if hasattr(decoder, "roberta") else None


def settle_bert(model, seed, parts=("decoder.",)):
    """What `randomise` does for other names, of the parts of a model with such a decoder: norms around 1, positions that tell tokens
    apart."""
    if bert_head(model) is None:
        return
    for name, p in model.named_parameters():
        if not name.startswith(parts):
            continue
        noise = torch.from_numpy(generator(seed, f"settled {name}").standard_normal(p.shape)).float()
        if name.endswith(("LayerNorm.weight", "layer_norm.weight")):
            p.data = 1 + 0.1 * noise
        elif "position_embeddings" in name:
            p.data = 0.8 * noise
        elif "token_type_embeddings" in name:
            p.data = 0.5 * noise
        elif name.endswith((".output.dense.weight", "lm_head.dense.weight", "transform.dense.weight")):
            # Activations have a mean; without this it decides every token.
            p.data -= p.data.mean(1, keepdim=True)


def round_weights(model, dtype):
    """Rounds weights to what `dtype` can hold, so that a narrow file and this f32 model are equal."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(dtype).to(p.dtype))


def expanded(model, expand_size=1, is_encoder_decoder=False, input_ids=None, **inputs):
    """Inputs of so many beams of one prompt, each with all of its items."""
    items = ("pixel_values", "pixel_values_local", "num_local_patches", "image_grid_thw", "input_features", "feature_attention_mask", "input_features_mask")

    def repeated(name, value):
        if name == "mm_encoder_outputs" and value:
            for output in value.values():
                rows = output.pooler_output
                output.pooler_output = torch.cat([rows] * expand_size) if torch.is_tensor(rows) else tuple(rows) * expand_size
        if not torch.is_tensor(value):
            return value
        if name in items:
            return torch.cat([value] * expand_size)
        return value.repeat_interleave(expand_size, dim=1 if name == "position_ids" and value.ndim == 3 else 0)

    assert len(input_ids) == 1
    return repeated("input_ids", input_ids), {name: repeated(name, value) for name, value in inputs.items()}


def give_beams_their_items(model):
    """transformers gives some beams the items of others where a prompt has several."""
    model._expand_inputs_for_generation = types.MethodType(expanded, model)


def byte_bpe(n_merges, specials, qwen):
    """A byte-level BPE: 256 bytes, up to `n_merges` merges, then `specials` as (text, is_special)."""
    tok = Tokenizer(BPE())
    if qwen:
        tok.normalizer = normalizers.NFC()
        tok.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(pattern=Regex(QWEN_SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=256 + n_merges, initial_alphabet=alphabet, special_tokens=[], show_progress=False
    )
    tok.train_from_iterator(CORPUS.splitlines(), trainer)
    assert tok.get_vocab_size() == 256 + n_merges, tok.get_vocab_size()
    for text, is_special in specials:
        added = AddedToken(text, special=is_special, normalized=False)
        (tok.add_special_tokens if is_special else tok.add_tokens)([added])
    return tok


def case_dir(case):
    path = ROOT / case
    if path.exists():
        shutil.rmtree(path)
    (path / "model").mkdir(parents=True)
    return path


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def one_line(value):
    return json.dumps(value, ensure_ascii=False)


def one_item_a_line(value, indent):
    if not (isinstance(value, list) and value and isinstance(value[0], (dict, list))):
        return one_line(value)
    pad = "\n" + " " * indent
    return "[" + pad + ("," + pad).join(map(one_line, value)) + "]"


def write_compact(path, value):
    """JSON whose lists of records have a record a line, so that long number lists stay readable in a diff."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(value, dict):
        lines = [f" {one_line(k)}: {one_item_a_line(v, 2)}" for k, v in value.items()]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    else:
        path.write_text(one_item_a_line(value, 1) + "\n")


def write_tensors(path, tensors):
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({k: torch.as_tensor(v).contiguous().clone() for k, v in tensors.items()}, str(path), {"format": "pt"})
    path.chmod(0o644)


def experts_state(model):
    """The state of a model with experts in the layout of the published checkpoints, which is not that in memory."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(os.path.join(folder, "model.safetensors"))


def inputs_first(state):
    """A state whose stacked experts are `[n, in, out]`, as they were published; transformers 5 saves `[n, out, in]`."""
    return {k: v.transpose(1, 2).contiguous() if ".mlp.experts." in k else v for k, v in state.items()}


def plain_experts(model):
    """Experts one after another, as f64 needs it."""
    model.set_experts_implementation("eager")


def expert_gains(hidden, width):
    """Gains of stacked experts, whose fan-in is one dimension of three, and of a router that is sure of its choice.

    What an expert adds is small, so that a choice that rounding changes does not decide the logits."""
    return [("experts.gate_up_proj", np.sqrt(2 * width)), ("experts.down_proj", 0.4 * np.sqrt(hidden)), ("mlp.gate.", 3.0)]


def smallest_gap(logits):
    """The least distance between the best and the second-best logit over all rows."""
    top = torch.topk(logits.float(), 2, dim=-1).values
    return float((top[..., 0] - top[..., 1]).min())


def first_good_seed(attempt, seeds):
    """Calls `attempt(seed)` until one returns a result rather than a reason to refuse it."""
    for seed in seeds:
        result = attempt(seed)
        if not isinstance(result, str):
            return result
        print(f"  seed {seed} refused: {result}", flush=True)
    raise RuntimeError("no seed gave separated logits")
