"""The inverse cloze task (Lee et al. 2019): which block of sentences is a sentence from?

For the same files, seed and number of samples, the blocks and their order equal Megatron-LM's
(`build_blocks_mapping`). Which sentence of a block is the query depends on (seed, sample number);
Megatron-LM draws it from a generator that all samples share, and could not resume a run.
"""

import dataclasses

import numpy as np

from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.corpus.stored import cached, digest
from maxmeg.data.masked.sentences import (
    MAX_SENTENCE,
    ONE_EPOCH,
    SentenceDataset,
    SentenceOrder,
    order_of,
    shuffled_rows,
)
from maxmeg.data.opening import Opening
from maxmeg.data.retrieval.rows import (
    Lengths,
    TextEncoder,
    empty_rows,
    fill_row,
    lengths_of,
    title_room,
)
from maxmeg.data.samples.dataset import Record, identify
from maxmeg.data.samples.sampling import Batch, split_range

FEWEST = 2  # sentences of a block: one of them may be taken away


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Rows [N, 3] of blocks of whole sentences: first sentence, end, number of the document.

    lengths: tokens of every sentence of the corpus. bounds: first sentence of each document, and
    the end of the last. rooms: tokens at which a block of each document ends. first: number of the
    first document.
    """

    lengths: np.ndarray
    bounds: np.ndarray
    rooms: np.ndarray
    first: int = 0

    def epoch(self) -> np.ndarray:
        """The blocks in reading order, int64. Left out are documents of one sentence, or with one
        above MAX_SENTENCE tokens. ValueError if no document is left."""
        rows, origin = [], int(self.bounds[0])
        lengths = np.asarray(self.lengths[origin : int(self.bounds[-1])], np.int64)
        totals = np.concatenate([[0], np.cumsum(lengths)])
        long = np.concatenate([[0], np.cumsum(lengths > MAX_SENTENCE)])
        begins, ends = self.bounds[:-1] - origin, self.bounds[1:] - origin
        usable = (ends - begins >= FEWEST) & (long[begins] == long[ends])
        for document in np.flatnonzero(usable).tolist():
            start, last = int(begins[document]), int(ends[document])
            sums, room = totals[start : last + 1], int(self.rooms[document])
            while start < last:
                full = last - len(sums) + 1 + np.searchsorted(sums, totals[start] + room)
                end = max(int(full), start + FEWEST)
                end = last if last - end < FEWEST else end
                rows.append((origin + start, origin + end, self.first + document))
                start = end
        if not rows:
            raise ValueError(
                f"no document of {len(begins)} has {FEWEST} sentences or more, none above "
                f"{MAX_SENTENCE} tokens: was the corpus prepared with --split_sentences?"
            )
        return np.array(rows, np.int64)

    def rows(self, order: SentenceOrder) -> np.ndarray:
        """Shuffled blocks of whole epochs, at least as many as the order has samples."""

        def make() -> dict[str, np.ndarray]:
            epoch = self.epoch()
            epochs = -(-max(order.num_samples or 1, 1) // len(epoch))
            return {"rows": np.tile(epoch, (epochs, 1))[shuffled(epochs * len(epoch))]}

        def shuffled(count: int) -> np.ndarray:
            return shuffled_rows(count, order.seed + 1)

        sizes = self.lengths[int(self.bounds[0]) : int(self.bounds[-1])]
        name = digest(1, order.seed, order.num_samples, self.first, self.bounds, self.rooms, sizes)
        return cached(order.cache_dir, f"blocks-{name}", ("rows",), make)["rows"]


class IctDataset(SentenceDataset):
    """Batches of one split (its weights, and its number as in SPLITS) of a corpus with one sequence
    a sentence.

    titles: a corpus with a title for each document of `corpus`; None: none. query_in_block:
    fraction of samples whose block keeps its query.
    """

    def __init__(
        self,
        corpus: IndexedDataset,
        part: tuple[str, int],
        lengths: Lengths,
        encoder: TextEncoder,
        titles: IndexedDataset | None = None,
        query_in_block: float = 0.1,
        order: SentenceOrder = ONE_EPOCH,
    ) -> None:
        if titles is not None and len(titles) != corpus.num_documents:
            raise ValueError(
                f"{titles.prefix} has {len(titles)} titles for {corpus.num_documents} documents of "
                f"{corpus.prefix}: data.titles must have one for each"
            )
        self.titles, self._encode, self._lengths = titles, encoder, lengths
        self._query_in_block = query_in_block
        self.sequence_length, self.vocab_size = lengths.row, encoder.vocab_size
        split, split_index = part

        def blocks(sizes: np.ndarray, bounds: np.ndarray) -> Blocks:
            first, end = split_range(*part, corpus.num_documents)
            of_titles = 0 if titles is None else titles.lengths[first:end]
            title_lengths = np.minimum(of_titles, title_room(lengths.text))
            rooms = lengths.text - 3 - np.broadcast_to(title_lengths, end - first)
            return Blocks(sizes, bounds, rooms, first)

        super().__init__(corpus, split, split_index, blocks, order)

    @property
    def description(self) -> Record:
        titles = [] if self.titles is None else identify([self.titles], [(0, len(self.titles))])
        fields = {"order": "blocks", "text_length": self._lengths.text, "titles": titles}
        return {**super().description, **fields}

    def batch(self, indices: np.ndarray) -> Batch:
        """The samples with these numbers, any >= 0, as from `empty_rows`."""
        batch = empty_rows(len(indices), self._lengths, 1)
        random = np.random.RandomState(0)
        for row, n in enumerate(np.asarray(indices).tolist()):
            sentences, document = self.sentences(n, random)
            chosen = int(random.randint(0, len(sentences)))
            is_kept = random.random() < self._query_in_block
            query = sentences[chosen] if is_kept else sentences.pop(chosen)
            query = self._encode(query, self._lengths.query)
            fill_row(batch, row, [query, self.text(sentences, document)])
        self._encode.check(batch["tokens"], f"{self.corpus.prefix}.bin")
        return batch

    def text(self, sentences: list[np.ndarray], document: int) -> np.ndarray:
        """The tokens of a block, behind the title of its document."""
        title = None if self.titles is None else self.titles.get(document)
        return self._encode(np.concatenate(sentences), self._lengths.text, title)


def open_blocks(opening: Opening) -> IctDataset | None:
    """The samples of a split of one corpus of sentences; None where it may be left out."""
    if (corpus := opening.only_corpus()) is None:
        return None
    config, split = opening.config, (opening.split, opening.index)
    titles = opening.corpus(config.titles) if config.titles else None
    encoder = TextEncoder.of(opening.tokenizer, opening.num_ids)
    rest = titles, config.query_in_block, order_of(opening)
    return IctDataset(corpus, split, lengths_of(config), encoder, *rest)
