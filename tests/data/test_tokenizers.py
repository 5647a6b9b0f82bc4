"""Every tokenizer: round trips, special ids, identity, and files that are wrong."""

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_files import decoding_kinds

from maxmeg.data.tokenizers.load import KINDS, load_tokenizer
from maxmeg.data.tokenizers.tiktoken_ranks import MEGATRON_SPECIAL
from maxmeg.data.tokenizers.tokenizer import encode_placeholders

TEXTS = ["hello the world", "", " leading, trailing ", "naïve 東京 🎉\n\n\ttabs", "1234567 it's"]
ADDED = "special_tokens=<image>,<|end|>&extra_ids=3"
loaded = functools.cache(load_tokenizer)
LOSSLESS = [kind for kind in KINDS if kind not in ("null", "wordpiece")]


SP = "sentencepiece"
SPECIAL = {  # eod, bos, pad
    "bytes": (256, None, None),
    "null": (999, None, None),
    "tiktoken": (260, None, None),
    "sentencepiece": (2, 1, 3),
    "gpt2": (0, None, None),
    "huggingface": (0, None, None),
    "wordpiece": (3, 2, 0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_text_round_trips_and_special_tokens_have_the_expected_ids(vocabularies, kind):
    tokenizer = load_tokenizer(vocabularies[kind])
    assert (tokenizer.eod, tokenizer.bos, tokenizer.pad) == SPECIAL[kind]
    size = {"bytes": 257, "null": 1000, "tiktoken": 261}
    assert tokenizer.vocab_size == size.get(kind, tokenizer.vocab_size) > tokenizer.eod
    assert isinstance(tokenizer.decode([tokenizer.eod]), str)
    assert tokenizer.identity.startswith(kind)
    assert load_tokenizer(tokenizer.spec).identity == tokenizer.identity
    for text in TEXTS if kind in LOSSLESS else ():
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32
        assert not len(ids) or 0 <= ids.min() <= ids.max() < tokenizer.vocab_size
        assert tokenizer.eod not in ids
        assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == text


def test_null_reads_numbers_and_bytes_replace_what_is_not_utf8():
    assert load_tokenizer("bytes").decode([0xFF, 65, 256]) == "\N{REPLACEMENT CHARACTER}A"
    tokenizer = load_tokenizer("null:100")
    assert tokenizer.encode("5 7  99").tolist() == [5, 7, 99]
    assert tokenizer.decode([5, 7]) == "5 7"
    for text in ("5 x", "100", "-1"):
        with pytest.raises(ValueError, match="null"):
            tokenizer.encode(text)


def test_identity_is_the_content_not_the_path(vocabularies, tmp_path):
    path = Path(vocabularies["sentencepiece"].partition(":")[2])
    other = shutil.copy(path, tmp_path / "elsewhere.model")
    same = load_tokenizer(f"sentencepiece:{other}")
    assert same.identity == load_tokenizer(vocabularies["sentencepiece"]).identity
    ranks = Path(vocabularies["tiktoken"].partition(":")[2]).read_bytes()
    changed = tmp_path / "ranks"
    changed.write_bytes(ranks.replace(b" 259", b" 300"))
    different = load_tokenizer(f"tiktoken:{changed}")
    assert different.identity != load_tokenizer(vocabularies["tiktoken"]).identity
    assert different.vocab_size == 302


def test_huggingface_takes_special_names_from_its_config(vocabularies, tmp_path):
    source = Path(vocabularies["huggingface"].partition(":")[2])
    shutil.copy(source, tmp_path / "tokenizer.json")
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": {"content": "<s>"}, "bos_token": "<|endoftext|>"}))
    tokenizer = load_tokenizer(f"huggingface:{tmp_path}")
    assert (tokenizer.eod, tokenizer.bos) == (1, 0)
    config.write_text(json.dumps({"eos_token": "<absent>"}))
    with pytest.raises(ValueError, match="'<absent>' is not in the vocabulary"):
        load_tokenizer(f"huggingface:{tmp_path}")


PANIC = {"type": "BPE", "continuing_subword_prefix": "##", "vocab": {"a": 0, "": 1, "ab": 2}}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({**PANIC, "merges": [["a", ""]]}, "(range end index|out of bounds)"),
        ({"type": "Unigram", "vocab": [["a", -1.0]]}, "unknown token but `unk_id` is missing"),
    ],
)
def test_failures_of_the_library_are_reported(tmp_path, model, message):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", "model": model}))
    with pytest.raises(ValueError, match=f"{path}.*{message}"):
        load_tokenizer(f"huggingface:{path}").encode("z")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sentencepeice:x", "did you mean 'sentencepiece'"),
        ("zzz", "Choose one of bytes, null"),
        ("", "unknown tokenizer"),
        ("gpt2", "gpt2:FOLDER"),
        ("huggingface:", "huggingface:FILE"),
        ("bytes:3", "takes no argument"),
        ("meta-llama/L-3", "did you mean huggingface:meta-llama/L-3.*hf download meta-llama/L-3"),
        ("huggingface:meta-llama/L-3/tokenizer.json", "hf download meta-llama/L-3 --local-dir"),
        ("null:", "like null:32000"),
        ("sentencepiece:/nowhere", "/nowhere: No such file"),
        ("bytes?special_token=<a>", "did you mean 'special_tokens'"),
        ("wordpiece:v?do_lowercase=true", "did you mean 'do_lower_case'"),
        ("null:5?extra_ids=3", "null has no option 'extra_ids'.*none"),
        ("bytes?extra_ids", "write extra_ids=VALUE"),
        ("bytes?extra_ids=1&extra_ids=2", "only once"),
        ("bytes?extra_ids=-1", "extra_ids=-1 must be a whole number"),
        ("bytes?extra_ids=9999999", "extra_ids=9999999 must be"),
        ("bytes?special_tokens=<a>,<b>,<a>", "names '<a>' twice"),
        ("bytes?special_tokens=<a>,", "has an empty name"),
    ],
)
def test_wrong_specs_are_explained(spec, message):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(spec)


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface", "gpt2", "wordpiece", "tiktoken"])
@pytest.mark.parametrize("content", [b"", b"nonsense", b"{}", b"\xff\xfe\x00", b"YQ== x\n"])
def test_wrong_files_are_explained(tmp_path, kind, content):
    names = ("vocab.json", "merges.txt") if kind == "gpt2" else ("file",)
    for name in names:
        (tmp_path / name).write_bytes(content)
    path = tmp_path if kind == "gpt2" else tmp_path / "file"
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_tokenizer(f"{kind}:{path}")


def test_tiktoken_files_with_gaps_are_refused(vocabularies, tmp_path):
    ranks = Path(vocabularies["tiktoken"].partition(":")[2]).read_bytes().splitlines()
    (tmp_path / "short").write_bytes(b"\n".join(ranks[1:]))
    with pytest.raises(ValueError, match="lacks 1 single bytes"):
        load_tokenizer(f"tiktoken:{tmp_path / 'short'}")
    (tmp_path / "twice").write_bytes(b"\n".join([*ranks, b"YWI= 5"]))
    with pytest.raises(ValueError, match="same rank"):
        load_tokenizer(f"tiktoken:{tmp_path / 'twice'}")


def test_wordpiece_settings_are_applied(tmp_path):
    """The oracle tests have transformers' ids."""
    (tmp_path / "vocab.txt").write_text("[UNK]\r\nCafe\r\nCafé\r\ncafe\r\ncafé\r\n東", "utf-8")
    config = tmp_path / "tokenizer_config.json"

    def ids(options="", text="Café東"):
        return load_tokenizer(f"wordpiece:{tmp_path}{options}").encode(text).tolist()

    assert ids() == [2, 5]  # words with capitals: cased
    assert ids("?strip_accents=true") == [1, 5]
    assert ids("?do_lower_case=true") == [3, 5]
    assert ids("?do_lower_case=true&strip_accents=false") == [4, 5]
    assert ids("?tokenize_chinese_chars=false") == [0]
    config.write_text(json.dumps({"do_lower_case": True, "strip_accents": False}))
    assert ids() == [4, 5]
    assert ids("?do_lower_case=false&strip_accents=true") == [1, 5]
    tokenizer = load_tokenizer(f"wordpiece:{tmp_path}")
    assert (tokenizer.eod, tokenizer.vocab_size, tokenizer.cls) == (6, 7, None)
    for content, message in (
        ("a\nb", "no .UNK. among its 2 lines"),
        ("[UNK]\na\nb\na\n", "'a' on lines 2 and 4"),
    ):
        (tmp_path / "vocab.txt").write_text(content)
        with pytest.raises(ValueError, match=message):
            load_tokenizer(f"wordpiece:{tmp_path}")
    (tmp_path / "vocab.txt").write_text("[UNK]\na")
    with pytest.raises(ValueError, match="do_lower_case=yes: write true or false"):
        load_tokenizer(f"wordpiece:{tmp_path}?do_lower_case=yes")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "null"])
def test_added_tokens_follow_the_vocabulary(vocabularies, kind):
    base = load_tokenizer(vocabularies[kind])
    tokenizer = load_tokenizer(f"{vocabularies[kind]}?{ADDED}")
    names = ["<image>", "<|end|>", "<extra_id_0>", "<extra_id_1>", "<extra_id_2>"]
    new = range(base.vocab_size, base.vocab_size + 5)
    assert list(map(tokenizer.token_id, names)) == list(new) == list(tokenizer.added.values())
    assert tokenizer.vocab_size == base.vocab_size + 5
    assert tokenizer.sentinels == tuple(new[2:])
    assert tokenizer.special_ids >= set(new) | {base.eod}
    assert (tokenizer.eod, tokenizer.bos, tokenizer.pad) == (base.eod, base.bos, base.pad)
    assert tokenizer.identity.startswith(kind) and tokenizer.identity != base.identity
    assert load_tokenizer(tokenizer.spec).identity == tokenizer.identity
    other = load_tokenizer(f"{vocabularies[kind]}?special_tokens=<|end|>,<image>&extra_ids=3")
    assert other.identity != tokenizer.identity
    text = "hello<image>the <|end|>fox<extra_id_2>[CLS][SEP]</s><pad><|endoftext|>"
    actual = encode_placeholders(tokenizer, text, ["<image>", "<extra_id_2>"]).tolist()
    assert [i for i in actual if i >= base.vocab_size] == [new[0], new[4]]
    assert tokenizer.decode(actual[actual.index(new[0]) :]).startswith("<image>")
    if kind in LOSSLESS:
        assert tokenizer.decode(actual) == text
    if kind != "huggingface":  # there the file itself asks for its tokens
        assert not set(tokenizer.encode(text)) & tokenizer.special_ids
    assert not set(tokenizer.encode(text)) & set(new)
    assert encode_placeholders(tokenizer, text, []).tolist() == base.encode(text).tolist()


def test_roles_name_tokens(vocabularies):
    spec = vocabularies["tiktoken"]  # its end is appended, and gives way to a named one
    tokenizer = load_tokenizer(f"{spec}?special_tokens=<s>,</s>&bos=<s>&eod=</s>&mask=[M]")
    assert (tokenizer.bos, tokenizer.eod, tokenizer.mask) == (260, 261, 262)
    assert tokenizer.vocab_size == 263
    assert tokenizer.special_ids == {260, 261, 262}
    spec = vocabularies["sentencepiece"]
    same = load_tokenizer(f"{spec}?bos=<s>&pad=<pad>")
    assert same.identity == load_tokenizer(spec).identity
    changed = load_tokenizer(f"{spec}?special_tokens=<EOD>&eod=<EOD>")
    assert changed.eod == load_tokenizer(spec).vocab_size and changed.identity != same.identity
    path = Path(vocabularies["wordpiece"].partition(":")[2])
    more = path.with_name("with-dogs?")  # a ? in a file's name
    more.write_text(path.read_text("utf-8") + "dogs\n", "utf-8")
    assert load_tokenizer(f"wordpiece:{more}?").vocab_size == 100
    with pytest.raises(ValueError, match="already encodes the plain text 'dogs'"):
        load_tokenizer(f"wordpiece:{more}?special_tokens=dogs")
    comma = load_tokenizer("bytes?special_tokens=%3Ca%2Cb%3E,%26")
    assert list(comma.added) == ["<a,b>", "&"]


@given(text=st.text(st.characters(exclude_categories=["Cs"])), marks=st.lists(st.integers(0, 6)))
def test_marked_text_round_trips(vocabularies, text, marks):
    """Of bytes, GPT-2, tiktoken and byte-level tokenizer.json, with marks anywhere."""
    names = ["<image>", "<|end|>", "<extra_id_0>", "<extra_id_1>", "<extra_id_2>"]
    text += "".join(f"{text[:m]}{names[m % 5]}" for m in marks)
    for kind in ("bytes", "gpt2", "tiktoken", "huggingface"):
        tokenizer = loaded(f"{vocabularies[kind]}?{ADDED}")
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not set(ids.tolist()) & set(tokenizer.added.values())
        marked = encode_placeholders(tokenizer, text, names)
        assert tokenizer.decode(marked) == text
        assert sum(i in tokenizer.added.values() for i in marked.tolist()) >= len(marks)


def test_sentencepiece_symbols_and_spaces(tmp_path, vocabularies):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(["hello the world", "a word of it"] * 9), vocab_size=300,
        model_prefix=str(tmp_path / "m"), byte_fallback=True, hard_vocab_limit=False,
        user_defined_symbols=["<table>", "<extra_id_0>"], control_symbols=["<ctl>"], minloglevel=2,
    )  # fmt: skip
    tokenizer = load_tokenizer(f"sentencepiece:{tmp_path / 'm.model'}?special_tokens=<image>")
    table, control = tokenizer.token_id("<table>"), tokenizer.token_id("<ctl>")
    text = "the ﬁ  <table> <ctl> 東"  # normalised: a ligature, spaces; a character of bytes
    ids = tokenizer.encode(text).tolist()
    assert table in ids and control not in ids and tokenizer.unk not in ids
    assert tokenizer.decode(ids) == "the fi <table> <ctl> 東"
    assert control in tokenizer.special_ids and table not in tokenizer.special_ids
    assert tokenizer.sentinels == (tokenizer.token_id("<extra_id_0>"),)
    assert tokenizer.unk is not None
    unknown = tokenizer.known_bytes[tokenizer.unk].decode()
    assert tokenizer.decode([table or 0, tokenizer.unk]) == f"<table>{unknown}"
    text = "a<image> word <image>of"
    marked = encode_placeholders(tokenizer, text, ["<image>"])
    assert tokenizer.decode(marked) == "a<image> word<image>of"
    with pytest.raises(ValueError, match="already encodes the plain text '<table>'"):
        load_tokenizer(f"sentencepiece:{tmp_path / 'm.model'}?special_tokens=<table>")


def test_placeholders_are_named(vocabularies):
    tokenizer = load_tokenizer(f"bytes?{ADDED}")
    with pytest.raises(ValueError, match="did you mean '<image>'"):
        encode_placeholders(tokenizer, "a<img>", ["<imag>"])
    longest = load_tokenizer("bytes?special_tokens=<a,<a>,<a>b")
    assert encode_placeholders(longest, "<a><a>b<a", longest.added).tolist() == [258, 259, 257]


def test_tiktoken_as_megatron(vocabularies, tmp_path):
    lines = Path(vocabularies["tiktoken"].partition(":")[2]).read_bytes().splitlines()
    entries = [{"rank": i, "token_bytes": line.split()[0].decode()} for i, line in enumerate(lines)]
    path = tmp_path / "ranks.json"
    path.write_text(json.dumps(entries))
    tokenizer = load_tokenizer(f"tiktoken:{path}")
    assert tokenizer.vocab_size == 1260
    assert list(map(tokenizer.token_id, MEGATRON_SPECIAL)) == list(range(7))
    roles = (tokenizer.unk, tokenizer.bos, tokenizer.eod, tokenizer.mask, tokenizer.pad)
    assert (*roles, tokenizer.cls, tokenizer.sep) == tuple(range(7))
    assert tokenizer.token_id("<SPECIAL_7>") == 7
    assert tokenizer.encode("the a1<s>").tolist() == [
        1000 + i for i in (257, 32, 97, 49, 60, 115, 62)
    ]
    more = load_tokenizer(f"tiktoken:{path}?num_special_tokens=20&vocab_size=278&{ADDED}")
    assert (more.vocab_size, more.token_id("<image>"), more.sentinels) == (278, 7, (9, 10, 11))
    assert more.decode(encode_placeholders(more, "the<image>", ["<image>"])) == "the<image>"
    shifted = load_tokenizer(f"{vocabularies['tiktoken']}?num_special_tokens=7")
    assert shifted.encode("the").tolist() == [264] and shifted.vocab_size == 267
    cut = load_tokenizer(f"{vocabularies['tiktoken']}?vocab_size=258")
    assert (cut.encode("the").tolist(), cut.eod) == ([256, 101], 257)
    for options, message in (
        ("pattern=v3", "not one of cl100k"),
        ("num_special_tokens=6", "must hold the 7"),
        ("num_special_tokens=x", "must be a whole number"),
        ("special_tokens=<s>", "name all seven"),
        ("num_special_tokens=9&extra_ids=3", "and 3 other tokens"),
        ("vocab_size=99999", "choose at most"),
        ("num_special_tokens=10&vocab_size=200", "at least 266"),
    ):
        with pytest.raises(ValueError, match=message):
            load_tokenizer(f"tiktoken:{path}?{options}")
    for content in ("{}", "[1]", '[{"rank": 1, "token_bytes": "YQ=="}]', '[{"rank": 0}]'):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"ranks\.json"):
            load_tokenizer(f"tiktoken:{path}")


def test_bytes_of_ids_are_what_they_decode_to(tmp_path, vocabularies):
    """Inside a text, also of added tokens; without bytes where other tokens decide them."""
    texts = [" a  x   a a", "    x", "naïve 東京 🎉\n\n\n é", "på Ġx ▁▁▁▁"]
    texts += ["ab cd  aw w w", "a <r>  a", "<0x0A>", "The fox jumps 1234.", "a"]
    for name, spec in {**vocabularies, **decoding_kinds(tmp_path)}.items():
        tokenizer = load_tokenizer(spec)
        known, lengths = tokenizer.token_bytes(), tokenizer.byte_lengths()
        if known is None or lengths is None:
            assert name in ("stripped", "words", "none", "null", "wordpiece")
            continue
        assert not lengths[[tokenizer.eod, *tokenizer.special_ids]].any()
        (x,) = tokenizer.encode("xx").tolist()[-1:]
        begin, end = len(tokenizer.decode([x])), len(tokenizer.decode([x, x]))

        def inside(ids, decode=tokenizer.decode, x=x, cut=(begin, begin - end)):
            return decode([x, *ids, x])[slice(*cut)]

        for i, data in known.items():
            assert inside([i]).strip("\ufffd") == data.decode("utf-8", "ignore"), (name, i)
        for text in texts:
            ids = tokenizer.encode(text).tolist()
            told = b"".join(map(known.__getitem__, ids))
            assert told.decode() == inside(ids) and lengths[ids].sum() == len(told), (name, text)
            if name not in ("llama", "unigram") and "<r>" not in text:  # these add or drop spaces
                plain = text.replace("▁", " ") if name in ("gemma", "nested", SP) else text
                assert told.decode().removeprefix(" " * (name == SP)) == plain, (name, text)
        marked = load_tokenizer(f"{spec}?special_tokens=<é>")
        ids = encode_placeholders(marked, "x<é>på", ["<é>"])
        assert marked.decode(ids).endswith("x<é>på") and not marked.known_bytes.get(marked.eod)
