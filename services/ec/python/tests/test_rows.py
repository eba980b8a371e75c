"""The rows of Triptych's encoders are those of vLLM's own towers for the same bytes, and answers from either are the same."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import Server, binary
from test_vllm import engine
from towers import GOLDEN, MODELS

from triptych_ec import decode, open_store, proxy_identifier
from triptych_ec.keys import content_key
from triptych_ec.loading import LoadedObject
from triptych_ec.tensors import tensor_of
from triptych_ec.vllm_items import OPTIONS

TOLERANCES = {"float32": 2e-5, "bfloat16": 0.06}
"""Largest difference of rows of a type, over their root mean square: some roundings of the largest values in each layer."""

CASES = [
    pytest.param("qwen2-vl", "float32", [], id="qwen2-vl-f32"),
    pytest.param("qwen2.5-vl", "float32", [], id="qwen2.5-vl-f32"),
    pytest.param("qwen3-vl", "float32", [], id="qwen3-vl-f32"),
    pytest.param("qwen3-vl", "bfloat16", [], id="qwen3-vl-bf16"),
    pytest.param("qwen2-vl", "bfloat16", ["--ec-rows", "int8"], id="qwen2-vl-int8"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """The checkpoints, by name."""
    folder = tmp_path_factory.mktemp("models")
    for name in MODELS:
        script = str(Path(__file__).with_name("towers.py"))
        subprocess.run([sys.executable, script, name, str(folder / name)], check=True, capture_output=True)
    return {name: folder / name for name in MODELS}


@pytest.mark.parametrize("name, dtype, flags", CASES)
def rows_of_our_encoder_are_those_of_vllms_tower(models, tmp_path, name: str, dtype: str, flags: list[str]) -> None:
    images = sorted((GOLDEN / MODELS[name][0] / "images").glob("*.png"))
    store = open_store(f"disk:{tmp_path}/ec")
    with cluster(models[name], tmp_path / "ec", dtype, flags) as url:
        keys = [encoded(url, image, tmp_path / "ec") for image in images]
    assert len(set(keys)) == len(images)
    heads = [store.head(key) for key in keys]

    steps = [[{"seed": i, "image": str(image)}] for i, image in enumerate(images)]
    for key, head in zip(keys, heads):
        grid = [head.extent.t, head.extent.h, head.extent.w]
        steps.append([{"seed": 0, "name": proxy_identifier(key), "pixels": False, "grid": grid}])
    settings = {"store": f"disk:{tmp_path}/ec", "patience_s": 5, "accept_proxy_keys": True, "fingerprint": "w"}
    done = engine("ec_both", settings, steps, models[name], dtype)
    answers = [batch[0]["tokens"] for batch in done["answers"]]
    assert answers[: len(images)] == answers[len(images) :] or dtype == "bfloat16"
    assert all(batch[0]["finish"] == "length" for batch in done["answers"])
    assert done["counters"]["triptych_ec_loads_total loaded"] == len(images)

    others = {path.stem for path in (tmp_path / "ec").glob("??/*.safetensors")} - {key.hex() for key in keys}
    fingerprint = store.head(bytes.fromhex(others.pop())).fingerprint
    for i, key in enumerate(keys):
        theirs = content_key(fingerprint, "image", f"image-{i}".encode(), options=OPTIONS)
        assert_close(rows(store, key), rows(store, theirs), 2 * TOLERANCES[dtype] if flags else TOLERANCES[dtype])


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    """Rows of the same shape, whose values differ by no more than the tolerance."""
    assert ours.shape == theirs.shape
    scale = theirs.square().mean().sqrt()
    worst = ((ours - theirs).abs().max() / scale).item()
    print(f"{tuple(ours.shape)}: {worst:.2e}")
    assert scale > 0.1 and worst <= tolerance, worst


def rows(store, key: bytes) -> torch.Tensor:
    """The rows of an object, in f32."""
    data = store.get(key)
    item, payload = decode(data, key)
    return tensor_of(LoadedObject(item, data, len(data) - len(payload)), "cpu", torch.float32)


@contextmanager
def cluster(model: Path, directory: Path, dtype: str, flags: list[str]) -> Iterator[str]:
    """The address of a Triptych cluster that keeps encoder outputs in a directory."""
    precision = {"float32": "f32", "bfloat16": "bf16"}[dtype]

    def start(port: int) -> list[str]:
        command = [binary("triptych"), "up", "--model", f"m={model}", "--http", f"127.0.0.1:{port}"]
        command += ["--grpc", "127.0.0.1:0", "--ec", f"disk:{directory}", "--precision", precision, "--threads", "1"]
        return [*command, "--packed-mib", "0", *flags]

    server = Server(start, "http://127.0.0.1:{}")
    try:
        yield server.setting
    finally:
        server.stop()


def encoded(url: str, image: Path, directory: Path) -> bytes:
    """The key of the object that the cluster's encoder makes of an image."""
    before = set(directory.glob("??/*.safetensors"))
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + b64encode(image.read_bytes()).decode()}}
    body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
    until = time.monotonic() + 120
    while True:
        headers = {"content-type": "application/json"}
        asked = urllib.request.Request(f"{url}/v1/encoder_outputs", json.dumps(body).encode(), headers)
        try:
            urllib.request.urlopen(asked, timeout=60).read()
            break
        except urllib.error.HTTPError as e:
            assert e.code == 503 and time.monotonic() < until, e.read()
            time.sleep(0.2)
    while not (new := set(directory.glob("??/*.safetensors")) - before):
        assert time.monotonic() < until, "no object is stored"
        time.sleep(0.05)
    (file,) = new
    return bytes.fromhex(file.stem)
