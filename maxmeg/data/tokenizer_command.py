"""`python -m maxmeg.preprocess train-tokenizer`: its flags, the text it reads, what it prints."""

import argparse
import difflib
import sys
from collections.abc import Iterator, Sequence

from maxmeg.data import documents
from maxmeg.data.encoding import Options, Places, read_documents, texts_of
from maxmeg.data.pieces import chunks, cut, open_inputs
from maxmeg.data.tiktoken_ranks import PATTERNS
from maxmeg.data.tokenizer_training import Recipe, Trained, check_recipe, train_tokenizer

_SHOWN = 5  # bad lines named one by one


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "maxmeg.preprocess train-tokenizer",
        description="Makes a vocabulary of text, for --tokenizer and data.tokenizer.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--input", nargs="+", action="extend", required=True, metavar="FILE",
        help="as of preprocess: .jsonl, .parquet or text, packed or not; globs; - once",
    )  # fmt: skip
    parser.add_argument(
        "--model", choices=("bpe", "unigram", "wordpiece"), required=True,
        help="bpe: of bytes (FOLDER/tokenizer.json) or SentencePiece's (FILE.model); unigram: "
        "SentencePiece's; wordpiece: BERT's",
    )  # fmt: skip
    parser.add_argument("--vocab_size", type=int, required=True, help="all tokens")
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
        "--user_symbols", nargs="*", default=[], metavar="NAME",
        help="always one token where text has them",
    )  # fmt: skip
    parser.add_argument(
        "--pattern", choices=PATTERNS, help="how bpe of bytes splits text; default: cl100k"
    )
    parser.add_argument("--lower_case", action="store_true", help="of wordpiece; also no accents")
    parser.add_argument(
        "--character_coverage", type=float,
        help="of SentencePiece: share of characters that are no bytes; default: 0.9995",
    )  # fmt: skip
    parser.add_argument("--json_keys", nargs="+", default=["text"], metavar="KEY")
    parser.add_argument("--stdin_format", choices=("jsonl", "text"), default="jsonl")
    parser.add_argument(
        "--max_mb", type=float, metavar="MB", help="of text, from the start; default: all of it"
    )
    parser.add_argument(
        "--skip_bad_lines", action="store_true", help="leave them out, instead of stopping"
    )
    known = [name for action in parser._actions for name in action.option_strings]
    for word in arguments:
        name = word.partition("=")[0]
        if name.startswith("--") and name not in known and word not in ("--", "-"):
            near = difflib.get_close_matches(name, known, 1)
            parser.error(f"unknown {name}" + (f": did you mean {near[0]}?" if near else ""))
    return parser.parse_args(arguments)


class _Texts:
    """The documents' texts, read anew by every iteration."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self._flags, self.bad = flags, 0
        self._inputs = open_inputs(documents.find_inputs(flags.input), flags.stdin_format)
        if flags.model == "wordpiece" and any(one.path == "-" for one in self._inputs):
            raise ValueError("wordpiece reads its input twice, which - cannot: give a file")

    def __iter__(self) -> Iterator[str]:
        keys, self.bad, size = self._flags.json_keys, 0, 0
        options, places = Options("bytes", tuple(keys)), Places()
        limit = float("inf") if self._flags.max_mb is None else self._flags.max_mb * 1e6
        everything = cut(self._inputs, 0, sum(one.width for one in self._inputs))
        for chunk in chunks(everything, keys):
            for place, length, document in read_documents(chunk, keys):
                try:
                    texts = texts_of(chunk.kind, document, options)
                except ValueError as error:
                    self._report(f"{places.name(chunk, place)}: {error}")
                    continue
                if size and size + length > limit:
                    return
                size += length
                yield from (text for parts in texts for text in parts)

    def _report(self, message: str) -> None:
        if not self._flags.skip_bad_lines:
            raise ValueError(f"{message}; --skip_bad_lines leaves such lines out")
        self.bad += 1
        if self.bad <= _SHOWN:
            print(f"left out: {message}", file=sys.stderr)


def run(arguments: Sequence[str]) -> int:
    """Trains a tokenizer and says how it does on text it has not seen."""
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
    print(_summarize(trained, recipe, texts.bad))
    return 0


def _summarize(trained: Trained, recipe: Recipe, bad: int) -> str:
    tokenizer, size = trained.tokenizer, trained.tokenizer.vocab_size
    asked = f" of the {recipe.vocab_size:,} asked for: there are no more in the text"
    lines = [
        f"{recipe.model} of {trained.documents:,} texts, {trained.text_bytes / 1e6:,.1f} MB: "
        f"{size:,} tokens" + asked * (size < recipe.vocab_size) + f", eod={tokenizer.eod}"
    ]
    if trained.held_out_tokens:
        lines.append(
            f"{trained.held_out_bytes / trained.held_out_tokens:.2f} bytes a token on "
            f"{trained.held_out:,} texts held out ({trained.held_out_bytes / 1e6:,.1f} MB)"
        )
    else:
        lines.append("too few texts to hold any out: bytes a token are not measured")
    if bad:
        lines.append(f"{bad:,} bad lines left out")
    lines.append(f"wrote {' and '.join(trained.files)}: --tokenizer={tokenizer.spec}")
    return "\n".join(lines)
