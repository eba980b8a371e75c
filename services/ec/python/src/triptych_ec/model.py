"""A vLLM model's encoder by its configuration and files: its fingerprint, its tower, and the width of its rows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .errors import SettingError
from .keys import fingerprint
from .tower import Tower

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
    parts.append(_json(_processor_kwargs(model)))
    parts.append(_json(hf_config.to_dict() if hasattr(hf_config, "to_dict") else None))
    parts.append(str(getattr(model, "quantization", None)).encode())
    if name:
        return fingerprint([*parts, b"named", name.encode()])
    path = Path(str(getattr(model, "model", "")))
    if path.is_dir():
        return fingerprint([*parts, b"sampled", *_samples(path)])
    commit = getattr(hf_config, "_commit_hash", None) or getattr(model, "revision", None)
    return fingerprint([*parts, b"hub", str(path).encode(), str(commit).encode()])


def published_tower(vllm_config: Any) -> Tower:
    """The tower whose images an encoder publishes under the keys of Triptych's proxy.

    Raises `SettingError` where vLLM is told to compute other rows than the checkpoint's files say: a PD worker knows those alone.
    """
    model = vllm_config.model_config
    multimodal: Any = getattr(model, "multimodal_config", None)
    values = {name: getattr(model, name, None) for name in ("quantization", "hf_overrides")}
    values |= {name: getattr(multimodal, name, None) for name in ("media_io_kwargs", "mm_encoder_attn_dtype")}
    values["mm_processor_kwargs"] = _processor_kwargs(model)
    changed = [f"`{name}` is {value!r}" for name, value in values.items() if value]
    if changed:
        raise SettingError(f"`accept_proxy_keys` of an encoder: {', '.join(changed)}; allowed is the checkpoint as it is")
    try:
        return Tower.read(_directory(model))
    except SettingError as e:
        raise SettingError(f"`accept_proxy_keys` of an encoder: {e}") from e


def _processor_kwargs(model: Any) -> dict[str, Any] | None:
    """The settings of the processor that a server was started with; where it runs is none, and vLLM sets it by the role."""
    kwargs = getattr(getattr(model, "multimodal_config", None), "mm_processor_kwargs", None)
    return {name: value for name, value in (kwargs or {}).items() if name != "device"} or None


def _directory(model: Any) -> Path:
    path = Path(str(getattr(model, "model", "")))
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), revision=getattr(model, "revision", None), local_files_only=True))
    except (OSError, ValueError) as e:
        raise SettingError(f"the files of {path} are not here: {e}") from e


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
