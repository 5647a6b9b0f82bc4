"""`python -m maxmeg.preprocess image-text`: images and their texts as one dataset."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from maxmeg.data.documents import Progress, Record, find_inputs, has_lines, read_records
from maxmeg.data.image_text import IMAGE, TEXT, WORD, decode_image, image_words
from maxmeg.data.indexed import IndexedWriter
from maxmeg.data.tokenizers import Tokenizer, encode_placeholders, load_tokenizer
from maxmeg.data.turns import MAX_ERRORS, BadRow, read_object

_LINES_OF_ERRORS = 8


@dataclasses.dataclass(frozen=True)
class Pairs:
    """How rows {"image": FILE, "text" or "caption": TEXT} become documents.

    folder: which names of images are relative to. length: ids of every text, cut or filled up with
    ends of documents, as Megatron-LM's own script writes them; 0 leaves them as they are.
    placeholder: a token that may stand in texts. checks_images: whether each is decoded once.
    """

    tokenizer: Tokenizer
    folder: str = "."
    append_eod: bool = False
    length: int = 0
    placeholder: str = ""
    checks_images: bool = True

    def read(self, record: Record) -> tuple[np.ndarray, np.ndarray]:
        """A row's text and image as sequences; BadRow for what is none."""
        row = read_object(record, "image")
        text, path = row.get("text", row.get("caption")), row["image"]
        if not isinstance(text, str) or not isinstance(path, str):
            raise BadRow(
                'a row must be an object with "image" and "text" (or "caption"), both text'
            )
        try:
            text.encode("utf-8")
            names = (self.placeholder,) if self.placeholder else ()
            ids = encode_placeholders(self.tokenizer, text, names)
        except UnicodeEncodeError:
            raise BadRow("half a surrogate pair is no character") from None
        if not len(ids):
            raise BadRow("its text is empty")
        ids = ids[: self.length or None]
        missing = self.length - len(ids) if self.length else int(self.append_eod)
        ids = np.concatenate([ids, np.full(missing, self.tokenizer.eod, ids.dtype)])
        try:
            data = Path(self.folder, path).read_bytes()
            if self.checks_images:
                decode_image(data)
        except (OSError, ValueError) as error:
            raise BadRow(f"image {path}: {getattr(error, 'strerror', None) or error}") from None
        if not data:
            raise BadRow(f"image {path} is empty")
        return ids, image_words(data)


def write_pairs(inputs: Sequence[str], output: str, pairs: Pairs) -> int:
    """Writes OUTPUT.bin and .idx and returns how many pairs; ValueError that names bad rows."""
    files, count, problems = find_inputs(inputs), 0, []
    for file in files:
        if not has_lines(file):
            raise ValueError(f"{file} is not named .jsonl: give a JSON object a line")
    with IndexedWriter(output, dtype=WORD, multimodal=True) as writer:
        for record in read_records(files, Progress()):
            try:
                text, image = pairs.read(record)
            except BadRow as error:
                problems.append(f"{record.place}: {error}")
                if len(problems) == MAX_ERRORS:
                    break
                continue
            values = np.concatenate([text.astype(WORD), image])
            writer.add_document(values, [len(text), len(image)], [TEXT, IMAGE])
            count += 1
        if problems or not count:
            more = len(problems) - _LINES_OF_ERRORS
            lines = problems[:_LINES_OF_ERRORS] + [f"and {more} more"] * (more > 0)
            raise ValueError("\n".join([*lines, "mend these rows or remove them"])
                             if lines else f"{', '.join(files)}: no rows")  # fmt: skip
    return count


def run(arguments: Sequence[str]) -> int:
    """The subcommand."""
    parser = argparse.ArgumentParser(
        "maxmeg.preprocess image-text", allow_abbrev=False,
        description='Rows {"image": FILE, "text" or "caption": TEXT} as multimodal .bin/.idx.',
    )  # fmt: skip
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE.jsonl")
    parser.add_argument("--output", required=True, metavar="PREFIX", help="what is written")
    parser.add_argument("--tokenizer", required=True, help="as data.tokenizer of a run")
    parser.add_argument("--images", default=".", metavar="FOLDER", help="where images lie")
    parser.add_argument("--append_eod", action="store_true", help="an end of document after texts")
    parser.add_argument(
        "--length", type=int, default=0, metavar="IDS",
        help="with --append_eod: every text is cut or filled up with ends of documents to this",
    )  # fmt: skip
    parser.add_argument("--placeholder", default="", help="a token that may stand in texts")
    parser.add_argument(
        "--unchecked", action="store_true", help="do not decode every image to see that it is one"
    )
    flags = parser.parse_args(arguments)
    if flags.length < 0 or (flags.length and not flags.append_eod):
        parser.error("--length must be >= 0 and needs --append_eod")
    tokenizer = load_tokenizer(flags.tokenizer)
    pairs = Pairs(
        tokenizer, flags.images, flags.append_eod, flags.length, flags.placeholder,
        not flags.unchecked,
    )  # fmt: skip
    count = write_pairs(flags.input, flags.output, pairs)
    print(f"wrote {count:,} pairs to {flags.output}.bin and .idx", file=sys.stderr)
    return 0
