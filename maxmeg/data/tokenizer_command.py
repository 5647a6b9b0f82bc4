"""`maxmeg preprocess train-tokenizer`: its flags, its input, and its output."""

import argparse
import sys
from collections.abc import Iterator, Sequence

from maxmeg.data.prepare import documents
from maxmeg.data.prepare.encoding import (
    DocumentNames,
    Options,
    parsed,
    read_documents,
    texts_of,
)
from maxmeg.data.prepare.pieces import chunks, cut, open_inputs
from maxmeg.data.prepare.run import SKIP_HINT
from maxmeg.data.prepare_command import BadLines, Parser, add_input_flags
from maxmeg.data.tokenizers.tiktoken_ranks import PATTERNS
from maxmeg.data.tokenizers.training import Recipe, Trained, check_recipe, train_tokenizer


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "maxmeg preprocess train-tokenizer",
        "Train a vocabulary on text, for --tokenizer and data.tokenizer.",
    )
    add_input_flags(parser)
    parser.add_argument(
        "--model", choices=("bpe", "unigram", "wordpiece"), required=True,
        help="bpe: of bytes (FOLDER/tokenizer.json) or SentencePiece's (FILE.model); unigram: "
        "SentencePiece's; wordpiece: BERT's",
    )  # fmt: skip
    parser.add_argument("--vocab_size", type=int, required=True, help="number of all tokens")
    parser.add_argument(
        "--output", required=True, metavar="FILE",
        help="FOLDER/tokenizer.json | FOLDER/vocab.txt | FILE.model",
    )  # fmt: skip
    parser.add_argument(
        "--special_tokens", nargs="*", default=[], metavar="NAME",
        help="the first ids; default: <|endoftext|> of bpe; wordpiece and SentencePiece have "
        "their own before these",
    )  # fmt: skip
    parser.add_argument(
        "--user_symbols", rare=True, nargs="*", default=[], metavar="NAME",
        help="texts that always become one token",
    )  # fmt: skip
    parser.add_argument(
        "--pattern",
        rare=True,
        choices=PATTERNS,
        help="how bpe of bytes splits text; default: cl100k",
    )
    parser.add_argument(
        "--lower_case", rare=True, action="store_true", help="wordpiece only; also removes accents"
    )
    parser.add_argument(
        "--character_coverage", rare=True, type=float,
        help="SentencePiece only: share of characters not encoded as bytes; default: 0.9995",
    )  # fmt: skip
    parser.add_argument(
        "--max_mb",
        rare=True,
        type=float,
        metavar="MB",
        help="megabytes of text to read; default: all of it",
    )
    return parser.parse_args(arguments)


class _Texts:
    """The texts of the documents; each iteration reads the files again."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self._flags, self.bad = flags, BadLines()
        self._inputs = open_inputs(documents.find_inputs(flags.input), flags.stdin_format)
        if flags.model == "wordpiece" and any(file.path == "-" for file in self._inputs):
            raise ValueError(
                "wordpiece reads its input twice, which is impossible for -: give a file"
            )

    def __iter__(self) -> Iterator[str]:
        keys, self.bad, size = self._flags.json_keys, BadLines(), 0
        options, places = Options("bytes", tuple(keys)), DocumentNames()
        limit = float("inf") if self._flags.max_mb is None else self._flags.max_mb * 1e6
        everything = cut(self._inputs, 0, sum(file.width for file in self._inputs))
        for chunk in chunks(everything, keys):
            for place, length, document in read_documents(chunk):
                try:
                    texts = texts_of(chunk.kind, parsed(chunk.kind, document), options)
                except ValueError as error:
                    message = f"{places.name(chunk, place)}: {error}"
                    if not self._flags.skip_bad_lines:
                        raise ValueError(f"{message}; {SKIP_HINT}") from None
                    self.bad(message)
                    continue
                if size and size + length > limit:
                    return
                size += length
                yield from (text for parts in texts for text in parts)


def run(arguments: Sequence[str]) -> int:
    """Train a tokenizer, and print how many bytes per token it has on held-out text."""
    flags = parse_arguments(arguments)
    if flags.max_mb is not None and not flags.max_mb > 0:
        raise ValueError(f"max_mb={flags.max_mb} must be positive: leave it out to read all")
    recipe = Recipe(
        flags.model, flags.vocab_size, tuple(flags.special_tokens), tuple(flags.user_symbols),
        flags.pattern, flags.lower_case, flags.character_coverage,
    )  # fmt: skip
    check_recipe(recipe, flags.output)
    texts = _Texts(flags)
    trained = train_tokenizer(texts, flags.output, recipe, sys.stderr.isatty())
    print(_summarize(trained, recipe, texts.bad.count))
    return 0


def _summarize(trained: Trained, recipe: Recipe, bad: int) -> str:
    tokenizer, size = trained.tokenizer, trained.tokenizer.vocab_size
    requested = f" of the requested {recipe.vocab_size:,}: the text has no more"
    lines = [
        f"{recipe.model} from {trained.documents:,} texts, {trained.text_bytes / 1e6:,.1f} MB: "
        f"{size:,} tokens" + requested * (size < recipe.vocab_size) + f", eod={tokenizer.eod}"
    ]
    if trained.held_out_tokens:
        lines.append(
            f"{trained.held_out_bytes / trained.held_out_tokens:.2f} bytes per token on "
            f"{trained.held_out:,} held-out texts ({trained.held_out_bytes / 1e6:,.1f} MB)"
        )
    else:
        lines.append("too few texts to hold some out: bytes per token are not measured")
    if bad:
        lines.append(f"{bad:,} bad lines left out")
    lines.append(f"wrote {' and '.join(trained.files)}: --tokenizer={tokenizer.spec}")
    return "\n".join(lines)
