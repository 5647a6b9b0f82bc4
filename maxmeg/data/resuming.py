"""The order of training samples across a resume: record it, continue it, and compare two orders.

Datasets record and compare themselves (`samples/dataset.py`). Here are the orders of samples that
are cut from corpora: one record for each member of a blend.
"""

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.samples.dataset import Difference, Record, RecordedDataset, bound, identify
from maxmeg.data.samples.megatron_order import MegatronOrder, continued, make_samples
from maxmeg.data.samples.sampling import GptSamples, Samples, split_range

logger = logging.getLogger("maxmeg")
_PLACES = 1 << 20  # tokens of a corpus that are compared; larger corpora are sampled evenly
_NAMES = {
    "order": "data.order",
    "corpora": "corpora or data.split",
    "documents": "documents",
    "sequence_length": "data.sequence_length",
    "source_length": "data.source_length",
    "text_length": "data.query_length",
    "titles": "data.titles",
    "negatives": "data.negatives",
    "seed": "seed",
    "packing": "data.packing",
    "weights": "weights of documents",
    "neighbours": "data.neighbours",
    "num_samples": "train.num_steps, beyond whole epochs of sentences",
}


def record_order(dataset: object, consumed: int) -> list[Record]:
    """The records of all members that contribute to the first `consumed` samples; none of datasets
    made in Python."""
    return dataset.record(consumed) if isinstance(dataset, RecordedDataset) else []


def kept_parts(
    saved: list[Record],
    corpora: Sequence[IndexedDataset],
    cut: tuple[str, int, int, int],
    num_requested: int | None,
) -> tuple[tuple[int, int | None], ...]:
    """The `MegatronOrder.parts` that continue a saved record of the same data; empty without one.

    The matching record is removed from `saved`. cut: (split, split index, sequence length, seed).
    num_requested: samples of the whole run; None means one epoch.
    """
    if not saved:
        return ()
    split, index, length, seed = cut
    ranges = [split_range(split, index, len(corpus)) for corpus in corpora]
    key = {"order": "megatron", "corpora": identify(corpora, ranges)}
    key |= {"sequence_length": length, "seed": seed}
    for record in saved:
        if {**record, **key} == record:
            saved.remove(record)
            parts = [(start, count) for start, count in record["parts"]]
            num_tokens = sum(
                int(corpus.lengths[begin:end].sum(dtype=np.int64))
                for corpus, (begin, end) in zip(corpora, ranges, strict=True)
            )
            return continued(parts, (num_tokens, length), record["samples"], num_requested)
    return ()


def compare(saved: Sequence[Record], dataset: RecordedDataset, consumed: int) -> Difference:
    """Compare the first `consumed` samples of `dataset` with the samples that were read before.

    saved: the records of the samples that were read. The run continues with sample `consumed`.
    """
    orders = [
        sorted(repr({k: v for k, v in record.items() if k != "weights"}) for record in records)
        for records in (saved, dataset.record(consumed))
    ]
    if orders[0] == orders[1]:
        return Difference(0, 0)
    return dataset.compare(saved, consumed)


def compare_orders(
    saved: Sequence[Record],
    corpora: Mapping[tuple[int, ...], IndexedDataset],
    after: Sequence[tuple[Record, Samples]],
) -> Difference:
    """Compare records of samples that were cut from corpora with the samples that count as read.

    corpora: by their sequences, tokens and CRC-32. after: records, and the samples of each.
    """
    before = []
    for record in saved:
        keys = [tuple(identity[:3]) for identity in record.get("corpora", [])]
        matches = [corpora[key] for key in keys if key in corpora]
        if matches and len(matches) == len(keys):
            before.append((record, _rebuild(record, matches)))
        elif matches or not keys:  # the lengths of missing documents are unknown
            return bound(saved, [record for record, _ in after])
    repeated, left_out, is_exact = 0.0, 0.0, True
    for key, corpus in corpora.items():
        _, num_tokens, _ = key
        positions = np.arange(min(num_tokens, _PLACES)) * num_tokens // min(num_tokens, _PLACES)
        surplus = np.zeros(len(positions), np.int64)
        for sign, orders in ((1, before), (-1, after)):
            for record, samples in orders:
                surplus += sign * _times_read(record, samples, key, corpus, positions)
        weight = num_tokens / len(positions)
        repeated += surplus.clip(min=0).sum() * weight
        left_out -= surplus.clip(max=0).sum() * weight
        is_exact &= len(positions) == num_tokens
    return Difference(round(repeated), round(left_out), is_exact)


def _rebuild(record: Record, corpora: Sequence[IndexedDataset]) -> Samples:
    """The samples that a record describes, from the corpora that it names."""
    ranges = [identity[3:] for identity in record["corpora"]]
    lengths = [corpus.lengths[a:b] for corpus, (a, b) in zip(corpora, ranges, strict=True)]
    joined, length, seed = np.concatenate(lengths), record["sequence_length"], record["seed"]
    if record["order"] == "native":
        return GptSamples(joined, length, seed)
    parts = tuple((start, count) for start, count in record["parts"])
    return make_samples(joined, length, seed, MegatronOrder(parts=parts))


def _times_read(
    record: Record,
    samples: Samples,
    key: tuple[int, ...],
    corpus: IndexedDataset,
    positions: np.ndarray,
) -> np.ndarray:
    """How often the record's samples contain the tokens at these positions of the corpus `key` as
    an input."""
    times, first = np.zeros(len(positions), np.int64), 0
    for *identity, begin, end in record["corpora"]:
        if tuple(identity) == key:
            low, high = (int(corpus.lengths[:n].sum(dtype=np.int64)) for n in (begin, end))
            rows = np.flatnonzero((low <= positions) & (positions < high))
            before = int(samples.lengths[:first].sum(dtype=np.int64))
            times[rows] += samples.times_read(positions[rows] - low + before, record["samples"])
        first += end - begin
    return times


def warn_of_order(saved: Sequence[Record] | None, dataset: RecordedDataset, consumed: int) -> None:
    """Log a warning if the first `consumed` samples of `dataset` are not the samples that were
    read.

    saved: `record_order` in the checkpoint; None for a checkpoint without one.
    """
    if saved is None:
        return
    difference = compare(saved, dataset, consumed)
    now = record_order(dataset, consumed)
    changed = [
        name
        for key, name in _NAMES.items()
        if {repr(record.get(key)) for record in saved} != {repr(record.get(key)) for record in now}
    ]
    if not difference.repeated and not difference.left_out:
        if _NAMES["weights"] in changed:
            logger.warning(
                "the weights of documents (PREFIX.weights.npy) are not those that the checkpoint "
                "was trained with; the run continues with the new ones: to avoid this, put the old "
                "files back"
            )
        return
    about = "up to " if difference.is_bound else "" if difference.is_exact else "about "
    length = getattr(dataset, "sequence_length", 1)
    repeated, left_out = (
        f"{about}{tokens:,} tokens ({-(-tokens // length):,} samples)"
        for tokens in (difference.repeated, difference.left_out)
    )
    logger.warning(
        f"the training data is not what the checkpoint was trained on (changed: "
        f"{', '.join(changed) or 'weights of the blend'}). After sample {consumed:,}, {repeated} "
        f"that were read before are repeated and {left_out} that were not read are left out. To "
        "avoid this, undo the change; data.blend_changes adds corpora and changes weights without "
        "it."
    )
