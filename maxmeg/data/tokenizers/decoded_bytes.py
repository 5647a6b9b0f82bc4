"""The bytes that each token of a tokenizer.json decodes to inside a text.

The decoder of a tokenizer.json is a sequence of steps over the tokens of a text. The steps that are
known here change each token on its own, except at the ends of the text, so every id has its bytes.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from maxmeg.data.tokenizers.merged_bytes import byte_letters

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_LETTERS = byte_letters()
_EMPTY = '{"model": {"type": "BPE", "vocab": {}, "merges": []}, "decoder": %s}'


def decoder_steps(model: Any) -> list[dict[str, Any]]:
    """The steps of a tokenizer's decoder as in tokenizer.json; empty where it has none."""
    return [] if model.decoder is None else _flat(json.loads(model.decoder.__getstate__()))


def is_byte_level(model: Any) -> bool:
    """Whether a text is decoded by byte-level BPE's letters alone."""
    return [step["type"] for step in decoder_steps(model)] == ["ByteLevel"]


def misread_tokens(model: Any) -> dict[int, str]:
    """Added tokens of a byte-level vocabulary that the library decodes to other text.

    The library takes the letters of an added token such as `på` for bytes, and decodes it to text
    with U+FFFD. Tokens that are in BPE's own vocabulary too stand for bytes.
    """
    if not is_byte_level(model):
        return {}
    vocabulary = model.get_vocab(with_added_tokens=False)
    return {
        i: text
        for i, text in _added_texts(model).items()
        if text not in vocabulary and letter_bytes(text) != text.encode("utf-8")
    }


def decoded_bytes(model: Any) -> dict[int, bytes] | None:
    """The bytes of each id; None where they depend on the tokens around it."""
    steps = decoder_steps(model)
    if not steps:
        return None  # the library puts spaces between the tokens
    tokens: dict[int, str | bytes] = {i: token for token, i in model.get_vocab().items()}
    tokens |= _added_texts(model)
    is_joined = has_bytes = False
    for step in steps:
        kind = step["type"]
        if kind == "Fuse":
            is_joined = True
        elif kind == "ByteLevel" and not has_bytes:
            tokens = {i: letter_bytes(token) for i, token in tokens.items()}
            is_joined = has_bytes = True
        elif kind == "ByteFallback" and not is_joined:
            tokens = {i: _fallback(token) for i, token in tokens.items()}
            has_bytes = True
        elif kind == "Strip" and is_joined:
            continue  # changes the ends of the text
        elif (change := _change_of(step, is_joined, has_bytes)) is not None:
            tokens = {i: t if isinstance(t, bytes) else change(t) for i, t in tokens.items()}
        else:
            return None
    token_bytes = {i: t if isinstance(t, bytes) else t.encode("utf-8") for i, t in tokens.items()}
    return token_bytes | {i: text.encode("utf-8") for i, text in misread_tokens(model).items()}


def piece_bytes(piece: str) -> bytes:
    """The byte of a piece such as <0x0A>."""
    return bytes([int(piece[3:5], 16)])


def letter_bytes(token: Any) -> bytes:
    """The bytes of a token of byte-level BPE, in which a letter stands for a byte; a token with
    another character is literal text."""
    if all(c in _LETTERS for c in token):
        return bytes(_LETTERS[c] for c in token)
    return token.encode("utf-8")


def _added_texts(model: Any) -> dict[int, str]:
    """The texts of added tokens that the decoder reads: of normalized tokens, the normalized."""
    return {i: model.id_to_token(i) for i in model.get_added_tokens_decoder()}


def _fallback(token: str | bytes) -> str | bytes:
    is_byte = isinstance(token, str) and _BYTE.fullmatch(token)
    return piece_bytes(token) if is_byte else token  # pyright: ignore


def _change_of(step: Mapping[str, Any], is_joined: bool, has_bytes: bool) -> Any:
    """The function that a step applies to each token; None where it depends on other tokens."""
    kind = step["type"]
    if kind == "Metaspace" and not is_joined:
        return lambda token: token.replace(step["replacement"], " ")
    if kind == "Replace":
        old, new = step["pattern"].get("String"), step["content"]
        if old is not None and (len(old) == 1 or not is_joined):
            return lambda token: token.replace(old, new)
    if is_joined or has_bytes or kind not in ("Replace", "Strip"):
        return None
    import tokenizers

    decoder: Any = tokenizers.Tokenizer.from_str(_EMPTY % json.dumps(step)).decoder
    return lambda token: decoder.decode([token])


def _flat(step: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The steps of a decoder, in which sequences may hold sequences."""
    if step["type"] != "Sequence":
        return [dict(step)]
    return [inner for one in step["decoders"] for inner in _flat(one)]
