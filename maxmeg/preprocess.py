"""Tokenizes text into .bin/.idx files: `python -m maxmeg.preprocess --input=a.jsonl --output=out`.

Reads JSON lines (.jsonl, .json, .ndjson), Parquet (.parquet) and plain text (any other name, the
whole file is one document), lines and text also packed as .gz, .zst, .bz2 and .xz, from paths,
s3://bucket/key and other addresses that fsspec knows, and standard input (`-`). What is written
has subcommands: `python -m maxmeg.preprocess inspect PREFIX`, `merge PREFIX ... --output=PREFIX`,
`verify PREFIX`.
"""

import signal
import sys
from collections.abc import Sequence

from maxmeg.data import commands, prepare_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; 1 after an error that was explained."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in commands.COMMANDS:
        return commands.run(arguments)
    return prepare_command.run(__doc__, arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
