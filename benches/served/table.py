"""Markdown of what `run.py` measured: a table for each load, with ratios to the best rival."""

import platform
import subprocess
from pathlib import Path

TITLES = {
    "image": "One fresh image a request, Qwen2-VL 263M",
    "text": "Text alone, Qwen2-VL 263M",
    "audio": "Clips of 11 s, Whisper tiny.en",
}


#: Requests/s of ours over the best rival's that are the goal, by neighbours.
GOALS = {0: 2.0, 1: 1.5}


def cpu():
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit(root):
    done = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def is_ours(name):
    return name.startswith("ours-")


def markdown(document):
    lines = ["# Served beside other servers", "",
             f"Closed loops with {document['in_flight']} requests in flight, systems in turn in one run, each on the same "
             f"{document['cores']} cores; client and neighbour are on them too. Made by `python3 benches/served/run.py`. A ratio "
             "is ours to the best rival of the same load and neighbours; more is better for us. TTFT is told where answers are "
             "streamed. Errors are answers that were refused, broken off, or not what was asked.", "",
             f"Host: {document['host']}; vLLM {document['vllm']}; commit {document['commit']}."]
    for load, title in TITLES.items():
        rows = table(load, document["cells"])
        lines += ["", f"## {title}", "", *rows] if rows else []
    lines += bars(document["cells"])
    if document["left_out"]:
        lines += ["", "Left out:", ""] + [f"- {name}: {why}" for name, why in document["left_out"].items()]
    return "\n".join(lines) + "\n"


def table(load, cells):
    """Rows of a load, neighbours by neighbours."""
    there = {tuple(cell.split(":")[1:]): found for cell, found in cells.items() if cell.startswith(f"{load}:")}
    if not there:
        return []
    rows = ["| neighbours | system | requests/s | ratio | TTFT p50 | ratio | TPOT p50 | ratio | answer p50 | errors |",
            "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for n in sorted({n for _, n in there}):
        beside = {name: found for (name, of), found in there.items() if of == n}
        rivals = [found for name, found in beside.items() if not is_ours(name)]
        for name, found in beside.items():
            rows.append(row(n, name, found, rivals))
    return rows


def bars(cells):
    """A line for each of our cells: which goals hold. TTFT and TPOT are goals without a neighbour."""
    lines = ["", "## Goals", "", "Beside the best rival: at least twice the requests/s, at a lower median TTFT and TPOT; beside a busy "
             "neighbour 1.5 times the requests/s.", "", "| load | neighbours | system | requests/s | TTFT | TPOT |",
             "| --- | ---: | --- | --- | --- | --- |"]
    for cell, found in sorted(cells.items()):
        load, name, n = cell.split(":")
        rivals = [of for other, of in cells.items() if other.startswith(f"{load}:") and other.endswith(f":{n}")
                  and not is_ours(other.split(":")[1])]
        if not is_ours(name) or not rivals:
            continue
        rate = found["requests_per_s"] / max(of["requests_per_s"] for of in rivals)
        goals = [f"{'holds' if rate >= GOALS[int(n)] else 'missed'} ({rate:.3f})"]
        for figure in ("ttft_p50_ms", "tpot_p50_ms"):
            theirs = [of[figure] for of in rivals if of[figure]]
            is_goal = n == "0" and theirs and found[figure]
            goals.append(("holds" if found[figure] < min(theirs) else "missed") if is_goal else "–")
        lines.append("| " + " | ".join([load, n, name, *goals]) + " |")
    return lines


def row(n, name, found, rivals):
    cells = [n, name]
    for figure in ("requests_per_s", "ttft_p50_ms", "tpot_p50_ms"):
        cells.append(shown(figure, found[figure]))
        cells.append(ratio(figure, found[figure], rivals) if is_ours(name) else "")
    cells += [shown("answer_p50_ms", found["answer_p50_ms"]), f"{found['n_errors']} of {found['n']}"]
    return "| " + " | ".join(cells) + " |"


def shown(figure, value):
    if value is None:
        return "–"
    return f"{value:.2f}" if figure == "requests_per_s" else f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def ratio(figure, own, rivals):
    """How many times better than the best rival."""
    theirs = [found[figure] for found in rivals if found[figure]]
    if not own or not theirs:
        return "–"
    return f"{own / max(theirs):.2f}" if figure == "requests_per_s" else f"{min(theirs) / own:.2f}"
