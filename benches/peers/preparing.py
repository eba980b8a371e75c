"""What peers take from a file's bytes, in memory already, to what an encoder reads: milliseconds of the fastest way.

Audio becomes log-mel features by soundfile (libsndfile) and transformers' WhisperFeatureExtractor on torch; torchaudio was not
tried. An image becomes patches by torchvision or Pillow,
then transformers' processor on torchvision or on Pillow; every pair is tried.
"""

import io
import itertools

from rivals import timed

#: Preprocessing is short: so many times the runs of the rest.
RUNS = 4


def sound_ways(args, data):
    """`{name: work}`, each from FLAC bytes to `[1, n_mels, 3000]`."""
    import soundfile
    import transformers

    extractor = transformers.WhisperFeatureExtractor.from_pretrained(args.directory)

    def features():
        samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
        return extractor(samples, sampling_rate=rate, return_tensors="pt")["input_features"]

    return {"soundfile, torch": features}


def image_ways(args, data):
    """`{name: work}`, each from JPEG bytes to `[n_patches, patch_dim]`."""
    import numpy as np
    import torch
    import transformers
    from PIL import Image
    from torchvision.io import ImageReadMode, decode_jpeg

    held = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    decoders = {
        "torchvision": lambda: decode_jpeg(held, mode=ImageReadMode.RGB),
        "Pillow": lambda: Image.open(io.BytesIO(data)).convert("RGB"),
    }
    processors = {backend: transformers.AutoImageProcessor.from_pretrained(args.directory, backend=backend)
                  for backend in ("torchvision", "pil")}

    def way(decode, process):
        return lambda: process(decode(), return_tensors="pt")["pixel_values"]

    return {f"{decoder}, {backend}": way(decoders[decoder], processors[backend])
            for decoder, backend in itertools.product(decoders, processors)}


def measured(args):
    """`preprocess_ms` of the fastest way, and of each."""
    data = args.preprocess.read_bytes()
    ways = {"whisper": sound_ways, "vision": image_ways}[args.kind](args, data)
    took = {}
    for name, work in ways.items():
        work()
        took[name] = timed(work, args.repeats * RUNS)[0] * 1e3
    return {"preprocess_ms": min(took.values()), "preprocess_ways_ms": took}
