"""Arithmetic at the widths of published models: two layers of each kind, seeded weights that are not stored (`wide.py`)."""

import sys

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GlmOcrConfig,
    GlmOcrForConditionalGeneration,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlamaConfig,
    LightOnOcrConfig,
    LightOnOcrForConditionalGeneration,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    PegasusConfig,
    PegasusForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    VoxtralConfig,
    VoxtralForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from audio_chat import published_name as audio_name
from internvl import published_name as internvl_name
from llava import published_name as llava_name
from names import LLAVA_CLIP, bart_line, t5_line
from pixtral import published_name as pixtral_name
from qwen import published_name as qwen_name
from wide import ITEM_TOKEN, SEQ2SEQ, TWO, VOCAB, Wide, decoder, features, ids, make_case, sampled, with_items

def text(model):
    tokens = ids(40, 5)
    logits = model(tokens).logits[0]
    return {"prompt": tokens[0].tolist(), "logit_rows": [0, 20, 39]}, {"logits": sampled(logits, [0, 20, 39])}


def seq2seq(model):
    tokens, decoded = ids(40, 5), ids(12, 9)
    encoded = model.get_encoder()(tokens).last_hidden_state
    logits = model(encoder_outputs=(encoded,), decoder_input_ids=decoded).logits[0]
    return ({"input": {"tokens": tokens[0].tolist()}, "prompt": decoded[0].tolist(), "rows": [0, 17, 39], "logit_rows": [0, 5, 11]},
            {"rows": sampled(encoded[0], [0, 17, 39]), "logits": sampled(logits, [0, 5, 11])})


def mel(model):
    shape = (model.config.num_mel_bins, 2 * model.config.max_source_positions)
    decoded, dtype = ids(12, 9), model.dtype
    encoded = model.get_encoder()(features(shape)[None].to(dtype)).last_hidden_state
    logits = model(encoder_outputs=(encoded,), decoder_input_ids=decoded).logits[0]
    at = [0, 700, encoded.shape[1] - 1]
    return ({"input": {"mel": shape}, "prompt": decoded[0].tolist(), "rows": at, "logit_rows": [0, 5, 11]},
            {"rows": sampled(encoded[0], at), "logits": sampled(logits, [0, 5, 11])})


def audio(model):
    """A whole window of log-mel whose rows are among the tokens."""
    n = 375 if isinstance(model, VoxtralForConditionalGeneration) else 750
    shape = (128, 3000)
    inputs = {"input_features": features(shape)[None].to(model.dtype)}
    if isinstance(model, Qwen2AudioForConditionalGeneration):
        inputs["feature_attention_mask"] = torch.ones(1, shape[1], dtype=torch.long)
    kept = {}

    def keep(_, arguments, named):
        kept["rows"] = named["inputs_embeds"][0, 6:6 + n]

    hook = model.model.language_model.register_forward_pre_hook(keep, with_kwargs=True)
    tokens = torch.cat([ids(6, 5), torch.full((1, n), ITEM_TOKEN), ids(8, 9)], dim=1)
    model(input_ids=tokens, **inputs)
    hook.remove()
    return with_items(model, kept["rows"], {"input": {"mel": shape}}, **inputs)


def patches(model):
    grid = (1, 12, 20)
    vision = model.config.vision_config
    shape = (12 * 20, 3 * vision.temporal_patch_size * vision.patch_size**2)
    inputs = {"pixel_values": features(shape).to(model.dtype), "image_grid_thw": torch.tensor([grid])}
    found = model.model.get_image_features(**inputs)
    rows = found.pooler_output[0] if isinstance(found.pooler_output, (list, tuple)) else found.pooler_output
    # Levels lie side by side in a row.
    levels = [level[0] if isinstance(level, tuple) else level for level in getattr(found, "deepstack_features", None) or []]
    rows = torch.cat([rows, *levels], dim=-1)
    return with_items(model, rows, {"input": {"patches": shape, "grid": grid}}, **inputs)


def planes(model):
    side = model.config.vision_config.image_size
    shape = (1, 3, *(side if isinstance(side, (list, tuple)) else (side, side)))
    inputs = {"pixel_values": features(shape).to(model.dtype)}
    if isinstance(model, (Idefics3ForConditionalGeneration, SmolVLMForConditionalGeneration)):
        inputs["pixel_values"] = inputs["pixel_values"][None]
    found = model.model.get_image_features(**inputs)
    rows = found.pooler_output[0] if isinstance(found.pooler_output, (list, tuple)) else found.pooler_output
    rows = rows.reshape(-1, rows.shape[-1])
    return with_items(model, rows, {"input": {"planes": shape}}, **inputs)


def any_size(model):
    side = model.config.vision_config.patch_size
    shape = (1, 3, 10 * side, 14 * side)
    inputs = {"pixel_values": features(shape).to(model.dtype), "image_sizes": torch.tensor([shape[2:]])}
    rows = model.model.get_image_features(**inputs).pooler_output[0]
    return with_items(model, rows, {"input": {"planes": shape}}, **inputs)


MROPE = dict(image_token_id=ITEM_TOKEN, video_token_id=2001, vision_start_token_id=2002, vision_end_token_id=2003)
SIGLIP = dict(model_type="siglip_vision_model", hidden_size=1152, intermediate_size=4304, num_attention_heads=16,
              num_hidden_layers=2, patch_size=14, vision_use_head=False)


def qwen_vl():
    def text_config(mrope, **sizes):
        return dict(max_position_embeddings=32768, rms_norm_eps=1e-6, rope_parameters={
            "rope_type": "default", "rope_theta": 1e6, **mrope}, **sizes)

    sections = {"mrope_section": [16, 24, 24]}
    yield Wide("qwen2_vl_7b", Qwen2VLForConditionalGeneration, Qwen2VLConfig(
        **MROPE, text_config=text_config(sections, **decoder(3584, 18944, 28, 4)),
        vision_config=dict(depth=2, embed_dim=1280, mlp_ratio=4, num_heads=16, hidden_size=3584)), patches, qwen_name)
    yield Wide("qwen2_5_vl_7b", Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig(
        **MROPE, text_config=text_config(sections, **decoder(3584, 18944, 28, 4)),
        vision_config=dict(depth=2, hidden_size=1280, intermediate_size=3420, num_heads=16, out_hidden_size=3584,
                           fullatt_block_indexes=[1])), patches, qwen_name)
    yield Wide("qwen3_vl_8b", Qwen3VLForConditionalGeneration, Qwen3VLConfig(
        **MROPE, text_config=text_config({"mrope_section": [24, 20, 20], "mrope_interleaved": True}, head_dim=128,
                                         **decoder(4096, 12288, 32, 8)),
        vision_config=dict(depth=2, hidden_size=1152, intermediate_size=4304, num_heads=16, out_hidden_size=4096,
                           deepstack_visual_indexes=[0, 1])), patches)
    yield Wide("qwen3_5_0_8b", Qwen3_5ForConditionalGeneration, Qwen3_5Config(
        **MROPE, tie_word_embeddings=True, text_config=dict(
            head_dim=256, linear_num_value_heads=16, layer_types=["linear_attention", "full_attention"],
            rope_parameters={"rope_theta": 1e7, "rope_type": "default", "mrope_section": [11, 11, 10],
                             "mrope_interleaved": True, "partial_rotary_factor": 0.25}, **decoder(1024, 3584, 8, 2)),
        vision_config=dict(depth=2, hidden_size=768, intermediate_size=3072, num_heads=12, out_hidden_size=1024)), patches,
        left_out=("lm_head.weight",))
    yield Wide("glm_ocr", GlmOcrForConditionalGeneration, GlmOcrConfig(
        image_token_id=ITEM_TOKEN, video_token_id=2001, image_start_token_id=2002, image_end_token_id=2003,
        video_start_token_id=2004, video_end_token_id=2005,
        text_config=dict(head_dim=128, num_nextn_predict_layers=0, rope_parameters={
            "rope_type": "default", "rope_theta": 10000, "mrope_section": [16, 24, 24], "partial_rotary_factor": 1.0},
            **decoder(1536, 4608, 16, 8)), vision_config=dict(depth=2)), patches)


def towers():
    yield Wide("llava_1_5_7b", LlavaForConditionalGeneration, LlavaConfig(
        image_token_index=ITEM_TOKEN, vision_feature_layer=-1, text_config=dict(
            model_type="llama", max_position_embeddings=4096, rms_norm_eps=1e-5, **decoder(4096, 11008, 32, 32)),
        vision_config={**LLAVA_CLIP, "num_hidden_layers": 2}), planes, llava_name)
    yield Wide("smolvlm_2_2b", SmolVLMForConditionalGeneration, SmolVLMConfig(
        scale_factor=3, image_token_id=ITEM_TOKEN, tie_word_embeddings=False,
        text_config=dict(model_type="llama", head_dim=64, **decoder(2048, 8192, 32, 32)),
        vision_config=dict(hidden_size=1152, image_size=384, patch_size=14, num_attention_heads=16, intermediate_size=4304,
                           num_hidden_layers=2)), planes)
    yield Wide("internvl3_8b", InternVLForConditionalGeneration, InternVLConfig(
        image_token_id=ITEM_TOKEN, tie_word_embeddings=False,
        text_config=dict(model_type="qwen2", **decoder(3584, 18944, 28, 4)),
        vision_config=dict(attention_bias=True, num_hidden_layers=2)), planes, internvl_name)
    yield Wide("gemma_3_4b", Gemma3ForConditionalGeneration, Gemma3Config(
        image_token_index=ITEM_TOKEN, boi_token_index=2001, eoi_token_index=2002,
        text_config=dict(head_dim=256, sliding_window=1024, layer_types=["sliding_attention", "full_attention"],
                         **decoder(2560, 10240, 8, 4)),
        vision_config=dict(image_size=896, **SIGLIP)), planes, llava_name, ("lm_head.weight",))
    yield Wide("lighton_ocr_1b", LightOnOcrForConditionalGeneration, LightOnOcrConfig(
        image_token_id=ITEM_TOKEN, text_config=dict(model_type="qwen3", head_dim=128, **decoder(1024, 3072, 16, 8)),
        vision_config=dict(LightOnOcrConfig().vision_config.to_dict(), num_hidden_layers=2)), any_size,
        left_out=("lm_head.weight",))
    yield Wide("pixtral_12b", LlavaForConditionalGeneration, LlavaConfig(
        image_token_index=ITEM_TOKEN, vision_feature_layer=-1, vision_feature_select_strategy="full",
        text_config=dict(model_type="mistral", head_dim=128, sliding_window=None, **decoder(5120, 14336, 32, 8)),
        vision_config=dict(model_type="pixtral", hidden_act="silu", image_size=1024, patch_size=16, num_hidden_layers=2)),
        any_size, pixtral_name)


def audio_decoders():
    yield Wide("qwen2_audio_7b", Qwen2AudioForConditionalGeneration, Qwen2AudioConfig(
        audio_token_index=ITEM_TOKEN, tie_word_embeddings=False,
        audio_config=dict(model_type="qwen2_audio_encoder", encoder_layers=2),
        text_config=dict(model_type="qwen2", **decoder(4096, 11008, 32, 32))), audio, audio_name)
    yield Wide("voxtral_mini_3b", VoxtralForConditionalGeneration, VoxtralConfig(
        audio_token_id=ITEM_TOKEN, tie_word_embeddings=False,
        audio_config=dict(model_type="voxtral_encoder", num_hidden_layers=2),
        text_config=dict(model_type="llama", head_dim=128, **decoder(3072, 8192, 32, 8))), audio, audio_name)


def text_decoders():
    llama3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 8192}
    yield Wide("llama_3_1_8b", LlamaForCausalLM, LlamaConfig(
        rope_parameters=llama3, max_position_embeddings=131072, **decoder(4096, 14336, 32, 8)), text)
    yield Wide("mistral_7b", MistralForCausalLM, MistralConfig(sliding_window=None, **decoder(4096, 14336, 32, 8)), text)
    yield Wide("qwen2_5_7b", Qwen2ForCausalLM, Qwen2Config(**decoder(3584, 18944, 28, 4)), text)
    yield Wide("qwen3_8b", Qwen3ForCausalLM, Qwen3Config(head_dim=128, **decoder(4096, 12288, 32, 8)), text)
    yield Wide("gemma_2_9b", Gemma2ForCausalLM, Gemma2Config(
        head_dim=256, tie_word_embeddings=True, **decoder(3584, 14336, 16, 8)), text, left_out=("lm_head.weight",))


def encoder_decoders():
    yield Wide("whisper_large_v3", WhisperForConditionalGeneration, WhisperConfig(
        d_model=1280, encoder_layers=2, decoder_layers=2, encoder_attention_heads=20, decoder_attention_heads=20,
        encoder_ffn_dim=5120, decoder_ffn_dim=5120, num_mel_bins=128, vocab_size=VOCAB, suppress_tokens=None,
        begin_suppress_tokens=None, **TWO), mel, left_out=("proj_out.weight",))
    bert = dict(num_hidden_layers=2, vocab_size=VOCAB)
    yield Wide("bert2bert_base", EncoderDecoderModel, EncoderDecoderConfig.from_encoder_decoder_configs(
        BertConfig(**bert), BertConfig(**bert, is_decoder=True, add_cross_attention=True)), seq2seq,
        left_out=("predictions.decoder.weight", "predictions.decoder.bias", "pooler.dense.weight", "pooler.dense.bias"))
    yield Wide("bart_large", BartForConditionalGeneration, BartConfig(**bart_line(1024, (2, 2), 16, 4096, VOCAB), **TWO), seq2seq,
               left_out=SEQ2SEQ)
    yield Wide("pegasus_large", PegasusForConditionalGeneration, PegasusConfig(
        **bart_line(1024, (2, 2), 16, 4096, VOCAB), **TWO), seq2seq, left_out=SEQ2SEQ + ("embed_positions.weight",))
    yield Wide("nllb_3_3b", M2M100ForConditionalGeneration, M2M100Config(**bart_line(2048, (2, 2), 16, 8192, VOCAB), **TWO), seq2seq,
               left_out=SEQ2SEQ)
    yield Wide("flan_t5_xl", T5ForConditionalGeneration, T5Config(
        **t5_line(2048, (2, 2), 32, 5120, VOCAB), feed_forward_proj="gated-gelu", tie_word_embeddings=False), seq2seq,
        left_out=SEQ2SEQ[:2])


CASES = [case for cases in (encoder_decoders, text_decoders, qwen_vl, towers, audio_decoders) for case in cases()]


def make(names=()):
    import real_widths_more
    import real_widths_vision

    print("real_widths", flush=True)
    for case in [*CASES, *real_widths_more.cases(), *real_widths_vision.cases()]:
        if not names or case.name in names:
            make_case(case)


if __name__ == "__main__":
    make(sys.argv[1:])
