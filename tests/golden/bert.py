"""Golden files of `encoder-decoder`: BERT and RoBERTa as encoder and as decoder, in three shapes."""

import collections
import copy

import torch
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import WordPiece
from transformers import BertConfig, EncoderDecoderConfig, EncoderDecoderModel, RobertaConfig

import text
import text_families
from common import CORPUS, bert_head, randomise, round_weights, settle_bert

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
GAINS = (("crossattention.self", 2.0), ("crossattention.output.dense", 1.5), ("intermediate.dense", 1.5),
         ("attention.self.query", 1.5))


def word_piece():
    """Letters, alone and inside words, and the most frequent words of the corpus, lower case."""
    words = "".join(c for c in CORPUS if c.isascii()).lower().split()
    letters = [chr(c) for c in range(33, 127) if not chr(c).isupper()]
    frequent = [w for w, _ in sorted(collections.Counter(words).items(), key=lambda kv: (-kv[1], kv[0])) if w.isalpha() and len(w) > 1]
    pieces = letters + [f"##{c}" for c in letters if c.isalnum()] + frequent[:30]
    tok = Tokenizer(WordPiece({piece: i for i, piece in enumerate(SPECIALS + pieces)}, unk_token="[UNK]"))
    tok.normalizer = normalizers.BertNormalizer(lowercase=True)
    tok.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tok.decoder = decoders.WordPiece()
    return text_families.finish(tok, SPECIALS, "[CLS] $A [SEP]")


def byte_level():
    return text_families.byte_level(text_families.FAIRSEQ, ["<mask>"], 20, "<s> $A </s>")


def section(config, tok, hidden, heads, ffn, layers, **more):
    """The section of a configuration, as published files have it."""
    return dict(
        model_type=config.model_type, vocab_size=tok.get_vocab_size(), hidden_size=hidden, num_attention_heads=heads, intermediate_size=ffn,
        num_hidden_layers=layers, max_position_embeddings=64, **more)


DECODER = dict(is_decoder=True, add_cross_attention=True)


def build(shape, seed):
    torch.manual_seed(seed)
    model = EncoderDecoderModel(EncoderDecoderConfig(**copy.deepcopy(shape.config), **shape.generation))
    randomise(model, seed, gain=1.3, embed_std=shape.token, gains=shape.gains, embeddings=("word_embeddings",))
    settle_bert(model, seed, ("encoder.", "decoder."))
    head = model.get_output_embeddings().weight
    if head is not model.decoder.get_input_embeddings().weight:
        head.data *= 3
    norm = bert_head(model)
    norm.weight.data *= shape.spread / (float(head.std()) * norm.weight.shape[0] ** 0.5)
    round_weights(model, shape.disk)
    return model.eval()


def shapes():
    bert, roberta = word_piece, byte_level
    bert_ids = dict(pad_token_id=0, bos_token_id=2, eos_token_id=3)
    roberta_ids = text_families.fairseq_ids()
    bert_start = bert_ids | dict(decoder_start_token_id=2)
    roberta_start = roberta_ids | dict(decoder_start_token_id=0)
    kind = dict(family=EncoderDecoderModel, gains=GAINS, build=build, names=text_families.without_tied_head)
    return [
        text.Shape(
            "bert2bert", config=dict(
                encoder=section(BertConfig, bert(), 24, 3, 40, 2, **bert_ids),
                decoder=section(BertConfig, bert(), 24, 2, 36, 2, **bert_ids, **DECODER)),
            tokenizer=bert, generation=bert_start | dict(num_beams=4, length_penalty=2.0, early_stopping=True,
                                                         no_repeat_ngram_size=3, max_length=60),
            disk=torch.float32, seed=6000, **kind),
        text.Shape(
            "roberta2roberta_projected", config=dict(
                encoder=section(RobertaConfig, roberta(), 36, 3, 44, 1, type_vocab_size=1, layer_norm_eps=1e-5, **roberta_ids),
                decoder=section(RobertaConfig, roberta(), 28, 4, 40, 2, layer_norm_eps=1e-5, hidden_act="relu",
                                **roberta_ids, **DECODER)),
            tokenizer=roberta, generation=roberta_start, disk=torch.float16, seed=6100, **kind),
        text.Shape(
            "bert2bert_own_head", config=dict(
                encoder=section(BertConfig, bert(), 32, 4, 40, 2, hidden_act="gelu_new", **bert_ids),
                decoder=section(BertConfig, bert(), 32, 2, 48, 1, tie_word_embeddings=False, hidden_act="gelu_new",
                                type_vocab_size=3, **bert_ids, **DECODER)),
            tokenizer=bert, generation=bert_start, disk=torch.bfloat16, seed=6200, **kind),
    ]


def make():
    text.make(shapes())
