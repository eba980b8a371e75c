"""The EC object: one encoder output as bytes in stores, a safetensors file whose head is canonical.

Reading trusts nothing: each length is checked before it is used, the head must be byte for byte what `encode` writes
for the item it describes, and the rows must hash to its checksum.
"""

from __future__ import annotations

import hmac
import json
import struct
from dataclasses import dataclass, replace

from blake3 import blake3

from .errors import ObjectError, SettingError, TooLarge
from .extents import parse_extent
from .items import DTYPE_BYTES, SCALED_DTYPES, EncodedItem
from .keys import MODALITIES
from .limits import KEY_BYTES, LAYOUT_VERSION, MAX_HEAD_BYTES, MAX_OBJECT_BYTES

_LEN_BYTES = 8
_U32 = (1 << 32) - 1
_U64 = (1 << 64) - 1
_HEAD_CONTEXT = "triptych ec object head v1"


@dataclass(frozen=True, repr=False)
class MacKeys:
    """The keys of a cluster's objects: the first signs, any is accepted. None: objects are not signed."""

    keys: tuple[bytes, ...] = ()

    @classmethod
    def parse(cls, text: str) -> MacKeys:
        """Keys of 64 hex digits between white space. Raises `SettingError`, which does not quote them."""
        keys = []
        for number, word in enumerate(text.split(), start=1):
            key = _hex32(word)
            if key is None:
                raise SettingError(f"MAC key {number} is not 64 hex digits; `openssl rand -hex 32` makes one")
            keys.append(key)
        return cls(tuple(keys))

    def sign(self, item: EncodedItem) -> bytes | None:
        """The MAC of an object of this description; `None` without keys."""
        return _mac(self.keys[0], item) if self.keys else None

    def verify(self, item: EncodedItem, found: bytes | None) -> None:
        """Raises `ObjectError` unless one of the keys made the MAC, or there are none."""
        if not self.keys:
            return
        if found is None:
            raise ObjectError("object is not signed")
        # Every key is tried, so that the time does not reveal which one fits.
        if sum(hmac.compare_digest(_mac(key, item), found) for key in self.keys) == 0:
            raise ObjectError("object is signed with another key")

    def __repr__(self) -> str:
        return f"MacKeys({len(self.keys)})"


@dataclass(frozen=True)
class Head:
    """A parsed head."""

    item: EncodedItem
    mac: bytes | None
    n_bytes: int
    """Length of the head, the eight bytes before it included."""


def seal(item: EncodedItem, rows: bytes | memoryview) -> EncodedItem:
    """The item with the checksum of its rows. Raises `ObjectError` if they do not have the shape's length."""
    if len(rows) != item.payload_len():
        raise ObjectError(f"rows have {len(rows)} bytes, {item.payload_len()} expected from the shape")
    return replace(item, checksum=blake3(rows).digest())


def encode(item: EncodedItem, rows: bytes | memoryview, keys: MacKeys = MacKeys()) -> bytes:
    """Writes the object of a sealed item. Copies the rows once."""
    if len(rows) != item.payload_len():
        raise ObjectError(f"rows have {len(rows)} bytes, {item.payload_len()} expected from the shape")
    return b"".join((write_head(item, keys.sign(item)), rows))


def write_head(item: EncodedItem, mac: bytes | None = None) -> bytes:
    """The head of the item's object: all bytes before its rows."""
    metadata = {
        "layout": str(LAYOUT_VERSION),
        "key": item.key.hex(),
        "fingerprint": item.fingerprint.hex(),
        "modality": item.modality,
        "extent": str(item.extent),
        "dtype": item.dtype,
        "checksum": item.checksum.hex(),
        "head_checksum": blake3(item.description().encode(), derive_key_context=_HEAD_CONTEXT).hexdigest(),
    }
    if mac is not None:
        metadata["mac"] = mac.hex()
    head: dict[str, object] = {"__metadata__": metadata}
    scales, payload = min(item.scales_len(), _U64), min(item.payload_len(), _U64)
    if item.dtype in SCALED_DTYPES:
        head["ec_scale"] = {"dtype": "F32", "shape": [item.n_tokens], "data_offsets": [0, scales]}
    shape = [item.n_tokens, item.hidden]
    head["ec_cache"] = {"dtype": item.dtype, "shape": shape, "data_offsets": [scales, payload]}
    text = json.dumps(head, separators=(",", ":")).encode()
    padded = -(-len(text) // _LEN_BYTES) * _LEN_BYTES
    return struct.pack("<Q", padded) + text.ljust(padded, b" ")


def head_bytes(data: bytes | memoryview) -> int:
    """Length of an object's head as the object claims it, at most `MAX_HEAD_BYTES` and the object's length."""
    most = min(len(data), MAX_HEAD_BYTES)
    if len(data) < _LEN_BYTES:
        return most
    (claimed,) = struct.unpack_from("<Q", data)
    return min(claimed + _LEN_BYTES, most)


def parse_head(first_bytes: bytes | memoryview) -> Head:
    """Reads the description of an object from its first bytes; `MAX_HEAD_BYTES` are enough. Raises `ObjectError`."""
    if len(first_bytes) < _LEN_BYTES:
        raise ObjectError(f"object ends after {len(first_bytes)} bytes, {_LEN_BYTES} expected")
    (claimed,) = struct.unpack_from("<Q", first_bytes)
    if claimed > MAX_HEAD_BYTES - _LEN_BYTES:
        raise ObjectError(f"head claims {claimed} bytes, the limit is {MAX_HEAD_BYTES - _LEN_BYTES}")
    n_bytes = _LEN_BYTES + claimed
    raw = bytes(first_bytes[:n_bytes])
    if len(raw) < n_bytes:
        raise ObjectError(f"object ends after {len(raw)} bytes, {n_bytes} expected")
    try:
        parsed = json.loads(raw[_LEN_BYTES:])
        item, mac = _item_of(parsed)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as e:
        raise ObjectError(f"head cannot be read: {e}") from e
    # The canonical form holds numbers, order, spacing and the head's own checksum by one comparison.
    if write_head(item, mac) != raw:
        raise ObjectError("head does not agree with itself")
    return Head(item, mac, n_bytes)


def probe(first_bytes: bytes | memoryview, length: int, key: bytes, max_bytes: int = MAX_OBJECT_BYTES) -> Head:
    """Reads the description of the object of `key`, which is `length` bytes long, from its first bytes."""
    if length > max_bytes:
        raise ObjectError(str(TooLarge(max_bytes, length)))
    head = parse_head(first_bytes)
    if head.item.key != key:
        raise ObjectError(f"object is of {head.item.key.hex()}, asked for {key.hex()}")
    expected = head.n_bytes + head.item.payload_len()
    if length != expected:
        raise ObjectError(f"object has {length} bytes, {expected} expected")
    return head


def decode(
    data: bytes | memoryview, key: bytes, keys: MacKeys = MacKeys(), max_bytes: int = MAX_OBJECT_BYTES
) -> tuple[EncodedItem, memoryview]:
    """Reads and verifies a whole object: its item, and its rows without a copy. Raises `ObjectError`."""
    view = memoryview(data)
    head = probe(view[:MAX_HEAD_BYTES], len(view), key, max_bytes)
    keys.verify(head.item, head.mac)
    rows = view[head.n_bytes :]
    if blake3(rows).digest() != head.item.checksum:
        raise ObjectError("checksum of the rows differs from the head")
    return head.item, rows


def _item_of(head: dict) -> tuple[EncodedItem, bytes | None]:
    meta, cache = head["__metadata__"], head["ec_cache"]
    if meta["layout"] != str(LAYOUT_VERSION):
        raise ValueError("the layout is not a known value")
    n_tokens, hidden = cache["shape"]
    if not all(type(n) is int and 0 <= n <= _U32 for n in (n_tokens, hidden)):
        raise ValueError("the shape is not of two counts")
    extent = parse_extent(meta["extent"])
    ids = [_hex32(meta[name]) for name in ("key", "fingerprint", "checksum")]
    mac = _hex32(meta["mac"]) if "mac" in meta else None
    known = meta["modality"] in MODALITIES and meta["dtype"] in DTYPE_BYTES
    if extent is None or not known or None in ids or ("mac" in meta and mac is None):
        raise ValueError("a field is not a known value")
    key, encoder, checksum = (bytes(part) for part in ids if part is not None)
    item = EncodedItem(key, encoder, meta["modality"], n_tokens, hidden, meta["dtype"], extent, checksum)
    return item, mac


def _hex32(text: str) -> bytes | None:
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        return None
    return raw if len(raw) == KEY_BYTES and len(text) == 2 * KEY_BYTES else None


def _mac(key: bytes, item: EncodedItem) -> bytes:
    return blake3(item.description().encode(), key=key).digest()
