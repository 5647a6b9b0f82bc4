"""The flags of `python -m maxmeg.preprocess` itself, and what it prints."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from maxmeg.data.encoding import Options, Report
from maxmeg.data.prepare import PART_BYTES, Share, prepare
from maxmeg.runtime.slurm_array import array_task

_SHOWN = 5  # bad lines named one by one


def parse_arguments(description: str | None, arguments: Sequence[str]) -> argparse.Namespace:
    """The command's flags; the names are Megatron-LM's."""
    parser = argparse.ArgumentParser(
        "maxmeg.preprocess", description=description, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--input", nargs="+", action="extend", required=True, metavar="FILE",
        help="files or objects, globs of them, or - for standard input; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--output", required=True, metavar="PREFIX", help="writes PREFIX_KEY_document.bin and .idx"
    )
    parser.add_argument(
        "--tokenizer", default="bytes",
        help="bytes | null:N | sentencepiece:FILE | huggingface:FILE | gpt2:FOLDER | "
        "wordpiece:FILE | tiktoken:FILE; ?special_tokens=NAME,NAME after it adds tokens",
    )  # fmt: skip
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="processes; 0: only this one"
    )
    parser.add_argument(
        "--json_keys", nargs="+", default=["text"], metavar="KEY",
        help="fields of a JSON line or columns of Parquet, each written to its own files; a list "
        "is taken as sentences",
    )  # fmt: skip
    parser.add_argument(
        "--append_eod", action="store_true", help="end every document with the tokenizer's eod"
    )
    parser.add_argument(
        "--split_sentences", action="store_true",
        help="one sequence a sentence (. ! ? before a capital), written to PREFIX_KEY_sentence",
    )  # fmt: skip
    parser.add_argument(
        "--aligned", action="store_true",
        help="parallel texts: sequence n of every key is of one row; rows with an empty text "
        "under any key are left out of all",
    )  # fmt: skip
    parser.add_argument(
        "--placeholders", nargs="+", default=[], metavar="NAME",
        help="tokens that text names, like <image>; without, no text makes special tokens",
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
    parser.add_argument(
        "--partitions", type=int, default=1, metavar="N",
        help="make one of N parts of the output, PREFIX_0000I-of-0000N_...; `merge` of all of them "
        "is what one run writes",
    )  # fmt: skip
    parser.add_argument(
        "--partition", type=int, metavar="I",
        help="which one, from 0; default: SLURM_ARRAY_TASK_ID",
    )  # fmt: skip
    parser.add_argument(
        "--part_mb", type=int, default=PART_BYTES >> 20, metavar="MB",
        help="of the inputs, as stored: kept in PREFIX.parts until the end, so that the same "
        "command goes on where an interrupted run was",
    )  # fmt: skip
    return parser.parse_args(arguments)


def run(description: str | None, arguments: Sequence[str]) -> int:
    """Prepares a corpus; 1 after an error that was explained."""
    flags = parse_arguments(description, arguments)
    options = Options(
        flags.tokenizer, tuple(flags.json_keys), flags.append_eod, flags.split_sentences,
        not flags.no_checksums, flags.aligned, tuple(flags.placeholders),
    )  # fmt: skip
    shown = 0

    def show_bad_line(message: str) -> None:
        nonlocal shown
        shown += 1
        if shown <= _SHOWN:
            print(f"left out: {message}", file=sys.stderr)

    share = Share()
    try:
        share = _share(flags)
        report = prepare(
            flags.input, flags.output, options, flags.workers,
            flags.skip_bad_lines, flags.stdin_format, show_bad_line, share,
        )  # fmt: skip
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        parts = Path(share.name(flags.output) + ".parts")
        said = f"the same command goes on from {parts}" if parts.is_dir() else "nothing is written"
        print(f"interrupted: {said}", file=sys.stderr)
        return 130
    print(_summarize(report))
    return 0


def _share(flags: argparse.Namespace) -> Share:
    partition = flags.partition
    if partition is None:
        partition = array_task() if flags.partitions > 1 else 0
        if partition is None:
            raise ValueError(
                f"partitions={flags.partitions}: say which with --partition, from 0, or start an "
                "array of Slurm jobs"
            )
    return Share(partition, flags.partitions, flags.part_mb << 20)


def _summarize(report: Report) -> str:
    """What was written, in a few lines."""
    speed = report.text_bytes / 1e6 / max(report.seconds, 1e-9)
    lines = [
        f"{report.documents:,} documents, {report.tokens:,} tokens, "
        f"{report.text_bytes / 1e6:,.1f} MB of text in {report.seconds:.1f} s ({speed:.1f} MB/s)"
    ]
    if report.parts_found:
        lines.append(f"{report.parts_found:,} parts were there from an interrupted run")
    if report.bad_lines:
        lines.append(f"{report.bad_lines:,} bad lines left out")
    if report.empty_rows:
        lines.append(f"{report.empty_rows:,} rows with an empty text left out")
    lines += [f"wrote {prefix}.bin and .idx" for prefix in report.prefixes.values()]
    return "\n".join(lines)
