"""The identity of a vision tower by its files, as Triptych's PD workers make it (`services/models/src/model/tower.rs`).

Rows that vLLM computes have a fingerprint that follows from the tower and their type, so a PD worker knows from its own copy of
the checkpoint whose rows it takes. Knows no vLLM and no torch.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from .errors import SettingError
from .keys import fingerprint

FAMILIES = {
    "qwen2_vl": ("visual.", "model.visual."),
    "qwen2_5_vl": ("visual.", "model.visual."),
    "qwen3_vl": ("model.visual.", "visual."),
    "qwen3_vl_moe": ("model.visual.", "visual."),
}
"""`model_type` of the families, and the prefixes of the tower's tensors, the first with any being theirs."""

_MAX_HEADER_BYTES = 100 << 20
_LEN = struct.Struct("<Q")


@dataclass(frozen=True)
class Tower:
    """Digests of all that a tower computes from beside the item, 32 bytes each."""

    configuration: bytes
    """Its part of `config.json`."""
    processor: bytes
    """Settings of its processor."""
    weights: bytes
    """Names, types, shapes and bytes of its tensors."""

    @classmethod
    def read(cls, directory: Path) -> Tower:
        """That of a model's directory. Raises `SettingError` for one whose rows no PD worker of Triptych takes."""
        config = _json_object(directory / "config.json")
        family = config.get("model_type")
        if family not in FAMILIES:
            raise SettingError(f"`model_type` is {family!r}; allowed are {', '.join(FAMILIES)}")
        vision = config.get("vision_config")
        if not isinstance(vision, dict):
            raise SettingError("config.json has no `vision_config`")
        if config.get("quantization_config"):
            raise SettingError("config.json has a `quantization_config`; only weights that are not quantized are allowed")
        return cls(
            configuration=fingerprint([family.encode(), canonical(vision).encode()]),
            processor=fingerprint([canonical(_processor(directory)).encode()]),
            weights=fingerprint(_tensors(directory, FAMILIES[family])),
        )

    def rows_of_vllm(self, modality: str, dtype: str) -> bytes:
        """The fingerprint of rows of a type that vLLM computes with it, 32 bytes."""
        parts = [b"rows of vLLM", modality.encode(), dtype.encode()]
        return fingerprint([*parts, self.configuration, self.processor, self.weights])


def canonical(value: Any) -> str:
    """A value of JSON as text that depends on nothing but the value: keys in order, a fraction as the bits of the nearest f32."""
    if isinstance(value, dict):
        return "{" + "".join(f"{_text(key)}:{canonical(value[key])}," for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + "".join(f"{canonical(item)}," for item in value) + "]"
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 64:
        return str(value)
    if isinstance(value, int | float):
        try:
            return "f" + struct.pack(">f", value).hex()
        except OverflowError:
            return "f7f800000" if value > 0 else "fff800000"
    return _text(value)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_object(path: Path) -> dict:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as e:
        raise SettingError(f"{path.name} cannot be read: {e}") from e
    if not isinstance(found, dict):
        raise SettingError(f"{path.name} is no JSON object")
    return found


def _processor(directory: Path) -> dict:
    """The settings of the image processor. Where a directory has both files, the object wins, as in transformers."""
    nested = directory / "processor_config.json"
    part = _json_object(nested).get("image_processor") if nested.exists() else None
    if part is None:
        return _json_object(directory / "preprocessor_config.json")
    if not isinstance(part, dict):
        raise SettingError("`image_processor` of processor_config.json is no object")
    return part


def _tensors(directory: Path, prefixes: tuple[str, ...]) -> Iterator[bytes]:
    """Name, type and shape of each tensor, and the hash of its bytes, in the order of the names."""
    tensors: dict[str, tuple[Path, int, dict]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        start, header = _header(path)
        for name, tensor in header.items():
            if name != "__metadata__":
                tensors[name] = (path, start, tensor)
    for prefix in prefixes:
        names = sorted(name for name in tensors if name.startswith(prefix))
        if names:
            break
    else:
        raise SettingError(f"no safetensors file has tensors under {' or '.join(prefixes)}")
    for name in names:
        path, start, tensor = tensors[name]
        try:
            yield f"{name.removeprefix(prefix)} {tensor['dtype']} {tensor['shape']}".encode()
            yield _hash(path, *(start + offset for offset in tensor["data_offsets"]))
        except (KeyError, TypeError, ValueError, OSError) as e:
            raise SettingError(f"{path.name}: tensor {name} cannot be read: {e}") from e


def _header(path: Path) -> tuple[int, dict]:
    """The place of the first tensor's first byte, and the description of all."""
    try:
        with path.open("rb") as file:
            (length,) = _LEN.unpack(file.read(_LEN.size))
            if length > _MAX_HEADER_BYTES:
                raise SettingError(f"{path.name}: its header has {length} bytes, the limit is {_MAX_HEADER_BYTES}")
            header = json.loads(file.read(length))
    except (OSError, ValueError, struct.error, RecursionError) as e:
        raise SettingError(f"{path.name} is no safetensors file: {e}") from e
    if not isinstance(header, dict):
        raise SettingError(f"{path.name} is no safetensors file")
    return _LEN.size + length, header


def _hash(path: Path, start: int, end: int) -> bytes:
    if not 0 <= start <= end <= path.stat().st_size:
        raise ValueError("its bytes are not within the file")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        view = memoryview(data)
        try:
            return blake3(view[start:end], max_threads=blake3.AUTO).digest()
        finally:
            view.release()
