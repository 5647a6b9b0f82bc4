"""Megatron-LM's mock data: a corpus without files, for benchmarks and first runs."""

import numpy as np

from maxmeg.data.corpus.indexed import IndexedDataset

SPLIT = "1,1,1"
_DOCUMENTS, _LONGEST, _SEED = 100_000, 4096, 0


class MockCorpus(IndexedDataset):
    """Documents of tokens 1, 2, 3, ... (modulo the vocabulary) and an end; computed on demand."""

    def __init__(self, vocab_size: int, eod: int) -> None:
        self._arguments = vocab_size, eod
        random = np.random.default_rng(_SEED)
        self.lengths = random.integers(1, _LONGEST, _DOCUMENTS, dtype=np.int32)
        self.prefix, self.modes, self.weights = "mock data", None, None
        self.is_remote = False
        self.document_indices = np.arange(_DOCUMENTS + 1)
        ends = np.cumsum(self.lengths, dtype=np.int64)
        self.dtype = np.dtype("<i4")
        self._pointers = (ends - self.lengths) * self.dtype.itemsize
        self.tokens = _Counted(ends, vocab_size, eod)

    def __reduce__(self) -> tuple:
        return MockCorpus, self._arguments


class _Counted:
    """The tokens of a MockCorpus, computed slice by slice. ends: position of the end of each
    document."""

    def __init__(self, ends: np.ndarray, vocab_size: int, eod: int) -> None:
        self._ends, self._vocab_size, self._eod = ends, vocab_size, eod

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, where: slice) -> np.ndarray:
        begin, end, _ = where.indices(len(self))
        first, last = np.searchsorted(self._ends, (begin, max(begin, end - 1)), side="right")
        places = np.arange(begin, end)
        starts = self._ends[first - 1] if first else 0
        is_end = places == self._ends[first] - 1
        if first != last:
            document = np.searchsorted(self._ends, places, side="right")
            starts = np.where(document, self._ends[document - 1], 0)
            is_end = places == self._ends[document] - 1
        tokens = (places - starts + 1) % self._vocab_size
        return np.where(is_end, self._eod, tokens).astype(np.int32)
