"""Golden files of Step3: both sizes of images, windows, the convolutions behind the tower, a decoder with experts; three shapes.

The model is in no release of transformers. The reference is written here, from vLLM's description of it (0.32: `step3_vl.py`,
`step3_text.py`, and its processor) and with the names of the published tensors. The published weights were never run here, and
this reference was never run beside vLLM's model; `check_processor` holds its images and layouts to vLLM's processor, from a file of
that (`STEP3_PROCESSOR`), when it is given one.
"""

import dataclasses
import importlib.util
import math
import os
import sys
import types

import numpy as np
import torch
from PIL import Image
from tokenizers import processors
from torch import nn
from torchvision.transforms.functional import InterpolationMode, resize
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from common import ROOT, byte_bpe, give_beams_their_items, randomise, round_weights, write_compact
from llava import Maker, make_case

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
N_MERGES = 60
SPECIALS = ["<unk>", "<s>", "</s>", "<pad>", "<im_patch>", "<im_start>", "<im_end>", "<patch_start>", "<patch_end>",
            "<patch_newline>"]
VOCAB = 336
# Windows of an image have 9/13 of its pixels on a side: 504 and 728 as published.
PART, WHOLE = 9, 13
N_CLASS_ROWS = 4
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}USER: {% else %}ASSISTANT: {% endif %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}<im_patch>"
    "{% else %}{{ content['text'] }}{% endif %}{% endfor %} {% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Shape:
    case: str
    text: dict
    vision: dict
    disk: torch.dtype
    seed: int
    prompts: tuple
    projector_bias: bool = False
    many_rows: int | None = None
    published: bool = False


def text(hidden, heads, head_dim, rank, layers, ffn, experts, top_k, width, shared, sparse, **more):
    return dict(model_type="step3_text", architectures=["Step3TextForCausalLM"], hidden_size=hidden, num_attention_heads=heads,
                num_attention_groups=1, head_dim=head_dim, share_q_dim=rank, num_hidden_layers=layers, intermediate_size=ffn,
                moe_num_experts=experts, moe_top_k=top_k, moe_intermediate_size=width, share_expert_dim=shared,
                moe_layers_enum=sparse, max_seq_len=2048, max_position_embedding=2048, vocab_size=VOCAB, rms_norm_eps=1e-5,
                rope_theta=500000, **more)


def vision(hidden, heads, layers, ffn, output, side, patch):
    return dict(model_type="step3_vision_encoder", hidden_size=hidden, num_attention_heads=heads, num_hidden_layers=layers,
                intermediate_size=ffn, output_hidden_size=output, image_size=side * patch, patch_size=patch, num_channels=3,
                hidden_act="quick_gelu", layer_norm_eps=1e-5)


# None of the first has windows, nor has a thin one; two or four; one below the other, and filled up with black; of an image that is
# made smaller first.
PROMPTS = ((), ("40x48",), ("52x75",), ("24x60",), ("40x48", "48x30"), ("8x48", "24x60"))
SMALL_PROMPTS = ((), ("30x36",), ("40x56",), ("20x48",), ("30x170",), ("6x36", "20x48"))
SHAPES = [
    Shape("step3_dense_first", text(48, 4, 16, 24, 3, 72, 5, 2, 12, 20, "1,2"), vision(32, 2, 2, 48, 12, 13, 4), torch.float32,
          9604, PROMPTS, many_rows=1),
    # Weights of a token's experts add up to one; the last layer is dense; biases behind the convolutions.
    Shape("step3_renormalised", text(60, 3, 20, 40, 3, 88, 4, 3, 16, 12, "0, 1", norm_expert_weight=True),
          vision(32, 4, 2, 48, 10, 26, 2), torch.bfloat16, 9700, PROMPTS, True),
    # More values between both matrices of queries than a row has; the context is scaled.
    Shape("step3_wide_queries", text(40, 2, 24, 48, 2, 64, 6, 1, 16, 16, "1", rope_scaling={
        "rope_type": "linear", "factor": 2.0}), vision(16, 2, 3, 28, 8, 13, 3), torch.float16, 9800, SMALL_PROMPTS),
]


class RmsNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        wide = x if x.dtype == torch.float64 else x.float()
        return (self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps))).to(x.dtype)


def attend(q, k, v, causal):
    """`[batch, n, heads, width]`, heads joined in the result."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores + torch.full(scores.shape[2:], -math.inf, dtype=scores.dtype).triu(1)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    return torch.einsum("bhqk,bkhd->bqhd", wide.softmax(-1).to(v.dtype), v).flatten(2)


def linear(width, out):
    return nn.Linear(width, out, bias=False)


class Embeddings(nn.Module):
    def __init__(self, c):
        super().__init__()
        width, self.side = c["hidden_size"], c["image_size"] // c["patch_size"]
        self.class_embedding = nn.Parameter(torch.zeros(1, width))
        self.patch_embedding = nn.Conv2d(3, width, c["patch_size"], c["patch_size"])
        self.position_embedding = nn.Embedding(self.side**2 + 1, width)

    def positions(self, side):
        """`[1 + side², width]`; those of patches resampled from the whole image's."""
        first, rest = self.position_embedding.weight[:1], self.position_embedding.weight[1:]
        if side == self.side:
            return torch.cat([first, rest])
        plane = rest.T.reshape(1, -1, self.side, self.side)
        plane = plane if plane.dtype == torch.float64 else plane.float()
        plane = nn.functional.interpolate(plane, (side, side), mode="bicubic", antialias=True, align_corners=False)
        return torch.cat([first, plane[0].flatten(1).T.to(rest.dtype)])

    def forward(self, pixels):
        x = self.patch_embedding(pixels)
        side = x.shape[-1]
        x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x.flatten(2).transpose(1, 2)], 1) + self.positions(side)
        return torch.cat([x[:, :1].expand(-1, N_CLASS_ROWS - 1, -1), x], 1)


class TowerAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv_proj, self.out_proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return self.out_proj(attend(q, k, v, False))


class TowerLayer(nn.Module):
    """Norms are of what a sub-layer adds."""

    def __init__(self, c):
        super().__init__()
        width = c["hidden_size"]
        self.self_attn = TowerAttention(width, c["num_attention_heads"])
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, c["intermediate_size"]), "fc2": nn.Linear(c["intermediate_size"], width)})
        self.layer_norm1, self.layer_norm2 = (nn.LayerNorm(width, eps=c["layer_norm_eps"]) for _ in range(2))

    def forward(self, x):
        x = x + self.layer_norm1(self.self_attn(x))
        inner = self.mlp["fc1"](x)
        return x + self.layer_norm2(self.mlp["fc2"](inner * torch.sigmoid(1.702 * inner)))


class Tower(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embeddings = Embeddings(c)
        self.transformer = nn.ModuleDict({"layers": nn.ModuleList(TowerLayer(c) for _ in range(c["num_hidden_layers"]))})

    def forward(self, pixels):
        x = self.embeddings(pixels)
        for layer in self.transformer["layers"]:
            x = layer(x)
        return x[:, N_CLASS_ROWS:]


class Attention(nn.Module):
    """Queries through few values, with a norm between; one head of keys and values."""

    def __init__(self, c):
        super().__init__()
        hidden, heads, dim, rank = (c[k] for k in ("hidden_size", "num_attention_heads", "head_dim", "share_q_dim"))
        self.q_proj, self.k_proj, self.v_proj = linear(hidden, rank), linear(hidden, dim), linear(hidden, dim)
        self.inter_norm, self.wq, self.o_proj = RmsNorm(rank, c["rms_norm_eps"]), linear(rank, heads * dim), linear(heads * dim, hidden)
        self.heads, self.theta = heads, c["rope_theta"]
        self.factor = (c.get("rope_scaling") or {}).get("factor", 1.0)

    def turn(self, x):
        dim = x.shape[-1]
        inverse = 1.0 / (self.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)) / self.factor
        angles = torch.arange(x.shape[1], dtype=torch.float32)[:, None] * inverse
        cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, x):
        q = self.wq(self.inter_norm(self.q_proj(x))).unflatten(-1, (self.heads, -1))
        k, v = (p(x).unflatten(-1, (1, -1)) for p in (self.k_proj, self.v_proj))
        k, v = (p.expand(-1, -1, self.heads, -1) for p in (self.turn(k), v))
        return self.o_proj(attend(self.turn(q), k, v, True))


class Stacked(nn.Module):
    """A weight of all experts, outputs first."""

    def __init__(self, n, width, out):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n, out, width))


class Experts(nn.Module):
    def __init__(self, c):
        super().__init__()
        n, hidden, width = c["moe_num_experts"], c["hidden_size"], c["moe_intermediate_size"]
        self.gate = linear(hidden, n)
        self.gate_proj, self.up_proj, self.down_proj = Stacked(n, hidden, width), Stacked(n, hidden, width), Stacked(n, width, hidden)
        self.top_k, self.renormalise = c["moe_top_k"], c.get("norm_expert_weight", False)

    def forward(self, x):
        logits = self.gate(x)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        weights, chosen = wide.softmax(-1).topk(self.top_k, -1)
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        every = torch.zeros_like(wide).scatter(-1, chosen, weights).to(x.dtype)
        out = torch.zeros_like(x)
        for i in range(len(self.gate.weight)):
            inner = nn.functional.silu(x @ self.gate_proj.weight[i].T) * (x @ self.up_proj.weight[i].T)
            out = out + every[..., i:i + 1] * (inner @ self.down_proj.weight[i].T)
        return out


class Mlp(nn.Module):
    def __init__(self, hidden, ffn):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(hidden, ffn), linear(hidden, ffn), linear(ffn, hidden)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c, has_experts):
        super().__init__()
        hidden = c["hidden_size"]
        self.self_attn = Attention(c)
        self.input_layernorm, self.post_attention_layernorm = (RmsNorm(hidden, c["rms_norm_eps"]) for _ in range(2))
        if has_experts:
            self.moe, self.share_expert = Experts(c), Mlp(hidden, c["share_expert_dim"])
        else:
            self.mlp = Mlp(hidden, c["intermediate_size"])
        self.has_experts = has_experts

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        inner = self.post_attention_layernorm(x)
        return x + (self.share_expert(inner) + self.moe(inner) if self.has_experts else self.mlp(inner))


class Inner(nn.Module):
    def __init__(self, c):
        super().__init__()
        sparse = {int(i) for i in c["moe_layers_enum"].split(",")}
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c, i in sparse) for i in range(c["num_hidden_layers"]))
        self.norm = RmsNorm(c["hidden_size"], c["rms_norm_eps"])


class Config(PretrainedConfig):
    model_type = "step3_vl"

    def __init__(self, text_config=None, vision_config=None, projector_bias=True, image_token_id=None, **more):
        self.text_keys, self.tower_keys = text_config, vision_config
        self.projector_bias, self.image_token_id = projector_bias, image_token_id
        super().__init__(**more)
        self.vocab_size = (text_config or {}).get("vocab_size")


class Step3(PreTrainedModel, GenerationMixin):
    """No cache, so that all is computed anew."""

    config_class = Config
    main_input_name = "input_ids"

    def __init__(self, config):
        super().__init__(config)
        c, t = config.tower_keys, config.text_keys
        self.model = Inner(t)
        self.lm_head = linear(t["hidden_size"], t["vocab_size"])
        self.vision_model = Tower(c)
        self.vit_downsampler = nn.Conv2d(c["hidden_size"], c["output_hidden_size"], 2, 2)
        self.vit_downsampler2 = nn.Conv2d(c["output_hidden_size"], 2 * c["output_hidden_size"], 3, 2, 1)
        self.vit_large_projector = nn.Linear(2 * c["output_hidden_size"], t["hidden_size"], bias=config.projector_bias)
        self.model.get_image_features = self.get_image_features
        self.seen = None
        self.post_init()

    def rows(self, pixels):
        """`[n_images, n_rows, hidden]`."""
        x = self.vision_model(pixels.to(self.lm_head.weight.dtype))
        side = math.isqrt(x.shape[1])
        x = self.vit_downsampler2(self.vit_downsampler(x.transpose(1, 2).unflatten(-1, (side, side))))
        return self.vit_large_projector(x.flatten(2).transpose(1, 2))

    def get_image_features(self, pixel_values, pixel_values_local=None, num_local_patches=None, **_):
        """Of each image the rows of its windows, then those of the whole."""
        # Without a cache of the decoder, the images of a prompt come again with each token.
        if self.seen and self.seen[0] is pixel_values and self.seen[1] is pixel_values_local:
            return self.seen[2]
        whole, out = self.rows(pixel_values), []
        parts = self.rows(pixel_values_local).split(num_local_patches.tolist()) if pixel_values_local is not None else None
        for i, rows in enumerate(whole):
            out.append(torch.cat([parts[i].flatten(0, 1), rows]) if parts else rows)
        self.seen = pixel_values, pixel_values_local, types.SimpleNamespace(pooler_output=out)
        return self.seen[2]

    def prepare_inputs_for_generation(self, input_ids, pixel_values=None, pixel_values_local=None, num_local_patches=None, **_):
        return dict(input_ids=input_ids, pixel_values=pixel_values, pixel_values_local=pixel_values_local,
                    num_local_patches=num_local_patches)

    def forward(self, input_ids, pixel_values=None, pixel_values_local=None, num_local_patches=None, **_):
        x = self.model.embed_tokens(input_ids)
        if pixel_values is not None:
            rows = torch.cat(self.get_image_features(pixel_values, pixel_values_local, num_local_patches).pooler_output)
            x = x.masked_scatter((input_ids == self.config.image_token_id)[..., None], rows.to(x.dtype))
        for layer in self.model.layers:
            x = layer(x)
        return CausalLMOutputWithPast(logits=self.lm_head(self.model.norm(x)))


def cut(image, part, whole):
    """An image that is not thin, its windows, and how many are down and across."""
    width, height = image.size
    if min(width, height) < 32 and max(width, height) / min(width, height) > 4:
        square = Image.new(image.mode, (max(width, height),) * 2, 0)
        square.paste(image, (0, 0))
        image = square
    width, height = image.size
    if max(width, height) > 6 * part:
        scale = 6 * part / max(width, height)
        image = image.resize((int(width * scale), int(height * scale)), Image.Resampling.BILINEAR)
    width, height = image.size
    long, short = max(width, height), min(width, height)
    if long < whole:
        side = short if long / short > 1.5 else 0
    else:
        side = min(short, part) if long / short > 4 else part
    if side == 0:
        return image, [], (0, 0)

    def whole_windows(n):
        return n if n < side else (n // side + (n / side - n // side > 0.2)) * side

    width, height = whole_windows(width), whole_windows(height)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    across, down = math.ceil(width / side), math.ceil(height / side)
    windows = [resized.crop((x * side, y * side, (x + 1) * side, (y + 1) * side)) for y in range(down) for x in range(across)]
    return image, windows, (down, across)


def pixels(image, side):
    """`[3, side, side]`: normalised, then resized."""
    values = torch.from_numpy(np.asarray(image, dtype=np.float32) / 255).permute(2, 0, 1)
    values = (values - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    return resize(values, [side, side], InterpolationMode.BILINEAR, antialias=True)


class Images:
    def __init__(self, part, whole):
        self.part, self.whole = part, whole

    def to_dict(self):
        return {"image_processor_type": "none"}

    def arrangement(self, image):
        return cut(image.convert("RGB"), self.part, self.whole)[2]

    def __call__(self, images, return_tensors="pt"):
        every = [cut(image.convert("RGB"), self.part, self.whole) for image in images]
        out = {"pixel_values": torch.stack([pixels(image, self.whole) for image, *_ in every])}
        parts = [pixels(window, self.part) for _, windows, _ in every for window in windows]
        if parts:
            out["pixel_values_local"] = torch.stack(parts)
            out["num_local_patches"] = torch.tensor([len(windows) for _, windows, _ in every])
        return out


class Processor:
    chat_template = CHAT_TEMPLATE

    def __init__(self, tok, images, n_rows):
        self.tok, self.image_processor, self.n_rows = tok, images, n_rows

    def apply_chat_template(self, messages, tokenize=False, add_generation_prompt=True):
        from jinja2 import Template
        return Template(self.chat_template).render(messages=messages, add_generation_prompt=add_generation_prompt)

    def layout(self, arrangement):
        """Text of an image, line by line of its windows."""
        part, whole = ("<im_patch>" * n for n in self.n_rows)
        line = f"<patch_start>{part}<patch_end>" * arrangement[1]
        return "<patch_newline>".join([line] * arrangement[0]) + f"<im_start>{whole}<im_end>"

    def __call__(self, text, images=None, return_tensors="pt", add_special_tokens=True):
        pieces = text[0].split("<im_patch>")
        written = pieces[0]
        for piece, image in zip(pieces[1:], images or [], strict=True):
            written += self.layout(self.image_processor.arrangement(image)) + piece
        ids = self.tok.encode(written, add_special_tokens=add_special_tokens).ids
        return {"input_ids": torch.tensor([ids]), **(self.image_processor(images) if images else {})}


def tokenizer():
    tok = byte_bpe(N_MERGES, [(t, True) for t in SPECIALS], qwen=False)
    tok.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tok.token_to_id("<s>"))]),
    ])
    return tok


def reduced(side):
    return math.ceil(side // 2 / 2) ** 2


def sides(c):
    whole = c["image_size"] // c["patch_size"]
    return whole // WHOLE * PART, whole


def config_json(shape, i):
    part, whole = sides(shape.vision)
    return {
        "architectures": ["Step3VLForConditionalGeneration"], "model_type": "step3_vl", "image_token_id": i("<im_patch>"),
        "image_token_len": reduced(whole), "patch_token_len": reduced(part), "projector_bias": shape.projector_bias,
        "understand_projector_stride": 2, "torch_dtype": str(shape.disk).removeprefix("torch."),
        "bos_token_id": i("<s>"), "eos_token_id": i("</s>"), "pad_token_id": i("<pad>"), "transformers_version": "4.54.0",
        "text_config": shape.text, "vision_config": shape.vision,
    }


def build(shape, seed, tok):
    config = config_json(shape, tok.token_to_id)
    torch.manual_seed(seed)
    model = Step3(Config(**{k: v for k, v in config.items() if k not in ("torch_dtype", "model_type")}))
    hidden, width = shape.text["hidden_size"], shape.text["moe_intermediate_size"]
    randomise(model, seed, gain=1.4, embed_std=0.6, quiet_rows=range(256 + N_MERGES, VOCAB),
              gains=[("q_proj", 1.4), ("wq", 1.6), ("k_proj", 1.6), ("v_proj", 1.5), ("o_proj", 2.0), ("position_embedding", 3.0),
                     ("patch_embedding", 2.0), ("vit_large_projector", 3.0), ("moe.gate.", 3.0), ("moe.gate_proj", np.sqrt(width)),
                     ("moe.up_proj", np.sqrt(width)), ("moe.down_proj", 0.4 * np.sqrt(hidden))])
    model.model.norm.weight.data *= 3
    round_weights(model, shape.disk)
    model.generation_config = GenerationConfig(use_cache=False)
    give_beams_their_items(model)
    return config, model


def processor(shape, tok):
    c = shape.vision
    part, whole = sides(c)
    return Processor(tok, Images(part * c["patch_size"], whole * c["patch_size"]), (reduced(part), reduced(whole)))


def check_processor():
    """Images and layouts of the published sizes against vLLM's processor, whose file has its own imports of vLLM stubbed."""
    path = os.environ.get("STEP3_PROCESSOR")
    if not path:
        print("  STEP3_PROCESSOR is not set: not held to vLLM's processor")
        return
    sys.modules.setdefault("vllm", types.ModuleType("vllm"))
    sys.modules.setdefault("vllm.tokenizers", types.ModuleType("vllm.tokenizers")).TokenizerLike = object
    spec = importlib.util.spec_from_file_location("step3_processor", path)
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    images, ours = theirs.Step3VLImageProcessor(), Images(504, 728)
    tok = types.SimpleNamespace(convert_tokens_to_ids=lambda token: SPECIALS.index(token))
    layouts = theirs.Step3VLProcessor.__new__(theirs.Step3VLProcessor)
    theirs.Step3VLProcessor.__init__(layouts, images, tok)
    rng = np.random.default_rng(1)
    for width, height in ((500, 400), (727, 484), (727, 485), (728, 600), (900, 1300), (300, 1500), (900, 100), (160, 31), (3100, 700)):
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        seen, own = images(image), ours([image])
        assert torch.equal(seen["pixel_values"], own["pixel_values"]), (width, height)
        windows = seen["patch_pixel_values"]
        assert len(windows) == len(own.get("pixel_values_local", [])), (width, height)
        assert not len(windows) or torch.equal(windows, own["pixel_values_local"]), (width, height)
        text = layouts.get_image_repl_feature_text(1, len(windows), seen["patch_newline_mask"].tolist())
        assert text == Processor(None, ours, (81, 169)).layout(ours.arrangement(image)), (width, height)
    print("  images and layouts are those of vLLM's processor")


def write_names():
    """Names and shapes of this reference at the published sizes, but for the number of the decoder's layers, of which those with
    experts are alike: no published file was read."""
    published = Shape("step3", text(7168, 64, 256, 2048, 3, 18432, 48, 3, 5120, 5120, "1") | {"vocab_size": 128815},
                      vision(1792, 16, 63, 15360, 4096, 52, 14), torch.bfloat16, 0, ())
    with torch.device("meta"):
        state = Step3(Config(text_config=published.text, vision_config=published.vision, projector_bias=False)).state_dict()
    write_compact(ROOT / "names" / f"{published.case}.json", dict(sorted((k, list(v.shape)) for k, v in state.items())))
    print(" ", published.case, len(state), sum(v.numel() for v in state.values()))


def make():
    check_processor()
    maker = Maker(tokenizer, build, processor, lambda name: name, most_rounding=6e-5)
    for shape in SHAPES:
        make_case(shape, maker)
        # The published directory has none.
        (ROOT / shape.case / "model" / "preprocessor_config.json").unlink()
    write_names()
