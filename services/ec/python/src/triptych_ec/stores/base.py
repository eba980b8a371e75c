"""The contract of a store. It moves framed bytes under content keys; verifying rows is the reader's part.

Atomic: a reader sees a whole object or none. First wins: of concurrent writers of one key one stores, and its bytes
stay. A store may lose what it holds at any time: then the next read is a miss and the next put is stored. Every call
ends within the store's deadline. All methods may be called from any thread.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

from ..items import EncodedItem


@dataclass(frozen=True)
class Lease:
    """The lease of a key, whose holder encodes the item for everyone."""

    key: bytes
    token: int
    """Larger than that of every earlier lease of the key."""


@dataclass(frozen=True)
class Held:
    """A lease that another holds."""

    left_s: float
    """Time left, unless it is released early or renewed."""


class Store(ABC):
    """A store of EC objects. Every method raises `StoreUnavailable` if it does not answer in time."""

    @abstractmethod
    def describe(self) -> str:
        """The place for operators, without passwords."""

    @abstractmethod
    def put_if_absent(self, key: bytes, data: bytes) -> bool:
        """Stores the object unless the key has one; true if these bytes are now the object. Raises `TooLarge`."""

    @abstractmethod
    def get(self, key: bytes) -> bytes | None:
        """The bytes under the key, unverified; `None` is a miss. Raises `ObjectError` for bytes that are no object."""

    @abstractmethod
    def head(self, key: bytes) -> EncodedItem | None:
        """The description of the object; `None` is a miss, or an object whose head is malformed."""

    @abstractmethod
    def quarantine(self, key: bytes) -> bool:
        """Hides an object that does not verify, so that a put is stored again. True if there was one."""

    @abstractmethod
    def acquire(self, key: bytes, ttl_s: float) -> Lease | Held:
        """Acquires the lease of a key, if it is free. It ends after `ttl_s` unless it is renewed."""

    @abstractmethod
    def renew(self, lease: Lease, ttl_s: float) -> bool:
        """Extends a lease to `ttl_s` from now. False: this holder has lost it."""

    @abstractmethod
    def release(self, lease: Lease) -> bool:
        """Releases a lease. False: this holder had lost it."""

    @abstractmethod
    def is_leased(self, key: bytes) -> bool:
        """True while somebody holds the key's lease, and so is about to store the object."""

    @abstractmethod
    def wait(self, key: bytes, patience_s: float) -> EncodedItem | None:
        """Waits until the object is stored, the key's lease is free, or `patience_s` is over. `None` may come early."""

    def close(self) -> None:
        """Closes connections."""
        return


class PolledStore(Store):
    """A store that is asked again and again by who waits."""

    def wait(self, key: bytes, patience_s: float) -> EncodedItem | None:
        until = time.monotonic() + patience_s
        pause = 0.002
        while True:
            # The lease is read first: its holder stores the object before the release.
            leased = self.is_leased(key)
            item = self.head(key)
            left = until - time.monotonic()
            if item is not None or not leased or left <= 0:
                return item
            time.sleep(min(pause * random.uniform(0.5, 1.0), left))
            pause = min(2 * pause, 0.05)
