"""Curves of a device that takes longer by a factor, for timed workers (`--timed-by`) on a machine with few cores.

    python3 benches/dilate.py benches/papers/a100-qwen3-vl-4b.json 4 > a100-4.json    # for the workers
    python3 benches/dilate.py profile.json 4 > profile-4.json                         # for their simulation

Encodes and steps take longer, and what the host does takes as long as before. Beside devices that are four times as slow the
software has four times the cores for each of its operations: at a quarter of the rate, and with SLOs four times as long, the
cluster is that of a machine with four times the cores. Time dilation, as in "To Infinity and Beyond: Time-Warped Network
Emulation" (Gupta et al., NSDI 2006).
"""

import argparse
import json
import sys


def dilate(points, factor):
    """Points of a curve whose times are longer."""
    return [{**point, "p50_us": point["p50_us"] * factor, "p95_us": point["p95_us"] * factor} for point in points]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", type=argparse.FileType(), help="a file of curves")
    parser.add_argument("factor", type=float, help="how many times as long encodes and steps take")
    args = parser.parse_args()
    curves = json.load(args.curves)
    curves["step"] = dilate(curves["step"], args.factor)
    for tower in [curves, *curves.get("more_towers", [])]:
        tower["encode"] = dilate(tower["encode"], args.factor)
    json.dump(curves, sys.stdout, indent=1)
    print()
