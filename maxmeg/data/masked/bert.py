"""BERT's samples: masked tokens, and two segments whose order the model has to predict.

For the same files, seed and number of samples, `BertDataset` equals Megatron-LM's
BERTMaskedWordPieceDataset.
"""

import numpy as np

from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.masked.masking import Masking, Vocabulary, masked_spans
from maxmeg.data.masked.sentences import (
    ONE_EPOCH,
    SentenceDataset,
    SentenceOrder,
    order_of,
    sentence_samples,
)
from maxmeg.data.opening import Opening
from maxmeg.data.samples.sampling import Batch, empty_batch

WORDS = Masking()  # Megatron-LM's settings for BERT
_MASKED, _RANDOM = 0.8, 0.5  # share that becomes [MASK]; share of the rest that is kept


class BertDataset(SentenceDataset):
    """Batches of one split (0 train, 1 validation, 2 test) of a corpus with one sequence per
    sentence.

    has_pairs: two segments, [CLS] A [SEP] B [SEP], swapped in half of the samples; otherwise one
    segment. Megatron-LM's optional permutation of tokens is not implemented: it draws from a
    generator that all samples share, so a sample could not be reproduced by itself.
    """

    def __init__(
        self,
        corpus: IndexedDataset,
        split: str,
        split_index: int,
        sequence_length: int,
        vocabulary: Vocabulary,
        masking: Masking = WORDS,
        order: SentenceOrder = ONE_EPOCH,
        has_pairs: bool = True,
    ) -> None:
        self._cls, self._sep, self._mask = vocabulary.need("cls", "sep", "mask")
        fewest = 2 if has_pairs else 1
        samples = sentence_samples(sequence_length - 3, fewest, masking.short_probability)
        super().__init__(corpus, split, split_index, samples, order)
        self.sequence_length, self.vocab_size = sequence_length, vocabulary.size
        self._vocabulary, self._masking, self._has_pairs = vocabulary, masking, has_pairs

    def batch(self, indices: np.ndarray) -> Batch:
        """The samples with these numbers, any >= 0; arrays are [len(indices), sequence_length].

        tokens, targets (0 without a loss), token_types (0 for A, 1 for B), positions and
        segment_ids (1; 0 is padding) are int32, loss_mask float32; is_swapped is int32
        [len(indices)].
        """
        batch = empty_batch(len(indices), self.sequence_length, 0, "token_types")
        batch["positions"][:] = np.arange(self.sequence_length)
        batch["is_swapped"] = np.zeros(len(indices), np.int32)
        random = np.random.RandomState(0)
        for row, n in enumerate(np.asarray(indices).tolist()):
            sample = {name: values[row : row + 1] for name, values in batch.items()}
            self._fill(sample, n, random)
        return batch

    def _fill(self, sample: Batch, n: int, random: np.random.RandomState) -> None:
        sentences, target = self.sentences(n, random)
        first, second, is_swapped = self._segments(sentences, random)
        first, second = cut_ends(first, second, target, random)
        vocabulary = self._vocabulary
        parts = [[self._cls], first, [self._sep]]
        parts += [second, [self._sep]] if len(second) else []
        text = np.concatenate(parts).astype(np.int32)
        vocabulary.check(text, f"{self.corpus.prefix}.bin")
        masked = text.copy()

        def replace(position: int) -> None:
            if random.random() < _MASKED:
                masked[position] = self._mask
            elif random.random() >= _RANDOM:
                masked[position] = random.randint(0, vocabulary.size)

        spans = masked_spans(text, target, self._masking, vocabulary, random, replace)
        chosen = [position for span in spans for position in span]
        size = len(text)
        sample["tokens"][0, :size] = np.where(masked == vocabulary.pad, 0, masked)
        sample["segment_ids"][0, :size] = masked != vocabulary.pad
        sample["token_types"][0, len(first) + 2 : size] = 1
        sample["targets"][0, chosen] = np.where(text == vocabulary.pad, 0, text)[chosen]
        sample["loss_mask"][0, chosen] = 1
        sample["is_swapped"][0] = is_swapped

    def _segments(
        self, sentences: list[np.ndarray], random: np.random.RandomState
    ) -> tuple[np.ndarray, np.ndarray, bool]:
        nothing = np.empty(0, np.int32)
        if not self._has_pairs:
            return np.concatenate(sentences), nothing, False
        pivot = int(random.randint(1, len(sentences))) if len(sentences) >= 3 else 1
        pair = np.concatenate(sentences[:pivot]), np.concatenate(sentences[pivot:])
        is_swapped = random.random() < 0.5
        first, second = pair[::-1] if is_swapped else pair
        return first, second, is_swapped


def cut_ends(
    first: np.ndarray, second: np.ndarray, target: int, random: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """Remove the tokens above `target`, one at a time from the longer segment, at a random end."""
    excess = len(first) + len(second) - target
    if excess <= 0:
        return first, second
    from_front = random.random(excess) < 0.5
    # The longer segment is cut until the lengths are equal, then the second and the first in turn.
    from_first = np.full(excess, len(first) > len(second))
    from_first[abs(len(first) - len(second)) :] = False
    from_first[abs(len(first) - len(second)) + 1 :: 2] = True
    cut = []
    for tokens, is_here in ((first, from_first), (second, ~from_first)):
        begin = int((is_here & from_front).sum())
        cut.append(tokens[begin : len(tokens) - int((is_here & ~from_front).sum())])
    return cut[0], cut[1]


def open_masked(opening: Opening) -> BertDataset | None:
    """The samples of a split of one corpus of sentences; None where it may be left out."""
    if (corpus := opening.only_corpus()) is None:
        return None
    config, vocabulary = opening.config, Vocabulary.of(opening.tokenizer, opening.num_ids)
    rest = {"order": order_of(opening), "has_pairs": config.sentence_pairs}
    split = opening.split, opening.index
    return BertDataset(corpus, *split, config.sequence_length, vocabulary, **rest)
