"""Times torch over the work that `throughput` and `ops` time, on the same device and over the same shapes.

    python benches/device/torch_side.py ops linear:4096x1280x5120 attention:8x1500x20x20x64
    python benches/device/torch_side.py model DIR --item 896 --encode-batches 1,8 --batches 1,8,32 --new-tokens 64

Models are written here with as few launches as torch's own ops allow: fused projections, scaled_dot_product_attention, keys
and values in place; random weights in bf16. `eager` submits each launch, `graphs` replays them as one CUDA graph, `compiled`
is the same with each layer compiled by torch.compile. Times are of CUDA events, the best of several; nothing is copied from
or to the host in them, and nobody looks at the tokens. Prints a line of JSON after each measurement; the last has all. Its
keys are those of the other side, and `costs`: operations and fewest bytes of each work, told without torch too.
"""

import argparse
import json
import sys
import time
from pathlib import Path

#: Launches of an op in one graph, as in `ops`.
GRAPH_LAUNCHES = 16
#: A projection as wide as the largest product of any of the models.
PEAK_SIDE = 8192
MODES = ["eager", "graphs", "compiled"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ms", type=float, default=30, help="of each of three measurements, of which the best counts")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("ops").add_argument("cases", nargs="+")
    model = commands.add_parser("model")
    model.add_argument("directory", type=Path)
    model.add_argument("--item", type=int, default=0, help="side of an image in pixels")
    model.add_argument("--encode-batches", default="1")
    model.add_argument("--batches", default="1")
    model.add_argument("--text-tokens", type=int, default=4)
    model.add_argument("--new-tokens", type=int, default=64)
    model.add_argument("--modes", default=",".join(MODES))
    model.add_argument("--compile-seconds", type=float, default=60, help="no layer is compiled after so long")
    return parser.parse_args()


def sizes(case):
    """Kind and numbers of a case of `ops`."""
    kind, _, numbers = case.partition(":")
    return kind, [int(n) for n in numbers.split("x")]


def op_cost(case):
    """Operations and fewest bytes of a case."""
    kind, numbers = sizes(case)
    if kind in ("linear", "logits"):
        rows, n_in, n_out = numbers
        return 2 * rows * n_in * n_out, 2 * (rows * n_in + n_in * n_out + rows * n_out)
    seqs, tokens, heads, kv_heads, width = numbers
    queries = 1 if kind == "decode" else tokens
    scores = seqs * queries * tokens / (2 if kind == "causal" else 1)
    return 4 * scores * heads * width, 4 * seqs * width * (queries * heads + tokens * kv_heads)


class Whisper:
    """Shapes and costs of a Whisper; a layer's weights are its rows times its columns."""

    def __init__(self, config, args):
        self.d, self.heads, self.inner = config["d_model"], config["encoder_attention_heads"], config["encoder_ffn_dim"]
        self.layers, self.vocab, self.mels = config["encoder_layers"], config["vocab_size"], config["num_mel_bins"]
        self.rows, self.width = config["max_source_positions"], self.d // self.heads
        # The prompt, and half of what is written.
        self.context = 4 + args.new_tokens // 2

    def encode(self, batch):
        d, n = self.d, self.rows
        layer, stem = 4 * d * d + 2 * d * self.inner, 3 * d * (2 * self.mels + d)
        return batch * (2 * n * (self.layers * layer + stem) + self.layers * 4 * n * n * d), 2 * (self.layers * layer + stem)

    def decode(self, batch):
        keys = self.context + self.rows
        weights = self.layers * (6 * self.d * self.d + 2 * self.d * self.inner) + self.vocab * self.d
        values = batch * self.layers * 2 * self.d * keys
        return 2 * batch * weights + 2 * values, 2 * (weights + values)


class Qwen:
    """Shapes and costs of a Qwen2.5-VL."""

    def __init__(self, config, args):
        vision = config["vision_config"]
        self.d, self.layers, self.vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
        self.heads, self.kv_heads, self.inner = config["num_attention_heads"], config["num_key_value_heads"], config["intermediate_size"]
        self.width = self.d // self.heads
        self.vd, self.vlayers, self.vheads, self.vinner = vision["hidden_size"], vision["depth"], vision["num_heads"], vision["intermediate_size"]
        self.full, self.merge = vision["fullatt_block_indexes"], vision["spatial_merge_size"]
        self.patch = vision["in_chans"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
        side = args.item // vision["patch_size"]
        window = vision["window_size"] // vision["patch_size"]
        if side % window:
            sys.exit(f"an image of {args.item} pixels has a window that is cut, and this side has whole ones alone")
        self.rows, self.in_window = side * side, window * window
        self.merged = self.rows // self.merge**2
        # The prompt, and half of what is written.
        self.context = self.merged + args.text_tokens + args.new_tokens // 2

    def encode(self, batch):
        d, n, wide = self.vd, self.rows, self.vd * self.merge**2
        layer, merger = 4 * d * d + 3 * d * self.vinner, wide * (wide + self.d)
        keys = len(self.full) * n + (self.vlayers - len(self.full)) * self.in_window
        operations = 2 * n * (self.vlayers * layer + self.patch * d) + 2 * self.merged * merger + 4 * n * keys * d
        return batch * operations, 2 * (self.vlayers * layer + merger)

    def decode(self, batch):
        kv = self.kv_heads * self.width
        weights = self.layers * (2 * self.d * self.d + 2 * self.d * kv + 3 * self.d * self.inner) + self.vocab * self.d
        values = batch * self.layers * 2 * kv * self.context
        return 2 * batch * weights + batch * self.layers * 4 * self.d * self.context, 2 * (weights + values)


class Clock:
    """Times work on a device."""

    def __init__(self, device, ms):
        self.device, self.ms, self.is_cuda = device, ms, device.startswith("cuda")

    def once(self, run, n):
        """Milliseconds of one of `n` runs."""
        if not self.is_cuda:
            start = time.perf_counter()
            for _ in range(n):
                run()
            return (time.perf_counter() - start) * 1e3 / n
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(n):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / n

    def best(self, run):
        """The best of three measurements."""
        self.once(run, 1)
        one = self.once(run, 2)
        return min(self.once(run, max(1, min(4096, int(self.ms / max(one, 1e-4))))) for _ in range(3))

    def graph(self, run):
        """The same work as one CUDA graph."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay


def attend(q, k, v, causal=False):
    """`[seqs, tokens, heads, width]` each; fewer heads of keys are shared."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(2)


def op(case, device):
    """A function that submits a case once."""
    kind, numbers = sizes(case)
    random = lambda *shape: torch.randn(*shape, device=device, dtype=torch.bfloat16)
    if kind in ("linear", "logits"):
        rows, n_in, n_out = numbers
        x, w = random(rows, n_in), random(n_out, n_in)
        return lambda: F.linear(x, w)
    seqs, tokens, heads, kv_heads, width = numbers
    q = random(seqs, 1 if kind == "decode" else tokens, heads, width)
    k, v = random(seqs, tokens, kv_heads, width), random(seqs, tokens, kv_heads, width)
    return lambda: attend(q, k, v, kind == "causal")


def peak(clock):
    """Rates of a large product and of a large copy on this device."""
    side, n_bytes = (PEAK_SIDE, 2 << 30) if clock.is_cuda else (256, 1 << 20)
    a, b = (torch.randn(side, side, device=clock.device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(n_bytes, device=clock.device, dtype=torch.uint8)
    to = torch.empty_like(source)
    return {"flops_per_s": 2e3 * side**3 / clock.best(lambda: a @ b), "bytes_per_s": 2e3 * n_bytes / clock.best(lambda: to.copy_(source))}


class Random:
    """Weights, made when a layer is."""

    def __init__(self, device):
        self.device = device

    def __call__(self, *shape):
        return torch.empty(*shape, device=self.device, dtype=torch.bfloat16).normal_(std=0.02)

    def linear(self, n_out, n_in):
        return self(n_out, n_in), self(n_out)

    def norm(self, width):
        return self(width) + 1, self(width)


def layer_norm(x, norm):
    return F.layer_norm(x, x.shape[-1:], *norm)


def rms_norm(x, norm):
    return F.rms_norm(x, x.shape[-1:], norm[0], 1e-6)


def rotate(x, angles):
    """`x: [seqs, tokens, heads, width]`, `angles`: cosines and sines, `[tokens, 1, width]`."""
    half = x.shape[-1] // 2
    return x * angles[0] + torch.cat((-x[..., half:], x[..., :half]), -1) * angles[1]


def heads_of(x, width):
    return x.unflatten(-1, (-1, width))


def encoder_layer(x, w, width, seqs, angles):
    """A layer of either encoder; `x: [seqs, tokens, d]`, attention inside of `seqs` parts of each sequence."""
    norm = layer_norm if angles is None else rms_norm
    q, k, v = heads_of(F.linear(norm(x, w["norm1"]), *w["qkv"]), width).chunk(3, -2)
    if angles is not None:
        q, k = rotate(q, angles), rotate(k, angles)
    q, k, v = (part.reshape(part.shape[0] * seqs, -1, *part.shape[2:]) for part in (q, k, v))
    x = x + F.linear(attend(q, k, v).reshape(x.shape), *w["out"])
    return x + mlp(norm(x, w["norm2"]), w)


def mlp(x, w):
    if "up" in w:
        return F.linear(F.gelu(F.linear(x, *w["up"])), *w["down"])
    gate, up = F.linear(x, *w["gate_up"]).chunk(2, -1)
    return F.linear(F.silu(gate) * up, *w["down"])


def decoder_layer(x, w, width, cache, angles):
    """A layer of either decoder for one token of each sequence; `x: [seqs, 1, d]`, the last place of the cache is its own."""
    norm = layer_norm if angles is None else rms_norm
    (keys, values), n_heads = cache["own"], w["out"][0].shape[1] // width
    qkv = heads_of(F.linear(norm(x, w["norm1"]), *w["qkv"]), width)
    q, k, v = qkv.split((n_heads, keys.shape[2], keys.shape[2]), -2)
    if angles is not None:
        q, k = rotate(q, angles), rotate(k, angles)
    keys[:, -1:], values[:, -1:] = k, v
    x = x + F.linear(attend(q, keys, values), *w["out"])
    if "cross" in cache:
        q = heads_of(F.linear(norm(x, w["norm_cross"]), *w["cross_q"]), width)
        x = x + F.linear(attend(q, *cache["cross"]), *w["cross_out"])
    return x + mlp(norm(x, w["norm2"]), w)


def angles_of(rows, width, device):
    angle = torch.rand(rows, 1, width, device=device)
    return angle.cos().bfloat16(), angle.sin().bfloat16()


def whisper_encoder(of, new):
    layers = [{"norm1": new.norm(of.d), "qkv": new.linear(3 * of.d, of.d), "out": new.linear(of.d, of.d), "norm2": new.norm(of.d),
               "up": new.linear(of.inner, of.d), "down": new.linear(of.d, of.inner)} for _ in range(of.layers)]
    convs, last, positions = ((new(of.d, of.mels, 3), new(of.d)), (new(of.d, of.d, 3), new(of.d))), new.norm(of.d), new(of.rows, of.d)

    def prepared(batch):
        features = new(batch, of.mels, 2 * of.rows)

        def run(layer):
            x = F.gelu(F.conv1d(features, *convs[0], padding=1))
            x = F.gelu(F.conv1d(x, *convs[1], stride=2, padding=1)).transpose(1, 2) + positions
            for w in layers:
                x = layer(x, w, of.width, 1, None)
            return layer_norm(x, last)
        return run
    return prepared, encoder_layer


def qwen_encoder(of, new):
    layers = [{"norm1": new.norm(of.vd), "qkv": new.linear(3 * of.vd, of.vd), "out": new.linear(of.vd, of.vd), "norm2": new.norm(of.vd),
               "gate_up": new.linear(2 * of.vinner, of.vd), "down": new.linear(of.vd, of.vinner)} for _ in range(of.vlayers)]
    wide = of.vd * of.merge**2
    stem, last, merger = new(of.vd, of.patch), new.norm(of.vd), (new.linear(wide, wide), new.linear(of.d, wide))
    angles = angles_of(of.rows, of.vd // of.vheads, new.device)

    def prepared(batch):
        patches = new(batch, of.rows, of.patch)

        def run(layer):
            x = F.linear(patches, stem)
            for i, w in enumerate(layers):
                x = layer(x, w, of.vd // of.vheads, 1 if i in of.full else of.rows // of.in_window, angles)
            x = rms_norm(x, last).reshape(batch, -1, wide)
            return F.linear(F.gelu(F.linear(x, *merger[0])), *merger[1])
        return run
    return prepared, encoder_layer


def decoder(of, new):
    is_whisper = isinstance(of, Whisper)
    kv_heads = of.heads if is_whisper else of.kv_heads
    wide = (of.heads + 2 * kv_heads) * of.width

    def weights():
        w = {"norm1": new.norm(of.d), "qkv": new.linear(wide, of.d), "out": new.linear(of.d, of.d), "norm2": new.norm(of.d), "down": new.linear(of.d, of.inner)}
        if is_whisper:
            further = {"norm_cross": new.norm(of.d), "cross_q": new.linear(of.d, of.d), "cross_out": new.linear(of.d, of.d)}
            return w | further | {"up": new.linear(of.inner, of.d)}
        return w | {"gate_up": new.linear(2 * of.inner, of.d)}
    layers = [weights() for _ in range(of.layers)]
    table, last, norm = new(of.vocab, of.d), new.norm(of.d), layer_norm if is_whisper else rms_norm
    head = table if is_whisper else new(of.vocab, of.d)
    angles = None if is_whisper else angles_of(1, of.width, new.device)

    def prepared(batch):
        kv = lambda n: (new(batch, n, kv_heads, of.width), new(batch, n, kv_heads, of.width))
        caches = [{"own": kv(of.context)} | ({"cross": kv(of.rows)} if is_whisper else {}) for _ in layers]
        tokens = torch.full((batch, 1), 7, device=new.device)

        def run(layer):
            x = F.embedding(tokens, table)
            for w, cache in zip(layers, caches):
                x = layer(x, w, of.width, cache, angles)
            tokens.copy_(F.linear(norm(x, last), head).argmax(-1))
        return run
    return prepared, decoder_layer


def time_model(args, of, clock, told):
    modes, deadline = args.modes.split(","), time.monotonic() + args.compile_seconds
    new = Random(args.device)
    works = [("encode", whisper_encoder if isinstance(of, Whisper) else qwen_encoder, args.encode_batches), ("decode", decoder, args.batches)]
    # What compiling takes comes last: it may use up the time.
    made = {name: make(of, new) for name, make, _ in works}
    for mode in [mode for mode in MODES if mode in modes and (mode == "eager" or clock.is_cuda)]:
        for name, _, batches in works:
            prepared, layer = made[name]
            for batch in [int(b) for b in batches.split(",")]:
                if mode == "compiled" and time.monotonic() > deadline:
                    return
                try:
                    of_mode = torch.compile(layer, dynamic=False) if mode == "compiled" else layer
                    run = prepared(batch)
                    submit = lambda: run(of_mode)
                    ms = clock.best(submit if mode == "eager" else clock.graph(submit))
                except RuntimeError as error:
                    # One that does not fit, or cannot be captured, takes none of the others with it.
                    print(f"{name} at batch {batch}, {mode}: {error}", file=sys.stderr)
                    continue
                value = {"ms": ms} if name == "encode" else {"tokens_per_s": batch * 1e3 / ms}
                told.setdefault(name, []).append({"batch": batch, "mode": mode, **value})
                print(json.dumps(told), flush=True)


def time_ops(args, clock, told):
    told["peak"] = peak(clock)
    for case in args.cases:
        run = op(case, args.device)

        def several():
            for _ in range(GRAPH_LAUNCHES):
                run()
        ms = {"eager": clock.best(run)}
        if clock.is_cuda:
            ms["graphs"] = clock.best(clock.graph(several)) / GRAPH_LAUNCHES
        told["ops"] += [{"op": case, "mode": mode, "ms": value} for mode, value in ms.items()]
        print(json.dumps(told), flush=True)


def main():
    global torch, F
    args = arguments()
    if args.command == "ops":
        of, told = None, {"ops": [], "costs": [{"op": c, "flops": op_cost(c)[0], "bytes": op_cost(c)[1]} for c in args.cases]}
    else:
        config = json.loads((args.directory / "config.json").read_text())
        of = (Whisper if config["model_type"] == "whisper" else Qwen)(config, args)
        works = [("encode", of.encode, args.encode_batches), ("decode", of.decode, args.batches)]
        cost = lambda name, work, batch: {"op": name, "batch": batch, **dict(zip(("flops", "bytes"), work(batch)))}
        told = {"costs": [cost(name, work, int(b)) for name, work, batches in works for b in batches.split(",")]}
    print(json.dumps(told), flush=True)
    import torch
    import torch.nn.functional as F

    told["torch"] = torch.__version__
    clock = Clock(args.device, args.ms)
    with torch.inference_mode():
        time_ops(args, clock, told) if of is None else time_model(args, of, clock, told)


if __name__ == "__main__":
    main()
