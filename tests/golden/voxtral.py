"""Golden files of Voxtral: three shapes, tokens and conversations by mistral-common from a small `tekken.json`."""

import base64
import copy
import io
import json
import pathlib
import tempfile
import wave

import torch
from mistral_common.protocol.instruct.chunk import AudioChunk, TextChunk
from mistral_common.protocol.instruct.messages import AssistantMessage, SystemMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.transcription.request import TranscriptionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from transformers import VoxtralConfig, VoxtralForConditionalGeneration, WhisperFeatureExtractor
from transformers.models.voxtral.processing_voxtral import VoxtralProcessor

from audio_chat import FRAMES_PER_SECOND, N_MERGES, RATE, Maker, Shape, heard, make_case, samples
from common import STEPS, byte_bpe, randomise, round_weights
from llava import text

N_SPECIAL = 40
VOCAB = N_SPECIAL + 256 + N_MERGES
# At the ids of the published file; what is left out there is filled up.
SPECIALS = {0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]", 5: "[AVAILABLE_TOOLS]", 6: "[/AVAILABLE_TOOLS]",
            7: "[TOOL_RESULTS]", 8: "[/TOOL_RESULTS]", 9: "[TOOL_CALLS]", 10: "[IMG]", 11: "<pad>", 12: "[IMG_BREAK]",
            13: "[IMG_END]", 14: "[PREFIX]", 15: "[MIDDLE]", 16: "[SUFFIX]", 17: "[SYSTEM_PROMPT]", 18: "[/SYSTEM_PROMPT]",
            19: "[TOOL_CONTENT]", 24: "[AUDIO]", 25: "[BEGIN_AUDIO]", 34: "[TRANSCRIBE]"}
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = ["The weather in the north is cold.", "你好，世界。 12345\n\n  two  spaces", "naïve café — ещё раз", " <s>[INST]", "x\r\n/y"]


def tower(hidden, heads, layers, seconds):
    return dict(model_type="voxtral_encoder", hidden_size=hidden, num_attention_heads=heads, intermediate_size=4 * hidden,
                num_hidden_layers=layers, max_source_positions=seconds * FRAMES_PER_SECOND // 2, num_mel_bins=128,
                activation_function="gelu", scale_embedding=False)


SHAPES = [
    Shape("voxtral_odd_heads", text("llama", 60, 3, 1, 2, 88, head_dim=20), tower(24, 2, 2, 2), 2, torch.float32, 5300, True,
          ((), ("5121",), ("32000",), ("40000",), ("5121", "40000"), ("40000", "5121"))),
    Shape("voxtral_three_layers", text("llama", 48, 4, 2, 3, 72, head_dim=16, rope_theta=1e8), tower(28, 4, 3, 2), 2,
          torch.bfloat16, 5400, True, ((), ("5121",), ("31999",), ("65000",), ("5121", "31999"), ("65000", "5121"))),
    Shape("voxtral_long_window", text("llama", 48, 4, 4, 2, 64, head_dim=12), tower(20, 2, 2, 4), 4, torch.float16, 5500, False,
          ((), ("5121",), ("64000",), ("64001",), ("5121", "64000"), ("5121", "5121"))),
]


def file_name(b):
    """The bytes of a token that the byte-level model of the library spells."""
    spell = {}
    extra = 0
    for i in range(256):
        plain = 0x21 <= i <= 0x7E or 0xA1 <= i <= 0xAC or 0xAE <= i <= 0xFF
        spell[chr(i) if plain else chr(256 + extra)] = i
        extra += not plain
    return bytes(spell[c] for c in b)


def tekken(seconds):
    """A `tekken.json`: bytes, then what merges make of them, in their order."""
    merged = json.loads(byte_bpe(N_MERGES, [], qwen=False).to_str())["model"]
    ranks = [bytes([i]) for i in range(256)]
    for pair in merged["merges"]:
        left, right = pair if isinstance(pair, list) else pair.split(" ")
        token = file_name(left + right)
        if token not in ranks:
            ranks.append(token)
    assert len(ranks) == 256 + N_MERGES

    def text_of(token):
        try:
            return token.decode()
        except UnicodeDecodeError:
            return None

    return {
        "config": {"pattern": PATTERN, "num_vocab_tokens": len(ranks), "default_vocab_size": VOCAB,
                   "default_num_special_tokens": N_SPECIAL, "version": "v7"},
        "vocab": [{"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": text_of(t)} for i, t in enumerate(ranks)],
        "special_tokens": [{"rank": i, "token_str": SPECIALS.get(i, f"<SPECIAL_{i}>"), "is_control": True} for i in range(N_SPECIAL)],
        "audio": {"sampling_rate": RATE, "frame_rate": 12.5, "chunk_length_s": float(seconds),
                  "audio_encoding_config": {"num_mel_bins": 128, "hop_length": 160, "window_size": 400}},
    }


class Tokenizer:
    """What the makers ask of a tokenizer, over mistral-common's."""

    def __init__(self, seconds):
        self.file = tekken(seconds)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "tekken.json"
            path.write_text(json.dumps(self.file))
            self.mistral = MistralTokenizer.from_file(str(path))
        self.tekken = self.mistral.instruct_tokenizer.tokenizer

    def token_to_id(self, token):
        return {t: i for i, t in SPECIALS.items()}[token]

    def decode(self, ids, skip_special_tokens):
        return self.tekken.decode([t for t in ids if t >= N_SPECIAL])

    def write(self, folder):
        (folder / "tekken.json").write_text(json.dumps(self.file) + "\n")


def wav(name):
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples(name).tobytes())
    return base64.b64encode(data.getvalue()).decode()


class Processor:
    """The published processor's features, and mistral-common's tokens."""

    chat_template = None

    def __init__(self, shape, tok):
        self.tok, self.window = tok, shape.seconds
        self.feature_extractor = WhisperFeatureExtractor(feature_size=128, chunk_length=shape.seconds)

    def features(self, names):
        # The published values for windows of 30 s.
        return VoxtralProcessor._retrieve_input_features(
            self, [heard(n) for n in names], max_source_positions=self.window * FRAMES_PER_SECOND, sampling_rate=RATE,
            padding=True, truncation=False, pad_to_multiple_of=self.window * RATE, return_tensors="pt")

    def chat(self, messages):
        return self.tok.mistral.encode_chat_completion(ChatCompletionRequest(messages=messages)).tokens

    def transcription(self, name, language):
        request = TranscriptionRequest(model="voxtral", audio=wav(name), language=language)
        return self.tok.mistral.encode_transcription(request).tokens


def build(shape, seed, tok):
    words = {**shape.text, "vocab_size": VOCAB}
    config = {
        "architectures": ["VoxtralForConditionalGeneration"], "model_type": "voxtral", "audio_config": shape.tower,
        "audio_token_id": 24, "hidden_size": words["hidden_size"], "projector_hidden_act": "gelu", "text_config": words,
        "transformers_version": "4.54.0.dev0",
    }
    torch.manual_seed(seed)
    model = VoxtralForConditionalGeneration(VoxtralConfig(**copy.deepcopy(config), tie_word_embeddings=False))
    randomise(model, seed, gain=1.4, embed_std=0.6, quiet_rows=range(N_SPECIAL), fixed=(),
              gains=[("q_proj", 1.8), ("k_proj", 1.8), ("v_proj", 1.5), ("o_proj", 2.0), ("linear_2", 3.0), ("conv", 2.0)])
    model.model.language_model.norm.weight.data *= 3
    round_weights(model, shape.disk)
    return config, model


def inputs_of(proc, names, words):
    content = [*(AudioChunk(input_audio=wav(n)) for n in names), TextChunk(text=words)]
    inputs = {"input_ids": torch.tensor([proc.chat([UserMessage(content=content)])])}
    if names:
        inputs["input_features"] = proc.features(names)
    return "", inputs


@torch.no_grad()
def audio_tensors(model, proc, name):
    mel = proc.features([name])
    return mel, model.get_audio_features(mel, return_dict=True).pooler_output


@torch.no_grad()
def extra(model, proc, tok, runs):
    """Transcriptions, conversations of several messages, and texts."""
    name = next(r["names"][0] for r in runs if r["names"])
    transcriptions = []
    for language in (None, "en"):
        ids = proc.transcription(name, language)
        inputs = {"input_ids": torch.tensor([ids]), "input_features": proc.features([name])}
        made = model.generate(**inputs, do_sample=False, max_new_tokens=STEPS)[0, len(ids):].tolist()
        transcriptions.append({"audio": name, "language": language, "input_ids": ids, "greedy_tokens": made,
                               "greedy_text": tok.decode(made, True)})
    said = [("system", ["Be brief."]), ("user", ["One", "two"]), ("assistant", ["Three."]), ("user", ["Four?"])]
    kinds = {"system": SystemMessage, "user": UserMessage, "assistant": AssistantMessage}
    messages = [kinds[role](content=[TextChunk(text=t) for t in parts] if role == "user" else parts[0]) for role, parts in said]
    return {
        "transcriptions": transcriptions,
        "conversation": {"messages": [{"role": r, "parts": p} for r, p in said], "input_ids": proc.chat(messages)},
        "texts": [{"text": t, "ids": tok.tekken.encode(t, bos=False, eos=False)} for t in TEXTS],
    }


def make():
    for shape in SHAPES:
        make_case(shape, Maker(lambda: Tokenizer(shape.seconds), build, Processor, audio_tensors, inputs_of, "[AUDIO]",
                               ("<pad>", "</s>"), extra, lambda token: token >= N_SPECIAL))
