"""Golden files of LoRA adapters of encoders: pairs that PEFT writes for the encoder or tower of models of other cases.

Of each adapter there are the encoder's rows of every input, and what the decoder makes of the first. The inputs are those of the
base case.
"""

import copy
import dataclasses
import json
import shutil

import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from safetensors.torch import load_file
from transformers import Qwen2_5_VLForConditionalGeneration, T5ForConditionalGeneration, WhisperForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from common import MIN_GAP, ROOT, first_good_seed, smallest_gap, write_compact, write_tensors
from lora import LOGIT_ROWS, STEPS, Adapter, draw, write_adapter

MIN_CHANGE = 0.1
"""Least change of an encoder row by an adapter of the encoder: less would let a run without it pass."""
WHISPER = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
T5 = ["q", "k", "v", "o", "wi", "wo"]
VISUAL = r".*visual\.(blocks\..*\.(qkv|proj|gate_proj|up_proj|down_proj)|merger\.mlp\.(0|2))"
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "qkv", "attn.proj", "gate_proj", "up_proj", "down_proj", "mlp.0", "mlp.2"]


class Speech:
    """Features of audio, and a decoder that cross-attends."""

    model = WhisperForConditionalGeneration

    def __init__(self, folder):
        self.expected = load_file(folder / "expected.safetensors")
        quantised = self.expected["batch_input_features_u8"][:2].float() / 64 - 2
        self.items = [x[None] for x in quantised]
        self.tokens = self.expected["decoder_input_ids"].reshape(1, -1)
        self.prompts = {"greedy_tokens": self.tokens}

    def rows(self, model):
        dtype = next(model.parameters()).dtype
        return [model.get_encoder()(x.to(dtype)).last_hidden_state[0].float() for x in self.items]

    def logits(self, model, tokens):
        dtype = next(model.parameters()).dtype
        return model(input_features=self.items[0].to(dtype), decoder_input_ids=tokens).logits[0].float()


class Text:
    """Tokens, and a decoder that cross-attends."""

    model = T5ForConditionalGeneration

    def __init__(self, folder):
        expected = load_file(folder / "expected.safetensors")
        inputs = json.loads((folder / "expected.json").read_text())["inputs"]
        self.items = [torch.tensor([ids]) for ids in inputs[:3]]
        self.tokens = expected["decoder_input_ids"].reshape(1, -1)
        self.prompts = {"greedy_tokens": self.tokens, "tokens_from_start": self.tokens[:, :1]}

    def rows(self, model):
        return [model.get_encoder()(x).last_hidden_state[0].float() for x in self.items]

    def logits(self, model, tokens):
        return model(input_ids=self.items[0], decoder_input_ids=tokens).logits[0].float()


class Images:
    """Images among the tokens of a prompt, all of those of the base case."""

    model = Qwen2_5_VLForConditionalGeneration

    def __init__(self, folder):
        told = json.loads((folder / "expected.json").read_text())
        expected = load_file(folder / "expected.safetensors")
        k = told["many_rows_prompt"]
        self.tokens = expected[f"prompt.{k}.input_ids"].reshape(1, -1)
        self.prompts = {"greedy_tokens": self.tokens}
        self.pad = json.loads((folder / "model" / "config.json").read_text())["image_token_id"]
        settings = json.loads((folder / "model" / "preprocessor_config.json").read_text())
        process = Qwen2VLImageProcessorPil(min_pixels=settings["min_pixels"], max_pixels=settings["max_pixels"])
        names = sorted(told["images"])
        seen = {n: process(images=[Image.open(folder / told["images"][n]["file"])], return_tensors="pt") for n in names}
        self.items = [(seen[n]["pixel_values"], seen[n]["image_grid_thw"]) for n in names]
        shown = [seen[n] for n in told["prompts"][k]["images"]]
        self.pixels = torch.cat([s["pixel_values"] for s in shown])
        self.grids = torch.cat([s["image_grid_thw"] for s in shown])

    def rows(self, model):
        dtype = next(model.parameters()).dtype
        found = [model.get_image_features(pixels.to(dtype), grid, return_dict=True) for pixels, grid in self.items]
        return [torch.cat(list(one.pooler_output)).float() for one in found]

    def logits(self, model, tokens):
        model.model.rope_deltas = None
        dtype = next(model.parameters()).dtype
        kinds = (tokens == self.pad).int()
        return model(input_ids=tokens, pixel_values=self.pixels.to(dtype), image_grid_thw=self.grids,
                     mm_token_type_ids=kinds, use_cache=False).logits[0].float()


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    base: str
    kind: type
    adapters: tuple
    seed: int


CASES = [
    Case("lora_whisper_encoder", "whisper_multilingual", Speech, (
        Adapter("both", {"r": 4, "lora_alpha": 8, "target_modules": WHISPER}),
        Adapter("encoder", {"r": 3, "lora_alpha": 6, "target_modules": r".*\.encoder\..*(q_proj|v_proj|fc1|fc2)"}, torch.float16),
    ), 7500),
    Case("lora_t5_encoder", "t5_small", Text, (
        Adapter("both", {"r": 4, "lora_alpha": 6, "target_modules": T5, "use_rslora": True}, torch.bfloat16),
        Adapter("encoder", {"r": 2, "lora_alpha": 4, "target_modules": r"encoder\..*\.(q|v|wi)"}, pickled=True),
    ), 7600),
    Case("lora_qwen2_5_vl_tower", "qwen2_5_vl_window56", Images, (
        Adapter("tower", {"r": 4, "lora_alpha": 8, "target_modules": VISUAL}),
        Adapter("everything", {"r": 3, "lora_alpha": 1.5, "target_modules": ALL, "rank_pattern": {"qkv": 5}}, torch.bfloat16),
    ), 7700),
]


def base_model(case):
    path = ROOT / case.base / "model"
    return case.kind.model.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def greedy(inputs, model, tokens):
    chosen, gap = [], float("inf")
    for _ in range(STEPS):
        row = inputs.logits(model, tokens)[-1:]
        gap = min(gap, smallest_gap(row))
        chosen.append(int(row.argmax()))
        tokens = torch.cat([tokens, torch.tensor([[chosen[-1]]])], dim=1)
    return chosen, gap


@torch.no_grad()
def attempt(case, inputs, adapter, seed):
    peft = get_peft_model(base_model(case), LoraConfig(**adapter.settings), autocast_adapter_dtype=False)
    draw(peft, adapter, seed)
    model = peft.base_model.model.eval()
    plain = base_model(case)
    told = {}
    for name, tokens in inputs.prompts.items():
        told[name], gap = greedy(inputs, model, tokens)
        if gap < MIN_GAP:
            return f"gap {gap:.1e}"
        if told[name] == greedy(inputs, plain, tokens)[0]:
            return "the adapter changes no token"
    changes = [float((own - base).abs().max()) for own, base in zip(inputs.rows(model), inputs.rows(plain), strict=True)]
    if min(changes) < MIN_CHANGE:
        return f"changes of rows {changes}"
    return seed, peft, told


@torch.no_grad()
def make():
    for case in CASES:
        folder = ROOT / case.name
        shutil.rmtree(folder, ignore_errors=True)
        inputs = case.kind(ROOT / case.base)
        tensors, told = {}, []
        for adapter in case.adapters:
            print(case.name, adapter.name, flush=True)
            seed, peft, chosen = first_good_seed(
                lambda seed: attempt(case, inputs, adapter, seed), range(case.seed, case.seed + 200))
            write_adapter(folder / adapter.name, peft, adapter)
            model = peft.base_model.model
            for i, rows in enumerate(inputs.rows(model)):
                tensors[f"{adapter.name}.rows.{i}"] = rows
            tensors[f"{adapter.name}.logits"] = inputs.logits(model, inputs.tokens)[-LOGIT_ROWS:]
            narrow = copy.deepcopy(model).to(torch.bfloat16)
            tensors[f"{adapter.name}.logits_bf16"] = inputs.logits(narrow, inputs.tokens)[-LOGIT_ROWS:]
            told.append({"name": adapter.name, "seed": seed, **chosen})
        plain = {f"base_{name}": greedy(inputs, base_model(case), tokens)[0] for name, tokens in inputs.prompts.items()}
        write_compact(folder / "expected.json", {
            "base": case.base, "input_ids": inputs.tokens[0].tolist(), **plain, "adapters": told,
        })
        write_tensors(folder / "expected.safetensors", tensors)
