"""One peer on one model, in a process of its own: rivals.py PEER-TYPE DIR whisper|seq2seq|vision --item … ; prints JSON.

    {"encode_ms": …, "decode": [{"batch": 1, "tokens_per_s": …}, …], "steps": [the same], "ready_ms": …, "peak_mb": …}

Decode is greedy, over encoder outputs that are there already; projecting them for cross-attention counts, as it does
on our side. Steps are what follows the first token, without that projection. Where a peer projects with its encode, or
decode cannot be told without steps, both are the steps. A peer that cannot do a batch leaves it out. A vision model (vision.py) tells `prefill` too, and its decode
leaves that out. With --preprocess FILE there is `preprocess_ms` (preparing.py).
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
import wave
from pathlib import Path

import numpy as np


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("who")
    parser.add_argument("directory", type=Path)
    parser.add_argument("kind", choices=["whisper", "seq2seq", "vision"])
    parser.add_argument("--item", required=True)
    parser.add_argument("--text-tokens", type=int, default=0, help="tokens behind the image in a vision model's prompt")
    parser.add_argument("--preprocess", metavar="FILE", type=Path, help="time its way from bytes to what the encoder reads")
    parser.add_argument("--batches", type=lambda text: [int(b) for b in text.split(",")])
    parser.add_argument("--beams", type=int, default=1, help="beams of a search that is timed too; 1: none")
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=1, help="runs of each, of which the shortest counts")
    parser.add_argument("--smoke", action="store_true", help="that it runs, not how fast: times may be noise")
    return parser.parse_args()


def timed(work, repeats=1):
    """The shortest of several runs, in seconds, and what the last one gave."""
    shortest = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        result = work()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest, result


def encoded(seconds):
    return "encode_ms", seconds * 1e3


def decoded(batch, tokens_per_s):
    return "decode", {"batch": batch, "tokens_per_s": tokens_per_s}


def stepped(batch, tokens_per_s):
    return "steps", {"batch": batch, "tokens_per_s": tokens_per_s}


def searched(tokens_per_s):
    return "beams_tokens_per_s", tokens_per_s


def more(args, longer, shorter):
    """Their difference, in seconds. What it says is noise unless the longer run really took longer."""
    if args.smoke:
        return max(longer - shorter, 1e-6)
    if longer <= shorter:
        raise SystemExit(f"{longer:.6f} s where {shorter:.6f} s were less work; more tokens, or a quieter machine")
    return longer - shorter


def ids(args):
    return [10 + i % 80 for i in range(int(args.item))]


def mel(args):
    """Log-mel features of the audio, `[1, n_mels, 3000]`."""
    import transformers

    with wave.open(args.item) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(args.directory)
    return extractor(samples, sampling_rate=16_000, return_tensors="np")["input_features"].astype(np.float32)


def torch_model(args, dtype):
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    config = transformers.AutoConfig.from_pretrained(args.directory)
    return getattr(transformers, config.architectures[0]).from_pretrained(
        args.directory, dtype={"f32": torch.float32, "bf16": torch.bfloat16}[dtype]).eval()


def of_torch(args, dtype):
    import torch
    import transformers

    model = torch_model(args, dtype)
    config = model.config
    yield None
    if args.kind == "whisper":
        inputs = {"input_features": torch.from_numpy(mel(args)).to(model.dtype)}
    else:
        inputs = {"input_ids": torch.tensor([ids(args)])}
    encoder = model.get_encoder()
    encoder(**inputs)
    encode, state = timed(lambda: encoder(**inputs).last_hidden_state, args.repeats)
    yield encoded(encode)

    def seconds(batch, n, beams=1):
        settings = transformers.GenerationConfig(
            max_new_tokens=n, min_new_tokens=n, do_sample=False, num_beams=beams, use_cache=True,
            pad_token_id=config.pad_token_id or 0, eos_token_id=config.eos_token_id,
            decoder_start_token_id=config.decoder_start_token_id)
        states = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=state.repeat(batch, 1, 1))
        # The plain loop: Whisper's own adds language detection and long-form logic, which is not what is compared.
        generate = transformers.GenerationMixin.generate
        return timed(lambda: generate(model, encoder_outputs=states, generation_config=settings), args.repeats)[0]

    for batch in args.batches:
        whole = seconds(batch, args.new_tokens)
        yield decoded(batch, batch * args.new_tokens / whole)
        yield stepped(batch, batch * (args.new_tokens - 1) / more(args, whole, seconds(batch, 1)))
    if args.beams > 1:
        yield searched(args.new_tokens / seconds(1, args.new_tokens, args.beams))


def of_ctranslate2(args, dtype):
    import ctranslate2

    compute = {"f32": "float32", "int8": "int8"}[dtype]
    cached = args.directory.parent / f"{args.directory.name}.ct2"
    if not (cached / "model.bin").exists():
        import ctranslate2.converters

        ctranslate2.converters.TransformersConverter(str(args.directory)).convert(str(cached), quantization="float32", force=True)
    options = {"device": "cpu", "compute_type": compute, "intra_threads": args.threads, "inter_threads": 1}
    if args.kind == "whisper":
        yield from whisper_of_ctranslate2(args, ctranslate2.models.Whisper(str(cached), **options))
        return
    model = ctranslate2.Translator(str(cached), **options)
    yield None
    vocabulary = json.loads((cached / "shared_vocabulary.json").read_text())
    source = [vocabulary[i] for i in ids(args)]

    def translate(batch, n, beams=1):
        settings = {"beam_size": beams, "max_decoding_length": n, "min_decoding_length": n, "max_batch_size": batch}
        return timed(lambda: model.translate_batch([source] * batch, **settings), max(args.repeats, 3))[0]

    translate(1, 2)
    first = translate(1, 1)
    step = more(args, translate(1, args.new_tokens), first) / max(args.new_tokens - 1, 1)
    # It encodes only together with a first token, whose step is taken off.
    yield encoded(more(args, first, step))
    for batch in args.batches:
        began = translate(batch, 1)
        rate = batch * (args.new_tokens - 1) / more(args, translate(batch, args.new_tokens), began)
        yield decoded(batch, rate)
        yield stepped(batch, rate)
    if args.beams > 1:
        began = translate(1, 1, args.beams)
        yield searched((args.new_tokens - 1) / more(args, translate(1, args.new_tokens, args.beams), began))


def whisper_of_ctranslate2(args, model):
    import ctranslate2

    yield None
    features = mel(args)
    one = ctranslate2.StorageView.from_array(features)
    model.encode(one, to_cpu=True)
    encode, _ = timed(lambda: model.encode(one, to_cpu=True), args.repeats)
    yield encoded(encode)
    vocabulary = json.loads((args.directory.parent / f"{args.directory.name}.ct2/vocabulary.json").read_text())
    prompt = [vocabulary.index("<|startoftranscript|>")]

    def written(batch, n, beams=1):
        """(seconds, tokens) of answers of `n` tokens each, or to their end."""
        many = ctranslate2.StorageView.from_array(np.repeat(features, batch, axis=0))
        outputs = model.encode(many, to_cpu=True)
        settings = {"beam_size": beams, "max_length": n + 1, "suppress_blank": False, "suppress_tokens": []}
        took, results = timed(lambda: model.generate(outputs, [prompt] * batch, **settings), args.repeats)
        return took, sum(len(result.sequences_ids[0]) for result in results)

    for batch in args.batches:
        (took, n), (began, n_first) = written(batch, args.new_tokens), written(batch, 1)
        yield decoded(batch, n / took)
        yield stepped(batch, max(n - n_first, 1) / more(args, took, began))
    if args.beams > 1:
        took, n = written(1, args.new_tokens, args.beams)
        yield searched(n / took)


def of_whispercpp(args, dtype):
    import _pywhispercpp as cpp
    import ggml

    cached = args.directory.parent / f"{args.directory.name}.{dtype}.bin"
    if not cached.exists():
        ggml.write(args.directory, cached, dtype)
    context = cpp.whisper_init_from_file_with_params(str(cached), cpp.whisper_context_default_params())
    yield None
    features = mel(args)[0]
    cpp.whisper_set_mel(context, np.ascontiguousarray(features).reshape(-1), features.shape[1], features.shape[0])
    cpp.whisper_encode(context, 0, args.threads)
    encode, _ = timed(lambda: cpp.whisper_encode(context, 0, args.threads), args.repeats)
    yield encoded(encode)
    if 1 not in args.batches:
        return

    def write():
        token = cpp.whisper_token_sot(context)
        for past in range(args.new_tokens):
            # The binding takes one token, by value.
            cpp.whisper_decode(context, token, 1, past, args.threads)
            # Logits are computed and, as copying them through the binding is not whisper.cpp's doing, left there.
            token = 100 + past

    took, _ = timed(write, args.repeats)
    # It projects with its encode.
    yield decoded(1, args.new_tokens / took)
    yield stepped(1, args.new_tokens / took)


def work_of(args):
    """`None` when the model is ready, then pairs of a figure and its value."""
    who, _, dtype = args.who.partition("-")
    if args.kind == "vision":
        import vision

        return {"torch": vision.of_torch, "vllm": vision.of_vllm}[who](args, dtype)
    return {"torch": of_torch, "ctranslate2": of_ctranslate2, "whispercpp": of_whispercpp}[who](args, dtype)


def main():
    args = arguments()
    work = work_of(args)
    # Libraries print to standard output; the result goes where it was.
    out = os.dup(1)
    os.dup2(2, 1)
    next(work)
    ready = time.time() - float(os.environ.get("STARTED_AT", time.time()))
    result = {"ready_ms": ready * 1e3, "decode": [], "steps": []}
    for what, value in work:
        if what in ("decode", "steps"):
            result[what].append(value)
        else:
            result[what] = value
    result["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if args.preprocess:
        import preparing

        result |= preparing.measured(args)
    os.write(out, (json.dumps(result) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main())
