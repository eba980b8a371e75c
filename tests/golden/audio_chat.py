"""Golden files of models whose audio stands among the decoder's tokens: Qwen2-Audio, three shapes."""

import copy
import dataclasses
import wave

import numpy as np
import torch
from tokenizers import processors
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

from common import (
    MIN_GAP,
    STEPS,
    byte_bpe,
    case_dir,
    first_good_seed,
    give_beams_their_items,
    randomise,
    round_weights,
    smallest_gap,
    write_compact,
    write_json,
    write_tensors,
)
from llava import text
from qwen import MIN_SIGHT, MIN_VARIED, TEXTS, stable_beams
from whisper import waveform

N_MERGES = 60
VOCAB = 336
RATE = 16000
FRAMES_PER_SECOND = 100
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]


@dataclasses.dataclass(frozen=True)
class Shape:
    case: str
    text: dict
    tower: dict
    seconds: int
    disk: torch.dtype
    seed: int
    published: bool
    prompts: tuple
    more: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Maker:
    """What a family has of its own."""

    tokenizer: callable
    build: callable
    processor: callable
    audio_tensors: callable
    inputs: callable
    placeholder: str
    ends: tuple
    # Further contents of `expected.json`.
    extra: callable = lambda *_: {}
    # True for the id of a token that is text.
    is_plain: callable = lambda token: token < 256 + N_MERGES


def tower(hidden, heads, ffn, layers, seconds, mels):
    return dict(model_type="qwen2_audio_encoder", d_model=hidden, encoder_attention_heads=heads, encoder_ffn_dim=ffn,
                encoder_layers=layers, max_source_positions=seconds * FRAMES_PER_SECOND // 2, num_mel_bins=mels,
                activation_function="gelu", scale_embedding=False)


# Numbers of samples. 5121 ends a frame after the last whole pair of rows; 15840 is a whole row short of a window.
PROMPTS = ((), ("5121",), ("15840",), ("16000",), ("9000", "5121"), ("5121", "9000", "5121"))
SHAPES = [
    Shape("qwen2_audio_odd_heads", text("qwen2", 60, 3, 1, 2, 88), tower(36, 3, 60, 2, 1, 80), 1, torch.float32, 5000, True,
          PROMPTS),
    Shape("qwen2_audio_three_layers", text("qwen2", 48, 4, 4, 2, 72, rope_theta=1e6), tower(48, 4, 72, 3, 1, 128), 1,
          torch.bfloat16, 5100, True, PROMPTS),
    Shape("qwen2_audio_long_window", text("qwen2", 48, 2, 2, 3, 64), tower(32, 2, 52, 2, 2, 128), 2, torch.float16, 5200,
          False, ((), ("5121",), ("32000",), ("23999",), ("16001", "5121"), ("32000", "5121"))),
]


def samples(name):
    """A clip of so many samples, as the file that holds it has them."""
    n = int(name)
    clip = np.concatenate([waveform(n, 1.0) for _ in range(-(-n // 8000))])[:n]
    return np.round(clip * 32767).astype(np.int16)


def write_wav(path, clip):
    path.parent.mkdir(exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(clip.tobytes())


def heard(name):
    return (samples(name) / 32768).astype(np.float32)


def tokenizer():
    tok = byte_bpe(N_MERGES, [(t, True) for t in SPECIALS], qwen=True)
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    return tok


def build(shape, seed, tok):
    i = tok.token_to_id
    config = {
        "architectures": ["Qwen2AudioForConditionalGeneration"], "model_type": "qwen2_audio", "ignore_index": -100,
        "audio_config": shape.tower, "audio_token_index": i("<|AUDIO|>"),
        "text_config": {**shape.text, "torch_dtype": str(shape.disk).removeprefix("torch.")},
        "tie_word_embeddings": False, "transformers_version": "4.41.2",
    }
    read = copy.deepcopy(config)
    del read["text_config"]["torch_dtype"]
    torch.manual_seed(seed)
    model = Qwen2AudioForConditionalGeneration(Qwen2AudioConfig(**read))
    randomise(model, seed, gain=1.4, embed_std=0.6, quiet_rows=range(256 + N_MERGES, VOCAB), fixed=(),
              gains=[("q_proj", 1.8), ("k_proj", 1.8), ("v_proj", 1.5), ("o_proj", 2.0), ("multi_modal_projector", 3.0),
                     ("conv", 2.0)])
    model.model.language_model.norm.weight.data *= 3
    round_weights(model, shape.disk)
    return config, model


def processor(shape, tok):
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    features = WhisperFeatureExtractor(feature_size=shape.tower["num_mel_bins"], chunk_length=shape.seconds,
                                       return_attention_mask=True)
    return Qwen2AudioProcessor(features, fast)


def inputs_of(proc, names, words):
    """What the reference's own processor makes of a conversation."""
    messages = [{"role": "user", "content": [*({"type": "audio"} for _ in names), {"type": "text", "text": words}]}]
    rendered = proc.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    clips = [heard(n) for n in names] or None
    return rendered, proc(text=[rendered], audio=clips, sampling_rate=RATE, return_tensors="pt")


@torch.no_grad()
def audio_tensors(model, proc, name):
    """Input and output of the encoder for one clip, as `forward` computes them: it has no function for the rows alone."""
    inputs = proc(text=[proc.audio_token], audio=[heard(name)], sampling_rate=RATE, return_tensors="pt")
    kept = {}

    def keep(_, arguments):
        kept["embeds"] = arguments[1]["inputs_embeds"]

    hook = model.model.language_model.register_forward_pre_hook(lambda m, a, k: keep(m, (a, k)), with_kwargs=True)
    model(**inputs)
    hook.remove()
    return inputs["input_features"], kept["embeds"][0]


@torch.no_grad()
def run_prompt(model, proc, maker, names, words):
    """Tokens and logits of a prompt, and what changes without its audio."""
    rendered, inputs = maker.inputs(proc, names, words)
    ids = inputs["input_ids"]
    logits = model(**inputs).logits[0]
    sight = np.inf
    if names:
        silent = torch.zeros_like(inputs["input_features"])
        deaf = model(**{**inputs, "input_features": silent}).logits[0]
        sight = float((deaf[-1] - logits[-1]).abs().max())
    made = model.generate(**inputs, do_sample=False, max_new_tokens=STEPS, output_logits=True,
                          return_dict_in_generate=True)
    tokens = made.sequences[0, ids.shape[1]:]
    return dict(names=list(names), rendered=rendered, inputs=inputs, ids=ids[0], logits=logits,
                tokens=tokens, gap=smallest_gap(torch.cat(made.logits)), sight=sight)


def attempt(shape, seed, tok, maker):
    config, model = maker.build(shape, seed, tok)
    give_beams_their_items(model)
    model.generation_config.eos_token_id = [tok.token_to_id(t) for t in maker.ends]
    model.generation_config.pad_token_id = tok.token_to_id(maker.ends[0])
    proc = maker.processor(shape, tok)
    runs, texts = [], list(TEXTS)
    for names in shape.prompts:
        for words in list(texts):
            run = run_prompt(model, proc, maker, names, words)
            varied = len(set(run["tokens"].tolist()))
            specials = [t for t in run["tokens"].tolist() if not maker.is_plain(t)]
            plain = not specials and len(run["tokens"]) == STEPS
            if run["gap"] >= 5 * MIN_GAP and run["sight"] >= MIN_SIGHT and varied >= MIN_VARIED and plain:
                runs.append({**run, "text": words})
                texts.remove(words)
                break
        else:
            return f"no text works for {names}"
    return seed, config, model, proc, runs


def write_tokenizer(tok, proc, folder, maker):
    if hasattr(tok, "write"):
        tok.write(folder)
        return
    i = tok.token_to_id
    specials = [t.content for t in tok.get_added_tokens_decoder().values()]
    tok.save(str(folder / "tokenizer.json"), pretty=False)
    write_json(folder / "tokenizer_config.json", {
        "eos_token": maker.ends[-1], "pad_token": maker.ends[0], "model_max_length": 2048,
        "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": proc.chat_template,
        "added_tokens_decoder": {str(i(t)): {"content": t, "lstrip": False, "normalized": False, "rstrip": False,
                                             "single_word": False, "special": True} for t in specials},
    })


def write_model(shape, tok, config, model, proc, folder, maker):
    i = tok.token_to_id
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {
        "eos_token_id": [i(t) for t in maker.ends], "pad_token_id": i(maker.ends[0]), "max_new_tokens": STEPS,
        "transformers_version": "4.41.2"})
    settings = proc.feature_extractor.to_dict()
    settings.pop("mel_filters", None)
    settings.pop("processor_class", None)
    write_json(folder / "preprocessor_config.json", settings)
    write_tokenizer(tok, proc, folder, maker)
    state = {k: v.to(shape.disk) for k, v in model.state_dict().items()}
    if shape.published:
        state = {published_name(k): v for k, v in state.items()}
    write_tensors(folder / "model.safetensors", state)


def published_name(name):
    """The names in the published checkpoints, from those of the modules in memory."""
    if name == "lm_head.weight":
        return "language_model.lm_head.weight"
    if name.startswith("model.language_model."):
        return "language_model.model." + name.removeprefix("model.language_model.")
    return name.removeprefix("model.")


@torch.no_grad()
def write_matrix(folder, tok, model, runs, audios, maker):
    ends, pad = [tok.token_to_id(t) for t in maker.ends], tok.token_to_id(maker.placeholder)
    exact, names, requests = copy.deepcopy(model).double(), list(audios), []
    for k, r in enumerate(runs):
        ids = r["ids"].tolist()
        starts = [i for i, t in enumerate(ids) if t == pad and ids[i - 1] != pad]
        requests.append({
            "rows": None, "prompt": ids, "end_tokens": ends,
            "spans": [{"rows": names.index(n), "first_token": at} for n, at in zip(r["names"], starts, strict=True)],
            "positions": f"prompt.{k}.position_ids", "next_position": len(ids),
            "max_new_tokens": 32, "greedy": r["tokens"][:32].tolist(),
            "beam4": stable_beams(model, exact, r, ends), "next_logits": f"prompt.{k}.logits_last",
        })
    write_compact(folder / "matrix.json", {"rows": [f"audio.{n}.embeds" for n in names], "requests": requests})


@torch.no_grad()
def make_case(shape, maker):
    print(shape.case, flush=True)
    tok = maker.tokenizer()
    seed, config, model, proc, runs = first_good_seed(
        lambda s: attempt(shape, s, tok, maker), range(shape.seed, shape.seed + 60))
    out = case_dir(shape.case)
    write_model(shape, tok, config, model, proc, out / "model", maker)
    tensors, audios, prompts = {}, {}, []
    for name in sorted({n for r in runs for n in r["names"]}):
        write_wav(out / "audios" / f"{name}.wav", samples(name))
        mel, embeds = maker.audio_tensors(model, proc, name)
        tensors |= {f"audio.{name}.input_features": mel, f"audio.{name}.embeds": embeds}
        audios[name] = {"file": f"audios/{name}.wav", "n_tokens": len(embeds)}
    wide = max(range(len(runs)), key=lambda k: len(runs[k]["names"]))
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    for k, r in enumerate(runs):
        tensors[f"prompt.{k}.input_ids"] = r["ids"]
        tensors[f"prompt.{k}.position_ids"] = torch.arange(len(r["ids"])).expand(3, -1)
        tensors[f"prompt.{k}.logits_last"] = r["logits"][-1]
        prompts.append({
            "text": r["text"], "audios": r["names"], "rendered": r["rendered"], "smallest_top2_gap": r["gap"],
            "input_ids": r["ids"].tolist(), "greedy_tokens": r["tokens"].tolist(),
            "greedy_text": tok.decode(r["tokens"].tolist(), skip_special_tokens=True),
        })
    n = len(runs[wide]["ids"])
    rows = torch.tensor(sorted({*range(0, n, 6), n - 1}))
    tensors[f"prompt.{wide}.logit_rows"] = rows
    tensors[f"prompt.{wide}.logits"] = runs[wide]["logits"][rows]
    halved = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in runs[wide]["inputs"].items()}
    tensors[f"prompt.{wide}.logits_bf16"] = narrow(**halved).logits[0].float()[rows]
    tensors["greedy_tokens"] = torch.stack([r["tokens"] for r in runs])
    write_matrix(out, tok, model, runs, audios, maker)
    write_tensors(out / "expected.safetensors", tensors)
    write_compact(out / "expected.json", {"seed": seed, "many_rows_prompt": wide, "audios": audios, "prompts": prompts,
                                          **maker.extra(model, proc, tok, runs)})
    again = type(model).from_pretrained(out / "model", dtype=torch.float32)
    assert (again(**runs[wide]["inputs"]).logits[0] - runs[wide]["logits"]).abs().max() < 1e-5


def make_qwen2_audio():
    for shape in SHAPES:
        make_case(shape, Maker(tokenizer, build, processor, audio_tensors, inputs_of, "<|AUDIO|>",
                               ("<|endoftext|>", "<|im_end|>")))
