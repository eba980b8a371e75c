"""The connector's counters in vLLM's own metrics and log."""

from __future__ import annotations

from typing import Any

from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats

from .metrics import COUNTERS, OUTCOMES


class EcStats(ECConnectorStats):
    """What was counted since the last step, by `name|outcome`."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: ECConnectorStats) -> EcStats:
        for name, n in other.data.items():
            self.data[name] = self.data.get(name, 0) + n
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name.replace("|", " ").strip(): n for name, n in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class EcPromMetrics(ECConnectorPromMetrics):
    """One Prometheus counter for each of ours, with vLLM's labels of the engine."""

    def __init__(self, vllm_config: Any, metric_types: dict, labelnames: list[str], per_engine: dict[int, list]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._counters: dict[str, Any] = {}
        for name, text in COUNTERS.items():
            labels = labelnames + (["outcome"] if name in OUTCOMES else [])
            self._counters[name] = self._counter_cls(name=name, documentation=text, labelnames=labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, n in transfer_stats_data.items():
            name, _, outcome = key.partition("|")
            if name in self._counters:
                labels = [*self.per_engine_labelvalues[engine_idx], *([outcome] if outcome else [])]
                self._counters[name].labels(*labels).inc(n)
