"""Objects and keys: canonical, verified to the last bit, and the same as the Rust side's."""

from __future__ import annotations

import random
import struct

import pytest
from conftest import rust
from samples import KINDS, fresh, sample

from triptych_ec import MacKeys, ObjectError, SettingError, content_key, decode, encode, fingerprint
from triptych_ec.extents import parse_extent
from triptych_ec.items import DTYPE_BYTES
from triptych_ec.objects import head_bytes, parse_head, write_head

SECRET, OTHER = MacKeys.parse("ab" * 32), MacKeys.parse("cd" * 32)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("kind", KINDS)
def objects_read_back(dtype: str, kind: str) -> None:
    item, rows = sample(3, 5, dtype, kind)
    data = encode(item, rows)
    assert decode(data, item.key) == (item, rows)
    assert head_bytes(data) == len(data) - len(rows)
    assert (len(data) - len(rows)) % 8 == 0


def a_flipped_bit_anywhere_is_found() -> None:
    item, rows = sample(2, 3, "F16", "image")
    data = encode(item, rows, SECRET)
    for at in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[at // 8] ^= 1 << at % 8
        with pytest.raises(ObjectError):
            decode(bytes(damaged), item.key, SECRET)


def no_other_length_is_an_object() -> None:
    item, rows = sample(2, 3, "F32", "video")
    data = encode(item, rows)
    for damaged in [data[:n] for n in range(len(data))] + [data + b"x"]:
        with pytest.raises(ObjectError):
            decode(damaged, item.key)


def every_head_that_is_not_canonical_is_refused() -> None:
    item, rows = sample(2, 3, "F32", "image")
    text = write_head(item)[8:].rstrip()
    with_space = text.replace(b'":"', b'": "', 1)
    twice = text.replace(b'{"__metadata__"', b'{"ec_cache":0,"__metadata__"', 1)
    deep, wide = b"[" * 8000, b'{"__metadata__":' + b"9" * 5000 + b"}"
    for head in (with_space, twice, deep, wide, b"", b"null", b"[]", b'{"__metadata__":[],"ec_cache":{}}', b"\xff\xfe"):
        padded = head.ljust(-(-len(head) // 8) * 8, b" ")
        with pytest.raises(ObjectError):
            parse_head(struct.pack("<Q", len(padded)) + padded + rows)
    for claimed in (1 << 63, (16 << 10) - 7, 1 << 40):
        with pytest.raises(ObjectError):
            parse_head(struct.pack("<Q", claimed) + text)


def an_object_of_another_key_or_over_the_limit_is_refused() -> None:
    item, rows = fresh()
    data = encode(item, rows)
    with pytest.raises(ObjectError, match="asked for"):
        decode(data, bytes(32))
    with pytest.raises(ObjectError, match="over the limit"):
        decode(data, item.key, max_bytes=len(data) - 1)


def what_another_key_signed_is_refused() -> None:
    item, rows = fresh()
    both = MacKeys(OTHER.keys + SECRET.keys)
    signed = encode(item, rows, SECRET)
    assert decode(signed, item.key, both)[0] == item
    assert decode(signed, item.key)[0] == item
    with pytest.raises(ObjectError, match="another key"):
        decode(signed, item.key, OTHER)
    with pytest.raises(ObjectError, match="not signed"):
        decode(encode(item, rows), item.key, SECRET)
    with pytest.raises(SettingError, match="MAC key 2 is not"):
        MacKeys.parse("ab" * 32 + " rubbish")
    assert "ab" not in repr(SECRET)


def the_text_of_extents_is_canonical() -> None:
    for text in ("grid 1 2 4", "windows 2 9 0-1 1-9", "tokens", "video 1 2 3 0.1 5", "video 1 2 3 0.0000001 -0"):
        assert str(parse_extent(text)) == text
    wrong = ["", "grid 1 2", "grid 1 2 4294967296", "grid 1 2 x", "windows 2 9 0-1", "video 2 1 1 0.1 1", "tokens 1"]
    for text in [*wrong, "video 1 1 1 nan 1", "video 1 1 1 inf 1", "video 1 1 1 -1 1", "grid 1 2 \u0661"]:
        assert parse_extent(text) is None, text


def keys_are_those_of_the_rust_side() -> None:
    cases = [
        ("", "weights", "image", "", "item"),
        ("salt", "weights", "audio", "x=1", "item"),
        ("a", "b", "video", "", "\u00fc" * 99),
    ]
    for salt, encoder, modality, options, item in cases:
        key = content_key(
            fingerprint([encoder.encode()]), modality, item.encode(), options=options, tenant_salt=salt.encode()
        )
        assert rust("key", salt, encoder, modality, options, item) == key.hex()


def random_bytes_never_raise_anything_else() -> None:
    rng = random.Random(7)
    item, rows = sample(2, 3, "F32", "image")
    data = encode(item, rows)
    for _ in range(3000):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 6)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            decode(bytes(damaged), item.key)
        except ObjectError:
            continue
        assert bytes(damaged) == data
