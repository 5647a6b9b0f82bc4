"""`maxmeg preprocess chats`: write conversations of any form as rows of messages."""

import collections
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from maxmeg.data.chat.conversation import excerpt
from maxmeg.data.chat.turns import MAX_ERRORS, BadRow, Row, bad_rows, bad_rows_error, read_row
from maxmeg.data.corpus.stored import atomic_file
from maxmeg.data.prepare.documents import check_unicode, find_row_files, read_records
from maxmeg.data.prepare_command import BadLines, Parser


def message_row(row: Row) -> dict[str, Any]:
    """A conversation that `read_row` returned, as a row of the form messages with equal tokens and
    weights."""
    pairs = zip(row["messages"], row["weights"], strict=True)
    messages = [message | {"weight": weight} for message, weight in pairs]
    for message in messages:
        if message["role"] != "assistant" or message["weight"] == 1:
            del message["weight"]
    fields = {"messages": messages, "tools": row["tools"], "weight": row["weight"]}
    return {name: value for name, value in fields.items() if value not in (None, 1)}


def _no_json(value: Any) -> None:
    raise ValueError(f"{excerpt(value)} is no JSON value")


def write_chats(
    inputs: Sequence[str], output: str, on_bad_row: Callable[[str], None] | None = None
) -> collections.Counter[str]:
    """Write the conversations of files into a file of JSON lines; returns the rows of each form.

    on_bad_row: is called with file, row and field of an invalid row, which is left out. Without it,
    ValueError names the invalid rows, and nothing is written.
    """
    if not output.endswith(".jsonl"):
        raise ValueError(f"output={output} must be named .jsonl, as files of rows are")
    forms, problems = collections.Counter(), []
    files = find_row_files(inputs, "conversations")
    with atomic_file(Path(output)) as file:
        for record in read_records(files):
            try:
                row = read_row(record)
                with bad_rows():
                    line = json.dumps(
                        message_row(row), ensure_ascii=False, allow_nan=False, default=_no_json
                    )
                    check_unicode(line, "the conversation")
            except BadRow as error:
                problems.append(f"{record.place}: {error}")
                if on_bad_row:
                    on_bad_row(problems.pop())
                elif len(problems) == MAX_ERRORS:
                    break
                continue
            file.write(line.encode() + b"\n")
            forms[row["form"]] += 1
        if problems:
            raise bad_rows_error(problems)
        if not forms:
            raise ValueError(f"{', '.join(files)}: no conversations")
    return forms


def run(arguments: Sequence[str]) -> int:
    """Run the subcommand."""
    parser = Parser(
        "maxmeg preprocess chats",
        "Conversations of any form that data.objective=sft reads (ShareGPT, Alpaca, "
        'prompt and completion, messages) as JSON lines {"messages": ..., "tools": ..., "weight": '
        "...}. Other fields of rows are left out.",
    )  # fmt: skip
    parser.add_argument(
        "--input", nargs="+", action="extend", required=True, metavar="FILE",
        help="files (.jsonl, .json, .parquet, .arrow), globs of them, folders of Parquet or saved "
        "by datasets, or - for JSON lines in standard input",
    )  # fmt: skip
    parser.add_argument("--output", required=True, metavar="FILE.jsonl", help="what is written")
    parser.add_argument(
        "--skip_bad_lines", action="store_true",
        help="skip and count invalid rows, instead of stopping",
    )  # fmt: skip
    flags = parser.parse_args(arguments)
    bad_lines = BadLines()
    forms = write_chats(flags.input, flags.output, bad_lines if flags.skip_bad_lines else None)
    if bad_lines.count:
        print(f"{bad_lines.count:,} bad rows left out")
    counts = ", ".join(f"{count:,} {form}" for form, count in forms.items())
    print(f"wrote {forms.total():,} conversations ({counts}) to {flags.output}")
    return 0
