"""Golden files of LoRA adapters: pairs that PEFT writes for models of other cases, and what those models then compute.

An adapter is drawn so that it changes the tokens. Its directory is what `save_pretrained` of PEFT writes; one has its weights
as a pickle, as older versions wrote them, and one in f16.
"""

import dataclasses
import json
import shutil

import numpy as np
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, WhisperForConditionalGeneration

from common import MIN_GAP, ROOT, first_good_seed, generator, smallest_gap, write_compact, write_tensors

STEPS = 24
LOGIT_ROWS = 12
"""Rows of logits that are kept, the last ones of a prompt."""
ATTENTION = ["q_proj", "v_proj"]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WHISPER = r".*decoder.*\.(q_proj|k_proj|v_proj|out_proj|fc1|fc2)"


@dataclasses.dataclass(frozen=True)
class Adapter:
    name: str
    settings: dict
    disk: torch.dtype = torch.float32
    pickled: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    base: str
    adapters: tuple
    seed: int


CASES = [
    Case("lora_llama", "llama_tied", (
        Adapter("attention", {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION}),
        Adapter("everything", {
            "r": 3, "lora_alpha": 6, "target_modules": ALL, "use_rslora": True,
            "rank_pattern": {"model.layers.1.self_attn.q_proj": 9, "down_proj": 2},
            "alpha_pattern": {"k_proj": 4},
        }, torch.float16),
        Adapter("feed_forward", {
            "r": 2, "lora_alpha": 3, "target_modules": ["up_proj", "down_proj"], "layers_to_transform": [1],
        }, torch.bfloat16, pickled=True),
    ), 7100),
    Case("lora_qwen2", "qwen2_tied", (
        Adapter("everything", {"r": 5, "lora_alpha": 10, "target_modules": ALL}, torch.bfloat16),
    ), 7200),
    Case("lora_whisper", "whisper_multilingual", (
        Adapter("decoder", {"r": 4, "lora_alpha": 8, "target_modules": WHISPER}),
        Adapter("cross_values", {"r": 8, "lora_alpha": 8, "target_modules": r".*encoder_attn\.(q_proj|v_proj)"}),
    ), 7300),
]


def base_model(case):
    path = ROOT / case.base / "model"
    kind = WhisperForConditionalGeneration if "whisper" in case.base else AutoModelForCausalLM
    return kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def draw(model, adapter, seed):
    for name, p in model.named_parameters():
        if "lora_" in name:
            x = generator(seed, f"{adapter.name} {name}").standard_normal(p.shape, dtype=np.float32)
            # What an adapter adds is smaller than what it adds to, or rounding decides the logits.
            factor = 0.3 if "lora_B" in name else 1.0
            p.copy_(torch.from_numpy(factor * x / np.sqrt(p.shape[1])).to(adapter.disk).float())


def adapted(case, adapter, seed):
    model = get_peft_model(base_model(case), LoraConfig(**adapter.settings), autocast_adapter_dtype=False)
    draw(model, adapter, seed)
    return model.eval()


def inputs(case):
    """The tokens of a prompt, and the encoder rows that it cross-attends to."""
    base = ROOT / case.base
    expected = load_file(base / "expected.safetensors")
    if "whisper" in case.base:
        return expected["decoder_input_ids"].reshape(1, -1), expected["encoder_last_hidden_state"].float()
    prompts = json.loads((base / "expected.json").read_text())["prompts"]
    return torch.tensor([prompts[0]["input_ids"]]), None


def logits_of(model, tokens, states):
    if states is None:
        return model(input_ids=tokens).logits[0].float()
    dtype = next(model.parameters()).dtype
    states = states.reshape(1, -1, states.shape[-1]).to(dtype)
    return model(encoder_outputs=(states,), decoder_input_ids=tokens).logits[0].float()


def greedy(model, tokens, states):
    chosen, gap = [], float("inf")
    for _ in range(STEPS):
        row = logits_of(model, tokens, states)[-1:]
        gap = min(gap, smallest_gap(row))
        chosen.append(int(row.argmax()))
        tokens = torch.cat([tokens, torch.tensor([[chosen[-1]]])], dim=1)
    return chosen, gap


@torch.no_grad()
def attempt(case, adapter, seed):
    model = adapted(case, adapter, seed)
    tokens, states = inputs(case)
    chosen, gap = greedy(model, tokens, states)
    plain, _ = greedy(base_model(case), tokens, states)
    if gap < MIN_GAP:
        return f"gap {gap:.1e}"
    if chosen == plain:
        return "the adapter changes no token"
    return seed, model, chosen


def write_adapter(folder, model, adapter):
    state = {k: v.to(adapter.disk).contiguous() for k, v in get_peft_model_state_dict(model).items()}
    model.save_pretrained(folder)
    weights = folder / "adapter_model.safetensors"
    if adapter.pickled:
        weights.unlink()
        torch.save(state, folder / "adapter_model.bin")
    else:
        save_file(state, str(weights), {"format": "pt"})
        weights.chmod(0o644)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "base"
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    (folder / "README.md").unlink(missing_ok=True)


@torch.no_grad()
def make():
    for case in CASES:
        folder = ROOT / case.name
        shutil.rmtree(folder, ignore_errors=True)
        tokens, states = inputs(case)
        tensors, told = {}, []
        for adapter in case.adapters:
            print(case.name, adapter.name, flush=True)
            seed, model, chosen = first_good_seed(
                lambda seed: attempt(case, adapter, seed), range(case.seed, case.seed + 200))
            write_adapter(folder / adapter.name, model, adapter)
            tensors[f"{adapter.name}.logits"] = logits_of(model, tokens, states)[-LOGIT_ROWS:]
            tensors[f"{adapter.name}.logits_bf16"] = logits_of(model.to(torch.bfloat16), tokens, states)[-LOGIT_ROWS:]
            told.append({"name": adapter.name, "seed": seed, "greedy_tokens": chosen})
        plain, _ = greedy(base_model(case), tokens, states)
        write_compact(folder / "expected.json", {
            "base": case.base, "input_ids": tokens[0].tolist(), "base_greedy_tokens": plain, "adapters": told,
        })
        write_tensors(folder / "expected.safetensors", tensors)
