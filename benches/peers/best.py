"""The better of a peer's results with different numbers of threads, figure by figure."""

#: Figures of which less is better; rates are in lists, by batch.
LESS = ("encode_ms", "ready_ms", "peak_mb", "preprocess_ms")
RATES = ("decode", "steps")


def merged(results):
    """One result with the better value of each figure."""
    found = dict(results[0])
    for other in results[1:]:
        for figure in LESS:
            if figure in other:
                found[figure] = min(found[figure], other[figure])
        for figure in RATES:
            found[figure] = [max(pair, key=lambda rate: rate["tokens_per_s"]) for pair in zip(found[figure], other[figure], strict=True)]
        if other.get("prefill"):
            found["prefill"] = max(found["prefill"], other["prefill"], key=lambda rate: rate["tokens_per_s"])
        if other.get("beams_tokens_per_s"):
            found["beams_tokens_per_s"] = max(found["beams_tokens_per_s"], other["beams_tokens_per_s"])
    return found


def threads(found):
    """The number of threads that each figure is from, of `{threads: result}`."""
    of = {figure: min(found, key=lambda n: found[n][figure]) for figure in LESS if figure in next(iter(found.values()))}
    for figure in RATES:
        for i, rate in enumerate(next(iter(found.values()))[figure]):
            of[f"{figure} {rate['batch']}"] = max(found, key=lambda n: found[n][figure][i]["tokens_per_s"])
    return of
