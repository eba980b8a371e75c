"""Checks of `buf curl`, which reads the schema from the server's reflection."""

import json
import os
import subprocess
import sys
from pathlib import Path

import report

BUF = Path(sys.executable).parent / "buf"
SERVICE = f"http://{os.environ['TRIPTYCH_GRPC']}/triptych.v1.Triptych"


def curl(method: str, message: dict) -> list[dict]:
    """The messages that a method answers with."""
    call = [BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--data", json.dumps(message)]
    done = subprocess.run([*call, f"{SERVICE}/{method}"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    decoder, rest, found = json.JSONDecoder(), done.stdout.strip(), []
    while rest:
        value, end = decoder.raw_decode(rest)
        found.append(value)
        rest = rest[end:].strip()
    return found


def list_models() -> None:
    (listed,) = curl("ListModels", {})
    assert "agent" in [model["name"] for model in listed["models"]], listed


def generate() -> None:
    chat = {"messages": [{"role": "ROLE_USER", "parts": [{"text": "Is it cold?"}]}]}
    found = curl("Generate", {"model": "agent", "prompt": {"chat": chat}, "sampling": {"maxTokens": 4}})
    assert found[-1]["summary"]["usage"]["completionTokens"] == 4, found


def errors_name_the_field() -> None:
    try:
        curl("Generate", {"model": "agent", "sampling": {"temperature": 9}})
    except AssertionError as e:
        assert "invalid_argument" in str(e), e
    else:
        raise AssertionError("no error")


report.run("buf-bin", [list_models, generate, errors_name_the_field], "buf curl")
