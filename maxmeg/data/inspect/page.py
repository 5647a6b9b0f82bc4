"""Report on inspected datasets as one self-contained HTML page."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from maxmeg.data.corpus.stored import write_atomically
from maxmeg.data.inspect.composition import SplitUse
from maxmeg.data.inspect.contents import Inspection, Lengths, bin_range
from maxmeg.pages import COLOURS, cards, definitions, document, section, small_bar, table


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
    total = sum(inspection.num_tokens for inspection in inspections)
    count = len(inspections)
    title = f"{count} datasets" if count != 1 else inspections[0].prefix
    facts = [
        ("tokens", f"{total:,}"),
        ("documents", f"{sum(each.documents.total for each in inspections):,}"),
        ("problems", str(sum(len(each.problems) for each in inspections))),
    ]
    parts = [f"<h1>{escape(title)}</h1>", cards(facts)]
    if uses:
        parts.append(section("What the run reads", _uses(uses)))
    if count > 1:
        rows = [
            _row(escape(each.prefix), f"{each.num_tokens:,}", each.num_tokens / max(total, 1))
            for each in sorted(inspections, key=lambda each: -each.num_tokens)
        ]
        parts.append(
            section("Share of the tokens", table(["dataset", "tokens", "share", ""], rows, "wnnf"))
        )
    parts += [section(each.prefix, _dataset(each)) for each in inspections]
    notes = f"Made by <code>{escape(command)}</code>" if command else ""
    write_atomically(Path(path), document(title, "\n".join(parts), notes).encode())


def _dataset(inspection: Inspection) -> str:
    facts = [
        ("tokens", f"{inspection.num_tokens:,} of {inspection.dtype}"),
        ("bytes", f"{inspection.num_bytes:,}"),
        ("checksums", inspection.checksums),
    ]
    if inspection.modes is not None:
        modes = (f"{count:,} of mode {mode}" for mode, count in inspection.modes.items())
        facts.append(("multimodal", ", ".join(modes)))
    facts += [("note", note) for note in inspection.notes]
    content = [
        _problems(inspection),
        definitions(facts),
        _lengths("document", inspection.documents),
    ]
    if inspection.sequences != inspection.documents:
        content.append(_lengths("sequence", inspection.sequences))
    return "\n".join([*content, f"<h3>Sample</h3><pre>{escape(inspection.sample)}</pre>"])


def _problems(inspection: Inspection) -> str:
    problems = inspection.problems or ("no problems found",)
    kind = "bad" if inspection.problems else "good"
    return "".join(f'<p class="verdict {kind}">{escape(problem)}</p>' for problem in problems)


def _lengths(name: str, lengths: Lengths) -> str:
    """A histogram of tokens per sequence or document; each bin doubles the length."""
    rows = []
    for i in range(lengths.smallest.bit_length(), len(lengths.counts)):
        count, (low, high) = lengths.counts[i], bin_range(i)
        span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        rows.append([span, f"{count:,}", small_bar(count / max(lengths.counts), COLOURS[0])])
    summary = (
        f"min {lengths.smallest:,}, median {lengths.median:,.0f}, mean {lengths.mean:,.1f}, "
        f"max {lengths.largest:,}"
    )
    histogram = table([f"tokens per {name}", f"{name}s", ""], rows, "lnf")
    return f"<h3>Tokens per {name}: {summary}</h3>{histogram}"


def _uses(uses: Sequence[SplitUse]) -> str:
    rows = []
    for split in uses:
        for use in (split.whole, *(split.corpora if len(split.corpora) > 1 else ())):
            documents = "-" if use.documents is None else f"{use.documents:,}"
            name = escape(use.name)
            name = f"<b>{name}</b>" if use is split.whole else name
            read = f"{use.samples:,.0f}"
            rows.append([name, documents, f"{use.tokens:,}", read, f"{use.epochs:.3f}"])
    header = ["split, corpus", "documents", "tokens", "samples read", "epochs"]
    return table(header, rows, "wnnnn")


def _row(name: str, number: str, share: float) -> list[str]:
    return [name, number, f"{share:.1%}", small_bar(share, COLOURS[1])]
