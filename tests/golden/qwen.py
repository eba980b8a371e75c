"""Golden files of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5, the last two also with experts: three shapes each, images whose size needs no resize."""

import copy
import dataclasses

import numpy as np
import torch
from PIL import Image
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.vision_utils import get_vision_window_index

from common import (
    MIN_GAP,
    STEPS,
    byte_bpe,
    case_dir,
    expert_gains,
    experts_state,
    first_good_seed,
    generator,
    inputs_first,
    plain_experts,
    randomise,
    round_weights,
    smallest_gap,
    write_compact,
    write_json,
    write_tensors,
)

MIN_VARIED = 10
BEAM_TOKENS = 24
# Most error of logits of the prompt of most images, in units of their size, where weights have 8 bits, or the decoder's 4, and what
# they read 8: a choice of experts that these change decides logits.
MAX_COARSE = ((127, 0.11), (7, 0.58))
# Least change of the last logits by zeroed pixels: less would let a wrong tower pass.
MIN_SIGHT = 1.0
N_MERGES = 60
VOCAB = 336
SPECIALS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]
CHAT_TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}"
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}"
    "{% set video_count.value = video_count.value + 1 %}"
    "{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT_TEMPLATE_3 = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for content in message.content %}"
    "{% if content.type == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content.type == 'video' or 'video' in content %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [
    "Describe the image.", "What is it?", "How many dogs are there?", "Say hi", "Is the sky blue?", "Which colour?",
    "Count: 1, 2, 3", "Who is near the wall?", "Read this.", "And now?", "Was ist das?", "你好", "Warm or cold?",
    "Left or right?", "Name two cats.", "Please explain", "Where is the fox?", "x + y = 10", "Why?", "Compare them.",
]


@dataclasses.dataclass(frozen=True)
class Kind:
    """What the versions differ in beside the shapes."""

    name: str
    config: type
    model: type
    processor: type
    video: type
    template: str
    patch: int
    pixels: tuple


KIND2 = Kind("qwen2_vl", Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLProcessor, Qwen2VLVideoProcessor,
             CHAT_TEMPLATE, 14, (3136, 12845056))
KIND2_5 = Kind("qwen2_5_vl", Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor,
               Qwen2VLVideoProcessor, CHAT_TEMPLATE, 14, (3136, 12845056))
KIND3 = Kind("qwen3_vl", Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLProcessor, Qwen3VLVideoProcessor,
             CHAT_TEMPLATE_3, 16, (1024, 16777216))
KIND3_MOE = Kind("qwen3_vl_moe", Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration, Qwen3VLProcessor, Qwen3VLVideoProcessor,
                 CHAT_TEMPLATE_3, 16, (1024, 16777216))
KIND3_5 = Kind("qwen3_5", Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3VLProcessor, Qwen3VLVideoProcessor,
               CHAT_TEMPLATE_3, 16, (1024, 16777216))
KIND3_5_MOE = Kind("qwen3_5_moe", Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration, Qwen3VLProcessor, Qwen3VLVideoProcessor,
                   CHAT_TEMPLATE_3, 16, (1024, 16777216))
KINDS3 = (KIND3, KIND3_MOE, KIND3_5, KIND3_5_MOE)


@dataclasses.dataclass(frozen=True)
class Shape:
    case: str
    kind: Kind
    hidden: int
    heads: int
    kv_heads: int
    layers: int
    ffn: int
    mrope: tuple
    vision: dict
    tied: bool
    nested: bool
    disk: torch.dtype
    seed: int
    prompts: tuple
    head_dim: int = 0
    experts: dict = dataclasses.field(default_factory=dict)
    recurrent: dict = dataclasses.field(default_factory=dict)


QWEN2 = [
    Shape("qwen2_vl_odd_heads", KIND2, 60, 3, 1, 1, 88, (2, 4, 4),
          dict(depth=1, embed_dim=24, num_heads=2, mlp_ratio=3), True, False, torch.float32, 403,
          ((), (), ("56x56",), ("56x84",), ("84x56",), ("56x56", "56x84"), ("84x56", "56x56"), ("56x84", "84x56"))),
    Shape("qwen2_vl_two_images", KIND2, 64, 4, 2, 2, 96, (2, 3, 3),
          dict(depth=2, embed_dim=32, num_heads=4, mlp_ratio=4), True, False, torch.bfloat16, 500,
          ((), ("84x112",), ("56x56",), ("84x112", "56x140"), ("56x140", "84x112"), ("56x56", "56x140"),
           ("56x140", "56x56", "84x112"), ("56x140", "56x140"))),
    Shape("qwen2_vl_untied_nested", KIND2, 48, 4, 1, 2, 72, (2, 2, 2),
          dict(depth=1, embed_dim=16, num_heads=2, mlp_ratio=4), False, True, torch.float16, 600,
          ((), (), (), ("28x560",), ("560x28",), ("56x56",), ("28x560", "56x56"), ("560x28", "28x560"))),
]
QWEN2_5 = [
    Shape("qwen2_5_vl_window112", KIND2_5, 48, 4, 2, 2, 72, (2, 2, 2),
          dict(depth=3, hidden_size=24, intermediate_size=42, num_heads=2, window_size=112, fullatt_block_indexes=[1]),
          True, False, torch.bfloat16, 700,
          ((), ("140x196",), ("112x112",), ("56x84",), ("140x196", "56x84"), ("56x84", "112x112"),
           ("112x112", "140x196"), ())),
    Shape("qwen2_5_vl_window56", KIND2_5, 60, 3, 1, 2, 88, (2, 4, 4),
          dict(depth=4, hidden_size=32, intermediate_size=52, num_heads=4, window_size=56,
               fullatt_block_indexes=[1, 3]),
          True, False, torch.bfloat16, 800,
          ((), ("84x140",), ("28x420",), ("56x84",), ("84x140", "56x84"), ("28x420", "84x140"),
           ("56x84", "28x420", "84x140"), ())),
    Shape("qwen2_5_vl_untied_nested", KIND2_5, 48, 2, 2, 1, 64, (4, 4, 4),
          dict(depth=2, hidden_size=16, intermediate_size=28, num_heads=2, window_size=112, fullatt_block_indexes=[0]),
          False, True, torch.float16, 902,
          ((), (), ("28x560",), ("168x84",), ("56x56",), ("28x560", "168x84"), ("56x56", "56x56"),
           ("168x84", "56x56", "28x560"))),
]

# A head's width is `head_dim`, not `hidden / heads`. The grid of positions has another side than any image.
QWEN3 = [
    Shape("qwen3_vl_wide_heads", KIND3, 48, 4, 2, 3, 72, (4, 2, 2),
          dict(depth=3, hidden_size=32, intermediate_size=52, num_heads=2, num_position_embeddings=49,
               deepstack_visual_indexes=[0, 1]),
          True, True, torch.float32, 1005,
          ((), (), ("64x64",), ("64x96",), ("96x64",), ("64x64", "64x96"), ("96x64", "64x64"), ("64x96", "96x64")), 16),
    Shape("qwen3_vl_one_level", KIND3, 60, 3, 1, 2, 88, (4, 3, 3),
          dict(depth=4, hidden_size=24, intermediate_size=40, num_heads=2, num_position_embeddings=144,
               deepstack_visual_indexes=[2]),
          True, True, torch.bfloat16, 1112,
          ((), ("96x128",), ("64x64",), ("96x128", "64x160"), ("64x160", "96x128"), ("64x64", "64x160"), (),
           ("64x160", "64x160")), 20),
    Shape("qwen3_vl_untied", KIND3, 48, 4, 4, 3, 64, (2, 2, 2),
          dict(depth=3, hidden_size=16, intermediate_size=28, num_heads=2, num_position_embeddings=25,
               deepstack_visual_indexes=[0, 1, 2]),
          False, True, torch.float16, 1201,
          ((), (), (), ("32x640",), ("640x32",), ("64x64",), ("32x640", "64x64"), ("640x32", "32x640")), 12),
]


QWEN3_MOE = [
    Shape("qwen3_vl_moe_wide_heads", KIND3_MOE, 48, 4, 2, 3, 72, (4, 2, 2),
          dict(depth=3, hidden_size=32, intermediate_size=52, num_heads=2, num_position_embeddings=49,
               deepstack_visual_indexes=[0, 1]),
          False, True, torch.float32, 1305,
          ((), (), ("64x64",), ("64x96",), ("96x64",), ("64x64", "64x96"), ("96x64", "64x64"), ("64x96", "96x64")), 16,
          dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, decoder_sparse_step=1, mlp_only_layers=[])),
    Shape("qwen3_vl_moe_dense_layer", KIND3_MOE, 60, 3, 1, 2, 88, (4, 3, 3),
          dict(depth=4, hidden_size=24, intermediate_size=40, num_heads=2, num_position_embeddings=144,
               deepstack_visual_indexes=[2]),
          False, True, torch.bfloat16, 1412,
          ((), ("96x128",), ("64x64",), ("96x128", "64x160"), ("64x160", "96x128"), ("64x64", "64x160"), (),
           ("64x160", "64x160")), 20,
          dict(num_experts=4, num_experts_per_tok=3, moe_intermediate_size=36, decoder_sparse_step=2, mlp_only_layers=[])),
    Shape("qwen3_vl_moe_one_expert", KIND3_MOE, 48, 4, 4, 2, 64, (2, 2, 2),
          dict(depth=3, hidden_size=16, intermediate_size=28, num_heads=2, num_position_embeddings=25,
               deepstack_visual_indexes=[0, 1]),
          False, True, torch.float16, 1501,
          ((), (), (), ("32x640",), ("640x32",), ("64x64",), ("32x640", "64x64"), ("640x32", "32x640")), 12,
          dict(num_experts=5, num_experts_per_tok=1, moe_intermediate_size=32, decoder_sparse_step=1, mlp_only_layers=[])),
]


def delta(key_heads, value_heads, key_dim, value_dim, taps, rotated, **more):
    """Keys of layers with a gated delta rule, and the part of a head that is rotated."""
    return dict(linear_num_key_heads=key_heads, linear_num_value_heads=value_heads, linear_key_head_dim=key_dim,
                linear_value_head_dim=value_dim, linear_conv_kernel_dim=taps, partial_rotary_factor=rotated, rms_norm_eps=0.01, **more)


QWEN3_5 = [
    Shape("qwen3_5_tied", KIND3_5, 48, 4, 2, 4, 72, (2, 2, 2),
          dict(depth=3, hidden_size=32, intermediate_size=52, num_heads=2, num_position_embeddings=49,
               deepstack_visual_indexes=[]),
          True, True, torch.float32, 1605,
          ((), (), ("64x64",), ("64x96",), ("96x64",), ("64x64", "64x96"), ("96x64", "64x64"), ("64x96", "96x64")), 24,
          recurrent=delta(2, 4, 8, 12, 4, 0.5, full_attention_interval=4)),
    Shape("qwen3_5_listed_layers", KIND3_5, 60, 3, 1, 3, 88, (4, 3, 3),
          dict(depth=4, hidden_size=24, intermediate_size=40, num_heads=2, num_position_embeddings=144),
          True, True, torch.bfloat16, 1712,
          ((), ("96x128",), ("64x64",), ("96x128", "64x160"), ("64x160", "96x128"), ("64x64", "64x160"), (),
           ("64x160", "64x160")), 40,
          recurrent=delta(3, 3, 16, 16, 3, 0.5, layer_types=["linear_attention", "full_attention", "linear_attention"])),
    Shape("qwen3_5_untied", KIND3_5, 48, 2, 2, 4, 64, (3, 2, 1),
          dict(depth=3, hidden_size=16, intermediate_size=28, num_heads=2, num_position_embeddings=25),
          False, True, torch.float16, 1801,
          ((), (), (), ("32x640",), ("640x32",), ("64x64",), ("32x640", "64x64"), ("640x32", "32x640")), 24,
          recurrent=delta(2, 6, 12, 4, 5, 0.5, full_attention_interval=2)),
]

# As published, stacked experts have their outputs first; the last case has the experts one by one, as transformers saves them.
QWEN3_5_MOE = [
    Shape("qwen3_5_moe_wide_shared", KIND3_5_MOE, 48, 4, 2, 3, 0, (2, 2, 2),
          dict(depth=2, hidden_size=24, intermediate_size=40, num_heads=2, num_position_embeddings=49,
               deepstack_visual_indexes=[]),
          False, True, torch.float32, 1940,
          ((), (), ("64x64",), ("64x96",), ("96x64",), ("64x64", "64x96"), ("96x64", "64x64"), ("64x96", "96x64")), 24,
          dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12, shared_expert_intermediate_size=20),
          delta(2, 4, 8, 12, 4, 0.5, full_attention_interval=3)),
    Shape("qwen3_5_moe_listed_layers", KIND3_5_MOE, 60, 3, 1, 3, 0, (4, 3, 3),
          dict(depth=4, hidden_size=24, intermediate_size=40, num_heads=2, num_position_embeddings=144),
          False, True, torch.bfloat16, 2015,
          ((), ("96x128",), ("64x64",), ("96x128", "64x160"), ("64x160", "96x128"), ("64x64", "64x160"), (),
           ("64x160", "64x160")), 40,
          dict(num_experts=5, num_experts_per_tok=3, moe_intermediate_size=20, shared_expert_intermediate_size=12),
          delta(3, 3, 16, 16, 3, 0.5, layer_types=["linear_attention", "full_attention", "linear_attention"])),
    Shape("qwen3_5_moe_separate_experts", KIND3_5_MOE, 48, 2, 2, 4, 0, (3, 2, 1),
          dict(depth=3, hidden_size=16, intermediate_size=28, num_heads=2, num_position_embeddings=25),
          False, True, torch.float16, 2101,
          ((), (), (), ("32x640",), ("640x32",), ("64x64",), ("32x640", "64x64"), ("640x32", "32x640")), 24,
          dict(num_experts=4, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16),
          delta(2, 6, 12, 4, 5, 0.5, full_attention_interval=2)),
]


def image(name):
    """An image of `HxW` whose sides are multiples of a merged patch, so that no processor resizes it."""
    height, width = map(int, name.split("x"))
    rng = generator(height * 1000 + width, "image")
    y, x = np.mgrid[0:height, 0:width] / 28
    planes = [np.sin(rng.uniform(0.5, 2) * x + rng.uniform(0, 6)) + np.cos(rng.uniform(0.5, 2) * y + k) for k in range(3)]
    pixels = np.stack(planes, -1) * 60 + 128
    pixels[(np.floor(x * 2) + np.floor(y * 2)) % 3 == 0] *= rng.uniform(0.3, 0.7, 3)
    # Steps of eight keep the PNG small.
    return Image.fromarray((np.clip(pixels, 0, 255) // 8 * 8).astype(np.uint8))


def generation_config(i):
    return {
        "bos_token_id": i("<|endoftext|>"), "pad_token_id": i("<|endoftext|>"), "do_sample": True,
        "eos_token_id": [i("<|im_end|>"), i("<|endoftext|>")], "temperature": 0.01, "top_p": 0.001, "top_k": 1,
        "transformers_version": "4.41.2",
    }


def config_json(shape, i):
    """The layout of the published files: text keys at the top. Nested: as transformers 4.52 and later write it."""
    ids = {
        "image_token_id": i("<|image_pad|>"), "video_token_id": i("<|video_pad|>"),
        "vision_start_token_id": i("<|vision_start|>"), "vision_end_token_id": i("<|vision_end|>"),
        "vision_token_id": i("<|vision_pad|>"),
    }
    text = {
        "attention_dropout": 0.0, "bos_token_id": i("<|endoftext|>"), "eos_token_id": i("<|im_end|>"),
        "hidden_act": "silu", "hidden_size": shape.hidden, "initializer_range": 0.02, "intermediate_size": shape.ffn,
        "max_position_embeddings": 4096, "max_window_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers, "num_key_value_heads": shape.kv_heads, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": list(shape.mrope)},
        "sliding_window": 4096, "use_sliding_window": False, "use_cache": True, "vocab_size": VOCAB,
    }
    vision = {"in_chans": 3, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
              "temporal_patch_size": 2, **shape.vision}
    kind = shape.kind.name
    if shape.kind in KINDS3:
        # As published: nested, with the base of the angles beside their scaling.
        for key in ("max_window_layers", "sliding_window", "use_sliding_window"):
            del text[key]
        text.update(attention_bias=False, head_dim=shape.head_dim, model_type=f"{kind}_text", **shape.experts, rope_scaling={
            "mrope_interleaved": True, "mrope_section": list(shape.mrope), "rope_type": "default"})
        if shape.recurrent:
            recurrent, rope = dict(shape.recurrent), text.pop("rope_scaling")
            rope.update(partial_rotary_factor=recurrent.pop("partial_rotary_factor"), rope_theta=text.pop("rope_theta"))
            if shape.experts:
                del text["intermediate_size"]
            # As published; the last three change nothing.
            text.update(**recurrent, rope_parameters=rope, attn_output_gate=True, mamba_ssm_dtype="float32",
                        mtp_num_hidden_layers=1)
        vision = {"hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "model_type": kind, "patch_size": 16,
                  "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": shape.hidden, **shape.vision}
        del ids["vision_token_id"]
        return {"architectures": [shape.kind.model.__name__], "model_type": kind, "tie_word_embeddings": shape.tied,
                "transformers_version": "4.57.0.dev0", **ids, "text_config": text, "vision_config": vision}
    if shape.kind is KIND2_5:
        vision.update(out_hidden_size=shape.hidden, hidden_act="silu", tokens_per_second=2)
    else:
        vision.update(hidden_size=shape.hidden)
    top = {"architectures": [shape.kind.model.__name__], "model_type": kind, "tie_word_embeddings": shape.tied,
           "torch_dtype": str(shape.disk).removeprefix("torch."), "transformers_version": "4.41.2", **ids}
    if not shape.nested:
        return {**top, **text, "vision_config": vision}
    text["model_type"] = f"{kind}_text"
    theta, scaling = text.pop("rope_theta"), text.pop("rope_scaling")
    text["rope_parameters"] = {"rope_theta": theta, "rope_type": "default", **scaling}
    vision["model_type"] = f"{kind}_vision"
    return {**top, "transformers_version": "5.23.0", "text_config": text, "vision_config": vision}


def published_name(name):
    """The names in the published checkpoints, from those of the modules in memory since 4.52."""
    for new, old in (("model.visual.", "visual."), ("model.language_model.", "model.")):
        if name.startswith(new):
            return old + name.removeprefix(new)
    return name


@torch.no_grad()
def set_delta_rule(model):
    """Norms of the decoder as factors less 1, but for the gated ones, and decays that differ between heads."""
    for name, p in model.named_parameters():
        if "norm" in name and "linear_attn" not in name and "visual" not in name:
            p.data -= 1
        elif name.endswith("A_log"):
            p.data -= 1.5


def build(shape, seed, tok):
    config = config_json(shape, tok.token_to_id)
    parsed = shape.kind.config(**{k: v for k, v in copy.deepcopy(config).items() if k != "torch_dtype"})
    torch.manual_seed(seed)
    model = shape.kind.model(parsed)
    assert model.config.text_config.rope_parameters["mrope_section"] == list(shape.mrope)
    randomise(model, seed, gain=1.4, embed_std=0.6, quiet_rows=range(256 + N_MERGES, VOCAB),
              gains=[("q_proj", 1.8), ("k_proj", 1.8), ("v_proj", 1.5), ("o_proj", 2.0), ("merger.mlp.2", 3.0), ("linear_fc2", 3.0),
                     ("pos_embed", 4.0), *(expert_gains(shape.hidden, shape.experts["moe_intermediate_size"]) if shape.experts else ())])
    if shape.kind is KIND3_5_MOE:
        # All layers have experts, so that a choice of them counts more.
        for name, p in model.named_parameters():
            p.data *= 0.4 if "experts.down_proj" in name else 1
    if shape.recurrent:
        set_delta_rule(model)
    # A wide last norm spreads the logits, so that the two best are not within rounding of each other.
    last = model.model.language_model.norm.weight.data
    last.copy_(3 * last if not shape.recurrent else 3 * (1 + last) - 1)
    round_weights(model, shape.disk)
    if shape.experts:
        plain_experts(model)
    return config, model


def processor(shape, tok):
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    least, most = shape.kind.pixels
    settings = dict(min_pixels=least, max_pixels=most)
    if shape.kind in KINDS3:
        settings = dict(size={"shortest_edge": least, "longest_edge": most}, patch_size=shape.kind.patch,
                        image_mean=[0.5] * 3, image_std=[0.5] * 3)
    return shape.kind.processor(image_processor=Qwen2VLImageProcessorPil(**settings), tokenizer=fast,
                                video_processor=shape.kind.video(), chat_template=shape.kind.template)


@torch.no_grad()
def run_prompt(model, proc, names, text):
    content = [{"type": "image"} for _ in names] + [{"type": "text", "text": text}]
    messages = [{"role": "user", "content": content if names else text}]
    rendered = proc.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    sample_images = [image(n) for n in names]
    inputs = proc(text=[rendered], images=sample_images or None, return_tensors="pt")
    ids = inputs["input_ids"]
    if names:
        positions, delta = model.model.get_rope_index(
            ids, mm_token_type_ids=inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"],
            attention_mask=inputs["attention_mask"])
    else:
        positions, delta = torch.arange(ids.shape[1]).expand(3, 1, -1), torch.zeros(1, 1, dtype=torch.long)
    model.model.rope_deltas = None
    logits = model(**inputs).logits[0]
    sight = np.inf
    model.model.rope_deltas = None
    if names:
        blind = model(**{**inputs, "pixel_values": torch.zeros_like(inputs["pixel_values"])}).logits[0]
        sight = float((blind[-1] - logits[-1]).abs().max())
        model.model.rope_deltas = None
    made = model.generate(**inputs, do_sample=False, max_new_tokens=STEPS, output_logits=True,
                          return_dict_in_generate=True)
    tokens = made.sequences[0, ids.shape[1]:]
    return dict(names=list(names), messages=messages, rendered=rendered, inputs=inputs, ids=ids[0],
                positions=positions[:, 0], delta=int(delta), logits=logits, tokens=tokens,
                gap=smallest_gap(torch.cat(made.logits)), sight=sight)


def in_steps(x, n):
    """Rows of `x` in as many steps on either side of zero."""
    step = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / n
    return (x / step).round() * step


@torch.no_grad()
def coarse_error(model, run, n):
    """Error of the logits, in units of their size, where weights have `n` steps on either side of zero; in few steps the decoder's."""
    coarse = copy.deepcopy(model)
    for name, module in coarse.named_modules():
        if n < 127 and "visual" in name:
            continue
        if isinstance(module, torch.nn.Linear):
            module.weight.copy_(in_steps(module.weight, n))
            module.register_forward_pre_hook(lambda _, inputs: (in_steps(inputs[0], 127),))
        elif name.endswith("experts"):
            for p in module.parameters():
                p.copy_(in_steps(p, n))
    coarse.model.rope_deltas = None
    logits = coarse(**run["inputs"]).logits[0]
    return float((logits - run["logits"]).pow(2).mean().sqrt() / run["logits"].pow(2).mean().sqrt())


def attempt(shape, seed, tok):
    config, model = build(shape, seed, tok)
    i = tok.token_to_id
    model.generation_config.eos_token_id = [i("<|im_end|>"), i("<|endoftext|>")]
    model.generation_config.pad_token_id = i("<|endoftext|>")
    proc = processor(shape, tok)
    runs, texts = [], list(TEXTS)
    for names in shape.prompts:
        for text in list(texts):
            run = run_prompt(model, proc, names, text)
            varied = len(set(run["tokens"].tolist()))
            plain = int(run["tokens"].max()) < 256 + N_MERGES and len(run["tokens"]) == STEPS
            if run["gap"] >= 5 * MIN_GAP and run["sight"] >= MIN_SIGHT and varied >= MIN_VARIED and plain:
                runs.append({**run, "text": text})
                texts.remove(text)
                break
        else:
            return f"no text works for {names}"
    if shape.kind is KIND3_5_MOE:
        wide = max(runs, key=lambda run: len(run["names"]))
        errors = [coarse_error(model, wide, n) for n, _ in MAX_COARSE]
        print("  errors in 8 and 4 bits", *(f"{error:.2f}" for error in errors), flush=True)
        if any(error > most for error, (_, most) in zip(errors, MAX_COARSE, strict=True)):
            return "rounding changes the choice of experts"
    return seed, config, model, proc, runs


def all_levels(features):
    """Rows of each image, those of further levels beside them."""
    levels = [features.pooler_output, *(getattr(features, "deepstack_features", None) or [])]
    return [torch.cat(rows, dim=-1) for rows in zip(*levels, strict=True)]


@torch.no_grad()
def image_tensors(model, proc, runs, keep_values):
    """Input and output of the tower for each image: pixels in patch order, and merged embeddings when it runs alone."""
    tensors, meta = {}, {}
    names = {n for r in runs for n in r["names"]}
    for name in sorted(names, key=lambda n: (np.prod([int(v) for v in n.split("x")]), n)):
        seen = proc.image_processor(images=[image(name)], return_tensors="pt")
        grid = seen["image_grid_thw"]
        pixels = torch.from_numpy(np.array(image(name)))
        _, gh, gw = grid[0].tolist()
        side = proc.image_processor.patch_size
        patches = pixels.reshape(gh // 2, 2, side, gw // 2, 2, side, 3).permute(0, 3, 1, 4, 6, 2, 5)
        patches = patches.reshape(-1, 3, side, side)
        mean, std = (torch.tensor(v).view(1, 3, 1, 1, 1) for v in (proc.image_processor.image_mean, proc.image_processor.image_std))
        formula = ((patches[:, :, None].expand(-1, -1, 2, -1, -1) / 255.0 - mean) / std).reshape(len(patches), -1)
        assert (formula - seen["pixel_values"]).abs().max() < 1e-5
        tensors[f"image.{name}.pixels"] = patches
        tensors[f"image.{name}.embeds"] = all_levels(model.model.get_image_features(
            seen["pixel_values"], grid, return_dict=True))[0]
        if keep_values and not meta:
            tensors[f"image.{name}.pixel_values"] = seen["pixel_values"]
        meta[name] = {"file": f"images/{name}.png", "grid_thw": grid[0].tolist()}
        vision = model.config.vision_config
        if hasattr(vision, "window_size"):
            index, bounds = get_vision_window_index(grid, 2, vision.window_size, vision.patch_size)
            meta[name] |= {"window_index": index.tolist(), "cu_window_seqlens": bounds.tolist()}
    for r in runs:
        if len(r["names"]) > 1:
            out = model.model.get_image_features(r["inputs"]["pixel_values"], r["inputs"]["image_grid_thw"], return_dict=True)
            for name, embeds in zip(r["names"], all_levels(out)):
                assert (embeds - tensors[f"image.{name}.embeds"]).abs().max() < 1e-4
    return tensors, meta


def write_model(shape, tok, config, model, proc, folder):
    i = tok.token_to_id
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", generation_config(i))
    least, most = shape.kind.pixels
    is_3 = shape.kind in KINDS3
    pixels = {"size": {"longest_edge": most, "shortest_edge": least}} if is_3 else {
        "min_pixels": least, "max_pixels": most}
    write_json(folder / "preprocessor_config.json", {
        **pixels, "patch_size": shape.kind.patch, "temporal_patch_size": 2, "merge_size": 2,
        "image_mean": list(proc.image_processor.image_mean), "image_std": list(proc.image_processor.image_std),
        "image_processor_type": "Qwen2VLImageProcessorFast" if is_3 else "Qwen2VLImageProcessor",
        "processor_class": shape.kind.processor.__name__,
    })
    tok.save(str(folder / "tokenizer.json"), pretty=False)
    write_json(folder / "tokenizer_config.json", {
        "add_prefix_space": False, "bos_token": None, "chat_template": shape.kind.template,
        "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "errors": "replace",
        "model_max_length": 32768, "pad_token": "<|endoftext|>", "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer", "unk_token": None,
        "added_tokens_decoder": {str(i(t)): {"content": t, "lstrip": False, "normalized": False, "rstrip": False,
                                             "single_word": False, "special": True} for t in SPECIALS},
    })
    write_json(folder / "chat_template.json", {"chat_template": shape.kind.template})
    state = experts_state(model) if shape.experts else model.state_dict()
    if shape.kind is KIND3_5_MOE and shape.disk != torch.float16:
        state = model.state_dict()
    elif shape.kind is KIND3_MOE and shape.disk != torch.float16:
        state = inputs_first(state)
    state = {k: v.to(shape.disk) for k, v in state.items() if not (shape.tied and k == "lm_head.weight")}
    if not shape.nested:
        state = {published_name(k): v for k, v in state.items()}
    write_tensors(folder / "model.safetensors", state)


@torch.no_grad()
def make_case(shape):
    print(shape.case, flush=True)
    tok = byte_bpe(N_MERGES, [(t, True) for t in SPECIALS], qwen=True)
    seed, config, model, proc, runs = first_good_seed(
        lambda s: attempt(shape, s, tok), range(shape.seed, shape.seed + 60))
    out = case_dir(shape.case)
    write_model(shape, tok, config, model, proc, out / "model")
    tensors, images = image_tensors(model, proc, runs, shape.disk == torch.float32)
    (out / "images").mkdir()
    for name in images:
        image(name).save(out / "images" / f"{name}.png", optimize=True)
    wide = max(range(len(runs)), key=lambda k: len(runs[k]["names"]))
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    prompts = []
    for k, r in enumerate(runs):
        tensors[f"prompt.{k}.input_ids"] = r["ids"]
        tensors[f"prompt.{k}.position_ids"] = r["positions"]
        tensors[f"prompt.{k}.logits_last"] = r["logits"][-1]
        prompts.append({
            "text": r["text"], "images": r["names"], "rendered": r["rendered"], "rope_delta": r["delta"],
            "smallest_top2_gap": r["gap"], "input_ids": r["ids"].tolist(), "greedy_tokens": r["tokens"].tolist(),
            "greedy_text": tok.decode(r["tokens"].tolist(), skip_special_tokens=True),
        })
    n = len(runs[wide]["ids"])
    rows = torch.tensor(sorted({*range(0, n, 6), n - 1}))
    narrow.model.rope_deltas = None
    tensors[f"prompt.{wide}.logit_rows"] = rows
    tensors[f"prompt.{wide}.logits"] = runs[wide]["logits"][rows]
    tensors[f"prompt.{wide}.logits_bf16"] = narrow(**runs[wide]["inputs"]).logits[0].float()[rows]
    tensors["greedy_tokens"] = torch.stack([r["tokens"] for r in runs])
    write_matrix(out, tok, model, runs, images)
    write_tensors(out / "expected.safetensors", tensors)
    sample = "The quick fox, 2024: Füchse 你好\n\n  <|im_end|> it's end"
    ids = tok.encode(sample, add_special_tokens=False).ids
    tokenized = {"text": sample, "ids": ids, "decoded": tok.decode(ids, skip_special_tokens=True)}
    write_compact(out / "expected.json", {"seed": seed, "many_rows_prompt": wide, "tokenize": tokenized,
                                          "images": images, "prompts": prompts})
    check_sharpness(shape, model, runs[wide])
    check_reload(out / "model", type(model), runs[wide])


@torch.no_grad()
def beams(model, inputs, ends, setting):
    model.model.rope_deltas = None
    made = model.generate(
        **inputs, num_beams=4, num_return_sequences=2, do_sample=False, max_new_tokens=BEAM_TOKENS, eos_token_id=ends,
        temperature=None, top_p=None, top_k=None, return_dict_in_generate=True, output_scores=True, **setting)
    model.model.rope_deltas = None
    answers = []
    for row, score in zip(made.sequences, made.sequences_scores.tolist(), strict=True):
        tokens = row[inputs["input_ids"].shape[1]:].tolist()
        stops = [i for i, t in enumerate(tokens) if t in ends]
        answers.append({"tokens": tokens[: stops[0] + 1] if stops else tokens, "score": round(score, 6)})
    return answers


@torch.no_grad()
def stable_beams(model, exact, run, ends):
    """Beams that do not depend on rounding, as f64 shows, by whichever setting gives some."""
    narrow = dict(run["inputs"])
    wide = {k: v.double() if torch.is_floating_point(v) else v for k, v in narrow.items()}
    for penalty in (1.0, 0.6, 2.0, 0.0, 1.5):
        for early in (False, True, "never"):
            setting = {"length_penalty": penalty, "early_stopping": early}
            answers, same = beams(model, narrow, ends, setting), beams(exact, wide, ends, setting)
            apart = answers[0]["score"] - answers[1]["score"]
            if [a["tokens"] for a in answers] == [a["tokens"] for a in same] and apart > MIN_GAP:
                return {**setting, "max_new_tokens": BEAM_TOKENS, "answers": answers}
    raise RuntimeError(f"no stable beams for {run['names']}")


@torch.no_grad()
def write_matrix(folder, tok, model, runs, images):
    """`matrix.json`, with items among the tokens instead of encoder rows to cross-attend to."""
    ends = [tok.token_to_id("<|im_end|>"), tok.token_to_id("<|endoftext|>")]
    pad, exact, names = tok.token_to_id("<|image_pad|>"), copy.deepcopy(model).double(), list(images)
    requests = []
    for k, r in enumerate(runs):
        ids = r["ids"].tolist()
        starts = [i for i, t in enumerate(ids) if t == pad and ids[i - 1] != pad]
        requests.append({
            "rows": None, "prompt": ids, "end_tokens": ends,
            "spans": [{"rows": names.index(n), "first_token": at} for n, at in zip(r["names"], starts, strict=True)],
            "positions": f"prompt.{k}.position_ids", "next_position": len(ids) + r["delta"],
            "max_new_tokens": 32, "greedy": r["tokens"][:32].tolist(),
            "beam4": stable_beams(model, exact, r, ends), "next_logits": f"prompt.{k}.logits_last",
        })
    write_compact(folder / "matrix.json", {"rows": [f"image.{n}.embeds" for n in names], "requests": requests})


@torch.no_grad()
def check_reload(folder, kind, run):
    """The directory on disk, read by the reference itself, is the model that made the numbers."""
    again = kind.from_pretrained(folder, dtype=torch.float32)
    assert (again(**run["inputs"]).logits[0] - run["logits"]).abs().max() < 1e-5


def flat_levels(model, run):
    """Change of the last logits if levels beyond the first are not added."""
    text = model.model.language_model
    kept, text._deepstack_process = text._deepstack_process, lambda hidden, *_: hidden
    model.model.rope_deltas = None
    wrong = model(**run["inputs"]).logits[0, -1]
    text._deepstack_process = kept
    return float((wrong - run["logits"][-1]).abs().max())


def plain_sections(model, run):
    """Change of the last logits if the frequencies of temporal, height, width follow each other."""
    rotary = model.model.language_model.rotary_emb
    kept, sections = rotary.recomposition_frequencies, rotary.mrope_section

    def consecutive(freq):
        parts = [part[i] for i, part in enumerate(freq.split(sections, dim=-1))]
        return torch.cat([torch.cat(parts, dim=-1)] * 2, dim=-1)

    rotary.recomposition_frequencies = consecutive
    model.model.rope_deltas = None
    wrong = model(**run["inputs"]).logits[0, -1]
    rotary.recomposition_frequencies = kept
    return float((wrong - run["logits"][-1]).abs().max())


@torch.no_grad()
def check_sharpness(shape, model, run):
    """A case is worth little if plain positions, or one kind of attention, would pass it too."""
    model.model.rope_deltas = None
    flat = torch.arange(len(run["ids"])).expand(3, 1, -1)
    assert (model(**run["inputs"], position_ids=flat).logits[0, -1] - run["logits"][-1]).abs().max() > 0.3
    if shape.kind in KINDS3:
        # Nor would one without the further levels, or with the frequencies of one part of a position after another.
        changes = ((flat_levels, 0.3), (plain_sections, 0.03)) if shape.kind in (KIND3, KIND3_MOE) else ((plain_sections, 0.02),)
        for wrong, least in changes:
            change = wrong(model, run)
            assert change > least, f"{wrong.__name__}: {change}"
    if shape.kind is KIND2_5:
        visual, inputs = model.model.visual, run["inputs"]
        right = visual(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
        kept, visual.fullatt_block_indexes = visual.fullatt_block_indexes, list(range(9))
        wrong = visual(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
        visual.fullatt_block_indexes = kept
        assert (right - wrong).abs().max() > 0.1


def make_qwen2_vl():
    for shape in QWEN2:
        make_case(shape)


def make_qwen2_5_vl():
    for shape in QWEN2_5:
        make_case(shape)


def make_qwen3_5():
    for shape in QWEN3_5:
        make_case(shape)


def make_qwen3_5_moe():
    for shape in QWEN3_5_MOE:
        make_case(shape)


def make_qwen3_vl_moe():
    for shape in QWEN3_MOE:
        make_case(shape)


def make_qwen3_vl():
    for shape in QWEN3:
        make_case(shape)
