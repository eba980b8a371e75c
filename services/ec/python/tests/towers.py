"""Small checkpoints that vLLM loads too: towers as in the golden models, text widths for which vLLM has kernels.

Run with the environment of the tests: towers.py NAME DIRECTORY.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

GOLDEN = Path(__file__).parents[4] / "tests/golden"

TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Two heads of 32, the smallest that vLLM's attention on CPUs has."""

MODELS = {
    "qwen2-vl": ("qwen2_vl_two_images", [4, 6, 6], {"hidden_size": 64}),
    "qwen2.5-vl": ("qwen2_5_vl_window112", [4, 6, 6], {"out_hidden_size": 64}),
    "qwen3-vl": ("qwen3_vl_one_level", [8, 4, 4], {"out_hidden_size": 64}),
}
"""Golden model, sections of its rotary positions, and what its tower gives to a text of this width."""


def make(name: str, directory: Path) -> None:
    """Writes the model with random weights, the same in every run."""
    import torch
    import transformers

    golden, sections, tower = MODELS[name]
    directory.mkdir(parents=True)
    for file in (GOLDEN / golden / "model").iterdir():
        if file.suffix == ".json":
            shutil.copy(file, directory)
    config = json.loads((directory / "config.json").read_text())
    text = config.get("text_config", config)
    text |= TEXT | ({"head_dim": 32} if "head_dim" in text else {})
    text["rope_scaling"]["mrope_section"] = sections
    config["vision_config"] |= tower
    config["torch_dtype"] = "float32"
    (directory / "config.json").write_text(json.dumps(config))

    torch.manual_seed(7)
    loaded = transformers.AutoConfig.from_pretrained(directory)
    model = transformers.AutoModelForImageTextToText.from_config(loaded, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            # So wide that rows have values of about one, and differences show.
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
        else:
            torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.1)
    model.save_pretrained(directory)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
