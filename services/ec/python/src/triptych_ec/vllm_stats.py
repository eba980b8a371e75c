"""The connector's counters in vLLM's own metrics and log, and the description of the encoder that it publishes for."""

from __future__ import annotations

from typing import Any

from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats

from .metrics import COUNTERS, OUTCOMES
from .model import published_tower
from .settings import ConnectorSettings
from .tensors import dtype_name
from .vllm_items import PUBLISHED, publishes_for_proxy

ENCODER_INFO = "triptych_ec_encoder_info"
"""Name of the gauge, which the proxy knows (`services/vllm/src/metrics.rs`)."""

ENCODER_HELP = "The encoder of images whose outputs are published under keys of Triptych's proxy: its digests."


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
        self._describe_encoder(vllm_config)

    def _describe_encoder(self, vllm_config: Any) -> None:
        """The encoder whose images lie under the proxy's keys: the proxy reads this gauge before it sends any."""
        settings = ConnectorSettings.read(vllm_config.ec_transfer_config.ec_connector_extra_config)
        if not publishes_for_proxy(vllm_config, settings):
            return
        tower = published_tower(vllm_config)
        fingerprint = tower.rows_of_vllm(PUBLISHED, dtype_name(vllm_config.model_config.dtype))
        digests = (fingerprint, tower.configuration, tower.processor, tower.weights)
        labels = [*self._labelnames, "fingerprint", "configuration", "processor", "weights"]
        info = self._gauge_cls(name=ENCODER_INFO, documentation=ENCODER_HELP, labelnames=labels)
        for engine in self.per_engine_labelvalues.values():
            info.labels(*engine, *(digest.hex() for digest in digests)).set(1)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, n in transfer_stats_data.items():
            name, _, outcome = key.partition("|")
            if name in self._counters:
                labels = [*self.per_engine_labelvalues[engine_idx], *([outcome] if outcome else [])]
                self._counters[name].labels(*labels).inc(n)
