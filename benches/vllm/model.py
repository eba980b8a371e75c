"""Writes a model of benches/models with random weights, for both engines: model.py SHAPES OUT. Images are at most 640×640."""

import json
import shutil
import sys
from pathlib import Path

import torch
import transformers

MAX_PIXELS = 644 * 644


def main():
    shapes, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(shapes)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(out)
    for file in sorted(shapes.iterdir()):
        shutil.copy(file, out)
    # vLLM sizes its memory for the largest image; in the settings of a server this would change every item's identifier.
    settings = json.loads((out / "preprocessor_config.json").read_text())
    settings["max_pixels"] = settings["size"]["longest_edge"] = MAX_PIXELS
    (out / "preprocessor_config.json").write_text(json.dumps(settings, indent=1) + "\n")


if __name__ == "__main__":
    main()
