"""Opening a store from its setting."""

from __future__ import annotations

import re

from ..errors import SettingError
from ..limits import MAX_OBJECT_BYTES
from .base import Store
from .disk import DiskStore
from .remote import RemoteStore
from .tls import TlsFiles

ALLOWED = "`disk:DIR`, `redis://[user:password@]host[:port][/db][?ttl_s=N]`, `rediss://…` for TLS, `grpc://host:port`"

_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}", re.ASCII)


def is_authority(text: str) -> bool:
    """True for exactly `host:port`."""
    return _AUTHORITY.fullmatch(text) is not None and int(text.rpartition(":")[2]) < 1 << 16


def open_store(
    setting: str, *, max_bytes: int = MAX_OBJECT_BYTES, timeout_s: float = 10.0, tls: TlsFiles | None = None
) -> Store:
    """Opens the store. A server that cannot be reached is no error: its operations are `StoreUnavailable` until it can.

    `tls`: for a store behind gRPC. Raises `SettingError` for a setting that cannot be used.
    """
    place = setting.strip()
    if place.startswith("disk:") and "?" in place:
        raise SettingError(f"{place}: a budget (`?mib=N`) is kept by Triptych's own processes; allowed are {ALLOWED}")
    if place.startswith("disk:"):
        return DiskStore(place.removeprefix("disk:"), max_bytes=max_bytes, timeout_s=timeout_s)
    if place.startswith("grpc://"):
        authority = place.removeprefix("grpc://")
        if not is_authority(authority):
            raise SettingError("`grpc://` needs a host and a port, as in `grpc://127.0.0.1:7400`")
        return RemoteStore(authority, max_bytes=max_bytes, timeout_s=timeout_s, tls=tls)
    if place.startswith(("redis://", "rediss://")):
        from .redis import RedisStore

        return RedisStore(place, max_bytes=max_bytes, timeout_s=timeout_s)
    scheme = place.partition(":")[0] or "nothing"
    raise SettingError(f"`{scheme}` is not a store that this package opens; allowed are {ALLOWED}")
