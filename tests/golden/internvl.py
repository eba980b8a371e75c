"""Golden files of InternVL: four shapes, images of one tile and of several."""

import copy
import dataclasses

import torch
from tokenizers import processors
from transformers import (
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from common import byte_bpe, randomise, round_weights
from idefics import PROMPTS
from llava import N_MERGES, Maker, make_case, text

SPECIALS = ["<unk>", "<s>", "</s>", "<pad>", "<image>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>", "<|im_start|>", "<|im_end|>"]
VOCAB = 336
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}{% elif content['type'] == 'video' %}{{ '<video>\n' }}"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Shape:
    case: str
    text: dict
    vision: dict
    tiles: int
    tied: bool
    disk: torch.dtype
    seed: int
    published: bool
    prompts: tuple = PROMPTS


def tower(hidden, heads, ffn, layers, side, patch, **more):
    return {**dict(model_type="internvl_vision", hidden_size=hidden, num_attention_heads=heads, intermediate_size=ffn,
                   num_hidden_layers=layers, image_size=[side, side], patch_size=[patch, patch], attention_bias=True), **more}


SHAPES = [
    Shape("internvl_qwen2", text("qwen2", 48, 4, 2, 2, 72, rope_theta=1e6), tower(32, 2, 52, 3, 32, 8), 6, False,
          torch.float32, 4000, True),
    Shape("internvl_rms_qwen3", text("qwen3", 60, 3, 1, 2, 88, head_dim=16), tower(24, 3, 40, 2, 28, 7, norm_type="rms_norm"),
          4, False, torch.bfloat16, 4100, True),
    Shape("internvl_normed_llama", text("llama", 48, 2, 2, 3, 64), tower(32, 4, 52, 2, 24, 6, use_mean_pooling=False), 12,
          True, torch.float16, 4200, False),
    # As the tower of 6 billion parameters.
    Shape("internvl_row_norms", text("qwen2", 48, 3, 1, 2, 72), tower(24, 2, 40, 3, 28, 7, norm_type="rms_norm", use_qk_norm=True,
                                                                      attention_bias=False), 4, False, torch.bfloat16, 4900, True),
]


def tokenizer():
    tok = byte_bpe(N_MERGES, [(t, True) for t in SPECIALS], qwen=True)
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    return tok


def build(shape, seed, tok):
    i = tok.token_to_id
    side = shape.vision["image_size"][0] // shape.vision["patch_size"][0]
    config = {
        "architectures": ["InternVLForConditionalGeneration"], "model_type": "internvl", "downsample_ratio": 0.5,
        "image_seq_length": (side // 2) ** 2, "image_token_id": i("<IMG_CONTEXT>"), "projector_hidden_act": "gelu",
        "text_config": {**shape.text, "vocab_size": VOCAB, "tie_word_embeddings": shape.tied},
        "tie_word_embeddings": shape.tied, "transformers_version": "4.52.0.dev0", "vision_config": shape.vision,
        "vision_feature_layer": -1, "vision_feature_select_strategy": "default",
    }
    torch.manual_seed(seed)
    model = InternVLForConditionalGeneration(InternVLConfig(**copy.deepcopy(config)))
    randomise(model, seed, gain=1.4, embed_std=0.6, quiet_rows=range(256 + N_MERGES, VOCAB),
              gains=[("q_proj", 1.8), ("k_proj", 1.8), ("v_proj", 1.5), ("o_proj", 2.0), ("linear_2", 3.0)])
    model.model.language_model.norm.weight.data *= 3
    round_weights(model, shape.disk)
    return config, model


def processor(shape, tok):
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    for name, token in (("start_image_token", "<img>"), ("end_image_token", "</img>"), ("context_image_token", "<IMG_CONTEXT>"),
                        ("video_token", "<video>")):
        setattr(fast, name, token)
        setattr(fast, f"{name}_id", tok.token_to_id(token))
    side, patch = shape.vision["image_size"][0], shape.vision["patch_size"][0]
    square = {"height": side, "width": side}
    images = GotOcr2ImageProcessorPil(size=square, max_patches=shape.tiles, crop_to_patches=True)
    return InternVLProcessor(images, fast, InternVLVideoProcessor(size=square),
                             image_seq_length=(side // patch // 2) ** 2, chat_template=CHAT_TEMPLATE)


def published_name(name):
    """The names in the published checkpoints, from those of the modules in memory since 4.52."""
    if name == "lm_head.weight":
        return "language_model.lm_head.weight"
    if name.startswith("model.language_model."):
        return "language_model.model." + name.removeprefix("model.language_model.")
    return name.removeprefix("model.")


def make():
    for shape in SHAPES:
        make_case(shape, Maker(tokenizer, build, processor, published_name))
