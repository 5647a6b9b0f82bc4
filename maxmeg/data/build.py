"""Open the tokenizer and the datasets that a run's settings name."""

import dataclasses
import os
from collections.abc import Callable, Sequence

from maxmeg.config.data import Builtin, DataConfig, Objective
from maxmeg.config.schema import Config
from maxmeg.data.batch_sizes import BatchSizes
from maxmeg.data.chat.preferences import open_preferences
from maxmeg.data.chat.sft import open_chats
from maxmeg.data.corpus import mock
from maxmeg.data.corpus.vocabulary import check_vocabularies
from maxmeg.data.labelled.dataset import open_labelled
from maxmeg.data.masked.bert import open_masked
from maxmeg.data.masked.t5 import open_spans
from maxmeg.data.opening import Opening, Request
from maxmeg.data.prepare import standard_library as builtin_corpus
from maxmeg.data.retrieval.ict import open_blocks
from maxmeg.data.retrieval.pairs import open_pairs
from maxmeg.data.samples import phases
from maxmeg.data.samples.aligned import open_aligned
from maxmeg.data.samples.blending import parse_blend, read_blend
from maxmeg.data.samples.dataset import SPLITS, Dataset, Record
from maxmeg.data.samples.image_text import open_image_text
from maxmeg.data.samples.retro import open_retro
from maxmeg.data.samples.sampling import parse_split
from maxmeg.data.samples.texts import is_blend, open_texts
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.data.tokenizers.tokenizer import Tokenizer

# What opens a split of each objective's files; it returns None where another split than training
# has no sample. ValueError for damaged files, and for a training split without a sample.
OPENERS: dict[Objective, Callable[[Opening], Dataset | None]] = {
    Objective.gpt: open_texts,
    Objective.sft: open_chats,
    Objective.preferences: open_preferences,
    Objective.masked: open_masked,
    Objective.span_corruption: open_spans,
    Objective.seq2seq: open_aligned,
    **dict.fromkeys((Objective.classify, Objective.tag, Objective.choose), open_labelled),
    Objective.ict: open_blocks,
    Objective.retrieve: open_pairs,
    Objective.retro: open_retro,
    Objective.image_text: open_image_text,
}
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
    config: Config, split_index: int, batches: BatchSizes, saved: Sequence[Record] = ()
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
        begins = tuple(map(batches.consumed_samples, steps))
        return Request(batches.total_samples, begins, tuple(saved))
    if split_index == 1 and not train.eval_steps:
        return Request()
    before = batches.validation_samples(train.num_steps) if split_index == 1 else 0
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
    (names, weights), split = _find_blend(config, prefixes, split_index)
    check_vocabularies(names, tokenizer, warns=split_index == 0)  # "mock" is no file
    if not names:
        return None
    if weights is not None and len(names) > 1 and not is_blend(config):
        raise ValueError(
            f"data.paths={','.join(prefixes)} has weights, but objective={config.objective.value} "
            f"and packing={config.packing.value} read files one after the other: give paths "
            "without weights"
        )
    return OPENERS[config.objective](
        Opening(
            config,
            names,
            split,
            split_index,
            tokenizer,
            num_ids,
            seed,
            weights,
            request,
            cache_dir,
            vocab_size or num_ids,
        )
    )


def open_split(
    config: Config, prefixes: list[str], tokenizer: Tokenizer, index: int, samples: Asked
) -> Dataset | None:
    """`build_dataset` with the settings of a run."""
    model, folder = config.model, cache_folder(config.data, config.run_dir)
    place = config.data, prefixes, tokenizer, index
    return build_dataset(*place, config.seed, model.vocab_size, samples, folder)


def build_validation(
    config: Config, prefixes: list[str], tokenizer: Tokenizer, samples: Asked = None
) -> dict[str, Dataset]:
    """The validation sets by name; one set, named "", unless data.validate_each is set.

    samples: those read of each set. The dict is empty where no sequence is left for validation.
    """
    if not config.data.validate_each:
        dataset = open_split(config, prefixes, tokenizer, 1, samples)
        return {} if dataset is None else {"": dataset}
    (paths, weights), split = _find_blend(config.data, prefixes, 1)
    if weights is not None or split != _whole_split(1):
        raise ValueError(
            f"data.validate_each=True cannot read {' '.join(paths)} with weights {weights} and "
            f"split={split!r}: name prefixes without weights, as validation: [a, b] in the file "
            "data.blend or as data.validation_paths=a,b"
        )
    names = [os.path.basename(path) for path in paths]
    sets = {}
    for name, path in zip(names if len(set(names)) == len(names) else paths, paths, strict=True):
        alone = dataclasses.replace(config, data=dataclasses.replace(config.data))
        read_whole(alone.data, (path,), 1)
        sets[name] = open_split(alone, [path], tokenizer, 1, samples)
    return sets


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
