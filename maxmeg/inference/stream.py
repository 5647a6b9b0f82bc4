"""Generate one text token by token, for a reader who waits."""

import functools
import itertools
import operator
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from maxmeg.inference.decode import (
    Progress,
    Prompts,
    Request,
    advance,
    check_causal,
    check_ids,
    check_length,
    jitted,
    pad,
    rotary_switch,
    start,
    text_after,
)
from maxmeg.inference.load import Trained
from maxmeg.models.lm import LM
from maxmeg.parallel.mesh import MESH_AXES

SHORTEST_CACHE = 256  # tokens; caches have this length times a power of two
_INCOMPLETE = "\ufffd"  # decoded from the first bytes of a character
# A device's cache has a leading dimension of one: together they are an array over all devices.
_SPECS = Progress(*(P(),) * (len(Progress._fields) - 1), P(MESH_AXES))  # pyright: ignore


class Stream:
    """Yields the continuation of a prompt in pieces, equal together to what `Writer` generates.

    One program is compiled per padded length of the prompt and length of the cache, and one per
    length of the cache that generates the next token. Every token reads all weights: give them in
    the compute dtype.
    """

    def __init__(self, trained: Trained, request: Request) -> None:
        check_causal(trained.config.model)
        self.trained, self.request = trained, request
        self._starts: dict[int, Callable] = {}
        self._advance = self._jitted(self._next, (_SPECS,), donate=(1,))

    def __call__(
        self, prompt: np.ndarray, seed: int, num_tokens: int | None = None
    ) -> Iterator[str]:
        """num_tokens: most new tokens, default the request's. ValueError as `check_length`."""
        trained, count = self.trained, num_tokens or self.request.num_tokens
        check_length(len(prompt), count, trained.config.model.max_position)
        check_ids(prompt, trained.config.model.vocab_size)
        return self._pieces(prompt, seed, count)

    def _pieces(self, prompt: np.ndarray, seed: int, count: int) -> Iterator[str]:
        trained = self.trained
        prompts, length = pad([prompt], [0], 1), SHORTEST_CACHE
        while length < prompts.ids_BL.shape[1] + count:
            length *= 2
        if length not in self._starts:
            self._starts[length] = self._jitted(functools.partial(self._first, length), P())
        key = jax.random.key_data(jax.random.key(seed))
        progress = self._starts[length](trained.model, prompts, key)
        shown = ""
        while True:
            is_last = bool(progress.ended_B[0]) or int(progress.step) == count
            end = len(prompt) + int(progress.counts_B[0])
            text = text_after(trained, prompt, np.asarray(progress.ids_BM)[0, len(prompt) : end])
            text = text if is_last else text.rstrip(_INCOMPLETE)
            same = sum(itertools.takewhile(bool, map(operator.eq, shown, text)))
            yield text[same:]
            if is_last:
                return
            shown = text
            progress = self._advance(trained.model, progress)

    def _jitted(self, function: Callable, arguments, donate: tuple[int, ...] = ()) -> Callable:
        trained = self.trained
        where = (trained.config, trained.mesh, trained.model)
        return jitted(function, *where, arguments, _SPECS, donate)

    def _first(self, length: int, model: LM, prompts: Prompts, raw_key: jax.Array) -> Progress:
        key = jax.random.wrap_key_data(raw_key)
        return with_device_axis(start(model, prompts, key, self.request, length))

    def _next(self, model: LM, progress: Progress) -> Progress:
        cache = jax.tree.map(lambda array: array[0], progress.cache)
        switch = rotary_switch(self.trained.config.model)
        progress = advance(model, progress._replace(cache=cache), self.request, switch)
        return with_device_axis(progress)


def with_device_axis(progress: Progress) -> Progress:
    return progress._replace(cache=jax.tree.map(lambda array: array[None], progress.cache))
