"""Writes the model directories of this folder: configurations and tokenizers, no weights.

    python benches/models/make.py                   # those of this folder
    python benches/models/make.py --large DIR       # Whisper-large-v3 and Qwen2.5-VL-7B, into another folder

Nothing here is taken from a published model but its shapes, which are in each model's config. The tokenizers are made:
bytes, a few hundred English words, and words of syllables up to the size of the vocabulary, each of them one token, so
that every id that random weights choose is text. Needs nothing but Python, and writes the same bytes every time.
"""

import itertools
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent

ENGLISH = """the of and to in a is that it for was on are as with his they at be this from have or by one had not but
what all were when we there can an your which their said if do will each about how up out them then she many some so
these would other into has more her two like him see time could no make than first been its who now people my made over
did down only way find use may water long little very after words called just where most know get through back much
before go good new write our used me man too any day same right look think also around another came come work three word
must because does part even place well such here take why things help put years different away again off went old number
great tell men say small every found still between name should home big give air line set own under read last never us
left end along while might next sound below saw something thought both few those always looked show large often together
asked house world going want school important until form food keep children feet land side without boy once animals life
enough took sometimes four head above kind began almost live page got earth need far hand high year mother light parts
country father let night following picture image describe count red green blue circle square""".split()

IMAGE_MEAN = [0.48145466, 0.4578275, 0.40821073]
IMAGE_STD = [0.26862954, 0.26130258, 0.27577711]

CHAT = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_letters():
    """The letter that a byte is written as, as in byte-level BPE."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return [chr(b) for b in plain] + [chr(256 + i) for i in range(len(rest))]


def words(n):
    """`n` tokens: bytes first, then words behind a space, then the English ones without."""
    syllables = [c + v for c, v in itertools.product("bcdfghklmnprstvz", "aeiou")]
    made = ("".join(s) for k in (2, 3) for s in itertools.product(syllables, repeat=k))
    spaced = ("Ġ" + word for word in itertools.chain(ENGLISH, [w.capitalize() for w in ENGLISH]))
    plain = (word for word in ENGLISH if len(word) > 1)
    tokens = dict.fromkeys(itertools.chain(byte_letters(), spaced, plain))
    for word in made:
        if len(tokens) >= n:
            break
        tokens.setdefault("Ġ" + word)
    return list(tokens)[:n]


def tokenizer(vocab, specials, plain_specials=()):
    """A byte-level BPE without merges: a word of the vocabulary is one token, any other is its bytes."""
    added = [(i, content, True) for i, content in specials] + [(i, content, False) for i, content in plain_specials]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": special}
            for i, content, special in sorted(added)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
            "vocab": {token: i for i, token in enumerate(vocab)}, "merges": [],
        },
    }


def write(directory, files):
    directory.mkdir(exist_ok=True, parents=True)
    for name, content in files.items():
        indent = None if name == "tokenizer.json" else 2
        text = content if isinstance(content, str) else json.dumps(content, indent=indent, ensure_ascii=False) + "\n"
        (directory / name).write_text(text)


def qwen_ids(vocab):
    """The special tokens at the end of a vocabulary."""
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
             "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>",
             "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
    return {content: vocab - len(names) + i for i, content in enumerate(names)}


def qwen2_vl(name, text, vision, vocab, pixels):
    """A Qwen2-VL: `text` and `vision` are (hidden, layers, heads, feed-forward or ratio), text has KV heads too."""
    ids = qwen_ids(vocab)
    hidden, layers, heads, kv_heads, inner = text
    quarter = hidden // heads // 8
    config = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "dtype": "bfloat16",
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen2_vl_text", "hidden_act": "silu", "hidden_size": hidden, "intermediate_size": inner,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "max_position_embeddings": 32768, "max_window_layers": layers, "rms_norm_eps": 1e-06,
            "rope_parameters": {"mrope_section": [quarter, (3 * quarter) // 2, (3 * quarter) // 2],
                                "rope_theta": 1000000.0, "rope_type": "default"},
            "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": True, "vocab_size": vocab,
        },
        "vision_config": {
            "model_type": "qwen2_vl_vision", "depth": vision[1], "embed_dim": vision[0], "hidden_size": hidden,
            "num_heads": vision[2], "mlp_ratio": vision[3], "hidden_act": "quick_gelu", "in_channels": 3,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
    }
    write_qwen(HERE / name, config, ids, pixels)


def qwen2_5_vl_7b(directory):
    """Qwen/Qwen2.5-VL-7B-Instruct, size by size; special tokens stand at the end of the vocabulary."""
    vocab = 152064
    ids = qwen_ids(vocab)
    write_qwen(directory, {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "torch_dtype": "bfloat16",
        "bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"],
        "image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"], "vision_end_token_id": ids["<|vision_end|>"],
        "vision_token_id": ids["<|vision_pad|>"], "tie_word_embeddings": False, "hidden_act": "silu",
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "max_position_embeddings": 128000, "max_window_layers": 28, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "sliding_window": 32768, "use_sliding_window": False, "vocab_size": vocab,
        "vision_config": {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
            "hidden_act": "silu", "in_chans": 3, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
            "temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
        },
    }, ids, 12845056)


def write_qwen(directory, config, ids, pixels):
    """The directory of a Qwen2-VL or Qwen2.5-VL."""
    size = {"shortest_edge": 3136, "longest_edge": pixels}
    image = {
        "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
        "image_mean": IMAGE_MEAN, "image_std": IMAGE_STD, "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"], "size": size, "merge_size": 2,
        "patch_size": 14, "temporal_patch_size": 2, "resample": 3, "rescale_factor": 1 / 255,
    }
    write(directory, {
        "config.json": config,
        "generation_config.json": {
            "bos_token_id": ids["<|endoftext|>"], "pad_token_id": ids["<|endoftext|>"], "do_sample": False,
            "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        },
        "preprocessor_config.json": image | {"processor_class": "Qwen2VLProcessor"},
        "tokenizer_config.json": {
            "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "model_max_length": 32768,
            "processor_class": "Qwen2VLProcessor", "tokenizer_class": "Qwen2Tokenizer",
        },
        "chat_template.jinja": CHAT,
        "tokenizer.json": tokenizer(words(min(ids.values())), [(i, content) for content, i in ids.items()]),
    })


#: Width, heads, feed-forward, layers of encoder and of decoder, mel bins.
WHISPER_BASE, WHISPER_LARGE_V3 = (512, 8, 2048, 6, 80), (1280, 20, 5120, 32, 128)


def whisper(directory, sizes, further_languages=""):
    """An openai/whisper-*, with its vocabulary's size and the places of its special tokens."""
    hidden, heads, inner, layers, n_mels = sizes
    languages = """en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg
    lt la mi ml cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so af oc ka be tg
    sd gu am yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su""".split() + further_languages.split()
    end, start = 50257, 50258
    names = ["<|endoftext|>", "<|startoftranscript|>", *[f"<|{code}|>" for code in languages], "<|translate|>",
             "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    ids = {content: end + i for i, content in enumerate(names)}
    times = [(end + len(names) + i, f"<|{i * 0.02:.2f}|>") for i in range(1501)]
    vocab = words(end)
    assert len(vocab) == end and ids["<|notimestamps|>"] == times[0][0] - 1
    feature = {
        "chunk_length": 30, "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": n_mels,
        "hop_length": 160, "n_fft": 400, "n_samples": 480000, "nb_max_frames": 3000, "padding_side": "right",
        "padding_value": 0.0, "return_attention_mask": False, "sampling_rate": 16000,
    }
    special = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start}
    write(directory, {
        "config.json": special | {
            "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "dtype": "float32",
            "activation_function": "gelu", "d_model": hidden, "encoder_layers": layers, "decoder_layers": layers,
            "encoder_attention_heads": heads, "decoder_attention_heads": heads, "encoder_ffn_dim": inner,
            "decoder_ffn_dim": inner, "max_source_positions": 1500, "max_target_positions": 448,
            "num_mel_bins": n_mels, "vocab_size": times[-1][0] + 1, "scale_embedding": False, "tie_word_embeddings": True, "is_encoder_decoder": True,
            "begin_suppress_tokens": [220, end], "suppress_tokens": list(ids.values())[1:],
        },
        "generation_config.json": special | {
            "is_multilingual": True, "lang_to_id": {f"<|{code}|>": ids[f"<|{code}|>"] for code in languages},
            "task_to_id": {"transcribe": ids["<|transcribe|>"], "translate": ids["<|translate|>"]},
            "no_timestamps_token_id": ids["<|notimestamps|>"], "prev_sot_token_id": ids["<|startofprev|>"],
            "max_initial_timestamp_index": 50, "max_length": 448, "return_timestamps": False,
            "begin_suppress_tokens": [220, end], "suppress_tokens": list(ids.values())[1:],
        },
        "preprocessor_config.json": feature | {"processor_class": "WhisperProcessor"},
        "tokenizer_config.json": {
            "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>", "add_prefix_space": False, "model_max_length": 448,
            "processor_class": "WhisperProcessor", "tokenizer_class": "WhisperTokenizer",
        },
        "tokenizer.json": tokenizer(
            vocab + ["<|endoftext|>"], [(i, content) for content, i in ids.items()], times),
    })


def costs(text, vision, vocab, side, n_text):
    """Multiplications and additions, in millions: to encode an image, to read a prompt with it, to write a token."""
    d, depth, _, ratio = vision
    h, layers, heads, kv, inner = text
    patches = (side // 14) ** 2
    tokens = patches // 4
    encoder = depth * (4 + 2 * ratio) * d * d + 1176 * d
    merger = (4 * d) ** 2 + 4 * d * h
    encode = 2 * patches * encoder + 2 * tokens * merger + 4 * patches**2 * d * depth
    decoder = layers * (2 * h * h + 2 * h * (h // heads) * kv + 3 * h * inner)
    n = n_text + tokens
    prefill = 2 * n * decoder + 2 * n * n * h * layers
    write_one = 2 * (decoder + h * vocab) + 4 * n * h * layers
    return [round(flops / 1e6) for flops in (encode, prefill, write_one)]


REAL_2B = ((1536, 28, 12, 2, 8960), (1280, 32, 16, 4), 151936)
MODELS = {
    "qwen2-vl-263m": ((896, 11, 14, 2, 4864), (768, 8, 12, 4), 32768, 12845056),
    "qwen2-vl-tiny": ((256, 5, 4, 2, 1024), (256, 6, 4, 4), 4096, 112896),
    # The least that is a model, for workers that take their time from curves: 640x640 becomes 20x20 = 400 tokens.
    "qwen2-vl-timed": ((64, 1, 2, 1, 64), (64, 1, 2, 2), 4096, 313600),
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--large"]:
        whisper(Path(sys.argv[2]) / "whisper-large-v3", WHISPER_LARGE_V3, "yue")
        qwen2_5_vl_7b(Path(sys.argv[2]) / "qwen2.5-vl-7b")
        sys.exit()
    for name, shape in MODELS.items():
        qwen2_vl(name, *shape)
    whisper(HERE / "whisper-base", WHISPER_BASE)
    sides = {"qwen2-vl-263m": 644, "qwen2-vl-tiny": 336, "qwen2-vl-timed": 560}
    for name, (text, vision, vocab) in {"Qwen2-VL-2B": REAL_2B, **{n: m[:3] for n, m in MODELS.items()}}.items():
        encode, prefill, token = costs(text, vision, vocab, sides.get(name, 644), 400)
        print(f"{name:14} MFLOP: encode {encode}, prefill {prefill}, token {token};",
              f"encode : prefill : 150 tokens = {encode / prefill:.2f} : 1 : {150 * token / prefill:.2f}")
