"""Markdown of what `run.py` measured."""

import systems


def markdown(document):
    host = document["host"]
    lines = ["# Encoders apart, beside vLLM", "",
             "vLLM apart and in one instance, our encoders before vLLM, its encoder before ours, and all ours, one after the other on the same machine and "
             "the same requests: one image of 640×640 and 100 tokens of text each, 32 tokens written, a Qwen2-VL of 263 M "
             "parameters with random weights, bf16. Each system has the same two cores; where encoding and decoding are apart, "
             "each has one. Made by `python3 benches/vllm/run.py`; the load is that of `triptych bench`.", "",
             f"Host: {host['cpu']}, {host['cores']} cores; vLLM {host['vllm']}; commit {host['commit']} "
             "and, for cells that were there already, earlier ones. The last column has the judged requests of a run.", ""]
    lines += loads(document)
    lines += drills(document)
    if document["left_out"]:
        lines += ["", "Left out:", ""] + [f"- {name}: {why}" for name, why in document["left_out"].items()]
    return "\n".join(lines).rstrip() + "\n"


def loads(document):
    """A row for each system and load."""
    lines = ["| system | images | offered /s | served /s | TTFT p50 | p99 | TPOT p50 | p99 | not whole |",
             "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for name, title in systems.SYSTEMS.items():
        cell = document["cells"].get(name, {})
        for load, rates in cell.get("loads", {}).items():
            for rate, figures in rates.items():
                lines.append(row(title, "50 % repeated" if load == "repeated" else load, rate, figures))
    return lines if len(lines) > 2 else []


def row(title, load, rate, figures):
    if "error" in figures:
        return f"| {title} | {load} | {rate} | {one_line(figures['error'])} | | | | | |"
    ends = figures["ends"]
    broken = sum(n for end, n in ends.items() if end != "whole")
    cells = [title, load, number(figures["offered_per_s"]), number(figures["served_per_s"])]
    cells += [seconds(figures["ttft_ms"][at]) for at in ("p50", "p99")]
    cells += [millis(figures["tpot_ms"][at]) for at in ("p50", "p99")]
    return "| " + " | ".join([*cells, f"{broken} of {sum(ends.values())}"]) + " |"


def drills(document):
    """A row for each system that went through the drill."""
    found = {name: document["cells"].get(f"drill:{name}", {}).get("drill") for name in systems.SYSTEMS}
    found = {name: drill for name, drill in found.items() if drill}
    if not found:
        return []
    lines = ["", "## Under faults", "",
             "Requests of a small trained model, 8 in flight, clients without retries. The encoder is killed twice, a third of the stored rows is "
             "deleted once and damaged twice, Redis is restarted empty. Right: the answer without faults.", "",
             "| system | requests | right | lost | wrong | s |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for name, drill in found.items():
        if "error" in drill:
            lines.append(f"| {systems.SYSTEMS[name]} | {one_line(drill['error'])} | | | | |")
        else:
            counts = [str(drill[key]) for key in ("requests", "right", "lost", "wrong", "took_s")]
            lines.append("| " + " | ".join([systems.SYSTEMS[name], *counts]) + " |")
    for name, drill in found.items():
        for text, n in drill.get("errors", []):
            lines += ["", f"{systems.SYSTEMS[name]}: {n} × `{one_line(text)}`"]
    return lines


def one_line(text):
    return " ".join(str(text).split()).replace("|", "/")[-160:]


def number(value):
    return f"{value:.2f}"


def seconds(ms):
    return "–" if ms is None else f"{ms / 1000:.2f} s"


def millis(ms):
    return "–" if ms is None else f"{ms:.0f} ms"
