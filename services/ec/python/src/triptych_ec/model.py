"""A vLLM model's encoder by its configuration and files: its fingerprint, and the width of its rows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .keys import fingerprint

_SAMPLE_BYTES = 4 << 10
_N_SAMPLES = 64
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


def model_fingerprint(vllm_config: Any, name: str) -> bytes:
    """The fingerprint, 32 bytes. `name`: the operator's text for the weights; empty: they are sampled.

    Two checkpoints of one architecture that differ in few weights may look the same to the samples; then name them.
    """
    model = vllm_config.model_config
    hf_config: Any = getattr(model, "hf_config", None)
    parts: list[bytes] = [b"vllm", str(getattr(model, "dtype", "")).encode()]
    parts.append(_json(getattr(model, "mm_processor_kwargs", None)))
    parts.append(_json(hf_config.to_dict() if hasattr(hf_config, "to_dict") else None))
    parts.append(str(getattr(model, "quantization", None)).encode())
    if name:
        return fingerprint([*parts, b"named", name.encode()])
    path = Path(str(getattr(model, "model", "")))
    if path.is_dir():
        return fingerprint([*parts, b"sampled", *_samples(path)])
    commit = getattr(hf_config, "_commit_hash", None) or getattr(model, "revision", None)
    return fingerprint([*parts, b"hub", str(path).encode(), str(commit).encode()])


def row_width(vllm_config: Any, modality: str) -> int | None:
    """Values of a row that the model takes for an item, levels (DeepStack) included; `None`: the model does not say."""
    model = vllm_config.model_config
    width = model.get_hidden_size() if hasattr(model, "get_hidden_size") else None
    if width is None:
        return None
    hf_config: Any = getattr(model, "hf_config", None)
    vision: Any = getattr(hf_config, "vision_config", None)
    levels = getattr(vision, "deepstack_visual_indexes", None) if modality in ("image", "video") else None
    return width * (1 + len(levels or ()))


def _json(value: Any) -> bytes:
    if isinstance(value, dict):
        # Where the model lies and which library wrote it say nothing of what it computes.
        value = {k: v for k, v in value.items() if k not in ("_name_or_path", "transformers_version")}
    return json.dumps(value, sort_keys=True, default=str).encode()


def _samples(directory: Path) -> list[bytes]:
    """Name, size and 64 pages of each file of weights, spread evenly."""
    parts = []
    for path in sorted(p for p in directory.iterdir() if p.suffix in _WEIGHTS and p.is_file()):
        size = path.stat().st_size
        parts += [path.name.encode(), str(size).encode()]
        with open(path, "rb") as file:
            for i in range(_N_SAMPLES):
                file.seek((max(size - _SAMPLE_BYTES, 0) * i) // (_N_SAMPLES - 1), os.SEEK_SET)
                parts.append(file.read(_SAMPLE_BYTES))
    return parts
