"""Queries with the texts that answer them and with hard negatives, from JSON lines."""

import itertools
import zlib
from collections.abc import Sequence

import numpy as np

from maxmeg.data.corpus.indexed import check_vocabulary
from maxmeg.data.labelled.files import read_examples
from maxmeg.data.opening import Opening
from maxmeg.data.retrieval.rows import Lengths, TextEncoder, empty_rows, fill_row, lengths_of
from maxmeg.data.samples.dataset import EpochRows, Record
from maxmeg.data.samples.sampling import Batch, EpochOrder

_KEY, _NEGATIVES = 5, 6  # of the orders of pairs and of negatives; labelled examples have 4


class PairDataset(EpochRows):
    """Each row is a query, its text, and `negatives` of its hard negatives, or as many as it has.

    examples: tokens of a query, its text and its hard negatives. Example n of a run and its
    negatives depend on (n, seed) alone. shuffle: another order in each epoch.
    """

    def __init__(
        self,
        examples: Sequence[Sequence[np.ndarray]],
        lengths: Lengths,
        negatives: int,
        vocab_size: int,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.examples, self.sequence_length, self.vocab_size = examples, lengths.row, vocab_size
        self._lengths, self._negatives, self._seed = lengths, negatives, seed
        self._order = EpochOrder(len(examples), seed, _KEY, shuffle)

    @property
    def num_tokens(self) -> int:
        """Tokens of one epoch."""
        chosen = (example[: 2 + self._negatives] for example in self.examples)
        return sum(len(tokens) for texts in chosen for tokens in texts)

    @property
    def description(self) -> Record:
        digest = 0  # CRC-32 of all tokens and lengths
        for tokens in itertools.chain(*self.examples):
            data = np.array([len(tokens), *tokens.tolist()], "<i4")
            digest = zlib.crc32(data.tobytes(), digest)
        return {
            "documents": [len(self.examples), digest],
            "sequence_length": self.sequence_length,
            "negatives": self._negatives,
            "seed": self._seed,
        }

    def batch(self, indices: np.ndarray) -> Batch:
        """The examples with these numbers, any >= 0, as from `empty_rows`."""
        batch = empty_rows(len(indices), self._lengths, 1 + self._negatives)
        numbers = self._order(np.asarray(indices)).tolist()
        for row, (n, number) in enumerate(zip(np.asarray(indices).tolist(), numbers, strict=True)):
            query, text, *negatives = self.examples[number]
            if len(negatives) > self._negatives:
                random = np.random.default_rng([_NEGATIVES, self._seed, n])
                chosen = random.permutation(len(negatives))[: self._negatives]
                negatives = [negatives[place] for place in np.sort(chosen).tolist()]
            fill_row(batch, row, [query, text, *negatives])
        check_vocabulary(batch["tokens"], self.vocab_size, "the queries and texts")
        return batch


def open_pairs(opening: Opening) -> PairDataset | None:
    """Queries and their texts from a split of files; None where another split than training has
    none."""
    names, lengths = opening.names, lengths_of(opening.config)
    pairs = [pair for name in names for pair in read_pairs(opening, name)]
    if not pairs and opening.index:
        return None
    if not pairs:
        raise ValueError(
            f"data.split={opening.split!r} leaves no query of {', '.join(names)} for training: "
            "give it more weight"
        )
    rest = opening.config.negatives, opening.num_ids, opening.seed
    return PairDataset(pairs, lengths, *rest, shuffle=opening.index == 0)


def read_pairs(opening: Opening, path: str) -> list[list[np.ndarray]]:
    """The examples of a split of a file. ValueError as `read_examples`."""
    config, encode = opening.config, opening.tokenizer.encode
    encoder = TextEncoder.of(opening.tokenizer)
    examples = read_examples(config, path)
    begin, end = opening.range(len(examples))
    pairs = []
    for example in examples[begin:end]:
        (_, query), *texts = example.texts  # type: ignore[union-attr]
        tokens = [encoder(encode(query), config.query_length)]
        for title, text in texts:
            title_ids = encode(title) if title else None
            tokens.append(encoder(encode(text), config.text_tokens, title_ids))
        pairs.append(tokens)
    return pairs
