"""Makes `shapes-qwen2-vl/`: a Qwen2-VL of two million parameters that describes coloured
shapes, trained from nothing on scenes that this script draws.

The directory it leaves is an ordinary Hugging Face one. The script also draws the held-out
scenes (`heldout/scenes.jsonl`, `pairs.jsonl`, `chat.jsonl`) from another seed, and ends by
measuring the saved directory on them through `transformers`.

    python make_shapes.py            # everything
    python make_shapes.py --measure  # only the accuracy of the directory that is there
"""

import argparse
import json
import random
import tempfile
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from tokenizers import AddedToken
from transformers import (
    AutoProcessor,
    GenerationConfig,
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from common import HELD_OUT, HERE, Training, drop_load_options, save_model, seed_everything, train_byte_level_bpe, write_jsonl

DIRECTORY = HERE / "shapes-qwen2-vl"
TRAIN_SEED, HELD_OUT_SEED = 20_240, 77_001
DTYPE = torch.bfloat16
PATCH, MERGE = 14, 2
CELL = PATCH * MERGE
MIN_PIXELS, MAX_PIXELS = 112 * 112, 224 * 224
SYSTEM = "You describe pictures of shapes."

# ---------------------------------------------------------------------------- scenes

SHAPES = ["circle", "square", "triangle", "star"]
COLOURS = {
    "red": [(255, 0, 0), (220, 30, 30)],
    "green": [(0, 128, 0), (40, 180, 60), (0, 200, 0)],
    "blue": [(0, 0, 255), (30, 70, 225)],
    "yellow": [(255, 255, 0), (245, 220, 30)],
    "purple": [(128, 0, 128), (150, 50, 200)],
    "orange": [(255, 140, 0), (255, 165, 0)],
}
COLOUR_NAMES = list(COLOURS)
# Picture sizes in cells of 28 px, (height, width), with how often each is drawn.
SIZES = {
    (4, 4): 10, (4, 5): 2, (5, 4): 2, (5, 5): 2, (4, 6): 2, (6, 4): 2, (6, 6): 2,
    (5, 7): 1, (7, 5): 1, (6, 8): 1.5, (8, 6): 1.5, (8, 8): 2, (4, 8): 0.5, (8, 4): 0.5,
}


@dataclass
class Thing:
    shape: str
    colour: str
    x: float
    y: float
    size: int

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"

    @property
    def with_article(self) -> str:
        return f"{'an' if self.colour[0] == 'o' else 'a'} {self.name}"


@dataclass
class Scene:
    width: int
    height: int
    things: list[Thing]  # in reading order: left to right, or the upper one first

    @property
    def stacked(self) -> bool:
        """Two things whose distance is mostly vertical."""
        if len(self.things) != 2:
            return False
        a, b = self.things
        return abs(a.y - b.y) > abs(a.x - b.x)


@lru_cache(maxsize=None)
def stencil(shape: str, size: int) -> np.ndarray:
    """Coverage of a `size` x `size` square by the shape, in 0..1, antialiased."""
    scale = 8
    n = size * scale
    image = Image.new("L", (n, n), 0)
    draw = ImageDraw.Draw(image)
    if shape == "circle":
        draw.ellipse((0, 0, n - 1, n - 1), fill=255)
    elif shape == "square":
        margin = n * 0.06
        draw.rectangle((margin, margin, n - margin, n - margin), fill=255)
    elif shape == "triangle":
        draw.polygon([(n / 2, 0), (n - 1, n * 0.93), (0, n * 0.93)], fill=255)
    else:
        corners = []
        for k in range(10):
            radius = n / 2 if k % 2 == 0 else n * 0.2
            angle = -np.pi / 2 + k * np.pi / 5
            corners.append((n / 2 + radius * np.cos(angle), n * 0.53 + radius * np.sin(angle)))
        draw.polygon(corners, fill=255)
    return np.asarray(image.reduce(scale), dtype=np.float32) / 255.0


def place(rng: random.Random, width: int, height: int, n_things: int) -> list[tuple[float, float, int]]:
    """Centres and sizes, apart from one another and with an order that can be told by eye."""
    short = min(width, height)
    low, high = max(22, int(0.15 * short)), int(short * (0.36 if n_things <= 2 else 0.29))
    while True:
        spots: list[tuple[float, float, int]] = []
        for _ in range(n_things * 12):
            size = rng.randint(low, max(low, high))
            x = rng.uniform(size / 2 + 1, width - size / 2 - 1)
            y = rng.uniform(size / 2 + 1, height - size / 2 - 1)
            apart = all(np.hypot(x - u, y - v) > 0.58 * (size + s) + 2 for u, v, s in spots)
            ordered = n_things < 3 or all(abs(x - u) > 0.11 * short for u, _, _ in spots)
            if apart and ordered:
                spots.append((x, y, size))
            if len(spots) == n_things:
                break
        if len(spots) < n_things:
            continue
        if n_things == 2:
            dx, dy = abs(spots[0][0] - spots[1][0]), abs(spots[0][1] - spots[1][1])
            if max(dx, dy) < 1.6 * min(dx, dy):
                continue
            return sorted(spots, key=lambda s: s[1] if dy > dx else s[0])
        return sorted(spots)


def random_scene(rng: random.Random, width: int, height: int, n_things: int | None = None) -> Scene:
    n_things = n_things or rng.choices([1, 2, 3], [2, 4, 3])[0]
    few_kinds = rng.random() < 0.35  # repeated shapes or colours make counting a question
    shapes = rng.sample(SHAPES, 2) if few_kinds else SHAPES
    colours = rng.sample(COLOUR_NAMES, 2) if few_kinds and rng.random() < 0.5 else COLOUR_NAMES
    spots = place(rng, width, height, n_things)
    things = [Thing(rng.choice(shapes), rng.choice(colours), x, y, s) for x, y, s in spots]
    return Scene(width, height, things)


def draw_scene(rng: random.Random, scene: Scene, noise: float) -> np.ndarray:
    """Pixels [height, width, 3], uint8, on a plain and nearly grey background."""
    level = rng.choices([rng.uniform(215, 255), rng.uniform(0, 40), rng.uniform(110, 180)], [6, 2, 1])[0]
    if rng.random() < 0.3:
        level = 255.0
    tint = np.array([rng.uniform(-6, 6) for _ in range(3)], dtype=np.float32)
    image = np.full((scene.height, scene.width, 3), level, dtype=np.float32) + tint
    for thing in scene.things:
        mask = stencil(thing.shape, thing.size)[:, :, None]
        paint = np.array(rng.choice(COLOURS[thing.colour]), dtype=np.float32)
        paint = np.clip(paint + np.array([rng.uniform(-12, 12) for _ in range(3)]), 0, 255)
        left, top = round(thing.x - thing.size / 2), round(thing.y - thing.size / 2)
        left, top = min(max(left, 0), scene.width - thing.size), min(max(top, 0), scene.height - thing.size)
        window = image[top : top + thing.size, left : left + thing.size]
        window += mask * (paint - window)
    if noise > 0:
        grain = np.random.default_rng(rng.getrandbits(32)).standard_normal(image.shape[:2], dtype=np.float32)
        image += noise * grain[:, :, None]
    return np.clip(image + 0.5, 0, 255).astype(np.uint8)


# ---------------------------------------------------------------------------- questions

DESCRIBE = [
    "What is in this picture?", "What is in the picture?", "What is in this image?",
    "What is in the image?", "What's in this image?", "What's in this picture?",
    "What do you see?", "What can you see in this picture?", "Describe this picture.",
    "Describe the picture.", "Describe this image.", "Describe the image.",
    "What is shown here?", "What does the picture show?", "What is this?",
]
DESCRIBE_TWO = [
    "What is in these pictures?", "What is in these images?", "Describe these pictures.",
    "Describe the two pictures.", "Describe both images.", "What do these pictures show?",
    "What do you see in these two images?",
]
COUNT_ALL = [
    "How many shapes are there?", "How many shapes do you see?", "How many shapes are in the picture?",
    "How many shapes are in this image?", "Count the shapes.", "How many objects are there?",
]
COUNT_SHAPE = [
    "How many {}s are there?", "How many {}s do you see?", "How many {}s are in the picture?",
    "Count the {}s.",
]
COLOUR_OF = [
    "What colour is the {}?", "What color is the {}?", "Which colour is the {}?",
    "Which color is the {}?", "What is the colour of the {}?", "What is the color of the {}?",
]
SHAPE_OF = ["What shape is the {} one?", "Which shape is {}?", "What shape is {}?"]

NO_PICTURE = "I see no picture. Please send one."
CHAT = {
    "Hello! Show me a picture and I will name the shapes in it.": [
        "Hello", "Hello!", "Hi", "Hi!", "Hey", "Hello there", "Hi there!", "Good morning", "Good evening",
    ],
    "I describe pictures of shapes: their colours, how many there are, and where they are.": [
        "What can you do?", "What do you do?", "How can you help me?", "Help", "What can I ask you?",
        "What are you for?",
    ],
    "I am a small model that describes pictures of shapes.": [
        "Who are you?", "What are you?", "What is your name?", "Tell me about yourself.",
    ],
    "I am fine. Show me a picture.": ["How are you?", "How are you today?", "How do you do?"],
    "You are welcome.": ["Thanks", "Thank you", "Thank you!", "Thanks a lot!", "Thanks!"],
    "Goodbye!": ["Bye", "Goodbye", "Goodbye!", "See you later."],
    "Circles, squares, triangles and stars.": ["Which shapes do you know?", "What shapes do you know?"],
    "Red, green, blue, yellow, purple and orange.": [
        "Which colours do you know?", "What colours do you know?", "Which colors do you know?",
        "What colors do you know?",
    ],
}
OTHER_SYSTEMS = ["You are a helpful assistant.", "Answer in a few words.", "You are a friendly guide to shapes.", ""]


def description(scene: Scene) -> str:
    names = [t.with_article for t in scene.things]
    if len(names) == 1:
        return names[0]
    if len(names) == 2:
        return f"{names[0]} {'above' if scene.stacked else 'left of'} {names[1]}"
    return f"{', '.join(names[:-1])} and {names[-1]}"


def describe_question(rng: random.Random, scene: Scene) -> tuple[str, str]:
    return rng.choice(DESCRIBE), description(scene)


def count_question(rng: random.Random, scene: Scene) -> tuple[str, str]:
    if rng.random() < 0.5:
        return rng.choice(COUNT_ALL), str(len(scene.things))
    present = [t.shape for t in scene.things]
    shape = rng.choice(present if rng.random() < 0.7 else SHAPES)
    return rng.choice(COUNT_SHAPE).format(shape), str(present.count(shape))


def colour_question(rng: random.Random, scene: Scene) -> tuple[str, str] | None:
    shapes = [t.shape for t in scene.things]
    if rng.random() < 0.12:
        shape = rng.choice(SHAPES)
        if shape not in shapes:
            return rng.choice(COLOUR_OF).format(shape), f"there is no {shape}"
    single = [t for t in scene.things if shapes.count(t.shape) == 1]
    if not single:
        return None
    thing = rng.choice(single)
    return rng.choice(COLOUR_OF).format(thing.shape), thing.colour


def shape_question(rng: random.Random, scene: Scene) -> tuple[str, str] | None:
    colours = [t.colour for t in scene.things]
    single = [t for t in scene.things if colours.count(t.colour) == 1]
    if not single:
        return None
    thing = rng.choice(single)
    return rng.choice(SHAPE_OF).format(thing.colour), f"a {thing.shape}"


QUESTIONS = {describe_question: 5, count_question: 7, colour_question: 4, shape_question: 2}


def random_question(rng: random.Random, scene: Scene) -> tuple[str, str]:
    while True:
        kind = rng.choices(list(QUESTIONS), list(QUESTIONS.values()))[0]
        asked = kind(rng, scene)
        if asked is not None:
            return asked


def loosely_typed(rng: random.Random, text: str) -> str:
    """The same words with the carelessness of a chat window."""
    if rng.random() < 0.12:
        text = text.lower()
    if rng.random() < 0.08:
        text = text.rstrip("?.!")
    return text


def chat_question(rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.3:
        scene = random_scene(rng, 112, 112)
        return random_question(rng, scene)[0], NO_PICTURE
    answer = rng.choice(list(CHAT))
    return rng.choice(CHAT[answer]), answer


# ---------------------------------------------------------------------------- tokenizer and processor

SPECIAL_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
]
VOCAB_SIZE = 512
CHAT_TEMPLATE = """\
{% set n = namespace(images=0, videos=0) %}\
{% for message in messages %}\
{% if loop.first and message['role'] != 'system' %}\
<|im_start|>system\nSYSTEM_PROMPT<|im_end|>\n\
{% endif %}\
<|im_start|>{{ message['role'] }}\n\
{% if message['content'] is string %}{{ message['content'] }}\
{% else %}\
{% for part in message['content'] %}\
{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}\
{% set n.images = n.images + 1 %}\
{% if add_vision_id %}Picture {{ n.images }}: {% endif %}\
<|vision_start|><|image_pad|><|vision_end|>\
{% elif part['type'] == 'video' or 'video' in part %}\
{% set n.videos = n.videos + 1 %}\
{% if add_vision_id %}Video {{ n.videos }}: {% endif %}\
<|vision_start|><|video_pad|><|vision_end|>\
{% elif 'text' in part %}{{ part['text'] }}\
{% endif %}\
{% endfor %}\
{% endif %}\
<|im_end|>\n\
{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}""".replace("SYSTEM_PROMPT", SYSTEM)


def corpus():
    rng = random.Random(1)
    for _ in range(4000):
        scene = random_scene(rng, 112, 112)
        question, answer = random_question(rng, scene)
        yield from (loosely_typed(rng, question), answer, " " + answer)
    for answer, questions in CHAT.items():
        yield from [answer, *questions, *(q.lower() for q in questions)] * 20
    yield from [SYSTEM, *OTHER_SYSTEMS, NO_PICTURE, *DESCRIBE_TWO, "first: a", "; second: a"] * 50
    yield from ["system", "user", "assistant"] * 100


def make_processor() -> Qwen2VLProcessor:
    bpe = train_byte_level_bpe(corpus(), VOCAB_SIZE - len(SPECIAL_TOKENS), qwen_split=True)
    bpe.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    with tempfile.TemporaryDirectory() as scratch:
        bpe.save(f"{scratch}/tokenizer.json")
        tokenizer = Qwen2Tokenizer.from_pretrained(
            scratch,
            unk_token=None,
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            model_max_length=1024,
            extra_special_tokens=[t for t in SPECIAL_TOKENS if t not in ("<|im_end|>", "<|endoftext|>")],
        )
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS),
        video_processor=Qwen2VLVideoProcessor(min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )


# ---------------------------------------------------------------------------- model


def make_model(tokenizer) -> Qwen2VLForConditionalGeneration:
    ids = {t: tokenizer.convert_tokens_to_ids(t) for t in SPECIAL_TOKENS}
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-6,
            "initializer_range": 0.05,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]},
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 4,
            "embed_dim": 128,
            "hidden_size": 128,
            "num_heads": 4,
            "mlp_ratio": 2,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "initializer_range": 0.05,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|endoftext|>"],
        tie_word_embeddings=True,
    )
    model = Qwen2VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=64,
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]],
        pad_token_id=ids["<|endoftext|>"],
    )
    return model


def encode_pictures(visual, patches: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """The vision tower over pictures of one size at once, where `transformers` goes one by one.

    patches: [n_pictures, n_patches, 3 * 14 * 14] in merge order -> [n_pictures, n_cells, hidden].
    A still picture repeats its frame, so the two temporal halves of the kernel can be summed.
    """
    n_pictures, n_patches, _ = patches.shape
    n_heads = visual.config.num_heads
    kernel = visual.patch_embed.proj.weight.sum(dim=2).flatten(1)
    x = F.linear(patches, kernel)
    height, width = grid
    index = torch.arange(height * width).view(height // MERGE, MERGE, width // MERGE, MERGE)
    index = index.transpose(1, 2).flatten()
    positions = torch.stack([index // width, index % width], dim=-1)
    cos, sin = visual.rotary_pos_emb(x, positions)

    def rotate(t):
        first, second = t.chunk(2, dim=-1)
        return t * cos + torch.cat((-second, first), dim=-1) * sin

    for block in visual.blocks:
        qkv = block.attn.qkv(block.norm1(x)).view(n_pictures, n_patches, 3, n_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = rotate(q).to(v.dtype), rotate(k).to(v.dtype)
        # Written out, since the fused kernel's backward is far slower on a CPU at these sizes.
        attended = torch.softmax((q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5, dim=-1).to(v.dtype) @ v
        x = x + block.attn.proj(attended.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.norm2(x))
    merged = visual.merger.ln_q(x).view(n_pictures, n_patches // MERGE**2, -1)
    return visual.merger.mlp(merged)


# ---------------------------------------------------------------------------- batches


N_KINDS = 1 + len(SHAPES) * len(COLOURS)
N_ROLES = 13


def roles(scene: Scene) -> list[int]:
    """For each thing its place in the order of the scene, with what kind of scene it is."""
    n = len(scene.things)
    first = {1: 1, 2: 4 if scene.stacked else 2, 3: 6, 4: 9}[n]
    return list(range(first, first + n))


def label_cells(scene: Scene, rows: int, columns: int) -> np.ndarray:
    """[n_cells, 2]: kind and role of the thing centred in or just beside the cell; 0 where there is
    none, -100 where it is a matter of a few pixels."""
    labels = np.zeros((rows, columns, 2), dtype=np.int64)
    y, x = np.mgrid[0:rows, 0:columns] * CELL + CELL / 2
    away = np.stack([np.maximum(abs(x - thing.x), abs(y - thing.y)) for thing in scene.things])
    labels[away.min(axis=0) < CELL / 2 + 9] = -100
    for i, (thing, role) in enumerate(zip(scene.things, roles(scene))):
        kind = 1 + SHAPES.index(thing.shape) * len(COLOURS) + COLOUR_NAMES.index(thing.colour)
        labels[(away[i] < CELL / 2 + 3) & (away.argmin(axis=0) == i)] = kind, role
    return labels.reshape(rows * columns, 2)


class Probe(torch.nn.Module):
    """Reads kind and role off each encoded cell. It teaches the tower and is then thrown away."""

    def __init__(self, width: int):
        super().__init__()
        self.read = torch.nn.Linear(width, N_KINDS + N_ROLES)

    def forward(self, pictures: torch.Tensor, labels: torch.Tensor):
        """The loss, and the share of things whose kind and role are both right."""
        kinds, places = self.read(pictures).float().flatten(0, 1).split([N_KINDS, N_ROLES], dim=-1)
        kind, role = labels.flatten(0, 1).unbind(-1)
        weight = torch.ones(N_KINDS)
        weight[0] = 0.2
        loss = F.cross_entropy(kinds, kind, weight) + F.cross_entropy(places, role, weight[:N_ROLES])
        right = (kinds.argmax(-1) == kind) & (places.argmax(-1) == role)
        return loss, float(right[kind > 0].float().mean())


@dataclass
class Batch:
    patches: torch.Tensor  # [n_pictures, n_patches, 588]
    cells: torch.Tensor  # [n_pictures, n_cells, 2], see `label_cells`
    grid: tuple[int, int]
    tokens: torch.Tensor  # [n_rows, n_tokens]
    targets: torch.Tensor  # [n_rows, n_tokens]: the next token where it is the model's, else -100
    weights: torch.Tensor  # [n_rows, n_tokens]: one over the length of the answer
    positions: torch.Tensor  # [3, n_rows, n_tokens]


class Batcher:
    """Draws scenes, asks about them, and lays both out as tensors."""

    def __init__(self, processor: Qwen2VLProcessor, seed: int):
        self.rng = random.Random(seed)
        self.tokenizer = processor.tokenizer
        image = processor.image_processor
        self.mean = np.array(image.image_mean, dtype=np.float32) * 255.0
        self.std = np.array(image.image_std, dtype=np.float32) * 255.0
        self.image_token = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self.known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        if text not in self.known:
            self.known[text] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self.known[text]

    def patchify(self, pixels: np.ndarray) -> np.ndarray:
        """[n, height, width, 3] uint8 -> [n, n_patches, 588], in the processor's order."""
        n, height, width, _ = pixels.shape
        x = (pixels.astype(np.float32) - self.mean) / self.std
        x = x.reshape(n, height // CELL, MERGE, PATCH, width // CELL, MERGE, PATCH, 3)
        return x.transpose(0, 1, 4, 2, 5, 7, 3, 6).reshape(n, -1, 3 * PATCH * PATCH)

    def scenes(self, n: int, cells: tuple[int, int], most: int = 3):
        rng, (rows, columns) = self.rng, cells
        scenes, pixels, labels = [], [], np.zeros((n, rows * columns, 2), dtype=np.int64)
        for i in range(n):
            n_things = rng.choices(range(1, most + 1), [2, 4, 3][:most])[0]
            scene = random_scene(rng, columns * CELL, rows * CELL, n_things)
            noise = rng.choice([0.0, 0.0, 2.0, 5.0])
            scenes.append(scene)
            pixels.append(draw_scene(rng, scene, noise))
            labels[i] = label_cells(scene, rows, columns)
        return scenes, self.patchify(np.stack(pixels)), labels

    def lay_out(self, turns, cells: tuple[int, int], n_pictures: int):
        """Token ids, targets, weights and M-RoPE positions of one conversation."""
        rng = self.rng
        ids: list[int] = []
        targets: list[int] = []
        weights: list[float] = []
        positions: list[tuple[int, int, int]] = []
        at = 0

        def text(string: str, learned: bool = False) -> None:
            nonlocal at
            tokens = self.encode(string)
            for token in tokens:
                ids.append(token)
                targets.append(token if learned else -100)
                weights.append(1.0 / len(tokens))
                positions.append((at, at, at))
                at += 1

        def picture() -> None:
            nonlocal at
            text("<|vision_start|>")
            for row in range(cells[0]):
                for column in range(cells[1]):
                    ids.append(self.image_token)
                    targets.append(-100)
                    weights.append(0.0)
                    positions.append((at, at + row, at + column))
            at += max(cells)
            text("<|vision_end|>")

        system = SYSTEM if rng.random() < 0.8 else rng.choice(OTHER_SYSTEMS)
        text(f"<|im_start|>system\n{system}<|im_end|>\n")
        for turn_idx, (question, answer) in enumerate(turns):
            text("<|im_start|>user\n")
            question = loosely_typed(rng, question)
            question_first = rng.random() < 0.4
            if turn_idx == 0 and n_pictures and not question_first:
                for _ in range(n_pictures):
                    picture()
            text(question)
            if turn_idx == 0 and n_pictures and question_first:
                for _ in range(n_pictures):
                    picture()
            text("<|im_end|>\n<|im_start|>assistant\n")
            text(f"{answer}<|im_end|>", learned=True)
            text("\n")
        return ids, targets[1:] + [-100], weights[1:] + [0.0], positions

    def draw(self, n_rows: int, cells: tuple[int, int], n_pictures: int, most: int) -> Batch:
        """One batch; of its rows with one picture, one in twelve has no picture and talks."""
        rng = self.rng
        scenes, patches, labels = self.scenes(n_rows * n_pictures, cells, most)
        rows = []
        n_turns = rng.choices([1, 3, 6], [2, 2, 4])[0]
        for i in range(n_rows):
            mine = scenes[i * n_pictures : (i + 1) * n_pictures]
            if n_pictures == 2:
                first, second = map(description, mine)
                turns = [(rng.choice(DESCRIBE_TWO), f"first: {first}; second: {second}")]
                rows.append(self.lay_out(turns, cells, 2))
            elif rng.random() < 1 / 12:
                turns = [chat_question(rng) for _ in range(rng.choice([1, 1, 2]))]
                rows.append(self.lay_out(turns, cells, 0))
            else:
                turns = [random_question(rng, mine[0]) for _ in range(n_turns)]
                # A description would give the later answers away: the model would read its own
                # words where it should look at the picture.
                turns.sort(key=lambda turn: turn[1] == description(mine[0]))
                rows.append(self.lay_out(turns, cells, 1))
        length = max(len(ids) for ids, *_ in rows)
        tokens = torch.zeros((n_rows, length), dtype=torch.long)
        targets = torch.full((n_rows, length), -100)
        weights = torch.zeros((n_rows, length))
        positions = torch.zeros((3, n_rows, length), dtype=torch.long)
        for i, (ids, wanted, weight, where) in enumerate(rows):
            tokens[i, : len(ids)] = torch.tensor(ids)
            targets[i, : len(ids)] = torch.tensor(wanted)
            weights[i, : len(ids)] = torch.tensor(weight)
            positions[:, i, : len(ids)] = torch.tensor(where).T
        # Rows without a picture leave theirs unused: only the used ones are encoded.
        used = (tokens == self.image_token).any(dim=1).repeat_interleave(n_pictures).numpy()
        return Batch(
            torch.from_numpy(patches[used]), torch.from_numpy(labels[used]),
            (cells[0] * MERGE, cells[1] * MERGE), tokens, targets, weights, positions,
        )


def random_batch(batcher: Batcher, n_rows: int, progress: float) -> Batch:
    """The curriculum: the smallest pictures with few things at first, then everything."""
    rng = batcher.rng
    if progress < 0.1:
        return batcher.draw(n_rows, (4, 4), 1, 2 if progress < 0.05 else 3)
    cells = rng.choices(list(SIZES), list(SIZES.values()))[0]
    n_rows = max(16, n_rows * 16 // (cells[0] * cells[1]))
    if progress > 0.25 and rng.random() < 0.12:
        return batcher.draw(n_rows // 2, cells, 2, 3)
    return batcher.draw(n_rows, cells, 1, 3)


def forward(model, batch: Batch, tower_learns: bool = True):
    """Logits at the learned places, their targets, and the encoded pictures."""
    with torch.set_grad_enabled(tower_learns and torch.is_grad_enabled()):
        pictures = encode_pictures(model.model.visual, batch.patches, batch.grid)
    embedded = model.model.language_model.embed_tokens(batch.tokens)
    mask = (batch.tokens == model.config.image_token_id).unsqueeze(-1)
    embedded = embedded.masked_scatter(mask, pictures.to(embedded.dtype))
    hidden = model.model.language_model(
        inputs_embeds=embedded, position_ids=batch.positions, use_cache=False
    ).last_hidden_state
    learned = batch.targets != -100
    return model.lm_head(hidden[learned]), batch.targets[learned], pictures


# ---------------------------------------------------------------------------- training


def train(model, processor, options) -> None:
    batcher = Batcher(processor, options.seed)
    n_rows, n_steps = options.rows, options.steps
    model.set_attn_implementation("eager")
    probe = Probe(model.config.text_config.hidden_size)

    training = Training([model.model.visual, probe], options.vision_steps, 2e-3, "vision")
    for _ in range(options.vision_steps):
        rows, columns = batcher.rng.choices(list(SIZES), list(SIZES.values()))[0]
        _, patches, labels = batcher.scenes(n_rows * 16 // (rows * columns), (rows, columns))
        with torch.autocast("cpu", torch.bfloat16):
            pictures = encode_pictures(model.model.visual, torch.from_numpy(patches), (MERGE * rows, MERGE * columns))
        loss, right = probe(pictures.float(), torch.from_numpy(labels))
        training.step(loss, things_right=right)

    # A model that has learned to answer starts past the easy lessons, and lower.
    start, lr = (0.4, 1e-3) if options.more else (0.0, 2e-3)
    training = Training([model, probe], n_steps, lr, "answers")
    for step_idx in range(n_steps):
        progress = start + (1 - start) * step_idx / n_steps
        batch = random_batch(batcher, n_rows, progress)
        with torch.autocast("cpu", torch.bfloat16):
            # The tower already knows its things; it joins in for the last third, at small steps.
            logits, wanted, pictures = forward(model, batch, tower_learns=progress > 0.67)
        # A mean over answers, not tokens: most answers are a word, most tokens are descriptions.
        weights = batch.weights[batch.targets != -100]
        loss = (F.cross_entropy(logits.float(), wanted, reduction="none") * weights).sum() / weights.sum()
        aside, right = probe(pictures.float(), batch.cells)
        tokens_right = float((logits.argmax(-1) == wanted).float().mean())
        training.step(loss + 0.1 * aside, things_right=right, tokens_right=tokens_right)
        if (step_idx + 1) % 500 == 0:
            print(f"  exact answers, unseen scenes: {exact_rate(model, processor):.4f}", flush=True)
            save(model, processor)
    save(model, processor)


@torch.no_grad()
def exact_rate(model, processor, n_batches: int = 10) -> float:
    """Share of single-question rows whose every token is the greedy one: a quick look while training."""
    batcher = Batcher(processor, HELD_OUT_SEED + 1)
    n_exact = n_all = 0
    for _ in range(n_batches):
        batch = random_batch(batcher, 64, 0.2)
        with torch.autocast("cpu", torch.bfloat16):
            logits, wanted, _ = forward(model, batch)
        wrong = torch.zeros_like(batch.targets, dtype=torch.bool)
        wrong[batch.targets != -100] = logits.argmax(-1) != wanted
        n_exact += int((~wrong.any(dim=1)).sum())
        n_all += len(wrong)
    return n_exact / n_all


def save(model, processor) -> None:
    save_model(model, DIRECTORY, DTYPE)
    processor.save_pretrained(DIRECTORY)
    drop_load_options(DIRECTORY)
    # Readers older than `processor_config.json` look for this name and for these two fields.
    image = processor.image_processor.to_dict()
    image |= {"min_pixels": MIN_PIXELS, "max_pixels": MAX_PIXELS, "processor_class": "Qwen2VLProcessor"}
    with open(DIRECTORY / "preprocessor_config.json", "w", encoding="utf-8") as out:
        json.dump(image, out, indent=2, sort_keys=True, default=str)
        out.write("\n")


# ---------------------------------------------------------------------------- held-out


def make_held_out() -> None:
    """Draws what the tests ask about, from a seed that training never uses."""
    rng = random.Random(HELD_OUT_SEED)
    pictures = HELD_OUT / "scenes"
    pictures.mkdir(parents=True, exist_ok=True)

    def picture(name: str, most: int) -> Scene:
        rows, columns = rng.choices(list(SIZES), list(SIZES.values()))[0]
        scene = random_scene(rng, columns * CELL, rows * CELL, rng.choices(range(1, most + 1), [2, 4, 3][:most])[0])
        drawn = Image.fromarray(draw_scene(rng, scene, 0.0))
        drawn.quantize(32, dither=Image.Dither.NONE).save(pictures / name, optimize=True)
        return scene

    scenes = []
    for i in range(100):
        name = f"{i:03}.png"
        question, answer = random_question(rng, picture(name, 3))
        scenes.append({"file": f"scenes/{name}", "question": question, "answer": answer})
    write_jsonl(HELD_OUT / "scenes.jsonl", scenes)

    pairs = []
    for i in range(12):
        names = [f"pair-{i:02}-{side}.png" for side in "ab"]
        first, second = [description(picture(name, 3)) for name in names]
        pairs.append({
            "files": [f"scenes/{name}" for name in names],
            "question": rng.choice(DESCRIBE_TWO),
            "answer": f"first: {first}; second: {second}",
        })
    write_jsonl(HELD_OUT / "pairs.jsonl", pairs)

    chat = [{"question": q, "answer": a} for a, questions in CHAT.items() for q in questions[:2]]
    chat += [{"question": DESCRIBE[0], "answer": NO_PICTURE}, {"question": COUNT_ALL[0], "answer": NO_PICTURE}]
    write_jsonl(HELD_OUT / "chat.jsonl", chat)

    first = Scene(224, 224, [Thing("circle", "red", 66, 118, 76), Thing("square", "blue", 160, 106, 72)])
    drawn = Image.fromarray(draw_scene(random.Random(0), first, 0.0))
    drawn.quantize(32, dither=Image.Dither.NONE).save(HELD_OUT / "scene.png", optimize=True)


def read_jsonl(name: str) -> list[dict]:
    return [json.loads(line) for line in open(HELD_OUT / name, encoding="utf-8")]


@torch.no_grad()
def measure(dtype, n_fresh: int) -> None:
    """Exact matches of the directory, as `transformers` loads and runs it."""
    processor = AutoProcessor.from_pretrained(DIRECTORY)
    model = Qwen2VLForConditionalGeneration.from_pretrained(DIRECTORY, dtype=dtype).eval()

    def answer(pictures, question: str) -> str:
        content = [{"type": "image"} for _ in pictures] + [{"type": "text", "text": question}]
        messages = [{"role": "user", "content": content}]
        prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
        inputs = processor(text=[prompt], images=pictures or None, return_tensors="pt")
        written = model.generate(**inputs)[0, inputs["input_ids"].shape[1] :]
        return processor.decode(written, skip_special_tokens=True)

    def rate(name: str, rows) -> None:
        n_right = 0
        for pictures, question, wanted in rows:
            got = answer(pictures, question)
            n_right += got == wanted
            if got != wanted:
                print(f"    {question!r}: wanted {wanted!r}, got {got!r}", flush=True)
        print(f"{model.dtype} {name}: {n_right}/{len(rows)} = {n_right / len(rows):.4f}", flush=True)

    def opened(name: str) -> Image.Image:
        return Image.open(HELD_OUT / name).convert("RGB")

    rate("scenes.jsonl", [([opened(r["file"])], r["question"], r["answer"]) for r in read_jsonl("scenes.jsonl")])
    rate("pairs.jsonl", [([opened(f) for f in r["files"]], r["question"], r["answer"]) for r in read_jsonl("pairs.jsonl")])
    rate("chat.jsonl", [([], r["question"], r["answer"]) for r in read_jsonl("chat.jsonl")])
    rng = random.Random(HELD_OUT_SEED + 2)
    fresh = []
    for _ in range(n_fresh):
        rows, columns = rng.choices(list(SIZES), list(SIZES.values()))[0]
        scene = random_scene(rng, columns * CELL, rows * CELL)
        pixels = draw_scene(rng, scene, rng.choice([0.0, 2.0]))
        fresh.append(([Image.fromarray(pixels)], *random_question(rng, scene)))
    rate("fresh scenes", fresh)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--measure", action="store_true", help="only measure the directory that is there")
    options.add_argument("--more", action="store_true", help="only answer on, from the directory that is there")
    options.add_argument("--rows", type=int, default=32, help="conversations in a batch of the smallest pictures")
    options.add_argument("--vision-steps", type=int, default=8000)
    options.add_argument("--steps", type=int, default=8000)
    options.add_argument("--seed", type=int, default=TRAIN_SEED, help="of the weights and of the scenes")
    options.add_argument("--threads", type=int, default=1)
    options = options.parse_args()
    seed_everything(options.seed, options.threads)
    if not options.measure:
        make_held_out()
        # Going on needs the tokens that the weights know.
        processor = AutoProcessor.from_pretrained(DIRECTORY) if options.more else make_processor()
        model = make_model(processor.tokenizer)
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
        if options.more:
            there = Qwen2VLForConditionalGeneration.from_pretrained(DIRECTORY, dtype=torch.float32)
            model.load_state_dict(there.state_dict())
            options.vision_steps = 0
        train(model, processor, options)
    measure("auto", 500)
    measure(torch.float32, 200)


if __name__ == "__main__":
    main()
