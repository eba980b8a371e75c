"""Makes `plates-trocr/`: a TrOCR of half a million parameters that reads a printed number, trained from nothing.

The directory is an ordinary Hugging Face one. The script also draws the held-out images (`heldout/plates.jsonl`), and ends by
measuring the saved directory on them through `transformers`.

    python make_plates.py            # everything
    python make_plates.py --measure  # only the accuracy of the directory that is there
"""

import argparse
import json
import random

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from tokenizers import AddedToken
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    TrOCRConfig,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from common import HELD_OUT, HERE, Training, drop_load_options, save_model, seed_everything, train_byte_level_bpe, write_jsonl

DIRECTORY = HERE / "plates-trocr"
TRAIN_SEED, HELD_OUT_SEED = 41_011, 99_017
DTYPE = torch.float16
HEIGHT, WIDTH = 32, 64
N_HELD_OUT = 150
SPECIALS = ["<s>", "<pad>", "</s>", "<unk>"]
FONTS = {size: ImageFont.load_default(size=size) for size in range(20, 23)}


def plate(rng):
    """An image of one to three digits, and the digits."""
    text = "".join(rng.choice("0123456789") for _ in range(rng.randint(1, 3)))
    paper, ink = rng.randint(150, 255), rng.randint(0, 90)
    if rng.random() < 0.3:
        paper, ink = ink, paper
    tint = [rng.randint(-25, 25) for _ in range(3)]
    image = Image.new("RGB", (WIDTH, HEIGHT), tuple(max(0, min(255, paper + t)) for t in tint))
    font = FONTS[rng.choice(list(FONTS))]
    left, top, right, bottom = font.getbbox(text)
    at = rng.randint(4, 10), rng.randint(6, 10)
    ImageDraw.Draw(image).text((at[0] - left, at[1] - top), text, fill=(ink,) * 3, font=font)
    noise = np.random.default_rng(rng.getrandbits(32)).normal(0, rng.uniform(0, 8), (HEIGHT, WIDTH, 1))
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8)), text


def pixels(images):
    """As the processor gives them, whose sizes these images have."""
    values = np.stack([np.asarray(image, dtype=np.float32) for image in images]) / 255
    return torch.from_numpy((values - 0.5) / 0.5).permute(0, 3, 1, 2).contiguous()


def make_tokenizer():
    bpe = train_byte_level_bpe(["0 1 2 3 4 5 6 7 8 9"], 256, qwen_split=True)
    bpe.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
                                   cls_token="<s>", sep_token="</s>", model_max_length=32, processor_class="TrOCRProcessor")


def make_model(tokenizer):
    begin, pad, end = tokenizer.convert_tokens_to_ids(["<s>", "<pad>", "</s>"])
    encoder = ViTConfig(hidden_size=96, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256, image_size=[HEIGHT, WIDTH],
                        patch_size=8, qkv_bias=True, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    decoder = TrOCRConfig(vocab_size=len(tokenizer), d_model=96, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=256,
                          max_position_embeddings=32, dropout=0.0, is_decoder=True, add_cross_attention=True, bos_token_id=begin,
                          pad_token_id=pad, eos_token_id=end, decoder_start_token_id=end)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = end, pad, end
    model = VisionEncoderDecoderModel(config)
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and "embed" not in name:
            torch.nn.init.xavier_uniform_(weight)
    model.generation_config = GenerationConfig(decoder_start_token_id=end, pad_token_id=pad, bos_token_id=begin, eos_token_id=end, max_length=8)
    return model


def train(tokenizer, n_steps, batch):
    model = make_model(tokenizer).train()
    rng = random.Random(TRAIN_SEED)
    training = Training([model], n_steps, 1.5e-3, "plates", warmup=200)
    for _ in range(n_steps):
        drawn = [plate(rng) for _ in range(batch)]
        wanted = [tokenizer.convert_tokens_to_ids(list(text)) + [tokenizer.eos_token_id] for _, text in drawn]
        longest = max(map(len, wanted))
        labels = torch.tensor([ids + [-100] * (longest - len(ids)) for ids in wanted])
        out = model(pixel_values=pixels([image for image, _ in drawn]), labels=labels)
        right = (out.logits.argmax(-1) == labels)[labels != -100].float().mean()
        training.step(out.loss, right=float(right))
    return model.eval()


def write_held_out():
    rng = random.Random(HELD_OUT_SEED)
    rows = []
    (HELD_OUT / "plates").mkdir(parents=True, exist_ok=True)
    for i in range(N_HELD_OUT):
        image, text = plate(rng)
        file = f"plates/{i:03}.png"
        image.quantize(32).save(HELD_OUT / file, optimize=True)
        rows.append({"file": file, "text": text})
    write_jsonl(HELD_OUT / "plates.jsonl", rows)


@torch.no_grad()
def measure():
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DIRECTORY)
    model = VisionEncoderDecoderModel.from_pretrained(DIRECTORY).float().eval()
    rows = [json.loads(line) for line in open(HELD_OUT / "plates.jsonl")]
    right = 0
    for row in rows:
        image = Image.open(HELD_OUT / row["file"]).convert("RGB")
        answer = tokenizer.decode(model.generate(pixel_values=pixels([image]), do_sample=False)[0], skip_special_tokens=True)
        right += answer == row["text"]
        if answer != row["text"]:
            print(f"{row['file']} {row['text']}: {answer}")
    print(f"{right}/{len(rows)} held-out images")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if not args.measure:
        seed_everything(TRAIN_SEED, args.threads)
        tokenizer = make_tokenizer()
        model = train(tokenizer, args.steps, args.batch)
        tokenizer.save_pretrained(DIRECTORY)
        drop_load_options(DIRECTORY)
        save_model(model, DIRECTORY, DTYPE)
        ViTImageProcessorPil(size={"height": HEIGHT, "width": WIDTH}, image_mean=[0.5] * 3, image_std=[0.5] * 3).save_pretrained(DIRECTORY)
        write_held_out()
    measure()


if __name__ == "__main__":
    main()
