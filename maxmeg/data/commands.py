"""The subcommands of `maxmeg preprocess`.

inspect PREFIX ...                 counts, lengths, a text sample and problems of datasets
inspect --config=NAME           what a run reads of its corpora
merge PREFIX ... --output=PREFIX   one dataset from several
verify PREFIX ...                  compare files with their checksums
train-tokenizer                    train a vocabulary on text
chats                              conversations of any form as rows of messages
image-text                         images and their texts as one dataset
"""

import shlex
import sys
from collections.abc import Sequence

from maxmeg.config.files import fields
from maxmeg.config.flags import parse as parse_config
from maxmeg.config.schema import Config
from maxmeg.data import chats_command as _chats_command
from maxmeg.data import image_text_command as _image_text_command
from maxmeg.data import tokenizer_command as _tokenizer_command
from maxmeg.data.corpus.checksum import SUFFIX, create_sums
from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.corpus.loss_weights import written_files
from maxmeg.data.corpus.storage import is_remote
from maxmeg.data.inspect.composition import composition_text, uses_of
from maxmeg.data.inspect.contents import inspect, inspection_text
from maxmeg.data.inspect.page import check_report, write_report
from maxmeg.data.prepare.merge import find_prefixes, merge
from maxmeg.data.prepare_command import Parser
from maxmeg.data.tokenizers.load import load_tokenizer

_PREFIXES = "prefixes of .bin and .idx files, or folders of them"


def run_inspect(arguments: Sequence[str]) -> int:
    """Print what datasets hold. Returns 1 if one of them has a problem, 2 if one cannot be read."""
    parser = _parser("inspect", "Counts, lengths, a sample and problems of .bin/.idx files.")
    parser.add_argument("prefixes", nargs="*", metavar="PREFIX", help=_PREFIXES)
    parser.add_argument(
        "--config", action="append", default=[], metavar="NAME",
        help="what a run reads: documents, tokens, samples, epochs of every split, and its corpora "
        "where no PREFIX is given; --SECTION.FIELD=VALUE as there",
    )  # fmt: skip
    parser.add_argument("--tokenizer", help="decodes the sample; its vocabulary bounds the ids")
    parser.add_argument("--vocab_size", type=int, help="bounds the ids instead of the tokenizer's")
    parser.add_argument(
        "--document", type=int, help="number of the document to show; default: the first"
    )
    parser.add_argument("--verify", action="store_true", help=f"compare .bin with PREFIX{SUFFIX}")
    parser.add_argument("--report", metavar="FILE", help="write the report as an .html page")
    of_run = [word for word in arguments if _is_setting(word)]
    flags = parser.parse_args([word for word in arguments if word not in of_run])
    if not flags.prefixes and not flags.config:
        parser.error("name a PREFIX, or a run with --config=NAME")
    if of_run and not flags.config:
        parser.error(f"{of_run[0]} needs --config=NAME")
    if flags.report:
        check_report(flags.report)
    uses, prefixes, spec = [], find_prefixes(flags.prefixes), flags.tokenizer
    if flags.config:
        words = ["maxmeg preprocess", *(f"--config={file}" for file in flags.config), *of_run]
        config, _ = parse_config(words)
        assert config is not None
        uses = uses_of(config)
        print(composition_text(uses) + "\n")
        named = [corpus.name for split in uses for corpus in split.corpora if not config.data.mock]
        named = [name for name in named if not is_remote(name)]
        prefixes, spec = prefixes or list(dict.fromkeys(named)), spec or config.data.tokenizer
    tokenizer = load_tokenizer(spec) if spec else None
    inspections, failed = [], False
    for prefix in prefixes:
        try:
            inspection = inspect(prefix, tokenizer, flags.vocab_size, flags.document, flags.verify)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            failed = True
            continue
        print(inspection_text(inspection) + "\n")
        inspections.append(inspection)
    if flags.report and (inspections or uses):
        command = f"maxmeg preprocess {shlex.join(sys.argv[1:])}"
        write_report(flags.report, inspections, uses, command)
        print(f"wrote {flags.report}")
    return 2 if failed else int(any(inspection.problems for inspection in inspections))


def _is_setting(word: str) -> bool:
    """Return whether a word sets a field of a run: --run_dir=X, --data.split=X."""
    name = word.partition("=")[0].removeprefix("--")
    return word.startswith("--") and ("." in name or name in fields(Config))


def run_merge(arguments: Sequence[str]) -> int:
    """Write several datasets as one."""
    parser = _parser("merge", "One .bin/.idx of several, their documents in the order given.")
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help=_PREFIXES)
    parser.add_argument("--output", required=True, metavar="PREFIX", help="what is written")
    parser.add_argument("--no_checksums", action="store_true", help=f"write no PREFIX{SUFFIX}")
    parser.add_argument(
        "--shuffle_documents", type=int, metavar="SEED",
        help="in a random order that depends on SEED alone, instead of one dataset after the other",
    )  # fmt: skip
    flags = parser.parse_args(arguments)
    report = merge(flags.prefixes, flags.output, not flags.no_checksums, flags.shuffle_documents)
    print(
        f"merged {report.datasets:,} datasets ({report.verified:,} verified by checksums): "
        f"{report.documents:,} documents, {report.tokens:,} tokens\n"
        f"{written_files(flags.output)}"
    )
    return 0


def run_verify(arguments: Sequence[str]) -> int:
    """Compare files with their checksums; returns 1 where one differs or has none."""
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
                print(f"{prefix}: .bin and .idx match their checksums")
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            failed = True
    return int(failed)


def _parser(name: str, description: str) -> Parser:
    return Parser(f"maxmeg preprocess {name}", description)


COMMANDS = {
    "inspect": run_inspect,
    "merge": run_merge,
    "verify": run_verify,
    "chats": lambda arguments: _chats_command.run(arguments),
    "image-text": lambda arguments: _image_text_command.run(arguments),
    "train-tokenizer": lambda arguments: _tokenizer_command.run(arguments),
}


def run(arguments: Sequence[str]) -> int:
    """Run the subcommand that the first argument names. Returns the exit code."""
    try:
        return COMMANDS[arguments[0]](arguments[1:])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
