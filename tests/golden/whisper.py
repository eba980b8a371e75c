"""Golden files of Whisper: three shapes, with logit rules in the multilingual one."""

import copy
import dataclasses

import numpy as np
import torch
from tokenizers import processors
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from common import (
    MIN_GAP,
    STEPS,
    byte_bpe,
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

N_INPUTS = 8
MIN_VARIED = 16


@dataclasses.dataclass(frozen=True)
class Shape:
    case: str
    multilingual: bool
    n_mels: int
    d_model: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    encoder_ffn: int
    decoder_ffn: int
    chunk_seconds: int
    languages: tuple
    no_speech: str
    disk: torch.dtype
    n_merges: int
    seed: int
    odd_positions: bool = False
    keep_waveform: bool = True


SHAPES = [
    Shape("whisper_en_odd_heads", False, 80, 36, 3, 1, 1, 100, 84, 1, ("en", "zh"), "<|nocaptions|>",
          torch.float32, 80, 101),
    Shape("whisper_multilingual", True, 128, 64, 4, 2, 2, 128, 96, 1, ("en", "zh", "de", "yue"), "<|nospeech|>",
          torch.float16, 90, 268),
    Shape("whisper_deep_f16", True, 80, 40, 5, 3, 2, 72, 152, 3, ("en", "fr", "es"), "<|nospeech|>",
          torch.float16, 50, 350, odd_positions=True, keep_waveform=False),
]


def special_tokens(shape):
    """The order of the published vocabularies, with fewer languages and only the chunk's timestamps."""
    names = ["<|endoftext|>", "<|startoftranscript|>"]
    names += [f"<|{code}|>" for code in shape.languages]
    names += ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", shape.no_speech, "<|notimestamps|>"]
    stamps = [f"<|{i * 0.02:.2f}|>" for i in range(shape.chunk_seconds * 50 + 1)]
    return [(n, True) for n in names] + [(n, False) for n in stamps]


def tokenizer(shape):
    tok = byte_bpe(shape.n_merges, special_tokens(shape), qwen=False)
    start, end = "<|startoftranscript|>", "<|endoftext|>"
    tok.post_processor = processors.TemplateProcessing(
        single=f"{start} <|notimestamps|> $A {end}",
        pair=f"{start} <|notimestamps|> $A $B {end}",
        special_tokens=[(t, tok.token_to_id(t)) for t in (start, "<|notimestamps|>", end)],
    )
    return tok


def model_config(shape, tok):
    end = tok.token_to_id("<|endoftext|>")
    return WhisperConfig(
        vocab_size=tok.get_vocab_size(),
        num_mel_bins=shape.n_mels,
        d_model=shape.d_model,
        encoder_layers=shape.encoder_layers,
        decoder_layers=shape.decoder_layers,
        encoder_attention_heads=shape.heads,
        decoder_attention_heads=shape.heads,
        encoder_ffn_dim=shape.encoder_ffn,
        decoder_ffn_dim=shape.decoder_ffn,
        max_source_positions=shape.chunk_seconds * 50,
        max_target_positions=80,
        decoder_start_token_id=tok.token_to_id("<|startoftranscript|>"),
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        begin_suppress_tokens=[tok.token_to_id("Ġ"), end],
        suppress_tokens=None,
        architectures=["WhisperForConditionalGeneration"],
    )


def generation_config(shape, tok):
    """The keys of the published files, as they were published for English-only and multilingual models."""
    i = tok.token_to_id
    end = i("<|endoftext|>")
    noise = [i(c) for c in ['"', "#", "(", ")", "*", "+", "/", ":", ";", "<", "=", ">", "@", "["]]
    never = ["<|startoftranscript|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", shape.no_speech]
    config = {
        "alignment_heads": [[shape.decoder_layers - 1, 0], [shape.decoder_layers - 1, shape.heads - 1]],
        "begin_suppress_tokens": [i("Ġ"), end],
        "bos_token_id": end,
        "decoder_start_token_id": i("<|startoftranscript|>"),
        "eos_token_id": end,
        "forced_decoder_ids": [[1, i("<|notimestamps|>")]],
        "is_multilingual": shape.multilingual,
        "max_initial_timestamp_index": 10,
        "max_length": 80,
        "no_timestamps_token_id": i("<|notimestamps|>"),
        "pad_token_id": end,
        "prev_sot_token_id": i("<|startofprev|>"),
        "return_timestamps": False,
        "suppress_tokens": sorted(noise + [i(t) for t in never]),
        "transformers_version": "4.31.0.dev0",
    }
    if shape.multilingual:
        config["forced_decoder_ids"] = [[1, None], [2, i("<|transcribe|>")]]
        config["lang_to_id"] = {f"<|{c}|>": i(f"<|{c}|>") for c in shape.languages}
        config["task_to_id"] = {"transcribe": i("<|transcribe|>"), "translate": i("<|translate|>")}
    return config


def waveform(seed, seconds):
    """Between half of and all of `seconds` of harmonics that glide, with some noise; peak below one."""
    rng = generator(seed, "waveform")
    n = int(16000 * seconds * rng.uniform(0.5, 1.0))
    t = np.arange(n) / 16000
    pitch = rng.uniform(90, 900) * np.exp(rng.uniform(-0.7, 0.7) * t / seconds)
    phase = 2 * np.pi * np.cumsum(pitch) / 16000
    x = sum(rng.uniform(0.1, 1) / k * np.sin(k * phase + rng.uniform(0, 6)) for k in range(1, 8))
    x = x * (0.3 + np.abs(np.sin(np.pi * rng.uniform(1, 5) * t))) + 0.05 * rng.standard_normal(n)
    return (0.7 * x / np.abs(x).max()).astype(np.float32)


def prompts(shape, tok):
    i = tok.token_to_id
    start = [i("<|startoftranscript|>")]
    if shape.multilingual:
        start += [i(f"<|{shape.languages[0]}|>"), i("<|transcribe|>")]
    return start + [i("<|notimestamps|>")], start


@torch.no_grad()
def greedy(model, features, prompt, rules=None, stop=None):
    """Argmax decoding with a cache, one row per input. Returns tokens and the rows they were taken from."""
    n = len(features)
    encoded = model.model.encoder(features)
    ids = torch.tensor([prompt] * n)
    step, past, rows = ids, None, []
    for _ in range(STEPS):
        out = model(encoder_outputs=encoded, decoder_input_ids=step, past_key_values=past, use_cache=True)
        past = out.past_key_values
        row = out.logits[:, -1].float()
        if rules is not None:
            row = rules(ids, row)
        rows.append(row)
        step = row.argmax(-1, keepdim=True)
        ids = torch.cat([ids, step], dim=-1)
        if stop is not None and bool((step == stop).all()):
            break
    return ids[:, len(prompt):], torch.stack(rows, 1)


def logit_rules(gen, begin, with_timestamps):
    """The chain of `WhisperGenerationMixin`: begin_suppress, then suppress, then the timestamp rule."""
    chain = [
        SuppressTokensAtBeginLogitsProcessor(gen["begin_suppress_tokens"], begin),
        SuppressTokensLogitsProcessor(gen["suppress_tokens"]),
    ]
    if with_timestamps:
        chain.append(WhisperTimeStampLogitsProcessor(GenerationConfig(**gen), begin_index=begin))

    def apply(ids, row):
        for rule in chain:
            row = rule(ids, row)
        return row

    return apply


def timestamp_rule_table(shape, tok, gen, begin_prompt):
    """Random logits and, for prefixes that touch each branch of the rule, which ids become -inf."""
    ts = tok.token_to_id("<|notimestamps|>") + 1
    last = tok.get_vocab_size() - 1
    text = [tok.token_to_id(c) for c in "abcde"]
    tails = [
        [], [text[0]], [ts], [ts, text[0]], [ts + 3, text[0], text[1]], [ts, text[0], ts + 7],
        [ts, text[0], ts + 7, ts + 7], [ts, text[0], ts + 7, ts + 7, text[2]],
        [ts, text[0], ts + 7, ts + 7, text[2], ts + 20], [ts, text[0], ts + 7, ts + 9], [ts + 2, ts + 2],
        [text[0], ts + 5], [text[0], ts + 5, text[1], text[2]], [ts, text[0], last], [ts, text[0], last, last],
        [gen["eos_token_id"]], [ts, gen["eos_token_id"]],
    ]
    tensors, rows = {}, []
    vocab = tok.get_vocab_size()
    for boost in (0.0, -6.0):
        for tail in tails:
            logits = generator(len(rows), shape.case + "rule").standard_normal(vocab).astype(np.float32) * 2
            logits[ts:] += boost
            rows.append((begin_prompt + tail, torch.from_numpy(logits)))
    tensors["rule_logits"] = torch.stack([r[1] for r in rows])
    begin = len(begin_prompt)
    only, uncapped, full, plain = [], [], [], []
    free = {k: v for k, v in gen.items() if k != "max_initial_timestamp_index"}
    for prefix, logits in rows:
        ids, row = torch.tensor([prefix]), logits[None]
        only.append(WhisperTimeStampLogitsProcessor(GenerationConfig(**gen), begin_index=begin)(ids, row.clone()))
        uncapped.append(WhisperTimeStampLogitsProcessor(GenerationConfig(**free), begin_index=begin)(ids, row.clone()))
        full.append(logit_rules(gen, begin, True)(ids, row.clone()))
        plain.append(logit_rules(gen, begin, False)(ids, row.clone()))
    for name, done in [("timestamps", only), ("timestamps_no_initial_cap", uncapped), ("all", full), ("suppress", plain)]:
        tensors[f"rule_mask.{name}"] = torch.isinf(torch.cat(done)).to(torch.uint8)
    return tensors, {"begin_index": begin, "prefixes": [r[0] for r in rows]}


def attempt(shape, seed):
    tok = tokenizer(shape)
    config, gen = model_config(shape, tok), generation_config(shape, tok)
    specials = [tok.token_to_id(t) for t, is_special in special_tokens(shape) if is_special]
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(config)
    randomise(model, seed, gain=1.3, embed_std=0.4, pos_std=1.5, quiet_rows=specials,
              gains=[("conv", 1.5), ("encoder_attn", 2.5), ("encoder_attn.q_proj", 1.5)])
    # A wide last norm spreads the logits, so that the two best are not within rounding of each other.
    model.model.decoder.layer_norm.weight.data *= 3
    if shape.odd_positions:
        table = model.model.encoder.embed_positions.weight
        noise = generator(seed, "positions").standard_normal(table.shape).astype(np.float32)
        table.data += 0.2 * torch.from_numpy(noise)
    round_weights(model, shape.disk)

    extractor = WhisperFeatureExtractor(feature_size=shape.n_mels, chunk_length=shape.chunk_seconds)
    plain, timed = prompts(shape, tok)
    end = gen["eos_token_id"]
    waves = [waveform(1000 * seed + k, shape.chunk_seconds) for k in range(3 * N_INPUTS)]
    features = torch.cat([extractor(w, sampling_rate=16000, return_tensors="pt").input_features for w in waves])
    batch = torch.clamp(torch.round((features + 2) * 64), 0, 255) / 64 - 2
    guess, _ = greedy(model, batch, plain)
    likely = [k for k, row in enumerate(guess.tolist()) if len(set(row)) >= MIN_VARIED and end not in row]
    if len(likely) < N_INPUTS:
        return f"only {len(likely)} inputs give varied tokens"
    kept = []
    for k in likely:
        one = batch[k:k + 1]
        tokens, rows = greedy(model, one, plain)
        ruled, ruled_rows = greedy(model, one, plain, logit_rules(gen, len(plain), False))
        stamped, stamped_rows = greedy(model, one, timed, logit_rules(gen, len(timed), True), end)
        gap = min(smallest_gap(r) for r in (rows, ruled_rows, stamped_rows))
        if gap < MIN_GAP or (ruled == end).any() or any(torch.equal(tokens, other["tokens"]) for other in kept):
            continue
        kept.append(dict(wave=waves[k], features=features[k:k + 1], batch=one, tokens=tokens, ruled=ruled,
                         stamped=stamped[0].tolist(), gap=gap))
    if len(kept) < N_INPUTS:
        return f"only {len(kept)} inputs are well separated"
    kept = kept[:N_INPUTS]
    joined = {k: torch.cat([x[k] for x in kept]) for k in ("features", "batch", "tokens", "ruled")}
    together, _ = greedy(model, joined["batch"], plain)
    if not torch.equal(joined["tokens"], together):
        return "batched and alone differ"
    return dict(tok=tok, config=config, gen=gen, model=model, extractor=extractor, plain=plain, timed=timed,
                waves=[x["wave"] for x in kept], timed_runs=[x["stamped"] for x in kept],
                gap=min(x["gap"] for x in kept), seed=seed, **joined)


@torch.no_grad()
def check_against_generate(shape, run):
    """The loops above must say what `generate` says, or the golden lists would be ours, not the reference's."""
    model = copy.deepcopy(run["model"])
    gen = {k: v for k, v in run["gen"].items() if k not in ("forced_decoder_ids", "max_length", "transformers_version")}
    model.generation_config = GenerationConfig(**gen)
    kind = {"language": shape.languages[0], "task": "transcribe"} if shape.multilingual else {}
    for k in (0, 5):
        out = model.generate(run["batch"][k:k + 1], max_new_tokens=STEPS, return_timestamps=False,
                             force_unique_generate_call=True, **kind)
        out = out[0].tolist()
        want = run["ruled"][k].tolist()
        assert out[-len(want):] == want, (out, want)
    for k, want in enumerate(run["timed_runs"]):
        out = model.generate(run["batch"][k:k + 1], max_new_tokens=STEPS, return_timestamps=True,
                             force_unique_generate_call=True, **kind)
        assert out[0].tolist() == run["timed"] + want, (out, want)


@torch.no_grad()
def make_case(shape):
    print(shape.case, flush=True)
    run = first_good_seed(lambda s: attempt(shape, s), range(shape.seed, shape.seed + 90))
    out = case_dir(shape.case)
    model, tok, gen = run["model"], run["tok"], run["gen"]
    check_against_generate(shape, run)

    folder = out / "model"
    config = run["config"].to_dict()
    config.update(torch_dtype=str(shape.disk).removeprefix("torch."), transformers_version="4.31.0.dev0")
    config.pop("dtype", None)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", gen)
    extractor = run["extractor"].to_dict()
    extractor.pop("mel_filters", None)
    write_json(folder / "preprocessor_config.json", extractor)
    tok.save(str(folder / "tokenizer.json"), pretty=False)
    write_json(folder / "tokenizer_config.json", {
        "add_prefix_space": False, "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "errors": "replace",
        "model_max_length": 80, "processor_class": "WhisperProcessor", "tokenizer_class": "WhisperTokenizer",
    })
    state = {k: v.to(shape.disk) for k, v in model.state_dict().items() if k != "proj_out.weight"}
    write_tensors(folder / "model.safetensors", state)

    words = tok.encode(" the fox is near", add_special_tokens=False).ids
    forced = (run["plain"] + words + [tok.token_to_id(c) for c in "abcdefgh"])[:12]
    ids = torch.tensor([forced])
    features = run["features"][:1] if shape.keep_waveform else run["batch"][:1]
    encoded = model.model.encoder(features).last_hidden_state
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    tensors = {
        "encoder_last_hidden_state": encoded[0],
        "decoder_input_ids": ids[0],
        "logits": model(encoder_outputs=(encoded,), decoder_input_ids=ids).logits[0],
        "logits_bf16": narrow(features.bfloat16(), decoder_input_ids=ids).logits[0].float(),
        "batch_input_features_u8": ((run["batch"] + 2) * 64).to(torch.uint8),
        "greedy_tokens": run["tokens"],
        "greedy_tokens_suppressed": run["ruled"],
    }
    if shape.keep_waveform:
        tensors |= {"waveform": run["waves"][0], "input_features": features[0]}
    meta = {
        "seed": run["seed"],
        "smallest_top2_gap": run["gap"],
        "prompt": run["plain"],
        "prompt_with_timestamps": run["timed"],
        "decoder_input_ids": forced,
        "greedy_tokens": run["tokens"].tolist(),
        "greedy_tokens_suppressed": run["ruled"].tolist(),
        "greedy_tokens_timestamps": run["timed_runs"],
        "suppress_tokens": gen["suppress_tokens"],
        "begin_suppress_tokens": gen["begin_suppress_tokens"],
        "timestamp_begin": gen["no_timestamps_token_id"] + 1,
    }
    if shape.case == "whisper_multilingual":
        table, rule = timestamp_rule_table(shape, tok, gen, run["timed"])
        tensors.update(table)
        meta["rule"] = rule
    sample = "The quick fox, 2024: Füchse 你好 <|notimestamps|> end"
    meta["tokenize"] = {"text": sample, "ids": tok.encode(sample, add_special_tokens=False).ids}
    meta["tokenize"]["decoded"] = tok.decode(meta["tokenize"]["ids"], skip_special_tokens=True)
    write_tensors(out / "expected.safetensors", tensors)
    write_compact(out / "expected.json", meta)
    again = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(again(encoder_outputs=(encoded,), decoder_input_ids=ids).logits[0], tensors["logits"])


def make():
    for shape in SHAPES:
        make_case(shape)
