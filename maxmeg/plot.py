"""Compare runs on one page: maxmeg plot runs/a runs/b [--x=tokens] [--output=FILE.html]

Losses, learning rate and throughput of every run, from its metrics.jsonl. The page needs no other
file and no network.
"""

if __name__ == "__main__":  # before the imports: a mistake needs no JAX
    from maxmeg.__main__ import run_module

    run_module("plot")

import pathlib
import shlex
from collections.abc import Sequence

from maxmeg.config.flags import parse
from maxmeg.config.help import asked_help, describe, options_of
from maxmeg.config.options import Plot
from maxmeg.data.corpus.stored import write_atomically
from maxmeg.runtime.metrics.comparison import comparison_html, read_run


def main(arguments: Sequence[str]) -> int:
    """Write the page."""
    if asked_help(arguments) is not None:
        print(describe(__doc__ or "", options_of(Plot), has_settings=False))
        return 0
    folders = [word for word in arguments if not word.startswith("-")]
    flags = [word for word in arguments if word.startswith("-")]
    _, options = parse(["maxmeg plot", *flags], Plot, needs_config=False)
    if not folders:
        raise ValueError("no run: name folders of runs, as in maxmeg plot runs/a runs/b")
    runs = [read_run(folder, options.x) for folder in folders]
    command = shlex.join(["maxmeg", "plot", *arguments])
    page = comparison_html(runs, options.x, command)
    write_atomically(pathlib.Path(options.output), page.encode())
    print(f"wrote {options.output}")
    return 0
