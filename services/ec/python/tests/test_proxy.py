"""Triptych's proxy in front of the real vLLM: the same answers as vLLM gives by itself, with and without our encoders."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import free_port

ROOT = Path(__file__).parents[4]
MODEL = ROOT / "tests/models/shapes-qwen2-vl"
BINARY = ROOT / "target/debug/triptych"
CONNECTOR = {"ec_connector": "TriptychECConnector", "ec_connector_module_path": "triptych_ec.vllm_connector"}


@contextlib.contextmanager
def process(command: list[str], health: str, log: Path) -> Iterator[None]:
    """A program that answers 200 under `health` while the context lasts."""
    settings = {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with log.open("w") as out:
        group = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | settings, start_new_session=True
        )
    try:
        until = time.monotonic() + 550
        while not answers(health):
            assert group.poll() is None and time.monotonic() < until, log.read_text()[-4000:]
            time.sleep(0.2)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group.pid, signal.SIGKILL)
        group.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def vllm(port: int, log: Path, *more: str) -> contextlib.AbstractContextManager[None]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL)]
    command += ["--served-model-name", "vl"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "512"]
    command += ["--max-num-seqs", "4", "--enforce-eager", "--skip-mm-profiling", *more]
    return process(command, f"http://127.0.0.1:{port}/health", log)


def proxy(port: int, log: Path, *more: str) -> contextlib.AbstractContextManager[None]:
    command = [str(BINARY), "proxy", "--http", f"127.0.0.1:{port}", "--grpc", f"127.0.0.1:{free_port()}", *more]
    return process(command, f"http://127.0.0.1:{port}/readyz", log)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Iterator[int]:
    """The port of a vLLM without a connector."""
    port = free_port()
    with vllm(port, tmp_path_factory.mktemp("plain") / "log"):
        yield port


def stop_engines() -> list[psutil.Process]:
    """Stops the engines of all vLLM servers of this process, not their API servers."""
    engines = [one for one in psutil.Process().children(recursive=True) if "EngineCore" in one.name()]
    assert engines, "vLLM has no engine process"
    for engine in engines:
        engine.suspend()
    return engines


def post(port: int, path: str, body: dict) -> dict:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        pytest.fail(f"{error.code}: {error.read().decode()}")


def chat(seed: int | None, question: str = "what is this?") -> dict:
    """A question about the random image of a seed, if there is one."""
    content: list[dict] = [{"type": "text", "text": question}]
    if seed is not None:
        url = f"data:image/png;base64,{base64.b64encode(png(seed)).decode()}"
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    messages = [{"role": "user", "content": content}]
    return {"model": "vl", "messages": messages, "temperature": 0, "max_tokens": 12, "logprobs": True}


def png(seed: int, width: int = 84, height: int = 56) -> bytes:
    """A PNG file of random pixels."""
    noise = random.Random(seed)
    rows = b"".join(b"\0" + noise.randbytes(3 * width) for _ in range(height))

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(name, data) for name, data in chunks)


def said(port: int, body: dict) -> tuple:
    """Text, reason of the end, tokens of prompt and answer, and texts of the tokens."""
    answer = post(port, "/v1/chat/completions", body)
    (choice,), usage = answer["choices"], answer["usage"]
    tokens = [token["token"] for token in choice["logprobs"]["content"]]
    counts = (usage["prompt_tokens"], usage["completion_tokens"])
    return choice["message"]["content"], choice["finish_reason"], counts, tokens


def metric(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith(name + "{")]
    return float(line.split()[-1])


def the_proxy_answers_as_vllm_does_and_a_client_that_leaves_ends_its_request(plain, tmp_path) -> None:
    port = free_port()
    with proxy(port, tmp_path / "proxy", "--pd", f"vllm+http://127.0.0.1:{plain}"):
        for seed in (None, 1, 2, 1):
            assert said(port, chat(seed)) == said(plain, chat(seed)), seed
        one = post(port, "/v1/completions", {"model": "vl", "prompt": "a b", "temperature": 0, "max_tokens": 6})
        own = post(plain, "/v1/completions", {"model": "vl", "prompt": "a b", "temperature": 0, "max_tokens": 6})
        assert one["choices"][0]["text"] == own["choices"][0]["text"]
        long = chat(None) | {"stream": True, "ignore_eos": True, "max_tokens": 450}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(long).encode(),
            {"content-type": "application/json"},
        )
        before = metric(plain, "vllm:generation_tokens_total")
        with urllib.request.urlopen(request, timeout=300) as response:
            response.readline()
            engines = stop_engines()
        # The server learns that nobody reads while its engine stands still, however busy the machine is.
        time.sleep(2)
        for engine in engines:
            engine.resume()
        until = time.monotonic() + 60
        while metric(plain, "vllm:num_requests_running") and time.monotonic() < until:
            time.sleep(0.05)
        assert metric(plain, "vllm:generation_tokens_total") - before < 400, "vLLM went on to the end"


def the_rows_of_our_encoder_give_the_answers_of_vllm_itself(plain, tmp_path) -> None:
    store = f"disk:{tmp_path / 'store'}"
    (ours, consumer, port) = (free_port(), free_port(), free_port())
    extra = {"store": store, "accept_proxy_keys": True, "patience_s": 5}
    transfer = json.dumps(CONNECTOR | {"ec_role": "ec_consumer", "ec_connector_extra_config": extra})
    admin = free_port()
    encoder = [str(BINARY), "encoder", "--model", f"vl={MODEL}", "--grpc", f"127.0.0.1:{ours}", "--ec", store]
    encoder += ["--admin", f"127.0.0.1:{admin}"]
    workers = ["--encoder", f"127.0.0.1:{ours}", "--pd", f"vllm+http://127.0.0.1:{consumer}", "--ec", store]
    with contextlib.ExitStack() as stack:
        stack.enter_context(process(encoder, f"http://127.0.0.1:{admin}/readyz", tmp_path / "encoder"))
        more = ["--enable-mm-embeds", "--no-enable-prefix-caching", "--ec-transfer-config", transfer]
        stack.enter_context(vllm(consumer, tmp_path / "consumer", *more))
        stack.enter_context(proxy(port, tmp_path / "proxy", *workers))
        for seed in (None, 1, 2):
            assert said(port, chat(seed)) == said(plain, chat(seed)), seed
        assert "by metadata" in (tmp_path / "proxy").read_text()
        # An object that is lost after it was published: vLLM waits for it in vain, and it is encoded again.
        there = stored(tmp_path)
        assert len(there) == 2
        image = chat(3)["messages"][0]["content"][:1]
        post(port, "/v1/embeddings", {"model": "vl", "messages": [{"role": "user", "content": image}]})
        (lost,) = stored(tmp_path) - there
        lost.unlink()
        assert said(port, chat(3)) == said(plain, chat(3))
        assert lost.is_file()
        assert "encoding again" in (tmp_path / "proxy").read_text()


def stored(directory: Path) -> set[Path]:
    return set((directory / "store").glob("??/*.safetensors"))


def vllms_encoder_feeds_prefill_and_decode_of_ours_with_the_answers_of_our_own_encoder(tmp_path) -> None:
    store = f"disk:{tmp_path / 'store'}"
    transfer = json.dumps(
        CONNECTOR | {"ec_role": "ec_producer", "ec_connector_extra_config": {"store": store, "accept_proxy_keys": True}}
    )
    ports = {name: free_port() for name in ("vllm", "encoder", "pd", "encoder-admin", "pd-admin", "apart", "ours")}

    def ours(role: str) -> contextlib.AbstractContextManager[None]:
        command = [str(BINARY), role, "--model", f"vl={MODEL}", "--grpc", f"127.0.0.1:{ports[role]}", "--ec", store]
        command += ["--admin", f"127.0.0.1:{ports[role + '-admin']}", "--threads", "1"]
        return process(command, f"http://127.0.0.1:{ports[role + '-admin']}/readyz", tmp_path / role)

    def before(name: str, encoder: str) -> contextlib.AbstractContextManager[None]:
        workers = ["--encoder", encoder, "--pd", f"127.0.0.1:{ports['pd']}", "--ec", store]
        return proxy(ports[name], tmp_path / name, *workers)

    with contextlib.ExitStack() as stack:
        stack.enter_context(ours("pd"))
        stack.enter_context(ours("encoder"))
        dead = stack.enter_context(contextlib.ExitStack())
        dead.enter_context(vllm(ports["vllm"], tmp_path / "vllm", "--ec-transfer-config", transfer))
        stack.enter_context(before("apart", f"vllm+http://127.0.0.1:{ports['vllm']}"))
        stack.enter_context(before("ours", f"127.0.0.1:{ports['encoder']}"))
        for seed in (None, 1, 2):
            assert said(ports["apart"], chat(seed)) == said(ports["ours"], chat(seed)), seed
        assert len(stored(tmp_path)) == 4, "under keys of their own"
        # Both caches of vLLM have the item; the store lost its object twice.
        there = stored(tmp_path)
        image = chat(3)["messages"][0]["content"][:1]
        for _ in range(2):
            post(ports["apart"], "/v1/embeddings", {"model": "vl", "messages": [{"role": "user", "content": image}]})
            (lost,) = stored(tmp_path) - there
            lost.unlink()
        assert said(ports["apart"], chat(3)) == said(ports["ours"], chat(3))
        assert lost.is_file()
        # The encoder dies; what it published is still answered from.
        dead.close()
        assert said(ports["apart"], chat(1)) == said(ports["ours"], chat(1))
