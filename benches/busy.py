"""How busy the threads that compute are: reads what `--trace-file` wrote.

    python3 benches/busy.py trace.json                     # from the first span to the end of the last
    python3 benches/busy.py trace.json --from 10 --to 60   # a part of it, in seconds since the first span

A thread is busy while it runs a span: a step of the engine (planning, forward, choosing tokens), a forward of an
encoder. One line for each thread, and what its spans are.
"""

import argparse
import collections
import json
import sys


def events(path):
    """The events of a timeline, line by line; a process that was killed may have broken its last line."""
    with open(path) as lines:
        for line in lines:
            text = line.strip().rstrip(",").lstrip("[")
            try:
                if text:
                    yield json.loads(text)
            except json.JSONDecodeError:
                continue


def covered(spans, start, end):
    """Time between two moments that spans cover, however they overlap."""
    total, reached = 0.0, start
    for first, last in sorted(spans):
        first, last = max(first, reached), min(last, end)
        if last > first:
            total, reached = total + last - first, last
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", help="a file that --trace-file wrote")
    parser.add_argument("--from", dest="start", type=float, default=0.0, help="seconds since the first span")
    parser.add_argument("--to", dest="end", type=float, default=float("inf"), help="seconds since the first span")
    args = parser.parse_args()

    processes, threads, spans = {}, {}, collections.defaultdict(lambda: collections.defaultdict(list))
    for event in events(args.trace):
        place = (event["pid"], event.get("tid"))
        if event["name"] == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        elif event["name"] == "thread_name":
            threads[place] = event["args"]["name"]
        elif event["ph"] == "X":
            spans[place][event["name"]].append((event["ts"], event["ts"] + event["dur"]))
    if not spans:
        sys.exit(f"{args.trace}: no thread computed anything")

    ends = [moment for names in spans.values() for found in names.values() for span in found for moment in span]
    first, last = min(ends), max(ends)
    start, end = first + args.start * 1e6, min(last, first + args.end * 1e6)
    if start >= end:
        parser.error(f"--from {args.start:g} --to {args.end:g}: the timeline has {(last - first) / 1e6:.1f} s")
    print(f"{(end - start) / 1e6:.1f} s of {(last - first) / 1e6:.1f}")
    for place, names in sorted(spans.items()):
        busy = covered([span for found in names.values() for span in found], start, end)
        parts = sorted(((covered(found, start, end), name) for name, found in names.items()), reverse=True)
        shares = ", ".join(f"{name} {100 * time / (end - start):.1f} %" for time, name in parts)
        who = f"{processes.get(place[0], place[0])} {threads.get(place, place[1])}"
        print(f"{who:32} busy {100 * busy / (end - start):5.1f} %   ({shares})")


if __name__ == "__main__":
    main()
