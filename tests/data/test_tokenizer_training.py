"""Vocabularies made of text: what they give back, what is written, the same bytes every time."""

import dataclasses
import json
import random
from pathlib import Path

import pytest

from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.data.tokenizers.tokenizer import encode_placeholders
from maxmeg.data.tokenizers.training import Recipe, train_tokenizer

SPECIAL = ("[END]", "[user]")
RECIPES = {
    "bytes/tokenizer.json": Recipe("bpe", 400),
    "v1/tokenizer.json": Recipe("bpe", 400, ("<s>", "</s>"), ("<image>",), pattern="v1"),
    "vocab/vocab.txt": Recipe("wordpiece", 200, SPECIAL, lower_case=True),
    "cased/tokenizer.json": Recipe("wordpiece", 200, SPECIAL, ("<image>",)),
    "unigram.model": Recipe("unigram", 370, SPECIAL, ("<image>",)),
    "bpe.model": Recipe("bpe", 400, SPECIAL, character_coverage=1.0),
}
LOSSLESS = [name for name, recipe in RECIPES.items() if recipe.model != "wordpiece"]


def some_texts() -> list[str]:
    source = random.Random(0)
    words = ["the", "Fox", "café", "東京", "1984", "don't\tit\n\n", "jumped,", "fox's!", "fox"]
    words += ["over the", "jumping", "Lazily", "🎉", "  ", "x" * 40, "DOG", "a"]
    words += ["".join(source.choices("etaoinshr", k=source.randrange(3, 8))) for _ in range(60)]
    return [" ".join(source.choices(words, k=source.randrange(60))) for _ in range(150)]


TEXTS = some_texts()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    return {name: train_tokenizer(TEXTS, str(folder / name), r) for name, r in RECIPES.items()}


@pytest.mark.parametrize("name", RECIPES)
def test_the_trained_tokenizer_has_the_requested_properties(trained, tmp_path, name):
    recipe, actual = RECIPES[name], trained[name]
    tokenizer = actual.tokenizer
    assert tokenizer.vocab_size <= recipe.vocab_size
    assert actual.documents + actual.held_out == len(TEXTS) and actual.held_out == 7
    assert actual.held_out_bytes / actual.held_out_tokens > (
        1.5 if tokenizer.vocab_size > 300 else 1
    )
    again = train_tokenizer(TEXTS, str(tmp_path / name), recipe)
    for one, other in zip(actual.files, again.files, strict=True):
        assert Path(one).read_bytes() == Path(other).read_bytes()
    assert load_tokenizer(tokenizer.spec).identity == again.tokenizer.identity
    assert not list(Path(actual.files[0]).parent.glob("*.partial"))
    for symbol in recipe.user_symbols:
        assert tokenizer.encode(f"fox{symbol}fox").tolist().count(tokenizer.token_id(symbol)) == 1
    ids = [tokenizer.token_id(token) for token in recipe.special_tokens]
    assert None not in ids and set(ids) <= tokenizer.special_ids
    if not name.endswith(".json"):  # there a special token's name is the token
        assert not set(tokenizer.encode(" ".join(recipe.special_tokens)).tolist()) & set(ids)
    marked = encode_placeholders(
        tokenizer, "fox".join(recipe.special_tokens), recipe.special_tokens
    )
    assert [i for i in marked.tolist() if i in ids] == ids


@pytest.mark.parametrize("name", LOSSLESS)
def test_texts_are_decoded_unchanged(trained, name):
    tokenizer = trained[name].tokenizer
    for text in [*TEXTS, "ﬁ ½ \u200b\u00a0 हिन्दी\r\n", " a", ""]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_roles_are_written(trained):
    def roles(name):
        tokenizer = trained[name].tokenizer
        return {r: getattr(tokenizer, r) for r in ("eod", "bos", "pad", "unk", "cls", "sep")}

    none = dict.fromkeys(("bos", "pad", "unk", "cls", "sep"))
    assert roles("bytes/tokenizer.json") == none | {"eod": 0, "sep": 0}
    assert roles("v1/tokenizer.json") == none | {"eod": 1, "sep": 1, "bos": 0, "cls": 0}
    bert = {"eod": 3, "pad": 0, "unk": 1, "cls": 2, "sep": 3, "bos": 2}
    assert roles("vocab/vocab.txt") == roles("cased/tokenizer.json") == bert
    assert roles("bpe.model") == none | {"eod": 2, "bos": 1, "pad": 3, "unk": 0}
    lower = trained["vocab/vocab.txt"].tokenizer
    assert lower.encode("FÓX").tolist() == lower.encode("fox").tolist()


def test_a_small_corpus_has_fewer_tokens(tmp_path):
    actual = train_tokenizer(["ab ab"], str(tmp_path / "tokenizer.json"), Recipe("bpe", 1000))
    assert (actual.tokenizer.vocab_size, actual.held_out) == (259, 0)  # bytes, the end, ab and _ab
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config == {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}


BPE = RECIPES["bytes/tokenizer.json"]


@pytest.mark.parametrize(
    ("recipe", "name", "message"),
    [
        (BPE, "a.json", r"bpe is written as FOLDER/tokenizer.json or FILE.model"),
        (Recipe("unigram", 400), "tokenizer.json", "unigram is written as FILE.model"),
        (Recipe("wordpiece", 400), "a.model", "FOLDER/tokenizer.json or FOLDER/vocab.txt"),
        (Recipe("bpe", 257), "tokenizer.json", "leaves no room beside 257 tokens"),
        (Recipe("unigram", 9000), "a.model", "SentencePiece cannot make vocab_size=9000"),
        (Recipe("wordpiece", 40), "vocab.txt", "smaller than the .* tokens that single"),
        (Recipe("bpe", 400, ("<a>", "<a>")), "tokenizer.json", "name '<a>' twice"),
        (Recipe("bpe", 400, ("",)), "tokenizer.json", "have an empty name"),
        (Recipe("wordpiece", 400, ("NEWS",)), "vocab.txt", "cannot say what 'NEWS' is"),
        (Recipe("wordpiece", 400, (), ("<a>",)), "vocab.txt", "cannot say what '<a>' is"),
        (dataclasses.replace(BPE, pattern="v3"), "tokenizer.json", "not one of cl100k"),
        (dataclasses.replace(BPE, pattern="v1"), "a.model", "pattern=v1 has no effect"),
        (dataclasses.replace(BPE, lower_case=True), "tokenizer.json", "True has no effect"),
        (Recipe("unigram", 400, character_coverage=0.5), "a.model", "must lie in"),
    ],
)
def test_what_cannot_be_trained(tmp_path, recipe, name, message):
    with pytest.raises(ValueError, match=message):
        train_tokenizer(TEXTS, str(tmp_path / name), recipe)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", RECIPES)
def test_texts_that_are_empty_or_fail_while_they_are_read(tmp_path, name):
    with pytest.raises(ValueError, match="no text to train on"):
        train_tokenizer([""], str(tmp_path / name), RECIPES[name])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]

    class Texts:
        def __init__(self, texts):
            self.texts = texts

        def __iter__(self):
            yield from self.texts
            raise ValueError("line 3 is bad")

    for texts in ([], TEXTS[:2]):
        with pytest.raises(ValueError, match=r"^line 3 is bad$"):
            train_tokenizer(Texts(texts), str(tmp_path / name), RECIPES[name])
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        train_tokenizer(Texts([]), str(tmp_path / "file" / name), RECIPES[name])
    if RECIPES[name].model == "wordpiece":
        with pytest.raises(ValueError, match="twice: give a list"):
            train_tokenizer(iter(TEXTS), str(tmp_path / name), RECIPES[name])
