"""Named architectures and their sizes: maxmeg models [WORD ...]

Lists those whose names contain one of the words; without words, all.
"""

import json
from collections.abc import Sequence

from maxmeg.config.architectures import ALIASES, ARCHITECTURES, FOLDER, architecture
from maxmeg.config.flags import show
from maxmeg.config.help import asked_help
from maxmeg.config.hints import nearest_few


def main(words: Sequence[str]) -> int:
    """Print a line for each architecture."""
    if asked_help(words) is not None:
        print(__doc__)
        return 0
    names = [name for name in ARCHITECTURES if not words or any(word in name for word in words)]
    if not names:
        nearest = nearest_few(words[0], list(ARCHITECTURES))
        raise ValueError(f"no architecture is named {' or '.join(words)}: did you mean {nearest}?")
    numbers = num_parameters()
    lines = [_line("name", "parameters", "active", "layers", "context")]
    for name in names:
        model = architecture(name)
        counts = (f"{number / 1e9:,.3f} B" for number in numbers[name])
        lines.append(_line(name, *counts, str(model.num_layers), f"{model.max_position:,}"))
    if not words:
        aliases = (f"{alias} = {name}" for alias, name in ALIASES.items())
        lines.append("other names: " + ", ".join(aliases))
    show("\n".join(lines))
    return 0


def num_parameters() -> dict[str, tuple[int, int]]:
    """(all parameters, those that one token uses) of each architecture, as
    `planning.cost.parameters` counted them: without importing JAX."""
    return json.loads((FOLDER / "counts.json").read_text("utf-8"))


def _line(name: str, *cells: str) -> str:
    return f"{name:<26}" + "".join(f"{cell:>12}" for cell in cells)
