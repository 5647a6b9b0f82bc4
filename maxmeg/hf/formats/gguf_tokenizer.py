"""Convert tokenizer and chat template in a GGUF file to files of a Hugging Face folder, and back.

A tokenizer is written where a file with its metadata, read back, encodes PROBES to the same ids.
"""

import dataclasses
import functools
import json
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token_type
WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's character for a space
ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "mask": "mask"}
PROBES = (  # texts that tokenizers split differently
    "Hello world  and   more\n \n\n\t\t x\r\n  end ",
    "I'm it's THEY'LL we'Ve 1 12 123 1234 3.14; f(x)=y_2//a++ ---- !!?? https://a.b/c",
    "caf\xe9 e\u0301 \ufb01nnish \u6771\u4eac\u30bf\u30ef\u30fc",
    "\u041f\u0440\u0438\u0432\u0435\u0442 \U0001f389\U0001f468\u200d\U0001f469 \uff11\u2460",
    "HelloWorld camelCase",
    "",
)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"


@dataclasses.dataclass(frozen=True)
class Splitting:
    """How text is split before BPE, for a value of tokenizer.ggml.pre.

    pattern: regular expression; empty: GPT-2's. digits: split every digit. whole_words: do not
    merge a word that is in the vocabulary. bos: whether texts begin with the BOS token by default.
    nfc: whether text is first normalized to NFC.
    """

    pattern: str = ""
    digits: bool = False
    whole_words: bool = False
    bos: bool = False
    nfc: bool = False


_GPT2, _DIGITS = Splitting(), Splitting(digits=True)
_LLAMA3 = Splitting(_CONTRACTIONS + r"\p{N}{1,3}" + _REST, whole_words=True, bos=True)
_QWEN2 = Splitting(_CONTRACTIONS + r"\p{N}" + _REST, nfc=True)
_TEKKEN = Splitting(
    rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    whole_words=True,
    bos=True,
)
SPLITTINGS = {
    "gpt-2": _GPT2,
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _TEKKEN,
}


def tokenizer_files(fields: Mapping[str, typing.Any]) -> dict[str, str]:
    """Return tokenizer.json, tokenizer_config.json and chat_template.jinja: {file name: text}.

    fields: the file's metadata. ValueError if they hold no supported tokenizer.
    """
    entries = {key.removeprefix(PREFIX): v for key, v in fields.items() if key.startswith(PREFIX)}
    kind, tokens = entries.get("model"), entries.get("tokens")
    if not tokens:
        raise ValueError(f"the file has no {PREFIX}tokens")
    if len(set(tokens)) < len(tokens):
        raise ValueError(f"{PREFIX}tokens names some token twice")
    types = entries.get("token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(f"{PREFIX}token_type has {len(types)} entries for {len(tokens)} tokens")
    roles = {
        f"{role}_token": tokens[entries[f"{name}_token_id"]]
        for name, role in ROLES.items()
        if 0 <= entries.get(f"{name}_token_id", -1) < len(tokens)
    }
    if kind == "gpt2":
        tokenizer, opens = byte_level(entries, tokens)
    elif kind == "llama":
        tokenizer, opens = sentence_piece(entries, tokens, types, roles)
    else:
        raise ValueError(f"{PREFIX}model={kind!r} is not supported; supported are gpt2 and llama")
    for token_type in (CONTROL, UNKNOWN, USER_DEFINED):
        added = [
            tokenizers.AddedToken(token, normalized=False, special=token_type != USER_DEFINED)
            for token, its_type in zip(tokens, types, strict=True)
            if its_type == token_type
        ]
        tokenizer.add_tokens(added)
    bos = roles.get("bos_token")
    if bos is not None and entries.get("add_bos_token", opens):
        special = [(bos, entries["bos_token_id"])]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=special
        )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **roles}
    settings |= {"clean_up_tokenization_spaces": False}
    files = {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(settings)}
    if template := fields.get(TEMPLATE):
        files["chat_template.jinja"] = template
    return files


def byte_level(
    entries: Mapping[str, typing.Any], tokens: Sequence[str]
) -> tuple[tokenizers.Tokenizer, bool]:
    """Return a byte-level BPE tokenizer, and whether texts begin with BOS by default."""
    name = entries.get("pre", "gpt-2")
    if name not in SPLITTINGS:
        raise ValueError(
            f"{PREFIX}pre={name!r} is not supported; supported are {', '.join(SPLITTINGS)}"
        )
    splitting = SPLITTINGS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in entries.get("merges") or ()]
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=ids, merges=merges, ignore_merges=splitting.whole_words)
    )
    first: list[typing.Any] = []
    if splitting.digits:
        first.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.pattern:
        first.append(pre_tokenizers.Split(tokenizers.Regex(splitting.pattern), "isolated"))
    byte_parts = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splitting.pattern)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_parts])
    tokenizer.decoder = decoders.ByteLevel()
    if splitting.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, splitting.bos


def sentence_piece(
    entries: Mapping[str, typing.Any],
    tokens: Sequence[str],
    types: Sequence[int],
    roles: Mapping[str, str],
) -> tuple[tokenizers.Tokenizer, bool]:
    """Return SentencePiece's BPE tokenizer, and whether texts begin with BOS by default.

    Its merges follow from the scores; unknown characters become bytes.
    """
    scores = entries.get("scores") or ()
    if len(scores) != len(tokens):
        raise ValueError(f"{PREFIX}scores has {len(scores)} entries for {len(tokens)} tokens")
    unknown = tokens[types.index(UNKNOWN)] if UNKNOWN in types else roles.get("unk_token")
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=merges_of(tokens, scores, types),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=BYTE in types,
        )
    )
    spaces = normalizers.Replace(" ", WORD_START)
    ends: list[typing.Any] = [decoders.Replace(WORD_START, " "), decoders.ByteFallback()]
    ends.append(decoders.Fuse())
    if entries.get("add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(WORD_START), spaces])
        ends.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(ends)
    return tokenizer, True


def merges_of(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Return the pairs of pieces that form a piece, in SentencePiece's order of merging.

    Pieces of higher score come first; for one piece, pairs of earlier pieces.
    """
    pieces = {
        token: number
        for number, token in enumerate(tokens)
        if types[number] in (NORMAL, USER_DEFINED)
    }
    order = sorted((n for n in pieces.values() if types[n] == NORMAL), key=lambda n: -scores[n])
    merges: list[tuple[str, str]] = []
    for number in order:
        token = tokens[number]
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        merged = [cut for cut in cuts if cut[0] in pieces and cut[1] in pieces]
        merges += sorted(merged, key=lambda cut: (pieces[cut[0]], pieces[cut[1]]))
    return merges


Encoded: typing.TypeAlias = tuple[list[int], list[str]]
Tokens: typing.TypeAlias = dict[int, tuple[str, int]]  # text and type of each
Source: typing.TypeAlias = tuple[
    Callable[[str], Encoded], Tokens, Iterator[Mapping[str, typing.Any]]
]


def tokenizer_fields(
    path: Path, vocab_size: int, opens: bool, ids: Mapping[str, int]
) -> dict[str, typing.Any]:
    """Return the metadata of a tokenizer.json, or of SentencePiece's .model.

    opens: whether texts begin with BOS. ids: fields that name special tokens. ValueError where no
    tokenizer of GGUF encodes text as this one.
    """
    is_model = path.suffix == ".model"
    encode, pieces, candidates = _pieces(path) if is_model else _library_tokens(path)
    vocabulary = [pieces.get(i, (f"[PAD{i}]", UNUSED)) for i in range(vocab_size)]
    tokens, types = [token for token, _ in vocabulary], [kind for _, kind in vocabulary]
    probes = [without_added(text, vocabulary) for text in PROBES]
    for entries in candidates:
        entries = {**entries, "tokens": tokens, "token_type": types, "add_bos_token": opens}
        if "scores" in entries:
            entries["scores"] = [entries["scores"].get(token, 0.0) for token in tokens]
        fields = {f"{PREFIX}{name}": value for name, value in entries.items()}
        fields |= ids
        read = tokenizers.Tokenizer.from_str(tokenizer_files(fields)["tokenizer.json"])
        if all(encoding(read, text) == encode(text) for text in probes):
            return fields
    raise ValueError(
        f"{path} encodes text as no tokenizer of GGUF does: written are SentencePiece's BPE, and "
        f"byte-level BPE that splits text as {', '.join(SPLITTINGS)}"
    )


def encoding(tokenizer: tokenizers.Tokenizer, text: str) -> Encoded:
    """Return the ids of a text, and its parts if merges are limited to parts."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    splitting: typing.Any = tokenizer.pre_tokenizer
    model: typing.Any = tokenizer.model
    if splitting is None or model.byte_fallback:
        return ids, []
    return ids, [part for part, _ in splitting.pre_tokenize_str(text)]


def without_added(text: str, tokens: Sequence[tuple[str, int]]) -> str:
    """Remove user-defined tokens: libraries differ in the spaces that they put after one."""
    for token, kind in tokens:
        text = text.replace(token, "") if kind == USER_DEFINED else text
    return text


def _pieces(path: Path) -> Source:
    """Return SentencePiece's encoder, its pieces, and the metadata that may describe it."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    data, model = path.read_bytes(), sentencepiece.SentencePieceProcessor()
    library: typing.Any = sentencepiece_model_pb2
    proto = library.ModelProto.FromString(data)
    model.LoadFromSerializedProto(data)
    pieces = {i: (entry.piece, entry.type) for i, entry in enumerate(proto.pieces)}
    scores = {entry.piece: entry.score for entry in proto.pieces}
    return lambda text: (model.EncodeAsIds(text), []), pieces, _with_prefix(scores)


def _with_prefix(scores: Mapping[str, float]) -> Iterator[Mapping[str, typing.Any]]:
    for prefix in (True, False):
        yield {"model": "llama", "scores": scores, "add_space_prefix": prefix}


def _library_tokens(path: Path) -> Source:
    """Return the encoder of a tokenizer.json, its tokens, and the metadata that may describe it."""
    library = tokenizers.Tokenizer.from_file(str(path))
    model = json.loads(library.to_str())["model"]
    is_byte_level = not model.get("byte_fallback")
    added = library.get_added_tokens_decoder()
    pieces: Tokens = {}
    for token, i in library.get_vocab(with_added_tokens=True).items():
        kind = NORMAL
        if i in added:
            kind = CONTROL if added[i].special else USER_DEFINED
            kind = UNKNOWN if token == model.get("unk_token") else kind
        elif not is_byte_level and len(token) == 6 and token.startswith("<0x"):
            kind = BYTE
        pieces[i] = (token, kind)

    encode = functools.partial(encoding, library)
    if model["type"] != "BPE":
        return encode, pieces, iter(())
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    if is_byte_level:
        return encode, pieces, _with_splittings(merges, bool(model.get("ignore_merges")))
    if (model_file := path.with_name("tokenizer.model")).is_file():
        return encode, pieces, _pieces(model_file)[2]
    ranks: dict[str, float] = {}
    for merge in merges:
        ranks.setdefault(merge.replace(" ", "", 1), -float(len(ranks)))
    return encode, pieces, _with_prefix(ranks)


def _with_splittings(
    merges: Sequence[str], whole_words: bool
) -> Iterator[Mapping[str, typing.Any]]:
    tried = set()
    for name, splitting in SPLITTINGS.items():
        if splitting not in tried and splitting.whole_words == whole_words:
            tried.add(splitting)
            yield {"model": "gpt2", "pre": name, "merges": [*merges]}
