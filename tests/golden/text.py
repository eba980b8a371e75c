"""Golden files of the text encoder-decoders: BART and its relatives, T5 and its relatives; `bert.py` makes its cases with this."""

import copy
import dataclasses
import math
import typing

import torch
from transformers import GenerationConfig
from transformers.modeling_outputs import BaseModelOutput

import text_families
from common import (
    MIN_GAP,
    case_dir,
    first_good_seed,
    generator,
    randomise,
    round_weights,
    smallest_gap,
    write_compact,
    write_json,
    write_tensors,
)
from matrix import AT_MAX_LENGTH, Request, make_matrix

RAW_STEPS = 40
MIN_VARIED = 8
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "How many people are there?",
    "Describe the sky: it is blue, and the grass is green.",
    "red",
    "two cats and three dogs",
    "What is the colour of the grass?",
    "She had your dark suit in greasy wash water all year.",
    "Please write down what you hear: it is cold.",
    "near the wall",
    "The weather in the north is warm, 2024.",
]
N_TEXTS = 4
RANDOM_LENGTHS = [3, 17, 33, 45]
TRIES = 6


@dataclasses.dataclass(frozen=True)
class Shape:
    """A case: whose class and configuration, which tokenizer, how it lies on disk."""

    case: str
    family: type
    config: dict
    tokenizer: typing.Callable
    generation: dict
    disk: torch.dtype
    seed: int
    names: typing.Callable = lambda state: state
    """Names of the tensors in the file, and the tensors it has."""
    prompts: tuple = ()
    """Decoder tokens, as text or ids, that requests put after the start token."""
    gains: tuple = ()
    token: float = 0.4
    """Deviation of a token's embedding as the first layer sees it: small beside positions, or tokens repeat."""
    spread: float = 6.0
    """Deviation of the logits, by way of the norm before the head."""
    head: float = 0.0
    """Deviation of a head of its own in models that can only be told so by their file; 0: the token table."""
    build: typing.Callable | None = None
    """Makes the model of a shape and a seed; None: `new_model`."""
    bias: float = 0.0
    """Deviation of a bias of the logits, which these models hold as a buffer."""


def new_model(shape, seed):
    torch.manual_seed(seed)
    config = shape.family.config_class(**shape.config)
    model = shape.family(config)
    learned = shape.family.__name__ not in ("PegasusForConditionalGeneration", "MarianMTModel")
    embed_std = shape.token / math.sqrt(config.d_model) if getattr(config, "scale_embedding", False) else shape.token
    randomise(
        model, seed, gain=1.3, embed_std=embed_std, pos_std=1.5,
        gains=shape.gains, fixed=() if learned else ("embed_positions",), embeddings=("embed_tokens", "shared"),
    )
    for name, weight in model.named_parameters():
        if name.endswith(("fc2.weight", "wo.weight")):
            # Activations have a mean; without this it decides every token.
            weight.data -= weight.data.mean(1, keepdim=True)
    if shape.head:
        own = generator(seed, "lm_head").standard_normal(model.lm_head.weight.shape) * shape.head
        model.lm_head.weight = torch.nn.Parameter(torch.from_numpy(own).float())
    head = model.get_output_embeddings().weight
    width = 1.0 if text_families.scales_outputs(config) else math.sqrt(config.d_model)
    text_families.last_norm(model).weight.data *= shape.spread / (float(head.std()) * width)
    if hasattr(model, "final_logits_bias"):
        noise = generator(seed, "final_logits_bias").standard_normal(model.final_logits_bias.shape)
        model.final_logits_bias.copy_(torch.from_numpy(noise).float() * shape.bias)
        model.final_logits_bias.copy_(model.final_logits_bias.to(shape.disk).float())
    computed = {n: p.data.clone() for n, p in model.named_parameters() if "embed_positions" in n and not learned}
    round_weights(model, shape.disk)
    if shape.names is text_families.computed_positions:
        for name, exact in computed.items():
            model.get_parameter(name).data = exact
    return model


def candidates(tok, seed):
    """Candidates of each input: the tokens of texts, then random ones of lengths on both sides of a block."""
    for k in range(N_TEXTS):
        yield [tok.encode(text).ids for text in TEXTS[k:] + TEXTS[:k]]
    low, high = text_families.plain_tokens(tok)
    for length in RANDOM_LENGTHS:
        yield [generator(seed, f"input {k} {length}").integers(low, high, length).tolist() for k in range(TRIES)]


def start_of(shape):
    return shape.generation["decoder_start_token_id"]


def rows_of(model, ids):
    """Input of the decoder: encoder states, projected where the model does that."""
    states = model.get_encoder()(input_ids=torch.tensor([ids])).last_hidden_state
    project = getattr(model, "enc_to_dec_proj", None)
    return (states if project is None else project(states))[0]


def reader(model):
    """The model over rows that are projected already."""
    if hasattr(model, "enc_to_dec_proj"):
        model = copy.deepcopy(model)
        model.enc_to_dec_proj = torch.nn.Identity()
    return model


@torch.no_grad()
def raw_greedy(model, rows, start):
    """Argmax decoding of one input: tokens, and the logits they were taken from."""
    encoded = BaseModelOutput(last_hidden_state=rows[None])
    step, past, logits = torch.tensor([[start]]), None, []
    tokens = []
    for _ in range(RAW_STEPS):
        out = model(encoder_outputs=encoded, decoder_input_ids=step, past_key_values=past, use_cache=True)
        past = out.past_key_values
        logits.append(out.logits[0, -1].float())
        step = logits[-1].argmax()[None, None]
        tokens.append(int(step))
    return tokens, smallest_gap(torch.stack(logits))


def requests_of(shape, tok, inputs):
    gen = shape.generation
    ends = (gen["eos_token_id"],)
    start = start_of(shape)
    last = ((AT_MAX_LENGTH, gen["forced_eos_token_id"]),) if gen.get("forced_eos_token_id") is not None else ()
    first = ((0, gen["forced_bos_token_id"]),) if gen.get("forced_bos_token_id") is not None else ()
    suppress = tuple(t for run in gen.get("bad_words_ids") or [] for t in run)
    low, _ = text_families.plain_tokens(tok)
    longer = tuple(t for p in shape.prompts for t in ([p] if isinstance(p, int) else tok.encode(p, add_special_tokens=False).ids))
    longer = longer or (low + 4, low + 9, low + 4)
    base = dict(end_tokens=ends, suppress=suppress)
    return [
        Request(rows=0, prompt=(start,), forced=first + last, **base),
        Request(rows=0, prompt=(start, *longer), forced=last, length_penalty=2.0, **base),
        Request(rows=1, prompt=(start,), forced=first + last, early_stopping=True, max_new_tokens=24, **base),
        Request(rows=2, prompt=(start,), forced=first, length_penalty=0.6, **base),
        Request(rows=3, prompt=(start,), max_new_tokens=40, early_stopping="never", **base),
        Request(rows=6, prompt=(start, low + 1), begin_suppress=tuple(range(low, low + 40)), **base),
        Request(rows=7, prompt=(start,), end_tokens=(*ends, low + 7), suppress=(*suppress, low + 3, low + 5)),
        Request(rows=5, prompt=(start,), forced=((0, low + 2), (1, low + 6)), **base),
    ]


def attempt(shape, seed):
    tok = shape.tokenizer()
    model = (shape.build or new_model)(shape, seed)
    read = reader(model)
    kept = []
    for choices in candidates(tok, seed):
        refusal = "nothing to choose from"
        for ids in choices:
            with torch.no_grad():
                rows = rows_of(model, ids)
            tokens, gap = raw_greedy(read, rows, start_of(shape))
            if ids in [k["inputs"] for k in kept] or len(set(tokens)) < MIN_VARIED or tokens in [k["raw"] for k in kept]:
                refusal = f"only {len(set(tokens))} different tokens, or those of another input"
            elif gap < MIN_GAP:
                refusal = f"best logits {gap:.1e} apart"
            elif model.config.model_type == "m2m_100" and model.config.pad_token_id in tokens:
                # It has no position, and those behind it have that of one token less.
                refusal = "the padding token was written"
            else:
                kept.append(dict(inputs=ids, rows=rows, raw=tokens, gap=gap))
                refusal = None
                break
        if refusal:
            return f"input {len(kept)}: {refusal}"
    joined = {key: [k[key] for k in kept] for key in ("inputs", "rows", "raw")}
    return dict(seed=seed, tok=tok, model=model, read=read, gap=min(k["gap"] for k in kept), **joined)


def with_matrix(shape, out, seed):
    run = attempt(shape, seed)
    if isinstance(run, str):
        return run
    requests = requests_of(shape, run["tok"], run["inputs"])
    tensors, refusal = make_matrix(out, run["read"], run["rows"], requests)
    run |= {"tensors": tensors, "requests": requests}
    return refusal or run


@torch.no_grad()
def check_against_generate(shape, run, matrix):
    """The settings of the file must do by themselves what the first request says."""
    model = copy.deepcopy(run["model"])
    plain = {k: v for k, v in shape.generation.items() if k not in ("max_length", "num_beams", "min_length", "no_repeat_ngram_size", "early_stopping", "length_penalty")}
    model.generation_config = GenerationConfig(**plain)
    out = model.generate(torch.tensor([run["inputs"][0]]), max_new_tokens=run["requests"][0].max_new_tokens, num_beams=1)
    tokens = out[0].tolist()[1:]
    assert tokens == matrix["requests"][0]["greedy"], (tokens, matrix["requests"][0])


@torch.no_grad()
def make_case(shape):
    print(shape.case, flush=True)
    out = case_dir(shape.case)
    run = first_good_seed(lambda seed: with_matrix(shape, out, seed), range(shape.seed, shape.seed + 200))
    model, tok, inputs = run["model"], run["tok"], run["inputs"]
    text_families.write_model(out / "model", shape, model, tok)

    forced = [start_of(shape)] + inputs[1][:4] + run["raw"][0][:7]
    ids = torch.tensor([forced[:12]])
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    source = torch.tensor([inputs[0]])
    tensors = run["tensors"] | {
        "decoder_input_ids": ids[0],
        "logits": model(input_ids=source, decoder_input_ids=ids).logits[0],
        "logits_bf16": narrow(input_ids=source, decoder_input_ids=ids).logits[0].float(),
        "greedy_tokens": torch.tensor(run["raw"]),
    }
    sample = "The quick fox: is it red? " + text_families.some_special(tok)
    ids_of = tok.encode(sample, add_special_tokens=True).ids
    write_tensors(out / "expected.safetensors", tensors)
    write_compact(out / "expected.json", {
        "seed": run["seed"],
        "smallest_top2_gap": run["gap"],
        "start": start_of(shape),
        "texts": [next(t for t in TEXTS if tok.encode(t).ids == ids) for ids in inputs[:N_TEXTS]],
        "inputs": inputs,
        "tokenize": {"text": sample, "ids": ids_of, "decoded": tok.decode(ids_of, skip_special_tokens=True)},
    })
    again = shape.family.from_pretrained(out / "model", dtype=torch.float32)
    assert torch.equal(again(input_ids=source, decoder_input_ids=ids).logits[0], tensors["logits"]), "reloaded"
    import json
    check_against_generate(shape, run, json.loads((out / "matrix.json").read_text()))


def make(shapes):
    for shape in shapes:
        make_case(shape)


def make_bart():
    make(text_families.bart_shapes(Shape))


def make_m2m_100():
    make(text_families.m2m_100(Shape))


def make_t5():
    make(text_families.t5_shapes(Shape))
