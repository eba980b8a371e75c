"""Golden files of Qwen3-ASR: three shapes, the last in the names and keys of its authors' checkpoints."""

import copy
import itertools
import json

import torch
from safetensors.torch import load_file
from tokenizers import processors
from transformers import PreTrainedTokenizerFast, Qwen3ASRConfig, Qwen3ASRForConditionalGeneration
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor
from transformers.models.qwen3_asr.processing_qwen3_asr import Qwen3ASRProcessor

from audio_chat import N_MERGES, RATE, VOCAB, Maker, Shape, heard, make_case
from common import ROOT, STEPS, byte_bpe, randomise, round_weights, write_compact, write_json, write_tensors
from llava import text

CHUNK = 100
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"]
# The published one is not special: it stays in the text.
MARK = "<asr_text>"
# Written for these files, in the layout of the published models: a system part even if it is empty.
TEMPLATE = (
    "{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\n<|im_end|>\\n' }}{% endif -%}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{ message.content }}{% else %}{%- for part in message.content %}"
    "{%- if part.type == 'audio' %}{{ '<|audio_start|><|audio_pad|><|audio_end|>' }}"
    "{%- elif part.type == 'text' %}{{ part.text }}{% endif %}{%- endfor %}{% endif %}{{ '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"
)


def tower(hidden, heads, ffn, layers, channels, mels, window, out):
    return dict(model_type="qwen3_asr_encoder", d_model=hidden, encoder_attention_heads=heads, encoder_ffn_dim=ffn,
                encoder_layers=layers, num_mel_bins=mels, n_window=CHUNK // 2, n_window_infer=window, output_dim=out,
                downsample_hidden_size=channels, max_position_embeddings=13, activation_function="gelu",
                scale_embedding=False)


# Numbers of samples: 5121 is filled up to half a second, 16000 is a whole chunk, 24160 ends inside its second, 40000 is more
# than a window of two, 33600 a frame more than two chunks with the smallest rest.
PROMPTS = ((), ("5121",), ("16000",), ("24160",), ("40000",), ("40000", "5121"))
SHAPES = [
    Shape("qwen3_asr_odd_heads", text("qwen3", 60, 3, 1, 2, 88, head_dim=20), tower(36, 3, 60, 2, 6, 80, 200, 60), 30,
          torch.float32, 6000, False, PROMPTS),
    Shape("qwen3_asr_three_layers", text("qwen3", 48, 4, 2, 3, 72, head_dim=16, rope_theta=1e6),
          tower(48, 4, 72, 3, 8, 128, 400, 48), 30, torch.bfloat16, 6100, False,
          ((), ("5121",), ("15999",), ("24160",), ("72160",), ("72160", "16000"))),
    Shape("qwen3_asr_original", text("qwen3", 48, 2, 2, 2, 64, head_dim=24, rope_theta=1e6),
          tower(32, 2, 52, 2, 7, 128, 100, 48), 30,
          torch.float16, 6200, False, ((), ("8000",), ("16000",), ("33600",), ("24160", "8000"), ("33600", "33600"))),
]


def tokenizer():
    tok = byte_bpe(N_MERGES, [*((t, True) for t in SPECIALS), (MARK, False)], qwen=True)
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    return tok


def build(shape, seed, tok):
    i = tok.token_to_id
    words = {**shape.text, "tie_word_embeddings": False}
    config = {
        "architectures": ["Qwen3ASRForConditionalGeneration"], "model_type": "qwen3_asr", "audio_config": shape.tower,
        "text_config": words, "audio_token_id": i("<|audio_pad|>"), "tie_word_embeddings": False,
        "transformers_version": "5.13.0",
    }
    torch.manual_seed(seed)
    model = Qwen3ASRForConditionalGeneration(Qwen3ASRConfig(**copy.deepcopy(config)))
    randomise(model, seed, gain=1.4, embed_std=0.6, quiet_rows=range(256 + N_MERGES, VOCAB), fixed=(),
              gains=[("q_proj", 1.8), ("k_proj", 1.8), ("v_proj", 1.5), ("o_proj", 2.0), ("multi_modal_projector", 3.0),
                     ("conv", 2.0)])
    model.model.language_model.norm.weight.data *= 3
    round_weights(model, shape.disk)
    return config, model


def processor(shape, tok):
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tok, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        extra_special_tokens={"audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>",
                              "audio_eos_token": "<|audio_end|>"})
    features = Qwen3ASRFeatureExtractor(feature_size=shape.tower["num_mel_bins"])
    return Qwen3ASRProcessor(features, fast, chat_template=TEMPLATE)


def features_of(proc, names):
    """Each audio by itself: in a batch the last chunk of a shorter one is filled up with silence instead of zeros."""
    kept = {"input_features": [], "input_features_mask": []}
    texts = []
    for name in names:
        inputs, text = proc._process_audio([heard(name)], sampling_rate=RATE, padding=True, truncation=False,
                                           return_attention_mask=True, return_tensors="pt")
        texts += text
        for key, values in kept.items():
            values.append(inputs[key][0])
    longest = max(mask.shape[0] for mask in kept["input_features_mask"])
    filled = {k: [torch.nn.functional.pad(v, (0, longest - v.shape[-1])) for v in values] for k, values in kept.items()}
    return {k: torch.stack(values) for k, values in filled.items()}, texts


def inputs_of(proc, names, words):
    messages = [{"role": "user", "content": [*({"type": "audio"} for _ in names), {"type": "text", "text": words}]}]
    rendered = proc.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs, texts = features_of(proc, names) if names else ({}, [])
    parts = rendered.split(proc.audio_token)
    written = "".join(itertools.chain.from_iterable(zip(parts, [*texts, ""], strict=True)))
    inputs["input_ids"] = proc.tokenizer(written, return_tensors="pt")["input_ids"]
    if len(names) == 1:
        # The processor takes one audio for each text.
        own = proc(text=[rendered], audio=[heard(names[0])], sampling_rate=RATE)
        assert all(torch.equal(own[k], v) for k, v in inputs.items())
    return rendered, inputs


@torch.no_grad()
def audio_tensors(model, proc, name):
    inputs, _ = features_of(proc, [name])
    mel = inputs["input_features"][0]
    chunks = mel.view(mel.shape[0], -1, CHUNK).permute(1, 0, 2).contiguous()
    return chunks, model.get_audio_features(**inputs, return_dict=True).pooler_output


@torch.no_grad()
def extra(model, proc, tok, runs):
    """Transcriptions: with a language and without, with words to expect."""
    name = next(r["names"][0] for r in runs if r["names"])
    transcriptions = []
    for language, prompt in ((None, None), ("en", None), ("yue", "Names: Ada.")):
        inputs = proc.apply_transcription_request([heard(name)], language=language, prompt=prompt)
        ids = inputs["input_ids"][0].tolist()
        made = model.generate(**inputs, do_sample=False, max_new_tokens=STEPS)[0, len(ids):].tolist()
        transcriptions.append({"audio": name, "language": language, "prompt": prompt, "input_ids": ids, "greedy_tokens": made,
                               "greedy_text": tok.decode(made, skip_special_tokens=True)})
    return {"transcriptions": transcriptions}


def original_name(name):
    """The names in the checkpoints of the model's authors."""
    if name == "lm_head.weight":
        return "thinker.lm_head.weight"
    for new, old in (("model.language_model.", "thinker.model."), ("model.audio_tower.", "thinker.audio_tower."),
                     ("model.multi_modal_projector.linear_", "thinker.audio_tower.proj")):
        if name.startswith(new):
            return old + name.removeprefix(new)
    raise ValueError(name)


def original_config(config):
    inner = {k: v for k, v in config.items() if k in ("audio_config", "text_config", "audio_token_id")}
    inner["audio_config"] = {**inner["audio_config"], "model_type": "qwen3_asr_audio_encoder"}
    # Audio has positions of text, so the parts of a position are equal.
    mrope = {"mrope_section": [4, 4, 4], "mrope_interleaved": True, "rope_type": "default"}
    inner["text_config"] = {**inner["text_config"], "model_type": "qwen3_asr_text", "rope_scaling": mrope}
    return {"architectures": config["architectures"], "model_type": "qwen3_asr", "support_languages": ["Chinese", "English"],
            "thinker_config": inner, "transformers_version": "4.57.6"}


def as_published_first(folder):
    """Rewrites a model directory in the layout of the authors' checkpoints, which the class here does not read."""
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", original_config(config))
    state = load_file(folder / "model.safetensors")
    write_tensors(folder / "model.safetensors", {original_name(k): v for k, v in state.items()})
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    for key in ("min_length", "n_window"):
        del settings[key]
    write_json(folder / "preprocessor_config.json", {**settings, "feature_extractor_type": "WhisperFeatureExtractor"})


def make_names():
    """Names and shapes of the 1.7B model in both layouts: its sizes are the class's defaults."""
    config = Qwen3ASRConfig(audio_config=dict(model_type="qwen3_asr_encoder", output_dim=2048))
    with torch.device("meta"):
        state = Qwen3ASRForConditionalGeneration(config).state_dict()
    shapes = {k: list(v.shape) for k, v in state.items() if k != "lm_head.weight"}
    write_compact(ROOT / "names" / "qwen3-asr-1.7b-hf.json", dict(sorted(shapes.items())))
    original = {original_name(k): v for k, v in shapes.items()}
    write_compact(ROOT / "names" / "qwen3-asr-1.7b.json", dict(sorted(original.items())))
    print(" ", len(shapes), sum(torch.Size(s).numel() for s in shapes.values()))


def make():
    for shape in SHAPES:
        make_case(shape, Maker(tokenizer, build, processor, audio_tensors, inputs_of, "<|audio_pad|>",
                               ("<|endoftext|>", "<|im_end|>"), extra))
    as_published_first(ROOT / SHAPES[-1].case / "model")
