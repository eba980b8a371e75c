"""The same load by vLLM's `bench serve`, aiperf, guidellm and `triptych bench`: do they measure the same?

Requests of equal lengths, at a constant rate, to a cluster whose workers sleep as long as measured curves say: so that the server is
the same for each of them, and slow beside their own work. Ours runs before and after each other one, so that a machine that grows
slower hits both; how far its two runs are from each other is printed too. A machine with other work on it says nothing. vLLM's client
needs an environment with vLLM, whose interpreter TRIPTYCH_VLLM_PYTHON names.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import report

#: Requests, requests a second, prompt and output tokens.
N_REQUESTS, RATE, PROMPT, OUTPUT = 100, 4, 512, 32
#: Largest difference to ours.
ALLOWED = 0.05

MODEL = "timed"
TOKENIZER = report.ROOT / "benches" / "models" / "qwen2-vl-timed"
URL = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")


def run(words: list, out: Path) -> None:
    subprocess.run(
        [str(word) for word in words], check=True, cwd=out, env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL, timeout=300,
    )


#: vLLM's benchmark without its command line, which needs the metadata of a package of that name.
VLLM_BENCH = """
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""


def program(variable: str, name: str) -> Path:
    """A program of the environment that a variable names by its interpreter."""
    python = os.environ.get(variable)
    assert python, f"{variable} names no environment with {name}"
    return Path(python).parent / name


def ours() -> dict:
    """Our figures: p50 of TTFT and TPOT in milliseconds, served requests a second."""
    out = Path(tempfile.mkdtemp())
    run(
        [os.environ["TRIPTYCH_BINARY"], "bench", "run", "--url", URL, "--model", MODEL, "--rates", RATE,
         "--workload", f"text:text={PROMPT},output={OUTPUT}", "--arrivals", "constant", "--requests", N_REQUESTS,
         "--seeds", 1, "--slo", "ttft=60s,tpot=10s", "--warm-up", "2s", "--json", out / "ours.json"], out,
    )
    result = json.loads((out / "ours.json").read_text())["rates"][0]["runs"][0]
    return {
        "TTFT": result["ttft_ms"]["p50"], "TPOT": result["tpot_ms"]["p50"],
        "rate": result["throughput"]["requests_per_s"],
    }


def compare(client: str, theirs) -> None:
    """Holds what a client measures against the mean of ours before and after it, and prints both."""
    before, figures, after = ours(), theirs(), ours()
    mean = {name: (before[name] + after[name]) / 2 for name in figures}
    lines = {
        client: figures, "triptych bench": mean, "triptych bench, before": before, "triptych bench, after": after,
    }
    for name, values in lines.items():
        shown = ", ".join(f"{what} {value:.2f} ({value / mean[what] - 1:+.1%})" for what, value in values.items())
        print(f"{name}: {shown}", file=sys.stderr)
    far = {name: f"{value / mean[name] - 1:+.1%}" for name, value in figures.items()
           if abs(value / mean[name] - 1) > ALLOWED}
    assert not far, f"further from ours than {ALLOWED:.0%}: {far}"


def vllm_figures() -> dict:
    out = Path(tempfile.mkdtemp())
    python = os.environ.get("TRIPTYCH_VLLM_PYTHON")
    assert python, "TRIPTYCH_VLLM_PYTHON names no environment with vLLM"
    # With so large a shape the gaps between requests are all the same.
    run(
        [python, "-c", VLLM_BENCH, "--backend", "openai-chat", "--base-url", URL,
         "--endpoint", "/v1/chat/completions", "--model", MODEL, "--tokenizer", TOKENIZER, "--dataset-name", "random",
         "--random-input-len", PROMPT, "--random-output-len", OUTPUT, "--num-prompts", N_REQUESTS, "--request-rate", RATE,
         "--burstiness", 1e6, "--ignore-eos", "--percentile-metrics", "ttft,tpot", "--save-result", "--result-dir", out,
         "--result-filename", "vllm.json", "--disable-tqdm"], out,
    )
    result = json.loads((out / "vllm.json").read_text())
    assert result["completed"] == N_REQUESTS, result["completed"]
    return {"TTFT": result["median_ttft_ms"], "TPOT": result["median_tpot_ms"], "rate": result["request_throughput"]}


def guidellm_figures() -> dict:
    out = Path(tempfile.mkdtemp())
    settings = {
        "--backend": f"kind=openai_http,target={URL},model={MODEL}",
        "--profile": f"kind=constant,rate={RATE}",
        "--constraint": f"kind=max_requests,count={N_REQUESTS}",
        "--tokenizer": f"kind=hf_auto,model={TOKENIZER}",
        "--data": f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
        "--output": f"kind=json,path={out / 'report.json'}",
    }
    words = [word for pair in settings.items() for word in pair]
    run([program("TRIPTYCH_LOAD_PYTHON", "guidellm"), "run", *words, "--disable-console"], out)
    metrics = json.loads((out / "report.json").read_text())["benchmarks"][0]["metrics"]
    return {
        "TTFT": metrics["time_to_first_token_ms"]["successful"]["median"],
        "TPOT": metrics["inter_token_latency_ms"]["successful"]["median"],
        "rate": metrics["requests_per_second"]["successful"]["mean"],
    }


def aiperf_figures() -> dict:
    out = Path(tempfile.mkdtemp())
    run(
        [program("TRIPTYCH_AIPERF_PYTHON", "aiperf"), "profile", "--model", MODEL, "--url", URL, "--endpoint-type", "chat",
         "--streaming", "--request-count", N_REQUESTS, "--request-rate", RATE, "--arrival-pattern", "constant",
         "--random-seed", 1, "--prompt-input-tokens-mean", PROMPT, "--prompt-input-tokens-stddev", 0,
         "--prompt-output-tokens-mean", OUTPUT, "--extra-inputs", f"min_tokens:{OUTPUT}",
         "ignore_eos:true", "--tokenizer", TOKENIZER, "--output-artifact-dir", out, "--ui", "none"], out,
    )
    result = json.loads(next(out.rglob("profile_export_aiperf.json")).read_text())
    return {
        "TTFT": result["time_to_first_token"]["p50"], "TPOT": result["inter_token_latency"]["p50"],
        "rate": result["request_throughput"]["avg"],
    }


def vllm_bench_serve() -> None:
    compare("vllm bench serve", vllm_figures)


def guidellm() -> None:
    compare("guidellm", guidellm_figures)


def aiperf() -> None:
    compare("aiperf", aiperf_figures)


report.run(None, [vllm_bench_serve, guidellm, aiperf], client="agreement")
