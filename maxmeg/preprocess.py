"""Tokenizes text into .bin/.idx files.

Reads JSON lines (.jsonl, .json, .ndjson), Parquet (.parquet) and plain text (any other name: one
document per file) from paths, s3://bucket/key and other fsspec URLs, and standard input (`-`). JSON
lines and text may be compressed (.gz, .zst, .bz2, .xz).

Subcommands, each with --help: inspect, merge and verify (written files), chats (ShareGPT, Alpaca,
...), image-text, train-tokenizer.
"""

if __name__ == "__main__":  # before the imports: a mistake needs no JAX
    from maxmeg.__main__ import run_module

    run_module("preprocess")

import signal
import sys
from collections.abc import Sequence

from maxmeg.data import commands, prepare_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code, 2 after an error, which is printed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments and arguments[0] in commands.COMMANDS:
            return commands.run(arguments)
        return prepare_command.run(__doc__, arguments)
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def command(arguments: Sequence[str]) -> int:
    """Run as a program of its own, which SIGTERM interrupts as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return main(arguments)
