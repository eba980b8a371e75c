"""Curves whose times are all longer by a factor, for timed workers (`--timed-by`) on a machine with few cores.

    python3 benches/dilate.py benches/papers/a100-qwen3-vl-4b.json 4 --model qwen2-vl-timed > timed-4.json

Software that computes in real time beside accelerators that are four times as slow has four times the cores for each of their
operations: at a quarter of the rate, and SLOs four times as long, the cluster is that of a machine with four times the cores.
Time dilation, as in "To Infinity and Beyond: Time-Warped Network Emulation" (Gupta et al., NSDI 2006).
"""

import argparse
import json
import sys


def dilate(value, factor):
    """The same value with each duration (`..._us`) times the factor."""
    if isinstance(value, list):
        return [dilate(v, factor) for v in value]
    if isinstance(value, dict):
        return {k: v * factor if k.endswith("_us") else dilate(v, factor) for k, v in value.items()}
    return value


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", type=argparse.FileType(), help="a file of curves")
    parser.add_argument("factor", type=float, help="how many times as long everything takes")
    parser.add_argument("--model", help="the name of the model in the file that is written")
    args = parser.parse_args()
    curves = dilate(json.load(args.curves), args.factor)
    if args.model:
        curves["model"] = args.model
    json.dump(curves, sys.stdout, indent=1)
    print()
