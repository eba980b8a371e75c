"""Speech, and its transcripts by transformers with the real Whisper tiny.en: text, segments, words.

    cargo xtask whisper                                 # makes .cache/whisper-tiny.en
    venv/bin/python tests/golden/tiny_en.py LIBRIVOX    # needs espeak-ng; writes tests/golden/tiny_en/

LIBRIVOX is the folder test/data/librivox of the source package pocketsphinx 5.1.1 on PyPI: five sentences of a
LibriVox recording of "Sense and Sensibility", in the public domain. Everything else is spoken by espeak-ng.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import soundfile
import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

HERE = Path(__file__).parent
MODEL = HERE.parent.parent / ".cache" / "whisper-tiny.en"
OUT = HERE / "tiny_en"
RATE = 16_000
STEP = 0.02
CLIPS = [
    ("en-us", 140, "The quick brown fox jumps over the lazy dog."),
    ("en-gb", 145, "We will meet at the station on Monday morning."),
    ("en-us+f3", 140, "Please turn off the lights before you leave the house."),
    ("en-gb-scotland", 140, "My brother bought a new car last summer."),
    ("en-us+m3", 150, "The train to London was late because of the snow."),
    ("en-gb+f2", 140, "She keeps three cats and a very old dog."),
    ("en-us+f4", 145, "There are seven apples and eleven oranges on the table."),
    ("en-gb-x-rp", 140, "The museum opens at nine in the morning."),
    ("en-us+m5", 135, "Could you tell me the way to the library, please?"),
    ("en-gb-scotland+f1", 140, "It rained all day, so we stayed at home."),
    ("en-us+m1", 155, "He wrote a long letter to his sister in Paris."),
    ("en-gb+m4", 140, "The children are playing football in the garden."),
    ("en-us+f1", 140, "I would like a cup of coffee with milk."),
    ("en-gb-x-gbclan", 140, "The bridge was built more than a hundred years ago."),
    ("en-us+m7", 140, "Nobody knows what will happen tomorrow."),
]
STORIES = [
    ("en-us", 140, [
        "Last year we travelled across the country by train.",
        "The first stop was a small town near the mountains.",
        "It was cold, and there was snow on every roof.",
        "We stayed for two nights in an old hotel by the river.",
        "In the morning the owner made us a large breakfast.",
        "Then we walked through the forest until the afternoon.",
        "On the third day we took the early train to the coast.",
        "The sea was calm, and the beach was almost empty.",
        "My sister found a green bottle with a letter inside.",
        "We never found out who had written it.",
    ]),
    ("en-gb", 150, [
        "Good evening, and welcome to the weather report.",
        "Tomorrow will begin with clouds in the north and west.",
        "By noon the rain will reach the eastern counties.",
        "Temperatures will stay between ten and fourteen degrees.",
        "There may be strong winds along the southern coast.",
        "On Wednesday it will be dry and sunny for most of the day.",
        "The weekend looks warm, with a chance of thunder on Sunday evening.",
        "Farmers should expect some frost in the valleys at night.",
        "That is all for now, and we will be back at six.",
    ]),
]


def speak(voice: str, speed: int, text: str) -> np.ndarray:
    command = ["espeak-ng", "--stdout", "-v", voice, "-s", str(speed), text]
    spoken = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    # A stream's header gives no length, so the samples are read past it.
    audio = np.frombuffer(spoken, dtype="<i2", offset=44).astype(np.float64)
    n = -(-len(audio) // 441) * 441
    n_out = n * 320 // 441
    audio = np.fft.irfft(np.fft.rfft(audio, n)[: n_out // 2 + 1], n_out) * (n_out / n)
    return (audio / np.abs(audio).max() * 0.7).astype(np.float32)


def coarse(audio: np.ndarray) -> np.ndarray:
    """Eleven bits a sample: FLAC stores those that are used."""
    return np.round(audio * 1024) / 1024


def story(voice: str, speed: int, sentences: list[str]) -> np.ndarray:
    pause = np.zeros(int(0.6 * RATE), np.float32)
    parts = [part for said in sentences for part in (speak(voice, speed, said), pause)]
    return np.concatenate(parts)


def clips(librivox: Path):
    """Name, voice, what is said, samples; `None` for clips whose file is there."""
    for i, (voice, speed, said) in enumerate(CLIPS):
        yield f"{i}.flac", voice, said, None if i < 4 else coarse(speak(voice, speed, said))
    for i, (voice, speed, sentences) in enumerate(STORIES):
        yield f"long-{i}.flac", voice, " ".join(sentences), coarse(story(voice, speed, sentences))
    files = sorted(librivox.glob("*.wav"))
    said = dict(line.split("|") for line in (SAID.strip().splitlines()))
    read = {f: soundfile.read(f, dtype="float32")[0] for f in files}
    for f in files:
        yield f"real-{f.stem[-4:]}.flac", "LibriVox", said[f.stem[-4:]], read[f]
    # A reader without pauses of our own making, longer than a window.
    order = [*files, *files[:2]]
    whole = np.concatenate([read[f] for f in order])
    yield "long-real.flac", "LibriVox", " ".join(said[f.stem[-4:]] for f in order), coarse(whole)


SAID = """
0870|and mister john dashwood had then leisure to consider how much there might be prudently in his power to do for them
0880|he was not an ill disposed young man
0890|unless to be rather cold hearted and rather selfish is to be ill disposed
0920|had he married a more amiable woman he might have been made still more respectable than he was
0930|he might even have been made amiable himself
"""


def timed(model, processor, audio: np.ndarray, **how) -> list[dict]:
    """Segments with their words, as transformers' long-form generation and its pipeline's tokenizer tell them."""
    long = len(audio) > 30 * RATE
    shape = dict(truncation=False, padding="longest") if long else {}
    read = processor(audio, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **shape)
    out = model.generate(
        read.input_features, attention_mask=read.attention_mask, do_sample=False, num_beams=1,
        return_timestamps=True, return_token_timestamps=True, return_segments=True, **how)
    begin = model.generation_config.no_timestamps_token_id + 1
    segments = []
    for segment in out["segments"][0]:
        tokens, times = segment["tokens"].tolist(), segment["token_timestamps"].tolist()
        places = [i for i, token in enumerate(tokens) if token < begin]
        text = [tokens[i] for i in places]
        if not text:
            continue
        words, _, indices = _combine_tokens_into_words(processor.tokenizer, text, "english")
        at = lambda i: round(times[i], 2) if i >= 0 else round(float(segment["start"]), 2)
        segments.append({
            "start": round(float(segment["start"]), 2), "end": round(float(segment["end"]), 2),
            "text": processor.tokenizer.decode(text),
            "words": [[w, at(places[k[0]] - 1), at(places[k[-1]])] for w, k in zip(words, indices)],
        })
    return segments


def main() -> None:
    OUT.mkdir(exist_ok=True)
    processor = WhisperProcessor.from_pretrained(MODEL)
    model = WhisperForConditionalGeneration.from_pretrained(MODEL, dtype=torch.float32).eval()
    rows = []
    for file, voice, said, samples in clips(Path(sys.argv[1])):
        if samples is not None:
            soundfile.write(OUT / file, samples, RATE, subtype="PCM_16", format="FLAC")
        audio, _ = soundfile.read(OUT / file, dtype="float32")
        row = {"file": file, "voice": voice, "said": said}
        if len(audio) <= 30 * RATE:
            features = processor(audio, sampling_rate=RATE, return_tensors="pt").input_features
            written = model.generate(features, do_sample=False, num_beams=1)
            row["written"] = processor.batch_decode(written, skip_special_tokens=True)[0].strip()
        row["segments"] = timed(model, processor, audio)
        if len(audio) > 30 * RATE:
            row["conditioned"] = [
                {k: v for k, v in s.items() if k != "words"}
                for s in timed(model, processor, audio, condition_on_prev_tokens=True)]
        rows.append(row)
        print(file, len(audio) / RATE, row.get("written"), [s["text"] for s in row["segments"]], flush=True)
    with open(OUT / "expected.json", "w", encoding="utf-8") as out:
        out.write("[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
