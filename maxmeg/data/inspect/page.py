"""Report on inspected datasets as one self-contained HTML page."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from maxmeg.data.corpus.stored import write_atomically
from maxmeg.data.inspect.composition import SplitUse
from maxmeg.data.inspect.contents import Inspection, bin_range
from maxmeg.pages.table import Marked, Table
from maxmeg.pages.templates import render


def check_report(path: str) -> None:
    """ValueError unless `path` is a .html file in an existing folder."""
    if Path(path).suffix != ".html":
        raise ValueError(f"--report={path} must end in .html")
    if not Path(path).parent.is_dir() or Path(path).is_dir():
        raise ValueError(f"--report={path}: the folder {Path(path).parent} does not exist")


def write_report(
    path: str, inspections: Sequence[Inspection], uses: Sequence[SplitUse] = (), command: str = ""
) -> None:
    """Write a page: what the run reads of each corpus, the tokens, lengths, sample and problems of
    each dataset. command: the command line that made it."""
    check_report(path)
    total, count = sum(each.num_tokens for each in inspections), len(inspections)
    shares: list[list] = [
        [each.prefix, f"{each.num_tokens:,}", f"{share:.1%}", share]
        for each in sorted(inspections, key=lambda each: -each.num_tokens)
        for share in [each.num_tokens / max(total, 1)]
    ]
    page = render(
        "datasets.html",
        title=f"{count} datasets" if count != 1 else inspections[0].prefix,
        command=command,
        facts=[
            ("tokens", f"{total:,}"),
            ("documents", f"{sum(each.documents.total for each in inspections):,}"),
            ("problems", str(sum(len(each.problems) for each in inspections))),
        ],
        uses=_uses(uses),
        shares=Table(["dataset", "tokens", "share", ""], shares, "wnnf", tint=1),
        datasets=[(each, _facts(each), _histograms(each)) for each in inspections],
    )
    write_atomically(Path(path), page.encode())


def _facts(inspection: Inspection) -> list[tuple[str, str]]:
    facts = [
        ("tokens", f"{inspection.num_tokens:,} of {inspection.dtype}"),
        ("bytes", f"{inspection.num_bytes:,}"),
        ("checksums", inspection.checksums),
    ]
    if inspection.modes is not None:
        modes = (f"{count:,} of mode {mode}" for mode, count in inspection.modes.items())
        facts.append(("multimodal", ", ".join(modes)))
    return facts + [("note", note) for note in inspection.notes]


def _histograms(inspection: Inspection) -> Iterator[tuple[str, Table]]:
    """(title, table) of tokens per document, and per sequence where these are others; each bin
    doubles the length."""
    kinds = {"document": inspection.documents, "sequence": inspection.sequences}
    if inspection.sequences == inspection.documents:
        del kinds["sequence"]
    for name, lengths in kinds.items():
        rows = []
        for i in range(lengths.smallest.bit_length(), len(lengths.counts)):
            count, (low, high) = lengths.counts[i], bin_range(i)
            span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
            rows.append([span, f"{count:,}", count / max(lengths.counts)])
        title = (
            f"Tokens per {name}: min {lengths.smallest:,}, median {lengths.median:,.0f}, "
            f"mean {lengths.mean:,.1f}, max {lengths.largest:,}"
        )
        yield title, Table([f"tokens per {name}", f"{name}s", ""], rows, "lnf", tint=0)


def _uses(uses: Sequence[SplitUse]) -> Table:
    rows = []
    for split in uses:
        for use in (split.total, *(split.corpora if len(split.corpora) > 1 else ())):
            documents = "-" if use.documents is None else f"{use.documents:,}"
            name = Marked(use.name, "bold" if use is split.total else "")
            read = f"{use.samples:,.0f}"
            rows.append([name, documents, f"{use.tokens:,}", read, f"{use.epochs:.3f}"])
    header = ["split, corpus", "documents", "tokens", "samples read", "epochs"]
    return Table(header, rows, "wnnnn")
