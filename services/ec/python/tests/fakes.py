"""A store in memory that fails on demand."""

from __future__ import annotations

import threading
import time

from triptych_ec import EncodedItem, ObjectError, StoreUnavailable, parse_head
from triptych_ec.stores import Held, Lease
from triptych_ec.stores.base import PolledStore


class FakeStore(PolledStore):
    """Objects and leases in dictionaries; `is_down` makes every call fail, `delay_s` makes it slow."""

    def __init__(self) -> None:
        self.objects: dict[bytes, bytes] = {}
        self.leases: dict[bytes, tuple[int, float]] = {}
        self.quarantined: list[bytes] = []
        self.is_down = False
        self.delay_s = 0.0
        self.n_gets = 0
        self._token = 0
        self._lock = threading.Lock()

    def _check(self, op: str) -> None:
        time.sleep(self.delay_s)
        if self.is_down:
            raise StoreUnavailable("fake", op, "down")

    def describe(self) -> str:
        return "fake"

    def put_if_absent(self, key: bytes, data: bytes) -> bool:
        self._check("put")
        with self._lock:
            return self.objects.setdefault(key, data) is data

    def get(self, key: bytes) -> bytes | None:
        self.n_gets += 1
        self._check("get")
        return self.objects.get(key)

    def head(self, key: bytes) -> EncodedItem | None:
        data = self.get(key)
        try:
            return parse_head(data).item if data else None
        except ObjectError:
            return None

    def quarantine(self, key: bytes) -> bool:
        self._check("quarantine")
        self.quarantined.append(key)
        return self.objects.pop(key, None) is not None

    def acquire(self, key: bytes, ttl_s: float) -> Lease | Held:
        self._check("lease")
        with self._lock:
            token, until = self.leases.get(key, (0, 0.0))
            if until > time.monotonic():
                return Held(until - time.monotonic())
            self._token += 1
            self.leases[key] = (self._token, time.monotonic() + ttl_s)
            return Lease(key, self._token)

    def renew(self, lease: Lease, ttl_s: float) -> bool:
        self._check("lease")
        with self._lock:
            if self.leases.get(lease.key, (0, 0.0))[0] != lease.token:
                return False
            self.leases[lease.key] = (lease.token, time.monotonic() + ttl_s)
            return True

    def release(self, lease: Lease) -> bool:
        self._check("lease")
        with self._lock:
            return self.leases.get(lease.key, (0, 0.0))[0] == lease.token and bool(self.leases.pop(lease.key))

    def is_leased(self, key: bytes) -> bool:
        self._check("wait")
        return self.leases.get(key, (0, 0.0))[1] > time.monotonic()


def until_true(check, seconds: float = 10.0) -> None:
    """Calls `check` again and again until it is true."""
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.005)
