"""The two halves of the connector, driven as vLLM's scheduler and model runner drive them, without an engine."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes import until_true
from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.v1.outputs import ECConnectorOutput

from triptych_ec import SettingError
from triptych_ec.extents import Grid, Windows
from triptych_ec.model import model_fingerprint
from triptych_ec.stores import Lease
from triptych_ec.tower import Tower
from triptych_ec.vllm_connector import TriptychECConnector, extent_of

DTYPE = torch.bfloat16
MODEL = Path(__file__).parents[4] / "tests/golden/qwen2_vl_two_images/model"


class Instance:
    """A vLLM instance's two connectors over a directory."""

    def __init__(self, directory, role: str, n_levels: int = 0, **settings) -> None:
        extra = {"store": f"disk:{directory}", "patience_s": 20, "fingerprint": "w", **settings}
        transfer = ECTransferConfig(
            ec_connector="TriptychECConnector",
            ec_connector_module_path="triptych_ec.vllm_connector",
            ec_role=role,
            ec_connector_extra_config=extra,
        )
        vision = SimpleNamespace(deepstack_visual_indexes=list(range(n_levels)))
        model = SimpleNamespace(dtype=DTYPE, model=str(MODEL), quantization=None, hf_overrides={})
        model.multimodal_config = SimpleNamespace(mm_processor_kwargs=None, media_io_kwargs={})
        model.hf_config = SimpleNamespace(vision_config=vision)
        model.get_hidden_size = lambda: 8 // (1 + n_levels)
        config = SimpleNamespace(ec_transfer_config=transfer, model_config=model)
        self.scheduler = TriptychECConnector(config, ECConnectorRole.SCHEDULER)
        self.worker = TriptychECConnector(config, ECConnectorRole.WORKER)
        # What a model declares, as Qwen2-VL does.
        self.scheduler._scheduler._inputs._resolver._cache["image"] = {"image_grid_thw"}
        self.cache: dict[str, torch.Tensor] = {}

    def wait(self, request) -> bool:
        """Until the request may be scheduled, or is to be ended (false)."""
        state = []

        def is_settled() -> bool:
            is_ready = self.scheduler.ensure_cache_available(request, 0)
            state.append(is_ready)
            return is_ready or bool(self.scheduler.take_unavailable_requests())

        until_true(is_settled)
        return state[-1]

    def step(self, request, encode, freed: tuple[str, ...] = ()) -> list[str]:
        """A step that schedules the request; the identifiers that it encoded."""
        encoded = []
        assert self.wait(request)
        for i, feature in enumerate(request.mm_features):
            if feature.identifier not in self.cache:
                if not self.scheduler.has_cache_item(feature.identifier):
                    encoded.append(feature.identifier)
                self.scheduler.update_state_after_alloc(request, i)
        output = SimpleNamespace(num_scheduled_tokens={request.request_id: 9}, free_encoder_mm_hashes=list(freed))
        # As between processes.
        meta = pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(output)))
        for name in freed:
            self.cache.pop(name, None)
        self.worker.bind_connector_metadata(meta)
        if self.worker.is_producer:
            self.worker.start_save_caches(encoder_cache=self.cache)
        if self.worker.is_consumer:
            self.worker.start_load_caches(self.cache)
        for name in encoded:
            self.cache[name] = encode(name)
            self.worker.save_caches(self.cache, name)
        assert all(f.identifier in self.cache for f in request.mm_features)
        self.flush()
        self.worker.clear_connector_metadata()
        return encoded

    def flush(self) -> None:
        self.worker._worker.publisher.flush(10)
        report = self.worker.build_connector_worker_meta()
        if report is not None:
            self.scheduler.update_connector_output(ECConnectorOutput(ec_connector_worker_meta=report))

    def n(self, name: str, outcome: str = "") -> int:
        return self.scheduler.counters.get(f"triptych_ec_{name}_total", outcome)


def request(name: str, *items: str, n_tokens: int = 3, has_input: bool = True, grid: tuple[int, ...] = ()):
    """A request with images of so many rows, and perhaps of so many patches."""
    features = []
    for i, item in enumerate(items):
        position = SimpleNamespace(offset=10 * i, length=n_tokens, get_num_embeds=lambda: n_tokens)
        data = {"pixel_values": SimpleNamespace(data=torch.zeros(1))} if has_input else {}
        if grid:
            data["image_grid_thw"] = SimpleNamespace(data=torch.tensor([grid]))
        features.append(SimpleNamespace(identifier=item, modality="image", mm_position=position, data=data))
    return SimpleNamespace(request_id=name, mm_features=features)


def rows(name: str, n_tokens: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(n_tokens, 8, generator=generator).to(DTYPE)


def what_a_producer_publishes_a_consumer_loads_bit_for_bit(tmp_path) -> None:
    producer, consumer = Instance(tmp_path, "ec_producer"), Instance(tmp_path, "ec_consumer")
    assert producer.step(request("a", "x", "y"), rows) == ["x", "y"]
    assert producer.n("publishes", "stored") == 2
    assert consumer.step(request("b", "y", "x", has_input=False), rows) == []
    assert all(torch.equal(consumer.cache[name], rows(name)) for name in "xy")
    assert not [p for p in (tmp_path / "leases").iterdir() if len(p.name) == 64], "leases are released"
    other = Instance(tmp_path, "ec_consumer", fingerprint="other weights", patience_s=0.1)
    assert not other.wait(request("c", "x", has_input=False))


def an_item_is_encoded_by_one_producer_and_loaded_by_the_other(tmp_path) -> None:
    first, later = Instance(tmp_path, "ec_producer"), Instance(tmp_path, "ec_producer")
    assert first.wait(request("a", "x"))
    for _ in range(50):
        assert not later.scheduler.ensure_cache_available(request("b", "x"), 0), "the first has the lease"
    assert first.step(request("a", "x"), rows) == ["x"]
    assert later.step(request("b", "x"), rows) == []
    assert torch.equal(later.cache["x"], rows("x"))


def the_lease_of_a_request_that_was_ended_goes_to_the_next_producer(tmp_path) -> None:
    first, later = Instance(tmp_path, "ec_producer"), Instance(tmp_path, "ec_producer")
    assert first.wait(request("a", "x"))
    first.scheduler._scheduler.finished(request("a"))
    assert later.step(request("b", "x"), rows) == ["x"]


def an_output_that_the_store_lost_is_published_again_from_the_engines_cache(tmp_path) -> None:
    producer = Instance(tmp_path, "ec_producer")
    producer.step(request("a", "x"), rows)
    producer.scheduler._scheduler.finished(request("a"))
    producer.scheduler._scheduler.loader.forget("a")
    (file,) = tmp_path.glob("??/*")
    file.unlink()
    assert producer.step(request("b", "x"), rows) == []
    assert file.is_file() and producer.n("publishes", "stored") == 2


def rows_of_another_shape_are_not_loaded_under_a_reused_identifier(tmp_path) -> None:
    both = Instance(tmp_path, "ec_both")
    both.step(request("a", "x"), rows)
    consumer = Instance(tmp_path, "ec_consumer", patience_s=0.3)
    assert consumer.step(request("b", "x", has_input=False), rows) == []
    assert consumer.wait(request("c", "x", n_tokens=5)) is True
    assert not consumer.scheduler.has_cache_item("x"), "the request would get 3 rows for 5"
    assert not consumer.wait(request("d", "x", n_tokens=5, has_input=False))
    assert consumer.wait(request("e", "x", has_input=False)) and consumer.scheduler.has_cache_item("x")


def an_evicted_item_is_loaded_again_and_a_finished_request_holds_nothing(tmp_path) -> None:
    Instance(tmp_path, "ec_producer").step(request("a", "x"), rows)
    consumer = Instance(tmp_path, "ec_consumer")
    asked = request("b", "x", has_input=False)
    consumer.step(asked, rows)
    assert consumer.scheduler.ensure_cache_available(asked, 100), "all of it is computed"
    half = consumer.scheduler._scheduler
    assert not half.loader._order and half._needed == {"b": {}}
    assert consumer.scheduler.request_finished(asked) == (False, None) and half._needed == {}
    consumer.cache.clear()
    assert consumer.step(request("c", "x", has_input=False), rows, freed=("x",)) == []
    assert torch.equal(consumer.cache["x"], rows("x"))


def rows_that_objects_cannot_hold_are_counted_and_not_published(tmp_path) -> None:
    producer = Instance(tmp_path, "ec_producer")
    producer.step(request("a", "x"), lambda name: rows(name, 4))
    assert producer.n("publishes", "refused") == 1 and not list(tmp_path.glob("??/*"))


def the_extent_is_the_models_grid_where_it_has_one() -> None:
    grid = SimpleNamespace(data=torch.tensor([1, 8, 10]))
    assert extent_of(SimpleNamespace(data={"image_grid_thw": grid}, modality="image"), 20) == Grid(1, 8, 10)
    assert extent_of(SimpleNamespace(data=None, modality="image"), 20) == Grid(1, 1, 20)
    assert extent_of(SimpleNamespace(data={}, modality="audio"), 20) == Windows(1, 0)


def what_is_counted_is_in_vllms_metrics(tmp_path) -> None:
    from prometheus_client import Counter, Gauge, Histogram, generate_latest

    producer = Instance(tmp_path, "ec_producer")
    producer.step(request("a", "x"), rows)
    stats = producer.scheduler.get_ec_connector_stats()
    assert not stats.is_empty() and producer.scheduler.get_ec_connector_stats() is None
    types = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    config = producer.scheduler._vllm_config
    metrics = TriptychECConnector.build_prom_metrics(config, types, ["engine"], {0: ["0"]})
    metrics.observe(TriptychECConnector.build_ec_connector_stats(stats.data).data, 0)
    text = generate_latest().decode()
    assert 'triptych_ec_publishes_total{engine="0",outcome="stored"} 1.0' in text
    assert 'triptych_ec_local_encodes_total{engine="0"} 1.0' in text


def an_encoder_of_the_proxy_tells_what_it_publishes_before_its_first_item(tmp_path) -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

    def told(role: str, **settings) -> str:
        registry = CollectorRegistry()
        types = {cls: partial(cls, registry=registry) for cls in (Counter, Gauge, Histogram)}
        config = Instance(tmp_path, role, **settings).scheduler._vllm_config
        TriptychECConnector.build_prom_metrics(config, types, ["engine"], {0: ["0"]})
        lines = generate_latest(registry).decode().splitlines()
        return "".join(line for line in lines if line.startswith("triptych_ec_encoder_info"))

    tower = Tower.read(MODEL)
    line = told("ec_producer", accept_proxy_keys=True)
    digests = {"fingerprint": tower.rows_of_vllm("image", "BF16"), "configuration": tower.configuration}
    digests |= {"processor": tower.processor, "weights": tower.weights}
    assert all(f'{name}="{digest.hex()}"' in line for name, digest in digests.items()) and line.endswith(" 1.0"), line
    assert not told("ec_producer") and not told("ec_both", accept_proxy_keys=True)


def the_processor_of_a_server_is_in_its_fingerprint_wherever_it_runs(tmp_path) -> None:
    def named(**kwargs) -> bytes:
        config = Instance(tmp_path, "ec_producer").scheduler._vllm_config
        config.model_config.multimodal_config.mm_processor_kwargs = kwargs or None
        return model_fingerprint(config, "w")

    assert named() == named(device="cuda") != named(max_pixels=7)


@pytest.mark.parametrize(
    "name, value",
    [("quantization", "fp8"), ("hf_overrides", {"vision_config": {}}), ("media_io_kwargs", {"image": {"mode": "L"}})],
)
def an_encoder_whose_rows_are_not_the_checkpoints_does_not_publish_for_the_proxy(tmp_path, name: str, value) -> None:
    config = Instance(tmp_path, "ec_producer", accept_proxy_keys=True).scheduler._vllm_config
    place = config.model_config.multimodal_config if name == "media_io_kwargs" else config.model_config
    setattr(place, name, value)
    with pytest.raises(SettingError, match=f"`accept_proxy_keys` of an encoder: `{name}` is"):
        TriptychECConnector(config, ECConnectorRole.SCHEDULER)
    setattr(place, name, None)
    config.model_config.model = str(tmp_path)
    with pytest.raises(SettingError, match="config.json cannot be read"):
        TriptychECConnector(config, ECConnectorRole.SCHEDULER)
    config.ec_transfer_config.ec_role = "ec_consumer"
    TriptychECConnector(config, ECConnectorRole.SCHEDULER)


def a_setting_that_is_wrong_ends_the_start_with_its_name(tmp_path) -> None:
    with pytest.raises(SettingError, match="`patience` is no setting"):
        Instance(tmp_path, "ec_both", patience=3)


def the_lease_goes_from_the_scheduler_to_the_worker(tmp_path) -> None:
    producer = Instance(tmp_path, "ec_producer")
    asked = request("a", "x")
    assert producer.wait(asked)
    output = SimpleNamespace(num_scheduled_tokens={"a": 9}, free_encoder_mm_hashes=[])
    (planned,) = producer.scheduler.build_connector_meta(output).planned.values()
    assert isinstance(planned.lease, Lease)
    assert producer.scheduler.ensure_cache_available(asked, 0), "a later step does not ask again"
    assert producer.scheduler.build_connector_meta(output).planned == {}
