"""The text encoder-decoder families as small cases: configurations, vocabularies, and names on disk."""

import collections
import json
import math

import torch
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram
from transformers import (
    BartForConditionalGeneration,
    BlenderbotForConditionalGeneration,
    BlenderbotSmallForConditionalGeneration,
    M2M100ForConditionalGeneration,
    MarianMTModel,
    MBartForConditionalGeneration,
    MT5ForConditionalGeneration,
    PegasusForConditionalGeneration,
    T5ForConditionalGeneration,
    UMT5ForConditionalGeneration,
)

from common import CORPUS, byte_bpe, write_json, write_tensors


# ---- vocabularies

def byte_level(first, last, n_merges, template):
    """A byte-level BPE with special tokens before and after it, as fairseq's dictionaries have them."""
    trained = json.loads(byte_bpe(n_merges, [], qwen=False).to_str())["model"]
    vocab = {name: i for i, name in enumerate(first)}
    vocab |= {piece: i + len(first) for piece, i in trained["vocab"].items()}
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in trained["merges"]]
    tok = Tokenizer(BPE(vocab=vocab, merges=merges))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    return finish(tok, first + last, template)


def pieces(n_words):
    """Letters, and the most frequent words and word starts of the corpus, with the logarithm of their share."""
    text = "".join(c for c in CORPUS if c.isascii()).split()
    marked = ["▁" + word for word in text]
    letters = collections.Counter("".join(marked))
    longer = collections.Counter(marked) + collections.Counter(w[:3] for w in marked if len(w) > 3)
    longer += collections.Counter(w[i:i + 2] for w in marked for i in range(1, len(w) - 1))
    best = sorted(longer.items(), key=lambda kv: (-kv[1] * len(kv[0]), kv[0]))[:n_words]
    both = sorted(letters.items()) + best
    total = sum(n for _, n in both)
    return [(piece, math.log(n / total)) for piece, n in both]


def unigram(first, last, n_words, template, unk="<unk>"):
    """A unigram model over words that start with a mark, as sentencepiece makes them."""
    vocab = [(name, 0.0) for name in first] + pieces(n_words) + [(name, 0.0) for name in last]
    names = [name for name, _ in vocab]
    tok = Tokenizer(Unigram(vocab, unk_id=names.index(unk), byte_fallback=False))
    tok.normalizer = normalizers.NFKC()
    tok.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    tok.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    return finish(tok, first + last, template)


def finish(tok, specials, template):
    tok.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    used = [part for part in template.split() if part != "$A"]
    tok.post_processor = processors.TemplateProcessing(
        single=template, pair=template + " $B", special_tokens=[(t, tok.token_to_id(t)) for t in dict.fromkeys(used)])
    return tok


def special_ids(tok):
    return {i for i, added in tok.get_added_tokens_decoder().items() if added.special}


def plain_tokens(tok):
    """The longest run of ids without a special token."""
    marks = [-1, *sorted(special_ids(tok)), tok.get_vocab_size()]
    low, high = max(zip(marks, marks[1:]), key=lambda pair: pair[1] - pair[0])
    return low + 1, high


def some_special(tok):
    return next(a.content for i, a in sorted(tok.get_added_tokens_decoder().items()) if a.content not in ("<pad>", "<unk>"))


# ---- models on disk

def last_norm(model):
    """The norm whose output the head reads."""
    decoder = model.get_decoder()
    for name in ("layer_norm", "final_layer_norm"):
        if hasattr(decoder, name):
            return getattr(decoder, name)
    return decoder.layers[-1].final_layer_norm


def scales_outputs(config):
    """True if rows are divided by the root of the width before the head."""
    by_tying = config.model_type == "umt5" and config.tie_word_embeddings
    return by_tying or getattr(config, "scale_decoder_outputs", False)


def tied(state):
    """Without the copies that tied weights have under other names."""
    drop = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    return {k: v for k, v in state.items() if not k.endswith(drop)}


def without_tied_head(state):
    """As `save_pretrained` writes BERT: a head that is the token table is left out, and so is the second name of its bias. A head
    of its own has a bias of its own, and nothing reads the other one."""
    kept = dict(state)
    for head, model in (("decoder.cls.predictions.decoder", "decoder.bert"), ("decoder.lm_head.decoder", "decoder.roberta")):
        table = state.get(f"{model}.embeddings.word_embeddings.weight")
        if table is not None and torch.equal(table, state[f"{head}.weight"]):
            del kept[f"{head}.weight"], kept[f"{head}.bias"]
    return kept


def own_head(state):
    """Everything: without tied weights encoder, decoder and head have a table each, and `shared` is unused."""
    return dict(state)


def bare(state):
    """As a model saved without its head: no outer prefix, no bias of the logits, the shared table three times."""
    skip = ("lm_head.weight", "final_logits_bias")
    return {k.removeprefix("model."): v for k, v in state.items() if k not in skip}


def decoder_table(state):
    """The shared table under the decoder's name only, as some converted files have it."""
    drop = ("encoder.embed_tokens.weight", "shared.weight", "lm_head.weight")
    return {k: v for k, v in state.items() if not k.endswith(drop)}


def computed_positions(state):
    return {k: v for k, v in tied(state).items() if "embed_positions" not in k}


def write_model(folder, shape, model, tok):
    config = model.config.to_dict() | {k: v for k, v in shape.config.items()}
    for key in {"dtype", "scale_decoder_outputs"} - shape.config.keys():
        config.pop(key, None)
    config |= {"torch_dtype": str(shape.disk).removeprefix("torch."), "transformers_version": "4.57.0"}
    config = {k: v for k, v in config.items() if v is not None and k not in ("_name_or_path", "id2label", "label2id")}
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", shape.generation)
    tok.save(str(folder / "tokenizer.json"), pretty=False)
    write_json(folder / "tokenizer_config.json", {
        "model_max_length": shape.config.get("max_position_embeddings", 512), "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tok.id_to_token(shape.generation["eos_token_id"]),
        "pad_token": tok.id_to_token(shape.generation["pad_token_id"]),
    })
    state = {k: v.to(shape.disk) for k, v in shape.names(model.state_dict()).items()}
    write_tensors(folder / "model.safetensors", state)


# ---- BART and its relatives

FAIRSEQ = ["<s>", "<pad>", "</s>", "<unk>"]
LANGUAGES = ["ar_AR", "de_DE", "en_XX", "ro_RO"]
BART_GAINS = (("encoder_attn.q_proj", 1.5),)


def loud(*factor):
    """Gains for computed positions, which are much alike: the inner layers must tell tokens apart."""
    return (("encoder_attn", 0.5), ("encoder_attn.q_proj", 4.0), *((f"decoder.layers.{i}.fc", f) for i, f in enumerate(factor)))


def bart_config(tok, d, heads, layers, ffn, **more):
    return dict(
        vocab_size=tok.get_vocab_size(), d_model=d, encoder_attention_heads=heads[0], decoder_attention_heads=heads[1],
        encoder_layers=layers[0], decoder_layers=layers[1], encoder_ffn_dim=ffn[0], decoder_ffn_dim=ffn[1],
        max_position_embeddings=64, **more)


def fairseq_ids(**more):
    return dict(bos_token_id=0, pad_token_id=1, eos_token_id=2) | more


def bart_shapes(shape):
    return [*bart(shape), *mbart(shape), *m2m_100(shape), *pegasus(shape), *marian(shape), *blenderbot(shape)]


def bart(shape):
    tok = lambda n=20: byte_level(FAIRSEQ, ["<mask>"], n, "<s> $A </s>")
    ids = fairseq_ids(decoder_start_token_id=2, forced_eos_token_id=2)
    kind = dict(family=BartForConditionalGeneration, gains=BART_GAINS)
    return [
        shape("bart_odd_heads", config=bart_config(tok(), 36, (3, 2), (1, 1), (52, 44)) | ids, tokenizer=tok,
              generation=ids, disk=torch.float32, seed=100, names=bare, **kind),
        shape("bart_large_cnn", config=bart_config(tok(), 32, (4, 4), (2, 2), (48, 64)) | ids, tokenizer=tok,
              generation=ids | dict(forced_bos_token_id=0, num_beams=4, length_penalty=2.0, early_stopping=True,
                                    no_repeat_ngram_size=3, max_length=60, min_length=5),
              disk=torch.float16, seed=200, names=tied, bias=0.5, **kind),
        shape("bart_own_head", tokenizer=tok, generation=ids, disk=torch.bfloat16, seed=300, names=own_head, bias=0.3,
              config=bart_config(tok(), 24, (4, 3), (3, 1), (40, 56), scale_embedding=True,
                                 activation_function="gelu_new", tie_word_embeddings=False) | ids, **kind),
    ]


def mbart(shape):
    last = [*LANGUAGES, "<mask>"]
    cc25 = lambda: unigram(FAIRSEQ, last, 50, "$A </s> en_XX")
    fifty = lambda: unigram(FAIRSEQ, last, 60, "en_XX $A </s>")
    code = {name: cc25().token_to_id(name) for name in LANGUAGES}
    codes = {name: fifty().token_to_id(name) for name in LANGUAGES}
    kind = dict(family=MBartForConditionalGeneration, gains=BART_GAINS)
    ids = fairseq_ids(forced_eos_token_id=2)
    one = ids | dict(decoder_start_token_id=code["ro_RO"])
    many = ids | dict(decoder_start_token_id=2)
    return [
        shape("mbart_cc25", config=bart_config(cc25(), 24, (2, 3), (1, 2), (40, 36), scale_embedding=True) | one,
              tokenizer=cc25, generation=one | dict(num_beams=5, max_length=60), disk=torch.float32, seed=400, names=tied, **kind),
        shape("mbart_50", config=bart_config(fifty(), 32, (4, 4), (2, 1), (48, 64), scale_embedding=True,
                                             activation_function="relu") | many,
              tokenizer=fifty, generation=many | dict(forced_bos_token_id=codes["de_DE"]), disk=torch.float16, seed=500,
              names=tied, bias=0.4, prompts=("ro_RO", "the dog"), **kind),
        shape("mbart_odd_heads", config=bart_config(fifty(), 30, (5, 6), (2, 2), (36, 44), tie_word_embeddings=False) | many,
              tokenizer=fifty, generation=many, disk=torch.bfloat16, seed=600, names=own_head, **kind),
    ]


def m2m_100(shape):
    nllb = lambda: unigram(FAIRSEQ, ["deu_Latn", "eng_Latn", "fra_Latn", "zho_Hans", "<mask>"], 60, "eng_Latn $A </s>")
    m2m = lambda: unigram(FAIRSEQ, ["__ast__", "__de__", "__en__", "__zh__"], 50, "__en__ $A </s>")
    german = nllb().token_to_id("deu_Latn")
    kind = dict(family=M2M100ForConditionalGeneration, gains=loud(3.0, 3.0), token=1.0)
    ids = fairseq_ids(decoder_start_token_id=2)
    never = dict(bad_words_ids=[[1]])
    more = dict(scale_embedding=True, activation_function="relu")
    return [
        shape("nllb_600m", config=bart_config(nllb(), 32, (4, 4), (2, 2), (64, 48), **more) | ids, tokenizer=nllb,
              generation=ids | never | dict(max_length=60), disk=torch.float16, seed=4500, names=tied, prompts=("deu_Latn",), **kind),
        shape("m2m_odd_heads", config=bart_config(m2m(), 30, (5, 3), (1, 2), (36, 44), scale_embedding=False,
                                                  activation_function="gelu") | ids, tokenizer=m2m,
              generation=ids | never | dict(num_beams=5, early_stopping=True, max_length=60, forced_eos_token_id=2),
              disk=torch.float32, seed=4600, names=tied, prompts=("__zh__",), **kind),
        shape("nllb_forced_language", config=bart_config(nllb(), 28, (4, 2), (2, 1), (40, 52), **more) | ids, tokenizer=nllb,
              generation=ids | never | dict(forced_bos_token_id=german), disk=torch.bfloat16, seed=4700, names=decoder_table,
              prompts=("fra_Latn", "the dog"), **kind),
    ]


def pegasus(shape):
    tok = lambda: unigram(["<pad>", "</s>", "<mask_1>", "<mask_2>", "<unk>"], [], 60, "$A </s>")
    ids = dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, forced_eos_token_id=1)
    kind = dict(family=PegasusForConditionalGeneration, tokenizer=tok, gains=loud(5.0, 5.0), token=1.0)
    more = dict(scale_embedding=True, activation_function="relu")
    return [
        shape("pegasus_xsum", config=bart_config(tok(), 32, (4, 4), (2, 2), (64, 48), **more) | ids, disk=torch.float32,
              generation=ids | dict(num_beams=8, length_penalty=0.6, max_length=64), seed=700, names=tied, bias=0.3, **kind),
        shape("pegasus_odd_heads", config=bart_config(tok(), 28, (4, 2), (1, 2), (36, 44), **more) | ids,
              disk=torch.float16, generation=ids, seed=800, names=computed_positions, **kind),
        shape("pegasus_odd_width", config=bart_config(tok(), 33, (3, 3), (2, 1), (40, 40), activation_function="gelu") | ids,
              disk=torch.bfloat16, generation=ids, seed=900, names=computed_positions, **kind),
    ]


def marian(shape):
    tok = lambda: unigram(["</s>", "<unk>"], ["<pad>"], 60, "$A </s>")
    pad = tok().get_vocab_size() - 1
    ids = dict(pad_token_id=pad, eos_token_id=0, bos_token_id=0, decoder_start_token_id=pad, forced_eos_token_id=0)
    gen = ids | dict(bad_words_ids=[[pad]], num_beams=4, max_length=60)
    kind = dict(family=MarianMTModel, tokenizer=tok, gains=loud(2.0, 2.0), token=1.0)
    more = dict(scale_embedding=True, activation_function="swish")
    return [
        shape("marian_en_de", config=bart_config(tok(), 32, (4, 4), (2, 2), (64, 48), **more) | ids, disk=torch.float16,
              generation=gen, seed=1000, names=computed_positions, bias=0.5, **kind),
        shape("marian_two_tables", config=bart_config(tok(), 24, (3, 4), (2, 1), (40, 36), share_encoder_decoder_embeddings=False,
                                                      decoder_vocab_size=pad + 1, **more) | ids,
              disk=torch.float32, generation=gen, seed=1100, names=lambda s: {k: v for k, v in s.items() if k != "lm_head.weight"}, **kind),
        shape("marian_decoder_table", config=bart_config(tok(), 30, (5, 3), (1, 2), (32, 52), **more) | ids,
              disk=torch.bfloat16, generation=gen, seed=1200, names=decoder_table, **kind),
    ]


def blenderbot(shape):
    names = ["<pad>", "<s>", "</s>", "<unk>"]
    tok = lambda: byte_level(names, ["<mask>"], 10, "$A </s>")
    ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=2)
    large = dict(family=BlenderbotForConditionalGeneration, tokenizer=tok, gains=BART_GAINS)
    small = dict(family=BlenderbotSmallForConditionalGeneration, tokenizer=tok, gains=BART_GAINS)
    return [
        shape("blenderbot_400m", config=bart_config(tok(), 32, (4, 4), (1, 3), (48, 64), scale_embedding=True) | ids,
              generation=ids | dict(num_beams=10, length_penalty=0.65, min_length=20, max_length=60, no_repeat_ngram_size=3),
              disk=torch.float16, seed=1300, names=tied, bias=0.3, **large),
        shape("blenderbot_odd_heads", config=bart_config(tok(), 27, (3, 9), (2, 1), (36, 40), activation_function="relu") | ids,
              generation=ids, disk=torch.float32, seed=1400, names=tied, **large),
        shape("blenderbot_small", config=bart_config(tok(), 24, (4, 2), (2, 2), (32, 48), scale_embedding=True) | ids,
              generation=ids, disk=torch.bfloat16, seed=1500, names=tied, bias=0.2, **small),
    ]


# ---- T5 and its relatives

def byte_vocabulary():
    """ByT5's: three special tokens, the bytes, and tokens that nothing is trained on."""
    names = ["<pad>", "</s>", "<unk>"]
    letter = {byte: char for char, byte in zip(sorted_alphabet(), range(256))}
    vocab = {name: i for i, name in enumerate(names)} | {letter[b]: b + 3 for b in range(256)}
    tok = Tokenizer(BPE(vocab=vocab, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.decoder = decoders.ByteLevel()
    return finish(tok, names, "$A </s>")


def sorted_alphabet():
    """The characters that byte-level vocabularies write bytes 0 to 255 as."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (chr(256 + n) for n in range(256))
    return [chr(b) if b in plain else next(others) for b in range(256)]


# `generate` makes room in its cache for as many layers as the encoder has, so no decoder here has more.
def t5_config(tok, d, heads, kv, layers, ffn, **more):
    return dict(
        vocab_size=tok.get_vocab_size() + 6, d_model=d, num_heads=heads, d_kv=kv, num_layers=layers[0],
        num_decoder_layers=layers[1], d_ff=ffn, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, **more)


def with_unread_bias(state):
    """As the first published files: one table, and biases of cross-attention that nothing reads."""
    kept = tied(state)
    bias = kept["decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
    return kept | {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": bias + 1}


def three_tables(state):
    """As the later published files: the shared table under three names, and the head."""
    return dict(state)


def t5_shapes(shape):
    tok = lambda: unigram(["<pad>", "</s>", "<unk>"], ["<extra_id_2>", "<extra_id_1>", "<extra_id_0>"], 60, "$A </s>")
    ids = dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    gains = (("relative_attention_bias", 4.0), ("SelfAttention.q", 0.4), ("SelfAttention.v", 2.0), ("DenseReluDense", 3.0))
    kind = lambda family: dict(family=family, gains=gains, tokenizer=tok, generation=ids, token=0.3)
    one, many, every = kind(T5ForConditionalGeneration), kind(MT5ForConditionalGeneration), kind(UMT5ForConditionalGeneration)
    gated = dict(feed_forward_proj="gated-gelu")
    later = dict(names=three_tables, head=1.0)
    near = dict(relative_attention_num_buckets=8, relative_attention_max_distance=20)
    return [
        shape("t5_small", config=t5_config(tok(), 32, 4, 8, (2, 2), 64), disk=torch.float32, seed=2000, names=with_unread_bias, **one),
        shape("t5_odd_heads", config=t5_config(tok(), 30, 3, 7, (3, 2), 44, **near), disk=torch.float16, seed=2100, names=tied, **one),
        shape("t5_wide_heads", config=t5_config(tok(), 24, 2, 20, (2, 1), 52), disk=torch.bfloat16, seed=2200, names=decoder_table, **one),
        shape("t5_v1_1", config=t5_config(tok(), 32, 4, 8, (2, 2), 48, tie_word_embeddings=False, **gated),
              disk=torch.float16, seed=2300, **later, **one),
        # As transformers 5 saves it: every model is called tied.
        shape("flan_t5", config=t5_config(tok(), 36, 3, 10, (3, 3), 40, tie_word_embeddings=True, scale_decoder_outputs=False, **gated),
              disk=torch.bfloat16, seed=2400, **later, **one),
        shape("t5_v1_1_silu", config=t5_config(tok(), 24, 4, 9, (3, 1), 44, tie_word_embeddings=False,
                                               feed_forward_proj="gated-silu", **near),
              disk=torch.float32, seed=2500, **later, **one),
        shape("byt5", config=t5_config(byte_vocabulary(), 24, 3, 8, (3, 1), 40, tie_word_embeddings=False, **gated),
              disk=torch.float16, seed=2600, **later, **(one | dict(tokenizer=byte_vocabulary))),
        shape("mt5_small", config=t5_config(tok(), 32, 3, 8, (2, 2), 40, tie_word_embeddings=False, **gated),
              disk=torch.float32, seed=2700, **later, **many),
        shape("umt5_small", config=t5_config(tok(), 32, 3, 8, (2, 2), 40, **gated), disk=torch.float16, seed=2800, **later, **every),
        shape("umt5_odd_heads", config=t5_config(tok(), 30, 5, 7, (3, 2), 36, **gated, **near), disk=torch.float32, seed=2900, **later, **every),
        shape("umt5_tied", config=t5_config(tok(), 24, 2, 12, (2, 2), 44, **gated), disk=torch.bfloat16, seed=3000, names=tied, **every),
    ]
