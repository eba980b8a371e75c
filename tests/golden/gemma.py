"""Golden files of Gemma 3: three shapes, windows longer and shorter than an image, with and without pan and scan."""

import copy
import dataclasses
import math

import torch
from tokenizers import processors
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3Processor, PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from common import byte_bpe, randomise, round_weights
from llava import N_MERGES, Maker, make_case, published_name, siglip

SPECIALS = ["<pad>", "</s>", "<s>", "<unk>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>",
            "<image_soft_token>"]
VOCAB = 336
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}{{ '<start_of_turn>' + role + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}{{ '<start_of_image>' }}{% elif item['type'] == 'text' %}{{ item['text'] | trim }}"
    "{% endif %}{% endfor %}{% endif %}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Shape:
    case: str
    text: dict
    vision: dict
    n_rows: int
    tied: bool
    disk: torch.dtype
    seed: int
    published: bool
    prompts: tuple
    pan_and_scan: dict = dataclasses.field(default_factory=dict)


def words(hidden, heads, kv_heads, layers, ffn, head_dim, window, scalar, **more):
    return dict(model_type="gemma3_text", hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads,
                num_hidden_layers=layers, intermediate_size=ffn, head_dim=head_dim, sliding_window=window,
                query_pre_attn_scalar=scalar, vocab_size=VOCAB, max_position_embeddings=2048, **more)


ROPES = {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
         "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}
PROMPTS = ((), ("64x64",), ("64x96",), ("96x64",), ("64x64", "64x96"), ("32x96",))
LONG = ((), ("64x64",), ("32x160",), ("160x32",), ("64x96", "32x160"), ("96x64",))
SHAPES = [
    # As published: the older keys, and what the class has as a default is left out.
    Shape("gemma3_old_keys", words(48, 4, 2, 4, 72, 16, 20, 16, sliding_window_pattern=2, rope_theta=1e6,
                                   rope_local_base_freq=1e4, rope_scaling={"factor": 8.0, "rope_type": "linear"}),
          siglip(32, 2, 52, 3, 32, 8), 4, True, torch.float32, 5000, True, PROMPTS),
    Shape("gemma3_pan_and_scan", words(60, 3, 1, 3, 88, 24, 12, 40, rope_parameters=ROPES, layer_types=[
              "full_attention", "sliding_attention", "sliding_attention"]),
          siglip(24, 3, 40, 2, 48, 8), 4, False, torch.bfloat16, 5120, True, LONG,
          dict(do_pan_and_scan=True, pan_and_scan_min_crop_size=20, pan_and_scan_max_num_crops=3,
               pan_and_scan_min_ratio_to_activate=1.2)),
    Shape("gemma3_narrow_window", words(48, 2, 2, 3, 64, 32, 6, 32, layer_types=[
              "sliding_attention", "sliding_attention", "full_attention"]),
          siglip(16, 2, 28, 4, 32, 4), 16, False, torch.float16, 5200, False, PROMPTS),
]


def tokenizer():
    tok = byte_bpe(N_MERGES, [(t, True) for t in SPECIALS], qwen=False)
    tok.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tok.token_to_id("<s>"))]),
    ])
    return tok


def build(shape, seed, tok):
    i = tok.token_to_id
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": i("<start_of_image>"),
        "eoi_token_index": i("<end_of_image>"), "eos_token_id": [i("</s>"), i("<end_of_turn>")],
        "image_token_index": i("<image_soft_token>"), "mm_tokens_per_image": shape.n_rows, "model_type": "gemma3",
        "text_config": shape.text, "tie_word_embeddings": shape.tied, "transformers_version": "4.50.0.dev0",
        "vision_config": shape.vision,
    }
    if not shape.tied:
        config["text_config"] = {**shape.text, "tie_word_embeddings": False}
    torch.manual_seed(seed)
    model = Gemma3ForConditionalGeneration(Gemma3Config(**copy.deepcopy(config)))
    hidden = shape.text["hidden_size"]
    randomise(model, seed, gain=1.4, embed_std=0.6 / math.sqrt(hidden), quiet_rows=range(256 + N_MERGES, VOCAB),
              gains=[("q_proj", 1.8), ("k_proj", 1.8), ("v_proj", 1.5), ("o_proj", 2.0), ("mm_input", 3.0),
                     ("position_embedding", 4.0), ("patch_embedding", 2.0)])
    for name, p in model.named_parameters():
        # Stored as the factor less 1.
        if "norm" in name and "vision_tower" not in name:
            p.data -= 1
    model.model.language_model.norm.weight.data += 9 if shape.tied else 2
    round_weights(model, shape.disk)
    return config, model


def processor(shape, tok):
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    for name, token in (("boi_token", "<start_of_image>"), ("eoi_token", "<end_of_image>"), ("image_token", "<image_soft_token>")):
        setattr(fast, name, token)
        setattr(fast, f"{name}_id", tok.token_to_id(token))
    side = shape.vision["image_size"]
    images = Gemma3ImageProcessorPil(size={"height": side, "width": side}, **shape.pan_and_scan)
    proc = Gemma3Processor(images, fast, chat_template=CHAT_TEMPLATE, image_seq_length=shape.n_rows)
    # The class's own setting would hide that of the file.
    proc.images_kwargs = {**proc.images_kwargs, **shape.pan_and_scan}
    return proc


def make():
    for shape in SHAPES:
        make_case(shape, Maker(tokenizer, build, processor, published_name))
