"""Reports on inspected datasets, as a PNG picture or an HTML page: token lengths and
composition."""

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path

from maxmeg.data.corpus.stored import write_atomically
from maxmeg.data.inspect.composition import SplitUse, composition_text
from maxmeg.data.inspect.contents import Inspection, Lengths, bin_range, inspection_text

_INK, _DOCUMENTS, _SHARES = "#333333", "#4c78a8", "#e4572e"
_DRAWN = 30  # datasets in a picture; the text of a page lists all
_STYLE = "body{font:15px sans-serif;max-width:60em;margin:2em auto;color:#333}img{max-width:100%}"


def check_report(path: str) -> None:
    """ValueError unless `path` is a .png or .html file in an existing folder."""
    if Path(path).suffix not in (".png", ".html"):
        raise ValueError(f"--report={path} must end in .png or .html")
    if not Path(path).parent.is_dir() or Path(path).is_dir():
        raise ValueError(f"--report={path}: the folder {Path(path).parent} does not exist")


def write_report(
    path: str, inspections: Sequence[Inspection], uses: Sequence[SplitUse] = ()
) -> None:
    """Write a report: a histogram for each of the 30 largest datasets, the share of tokens of
    each dataset, and the tokens that a run reads of each corpus."""
    check_report(path)
    picture = _draw(inspections, uses)
    if path.endswith(".html"):
        texts = [inspection_text(inspection) for inspection in inspections]
        picture = _page(picture, texts + [composition_text(uses)] * bool(uses)).encode()
    write_atomically(Path(path), picture)


def _draw(inspections: Sequence[Inspection], uses: Sequence[SplitUse]) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = sorted(inspections, key=lambda inspection: -inspection.num_tokens)[:_DRAWN]
    shares = []
    if len(inspections) > 1:
        shares.append(
            (
                "tokens",
                [(inspection.prefix, float(inspection.num_tokens)) for inspection in inspections],
            )
        )
    for use in uses:
        parts = use.corpora or (use.whole,)
        read = [(part.name, part.epochs * part.tokens) for part in parts]
        shares.append((f"tokens read: {use.whole.name}", read))
    shares = [(title, _largest(bars)) for title, bars in shares]
    heights = [3.0] * len(drawn) + [1.2 + 0.3 * len(bars) for _, bars in shares]
    figure = Figure(figsize=(8, sum(heights)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    for axes, inspection in zip(panels, drawn, strict=False):
        _draw_lengths(axes, inspection.prefix, inspection.documents)
    for axes, (title, bars) in zip(panels[len(drawn) :], shares, strict=True):
        _draw_shares(axes, title, bars)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def _draw_lengths(axes, prefix: str, lengths: Lengths) -> None:
    first = lengths.smallest.bit_length()
    ranges = [bin_range(i) for i in range(first, len(lengths.counts))]
    labels = [str(low) if low == high else f"{low}-{high}" for low, high in ranges]
    positions = range(len(labels))
    axes.bar(positions, lengths.counts[first:], color=_DOCUMENTS, width=0.9)
    axes.set_xticks(positions, labels, rotation=45, ha="right", fontsize=8)
    axes.set_xlabel("tokens per document", color=_INK)
    axes.set_ylabel("documents", color=_INK)
    axes.set_title(
        f"{_literal(prefix)}: {lengths.total:,} documents, median {lengths.median:,.0f} tokens",
        loc="left", color=_INK, fontsize=10,
    )  # fmt: skip


def _largest(bars: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """The largest bars in their original order, then one bar with the sum of the others."""
    if len(bars) <= _DRAWN:
        return list(bars)
    least = sorted((count for _, count in bars), reverse=True)[_DRAWN - 1]
    shown = [bar for bar in bars if bar[1] >= least][:_DRAWN]
    rest = sum(count for _, count in bars) - sum(count for _, count in shown)
    return [*shown, (f"{len(bars) - len(shown)} others", rest)]


def _draw_shares(axes, title: str, bars: Sequence[tuple[str, float]]) -> None:
    counts, total = [count for _, count in bars], sum(count for _, count in bars)
    axes.barh(range(len(bars)), counts, color=_SHARES)
    axes.set_yticks(range(len(bars)), [_literal(name[-40:]) for name, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(title, color=_INK)
    for i, count in enumerate(counts):
        axes.annotate(f" {100 * count / max(total, 1):.1f} %", (count, i), va="center", fontsize=8)
    axes.margins(x=0.15)


def _literal(text: str) -> str:
    """Escape dollar signs, between which matplotlib reads formulas."""
    return text.replace("$", r"\$")


def _page(picture: bytes, texts: Sequence[str]) -> str:
    blocks = "\n".join(f"<pre>{html.escape(text)}</pre>" for text in texts)
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>Corpora</title>\n'
        f"<style>{_STYLE}</style>\n<h1>Corpora</h1>\n"
        f'<img alt="token lengths" src="data:image/png;base64,'
        f'{base64.b64encode(picture).decode()}">\n{blocks}\n</html>\n'
    )
