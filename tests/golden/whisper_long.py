"""Whisper beyond one pass, for the models of `whisper.py`: `long.json`, `long.safetensors`, `matrix.json`.

Alignment matrices and the times of tokens, windows of long clips with their seeks and prompts, decisions about a
fallback, words, and seams: each is computed by transformers' own functions over the stored random weights. Run after
`whisper`; its files are read, and only the tensors of the matrix are added to `expected.safetensors`.
"""

import dataclasses
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig, WhisperForConditionalGeneration, WhisperTokenizer
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.whisper import generation_whisper
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words, _find_longest_common_sequence
from transformers.utils import ModelOutput

from common import ROOT, generator, write_compact, write_tensors
from matrix import Request, make_matrix
from whisper import SHAPES

MAX_WINDOWS = 10


class Enough(Exception):
    """A random model need not reach the end of a clip."""


class Plain(WhisperForConditionalGeneration):
    """Generates as every other model does, in one pass."""

    generate = GenerationMixin.generate


def config_of(gen, **more):
    left_out = ("forced_decoder_ids", "max_length", "transformers_version")
    return GenerationConfig(**{k: v for k, v in gen.items() if k not in left_out}, **more)


@torch.no_grad()
def alignments(model, features, meta, gen):
    """Matrices of the chosen heads, and the time of each token, of the timestamp lists of `expected.json`."""
    prompt = meta["prompt_with_timestamps"]
    tensors, found = {}, []
    for i, tokens in enumerate(meta["greedy_tokens_timestamps"]):
        tokens = [t for t in tokens if t != gen["eos_token_id"]]
        ids = torch.tensor([prompt + tokens])
        out = model(features[i:i + 1], decoder_input_ids=ids, output_attentions=True)
        frames = [features.shape[-1], features.shape[-1] * 2 // 3][i % 2]
        fake = ModelOutput(cross_attentions=(out.cross_attentions,), sequences=ids)
        times = model._extract_token_timestamps(
            fake, gen["alignment_heads"], num_frames=torch.tensor([frames]), num_input_ids=len(prompt))
        rows = [round(t / 0.02) for t in times[0, len(prompt):-1].tolist()]
        found.append({"input": i, "tokens": prompt + tokens, "n_prompt": len(prompt), "n_heard": frames // 2, "rows": rows})
        if i < 2:
            weights = torch.stack([out.cross_attentions[l][0, h] for l, h in gen["alignment_heads"]])
            tensors[f"align.{i}"] = weights
    return tensors, found


def windows_of(model, features, gen, kind, condition):
    """Every window of a long clip, as `generate` processes it: seek, prompt, tokens; then the segments."""
    seen = []
    whole = WhisperForConditionalGeneration.generate_with_fallback

    def watched(self, *args, **kwargs):
        if len(seen) == MAX_WINDOWS:
            raise Enough
        seek, prompt = int(kwargs["seek"][0]), kwargs["decoder_input_ids"][0].tolist()
        out = whole(self, *args, **kwargs)
        seen.append({"seek": seek, "prompt": prompt, "tokens": out[0][0].tolist()})
        return out

    WhisperForConditionalGeneration.generate_with_fallback = watched
    model.generation_config = config_of(gen)
    try:
        out = model.generate(
            features, return_timestamps=True, return_segments=True, condition_on_prev_tokens=condition,
            max_new_tokens=24, attention_mask=torch.ones(features.shape[0], features.shape[-1], dtype=torch.long), **kind)
        segments = [[float(s["start"]), float(s["end"]), s["tokens"].tolist()] for s in out["segments"][0]]
    except Enough:
        segments = None
    finally:
        WhisperForConditionalGeneration.generate_with_fallback = whole
    return {"n_frames": features.shape[-1], "conditioned": condition, "windows": seen, "segments": segments}


@torch.no_grad()
def sequences(shape, model, features, gen):
    kind = {"language": shape.languages[0], "task": "transcribe"} if shape.multilingual else {}
    found = []
    for i in range(6):
        long = torch.cat([features[(i + k) % 8] for k in range(4)], dim=-1)[None]
        long = long[..., :long.shape[-1] - 2 * (7 * i)]
        run = windows_of(model, long, gen, kind, condition=i % 2 == 1)
        found.append(run)
    short = windows_of(model, features[:1], gen, kind, condition=False)
    assert sum(len(run["windows"]) > 2 for run in found) >= 3, "windows that move"
    return [*found, short]


def fallbacks(model, vocab, end):
    """Decisions of `_need_fallback`, with the numbers they were made of."""
    found = []
    for case in range(24):
        rng = generator(case, "fallback")
        n = int(rng.integers(4, 60))
        period = [n, 1, 3, 7][case % 4]
        tokens = np.resize(rng.integers(0, vocab, period), n).tolist() + [end]
        scores = [torch.from_numpy(rng.standard_normal(vocab).astype(np.float32) * 2) for _ in tokens]
        sure = [12.0, 5.0, 0.0][case % 3]
        for row, token in zip(scores, tokens):
            row[token] += sure
        no_speech = float(rng.uniform(0, 1))
        limits = dict(compression_ratio_threshold=[2.4, 1.35, None][case % 3], logprob_threshold=[-1.0, -2.5][case % 2],
                      no_speech_threshold=[0.6, None][case // 12])
        detector = generation_whisper.WhisperNoSpeechDetection(no_speech_token=1, begin_index=1)
        detector._no_speech_prob = [no_speech]
        ids = torch.tensor(tokens)
        again, skip = model._need_fallback(
            ids, [{"scores": scores}], 0, [detector], GenerationConfig(**limits), vocab, 0.0)
        found.append({
            "tokens": tokens, "compression_ratio": model._retrieve_compression_ratio(ids, vocab),
            "logprob": float(model._retrieve_avg_logprobs(scores, ids, 0.0)), "no_speech": no_speech,
            "limits": [limits[k] for k in ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold")],
            "again": bool(again), "skip": bool(skip),
        })
    assert {(f["again"], f["skip"]) for f in found} == {(False, False), (True, False), (False, True)}
    return found


def words(tok):
    texts = {
        "en": " \"The quick fox,\" she said (softly): it's 12.5% near - the 'wall'! Füchse?",
        "zh": "你好，世界。“天空”是蓝色的！",
        "fr": " L'été — où vas-tu ? « Là-bas ».",
    }
    names = {"en": "english", "zh": "chinese", "fr": "french"}
    found = []
    for code, text in texts.items():
        ids = tok.encode(text, add_special_tokens=False)
        said, _, indices = _combine_tokens_into_words(tok, ids, names[code])
        found.append({"language": code, "tokens": ids, "words": said, "ends": [k[-1] + 1 for k in indices]})
    return found


def seams():
    found = []
    for case in range(30):
        rng = generator(case, "seam")
        common = rng.integers(0, 9 if case % 3 == 0 else 500, int(rng.integers(0, 14))).tolist()
        left = rng.integers(0, 500, int(rng.integers(0, 20))).tolist() + common
        right = common + rng.integers(0, 500, int(rng.integers(0, 20))).tolist()
        for _ in range(case % 4):
            left.append(int(rng.integers(0, 500)))
            right.insert(0, int(rng.integers(0, 500)))
        found.append({"left": left, "right": right, "joined": [int(t) for t in _find_longest_common_sequence([left, right])]})
    return found


def heard(rows, request):
    """Whisper's encoder output has no mask."""
    states = rows[request.rows][None]
    return {"decoder_input_ids": torch.tensor([list(request.prompt)]), "encoder_outputs": BaseModelOutput(last_hidden_state=states)}


@torch.no_grad()
def matrix(folder, features, meta, gen):
    model = Plain.from_pretrained(folder / "model", dtype=torch.float32).eval()
    rows = list(model.model.encoder(features[:6]).last_hidden_state)
    end, plain, timed = (gen["eos_token_id"],), tuple(meta["prompt"]), tuple(meta["prompt_with_timestamps"])
    words = tuple(meta["decoder_input_ids"][len(plain):])
    ruled = dict(suppress=tuple(gen["suppress_tokens"]), begin_suppress=tuple(gen["begin_suppress_tokens"]))
    candidates = []
    for i in range(6):
        candidates += [
            Request(i, plain, end, **ruled), Request(i, plain + words, end), Request(i, timed, end, **ruled, length_penalty=0.6),
            Request(i, plain + words[:3], end, **ruled, early_stopping=True),
            Request(i, timed[:1], end, forced=tuple(enumerate(plain[1:])), **ruled, length_penalty=2.0),
        ]
    good, kinds = [], set()
    with tempfile.TemporaryDirectory() as scratch:
        for k, candidate in enumerate(candidates):
            kind, used = k % 5, [g.rows for g in good]
            if kind in kinds and len(kinds) < 5 and used.count(candidate.rows) > 1:
                continue
            if make_matrix(Path(scratch), model, rows, [candidate], arguments=heard)[1] is None:
                good.append(candidate)
                kinds.add(kind)
            if len(good) >= 7 and len({g.rows for g in good}) >= 3:
                break
    kept = sorted({g.rows for g in good})
    good = [dataclasses.replace(g, rows=kept.index(g.rows)) for g in good]
    assert len(good) >= 6 and len(kept) < len(good), (len(good), kept)
    tensors, refusal = make_matrix(folder, model, [rows[i] for i in kept], good, arguments=heard)
    assert refusal is None, refusal
    old = {k: v for k, v in load_file(folder / "expected.safetensors").items() if not k.startswith("matrix.")}
    write_tensors(folder / "expected.safetensors", old | tensors)


def make():
    for shape in SHAPES:
        print(shape.case, flush=True)
        folder = ROOT / shape.case
        meta = json.loads((folder / "expected.json").read_text())
        gen = json.loads((folder / "model" / "generation_config.json").read_text())
        model = WhisperForConditionalGeneration.from_pretrained(
            folder / "model", dtype=torch.float32, attn_implementation="eager").eval()
        quantised = load_file(folder / "expected.safetensors")["batch_input_features_u8"]
        features = quantised.float() / 64 - 2
        tok = WhisperTokenizer.from_pretrained(folder / "model")
        tensors, aligned = alignments(model, features, meta, gen)
        write_tensors(folder / "long.safetensors", tensors)
        write_compact(folder / "long.json", {
            "alignments": aligned,
            "sequences": sequences(shape, model, features, gen),
            "fallbacks": fallbacks(model, model.config.vocab_size, gen["eos_token_id"]),
            "words": words(tok),
            "seams": seams(),
        })
        matrix(folder, features, meta, gen)
