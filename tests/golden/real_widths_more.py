"""More models at published widths (`wide.py`): experts, towers that read whole views, and what no release of transformers has.

Of models with experts there are fewer than published, and of the widest one layer of the decoder."""

import copy
from unittest import mock

import torch
from transformers import (
    BlenderbotConfig,
    BlenderbotForConditionalGeneration,
    BlenderbotSmallConfig,
    BlenderbotSmallForConditionalGeneration,
    DonutSwinConfig,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    MllamaConfig,
    MllamaForConditionalGeneration,
    MoonshineConfig,
    MoonshineForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3ASRConfig,
    Qwen3ASRForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    TrOCRConfig,
    UMT5Config,
    UMT5ForConditionalGeneration,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)
from transformers.models.moonshine.modeling_moonshine import MoonshineEncoderModelOutput

import cogagent
import deepseek_ocr
import step3
from mllama import blind_before_the_image
from mllama import published_name as mllama_name
from mllama import states as mllama_states
from names import bart_line, t5_line
from pixtral import published_name as pixtral_name
from real_widths import MROPE, any_size, patches, planes, seq2seq, text
from wide import ITEM_TOKEN, SEQ2SEQ, TWO, VOCAB, Wide, decoder, features, ids, sampled, with_items


class Written:
    """A configuration as it is written in a file, where transformers has no class for it."""

    def __init__(self, keys):
        self.keys = keys

    def to_dict(self):
        return self.keys


def by_head(module):
    """The attention of a module a head at a time: over a large image, the scores of all heads take gigabytes."""
    attend = module.attend

    def attend_by_head(q, k, v, causal):
        return torch.cat([attend(*(part[:, :, i:i + 1] for part in (q, k, v)), causal) for i in range(q.shape[2])], -1)

    return mock.patch.object(module, "attend", attend_by_head)


@by_head(step3)
def views(model):
    """The whole image, and no parts."""
    side = 728 if isinstance(model, step3.Step3) else 1024
    shape = (1, 3, side, side)
    inputs = {"pixel_values": features(shape).to(model.dtype)}
    rows = model.model.get_image_features(**inputs).pooler_output[0]
    return with_items(model, rows, {"input": {"views": shape}}, **inputs)


def chunks(model):
    """Ten seconds of log-mel in chunks of a second."""
    shape = (10, model.config.audio_config.num_mel_bins, 100)
    mel = features(shape).permute(1, 0, 2).flatten(1)[None].to(model.dtype)
    inputs = {"input_features": mel, "input_features_mask": torch.ones(1, mel.shape[-1], dtype=torch.long)}
    rows = model.get_audio_features(**inputs, return_dict=True).pooler_output
    return with_items(model, rows, {"input": {"chunks": shape}}, **inputs)


def samples(model):
    """Two seconds of samples."""
    decoded, shape = ids(12, 9), (32000,)
    encoded = model.get_encoder()(features(shape)[None].to(model.dtype)).last_hidden_state
    seen = MoonshineEncoderModelOutput(last_hidden_state=encoded)
    logits = model(encoder_outputs=seen, decoder_input_ids=decoded).logits[0]
    return cross_attended(encoded[0], logits, {"input": {"samples": shape}, "prompt": decoded[0].tolist()})


def cross_attended(rows, logits, given):
    """What is stored of rows that are cross-attended to."""
    at = [0, len(rows) // 3, len(rows) - 1]
    return (given | {"rows": at, "n_rows": len(rows), "logit_rows": [0, 5, len(logits) - 1]},
            {"rows": sampled(rows, at), "logits": sampled(logits, [0, 5, len(logits) - 1])})


def page(model):
    """An image that is cross-attended to."""
    side = model.config.encoder.image_size
    shape = (1, 3, *(side if isinstance(side, (list, tuple)) else (side, side)))
    rows = model.encoder(features(shape).to(model.dtype)).last_hidden_state
    rows = model.enc_to_dec_proj(rows) if hasattr(model, "enc_to_dec_proj") else rows
    decoded = ids(12, 9)
    logits = model.decoder(decoded, encoder_hidden_states=rows).logits[0]
    return cross_attended(rows[0], logits, {"input": {"planes": shape}, "prompt": decoded[0].tolist()})


def one_tile(model):
    """An image of a tile; the token before it sees none."""
    if not getattr(model, "is_blind", False):
        blind_before_the_image(model)
        model.is_blind = True
    shape, image = (1, 3, 560, 560), VOCAB
    tokens = torch.cat([ids(1, 5), torch.tensor([[image]]), ids(10, 9)], dim=1)
    seen = torch.zeros(1, tokens.shape[1], 1, 4, dtype=torch.long)
    seen[:, 1:, :, :1] = 1
    tiles = torch.cat([features(shape), torch.zeros(3, *shape[1:])])[None, None]
    inputs = {"pixel_values": tiles.to(model.dtype), "aspect_ratio_ids": torch.tensor([[1]]),
              "aspect_ratio_mask": torch.tensor([[[1, 0, 0, 0]]])}
    rows = mllama_states(model, inputs)
    logits = model(input_ids=tokens, cross_attention_mask=seen, **inputs).logits[0]
    return cross_attended(rows, logits, {"input": {"tile": shape}, "prompt": tokens[0].tolist(), "seen_from": 1})


@by_head(cogagent)
def two_towers(model):
    """An image at both sizes: rows among the tokens, then rows that are cross-attended to."""
    shapes = [(1, 3, 224, 224), (1, 3, 1120, 1120)]
    low, high = (model.model.vision(features(shapes[0]).to(model.dtype)), model.model.cross_vision(features(shapes[1]).to(model.dtype)))
    n = low.shape[1]
    tokens = torch.cat([torch.tensor([[1]]), torch.zeros(1, n, dtype=torch.long), ids(9, 9)], dim=1)
    logits = model(tokens, low, high).logits[0]
    at, high_at, seen = [0, n // 2, n - 1], [0, high.shape[1] // 2, high.shape[1] - 1], [0, 1 + n // 2, n + 9]
    positions = cogagent.positions_of(tokens.shape[1], n).expand(3, -1)
    rows = torch.cat([sampled(low[0], at).flatten(), sampled(high[0], high_at).flatten()])
    return ({"input": {"towers": shapes}, "prompt": tokens[0].tolist(), "item": [1, n], "n_high": high.shape[1],
             "positions": positions.tolist(), "rows": at, "high_rows": high_at, "logit_rows": seen},
            {"rows": rows, "logits": sampled(logits, seen)})


def cogagent_18b():
    shape = cogagent.Shape(
        "cogagent_18b", "chat", cogagent.text(4096, 32, 1, 11008, 1024) | {"vocab_size": VOCAB},
        # The last block is never run.
        cogagent.low(1792, 16, 15360, 2, 224, 14), cogagent.high(3, 64, 1120, 14) | {"embed_dim": 768}, torch.bfloat16, 0)

    class Tokens:
        def token_to_id(self, token):
            return {"<unk>": 0, "<s>": 1, "</s>": 2}[token]

    config = Written(cogagent.config_json(shape, Tokens()) | {"vocab_size": VOCAB})
    return Wide(shape.case, lambda _: cogagent.CogAgent(shape), config, two_towers)


def step3_vl():
    text_config = step3.text(7168, 64, 256, 2048, 1, 18432, 4, 3, 5120, 5120, "0") | {"vocab_size": VOCAB}
    shape = step3.Shape("step3_vl", text_config, step3.vision(1792, 16, 2, 15360, 4096, 52, 14), torch.bfloat16, 0, ())
    ends = {"<s>": 1, "</s>": 2, "<pad>": 0, "<im_patch>": ITEM_TOKEN}
    keys = step3.config_json(shape, ends.get)
    own = {k: v for k, v in keys.items() if k not in ("torch_dtype", "model_type")}
    return Wide(shape.case, lambda _: step3.Step3(step3.Config(**copy.deepcopy(own))), Written(keys), views)


def deepseek_ocr_2():
    config = deepseek_ocr.published().config
    config.image_token_id = ITEM_TOKEN
    config.vision_config.sam_config.num_hidden_layers = config.vision_config.encoder_config.num_hidden_layers = 2
    config.vision_config.encoder_config.layer_types = config.vision_config.encoder_config.layer_types[:2]
    config.vision_config.sam_config.global_attn_indexes = [1]
    config.text_config.num_hidden_layers, config.text_config.vocab_size = 2, VOCAB
    config.text_config.mlp_layer_types = ["dense", "sparse"]
    return Wide("deepseek_ocr_2", deepseek_ocr.DeepseekOcr2ForConditionalGeneration, config, views, by_file=True)


def towers():
    yield deepseek_ocr_2()
    yield cogagent_18b()
    yield step3_vl()
    yield Wide("mistral_small_3_1", Mistral3ForConditionalGeneration, Mistral3Config(
        image_token_index=ITEM_TOKEN, tie_word_embeddings=False, text_config=dict(
            model_type="mistral", head_dim=128, sliding_window=None, **decoder(5120, 32768, 32, 8) | {"num_hidden_layers": 1}),
        vision_config=dict(model_type="pixtral", hidden_act="silu", image_size=1540, patch_size=14, num_hidden_layers=2)),
        any_size, pixtral_name)
    yield Wide("idefics3_8b", Idefics3ForConditionalGeneration, Idefics3Config(
        scale_factor=2, image_token_id=ITEM_TOKEN, tie_word_embeddings=False,
        text_config=dict(model_type="llama", **decoder(4096, 14336, 32, 8)),
        vision_config=dict(hidden_size=1152, image_size=364, patch_size=14, num_attention_heads=16, intermediate_size=4304,
                           num_hidden_layers=2)), planes)
    yield Wide("llama_3_2_11b_vision", MllamaForConditionalGeneration, MllamaConfig(
        image_token_index=VOCAB, vision_config=dict(image_size=560, max_num_tiles=4, num_hidden_layers=2, num_global_layers=1,
                                                    intermediate_layers_indices=[0, 1], vision_output_dim=3 * 1280),
        text_config=dict(cross_attention_layers=[1], **decoder(4096, 14336, 32, 8))), one_tile, mllama_name)


def audio():
    words = Qwen3ASRConfig().text_config.to_dict() | {"num_hidden_layers": 2, "vocab_size": VOCAB}
    words.pop("layer_types", None)
    yield Wide("qwen3_asr_1_7b", Qwen3ASRForConditionalGeneration, Qwen3ASRConfig(
        audio_token_id=ITEM_TOKEN, text_config=words,
        audio_config=dict(model_type="qwen3_asr_encoder", output_dim=2048, encoder_layers=2)), chunks, left_out=("lm_head.weight",))
    yield Wide("moonshine_base", MoonshineForConditionalGeneration, MoonshineConfig(
        hidden_size=416, encoder_num_hidden_layers=2, decoder_num_hidden_layers=2, intermediate_size=1664, vocab_size=VOCAB,
        max_position_embeddings=194, pad_head_dim_to_multiple_of=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.62}), samples,
        left_out=("proj_out.weight",))


def experts():
    yield Wide("mixtral_8x7b", MixtralForCausalLM, MixtralConfig(
        num_local_experts=4, **decoder(4096, 14336, 32, 8) | {"num_hidden_layers": 1}), text, by_file=True)
    yield Wide("qwen1_5_moe_a2_7b", Qwen2MoeForCausalLM, Qwen2MoeConfig(
        num_experts=16, moe_intermediate_size=1408, shared_expert_intermediate_size=5632, **decoder(2048, 5632, 16, 16)), text,
        by_file=True)
    yield Wide("qwen3_30b_a3b", Qwen3MoeForCausalLM, Qwen3MoeConfig(
        head_dim=128, norm_topk_prob=True, num_experts=32, moe_intermediate_size=768, **decoder(2048, 6144, 32, 4)), text,
        by_file=True)
    yield Wide("qwen3_vl_30b_a3b", Qwen3VLMoeForConditionalGeneration, Qwen3VLMoeConfig(
        **MROPE, tie_word_embeddings=False, text_config=dict(
            head_dim=128, moe_intermediate_size=768, num_experts=32, num_experts_per_tok=8, rope_parameters={
                "rope_theta": 5e6, "rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
            **decoder(2048, 6144, 32, 4)),
        vision_config=dict(depth=2, hidden_size=1152, intermediate_size=4304, num_heads=16, out_hidden_size=2048,
                           deepstack_visual_indexes=[0, 1])), patches, by_file=True, inputs_first=True)
    yield Wide("qwen3_5_35b_a3b", Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeConfig(
        **MROPE, tie_word_embeddings=False, text_config=dict(
            head_dim=256, num_experts=32, layer_types=["linear_attention", "full_attention"], rope_parameters={
                "rope_theta": 1e7, "rope_type": "default", "mrope_section": [11, 11, 10], "mrope_interleaved": True,
                "partial_rotary_factor": 0.25},
            **{k: v for k, v in decoder(2048, 0, 16, 2).items() if k != "intermediate_size"}),
        vision_config=dict(depth=2, hidden_size=1152, intermediate_size=4304, num_heads=16, out_hidden_size=2048)), patches,
        by_file=True)


def text_decoders():
    yield Wide("gemma_3_1b", Gemma3ForCausalLM, Gemma3TextConfig(
        head_dim=256, sliding_window=512, layer_types=["sliding_attention", "full_attention"],
        **decoder(1152, 6912, 4, 1)), text, left_out=("lm_head.weight",))
    yield Wide("qwen3_5_0_8b_text", Qwen3_5ForCausalLM, Qwen3_5TextConfig(
        head_dim=256, linear_num_value_heads=16, layer_types=["linear_attention", "full_attention"], tie_word_embeddings=True,
        rope_parameters={"rope_theta": 1e7, "rope_type": "default", "mrope_section": [11, 11, 10], "mrope_interleaved": True,
                         "partial_rotary_factor": 0.25}, **decoder(1024, 3584, 8, 2)), text, left_out=("lm_head.weight",))


def encoder_decoders():
    def line(name, kind, config, *sizes, left_out=(), **more):
        return Wide(name, kind, config(**bart_line(*sizes, VOCAB), **TWO, **more), seq2seq, left_out=SEQ2SEQ + left_out)

    yield line("mbart_large_50", MBartForConditionalGeneration, MBartConfig, 1024, (2, 2), 16, 4096)
    yield line("opus_mt", MarianMTModel, MarianConfig, 512, (2, 2), 8, 2048, left_out=("embed_positions.weight",))
    yield line("blenderbot_400m", BlenderbotForConditionalGeneration, BlenderbotConfig, 1280, (2, 2), 32, 5120)
    yield line("blenderbot_90m", BlenderbotSmallForConditionalGeneration, BlenderbotSmallConfig, 512, (2, 2), 16, 2048)
    gated = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    yield Wide("mt5_xl", MT5ForConditionalGeneration, MT5Config(**t5_line(2048, (2, 2), 32, 5120, VOCAB), **gated), seq2seq,
               left_out=SEQ2SEQ[:2])
    yield Wide("umt5_xl", UMT5ForConditionalGeneration, UMT5Config(**t5_line(2048, (2, 2), 32, 5120, VOCAB), **gated), seq2seq,
               left_out=SEQ2SEQ[:2])


def readers():
    def pair(name, encoder, text_config):
        config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, text_config)
        return Wide(name, VisionEncoderDecoderModel, config, page, by_file=True, left_out=("pooler.dense.weight", "pooler.dense.bias"))

    yield pair("trocr_base", ViTConfig(image_size=384, qkv_bias=False, num_hidden_layers=2), TrOCRConfig(
        decoder_layers=2, vocab_size=VOCAB, cross_attention_hidden_size=768, is_decoder=True))
    yield pair("donut_base", DonutSwinConfig(
        image_size=[640, 480], embed_dim=128, depths=[2, 2, 2, 2], num_heads=[4, 8, 16, 32], window_size=10), MBartConfig(
            decoder_layers=2, vocab_size=VOCAB, is_decoder=True, add_cross_attention=True))


def cases():
    for some in (encoder_decoders, text_decoders, experts, readers, audio, towers):
        yield from some()
