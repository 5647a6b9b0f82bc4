"""From a run's settings to its tokenizer and datasets."""

import dataclasses
import functools
import logging
import math
import os
from collections.abc import Callable

from maxmeg.config.lazy import Lazy
from maxmeg.config.schema import Config, DataConfig, DataOrder, Objective, Packing
from maxmeg.data.blending import (
    BlendedDataset,
    Mixture,
    check_weights,
    member_sizes,
    normalized,
    parse_blend,
    read_blend,
)
from maxmeg.data.gpt import SPLITS, Dataset, DocumentRules, GptDataset
from maxmeg.data.indexed import IndexedDataset
from maxmeg.data.megatron_order import MegatronOrder
from maxmeg.data.sampling import split_range
from maxmeg.data.tokenizers import Tokenizer, load_tokenizer

logger = logging.getLogger("maxmeg")
default_corpus = Lazy("maxmeg.data.corpus")
mock = Lazy("maxmeg.data.mock")
fim = Lazy("maxmeg.data.fim")
remote = Lazy("maxmeg.data.remote")  # also opens what is not
phases = Lazy("maxmeg.data.phases")
whole_documents = Lazy("maxmeg.data.rows")  # chats, and packed documents

Blend = tuple[list[str], list[float] | None]
Asked = int | tuple[int, ...] | None  # samples in all, before them those before every change


def open_corpus(config: DataConfig, run_dir: str) -> tuple[Tokenizer, list[str]]:
    """The tokenizer, and `paths`: prefixes of .bin/.idx files, with weights where it has them.

    Where the settings name no corpus, the default one is prepared on first use, in `cache_dir` or
    RUN_DIR/data. None are returned where `blend` or paths of single sets name the corpora.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    if config.mock:
        return tokenizer, ["mock"]
    if config.paths or config.blend or any(_own_paths(config)):
        return tokenizer, list(config.paths)
    return tokenizer, [
        default_corpus.standard_library(cache_folder(config, run_dir), config.tokenizer)
    ]


def cache_folder(config: DataConfig, run_dir: str) -> str:
    """Where what is made from the corpora is kept."""
    return config.cache_dir or os.path.join(run_dir, "data")


def read_whole(config: DataConfig, paths: tuple[str, ...], split_index: int) -> None:
    """Settings with which these corpora, read whole, are the split; nothing else is read."""
    config.paths, config.blend, config.mock = paths, "", False
    config.train_paths = config.validation_paths = config.test_paths = ()
    config.split = _only(split_index)


def samples_asked(config: Config, split_index: int, consumed: Callable[[int], int]) -> Asked:
    """Samples that a run asks of a split, by Megatron-LM's rule; they decide the epochs' order.

    consumed: samples of the steps before one. Of training, also those before each change of its
    blend; of the validation as many as all its evaluations read, one after the other.
    """
    train = config.train
    if split_index == 0:
        changes = config.data.blend_changes
        steps = [change.step for change in phases.parse_changes(changes)] if changes else []
        if steps and steps[-1] >= train.num_steps:
            raise ValueError(
                f"data.blend_changes has step {steps[-1]}, but the run ends with step "
                f"train.num_steps={train.num_steps}: leave out what it never reads"
            )
        total = consumed(train.num_steps)
        return (*map(consumed, steps), total) if steps else total
    per_evaluation = train.eval_steps * train.global_batch_size
    if split_index == 2 or not train.eval_every:
        return per_evaluation
    return (train.num_steps // train.eval_every + 1) * per_evaluation


def evaluation_start(config: Config, step: int) -> int:
    """The first sample that the validation after step `step` reads.

    In Megatron-LM's order each goes on where the last one ended, in ours all begin with the first.
    """
    train = config.train
    if config.data.order is DataOrder.native or not train.eval_every:
        return 0
    return step // train.eval_every * train.eval_steps * train.global_batch_size


def build_dataset(
    config: DataConfig,
    prefixes: list[str],
    tokenizer: Tokenizer,
    split_index: int,
    seed: int,
    vocab_size: int = 0,
    asked: Asked = None,
    cache_dir: str = "",
) -> Dataset | None:
    """Split 0 (train), 1 (validation) or 2 (test); None where no sequence falls into it.

    prefixes: `open_corpus`'s. vocab_size: ids the model knows; 0 takes the tokenizer's.
    asked: how many samples will be asked for, which Megatron-LM's order depends on; None is an
    epoch, without changes of the blend. cache_dir: of what is made once on a node; empty keeps it
    in memory. ValueError for files that are missing or damaged and for a split with less than one
    sample.
    """
    vocab_size = vocab_size or tokenizer.vocab_size
    starts, num_samples = (asked[:-1], asked[-1]) if isinstance(asked, tuple) else ((), asked)
    (names, weights), split = _find_blend(config, prefixes, split_index)
    if starts:
        phases.check_changeable(names, weights)
    if config.objective is Objective.sft or config.packing is not Packing.none:
        if weights is not None:
            raise ValueError(
                f"data.paths={','.join(prefixes)} has weights, but objective=sft and packing="
                f"{config.packing.value} read files one after the other: give paths alone"
            )
        opened = functools.partial(remote.open_dataset, config=config, folder=cache_dir)
        part = whole_documents.Part(names, split, split_index, opened)
        return whole_documents.open_rows(config, part, tokenizer, seed, vocab_size, cache_dir)
    if config.mock:
        corpora = [mock.MockCorpus(tokenizer.vocab_size, tokenizer.eod)]
    else:
        corpora = [remote.open_dataset(name, config, cache_dir, vocab_size) for name in names]
    empty = _without_sequences(corpora, split, split_index)
    if len(empty) == len(corpora) and split_index:
        return None
    is_native = config.order is DataOrder.native
    if len(empty) == len(corpora) or weights or not is_native:
        _refuse_empty(empty, split, split_index)
    rules = _rules(config, tokenizer, seed, vocab_size)

    def single(members: list[IndexedDataset], size: int | None) -> GptDataset:
        order = None if is_native else MegatronOrder(size, cache_dir)
        length = config.sequence_length
        return GptDataset(members, split, split_index, length, vocab_size, seed, rules, order)

    def added(name: str) -> GptDataset:
        corpus = remote.open_dataset(name, config, cache_dir, vocab_size)
        _refuse_empty(_without_sequences([corpus], split, split_index), split, split_index)
        return single([corpus], None)

    def changing(members: list[GptDataset]) -> Dataset:
        first = (names, weights or [1.0], members)
        ends = (*starts, num_samples or 0)
        blend = phases.change(first, config.blend_changes, ends, added, cache_dir)
        if not is_native:
            _tell_repeats(blend)
        return blend

    if weights is None and (len(corpora) == 1 or is_native):
        whole = single(corpora, num_samples)
        return changing([whole]) if starts else whole
    if weights is None:
        epochs = [single([corpus], None) for corpus in corpora]
        return _join(epochs, num_samples, split_index, cache_dir)
    shares = normalized(weights)
    if num_samples is None:  # as many as the corpora have, though not the same ones
        epochs = sum(max(0, _tokens(c, split, split_index) - 1) for c in corpora)
        num_samples = max(1, epochs // config.sequence_length)
    sizes, total = member_sizes(shares, num_samples, config.blend_surplus)
    members = [single([c], size) for c, size in zip(corpora, sizes, strict=True)]
    if starts:
        return changing(members)
    blend = BlendedDataset(members, shares, total, cache_dir)
    if not is_native:
        _check_supply(blend, members, config.blend_surplus)
    return blend


def build_validation(
    config: DataConfig,
    prefixes: list[str],
    tokenizer: Tokenizer,
    seed: int,
    vocab_size: int = 0,
    num_samples: Asked = None,
    cache_dir: str = "",
) -> dict[str, Dataset]:
    """Validation sets by name, each of `num_samples`; one, named "", unless `validate_each`.

    Nothing where no sequence is left for validation.
    """
    rest = (seed, vocab_size, num_samples, cache_dir)
    if not config.validate_each:
        whole = build_dataset(config, prefixes, tokenizer, 1, *rest)
        return {} if whole is None else {"": whole}
    (paths, weights), split = _find_blend(config, prefixes, 1)
    if weights is not None or split != _only(1):
        raise ValueError(
            f"data.validate_each=True reads every set by itself, not {' '.join(paths)} with "
            f"weights {weights} and split={split!r}: name prefixes alone, as validation: [a, b] in "
            "the file data.blend or as data.validation_paths=a,b"
        )
    names = [os.path.basename(path) for path in paths]
    sets = {}
    for name, path in zip(names if len(set(names)) == len(names) else paths, paths, strict=True):
        alone = dataclasses.replace(config)
        read_whole(alone, (path,), 1)
        sets[name] = build_dataset(alone, [path], tokenizer, 1, *rest)
    return sets


def order_of(dataset: object, before: int | None = None) -> list:
    """What decides which sample has which number, as plain values that JSON can hold.

    before: of the samples before that number, which later changes of a blend do not touch.
    """
    if isinstance(dataset, Mixture):
        return dataset.order(order_of, before)
    if isinstance(dataset, GptDataset):
        return list(dataset.samples.identity)
    return list(getattr(dataset, "identity", ()))  # rows of whole documents have one


def warn_of_order(saved: list | None, dataset: object, before: int | None = None) -> None:
    """Says so where a checkpoint's samples were numbered otherwise; saved: its `order_of`."""
    if saved is not None and saved != order_of(dataset, before):
        logger.warning(
            "training samples are in another order than before this checkpoint (data settings, "
            "seed, or with data.order=megatron train.num_steps or batch sizes are others): some "
            "come again, others never"
        )


def _join(
    members: list[GptDataset], num_samples: int | None, split_index: int, cache_dir: str
) -> BlendedDataset:
    """An epoch of each, in turns; fewer where fewer are asked for."""
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
    return BlendedDataset(members, weights, size, cache_dir)


def _tell_repeats(blend: Mixture) -> None:
    for member, taken in zip(blend.members, blend.samples_of_members(), strict=True):
        if isinstance(member, GptDataset) and taken > (have := member.num_samples):
            logger.info(
                f"{member.corpora[0].prefix}: the blend takes {taken} samples, {have} come in "
                "Megatron-LM's order, then the same again from the first"
            )


def _check_supply(blend: BlendedDataset, members: list[GptDataset], surplus: float) -> None:
    for member, taken in zip(members, blend.samples_of_members(), strict=True):
        if taken > (have := member.num_samples):
            raise ValueError(
                f"the blend takes {taken} samples of {member.corpora[0].prefix}, of which only "
                f"{have} are made with data.blend_surplus={surplus}: raise it, as to "
                f"{max(2 * surplus, math.ceil(100 * taken / have) / 100 - 1):g}"
            )


def _find_blend(config: DataConfig, prefixes: list[str], split_index: int) -> tuple[Blend, str]:
    """Corpora and weights of a split, and the split string that cuts it out of them."""
    own: dict[int, list] | None = None
    items = list(prefixes)
    if config.blend:
        read = read_blend(config.blend)
        if isinstance(read, dict):
            own = {index: list(found) for index, found in read.items()}
        else:
            items = list(read)
    elif any(_own_paths(config)):
        own = {index: list(paths) for index, paths in enumerate(_own_paths(config)) if paths}
    if own is None:
        return parse_blend(items), mock.SPLIT if config.mock else config.split
    if 0 not in own:
        where = f"data.blend={config.blend}" if config.blend else "data.validation_paths"
        raise ValueError(f"{where} without a set to train on: name train (data.train_paths) too")
    if split_index not in own:
        return ([], None), _only(split_index)
    names, weights = parse_blend(own[split_index])
    # A set of one corpus is that corpus, as in Megatron-LM: no blend, no surplus.
    return (names, weights if len(names) > 1 else None), _only(split_index)


def _own_paths(config: DataConfig) -> tuple[tuple[str, ...], ...]:
    return config.train_paths, config.validation_paths, config.test_paths


def _only(split_index: int) -> str:
    return ",".join(str(int(i == split_index)) for i in range(len(SPLITS)))


def _without_sequences(corpora, split: str, split_index: int) -> list[IndexedDataset]:
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


def _refuse_empty(empty: list[IndexedDataset], split: str, split_index: int) -> None:
    if empty:
        counts = ", ".join(f"{c.prefix} has {len(c)}" for c in empty)
        raise ValueError(
            f"split={split!r} leaves no sequence for {SPLITS[split_index]} ({counts}): give "
            f"{SPLITS[split_index]} more weight, use a larger corpus, or name the corpora of "
            "every set (data.train_paths, ...)"
        )


def _tokens(corpus: IndexedDataset, split: str, split_index: int) -> int:
    begin, end = split_range(split, split_index, len(corpus))
    return int(corpus.lengths[begin:end].sum(dtype="int64"))
