"""From results of rounds to a document, and from that to Markdown and a plot."""

import datetime
import platform
import statistics
import subprocess
from html import escape
from pathlib import Path

import work


def cpu():
    """Its name, with the numbers that tell its generation where the name does not."""
    lines = [line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line]
    told = {key.strip(): value.strip() for key, value in reversed(lines)}
    if "model name" not in told:
        return platform.processor()
    numbers = [f"{what} {told[key]}" for key, what in (("cpu family", "family"), ("model", "model")) if key in told]
    return f"{told['model name']} ({', '.join(numbers)})" if numbers else told["model name"]


#: Names of models on the command line.
KEYS = {"Whisper-base": "whisper", "T5-small": "t5", "BART-base": "bart", "Qwen2-VL 263M": "qwen2vl"}
#: What preprocessing is of, by kind of model.
ROW_OF_FILE = {"whisper": "30 s FLAC to log-mel, ms", "vision": "JPEG 1080p to model input, ms"}


def rows_of(results, kind):
    """`{row: {who: [value of each round]}}` of one model; a row's unit ends its name."""
    rows = {}
    for who, rounds in results.items():
        for result in rounds:
            values = {ROW_OF_FILE.get(kind): result.get("preprocess_ms"), "encode, ms": result["encode_ms"]}
            if prefill := result.get("prefill"):
                values[f"prefill of {prefill['tokens']} tokens, tokens/s"] = prefill["tokens_per_s"]
            values |= {f"decode at batch {d['batch']}, tokens/s": d["tokens_per_s"] for d in result["decode"]}
            if not prefill:
                values |= {f"decode steps alone at batch {d['batch']}, tokens/s": d["tokens_per_s"] for d in result.get("steps", [])}
            if beams := result.get("beams_tokens_per_s"):
                values["decode with 5 beams, tokens/s"] = beams
            # A peer that takes one sequence at a time has a memory for one, and none for the largest batch.
            largest = max((d["batch"] for d in result["decode"]), default=1)
            values |= {"start to ready, ms": result.get("ready_ms"), "most memory, batch 1, MB": result.get("peak_mb_alone")}
            if largest > 1:
                values[f"most memory, batch {largest}, MB"] = result.get("peak_mb")
            for row, value in values.items():
                if value is not None:
                    rows.setdefault(row, {}).setdefault(who, []).append(value)
    return rows


def peaks_of(results):
    """The most that was measured in a run: `{who: multiply-adds a second}` of ours, and bytes a second.

    One that is measured while a neighbour has a core is too low, and shares of it were too high.
    """
    multiply, read = {}, 0
    for of in results.values():
        for who, rounds in of.items():
            if is_ours(who):
                multiply[who] = max([multiply.get(who, 0), *(r["multiply_adds_per_s"] for r in rounds)])
                read = max([read, *(r["bytes_per_s"] for r in rounds)])
    return multiply, read


def shares(of, directory, peaks):
    """`{who: {what: share of the peak}}` of ours: multiplications of encode and prefill, bytes of a decode step at batch 1."""
    found = {}
    for who, rounds in of.items():
        if not is_ours(who):
            continue
        n_item, prefill = rounds[0]["item_tokens"], rounds[0].get("prefill")
        n_read = prefill["tokens"] if prefill else n_item
        read = work.decode_bytes(directory, who.removeprefix("ours-"), n_read)

        def of_peak(multiply_adds, seconds):
            return statistics.median(multiply_adds / seconds(r) / peaks[0][who] for r in rounds)

        found[who] = {"encode": of_peak(work.encode_multiply_adds(directory, n_item), lambda r: r["encode_ms"] / 1e3)}
        if prefill:
            found[who]["prefill"] = of_peak(work.prefill_multiply_adds(directory, n_read), lambda r: n_read / r["prefill"]["tokens_per_s"])
        one = [next((d["tokens_per_s"] for d in r["decode"] if d["batch"] == 1), None) for r in rounds]
        if None not in one:
            found[who]["decode at batch 1"] = statistics.median(
                read * rate / peaks[1] for rate in one)
    return found


def document(results, models, args, root):
    """Of results by name of model, and of `{name: (directory, kind)}`. Each model has the run that it is of."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True).stdout.strip()
    peaks = peaks_of(results)
    run = {"host": cpu(), "threads": args.threads, "commit": commit, "date": str(datetime.date.today()),
           "peer_threads": args.peer_threads, "rounds": args.rounds, "new_tokens": args.new_tokens}
    return {
        "isa": args.isa, "runs": {name: run for name in results},
        "models": {name: {row: {who: {"median": statistics.median(v), "rounds": v} for who, v in values.items()}
                          for row, values in rows_of(of, models[name][1]).items()} for name, of in results.items()},
        "peaks": {name: shares(of, models[name][0], peaks) for name, of in results.items()},
    }


def merged(stored, new):
    """What is stored, with the models of a later document in the place of its own."""
    if not stored:
        return new
    parts = {part: {**stored.get(part, {}), **new[part]} for part in ("runs", "models", "peaks")}
    return {"isa": new["isa"], **parts}


def more_is_better(row):
    return row.endswith("tokens/s")


def best(row, values, whose):
    """`(who, median)` of the best of some."""
    medians = {who: v["median"] for who, v in values.items() if whose(who)}
    if not medians:
        return None
    return (max if more_is_better(row) else min)(medians.items(), key=lambda item: item[1])


def ratio(row, ours, theirs):
    """How many times better ours is."""
    return ours / theirs if more_is_better(row) else theirs / ours


def is_ours(who):
    return who.startswith("ours-")


def of_run(name, run, isa):
    """Machine, method and command of a model's rows."""
    n = run.get("peer_threads")
    peers = f"peers with {' and with '.join(map(str, n))} thread(s), the better counted" if n else "peers with all threads"
    model = KEYS.get(name)
    command = f"python3 benches/peers/run.py{f' {model}' if model else ''} --rounds {run['rounds']}{f' --isa {isa}' if isa else ''}"
    return (f"{run['host']}, {run['threads']} threads, commit {run['commit']}, {run['date']}; medians of {run['rounds']} round(s) in "
            f"turn, {run['new_tokens']} tokens a sequence; {peers}: `{command}`")


def markdown(doc):
    lines = [
        "# Beside the peers", "",
        "Published shapes with random weights. A ratio is ours to the best peer of the row; more is better for us. Decode has the "
        "projection of cross-attention keys in it where a peer projects then; steps alone are those after the first token.", "",
    ]
    for name, rows in doc["models"].items():
        peers = sorted({who for values in rows.values() for who in values if not is_ours(who)})
        ours = sorted({who for values in rows.values() for who in values if is_ours(who)})
        lines += [f"## {name}", "", of_run(name, doc["runs"][name], doc.get("isa")), "", f"| work | {' | '.join(peers)} | {' | '.join(f'{who} | ratio' for who in ours)} |",
                  f"|---{'|---' * (len(peers) + 2 * len(ours))}|"]
        for row, values in rows.items():
            top = best(row, values, lambda who: not is_ours(who))
            cells = [f"{values[who]['median']:.0f}" if who in values else "–" for who in peers]
            for who in ours:
                own = values.get(who)
                cells.append(f"{own['median']:.0f}" if own else "–")
                cells.append(f"{ratio(row, own['median'], top[1]):.2f}" if own and top else "–")
            lines.append(f"| {row} | {' | '.join(cells)} |")
        peaks = doc["peaks"].get(name, {})
        for what, unit in [("encode", "multiplications"), ("prefill", "multiplications"), ("decode at batch 1", "bytes read")]:
            listed = [f"{who.removeprefix('ours-')} {of[what]:.0%}" for who, of in sorted(peaks.items()) if what in of]
            if listed:
                lines += ["", f"Of the measured peak of {unit}, {what}: {', '.join(listed)}."]
        lines.append("")
    return "\n".join(lines)


def plot(doc):
    """Bars of the best of ours beside the best peer, as SVG: how many times better, 1 being level."""
    bars = []
    for name, rows in doc["models"].items():
        for row, values in rows.items():
            ours, theirs = best(row, values, is_ours), best(row, values, lambda who: not is_ours(who))
            if ours and theirs:
                bars.append((f"{name}: {row.split(',')[0]}", ours[0], theirs[0], ratio(row, ours[1], theirs[1])))
    scale = 300 / max([b[3] for b in bars] + [1])
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="{30 + 22 * len(bars)}" font-family="sans-serif" font-size="12">',
             '<rect width="100%" height="100%" fill="white"/>']
    for i, (label, own, peer, times) in enumerate(bars):
        y = 20 + 22 * i
        color = "#2a7f62" if times >= 1 else "#b23a48"
        lines.append(f'<text x="250" y="{y + 12}" text-anchor="end">{escape(label)}</text>')
        lines.append(f'<rect x="260" y="{y}" width="{times * scale:.1f}" height="16" fill="{color}"/>')
        lines.append(f'<text x="{266 + times * scale:.1f}" y="{y + 12}">{times:.2f}× ({escape(own)} beside {escape(peer)})</text>')
    lines.append(f'<line x1="{260 + scale:.1f}" x2="{260 + scale:.1f}" y1="10" y2="{20 + 22 * len(bars)}" stroke="black"/>')
    return "\n".join(lines + ["</svg>"]) + "\n"
