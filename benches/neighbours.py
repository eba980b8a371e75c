"""What a busy neighbour costs: encode and decode beside processes that compute, with each number of threads.

    python3 benches/neighbours.py benches/models/qwen2-vl-263m --item 448 --precision bf16

Runs `throughput` in turn with 0, 1, 2 neighbours of the same priority, each in a session of its own as another user's
process would be, and with one thread and all of them. Prints rates as shares of the undisturbed rate with all threads, and
whether all threads beside a neighbour are ever slower than one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SPIN = "while True: pass"


def binary():
    """The benchmark, built if it is not."""
    command = ["cargo", "build", "--release", "--quiet", "-p", "triptych-benches", "--bin", "throughput"]
    subprocess.run(command, cwd=ROOT, check=True)
    return ROOT / "target/release/throughput"


def measure(program, args, n_threads, n_neighbours):
    """Encodes and decode tokens a second beside neighbours."""
    spin = [sys.executable, "-c", SPIN]
    neighbours = [subprocess.Popen(spin, start_new_session=True) for _ in range(n_neighbours)]
    try:
        command = [program, args.model, "--item", args.item, "--precision", args.precision, "--threads", n_threads]
        command += ["--load-format", "dummy", "--batches", args.batch, "--new-tokens", args.new_tokens]
        command += ["--repeats", args.repeats]
        done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
    result = json.loads(done.stdout.strip().splitlines()[-1])
    return {"encode": 1e3 / result["encode_ms"], "decode": result["decode"][0]["tokens_per_s"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model directory; its weights are random")
    parser.add_argument("--item", default="448", help="side of a square image, or a file")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--batch", type=int, default=8, help="sequences that decode together")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=1, help="of each op in a run; the best counts")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind, in turn; the median counts")
    args = parser.parse_args()
    program, n_cores = binary(), os.cpu_count()
    kinds = [(n, threads) for n in (0, 1, 2) for threads in (1, n_cores)]
    rates = {kind: [] for kind in kinds}
    for i in range(args.rounds):
        for n_neighbours, n_threads in kinds:
            rates[n_neighbours, n_threads].append(measure(program, args, n_threads, n_neighbours))
            print(f"round {i + 1} of {args.rounds}: {n_neighbours} neighbours, {n_threads} threads", file=sys.stderr)
    print("| neighbours | threads | encode | decode |\n|---|---|---|---|")
    shares = {}
    for kind, found in rates.items():
        for op in ("encode", "decode"):
            whole = statistics.median(rate[op] for rate in rates[0, n_cores])
            shares[kind, op] = statistics.median(rate[op] for rate in found) / whole
        print(f"| {kind[0]} | {kind[1]} | {shares[kind, 'encode']:.2f} | {shares[kind, 'decode']:.2f} |")
    for n in (0, 1, 2):
        for op in ("encode", "decode"):
            ratio = shares[(n, n_cores), op] / shares[(n, 1), op]
            print(f"{op} beside {n}: {n_cores} threads are {ratio:.2f} times one thread")


if __name__ == "__main__":
    main()
