"""Golden files of sampling: processors, cuts, beam search and prompt lookup over small tables.

No model is involved. Logits are random rows, or a table that depends on the last token and the length, so
that a test can play the model's part. README.md says what each file holds.
"""

import numpy as np
import torch
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.generation import LogitsProcessor
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
from transformers.modeling_outputs import CausalLMOutput

from common import ROOT, generator, write_compact, write_tensors

VOCAB = 40
END = [38, 39]


class TableConfig(PretrainedConfig):
    model_type = "table"


class TableModel(PreTrainedModel, GenerationMixin):
    """Logits of a place: a row for its token, plus a row for the place."""

    config_class = TableConfig
    _supports_cache_class = False

    def __init__(self, by_token, by_place):
        super().__init__(TableConfig(vocab_size=VOCAB, num_hidden_layers=1, is_encoder_decoder=False, use_cache=False))
        self.by_token = torch.nn.Parameter(by_token)
        self.by_place = torch.nn.Parameter(by_place)
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, input_ids, attention_mask=None, **_):
        places = torch.arange(input_ids.shape[1]) % len(self.by_place)
        return CausalLMOutput(logits=self.by_token[input_ids] + self.by_place[places])

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **_):
        return {"input_ids": input_ids}


def tables(seed, spread=2.0):
    rng = generator(seed, "tables")
    draw = lambda *shape: torch.from_numpy(rng.standard_normal(shape).astype(np.float32) * spread)
    return draw(VOCAB, VOCAB), draw(7, VOCAB)


class Presence(LogitsProcessor):
    """OpenAI's definition: written tokens lose `presence` once and `frequency` for each time."""

    def __init__(self, n_prompt, presence, frequency):
        self.n_prompt, self.presence, self.frequency = n_prompt, presence, frequency

    def __call__(self, input_ids, scores):
        counts = torch.zeros_like(scores)
        for token in input_ids[0, self.n_prompt:].tolist():
            counts[0, token] += 1
        return scores - self.frequency * counts - self.presence * (counts > 0)


def processors_of(model, n_prompt, setting):
    """Those that `generate` makes of the settings, in its order."""
    config = GenerationConfig(
        eos_token_id=END,
        sequence_bias=[[[int(t)], float(b)] for t, b in setting.get("logit_bias", [])] or None,
        repetition_penalty=setting.get("repetition_penalty", 1.0),
        no_repeat_ngram_size=setting.get("no_repeat_ngram_size", 0),
        bad_words_ids=setting.get("bad_words") or None,
        min_new_tokens=setting.get("min_tokens") or None,
        suppress_tokens=setting.get("suppress"),
        begin_suppress_tokens=setting.get("begin_suppress"),
        do_sample=setting.get("sample", False),
        temperature=setting.get("temperature", 1.0), top_k=setting.get("top_k", 0), top_p=setting.get("top_p", 1.0),
        min_p=setting.get("min_p"),
    )
    model._prepare_special_tokens(config, kwargs_has_attention_mask=True)
    made = model._get_logits_processor(config, input_ids_seq_length=n_prompt)
    penalties = (setting.get("presence_penalty", 0.0), setting.get("frequency_penalty", 0.0))
    if any(penalties):
        # Not one of transformers' own; it stands with the other penalty.
        after = [type(p).__name__ for p in made]
        at = next((i + 1 for i, n in enumerate(after) if n == "RepetitionPenaltyLogitsProcessor"), None)
        at = at if at is not None else sum(n == "SequenceBiasLogitsProcessor" for n in after)
        made.insert(at, Presence(n_prompt, *penalties))
    return made


PROCESSOR_SETTINGS = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 0.8},
    {"frequency_penalty": -0.6},
    {"presence_penalty": -1.1, "frequency_penalty": 0.4},
    {"logit_bias": [[3, 5.0], [17, -7.5], [38, 100.0]]},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3},
    {"bad_words": [[4], [1, 2], [2, 3, 1], [1, 1]]},
    {"min_tokens": 6},
    {"suppress": [5, 9], "begin_suppress": [1, 2]},
    {"logit_bias": [[1, -2.0], [2, 3.0]], "repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": 0.3,
     "no_repeat_ngram_size": 2, "bad_words": [[7], [3, 2]], "min_tokens": 9, "suppress": [11], "begin_suppress": [0]},
]


def histories():
    """Prompt and written tokens; few distinct ones, so that runs repeat."""
    rng = generator(11, "histories")
    lengths = [(1, 0), (1, 5), (4, 0), (4, 9), (6, 30)]
    return [(rng.integers(0, 4, p).tolist(), rng.integers(0, 4, g).tolist()) for p, g in lengths]


def make_processors(model, tensors):
    rng = generator(12, "logits")
    cases = []
    for setting in PROCESSOR_SETTINGS:
        for prompt, written in histories():
            logits = torch.from_numpy(rng.standard_normal((1, VOCAB)).astype(np.float32) * 3)
            tokens = torch.tensor([prompt + written])
            name = f"processors.{len(cases)}"
            tensors[f"{name}.logits"] = logits[0]
            tensors[f"{name}.processed"] = processors_of(model, len(prompt), setting)(tokens, logits.clone())[0]
            cases.append({"setting": setting, "prompt": prompt, "written": written})
    return cases


CUT_SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"top_p": 0.35, "temperature": 1.4},
    {"min_p": 0.1},
    {"min_p": 0.05, "top_p": 0.9, "top_k": 12, "temperature": 1.2},
    {"top_k": 8, "top_p": 0.7},
    {"repetition_penalty": 1.5, "top_k": 20, "temperature": 0.8},
]


def make_cuts(model, tensors):
    rng = generator(13, "cuts")
    prompt, written = [1, 2, 3], [5, 5, 8, 13]
    cases = []
    for setting in CUT_SETTINGS:
        logits = torch.from_numpy(rng.standard_normal((1, VOCAB)).astype(np.float32))
        if "top_p" not in setting:
            # A tie at the edge of top-k: all stay. Which ones top-p keeps of equals is left to torch's sort.
            logits[0, 30] = logits[0, 31] = float(torch.topk(logits[0], 5).values[-1])
        tokens = torch.tensor([prompt + written])
        scores = processors_of(model, len(prompt), {**setting, "sample": True})(tokens, logits.clone())
        name = f"cuts.{len(cases)}"
        tensors[f"{name}.logits"] = logits[0]
        tensors[f"{name}.probabilities"] = torch.softmax(scores.double(), -1)[0].float()
        assert (tensors[f"{name}.probabilities"] > 0).sum() >= 4
        cases.append({"setting": setting, "prompt": prompt, "written": written})
    return cases


BEAM_SETTINGS = [
    dict(width=4, n=4, length_penalty=1.0, early_stopping=False, max_tokens=24),
    dict(width=4, n=2, length_penalty=1.0, early_stopping=True, max_tokens=24),
    dict(width=4, n=4, length_penalty=1.0, early_stopping="never", max_tokens=24),
    dict(width=3, n=3, length_penalty=0.0, early_stopping="never", max_tokens=30),
    dict(width=3, n=1, length_penalty=-1.5, early_stopping=False, max_tokens=30),
    dict(width=5, n=5, length_penalty=2.0, early_stopping=False, max_tokens=16),
    dict(width=5, n=3, length_penalty=2.0, early_stopping=True, max_tokens=16),
    dict(width=2, n=2, length_penalty=0.6, early_stopping=False, max_tokens=1),
    dict(width=8, n=8, length_penalty=1.0, early_stopping=False, max_tokens=12),
    dict(width=1, n=1, length_penalty=1.0, early_stopping=False, max_tokens=10),
    dict(width=4, n=4, length_penalty=1.0, early_stopping=False, max_tokens=20, no_repeat_ngram_size=2),
    dict(width=4, n=4, length_penalty=1.2, early_stopping=False, max_tokens=20, repetition_penalty=1.4, min_tokens=8),
    dict(width=3, n=3, length_penalty=1.0, early_stopping=True, max_tokens=20, bad_words=[[4], [1, 2]], min_tokens=3),
]


def run_beams(model, prompt, setting):
    made = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        generation_config=GenerationConfig(
            num_beams=setting["width"], num_return_sequences=setting["n"], max_new_tokens=setting["max_tokens"],
            length_penalty=setting["length_penalty"], early_stopping=setting["early_stopping"], do_sample=False,
            no_repeat_ngram_size=setting.get("no_repeat_ngram_size", 0),
            repetition_penalty=setting.get("repetition_penalty", 1.0), bad_words_ids=setting.get("bad_words"),
            min_new_tokens=setting.get("min_tokens"), eos_token_id=END, pad_token_id=0, use_cache=False,
            return_dict_in_generate=True, output_scores=True,
        ))
    if setting["width"] == 1:
        return [{"tokens": trim(made.sequences[0, len(prompt):].tolist()), "score": None}]
    return [
        {"tokens": trim(row[len(prompt):].tolist()), "score": float(score)}
        for row, score in zip(made.sequences, made.sequences_scores)
    ]


def trim(tokens):
    """Up to the first end token, which is kept: what follows is filling."""
    ends = [i for i, t in enumerate(tokens) if t in END]
    return tokens[: ends[0] + 1] if ends else tokens


def make_beams(tensors):
    cases = []
    for i in range(3):
        by_token, by_place = tables(20 + i, spread=1.0 + 0.5 * i)
        # Ends win now and then: too often, and every answer is short; never, and none of the rules is used.
        by_token[:, END] += (1.8, 0.6, -0.5)[i]
        tensors[f"beams.{i}.by_token"], tensors[f"beams.{i}.by_place"] = by_token, by_place
        model = TableModel(by_token, by_place).eval()
        for setting in BEAM_SETTINGS:
            for prompt in ([2], [3, 1, 4]):
                cases.append({"table": i, "prompt": prompt, "setting": setting,
                              "answers": run_beams(model, prompt, setting)})
    lengths = {len(a["tokens"]) for c in cases for a in c["answers"]}
    assert len(lengths) > 8, lengths
    return cases


def make_lookups():
    rng = generator(14, "lookups")
    cases = []
    for i in range(60):
        tokens = rng.integers(0, 2 + i % 6, 3 + i % 23).tolist()
        n_tokens, max_ngram = 1 + i % 5, 1 + i % 4
        max_length = len(tokens) + 1 + i % 7
        end = [1] if i % 3 == 0 else []
        finder = PromptLookupCandidateGenerator(
            eos_token_id=torch.tensor(end) if end else None, num_output_tokens=n_tokens,
            max_matching_ngram_size=max_ngram, max_length=max_length)
        found, _ = finder.get_candidates(torch.tensor([tokens]))
        cases.append({"tokens": tokens, "n_tokens": n_tokens, "max_ngram": max_ngram, "max_length": max_length,
                      "end": end, "draft": found[0, len(tokens):].tolist()})
    assert sum(bool(c["draft"]) for c in cases) > 30
    return cases


@torch.no_grad()
def make():
    folder = ROOT / "logits"
    model = TableModel(*tables(1)).eval()
    tensors = {}
    expected = {
        "vocab": VOCAB, "end_tokens": END,
        "processors": make_processors(model, tensors),
        "cuts": make_cuts(model, tensors),
        "beams": make_beams(tensors),
        "lookups": make_lookups(),
    }
    write_compact(folder / "expected.json", expected)
    write_tensors(folder / "expected.safetensors", tensors)
