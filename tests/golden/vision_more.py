"""Golden files of further image encoders and text decoders in one model: ViT-GPT2 and Nougat in three shapes each."""

import sys

import torch
from transformers import DonutSwinConfig, GPT2Config, SwinConfig, ViTConfig
from transformers.models.nougat.image_processing_pil_nougat import NougatImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from vision import PAGES, QUIET_LAYERS, SIZES, Shape, make_case, mbart

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
    settings = dict(embed_std=1.0, gains=QUIET_LAYERS, prompts=("<s>",), margins=True)
    return [
        Shape("nougat_margins", DonutSwinConfig(depths=[1, 2], num_heads=[1, 2], window_size=3, image_size=[72, 48], **swin),
              mbart(d_model=16, decoder_attention_heads=2), nougat(72, 48), torch.float32, 1400, PAGES, **settings),
        Shape("nougat_aligned", DonutSwinConfig(depths=[2, 1], num_heads=[2, 4], window_size=3, image_size=[56, 72], **swin),
              mbart(d_model=16, decoder_attention_heads=4, scale_embedding=False, tie_word_embeddings=False),
              nougat(56, 72, do_align_long_axis=True, resample=3), torch.float16, 1500, PAGES, **settings),
        Shape("nougat_uncropped", DonutSwinConfig(depths=[1, 1, 2], num_heads=[1, 2, 2], window_size=2, image_size=[64, 48],
                                                  **swin),
              mbart(d_model=32, decoder_attention_heads=4, decoder_layers=1), nougat(64, 48, do_crop_margin=False),
              torch.bfloat16, 1600, PAGES, **settings),
    ]


def make_nougat():
    for shape in nougat_shapes():
        make_case(shape)


def make_gpt2():
    for shape in gpt2_shapes():
        make_case(shape)


if __name__ == "__main__":
    sys.exit("run make.py")
