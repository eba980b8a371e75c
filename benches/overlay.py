"""Where time goes: lays the timeline of a cluster (`--trace-file`) over that of its simulation (`triptych plan trace`).

    python3 benches/overlay.py trace.json simulated.json              # one table in markdown
    python3 benches/overlay.py trace.json simulated.json --steps 20   # and the first steps of both, side by side

Steps are told apart by what they hold (sequences that write, prompt tokens), forwards by their items, so that each row
compares the same work. The column of lost time is what a row's work takes longer than simulated, over all of it; the time
between two steps of an engine that has more to do is a row of its own.
"""

import argparse
import bisect
import collections
import statistics
import sys

from busy import events

# Two steps less apart than this follow one another: the engine had more to do.
FOLLOWING_US = 2000


def power(n):
    """A range of counts that are alike, as text."""
    if n <= 1:
        return str(n)
    low = 1 << (n.bit_length() - 1)
    return f"{low} to {2 * low - 1}"


def kind(name, args):
    """The row that a span belongs to; None: it is part of another one."""
    if name == "preprocess":
        return "read an item"
    if name == "forward" and "items" in args:
        return f"encode, items: {power(args['items'])}"
    if name == "step" and "sequences" in args:
        extra = args["tokens"] - args["sequences"]
        return f"prefill, tokens: {power(extra)}" if extra > 0 else f"decode, sequences: {power(args['sequences'])}"
    return None


def spans(path):
    """Spans of each kind as (start, duration) in microseconds, steps with the sizes of the forward inside."""
    threads = collections.defaultdict(list)
    for event in events(path):
        if event.get("ph") == "X":
            threads[(event["pid"], event.get("tid"))].append(event)
    found, steps = collections.defaultdict(list), []
    for place, of_thread in threads.items():
        forwards = sorted(
            (e["ts"], e["args"]) for e in of_thread if e["name"] == "forward" and "sequences" in e.get("args", {})
        )
        starts = [start for start, _ in forwards]
        ended = None
        for event in sorted(of_thread, key=lambda e: e["ts"]):
            args = event.get("args") or {}
            if event["name"] == "step" and "sequences" not in args:
                i = bisect.bisect_left(starts, event["ts"])
                if i == len(starts) or starts[i] > event["ts"] + event["dur"]:
                    continue  # It computed nothing.
                args = forwards[i][1]
            row = kind(event["name"], args)
            if row is None:
                continue
            found[row].append((event["ts"], event["dur"]))
            if event["name"] == "step":
                if ended is not None and 0 <= event["ts"] - ended < FOLLOWING_US:
                    found["between steps"].append((ended, event["ts"] - ended))
                ended = event["ts"] + event["dur"]
                steps.append((event["ts"], event["dur"], row))
    return found, sorted(steps)


def order(row):
    """Rows of a kind stay together, by size."""
    words = row.replace(",", "").split()
    numbers = [int(word) for word in words if word.isdigit()]
    return (["read", "encode", "prefill", "decode", "between"].index(words[0]), numbers)


def table(measured, simulated):
    lines = [
        "| work | times measured | simulated | median ms measured | simulated | ratio | ms lost in all |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in sorted(set(measured) | set(simulated), key=order):
        real = [took for _, took in measured.get(row, [])]
        made = [took for _, took in simulated.get(row, [])]
        if not real or not made:
            lines.append(f"| {row} | {len(real)} | {len(made)} | | | | |")
            continue
        a, b = statistics.median(real), statistics.median(made)
        lost = (statistics.fmean(real) - statistics.fmean(made)) * len(real)
        ratio = f"{a / b:.2f}" if b > 0 else "–"
        lines.append(
            f"| {row} | {len(real)} | {len(made)} | {a / 1e3:.3f} | {b / 1e3:.3f} | {ratio} | {lost / 1e3:.0f} |"
        )
    return "\n".join(lines)


def side_by_side(measured, simulated, n):
    """The first steps of both, from the first of each on."""
    lines = ["", "| step | at ms measured | took | of | at ms simulated | took | of |", "| ---: | ---: | ---: | --- | ---: | ---: | --- |"]
    for i, (real, made) in enumerate(zip(measured[:n], simulated[:n])):
        cells = []
        for (start, took, row), first in ((real, measured[0][0]), (made, simulated[0][0])):
            cells += [f"{(start - first) / 1e3:.1f}", f"{took / 1e3:.3f}", row]
        lines.append(f"| {i + 1} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", help="a file that --trace-file wrote")
    parser.add_argument("simulated", help="a file that `triptych plan trace` wrote")
    parser.add_argument("--steps", type=int, default=0, help="first steps that are listed side by side")
    args = parser.parse_args()
    (measured, real_steps), (simulated, made_steps) = spans(args.measured), spans(args.simulated)
    for path, found in ((args.measured, measured), (args.simulated, simulated)):
        if not found:
            sys.exit(f"{path}: nothing was computed")
    print(table(measured, simulated))
    if args.steps:
        print(side_by_side(real_steps, made_steps, args.steps))


if __name__ == "__main__":
    main()
