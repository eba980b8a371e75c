"""The description of an encoder output: enough to admit, place and verify its rows."""

from __future__ import annotations

from dataclasses import dataclass

from .extents import Extent
from .limits import LAYOUT_VERSION

DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I8": 1, "F8_E4M3": 1}
"""Bytes of an element by the name of its type."""

SCALED_DTYPES = frozenset({"I8", "F8_E4M3"})
"""Types whose rows have an f32 scale each, which lie before the rows."""


@dataclass(frozen=True)
class EncodedItem:
    """The metadata of rows `[n_tokens, hidden]`, row-major, little-endian."""

    key: bytes
    """Content key, 32 bytes."""
    fingerprint: bytes
    """The encoder that made it, 32 bytes."""
    modality: str
    """One of `keys.MODALITIES`."""
    n_tokens: int
    """Number of rows."""
    hidden: int
    """Width of a row."""
    dtype: str
    """One of `DTYPE_BYTES`."""
    extent: Extent
    """Size in the item's own units."""
    checksum: bytes
    """BLAKE3 of the rows, scales included."""

    def scales_len(self) -> int:
        """Bytes of the scales before the rows."""
        return self.n_tokens * 4 if self.dtype in SCALED_DTYPES else 0

    def payload_len(self) -> int:
        """Bytes of the rows, scales included."""
        return self.scales_len() + self.n_tokens * self.hidden * DTYPE_BYTES[self.dtype]

    def description(self) -> str:
        """Everything that an object says of its rows as text, which the checksum of the head and signatures cover."""
        fields = (LAYOUT_VERSION, self.key.hex(), self.fingerprint.hex(), self.modality, self.n_tokens, self.hidden)
        return "|".join(str(f) for f in (*fields, self.dtype, self.extent, self.checksum.hex()))
