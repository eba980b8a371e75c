"""What an object must be for a request: held against its head before its rows are used. Knows no vLLM and no torch."""

from __future__ import annotations

from dataclasses import dataclass

from .extents import Grid, Video
from .items import EncodedItem


@dataclass(frozen=True)
class Expected:
    """The properties of the rows that a request can use."""

    n_tokens: int
    """Number of rows: places of the item in the prompt."""
    dtypes: frozenset[str]
    """Types that the reader can use."""
    fingerprints: frozenset[bytes] = frozenset()
    """Encoders whose rows are the model's; empty: any, for the key already depends on the encoder."""
    hidden: int | None = None
    """Width of a row, levels included; `None`: not known."""
    grid: tuple[int, int, int] | None = None
    """Patches of the item before merging, time first; `None`: it has none, or it is not known."""
    modality: str = ""
    """Kind of the item; empty: any."""

    def mismatch(self, item: EncodedItem) -> str | None:
        """The first property that differs, with both values; `None`: the rows fit."""
        if self.fingerprints and item.fingerprint not in self.fingerprints:
            names = ", ".join(sorted(name.hex()[:12] for name in self.fingerprints))
            return f"encoder {item.fingerprint.hex()[:12]}, expected {names}"
        if item.dtype not in self.dtypes:
            return f"type {item.dtype}, expected {', '.join(sorted(self.dtypes))}"
        if item.n_tokens != self.n_tokens:
            return f"{item.n_tokens} rows, the prompt has places for {self.n_tokens}"
        if self.hidden is not None and item.hidden != self.hidden:
            return f"rows are {item.hidden} wide, the model takes {self.hidden}"
        if self.modality and item.modality != self.modality:
            return f"modality {item.modality}, expected {self.modality}"
        grid = grid_of(item)
        if self.grid is not None and grid is not None and grid != self.grid:
            return f"patches {grid}, the prompt says {self.grid}"
        return None


def grid_of(item: EncodedItem) -> tuple[int, int, int] | None:
    """The patches of an image or video, time first."""
    extent = item.extent
    return (extent.t, extent.h, extent.w) if isinstance(extent, Grid | Video) else None
