"""T5's samples: spans of a text are replaced by sentinel tokens, and the decoder predicts the
spans.

For the same files, seed and number of samples, `T5Dataset` equals Megatron-LM's
T5MaskedWordPieceDataset.
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

SPANS = Masking(max_ngram=10, geometric=True)  # Megatron-LM's settings for T5


class T5Dataset(SentenceDataset):
    """Batches of one split (0 train, 1 validation, 2 test) of a corpus with one sequence per
    sentence.

    lengths: sequence lengths of the encoder and of the decoder.
    """

    def __init__(
        self,
        corpus: IndexedDataset,
        split: str,
        split_index: int,
        lengths: tuple[int, int],
        vocabulary: Vocabulary,
        masking: Masking = SPANS,
        order: SentenceOrder = ONE_EPOCH,
    ) -> None:
        self._bos, self._eos, _ = vocabulary.need("bos", "eos", "sentinels")
        samples = sentence_samples(lengths[0] - 2, 1, masking.short_probability)
        super().__init__(corpus, split, split_index, samples, order)
        self.source_length, self.sequence_length = lengths
        self.vocab_size = vocabulary.size
        self._vocabulary, self._masking = vocabulary, masking

    def batch(self, indices: np.ndarray) -> Batch:
        """The samples with these numbers, any >= 0; int32 except loss_mask (float32).

        encoder_tokens and encoder_segment_ids (1; 0 is padding) are [len(indices),
        source_length]; tokens (the decoder's input), targets, loss_mask, positions and segment_ids
        are [len(indices), sequence_length].
        """
        batch = empty_batch(len(indices), self.sequence_length, self.source_length)
        batch["positions"][:] = np.arange(self.sequence_length)
        random = np.random.RandomState(0)
        for row, n in enumerate(np.asarray(indices).tolist()):
            encoder, spans = self._corrupt(n, random)
            text = np.concatenate([[self._bos], spans])
            pad = self._vocabulary.pad
            for name, values in (("encoder_", encoder), ("", text)):
                batch[f"{name}tokens"][row, : len(values)] = np.where(values == pad, 0, values)
                batch[f"{name}segment_ids"][row, : len(values)] = values != pad
            targets = np.concatenate([spans, [self._eos]])
            batch["targets"][row, : len(text)] = np.where(targets == pad, 0, targets)
            batch["loss_mask"][row, : len(text)] = 1
        return batch

    def _corrupt(self, n: int, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
        """The text with a sentinel in place of each span; each sentinel followed by its span."""
        sentences, target = self.sentences(n, random)
        text = np.concatenate(sentences)[:target].astype(np.int32)
        self._vocabulary.check(text, f"{self.corpus.prefix}.bin")
        spans = sorted(masked_spans(text, target, self._masking, self._vocabulary, random))
        self._check_room(n, spans)
        encoder, decoder, at = [], [np.empty(0, np.int32)], 0
        for sentinel, span in zip(self._vocabulary.sentinels, spans, strict=False):
            encoder += [text[at : span[0]], [sentinel]]
            decoder += [[sentinel], text[span]]
            at = span[-1] + 1
        return np.concatenate([*encoder, text[at:]]), np.concatenate(decoder)

    def _check_room(self, n: int, spans: list[list[int]]) -> None:
        have, num_tokens = len(self._vocabulary.sentinels), 1 + sum(1 + len(span) for span in spans)
        if len(spans) > have:
            raise ValueError(
                f"sample {n} has {len(spans)} spans, but the tokenizer {have} sentinels: mask less "
                "(probability), longer spans (max_ngram), or add sentinels"
            )
        if num_tokens > self.sequence_length:
            raise ValueError(
                f"sample {n} needs {num_tokens} tokens of the decoder, which has "
                f"{self.sequence_length} (data.sequence_length): make it longer, or mask less "
                "(probability)"
            )


def open_spans(opening: Opening) -> T5Dataset | None:
    """The samples of a split of one corpus of sentences; None where it may be left out."""
    if (corpus := opening.only_corpus()) is None:
        return None
    config, vocabulary = opening.config, Vocabulary.of(opening.tokenizer, opening.num_ids)
    lengths = config.source_tokens, config.sequence_length
    split = opening.split, opening.index
    return T5Dataset(corpus, *split, lengths, vocabulary, order=order_of(opening))
