"""Objects in one Redis server, in chunks: `triptych:ec:{<hex>}` is the manifest, `…:<nonce>:c<i>` are the chunks.

A writer puts its chunks first, under a nonce of its own, and then the manifest, unless there is one: that is the atomic
step. Everything has a time to live. Lost data is a miss; a manifest whose chunk is gone is removed. Needs the package
`redis`.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from ..errors import ObjectError, SettingError, StoreUnavailable, TooLarge
from ..items import EncodedItem
from ..limits import CHUNK_BYTES, MAX_HEAD_BYTES, MAX_OBJECT_BYTES
from ..objects import head_bytes, probe
from . import scripts
from .base import Held, Lease, PolledStore

_MANIFEST = struct.Struct("<4sQ16sI")
_MAGIC = b"TEC1"
_OWN_BYTES = 4 + 8 + 16
_MAX_MANIFEST_BYTES = _MANIFEST.size + MAX_HEAD_BYTES
_CHUNK_GRACE_S = 60
_FENCE_GRACE_S = 24 * 3600
_DEFAULT_TTL_S = 3600


class Manifest(NamedTuple):
    """Length of an object, the nonce of its chunks, and its first bytes."""

    length: int
    nonce: bytes
    first_bytes: bytes

    def write(self) -> bytes:
        """Its bytes, little-endian."""
        return _MANIFEST.pack(_MAGIC, self.length, self.nonce, len(self.first_bytes)) + self.first_bytes

    @classmethod
    def read(cls, raw: bytes, max_bytes: int) -> Manifest:
        """Raises `ObjectError` for anything but a manifest within the limit."""
        if len(raw) < _MANIFEST.size:
            raise ObjectError("the manifest ends early")
        magic, length, nonce, n_first = _MANIFEST.unpack_from(raw)
        if magic != _MAGIC:
            raise ObjectError("no manifest")
        if length > max_bytes:
            raise ObjectError(str(TooLarge(max_bytes, length)))
        first_bytes = raw[_MANIFEST.size :]
        if n_first != len(first_bytes) or n_first > min(length, MAX_HEAD_BYTES):
            raise ObjectError("the manifest has the wrong length")
        return cls(length, nonce, first_bytes)

    def chunks(self, key: bytes) -> list[str]:
        """Names of the chunks."""
        # The nonce is a number of 128 bits: little-endian in the manifest, hex digits in the names.
        nonce = self.nonce[::-1].hex()
        return [f"{manifest_key(key)}:{nonce}:c{i}" for i in range(-(-self.length // CHUNK_BYTES))]


def manifest_key(key: bytes) -> str:
    """The name of a key's manifest."""
    return f"triptych:ec:{{{key.hex()}}}"


class RedisStore(PolledStore):
    """The store in Redis. Connects at the first operation, and again when the connection is lost."""

    def __init__(self, url: str, *, max_bytes: int = MAX_OBJECT_BYTES, timeout_s: float = 10.0) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as e:
            raise SettingError("a Redis store needs the package `redis`: pip install 'triptych-ec[redis]'") from e
        place, self._ttl_s = _split_ttl(url)
        self._shown = _without_password(place)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._errors = redis.RedisError
        self._wrong_type = redis.ResponseError
        try:
            self._redis = redis.Redis.from_url(
                place,
                socket_timeout=timeout_s,
                socket_connect_timeout=min(1.0, timeout_s),
                # A connection that the server closed while it was idle; every command here may run twice.
                retry=Retry(NoBackoff(), 1),
            )
        except ValueError as e:
            raise SettingError(f"{self._shown}: not a URL of Redis") from e

    def describe(self) -> str:
        return self._shown

    def put_if_absent(self, key: bytes, data: bytes) -> bool:
        if len(data) > self._max_bytes:
            raise TooLarge(self._max_bytes, len(data))
        name = manifest_key(key)
        try:
            is_there = self._run("put", lambda: self._redis.strlen(name)) > 0
        except ObjectError:
            is_there = True
        if is_there:
            return False
        deadline = self._deadline("put")
        manifest = Manifest(len(data), os.urandom(16), data[: head_bytes(data)])
        chunks = manifest.chunks(key)
        for i, chunk in enumerate(chunks):
            deadline()
            part = memoryview(data)[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES]
            store = partial(self._redis.set, chunk, part, ex=self._ttl_s + _CHUNK_GRACE_S)
            self._run("put", store)
        args = (manifest.write(), self._ttl_s, scripts.CHANNEL, key, _OWN_BYTES)
        stored = self._run("put", lambda: self._redis.eval(scripts.PUBLISH, 1, name, *args)) == 1
        if not stored and chunks:
            self._run("put", lambda: self._redis.unlink(*chunks))
        return stored

    def get(self, key: bytes) -> bytes | None:
        manifest = self._manifest(key)
        if manifest is None:
            return None
        parts, deadline = [], self._deadline("get")
        for i, name in enumerate(manifest.chunks(key)):
            deadline()
            expected = min(CHUNK_BYTES, manifest.length - i * CHUNK_BYTES)
            chunk = self._run("get", partial(self._redis.getrange, name, 0, expected))
            if not chunk:
                self._remove(key, manifest)
                return None
            if len(chunk) != expected:
                raise ObjectError("a chunk has the wrong length")
            parts.append(chunk)
        return b"".join(parts)

    def head(self, key: bytes) -> EncodedItem | None:
        try:
            manifest = self._manifest(key)
            if manifest is None:
                return None
            return probe(manifest.first_bytes, manifest.length, key, self._max_bytes).item
        except ObjectError:
            return None

    def quarantine(self, key: bytes) -> bool:
        try:
            manifest = self._manifest(key)
        except ObjectError:
            return self._run("quarantine", lambda: self._redis.unlink(manifest_key(key))) == 1
        return manifest is not None and self._remove(key, manifest)

    def acquire(self, key: bytes, ttl_s: float) -> Lease | Held:
        names = (f"{manifest_key(key)}:lease", f"{manifest_key(key)}:fence")
        args = (os.urandom(16).hex(), _millis(ttl_s), max(int(ttl_s), 1) + _FENCE_GRACE_S)
        token, left_ms = self._run("lease", lambda: self._redis.eval(scripts.ACQUIRE, 2, *names, *args))
        return Lease(key, int(token)) if token else Held(max(int(left_ms), 0) / 1000)

    def renew(self, lease: Lease, ttl_s: float) -> bool:
        args = (f"{manifest_key(lease.key)}:lease", lease.token, _millis(ttl_s))
        return self._run("lease", lambda: self._redis.eval(scripts.RENEW, 1, *args)) == 1

    def release(self, lease: Lease) -> bool:
        args = (f"{manifest_key(lease.key)}:lease", lease.token, scripts.CHANNEL, lease.key)
        return self._run("lease", lambda: self._redis.eval(scripts.RELEASE, 1, *args)) == 1

    def is_leased(self, key: bytes) -> bool:
        return self._run("wait", lambda: self._redis.exists(f"{manifest_key(key)}:lease")) == 1

    def close(self) -> None:
        self._redis.close()

    def _manifest(self, key: bytes) -> Manifest | None:
        name = manifest_key(key)
        raw = self._run("get", lambda: self._redis.getrange(name, 0, _MAX_MANIFEST_BYTES))
        return Manifest.read(raw, self._max_bytes) if raw else None

    def _remove(self, key: bytes, manifest: Manifest) -> bool:
        """Removes a manifest, unless another writer has replaced it, and its chunks."""
        own = manifest.write()[:_OWN_BYTES]
        args = (scripts.REMOVE_IF_SAME, 1, manifest_key(key), own)
        removed = self._run("delete", lambda: self._redis.eval(*args))
        chunks = manifest.chunks(key)
        if chunks:
            self._run("delete", lambda: self._redis.unlink(*chunks))
        return bool(removed)

    def _deadline(self, op: str) -> Callable[[], None]:
        """Raises, when it is called, once an operation of several commands has taken too long."""
        until = time.monotonic() + self._timeout_s

        def check() -> None:
            if time.monotonic() > until:
                raise StoreUnavailable(self._shown, op, f"not done within {self._timeout_s} s")

        return check

    def _run(self, op: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except self._wrong_type as e:
            if str(e).startswith("WRONGTYPE"):
                raise ObjectError("the key holds another kind of value") from e
            raise StoreUnavailable(self._shown, op, e) from e
        except self._errors as e:
            raise StoreUnavailable(self._shown, op, e) from e


def _split_ttl(url: str) -> tuple[str, int]:
    place, _, query = url.partition("?")
    settings = parse_qs(query, keep_blank_values=True, strict_parsing=False)
    ttl = settings.pop("ttl_s", [str(_DEFAULT_TTL_S)])[-1]
    if settings or not ttl.isdigit() or int(ttl) < 1:
        raise SettingError(f"{_without_password(url)}: after `?` allowed is `ttl_s=N`, integer seconds, 1 or more")
    return place, int(ttl)


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{'***@' if '@' in url else ''}{place}"


def _millis(seconds: float) -> int:
    return max(int(seconds * 1000), 1)
