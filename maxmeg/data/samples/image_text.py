"""Pairs of an image and a text in Megatron-LM's multimodal .bin/.idx files.

A document has two sequences: the token ids of the text (mode 0), and the bytes of the image file
(mode 1) as int32 words. The first word is the number of padding bytes in the last word.
"""

import dataclasses
import io
import warnings

import numpy as np

from maxmeg.data.corpus.indexed import IndexedDataset, check_vocabulary
from maxmeg.data.opening import Opening
from maxmeg.data.samples.dataset import EpochRows, Record, identify
from maxmeg.data.samples.packing import Document, fill_rows
from maxmeg.data.samples.sampling import Batch, EpochOrder, nonempty_range
from maxmeg.data.tokenizers.tokenizer import padding_of
from maxmeg.data.workers import RebuiltInWorkers

TEXT, IMAGE = 0, 1  # modes of sequences
WORD = np.dtype("<i4")
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
MAX_PIXELS = 2**26
_ROWS = 5  # key of the permutation; sampling, packing and preferences have others


def image_words(data: bytes) -> np.ndarray:
    """An image file as an int32 sequence."""
    missing = -len(data) % WORD.itemsize
    words = np.frombuffer(data + bytes(missing), WORD)
    return np.concatenate([np.array([missing], WORD), words])


def image_bytes(words: np.ndarray) -> bytes:
    """The inverse of `image_words`; ValueError for an invalid first word."""
    if len(words) < 2 or not 0 <= words[0] < WORD.itemsize:
        raise ValueError(f"{words[:4].tolist()} is not the beginning of an image's sequence")
    data = np.ascontiguousarray(words[1:], WORD).tobytes()
    return data[: len(data) - int(words[0])]


def decode_image(data: bytes, size: tuple[int, int] | None = None) -> np.ndarray:
    """The pixels of an image file, uint8 [height, width, 3], scaled to `size` (height, width) if
    given."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about metadata and large images
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise ValueError(
                        f"{image.width} x {image.height} pixels are more than {MAX_PIXELS}"
                    )
                image = image.convert("RGB")
                if size is not None and image.size != size[::-1]:
                    image = image.resize((size[1], size[0]), Image.Resampling.BICUBIC)
                return np.array(image, np.uint8)
    except Exception as error:  # a decoder can raise any exception
        raise ValueError(f"an image of {len(data)} bytes cannot be decoded: {error}") from None


@dataclasses.dataclass(frozen=True)
class ImageTokens:
    """The token ids that stand for an image, end a text, and pad it."""

    placeholder: int
    per_image: int  # placeholders per image
    eod: int
    pad: int
    vocab_size: int


class ImageTextDataset(EpochRows, RebuiltInWorkers):
    """Batches of one split (0 train, 1 validation, 2 test) of a corpus of pairs.

    The placeholders of the image replace the text's placeholder, or precede a text without one;
    they have no loss. Longer rows are truncated. Images are decoded on use, and scaled to `size`
    (height, width).
    """

    def __init__(
        self,
        corpus: IndexedDataset,
        split: str,
        split_index: int,
        sequence_length: int,
        size: tuple[int, int],
        tokens: ImageTokens,
        seed: int = 0,
    ) -> None:
        _check(corpus)
        pairs = f"pairs of {corpus.prefix}"
        self._begin, end = nonempty_range(split, split_index, corpus.num_documents, pairs)
        if not 1 <= tokens.per_image < sequence_length:
            raise ValueError(
                f"{tokens.per_image} tokens per image leave no room for text in sequence_length="
                f"{sequence_length}: raise it"
            )
        if not 0 <= tokens.placeholder < tokens.vocab_size:
            raise ValueError(
                f"the placeholder {tokens.placeholder} is not in the vocabulary [0, "
                f"{tokens.vocab_size})"
            )
        self.corpus, self._end, self._seed = corpus, end, seed
        self.sequence_length, self.vocab_size = sequence_length, tokens.vocab_size
        self._size, self._tokens = size, tokens
        self._order = EpochOrder(end - self._begin, seed, _ROWS, split_index == 0)
        lengths = corpus.lengths[2 * self._begin : 2 * end : 2] + np.int64(tokens.per_image - 1)
        self.num_tokens = int(np.minimum(lengths, sequence_length).sum())

    @property
    def description(self) -> Record:
        tokens = self._tokens
        return {
            "order": "image_text",
            "corpora": identify([self.corpus], [(2 * self._begin, 2 * self._end)]),
            "sequence_length": self.sequence_length,
            "images": [*self._size, tokens.placeholder, tokens.per_image],
            "seed": self._seed,
        }

    def image(self, n: int) -> bytes:
        """The image file of sample n."""
        return image_bytes(self.corpus.get(2 * self._pair(n) + 1))

    def batch(self, indices: np.ndarray) -> Batch:
        """The samples with these numbers, any >= 0: the arrays of `fill_rows`, [len(indices),
        sequence_length], and images, uint8 [len(indices), height, width, 3]."""
        numbers = np.asarray(indices).tolist()
        rows = [[self._document(self._pair(n))] for n in numbers]
        batch = fill_rows(rows, self.sequence_length, self._tokens.pad)
        batch["images"] = np.zeros((len(numbers), *self._size, 3), np.uint8)
        for row, n in enumerate(numbers):
            try:
                batch["images"][row] = decode_image(self.image(n), self._size)
            except ValueError as error:
                place = f"{self.corpus.prefix}.bin, document {self._pair(n)}"
                raise ValueError(f"{place}: {error}") from None
        return batch

    def _pair(self, n: int) -> int:
        """The document of sample n."""
        return self._begin + int(self._order(np.array([n]))[0])

    def _text(self, pair: int) -> np.ndarray:
        """The token ids of a pair, with the placeholders of its image, before truncation."""
        tokens, text = self._tokens, self.corpus.get(2 * pair)
        where = f"{self.corpus.prefix}.bin, document {pair}"
        check_vocabulary(text, tokens.vocab_size, where)
        # Of several end-of-document tokens at the end, all but the first are padding.
        ends = np.flatnonzero(text[::-1] != tokens.eod)
        length = len(text) - (int(ends[0]) if len(ends) else len(text))
        text = text[: length + 1]
        (places,) = np.nonzero(text == tokens.placeholder)
        if len(places) > 1:
            raise ValueError(
                f"{where}: its text has {len(places)} placeholders (id {tokens.placeholder}) for "
                "one image: leave one"
            )
        if len(text) == len(places):
            raise ValueError(f"{where}: its image has no text: leave it out")
        at = int(places[0]) if len(places) else 0
        image = np.full(tokens.per_image, tokens.placeholder)
        return np.concatenate([text[:at], image, text[at + len(places) :]])

    def _document(self, pair: int) -> Document:
        text = self._text(pair)[: self.sequence_length + 1]
        return text, text != self._tokens.placeholder


def open_image_text(opening: Opening) -> ImageTextDataset | None:
    """The pairs of a split of one corpus; None where it may be left out."""
    if (corpus := opening.only_corpus(has_ids=False)) is None:
        return None
    config, tokenizer, size = opening.config, opening.tokenizer, opening.num_ids
    if (placeholder := tokenizer.token_id(config.image_token)) is None:
        raise ValueError(
            f"data.image_token={config.image_token!r} is no token of data.tokenizer="
            f"{tokenizer.spec}: name one that is, or add it (?special_tokens="
            f"{config.image_token} after the tokenizer, also when the pairs are prepared)"
        )
    height, width = config.image_size
    pad = padding_of(tokenizer, size)
    tokens = ImageTokens(placeholder, config.tokens_per_image, tokenizer.eod, pad, size)
    split = opening.split, opening.index, config.sequence_length
    return ImageTextDataset(corpus, *split, (height, width), tokens, opening.seed)


def _check(corpus: IndexedDataset) -> None:
    """ValueError unless every document is a text and an image."""
    if corpus.modes is None:
        raise ValueError(
            f"{corpus.prefix}.idx has no modes, it holds text only: prepare pairs with "
            "`maxmeg preprocess image-text`"
        )
    if corpus.dtype != WORD:
        raise ValueError(
            f"{corpus.prefix}.bin holds {corpus.dtype}, but images are stored as int32"
        )
    sizes = np.diff(corpus.document_indices)
    modes = np.asarray(corpus.modes)
    if (sizes == 2).all() and (modes[::2] == TEXT).all() and (modes[1::2] == IMAGE).all():
        return
    for document, size in enumerate(sizes.tolist()):
        first = int(corpus.document_indices[document])
        document_modes = modes[first : first + size].tolist()
        if document_modes != [TEXT, IMAGE]:
            raise ValueError(
                f"{corpus.prefix}.idx, document {document}: the modes of its sequences are "
                f"{document_modes[:8]}, not {[TEXT, IMAGE]}, a text and an image"
            )
