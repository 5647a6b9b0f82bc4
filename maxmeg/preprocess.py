"""Tokenizes text into .bin/.idx files: `python -m maxmeg.preprocess --input=a.jsonl --output=out`.

Reads JSON lines (.jsonl, .json, .ndjson) and plain text (any other name, the whole file is one
document), both also as .gz and .zst, and standard input (`-`). What is written has subcommands:
`python -m maxmeg.preprocess inspect PREFIX`, `merge PREFIX ... --output=PREFIX`, `verify PREFIX`.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from maxmeg.data import commands
from maxmeg.data.prepare import Options, Report, prepare

_SHOWN = 5  # bad lines named one by one


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's flags; the names are Megatron-LM's."""
    parser = argparse.ArgumentParser("maxmeg.preprocess", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--input", nargs="+", action="extend", required=True, metavar="FILE",
        help="files, globs, or - for standard input; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--output", required=True, metavar="PREFIX", help="writes PREFIX_KEY_document.bin and .idx"
    )
    parser.add_argument(
        "--tokenizer", default="bytes",
        help="bytes | null:N | sentencepiece:FILE | huggingface:FILE | gpt2:FOLDER | tiktoken:FILE",
    )  # fmt: skip
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="processes; 0: only this one"
    )
    parser.add_argument(
        "--json_keys", nargs="+", default=["text"], metavar="KEY",
        help="fields of a JSON line, each written to its own files; a list is taken as sentences",
    )  # fmt: skip
    parser.add_argument(
        "--append_eod", action="store_true", help="end every document with the tokenizer's eod"
    )
    parser.add_argument(
        "--split_sentences", action="store_true",
        help="one sequence a sentence (. ! ? before a capital), written to PREFIX_KEY_sentence",
    )  # fmt: skip
    parser.add_argument(
        "--skip_bad_lines", action="store_true",
        help="leave out and count documents that are not valid UTF-8 or JSON, instead of stopping",
    )  # fmt: skip
    parser.add_argument(
        "--no_checksums", action="store_true", help="write no PREFIX.sums, which verify reads"
    )
    parser.add_argument(
        "--stdin_format", choices=("jsonl", "text"), default="jsonl", help="what - holds"
    )
    return parser.parse_args(arguments)


def summarize(report: Report) -> str:
    """What was written, in a few lines."""
    speed = report.text_bytes / 1e6 / max(report.seconds, 1e-9)
    lines = [
        f"{report.documents:,} documents, {report.tokens:,} tokens, "
        f"{report.text_bytes / 1e6:,.1f} MB of text in {report.seconds:.1f} s ({speed:.1f} MB/s)"
    ]
    if report.bad_lines:
        lines.append(f"{report.bad_lines:,} bad lines left out")
    lines += [f"wrote {prefix}.bin and .idx" for prefix in report.prefixes.values()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; 1 after an error that was explained."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in commands.COMMANDS:
        return commands.run(arguments)
    flags = parse_arguments(arguments)
    options = Options(
        flags.tokenizer, tuple(flags.json_keys), flags.append_eod, flags.split_sentences,
        not flags.no_checksums,
    )  # fmt: skip
    shown = 0

    def show_bad_line(message: str) -> None:
        nonlocal shown
        shown += 1
        if shown <= _SHOWN:
            print(f"left out: {message}", file=sys.stderr)

    try:
        report = prepare(
            flags.input, flags.output, options, flags.workers,
            flags.skip_bad_lines, flags.stdin_format, show_bad_line,
        )  # fmt: skip
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: nothing is written", file=sys.stderr)
        return 130
    print(summarize(report))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
