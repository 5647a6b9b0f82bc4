"""The subcommands of `python -m maxmeg.preprocess` that work on .bin/.idx files.

inspect PREFIX ...                 counts, lengths, a sample and problems
merge PREFIX ... --output=PREFIX   one dataset of several
verify PREFIX ...                  compares files with their checksums
"""

import argparse
import sys
from collections.abc import Sequence

from maxmeg.data.checksum import SUFFIX, create_sums
from maxmeg.data.indexed import IndexedDataset
from maxmeg.data.inspection import inspect, inspection_text
from maxmeg.data.inspection_page import check_report, write_report
from maxmeg.data.merge import find_prefixes, merge
from maxmeg.data.tokenizers import load_tokenizer

_PREFIXES = "prefixes of .bin and .idx files, or folders of them"


def run_inspect(arguments: Sequence[str]) -> int:
    """Prints what datasets hold; 1 where one has a problem."""
    parser = _parser("inspect", "Counts, lengths, a sample and problems of .bin/.idx files.")
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help=_PREFIXES)
    parser.add_argument("--tokenizer", help="decodes the sample; its vocabulary bounds the ids")
    parser.add_argument("--vocab_size", type=int, help="bounds the ids instead of the tokenizer's")
    parser.add_argument("--document", type=int, help="shown as a sample; default: the first")
    parser.add_argument("--verify", action="store_true", help=f"compare .bin with PREFIX{SUFFIX}")
    parser.add_argument("--report", metavar="FILE", help="draw the lengths into a .png or .html")
    flags = parser.parse_args(arguments)
    if flags.report:
        check_report(flags.report)
    tokenizer = load_tokenizer(flags.tokenizer) if flags.tokenizer else None
    found, failed = [], False
    for prefix in find_prefixes(flags.prefixes):
        try:
            one = inspect(prefix, tokenizer, flags.vocab_size, flags.document, flags.verify)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            failed = True
            continue
        print(inspection_text(one) + "\n")
        found.append(one)
    if flags.report and found:
        write_report(flags.report, found)
        print(f"wrote {flags.report}")
    return int(failed or any(one.problems for one in found))


def run_merge(arguments: Sequence[str]) -> int:
    """Writes several datasets as one."""
    parser = _parser("merge", "One .bin/.idx of several, their documents in the order given.")
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help=_PREFIXES)
    parser.add_argument("--output", required=True, metavar="PREFIX", help="what is written")
    parser.add_argument("--no_checksums", action="store_true", help=f"write no PREFIX{SUFFIX}")
    flags = parser.parse_args(arguments)
    report = merge(flags.prefixes, flags.output, not flags.no_checksums)
    print(
        f"merged {report.datasets:,} datasets ({report.verified:,} verified by checksums): "
        f"{report.documents:,} documents, {report.tokens:,} tokens\n"
        f"wrote {flags.output}.bin and .idx"
    )
    return 0


def run_verify(arguments: Sequence[str]) -> int:
    """Compares files with their checksums; 1 where one differs or has none."""
    parser = _parser("verify", f"Compares .bin and .idx with their checksums in PREFIX{SUFFIX}.")
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help=_PREFIXES)
    parser.add_argument(
        "--create", action="store_true",
        help="write checksums of the files as they are, for files made by other programs",
    )  # fmt: skip
    flags = parser.parse_args(arguments)
    failed = False
    for prefix in find_prefixes(flags.prefixes):
        try:
            if flags.create:
                IndexedDataset(prefix, check_sums=False)
                create_sums(prefix)
                print(f"wrote {prefix}{SUFFIX}")
            else:
                IndexedDataset(prefix).verify()
                print(f"{prefix}: .bin and .idx agree with their checksums")
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            failed = True
    return int(failed)


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        f"maxmeg.preprocess {name}", description=description, allow_abbrev=False
    )


COMMANDS = {"inspect": run_inspect, "merge": run_merge, "verify": run_verify}


def run(arguments: Sequence[str]) -> int:
    """Runs the subcommand that the first argument names; 1 after an error that was explained."""
    try:
        return COMMANDS[arguments[0]](arguments[1:])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
