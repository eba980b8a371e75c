"""Golden files of Mllama (Llama 3.2 Vision): three shapes, images of every tiling, prompts with none to three of them.

One thing differs from transformers' code, and agrees with the model as it was published: a token before the image takes
nothing from cross-attention (README.md, "What surprised us").
"""

import copy
import dataclasses
import pathlib
import tempfile

import numpy as np
import torch
from PIL import Image
from tokenizers import processors
from transformers import MllamaConfig, MllamaForConditionalGeneration, MllamaProcessor, PreTrainedTokenizerFast
from transformers.models.mllama.image_processing_pil_mllama import (
    MllamaImageProcessorPil,
    get_image_size_fit_to_canvas,
    get_optimal_tiled_canvas,
)

from common import (
    MIN_GAP,
    byte_bpe,
    case_dir,
    first_good_seed,
    randomise,
    round_weights,
    smallest_gap,
    write_compact,
    write_json,
    write_tensors,
)
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)
from matrix import Request, make_matrix
from preprocess import scene

STEPS = 48
LAST_ROWS = 16
MIN_VARIED = 4
WITH_LOGITS = (4, 5, 6, 9, 10)
IMAGE = "<|image|>"
BOS = "<|begin_of_text|>"
SPECIALS = [(t, True) for t in (BOS, "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
                                "<|python_tag|>")]
TEMPLATE = (
    "{{- bos_token }}\n"
    "{%- for message in messages %}\n"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}\n"
    "{%- if message['content'] is string %}\n"
    "{{- message['content'] }}\n"
    "{%- else %}\n"
    "{%- for part in message['content'] %}\n"
    "{%- if part['type'] == 'image' %}{{- '<|image|>' }}{%- else %}{{- part['text'] }}{%- endif %}\n"
    "{%- endfor %}\n"
    "{%- endif %}\n"
    "{{- '<|eot_id|>' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n"
    "{%- endif %}\n"
)


@dataclasses.dataclass(frozen=True)
class Shape:
    case: str
    image_size: int
    patch: int
    max_tiles: int
    vision: dict
    text: dict
    rope: dict
    disk: torch.dtype
    n_merges: int
    seed: int
    images: tuple
    new_names: bool = False


PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
SHAPES = [
    Shape("mllama_small_f32", 8, 4, 4,
          dict(hidden_size=24, attention_heads=2, num_hidden_layers=2, num_global_layers=1, intermediate_size=40,
               intermediate_layers_indices=[0]),
          dict(hidden_size=40, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3, intermediate_size=56,
               cross_attention_layers=[1]),
          PLAIN_ROPE, torch.float32, 30, 2100, ((8, 8), (9, 30), (40, 11), (20, 17))),
    Shape("mllama_deep_bf16", 18, 6, 4,
          dict(hidden_size=32, attention_heads=4, num_hidden_layers=3, num_global_layers=2, intermediate_size=48,
               intermediate_layers_indices=[0, 2]),
          dict(hidden_size=48, num_attention_heads=4, num_key_value_heads=1, num_hidden_layers=5, intermediate_size=64,
               cross_attention_layers=[1, 3]),
          LLAMA3, torch.bfloat16, 40, 2200, ((18, 18), (5, 60), (50, 12), (37, 41))),
    Shape("mllama_two_tiles_f16", 20, 5, 2,
          dict(hidden_size=24, attention_heads=3, num_hidden_layers=2, num_global_layers=1, intermediate_size=48,
               intermediate_layers_indices=[0, 1], supported_aspect_ratios=[[1, 1], [1, 2], [2, 1]]),
          dict(hidden_size=36, num_attention_heads=3, num_key_value_heads=3, num_hidden_layers=4, intermediate_size=48,
               cross_attention_layers=[1, 2]),
          LLAMA3, torch.float16, 50, 2300, ((20, 20), (13, 35), (61, 20), (7, 9)), new_names=True),
]


def tokenizer(shape):
    tok = byte_bpe(shape.n_merges, [*SPECIALS, (IMAGE, True)], qwen=True)
    tok.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tok.token_to_id(BOS))])
    return tok


def model_config(shape, tok):
    image = tok.token_to_id(IMAGE)
    end = [tok.token_to_id(t) for t in ("<|end_of_text|>", "<|eot_id|>")]
    assert image == tok.get_vocab_size() - 1
    taps = len(shape.vision["intermediate_layers_indices"])
    config = MllamaConfig(
        vision_config=dict(image_size=shape.image_size, patch_size=shape.patch, max_num_tiles=shape.max_tiles,
                           vision_output_dim=shape.vision["hidden_size"] * (1 + taps), **shape.vision),
        text_config=dict(vocab_size=image, rope_parameters=shape.rope, max_position_embeddings=256,
                         bos_token_id=tok.token_to_id(BOS), eos_token_id=end, pad_token_id=end[0], **shape.text),
        image_token_index=image,
        architectures=["MllamaForConditionalGeneration"],
    )
    return config


def published_config(shape, config):
    config = config.to_dict()
    config.pop("dtype", None)
    config.update(torch_dtype=str(shape.disk).removeprefix("torch."), transformers_version="4.45.0.dev0")
    for part in ("text_config", "vision_config"):
        config[part].pop("dtype", None)
    if not shape.new_names:
        rope = dict(config["text_config"].pop("rope_parameters"))
        config["text_config"]["rope_theta"] = rope.pop("rope_theta")
        config["text_config"]["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    return config


def published_name(name):
    if name.startswith("model.language_model."):
        return "language_model.model." + name.removeprefix("model.language_model.")
    if name.startswith("lm_head."):
        return "language_model." + name
    return name.removeprefix("model.")


def blind_before_the_image(model):
    """Zeroes what a token before the image takes from cross-attention, as the published code does."""
    def note(layer, args, kwargs):
        layer.cross_attn.seeing = kwargs.get("full_text_row_masked_out_mask")

    def mask(attention, args, out):
        return out if attention.seeing is None else (attention.seeing[:, 0] * out[0], out[1])

    for layer in model.model.language_model.layers:
        if hasattr(layer, "cross_attn"):
            layer.register_forward_pre_hook(note, with_kwargs=True)
            layer.cross_attn.register_forward_hook(mask)


def prompts(shape, processor):
    """(text, images, messages or None); the images stand where the text says."""
    def said(role, *parts):
        return {"role": role, "content": [
            {"type": "image"} if p is IMAGE else {"type": "text", "text": p} for p in parts]}

    def chat(*parts):
        return [said("user", *parts)]

    conversations = [
        (chat(IMAGE, "What is this?"), (0,)),
        (chat(IMAGE, "Describe the image."), (1,)),
        (chat(IMAGE, "How many dogs?"), (2,)),
        (chat(IMAGE, "The sky"), (3,)),
        (chat("Please look at this picture: ", IMAGE, "What colour is the grass?"), (3,)),
        (chat("What is the weather in the north?"), ()),
    ]
    several = [
        (chat(IMAGE, IMAGE, "Which of them is larger?"), (0, 2)),
        (chat("Compare ", IMAGE, " with ", IMAGE, " please."), (3, 1)),
        ([said("user", IMAGE, "What is this?"), said("assistant", "A dog."), said("user", IMAGE, IMAGE, "And these?")],
         (1, 0, 3)),
    ]
    def rendered(asked):
        return [(processor.apply_chat_template(m, add_generation_prompt=True), i, m) for m, i in asked]

    plain = [(IMAGE + "If I had to write", (1,), None), ("The quick brown fox", (), None)]
    return rendered(conversations) + plain + rendered(several) + [(2 * IMAGE + "Once upon a time", (2, 1), None)]


def inputs_of(processor, text, samples, is_chat):
    more = {"add_special_tokens": False} if is_chat else {}
    if not samples:
        return dict(processor(text=text, return_tensors="pt", **more))
    return dict(processor(images=[samples], text=[text], return_tensors="pt", **more))


@torch.no_grad()
def greedy(model, inputs):
    """Argmax decoding with a cache, as `generate` feeds the model."""
    inputs = {k: v for k, v in inputs.items() if k != "attention_mask"}
    mask, past, rows, tokens = inputs.get("cross_attention_mask"), None, [], []
    for _ in range(STEPS):
        out = model(**inputs, past_key_values=past, use_cache=True)
        past = out.past_key_values
        rows.append(out.logits[0, -1].float())
        tokens.append(int(rows[-1].argmax()))
        inputs = {"input_ids": torch.tensor([[tokens[-1]]])}
        if mask is not None:
            inputs["cross_attention_mask"] = mask[:, -1:]
        inputs["position_ids"] = torch.tensor([[past.get_seq_length()]])
    return tokens, torch.stack(rows)


@torch.no_grad()
def states(model, inputs):
    """Rows of the tiles that exist, projected: `[n_tiles · (n_patches + 1), hidden]`."""
    seen = model.model.vision_model(**{k: inputs[k] for k in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")})
    rows = model.model.multi_modal_projector(seen.last_hidden_state)[0, 0]
    return rows[: int(inputs["aspect_ratio_mask"].sum())].flatten(0, 1)


def attempt(shape, seed):
    tok = tokenizer(shape)
    config = model_config(shape, tok)
    torch.manual_seed(seed)
    model = MllamaForConditionalGeneration(config)
    specials = [tok.token_to_id(t) for t, _ in SPECIALS]
    randomise(model, seed, gain=1.6, embed_std=1.5, quiet_rows=specials,
              gains=[("tile_embedding", 8.0), ("tile_positional", 4.0), ("cross_attn.v_proj", 0.25), ("lm_head", 2.0),
                     ("self_attn.q_proj", 2.0), ("self_attn.o_proj", 1.5)])
    for layer in model.model.language_model.layers:
        if hasattr(layer, "cross_attn"):
            # Queries that tell rows apart; an even mean of all rows would say the same at every step.
            layer.cross_attn.q_norm.weight.data *= 3
    model.model.language_model.norm.weight.data *= 2
    round_weights(model, shape.disk)
    blind_before_the_image(model)
    images = MllamaImageProcessorPil(
        size={"height": shape.image_size, "width": shape.image_size}, max_image_tiles=shape.max_tiles)
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, bos_token=BOS, eos_token="<|eot_id|>",
                                   pad_token="<|end_of_text|>")
    processor = MllamaProcessor(images, fast, chat_template=TEMPLATE)
    sample_images = [Image.fromarray(scene(h, w, shape.seed + i)) for i, (h, w) in enumerate(shape.images)]
    asked = []
    for text, images, messages in prompts(shape, processor):
        inputs = inputs_of(processor, text, [sample_images[i] for i in images], messages is not None)
        asked.append({"text": text, "images": images, "messages": messages, "inputs": inputs})
    for ask in asked:
        ask["tokens"], rows = greedy(model, ask["inputs"])
        ask["gap"] = smallest_gap(rows)
    gap = min(a["gap"] for a in asked)
    if gap < MIN_GAP:
        return f"gap {gap:.1e}"
    if len({tuple(a["tokens"]) for a in asked}) < len(asked):
        return "two prompts give the same tokens"
    if min(len(set(a["tokens"])) for a in asked) < MIN_VARIED:
        return "too few different tokens"
    if set(specials) & {t for a in asked for t in a["tokens"]}:
        return "a special token won"
    run = {"tok": tok, "config": config, "model": model, "processor": processor, "sample_images": sample_images, "asked": asked,
           "gap": gap, "seed": seed}
    with tempfile.TemporaryDirectory() as folder:
        _, refusal = matrix(pathlib.Path(folder), run)
    return refusal or run


def matrix(folder, run):
    """Requests over images of different tilings, two on one image, two without, and two with several."""
    asked, end = run["asked"], tuple(run["config"].text_config.eos_token_id)
    with_images = {ask["images"]: ask for ask in reversed(asked)}
    order = sorted(i[0] for i in with_images if len(i) == 1)
    image = run["config"].image_token_index

    def arguments(rows, request):
        ids = torch.tensor([list(request.prompt)])
        seen = request.images or (() if request.rows is None else ((request.rows, request.first_token),))
        if not seen:
            return {"input_ids": ids}
        inputs = with_images[tuple(order[i] for i, _ in seen)]["inputs"]
        max_tiles = inputs["cross_attention_mask"].shape[3]
        mask = torch.from_numpy(convert_sparse_cross_attention_mask_to_dense(
            [get_cross_attention_token_mask(ids[0].tolist(), image)], num_tiles=[inputs["aspect_ratio_mask"][0].sum(1).tolist()],
            max_num_tiles=max_tiles, length=ids.shape[1]))
        kept = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
        return {"input_ids": ids, "cross_attention_mask": mask, **{k: inputs[k] for k in kept}}

    def request(ask, **more):
        prompt = ask["inputs"]["input_ids"][0].tolist()
        places = [(order.index(i), p) for i, p in zip(ask["images"], np.flatnonzero(np.array(prompt) == image).tolist())]
        if len(places) > 1:
            return Request(rows=None, prompt=tuple(prompt), end_tokens=end, images=tuple(places), **more)
        rows, first = places[0] if places else (None, 0)
        return Request(rows=rows, prompt=tuple(prompt), end_tokens=end, first_token=first, **more)

    late = asked[1]["tokens"][20]
    stop = dataclasses.replace(request(asked[1]), end_tokens=(*end, late))
    requests = [
        request(asked[0]),
        stop,
        request(asked[2], suppress=(asked[2]["tokens"][1],)),
        request(asked[4], length_penalty=0.5),
        request(asked[3], begin_suppress=(asked[3]["tokens"][0],), early_stopping=True),
        request(asked[5]),
        request(asked[7], length_penalty=0.0),
        request(asked[9]),
        request(asked[10]),
    ]
    rows = [states(run["model"], with_images[(i,)]["inputs"]) for i in order]
    return make_matrix(folder, run["model"], rows, requests, arguments=arguments)


@torch.no_grad()
def check_against_generate(run):
    for k in (0, 4, 5, 8, 10):
        inputs = run["asked"][k]["inputs"]
        out = run["model"].generate(**inputs, do_sample=False, max_new_tokens=STEPS, eos_token_id=None)
        want = inputs["input_ids"][0].tolist() + run["asked"][k]["tokens"]
        assert out[0].tolist() == want, (out[0].tolist(), want)


def layouts(shape):
    """[height, width, tiles down, tiles across, new height, new width] of sizes around those of tiles, and far from them."""
    side = shape.image_size
    edges = [1, 2, side - 1, side, side + 1, 2 * side, 2 * side + 1, 3 * side, 4 * side, 5 * side + 3, 40 * side]
    rows = []
    for height in edges:
        for width in edges:
            tiles = get_optimal_tiled_canvas(height, width, shape.max_tiles, side)
            new = get_image_size_fit_to_canvas(height, width, *tiles, side)
            rows.append([height, width, *(int(t) // side for t in tiles), *map(int, new)])
    return rows


def write_model(folder, shape, run):
    model, tok, config = run["model"], run["tok"], run["config"]
    write_json(folder / "config.json", published_config(shape, config))
    text = config.text_config
    write_json(folder / "generation_config.json", {
        "bos_token_id": text.bos_token_id, "do_sample": False, "eos_token_id": text.eos_token_id,
        "pad_token_id": text.pad_token_id, "transformers_version": "4.45.0.dev0"})
    images = run["processor"].image_processor
    write_json(folder / "preprocessor_config.json", {
        "do_convert_rgb": True, "do_normalize": True, "do_pad": True, "do_rescale": True, "do_resize": True,
        "image_mean": list(images.image_mean), "image_processor_type": "MllamaImageProcessor",
        "image_std": list(images.image_std), "max_image_tiles": shape.max_tiles, "resample": 2,
        "rescale_factor": 1 / 255, "size": {"height": shape.image_size, "width": shape.image_size}})
    write_json(folder / "chat_template.json", {"chat_template": TEMPLATE})
    tok.save(str(folder / "tokenizer.json"), pretty=False)
    write_json(folder / "tokenizer_config.json", {
        "bos_token": BOS, "eos_token": "<|eot_id|>", "pad_token": "<|end_of_text|>", "model_max_length": 256,
        "processor_class": "MllamaProcessor", "tokenizer_class": "PreTrainedTokenizerFast"})
    name = (lambda n: n) if shape.new_names else published_name
    write_tensors(folder / "model.safetensors", {name(k): v.to(shape.disk) for k, v in model.state_dict().items()})


@torch.no_grad()
def make_case(shape):
    print(shape.case, flush=True)
    run = first_good_seed(lambda s: attempt(shape, s), range(shape.seed, shape.seed + 200))
    check_against_generate(run)
    out = case_dir(shape.case)
    write_model(out / "model", shape, run)
    model, asked = run["model"], run["asked"]
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    tensors, images = {}, []
    (out / "images").mkdir()
    for i, sample in enumerate(run["sample_images"]):
        file = f"images/{sample.height}x{sample.width}.png"
        sample.save(out / file, optimize=True)
        inputs = next(a["inputs"] for a in asked if a["images"] == (i,))
        n_tiles = int(inputs["aspect_ratio_mask"].sum())
        tensors[f"image.{i}.pixel_values"] = inputs["pixel_values"][0, 0, :n_tiles]
        tensors[f"image.{i}.states"] = states(model, inputs)
        images.append({"file": file, "n_tiles": n_tiles, "aspect_ratio_id": int(inputs["aspect_ratio_ids"][0, 0])})
    rows = []
    for k, ask in enumerate(asked):
        ids = ask["inputs"]["input_ids"]
        if k in WITH_LOGITS:
            fed = {n: v for n, v in ask["inputs"].items() if n != "attention_mask"}
            tensors[f"prompt.{k}.logits"] = model(**fed).logits[0, -LAST_ROWS:]
            tensors[f"prompt.{k}.logits_bf16"] = narrow(**fed).logits[0, -LAST_ROWS:].float()
        rows.append({"text": ask["text"], "messages": ask["messages"], "images": list(ask["images"]),
                     "input_ids": ids[0].tolist()})
    tensors["greedy_tokens"] = torch.tensor([a["tokens"] for a in asked])
    tensors |= matrix(out, run)[0]
    write_tensors(out / "expected.safetensors", tensors)
    write_compact(out / "expected.json", {
        "seed": run["seed"], "smallest_top2_gap": run["gap"], "images": images, "prompts": rows,
        "prompts_with_logits": list(WITH_LOGITS), "layouts": layouts(shape)})
    again = MllamaForConditionalGeneration.from_pretrained(out / "model", dtype=torch.float32)
    blind_before_the_image(again)
    fed = {n: v for n, v in asked[4]["inputs"].items() if n != "attention_mask"}
    assert torch.equal(again(**fed).logits[0, -LAST_ROWS:], tensors["prompt.4.logits"])


def make():
    for shape in SHAPES:
        make_case(shape)
