"""The same load by vLLM's `bench serve`, aiperf, guidellm and `triptych bench`: do they measure the same?

Requests of equal lengths, at a constant rate, to a cluster whose workers sleep as long as measured curves say: so that the server is
the same for each of them, and slow beside their own work. The others read their prompts from a file: by their own rules prompts of
the small vocabulary here are not as long as asked for. The server's counters say that the lengths are the same. Ours runs before and
after each other one, so that a machine that grows slower hits both; how far its two runs are from each other is printed too. A machine
with other work on it says nothing. vLLM's client needs an environment with vLLM and pandas, whose interpreter
TRIPTYCH_VLLM_PYTHON names.
"""

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import report

#: Requests, requests a second, prompt tokens before the template's, and output tokens.
N_REQUESTS, RATE, PROMPT, OUTPUT = 100, 4, 512, 32
#: Largest difference to ours.
ALLOWED = 0.05

MODEL = "timed"
TOKENIZER = report.ROOT / "benches" / "models" / "qwen2-vl-timed"
URL = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")


def run(words: list, out: Path, is_offline: bool = True) -> None:
    environment = os.environ | ({"HF_HUB_OFFLINE": "1"} if is_offline else {})
    done = subprocess.run(
        [str(word) for word in words], cwd=out, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=300,
    )
    last = "\n".join(done.stdout.splitlines()[-20:])
    assert done.returncode == 0, f"{Path(str(words[0])).name} ended with {done.returncode}:\n{last}"


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


def counted() -> tuple:
    """Prompt tokens, and requests that were answered, since the cluster began."""
    with urllib.request.urlopen(f"{URL}/metrics") as answer:
        text = answer.read().decode()
    names = ("triptych_prompt_tokens_total", "triptych_requests_total")
    lines = [line for line in text.splitlines() if line.startswith(names) and "cancelled" not in line]
    return tuple(sum(float(line.split()[-1]) for line in lines if line.startswith(name)) for name in names)


def n_prompt_tokens(text: str) -> int:
    """Tokens of a message of this text, the template's among them."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    request = urllib.request.Request(
        f"{URL}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["usage"]["prompt_tokens"]


def prompts(client: str, n_tokens: int) -> list:
    """A text for each request that is this many tokens with the template. No two begin alike, so that none is found in a cache."""
    vocab = json.loads((TOKENIZER / "tokenizer.json").read_text())["model"]["vocab"]
    # A space before a letter stands for itself in these names.
    words = [word[1:] for word in vocab if re.fullmatch("\u0120[a-z]+", word)]
    random.seed(client)
    n_words = n_tokens - n_prompt_tokens("1")
    texts = [" ".join(["1", *random.choices(words, k=n_words)]) for _ in range(N_REQUESTS)]
    found = n_prompt_tokens(texts[0])
    assert found == n_tokens, f"a prompt of {found} tokens, {n_tokens} are asked for"
    return texts


def lines(path: Path, entries: list) -> Path:
    """A file of one JSON object a line."""
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


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


def with_length(measure) -> tuple:
    """What a client measures, and the prompt tokens of its requests by the server's counters."""
    before = counted()
    figures = measure()
    after = counted()
    return figures, (after[0] - before[0]) / (after[1] - before[1])


def compare(client: str, theirs) -> None:
    """Holds what a client measures against the mean of ours before and after it, and prints both."""
    before, n_tokens = with_length(ours)
    texts = prompts(client, round(n_tokens))
    figures, their_tokens = with_length(lambda: theirs(texts))
    assert abs(their_tokens / n_tokens - 1) < 0.01, f"{their_tokens:.0f} prompt tokens a request, ours had {n_tokens:.0f}"
    after = ours()
    mean = {name: (before[name] + after[name]) / 2 for name in figures}
    rows = {
        client: figures, "triptych bench": mean, "triptych bench, before": before, "triptych bench, after": after,
    }
    for name, values in rows.items():
        shown = ", ".join(f"{what} {value:.2f} ({value / mean[what] - 1:+.1%})" for what, value in values.items())
        print(f"{name}: {shown}, {n_tokens:.0f} prompt tokens", file=sys.stderr)
    far = {name: f"{value / mean[name] - 1:+.1%}" for name, value in figures.items()
           if abs(value / mean[name] - 1) > ALLOWED}
    assert not far, f"further from ours than {ALLOWED:.0%}: {far}"


def vllm_figures(texts: list) -> dict:
    out = Path(tempfile.mkdtemp())
    python = os.environ.get("TRIPTYCH_VLLM_PYTHON")
    assert python, "TRIPTYCH_VLLM_PYTHON names no environment with vLLM"
    data = lines(out / "prompts.jsonl", [{"prompt": text} for text in texts])
    # With so large a shape the gaps between requests are all the same.
    run(
        [python, "-c", VLLM_BENCH, "--backend", "openai-chat", "--base-url", URL,
         "--endpoint", "/v1/chat/completions", "--model", MODEL, "--tokenizer", TOKENIZER, "--dataset-name", "custom",
         "--dataset-path", data, "--custom-output-len", OUTPUT, "--skip-chat-template", "--num-prompts", N_REQUESTS,
         "--request-rate", RATE, "--burstiness", 1e6, "--ignore-eos", "--percentile-metrics", "ttft,tpot",
         "--save-result", "--result-dir", out, "--result-filename", "vllm.json", "--disable-tqdm"], out,
    )
    result = json.loads((out / "vllm.json").read_text())
    assert result["completed"] == N_REQUESTS, result["completed"]
    return {"TTFT": result["median_ttft_ms"], "TPOT": result["median_tpot_ms"], "rate": result["request_throughput"]}


def guidellm_figures(texts: list) -> dict:
    out = Path(tempfile.mkdtemp())
    data = lines(out / "prompts.jsonl", [{"prompt": text, "output_tokens_count": OUTPUT} for text in texts])
    settings = {
        "--backend": f"kind=openai_http,target={URL},model={MODEL}",
        "--profile": f"kind=constant,rate={RATE}",
        "--constraint": f"kind=max_requests,count={N_REQUESTS}",
        "--tokenizer": f"kind=hf_auto,model={TOKENIZER}",
        "--data": f"kind=json_file,path={data}",
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


def aiperf_figures(texts: list) -> dict:
    out = Path(tempfile.mkdtemp())
    data = lines(out / "prompts.jsonl", [{"text": text} for text in texts])
    run(
        [program("TRIPTYCH_AIPERF_PYTHON", "aiperf"), "profile", "--model", MODEL, "--url", URL, "--endpoint-type", "chat",
         "--streaming", "--request-count", N_REQUESTS, "--request-rate", RATE, "--arrival-pattern", "constant",
         "--random-seed", 1, "--input-file", data, "--custom-dataset-type", "single_turn", "--extra-inputs",
         f"max_tokens:{OUTPUT}", f"min_tokens:{OUTPUT}", "ignore_eos:true", "--use-server-token-count",
         "--tokenizer", TOKENIZER, "--output-artifact-dir", out, "--ui", "none"],
        # Told to be offline it takes no directory.
        out, is_offline=False,
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
