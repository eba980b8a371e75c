"""Speech by espeak-ng, and what transformers writes of it with the real Whisper tiny.en.

    cargo xtask whisper                      # makes .cache/whisper-tiny.en
    venv/bin/python tests/golden/tiny_en.py  # needs espeak-ng; writes tests/golden/tiny_en/
"""

import json
import subprocess
from pathlib import Path

import numpy as np
import soundfile
import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor

HERE = Path(__file__).parent
MODEL = HERE.parent.parent / ".cache" / "whisper-tiny.en"
OUT = HERE / "tiny_en"
RATE = 16_000
CLIPS = [
    ("en-us", 140, "The quick brown fox jumps over the lazy dog."),
    ("en-gb", 145, "We will meet at the station on Monday morning."),
    ("en-us+f3", 140, "Please turn off the lights before you leave the house."),
    ("en-gb-scotland", 140, "My brother bought a new car last summer."),
]


def speak(voice: str, speed: int, text: str) -> np.ndarray:
    command = ["espeak-ng", "--stdout", "-v", voice, "-s", str(speed), text]
    spoken = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    # A stream's header gives no length, so the samples are read past it.
    sound = np.frombuffer(spoken, dtype="<i2", offset=44).astype(np.float64)
    n = -(-len(sound) // 441) * 441
    n_out = n * 320 // 441
    sound = np.fft.irfft(np.fft.rfft(sound, n)[: n_out // 2 + 1], n_out) * (n_out / n)
    return (sound / np.abs(sound).max() * 0.7).astype(np.float32)


def main() -> None:
    OUT.mkdir(exist_ok=True)
    processor = WhisperProcessor.from_pretrained(MODEL)
    model = WhisperForConditionalGeneration.from_pretrained(MODEL, dtype=torch.float32).eval()
    rows = []
    for i, (voice, speed, said) in enumerate(CLIPS):
        file = f"{i}.flac"
        soundfile.write(OUT / file, speak(voice, speed, said), RATE, subtype="PCM_16", format="FLAC")
        sound, _ = soundfile.read(OUT / file, dtype="float32")
        features = processor(sound, sampling_rate=RATE, return_tensors="pt").input_features
        written = model.generate(features, do_sample=False, num_beams=1)
        text = processor.batch_decode(written, skip_special_tokens=True)[0].strip()
        rows.append({"file": file, "voice": voice, "said": said, "written": text})
        print(rows[-1], flush=True)
    with open(OUT / "expected.json", "w", encoding="utf-8") as out:
        json.dump(rows, out, indent=1)
        out.write("\n")


if __name__ == "__main__":
    main()
