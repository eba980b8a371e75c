"""Golden files of Pixtral, Mistral Small 3.1 and LightOnOCR: six shapes, images of any size."""

import copy
import dataclasses

import numpy as np
import torch
from tokenizers import processors
from transformers import (
    LightOnOcrConfig,
    LightOnOcrForConditionalGeneration,
    LightOnOcrProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from common import byte_bpe, generator, randomise, round_weights
from llava import N_MERGES, Maker, make_case, text

SPECIALS = ["<unk>", "<s>", "</s>", "<pad>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
LIGHT_ON_SPECIALS = ["<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|vision_pad|>", "<|vision_end|>"]
VOCAB = 336
CHAT_TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}{%- if message['role'] == 'user' %}{{- '[INST]' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}{%- else %}{%- for block in message['content'] %}"
    "{%- if block['type'] == 'text' %}{{- block['text'] }}{%- elif block['type'] in ['image', 'image_url'] %}{{- '[IMG]' }}"
    "{%- endif %}{%- endfor %}{%- endif %}{{- '[/INST]' }}{%- else %}{{- message['content'] + eos_token }}{%- endif %}"
    "{%- endfor %}"
)

LIGHT_ON_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' }}{%- if message['content'] is string %}"
    "{{- message['content'] }}{%- else %}{%- for block in message['content'] %}{%- if block['type'] == 'image' %}"
    "{{- '<|image_pad|>\\n' }}{%- else %}{{- block['text'] }}{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


@dataclasses.dataclass(frozen=True)
class Shape:
    case: str
    kind: str
    text: dict
    vision: dict
    merge: int
    longest: int
    published: bool
    disk: torch.dtype
    seed: int
    prompts: tuple


def tower(hidden, heads, ffn, layers, patch, **more):
    return dict(model_type="pixtral", hidden_size=hidden, num_attention_heads=heads, intermediate_size=ffn,
                num_hidden_layers=layers, patch_size=patch, **more)


PROMPTS = ((), ("64x64",), ("64x96",), ("50x70",), ("64x64", "64x96"), ("50x70", "64x64"))
SHAPES = [
    # As published: what is the class's default is left out.
    Shape("pixtral_silu", "llava", text("mistral", 48, 4, 2, 2, 72, head_dim=12, sliding_window=None, rope_theta=1e9),
          tower(32, 2, 52, 3, 8, hidden_act="silu", rope_theta=10000.0, head_dim=16, image_size=80), 1, 80, True,
          torch.float32, 4300, PROMPTS),
    Shape("mistral3_merged", "mistral3", text("mistral", 60, 3, 1, 2, 88, head_dim=16, sliding_window=None, rope_theta=1e9),
          tower(24, 2, 40, 2, 7, hidden_act="silu", rope_theta=5000.0, image_size=140), 2, 140, True,
          torch.bfloat16, 4400, (*PROMPTS[:3], ("96x64",), *PROMPTS[4:])),
    Shape("mistral3_gelu_biased", "mistral3", text("mistral", 48, 2, 2, 3, 64, sliding_window=None),
          tower(32, 4, 44, 4, 6, image_size=72), 3, 72, False, torch.float16, 4500, PROMPTS),
    # As published: no file has the activation of the projector.
    Shape("lighton_ocr_qwen3", "lighton_ocr", text("qwen3", 48, 4, 2, 2, 72, head_dim=16, rope_theta=1e6, rms_norm_eps=1e-6),
          tower(32, 2, 52, 2, 8, hidden_act="silu", rope_theta=10000.0, head_dim=16, image_size=96), 2, 96, True,
          torch.bfloat16, 4600, PROMPTS),
    Shape("lighton_ocr_untied", "lighton_ocr", text("qwen3", 60, 3, 1, 2, 88, head_dim=12, rope_theta=1e5),
          tower(24, 2, 40, 2, 7, hidden_act="silu", image_size=140), 2, 140, True,
          torch.float32, 4700, (*PROMPTS[:3], ("96x64",), *PROMPTS[4:])),
    Shape("lighton_ocr_three_layers", "lighton_ocr", text("qwen3", 64, 2, 2, 3, 96, head_dim=20, rope_theta=1e6),
          tower(48, 4, 60, 3, 6, hidden_act="gelu", image_size=72), 3, 72, True, torch.float16, 4800, PROMPTS),
]


def light_on_tokenizer():
    return byte_bpe(N_MERGES, [(t, True) for t in LIGHT_ON_SPECIALS], qwen=True)


def tokenizer():
    tok = byte_bpe(N_MERGES, [(t, True) for t in SPECIALS], qwen=False)
    tok.post_processor = processors.Sequence([
        tok.post_processor or processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tok.token_to_id("<s>"))]),
    ])
    return tok


def config_json(shape, i):
    if shape.kind == "lighton_ocr":
        return {"architectures": ["LightOnOcrForConditionalGeneration"], "image_token_id": i("<|image_pad|>"),
                "model_type": shape.kind, "spatial_merge_size": shape.merge, "transformers_version": "5.0.0",
                "text_config": {**shape.text, "vocab_size": VOCAB}, "tie_word_embeddings": not shape.case.endswith("untied"),
                "vision_config": shape.vision}
    common = {
        "image_token_index": i("[IMG]"), "model_type": shape.kind, "projector_hidden_act": "gelu",
        "text_config": {**shape.text, "vocab_size": VOCAB}, "tie_word_embeddings": False,
        "transformers_version": "4.50.0.dev0", "vision_config": shape.vision,
    }
    if shape.kind == "llava":
        return {"architectures": ["LlavaForConditionalGeneration"], **common, "ignore_index": -100, "image_seq_length": 1,
                "vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    biased = shape.case.endswith("biased")
    return {"architectures": ["Mistral3ForConditionalGeneration"], **common, "multimodal_projector_bias": biased,
            "spatial_merge_size": shape.merge, "vision_feature_layer": -2 if biased else -1}


def build(shape, seed, tok):
    config = config_json(shape, tok.token_to_id)
    read = copy.deepcopy(config)
    kinds = {"llava": (LlavaConfig, LlavaForConditionalGeneration), "mistral3": (Mistral3Config, Mistral3ForConditionalGeneration),
             "lighton_ocr": (LightOnOcrConfig, LightOnOcrForConditionalGeneration)}
    torch.manual_seed(seed)
    model = kinds[shape.kind][1](kinds[shape.kind][0](**read))
    is_light_on = shape.kind == "lighton_ocr"
    sharp = [("q_proj", 1.8), ("k_proj", 1.8), ("v_proj", 1.5), ("o_proj", 2.5), ("mlp.down_proj", 2.0)]
    gains = [("q_proj", 1.4), ("k_proj", 1.4), ("v_proj", 1.3), ("self_attn.o_proj", 2.0), ("feed_forward", 0.7)]
    randomise(model, seed, gain=1.4, embed_std=0.3 if is_light_on else 0.6, quiet_rows=range(256 + N_MERGES, VOCAB),
              gains=sharp if is_light_on else gains)
    first = (model.model.vision_encoder if is_light_on else model.model.vision_tower).ln_pre.weight
    first.data = torch.from_numpy(1 + 0.1 * generator(seed, "ln_pre").standard_normal(first.shape, dtype=np.float32))
    model.model.language_model.norm.weight.data *= 3
    round_weights(model, shape.disk)
    return config, model


def processor(shape, tok):
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    patch = shape.vision["patch_size"]
    images = PixtralImageProcessorPil(size={"longest_edge": shape.longest}, patch_size={"height": patch, "width": patch})
    return PixtralProcessor(images, fast, patch_size=patch, spatial_merge_size=shape.merge, chat_template=CHAT_TEMPLATE)


def light_on_processor(shape, tok):
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tok, bos_token="<s>", eos_token="</s>", pad_token="<pad>", extra_special_tokens={
            "image_token": "<|image_pad|>", "image_break_token": "<|vision_pad|>", "image_end_token": "<|vision_end|>"})
    side = shape.vision["patch_size"]
    # Whole squares, as transformers 5.0's processor asks for them; 5.24's does not, and cuts odd patches off.
    whole = {"height": side * shape.merge, "width": side * shape.merge}
    images = PixtralImageProcessorPil(size={"longest_edge": shape.longest}, patch_size=whole)
    return LightOnOcrProcessor(images, fast, patch_size=side, spatial_merge_size=shape.merge, chat_template=LIGHT_ON_TEMPLATE)


def read_image(proc, image):
    """As the processor asks of the image processor."""
    return proc.image_processor(images=[image], patch_size=proc.patch_size * proc.spatial_merge_size, return_tensors="pt")


def processor_config(proc):
    """The file beside that of the image processor."""
    return {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]", "image_token": "[IMG]",
            "patch_size": proc.patch_size, "processor_class": "PixtralProcessor",
            "spatial_merge_size": proc.spatial_merge_size}


def published_name(name):
    """The names in the published checkpoints, from those of the modules in memory since 4.52."""
    if name == "lm_head.weight":
        return "language_model.lm_head.weight"
    if name.startswith("model.language_model."):
        return "language_model.model." + name.removeprefix("model.language_model.")
    return name.removeprefix("model.")


def light_on_config(proc):
    return {"patch_size": proc.patch_size, "processor_class": "LightOnOcrProcessor",
            "spatial_merge_size": proc.spatial_merge_size}


def make():
    for shape in SHAPES:
        if shape.kind == "lighton_ocr":
            maker = Maker(light_on_tokenizer, build, light_on_processor, lambda name: name, processor_config=light_on_config)
        else:
            maker = Maker(tokenizer, build, processor, published_name, read_image, processor_config)
        make_case(shape, maker)
