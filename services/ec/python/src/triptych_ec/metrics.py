"""Counters of the connector, in Prometheus' form. Names are fixed; anything else is refused."""

from __future__ import annotations

import threading
from collections.abc import Mapping

COUNTERS = {
    "triptych_ec_loads_total": "Items looked for in the store, by outcome.",
    "triptych_ec_loaded_bytes_total": "Bytes of verified objects that were loaded.",
    "triptych_ec_publishes_total": "Items to publish, by outcome.",
    "triptych_ec_published_bytes_total": "Bytes of objects that were stored.",
    "triptych_ec_local_encodes_total": "Items that this instance encodes since no object was found.",
    "triptych_ec_unavailable_requests_total": "Requests that failed since an item was in no store, and its input not here.",
}
"""Counters and their help."""

OUTCOMES = {
    "triptych_ec_loads_total": ("loaded", "missing", "awaited", "damaged", "mismatched", "unreachable"),
    "triptych_ec_publishes_total": ("stored", "already_there", "dropped", "failed", "refused"),
}
"""Values of the label `outcome`."""


class Counters:
    """A set of counters, safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total: dict[tuple[str, str], int] = {}
        self._taken: dict[tuple[str, str], int] = {}

    def add(self, name: str, n: int = 1, *, outcome: str = "") -> None:
        """Adds to a counter. Raises `KeyError` for one that is not known."""
        if name not in COUNTERS or (outcome or name in OUTCOMES) and outcome not in OUTCOMES.get(name, ()):
            raise KeyError(f"{name} {outcome}")
        with self._lock:
            self._total[name, outcome] = self._total.get((name, outcome), 0) + n

    def merge(self, delta: Mapping[str, int]) -> None:
        """Adds what `take` gave elsewhere."""
        for key, n in delta.items():
            name, _, outcome = key.partition("|")
            self.add(name, n, outcome=outcome)

    def take(self) -> dict[str, int]:
        """What was added since the last call, by `name|outcome`; empty: nothing."""
        with self._lock:
            delta = {k: n - self._taken.get(k, 0) for k, n in self._total.items()}
            self._taken = dict(self._total)
        return {f"{name}|{outcome}": n for (name, outcome), n in delta.items() if n}

    def get(self, name: str, outcome: str = "") -> int:
        """The value of a counter."""
        with self._lock:
            return self._total.get((name, outcome), 0)

    def render(self) -> str:
        """All counters in the text form of Prometheus, the ones at zero included."""
        lines = []
        for name, text in COUNTERS.items():
            lines += [f"# HELP {name} {text}", f"# TYPE {name} counter"]
            for outcome in OUTCOMES.get(name, ("",)):
                label = f'{{outcome="{outcome}"}}' if outcome else ""
                lines.append(f"{name}{label} {self.get(name, outcome)}")
        return "\n".join(lines) + "\n"
