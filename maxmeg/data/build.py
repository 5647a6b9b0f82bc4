"""From a run's settings to its tokenizer and datasets."""

import os

from maxmeg.config.schema import DataConfig
from maxmeg.data.corpus import standard_library
from maxmeg.data.gpt import SPLITS, DocumentRules, GptDataset
from maxmeg.data.indexed import IndexedDataset
from maxmeg.data.sampling import split_range
from maxmeg.data.tokenizers import Tokenizer, load_tokenizer


def open_corpus(config: DataConfig, run_dir: str) -> tuple[Tokenizer, list[str]]:
    """The tokenizer, and the prefixes of the .bin/.idx files.

    Without `paths` the default corpus is prepared on first use, in `cache_dir` or RUN_DIR/data.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    if config.paths:
        return tokenizer, list(config.paths)
    cache_dir = config.cache_dir or os.path.join(run_dir, "data")
    return tokenizer, [standard_library(cache_dir, config.tokenizer)]


def build_dataset(
    config: DataConfig,
    prefixes: list[str],
    tokenizer: Tokenizer,
    split_index: int,
    seed: int,
    vocab_size: int = 0,
) -> GptDataset | None:
    """Split 0 (train), 1 (validation) or 2 (test); None where no sequence falls into it.

    vocab_size: ids the model knows; 0 takes the tokenizer's. ValueError for files that are
    missing or damaged and for a split with less than one sample.
    """
    corpora = [IndexedDataset(prefix) for prefix in prefixes]
    ranges = [split_range(config.split, split_index, len(corpus)) for corpus in corpora]
    if all(begin == end for begin, end in ranges):
        if split_index == 0:
            counts = ", ".join(f"{c.prefix} has {len(c)}" for c in corpora)
            raise ValueError(
                f"split={config.split!r} leaves no sequence for {SPLITS[0]} ({counts}): give "
                "training more weight or use a larger corpus"
            )
        return None
    rules = DocumentRules(
        tokenizer.eod,
        config.reset_position_ids,
        config.reset_attention_mask,
        config.eod_mask_loss,
    )
    return GptDataset(
        corpora,
        config.split,
        split_index,
        config.sequence_length,
        vocab_size or tokenizer.vocab_size,
        seed,
        rules,
    )
