"""Sample outputs, the same as those of the Rust end."""

from __future__ import annotations

import os

from blake3 import blake3

from triptych_ec import EncodedItem, fingerprint
from triptych_ec.extents import Extent, Grid, Tokens, Video, Windows
from triptych_ec.objects import seal

SAMPLE_ENCODER = fingerprint([b"sample"])

KINDS = ("image", "audio", "overlapping", "text", "video")


def sample(n_tokens: int, hidden: int, dtype: str, kind: str) -> tuple[EncodedItem, bytes]:
    """The output that `ec_object write` stores."""
    extents: dict[str, tuple[str, Extent]] = {
        "image": ("image", Grid(1, 2, 2 * n_tokens)),
        "audio": ("audio", Windows(2, 2100)),
        "overlapping": ("audio", Windows(2, 2100, ((0, 1500), (1000, 2100)))),
        "text": ("text", Tokens()),
        "video": ("video", Video(3, 2, 2, 0.1, (0.25, 1e-7, 1e22))),
    }
    modality, extent = extents[kind]
    key = blake3(f"{n_tokens} {hidden} {dtype} {kind}".encode()).digest()
    item = EncodedItem(key, SAMPLE_ENCODER, modality, n_tokens, hidden, dtype, extent, bytes(32))
    rows = blake3(key).digest(length=item.payload_len())
    return seal(item, rows), rows


def fresh(n_tokens: int = 3, hidden: int = 4) -> tuple[EncodedItem, bytes]:
    """An output with a key that no other call gives."""
    extent = Grid(1, 1, n_tokens)
    item = EncodedItem(os.urandom(32), SAMPLE_ENCODER, "image", n_tokens, hidden, "F32", extent, bytes(32))
    rows = os.urandom(item.payload_len())
    return seal(item, rows), rows
