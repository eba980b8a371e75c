"""Sizes of the formats, fixed by them, and the limit that an operator may change."""

from __future__ import annotations

KEY_BYTES = 32
"""Bytes of a content key, a fingerprint and a checksum."""

LAYOUT_VERSION = 1
"""Version of keys and objects; a change of either makes every stored object a miss."""

MAX_HEAD_BYTES = 16 << 10
"""Largest head of an object."""

CHUNK_BYTES = 1 << 20
"""Bytes of a chunk in Redis, and most bytes of a gRPC frame."""

MAX_OBJECT_BYTES = 512 << 20
"""Default limit of an object."""
