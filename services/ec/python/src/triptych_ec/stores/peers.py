"""A store, and behind it the memories of workers that may still hold what the store has lost.

A peer is an `EcObjects` server. It is only read; one that does not answer is skipped for a moment, so that a dead peer
costs its deadline once and not once an item.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..errors import EcError
from ..items import EncodedItem
from .base import Held, Lease, Store

T = TypeVar("T")

MAX_PEERS = 4
"""Most peers asked for one item."""

_SKIP_S = 3.0
_MAX_REMEMBERED = 1024


class WithPeers(Store):
    """The store first, then its peers in their order."""

    def __init__(self, store: Store, peers: Sequence[Store]) -> None:
        self._store = store
        self._peers = list(peers)
        self._away_until: dict[int, float] = {}
        self._last_from: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def describe(self) -> str:
        return f"{self._store.describe()}, then {len(self._peers)} peers"

    def put_if_absent(self, key: bytes, data: bytes) -> bool:
        return self._store.put_if_absent(key, data)

    def get(self, key: bytes) -> bytes | None:
        with self._lock:
            self._last_from.pop(key, None)
        data = self._store.get(key)
        return data if data is not None else self._from_peers(key, lambda peer: peer.get(key))

    def head(self, key: bytes) -> EncodedItem | None:
        item = self._store.head(key)
        return item if item is not None else self._from_peers(key, lambda peer: peer.head(key))

    def _from_peers(self, key: bytes, ask: Callable[[Store], T | None]) -> T | None:
        n_asked = 0
        for i, peer in enumerate(self._peers):
            with self._lock:
                is_away = self._away_until.get(i, 0.0) > time.monotonic()
            if is_away or n_asked == MAX_PEERS:
                continue
            n_asked += 1
            try:
                found = ask(peer)
            except EcError:
                with self._lock:
                    self._away_until[i] = time.monotonic() + _SKIP_S
                continue
            if found is not None:
                with self._lock:
                    self._last_from[key] = i
                    while len(self._last_from) > _MAX_REMEMBERED:
                        self._last_from.pop(next(iter(self._last_from)))
                return found
        return None

    def quarantine(self, key: bytes) -> bool:
        """The store's object, or else the peer that gave one is skipped for a moment."""
        with self._lock:
            peer = self._last_from.pop(key, None)
            if peer is not None:
                self._away_until[peer] = time.monotonic() + _SKIP_S
        return self._store.quarantine(key) or peer is not None

    def acquire(self, key: bytes, ttl_s: float) -> Lease | Held:
        return self._store.acquire(key, ttl_s)

    def renew(self, lease: Lease, ttl_s: float) -> bool:
        return self._store.renew(lease, ttl_s)

    def release(self, lease: Lease) -> bool:
        return self._store.release(lease)

    def is_leased(self, key: bytes) -> bool:
        return self._store.is_leased(key)

    def wait(self, key: bytes, patience_s: float) -> EncodedItem | None:
        return self._store.wait(key, patience_s)

    def close(self) -> None:
        for store in (self._store, *self._peers):
            store.close()
