"""Texts for causal language models: corpora that are cut through documents, and their blends."""

import logging
import math
from collections.abc import Sequence

from maxmeg.config.data import DataConfig, DataOrder, Objective, Packing
from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.corpus.mock import MockCorpus
from maxmeg.data.opening import Opening
from maxmeg.data.resuming import kept_parts
from maxmeg.data.samples import fim, phases
from maxmeg.data.samples.blending import Blend, blended, check_weights, member_sizes, normalized
from maxmeg.data.samples.dataset import Dataset
from maxmeg.data.samples.gpt import DocumentRules, GptDataset
from maxmeg.data.samples.megatron_order import MegatronOrder
from maxmeg.data.samples.rows import open_documents

logger = logging.getLogger("maxmeg")


def is_blend(config: DataConfig) -> bool:
    """Whether the samples of several corpora can be mixed by weights."""
    return config.objective is Objective.gpt and config.packing is Packing.none


def open_texts(opening: Opening) -> Dataset | None:
    """Samples of a split of corpora; None where another split than training has no sequence."""
    config, tokenizer = opening.config, opening.tokenizer
    if not is_blend(config):
        return open_documents(opening)
    if opening.request.changes:
        phases.check_changeable(opening.names, opening.weights)
    if config.mock:
        corpora: list[IndexedDataset] = [MockCorpus(opening.num_ids, tokenizer.eod)]
    else:
        corpora = list(map(opening.corpus, opening.names))
    empty = _empty_corpora(opening, corpora)
    if len(empty) == len(corpora) and opening.index:
        return None
    if len(empty) == len(corpora) or opening.weights or config.order is not DataOrder.native:
        _refuse_empty(opening, empty)
    return _Texts(opening).open(corpora)


class _Texts:
    """Opens the samples of corpora that have sequences in the split."""

    def __init__(self, opening: Opening) -> None:
        self.opening, config = opening, opening.config
        self.saved, self.is_native = list(opening.request.saved), config.order is DataOrder.native
        fill, tokenizer = None, opening.tokenizer
        if config.fim_rate:
            fill = fim.make_fim(config, tokenizer, opening.seed, opening.vocab_size)
        self.rules = DocumentRules(
            tokenizer.eod,
            config.reset_position_ids,
            config.reset_attention_mask,
            config.eod_mask_loss,
            fill,
        )

    def open(self, corpora: list[IndexedDataset]) -> Dataset:
        opening, config, request = self.opening, self.opening.config, self.opening.request
        num_samples, weights = request.num_samples, opening.weights
        if weights is None and (len(corpora) == 1 or self.is_native):
            dataset = self.single(corpora, num_samples)
            return self.changing([dataset]) if request.changes else dataset
        if weights is None:
            return _join([self.single([corpus], None) for corpus in corpora], opening)
        shares = normalized(weights)
        if num_samples is None:
            num_samples = _one_epoch(opening, corpora)
        sizes, total = member_sizes(shares, num_samples, config.blend_surplus)
        members = [self.single([c], size) for c, size in zip(corpora, sizes, strict=True)]
        if request.changes:
            return self.changing(members)
        blend = blended(members, shares, total, opening.cache_dir)
        if not self.is_native:
            _check_supply(blend, members, config.blend_surplus)
        return blend

    def single(self, corpora: list[IndexedDataset], size: int | None) -> GptDataset:
        """The samples of corpora that are read as one; size: samples of the whole run."""
        opening, config, order = self.opening, self.opening.config, None
        split, length, seed = (opening.split, opening.index), config.sequence_length, opening.seed
        if not self.is_native:
            parts = kept_parts(self.saved, corpora, (*split, length, seed), size)
            most = config.max_epochs * (not opening.index)
            order = MegatronOrder(size, opening.cache_dir, parts, most)
        return GptDataset(corpora, *split, length, opening.num_ids, seed, self.rules, order)

    def added(self, name: str) -> GptDataset:
        """The samples of a corpus that a change of the blend adds."""
        corpus = self.opening.corpus(name)
        _refuse_empty(self.opening, _empty_corpora(self.opening, [corpus]))
        return self.single([corpus], None)

    def changing(self, members: list[GptDataset]) -> Blend:
        opening, request = self.opening, self.opening.request
        first = (opening.names, opening.weights or [1.0], members)
        ends = (*request.changes, request.num_samples or 0)
        changes, cache_dir = opening.config.blend_changes, opening.cache_dir
        blend = phases.change(first, changes, ends, self.added, cache_dir)
        if not self.is_native:
            _log_repeats(blend)
        return blend


def _one_epoch(opening: Opening, corpora: Sequence[IndexedDataset]) -> int:
    """The number of samples of one epoch of the corpora."""
    tokens = 0
    for corpus in corpora:
        begin, end = opening.range(len(corpus))
        tokens += max(0, int(corpus.lengths[begin:end].sum(dtype="int64")) - 1)
    return max(1, tokens // opening.config.sequence_length)


def _join(members: list[GptDataset], opening: Opening) -> Blend:
    """Read one epoch of each corpus, taking turns; less where the run asks for fewer samples."""
    num_samples = opening.request.num_samples
    sizes = [member.samples_per_epoch for member in members]
    total = sum(sizes)
    if opening.index == 0 and num_samples is not None and num_samples > total:
        raise ValueError(
            f"training asks for {num_samples} samples, but one epoch of {len(members)} corpora "
            f"without weights holds {total}: give weights (data.paths=0.5,a,0.5,b), which allow "
            "several epochs, or train for fewer steps"
        )
    size = None if num_samples is None else min(num_samples, total)
    weights = [float(size) for size in sizes]
    check_weights(weights, [member.corpora[0].prefix for member in members])
    return blended(members, weights, size, opening.cache_dir)


def _log_repeats(blend: Blend) -> None:
    for member, count in zip(blend.members, blend.samples_of_members(), strict=True):
        if isinstance(member, GptDataset) and count > (have := member.num_samples):
            logger.info(
                f"{member.corpora[0].prefix}: the blend takes {count} samples: {have} in "
                "Megatron-LM's order, which then repeats"
            )


def _check_supply(blend: Blend, members: list[GptDataset], surplus: float) -> None:
    for member, count in zip(members, blend.samples_of_members(), strict=True):
        if count > (have := member.num_samples):
            raise ValueError(
                f"the blend takes {count} samples of {member.corpora[0].prefix}, but only "
                f"{have} exist with data.blend_surplus={surplus}: raise it, for example to "
                f"{max(2 * surplus, math.ceil(100 * count / have) / 100 - 1):g}"
            )


def _empty_corpora(opening: Opening, corpora: Sequence[IndexedDataset]) -> list[IndexedDataset]:
    """The corpora without a sequence in this split."""
    ranges = [opening.range(len(corpus)) for corpus in corpora]
    return [c for c, (begin, end) in zip(corpora, ranges, strict=True) if begin == end]


def _refuse_empty(opening: Opening, empty: list[IndexedDataset]) -> None:
    if empty:
        counts = ", ".join(f"{c.prefix} has {len(c)}" for c in empty)
        raise ValueError(
            f"split={opening.split!r} leaves no sequence for {opening.name} ({counts}): give "
            f"{opening.name} more weight, use a larger corpus, or name the corpora of "
            "every set (data.train_paths, ...)"
        )
