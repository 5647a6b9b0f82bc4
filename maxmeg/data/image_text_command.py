"""`maxmeg preprocess image-text`: write images and their texts as one dataset."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from maxmeg.data.chat.turns import MAX_ERRORS, BadRow, bad_rows_error, read_object
from maxmeg.data.corpus.indexed import IndexedWriter
from maxmeg.data.corpus.vocabulary import write_vocabulary
from maxmeg.data.prepare.documents import Record, check_unicode, find_row_files, read_records
from maxmeg.data.prepare_command import Parser
from maxmeg.data.samples.image_text import IMAGE, TEXT, WORD, decode_image, image_words
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.data.tokenizers.tokenizer import Tokenizer, encode_placeholders


@dataclasses.dataclass(frozen=True)
class Pairs:
    """How rows {"image": FILE, "text" or "caption": TEXT} become documents.

    folder: the folder that image paths are relative to. append_eod: end each text with the
    end-of-document token. length: tokens per text, truncated or filled up with end-of-document
    tokens as in Megatron-LM's script; 0 keeps the texts' lengths. placeholder: a special token that
    texts may contain. checks_images: decode each image once.
    """

    tokenizer: Tokenizer
    folder: str = "."
    append_eod: bool = False
    length: int = 0
    placeholder: str = ""
    checks_images: bool = True

    def read(self, record: Record) -> tuple[np.ndarray, np.ndarray]:
        """The text and the image of a row as sequences; BadRow for an invalid row."""
        row = read_object(record, "image")
        text, path = row.get("text", row.get("caption")), row["image"]
        if not isinstance(text, str) or not isinstance(path, str):
            raise BadRow(
                'a row must be an object with "image" and "text" (or "caption"), both text'
            )
        try:
            check_unicode(text, "the text")
        except ValueError as error:
            raise BadRow(str(error)) from None
        names = (self.placeholder,) if self.placeholder else ()
        ids = encode_placeholders(self.tokenizer, text, names)
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
    """Write OUTPUT.bin and .idx; returns the number of pairs. ValueError that names invalid
    rows."""
    files, count, problems = find_row_files(inputs, "pairs of images and texts"), 0, []
    with IndexedWriter(output, dtype=WORD, multimodal=True) as writer:
        for record in read_records(files):
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
        if problems:
            raise bad_rows_error(problems)
        if not count:
            raise ValueError(f"{', '.join(files)}: no rows")
    return count


def run(arguments: Sequence[str]) -> int:
    """Run the subcommand."""
    parser = Parser(
        "maxmeg preprocess image-text",
        'Rows {"image": FILE, "text" or "caption": TEXT} as multimodal .bin/.idx.',
    )  # fmt: skip
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="FILE.jsonl", help="JSON lines of such rows"
    )
    parser.add_argument("--output", required=True, metavar="PREFIX", help="what is written")
    parser.add_argument("--tokenizer", required=True, help="as in data.tokenizer of a run")
    parser.add_argument("--images", default=".", metavar="FOLDER", help="the folder of the images")
    parser.add_argument(
        "--append_eod", action="store_true", help="end every text with the end-of-document token"
    )
    parser.add_argument(
        "--length", type=int, default=0, metavar="IDS",
        help="with --append_eod: cut every text, or fill it up with end-of-document tokens, to IDS",
    )  # fmt: skip
    parser.add_argument("--placeholder", default="", help="a special token that texts may contain")
    parser.add_argument(
        "--unchecked", action="store_true", help="do not check that every image can be decoded"
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
    write_vocabulary(flags.output, tokenizer.identity)
    print(f"wrote {count:,} pairs to {flags.output}.bin and .idx", file=sys.stderr)
    return 0
