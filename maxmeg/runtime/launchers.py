"""Paths of the launch scripts: maxmeg launch [NAME]

    sbatch --nodes=2 $(maxmeg launch slurm.sbatch) \\
        --config=gpt --run_dir=/shared/runs/gpt
    python $(maxmeg launch local.py) -n 2 -- maxmeg train --config=gpt

Without a name, the scripts are listed. Copy one to change it.
"""

import pathlib
from collections.abc import Sequence

from maxmeg.config.hints import nearest_few
from maxmeg.config.paths import source_folder


def main(arguments: Sequence[str]) -> int:
    """Print the path of the script that is named, or the names of all."""
    files = scripts()
    if not arguments or arguments[0].startswith("-"):
        print(f"{__doc__}\n{', '.join(files)}")
        return 0
    if len(arguments) > 1 or arguments[0] not in files:
        names = nearest_few(arguments[0], list(files))
        raise ValueError(f"no launch script is named {' '.join(arguments)}: there are {names}")
    print(files[arguments[0]])
    return 0


def scripts() -> dict[str, pathlib.Path]:
    """Return the launch scripts by name."""
    folder = source_folder("launch")
    return {p.name: p for p in sorted(folder.iterdir()) if p.suffix in (".py", ".sbatch")}
