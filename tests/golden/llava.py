"""Golden files of LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision: three shapes each, CLIP and SigLIP towers, decoders of the
Llama line."""

import copy
import dataclasses

import numpy as np
import torch
from tokenizers import processors
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextProcessor,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from common import (
    MIN_GAP,
    STEPS,
    byte_bpe,
    case_dir,
    experts_state,
    first_good_seed,
    plain_experts,
    randomise,
    round_weights,
    smallest_gap,
    write_compact,
    write_json,
    write_tensors,
)
from qwen import MIN_SIGHT, MIN_VARIED, TEXTS, image, stable_beams

N_MERGES = 60
SPECIALS = ["<unk>", "<s>", "</s>", "<pad>", "<image>", "<video>"]
VOCAB = 336
# As vicuna's: no start token in the text, since the tokenizer adds it.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}USER: {% else %}ASSISTANT: {% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' ' }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Shape:
    case: str
    kind: str
    text: dict
    vision: dict
    strategy: str
    layer: int
    published: bool
    disk: torch.dtype
    seed: int
    prompts: tuple
    sizes: tuple = ()
    aspect: str = ""


def clip(hidden, heads, ffn, layers, side, patch):
    return dict(model_type="clip_vision_model", hidden_size=hidden, num_attention_heads=heads, intermediate_size=ffn,
                num_hidden_layers=layers, image_size=side, patch_size=patch, projection_dim=hidden)


def siglip(hidden, heads, ffn, layers, side, patch):
    return {**clip(hidden, heads, ffn, layers, side, patch), "model_type": "siglip_vision_model",
            "vision_use_head": False}


def text(kind, hidden, heads, kv_heads, layers, ffn, **more):
    return dict(model_type=kind, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads,
                num_hidden_layers=layers, intermediate_size=ffn, vocab_size=VOCAB, max_position_embeddings=2048, **more)


PROMPTS = ((), ("64x64",), ("64x96",), ("96x64",), ("64x64", "64x96"), ("96x64", "64x64"))
SHAPES = [
    Shape("llava_clip_llama", "llava", text("llama", 48, 4, 4, 2, 72), clip(32, 2, 52, 3, 56, 14), "default", -2, True,
          torch.float32, 2000, PROMPTS),
    Shape("llava_siglip_qwen2", "llava", text("qwen2", 60, 3, 1, 2, 88, rope_theta=1e6), siglip(24, 3, 40, 2, 48, 8),
          "full", -1, True, torch.bfloat16, 2100, PROMPTS),
    Shape("llava_class_row_mistral", "llava",
          text("mistral", 48, 2, 1, 3, 64, head_dim=16, sliding_window=None, rope_theta=1e6),
          clip(16, 2, 28, 4, 32, 8), "full", -3, False, torch.float16, 2200, PROMPTS),
    Shape("llava_next_mistral", "llava_next", text("mistral", 48, 4, 2, 2, 72, sliding_window=None),
          clip(24, 2, 40, 3, 32, 8), "default", -2, True, torch.float32, 2300, PROMPTS,
          ((32, 64), (64, 32), (64, 64), (96, 32), (32, 96))),
    Shape("llava_next_llama3", "llava_next",
          text("llama", 60, 3, 3, 2, 88, rope_theta=5e5, rope_scaling={
              "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 256}),
          clip(32, 4, 48, 2, 42, 14), "default", -2, True, torch.bfloat16, 2400,
          ((), ("64x64",), ("32x160",), ("160x32",), ("64x96", "32x160"), ("160x32",)),
          ((42, 84), (84, 42), (84, 84), (126, 42), (42, 126))),
    Shape("llava_next_siglip_qwen2", "llava_next", text("qwen2", 48, 4, 2, 3, 64), siglip(16, 2, 28, 3, 24, 8), "full", -1,
          False, torch.float16, 2500, PROMPTS, ((24, 48), (48, 24), (48, 48), (72, 24), (24, 72))),
    # A tile's side is no multiple of a patch's.
    Shape("llava_onevision_reduced", "llava_onevision", text("qwen2", 48, 4, 2, 2, 72), siglip(24, 2, 40, 2, 35, 8),
          "full", -1, True, torch.float32, 2600, PROMPTS, tuple((35 * h, 35 * w) for h in (1, 2, 3) for w in (1, 2, 3)),
          "anyres_max_2"),
    Shape("llava_onevision_whole", "llava_onevision", text("qwen2", 60, 3, 1, 2, 88, rope_theta=1e6),
          siglip(32, 4, 52, 3, 32, 8), "full", -1, True, torch.bfloat16, 2700, PROMPTS,
          tuple((32 * h, 32 * w) for h in (1, 2, 3) for w in (1, 2, 3)), "anyres_max_9"),
    Shape("llava_onevision_one_tile", "llava_onevision", text("qwen2", 48, 2, 2, 3, 64), siglip(16, 2, 28, 4, 24, 8),
          "full", -2, False, torch.float16, 2800, PROMPTS, tuple((24 * h, 24 * w) for h in (1, 2) for w in (1, 4)),
          "anyres_max_1"),
]
KINDS = {
    "llava": (LlavaConfig, LlavaForConditionalGeneration),
    "llava_next": (LlavaNextConfig, LlavaNextForConditionalGeneration),
    "llava_onevision": (LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration),
}


def tokenizer():
    tok = byte_bpe(N_MERGES, [(t, True) for t in SPECIALS], qwen=False)
    tok.post_processor = processors.Sequence([
        tok.post_processor or processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tok.token_to_id("<s>"))]),
    ])
    return tok


def config_json(shape, i):
    more = {}
    if shape.sizes:
        more |= {"image_grid_pinpoints": [list(s) for s in shape.sizes], "use_image_newline_parameter": True}
    if shape.aspect:
        more |= {"vision_aspect_ratio": shape.aspect, "video_token_index": i("<video>")}
    words = {**shape.text, "torch_dtype": str(shape.disk).removeprefix("torch.")}
    if shape.case == "llava_clip_llama":
        # As published: what is the class's default is left out.
        del words["max_position_embeddings"], words["num_key_value_heads"]
    return {
        "architectures": [KINDS[shape.kind][1].__name__], "model_type": shape.kind,
        "ignore_index": -100, "image_token_index": i("<image>"), "pad_token_id": i("<pad>"),
        "projector_hidden_act": "gelu", "text_config": words,
        "tie_word_embeddings": False, "transformers_version": "4.41.2", **more,
        "vision_config": shape.vision, "vision_feature_layer": shape.layer,
        "vision_feature_select_strategy": shape.strategy,
    }


def published_name(name):
    """The names in the published checkpoints, from those of the modules in memory since 4.52."""
    if name == "lm_head.weight":
        return "language_model.lm_head.weight"
    for new, old in (("model.language_model.", "language_model.model."), ("model.vision_tower.vision_model.", "vision_tower.vision_model."),
                     ("model.vision_tower.", "vision_tower.vision_model."), ("model.", "")):
        if name.startswith(new):
            return old + name.removeprefix(new)
    return name


def build(shape, seed, tok):
    config = config_json(shape, tok.token_to_id)
    classes = KINDS[shape.kind]
    torch.manual_seed(seed)
    # The type of the file is not that of the run.
    read = copy.deepcopy(config)
    del read["text_config"]["torch_dtype"]
    model = classes[1](classes[0](**read))
    randomise(model, seed, gain=1.4, embed_std=0.6, quiet_rows=range(256 + N_MERGES, VOCAB),
              gains=[("q_proj", 1.8), ("k_proj", 1.8), ("v_proj", 1.5), ("o_proj", 2.0), ("linear_2", 3.0),
                     ("position_embedding", 4.0), ("patch_embedding", 2.0)])
    model.model.language_model.norm.weight.data *= 3
    round_weights(model, shape.disk)
    return config, model


def image_settings(shape):
    side = shape.vision["image_size"]
    square = {"height": side, "width": side}
    if shape.kind == "llava_onevision":
        return LlavaOnevisionImageProcessorPil(size=square, image_grid_pinpoints=[list(s) for s in shape.sizes])
    if shape.kind == "llava_next":
        return LlavaNextImageProcessorPil(size={"shortest_edge": side}, crop_size=square, image_grid_pinpoints=[
            list(s) for s in shape.sizes])
    if shape.vision["model_type"] == "clip_vision_model":
        return CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size=square)
    return SiglipImageProcessorPil(size=square)


def processor(shape, tok):
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.image_token, fast.image_token_id = "<image>", tok.token_to_id("<image>")
    if shape.kind == "llava_onevision":
        fast.video_token, fast.video_token_id = "<video>", tok.token_to_id("<video>")
        return LlavaOnevisionProcessor(
            image_processor=image_settings(shape), tokenizer=fast, video_processor=LlavaOnevisionVideoProcessor(),
            num_image_tokens=(shape.vision["image_size"] // shape.vision["patch_size"]) ** 2,
            vision_feature_select_strategy=shape.strategy, chat_template=CHAT_TEMPLATE,
            vision_aspect_ratio=shape.aspect)
    kind = LlavaNextProcessor if shape.kind == "llava_next" else LlavaProcessor
    has_class = shape.vision["model_type"] == "clip_vision_model"
    return kind(image_processor=image_settings(shape), tokenizer=fast, patch_size=shape.vision["patch_size"],
                vision_feature_select_strategy=shape.strategy, num_additional_image_tokens=int(has_class),
                chat_template=CHAT_TEMPLATE)


@torch.no_grad()
def run_prompt(model, proc, names, words, maker):
    """Tokens and logits of a prompt, and what changes without its images."""
    messages = [{"role": "user", "content": [*({"type": "image"} for _ in names), {"type": "text", "text": words}]}]
    rendered = proc.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    # As `apply_chat_template(tokenize=True)`: a start token that the template wrote is not added again.
    inputs = proc(text=[rendered], images=[image(n) for n in names] or None, return_tensors="pt",
                  add_special_tokens=not rendered.startswith("<s>"))
    ids = inputs["input_ids"]
    positions, delta = maker.positions(model, inputs)
    logits = model(**inputs).logits[0]
    sight = np.inf
    if names:
        blind = model(**{**inputs, "pixel_values": torch.full_like(inputs["pixel_values"], 1e-3)}).logits[0]
        sight = float((blind[-1] - logits[-1]).abs().max())
    made = model.generate(**inputs, do_sample=False, max_new_tokens=STEPS, output_logits=True,
                          return_dict_in_generate=True)
    tokens = made.sequences[0, ids.shape[1]:]
    return dict(names=list(names), messages=messages, rendered=rendered, inputs=inputs, ids=ids[0], logits=logits, positions=positions, delta=delta,
                tokens=tokens, gap=smallest_gap(torch.cat(made.logits)), sight=sight)


def attempt(shape, seed, tok, maker):
    config, model = maker.build(shape, seed, tok)
    model.generation_config.eos_token_id = tok.token_to_id("</s>")
    model.generation_config.pad_token_id = tok.token_to_id("<pad>")
    proc = maker.processor(shape, tok)
    runs, texts = [], list(TEXTS)
    for names in shape.prompts:
        for words in list(texts):
            run = run_prompt(model, proc, names, words, maker)
            varied = len(set(run["tokens"].tolist()))
            plain = int(run["tokens"].max()) < 256 + N_MERGES and len(run["tokens"]) == STEPS
            if run["gap"] >= 5 * MIN_GAP and run["sight"] >= MIN_SIGHT and varied >= MIN_VARIED and plain:
                runs.append({**run, "text": words})
                texts.remove(words)
                break
        else:
            return f"no text works for {names}"
    if maker.most_rounding < np.inf and rounding(model, runs) > maker.most_rounding:
        return "logits depend on rounding"
    return seed, config, model, proc, runs


@torch.no_grad()
def rounding(model, runs):
    """The largest distance of logits from those in f64, in units of their root mean square."""
    exact, most = copy.deepcopy(model).double(), 0.0
    for run in runs:
        wide = {k: v.double() if torch.is_floating_point(v) else v for k, v in run["inputs"].items()}
        error = (exact(**wide).logits[0] - run["logits"]).abs().max()
        most = max(most, float(error / run["logits"].pow(2).mean().sqrt()))
    print(f"  rounding {most:.1e}", flush=True)
    return most


@torch.no_grad()
def image_tensors(model, proc, runs, maker):
    """Input and output of the encoder for each image."""
    tensors, meta = {}, {}
    for name in sorted({n for r in runs for n in r["names"]}):
        seen = maker.read_image(proc, image(name))
        for key in ("rows", "cols", "num_patches", "num_crops"):
            seen.pop(key, None)
        # Of one image, or of each of its tiles.
        features = model.model.get_image_features(**seen, return_dict=True).pooler_output
        features = features.flatten(0, 1) if torch.is_tensor(features) else torch.cat(list(features))
        tensors[f"image.{name}.pixel_values"] = maker.planes(proc, seen)
        if "pixel_values_local" in seen:
            tensors[f"image.{name}.parts"] = seen["pixel_values_local"]
        tensors[f"image.{name}.embeds"] = features
        meta[name] = {"file": f"images/{name}.png", "n_tokens": len(features)}
    return tensors, meta


def write_model(shape, tok, config, model, proc, folder, maker):
    i = tok.token_to_id
    specials = [t.content for t in tok.get_added_tokens_decoder().values()]
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {
        "_from_model_config": True, "bos_token_id": i("<s>"), "eos_token_id": i("</s>"), "pad_token_id": i("<pad>"),
        "transformers_version": "4.41.2"})
    settings = proc.image_processor.to_dict()
    settings["image_processor_type"] = settings["image_processor_type"].removesuffix("Pil")
    settings.pop("processor_class", None)
    write_json(folder / "preprocessor_config.json", settings)
    if maker.processor_config:
        write_json(folder / "processor_config.json", maker.processor_config(proc))
    tok.save(str(folder / "tokenizer.json"), pretty=False)
    write_json(folder / "tokenizer_config.json", {
        "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "model_max_length": 2048,
        "tokenizer_class": "LlamaTokenizer", "image_token": "<image>",
        "added_tokens_decoder": {str(i(t)): {"content": t, "lstrip": False, "normalized": False, "rstrip": False,
                                             "single_word": False, "special": True} for t in specials},
    })
    write_json(folder / "chat_template.json", {"chat_template": proc.chat_template})
    state = {k: v.to(shape.disk) for k, v in maker.state(model).items()}
    if shape.published:
        state = {maker.published_name(k): v for k, v in state.items()}
    write_tensors(folder / "model.safetensors", state)


@torch.no_grad()
def write_matrix(folder, tok, model, runs, images):
    ends, pad = [tok.token_to_id("</s>")], getattr(model.config, "image_token_id", tok.token_to_id("<image>"))
    exact, names, requests = copy.deepcopy(model).double(), list(images), []
    for k, r in enumerate(runs):
        ids = r["ids"].tolist()
        starts = [i for i, t in enumerate(ids) if t == pad and ids[i - 1] != pad]
        lengths = [next((n for n, t in enumerate(ids[at:]) if t != pad)) for at in starts]
        spans = []
        for name in r["names"]:
            first_row = 0
            while first_row < images[name]["n_tokens"]:
                at, n = starts.pop(0), lengths.pop(0)
                spans.append({"rows": names.index(name), "first_token": at, "first_row": first_row, "n_rows": n})
                first_row += n
        assert not starts
        requests.append({
            "rows": None, "prompt": ids, "end_tokens": ends, "spans": spans,
            "positions": f"prompt.{k}.position_ids", "next_position": len(ids) + r["delta"],
            "max_new_tokens": 32, "greedy": r["tokens"][:32].tolist(),
            "beam4": stable_beams(model, exact, r, ends), "next_logits": f"prompt.{k}.logits_last",
        })
    write_compact(folder / "matrix.json", {"rows": [f"image.{n}.embeds" for n in names], "requests": requests})


@dataclasses.dataclass(frozen=True)
class Maker:
    """What a family has of its own."""

    tokenizer: callable
    build: callable
    processor: callable
    published_name: callable
    read_image: callable = lambda proc, image: proc.image_processor(images=[image], return_tensors="pt")
    processor_config: callable = None
    # Of logits, by `rounding`; other makers trust their gains.
    most_rounding: float = np.inf
    state: callable = lambda model: model.state_dict()
    positions: callable = lambda model, inputs: (torch.arange(inputs["input_ids"].shape[1]).expand(3, -1), 0)
    planes: callable = lambda proc, seen: seen["pixel_values"].reshape(-1, *seen["pixel_values"].shape[-3:])


def narrowed(inputs):
    """Inputs for a model in bf16; most towers narrow pixels themselves."""
    return {k: v.to(torch.bfloat16) if torch.is_floating_point(v) else v for k, v in inputs.items()}


@torch.no_grad()
def make_case(shape, maker):
    print(shape.case, flush=True)
    tok = maker.tokenizer()
    seed, config, model, proc, runs = first_good_seed(
        lambda s: attempt(shape, s, tok, maker), range(shape.seed, shape.seed + 60))
    out = case_dir(shape.case)
    write_model(shape, tok, config, model, proc, out / "model", maker)
    tensors, images = image_tensors(model, proc, runs, maker)
    (out / "images").mkdir()
    for name in images:
        image(name).save(out / "images" / f"{name}.png", optimize=True)
    wide = getattr(shape, "many_rows", None) or max(range(len(runs)), key=lambda k: len(runs[k]["names"]))
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    prompts = []
    for k, r in enumerate(runs):
        tensors[f"prompt.{k}.input_ids"] = r["ids"]
        tensors[f"prompt.{k}.position_ids"] = r["positions"]
        tensors[f"prompt.{k}.logits_last"] = r["logits"][-1]
        prompts.append({
            "text": r["text"], "images": r["names"], "rendered": r["rendered"], "rope_delta": r["delta"],
            "smallest_top2_gap": r["gap"], "input_ids": r["ids"].tolist(), "greedy_tokens": r["tokens"].tolist(),
            "greedy_text": tok.decode(r["tokens"].tolist(), skip_special_tokens=True),
        })
    n = len(runs[wide]["ids"])
    rows = torch.tensor(sorted({*range(0, n, 6), n - 1}))
    tensors[f"prompt.{wide}.logit_rows"] = rows
    tensors[f"prompt.{wide}.logits"] = runs[wide]["logits"][rows]
    tensors[f"prompt.{wide}.logits_bf16"] = narrow(**narrowed(runs[wide]["inputs"])).logits[0].float()[rows]
    tensors["greedy_tokens"] = torch.stack([r["tokens"] for r in runs])
    write_matrix(out, tok, model, runs, images)
    write_tensors(out / "expected.safetensors", tensors)
    write_compact(out / "expected.json", {"seed": seed, "many_rows_prompt": wide, "images": images, "prompts": prompts})
    again = type(model).from_pretrained(out / "model", dtype=torch.float32)
    if maker.state is experts_state:
        plain_experts(again)
    assert (again(**runs[wide]["inputs"]).logits[0] - runs[wide]["logits"]).abs().max() < 1e-5


def make():
    for shape in SHAPES:
        make_case(shape, Maker(tokenizer, build, processor, published_name))
