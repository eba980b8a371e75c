"""The EC connector of vLLM: `--ec-transfer-config '{"ec_connector": "TriptychECConnector", …}'`.

The scheduler's half reads and verifies objects ahead of the step that needs them (`loading`), and hands their bytes to
the workers with the step, so that a worker never meets an object that is missing or bad. A request whose item is not
there yet waits; one whose input is here encodes it; one without either fails after the patience, which a client may
retry. The worker's half publishes fresh outputs in the background (`publishing`), under the lease that the scheduler
took before the encode.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)
from vllm.logger import init_logger

from .extents import Extent
from .items import EncodedItem
from .loading import LoadedObject, Loader, LoadLimits, Status
from .metrics import Counters
from .model import model_fingerprint
from .publishing import Claims, Publication, Publisher, PublishLimits, Settled
from .settings import ConnectorSettings
from .stores.base import Lease
from .tensors import DTYPES, dtype_name, rows_of, tensor_of
from .vllm_items import InputFields, ItemKeys, extent_of
from .vllm_stats import EcStats, EcPromMetrics

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

_MAX_PLANNED = 4096


@dataclass(frozen=True)
class Planned:
    """An output that a worker publishes when it is encoded."""

    key: bytes
    fingerprint: bytes
    modality: str
    n_tokens: int
    extent: Extent
    lease: Lease | None


@dataclass
class TriptychMetadata(ECConnectorMetadata):
    """What the workers do in a step, by identifier."""

    loads: dict[str, LoadedObject] = field(default_factory=dict)
    planned: dict[str, Planned] = field(default_factory=dict)


@dataclass
class TriptychWorkerMetadata(ECConnectorWorkerMetadata):
    """What a worker counted."""

    counted: dict[str, int]

    def aggregate(self, other: ECConnectorWorkerMetadata) -> TriptychWorkerMetadata:
        total = dict(self.counted)
        for name, n in getattr(other, "counted", {}).items():
            total[name] = total.get(name, 0) + n
        return TriptychWorkerMetadata(total)


class TriptychECConnector(ECConnectorBase):
    """The connector; vLLM makes one in the scheduler and one in each worker."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        transfer: Any = vllm_config.ec_transfer_config
        self.settings = ConnectorSettings.read(transfer.ec_connector_extra_config)
        self.counters = Counters()
        self._store = self.settings.open()
        self._keys = self.settings.mac_keys()
        self._fingerprint = model_fingerprint(vllm_config, self.settings.fingerprint)
        # vLLM calls the methods of one half only, each in its own process.
        self._scheduler: Any = SchedulerHalf(self) if role is ECConnectorRole.SCHEDULER else None
        self._worker: Any = WorkerHalf(self) if role is ECConnectorRole.WORKER else None
        logger.info("encoder outputs in %s, fingerprint %s", self._store.describe(), self._fingerprint.hex()[:12])

    def shutdown(self) -> None:
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.close()
        self._store.close()

    # The scheduler's half.

    def has_cache_item(self, identifier: str) -> bool:
        return self._scheduler.usable(identifier) is not None

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        return self._scheduler.ensure(request, num_computed_tokens)

    def take_unavailable_requests(self) -> set[str]:
        return self._scheduler.take_unavailable()

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        self._scheduler.allocated(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> TriptychMetadata:
        return self._scheduler.build(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.ec_connector_worker_meta
        if isinstance(meta, TriptychWorkerMetadata):
            self.counters.merge(meta.counted)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finished(request)

    # The workers' half.

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        self._worker.load(encoder_cache, self._get_connector_metadata())

    def start_save_caches(self, **kwargs: Any) -> None:
        self._worker.start_save(kwargs["encoder_cache"], self._get_connector_metadata())

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        if self.is_producer:
            self._worker.save(mm_hash, encoder_cache[mm_hash])

    def build_connector_worker_meta(self) -> TriptychWorkerMetadata | None:
        counted = self.counters.take()
        return TriptychWorkerMetadata(counted) if counted else None

    # Metrics.

    def get_ec_connector_stats(self) -> EcStats | None:
        counted = self.counters.take() if self._scheduler is not None else {}
        return EcStats(counted) if counted else None

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> EcStats:
        return EcStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> EcPromMetrics:
        return EcPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class SchedulerHalf:
    """Waits for items, and decides which are loaded and which are encoded here."""

    def __init__(self, connector: TriptychECConnector) -> None:
        settings = connector.settings
        self._connector = connector
        self._keys = ItemKeys(connector._vllm_config, settings, connector._fingerprint)
        limits = LoadLimits(
            patience_s=settings.patience_s,
            budget_bytes=settings.host_cache_mib << 20,
            max_object_bytes=settings.max_object_bytes(),
            n_threads=settings.n_threads,
        )
        self.loader = Loader(connector._store, connector.counters, connector._keys, limits)
        self.claims = Claims(connector._store, settings.lease_ttl_s)
        self._inputs = InputFields(connector._vllm_config)
        self._in_engine: set[str] = set()
        self._allocated: set[str] = set()
        self._loads: dict[str, LoadedObject] = {}
        self._needed: dict[str, dict[str, bytes]] = {}
        """Keys of the items that a request asked for, by identifier."""
        self._absent: set[str] = set()
        """Items of the request that was asked about last which are not loaded, whatever lies under their identifier."""
        self._to_encode: dict[str, dict[str, Planned]] = {}
        self._handed_over: dict[str, set[str]] = {}
        self._unavailable: set[str] = set()

    def ensure(self, request: Request, n_computed: int) -> bool:
        """False while an item that the request still needs is neither in memory nor to be encoded here."""
        if request.request_id in self._unavailable:
            return False
        is_ready = True
        self._absent = set()
        needed = self._needed.setdefault(request.request_id, {})
        for feature in request.mm_features:
            position = feature.mm_position
            if position.offset + position.length > n_computed:
                is_ready &= self._is_ready(request.request_id, feature)
            elif (key := needed.pop(feature.identifier, None)) is not None:
                self.loader.forget(request.request_id, feature.identifier)
                self.claims.forget(request.request_id, key)
        return is_ready

    def usable(self, identifier: str) -> LoadedObject | None:
        """What the request that was asked about last loads for an item."""
        return None if identifier in self._absent else self.loader.loaded(identifier)

    def _is_ready(self, request: str, feature: Any) -> bool:
        can_encode = self._inputs.can_encode(feature)
        identifier = feature.identifier
        if can_encode and identifier in self._in_engine and not self._connector.is_producer:
            # If the engine evicts it in this very step, it encodes it.
            self._absent.add(identifier)
            return True
        shared = self._keys.shared_key(identifier)
        if shared is not None and can_encode and self._publishes(identifier):
            return self._publish_for_proxy(request, feature, shared)
        wanted = self._keys.wanted(feature, can_encode)
        key = self._needed[request].setdefault(identifier, wanted.key)
        status = self.loader.poll(request, wanted)
        if status is Status.READY:
            self.claims.forget(request, key)
        if status is not Status.ABSENT:
            return status is Status.READY
        self._absent.add(identifier)
        if not can_encode:
            outcome = self.loader.outcome(identifier)
            logger.warning("request %s: no rows for item %s (%s), and its input is not here", request, identifier, outcome)
            self._connector.counters.add("triptych_ec_unavailable_requests_total")
            self._unavailable.add(request)
            return False
        return not self._publishes(identifier) or self._claim(request, feature, key)

    def _publishes(self, identifier: str) -> bool:
        """True if this instance stores what it encodes for the item. Under a key of Triptych's proxy only an encoder
        that the proxy asked does: others may have that key for the rows of a Triptych encoder."""
        is_shared = self._keys.shared_key(identifier) is not None
        return self._connector.is_producer and not (is_shared and self._connector.is_consumer)

    def _publish_for_proxy(self, request: str, feature: Any, key: bytes) -> bool:
        """True: the item is published, from the engine's cache or freshly encoded. The proxy asks for what is not in the store,
        and holds the lease of the key until it is, so neither is asked for here."""
        self._absent.add(feature.identifier)
        fingerprint = self._keys.published(feature.modality)
        if fingerprint is None:
            logger.warning("item %s: a %s is not published under a proxy's key", feature.identifier, feature.modality)
        elif feature.identifier not in self._handed_over.get(request, ()):
            self._plan(request, feature, (key, fingerprint))
        return True

    def _plan(self, request: str, feature: Any, identity: tuple[bytes, bytes]) -> None:
        n_tokens = feature.mm_position.get_num_embeds()
        planned = Planned(*identity, feature.modality, n_tokens, extent_of(feature, n_tokens), None)
        self._to_encode.setdefault(request, {})[feature.identifier] = planned

    def _claim(self, request: str, feature: Any, key: bytes) -> bool:
        """True once the item may be encoded; its publication is planned then."""
        if feature.identifier in self._handed_over.get(request, ()):
            return True
        settled = self.claims.settle(request, key)
        if feature.identifier in self._to_encode.get(request, {}):
            return True
        if settled is Settled.PENDING:
            return False
        if settled is Settled.HELD and self.loader.look_again(request, feature.identifier):
            return False
        self._plan(request, feature, (key, self._connector._fingerprint))
        return True

    def allocated(self, identifier: str) -> None:
        """The engine gave the item a place in this step."""
        self._allocated.add(identifier)
        loaded = self.usable(identifier)
        if loaded is not None:
            self._loads[identifier] = loaded
        else:
            self._connector.counters.add("triptych_ec_local_encodes_total")

    def build(self, output: SchedulerOutput) -> TriptychMetadata:
        """The step's work for the workers."""
        meta = TriptychMetadata(loads=self._loads)
        for request in [r for r in output.num_scheduled_tokens if r in self._to_encode]:
            for identifier, planned in self._to_encode.pop(request).items():
                lease = self.claims.hand_over(planned.key)
                self._handed_over.setdefault(request, set()).add(identifier)
                meta.planned[identifier] = replace(planned, lease=lease)
        self._in_engine.difference_update(output.free_encoder_mm_hashes)
        self._in_engine |= self._allocated
        self._loads, self._allocated = {}, set()
        return meta

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Forgets the request. A producer's response tells the consumer the items' identifiers and metadata."""
        self.loader.forget(request.request_id)
        self.claims.forget(request.request_id)
        for of_requests in (self._needed, self._to_encode, self._handed_over):
            of_requests.pop(request.request_id, None)
        self._unavailable.discard(request.request_id)
        if not self._connector.is_producer or not request.mm_features:
            return None
        return self._inputs.response_params(request.mm_features) or None

    def take_unavailable(self) -> set[str]:
        """Requests that cannot be served here; they stay deferred until the engine ends them."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    def close(self) -> None:
        """Ends the threads."""
        self.loader.close()
        self.claims.close()


class WorkerHalf:
    """Puts loaded rows into the engine's encoder cache, and publishes fresh ones."""

    def __init__(self, connector: TriptychECConnector) -> None:
        settings = connector.settings
        self._connector = connector
        model: Any = connector._vllm_config.model_config
        self._dtype: torch.dtype = model.dtype
        self._planned: OrderedDict[str, Planned] = OrderedDict()
        limits = PublishLimits(
            queue_bytes=settings.publish_queue_mib << 20,
            patience_s=settings.patience_s,
            lease_ttl_s=settings.lease_ttl_s,
        )
        self._patience_s = settings.timeout_s
        self.publisher = Publisher(connector._store, connector.counters, connector._keys, limits)

    def load(self, encoder_cache: dict[str, torch.Tensor], meta: TriptychMetadata) -> None:
        """Adds the step's items to the cache; they were verified before."""
        for identifier, loaded in meta.loads.items():
            if identifier not in encoder_cache:
                encoder_cache[identifier] = tensor_of(loaded, _device(), self._dtype)

    def start_save(self, encoder_cache: dict[str, torch.Tensor], meta: TriptychMetadata) -> None:
        """Remembers what is to be published, and publishes what was encoded in an earlier step."""
        if not self._connector.is_consumer:
            self.load(encoder_cache, meta)
        for identifier, planned in meta.planned.items():
            self._planned[identifier] = planned
            while len(self._planned) > _MAX_PLANNED:
                self._planned.popitem(last=False)
            if identifier in encoder_cache:
                self.save(identifier, encoder_cache[identifier])

    def save(self, identifier: str, rows: torch.Tensor) -> None:
        """Publishes an output that was planned. Of several ranks with the same rows only the first does."""
        planned = self._planned.pop(identifier, None)
        if planned is None or not _is_first_rank():
            return
        if rows.dim() != 2 or rows.dtype not in DTYPES or rows.shape[0] != planned.n_tokens:
            logger.warning("item %s: %s rows of %s are not published", identifier, tuple(rows.shape), rows.dtype)
            self._connector.counters.add("triptych_ec_publishes_total", outcome="refused")
            return
        item = EncodedItem(
            key=planned.key,
            fingerprint=planned.fingerprint,
            modality=planned.modality,
            n_tokens=rows.shape[0],
            hidden=rows.shape[1],
            dtype=dtype_name(rows.dtype),
            extent=planned.extent,
            checksum=bytes(32),
        )
        self.publisher.publish(Publication(item, rows_of(rows), planned.lease))

    def close(self) -> None:
        """Stores what is queued, within the deadline of an operation."""
        self.publisher.close(self._patience_s)


def _device() -> str:
    from vllm.platforms import current_platform

    device = current_platform.device_type
    # A device without a number is the first one, whichever this worker has.
    return f"{device}:{current_platform.current_device()}" if current_platform.is_cuda_alike() else device


def _is_first_rank() -> bool:
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return True
    return parallel_state.get_tensor_model_parallel_rank() == 0
