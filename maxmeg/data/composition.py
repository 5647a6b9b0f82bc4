"""What a run reads: documents, tokens, samples and epochs of every split and of every corpus."""

import copy
import dataclasses
from collections.abc import Sequence

import numpy as np

from maxmeg.config.schema import Config
from maxmeg.config.validate import resolve, validate
from maxmeg.data.blending import Mixture
from maxmeg.data.build import build_dataset, cache_folder, open_corpus, samples_asked
from maxmeg.data.gpt import SPLITS, Dataset, GptDataset
from maxmeg.data.indexed import IndexedDataset
from maxmeg.optim.schedules import Schedules


@dataclasses.dataclass(frozen=True)
class Use:
    """What is read of a corpus, or of a split in all. tokens: of the split, once through."""

    name: str
    documents: int | None  # None: not counted
    tokens: int
    samples: float
    epochs: float


@dataclasses.dataclass(frozen=True)
class SplitUse:
    """A split of a run; its samples are those of the training, or of one evaluation."""

    whole: Use
    corpora: tuple[Use, ...]


def uses_of(config: Config) -> list[SplitUse]:
    """Every split that has samples, opened as a run opens it: what it would refuse is refused."""
    config = copy.deepcopy(config)  # `resolve` writes to it
    validate(config, config.parallel.devices)
    tokenizer, prefixes = open_corpus(config.data, config.run_dir)
    resolve(config, tokenizer.vocab_size)
    consumed = Schedules(config).consumed_samples
    training = consumed(config.train.num_steps)
    evaluation = config.train.eval_steps * config.train.global_batch_size
    uses = []
    for index, name in enumerate(SPLITS):
        dataset = build_dataset(
            config.data,
            prefixes,
            tokenizer,
            index,
            config.seed,
            config.model.vocab_size,
            samples_asked(config, index, consumed),
            cache_folder(config.data, config.run_dir),
        )
        if dataset is not None:
            uses.append(_split_use(name, dataset, evaluation if index else training))
    return uses


def _split_use(name: str, dataset: Dataset, samples: int) -> SplitUse:
    members, shares = [dataset], [1.0]
    if isinstance(dataset, Mixture):
        members = dataset.members
        shares = [taken / dataset.num_samples for taken in dataset.samples_of_members()]
    corpora = []
    for member, share in zip(members, shares, strict=True):
        if not isinstance(member, GptDataset):  # rows of whole documents or conversations
            assert len(members) == 1, "only GPT data is blended"
            epochs = samples / member.samples_per_epoch
            return SplitUse(Use(name, None, member.num_tokens, samples, epochs), ())
        for corpus, (begin, end) in zip(member.corpora, member.ranges, strict=True):
            tokens = int(corpus.lengths[begin:end].sum(dtype=np.int64))
            read = samples * share * tokens / max(member.num_tokens, 1)
            corpora.append(
                Use(
                    corpus.prefix,
                    _documents_within(corpus, begin, end),
                    tokens,
                    read,
                    read * member.sequence_length / max(tokens, 1),
                )
            )
    documents = sum(use.documents or 0 for use in corpora)
    tokens = sum(use.tokens for use in corpora)
    epochs = samples * dataset.sequence_length / tokens
    return SplitUse(Use(name, documents, tokens, samples, epochs), tuple(corpora))


def _documents_within(corpus: IndexedDataset, begin: int, end: int) -> int:
    """Documents that start in sequences [begin, end)."""
    first, last = np.searchsorted(corpus.document_indices[:-1], [begin, end])
    return int(last - first)


def composition_text(uses: Sequence[SplitUse]) -> str:
    """A table of the splits and their corpora."""
    lines = [f"{'':32} {'documents':>14} {'tokens':>18} {'samples read':>16} {'epochs':>10}"]
    for split in uses:
        rows = [split.whole, *(split.corpora if len(split.corpora) > 1 else ())]
        for use in rows:
            name = use.name if use is split.whole else f"  {use.name[-28:]}"
            documents = "-" if use.documents is None else f"{use.documents:,}"
            each = ", each time" if use is split.whole and use.name != SPLITS[0] else ""
            lines.append(
                f"{name + each:32} {documents:>14} {use.tokens:>18,} {use.samples:>16,.0f} "
                f"{use.epochs:>10.3f}"
            )
    return "\n".join(lines)
