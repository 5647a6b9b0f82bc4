"""The subcommands of `python -m maxmeg.preprocess`: on .bin/.idx files, and train-tokenizer.

inspect PREFIX ...                 counts, lengths, a sample and problems
inspect --config=FILE.py           what a run reads of its corpora
merge PREFIX ... --output=PREFIX   one dataset of several
verify PREFIX ...                  compares files with their checksums
train-tokenizer                    a vocabulary of text
image-text                         images and their texts as one dataset
"""

import argparse
import sys
from collections.abc import Sequence

from maxmeg.config.flags import parse as parse_config
from maxmeg.config.lazy import Lazy
from maxmeg.data.checksum import SUFFIX, create_sums
from maxmeg.data.composition import composition_text, uses_of
from maxmeg.data.indexed import IndexedDataset
from maxmeg.data.inspection import inspect, inspection_text
from maxmeg.data.inspection_page import check_report, write_report
from maxmeg.data.merge import find_prefixes, merge
from maxmeg.data.storage import is_remote
from maxmeg.data.tokenizers import load_tokenizer

_image_text_command = Lazy("maxmeg.data.image_text_command")
_tokenizer_command = Lazy("maxmeg.data.tokenizer_command")
_PREFIXES = "prefixes of .bin and .idx files, or folders of them"


def run_inspect(arguments: Sequence[str]) -> int:
    """Prints what datasets hold; 1 where one has a problem."""
    parser = _parser("inspect", "Counts, lengths, a sample and problems of .bin/.idx files.")
    parser.add_argument("prefixes", nargs="*", metavar="PREFIX", help=_PREFIXES)
    parser.add_argument(
        "--config", action="append", default=[], metavar="FILE.py",
        help="what a run reads: documents, tokens, samples, epochs of every split, and its corpora "
        "where no PREFIX is given; --config.FIELD=VALUE as there",
    )  # fmt: skip
    parser.add_argument("--tokenizer", help="decodes the sample; its vocabulary bounds the ids")
    parser.add_argument("--vocab_size", type=int, help="bounds the ids instead of the tokenizer's")
    parser.add_argument("--document", type=int, help="shown as a sample; default: the first")
    parser.add_argument("--verify", action="store_true", help=f"compare .bin with PREFIX{SUFFIX}")
    parser.add_argument("--report", metavar="FILE", help="draw the lengths into a .png or .html")
    of_run = [word for word in arguments if word.startswith("--config.")]
    flags = parser.parse_args([word for word in arguments if word not in of_run])
    if not flags.prefixes and not flags.config:
        parser.error("name a PREFIX, or a run with --config=FILE.py")
    if of_run and not flags.config:
        parser.error(f"{of_run[0]} needs --config=FILE.py")
    if flags.report:
        check_report(flags.report)
    uses, prefixes, spec = [], find_prefixes(flags.prefixes), flags.tokenizer
    if flags.config:
        words = ["maxmeg.preprocess", *(f"--config={file}" for file in flags.config), *of_run]
        config, _ = parse_config(words)
        assert config is not None
        uses = uses_of(config)
        print(composition_text(uses) + "\n")
        named = [corpus.name for split in uses for corpus in split.corpora if not config.data.mock]
        named = [name for name in named if not is_remote(name)]
        prefixes, spec = prefixes or list(dict.fromkeys(named)), spec or config.data.tokenizer
    tokenizer = load_tokenizer(spec) if spec else None
    found, failed = [], False
    for prefix in prefixes:
        try:
            one = inspect(prefix, tokenizer, flags.vocab_size, flags.document, flags.verify)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            failed = True
            continue
        print(inspection_text(one) + "\n")
        found.append(one)
    if flags.report and (found or uses):
        write_report(flags.report, found, uses)
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


COMMANDS = {
    "inspect": run_inspect,
    "merge": run_merge,
    "verify": run_verify,
    "image-text": lambda arguments: _image_text_command.run(arguments),
    "train-tokenizer": lambda arguments: _tokenizer_command.run(arguments),
}


def run(arguments: Sequence[str]) -> int:
    """Runs the subcommand that the first argument names; 1 after an error that was explained."""
    try:
        return COMMANDS[arguments[0]](arguments[1:])
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
