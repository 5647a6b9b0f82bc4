"""What linear + cross entropy takes on a device, by formulas, for each backend of the op."""

import dataclasses

from maxmeg.config.schema import LossBackend
from maxmeg.ops.backend import Device
from maxmeg.ops.cross_entropy.call import choice
from maxmeg.ops.cross_entropy.mosaic import chunk_words
from maxmeg.ops.cross_entropy.tiled import TILES

FLOAT32 = 4


@dataclasses.dataclass(frozen=True)
class Head:
    """The loss of a microbatch of T tokens over v rows of the output weight, D wide, in e bytes.

    chunk: tokens, of backend xla.
    """

    tokens: int
    width: int
    words: int
    itemsize: int
    chunk: int
    named: LossBackend
    smoothed: bool
    capped: bool

    @property
    def backend(self) -> str:
        """On a GPU."""
        sizes = (self.tokens, self.words, self.chunk)
        return choice(self.named.value, *sizes, Device("cuda"))

    @property
    def blocks(self) -> tuple[int, int]:
        """(count, tokens of each): blocks of tokens whose sums are exchanged together."""
        if self.backend == "mosaic":
            return 1, self.tokens
        if self.backend == "tiled":
            blocks = TILES.blocks(self.tokens, self.products)
            return blocks.count, blocks.size
        count = -(-self.tokens // self.chunk)
        return count, -(-self.tokens // count)

    @property
    def products(self) -> int:
        """Matrix products over all tokens and words."""
        if self.backend == "tiled":
            return 5 if self.smoothed and self.capped else 4
        return 4 if self.backend == "mosaic" else 3

    @property
    def temporaries(self) -> int:
        """Bytes while it runs, beside the weight, the hidden state and both gradients.

        xla, c tokens at a time: logits in float32 and their gradient, (4 + e) c v, and the
        weight's gradient summed in float32, 4 v D. tiled, the larger of forward and backward:
        c tokens and n words at a time, logits and weights (4 + e) c n, the words' copy e n D, and
        in forward two float32 products of the tokens, 8 c D (twice that where it has two sums), in
        backward the words' gradient, e n D. mosaic, n words at a time: the logits' gradient, e T n,
        the words' copy, e n D, and the float32 sum for the tokens, 4 T D.
        """
        e, D, T, v = self.itemsize, self.width, self.tokens, self.words
        if self.backend == "xla":
            return (FLOAT32 + e) * self.blocks[1] * v + FLOAT32 * v * D
        if self.backend == "mosaic":
            words = chunk_words(T, v)
            return e * words * (T + D) + FLOAT32 * T * D
        c, n = self.blocks[1], min(v, TILES.words)
        forward = (FLOAT32 + e) * c * n + e * n * D + 2 * (self.products - 3) * FLOAT32 * c * D
        c, n = min(T, TILES.backward_tokens), min(v, TILES.backward_words)
        return max(forward, (FLOAT32 + e) * c * n + 2 * e * n * D)

    @property
    def streamed(self) -> float:
        """Bytes that go through memory beside what the products read once.

        xla: 18 a logit, and the weight's float32 gradient read and written a chunk. tiled, whose
        logits fit in the L2 cache: in forward the words copied a block of tokens, e D v, and the
        tokens' float32 product read and written a chunk of words. mosaic: the logits' gradient
        written once and read twice, 3 e a logit, and the tokens' products three times a chunk.
        """
        e, D, T, v = self.itemsize, self.width, self.tokens, self.words
        if self.backend == "xla":
            return 18 * T * v + 2 * FLOAT32 * D * v * self.blocks[0]
        if self.backend == "mosaic":
            return 3 * e * T * v + 3 * FLOAT32 * T * D * (v / chunk_words(T, v))
        copies = e * D * v * self.blocks[0]
        return copies + 2 * FLOAT32 * T * D * (v / min(v, TILES.words))
