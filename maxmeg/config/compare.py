"""Compare settings: maxmeg config diff A B

A and B are values of --config, such as two run folders: what differs from A to B is printed.
"""

from collections.abc import Sequence

from maxmeg.config import files
from maxmeg.config.help import asked_help, describe
from maxmeg.config.named import load_config


def main(arguments: Sequence[str]) -> int:
    """Print one line per setting that differs."""
    if not arguments or asked_help(arguments) is not None:
        print(describe(__doc__ or "", has_settings=False))
        return 0
    if arguments[0] != "diff" or len(arguments) != 3:
        raise ValueError(
            f"maxmeg config {' '.join(arguments)}: write maxmeg config diff A B, with two values "
            "of --config, such as run folders"
        )
    before, after = map(load_config, arguments[1:])
    print("\n".join(files.changes(before, after)) or "no setting differs")
    return 0
