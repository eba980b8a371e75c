"""The connector under the real vLLM: its interface, and engines on the CPU that encode, load, wait and encode again."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
MODEL = ROOT / "tests/models/shapes-qwen2-vl"
GRID = [1, 8, 10]


def engine(role: str, settings: dict, steps: list, model: Path = MODEL, dtype: str = "bfloat16") -> dict:
    """What an engine in a process of its own answers."""
    command = [sys.executable, str(Path(__file__).with_name("engine.py")), str(model), role]
    command += [json.dumps(settings), json.dumps(steps), dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


def request(seed: int, *, pixels: bool) -> dict:
    return {"seed": seed, "pixels": pixels, "grid": GRID}


def the_overrides_take_what_vllm_calls_them_with() -> None:
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase

    from triptych_ec.vllm_connector import TriptychECConnector

    assert not TriptychECConnector.__abstractmethods__
    public = [name for name in vars(TriptychECConnector) if not name.startswith("_")]
    overridden = [name for name in public if callable(getattr(ECConnectorBase, name, None))]
    assert {"ensure_cache_available", "take_unavailable_requests", "start_save_caches"} <= set(overridden)
    for name in overridden:
        ours, base = (inspect.signature(getattr(c, name)) for c in (TriptychECConnector, ECConnectorBase))
        assert list(ours.parameters) == list(base.parameters), name


def the_factory_of_vllm_makes_it_by_its_module_path(tmp_path) -> None:
    from vllm.config import ECTransferConfig
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    from triptych_ec.vllm_connector import TriptychECConnector

    config = ECTransferConfig(
        ec_connector="TriptychECConnector",
        ec_connector_module_path="triptych_ec.vllm_connector",
        ec_role="ec_both",
        ec_connector_extra_config={"store": f"disk:{tmp_path}"},
    )
    assert ECConnectorFactory.get_connector_class(config) is TriptychECConnector


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """The answers of vLLM without a connector."""
    answers = engine("none", {}, [[request(seed, pixels=True)] for seed in (1, 2, 3)])["answers"]
    return [batch[0]["tokens"] for batch in answers]


def what_one_engine_encodes_another_answers_from_as_if_it_had_encoded_it(plain, tmp_path) -> None:
    settings = {"store": f"disk:{tmp_path}", "patience_s": 60}
    batches = [[1], [2, 3, 1]]
    encoded = engine("ec_producer", settings, [[request(seed, pixels=True) for seed in batch] for batch in batches])
    assert encoded["counters"]["triptych_ec_publishes_total stored"] == 3
    params = encoded["answers"][0][0]["params"]
    assert params["image-1"]["metadata"]["image_grid_thw"] == GRID

    first, second, third = stored_in_order(tmp_path)
    damaged = bytearray(second.read_bytes())
    damaged[-1] ^= 1
    second.write_bytes(damaged)
    third.rename(tmp_path / "aside")
    come_back = f"(sleep 3; mv {tmp_path}/aside {third}) >/dev/null 2>&1 &"
    steps = [
        [request(1, pixels=False)],
        [request(2, pixels=True)],
        {"shell": come_back},
        [request(3, pixels=False), request(1, pixels=False)],
    ]
    loaded = engine("ec_consumer", settings, steps)
    answers = [[a["tokens"] for a in batch] for batch in loaded["answers"]]
    assert answers == [[plain[0]], [plain[1]], [plain[2], plain[0]]]
    counters = loaded["counters"]
    assert first.is_file() and not second.is_file(), "the damaged object is hidden"
    assert counters["triptych_ec_loads_total damaged"] == 1
    assert counters["triptych_ec_loads_total missing"] > 1, "the request waited"
    assert counters["triptych_ec_local_encodes_total"] == 1
    assert "triptych_ec_unavailable_requests_total" not in counters


def an_engine_that_does_both_loads_and_publishes_and_ends_only_what_nobody_can_serve(plain, tmp_path) -> None:
    settings = {"store": f"disk:{tmp_path}", "patience_s": 1}
    steps = [
        [request(1, pixels=True)],
        {"shell": f"sleep 1; rm {tmp_path}/??/*.safetensors"},
        [request(1, pixels=True), request(9, pixels=False)],
        [request(2, pixels=True)],
    ]
    both = engine("ec_both", settings, steps)
    (one,), (again, nobody), (two,) = both["answers"]
    assert (one["tokens"], again["tokens"], two["tokens"]) == (plain[0], plain[0], plain[1])
    assert nobody["finish"] == "error"
    assert both["counters"]["triptych_ec_unavailable_requests_total"] == 1
    assert len(list(tmp_path.glob("??/*.safetensors"))) == 2, "a lost object is published again"
    assert not [p for p in (tmp_path / "leases").iterdir() if len(p.name) == 64]


def stored_in_order(directory: Path) -> list[Path]:
    """The objects of images 1, 2 and 3."""
    from triptych_ec import content_key, parse_head
    from triptych_ec.vllm_items import OPTIONS

    files = {path.stem: path for path in directory.glob("??/*.safetensors")}
    (encoder,) = {parse_head(path.read_bytes()).item.fingerprint for path in files.values()}
    keys = [content_key(encoder, "image", f"image-{seed}".encode(), options=OPTIONS) for seed in (1, 2, 3)]
    return [files[key.hex()] for key in keys]
