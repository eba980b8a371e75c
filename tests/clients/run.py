"""Real clients, unchanged, against a cluster of `triptych up` with golden and sample models: `cargo xtask clients`.

Clients are installed below `target/clients` and nowhere else. Prints a table of client, version, check and result; ends
with 1 if a check failed. No part of the gate: it needs PyPI and npm.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WORK = ROOT / "target" / "clients"
GOLDEN = ROOT / "tests" / "golden"
SECONDS_TO_START = 120


def python_with(requirements: str) -> Path:
    """Python of an environment of its own with what a list names; installed where it is missing."""
    place = WORK / requirements.removesuffix(".txt")
    python = place / "bin" / "python"
    wanted = (HERE / requirements).read_text()
    stamp = place / "installed.txt"
    if not (stamp.is_file() and stamp.read_text() == wanted):
        WORK.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "-r", HERE / requirements], check=True)
        stamp.write_text(wanted)
    return python


def install_npm() -> None:
    """Installs the npm package where it is missing."""
    shutil.copy(HERE / "package.json", WORK / "package.json")
    if not (WORK / "node_modules" / "openai").is_dir():
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--silent"], cwd=WORK, check=True)


def with_template(case: str, name: str, template: str) -> Path:
    """A copy of a golden model with another chat template."""
    target = WORK / "models" / name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(GOLDEN / case / "model", target)
    config = json.loads((target / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target


def models() -> list[str]:
    """The models: one that calls tools, one that thinks, one that embeds, and the two samples."""
    templates = json.loads((GOLDEN / "chat_tools" / "templates.json").read_text())
    hermes = next(entry["template"] for entry in templates if entry["name"] == "hermes")
    thinks = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}<|im_start|><think>"
    samples = ROOT / "tests" / "models"
    return [
        f"agent={with_template('qwen2_tied', 'agent', hermes)}",
        f"thinks={with_template('qwen3_windowed_layers', 'thinks', thinks)}",
        f"bart={GOLDEN / 'bart_odd_heads' / 'model'}",
        f"shapes={samples / 'shapes-qwen2-vl'}",
        f"digits={samples / 'digits-whisper'}",
    ]


def timed() -> list[str]:
    """Flags of a cluster whose workers compute nothing and take as long as curves of another machine say."""
    model, curves = ROOT / "benches" / "models" / "qwen2-vl-timed", ROOT / "benches" / "papers" / "a100-qwen3-vl-4b.json"
    return ["--model", f"timed={model}", "--load-format", "dummy", "--timed-by", str(curves)]


class Cluster:
    """A cluster on free ports."""

    def __init__(self, binary: Path, flags: list[str]) -> None:
        args = [binary, "up", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", *flags]
        self.log = open(WORK / "up.log", "w+", encoding="utf-8")
        self.process = subprocess.Popen(args, stdout=self.log, stderr=subprocess.STDOUT, cwd=ROOT)
        self.http, self.grpc = self.ready()

    def ready(self) -> tuple[str, str]:
        until = time.monotonic() + SECONDS_TO_START
        while time.monotonic() < until and self.process.poll() is None:
            text = (WORK / "up.log").read_text()
            found = re.search(r"OpenAI API\s+(\S+)\s+gRPC\s+(\S+)", text)
            if found:
                return found[1], found[2]
            time.sleep(0.1)
        self.stop()
        raise SystemExit(f"the cluster did not start:\n{(WORK / 'up.log').read_text()}")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(60)
        self.log.close()


def rows(output: str) -> list[dict]:
    """What a script of checks reports: a line of JSON for each."""
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"client"')]


def table(found: list[dict]) -> str:
    """The results by client, as Markdown."""
    lines = ["| client | version | works | fails |", "|---|---|---|---|"]
    clients = dict.fromkeys((row["client"], row["version"]) for row in found)
    for client, version in clients:
        of_client = [row for row in found if row["client"] == client]
        works = ", ".join(row["check"] for row in of_client if row["error"] is None)
        fails = ", ".join(row["check"] for row in of_client if row["error"] is not None)
        lines.append(f"| {client} | {version} | {works} | {fails or '–'} |")
    return "\n".join(lines)


def chosen(scripts: list[list], only: list[str]) -> list[list]:
    """The scripts that are to run."""
    return [script for script in scripts if not only or any(name in str(script[-1]) for name in only)]


def against(binary: Path, flags: list[str], scripts: list[list], programs: dict[str, str]) -> list[dict]:
    """What scripts report of a cluster with these flags."""
    if not scripts:
        return []
    cluster = Cluster(binary, flags)
    found = []
    try:
        environment = os.environ | programs | {
            "OPENAI_BASE_URL": cluster.http,
            "OPENAI_API_KEY": "unused",
            "TRIPTYCH_GRPC": cluster.grpc,
            "TRIPTYCH_ROOT": str(ROOT),
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
        }
        with urllib.request.urlopen(f"{cluster.http}/models") as served:
            print(f"served: {[model['id'] for model in json.load(served)['data']]}")
        for script in scripts:
            done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=1800)
            found += rows(done.stdout)
            if "agreement" in str(script[-1]):
                print("\n".join(line for line in done.stderr.splitlines() if ": TTFT" in line))
            if done.returncode != 0:
                error = done.stderr.strip().splitlines()[-1:] or ["ended early"]
                found.append({"client": Path(script[-1]).name, "version": "", "check": "the script", "error": error[0]})
                print(done.stderr, file=sys.stderr)
    finally:
        cluster.stop()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", type=Path, required=True, help="the triptych binary")
    parser.add_argument("only", nargs="*", help="clients to run; all by default")
    args = parser.parse_args()
    python, load = python_with("requirements.txt"), python_with("requirements-load.txt")
    aiperf = python_with("requirements-aiperf.txt")
    install_npm()
    binary = args.binary.resolve()
    shutil.copy(HERE / "openai_npm.mjs", WORK / "openai_npm.mjs")
    scripts = [
        [python, HERE / "openai_python.py"],
        ["node", WORK / "openai_npm.mjs"],
        [python, HERE / "frameworks.py"],
        [python, HERE / "grpc_client.py"],
        [python, HERE / "buf_curl.py"],
        [load, HERE / "load.py"],
        [aiperf, HERE / "aiperf_load.py"],
    ]
    programs = {"TRIPTYCH_BINARY": str(binary), "TRIPTYCH_LOAD_PYTHON": str(load), "TRIPTYCH_AIPERF_PYTHON": str(aiperf)}
    flags = [word for model in models() for word in ("--model", model)]
    found = against(binary, flags, chosen(scripts, args.only), {})
    found += against(binary, timed(), chosen([[python, HERE / "agreement.py"]], args.only), programs)
    failed = [row for row in found if row["error"] is not None]
    for row in failed:
        print(f"FAILED {row['client']} {row['check']}: {row['error']}")
    print(table(found))
    return 1 if failed or not found else 0


if __name__ == "__main__":
    sys.exit(main())
