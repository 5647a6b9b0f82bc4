"""Memory and time of the output projection with cross entropy, for each backend of the op."""

import dataclasses
import functools

from maxmeg.config.schema import LossBackend
from maxmeg.ops.backend import Device
from maxmeg.ops.cross_entropy.call import choice
from maxmeg.ops.cross_entropy.mosaic import chunk_words
from maxmeg.ops.cross_entropy.tiled import TILES
from maxmeg.ops.cross_entropy.xla import multiplies_once

FLOAT32 = 4


@dataclasses.dataclass(frozen=True)
class Head:
    """The loss of T tokens (a microbatch on a device) over v rows of the output weight [v, D] of e
    bytes an element. chunk: number of tokens in a chunk of backend xla."""

    tokens: int
    width: int
    words: int
    itemsize: int
    chunk: int
    named: LossBackend
    smoothed: bool
    capped: bool

    @functools.cached_property
    def backend(self) -> str:
        """The backend that the op chooses on a GPU."""
        sizes = (self.tokens, self.words, self.chunk)
        return choice(self.named.value, *sizes, Device("cuda"))

    @property
    def blocks(self) -> tuple[int, int]:
        """(number of blocks, tokens of each): blocks of tokens whose sums share collectives."""
        if self.backend == "mosaic":
            return 1, self.tokens
        if self.backend == "tiled":
            blocks = TILES.blocks(self.tokens, self.products)
            return blocks.count, blocks.size
        count = -(-self.tokens // self.chunk)
        return count, -(-self.tokens // count)

    @property
    def once(self) -> bool:
        """Whether backend xla makes the weight's gradient in one product."""
        return multiplies_once(self.tokens, self.width, self.itemsize)

    @property
    def products(self) -> int:
        """Number of matrix products over all tokens and vocabulary rows."""
        if self.backend == "tiled":
            return 5 if self.smoothed and self.capped else 4
        return 4 if self.backend == "mosaic" else 3

    @property
    def temporaries(self) -> int:
        """Bytes of temporaries beside the weight, the hidden state and both gradients.

        xla, c tokens at a time: logits in float32, 4 c v, and their gradient for all tokens, e T v,
        or for a chunk, e c v, and the weight's gradient accumulated in float32, 4 v D. tiled, the
        larger of forward and backward, with c tokens and n rows at a time: logits and their
        gradient, (4 + e) c n, a copy of the rows, e n D; in forward one or two float32 products,
        8 c D each; in backward the rows' gradient, e n D. mosaic, n rows at a time: the logits'
        gradient, e T n, a copy of the rows, e n D, and the hidden state's gradient accumulated in
        float32, 4 T D.
        """
        e, D, T, v = self.itemsize, self.width, self.tokens, self.words
        if self.backend == "xla":
            c = self.blocks[1]
            gradients = e * T * v if self.once else e * c * v + FLOAT32 * v * D
            return FLOAT32 * c * v + gradients
        if self.backend == "mosaic":
            words = chunk_words(T, v)
            return e * words * (T + D) + FLOAT32 * T * D
        c, n = self.blocks[1], min(v, TILES.words)
        forward = (FLOAT32 + e) * c * n + e * n * D + 2 * (self.products - 3) * FLOAT32 * c * D
        c, n = min(T, TILES.backward_tokens), min(v, TILES.backward_words)
        return max(forward, (FLOAT32 + e) * c * n + 2 * e * n * D)

    @property
    def streamed(self) -> float:
        """Bytes read and written beyond reading each product's operands once.

        xla: 18 per logit, and unless `once` the weight's float32 gradient read and written per
        chunk. tiled, whose logits fit in the L2 cache: in forward a copy of the weight per block of
        tokens, e D v, and the float32 product of the tokens read and written per chunk of rows.
        mosaic: the logits' gradient written once and read twice, 3 e per logit, and the tokens'
        product three times per chunk.
        """
        e, D, T, v = self.itemsize, self.width, self.tokens, self.words
        if self.backend == "xla":
            return 18 * T * v + (0 if self.once else 2 * FLOAT32 * D * v * self.blocks[0])
        if self.backend == "mosaic":
            return 3 * e * T * v + 3 * FLOAT32 * T * D * (v / chunk_words(T, v))
        copies = e * D * v * self.blocks[0]
        return copies + 2 * FLOAT32 * T * D * (v / min(v, TILES.words))
