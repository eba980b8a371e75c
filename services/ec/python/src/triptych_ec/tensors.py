"""Rows between torch and bytes. Types with a scale for each row are not read here: vLLM's encoders give none."""

from __future__ import annotations

import torch

from .loading import LoadedObject

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Types of rows, by their name in objects."""

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The name in objects; torch's own for a type that objects do not have, which equals none of theirs."""
    return DTYPES.get(dtype, str(dtype))


def rows_of(rows: torch.Tensor) -> bytes:
    """The bytes of rows `[n_tokens, width]`, row-major, little-endian. Waits for the device."""
    return rows.detach().to("cpu").contiguous().view(torch.uint8).numpy().tobytes()


def tensor_of(loaded: LoadedObject, device: str) -> torch.Tensor:
    """The rows of a verified object as a tensor `[n_tokens, width]` of its own."""
    item = loaded.item
    rows = bytearray(memoryview(loaded.data)[loaded.offset :])
    flat = torch.frombuffer(rows, dtype=_BY_NAME[item.dtype]) if rows else torch.empty(0, dtype=_BY_NAME[item.dtype])
    return flat.view(item.n_tokens, item.hidden).to(device)
