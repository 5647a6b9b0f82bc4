"""Checks real vocabularies: `python benchmarks/vocabularies.py SPEC_OR_GGUF [...]`.

SPEC is a value of `data.tokenizer`; a .gguf file is converted first. It checks that each token has
the bytes that it decodes to inside a text, that the bytes of a text's tokens add up to the decoded
text, that a stream gives the same text, that each token's offset is right, and that a grammar can
force the text. It prints how many checks fail, and how many texts the tokenizer changes.
"""

import functools
import json
import pathlib
import random
import sys
import tempfile
from collections.abc import Sequence

import numpy as np

from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.data.tokenizers.tokenizer import Tokenizer
from maxmeg.inference.grammar import Grammars
from maxmeg.inference.text import Text

BLOCKS = [(32, 127), (160, 0x250), (0x370, 0x3000), (0x4E00, 0x9FFF), (0x1F300, 0x1F900)]
TEXTS = [
    "    x",
    "Héllo 👩\u200d🚀 w",
    "naïve 東京 🎉\n\n\ttabs",
    " leading, trailing  ",
    "\n",
    "  ",
]
TEXTS += ["1234567 it's $5.00 don't", "\u200b\ufeff\u2028 x\u00a0y", "日本語 한국어 مرحبا हिन्दी"]
TEXTS += [
    "a  b   c    d         e\t\t\tf\n\n\n\n\n\ng",
    "på ① \uff21 ﬁ e\u0301 𠀀 ǅ",
    "▁a▁▁b <0x0A>",
]


def texts(count: int = 200) -> list[str]:
    """TEXTS, a source file, and random characters of many scripts."""
    draw = random.Random(0)
    made = [*TEXTS, pathlib.Path(functools.__file__).read_text("utf-8")]
    for _ in range(count):
        places = [draw.choice(BLOCKS) for _ in range(draw.randrange(40))]
        made.append("".join(draw.choice((chr(draw.randrange(*at)), " ", "\n")) for at in places))
    return made


def from_gguf(path: str, folder: str) -> str:
    """The spec of a GGUF file's tokenizer, whose files are written to a folder."""
    import gguf

    from maxmeg.hf.formats.gguf_tokenizer import tokenizer_files

    fields = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    for name, text in tokenizer_files(fields).items():
        pathlib.Path(folder, name).write_text(text, "utf-8")
    return f"huggingface:{folder}/tokenizer.json"


def forced(tokenizer: Tokenizer, grammars: Grammars, text: str) -> str:
    """What a grammar of one JSON string lets a model write; empty if the vocabulary cannot."""
    matcher, ids = grammars.compile("json_schema", json.dumps({"const": text})).matcher(), []
    while True:
        (allowed,) = np.nonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
        ids.append(int(allowed[0]))
        try:
            is_whole = matcher.add(ids[-1])
        except ValueError:
            return ""
        if is_whole:
            known = (tokenizer.known_bytes.get(i, b"") for i in ids)
            return json.loads(b"".join(known))


def check(tokenizer: Tokenizer) -> dict[str, int]:
    """Counts of failures, of texts that the tokenizer changes, and of texts with special tokens."""
    known, (x,) = tokenizer.known_bytes, tokenizer.encode("xx").tolist()[-1:]
    begin, end = len(tokenizer.decode([x])), len(tokenizer.decode([x, x]))
    names = ("ids", "texts", "streams", "places", "grammars", "changed", "special")
    counts: dict[str, int] = dict.fromkeys(names, 0)
    grammars = Grammars(tokenizer, tokenizer.required_size, (tokenizer.eod,))

    def inside(ids: list[int]) -> str:
        whole = tokenizer.decode([x, *ids, x])
        return whole[begin : len(whole) + begin - end]

    for i, data in known.items():
        text = data.decode("utf-8", "replace")
        counts["ids"] += inside([i]).strip("\ufffd") != text.strip("\ufffd")
    for text in texts():
        ids = tokenizer.encode(text).tolist()
        if set(ids) & tokenizer.special_ids:
            counts["special"] += 1
            continue
        told, stream, places = inside(ids), Text(tokenizer, [x]), []
        counts["texts"] += b"".join(known[i] for i in ids) != told.encode("utf-8")
        counts["changed"] += told not in (text, " " + text)
        for i in ids:
            stream.add(i)
            places.append(stream.begin)
        stream.finish()
        counts["streams"] += stream.output != told
        whole = [
            (place, known[i].decode("utf-8", "replace"))
            for place, i in zip(places, ids, strict=True)
        ]
        counts["places"] += any(
            not told.startswith(name, place) for place, name in whole if "\ufffd" not in name
        )
        if text in TEXTS:
            counts["grammars"] += forced(tokenizer, grammars, text) != text
    return counts


def main(specs: Sequence[str]) -> None:
    for spec in specs:
        with tempfile.TemporaryDirectory() as folder:
            try:
                tokenizer = load_tokenizer(from_gguf(spec, folder) if ".gguf" in spec else spec)
            except ValueError as error:
                print(f"{spec}: {error}")
                continue
            known = f"{tokenizer.vocab_size:,} tokens, {len(texts())} texts"
            print(f"{spec}: {known}:", check(tokenizer) if tokenizer.known_bytes else "no bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
