"""Inspect a .bin/.idx dataset: counts, lengths, a text sample, and problems."""

import dataclasses
import os

import numpy as np

from maxmeg.data.corpus import checksum
from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.tokenizers.tokenizer import Tokenizer

_BAR = 40  # characters of the longest bar
_SAMPLED = 256  # documents whose last token is checked
_SAMPLE_TOKENS = 100
_CHUNK = 1 << 22  # lengths that are counted at a time


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens per sequence or per document; counts[i] of the lengths are within `bin_range(i)`."""

    total: int
    smallest: int
    median: float
    mean: float
    largest: int
    counts: tuple[int, ...]


def bin_range(i: int) -> tuple[int, int]:
    """Smallest and largest length of bin i: 0; 1; 2 to 3; 4 to 7; ..."""
    return (0, 0) if i == 0 else (1 << (i - 1), (1 << i) - 1)


def summarize_lengths(lengths: np.ndarray) -> Lengths:
    """Statistics of one or more lengths."""
    largest = int(lengths.max())
    counts = np.zeros(largest.bit_length() + 1, np.int64)
    for begin in range(0, len(lengths), _CHUNK):
        _, bits = np.frexp(lengths[begin : begin + _CHUNK].astype(np.float64))
        counts += np.bincount(bits, minlength=len(counts))
    return Lengths(
        len(lengths),
        int(lengths.min()),
        float(np.median(lengths)),
        float(lengths.mean(dtype=np.float64)),
        largest,
        tuple(counts.tolist()),
    )


@dataclasses.dataclass(frozen=True)
class Inspection:
    """Facts about a dataset. problems: errors that break a run or its results; notes: other
    remarks."""

    prefix: str
    dtype: str
    num_bytes: int
    num_tokens: int
    modes: dict[int, int] | None  # sequences of each mode
    documents: Lengths
    sequences: Lengths
    checksums: str
    sample: str
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def inspect(
    prefix: str,
    tokenizer: Tokenizer | None = None,
    vocab_size: int | None = None,
    document: int | None = None,
    verify: bool = False,
) -> Inspection:
    """Inspect all of .idx and samples of .bin; with `verify`, all of both.

    document: the number of the document to show, by default the first one with tokens. vocab_size:
    the bound of token ids, by default the tokenizer's. ValueError for files that cannot be opened.
    """
    dataset = IndexedDataset(prefix)
    problems, notes = [], []
    vocab_size = tokenizer.vocab_size if vocab_size is None and tokenizer else vocab_size
    if vocab_size is not None:
        _collect(problems, dataset.check_ids, vocab_size)
    has_sums = os.path.exists(prefix + checksum.SUFFIX)
    state = "present, .idx matches" if has_sums else "none"
    if verify:
        before = len(problems)
        _collect(problems, dataset.verify)
        state = "verified, all match" if len(problems) == before else "not verified"
    starts = dataset.document_starts()
    sizes = np.diff(starts)
    if not has_sums:
        notes.append(f"no {prefix}{checksum.SUFFIX}: damage to .bin would not be noticed")
    if empty := int((sizes == 0).sum()):
        notes.append(f"{empty:,} of {len(sizes):,} documents are empty")
    if dataset.weights is not None:
        notes.append(_weights_note(dataset.weights, sizes))
    if tokenizer is not None:
        notes += _end_notes(dataset, starts, tokenizer)
    modes = None
    if dataset.modes is not None:
        values, counts = np.unique(dataset.modes, return_counts=True)
        modes = dict(zip(values.tolist(), counts.tolist(), strict=True))
    return Inspection(
        prefix,
        str(dataset.dtype),
        dataset.tokens.nbytes,
        dataset.num_tokens,
        modes,
        summarize_lengths(sizes),
        summarize_lengths(dataset.lengths),
        state,
        _sample(dataset, starts, tokenizer, document),
        tuple(problems),
        tuple(notes),
    )


def _collect(problems: list[str], check, *arguments) -> None:
    try:
        check(*arguments)
    except ValueError as error:
        problems.append(str(error))


def _weights_note(weights: np.ndarray, sizes: np.ndarray) -> str:
    """The documents' weights in the loss, and the share of the tokens with such weights."""
    kinds = {"have weight 0": weights == 0, "less than 1": (weights > 0) & (weights < 1)}
    kinds |= {"1": weights == 1, "more than 1": weights > 1}
    total = max(int(sizes.sum()), 1)
    shares = (f"{100 * sizes[is_it].sum() / total:.3g} % {name}" for name, is_it in kinds.items())
    return (
        f"{int((weights != 1).sum()):,} of {len(weights):,} documents have another weight in the "
        f"loss than 1, from {weights.min():g} to {weights.max():g}; tokens: " + ", ".join(shares)
    )


def _end_notes(dataset: IndexedDataset, starts: np.ndarray, tokenizer: Tokenizer) -> list[str]:
    filled = np.flatnonzero(np.diff(starts))
    chosen = filled[
        np.unique(np.linspace(0, len(filled) - 1, min(_SAMPLED, len(filled))).astype(int))
    ]
    missing = int((dataset.tokens[starts[chosen + 1] - 1] != tokenizer.eod).sum())
    if not missing:
        return []
    return [
        f"{missing} of {len(chosen)} sampled documents do not end with the tokenizer's "
        f"end-of-document id {tokenizer.eod}: prepare with --append_eod where runs need it"
    ]


def _sample(
    dataset: IndexedDataset, starts: np.ndarray, tokenizer: Tokenizer | None, document: int | None
) -> str:
    if document is None:
        document = int(np.argmax(np.diff(starts) > 0))
    if not 0 <= document < dataset.num_documents:
        raise ValueError(
            f"{dataset.prefix} has no document {document}: choose one in [0, "
            f"{dataset.num_documents})"
        )
    size = int(starts[document + 1] - starts[document])
    ids = dataset.tokens[starts[document] :][: min(size, _SAMPLE_TOKENS)]
    if tokenizer is None or dataset.dtype.kind not in "iu":
        text = " ".join(str(i) for i in ids.tolist())
    else:
        text = tokenizer.decode(ids.tolist())
    # Control characters in a corpus must not reach the terminal.
    excerpt = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    return f"document {document}, {len(ids)} of its {size:,} tokens:\n{excerpt}"


def inspection_text(inspection: Inspection) -> str:
    """The inspection as text for a terminal."""
    lines = [
        f"{inspection.prefix}: {inspection.num_tokens:,} tokens of {inspection.dtype} "
        f"({inspection.num_bytes:,} bytes) in {inspection.sequences.total:,} sequences of "
        f"{inspection.documents.total:,} documents",
        f"checksums: {inspection.checksums}",
    ]
    if inspection.modes is not None:
        counts = ", ".join(f"{count:,} of mode {mode}" for mode, count in inspection.modes.items())
        lines.append(f"multimodal: {counts}")
    lines += ["", *_lengths_lines("document", inspection.documents)]
    if inspection.sequences != inspection.documents:
        lines += ["", *_lengths_lines("sequence", inspection.sequences)]
    lines += ["", inspection.sample, ""]
    lines += [f"note: {note}" for note in inspection.notes]
    lines += [f"problem: {problem}" for problem in inspection.problems] or ["problems: none found"]
    return "\n".join(lines)


def _lengths_lines(name: str, lengths: Lengths) -> list[str]:
    lines = [
        f"tokens per {name}: min {lengths.smallest:,}, median {lengths.median:,.0f}, mean "
        f"{lengths.mean:,.1f}, max {lengths.largest:,}"
    ]
    most = max(lengths.counts)
    for i in range(lengths.smallest.bit_length(), len(lengths.counts)):
        count, (low, high) = lengths.counts[i], bin_range(i)
        span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        lines.append(f"{span:>26} {count:>14,} {'#' * -(-_BAR * count // most)}".rstrip())
    return lines
