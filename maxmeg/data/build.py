"""Open the tokenizer and the datasets that a run's settings name."""

import dataclasses
import functools
import logging
import math
import os
from collections.abc import Callable, Sequence

from maxmeg.config.data import Builtin, DataConfig, DataOrder, Objective
from maxmeg.config.schema import Config
from maxmeg.data.corpus import mock, remote
from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.corpus.vocabulary import check_vocabularies
from maxmeg.data.masked.bert import BertDataset
from maxmeg.data.masked.masking import Vocabulary
from maxmeg.data.masked.sentences import SentenceOrder
from maxmeg.data.masked.t5 import T5Dataset
from maxmeg.data.prepare import standard_library as builtin_corpus
from maxmeg.data.resuming import Record, kept_parts
from maxmeg.data.retrieval.ict import IctDataset
from maxmeg.data.retrieval.pairs import PairDataset, read_pairs
from maxmeg.data.retrieval.rows import TextEncoder, lengths_of
from maxmeg.data.samples import fim, phases
from maxmeg.data.samples import rows as whole_documents  # chats, labelled and packed documents
from maxmeg.data.samples.aligned import AlignedDataset
from maxmeg.data.samples.blending import (
    Blend,
    blended,
    check_weights,
    member_sizes,
    normalized,
    parse_blend,
    read_blend,
)
from maxmeg.data.samples.gpt import SPLITS, Dataset, DocumentRules, GptDataset
from maxmeg.data.samples.megatron_order import MegatronOrder
from maxmeg.data.samples.retro import RetroDataset
from maxmeg.data.samples.sampling import parse_split, split_range
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.data.tokenizers.tokenizer import Tokenizer
from maxmeg.optim.schedules import Schedules

logger = logging.getLogger("maxmeg")


@dataclasses.dataclass(frozen=True)
class Request:
    """The samples that a run reads of a split; Megatron-LM's order and changes of a blend depend on
    them.

    num_samples: samples of the whole run; None means one epoch. changes: the sample numbers at
    which the changes of the blend take effect. saved: `record_order` of the checkpoint to resume
    from.
    """

    num_samples: int | None = None
    changes: tuple[int, ...] = ()
    saved: tuple[Record, ...] = ()


Asked = Request | int | None  # a number n means Request(n)


def open_corpus(config: DataConfig, run_dir: str) -> tuple[Tokenizer, list[str]]:
    """Load the tokenizer, and return the prefixes of the .bin/.idx files in data.paths (with
    weights if given).

    A built-in corpus is tokenized on first use, into data.cache_dir or RUN_DIR/data. The list is
    empty where data.blend or the paths of single splits name the corpora. ValueError if no setting
    names a corpus.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    if config.mock:
        return tokenizer, ["mock"]
    if config.paths or config.blend or any(_paths_of_splits(config)):
        return tokenizer, list(config.paths)
    folder, builtin = cache_folder(config, run_dir), config.builtin
    if builtin is Builtin.none:  # runs of earlier versions have the first one without its name
        builtin = Builtin.source
        if not builtin_corpus.folder_of(folder, config.tokenizer, builtin).is_dir():
            raise ValueError(
                "no setting names a corpus: set data.paths=PREFIX (`maxmeg preprocess` writes "
                "corpora) and data.tokenizer to the tokenizer that wrote it; or, for a try, "
                "data.mock=true"
            )
    return tokenizer, [builtin_corpus.standard_library(folder, config.tokenizer, builtin)]


def cache_folder(config: DataConfig, run_dir: str) -> str:
    """The folder that keeps files derived from the corpora, such as the order of samples."""
    return config.cache_dir or os.path.join(run_dir, "data")


def read_whole(config: DataConfig, paths: tuple[str, ...], split_index: int) -> None:
    """Change `config` so that the split consists of all of these corpora, and of nothing else."""
    config.paths, config.blend, config.mock = paths, "", False
    config.train_paths = config.validation_paths = config.test_paths = ()
    config.split = _whole_split(split_index)


def samples_asked(
    config: Config, split_index: int, schedules: Schedules, saved: Sequence[Record] = ()
) -> Request:
    """The samples that a run reads of a split: for validation, the sum over all its evaluations.

    This is Megatron-LM's rule. saved: `record_order` of the checkpoint that the run resumes from.
    """
    train = config.train
    if split_index == 0:
        changes = config.data.blend_changes
        steps = [change.step for change in phases.parse_changes(changes)] if changes else []
        if steps and steps[-1] >= train.num_steps:
            raise ValueError(
                f"data.blend_changes has step {steps[-1]}, but the run ends with step "
                f"train.num_steps={train.num_steps}: leave out the changes that it does not reach"
            )
        begins = tuple(map(schedules.consumed_samples, steps))
        return Request(schedules.total_samples, begins, tuple(saved))
    if split_index == 1 and not train.eval_steps:
        return Request()
    before = schedules.validation_samples(train.num_steps) if split_index == 1 else 0
    return Request(before + train.eval_steps * train.global_batch_size)


def build_dataset(
    config: DataConfig,
    prefixes: list[str],
    tokenizer: Tokenizer,
    split_index: int,
    seed: int,
    vocab_size: int = 0,
    samples: Asked = None,
    cache_dir: str = "",
) -> Dataset | None:
    """Open split 0 (train), 1 (validation) or 2 (test); None where the split holds no sequence.

    prefixes: from `open_corpus`. vocab_size: of the model; 0 means the tokenizer's. samples: the
    samples that the run reads; n means Request(n), None one epoch. cache_dir: for files that are
    made once per node; empty: memory. ValueError for bad files or ids, a split without a sample.
    """
    num_ids = min(vocab_size or tokenizer.vocab_size, tokenizer.vocab_size)
    request = samples if isinstance(samples, Request) else Request(samples)
    starts, num_samples, saved = request.changes, request.num_samples, list(request.saved)
    (names, weights), split = _find_blend(config, prefixes, split_index)
    check_vocabularies(names, tokenizer, warns=split_index == 0)  # "mock" is no file
    if starts:
        phases.check_changeable(names, weights)
    if config.objective in SENTENCES:
        order, part = SentenceOrder(seed, num_samples, cache_dir), (split, split_index)
        return SENTENCES[config.objective](_Opening(config, names, part, tokenizer, num_ids, order))
    if whole_documents.reads(config):
        _refuse_weights(config, prefixes, weights)
        opened = functools.partial(remote.open_dataset, config=config, folder=cache_dir)
        part = whole_documents.Part(names, split, split_index, opened)
        return whole_documents.open_rows(config, part, tokenizer, seed, num_ids, cache_dir)
    if config.mock:
        corpora: list[IndexedDataset] = [mock.MockCorpus(num_ids, tokenizer.eod)]
    else:
        corpora = [remote.open_dataset(name, config, cache_dir, num_ids) for name in names]
    empty = _empty_corpora(corpora, split, split_index)
    if len(empty) == len(corpora) and split_index:
        return None
    is_native = config.order is DataOrder.native
    if len(empty) == len(corpora) or weights or not is_native:
        _refuse_empty(empty, split, split_index)
    rules = _rules(config, tokenizer, seed, vocab_size or num_ids)

    def single(members: list[IndexedDataset], size: int | None) -> GptDataset:
        length, order = config.sequence_length, None
        if not is_native:
            parts = kept_parts(saved, members, (split, split_index, length, seed), size)
            order = MegatronOrder(size, cache_dir, parts, config.max_epochs * (not split_index))
        return GptDataset(members, split, split_index, length, num_ids, seed, rules, order)

    def added(name: str) -> GptDataset:
        corpus = remote.open_dataset(name, config, cache_dir, num_ids)
        _refuse_empty(_empty_corpora([corpus], split, split_index), split, split_index)
        return single([corpus], None)

    def changing(members: list[GptDataset]) -> Dataset:
        first = (names, weights or [1.0], members)
        ends = (*starts, num_samples or 0)
        blend = phases.change(first, config.blend_changes, ends, added, cache_dir)
        if not is_native:
            _log_repeats(blend)
        return blend

    if weights is None and (len(corpora) == 1 or is_native):
        whole = single(corpora, num_samples)
        return changing([whole]) if starts else whole
    if weights is None:
        epochs = [single([corpus], None) for corpus in corpora]
        return _join(epochs, num_samples, split_index, cache_dir)
    shares = normalized(weights)
    if num_samples is None:
        num_samples = _one_epoch(corpora, split, split_index, config.sequence_length)
    sizes, total = member_sizes(shares, num_samples, config.blend_surplus)
    members = [single([c], size) for c, size in zip(corpora, sizes, strict=True)]
    if starts:
        return changing(members)
    blend = blended(members, shares, total, cache_dir)
    if not is_native:
        _check_supply(blend, members, config.blend_surplus)
    return blend


def _one_epoch(corpora: Sequence[IndexedDataset], split: str, index: int, length: int) -> int:
    """The number of samples of one epoch of the corpora."""
    return max(1, sum(max(0, _tokens(c, split, index) - 1) for c in corpora) // length)


def build_validation(
    config: DataConfig,
    prefixes: list[str],
    tokenizer: Tokenizer,
    seed: int,
    vocab_size: int = 0,
    num_samples: Asked = None,
    cache_dir: str = "",
) -> dict[str, Dataset]:
    """The validation sets by name; one set, named "", unless data.validate_each is set.

    num_samples: samples read of each set. The dict is empty where no sequence is left for
    validation.
    """
    rest = (seed, vocab_size, num_samples, cache_dir)
    if not config.validate_each:
        whole = build_dataset(config, prefixes, tokenizer, 1, *rest)
        return {} if whole is None else {"": whole}
    (paths, weights), split = _find_blend(config, prefixes, 1)
    if weights is not None or split != _whole_split(1):
        raise ValueError(
            f"data.validate_each=True cannot read {' '.join(paths)} with weights {weights} and "
            f"split={split!r}: name prefixes without weights, as validation: [a, b] in the file "
            "data.blend or as data.validation_paths=a,b"
        )
    names = [os.path.basename(path) for path in paths]
    sets = {}
    for name, path in zip(names if len(set(names)) == len(names) else paths, paths, strict=True):
        alone = dataclasses.replace(config)
        read_whole(alone, (path,), 1)
        sets[name] = build_dataset(alone, [path], tokenizer, 1, *rest)
    return sets


def _join(
    members: list[GptDataset], num_samples: int | None, split_index: int, cache_dir: str
) -> Blend:
    """Read one epoch of each corpus, taking turns; less where the run asks for fewer samples."""
    sizes = [member.samples_per_epoch for member in members]
    total = sum(sizes)
    if split_index == 0 and num_samples is not None and num_samples > total:
        raise ValueError(
            f"training asks for {num_samples} samples, but one epoch of {len(members)} corpora "
            f"without weights holds {total}: give weights (data.paths=0.5,a,0.5,b), which allow "
            "several epochs, or train for fewer steps"
        )
    size = None if num_samples is None else min(num_samples, total)
    weights = [float(size) for size in sizes]
    check_weights(weights, [member.corpora[0].prefix for member in members])
    return blended(members, weights, size, cache_dir)


def _log_repeats(blend: Blend) -> None:
    for member, taken in zip(blend.members, blend.samples_of_members(), strict=True):
        if isinstance(member, GptDataset) and taken > (have := member.num_samples):
            logger.info(
                f"{member.corpora[0].prefix}: the blend takes {taken} samples: {have} in "
                "Megatron-LM's order, which then repeats"
            )


def _check_supply(blend: Blend, members: list[GptDataset], surplus: float) -> None:
    for member, taken in zip(members, blend.samples_of_members(), strict=True):
        if taken > (have := member.num_samples):
            raise ValueError(
                f"the blend takes {taken} samples of {member.corpora[0].prefix}, but only "
                f"{have} exist with data.blend_surplus={surplus}: raise it, for example to "
                f"{max(2 * surplus, math.ceil(100 * taken / have) / 100 - 1):g}"
            )


def _find_blend(
    config: DataConfig, prefixes: list[str], split_index: int
) -> tuple[tuple[list[str], list[float] | None], str]:
    """The corpora and weights of a split, and the split string to apply to each corpus."""
    splits: dict[int, list] | None = None
    items = list(prefixes)
    if config.blend:
        read = read_blend(config.blend)
        if isinstance(read, dict):
            splits = {index: list(blend) for index, blend in read.items()}
        else:
            items = list(read)
    elif any(_paths_of_splits(config)):
        splits = {
            index: list(paths) for index, paths in enumerate(_paths_of_splits(config)) if paths
        }
    if splits is None:
        return parse_blend(items), mock.SPLIT if config.mock else config.split
    if 0 not in splits:
        where = f"data.blend={config.blend}" if config.blend else "data.validation_paths"
        raise ValueError(f"{where} has no training set: name train (data.train_paths) too")
    if split_index not in splits:
        return ([], None), _whole_split(split_index)
    names, weights = parse_blend(splits[split_index])
    # As in Megatron-LM, a set with one corpus is not a blend and has no surplus.
    return (names, weights if len(names) > 1 else None), _whole_split(split_index)


def split_weights(config: DataConfig, prefixes: list[str]) -> dict[str, float] | None:
    """The weights by which one corpus is split; None where the splits have corpora of their own."""
    strings = [_find_blend(config, prefixes, index)[1] for index in range(len(SPLITS))]
    if len(set(strings)) > 1:
        return None
    return dict(zip(SPLITS, parse_split(strings[0]), strict=True))


def _paths_of_splits(config: DataConfig) -> tuple[tuple[str, ...], ...]:
    return config.train_paths, config.validation_paths, config.test_paths


def _whole_split(split_index: int) -> str:
    """The split string that assigns a whole corpus to one split."""
    return ",".join(str(int(i == split_index)) for i in range(len(SPLITS)))


def _empty_corpora(corpora, split: str, split_index: int) -> list[IndexedDataset]:
    """The corpora without a sequence in this split."""
    ranges = [split_range(split, split_index, len(corpus)) for corpus in corpora]
    return [c for c, (begin, end) in zip(corpora, ranges, strict=True) if begin == end]


def _rules(config: DataConfig, tokenizer: Tokenizer, seed: int, vocab_size: int) -> DocumentRules:
    return DocumentRules(
        tokenizer.eod,
        config.reset_position_ids,
        config.reset_attention_mask,
        config.eod_mask_loss,
        fim.make_fim(config, tokenizer, seed, vocab_size) if config.fim_rate else None,
    )


def _refuse_weights(config: DataConfig, prefixes: list[str], weights: list[float] | None) -> None:
    if weights is not None:
        raise ValueError(
            f"data.paths={','.join(prefixes)} has weights, but objective={config.objective.value} "
            f"and packing={config.packing.value} read files one after the other: give paths "
            "without weights"
        )


def _refuse_empty(empty: list[IndexedDataset], split: str, split_index: int) -> None:
    if empty:
        counts = ", ".join(f"{c.prefix} has {len(c)}" for c in empty)
        raise ValueError(
            f"split={split!r} leaves no sequence for {SPLITS[split_index]} ({counts}): give "
            f"{SPLITS[split_index]} more weight, use a larger corpus, or name the corpora of "
            "every set (data.train_paths, ...)"
        )


@dataclasses.dataclass(frozen=True)
class _Opening:
    """What a split's samples are opened from. part: weights of the split, as data.split, and its
    number. num_ids: the tokenizer's ids for which the model has a row."""

    config: DataConfig
    names: list[str]
    part: tuple[str, int]
    tokenizer: Tokenizer
    num_ids: int
    order: SentenceOrder

    def corpus(self, name: str) -> IndexedDataset:
        return remote.open_dataset(name, self.config, self.order.cache_dir, self.num_ids)

    def is_empty(self, size: int) -> bool:
        """Whether another split than training has none of `size` documents or sequences."""
        begin, end = split_range(*self.part, size)
        return begin == end and self.part[1] > 0


def _open_sentences(opening: _Opening) -> Dataset | None:
    """Samples of one corpus of documents; None where another split than training has none."""
    config, names = opening.config, opening.names
    if not names:
        return None
    if len(names) > 1:
        raise ValueError(
            f"data.objective={config.objective.value} reads one corpus, not {len(names)} "
            f"({', '.join(names)}): merge them (maxmeg preprocess reads several files), or name one"
        )
    corpus = opening.corpus(names[0])
    if opening.is_empty(corpus.num_documents):
        return None
    part, tokenizer, order = opening.part, opening.tokenizer, opening.order
    if config.objective is Objective.retro:
        return RetroDataset(corpus, *part, config, tokenizer, order.seed, opening.num_ids)
    if config.objective is Objective.ict:
        titles = opening.corpus(config.titles) if config.titles else None
        encoder, lengths = TextEncoder.of(tokenizer, opening.num_ids), lengths_of(config)
        return IctDataset(corpus, part, lengths, encoder, titles, config.query_in_block, order)
    vocabulary = Vocabulary.of(tokenizer, opening.num_ids)
    if config.objective is Objective.span_corruption:
        lengths = config.source_tokens, config.sequence_length
        return T5Dataset(corpus, *part, lengths, vocabulary, order=order)
    rest = {"order": order, "has_pairs": config.sentence_pairs}
    return BertDataset(corpus, *part, config.sequence_length, vocabulary, **rest)


def _open_pairs(opening: _Opening) -> AlignedDataset | None:
    """Pairs from a split of two corpora; None where another split than training has none."""
    config, names, part = opening.config, opening.names, opening.part
    if not names:
        return None
    if len(names) != 2:
        raise ValueError(
            f"data.objective=seq2seq reads two corpora, SOURCE,TARGET, not {len(names)} "
            f"({', '.join(names)}): name the two files of maxmeg preprocess --aligned"
        )
    corpora = [opening.corpus(name) for name in names]
    if opening.is_empty(len(corpora[0])):
        return None
    lengths, cuts = (config.source_tokens, config.sequence_length), config.too_long.value
    rest = lengths, opening.tokenizer, cuts == "truncate", opening.order.seed
    data = AlignedDataset(corpora, *part, *rest, (opening.num_ids, config.start_token))
    logger.info("%s: %s", SPLITS[part[1]], data)
    return data


def _open_retrieval(opening: _Opening) -> PairDataset | None:
    """Queries and their texts from a split of files; None where another split than training has
    none."""
    config, names, part = opening.config, opening.names, opening.part
    tokenizer = opening.tokenizer
    examples = [each for name in names for each in read_pairs(config, name, tokenizer, part)]
    if not examples and part[1]:
        return None
    if not examples:
        raise ValueError(
            f"data.split={part[0]!r} leaves no query of {', '.join(names)} for training: give it "
            "more weight"
        )
    lengths, size = lengths_of(config), opening.num_ids
    rest = size, opening.order.seed, part[1] == 0
    return PairDataset(examples, lengths, config.negatives, *rest)


SENTENCES: dict[Objective, Callable[[_Opening], Dataset | None]] = {
    Objective.retrieve: _open_retrieval,
    Objective.seq2seq: _open_pairs,
    **dict.fromkeys((Objective.ict, Objective.retro), _open_sentences),
    **dict.fromkeys((Objective.masked, Objective.span_corruption), _open_sentences),
}


def _tokens(corpus: IndexedDataset, split: str, split_index: int) -> int:
    begin, end = split_range(split, split_index, len(corpus))
    return int(corpus.lengths[begin:end].sum(dtype="int64"))
