"""Shared by both sample-model scripts: seeding, the optimiser and its schedule, the
byte-level tokenizer, and saving in a half precision.

It knows nothing about shapes or digits.
"""

import json
import math
import random
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

HERE = Path(__file__).resolve().parent
HELD_OUT = HERE / "heldout"

# Qwen2's split: one digit is one piece, a word takes its leading space along.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def seed_everything(seed: int, n_threads: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(n_threads)


def train_byte_level_bpe(corpus, vocab_size: int, qwen_split: bool) -> Tokenizer:
    """A BPE whose alphabet is the 256 bytes, so that any UTF-8 text has an encoding."""
    tokenizer = Tokenizer(models.BPE())
    if qwen_split:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated", invert=False),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


class Training:
    """AdamW with a warm-up and a cosine from `lr` to `last` of it, gradient clipping, and a line of
    progress."""

    def __init__(self, modules, n_steps: int, lr: float, name: str, warmup: int = 200, last: float = 0.02):
        parameters = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
        self.parameters = list(parameters.values())
        matrices = [p for p in self.parameters if p.ndim >= 2]
        vectors = [p for p in self.parameters if p.ndim < 2]
        self.optimiser = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}],
            lr=lr,
            betas=(0.9, 0.98),
            fused=True,
        )
        self.n_steps, self.lr, self.name, self.warmup, self.last = n_steps, lr, name, warmup, last
        self.step_idx = 0
        self.started = time.monotonic()
        self.sums: dict[str, float] = {}
        self.n_summed = 0

    def step(self, loss: torch.Tensor, **shown: float) -> None:
        progress = self.step_idx / self.n_steps
        rate = min(1.0, (self.step_idx + 1) / self.warmup)
        rate *= self.last + (1.0 - self.last) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
        for group in self.optimiser.param_groups:
            group["lr"] = self.lr * rate
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimiser.step()
        self.step_idx += 1
        for key, value in {"loss": float(loss.detach()), **shown}.items():
            self.sums[key] = self.sums.get(key, 0.0) + value
        self.n_summed += 1
        if self.step_idx % 100 == 0 or self.step_idx == self.n_steps:
            self.report()

    def report(self) -> None:
        seconds = time.monotonic() - self.started
        means = "  ".join(f"{k} {v / self.n_summed:.4f}" for k, v in self.sums.items())
        print(f"{self.name} {self.step_idx}/{self.n_steps}  {means}  {seconds:.0f} s", flush=True)
        self.sums, self.n_summed = {}, 0


def save_model(model, directory: Path, dtype: torch.dtype) -> None:
    """Saves a copy cast to `dtype`; the model that is being trained stays in float32."""
    import copy

    cast = copy.deepcopy(model).to(dtype)
    cast.save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)


def drop_load_options(directory: Path) -> None:
    """Drops loading options, which `transformers` writes into the tokenizer's config."""
    path = directory / "tokenizer_config.json"
    options = json.loads(path.read_text())
    for key in ("is_local", "local_files_only"):
        options.pop(key, None)
    path.write_text(json.dumps(options, indent=2, ensure_ascii=False) + "\n")


def write_jsonl(path: Path, rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as out:
        for row in rows:
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
