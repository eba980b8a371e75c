"""Makes `digits-whisper/`: a Whisper of a million parameters that transcribes spoken digits,
trained from nothing on what espeak-ng says.

The directory it leaves is an ordinary Hugging Face one with the token layout of multilingual
Whisper in miniature and windows of 8 s. The script also speaks the held-out clips
(`heldout/digits.jsonl`) with voices that training never hears, and ends by measuring the saved
directory on them through `transformers`.

    python make_digits.py            # everything; needs espeak-ng on the PATH
    python make_digits.py --measure  # only the accuracy of the directory that is there
"""

import argparse
import random
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import soundfile
import torch
import torch.nn.functional as F
from tokenizers import AddedToken
from transformers import (
    AutoProcessor,
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

from common import HELD_OUT, HERE, Training, drop_load_options, save_model, seed_everything, train_byte_level_bpe, write_jsonl

DIRECTORY = HERE / "digits-whisper"
TRAIN_SEED, HELD_OUT_SEED = 20_241, 77_002
DTYPE = torch.float16
RATE = 16_000
WINDOW = 8  # seconds
N_FRAMES = WINDOW * 100
TICK = 0.02  # seconds between neighbouring timestamp tokens

# ---------------------------------------------------------------------------- speech

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
ACCENTS = ["en-us", "en-us", "en-gb", "en-gb", "en-gb-x-rp", "en-gb-scotland", "en-029", "en-us-nyc"]
VOICES = (
    "m1 m2 m3 m4 m5 m6 m7 f1 f2 f3 f4 Alex Alicia Andrea Andy Annie Denis Diogo Gene Henrique Hugo Lee "
    "Marco Mario Michael Mike anika antonio aunty belinda benjamin boris caleb david ed edward iven "
    "john linda max michel miguel norbert pablo paul pedro quincy rob robert sandro shelby steph travis "
    "victor klatt klatt2"
).split()


@dataclass(frozen=True)
class Manner:
    """Range of speech: slowest and fastest, in words a minute, and the share of repeats forced in."""

    speeds: tuple[int, int]
    repeats: float


# Repeats are what is hard to count: training hears more of them, and faster speech, than is held out.
TRAINING_MANNER = Manner((125, 205), 0.12)
HELD_OUT_MANNER = Manner((125, 175), 0.0)
HELD_OUT_VOICES = "m8 f5 adam steph2 edward2 iven3 marcelo Gene2".split()


@dataclass
class Utterance:
    digits: list[int]
    audio: np.ndarray  # int16, without silence at either end


def resample(audio: np.ndarray, rate: int) -> np.ndarray:
    """To 16 kHz, by cutting the spectrum; the audio is padded so that both lengths are whole."""
    unit = rate // np.gcd(rate, RATE)
    n = -(-len(audio) // unit) * unit
    n_out = n * RATE // rate
    spectrum = np.fft.rfft(audio, n)
    return np.fft.irfft(spectrum[: n_out // 2 + 1], n_out) * (n_out / n)


def say(rng: random.Random, voices: list[str], n_digits: int, manner: Manner = TRAINING_MANNER) -> Utterance:
    digits = [rng.randrange(10)]
    while len(digits) < n_digits:
        digits.append(digits[-1] if rng.random() < manner.repeats else rng.randrange(10))
    pause = rng.choice([" ", " ", ", "])
    voice = rng.choice(ACCENTS) + ("+" + rng.choice(voices) if rng.random() < 0.93 or voices is HELD_OUT_VOICES else "")
    command = [
        "espeak-ng", "--stdout", "-v", voice, "-s", str(rng.randint(*manner.speeds)),
        "-p", str(rng.randint(25, 75)), "-g", str(rng.choice([0, 0, 1, 3, 6, 10])),
        pause.join(WORDS[d] for d in digits),
    ]  # fmt: skip
    spoken = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout
    # A stream's header gives no length, so the samples are read past it.
    audio = np.frombuffer(spoken, dtype="<i2", offset=44).astype(np.float64)
    audio = resample(audio, 22_050)
    loud = np.abs(audio) > 0.015 * np.abs(audio).max()
    first, last = loud.argmax(), len(loud) - loud[::-1].argmax()
    audio = audio[max(0, first - 160) : last + 160]
    audio = audio / np.abs(audio).max() * 30_000
    return Utterance(digits, audio.astype(np.int16))


def speak_corpus(n: int) -> list[Utterance]:
    rng = random.Random(TRAIN_SEED)
    corpus = []
    while len(corpus) < n:
        said = say(rng, VOICES, rng.choices(range(1, 9), [3, 3, 3, 3, 2, 2, 2, 3])[0])
        if len(said.audio) < (WINDOW - 0.3) * RATE:
            corpus.append(said)
        if len(corpus) % 1000 == 0:
            print(f"spoken {len(corpus)}/{n}", flush=True)
    return corpus


def load_or_speak(path: str | None, n: int) -> list[Utterance]:
    """`path` keeps the corpus between runs; it holds the same as speaking it again would."""
    if path and Path(path).exists():
        held = np.load(path)
        ends, texts, audio_clips = held["ends"], held["texts"], held["audio_clips"]
        starts = [0, *ends[:-1]]
        return [Utterance([int(c) for c in t], audio_clips[a:b]) for t, a, b in zip(texts, starts, ends)]
    corpus = speak_corpus(n)
    if path:
        np.savez(
            path,
            ends=np.cumsum([len(u.audio) for u in corpus]),
            texts=["".join(map(str, u.digits)) for u in corpus],
            audio_clips=np.concatenate([u.audio for u in corpus]),
        )
    return corpus


# ---------------------------------------------------------------------------- clips


@dataclass
class Clip:
    """Content of one window: audio, and its segments with times."""

    audio: np.ndarray  # float32 [n_samples]
    segments: list[tuple[float, list[int], float]]  # start in seconds, digits, end

    @property
    def digits(self) -> list[int]:
        return [d for _, digits, _ in self.segments for d in digits]


@lru_cache(maxsize=1)
def noise_tracks() -> np.ndarray:
    """Sixteen tracks of 30 s at unit power, from white to noise that falls with frequency."""
    rng = np.random.default_rng(3)
    tracks = []
    for steepness in np.maximum(0.0, np.linspace(-0.5, 1.0, 16)):
        spectrum = np.fft.rfft(rng.standard_normal(30 * RATE))
        spectrum /= np.maximum(np.arange(len(spectrum)), len(spectrum) * 0.01) ** steepness
        track = np.fft.irfft(spectrum, 30 * RATE)
        tracks.append((track / track.std()).astype(np.float32))
    return np.stack(tracks)


def noise(rng: np.random.Generator, n: int) -> np.ndarray:
    track = noise_tracks()[rng.integers(16)]
    start = rng.integers(len(track) - n)
    return track[start : start + n]


def stretched(rng: np.random.Generator, audio: np.ndarray) -> np.ndarray:
    """Faster and higher, or slower and lower, by up to a tenth."""
    factor = rng.uniform(0.91, 1.1)
    n = int(len(audio) / factor)
    return np.interp(np.arange(n) * factor, np.arange(len(audio)), audio).astype(np.float32)


def tilted(rng: np.random.Generator, audio: np.ndarray) -> np.ndarray:
    """A duller or a thinner recording: a two-tap filter."""
    a = rng.uniform(-0.5, 0.7)
    out = audio.copy()
    out[1:] += a * audio[:-1]
    return out


def compose(rng: np.random.Generator, corpus: list[Utterance], n_samples: int, clean: bool) -> Clip:
    """One or two utterances somewhere in the window, with noise under them; rarely none."""
    out = np.zeros(n_samples, dtype=np.float32)
    segments: list[tuple[float, list[int], float]] = []
    at = int(rng.uniform(0.0, 0.2 if rng.random() < 0.5 else 1.0) * RATE)
    n_wanted = rng.choice([0, 1, 2], p=[0.02, 0.68, 0.30])
    room = 8
    for _ in range(n_wanted):
        for _ in range(20):  # the first utterance that fits what is left of the window
            said = corpus[rng.integers(len(corpus))]
            if len(said.digits) > room:
                continue
            audio = stretched(rng, said.audio.astype(np.float32) / 32_768)
            if at + len(audio) <= n_samples:
                break
        else:
            break
        audio = audio * rng.uniform(0.5, 1.0)
        out[at : at + len(audio)] = audio
        start, end = at / RATE, (at + len(audio)) / RATE
        if segments and start - segments[-1][2] < 0.5:
            before = segments.pop()
            segments.append((before[0], before[1] + said.digits, end))
        else:
            segments.append((start, said.digits, end))
        room -= len(said.digits)
        # Either the same breath or clearly another one: nothing in between to be unsure about.
        gap = rng.uniform(0.12, 0.3) if rng.random() < 0.4 else rng.uniform(0.8, 1.6)
        at += len(audio) + int(gap * RATE)
    out = tilted(rng, out) * 10 ** rng.uniform(-1.3, 0.0)
    if not clean and rng.random() < 0.75:
        level = np.abs(out).max() * 0.25 if segments else rng.uniform(0.001, 0.1)
        stop = n_samples if rng.random() < 0.5 else min(n_samples, at)  # noise may end with the clip
        out[:stop] += noise(rng, n_samples)[:stop] * level * 10 ** (-rng.uniform(8, 40) / 20)
    return Clip(np.clip(out, -1.0, 1.0), segments)


# ---------------------------------------------------------------------------- tokenizer and processor

# The order of Whisper, whose readers count languages from <|startoftranscript|>.
LANGUAGES = ["en", "zh", "de", "es"]
SPECIAL_TOKENS = [
    "<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES),
    "<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>",
    "<|notimestamps|>",
]  # fmt: skip
TIMESTAMPS = [f"<|{i * TICK:.2f}|>" for i in range(round(WINDOW / TICK) + 1)]
N_TEXT_TOKENS = 320


def as_digits(digits: list[int]) -> str:
    return "".join(f" {d}" for d in digits)


def as_words(digits: list[int]) -> str:
    return "".join(f" {WORDS[d]}" for d in digits)


def corpus_text():
    rng = random.Random(2)
    for _ in range(4000):
        digits = [rng.randrange(10) for _ in range(6)]
        yield from (as_digits(digits), as_words(digits))
    yield from ["the digits are", " the number is", " a and of to in"] * 100


def make_processor() -> WhisperProcessor:
    bpe = train_byte_level_bpe(corpus_text(), N_TEXT_TOKENS, qwen_split=False)
    assert bpe.get_vocab_size() == N_TEXT_TOKENS
    bpe.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    bpe.add_tokens([AddedToken(t, special=False, normalized=False) for t in TIMESTAMPS])
    with tempfile.TemporaryDirectory() as scratch:
        bpe.save(f"{scratch}/tokenizer.json")
        tokenizer = WhisperTokenizer.from_pretrained(
            scratch, pad_token="<|endoftext|>", extra_special_tokens=SPECIAL_TOKENS[1:], model_max_length=96
        )
    features = WhisperFeatureExtractor(feature_size=80, sampling_rate=RATE, hop_length=160, chunk_length=WINDOW, n_fft=400)
    return WhisperProcessor(features, tokenizer)


# ---------------------------------------------------------------------------- model


def make_model(tokenizer) -> WhisperForConditionalGeneration:
    ids = {t: tokenizer.convert_tokens_to_ids(t) for t in SPECIAL_TOKENS}
    space = tokenizer.convert_tokens_to_ids("Ġ")
    symbols = [tokenizer.convert_tokens_to_ids(c) for c in '"#()*+/:;<=>@[\\]^_`{|}~']
    never = symbols + [ids[t] for t in SPECIAL_TOKENS[1:2] + SPECIAL_TOKENS[2 + len(LANGUAGES) : -1]]
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=80,
        d_model=128,
        encoder_layers=3,
        encoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=512,
        max_source_positions=N_FRAMES // 2,
        max_target_positions=96,
        init_std=0.05,
        dropout=0.0,
        decoder_start_token_id=ids["<|startoftranscript|>"],
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|endoftext|>"],
        pad_token_id=ids["<|endoftext|>"],
        suppress_tokens=never,
        begin_suppress_tokens=[space, ids["<|endoftext|>"]],
        median_filter_width=7,
    )
    model = WhisperForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        decoder_start_token_id=ids["<|startoftranscript|>"],
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|endoftext|>"],
        pad_token_id=ids["<|endoftext|>"],
        prev_sot_token_id=ids["<|startofprev|>"],
        no_timestamps_token_id=ids["<|notimestamps|>"],
        is_multilingual=True,
        lang_to_id={f"<|{code}|>": ids[f"<|{code}|>"] for code in LANGUAGES},
        task_to_id={"transcribe": ids["<|transcribe|>"], "translate": ids["<|translate|>"]},
        suppress_tokens=never,
        begin_suppress_tokens=[space, ids["<|endoftext|>"]],
        max_initial_timestamp_index=round(1.0 / TICK),
        max_length=96,
        return_timestamps=False,
        alignment_heads=[[1, 0], [1, 1], [1, 2], [1, 3]],
    )
    return model


def encode_sound(encoder, mel: torch.Tensor) -> torch.Tensor:
    """The encoder over any number of frames: [n, 80, n_frames] -> [n, n_frames / 2, d_model].

    `transformers` insists on the full window; training is faster on what has audio in it.
    """
    x = F.gelu(encoder.conv1(mel))
    x = F.gelu(encoder.conv2(x)).transpose(1, 2)
    x = x + encoder.embed_positions.weight[: x.shape[1]]
    for layer in encoder.layers:
        x = layer(x, None)
        x = x if torch.is_tensor(x) else x[0]
    return encoder.layer_norm(x)


# ---------------------------------------------------------------------------- batches


@dataclass
class Batch:
    mel: torch.Tensor  # [n_clips, 80, n_frames]
    tokens: torch.Tensor  # [n_clips * n_writings, n_tokens]
    targets: torch.Tensor  # like tokens: the next token where it is learned, else -100
    digits: list[list[int]]


class Batcher:
    """Composes clips and writes the token sequences that go with them."""

    def __init__(self, processor: WhisperProcessor, corpus: list[Utterance], seed: int):
        self.rng = np.random.default_rng(seed)
        self.corpus = sorted(corpus, key=lambda u: len(u.audio))
        self.lengths = np.array([len(u.audio) for u in self.corpus])
        self.features = processor.feature_extractor
        tokenizer = processor.tokenizer
        self.ids = {t: tokenizer.convert_tokens_to_ids(t) for t in [*SPECIAL_TOKENS, TIMESTAMPS[0]]}
        self.digit = [tokenizer.convert_tokens_to_ids(f"Ġ{d}") for d in range(10)]
        self.word = [tokenizer(f" {w}", add_special_tokens=False)["input_ids"] for w in WORDS]

    def text(self, digits: list[int], translate: bool) -> list[int]:
        return [t for d in digits for t in self.word[d]] if translate else [self.digit[d] for d in digits]

    def timestamp(self, seconds: float) -> int:
        """The token of a time, to the nearest tenth of a second."""
        return self.ids[TIMESTAMPS[0]] + round(min(WINDOW, round(seconds, 1)) / TICK)

    def write(self, clip: Clip, prompts: bool, timed: bool) -> tuple[list[int], list[int]]:
        rng, ids = self.rng, self.ids
        prompt: list[int] = []
        if prompts and rng.random() < 0.12:
            prompt = [ids["<|startofprev|>"]]
            if rng.random() < 0.5:
                prompt += [self.digit[d] for d in rng.integers(0, 10, rng.integers(1, 24))]
            else:
                prompt += rng.integers(0, N_TEXT_TOKENS, rng.integers(1, 44)).tolist()
        translate = rng.random() < 0.15
        language = "<|en|>" if rng.random() < 0.96 else f"<|{rng.choice(LANGUAGES)}|>"
        head = [ids["<|startoftranscript|>"], ids[language], ids["<|translate|>" if translate else "<|transcribe|>"]]
        head += [] if timed else [ids["<|notimestamps|>"]]
        body: list[int] = []
        for start, digits, end in clip.segments:
            if not timed:
                body += self.text(digits, translate)
                continue
            # The first timestamp may not pass max_initial_timestamp_index.
            body.append(self.timestamp(start if body else min(start, 1.0)))
            body += [*self.text(digits, translate), self.timestamp(end)]
        if timed and not body:
            body = [self.timestamp(0.0)]
        tokens = prompt + head + body + [ids["<|endoftext|>"]]
        learned = [-100] * len(prompt + head) + body + [ids["<|endoftext|>"]]
        targets = learned[1:] + [-100]
        targets[len(prompt)] = ids["<|en|>" if clip.segments else "<|nospeech|>"]
        return tokens, targets

    def draw(self, n_clips: int, seconds: float, n_writings: int = 1, clean: bool = False, prompts: bool = True) -> Batch:
        """Clips, each written down `n_writings` times: in turn with and without timestamps."""
        n_samples = round(seconds * RATE)
        fits = self.corpus[: max(50, int(np.searchsorted(self.lengths, n_samples * 0.88)))]
        clips = [compose(self.rng, fits, n_samples, clean) for _ in range(n_clips)]
        mel = self.features._torch_extract_fbank_features(np.stack([c.audio for c in clips]))
        first = self.rng.integers(2)
        rows = [self.write(c, prompts, timed=bool((first + i + j) % 2)) for i, c in enumerate(clips) for j in range(n_writings)]
        length = max(len(tokens) for tokens, _ in rows)
        tokens = torch.full((len(rows), length), self.ids["<|endoftext|>"])
        targets = torch.full((len(rows), length), -100)
        for i, (written, wanted) in enumerate(rows):
            tokens[i, : len(written)] = torch.tensor(written)
            targets[i, : len(wanted)] = torch.tensor(wanted)
        return Batch(torch.from_numpy(mel), tokens, targets, [c.digits for c in clips])


def forward(model, batch: Batch):
    encoded = encode_sound(model.model.encoder, batch.mel)
    hidden = model.model.decoder(
        input_ids=batch.tokens,
        encoder_hidden_states=encoded.repeat_interleave(len(batch.tokens) // len(encoded), dim=0),
        use_cache=False,
    ).last_hidden_state
    learned = batch.targets != -100
    return model.proj_out(hidden[learned]), batch.targets[learned], encoded


# ---------------------------------------------------------------------------- training

class Tutor(torch.nn.Module):
    """Spells the digits along the frames, and counts them. It teaches the encoder to hear what is
    said and which in the row it is before the decoder has learned where to look; it is then
    thrown away."""

    def __init__(self, width: int):
        super().__init__()
        self.spell = torch.nn.Linear(width, 11)
        self.count = torch.nn.Linear(width, 9)

    def forward(self, encoded: torch.Tensor, digits: list[list[int]]) -> torch.Tensor:
        n_rows, n_frames, _ = encoded.shape
        frames = torch.full((n_rows,), n_frames)
        lengths = torch.tensor([len(row) for row in digits])

        def ctc(logits, targets):
            spread = logits.log_softmax(-1).transpose(0, 1)
            return F.ctc_loss(spread, torch.tensor(targets), frames, lengths, zero_infinity=True)

        spelled = ctc(self.spell(encoded), [d + 1 for row in digits for d in row])
        return spelled + ctc(self.count(encoded), [i + 1 for row in digits for i in range(len(row))])


# Seconds of window, clips, and how often, as hearing goes on.
LESSONS = [
    (0.2, [(2.0, 24, 1)]),
    (0.5, [(2.0, 24, 1), (3.5, 16, 1)]),
    (1.0, [(2.0, 24, 1), (3.5, 16, 2), (5.0, 12, 2), (8.0, 8, 1)]),
]
WRITING = [(2.0, 24, 1), (3.5, 16, 2), (5.0, 12, 2), (8.0, 8, 3)]


def train(model, processor, corpus, options) -> None:
    """First to hear: one writing of each clip, with a tutor over the encoder. Then to write: the
    encoder is by far the dearer half, so each clip it has heard is written down four times."""
    batcher = Batcher(processor, corpus, options.seed)
    unseen = [say(random.Random(HELD_OUT_SEED + 5 + i), HELD_OUT_VOICES, 1 + i % 8) for i in range(200)]
    model.set_attn_implementation("eager")
    tutor = Tutor(model.config.d_model)

    def take(training: Training, windows, n_writings: int, share: float, **options) -> None:
        odds = np.array([odds for _, _, odds in windows], dtype=float)
        seconds, n_clips, _ = windows[batcher.rng.choice(len(windows), p=odds / odds.sum())]
        batch = batcher.draw(n_clips, seconds, n_writings, **options)
        with torch.autocast("cpu", torch.bfloat16):
            logits, wanted, encoded = forward(model, batch)
        loss = F.cross_entropy(logits.float(), wanted)
        aside = tutor(encoded.float(), batch.digits) if share else torch.zeros(())
        is_text = wanted < N_TEXT_TOKENS
        right = (logits.argmax(-1) == wanted)[is_text].float().mean()
        training.step(loss + share * aside, aside=float(aside.detach()), text_right=float(right))
        if training.step_idx % 500 == 0:
            print(f"  exact strings, unseen voices: {exact_rate(model, processor, unseen):.4f}", flush=True)
            save(model, processor)

    training = Training([model, tutor], options.hearing_steps, 1.5e-3, "hearing", warmup=300, last=0.4)
    for step_idx in range(options.hearing_steps):
        progress = step_idx / options.hearing_steps
        windows = next(windows for until, windows in LESSONS if progress < until)
        take(training, windows, 1, 0.5 - 0.2 * progress, clean=progress < 0.2, prompts=progress > 0.7)

    training = Training([model], options.writing_steps, 4e-4 if options.more else 1e-3, "writing")
    for _ in range(options.writing_steps):
        take(training, WRITING, 4, 0.0)
    save(model, processor)


@torch.no_grad()
def exact_rate(model, processor, unseen: list[Utterance], n_batches: int = 8) -> float:
    """Share of whole windows whose every digit is the greedy one: a quick look while training."""
    batcher = Batcher(processor, unseen, HELD_OUT_SEED)
    n_exact = n_all = 0
    for _ in range(n_batches):
        batch = batcher.draw(24, WINDOW, 1, prompts=False)
        with torch.autocast("cpu", torch.bfloat16):
            logits, wanted, _ = forward(model, batch)
        wrong = torch.zeros_like(batch.targets, dtype=torch.bool)
        is_time = wanted >= batcher.ids[TIMESTAMPS[0]]
        wrong[batch.targets != -100] = (logits.argmax(-1) != wanted) & ~is_time
        n_exact += int((~wrong.any(dim=1)).sum())
        n_all += len(wrong)
    return n_exact / n_all


def save(model, processor) -> None:
    save_model(model, DIRECTORY, DTYPE)
    processor.save_pretrained(DIRECTORY)
    drop_load_options(DIRECTORY)
    processor.feature_extractor.save_pretrained(DIRECTORY)


# ---------------------------------------------------------------------------- held-out


def held_out_clip(rng: random.Random, n_digits: int, most_seconds: float) -> Clip:
    """A clip as a recorder would leave it: a little silence around, a little noise under."""
    dice = np.random.default_rng(rng.getrandbits(32))
    while True:
        said = say(rng, HELD_OUT_VOICES, n_digits, HELD_OUT_MANNER)
        if len(said.audio) < (most_seconds - 0.9) * RATE:
            break
    before, after = dice.uniform(0.05, 0.6), dice.uniform(0.05, 0.3)
    audio = np.pad(said.audio.astype(np.float32) / 32_768, (int(before * RATE), int(after * RATE)))
    audio *= dice.uniform(0.3, 0.9)
    audio += noise(dice, len(audio)) * np.abs(audio).max() * 0.25 * 10 ** (-dice.uniform(20, 40) / 20)
    return Clip(np.clip(audio, -1, 1), [(before, said.digits, before + len(said.audio) / RATE)])


def make_held_out() -> None:
    rng = random.Random(HELD_OUT_SEED)
    clips = HELD_OUT / "digits"
    clips.mkdir(parents=True, exist_ok=True)
    rows = []
    for i in range(60):
        clip = held_out_clip(rng, 1 + i % 8, 6.5)
        name = f"{i:03}.flac"
        # Twelve bits are enough to hear by and make the file a third smaller.
        audio = np.round(clip.audio * 2047) / 2048
        soundfile.write(clips / name, audio, RATE, subtype="PCM_16", format="FLAC")
        rows.append({"file": f"digits/{name}", "text": as_digits(clip.digits).strip()})
    write_jsonl(HELD_OUT / "digits.jsonl", rows)

    spoken = subprocess.run(
        ["espeak-ng", "--stdout", "-v", "en-us+f3", "-s", "150", "four, two, seven, one"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True,
    ).stdout  # fmt: skip
    audio = resample(np.frombuffer(spoken, dtype="<i2", offset=44).astype(np.float64), 22_050)
    audio = np.pad(audio / np.abs(audio).max() * 0.7, (RATE // 5, 0))
    soundfile.write(HELD_OUT / "digits.wav", audio, RATE, subtype="PCM_16")


@torch.no_grad()
def measure(dtype, n_fresh: int) -> None:
    """Exact matches of the directory, as `transformers` loads and runs it."""
    import json

    processor = AutoProcessor.from_pretrained(DIRECTORY)
    model = WhisperForConditionalGeneration.from_pretrained(DIRECTORY, dtype=dtype).eval()

    def hear(audio_clips: list[np.ndarray], **options) -> list[str]:
        texts = []
        for i in range(0, len(audio_clips), 20):
            inputs = processor(audio_clips[i : i + 20], sampling_rate=RATE, return_tensors="pt")
            written = model.generate(inputs.input_features.to(model.dtype), **options)
            texts += processor.batch_decode(written, skip_special_tokens=True)
        return texts

    def rate(name: str, audio_clips: list[np.ndarray], wanted: list[str], **options) -> None:
        got = hear(audio_clips, **options)
        n_right = sum(g.strip() == w for g, w in zip(got, wanted))
        for g, w in zip(got, wanted):
            if g.strip() != w:
                print(f"    wanted {w!r}, got {g!r}", flush=True)
        print(f"{model.dtype} {name}: {n_right}/{len(wanted)} = {n_right / len(wanted):.4f}", flush=True)

    held = [json.loads(line) for line in open(HELD_OUT / "digits.jsonl", encoding="utf-8")]
    audio_clips = [soundfile.read(HELD_OUT / row["file"], dtype="float32")[0] for row in held]
    texts = [row["text"] for row in held]
    words = [" ".join(WORDS[int(d)] for d in text.split()) for text in texts]
    known = {"language": "en", "task": "transcribe"}
    rate("digits.jsonl, transcribe", audio_clips, texts, **known)
    rate("digits.jsonl, language detected", audio_clips, texts, task="transcribe")
    rate("digits.jsonl, timestamps", audio_clips, texts, return_timestamps=True, **known)
    rate("digits.jsonl, translate", audio_clips, words, language="en", task="translate")
    rng = random.Random(HELD_OUT_SEED + 9)
    fresh = [held_out_clip(rng, 1 + i % 8, WINDOW) for i in range(n_fresh)]
    texts = [as_digits(clip.digits).strip() for clip in fresh]
    rate("fresh clips, transcribe", [c.audio for c in fresh], texts, **known)
    rate("fresh clips, timestamps", [c.audio for c in fresh], texts, return_timestamps=True, **known)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--measure", action="store_true", help="only measure the directory that is there")
    options.add_argument("--more", action="store_true", help="only write on, from the directory that is there")
    options.add_argument("--utterances", type=int, default=9000)
    options.add_argument("--hearing-steps", type=int, default=4500)
    options.add_argument("--writing-steps", type=int, default=6500)
    options.add_argument("--seed", type=int, default=TRAIN_SEED, help="of the weights and of the order of the clips")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--corpus", help="an .npz to keep what was spoken between runs")
    options = options.parse_args()
    seed_everything(options.seed, options.threads)
    if not options.measure:
        make_held_out()
        corpus = load_or_speak(options.corpus, options.utterances)
        processor = make_processor()
        model = make_model(processor.tokenizer)
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
        if options.more:
            there = WhisperForConditionalGeneration.from_pretrained(DIRECTORY, dtype=torch.float32)
            model.load_state_dict(there.state_dict())
            options.hearing_steps = 0
        train(model, processor, corpus, options)
    measure("auto", 400)
    measure(torch.float32, 200)


if __name__ == "__main__":
    main()
