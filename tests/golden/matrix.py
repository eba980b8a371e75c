"""`matrix.json`: what an engine must do with a model, for every way to generate, without prompts and preprocessing.

A family's maker hands over its model, the encoder outputs of its inputs, and `Request`s; `make_matrix` returns
tensors for `expected.safetensors` and writes `matrix.json`. README.md says what each key means.
"""

import copy
import dataclasses
import functools
import math

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.modeling_outputs import BaseModelOutput

from common import MIN_GAP, smallest_gap, write_compact

AT_MAX_LENGTH = -1
"""The step of a forced token that comes last when nothing else ended the answer."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One way to ask. `rows` is the index of an encoder output, or None for a decoder that can do without."""

    rows: int | None
    prompt: tuple
    end_tokens: tuple
    forced: tuple = ()
    suppress: tuple = ()
    begin_suppress: tuple = ()
    max_new_tokens: int = 32
    beam_tokens: int = 24
    length_penalty: float = 1.0
    early_stopping: bool = False
    first_token: int = 0
    """First token of the prompt that sees the encoder output, where earlier ones pass it by."""
    images: tuple = ()
    """Of several encoder outputs the index and the first token of each, in the place of `rows`."""


class Rules(LogitsProcessor):
    """Forced, suppressed and begin-suppressed tokens, as transformers' own processors do them one by one.

    A forced token gets 0 and everything else minus infinity, so that it costs a beam nothing. What is suppressed
    at the beginning is suppressed at the first step that is not forced.
    """

    def __init__(self, request, max_new_tokens):
        steps = {max_new_tokens - 1 if step == AT_MAX_LENGTH else step: token for step, token in request.forced}
        n_forced = next(i for i in range(len(steps) + 1) if i not in steps or i == max_new_tokens - 1)
        self.request, self.steps, self.begin = request, steps, n_forced

    def __call__(self, input_ids, scores):
        step = input_ids.shape[1] - len(self.request.prompt)
        scores = scores.clone()
        if step == self.begin:
            scores[:, list(self.request.begin_suppress)] = -math.inf
        scores[:, list(self.request.suppress)] = -math.inf
        if step in self.steps:
            scores[:] = -math.inf
            scores[:, self.steps[step]] = 0.0
        return scores


def inputs(rows, request):
    """Arguments of `generate` and of the model that stand for an encoder output and a decoder prompt."""
    ids = torch.tensor([list(request.prompt)])
    if request.rows is None:
        return {"decoder_input_ids": ids}
    states = rows[request.rows][None]
    mask = torch.ones(1, states.shape[1], dtype=torch.long)
    return {"decoder_input_ids": ids, "encoder_outputs": BaseModelOutput(last_hidden_state=states), "attention_mask": mask}


def settings(request, max_new_tokens, **more):
    pad = next(t for t in range(10_000) if t not in request.end_tokens)
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=list(request.end_tokens),
        pad_token_id=pad,
        decoder_start_token_id=request.prompt[0],
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **more,
    )


def run(model, ask, request, max_new_tokens, extra, **more):
    # `generate` fills what a config leaves open from the model's own; nothing of that may leak in here.
    kept, model.generation_config = model.generation_config, GenerationConfig()
    try:
        return model.generate(
            **ask(request),
            **extra,
            generation_config=settings(request, max_new_tokens, **more),
            logits_processor=LogitsProcessorList([Rules(request, max_new_tokens)]),
        )
    finally:
        model.generation_config = kept


def answer(request, ids):
    """The tokens after the prompt, up to and with the end token."""
    tokens = ids[len(request.prompt):].tolist()
    ends = [i for i, token in enumerate(tokens) if token in request.end_tokens]
    return tokens[:ends[0] + 1] if ends else tokens


@torch.no_grad()
def greedy(model, ask, request, extra):
    """The greedy answer and the least lead of a chosen token that was not forced."""
    out = run(model, ask, request, request.max_new_tokens, extra, num_beams=1)
    tokens = answer(request, out.sequences[0])
    gaps = [smallest_gap(s) for s in out.scores[:len(tokens)]]
    return tokens, min(gap for gap in gaps if gap < math.inf)


@torch.no_grad()
def beams(model, ask, request, extra):
    out = run(
        model, ask, request, request.beam_tokens, extra, num_beams=4, num_return_sequences=2,
        length_penalty=request.length_penalty, early_stopping=request.early_stopping,
    )
    answers = [answer(request, ids) for ids in out.sequences]
    scores = out.sequences_scores.tolist()
    return [{"tokens": tokens, "score": round(score, 6)} for tokens, score in zip(answers, scores, strict=True)]


@torch.no_grad()
def make_matrix(folder, model, rows, requests, extra=None, arguments=inputs):
    """Writes `folder/matrix.json`. `rows` are encoder outputs, f32 `[n_rows, hidden]` each; `extra` are further
    arguments of the model's `generate` and forward, the same for all requests. `arguments` says what stands for the
    encoder output and the prompt of a request, for models that do not take them as most do.

    Returns tensors to add to `expected.safetensors`, and a reason to refuse these weights or None: tokens that
    depend on rounding, which best logits near each other and beams that differ in f64 show, would test luck.
    """
    extra = extra or {}
    exact = copy.deepcopy(model).double()
    exact_rows = [r.double() for r in rows]
    exact_extra = {k: v.double() if torch.is_floating_point(v) else v for k, v in extra.items()}
    ask, exact_ask = (functools.partial(arguments, r) for r in (rows, exact_rows))
    tensors = {f"matrix.{i}.rows": r.float() for i, r in enumerate(rows)}
    entries, refusal = [], None
    for i, request in enumerate(requests):
        tokens, gap = greedy(model, ask, request, extra)
        answers = beams(model, ask, request, extra)
        if gap < MIN_GAP:
            refusal = f"request {i}: best logits {gap:.1e} apart"
        same = beams(exact, exact_ask, request, exact_extra)
        if [a["tokens"] for a in same] != [a["tokens"] for a in answers]:
            refusal = f"request {i}: beams differ in f64"
        lead = answers[0]["score"] - answers[1]["score"]
        if lead * len(answers[0]["tokens"]) ** request.length_penalty < MIN_GAP:
            refusal = f"request {i}: beams score alike"
        entry = {"rows": request.rows, "prompt": list(request.prompt), "end_tokens": list(request.end_tokens)}
        entry |= {"forced": [list(f) for f in request.forced]} if request.forced else {}
        entry |= {"suppress": list(request.suppress)} if request.suppress else {}
        entry |= {"begin_suppress": list(request.begin_suppress)} if request.begin_suppress else {}
        entry |= {"first_token": request.first_token} if request.first_token else {}
        entry |= {"images": [list(i) for i in request.images]} if request.images else {}
        entry |= {
            "max_new_tokens": request.max_new_tokens,
            "greedy": tokens,
            "beam4": {
                "length_penalty": request.length_penalty,
                "early_stopping": request.early_stopping,
                "max_new_tokens": request.beam_tokens,
                "answers": answers,
            },
            "next_logits": f"matrix.{i}.logits",
        }
        entries.append(entry)
        tensors[f"matrix.{i}.logits"] = model(**ask(request), **extra).logits[0, -1].float()
    write_compact(folder / "matrix.json", {"rows": [f"matrix.{i}.rows" for i in range(len(rows))], "requests": entries})
    return tensors, refusal
