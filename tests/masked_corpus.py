"""A corpus with a sequence a sentence, and a vocabulary of words and their further pieces."""

from pathlib import Path

import numpy as np

from maxmeg.data.corpus.indexed import IndexedDataset, IndexedWriter
from maxmeg.data.masked.masking import Vocabulary

SIZE, CLS, SEP, MASK, BOS, EOS = 60, 1, 2, 3, 4, 5
SENTINELS = (54, 55, 56, 57, 58, 59)
LENGTHS = (3, 4, 2, 5, 6, 1, 3, 2, 9, 8, 7)
ENDS = (4, 6, 8, 11)  # of documents, in sentences


def vocabulary(pad: int = 0) -> Vocabulary:
    continues = np.arange(SIZE) % 3 == 1
    continues[:6] = False
    return Vocabulary(SIZE, continues, pad, CLS, SEP, MASK, BOS, EOS, SENTINELS)


def corpus(folder: Path) -> IndexedDataset:
    prefix, at, first = str(folder / "sentences"), 0, 0
    with IndexedWriter(prefix, SIZE) as writer:
        for end in ENDS:
            lengths = LENGTHS[first:end]
            tokens = 6 + np.arange(at, at + sum(lengths)) * 7 % 48
            writer.add_document(tokens, lengths)
            at, first = at + sum(lengths), end
    return IndexedDataset(prefix)
