"""The documents, tokens, samples and epochs that a run reads of every split and corpus."""

import contextlib
import copy
import dataclasses
import logging
from collections.abc import Mapping, Sequence

import numpy as np

from maxmeg.config.schema import Config
from maxmeg.config.validate import resolve, validate
from maxmeg.data.build import open_corpus, open_split, samples_asked, split_weights
from maxmeg.data.placement import balanced_chunks, chunk_areas, imbalance
from maxmeg.data.samples.dataset import SPLITS, Dataset, RecordedDataset, Use
from maxmeg.data.tokenizers.tokenizer import Tokenizer
from maxmeg.optim.schedules import Schedules
from maxmeg.parallel.sequence import context_order

logger = logging.getLogger("maxmeg")
_FEW_DOCUMENTS = 20  # a split with fewer documents is reported
_ROWS = 64  # rows for which the balance over context is reported
_OFF = 2  # and a split whose share of the tokens differs from its weight by this factor


@dataclasses.dataclass(frozen=True)
class SplitUse:
    """A split of a run. Its samples are those of the training, or of one evaluation."""

    total: Use
    corpora: tuple[Use, ...]


def uses_of(config: Config) -> list[SplitUse]:
    """The splits of a run that have samples; ValueError for settings that a run would refuse."""
    config = copy.deepcopy(config)  # `resolve` changes it
    validate(config, config.parallel.devices, computing=False)
    tokenizer, prefixes = open_corpus(config.data, config.run_dir)
    resolve(config, tokenizer.vocab_size, tokenizer.required_size)
    schedules = Schedules(config)
    sets = {
        name: open_split(
            config, prefixes, tokenizer, index, samples_asked(config, index, schedules)
        )
        for index, name in enumerate(SPLITS)
    }
    return _split_uses(config, sets, schedules)


def print_data(
    config: Config,
    prefixes: list[str],
    tokenizer: Tokenizer,
    sets: Mapping[str, Dataset | None],
    schedules: Schedules,
) -> None:
    """Print the table of a run's splits, and warn of splits whose loss would mislead and of a
    tokenizer that may not be the model's.

    sets: the datasets that the run has opened, by their names in the table. The test split is
    opened for the table.
    """
    with contextlib.suppress(ValueError):  # training works without a test split
        samples = samples_asked(config, SPLITS.index("test"), schedules)
        test = open_split(config, prefixes, tokenizer, SPLITS.index("test"), samples)
        sets = {**sets, "test": test}
    uses = _split_uses(config, sets, schedules)
    print(composition_text([dataclasses.replace(use, corpora=()) for use in uses]), flush=True)
    if (train := sets.get("train")) is not None and config.parallel.context_chunks:
        print(balance_text(train, config), flush=True)
    weights = split_weights(config.data, prefixes)
    for warning in split_warnings(uses, weights) + vocabulary_warnings(config, tokenizer):
        logger.warning(warning)


def balance_text(data: Dataset, config: Config) -> str:
    """How the attention of the first rows is divided among the devices along context."""
    context, chunks = config.parallel.context, config.parallel.context_chunks
    batch = data.batch(np.arange(min(_ROWS, data.samples_per_epoch)))
    segments = batch.get("segment_ids", np.zeros_like(batch["tokens"]))
    order = np.broadcast_to(context_order(2 * context, context), (len(segments), 2 * context))
    before = imbalance(chunk_areas(segments, 2 * context), order, context)
    areas = chunk_areas(segments, chunks * context)
    after = imbalance(areas, balanced_chunks(areas, context), context)
    return (
        f"attention inside documents, busiest of {context} devices along context over the mean, "
        f"{len(segments)} rows: {after.mean():.3f} with parallel.context_chunks={chunks}, "
        f"{before.mean():.3f} without"
    )


def vocabulary_warnings(config: Config, tokenizer: Tokenizer) -> list[str]:
    """A warning if over half of the model's vocabulary has no token. Mock data needs none."""
    size = config.model.vocab_size
    if config.data.mock or 2 * tokenizer.vocab_size >= size:
        return []
    return [
        f"model.vocab_size={size}, but data.tokenizer={config.data.tokenizer} has only "
        f"{tokenizer.vocab_size} ids, so most rows of the embedding are never used: set "
        "data.tokenizer to the model's tokenizer, or model.vocab_size=0 to take the tokenizer's"
    ]


def split_warnings(uses: Sequence[SplitUse], weights: Mapping[str, float] | None) -> list[str]:
    """Warnings about splits that are too small or far from their weights (which sum to 1)."""
    if weights is None:
        return []
    total = sum(split.total.tokens for split in uses)
    warnings = []
    for split in uses:
        use, weight = split.total, weights[split.total.name]
        share = use.tokens / total
        few = use.documents is not None and use.documents < _FEW_DOCUMENTS
        if few or not weight / _OFF <= share <= weight * _OFF:
            count = use.documents
            documents = "" if count is None else f"{count:,} document{'s' * (count != 1)} and "
            warnings.append(
                f"the {use.name} split has {documents}{100 * share:.3g} % of the tokens at a weight"
                f" of {100 * weight:.3g} %: its loss may be unlike the corpus's. Shuffle the"
                " documents (maxmeg preprocess --shuffle_documents=SEED), use a larger corpus, or"
                " change data.split"
            )
    return warnings


def _split_uses(
    config: Config, sets: Mapping[str, Dataset | None], schedules: Schedules
) -> list[SplitUse]:
    evaluation = config.train.eval_steps * config.train.global_batch_size
    return [
        _split_use(name, dataset, schedules.total_samples if name == SPLITS[0] else evaluation)
        for name, dataset in sets.items()
        if dataset is not None
    ]


def _split_use(name: str, dataset: Dataset, samples: int) -> SplitUse:
    samples = samples or dataset.samples_per_epoch
    corpora = dataset.uses(samples) if isinstance(dataset, RecordedDataset) else []
    if not corpora:  # rows of whole documents or conversations
        epochs = samples / dataset.samples_per_epoch
        return SplitUse(Use(name, None, dataset.num_tokens, samples, epochs), ())
    documents = sum(use.documents or 0 for use in corpora)
    tokens = sum(use.tokens for use in corpora)
    epochs = samples * dataset.sequence_length / tokens
    return SplitUse(Use(name, documents, tokens, samples, epochs), tuple(corpora))


def composition_text(uses: Sequence[SplitUse]) -> str:
    """A table of the splits and their corpora."""
    lines = [f"{'data':22} {'documents':>11} {'tokens':>18} {'samples read':>13} {'epochs':>10}"]
    for split in uses:
        rows = [split.total, *(split.corpora if len(split.corpora) > 1 else ())]
        for use in rows:
            name = use.name if use is split.total else f"  {use.name[-20:]}"
            documents = "-" if use.documents is None else f"{use.documents:,}"
            each = ", each time" if use is split.total and use.name != SPLITS[0] else ""
            lines.append(
                f"{name + each:22} {documents:>11} {use.tokens:>18,} {use.samples:>13,.0f} "
                f"{use.epochs:>10,.3f}"
            )
    return "\n".join(lines)
