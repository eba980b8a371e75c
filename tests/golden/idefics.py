"""Golden files of Idefics3 and SmolVLM: three shapes, images of one tile and of several."""

import copy
import dataclasses

import torch
from tokenizers import processors
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from common import byte_bpe, randomise, round_weights
from llava import N_MERGES, Maker, make_case, text

PLACES = [f"<row_{row}_col_{col}>" for row in range(1, 4) for col in range(1, 4)]
SPECIALS = ["<unk>", "<s>", "</s>", "<pad>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *PLACES]
VOCAB = 352
CHAT_TEMPLATE = (
    "<s>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Shape:
    case: str
    kind: str
    text: dict
    vision: dict
    factor: int
    longest: int
    splits: bool
    tied: bool
    disk: torch.dtype
    seed: int
    prompts: tuple
    published: bool = False


def tower(kind, hidden, heads, ffn, layers, side, patch):
    return dict(model_type=kind, hidden_size=hidden, num_attention_heads=heads, intermediate_size=ffn,
                num_hidden_layers=layers, image_size=side, patch_size=patch)


PROMPTS = ((), ("64x64",), ("64x96",), ("96x64",), ("64x64", "64x96"), ("32x96",))
SHAPES = [
    Shape("smolvlm_split", "smolvlm", text("llama", 48, 4, 2, 2, 72, rope_theta=1e5), tower("smolvlm_vision", 32, 2, 52, 3, 32, 8),
          2, 64, True, True, torch.float32, 3000, PROMPTS),
    Shape("smolvlm_whole", "smolvlm", text("llama", 60, 3, 1, 2, 88), tower("smolvlm_vision", 24, 3, 40, 2, 48, 8),
          3, 96, False, True, torch.bfloat16, 3100, PROMPTS),
    Shape("idefics3_odd_tiles", "idefics3",
          text("llama", 60, 3, 3, 2, 88, rope_theta=5e5, rope_scaling={
              "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 256}),
          tower("idefics3", 32, 4, 52, 2, 28, 7), 4, 75, True, False, torch.float16, 3220, PROMPTS),
]
KINDS = {
    "smolvlm": (SmolVLMConfig, SmolVLMForConditionalGeneration),
    "idefics3": (Idefics3Config, Idefics3ForConditionalGeneration),
}


def tokenizer():
    tok = byte_bpe(N_MERGES, [(t, True) for t in SPECIALS], qwen=False)
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    return tok


def build(shape, seed, tok):
    i = tok.token_to_id
    config = {
        "architectures": [KINDS[shape.kind][1].__name__], "model_type": shape.kind, "image_token_id": i("<image>"),
        "pad_token_id": i("<pad>"), "scale_factor": shape.factor, "tie_word_embeddings": shape.tied,
        "text_config": {**shape.text, "vocab_size": VOCAB, "pad_token_id": i("<pad>")},
        "transformers_version": "4.47.1", "vision_config": shape.vision,
    }
    torch.manual_seed(seed)
    model = KINDS[shape.kind][1](KINDS[shape.kind][0](**copy.deepcopy(config)))
    randomise(model, seed, gain=1.4, embed_std=0.6, quiet_rows=range(256 + N_MERGES, VOCAB),
              gains=[("q_proj", 1.8), ("k_proj", 1.8), ("v_proj", 1.5), ("o_proj", 2.0),
                     ("position_embedding", 4.0), ("patch_embedding", 2.0)])
    model.model.text_model.norm.weight.data *= 3
    round_weights(model, shape.disk)
    return config, model


def processor(shape, tok):
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    for name, token in (("image_token", "<image>"), ("fake_image_token", "<fake_token_around_image>"),
                        ("global_image_token", "<global-img>"), ("end_of_utterance_token", "<end_of_utterance>")):
        setattr(fast, name, token)
        setattr(fast, f"{name}_id", tok.token_to_id(token))
    side, patch = shape.vision["image_size"], shape.vision["patch_size"]
    settings = dict(size={"longest_edge": shape.longest}, max_image_size={"longest_edge": side},
                    do_image_splitting=shape.splits)
    more = dict(image_seq_len=(side // patch // shape.factor) ** 2, chat_template=CHAT_TEMPLATE)
    if shape.kind == "smolvlm":
        video = SmolVLMVideoProcessor(max_image_size={"longest_edge": side}, size={"longest_edge": shape.longest})
        return SmolVLMProcessor(SmolVLMImageProcessorPil(**settings), fast, video, **more)
    return Idefics3Processor(Idefics3ImageProcessorPil(**settings), fast, **more)


def make():
    for shape in SHAPES:
        make_case(shape, Maker(tokenizer, build, processor, lambda name: name))
