"""Tokenizers against transformers' and Megatron-LM's, on texts that go wrong easily."""

import base64
import itertools
import json
import random
import warnings

import pytest
import sentencepiece
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.data.tokenizers.tiktoken_ranks import PATTERNS
from maxmeg.data.tokenizers.tokenizer import encode_placeholders
from maxmeg.data.tokenizers.training import Recipe, train_tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of accelerators that are not there
    from megatron.core.tokenizers.text import libraries as megatron

WORDS = """the Quick naïve CAFÉ e\u0301te\u0301 東京 한국어 日本語テキスト ß ǅ 🎉 👨\u200d👩\u200d👧
İstanbul ((a)[b]{c}) ...!? $5.00 don't … a_b 1234567 مرحبا हिन्दी ##ing ﬁ ① \uff21 𠀀"""
PARTS = WORDS.split()
PARTS += ["\x00", "\x07", "\t", "\n", "\r\n", "\u00a0", "\u200b", "\ufeff", "\u2028", "\ufffd"]
PARTS += [" ", "  ", "x" * 101, "\U000e0001"]
SPECIAL = ["<image>", "<|im_end|>", "<extra_id_0>", "<extra_id_1>"]


def some_texts(seed: int, marks: list[str], count: int = 150) -> list[str]:
    source = random.Random(seed)
    parts = [*PARTS, *marks * 6]
    made = ["".join(source.choices(parts, k=source.randrange(9))) for _ in range(count)]
    return ["", *parts, " ".join(parts), *made, *map(" ".join, itertools.pairwise(made))]


TEXTS = some_texts(0, [])
MARKED = some_texts(1, SPECIAL)


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory):
    """Words in both cases, so that the settings matter."""
    words = "[PAD] [unused0] [UNK] [CLS] [SEP] [MASK] the The quick Quick cafe café CAFÉ CAFE 東 京"
    words += (
        " 東京 ##京 日 本 語 ß ss x ##x a ##a b c 1 ##1 ##2 ##3 ##4 istanbul i ##s don t ete fi"
    )
    words += (
        " 𠀀 naive naïve ##ing ing 5 00 한국어 🎉 मर हिन्दी A \uff21 ( ) [ ] { } . , ! ? ' $ # _ - …"
    )
    path = tmp_path_factory.mktemp("wordpiece") / "vocab.txt"
    path.write_text(words.replace(" ", "\n") + "\n", "utf-8")
    return path


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("strip", [None, True, False])
@pytest.mark.parametrize("chinese", [True, False])
def test_wordpiece_is_transformers(wordpiece, lower, strip, chinese):
    settings = {"do_lower_case": lower, "strip_accents": strip, "tokenize_chinese_chars": chinese}
    theirs = transformers.BertTokenizer(str(wordpiece), **settings)
    words = [f"{k}={str(v).lower()}" for k, v in settings.items() if v is not None]
    ours = load_tokenizer(f"wordpiece:{wordpiece}?{'&'.join(words)}")
    for text in TEXTS:
        ids = ours.encode(text).tolist()
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids)
    named = (ours.cls, ours.sep, ours.mask, ours.pad, ours.unk)
    names = ("cls", "sep", "mask", "pad", "unk")
    assert named == tuple(getattr(theirs, f"{name}_token_id") for name in names)
    assert ours.opening == tuple(theirs("the").input_ids[:1])


def test_wordpiece_with_special_tokens_is_transformers(wordpiece):
    theirs = transformers.BertTokenizer(str(wordpiece), do_lower_case=False)
    theirs.add_special_tokens({"additional_special_tokens": SPECIAL})
    ours = load_tokenizer(
        f"wordpiece:{wordpiece}?do_lower_case=false&special_tokens=<image>,<|im_end|>&extra_ids=2"
    )
    assert [ours.token_id(name) for name in SPECIAL] == theirs.convert_tokens_to_ids(SPECIAL)
    assert (ours.vocab_size, len(ours.sentinels)) == (len(theirs), 2)
    for text in some_texts(2, [*SPECIAL, "[MASK]", "[SEP]"]):
        ids = encode_placeholders(ours, text, [*SPECIAL, "[MASK]", "[SEP]", "[CLS]", "[PAD]"])
        assert ids.tolist() == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids)
        assert not set(ours.encode(text)) & ours.special_ids


def trained(split, decoder, alphabet) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(unk_token=None if alphabet else "<unk>"))
    made.pre_tokenizer, made.decoder = split, decoder
    trainer = trainers.BpeTrainer(
        vocab_size=500, show_progress=False, initial_alphabet=alphabet,
        special_tokens=["<unk>", "<|endoftext|>"],
    )  # fmt: skip
    made.train_from_iterator(TEXTS, trainer)
    return made


def byte_level() -> tokenizers.Tokenizer:
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return trained(split, decoders.ByteLevel(), pre_tokenizers.ByteLevel.alphabet())


def metaspace() -> tokenizers.Tokenizer:
    split = pre_tokenizers.Metaspace(prepend_scheme="first")
    return trained(split, decoders.Metaspace(prepend_scheme="first"), [])


def test_gpt2_is_transformers(tmp_path):
    made = byte_level()
    made.model.save(str(tmp_path))
    names = {"vocab": str(tmp_path / "vocab.json"), "merges": str(tmp_path / "merges.txt")}
    theirs = transformers.GPT2Tokenizer(**names)
    ours = load_tokenizer(f"gpt2:{tmp_path}")
    assert (ours.eod, ours.vocab_size) == (theirs.eos_token_id, len(theirs))
    for text in TEXTS:
        ids = ours.encode(text).tolist()
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False) == text
    added = {"additional_special_tokens": SPECIAL}
    theirs.add_special_tokens(added)
    ours = load_tokenizer(f"gpt2:{tmp_path}?special_tokens={','.join(SPECIAL)}")
    for text in MARKED:
        ids = encode_placeholders(ours, text, SPECIAL).tolist()
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == text


@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_tokens_added_to_a_tokenizer_json_are_transformers(tmp_path, make):
    make().save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    theirs.add_special_tokens({"additional_special_tokens": SPECIAL})
    ours = load_tokenizer(f"huggingface:{tmp_path}?special_tokens={','.join(SPECIAL)}")
    assert [ours.token_id(name) for name in SPECIAL] == theirs.convert_tokens_to_ids(SPECIAL)
    assert ours.vocab_size == len(theirs)
    for text in MARKED:
        ids = encode_placeholders(ours, text, SPECIAL)
        assert ids.tolist() == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
        spans = ours.encode_spans(text, ours.added)
        assert spans[0].tolist() == ids.tolist()
        offsets = theirs(text, return_offsets_mapping=True, add_special_tokens=False)
        assert list(map(tuple, spans[1].tolist())) == offsets["offset_mapping"]


@pytest.mark.parametrize("rule", ["nmt_nfkc", "identity"])
def test_tokens_added_to_sentencepiece_are_megatrons(tmp_path, rule):
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(text for text in TEXTS if text.strip() and "\0" not in text),
        model_prefix=str(tmp_path / "model"), vocab_size=450, byte_fallback=True, pad_id=3,
        hard_vocab_limit=False, minloglevel=2, normalization_rule_name=rule,
        remove_extra_whitespaces=rule != "identity", user_defined_symbols=["<table>"],
        num_threads=1,
    )  # fmt: skip
    path = str(tmp_path / "model.model")
    theirs = megatron.SentencePieceTokenizer(path, special_tokens=SPECIAL, legacy=True)
    ours = load_tokenizer(f"sentencepiece:{path}?special_tokens=<image>,<|im_end|>&extra_ids=2")
    assert ours.vocab_size == theirs.vocab_size
    assert ours.added == theirs.special_token_to_id
    assert [*ours.added.values()][2:] == list(ours.sentinels)
    for text in some_texts(3, [*SPECIAL, "<table>"]):
        # A mark ends each, since after the last one Megatron-LM forgets its rule on spaces.
        text = text.replace("\0", "") + SPECIAL[0]
        ids = encode_placeholders(ours, text, SPECIAL)
        assert ids.tolist() == theirs.text_to_ids(text)
        assert ours.token_id("<table>") in ids or "<table>" not in text
        plain = ours.encode(text)
        assert plain.tolist() == theirs.tokenizer.encode(text)
        assert not set(plain) & ours.special_ids


def test_tiktoken_is_megatrons(tmp_path):
    tokens = [bytes([b]) for b in range(256)] + [b"th", b"the", b" t", b" q", b"\n\n", b"12"]
    entries = [
        {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for i, token in enumerate(tokens)
    ]
    path = tmp_path / "ranks.json"
    path.write_text(json.dumps(entries))
    seven = ["<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>"]
    for pattern, names in (("v1", None), ("v2", [*SPECIAL, *reversed(seven)])):
        theirs = megatron.TikTokenTokenizer(
            str(path), num_special_tokens=20, vocab_size=280, pattern=pattern, special_tokens=names
        )
        named = f"&special_tokens={','.join(names)}" if names else ""
        options = f"num_special_tokens=20&vocab_size=280&pattern={pattern}{named}"
        ours = load_tokenizer(f"tiktoken:{path}?{options}")
        assert ours.vocab_size == theirs.vocab_size
        for role in ("bos", "pad", "cls", "sep", "mask", "unk"):
            assert getattr(ours, role) == getattr(theirs, f"{role}_id")
        assert ours.eod == theirs.eod
        for text in some_texts(4, theirs.special_tokens[:12]):
            ids = encode_placeholders(ours, text, theirs.special_tokens)
            assert ids.tolist() == theirs.text_to_ids(text)
            assert ours.decode(ids) == text
            assert not set(ours.encode(text)) & ours.special_ids


@pytest.mark.parametrize("pattern", [None, *PATTERNS])
def test_trained_bpe_loads_in_transformers(tmp_path, pattern):
    recipe = Recipe("bpe", 400, ("<s>", "</s>", *SPECIAL[2:]), ("<image>",), pattern=pattern)
    ours = train_tokenizer(TEXTS, str(tmp_path / "tokenizer.json"), recipe).tokenizer
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert (ours.vocab_size, ours.bos, ours.eod) == (len(theirs), 0, theirs.eos_token_id)
    assert theirs.bos_token_id == ours.bos
    for text in MARKED:
        ids = ours.encode(text).tolist()
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json"])
def test_trained_wordpiece_loads_in_transformers(tmp_path, name, lower):
    recipe = Recipe("wordpiece", 500, lower_case=lower)
    ours = train_tokenizer(TEXTS, str(tmp_path / name), recipe).tokenizer
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert isinstance(theirs, transformers.BertTokenizer) == (name == "vocab.txt")
    roles = (ours.unk, ours.cls, ours.sep, ours.pad, ours.mask)
    names = ("unk", "cls", "sep", "pad", "mask")
    assert roles == tuple(getattr(theirs, f"{n}_token_id") for n in names) == (1, 2, 3, 0, 4)
    for text in TEXTS:
        assert [2, *ours.encode(text), 3] == theirs(text).input_ids


@pytest.mark.parametrize("model", ["bpe", "unigram"])
def test_trained_sentencepiece_is_megatrons(tmp_path, model):
    recipe = Recipe(model, 420, ("<|im_end|>",), ("<image>",))
    texts = [text.replace("\0", "") for text in TEXTS]
    ours = train_tokenizer(texts, str(tmp_path / "t.model"), recipe).tokenizer
    theirs = megatron.SentencePieceTokenizer(str(tmp_path / "t.model"))
    assert (ours.bos, ours.eod, ours.pad) == (theirs.bos_id, theirs.eos_id, theirs.pad_id)
    for text in texts:
        ids = ours.encode(text).tolist()
        assert ids == theirs.text_to_ids(text)
        assert ours.decode(ids) == theirs.ids_to_text(ids) == text


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": "</s>", "bos_token": "<s>", "pad_token": "<pad>"},
        {"eos_token": "</s>"},
        {"sep_token": "[SEP]", "cls_token": "[CLS]", "mask_token": "[MASK]", "pad_token": "<pad>"},
        {"eos_token": "</s>", "sep_token": "[SEP]", "bos_token": "<s>", "cls_token": "[CLS]"},
        {"eos_token": "</s>", "cls_token": "[CLS]", "unk_token": "<unk>"},
    ],
)
def test_roles_are_megatrons(tmp_path, config):
    made = byte_level()
    named = ["<s>", "</s>", "<pad>", "[SEP]", "[CLS]", "[MASK]"]
    made.add_special_tokens(named)
    made.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    extra = [f"<extra_id_{i}>" for i in range(5)]
    theirs = megatron.HuggingFaceTokenizer(str(tmp_path), additional_special_tokens=extra)
    ours = load_tokenizer(f"huggingface:{tmp_path}?extra_ids=5")
    for role in ("bos", "pad", "cls", "sep", "mask", "unk"):
        assert getattr(ours, role) == getattr(theirs, f"{role}_id"), role
    assert (ours.eod, ours.vocab_size) == (theirs.eod, theirs.vocab_size)
    assert list(ours.sentinels) == theirs.tokens_to_ids(extra)
    for text in TEXTS:
        assert ours.encode(text).tolist() == theirs.text_to_ids(text)
