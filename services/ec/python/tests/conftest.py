"""The other end of every format: Triptych's own binaries, and a real Redis."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from triptych_ec.stores import Store, open_store

TARGET = Path(os.environ.get("TRIPTYCH_TARGET", Path(__file__).parents[4] / "target")) / "debug"


def binary(path: str) -> str:
    """A binary of the workspace. A test that needs it fails without it."""
    file = TARGET / path
    assert file.is_file(), f"{file} is not built; run the tests with `cargo xtask vllm`"
    return str(file)


def rust(*args: object) -> str:
    """What the Rust end prints."""
    command = [binary("examples/ec_object"), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def rust_fails(*args: object) -> str:
    """What the Rust end says of an object that it refuses."""
    command = [binary("examples/ec_object"), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    return done.stderr


class Server:
    """A process that listens on a port of this host."""

    def __init__(self, start, setting: str) -> None:
        self.port = free_port()
        self.setting = setting.format(self.port)
        self._start = start
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._start(self.port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError(f"{self.setting} does not start")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Ends it and its children in their order."""
        self._process.terminate()
        self._process.wait(60)


def free_port() -> int:
    """A free port below those that the system gives to whoever asks for any, so that nobody takes it before its server does."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def start_redis(port: int) -> list[str]:
    program = shutil.which("redis-server")
    assert program, "redis-server is not installed"
    return [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]


def start_store(port: int) -> list[str]:
    return [binary("triptych"), "store", "--grpc", f"127.0.0.1:{port}"]


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Server]:
    server = Server(start_redis, "redis://127.0.0.1:{}")
    yield server
    server.kill()


@pytest.fixture(scope="session")
def store_server() -> Iterator[Server]:
    server = Server(start_store, "grpc://127.0.0.1:{}")
    yield server
    server.kill()


@pytest.fixture(params=["disk", "redis", "grpc"])
def setting(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The setting of each kind of store."""
    if request.param == "disk":
        return f"disk:{tmp_path}/ec"
    return request.getfixturevalue("redis_server" if request.param == "redis" else "store_server").setting


@pytest.fixture
def store(setting: str) -> Iterator[Store]:
    store = open_store(setting)
    yield store
    store.close()
