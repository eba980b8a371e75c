"""Content keys and fingerprints: BLAKE3 over length-framed parts, as `triptych_core::key` has them.

Every part is framed by its length, so no two lists of parts hash the same bytes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable

from blake3 import blake3

from .limits import KEY_BYTES, LAYOUT_VERSION

MODALITIES = ("image", "audio", "text", "video")
"""Kinds of items."""

_OWNER_BYTES = 2
_PROXY_IDENTIFIER = re.compile(r"triptych-([0-9a-f]{64})", re.ASCII)


def framed_hash(context: str, parts: Iterable[bytes]) -> bytes:
    """BLAKE3 of the parts under a context string, 32 bytes."""
    digest = blake3(derive_key_context=context)
    for part in parts:
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    return digest.digest()


def fingerprint(parts: Iterable[bytes]) -> bytes:
    """The identity of an encoder that depends on `parts`, in their order."""
    version = struct.pack("<I", LAYOUT_VERSION)
    return framed_hash("triptych encoder fingerprint v1", [version, *parts])


def content_key(encoder: bytes, modality: str, item: bytes, *, options: str = "", tenant_salt: bytes = b"") -> bytes:
    """The identity of one item's encoder output, 32 bytes. The last two name the tenant, by a hash of its salt."""
    parts = [tenant_salt, encoder, modality.encode(), options.encode(), item]
    owner = framed_hash("triptych owner of an object v1", [tenant_salt])
    key = framed_hash("triptych content key v1", parts)
    return key[: KEY_BYTES - _OWNER_BYTES] + owner[:_OWNER_BYTES]


def proxy_key(identifier: str) -> bytes | None:
    """The content key in an identifier that Triptych's proxy gives an item, `triptych-` and 64 hex digits."""
    found = _PROXY_IDENTIFIER.fullmatch(identifier)
    return bytes.fromhex(found[1]) if found else None


def proxy_identifier(key: bytes) -> str:
    """The identifier that Triptych's proxy gives the item with this content key."""
    return f"triptych-{key.hex()}"
