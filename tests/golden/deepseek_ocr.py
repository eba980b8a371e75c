"""Golden files of DeepSeek-OCR-2: three shapes, whole images and parts, windows with padding, experts.

The class has 144 and 256 learned queries whatever the image size says: one for each row that 768 and 1024 pixels leave behind the
convolutions. Here images are smaller, so the numbers are counted by that rule; all else is the class's. `names.py` has the
published sizes."""

import copy
import dataclasses

import numpy as np
import torch
from torch import nn
from transformers import DeepseekOcr2Config, DeepseekOcr2ForConditionalGeneration, PreTrainedTokenizerFast
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.deepseek_ocr2 import modeling_deepseek_ocr2 as modeling
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import DeepseekOcr2ImageProcessorPil
from transformers.models.deepseek_ocr2.processing_deepseek_ocr2 import DeepseekOcr2Processor

from common import ROOT, expert_gains, experts_state, give_beams_their_items, plain_experts, randomise, round_weights, write_compact
from llava import CHAT_TEMPLATE, N_MERGES, VOCAB, Maker, make_case, tokenizer


class SmallVisionModel(modeling.DeepseekOcr2VisionModel):
    """As many queries of each kind as a view of it has rows behind the convolutions."""

    def __init__(self, config):
        super().__init__(config)
        whole = config.sam_config.image_size // config.sam_config.patch_size
        rows = [int(np.ceil(np.ceil(side / 2) / 2)) ** 2 for side in (whole * 3 // 4, whole)]
        assert rows[0] < rows[1]
        self.query_768_resolution, self.query_1024_resolution = (
            nn.Embedding(n, config.encoder_config.hidden_size) for n in rows)

    def forward(self, pixel_values, **kwargs):
        rows = self.sam_encoder(pixel_values).last_hidden_state.flatten(2).transpose(1, 2)
        n = rows.shape[1]
        queries = next(q for q in (self.query_768_resolution, self.query_1024_resolution) if len(q.weight) == n).weight
        joined = torch.cat([rows, queries.unsqueeze(0).expand(len(rows), -1, -1)], dim=1)
        out = self.vision_encoder(inputs_embeds=joined, num_patches=n).last_hidden_state
        return modeling.BaseModelOutput(last_hidden_state=out[:, n:])


modeling.DeepseekOcr2VisionModel = SmallVisionModel


@dataclasses.dataclass(frozen=True)
class Shape:
    case: str
    text: dict
    sam: dict
    encoder: dict
    background: tuple
    disk: torch.dtype
    seed: int
    prompts: tuple
    # Gain of biases by offset: many keys of large biases make rows that rounding changes.
    offsets: float = 1.2
    # The prompt whose logits are stored; None: the first of most images. Rounding to 8 bits routes some tokens otherwise.
    many_rows: int | None = None
    published: bool = False


def text(hidden, heads, width, experts, top_k, kinds, **more):
    return dict(model_type="deepseek_ocr2_text", hidden_size=hidden, num_attention_heads=heads, num_hidden_layers=len(kinds),
                intermediate_size=2 * width, moe_intermediate_size=width, n_routed_experts=experts, num_experts_per_tok=top_k,
                n_group=1, topk_group=1, topk_method="greedy", vocab_size=VOCAB, max_position_embeddings=2048,
                mlp_layer_types=[{"d": "dense", "s": "sparse"}[kind] for kind in kinds], **more)


def sam(hidden, heads, layers, side, patch, window, whole, neck, inner, out, **more):
    return dict(model_type="deepseek_ocr2_sam_vision_model", hidden_size=hidden, num_attention_heads=heads,
                num_hidden_layers=layers, image_size=side * patch, patch_size=patch, window_size=window,
                global_attn_indexes=list(whole), output_channels=neck, downsample_channels=[inner, out], **more)


def encoder(hidden, heads, kv_heads, layers, ffn, theta):
    return dict(model_type="deepseek_ocr2_encoder", hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads,
                num_hidden_layers=layers, intermediate_size=ffn, vocab_size=1,
                rope_parameters={"rope_type": "default", "rope_theta": theta})


PROMPTS = ((), ("20x24",), ("64x96",), ("32x96",), ("20x24", "32x96"), ("64x96", "20x24"))
SHAPES = [
    Shape("deepseek_ocr2_windows", text(48, 4, 24, 4, 2, "ds", n_shared_experts=2), sam(16, 2, 3, 16, 2, 7, (1,), 8, 12, 24),
          encoder(24, 2, 1, 2, 40, 1e6), (127, 127, 127), torch.float32, 9300, PROMPTS),
    # Windows without padding; weights of experts are scaled.
    Shape("deepseek_ocr2_scaled", text(60, 3, 20, 6, 3, "sds", n_shared_experts=1, routed_scaling_factor=1.5, attention_bias=True,
                                       rms_norm_eps=1e-5),
          sam(24, 3, 2, 20, 2, 5, (1,), 12, 16, 30, mlp_ratio=3.0), encoder(30, 3, 3, 2, 44, 1e4), (90, 128, 200),
          torch.bfloat16, 9400, PROMPTS, 0.4, 1),
    # Larger windows than parts; every layer of the decoder has experts.
    Shape("deepseek_ocr2_wide_windows", text(48, 4, 24, 4, 3, "ss", n_shared_experts=2, num_key_value_heads=2),
          sam(16, 2, 2, 24, 2, 20, (0,), 8, 10, 24, qkv_bias=False, mlp_dim=40), encoder(24, 3, 1, 2, 32, 1e4),
          (127, 127, 127), torch.float16, 9500, PROMPTS, 0.4),
]


def build(shape, seed, tok):
    i = tok.token_to_id
    config = {
        "architectures": ["DeepseekOcr2ForConditionalGeneration"], "image_token_id": i("<image>"), "model_type": "deepseek_ocr2",
        "text_config": {**shape.text, "bos_token_id": i("<s>"), "eos_token_id": i("</s>"), "pad_token_id": i("<pad>")},
        "tie_word_embeddings": False, "transformers_version": "5.24.0",
        "vision_config": {"model_type": "deepseek_ocr2_vision", "sam_config": shape.sam, "encoder_config": shape.encoder},
    }
    torch.manual_seed(seed)
    model = DeepseekOcr2ForConditionalGeneration(DeepseekOcr2Config(**copy.deepcopy(config)))
    plain_experts(model)
    hidden, width = shape.text["hidden_size"], shape.text["moe_intermediate_size"]
    side = shape.sam["image_size"] // shape.sam["patch_size"]
    randomise(model, seed, gain=1.4, embed_std=0.6, quiet_rows=range(256 + N_MERGES, VOCAB),
              gains=[("q_proj", 1.4), ("k_proj", 1.4), ("v_proj", 1.5), ("o_proj", 2.0), ("multi_modal_projector", 3.0),
                     ("pos_embed", 0.5 * side * np.sqrt(shape.sam["hidden_size"])), ("rel_pos", shape.offsets), ("resolution", 2.0),
                     *expert_gains(hidden, width)])
    model.model.language_model.norm.weight.data *= 3
    round_weights(model, shape.disk)
    give_beams_their_items(model)
    return config, model


def processor(shape, tok):
    """Its `images_kwargs` win over the file of the image processor: 2 to 6 parts."""
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    side, patch = shape.sam["image_size"], shape.sam["patch_size"]
    images = DeepseekOcr2ImageProcessorPil(size={"height": side, "width": side}, tile_size=side * 3 // 4,
                                           background_color=list(shape.background))
    return DeepseekOcr2Processor(images, fast, patch_size=patch, downsample_ratio=4, chat_template=CHAT_TEMPLATE)


def processor_config(proc):
    return {"downsample_ratio": proc.downsample_ratio, "patch_size": proc.patch_size, "processor_class": "DeepseekOcr2Processor"}


def published():
    """The published sizes, but for the number of the decoder's layers, of which all but the first are alike."""
    return DeepseekOcr2ForConditionalGeneration(DeepseekOcr2Config(
        image_token_id=128815, vision_config=dict(
            sam_config=dict(mlp_dim=3072, downsample_channels=[512, 896]),
            encoder_config=dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                                num_key_value_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 1e6})),
        text_config=dict(hidden_size=1280, intermediate_size=6848, moe_intermediate_size=896, n_routed_experts=64,
                         n_shared_experts=2, num_experts_per_tok=6, num_attention_heads=10, num_hidden_layers=3, vocab_size=129280,
                         max_position_embeddings=8192, mlp_layer_types=["dense", "sparse", "sparse"])))


def make_names():
    print("names_deepseek_ocr2", flush=True)
    with torch.device("meta"):
        modeling.DeepseekOcr2VisionModel = SmallVisionModel.__base__
        model = published()
        modeling.DeepseekOcr2VisionModel = SmallVisionModel
        state = revert_weight_conversion(model, model.state_dict())
    shapes = {k: list(v.shape) for k, v in state.items()}
    write_compact(ROOT / "names" / "deepseek-ocr-2.json", dict(sorted(shapes.items())))
    print("  deepseek-ocr-2", len(shapes), sum(torch.Size(s).numel() for s in shapes.values()))


def make():
    maker = Maker(tokenizer, build, processor, lambda name: name, state=experts_state, processor_config=processor_config,
                  most_rounding=6e-5)
    for shape in SHAPES:
        make_case(shape, maker)
