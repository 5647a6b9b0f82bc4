"""Pairs of an image and a text in Megatron-LM's multimodal .bin/.idx files.

A document is two sequences: the text's ids (mode 0), and the image's file as it is (mode 1), as
int32 words behind a first one that says how many bytes of the last are filled up.
"""

import dataclasses
import io
import warnings

import numpy as np

from maxmeg.data.indexed import IndexedDataset
from maxmeg.data.packing import Document, fill_rows
from maxmeg.data.sampling import Permutation, split_range

TEXT, IMAGE = 0, 1  # modes
WORD = np.dtype("<i4")
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
MAX_PIXELS = 2**26
_ROWS = 5  # key of their order, beside those of sampling, packing and preferences

Batch = dict[str, np.ndarray]


def image_words(data: bytes) -> np.ndarray:
    """An image's file as a sequence, int32."""
    missing = -len(data) % WORD.itemsize
    words = np.frombuffer(data + bytes(missing), WORD)
    return np.concatenate([np.array([missing], WORD), words])


def image_bytes(words: np.ndarray) -> bytes:
    """What `image_words` was given; ValueError for words that it cannot have made."""
    if len(words) < 2 or not 0 <= words[0] < WORD.itemsize:
        raise ValueError(f"{words[:4].tolist()} is not how a sequence of an image begins")
    data = np.ascontiguousarray(words[1:], WORD).tobytes()
    return data[: len(data) - int(words[0])]


def decode_image(data: bytes, size: tuple[int, int] | None = None) -> np.ndarray:
    """Pixels of an image's file, uint8 [height, width, 3], scaled to `size` where it is given."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it thinks of an image's metadata and its size
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise ValueError(
                        f"{image.width} x {image.height} pixels are more than {MAX_PIXELS}"
                    )
                image = image.convert("RGB")
                if size is not None and image.size != size[::-1]:
                    image = image.resize((size[1], size[0]), Image.Resampling.BICUBIC)
                return np.array(image, np.uint8)
    except Exception as error:  # a decoder can raise whatever Python can
        raise ValueError(f"an image of {len(data)} bytes cannot be decoded: {error}") from None


@dataclasses.dataclass(frozen=True)
class ImageTokens:
    """Ids that stand for an image, and what ends and fills a text."""

    placeholder: int
    per_image: int  # placeholders in the place of one
    eod: int
    pad: int
    vocab_size: int


class ImageTextDataset:
    """Batches of one split (0 train, 1 validation, 2 test) of a corpus of pairs.

    The image's placeholders stand where the text has one, else before it; there is no loss on
    them. What is longer than a row is cut at its end. Images are decoded when they are asked for,
    and scaled to `size` (height, width).
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
        part = (corpus, split, split_index)
        self._arguments = (*part, sequence_length, size, tokens, seed)
        _check(corpus)
        self._begin, end = split_range(split, split_index, corpus.num_documents)
        if self._begin == end:
            raise ValueError(
                f"split={split!r} leaves none of {corpus.num_documents} pairs of {corpus.prefix} "
                f"for split {split_index}: give it more weight"
            )
        if not 1 <= tokens.per_image < sequence_length:
            raise ValueError(
                f"{tokens.per_image} tokens an image leave no room for text in sequence_length="
                f"{sequence_length}: raise it"
            )
        if not 0 <= tokens.placeholder < tokens.vocab_size:
            raise ValueError(
                f"the placeholder {tokens.placeholder} is not in the vocabulary [0, "
                f"{tokens.vocab_size})"
            )
        self.corpus, self.samples_per_epoch = corpus, end - self._begin
        self.sequence_length, self.vocab_size = sequence_length, tokens.vocab_size
        self._size, self._tokens, self._seed = size, tokens, seed
        self._shuffle = split_index == 0
        lengths = corpus.lengths[2 * self._begin : 2 * end : 2] + np.int64(tokens.per_image - 1)
        self.num_tokens = int(np.minimum(lengths, sequence_length).sum())

    def __reduce__(self) -> tuple:
        return ImageTextDataset, self._arguments

    def image(self, n: int) -> bytes:
        """The image's file of sample n."""
        return image_bytes(self.corpus.get(2 * self._pair(n) + 1))

    def batch(self, indices: np.ndarray) -> Batch:
        """Samples by number, any >= 0: what `fill_rows` gives, [len(indices), sequence_length],
        and images, uint8 [len(indices), height, width, 3]."""
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
        """The document of sample n; those of training come in another order each epoch."""
        if n < 0:
            raise ValueError(f"sample {n} is negative")
        epoch, place = divmod(n, self.samples_per_epoch)
        if self._shuffle:
            order = Permutation(self.samples_per_epoch, self._seed, epoch, _ROWS)
            place = int(order(np.array([place]))[0])
        return self._begin + place

    def _text(self, pair: int) -> np.ndarray:
        """The ids of a pair with its image's placeholders, whole."""
        tokens, text = self._tokens, self.corpus.get(2 * pair)
        where = f"{self.corpus.prefix}.bin, document {pair}"
        if text.size and not 0 <= text.min() <= text.max() < tokens.vocab_size:
            raise ValueError(
                f"{where}: ids from {text.min()} to {text.max()} are not in the vocabulary [0, "
                f"{tokens.vocab_size}): the corpus was made with another tokenizer; name that one"
            )
        # Texts may be filled up with ends of documents, of which the first alone ends one.
        ends = np.flatnonzero(text[::-1] != tokens.eod)
        used = len(text) - (int(ends[0]) if len(ends) else len(text))
        text = text[: used + 1]
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


def _check(corpus: IndexedDataset) -> None:
    """ValueError unless every document is a text and an image."""
    if corpus.modes is None:
        raise ValueError(
            f"{corpus.prefix}.idx has no modes, it holds text alone: prepare pairs with `python -m "
            "maxmeg.preprocess image-text`"
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
        found = modes[first : first + size].tolist()
        if found != [TEXT, IMAGE]:
            raise ValueError(
                f"{corpus.prefix}.idx, document {document}: the modes of its sequences are "
                f"{found[:8]}, not {[TEXT, IMAGE]}, a text and an image"
            )
