"""Golden files of InternVL in its authors' layout: transformers' class computes them, then names and files are the authors'."""

import json

import torch
from safetensors.torch import load_file
from tokenizers import processors
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

import internvl
from common import ROOT, byte_bpe, round_weights, write_json, write_tensors
from internvl import Shape, tower
from llava import N_MERGES, Maker, make_case, text

SPECIALS = [t for t in internvl.SPECIALS if t != "<image>"]
# A template of text models: contents are strings.
CHAT_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{{ '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHAPES = [
    Shape("internvl_chat_qwen2", text("qwen2", 48, 4, 2, 2, 72, rope_theta=1e6), tower(32, 2, 52, 3, 32, 8), 6, False,
          torch.float32, 6200, True),
    # As the tower of 6 billion parameters.
    Shape("internvl_chat_row_norms", text("qwen3", 60, 3, 1, 2, 88, head_dim=16),
          tower(24, 2, 40, 3, 28, 7, norm_type="rms_norm", use_qk_norm=True, attention_bias=False), 4, False, torch.bfloat16,
          6300, True),
    # InternLM2 is a Llama by other names.
    Shape("internvl_chat_internlm2", text("llama", 48, 4, 2, 3, 64, rope_theta=1e6), tower(24, 3, 40, 2, 24, 6), 12, False,
          torch.float16, 6402, True),
]
VISION = (
    ("embeddings.cls_token", "embeddings.class_embedding"), ("embeddings.patch_embeddings.projection", "embeddings.patch_embedding"),
    ("embeddings.position_embeddings", "embeddings.position_embedding"), ("encoder.layer.", "encoder.layers."),
    ("layernorm_before", "norm1"), ("layernorm_after", "norm2"), ("attention.projection_layer", "attn.proj"),
    ("attention.q_norm", "attn.q_norm"), ("attention.k_norm", "attn.k_norm"), ("lambda_1", "ls1"), ("lambda_2", "ls2"),
    ("attention.", "attn."),
)
PROJECTOR = (("layer_norm", "0"), ("linear_1", "1"), ("linear_2", "3"))
INTERNLM2 = (
    ("lm_head", "output"), ("embed_tokens", "tok_embeddings"), ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "ffn_norm"), ("self_attn.o_proj", "attention.wo"), ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.up_proj", "feed_forward.w3"), ("mlp.down_proj", "feed_forward.w2"),
)


def renamed(name, pairs):
    for new, old in pairs:
        name = name.replace(new, old)
    return name


def original_name(name, is_internlm2=False):
    """The authors' name of a tensor, from that of transformers' layout; projections are not yet together."""
    if name.startswith("vision_tower."):
        return "vision_model." + renamed(name.removeprefix("vision_tower."), VISION)
    if name.startswith("multi_modal_projector."):
        return "mlp1." + renamed(name.removeprefix("multi_modal_projector."), PROJECTOR)
    return renamed(name, INTERNLM2) if is_internlm2 else name


def grouped(parts, n_kv_heads):
    """Queries, keys and values of each key head on top of each other."""
    heads = [p.reshape(n_kv_heads, -1, p.shape[-1]) for p in parts]
    return torch.cat(heads, 1).reshape(-1, parts[0].shape[-1])


def ungrouped(value, n_heads, n_kv_heads):
    """Queries, keys and values that `grouped` put on top of each other."""
    heads = value.reshape(n_kv_heads, n_heads // n_kv_heads + 2, -1, value.shape[-1])
    return [part.reshape(-1, value.shape[-1]) for part in (heads[:, :-2], heads[:, -2], heads[:, -1])]


def original_shapes(state, n_grouped):
    """Shapes of the authors' tensors; `n_grouped`: key heads of InternLM2, else 0."""
    return {k: list(v.shape) for k, v in original_state(state, n_grouped).items()}


def sources_of(names, n_grouped):
    """Names that a tensor of the authors is made of: one, or queries, keys and values."""
    is_internlm2 = n_grouped > 0
    out, parts = {}, {}
    for own in names:
        name = original_name(own, is_internlm2)
        for i, part in enumerate(("q_proj", "k_proj", "v_proj")):
            if f"attn.{part}." in name and name.startswith("vision_model."):
                parts.setdefault(name.replace(part, "qkv"), [None] * 3)[i] = own
                break
            if is_internlm2 and f"self_attn.{part}." in name:
                parts.setdefault(name.replace(f"self_attn.{part}", "attention.wqkv"), [None] * 3)[i] = own
                break
        else:
            out[name] = [own]
    return out | parts


def original_state(state, n_grouped):
    """The authors' tensors: those of one projection are joined."""
    out = {}
    for name, sources in sources_of(state, n_grouped).items():
        parts = [state[source] for source in sources]
        own = grouped(parts, n_grouped) if name.endswith("wqkv.weight") else torch.cat(parts)
        out[name] = own.contiguous()
    return out


def parts_of(name, value, like, n_grouped):
    """The tensors that one of the authors is made of, each with the rows of the one in `like`."""
    if not name.endswith("wqkv.weight"):
        return value.split([len(part) for part in like])
    n_heads = n_grouped * len(like[0]) // len(like[1])
    return ungrouped(value, n_heads, n_grouped)


def original_config(shape, read):
    seen, words = shape.vision, dict(read["text_config"])
    side, patch = seen["image_size"][0], seen["patch_size"][0]
    words["architectures"] = ["Qwen2ForCausalLM" if words["model_type"] == "qwen2" else "Qwen3ForCausalLM"]
    if words["model_type"] == "llama":
        words |= {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False, "hidden_act": "silu",
                  "rms_norm_eps": 1e-6, "rope_scaling": {"factor": 2.0, "type": "dynamic"}}
    vision = {
        "architectures": ["InternVisionModel"], "attention_dropout": 0.0, "drop_path_rate": 0.0, "dropout": 0.0, "hidden_act": "gelu",
        "hidden_size": seen["hidden_size"], "image_size": side, "initializer_factor": 1.0, "intermediate_size": seen["intermediate_size"],
        "layer_norm_eps": 1e-6, "model_type": "intern_vit_6b", "norm_type": seen.get("norm_type", "layer_norm"),
        "num_attention_heads": seen["num_attention_heads"], "num_channels": 3, "num_hidden_layers": seen["num_hidden_layers"],
        "patch_size": patch, "qk_normalization": seen.get("use_qk_norm", False), "qkv_bias": seen["attention_bias"], "use_flash_attn": True,
    }
    return {
        "architectures": ["InternVLChatModel"], "auto_map": {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"},
        "downsample_ratio": 0.5, "dynamic_image_size": True, "force_image_size": side, "llm_config": words,
        "max_dynamic_patch": shape.tiles, "min_dynamic_patch": 1, "model_type": "internvl_chat", "pad2square": False, "ps_version": "v2",
        "select_layer": -1, "template": "internvl2_5", "torch_dtype": str(shape.disk).removeprefix("torch."), "use_backbone_lora": 0,
        "use_llm_lora": 0, "use_thumbnail": True, "vision_config": vision,
    }


def tokenizer():
    tok = byte_bpe(N_MERGES, [(t, True) for t in SPECIALS], qwen=True)
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    return tok


def build(shape, seed, tok):
    config, model = internvl.build(shape, seed, tok)
    if shape.text["model_type"] != "qwen3":
        # Nothing normalises queries and keys, and what a step of a byte moves would be far.
        for layer in model.model.language_model.layers:
            layer.self_attn.q_proj.weight.data *= 0.7
            layer.self_attn.k_proj.weight.data *= 0.7
        round_weights(model, shape.disk)
    return config, model


def processor(shape, tok):
    proc = internvl.processor(shape, tok)
    side = shape.vision["image_size"][0]
    proc.image_processor = GotOcr2ImageProcessorPil(
        size={"height": side, "width": side}, max_patches=shape.tiles, crop_to_patches=True, image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225])
    return proc


def rewrite(shape):
    """Turns a directory of transformers' layout into the authors'."""
    folder = ROOT / shape.case / "model"
    read = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", original_config(shape, read))
    n_grouped = shape.text["num_key_value_heads"] if shape.text["model_type"] == "llama" else 0
    write_tensors(folder / "model.safetensors", original_state(load_file(folder / "model.safetensors"), n_grouped))
    (folder / "chat_template.json").unlink()
    named = json.loads((folder / "tokenizer_config.json").read_text())
    del named["image_token"]
    write_json(folder / "tokenizer_config.json", {**named, "chat_template": CHAT_TEMPLATE})
    # As published, and read by nobody.
    side = shape.vision["image_size"][0]
    write_json(folder / "preprocessor_config.json", {
        "crop_size": side, "do_center_crop": True, "do_normalize": True, "do_resize": True, "feature_extractor_type": "CLIPFeatureExtractor",
        "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "resample": 3, "size": side})


def make():
    for shape in SHAPES:
        make_case(shape, Maker(tokenizer, build, processor, internvl.published_name))
        rewrite(shape)
