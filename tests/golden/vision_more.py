"""Golden files of further image encoders and text decoders in one model: ViT-GPT2, Nougat and Swinv2 in three shapes each, the
towers of CLIP and DINOv2, encoders of images of another size than that of their positions, decoders of BERT and RoBERTa, and Florence-2 as its authors published it, which is a case of `vision.py` by other names.
"""

import json
import re
import shutil
import sys

import torch
from safetensors.torch import load_file
from transformers import (
    BertConfig,
    CLIPVisionConfig,
    DeiTConfig,
    Dinov2Config,
    Dinov2WithRegistersConfig,
    DonutSwinConfig,
    GPT2Config,
    RobertaConfig,
    SwinConfig,
    Swinv2Config,
    ViTConfig,
)
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.nougat.image_processing_pil_nougat import NougatImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from common import ROOT, write_json, write_tensors
from vision import PAGES, QUIET_LAYERS, SIZES, Shape, clip, donut, make_case, mbart, trocr

# `randomise` takes the inputs of a matrix for its outputs, which GPT-2 stores first.
GPT2_GAINS = (("attn.c_attn", 1.8), ("crossattention.q_attn", 2.0), ("crossattention.c_attn", 1.4), ("attn.c_proj", 0.4),
              ("mlp.c_fc", 1.6), ("mlp.c_proj", 0.3))


def gpt2(**more):
    return GPT2Config(**dict(n_positions=64, n_layer=2) | more)


def vit_processor(height, width, **more):
    return ViTImageProcessorPil, {
        "image_processor_type": "ViTImageProcessor", "do_normalize": True, "do_rescale": True, "do_resize": True,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2, "rescale_factor": 1 / 255,
        "size": {"height": height, "width": width}, **more,
    }


def gpt2_shapes():
    vit = dict(num_hidden_layers=2, intermediate_size=40, patch_size=8, image_size=32)
    return [
        Shape("vit_gpt2", ViTConfig(hidden_size=24, num_attention_heads=3, **vit), gpt2(n_embd=24, n_head=3),
              vit_processor(32, 32), torch.float32, 1100, SIZES, gains=GPT2_GAINS),
        Shape("vit_gpt2_projected", ViTConfig(hidden_size=36, num_attention_heads=3, qkv_bias=False, **vit),
              gpt2(n_embd=28, n_head=2, n_inner=40, activation_function="relu", scale_attn_weights=False,
                   tie_word_embeddings=False),
              vit_processor(32, 32), torch.float16, 1200, SIZES, gains=GPT2_GAINS),
        Shape("swin_gpt2", SwinConfig(depths=[2, 2], num_heads=[2, 4], window_size=2, image_size=48, patch_size=4,
                                      embed_dim=8, mlp_ratio=2.0),
              gpt2(n_embd=16, n_head=4, n_layer=3, layer_norm_epsilon=1e-4), vit_processor(48, 48), torch.bfloat16, 1300,
              SIZES, gains=GPT2_GAINS),
    ]


def nougat(height, width, **more):
    return NougatImageProcessorPil, {
        "image_processor_type": "NougatImageProcessor", "do_align_long_axis": False, "do_crop_margin": True,
        "do_normalize": True, "do_pad": True, "do_rescale": True, "do_resize": True, "do_thumbnail": True,
        "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "resample": 2, "rescale_factor": 1 / 255,
        "size": {"height": height, "width": width}, **more,
    }


def nougat_shapes():
    swin = dict(patch_size=4, embed_dim=8, mlp_ratio=2.0)
    settings = dict(embed_std=1.0, gains=QUIET_LAYERS, prompts=("<s>",), margins=True, max_rounding=2e-5)
    return [
        Shape("nougat_margins", DonutSwinConfig(depths=[1, 2], num_heads=[1, 2], window_size=3, image_size=[72, 48], **swin),
              mbart(d_model=32, decoder_attention_heads=4, decoder_layers=1), nougat(72, 48), torch.float32, 1400, PAGES,
              **settings),
        Shape("nougat_aligned", DonutSwinConfig(depths=[2, 1], num_heads=[2, 4], window_size=3, image_size=[56, 72], **swin),
              mbart(d_model=16, decoder_attention_heads=4, scale_embedding=False, tie_word_embeddings=False),
              nougat(56, 72, do_align_long_axis=True, resample=3), torch.float16, 1500, PAGES, **settings),
        Shape("nougat_uncropped", DonutSwinConfig(depths=[1, 1, 2], num_heads=[1, 2, 2], window_size=2, image_size=[64, 48],
                                                  **swin),
              mbart(d_model=32, decoder_attention_heads=4, decoder_layers=1), nougat(64, 48, do_crop_margin=False),
              torch.bfloat16, 1600, PAGES, **settings),
    ]


def tower_shapes():
    sizes = dict(num_hidden_layers=2, patch_size=8, image_size=32)
    gains = (("position_embedding.", 8.0), ("patch_embedding.", 2.0), ("lambda1", 0.4))
    settings = dict(embed_std=1.0, gains=gains + QUIET_LAYERS)
    return [
        Shape("clip_trocr", CLIPVisionConfig(hidden_size=24, num_attention_heads=3, intermediate_size=40, **sizes),
              trocr(d_model=32, decoder_attention_heads=4, cross_attention_hidden_size=24),
              clip(0, 0, do_center_crop=True, crop_size={"height": 32, "width": 32}, size={"shortest_edge": 32}),
              torch.float32, 1700, SIZES, **settings),
        Shape("clip_mbart_projected", CLIPVisionConfig(hidden_size=36, num_attention_heads=2, intermediate_size=48,
                                                       hidden_act="gelu", **sizes),
              mbart(d_model=16, decoder_attention_heads=2), clip(32, 32), torch.float16, 1800, SIZES, **settings),
        Shape("dinov2_trocr", Dinov2Config(hidden_size=32, num_attention_heads=2, mlp_ratio=1, qkv_bias=False, **sizes),
              trocr(d_model=24, decoder_attention_heads=3, cross_attention_hidden_size=32), vit_processor(32, 32),
              torch.bfloat16, 2000, SIZES, **settings),
    ]


def make_towers():
    for shape in tower_shapes():
        make_case(shape)


def bit(edge, height, width):
    return BitImageProcessorPil, {
        "image_processor_type": "BitImageProcessor", "do_center_crop": True, "do_convert_rgb": True, "do_normalize": True,
        "do_rescale": True, "do_resize": True, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
        "resample": 3, "rescale_factor": 1 / 255, "size": {"shortest_edge": edge},
        "crop_size": {"height": height, "width": width},
    }


def resized_shapes():
    sizes = dict(num_hidden_layers=2, num_attention_heads=2, patch_size=8)
    gains = (("position_embedding.", 8.0), ("patch_embedding.", 2.0), ("lambda1", 0.4), ("register_tokens", 3.0))
    settings = dict(embed_std=1.0, gains=gains + QUIET_LAYERS)
    gpt2_settings = dict(gains=gains + GPT2_GAINS)
    read = trocr(d_model=24, decoder_attention_heads=3, decoder_layers=1, cross_attention_hidden_size=32)
    return [
        Shape("dinov2_cropped", Dinov2Config(hidden_size=32, mlp_ratio=1, image_size=48, **sizes), read, bit(36, 32, 24),
              torch.float32, 2700, SIZES[:4], **settings),
        Shape("dinov2_larger_gated", Dinov2Config(hidden_size=24, mlp_ratio=2, image_size=24, use_swiglu_ffn=True, **sizes),
              gpt2(n_embd=24, n_head=3), bit(44, 32, 40), torch.float16, 2800, SIZES[:4], **gpt2_settings),
        Shape("registers_unresized", Dinov2WithRegistersConfig(hidden_size=32, mlp_ratio=1, image_size=32, **sizes), read,
              vit_processor(32, 32), torch.float32, 2900, SIZES[:4], **settings),
        Shape("registers_cropped_gated", Dinov2WithRegistersConfig(
            hidden_size=32, mlp_ratio=1, image_size=56, num_register_tokens=3, use_swiglu_ffn=True, **sizes), read,
              bit(34, 32, 24), torch.float16, 3000, SIZES[:4], **settings),
        Shape("registers_larger", Dinov2WithRegistersConfig(
            hidden_size=16, mlp_ratio=2, image_size=24, num_register_tokens=1, qkv_bias=False, **sizes),
              gpt2(n_embd=24, n_head=3), bit(48, 32, 48), torch.bfloat16, 3100, SIZES[:4], **gpt2_settings),
        Shape("clip_larger", CLIPVisionConfig(hidden_size=32, intermediate_size=40, image_size=32, **sizes), read,
              clip(0, 0, do_center_crop=True, crop_size={"height": 48, "width": 40}, size={"shortest_edge": 48}),
              torch.bfloat16, 3200, SIZES[:4], resizes=True, **settings),
        Shape("deit_smaller", DeiTConfig(hidden_size=24, intermediate_size=40, image_size=40, **sizes),
              gpt2(n_embd=24, n_head=3), vit_processor(24, 32), torch.float32, 3300, SIZES[:4], resizes=True,
              **gpt2_settings),
    ]


def bert_shapes():
    vit = dict(num_hidden_layers=2, intermediate_size=40, patch_size=8, image_size=32)
    text = dict(num_hidden_layers=2, is_decoder=True, add_cross_attention=True)
    gains = (("crossattention.self", 2.0), ("crossattention.output.dense", 1.5), ("intermediate.dense", 1.5))
    settings = dict(embed_std=0.4, gains=gains)
    return [
        Shape("vit_bert", ViTConfig(hidden_size=24, num_attention_heads=3, **vit),
              BertConfig(hidden_size=24, num_attention_heads=2, intermediate_size=40, max_position_embeddings=64, **text),
              vit_processor(32, 32), torch.float32, 3400, SIZES[:4], **settings),
        Shape("deit_roberta_projected", DeiTConfig(hidden_size=36, num_attention_heads=3, **vit),
              # Positions begin behind the padding token, which is one of the last.
              RobertaConfig(max_position_embeddings=400, hidden_size=28, num_attention_heads=2, intermediate_size=48,
                            hidden_act="relu", tie_word_embeddings=False, type_vocab_size=1, layer_norm_eps=1e-5, **text),
              vit_processor(32, 32), torch.bfloat16, 3500, SIZES[:4], **settings),
    ]


def make_bert():
    for shape in bert_shapes():
        make_case(shape)


def make_resized():
    for shape in resized_shapes():
        make_case(shape)


def swinv2_shapes():
    swin = dict(patch_size=4, embed_dim=8, mlp_ratio=2.0)
    gains = (("position_bias_mlp.0", 3.0), ("position_bias_mlp.2", 4.0), ("logit_scale", 0.0))
    settings = dict(embed_std=1.0, gains=gains + QUIET_LAYERS, max_row_rounding=2.5e-5)
    return [
        # The second stage is as narrow as its windows, which are not shifted then.
        Shape("swinv2_trocr", Swinv2Config(depths=[2, 2], num_heads=[1, 2], window_size=4, image_size=32, **swin),
              trocr(d_model=32, decoder_attention_heads=4, cross_attention_hidden_size=16), vit_processor(32, 32),
              torch.float32, 2400, SIZES, **settings | {"max_row_rounding": 4e-5}),
        # Windows of 3 rows measured by those of another training, padding down and across, three stages.
        Shape("swinv2_padded", Swinv2Config(depths=[2, 1, 2], num_heads=[2, 2, 4], window_size=3, image_size=[56, 72],
                                            pretrained_window_sizes=[5, 4, 0], **swin),
              mbart(d_model=24, decoder_attention_heads=3, decoder_layers=1), donut(56, 72), torch.float16, 2500, PAGES,
              most_log_factor=3.0, **settings),
        # Images of another size than the configured one: windows stay as wide as that says.
        Shape("swinv2_resized", Swinv2Config(depths=[2, 2], num_heads=[1, 2], window_size=4, image_size=24, qkv_bias=False,
                                             **swin),
              trocr(d_model=32, decoder_attention_heads=4, cross_attention_hidden_size=16), vit_processor(32, 40),
              torch.bfloat16, 2600, SIZES, max_rounding=1e-5, most_log_factor=3.0, **settings),
    ]


def make_swinv2():
    for shape in swinv2_shapes():
        make_case(shape)


# Parts of names of tensors, converted and as published first.
FLORENCE_NAMES = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.vision_tower\.", "vision_tower."),
    (r"(convs\.\d+)\.conv\.", r"\1.proj."),
    (r"(_block\.conv[12])\.", r"\1.fn.dw."),
    (r"(window|channel)_attn\.(qkv|proj)", r"\1_attn.fn.\2"),
    (r"spatial_block\.norm1", "spatial_block.window_attn.norm"),
    (r"channel_block\.norm1", "channel_block.channel_attn.norm"),
    (r"_block\.norm2", "_block.ffn.norm"),
    (r"ffn\.(fc[12])", r"ffn.fn.net.\1"),
    (r"^model\.multi_modal_projector\.", ""),
    (r"^image_projection\.weight$", "image_projection"),
    (r"^image_position_embed\.", "image_pos_embed."),
)


def published_name(name):
    for pattern, into in FLORENCE_NAMES:
        name = re.sub(pattern, into, name)
    return name


def published_vision(vision):
    """The vision section as the authors' release has it."""
    same = ("depths", "num_groups", "num_heads", "patch_padding", "patch_prenorm", "patch_size", "patch_stride",
            "projection_dim", "window_size")
    return {
        "model_type": "davit", "dim_embed": vision["embed_dim"], "drop_path_rate": 0.1, "enable_checkpoint": False,
        "image_feature_source": ["spatial_avg_pool", "temporal_avg_pool"],
        "image_pos_embed": {"max_pos_embeddings": vision["max_position_embeddings"], "type": "learned_abs_2d"},
        "visual_temporal_embedding": {"max_temporal_embeddings": vision["max_temporal_embeddings"], "type": "COSINE"},
    } | {key: vision[key] for key in same}


def make_florence_original():
    """The same model, rows and tokens; its directory is written anew."""
    source, folder = ROOT / "florence_windows", ROOT / "florence_original"
    print(folder.name, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    state = load_file(str(folder / "model" / "model.safetensors"))
    state = {published_name(name): value for name, value in state.items()}
    state["image_projection"] = state["image_projection"].T
    text = "language_model.model.shared.weight"
    state.setdefault("language_model.final_logits_bias", torch.zeros(1, state[text].shape[0]))
    write_tensors(folder / "model" / "model.safetensors", state)
    config = json.loads((folder / "model" / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    assert vision.get("mlp_ratio", 4) == 4 and vision.get("qkv_bias", True)
    config = {key: config[key] for key in ("model_type", "bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    write_json(folder / "model" / "config.json", config | {
        "architectures": ["Florence2ForConditionalGeneration"], "is_encoder_decoder": True,
        "projection_dim": vision["projection_dim"], "vocab_size": text["vocab_size"],
        "text_config": text | {"model_type": "florence2_language"}, "vision_config": published_vision(vision),
    })


def make_nougat():
    for shape in nougat_shapes():
        make_case(shape)


def make_gpt2():
    for shape in gpt2_shapes():
        make_case(shape)


if __name__ == "__main__":
    sys.exit("run make.py")
