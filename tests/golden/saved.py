"""Golden directories as transformers 5 saves them: what `save_pretrained` makes of cases of other makers, without weights.

A processor is one `processor_config.json` there, with its parts nested, and a template is `chat_template.jinja`.
"""

import shutil

from transformers import AutoConfig, AutoProcessor, DonutProcessor, GenerationConfig

from common import ROOT

CASES = [
    "whisper_multilingual", "moonshine_deep_f16", "qwen2_vl_two_images", "qwen2_5_vl_window112", "mllama_small_f32",
    "trocr_vit", "donut_shifted", "florence_windows",
]


def make():
    print("saved", flush=True)
    for case in CASES:
        source, into = ROOT / case / "model", ROOT / "saved" / case
        shutil.rmtree(into, ignore_errors=True)
        processor = DonutProcessor if case.startswith("donut") else AutoProcessor
        for part in (AutoConfig, GenerationConfig, processor):
            part.from_pretrained(source).save_pretrained(into)
        assert not (into / "preprocessor_config.json").exists() and (into / "processor_config.json").exists(), case
