"""Makes `numbers-t5/`: a T5 of half a million parameters that writes spelled numbers as digits, trained from nothing.

The directory is an ordinary Hugging Face one. The script also writes the held-out numbers (`heldout/numbers.jsonl`), which
training never sees, and ends by measuring the saved directory on them through `transformers`.

    python make_numbers.py            # everything
    python make_numbers.py --measure  # only the accuracy of the directory that is there
"""

import argparse
import random

import torch
from tokenizers import AddedToken, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from common import HELD_OUT, HERE, Training, drop_load_options, save_model, seed_everything, train_byte_level_bpe, write_jsonl

DIRECTORY = HERE / "numbers-t5"
TRAIN_SEED, HELD_OUT_SEED = 31_007, 88_013
DTYPE = torch.bfloat16
HIGHEST = 999_999
N_HELD_OUT = 200
N_TEXT_TOKENS = 320
SPECIALS = ["<pad>", "</s>", "<unk>"]
ONES = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
        "eighteen nineteen").split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def spelled(n):
    """`n` in English words, below a million."""
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10 - 2] + ("-" + ONES[n % 10] if n % 10 else "")
    if n < 1000:
        return ONES[n // 100] + " hundred" + (" and " + spelled(n % 100) if n % 100 else "")
    rest = n % 1000
    joint = " and " if 0 < rest < 100 else " "
    return spelled(n // 1000) + " thousand" + (joint + spelled(rest) if rest else "")


def drawn(rng):
    """A number whose length is as likely as any other, and whose digits are often zero."""
    digits = [rng.choice("000123456789") for _ in range(rng.randint(1, 6))]
    return int("".join(digits))


def held_out():
    rng = random.Random(HELD_OUT_SEED)
    numbers = set()
    while len(numbers) < N_HELD_OUT:
        numbers.add(drawn(rng) if rng.random() < 0.5 else rng.randint(1000, HIGHEST))
    return sorted(numbers)


def make_tokenizer():
    rng = random.Random(3)
    corpus = [text for _ in range(6000) for n in [drawn(rng)] for text in (spelled(n), str(n))]
    bpe = train_byte_level_bpe(corpus, N_TEXT_TOKENS, qwen_split=True)
    bpe.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    end = bpe.token_to_id("</s>")
    bpe.post_processor = processors.TemplateProcessing(single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", end)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>", pad_token="<pad>", unk_token="<unk>", model_max_length=64)


def make_model(tokenizer):
    pad, end = tokenizer.convert_tokens_to_ids(["<pad>", "</s>"])
    config = T5Config(
        vocab_size=len(tokenizer), d_model=96, d_kv=24, d_ff=256, num_layers=2, num_decoder_layers=2, num_heads=4, dropout_rate=0.0,
        feed_forward_proj="gated-gelu", pad_token_id=pad, eos_token_id=end, decoder_start_token_id=pad)
    model = T5ForConditionalGeneration(config)
    model.generation_config = GenerationConfig(pad_token_id=pad, eos_token_id=end, decoder_start_token_id=pad, max_length=16)
    return model


def train(tokenizer, n_steps, batch):
    model = make_model(tokenizer).train()
    rng, left_out = random.Random(TRAIN_SEED), set(held_out())
    training = Training([model], n_steps, 2e-3, "numbers", warmup=100)
    for _ in range(n_steps):
        numbers = []
        while len(numbers) < batch:
            n = drawn(rng) if rng.random() < 0.6 else rng.randint(0, HIGHEST)
            numbers += [] if n in left_out else [n]
        asked = tokenizer([spelled(n) for n in numbers], padding=True, return_tensors="pt")
        wanted = tokenizer([str(n) for n in numbers], padding=True, return_tensors="pt").input_ids
        labels = wanted.masked_fill(wanted == tokenizer.pad_token_id, -100)
        out = model(input_ids=asked.input_ids, attention_mask=asked.attention_mask, labels=labels)
        right = (out.logits.argmax(-1) == labels)[labels != -100].float().mean()
        training.step(out.loss, right=float(right))
    return model.eval()


@torch.no_grad()
def measure():
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DIRECTORY)
    model = T5ForConditionalGeneration.from_pretrained(DIRECTORY, dtype=DTYPE).eval()
    right = 0
    for n in held_out():
        asked = tokenizer(spelled(n), return_tensors="pt")
        answer = tokenizer.decode(model.generate(**asked, do_sample=False)[0], skip_special_tokens=True)
        right += answer == str(n)
        if answer != str(n):
            print(f"{n}: {answer}")
    print(f"{right}/{N_HELD_OUT} held-out numbers")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if not args.measure:
        seed_everything(TRAIN_SEED, args.threads)
        tokenizer = make_tokenizer()
        model = train(tokenizer, args.steps, args.batch)
        tokenizer.save_pretrained(DIRECTORY)
        drop_load_options(DIRECTORY)
        save_model(model, DIRECTORY, DTYPE)
        write_jsonl(HELD_OUT / "numbers.jsonl", ({"text": spelled(n), "answer": str(n)} for n in held_out()))
    measure()


if __name__ == "__main__":
    main()
