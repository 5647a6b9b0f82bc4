"""Tables for pages, which parts.html draws, and for terminals."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Marked:
    """A text that a page shows differently. look: good, bad, bold or code."""

    text: str
    look: str

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of texts below the names of their columns, if any has a name.

    kinds: a letter per column: l text, w long text, n number, s a share of the number before it, f
    a bar filled to this fraction. On narrow screens a table with long text becomes a list of rows,
    each number with its name. tint: number of the colour of all bars; None: each row has its own.
    swatches: rows begin with a square of their colour.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str | float | Marked]]
    kinds: str
    tint: int | None = None
    swatches: bool = False

    def lines(self, title: str) -> list[str]:
        """The table for a terminal, without shares and bars. title: replaces the first name."""
        columns = [i for i, kind in enumerate(self.kinds) if kind not in "sf"]
        rows = [[str(row[i]) for i in columns] for row in self.rows]
        header = [title, *(self.header[i] for i in columns[1:])]
        return aligned(
            [header, *([f"  {row[0]}", *row[1:]] for row in rows)], self.kinds.count("n")
        )


def aligned(rows: Sequence[Sequence[str]], right: int = 0) -> list[str]:
    """Rows with the same number of cells as lines, the last `right` columns flush right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    left = len(widths) - right
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
