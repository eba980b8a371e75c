"""Objects in a directory: `DIR/ab/<hex>.safetensors`, shared with every process that mounts it.

A writer fills a file of its own under `DIR/tmp` and links it to its name, which fails if the name is taken. Leases are
`DIR/leases/<hex>` with token, renewals and time to live in milliseconds, replaced under a lock. The files hold no
time: whoever looks counts by its own clock how long a record did not change.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import ObjectError, SettingError, StoreUnavailable, TooLarge
from ..items import EncodedItem
from ..limits import MAX_HEAD_BYTES, MAX_OBJECT_BYTES
from ..objects import probe
from .base import Held, Lease, PolledStore

_MAX_TTL_S = 3600.0
_FORGOTTEN_S = 2 * 3600.0
_MAX_SEEN = 4096
_U64 = (1 << 64) - 1

Record = tuple[int, int, int]
"""Token, renewals and time to live in milliseconds of a lease."""


class DiskStore(PolledStore):
    """The store in a directory."""

    def __init__(self, directory: str, *, max_bytes: int = MAX_OBJECT_BYTES, timeout_s: float = 10.0) -> None:
        if not directory:
            raise SettingError("`disk:` needs a directory, as in `disk:/var/lib/triptych/ec`")
        self._dir = Path(directory)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._seen: dict[bytes, tuple[Record, float]] = {}
        self._seen_lock = threading.Lock()
        try:
            for name in ("tmp", "quarantine", "leases"):
                (self._dir / name).mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise SettingError(f"disk:{directory}: the directory is not usable: {e}") from e

    def describe(self) -> str:
        return f"disk:{self._dir}"

    def path_of(self, key: bytes) -> Path:
        """Path of the object of `key`, whether or not it exists."""
        return self._dir / key.hex()[:2] / f"{key.hex()}.safetensors"

    def put_if_absent(self, key: bytes, data: bytes) -> bool:
        if len(data) > self._max_bytes:
            raise TooLarge(self._max_bytes, len(data))
        path = self.path_of(key)
        with self._errors("put"):
            if path.exists():
                return False
            own = self._dir / "tmp" / os.urandom(16).hex()
            try:
                with open(own, "xb") as file:
                    # Locked while it is written: the tidying of other processes leaves it alone.
                    fcntl.flock(file, fcntl.LOCK_EX)
                    file.write(data)
                    file.flush()
                    path.parent.mkdir(exist_ok=True)
                    return _link(own, path)
            finally:
                with suppress(FileNotFoundError):
                    own.unlink()

    def get(self, key: bytes) -> bytes | None:
        with self._errors("get"):
            try:
                with open(self.path_of(key), "rb") as file:
                    length = os.fstat(file.fileno()).st_size
                    if length > self._max_bytes:
                        raise ObjectError(str(TooLarge(self._max_bytes, length)))
                    return file.read(length)
            except FileNotFoundError:
                return None

    def head(self, key: bytes) -> EncodedItem | None:
        with self._errors("head"):
            try:
                with open(self.path_of(key), "rb") as file:
                    length = os.fstat(file.fileno()).st_size
                    first_bytes = file.read(MAX_HEAD_BYTES)
            except FileNotFoundError:
                return None
        try:
            return probe(first_bytes, length, key, self._max_bytes).item
        except ObjectError:
            return None

    def quarantine(self, key: bytes) -> bool:
        aside = self._dir / "quarantine" / f"{key.hex()}.safetensors"
        with self._errors("quarantine"):
            try:
                os.replace(self.path_of(key), aside)
            except FileNotFoundError:
                return False
            return True

    def acquire(self, key: bytes, ttl_s: float) -> Lease | Held:
        with self._errors("lease"), self._lock():
            held = self._held(key)
            if held is not None:
                return Held(held[1])
            last = self._dir / "leases" / "last"
            before = _number(_read_text(last))
            token = max(min((before or 0) + 1, _U64), int(time.time() * 1_000_000))
            self._write(last, str(token))
            self._note(key, (token, 0, _millis(ttl_s)))
            return Lease(key, token)

    def renew(self, lease: Lease, ttl_s: float) -> bool:
        with self._errors("lease"), self._lock():
            held = self._held(lease.key)
            if held is None or held[0][0] != lease.token:
                return False
            self._note(lease.key, (lease.token, held[0][1] + 1, _millis(ttl_s)))
            return True

    def release(self, lease: Lease) -> bool:
        with self._errors("lease"), self._lock():
            held = self._held(lease.key)
            record = self._record(lease.key)
            if record is not None and record[0][0] == lease.token:
                with suppress(FileNotFoundError):
                    self._lease_path(lease.key).unlink()
                with self._seen_lock:
                    self._seen.pop(lease.key, None)
            return held is not None and held[0][0] == lease.token

    def is_leased(self, key: bytes) -> bool:
        with self._errors("wait"):
            return self._held(key) is not None

    def _lease_path(self, key: bytes) -> Path:
        return self._dir / "leases" / key.hex()

    def _held(self, key: bytes) -> tuple[Record, float] | None:
        """The record of a lease that is not over, and the seconds left."""
        found = self._record(key)
        if found is None:
            return None
        record, by_files = found
        now = time.monotonic()
        with self._seen_lock:
            if len(self._seen) > _MAX_SEEN:
                self._seen = {k: v for k, v in self._seen.items() if now - v[1] < _MAX_TTL_S}
            seen = self._seen.get(key)
            if seen is None or seen[0] != record:
                seen = self._seen[key] = (record, now)
        left = min(record[2] / 1000, _MAX_TTL_S) - max(now - seen[1], by_files - _FORGOTTEN_S)
        return (record, left) if left > 0 else None

    def _record(self, key: bytes) -> tuple[Record, float] | None:
        """A lease file and its age by the times of files; a malformed one is no lease."""
        path = self._lease_path(key)
        try:
            written = path.stat().st_mtime
        except FileNotFoundError:
            return None
        numbers = [_number(word) for word in _read_text(path).split()]
        if len(numbers) != 3 or None in numbers:
            return None
        token, renewals, ttl_ms = (int(n or 0) for n in numbers)
        return (token, renewals, ttl_ms), max(time.time() - written, 0.0)

    def _note(self, key: bytes, record: Record) -> None:
        start = time.monotonic()
        self._write(self._lease_path(key), " ".join(map(str, record)))
        with self._seen_lock:
            self._seen[key] = (record, start)

    def _write(self, path: Path, text: str) -> None:
        """Replaces a file. Called under the lock, so one temporary name is enough."""
        new = self._dir / "leases" / "new"
        new.write_text(text)
        os.replace(new, path)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        until = time.monotonic() + self._timeout_s
        with open(self._dir / "leases" / "lock", "ab") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise TimeoutError(f"the lock was not free within {self._timeout_s} s") from None
                    time.sleep(0.001)
            yield

    @contextmanager
    def _errors(self, op: str) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise StoreUnavailable(self.describe(), op, e) from e


def _link(own: Path, path: Path) -> bool:
    try:
        os.link(own, path)
    except FileExistsError:
        return False
    except PermissionError:
        # Some network file systems have no hard links; a rename is atomic too, and either object verifies.
        os.replace(own, path)
    return True


def _read_text(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(128).decode("ascii", "replace")
    except FileNotFoundError:
        return ""


def _number(word: str) -> int | None:
    word = word.strip()
    return int(word) if word.isascii() and word.isdigit() and len(word) <= 20 and int(word) <= _U64 else None


def _millis(seconds: float) -> int:
    return max(int(seconds * 1000), 0)
