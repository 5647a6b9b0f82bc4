"""Train vocabularies with the tokenizers and sentencepiece libraries.

The output's name decides the format: tokenizer.json (bpe over bytes, or wordpiece) or vocab.txt
(wordpiece), each with a tokenizer_config.json beside it, or NAME.model (SentencePiece's bpe or
unigram). The same text and settings give the same bytes.
"""

import collections
import dataclasses
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from maxmeg.data.corpus.stored import write_atomically
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.data.tokenizers.tiktoken_ranks import PATTERNS
from maxmeg.data.tokenizers.tokenizer import Tokenizer
from maxmeg.data.tokenizers.vocabularies import END_NAMES

HELD_OUT_EVERY, HELD_OUT_FIRST = 20, 10  # every 20th document is held out, from the 10th on
HELD_OUT_BYTES = 4 << 20
BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SENTENCEPIECE_TOKENS = ("<unk>", "<s>", "</s>", "<pad>")
WORDPIECE_CHARACTERS = 1000  # BERT's limit: rarer characters become [UNK]
LINE_BYTES = 1 << 14  # SentencePiece skips longer lines, so they are cut
THREADS = 16  # fixed, because SentencePiece's sums depend on the number of threads
ROLE_NAMES = {
    "eos_token": END_NAMES,
    "bos_token": ("<s>", "<bos>", "<|begin_of_text|>"),
    "pad_token": ("<pad>", "[PAD]", "<|pad|>"),
    "unk_token": ("[UNK]", "<unk>"),
    "cls_token": ("[CLS]", "<cls>"),
    "sep_token": ("[SEP]", "<sep>"),
    "mask_token": ("[MASK]", "<mask>"),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings of the training.

    special_tokens: in SentencePiece and vocab.txt no text contains them. user_symbols: always one
    token. pattern: how bpe splits text. None: the model's default.
    """

    model: str  # bpe | unigram | wordpiece
    vocab_size: int
    special_tokens: tuple[str, ...] = ()
    user_symbols: tuple[str, ...] = ()
    pattern: str | None = None
    lower_case: bool = False
    character_coverage: float | None = None


@dataclasses.dataclass
class Trained:
    """The trained tokenizer, and statistics of the texts for training and of held-out texts."""

    tokenizer: Tokenizer
    files: tuple[str, ...]
    documents: int
    text_bytes: int
    held_out: int
    held_out_bytes: int
    held_out_tokens: int


class _Reader:
    """Yields the texts for training, and keeps some texts as held out."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.is_done = False
        self.documents = self.text_bytes = self.held_out_bytes = 0
        self.held_out: list[str] = []

    def __iter__(self) -> Iterator[str]:
        self.documents = self.text_bytes = self.held_out_bytes = 0
        self.held_out = []
        for number, text in enumerate(self._texts):
            size = len(text.encode("utf-8"))
            holds = number % HELD_OUT_EVERY == HELD_OUT_FIRST
            if holds and self.held_out_bytes + size <= HELD_OUT_BYTES:
                self.held_out.append(text)
                self.held_out_bytes += size
                continue
            self.documents += 1
            self.text_bytes += size
            yield text
        self.is_done = True


def train_tokenizer(
    texts: Iterable[str], output: str, recipe: Recipe, show_progress: bool = False
) -> Trained:
    """Train on texts (wordpiece reads them twice), and write the files.

    ValueError where the texts or settings are not sufficient; then nothing is written.
    """
    kind = check_recipe(recipe, output)
    if recipe.model == "wordpiece" and iter(texts) is texts:
        raise ValueError("wordpiece reads its texts twice: give a list, not an iterator")
    reader = _Reader(texts)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    mark = Path(f"{output}.partial")
    mark.touch()  # find out before the training whether the folder is writable
    try:
        files = _files(reader, output, recipe, kind, show_progress)
        for name, data in files.items():
            write_atomically(Path(name), data)
    except ValueError:
        if reader.is_done and not reader.text_bytes:
            raise ValueError("the input holds no text to train on") from None
        raise
    finally:
        mark.unlink(missing_ok=True)
    tokenizer = load_tokenizer(f"{kind}:{Path(output).parent if kind == 'wordpiece' else output}")
    tokens = sum(len(tokenizer.encode(text)) for text in reader.held_out)
    return Trained(
        tokenizer, tuple(files), reader.documents, reader.text_bytes, len(reader.held_out),
        reader.held_out_bytes, tokens,
    )  # fmt: skip


def _files(reader: _Reader, output: str, recipe: Recipe, kind: str, show: bool) -> dict[str, bytes]:
    if kind == "sentencepiece":
        return {output: _sentencepiece(reader, recipe, show)}
    model = (_wordpiece if recipe.model == "wordpiece" else _bpe)(reader, recipe, show)
    if not reader.text_bytes:
        raise ValueError("no text")
    vocabulary = model.get_vocab(with_added_tokens=True)
    lines = "".join(f"{token}\n" for token in sorted(vocabulary, key=vocabulary.__getitem__))
    text = lines if kind == "wordpiece" else model.to_str(pretty=True)
    config = json.dumps(_config(recipe, kind), indent=2) + "\n"
    settings_path = str(Path(output).with_name("tokenizer_config.json"))
    return {output: text.encode(), settings_path: config.encode()}


def check_recipe(recipe: Recipe, output: str) -> str:
    """The kind of tokenizer that is written; ValueError for settings that contradict each other."""
    name = Path(output).name
    kinds = {"tokenizer.json": "huggingface", "vocab.txt": "wordpiece"}
    kind = "sentencepiece" if name.endswith(".model") else kinds.get(name, "")
    allowed = {
        "bpe": ("huggingface", "sentencepiece"),
        "unigram": ("sentencepiece",),
        "wordpiece": ("huggingface", "wordpiece"),
    }[recipe.model]
    if kind not in allowed:
        names = {"huggingface": "FOLDER/tokenizer.json", "sentencepiece": "FILE.model"}
        outputs = " or ".join(names.get(k, "FOLDER/vocab.txt") for k in allowed)
        raise ValueError(f"output {output}: {recipe.model} is written as {outputs}")
    first = _first_tokens(recipe, kind)
    names = [*recipe.special_tokens, *recipe.user_symbols]
    twice = sorted({token for token in names if names.count(token) > 1 or not token})
    if twice:
        raise ValueError(
            f"special_tokens or user_symbols name {twice[0]!r} twice, or have an empty name"
        )
    if kind == "wordpiece":
        words = [token for token in recipe.special_tokens if token.isalnum()]
        if words or recipe.user_symbols:
            raise ValueError(
                f"a vocab.txt cannot say what {[*words, *recipe.user_symbols][0]!r} is: name "
                "special_tokens like [THIS] and no user_symbols, or write a tokenizer.json"
            )
    for name, value, fits in (
        ("pattern", recipe.pattern, recipe.model == "bpe" and kind == "huggingface"),
        ("lower_case", recipe.lower_case or None, recipe.model == "wordpiece"),
        ("character_coverage", recipe.character_coverage, kind == "sentencepiece"),
    ):
        if value is not None and not fits:
            raise ValueError(f"{name}={value} has no effect on {recipe.model} in {output}")
    if recipe.pattern is not None and recipe.pattern not in PATTERNS:
        raise ValueError(f"pattern={recipe.pattern} is not one of {', '.join(PATTERNS)}")
    coverage = 1.0 if recipe.character_coverage is None else recipe.character_coverage
    if not 0.9 <= coverage <= 1:
        raise ValueError(f"character_coverage={coverage} must lie in [0.9, 1], such as 0.9995")
    least = len(first) + len(recipe.user_symbols) + 256 * (recipe.model != "wordpiece")
    if recipe.vocab_size <= least:
        parts = "256 bytes, special tokens" if recipe.model != "wordpiece" else "special tokens"
        raise ValueError(
            f"vocab_size={recipe.vocab_size} leaves no room beside {least} tokens ({parts} and "
            "symbols): raise it, to some thousands at least"
        )
    return kind


def _first_tokens(recipe: Recipe, kind: str) -> list[str]:
    """Special tokens in the order of their ids."""
    first = ("<|endoftext|>",) if not recipe.special_tokens else ()
    first = SENTENCEPIECE_TOKENS if kind == "sentencepiece" else first
    first = BERT_TOKENS if recipe.model == "wordpiece" else first
    return list(dict.fromkeys([*first, *recipe.special_tokens]))


def _bpe(texts: Iterable[str], recipe: Recipe, show: bool) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERNS[recipe.pattern or "cl100k"]), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size - len(recipe.user_symbols),
        show_progress=show,
        special_tokens=_first_tokens(recipe, "huggingface"),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    model.train_from_iterator(texts, trainer)
    _add_symbols(model, recipe)
    return model


def _wordpiece(texts: Iterable[str], recipe: Recipe, show: bool) -> Any:
    """Train BERT's WordPiece; reads the texts twice.

    The library alone would number characters in an order that differs from run to run.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from tokenizers import processors as templates

    lower = recipe.lower_case
    normalizer = normalizers.BertNormalizer(True, True, lower, lower)
    split = pre_tokenizers.BertPreTokenizer()
    counts: collections.Counter[str] = collections.Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    by_count = sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))
    letters = sorted(by_count[:WORDPIECE_CHARACTERS])
    inside = [c for c in letters if len(split.pre_tokenize_str(f"a{c}")) == 1]
    special = _first_tokens(recipe, "wordpiece")
    first = [*special, *letters, *(f"##{c}" for c in inside)]
    size = recipe.vocab_size - len(recipe.user_symbols)
    if size < len(first):
        raise ValueError(
            f"vocab_size={recipe.vocab_size} is smaller than the {len(first)} tokens that single "
            "characters and special tokens need: raise it, to some thousands at least"
        )
    merging = Tokenizer(models.BPE(continuing_subword_prefix="##"))
    merging.normalizer, merging.pre_tokenizer = normalizer, split
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        show_progress=show,
        special_tokens=list(dict.fromkeys(first)),
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        continuing_subword_prefix="##",
    )
    merging.train_from_iterator(texts, trainer)
    model = Tokenizer(models.WordPiece(merging.get_vocab(), unk_token="[UNK]"))
    model.normalizer, model.pre_tokenizer = normalizer, split
    model.decoder = decoders.WordPiece()
    model.add_special_tokens(special)
    _add_symbols(model, recipe)
    begin, end = (model.token_to_id(name) for name in ("[CLS]", "[SEP]"))
    model.post_processor = templates.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", begin), ("[SEP]", end)],
    )
    return model


def _add_symbols(model: Any, recipe: Recipe) -> None:
    from tokenizers import AddedToken

    model.add_tokens([AddedToken(word, normalized=False) for word in recipe.user_symbols])


def _sentencepiece(texts: Iterable[str], recipe: Recipe, show: bool) -> bytes:
    import sentencepiece

    model_file, failed = io.BytesIO(), []

    def lines() -> Iterator[str]:
        try:
            yield from _lines(texts)
        except BaseException as error:
            failed.append(error)  # SentencePiece would only keep its text
            raise

    control = [t for t in recipe.special_tokens if t not in SENTENCEPIECE_TOKENS]
    try:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=lines(),
            model_writer=model_file,
            model_type=recipe.model,
            vocab_size=recipe.vocab_size,
            character_coverage=recipe.character_coverage or 0.9995,
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",  # so that decoding restores the text
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            pad_id=SENTENCEPIECE_TOKENS.index("<pad>"),
            control_symbols=control,
            user_defined_symbols=list(recipe.user_symbols),
            max_sentence_length=LINE_BYTES,
            num_threads=THREADS,
            minloglevel=0 if show else 3,
        )
    except RuntimeError as error:
        if failed:
            raise failed[0] from None
        reason = str(error).rpartition("]")[2].strip() or str(error)
        raise ValueError(
            f"SentencePiece cannot make vocab_size={recipe.vocab_size} of this text: {reason}"
        ) from None
    return model_file.getvalue()


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """The lines of the texts; long lines are cut, at spaces if possible."""
    most = LINE_BYTES // 4  # characters
    for text in texts:
        for line in text.split("\n"):
            while len(line) > most:
                at = line.rfind(" ", 1, most)
                at = most if at < 0 else at
                yield line[:at]
                line = line[at:]
            if line:
                yield line


def _config(recipe: Recipe, kind: str) -> dict[str, Any]:
    """tokenizer_config.json: special tokens by role, which transformers also reads."""
    tokens = _first_tokens(recipe, recipe.model)
    name = "BertTokenizer" if kind == "wordpiece" else "PreTrainedTokenizerFast"
    config: dict[str, Any] = {"tokenizer_class": name}
    if recipe.model == "wordpiece":
        lower = recipe.lower_case
        config |= {"do_lower_case": lower, "strip_accents": lower, "tokenize_chinese_chars": True}
    for role, names in ROLE_NAMES.items():
        present = [name for name in names if name in tokens]
        if role == "eos_token" and not present:
            present = tokens[:1]
        if present:
            config[role] = present[0]
    return config
