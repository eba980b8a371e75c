"""A short load by aiperf: text, and an image with text; every request is answered and none fails."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import report

N_REQUESTS = 8


def run_load(model: str, tokenizer: Path, *settings: str) -> dict:
    """The report of a run."""
    out = Path(tempfile.mkdtemp())
    words = [
        "--model", model, "--url", os.environ["OPENAI_BASE_URL"].removesuffix("/v1"), "--endpoint-type", "chat", "--streaming",
        "--request-count", str(N_REQUESTS), "--concurrency", "2", "--num-dataset-entries", "4", "--random-seed", "1",
        "--prompt-input-tokens-mean", "16", "--prompt-output-tokens-mean", "8", "--tokenizer", str(tokenizer),
        "--output-artifact-dir", str(out), "--ui", "none",
    ]
    program = Path(sys.executable).parent / "aiperf"
    subprocess.run(
        [program, "profile", *words, *settings], check=True, cwd=out, stdout=subprocess.DEVNULL, timeout=300,
    )
    return json.loads(next(out.rglob("profile_export_aiperf.json")).read_text())


def check(found: dict) -> None:
    assert found["request_count"]["avg"] == N_REQUESTS, found["request_count"]
    assert not found.get("error_summary"), found["error_summary"]
    assert found["time_to_first_token"]["avg"] > 0, found["time_to_first_token"]


def text() -> None:
    check(run_load("agent", report.ROOT / "target" / "clients" / "models" / "agent"))


def images() -> None:
    sizes = ("--image-width-mean", "112", "--image-height-mean", "112", "--image-format", "png")
    check(run_load("shapes", report.ROOT / "tests" / "models" / "shapes-qwen2-vl", *sizes))


report.run("aiperf", [text, images])
