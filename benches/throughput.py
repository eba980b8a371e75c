"""Tokens per second of this engine and of Hugging Face transformers, in turn, in one run.

    python -m venv venv && venv/bin/pip install -r tests/golden/requirements.txt
    venv/bin/python benches/throughput.py            # or: whisper t5 bart, --new-tokens N, --threads N, --help

Models have the published shapes and random weights: what they write is noise, and how fast they write it is not.
Both sides get the same weights, the same encoder outputs' sizes, and write the same number of tokens greedily
(transformers with its KV cache and encoder outputs computed before). Rounds alternate, and the best of each side
counts. The result is Markdown, on the screen and in benches/results/.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="whisper, t5 or bart; all by default")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--built", action="store_true", help="target/release/throughput is there and up to date")
    args = parser.parse_args()
    args.models = args.models or ["whisper", "t5", "bart"]
    unknown = set(args.models) - {"whisper", "t5", "bart"}
    if unknown:
        parser.error(f"unknown models {sorted(unknown)}, there are whisper, t5 and bart")
    return args


PRECISIONS = ["f32", "bf16", "int8"]
ARGS = arguments()
os.environ["OMP_NUM_THREADS"] = str(ARGS.threads)

import torch  # noqa: E402
import transformers  # noqa: E402
from tokenizers import Tokenizer, models as token_models  # noqa: E402

torch.set_num_threads(ARGS.threads)
torch.set_grad_enabled(False)


def vocabulary(directory, specials, size):
    """A tokenizer of words: only ids matter here."""
    words = list(specials) + [f"w{i}" for i in range(size - len(specials))]
    tokenizer = Tokenizer(token_models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[-1]))
    tokenizer.add_special_tokens(list(specials))
    tokenizer.save(str(directory / "tokenizer.json"))


def silence(directory):
    """Thirty seconds of quiet noise, 16 kHz mono."""
    import wave

    path = directory / "noise.wav"
    generator = torch.Generator().manual_seed(0)
    samples = (torch.randn(480_000, generator=generator) * 500).to(torch.int16)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(samples.numpy().tobytes())
    return str(path)


def whisper(directory):
    text = 50_257
    config = transformers.WhisperConfig(
        vocab_size=51_865, d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048, begin_suppress_tokens=[],
        suppress_tokens=[])
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=text + 1, eos_token_id=text, pad_token_id=text, bos_token_id=text)
    model.save_pretrained(directory)
    transformers.WhisperFeatureExtractor(feature_size=80).save_pretrained(directory)
    words = [f"w{i}" for i in range(text)] + ["<|endoftext|>", "<|startoftranscript|>"]
    languages = ["en"] + [f"x{i}" for i in range(98)]
    words += [f"<|{language}|>" for language in languages]
    words += ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    words += [f"<|{i * 0.02:.2f}|>" for i in range(51_865 - len(words))]
    tokenizer = Tokenizer(token_models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="w0"))
    tokenizer.add_special_tokens(words[text:])
    tokenizer.save(str(directory / "tokenizer.json"))
    features = torch.randn(1, 80, 3000)
    return model, {"input_features": features}, silence(directory)


def t5(directory):
    config = transformers.T5Config(
        vocab_size=32_128, d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8, decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    model.save_pretrained(directory)
    vocabulary(directory, ["<pad>", "</s>", "<unk>"], 32_100)
    return model, {"input_ids": torch.arange(512).reshape(1, -1) % 80 + 10}, "512"


def bart(directory):
    config = transformers.BartConfig(
        vocab_size=50_265, d_model=768, encoder_layers=6, decoder_layers=6, encoder_attention_heads=12,
        decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072, forced_eos_token_id=None)
    model = transformers.BartForConditionalGeneration(config).eval()
    model.save_pretrained(directory)
    vocabulary(directory, ["<s>", "<pad>", "</s>", "<unk>"], 50_265)
    return model, {"input_ids": torch.arange(512).reshape(1, -1) % 80 + 10}, "512"


def theirs(model, inputs, batches):
    """Milliseconds of an encode, and tokens per second at each batch size."""
    encoder = model.get_encoder()
    encoder(**inputs)
    start = time.perf_counter()
    state = encoder(**inputs).last_hidden_state
    encode_ms = (time.perf_counter() - start) * 1e3
    rates = []
    generation = transformers.GenerationConfig(
        max_new_tokens=ARGS.new_tokens, min_new_tokens=ARGS.new_tokens, do_sample=False, num_beams=1, use_cache=True,
        pad_token_id=model.generation_config.pad_token_id or 0, eos_token_id=model.generation_config.eos_token_id,
        decoder_start_token_id=model.generation_config.decoder_start_token_id)
    # The plain loop: Whisper's own adds language detection and long-form logic, which is not what is compared.
    generate = transformers.GenerationMixin.generate
    for batch in batches:
        states = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=state.repeat(batch, 1, 1))
        start = time.perf_counter()
        written = generate(model, encoder_outputs=states, generation_config=generation)
        took = time.perf_counter() - start
        assert written.shape == (batch, ARGS.new_tokens + 1), written.shape
        rates.append(batch * ARGS.new_tokens / took)
    return encode_ms, rates


def ours(directory, item, batches, precision):
    command = [str(ROOT / "target/release/throughput"), str(directory), "--item", item, "--repeats", "1",
               "--batches", ",".join(map(str, batches)), "--new-tokens", str(ARGS.new_tokens),
               "--threads", str(ARGS.threads), "--precision", precision]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result["encode_ms"], [d["tokens_per_s"] for d in result["decode"]]


def merge(best, new):
    if best is None:
        return new
    return min(best[0], new[0]), [max(a, b) for a, b in zip(best[1], new[1])]


def cpu():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main():
    if not ARGS.built:
        subprocess.run(["cargo", "build", "--release", "--package", "triptych-benches"], cwd=ROOT, check=True)
    batches = [int(b) for b in ARGS.batches.split(",")]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    lines = [
        f"# Throughput beside transformers {transformers.__version__}, torch {torch.__version__}",
        "",
        f"{cpu()}, {ARGS.threads} threads, commit {commit}, {datetime.date.today()}; {ARGS.new_tokens} tokens a "
        f"sequence, best of {ARGS.rounds} alternating rounds.",
        "",
        "| model | work | transformers f32 | ours f32 | ratio | ours bf16 | ratio | ours int8 | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in ARGS.models:
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as directory:
            model, inputs, item = globals()[name](Path(directory))
            best = {"theirs": None, "f32": None, "bf16": None, "int8": None}
            for _ in range(ARGS.rounds):
                best["theirs"] = merge(best["theirs"], theirs(model, inputs, batches))
                for precision in PRECISIONS:
                    best[precision] = merge(best[precision], ours(directory, item, batches, precision))
        their = best["theirs"]
        shape = {"whisper": "Whisper-base", "t5": "T5-small", "bart": "BART-base"}[name]
        times = " | ".join(f"{best[p][0]:.0f} | {their[0] / best[p][0]:.2f}" for p in PRECISIONS)
        lines.append(f"| {shape} | encode, ms | {their[0]:.0f} | {times} |")
        for i, batch in enumerate(batches):
            t = their[1][i]
            rates = " | ".join(f"{best[p][1][i]:.0f} | {best[p][1][i] / t:.2f}" for p in PRECISIONS)
            lines.append(f"| {shape} | decode at batch {batch}, tokens/s | {t:.0f} | {rates} |")
        print("\n".join(lines[-1 - len(batches):]), flush=True)
    text = "\n".join(lines) + "\n"
    results = ROOT / "benches/results"
    results.mkdir(exist_ok=True)
    (results / "throughput.md").write_text(text)
    print("\n" + text)


if __name__ == "__main__":
    main()
