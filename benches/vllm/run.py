"""vLLM alone, vLLM apart, our encoders before vLLM and its before ours, and all ours, in turn on the same requests: one table.

    python3 benches/vllm/run.py                       # every cell that is not there yet, into benches/results/vllm.*
    python3 benches/vllm/run.py --brief               # few requests: that it runs, not how fast; stores nothing
    python3 benches/vllm/run.py --only epd aggregated # some systems
    python3 benches/vllm/run.py --again drill:ours    # one cell anew

A cell is one system under one load, or under the drill of faults. Each is stored as it ends, so a run that was broken off
goes on where it was. Every system has the same two cores; where encoding and decoding are apart, each has one. Needs an
environment with vLLM (--python), as `benches/peers/run.py --vllm` makes it, with the package of services/ec/python on its
path, which this script sees to; a Redis server; and our binary (--binary), or else it builds one.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import drill
import systems
import table

# Behind this folder's own modules.
sys.path.append(str(Path(__file__).resolve().parent.parent))
import subject  # noqa: E402

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CACHE = ROOT / ".cache/vllm"
PEERS = ROOT / ".cache/peers/vllm/bin/python"

#: Loads by name: the share of images that were sent before.
LOADS = {"fresh": 0.0, "repeated": 0.5}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(systems.SYSTEMS), help="these systems; all by default")
    parser.add_argument("--skip", nargs="+", default=[], choices=["load", "drill"], help="leave out the loads, or the drills")
    parser.add_argument("--again", nargs="+", default=[], metavar="CELL", help="cells to measure anew, as `epd` or `drill:epd`")
    parser.add_argument("--drills", nargs="+", choices=list(systems.SYSTEMS), default=[w for w in systems.SYSTEMS if w != "aggregated"],
                        help="systems that the drill is run with")
    parser.add_argument("--rates", default="0.3,1.5", help="requests a second: one that all can serve, one that none can")
    parser.add_argument("--requests", type=int, default=24, help="judged requests of a run")
    parser.add_argument("--drill-requests", type=int, default=500)
    parser.add_argument("--python", default=str(PEERS), help="the interpreter of an environment that has vLLM")
    parser.add_argument("--binary", type=Path, help="a built `triptych`, instead of building one")
    parser.add_argument("--cores", default="0,1", help="two cores, that of the encoder first")
    parser.add_argument("--eager", action="store_true", help="vLLM without compilation: starts sooner, runs slower")
    parser.add_argument("--out", type=Path, default=ROOT / "benches/results")
    parser.add_argument("--brief", action="store_true")
    args = parser.parse_args()
    if args.brief:
        args.requests, args.drill_requests, args.rates, args.eager = 4, 40, "1", True
    args.rates = [float(rate) for rate in args.rates.split(",")]
    args.cores = [int(core) for core in args.cores.split(",")]
    if len(args.cores) != 2:
        parser.error("--cores: two of them")
    return args


class Cells:
    """What was measured, by cell, in a file that is written after each."""

    def __init__(self, path, again):
        self.path = path
        self.done = json.loads(path.read_text()) if path.exists() else {}
        for cell in again:
            self.done.pop(cell, None)

    def put(self, cell, result):
        self.done[cell] = {"at": int(time.time()), **result}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.done, indent=1))
        new.replace(self.path)


def loads(args, running):
    """All loads of a system: {load: {rate: figures}}."""
    found = {}
    for load, share in LOADS.items():
        found[load] = {}
        for rate in args.rates:
            found[load][str(rate)] = measured(args, running, share, rate)
            print(f"  {load} at {rate}/s: {json.dumps(found[load][str(rate)])}", flush=True)
    return found


def measured(args, running, share, rate):
    """One run of `triptych bench`: figures, and its errors."""
    out = running.folder / f"bench-{share}-{rate}.json"
    size, text, output = (112, 20, 4) if args.brief else (640, 100, 32)
    workload = f"epd-short:images=1,text={text},output={output},size={size}x{size},share={share}"
    command = [args.binary, "bench", "run", "--url", running.url, "--model", "m", "--workload", workload,
               "--rates", str(rate), "--requests", str(args.requests), "--seeds", "1", "--slo", "ttft=60s,tpot=2s",
               "--max-late", "2s", "--warm-up", "2s" if args.brief else "10s", "--drain", "120s", "--json", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode or not out.exists():
        return {"error": (done.stderr or done.stdout)[-400:]}
    (run,) = json.loads(out.read_text())["rates"][0]["runs"]
    return {
        "offered_per_s": run["throughput"]["offered_per_s"], "served_per_s": run["throughput"]["requests_per_s"],
        "ttft_ms": {at: run["ttft_ms"].get(at) for at in ("p50", "p99")},
        "tpot_ms": {at: run["tpot_ms"].get(at) for at in ("p50", "p99")},
        "ends": run["verdict"]["ends"], "errors": run["errors"],
    }


def cell(args, name, what, work):
    """Runs a system's work unless it is done, and stores what came of it."""
    if name in args.cells.done:
        print(f"{name}: done before", flush=True)
        return
    why = systems.missing(args, what)
    if why:
        print(f"{name}: left out: {why}", flush=True)
        args.left_out[name] = why
        return
    print(name, flush=True)
    try:
        began = time.monotonic()
        with systems.started(args, what, is_drill=name.startswith("drill:")) as running:
            ready = time.monotonic() - began
            args.cells.put(name, {"ready_s": round(ready, 1), **work(running)})
    except (systems.NotStarted, OSError, ValueError, subprocess.SubprocessError) as e:
        # The other cells go on; the table says what became of this one.
        print(f"{name}: {e}", flush=True)
        args.left_out[name] = f"{type(e).__name__}: {str(e).splitlines()[0][:200] if str(e) else ''}"


def main():
    args = arguments()
    # So that what was started is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args.binary, args.model = subject.binary(args), subject.model(args, CACHE)
    args.drill_model = ROOT / "tests/models/shapes-qwen2-vl"
    args.scratch = CACHE / "scratch"
    args.cells = Cells(CACHE / ("brief.json" if args.brief else "cells.json"), args.again)
    args.left_out = {}
    chosen = args.only or list(systems.SYSTEMS)
    # With our proxy alone the loads show nothing that the neighbours in the table do not; its drill shows who retries.
    loaded = args.only or [what for what in chosen if what != "proxied"]
    for what in loaded if "load" not in args.skip else []:
        cell(args, what, what, lambda running: {"loads": loads(args, running)})
        write(args)
    for what in [w for w in args.drills if w in chosen] if "drill" not in args.skip else []:
        cell(args, f"drill:{what}", what, lambda running: drill.run(args, running))
        write(args)


def write(args):
    """The table of what is there so far."""
    host = {"cpu": cpu(), "cores": os.cpu_count(), "commit": commit(), "vllm": systems.version(args.python)}
    document = {"host": host, "cells": args.cells.done, "left_out": args.left_out, "requests": args.requests}
    text = table.markdown(document)
    print("\n" + text, flush=True)
    if not args.brief:
        args.out.mkdir(exist_ok=True, parents=True)
        (args.out / "vllm.md").write_text(text)
        (args.out / "vllm.json").write_text(json.dumps(document, indent=1) + "\n")


def cpu():
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit():
    done = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
