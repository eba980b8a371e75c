"""A short load by guidellm: every request is answered and none fails. How fast says nothing: the weights are random."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import report

N_REQUESTS = 8


def run_settings(kind: str) -> dict:
    """Counts of requests by outcome."""
    target = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
    out = Path(tempfile.mkdtemp()) / "report.json"
    settings = {
        "--backend": f"kind=openai_http,target={target},model=agent",
        "--profile": kind,
        "--constraint": f"kind=max_requests,count={N_REQUESTS}",
        "--tokenizer": f"kind=hf_auto,model={report.ROOT / 'target' / 'clients' / 'models' / 'agent'}",
        "--data": "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "--output": f"kind=json,path={out}",
    }
    words = [word for pair in settings.items() for word in pair]
    program = Path(sys.executable).parent / "guidellm"
    subprocess.run(
        [program, "run", *words, "--disable-console"], check=True, cwd=out.parent,
        env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdout=subprocess.DEVNULL,
    )
    requests = json.loads(out.read_text())["benchmarks"][0]["requests"]
    return {outcome: len(found) for outcome, found in requests.items() if isinstance(found, list)}


def one_after_the_other() -> None:
    counts = run_settings("kind=synchronous")
    assert counts["successful"] == N_REQUESTS and counts["errored"] == 0, counts


def four_at_once() -> None:
    counts = run_settings("kind=concurrent,streams=4")
    assert counts["successful"] >= N_REQUESTS - 4 and counts["errored"] == 0, counts


report.run("guidellm", [one_after_the_other, four_at_once])
