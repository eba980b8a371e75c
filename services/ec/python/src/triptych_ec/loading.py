"""Reading items into memory ahead of the engine, so that a step of the engine never meets an object that is missing.

The scheduler asks `Loader.poll` in every step; threads read and verify. What is ready stays in memory while a request
needs it, and after that as long as there is room. Knows no vLLM and no torch.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from .errors import EcError, ObjectError
from .expected import Expected
from .items import EncodedItem
from .metrics import Counters
from .objects import MacKeys, decode
from .stores.base import Store

_logger = logging.getLogger("vllm.triptych_ec")
# Below vLLM's own logger, whose handlers it gets.

_PAUSE_S = 0.02
_MAX_PAUSE_S = 0.5
_ROW_BYTES_AT_FIRST = 16 << 10


class Status(enum.Enum):
    """Answer to the scheduler."""

    PENDING = "pending"
    READY = "ready"
    ABSENT = "absent"


class Outcome(enum.Enum):
    """Result of one look at the store; the values are labels of the counter."""

    LOADED = "loaded"
    MISSING = "missing"
    AWAITED = "awaited"
    DAMAGED = "damaged"
    MISMATCHED = "mismatched"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True)
class Wanted:
    """An item that a request needs."""

    identifier: str
    key: bytes
    expected: Expected
    can_encode: bool
    """The instance has the item's input, and need not wait for an object that nobody makes."""


@dataclass(frozen=True)
class LoadedObject:
    """A verified object; its rows begin at `offset`."""

    item: EncodedItem
    data: bytes
    offset: int


@dataclass
class _Entry:
    waiters: dict[str, float] = field(default_factory=dict)
    """Requests that need it, and when each asked first."""
    loaded: LoadedObject | None = None
    outcome: Outcome | None = None
    in_flight: bool = False
    next_try: float = 0.0
    pause: float = _PAUSE_S
    n_tokens: int = 0


class Loader:
    """The items that requests need. Methods are called by the scheduler's thread."""

    def __init__(
        self,
        store: Store,
        counters: Counters,
        keys: MacKeys,
        limits: LoadLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._counters = counters
        self._keys = keys
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._order: OrderedDict[str, None] = OrderedDict()
        self._row_bytes = _ROW_BYTES_AT_FIRST
        self._pool = ThreadPoolExecutor(limits.n_threads, thread_name_prefix="triptych-ec-load")

    def poll(self, request: str, wanted: Wanted) -> Status:
        """The state of an item for a request, which keeps it in memory until `forget`. Starts a read where one is due."""
        now = self._clock()
        with self._lock:
            entry = self._entries.setdefault(wanted.identifier, _Entry())
            self._entries.move_to_end(wanted.identifier)
            self._order.setdefault(request)
            since = entry.waiters.setdefault(request, now)
            if entry.loaded is not None:
                fits = wanted.expected.mismatch(entry.loaded.item) is None
                return Status.READY if fits else Status.ABSENT
            if entry.in_flight:
                return Status.PENDING
            if self._is_absent(entry, wanted, now - since):
                return Status.ABSENT
            if now < entry.next_try or not self._has_room(request, wanted):
                return Status.PENDING
            entry.in_flight, entry.n_tokens = True, wanted.expected.n_tokens
        self._pool.submit(self._look, entry, wanted)
        return Status.PENDING

    def _is_absent(self, entry: _Entry, wanted: Wanted, waited_s: float) -> bool:
        if entry.outcome is None:
            return False
        if entry.outcome is Outcome.MISMATCHED or waited_s >= self._limits.patience_s:
            return True
        return wanted.can_encode and entry.outcome is not Outcome.AWAITED

    def _has_room(self, request: str, wanted: Wanted) -> bool:
        """The oldest request may always read, so that requests never wait for each other's memory in a circle."""
        if next(iter(self._order)) == request:
            return True
        pending = sum(e.n_tokens for e in self._entries.values() if e.in_flight) + wanted.expected.n_tokens
        pinned = sum(len(e.loaded.data) for e in self._entries.values() if e.loaded and e.waiters)
        return pinned + pending * self._row_bytes <= self._limits.budget_bytes

    def look_again(self, request: str, identifier: str) -> bool:
        """Another encodes an item that was missing: look for it again. False: the request has waited long enough."""
        with self._lock:
            entry = self._entries.get(identifier)
            if entry is None:
                return True
            if entry.outcome is Outcome.MISMATCHED:
                return False
            entry.outcome = Outcome.AWAITED
            return self._clock() - entry.waiters.get(request, self._clock()) < self._limits.patience_s

    def loaded(self, identifier: str) -> LoadedObject | None:
        """The verified object of an item that is ready."""
        with self._lock:
            entry = self._entries.get(identifier)
            return entry.loaded if entry else None

    def outcome(self, identifier: str) -> str:
        """The result of the last look at an item, for the log."""
        with self._lock:
            entry = self._entries.get(identifier)
            return entry.outcome.value if entry and entry.outcome else "not asked"

    def forget(self, request: str, identifier: str | None = None) -> None:
        """The request needs this item no more; `None`: none of its items."""
        with self._lock:
            names = [identifier] if identifier is not None else list(self._entries)
            for name in names:
                entry = self._entries.get(name)
                if entry is not None and entry.waiters.pop(request, None) is not None:
                    if not entry.waiters and entry.loaded is None and not entry.in_flight:
                        del self._entries[name]
            if not any(request in entry.waiters for entry in self._entries.values()):
                self._order.pop(request, None)
            self._evict()

    def held_bytes(self) -> int:
        """Bytes of objects in memory."""
        with self._lock:
            return sum(len(e.loaded.data) for e in self._entries.values() if e.loaded)

    def close(self) -> None:
        """Ends the threads. A read in progress ends by its deadline."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _evict(self) -> None:
        excess = sum(len(e.loaded.data) for e in self._entries.values() if e.loaded) - self._limits.budget_bytes
        for name in [n for n, e in self._entries.items() if e.loaded and not e.waiters]:
            if excess <= 0:
                return
            loaded = self._entries.pop(name).loaded
            excess -= len(loaded.data) if loaded else 0

    def _look(self, entry: _Entry, wanted: Wanted) -> None:
        loaded, outcome = None, Outcome.UNREACHABLE
        try:
            loaded, outcome = self._read(wanted)
        except EcError:
            pass
        finally:
            self._counters.add("triptych_ec_loads_total", outcome=outcome.value)
            with self._lock:
                entry.in_flight, entry.loaded, entry.outcome = False, loaded, outcome
                entry.next_try = self._clock() + entry.pause
                entry.pause = min(2 * entry.pause, _MAX_PAUSE_S)
                if loaded is not None:
                    self._row_bytes = max(len(loaded.data) // max(loaded.item.n_tokens, 1), 1)
                if not entry.waiters and loaded is None and self._entries.get(wanted.identifier) is entry:
                    del self._entries[wanted.identifier]
                self._evict()

    def _read(self, wanted: Wanted) -> tuple[LoadedObject | None, Outcome]:
        try:
            data = self._store.get(wanted.key)
            if data is None and self._store.is_leased(wanted.key):
                return None, Outcome.AWAITED
            # A lease that is free may have been released since: its holder stores the object before that.
            data = self._store.get(wanted.key) if data is None else data
            if data is None:
                return None, Outcome.MISSING
            item, rows = decode(data, wanted.key, self._keys, self._limits.max_object_bytes)
        except ObjectError:
            # Hidden, so that the next producer's object is stored.
            self._store.quarantine(wanted.key)
            return None, Outcome.DAMAGED
        if (reason := wanted.expected.mismatch(item)) is not None:
            _logger.warning("item %s: the object is not what the model takes: %s", wanted.identifier, reason)
            return None, Outcome.MISMATCHED
        self._counters.add("triptych_ec_loaded_bytes_total", len(data))
        return LoadedObject(item, data, len(data) - len(rows)), Outcome.LOADED


@dataclass(frozen=True)
class LoadLimits:
    """Bounds of a loader."""

    patience_s: float
    budget_bytes: int
    max_object_bytes: int
    n_threads: int

