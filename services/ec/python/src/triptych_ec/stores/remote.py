"""The client of an `EcObjects` server: `triptych store`, or the memory of the worker that encoded an item."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from ..errors import ObjectError, StoreUnavailable, TooLarge
from ..items import EncodedItem
from ..limits import CHUNK_BYTES, MAX_OBJECT_BYTES
from ..objects import probe
from .base import Held, Lease, Store
from .schema import SERVICE, message
from .tls import TlsFiles

_MAX_MESSAGE_BYTES = 2 * CHUNK_BYTES
_PROBE_S = 0.1
_MAX_PATIENCE_S = 30.0
_LIMIT_HEADER = "triptych-limit-bytes"
_OPTIONS = [
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
]


class RemoteStore(Store):
    """The store behind gRPC at `host:port`. Connects at the first operation, and again when the connection is lost."""

    def __init__(
        self,
        authority: str,
        *,
        max_bytes: int = MAX_OBJECT_BYTES,
        timeout_s: float = 10.0,
        tls: TlsFiles | None = None,
    ) -> None:
        self._authority = authority
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._channel = _channel(authority, tls)
        self._put = self._channel.stream_unary(f"{SERVICE}/Put", _write, message("PutResult").FromString)
        self._get = self._channel.unary_stream(f"{SERVICE}/Get", _write, message("GetFrame").FromString)
        self._head = self._unary("Head", "HeadResponse")
        self._delete = self._unary("Delete", "DeleteResponse")
        self._lease = self._unary("Lease", "LeaseResponse")
        self._wait = self._unary("Wait", "HeadResponse")

    def _unary(self, method: str, response: str) -> grpc.UnaryUnaryMultiCallable:
        return self._channel.unary_unary(f"{SERVICE}/{method}", _write, message(response).FromString)

    def describe(self) -> str:
        return f"grpc://{self._authority}"

    def put_if_absent(self, key: bytes, data: bytes) -> bool:
        if len(data) > self._max_bytes:
            raise TooLarge(self._max_bytes, len(data))
        # The check is a round trip of a few hundred bytes; without it, the whole object may be sent in vain.
        if len(data) > CHUNK_BYTES and self.head(key) is not None:
            return False
        try:
            return self._put(_put_frames(key, data), timeout=self._timeout_s).stored
        except grpc.RpcError as e:
            limit = _limit_of(e)
            if limit is not None:
                raise TooLarge(limit, len(data)) from e
            raise self._unavailable("put", e) from e

    def get(self, key: bytes) -> bytes | None:
        frames = self._get(message("GetRequest")(key=key), timeout=self._timeout_s)
        try:
            return self._collect(frames)
        except grpc.RpcError as e:
            if e.code() == grpc.StatusCode.NOT_FOUND:
                return None
            if e.code() == grpc.StatusCode.DATA_LOSS:
                raise ObjectError("the server found it corrupt") from e
            raise self._unavailable("get", e) from e
        finally:
            frames.cancel()

    def _collect(self, frames: Iterator) -> bytes:
        expected = None
        parts, n_bytes = [], 0
        for frame in frames:
            if expected is None:
                expected = frame.len
                if expected > self._max_bytes:
                    raise ObjectError(str(TooLarge(self._max_bytes, expected)))
            n_bytes += len(frame.data)
            if n_bytes > expected:
                raise ObjectError("more bytes than the server announced")
            parts.append(frame.data)
        if n_bytes != expected:
            raise ObjectError(f"object ends after {n_bytes} bytes, {expected} expected")
        return b"".join(parts)

    def head(self, key: bytes) -> EncodedItem | None:
        request = message("HeadRequest")(keys=[key])
        return self._entry(key, self._call("head", self._head, request, self._timeout_s))

    def _entry(self, key: bytes, answer: Any) -> EncodedItem | None:
        if len(answer.entries) != 1:
            raise StoreUnavailable(self.describe(), "head", f"{len(answer.entries)} heads for one key")
        (entry,) = answer.entries
        if not entry.found:
            return None
        try:
            return probe(entry.head, entry.len, key, self._max_bytes).item
        except ObjectError:
            return None

    def quarantine(self, key: bytes) -> bool:
        request = message("DeleteRequest")(key=key)
        return self._call("quarantine", self._delete, request, self._timeout_s).deleted

    def acquire(self, key: bytes, ttl_s: float) -> Lease | Held:
        answer = self._ask(key, acquire=message("LeaseRequest.Acquire")(ttl_ms=_millis(ttl_s)))
        return Lease(key, answer.token) if answer.done else Held(answer.left_ms / 1000)

    def renew(self, lease: Lease, ttl_s: float) -> bool:
        renew = message("LeaseRequest.Renew")(token=lease.token, ttl_ms=_millis(ttl_s))
        return self._ask(lease.key, renew=renew).done

    def release(self, lease: Lease) -> bool:
        return self._ask(lease.key, release=message("LeaseRequest.Release")(token=lease.token)).done

    def is_leased(self, key: bytes) -> bool:
        # The service has no question for it: a wait ends at once if the lease is free.
        start = time.monotonic()
        return self.wait(key, _PROBE_S) is None and time.monotonic() - start >= _PROBE_S

    def wait(self, key: bytes, patience_s: float) -> EncodedItem | None:
        # The server waits 30 s at most.
        patience_s = min(patience_s, _MAX_PATIENCE_S)
        request = message("WaitRequest")(key=key, patience_ms=_millis(patience_s))
        return self._entry(key, self._call("wait", self._wait, request, patience_s + self._timeout_s))

    def close(self) -> None:
        self._channel.close()

    def _ask(self, key: bytes, **ask: Any) -> Any:
        return self._call("lease", self._lease, message("LeaseRequest")(key=key, **ask), self._timeout_s)

    def _call(self, op: str, method: Callable[..., Any], request: Any, timeout_s: float) -> Any:
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as e:
            raise self._unavailable(op, e) from e

    def _unavailable(self, op: str, e: grpc.RpcError) -> StoreUnavailable:
        return StoreUnavailable(self.describe(), op, f"{e.code().name}: {e.details()}")


def _channel(authority: str, tls: TlsFiles | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(authority, options=_OPTIONS)
    return grpc.secure_channel(authority, tls.credentials(), options=[*_OPTIONS, *tls.options()])


def _write(request: Any) -> bytes:
    return request.SerializeToString()


def _put_frames(key: bytes, data: bytes) -> Iterator:
    frame = message("PutFrame")
    yield frame(start=message("PutFrame.Start")(key=key, len=len(data)))
    for start in range(0, len(data), CHUNK_BYTES):
        yield frame(data=data[start : start + CHUNK_BYTES])


def _limit_of(e: grpc.RpcError) -> int | None:
    """The limit in the refusal of an object that is too large."""
    metadata = dict(e.trailing_metadata() or ())
    limit = str(metadata.get(_LIMIT_HEADER, ""))
    return int(limit) if e.code() == grpc.StatusCode.OUT_OF_RANGE and limit.isdigit() else None


def _millis(seconds: float) -> int:
    return max(int(seconds * 1000), 0)
