"""The flags and the output of `maxmeg preprocess` without a subcommand."""

import argparse
import difflib
import os
import sys
import typing
from collections.abc import Sequence
from pathlib import Path

from maxmeg.config import values
from maxmeg.config.flags import show
from maxmeg.config.help import Option, asked_help, describe
from maxmeg.data.corpus.loss_weights import written_files
from maxmeg.data.prepare.encoding import Options, Report
from maxmeg.data.prepare.run import PART_BYTES, Share, prepare
from maxmeg.runtime.slurm import array_task

_SHOWN = 5  # bad lines that are listed


class Parser(argparse.ArgumentParser):
    """Prints --help and mistakes as the other commands do; raises a ValueError for a mistake."""

    def __init__(self, name: str, description: str) -> None:
        self._rare: set[str] = set()
        super().__init__(name, description=description, allow_abbrev=False)

    def add_argument(self, *names: typing.Any, rare: bool = False, **rules: typing.Any):
        """rare: --help leaves the option out, --help=all shows it."""
        action = super().add_argument(*names, **rules)
        self._rare |= {action.dest} if rare else set()
        return action

    def help_text(self, group: str) -> str:
        """Return what --help prints, or --help=GROUP."""
        usage, options = f"usage: {self.prog}", []
        for action in self._actions[1:]:  # the first is --help
            value = str(action.metavar or "|".join(action.choices or ()) or action.dest.upper())
            is_list, flags = action.nargs in ("+", "*"), action.option_strings[:1]
            values_text = [f"{value} ..." if is_list else value] * (action.nargs != 0)
            name = (" " if is_list else "=").join([*flags, *values_text])
            is_required = action.required and action.nargs != "*"
            usage += f" {name}" if is_required else f" [{name}]" * (not flags)
            default = tuple(action.default) if isinstance(action.default, list) else action.default
            words = "none" if default is None else values.text(default)
            words = "required" if is_required else words
            options.append(Option(name, words, action.help or "", action.dest in self._rare))
        summary = f"{self.description}\n\n{usage}"
        return describe(summary, options, has_settings=False, group=group)

    def parse_args(self, args=None, namespace=None):
        if (group := asked_help(args or ())) is not None:
            show(self.help_text(group))
            self.exit()
        options = [name for action in self._actions for name in action.option_strings]
        for word in args or ():
            name = word.partition("=")[0]
            if name.startswith("--") and name not in options and word != "--":
                matches = difflib.get_close_matches(name, options, 1)
                raise ValueError(
                    f"unknown flag {name}: "
                    + (f"did you mean {matches[0]}?" if matches else f"see {self.prog} --help")
                )
        return super().parse_args(args, namespace)

    def error(self, message: str) -> typing.NoReturn:
        raise ValueError(f"{message}: see {self.prog} --help")


def parse_arguments(description: str | None, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command's flags, which have Megatron-LM's names."""
    parser = Parser("maxmeg preprocess", description or "")
    add_input_flags(parser)
    parser.add_argument(
        "--output", required=True, metavar="PREFIX", help="writes PREFIX_KEY_document.bin and .idx"
    )
    parser.add_argument(
        "--tokenizer", default="bytes",
        help="bytes | null:N | sentencepiece:FILE | huggingface:FILE | gpt2:FOLDER | "
        "wordpiece:FILE | tiktoken:FILE; ?special_tokens=NAME,NAME after it adds tokens",
    )  # fmt: skip
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        help="number of processes; 0: this process alone",
    )
    parser.add_argument(
        "--append_eod", action="store_true", help="end every document with the tokenizer's eod"
    )
    parser.add_argument(
        "--split_sentences", rare=True, action="store_true",
        help="one sequence per sentence (. ! ? before a capital), written to PREFIX_KEY_sentence",
    )  # fmt: skip
    parser.add_argument(
        "--aligned", rare=True, action="store_true",
        help="parallel texts: sequence n of every key is from the same row; rows with an empty "
        "text under any key are left out",
    )  # fmt: skip
    parser.add_argument(
        "--shuffle_documents", rare=True, type=int, metavar="SEED",
        help="write the documents in a random order that depends on SEED alone, so that "
        "data.split takes a fair part for validation; the tokens are written and read twice, and "
        "need twice the space meanwhile",
    )  # fmt: skip
    parser.add_argument(
        "--placeholders", rare=True, nargs="+", default=[], metavar="NAME",
        help="names of special tokens in texts, such as <image>; other names are plain text",
    )  # fmt: skip
    parser.add_argument(
        "--no_checksums",
        rare=True,
        action="store_true",
        help="write no PREFIX.sums, which verify reads",
    )
    parser.add_argument(
        "--partitions", rare=True, type=int, default=1, metavar="N",
        help="make one of N parts of the output, PREFIX_0000I-of-0000N_...; `merge` of all "
        "partitions gives the output of a single run",
    )  # fmt: skip
    parser.add_argument(
        "--partition", rare=True, type=int, metavar="I",
        help="number of the partition, from 0; default: SLURM_ARRAY_TASK_ID",
    )  # fmt: skip
    parser.add_argument(
        "--part_mb", rare=True, type=int, default=PART_BYTES >> 20, metavar="MB",
        help="of the inputs, as stored: kept in PREFIX.parts until the end, so that the same "
        "command continues an interrupted run",
    )  # fmt: skip
    return parser.parse_args(arguments)


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which documents a command reads."""
    parser.add_argument(
        "--input", nargs="+", action="extend", required=True, metavar="FILE",
        help="files or objects (.jsonl, .json, .parquet, .arrow or text, JSON and text compressed "
        "or not), globs of them, folders of Parquet or saved by datasets, or - for standard input; "
        "may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--json_keys", nargs="+", default=["text"], metavar="KEY",
        help="fields of a JSON object or columns of a table; preprocess writes each to its own "
        "files, and takes a list as sentences",
    )  # fmt: skip
    parser.add_argument(
        "--stdin_format", rare=True, choices=("jsonl", "text"), default="jsonl",
        help="the format of standard input",
    )  # fmt: skip
    parser.add_argument(
        "--skip_bad_lines", rare=True, action="store_true",
        help="skip and count documents that are not valid UTF-8 or JSON, instead of stopping",
    )  # fmt: skip


class BadLines:
    """Counts the documents that are skipped, and prints the first errors."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, message: str) -> None:
        self.count += 1
        if self.count <= _SHOWN:
            print(f"left out: {message}", file=sys.stderr)


def run(description: str | None, arguments: Sequence[str]) -> int:
    """Tokenize a corpus. Returns the exit code."""
    flags = parse_arguments(description, arguments)
    options = Options(
        flags.tokenizer, tuple(flags.json_keys), flags.append_eod, flags.split_sentences,
        not flags.no_checksums, flags.aligned, tuple(flags.placeholders), flags.shuffle_documents,
    )  # fmt: skip
    share = Share()
    try:
        share = _share(flags)
        report = prepare(
            flags.input, flags.output, options, flags.workers,
            flags.skip_bad_lines, flags.stdin_format, BadLines(), share,
        )  # fmt: skip
    except KeyboardInterrupt:
        parts = Path(share.name(flags.output) + ".parts")
        message = (
            f"the same command continues from {parts}" if parts.is_dir() else "nothing is written"
        )
        print(f"interrupted: {message}", file=sys.stderr)
        return 130
    print(_summarize(report))
    return 0


def _share(flags: argparse.Namespace) -> Share:
    partition = flags.partition
    if partition is None:
        partition = array_task() if flags.partitions > 1 else 0
        if partition is None:
            raise ValueError(
                f"partitions={flags.partitions}: give the number of one with --partition, from 0, "
                "or start an array of Slurm jobs"
            )
    return Share(partition, flags.partitions, flags.part_mb << 20)


def _summarize(report: Report) -> str:
    """A few lines that say what was written."""
    speed = report.text_bytes / 1e6 / max(report.seconds, 1e-9)
    lines = [
        f"{report.documents:,} documents, {report.tokens:,} tokens, "
        f"{report.text_bytes / 1e6:,.1f} MB of text in {report.seconds:.1f} s ({speed:.1f} MB/s)"
    ]
    if report.parts_found:
        lines.append(f"{report.parts_found:,} parts were kept from an interrupted run")
    if report.bad_lines:
        lines.append(f"{report.bad_lines:,} bad lines left out")
    if report.empty_rows:
        lines.append(f"{report.empty_rows:,} rows with an empty text left out")
    lines += map(written_files, report.prefixes.values())
    return "\n".join(lines)
