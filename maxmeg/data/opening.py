"""What the samples of a split are opened from."""

import dataclasses
from collections.abc import Sequence

from maxmeg.config.data import DataConfig, Objective
from maxmeg.data.corpus import remote
from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.corpus.loss_weights import SUFFIX
from maxmeg.data.samples.dataset import SPLITS, Record
from maxmeg.data.samples.sampling import split_range
from maxmeg.data.tokenizers.tokenizer import Tokenizer


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


@dataclasses.dataclass(frozen=True)
class Opening:
    """A split of files, and how its samples are made.

    names: prefixes of corpora, or files; weights: None without them. split: weights of train,
    validation and test, as data.split; index: number of the split. num_ids: number of token ids
    that have an embedding; vocab_size: number of embeddings. cache_dir: folder of indices that are
    made once per node; empty: they stay in memory.
    """

    config: DataConfig
    names: Sequence[str]
    split: str
    index: int
    tokenizer: Tokenizer
    num_ids: int
    seed: int = 0
    weights: list[float] | None = None
    request: Request = Request()
    cache_dir: str = ""
    vocab_size: int = 0

    @property
    def name(self) -> str:
        """The name of the split."""
        return SPLITS[self.index]

    def corpus(self, name: str, has_ids: bool = True) -> IndexedDataset:
        """Open a corpus. has_ids: all of its sequences are token ids, which are checked. ValueError
        for one with weights of documents, if the objective does not read them."""
        num_ids, objective = self.num_ids if has_ids else None, self.config.objective
        corpus = remote.open_dataset(name, self.config, self.cache_dir, num_ids)
        if corpus.weights is not None and objective not in (Objective.gpt, Objective.seq2seq):
            raise ValueError(
                f"data.objective={objective.value} does not read the weights of documents in "
                f"{name}{SUFFIX}, only gpt and seq2seq do: delete this file, which gives all "
                "documents weight 1"
            )
        return corpus

    def range(self, size: int) -> tuple[int, int]:
        """Which of `size` documents, sequences or rows the split has, [begin, end)."""
        return split_range(self.split, self.index, size)

    def may_skip(self, size: int) -> bool:
        """Whether this is another split than training, and has none of `size` documents or
        sequences."""
        begin, end = self.range(size)
        return begin == end and self.index > 0

    def only_corpus(self, has_ids: bool = True) -> IndexedDataset | None:
        """The one corpus of an objective that reads documents of one; None if the split may be
        left out. ValueError for several. has_ids: as in `corpus`."""
        if len(self.names) > 1:
            raise ValueError(
                f"data.objective={self.config.objective.value} reads one corpus, not "
                f"{len(self.names)} ({', '.join(self.names)}): merge them (maxmeg preprocess reads "
                "several files), or name one"
            )
        corpus = self.corpus(self.names[0], has_ids)
        return None if self.may_skip(corpus.num_documents) else corpus
