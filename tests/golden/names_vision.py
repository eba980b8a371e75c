"""Tensor names and shapes of published image encoders with a text decoder, and of BERT and RoBERTa with themselves, as in
`names.py`."""

import torch
from transformers import (
    BartConfig,
    BertConfig,
    Dinov2WithRegistersConfig,
    DonutSwinConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    Florence2Config,
    Florence2ForConditionalGeneration,
    GPT2Config,
    MBartConfig,
    RobertaConfig,
    Swinv2Config,
    TrOCRConfig,
    ViTConfig,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
)
from transformers.core_model_loading import revert_weight_conversion

from common import ROOT, write_compact
from vision_more import published_name

# Tables that stand under another name in the published files, and what no encoder-decoder computes with.
LEFT_OUT = (".output_projection.", "lm_head.", "encoder.embed_tokens.", "language_model.decoder.embed_tokens.", ".pooler.")
# The same of decoders of BERT and RoBERTa, whose heads are the token table.
LEFT_OUT_OF_BERT = (".pooler.", "predictions.decoder.", "lm_head.decoder.")


def pair(encoder, decoder):
    return VisionEncoderDecoderModel, VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)


def models():
    return {
        "trocr-base-printed": pair(
            ViTConfig(image_size=384, qkv_bias=False), TrOCRConfig(is_decoder=True, cross_attention_hidden_size=768)),
        "vit-gpt2": pair(ViTConfig(), GPT2Config(is_decoder=True, add_cross_attention=True)),
        # The encoder is swinv2-tiny-patch4-window8-256.
        "swinv2-tiny-trocr": pair(Swinv2Config(image_size=256, window_size=8), TrOCRConfig(is_decoder=True)),
        "donut-base": pair(
            DonutSwinConfig(image_size=[2560, 1920], embed_dim=128, depths=[2, 2, 14, 2], num_heads=[4, 8, 16, 32],
                            window_size=10),
            MBartConfig(decoder_layers=4, max_position_embeddings=1536, vocab_size=57525, is_decoder=True,
                        add_cross_attention=True)),
        "nougat-base": pair(
            DonutSwinConfig(image_size=[896, 672], embed_dim=128, depths=[2, 2, 14, 2], num_heads=[4, 8, 16, 32],
                            window_size=7),
            MBartConfig(decoder_layers=10, max_position_embeddings=4096, vocab_size=50000, is_decoder=True,
                        add_cross_attention=True)),
        "florence-2-base": (Florence2ForConditionalGeneration, Florence2Config(
            vision_config=dict(projection_dim=768),
            text_config=BartConfig(d_model=768, encoder_layers=6, decoder_layers=6, encoder_attention_heads=12,
                                   decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072,
                                   vocab_size=51289).to_dict())),
    }


def bert_models():
    decoder = dict(is_decoder=True, add_cross_attention=True)
    roberta = dict(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)
    text = lambda encoder, decoder: (EncoderDecoderModel, EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder))
    return {
        "bert2bert-base": text(BertConfig(), BertConfig(**decoder)),
        "roberta2roberta-base": text(RobertaConfig(**roberta), RobertaConfig(**roberta, **decoder)),
        # No such pair is published: the encoder is dinov2-with-registers-base, the decoder roberta-base.
        "dinov2-with-registers-base-roberta": pair(
            Dinov2WithRegistersConfig(image_size=518, patch_size=14), RobertaConfig(**roberta, **decoder)),
    }


def original(shapes):
    """Shapes of Florence-2 by the names of its authors' release."""
    shapes = {published_name(name): shape for name, shape in shapes.items()}
    shapes["image_projection"].reverse()
    vocab = shapes["language_model.model.shared.weight"][0]
    return shapes | {"language_model.final_logits_bias": [1, vocab]}


def make():
    print("names_vision", flush=True)
    berts = bert_models()
    for name, (kind, config) in (models() | berts).items():
        left_out = LEFT_OUT_OF_BERT if name in berts else LEFT_OUT
        with torch.device("meta"):
            model = kind(config)
            state = revert_weight_conversion(model, model.state_dict())
        shapes = {k: list(v.shape) for k, v in state.items() if not any(part in k for part in left_out)}
        if name == "florence-2-base":
            write_compact(ROOT / "names" / "florence-2-base-original.json", dict(sorted(original({k: list(v) for k, v in shapes.items()}).items())))
        write_compact(ROOT / "names" / f"{name}.json", dict(sorted(shapes.items())))
        print(" ", name, len(shapes), sum(torch.Size(s).numel() for s in shapes.values()))
