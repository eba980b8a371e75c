"""Golden files of GLM-OCR: three shapes, images of any size, positions of three parts."""

import copy
import dataclasses

import torch
from tokenizers import processors
from transformers import (
    Glm46VProcessor,
    GlmOcrConfig,
    GlmOcrForConditionalGeneration,
    PreTrainedTokenizerFast,
)
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.glm46v.video_processing_glm46v import Glm46VVideoProcessor

from common import byte_bpe, give_beams_their_items, randomise, round_weights
from llava import N_MERGES, Maker, make_case

SPECIALS = ["<unk>", "<s>", "</s>", "<pad>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>",
            "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|image|>", "<|video|>"]
VOCAB = 336
CHAT_TEMPLATE = (
    "[gMASK]<sop>{% for message in messages %}{{ '<|' + message.role + '|>\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for item in message.content %}"
    "{% if item.type == 'image' or 'image' in item or 'image_url' in item %}<|begin_of_image|><|image|><|end_of_image|>"
    "{% elif item.type == 'text' %}{{ item.text }}{% endif %}{% endfor %}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Shape:
    case: str
    text: dict
    vision: dict
    pixels: tuple
    tied: bool
    disk: torch.dtype
    seed: int
    prompts: tuple
    published: bool = False


def text(hidden, heads, kv_heads, layers, ffn, mrope, **more):
    rope = {"rope_type": "default", "mrope_section": list(mrope), "partial_rotary_factor": 1.0, "rope_theta": 10000.0}
    return dict(model_type="glm_ocr_text", hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads,
                num_hidden_layers=layers, intermediate_size=ffn, vocab_size=VOCAB, max_position_embeddings=4096,
                rms_norm_eps=1e-5, hidden_act="silu", rope_parameters=rope, **more)


def tower(hidden, heads, ffn, depth, patch, merge, out, **more):
    return dict(model_type="glm_ocr_vision", hidden_size=hidden, num_heads=heads, intermediate_size=ffn, depth=depth,
                patch_size=patch, spatial_merge_size=merge, out_hidden_size=out, temporal_patch_size=2, in_channels=3, **more)


PROMPTS = ((), ("64x64",), ("64x96",), ("50x70",), ("64x64", "64x96"), ("50x70", "64x64"))
SHAPES = [
    # A head's width is `head_dim`, as in the published model. The least and the most pixels count both frames.
    Shape("glm_ocr_mrope", text(48, 4, 2, 2, 72, (4, 2, 2), head_dim=16), tower(32, 2, 52, 2, 8, 2, 48), (6000, 9000), False,
          torch.float32, 4600, PROMPTS),
    Shape("glm_ocr_odd_heads", text(60, 3, 1, 3, 88, (2, 4, 4), head_dim=20), tower(24, 3, 40, 3, 7, 2, 60, rms_norm_eps=1e-4),
          (2 * 28 * 28, 2 * 9000), False, torch.bfloat16, 4700, (*PROMPTS[:3], ("12x96",), ("96x64", "12x96"), PROMPTS[5])),
    Shape("glm_ocr_unbiased_tied", text(48, 2, 2, 2, 64, (6, 3, 3)), tower(32, 4, 44, 2, 6, 3, 48, attention_bias=False),
          (18 * 18 * 2, 2 * 7000), True, torch.float16, 4840, PROMPTS),
]


def tokenizer():
    tok = byte_bpe(N_MERGES, [(t, True) for t in SPECIALS], qwen=True)
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    return tok


def forget_positions(model, args, kwargs):
    """A prompt is read as the first: the model keeps the positions of the one before."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    if ids is not None and ids.shape[1] > 1:
        model.model.rope_deltas = None


def build(shape, seed, tok):
    i = tok.token_to_id
    config = {
        "architectures": ["GlmOcrForConditionalGeneration"], "model_type": "glm_ocr",
        "image_start_token_id": i("<|begin_of_image|>"), "image_end_token_id": i("<|end_of_image|>"),
        "video_start_token_id": i("<|begin_of_video|>"), "video_end_token_id": i("<|end_of_video|>"),
        "image_token_id": i("<|image|>"), "video_token_id": i("<|video|>"), "text_config": shape.text,
        "tie_word_embeddings": shape.tied, "transformers_version": "5.0.1dev0", "vision_config": shape.vision,
    }
    torch.manual_seed(seed)
    model = GlmOcrForConditionalGeneration(GlmOcrConfig(**copy.deepcopy(config)))
    randomise(model, seed, gain=1.4, embed_std=0.6, quiet_rows=range(256 + N_MERGES, VOCAB),
              gains=[("q_proj", 1.4), ("k_proj", 1.4), ("v_proj", 1.3), ("merger.down_proj", 3.0)])
    model.model.language_model.norm.weight.data *= 3
    round_weights(model, shape.disk)
    give_beams_their_items(model)
    model.register_forward_pre_hook(forget_positions, with_kwargs=True)
    return config, model


def processor(shape, tok):
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    least, most = shape.pixels
    images = Glm46VImageProcessorPil(
        size={"shortest_edge": least, "longest_edge": most}, patch_size=shape.vision["patch_size"],
        merge_size=shape.vision["spatial_merge_size"], temporal_patch_size=2)
    return Glm46VProcessor(images, fast, Glm46VVideoProcessor(), chat_template=CHAT_TEMPLATE)


def positions(model, inputs):
    """Positions of a prompt's tokens, and how far the next is from their number."""
    ids = inputs["input_ids"]
    if "image_grid_thw" not in inputs:
        return torch.arange(ids.shape[1]).expand(3, -1), 0
    all_parts, delta = model.model.get_rope_index(
        ids, mm_token_type_ids=inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"],
        attention_mask=inputs["attention_mask"])
    return all_parts[:, 0], int(delta)


def planes(proc, seen):
    """Patches of one image, whose frames are the same, as planes: `[1, 3, height, width]`."""
    _, down, across = seen["image_grid_thw"][0].tolist()
    side, merge = proc.image_processor.patch_size, proc.image_processor.merge_size
    patches = seen["pixel_values"].reshape(down // merge, across // merge, merge, merge, 3, 2, side, side)
    assert (patches[..., 0, :, :] - patches[..., 1, :, :]).abs().max() == 0
    return patches[..., 0, :, :].permute(4, 0, 2, 5, 1, 3, 6).reshape(1, 3, down * side, across * side)


def make():
    for shape in SHAPES:
        make_case(shape, Maker(tokenizer, build, processor, lambda name: name, positions=positions, planes=planes))
