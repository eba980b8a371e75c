"""Tensor names and shapes of the published checkpoints, from meta-device models of the real sizes."""

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GlmOcrConfig,
    GlmOcrForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3ForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    BlenderbotConfig,
    BlenderbotForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    MllamaConfig,
    LightOnOcrConfig,
    LightOnOcrForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MllamaForConditionalGeneration,
    MoonshineConfig,
    MoonshineForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
    VoxtralConfig,
    VoxtralForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from audio_chat import published_name as audio_name
from common import ROOT, write_compact
from internvl import published_name as internvl_name
from internvl_original import original_shapes
from llava import published_name as llava_name
from mllama import published_name as mllama_name
from pixtral import published_name as pixtral_name
from qwen import published_name

TEXT = dict(max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=True,
            rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}, vocab_size=151936)


def whisper(d, layers, heads, mels, vocab):
    return WhisperForConditionalGeneration, WhisperConfig(
        d_model=d, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads,
        decoder_attention_heads=heads, encoder_ffn_dim=4 * d, decoder_ffn_dim=4 * d, num_mel_bins=mels, vocab_size=vocab)


def moonshine(hidden, layers, ffn, factor):
    return MoonshineForConditionalGeneration, MoonshineConfig(
        hidden_size=hidden, encoder_num_hidden_layers=layers, decoder_num_hidden_layers=layers, intermediate_size=ffn,
        max_position_embeddings=194, pad_head_dim_to_multiple_of=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": factor})


def mllama():
    return MllamaForConditionalGeneration, MllamaConfig(
        vision_config=dict(image_size=560, max_num_tiles=4), text_config=dict(vocab_size=128256))


LLAVA_CLIP = dict(model_type="clip_vision_model", hidden_size=1024, image_size=336, intermediate_size=4096,
                  num_attention_heads=16, num_hidden_layers=24, patch_size=14, projection_dim=768, vocab_size=32000)


def llava():
    return LlavaForConditionalGeneration, LlavaConfig(
        text_config=dict(model_type="llama", max_position_embeddings=4096, rms_norm_eps=1e-5, vocab_size=32064),
        vision_config=LLAVA_CLIP)


def llava_next():
    return LlavaNextForConditionalGeneration, LlavaNextConfig(
        text_config=dict(model_type="mistral", max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=1e6,
                         sliding_window=None, vocab_size=32064, intermediate_size=14336, num_key_value_heads=8),
        vision_config=LLAVA_CLIP)


def llava_onevision():
    return LlavaOnevisionForConditionalGeneration, LlavaOnevisionConfig(
        tie_word_embeddings=True,
        text_config=dict(model_type="qwen2", hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                         num_attention_heads=14, num_key_value_heads=2, vocab_size=152000, tie_word_embeddings=True),
        vision_config=dict(model_type="siglip_vision_model", hidden_size=1152, image_size=384, intermediate_size=4304,
                           num_attention_heads=16, num_hidden_layers=26, patch_size=14, vision_use_head=False))


def smolvlm():
    return SmolVLMForConditionalGeneration, SmolVLMConfig(
        scale_factor=4, tie_word_embeddings=False,
        text_config=dict(model_type="llama", hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                         num_attention_heads=9, num_key_value_heads=3, head_dim=64, vocab_size=49280),
        vision_config=dict(hidden_size=768, image_size=512, patch_size=16, num_attention_heads=12,
                           intermediate_size=3072))


def internvl():
    return InternVLForConditionalGeneration, InternVLConfig(
        tie_word_embeddings=False,
        text_config=dict(model_type="qwen2", hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                         num_attention_heads=14, num_key_value_heads=2, vocab_size=151674, tie_word_embeddings=False),
        vision_config=dict(attention_bias=True))


def gemma3():
    return Gemma3ForConditionalGeneration, Gemma3Config(
        text_config=dict(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, sliding_window=1024),
        vision_config=dict(model_type="siglip_vision_model", hidden_size=1152, image_size=896, intermediate_size=4304,
                           num_attention_heads=16, num_hidden_layers=27, patch_size=14, vision_use_head=False))


def text_decoders():
    def sizes(hidden, ffn, layers, heads, kv_heads, vocab, **more):
        return dict(hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=heads,
                    num_key_value_heads=kv_heads, vocab_size=vocab, **more)

    return {
        "llama-3.2-1b": (LlamaForCausalLM, LlamaConfig(
            **sizes(2048, 8192, 16, 32, 8, 128256, head_dim=64, tie_word_embeddings=True))),
        "mistral-7b-v0.3": (MistralForCausalLM, MistralConfig(
            **sizes(4096, 14336, 32, 32, 8, 32768, sliding_window=None))),
        "qwen2.5-0.5b": (Qwen2ForCausalLM, Qwen2Config(**sizes(896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True))),
        "qwen3-0.6b": (Qwen3ForCausalLM, Qwen3Config(
            **sizes(1024, 3072, 28, 16, 8, 151936, head_dim=128, tie_word_embeddings=True))),
        "gemma-3-1b": (Gemma3ForCausalLM, Gemma3TextConfig(
            **sizes(1152, 6912, 26, 4, 1, 262144, head_dim=256, sliding_window=512, tie_word_embeddings=True))),
        "gemma-2-2b": (Gemma2ForCausalLM, Gemma2Config(
            **sizes(2304, 9216, 26, 8, 4, 256000, head_dim=256, tie_word_embeddings=True))),
    }


def qwen2_audio():
    return Qwen2AudioForConditionalGeneration, Qwen2AudioConfig(
        tie_word_embeddings=False, audio_config=dict(model_type="qwen2_audio_encoder"),
        text_config=dict(model_type="qwen2", intermediate_size=11008, vocab_size=156032))


def voxtral():
    return VoxtralForConditionalGeneration, VoxtralConfig(
        tie_word_embeddings=False, audio_config=dict(model_type="voxtral_encoder"),
        text_config=dict(model_type="llama", num_attention_heads=32))


def pixtral():
    return LlavaForConditionalGeneration, LlavaConfig(
        vision_feature_layer=-1, vision_feature_select_strategy="full",
        text_config=dict(model_type="mistral", hidden_size=5120, intermediate_size=14336, num_hidden_layers=40, head_dim=128,
                         num_key_value_heads=8, vocab_size=131072, sliding_window=None),
        vision_config=dict(model_type="pixtral", hidden_act="silu", image_size=1024, patch_size=16))


def mistral3():
    return Mistral3ForConditionalGeneration, Mistral3Config(
        tie_word_embeddings=False,
        text_config=dict(model_type="mistral", hidden_size=5120, intermediate_size=32768, num_hidden_layers=40, head_dim=128,
                         num_attention_heads=32, num_key_value_heads=8, vocab_size=131072, sliding_window=None),
        vision_config=dict(model_type="pixtral", hidden_act="silu", image_size=1540, patch_size=14))


def lighton_ocr():
    return LightOnOcrForConditionalGeneration, LightOnOcrConfig()


def glm_ocr():
    return GlmOcrForConditionalGeneration, GlmOcrConfig(text_config=dict(
        hidden_size=1536, intermediate_size=4608, head_dim=128, rope_parameters={
            "rope_type": "default", "rope_theta": 10000, "mrope_section": [16, 24, 24], "partial_rotary_factor": 1.0}))


def internvl_6b():
    return InternVLForConditionalGeneration, InternVLConfig(
        tie_word_embeddings=False,
        text_config=dict(model_type="qwen2", hidden_size=5120, intermediate_size=27648, num_hidden_layers=64,
                         num_attention_heads=40, num_key_value_heads=8, vocab_size=151674, tie_word_embeddings=False),
        vision_config=dict(attention_bias=False, hidden_size=3200, intermediate_size=12800, num_attention_heads=25,
                           num_hidden_layers=45, norm_type="rms_norm", use_qk_norm=True))


def models():
    return {
        "gemma-3-4b": gemma3(),
        "voxtral-mini-3b": voxtral(),
        "qwen2-audio-7b": qwen2_audio(),
        "internvl3-38b-hf": internvl_6b(),
        "glm-ocr": glm_ocr(),
        "pixtral-12b": pixtral(),
        "lighton-ocr-1b": lighton_ocr(),
        "mistral-small-3.1-24b": mistral3(),
        "internvl3-1b-hf": internvl(),
        "llava-onevision-qwen2-0.5b": llava_onevision(),
        "smolvlm-256m": smolvlm(),
        "llava-1.5-7b": llava(),
        "llava-v1.6-mistral-7b": llava_next(),
        "llama-3.2-11b-vision": mllama(),
        "moonshine-tiny": moonshine(288, 6, 1152, 0.9),
        "moonshine-base": moonshine(416, 8, 1664, 0.62),
        "whisper-tiny.en": whisper(384, 4, 6, 80, 51864),
        "whisper-large-v3": whisper(1280, 32, 20, 128, 51866),
        "qwen2-vl-2b": (Qwen2VLForConditionalGeneration, Qwen2VLConfig(
            hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
            num_key_value_heads=2, vision_config=dict(depth=32, embed_dim=1280, mlp_ratio=4, num_heads=16,
                                                      hidden_size=1536), **TEXT)),
        "qwen2.5-vl-3b": (Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig(
            hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
            num_key_value_heads=2, vision_config=dict(depth=32, hidden_size=1280, intermediate_size=3420,
                                                      num_heads=16, out_hidden_size=2048), **TEXT)),
        "qwen3-vl-2b": (Qwen3VLForConditionalGeneration, Qwen3VLConfig(
            tie_word_embeddings=True, text_config=dict(
                hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16, head_dim=128,
                num_key_value_heads=8, vocab_size=151936, max_position_embeddings=262144, rope_parameters={
                    "rope_theta": 5e6, "rope_type": "default", "mrope_section": [24, 20, 20],
                    "mrope_interleaved": True}),
            vision_config=dict(depth=24, hidden_size=1024, intermediate_size=4096, num_heads=16, out_hidden_size=2048,
                               deepstack_visual_indexes=[5, 11, 17]))),
        "qwen3.5-0.8b": (Qwen3_5ForConditionalGeneration, Qwen3_5Config(
            tie_word_embeddings=True, text_config=dict(
                hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, num_attention_heads=8, head_dim=256,
                num_key_value_heads=2, linear_num_value_heads=16, vocab_size=248320, max_position_embeddings=262144,
                rope_parameters={"rope_theta": 1e7, "rope_type": "default", "mrope_section": [11, 11, 10],
                                 "mrope_interleaved": True, "partial_rotary_factor": 0.25}),
            vision_config=dict(depth=12, hidden_size=768, intermediate_size=3072, num_heads=12, out_hidden_size=1024))),
    }


def bart_line(d, layers, heads, ffn, vocab):
    return dict(
        d_model=d, encoder_layers=layers[0], decoder_layers=layers[1], encoder_attention_heads=heads,
        decoder_attention_heads=heads, encoder_ffn_dim=ffn, decoder_ffn_dim=ffn, vocab_size=vocab)


def t5_line(d, layers, heads, ffn, vocab):
    return dict(d_model=d, d_kv=64, d_ff=ffn, num_layers=layers[0], num_decoder_layers=layers[1], num_heads=heads, vocab_size=vocab)


def bare(names):
    """As a model saved without its head."""
    return {k.removeprefix("model."): v for k, v in names.items() if k != "final_logits_bias"}


def with_unread_bias(names):
    return names | {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": [32, 8]}


def text_models():
    """Class, configuration, and what is particular about the published names. `lm_head` is a head of its own."""
    as_is = lambda names: names
    gated = dict(feed_forward_proj="gated-gelu")
    t5, mt5, umt5 = T5ForConditionalGeneration, MT5ForConditionalGeneration, UMT5ForConditionalGeneration
    return {
        "bart-base": (BartForConditionalGeneration, BartConfig(**bart_line(768, (6, 6), 12, 3072, 50265)), bare, False),
        "bart-large-cnn": (BartForConditionalGeneration, BartConfig(**bart_line(1024, (12, 12), 16, 4096, 50264)), as_is, False),
        "mbart-large-50": (MBartForConditionalGeneration, MBartConfig(**bart_line(1024, (12, 12), 16, 4096, 250054)), as_is, False),
        "nllb-200-distilled-600M": (M2M100ForConditionalGeneration, M2M100Config(**bart_line(1024, (12, 12), 16, 4096, 256206)), as_is, False),
        "pegasus-xsum": (PegasusForConditionalGeneration, PegasusConfig(**bart_line(1024, (16, 16), 16, 4096, 96103), max_position_embeddings=512), as_is, False),
        "opus-mt-en-de": (MarianMTModel, MarianConfig(**bart_line(512, (6, 6), 8, 2048, 58101), max_position_embeddings=512, pad_token_id=58100), as_is, False),
        "blenderbot-400M-distill": (BlenderbotForConditionalGeneration, BlenderbotConfig(**bart_line(1280, (2, 12), 32, 5120, 8008), max_position_embeddings=128), as_is, False),
        "t5-small": (t5, T5Config(**t5_line(512, (6, 6), 8, 2048, 32128)), with_unread_bias, False),
        "flan-t5-base": (t5, T5Config(**t5_line(768, (12, 12), 12, 2048, 32128), **gated), as_is, True),
        "madlad400-3b-mt": (t5, T5Config(**t5_line(1024, (32, 32), 16, 8192, 256000) | dict(d_kv=128), **gated), as_is, True),
        "mt5-small": (mt5, MT5Config(**t5_line(512, (8, 8), 6, 1024, 250112), **gated), as_is, True),
        "umt5-small": (umt5, UMT5Config(**t5_line(512, (8, 8), 6, 1024, 256384), **gated), as_is, True),
        "byt5-small": (t5, T5Config(**t5_line(1472, (12, 4), 6, 3584, 384), **gated), as_is, True),
    }


def make_text():
    for name, (kind, config, published, own_head) in text_models().items():
        with torch.device("meta"):
            state = kind(config).state_dict()
        # One table under one name; positions that are computed are not stored.
        left_out = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight") + (() if own_head else ("lm_head.weight",))
        left_out += ("embed_positions.weight",) if kind in (PegasusForConditionalGeneration, MarianMTModel) else ()
        shapes = published({k: list(v.shape) for k, v in state.items() if not k.endswith(left_out)})
        write_compact(ROOT / "names" / f"{name}.json", dict(sorted(shapes.items())))
        print(" ", name, len(shapes), sum(torch.Size(s).numel() for s in shapes.values()))


def internvl2_8b():
    # InternLM2 is a Llama by other names.
    return InternVLForConditionalGeneration, InternVLConfig(
        tie_word_embeddings=False,
        text_config=dict(model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                         num_attention_heads=32, num_key_value_heads=8, vocab_size=92553, tie_word_embeddings=False),
        vision_config=dict(attention_bias=True))


def make_originals():
    for name, (kind, config), n_grouped in (("internvl3-1b", internvl(), 0), ("internvl2.5-8b", internvl2_8b(), 8)):
        with torch.device("meta"):
            state = kind(config).state_dict()
        shapes = original_shapes({internvl_name(k): v for k, v in state.items()}, n_grouped)
        write_compact(ROOT / "names" / f"{name}.json", dict(sorted(shapes.items())))
        print(" ", name, len(shapes), sum(torch.Size(s).numel() for s in shapes.values()))


def make_text_decoders():
    for name, (kind, config) in text_decoders().items():
        with torch.device("meta"):
            state = kind(config).state_dict()
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        shapes = {k: list(v.shape) for k, v in state.items() if k not in tied}
        write_compact(ROOT / "names" / f"{name}.json", dict(sorted(shapes.items())))
        print(" ", name, len(shapes), sum(torch.Size(s).numel() for s in shapes.values()))


def make():
    print("names", flush=True)
    for name, (kind, config) in models().items():
        with torch.device("meta"):
            state = kind(config).state_dict()
        # Heads tied to the embedding are not in the published files.
        is_llava = kind in (LlavaForConditionalGeneration, LlavaNextForConditionalGeneration,
                            LlavaOnevisionForConditionalGeneration, Gemma3ForConditionalGeneration)
        is_tied = kind in (LlavaOnevisionForConditionalGeneration, Gemma3ForConditionalGeneration)
        is_audio = kind in (Qwen2AudioForConditionalGeneration, VoxtralForConditionalGeneration)
        own_head = not is_tied and (is_llava or is_audio or kind in (
            GlmOcrForConditionalGeneration, Mistral3ForConditionalGeneration, InternVLForConditionalGeneration,
            MllamaForConditionalGeneration, SmolVLMForConditionalGeneration))
        tied = set() if own_head else {"proj_out.weight", "lm_head.weight"}
        as_it_is = kind in (LightOnOcrForConditionalGeneration, GlmOcrForConditionalGeneration, Qwen3VLForConditionalGeneration,
                            Qwen3_5ForConditionalGeneration, SmolVLMForConditionalGeneration)
        rename = (audio_name if is_audio else pixtral_name if name in ("pixtral-12b", "mistral-small-3.1-24b")
                  else llava_name if is_llava else internvl_name if kind is InternVLForConditionalGeneration
                  else (lambda n: n) if as_it_is else mllama_name if own_head else published_name)
        shapes = {rename(k): list(v.shape) for k, v in state.items() if k not in tied}
        write_compact(ROOT / "names" / f"{name}.json", dict(sorted(shapes.items())))
        print(" ", name, len(shapes), sum(torch.Size(s).numel() for s in shapes.values()))
    make_originals()
    make_text()
    make_text_decoders()
