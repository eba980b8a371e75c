"""Writes models with published shapes and random weights, the same on every machine: models.py OUT NAME… [--smoke].

Whisper-base, T5-small, BART-base, and a Qwen2-VL of benches/models; with --smoke the same families with next to nothing
in them. Beside the models are the items that they read: audio and images, made here too.
"""

import argparse
import json
import math
import shutil
import sys
import wave
from pathlib import Path

import numpy as np
import soundfile
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models as token_models

#: Directories of shapes, without weights.
SHAPES = Path(__file__).resolve().parent.parent / "models"
ENGLISH = 50_257
LANGUAGES = 99


def words_tokenizer(directory, specials, size):
    """A tokenizer of words: only ids matter here."""
    words = list(specials) + [f"w{i}" for i in range(size - len(specials))]
    tokenizer = Tokenizer(token_models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[-1]))
    tokenizer.add_special_tokens(list(specials))
    tokenizer.save(str(directory / "tokenizer.json"))
    # What CTranslate2's converter opens it as: the family's own class cannot read words.
    named = {name: token for name, token in [("pad", "<pad>"), ("eos", "</s>"), ("unk", "<unk>"), ("bos", "<s>")] if token in specials}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **{f"{name}_token": token for name, token in named.items()}}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def whisper(directory, smoke):
    width, layers = (64, 1) if smoke else (512, 6)
    config = transformers.WhisperConfig(
        vocab_size=51_865, d_model=width, encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=width // 64, decoder_attention_heads=width // 64, encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width, begin_suppress_tokens=[], suppress_tokens=[], median_filter_width=7)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=ENGLISH + 1, eos_token_id=ENGLISH, pad_token_id=ENGLISH, bos_token_id=ENGLISH)
    model.save_pretrained(directory)
    transformers.WhisperFeatureExtractor(feature_size=80).save_pretrained(directory)
    words = [f"w{i}" for i in range(ENGLISH)] + ["<|endoftext|>", "<|startoftranscript|>"]
    words += [f"<|{'en' if i == 0 else f'x{i}'}|>" for i in range(LANGUAGES)]
    words += ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    words += [f"<|{i * 0.02:.2f}|>" for i in range(51_865 - len(words))]
    tokenizer = Tokenizer(token_models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="w0"))
    tokenizer.add_special_tokens(words[ENGLISH:])
    tokenizer.save(str(directory / "tokenizer.json"))


def t5(directory, smoke):
    width, layers = (64, 1) if smoke else (512, 6)
    config = transformers.T5Config(
        vocab_size=32_128, d_model=width, d_kv=64, d_ff=4 * width, num_layers=layers, num_heads=width // 64,
        decoder_start_token_id=0)
    transformers.T5ForConditionalGeneration(config).eval().save_pretrained(directory)
    words_tokenizer(directory, ["<pad>", "</s>", "<unk>"], 32_100)


def bart(directory, smoke):
    width, layers = (64, 1) if smoke else (768, 6)
    config = transformers.BartConfig(
        vocab_size=50_265, d_model=width, encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=width // 64, decoder_attention_heads=width // 64, encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width, forced_eos_token_id=None,
        # CTranslate2's converter asks for these.
        normalize_before=False, add_final_layer_norm=False, normalize_embedding=True)
    transformers.BartForConditionalGeneration(config).eval().save_pretrained(directory)
    words_tokenizer(directory, ["<s>", "<pad>", "</s>", "<unk>"], 50_265)


def qwen2vl(directory, smoke):
    shapes = SHAPES / ("qwen2-vl-tiny" if smoke else "qwen2-vl-263m")
    config = transformers.AutoConfig.from_pretrained(shapes)
    transformers.Qwen2VLForConditionalGeneration(config).float().eval().save_pretrained(directory)
    for file in sorted(shapes.iterdir()):
        shutil.copy(file, directory)


def noise(path):
    """Thirty seconds of quiet noise, 16 kHz mono."""
    samples = (torch.randn(480_000, generator=torch.Generator().manual_seed(0)) * 500).to(torch.int16)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(samples.numpy().tobytes())


def hum(path):
    """Thirty seconds of tones that swell, with a little noise, 16 kHz mono: FLAC of speech is about as large."""
    generator = np.random.default_rng(0)
    seconds = np.arange(480_000) / 16_000
    tones = sum(np.sin(2 * math.pi * 180 * k * seconds) / k for k in range(1, 12))
    samples = 1500 * tones * (1 + np.sin(2 * math.pi * 3 * seconds)) + 60 * generator.standard_normal(480_000)
    soundfile.write(path, samples.astype(np.int16), 16_000, subtype="PCM_16", format="FLAC")


def square(path):
    """An image of noise, 640×640."""
    pixels = np.random.default_rng(0).integers(0, 256, (640, 640, 3), np.uint8)
    Image.fromarray(pixels).save(path, compress_level=1)


def photo(path):
    """Gradients, waves and some noise, 1920×1080: as large as a photograph of that size."""
    y, x = np.mgrid[0:1080, 0:1920].astype(np.float32)
    planes = [90 + x / 20 + 30 * np.sin(y / 40), 60 + y / 10 + 30 * np.sin(x / 25), 200 - x / 16 + 20 * np.cos((x + y) / 60)]
    pixels = np.stack(planes, -1) + 6 * np.random.default_rng(0).standard_normal((1080, 1920, 1))
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)


MODELS = {"whisper": whisper, "t5": t5, "bart": bart, "qwen2vl": qwen2vl}
#: What the models read, and what preprocessing is timed with.
ITEMS = {"noise.wav": noise, "audio.flac": hum, "noise.png": square, "photo.jpg": photo}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="+", choices=list(MODELS))
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    for name, write in ITEMS.items():
        write(args.out / name)
    for name in args.names:
        directory = args.out / name
        if (directory / "tokenizer.json").exists():
            continue
        torch.manual_seed(0)
        directory.mkdir(parents=True, exist_ok=True)
        MODELS[name](directory, args.smoke)


if __name__ == "__main__":
    sys.exit(main())
