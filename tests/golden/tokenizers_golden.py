"""Tokenizers that directories hold without a `tokenizer.json`: small models and their encodings of texts.

Encodings are those of the code that the family was trained with: sentencepiece for `.model` and `.spm`
files, transformers' tokenizer class for the others. To sentencepiece's pieces the family's numbering is
applied here, as transformers' slow classes did up to version 4. Where version 5's class reads the same
directory, its answer stands beside: `agrees` says whether it is the same.
"""

import io
import json
import random
import re
import shutil

import sentencepiece as spm
from tokenizers import AddedToken, Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import (
    BartTokenizer,
    BertTokenizer,
    BlenderbotSmallTokenizer,
    BlenderbotTokenizer,
    ByT5Tokenizer,
    MarianTokenizer,
    MBart50Tokenizer,
    MBartTokenizer,
    PegasusTokenizer,
    Qwen2Tokenizer,
    T5Tokenizer,
    WhisperTokenizer,
    XLMRobertaTokenizer,
)
from transformers.models.mbart50.tokenization_mbart50 import FAIRSEQ_LANGUAGE_CODES as LANGUAGES_50

from common import CORPUS, ROOT, write_compact, write_json

OUT = ROOT / "tokenizers"

MORE = """
La vitesse de la lumière est de 299 792 458 mètres par seconde. Où êtes-vous, mon ami ?
Die Straße ist lang, und der König wohnt über dem Fluß. Größe, Öl, Übung.
El niño comió una manzana. ¿Dónde está la biblioteca? ¡Qué día tan bonito!
Быстрая лиса прыгает через ленивую собаку. Это предложение написано по-русски.
人工知能は面白いです。今日は天気がいいですね。东京是一个大城市。
She said: "hello, world!" and then (quietly) left... didn't she? It's 10:45 now.
""" * 4

TEXTS = [
    "",
    " ",
    "\n",
    "hello",
    "The quick brown fox jumps over the lazy dog.",
    "  two  spaces   at the start and in the middle ",
    "tabs\tand\nlines\r\nand a no-break\u00a0space\u3000and a wide one",
    "Die Straße ist lang, und der König wohnt über dem Fluß.",
    "¿Dónde está la biblioteca? ¡Qué día!",
    "Быстрая лиса прыгает через ленивую собаку.",
    "人工知能は面白いです。东京是一个大城市。",
    "مرحبا بالعالم भाषा",
    "emoji 🦀 and 👩‍👩‍👧 and 🇩🇪!",
    "ｆｕｌｌ　ｗｉｄｔｈ １２３ ﬁne ½ № ①",
    "control\u0000 \u0001 \u001c characters\u200b\ufeff here",
    "e\u0301 and é are one, x\u0323\u0302 is not",
    "zzzqqq ŁŁŁ ꙮꙮꙮ unknown",
    "It's 10:45 (now)... isn't it? 'quoted' \"twice\"",
    "a ▁ is how a space is spelled ▁▁here",
    "a" * 70,
    "<0x41> is not a byte",
]

# White space at the ends.
SPACES = ["hello ", " hello", "hello   ", "  ", "hello\n", " hello \n"]

SPECIALS = {
    "t5": ["fill <extra_id_0> and <extra_id_1>, then </s> it ends", "<pad><unk>", "a<extra_id_99>b"],
    "sentinels": ["fill <extra_id_0> and <extra_id_1>", "it ends</s> here", "a<extra_id_124>b"],
    "mask": ["fill the <mask> here", "a<mask>b </s> and <s>"],
    "pegasus": ["fill <mask_1> and <mask_2> here", "a </s> b <unk_2><unk_102>"],
    "marian": [">>deu<< Die Straße", "it ends </s> here", "hello>>deu<<"],
    "small": ["__start__ hello __end__", "a\nb\n\nc", "x \n y"],
    "whisper": ["<|startoftranscript|><|en|> hello <|0.00|>", "<|endoftext|>"],
    "chat": ["<|im_start|>user\nhello<|im_end|>\n"],
    "bert": ["fill the [MASK] here [SEP]"],
}

RULES = {" ": "\t\n\r\u00a0\u3000\u200b", "": "\u0001\u001c\ufeff", "fi": "ﬁ", "1/2": "½", "No": "№", "1": "①"}


def rules(path):
    """A small normalizer: blanks, controls, a few compatibility characters and full-width letters."""
    table = {c: to for to, chars in RULES.items() for c in chars}
    table |= {chr(0xFF01 + i): chr(0x21 + i) for i in range(94)}
    table["e\u0301"] = "é"
    points = lambda text: " ".join(f"{ord(c):X}" for c in text)
    path.write_text("".join(f"{points(a)}\t{points(b)}\n" for a, b in sorted(table.items())))
    return path


def train(path, vocab_size, **options):
    """A sentencepiece model over the corpus. `rules` for the small normalizer; else the name of a built-in."""
    options.setdefault("model_type", "unigram")
    if options.get("normalization_rule_name") == "rules":
        del options["normalization_rule_name"]
        options["normalization_rule_tsv"] = str(rules(path.with_suffix(".tsv")))
    model = io.BytesIO()
    lines = (CORPUS + MORE).splitlines()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in lines if line]),
        model_writer=model,
        vocab_size=vocab_size,
        num_threads=1,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    path.with_suffix(".tsv").unlink(missing_ok=True)
    path.write_bytes(model.getvalue())
    return spm.SentencePieceProcessor(model_proto=model.getvalue())


class Slow:
    """sentencepiece with a family's numbering: what the slow classes of transformers did."""

    def __init__(self, sp, number, added, before=(), after=()):
        self.sp, self.number, self.added = sp, number, added
        self.before, self.after = list(before), list(after)

    def ids(self, text):
        names = sorted(self.added, key=len, reverse=True)
        out = []
        strips = "|".join(r"\s*" + re.escape(n) if n.startswith("<mask") and n != "<mask_1>" else re.escape(n) for n in names)
        for part in re.split(f"({strips})", text) if names else [text]:
            if part.strip() in self.added and part:
                out.append(self.added[part.strip()])
            elif part:
                out.extend(self.number(p, i) for p, i in zip(self.sp.encode(part, out_type=str), self.sp.encode(part)))
        return out


def case(name, config=None):
    path = OUT / name
    if path.exists():
        shutil.rmtree(path)
    (path / "model").mkdir(parents=True)
    if config is not None:
        write_json(path / "model" / "tokenizer_config.json", config)
    return path


def decode(tokenizer, ids):
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    # BlenderBot-small's class leaves the mark of a word that was not ended.
    return text.removesuffix("@@") if isinstance(tokenizer, BlenderbotSmallTokenizer) else text


def write(path, texts, slow, theirs, note, decoder=None):
    """`slow` and `theirs` give ids of a text; the first is what is expected, the second stands beside."""
    records, differ = [], []
    for text in texts:
        plain, around = slow(text)
        seen = theirs.encode(text, add_special_tokens=False)
        record = {"text": text, "ids": plain, "input": around, "decoded": decode(decoder or theirs, plain)}
        if seen != plain:
            record["agrees"] = False
            differ.append(text)
        records.append(record)
    print(f"  {path.name}: {len(texts)} texts, version 5 differs on {differ}", flush=True)
    write_compact(path / "expected.json", {"note": note, "texts": records})


def pieces(path, slow, theirs, texts, note):
    def both(text):
        ids = slow.ids(text)
        return ids, slow.before + ids + slow.after

    # Version 5 writes the bytes of a piece as `<0xE4>`.
    bytes_too = slow.sp.piece_to_id("<0x00>") != slow.sp.unk_id()
    write(path, texts, both, theirs, note, Decoder(slow) if bytes_too else None)


def same_class(path, theirs, texts, note, around=None):
    def both(text):
        ids = theirs.encode(text, add_special_tokens=False)
        return ids, around(ids) if around else theirs.encode(text)

    write(path, texts, both, theirs, note)


def make_t5():
    layout = dict(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    path = case("t5", {"tokenizer_class": "T5Tokenizer"})
    sp = train(path / "model/spiece.model", 500, normalization_rule_name="nmt_nfkc", **layout)
    n = sp.get_piece_size()
    added = {f"<extra_id_{i}>": n + 99 - i for i in range(100)} | {"<pad>": 0, "</s>": 1, "<unk>": 2}
    slow = Slow(sp, lambda p, i: i, added, after=[1])
    theirs = T5Tokenizer.from_pretrained(path / "model")
    pieces(path, slow, theirs, TEXTS + SPECIALS["t5"], "unigram, nmt_nfkc, a hundred sentinels")

    path = case("mt5_bytes", {"tokenizer_class": "MT5Tokenizer", "extra_ids": 0})
    sp = train(
        path / "model/spiece.model", 700, normalization_rule_name="rules", byte_fallback=True,
        user_defined_symbols=["<sep>", "▁<extra_id_0>"], **layout,
    )
    slow = Slow(sp, lambda p, i: i, {"<pad>": 0, "</s>": 1, "<unk>": 2, "<sep>": sp.piece_to_id("<sep>")}, after=[1])
    theirs = T5Tokenizer.from_pretrained(path / "model")
    # What looks like a byte is one for the library, and text for sentencepiece.
    texts = [t for t in TEXTS if "<0x" not in t] + ["a <sep> b", "fill <extra_id_0> here"]
    pieces(path, slow, theirs, texts, "unigram with bytes, own rules, symbols of the user, no sentinels")


def make_fairseq():
    named = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    number = lambda p, i: 3 if i == 0 else i + 1
    for name, cls, n_codes, config, before, after in [
        ("mbart", MBartTokenizer, 25, {"src_lang": "de_DE"}, [], ["</s>", "de_DE"]),
        ("mbart50", MBart50Tokenizer, 52, {}, ["en_XX"], ["</s>"]),
        ("xlm_roberta", XLMRobertaTokenizer, 0, {}, ["<s>"], ["</s>"]),
    ]:
        path = case(name, {"tokenizer_class": cls.__name__} | config)
        sp = train(path / "model/sentencepiece.bpe.model", 400, normalization_rule_name="rules")
        end = sp.get_piece_size() + 1
        codes = {code: end + i for i, code in enumerate(LANGUAGES_50[:n_codes])}
        added = named | codes | {"<mask>": end + n_codes}
        slow = Slow(sp, number, added, [added[t] for t in before], [added[t] for t in after])
        theirs = cls.from_pretrained(path / "model", **config)
        texts = TEXTS + SPECIALS["mask"] + (["en_XX de_DE"] if codes else [])
        if name == "mbart50":
            # Version 5 keeps one space at the end of a text, and before what is added.
            same_class(path, theirs, texts + SPACES, "unigram, own rules, fairseq's numbering")
        else:
            pieces(path, slow, theirs, texts, "unigram, own rules, fairseq's numbering")


def make_pegasus():
    path = case("pegasus", {"tokenizer_class": "PegasusTokenizer"})
    train(path / "model/spiece.model", 400, normalization_rule_name="rules", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    # Version 5 keeps one space at the end of a text, and before what is added.
    theirs = PegasusTokenizer.from_pretrained(path / "model")
    same_class(path, theirs, TEXTS + SPACES + SPECIALS["pegasus"], "unigram, own rules, 103 places left free")


class Decoder:
    """Stands in where version 5 cannot read the directory: sentencepiece's own decoding."""

    def __init__(self, slow):
        self.slow = slow
        self.names = {slow.number(slow.sp.id_to_piece(i), i): i for i in range(slow.sp.get_piece_size())}

    def encode(self, text, add_special_tokens=False):
        return self.slow.ids(text)

    def decode(self, ids, **options):
        special = {i for name, i in self.slow.added.items() if name != "<sep>"}
        return self.slow.sp.decode([self.names[i] for i in ids if i not in special])


def make_bpe_pieces():
    path = case("llama", {"tokenizer_class": "LlamaTokenizer"})
    sp = train(
        path / "model/tokenizer.model", 700, model_type="bpe", normalization_rule_name="identity", byte_fallback=True,
        remove_extra_whitespaces=False, split_digits=True, allow_whitespace_only_pieces=True,
        user_defined_symbols=["▁▁", "▁▁▁▁"],
    )
    slow = Slow(sp, lambda p, i: i, {"<s>": 1, "</s>": 2, "<unk>": 0}, before=[1])
    texts = [t for t in TEXTS if "  " not in t and "<0x" not in t] + ["a</s>b"]
    pieces(path, slow, Decoder(slow), texts, "BPE with bytes, spaces kept")


def make_marian():
    for name, separate in [("marian", False), ("marian_separate", True)]:
        path = case(name, {"tokenizer_class": "MarianTokenizer", "separate_vocabs": separate})
        model = path / "model"
        source = train(model / "source.spm", 300, normalization_rule_name="rules")
        target = train(model / "target.spm", 420, normalization_rule_name="rules", model_type="unigram")
        def listed(sps, extra):
            names = [sp.id_to_piece(i) for sp in sps for i in range(3, sp.get_piece_size()) if i % 17]
            names = ["</s>", "<unk>"] + sorted(set(names)) + extra + ["<pad>"]
            return {name: i for i, name in enumerate(names)}
        lists = [listed([source], [">>deu<<"]), listed([target], [])] if separate else [listed([source, target], [">>deu<<"])]
        write_json(model / "vocab.json", lists[0])
        if separate:
            write_json(model / "target_vocab.json", lists[1])
        theirs = MarianTokenizer.from_pretrained(model)
        records = []
        for text in TEXTS + ([] if separate else SPECIALS["marian"][:2]):
            theirs._switch_to_target_mode()
            ids = theirs.encode(text, add_special_tokens=False)
            theirs._switch_to_input_mode()
            records.append({"text": text, "ids": ids, "input": theirs.encode(text), "decoded": decode(theirs, ids)})
        write_compact(path / "expected.json", {"note": "two models, one list or two", "texts": records})


def byte_level(path, specials, first, regex=True):
    """`vocab.json` with `specials` first or last, and `merges.txt`."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, special_tokens=[], show_progress=False)
    tokenizer.train_from_iterator((CORPUS + MORE).splitlines(), trainer)
    learnt = json.loads(tokenizer.to_str())["model"]
    names = sorted(learnt["vocab"], key=learnt["vocab"].get)
    names = specials + names if first else names + specials
    write_json(path / "vocab.json", {name: i for i, name in enumerate(names)})
    lines = "".join(f"{a} {b}\n" for a, b in learnt["merges"])
    (path / "merges.txt").write_text("#version: 0.2\n" + lines)
    return len(names)


def make_byte_level():
    five = ["<s>", "<pad>", "</s>", "<unk>"]
    path = case("bart")
    byte_level(path / "model", five + ["<mask>"], True)
    write_json(path / "model/config.json", {"model_type": "bart"})
    # Versions before 5 gave the mask this flag by themselves, and published directories hold it.
    mask = AddedToken("<mask>", lstrip=True, rstrip=False, normalized=False, special=True)
    theirs = BartTokenizer.from_pretrained(path / "model", mask_token=mask)
    same_class(path, theirs, TEXTS + SPECIALS["mask"], "RoBERTa's byte-level BPE")

    path = case("blenderbot", {"tokenizer_class": "BlenderbotTokenizer"})
    byte_level(path / "model", ["__null__", "__start__", "__end__", "__unk__"], True)
    named = {"bos_token": "__start__", "eos_token": "__end__", "unk_token": "__unk__", "pad_token": "__null__"}
    named |= {"sep_token": "__end__", "cls_token": "__start__"}
    write_json(path / "model/special_tokens_map.json", named)
    write_json(path / "model/added_tokens.json", {"<mask>": 504})
    theirs = BlenderbotTokenizer.from_pretrained(path / "model")
    same_class(path, theirs, TEXTS + ["fill the <mask> here __end__"], "a space before the first word", lambda ids: ids + [2])

    path = case("whisper", {"tokenizer_class": "WhisperTokenizer", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "bos_token": "<|endoftext|>"})
    n = byte_level(path / "model", ["<|endoftext|>"], False)
    names = ["<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>", "<|startofprev|>"]
    names += ["<|nospeech|>", "<|notimestamps|>"]
    write_json(path / "model/added_tokens.json", {name: n + i for i, name in enumerate(names)})
    write_json(path / "model/normalizer.json", {"colour": "color"})
    times = {str(n + len(names) + i): {"content": f"<|{i * 0.02:.2f}|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": False} for i in range(5)}
    config = json.loads((path / "model/tokenizer_config.json").read_text())
    special = {str(n + i): {"content": name, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True} for i, name in enumerate(names)}
    special |= {str(n - 1): {"content": "<|endoftext|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}}
    write_json(path / "model/tokenizer_config.json", config | {"added_tokens_decoder": special | times})
    theirs = WhisperTokenizer.from_pretrained(path / "model")
    same_class(path, theirs, TEXTS + SPECIALS["whisper"], "byte-level BPE, tokens added behind")

    path = case("qwen2", {"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": False})
    n = byte_level(path / "model", [], False)
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    decoder = {str(n + i): {"content": name, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True} for i, name in enumerate(names)}
    config = json.loads((path / "model/tokenizer_config.json").read_text())
    write_json(path / "model/tokenizer_config.json", config | {"added_tokens_decoder": decoder, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
    theirs = Qwen2Tokenizer.from_pretrained(path / "model")
    same_class(path, theirs, TEXTS + SPECIALS["chat"], "Qwen's split, NFC")


def make_byt5():
    path = case("byt5", {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125})
    theirs = ByT5Tokenizer.from_pretrained(path / "model")
    same_class(path, theirs, TEXTS + SPECIALS["sentinels"], "bytes")
    # Bytes that are no characters, some cut out of texts: the class leaves out what is in none.
    draw = random.Random(0)
    text = "".join(TEXTS).encode()
    runs = [bytes(draw.choices(range(256), k=draw.randrange(24))) for _ in range(40)]
    runs += [b"".join(text[i : i + draw.randrange(1, 4)] for i in draw.choices(range(len(text)), k=12)) for _ in range(40)]
    broken = [[3 + byte for byte in run] for run in runs] + [[3 + 0xC3, 1, 3 + 0xA9], [3 + 0xE2, 259, 3 + 0x82]]
    expected = json.loads((path / "expected.json").read_text())
    expected["broken"] = [{"ids": ids, "decoded": decode(theirs, ids)} for ids in broken]
    write_compact(path / "expected.json", expected)


def make_small():
    path = case("blenderbot_small", {"tokenizer_class": "BlenderbotSmallTokenizer"})
    words = re.sub(r"([.,!?()'])", r" \1 ", (CORPUS + MORE).lower())
    tokenizer = Tokenizer(BPE(end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=420, end_of_word_suffix="</w>", special_tokens=[], show_progress=False)
    tokenizer.train_from_iterator(words.splitlines(), trainer)
    learnt = json.loads(tokenizer.to_str())["model"]
    spelled = [n[:-4] if n.endswith("</w>") else n + "@@" for n in sorted(learnt["vocab"], key=learnt["vocab"].get)]
    # As published lists do, this one lacks some of what merges pass through.
    spelled = [n for i, n in enumerate(spelled) if i % 23 != 7]
    names = ["__null__", "__start__", "__end__", "__unk__", "__newln__"] + spelled
    write_json(path / "model/vocab.json", {n: i for i, n in enumerate(dict.fromkeys(names))})
    (path / "model/merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in learnt["merges"]))
    theirs = BlenderbotSmallTokenizer.from_pretrained(path / "model")
    same_class(path, theirs, TEXTS + SPECIALS["small"], "BPE over characters, pieces with @@")


def make_bert():
    path = case("bert", {"tokenizer_class": "BertTokenizer", "do_lower_case": True})
    letters = sorted(set((CORPUS + MORE).lower()) - set(" \n"))
    words = ["the", "quick", "fox", "hello", "over", "straße", "ist", "lang", "##ing", "##s", "##er", "here", "fill"]
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + words + letters + ["##" + c for c in letters]
    (path / "model/vocab.txt").write_text("".join(n + "\n" for n in dict.fromkeys(names)))
    theirs = BertTokenizer.from_pretrained(path / "model")
    same_class(path, theirs, TEXTS + SPECIALS["bert"], "WordPiece")


def make():
    make_t5()
    make_fairseq()
    make_pegasus()
    make_bpe_pieces()
    make_marian()
    make_byte_level()
    make_byt5()
    make_small()
    make_bert()
