"""Rows between torch and bytes."""

from __future__ import annotations

import torch

from .items import SCALED_DTYPES
from .loading import LoadedObject

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Types of rows that vLLM's encoders give, by their name in objects."""

_STORED = {name: dtype for dtype, name in DTYPES.items()} | {"I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn}


def dtype_name(dtype: torch.dtype) -> str:
    """The name in objects; torch's own for a type that objects do not have, which equals none of theirs."""
    return DTYPES.get(dtype, str(dtype))


def rows_of(rows: torch.Tensor) -> bytes:
    """The bytes of rows `[n_tokens, width]`, row-major, little-endian. Waits for the device."""
    return rows.detach().to("cpu").contiguous().view(torch.uint8).numpy().tobytes()


def tensor_of(loaded: LoadedObject, device: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The rows of a verified object as a tensor `[n_tokens, width]` of its own, in `dtype` or their own type.

    Rows of a scaled type are multiplied by their scales in f32 first, as Triptych's own readers do.
    """
    item = loaded.item
    data = bytearray(memoryview(loaded.data)[loaded.offset :])
    stored = _STORED[item.dtype]
    rows = _flat(data, stored, item.scales_len()).view(item.n_tokens, item.hidden)
    if item.dtype in SCALED_DTYPES:
        scales = _flat(data[: item.scales_len()], torch.float32, 0)
        rows = rows.to(torch.float32) * scales.unsqueeze(1)
    return rows.to(device=device, dtype=dtype or rows.dtype)


def _flat(data: bytearray, dtype: torch.dtype, offset: int) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype, offset=offset) if len(data) > offset else torch.empty(0, dtype=dtype)
