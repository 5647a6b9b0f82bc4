"""Generation by RETRO: when a chunk of the text is complete, its neighbours are looked up.

There is no key/value cache: each new token takes a forward pass over the whole text.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from maxmeg.inference.load import Trained
from maxmeg.inference.programs import jitted, rows_of
from maxmeg.inference.requests import Reply, Request, check_ids, check_length, sampling_columns
from maxmeg.inference.sampling import Rows, Sampling, sample
from maxmeg.inference.text import Text
from maxmeg.layers.context import Context, Source
from maxmeg.models.lm import LM

# ids [N, m] of whole chunks to (ids [N, k * r] of their neighbours, whether each is a token)
Search = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


class Generator:
    """Generate from RETRO, with the interface of `inference.engine.Engine`.

    search: finds the neighbours of chunks; None: generate without neighbours. batch: largest number
    of texts at a time.
    """

    def __init__(self, trained: Trained, search: Search | None, batch: int) -> None:
        self.trained, self.model, self.batch = trained, trained.config.model, batch
        self.search, retro = search, self.model.retro
        self.chunk = retro.chunk_length
        self.neighbour_tokens = trained.config.data.num_neighbours * retro.neighbour_length
        function = functools.partial(next_tokens, max_position=self.model.max_position)
        self.program = jitted(function, trained.config, trained.mesh, trained.model)

    def check(self, prompt: np.ndarray, request: Request, where: str = "") -> None:
        """ValueError for a prompt that is empty, too long or has unknown tokens, and for options
        that only the engine has."""
        check_length(len(prompt), request.num_tokens, self.model.max_position, where)
        check_ids(np.asarray(prompt), self.model.vocab_size, where, self.trained.tokenizer)
        sampling = request.sampling
        plain = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        if request != Request(request.num_tokens, plain, request.ends, request.stops):
            raise ValueError(
                f"{where}{request}: RETRO generates with temperature, top_k, top_p, min_p, ends "
                "and stops alone: leave the rest out"
            )

    def generate(
        self, prompts: Sequence[np.ndarray], request: Request, seed: int = 0
    ) -> list[Reply]:
        """Return the replies to the prompts, in their order. ValueError as `check`."""
        for number, ids in enumerate(prompts, 1):
            where = f"prompt {number} of {len(prompts)}: " if len(prompts) > 1 else ""
            self.check(ids, request, where)
        replies = [
            Reply(tuple(map(int, ids)), request, seed, number) for number, ids in enumerate(prompts)
        ]
        for first in range(0, len(replies), self.batch):
            for _ in self._steps(replies[first : first + self.batch]):
                pass
        return replies

    def stream(self, prompt: np.ndarray, request: Request, seed: int = 0) -> Iterator[str]:
        """Yield the text after a prompt piece by piece. ValueError as `check`."""
        self.check(prompt, request)
        reply, length = Reply(tuple(map(int, prompt)), request, seed, 0), 0
        for _ in self._steps([reply]):
            yield reply.text[length:]
            length = len(reply.text)

    def _steps(self, replies: list[Reply]) -> Iterator[None]:
        """Generate the replies in place; yields after each step, which adds a token to each."""
        longest = max(len(reply.prompt) + reply.request.num_tokens for reply in replies)
        count = -(-longest // self.chunk)
        ids_BL = np.zeros((len(replies), count * self.chunk), np.int32)
        neighbours_BCS = np.zeros((len(replies), count, self.neighbour_tokens), np.int32)
        segments_BCS = np.zeros_like(neighbours_BCS)  # 0: no neighbour, also of incomplete chunks
        for row, reply in enumerate(replies):
            ids_BL[row, : len(reply.prompt)] = reply.prompt
        texts = [Text(self.trained.tokenizer, r.prompt, r.request.stops) for r in replies]
        complete_B = np.zeros(len(replies), int)  # chunks whose neighbours are known
        while not all(reply.reason for reply in replies):
            lengths_B = np.array([len(r.prompt) + len(r.tokens) for r in replies], np.int32)
            numbers = np.arange(count)
            is_new_BC = numbers < lengths_B[:, None] // self.chunk
            is_new_BC &= numbers >= complete_B[:, None]
            if self.search is not None and is_new_BC.any():
                chunks_NM = ids_BL.reshape(-1, count, self.chunk)[is_new_BC]
                neighbours_BCS[is_new_BC], segments_BCS[is_new_BC] = self.search(chunks_NM)
            complete_B = lengths_B // self.chunk
            sources = (array.reshape(len(replies), -1) for array in (neighbours_BCS, segments_BCS))
            columns = [sampling_columns(reply, len(reply.tokens)) for reply in replies]
            rows = rows_of({name: np.array([c[name] for c in columns]) for name in columns[0]})
            arrays = (ids_BL, *sources, lengths_B, rows)
            outputs = self.program(self.trained.model, *jax.tree.map(jnp.asarray, arrays))
            tokens, logprobs = (np.asarray(array).tolist() for array in outputs)
            for row, reply in enumerate(replies):
                if not reply.reason:
                    ids_BL[row, lengths_B[row]] = tokens[row]
                    add(reply, texts[row], tokens[row], logprobs[row])
            yield


def add(reply: Reply, text: Text, token: int, logprob: float) -> None:
    """Append a token to a reply, and set its reason if it ends here."""
    request, is_stopped = reply.request, False
    if token in request.ends:
        reply.reason = "stop"
    else:
        reply.tokens.append(token)
        reply.logprobs.append(logprob)
        is_stopped = text.add(token)
    if is_stopped or len(reply.tokens) == request.num_tokens:
        reply.reason = "stop" if is_stopped else "length"
    if reply.reason and text.finish():
        reply.reason = "stop"
    reply.text = text.output


def next_tokens(
    model: LM,
    ids_BL: Int[Array, "B L"],
    neighbours_BS: Int[Array, "B S"],
    segments_BS: Int[Array, "B S"],
    lengths_B: Int[Array, " B"],
    rows: Rows,
    max_position: int,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Sample the token after the first lengths_B tokens of each text. Returns (token,
    log-probability)."""
    positions_L = jnp.minimum(jnp.arange(ids_BL.shape[1]), max_position - 1)
    positions_BL = jnp.broadcast_to(positions_L, ids_BL.shape)
    source = Source.of(neighbours_BS, segments_BS)
    rest = {"row_lengths_B": lengths_B, "source": source, "sequence_sharded": False}
    ctx = Context(positions_BL, jnp.ones_like(ids_BL), **rest)
    h_BLD = model.hidden(ids_BL, ctx)[0]
    last_B1D = jnp.take_along_axis(h_BLD, lengths_B[:, None, None] - 1, axis=1)
    logits_BV = model.logits(last_B1D)[:, 0]
    tokens_B = sample(logits_BV, rows)
    logprobs_BV = jax.nn.log_softmax(logits_BV)
    return tokens_B, jnp.take_along_axis(logprobs_BV, tokens_B[:, None], axis=1)[:, 0]
