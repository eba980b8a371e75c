"""Golden list of the keys of `generation_config.json`: those of transformers' class, and those that Whisper adds."""

import inspect
import re

from transformers import GenerationConfig
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor
from transformers.models.whisper import generation_whisper

from common import ROOT, write_json

ACCESS = r"generat(?:ion|e)_config\.([a-z_]+)\b(?!\()|generat(?:ion|e)_config, \"([a-z_]+)\""


def make():
    print("generation", flush=True)
    config = GenerationConfig()
    defaults = {key: None for key in vars(config)} | config._get_default_generation_params()
    code = inspect.getsource(generation_whisper) + inspect.getsource(WhisperTimeStampLogitsProcessor)
    names = {a or b for a, b in re.findall(ACCESS, code)}
    whisper = {name for name in names if not hasattr(config, name) and not name.startswith("_") and name != "json"}
    write_json(ROOT / "generation" / "keys.json", {
        "generation_config": dict(sorted(defaults.items())), "whisper": {name: None for name in sorted(whisper)},
    })
