"""Publishing of encoder outputs: leases before the encode, and a bounded queue of objects to store after it.

`Claims` live in the scheduler and take the lease of an item before it is encoded; `Publisher` lives in the worker that
has the rows, stores the object and releases the lease. A lease saves work and is not needed for correctness. Knows no
vLLM and no torch.
"""

from __future__ import annotations

import enum
import queue
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from .errors import EcError, ObjectError, TooLarge
from .items import EncodedItem
from .metrics import Counters
from .objects import MacKeys, encode, seal
from .stores.base import Held, Lease, Store

_RETRY_S = 0.05
_MAX_RETRY_S = 1.0


class Settled(enum.Enum):
    """Answer to a claim."""

    PENDING = "pending"
    OURS = "ours"
    """The lease is ours, or the store cannot be asked for it: encode."""
    HELD = "held"
    """Another encodes it."""


@dataclass
class _Claim:
    requests: set[str]
    asked: Future
    taken: float
    lease: Lease | None = None
    is_settled: bool = False


class Claims:
    """Leases of the items that this instance is about to encode. Methods are called by the scheduler's thread."""

    def __init__(self, store: Store, ttl_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._claims: dict[bytes, _Claim] = {}
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="triptych-ec-lease")

    def settle(self, request: str, key: bytes) -> Settled:
        """Asks for the lease of a key, and keeps it until `hand_over` or `forget`."""
        now = time.monotonic()
        claim = self._claims.get(key)
        if claim is None:
            asked = self._pool.submit(self._acquire, key)
            claim = self._claims[key] = _Claim(set(), asked, now)
        claim.requests.add(request)
        if claim.is_settled:
            self._keep(claim, now)
            return Settled.OURS
        if not claim.asked.done():
            return Settled.PENDING
        try:
            answer = claim.asked.result()
        except EcError:
            answer = None
        if isinstance(answer, Held):
            del self._claims[key]
            return Settled.HELD
        claim.lease, claim.is_settled = answer, True
        return Settled.OURS

    def _acquire(self, key: bytes) -> Lease | Held:
        lease = self._store.acquire(key, self._ttl_s)
        if isinstance(lease, Lease) and self._store.head(key) is not None:
            # Its last holder stored the object after the caller had looked for it.
            self._store.release(lease)
            return Held(0.0)
        return lease

    def _keep(self, claim: _Claim, now: float) -> None:
        if claim.lease is not None and now - claim.taken > self._ttl_s / 3:
            claim.taken = now
            self._pool.submit(self._store.renew, claim.lease, self._ttl_s)

    def hand_over(self, key: bytes) -> Lease | None:
        """The lease, which the caller passes on to the worker that stores the object; `None`: there is none."""
        claim = self._claims.pop(key, None)
        return claim.lease if claim else None

    def forget(self, request: str, key: bytes | None = None) -> None:
        """Releases what the request claimed and no other wants; with a key, only that."""
        for name in [key] if key is not None else list(self._claims):
            claim = self._claims.get(name)
            if claim is None or request not in claim.requests:
                continue
            claim.requests.discard(request)
            if not claim.requests:
                del self._claims[name]
                claim.asked.add_done_callback(self._give_back)

    def _give_back(self, asked: Future) -> None:
        if not asked.cancelled() and asked.exception() is None and isinstance(asked.result(), Lease):
            try:
                self._pool.submit(self._store.release, asked.result())
            except RuntimeError:
                return  # It is closing; the lease ends by itself.

    def close(self) -> None:
        """Ends the threads; leases that are held end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class Publication:
    """An output to store; the checksum of its item is filled in here."""

    item: EncodedItem
    rows: bytes
    lease: Lease | None


@dataclass(frozen=True)
class PublishLimits:
    """Bounds of a publisher."""

    queue_bytes: int
    patience_s: float
    lease_ttl_s: float


class Publisher:
    """A thread that stores objects in the order of their encodes."""

    def __init__(self, store: Store, counters: Counters, keys: MacKeys, limits: PublishLimits) -> None:
        self._store = store
        self._counters = counters
        self._keys = keys
        self._limits = limits
        self._queue: queue.Queue[Publication | None] = queue.Queue()
        self._changed = threading.Condition()
        self._queued_bytes = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="triptych-ec-publish", daemon=True)
        self._thread.start()

    def publish(self, publication: Publication) -> bool:
        """Queues an output. False: there is no room, and it is not published; its reader encodes it again."""
        n_bytes = len(publication.rows)
        with self._changed:
            if self._is_closing or (self._queued_bytes and self._queued_bytes + n_bytes > self._limits.queue_bytes):
                self._counters.add("triptych_ec_publishes_total", outcome="dropped")
                return False
            self._queued_bytes += n_bytes
        self._queue.put(publication)
        return True

    def flush(self, patience_s: float) -> bool:
        """Waits until all that is queued is stored. False: some is not yet."""
        with self._changed:
            return self._changed.wait_for(lambda: self._queued_bytes == 0, patience_s)

    def close(self, patience_s: float) -> None:
        """Stores what is queued, for at most so long, and ends the thread."""
        self.flush(patience_s)
        self._is_closing = True
        self._queue.put(None)

    def _run(self) -> None:
        while (publication := self._queue.get()) is not None:
            outcome = "failed"
            try:
                outcome = self._store_one(publication)
            except Exception:  # noqa: BLE001 - the thread must outlive whatever a store's client raises
                outcome = "failed"
            finally:
                self._counters.add("triptych_ec_publishes_total", outcome=outcome)
                self._release(publication.lease)
                with self._changed:
                    self._queued_bytes -= len(publication.rows)
                    self._changed.notify_all()

    def _store_one(self, publication: Publication) -> str:
        try:
            item = seal(publication.item, publication.rows)
            data = encode(item, publication.rows, self._keys)
        except ObjectError:
            return "refused"
        until, pause = time.monotonic() + self._limits.patience_s, _RETRY_S
        while True:
            try:
                if publication.lease is not None:
                    self._store.renew(publication.lease, self._limits.lease_ttl_s)
                if not self._store.put_if_absent(item.key, data):
                    return "already_there"
                self._counters.add("triptych_ec_published_bytes_total", len(data))
                return "stored"
            except TooLarge:
                return "refused"
            except EcError:
                if self._is_closing or time.monotonic() > until:
                    return "failed"
            time.sleep(pause)
            pause = min(2 * pause, _MAX_RETRY_S)

    def _release(self, lease: Lease | None) -> None:
        try:
            if lease is not None:
                self._store.release(lease)
        except EcError:
            return  # It ends by itself.
