"""Choosing the next token from logits, with settings of its own for every row."""

import dataclasses
import functools
import math
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

TOP = 20  # most likely tokens whose log-probabilities a request can ask for
BIASES = 300  # tokens whose logits a request can change


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are sampled.

    temperature: 0 takes the most likely token. top_k: keeps the k most likely tokens (0: all).
    min_p: keeps those with at least min_p times the highest probability. top_p: keeps of the rest
    the smallest set with at least this probability, and tokens as likely as its last one.
    top_logprobs: number of most likely tokens whose log-probabilities are returned.

    Before that, the logit of each token that is in the prompt or the reply is divided by
    repetition_penalty, or multiplied if it is negative; then frequency_penalty times the number of
    the token's occurrences in the reply is subtracted, and presence_penalty if there is one; and
    the value of each (token, value) in logit_bias is added.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_logprobs: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def penalises(self) -> bool:
        penalties = self.repetition_penalty, self.frequency_penalty, self.presence_penalty
        return penalties != (1, 0, 0)

    def __post_init__(self):
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"{self}: temperature and top_k must be at least 0 and top_p in (0, 1]"
            )
        if not 0 <= self.min_p <= 1 or not 0 <= self.top_logprobs <= TOP:
            raise ValueError(f"{self}: min_p must be in [0, 1], top_logprobs in 0..{TOP}")
        others = (self.frequency_penalty, self.presence_penalty, *(x for _, x in self.logit_bias))
        if not 0 < self.repetition_penalty < math.inf or not all(map(math.isfinite, others)):
            raise ValueError(
                f"{self}: repetition_penalty must be above 0, and it, the other penalties and the "
                "values of logit_bias finite"
            )
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias) or (
            len(self.logit_bias) > BIASES
        ):
            raise ValueError(
                f"logit_bias={self.logit_bias} is not at most {BIASES} different tokens"
            )


class Rows(typing.NamedTuple):
    """The settings of each row. A token depends on its logits, seed, number and step alone.

    numbers_B: of the row among those with the same seed. steps_B: number of its earlier new tokens.
    """

    temperatures_B: Float[Array, " B"]
    top_ks_B: Int[Array, " B"]
    top_ps_B: Float[Array, " B"]
    min_ps_B: Float[Array, " B"]
    seeds_B: Int[Array, " B"]
    numbers_B: Int[Array, " B"]
    steps_B: Int[Array, " B"]


class Changes(typing.NamedTuple):
    """What changes the logits of each row before sampling, beside its `Rows`.

    tokens_BM: the prompt and the reply so far. lengths_B: number of both; prompt_lengths_B: number
    of prompt tokens.
    A row may stand for several rows of logits: those after its first, second, ... further token.
    biases_BA: added to the logits of the tokens `biased_BA`. A token occurs once, or has bias 0.
    allowed_BW: bit v % 32 of word v // 32 tells whether token v may be sampled, in rows that are
    masked.
    """

    penalises_B: Int[Array, " B"]
    repetition_B: Float[Array, " B"]
    frequency_B: Float[Array, " B"]
    presence_B: Float[Array, " B"]
    tokens_BM: Int[Array, "B M"]
    lengths_B: Int[Array, " B"]
    prompt_lengths_B: Int[Array, " B"]
    is_biased_B: Int[Array, " B"]
    biased_BA: Int[Array, "B A"]
    biases_BA: Float[Array, "B A"]
    is_masked_B: Int[Array, " B"]
    allowed_BW: Int[Array, "B W"]


class Chosen(typing.NamedTuple):
    """A token of each row, its log-probability, and those of the TOP most likely tokens.

    Log-probabilities are of the plain logits, before temperature and limits.
    """

    ids_B: Int[Array, " B"]
    logprobs_B: Float[Array, " B"]
    top_ids_BT: Int[Array, "B T"]
    top_logprobs_BT: Float[Array, "B T"]


def choose(
    logits_BV: Float[Array, "B V"], rows: Rows, changes: Changes, wants_top_B: jax.Array
) -> Chosen:
    """Sample a token for each row. wants_top_B: rows that need the most likely tokens."""
    ids_B = sample(changed(logits_BV, changes), rows)
    sums_B1 = jax.nn.logsumexp(logits_BV, axis=-1, keepdims=True)
    logprobs_B = jnp.take_along_axis(logits_BV, ids_B[:, None], axis=1)[:, 0] - sums_B1[:, 0]
    B, top = len(logits_BV), min(TOP, logits_BV.shape[-1])

    def likeliest():
        values_BT, top_ids_BT = lax.top_k(logits_BV, top)
        return top_ids_BT, values_BT - sums_B1

    def nothing():
        return jnp.zeros((B, top), jnp.int32), jnp.zeros((B, top), jnp.float32)

    return Chosen(ids_B, logprobs_B, *lax.cond(wants_top_B.any(), likeliest, nothing))


def changed(logits_BV: Float[Array, "B V"], changes: Changes) -> Float[Array, "B V"]:
    """Logits with penalties and biases, and -inf for tokens that the grammar excludes."""
    for is_needed_B, change in (
        (changes.penalises_B, penalised),
        (changes.is_biased_B, biased),
        (changes.is_masked_B, masked),
    ):
        any_row = (is_needed_B > 0).any()
        change = functools.partial(_for_each_row, change)
        logits_BV = lax.cond(any_row, change, lambda x, _: x, logits_BV, changes)
    return logits_BV


def _for_each_row(change: typing.Callable, logits_RV: jax.Array, changes: Changes) -> jax.Array:
    B = len(changes.lengths_B)
    times = len(logits_RV) // B
    rows = Changes(*(jnp.repeat(array, times, axis=0) for array in changes))
    lengths_R = rows.lengths_B + jnp.tile(jnp.arange(times), B)
    return change(logits_RV, rows._replace(lengths_B=lengths_R))


def penalised(logits_BV: jax.Array, changes: Changes) -> jax.Array:
    places_M = jnp.arange(changes.tokens_BM.shape[1])
    is_known_BM = places_M < changes.lengths_B[:, None]
    is_new_BM = is_known_BM & (places_M >= changes.prompt_lengths_B[:, None])
    rows_B1, none_BV = jnp.arange(len(logits_BV))[:, None], jnp.zeros(logits_BV.shape, jnp.int32)
    counts_BV = none_BV.at[rows_B1, changes.tokens_BM].add(is_new_BM)
    is_seen_BV = none_BV.at[rows_B1, changes.tokens_BM].max(is_known_BM) > 0
    factors_BV = jnp.where(is_seen_BV, changes.repetition_B[:, None], 1)
    less_BV = jnp.where(logits_BV > 0, logits_BV / factors_BV, logits_BV * factors_BV)
    less_BV -= changes.frequency_B[:, None] * counts_BV
    less_BV -= changes.presence_B[:, None] * (counts_BV > 0)
    return jnp.where(changes.penalises_B[:, None] > 0, less_BV, logits_BV)


def biased(logits_BV: jax.Array, changes: Changes) -> jax.Array:
    rows_B1 = jnp.arange(len(logits_BV))[:, None]
    return logits_BV.at[rows_B1, changes.biased_BA].add(changes.biases_BA)


def masked(logits_BV: jax.Array, changes: Changes) -> jax.Array:
    allowed = is_allowed(changes.allowed_BW, logits_BV.shape[1])
    return jnp.where(allowed | (changes.is_masked_B[:, None] == 0), logits_BV, -jnp.inf)


def is_allowed(words_BW: Int[Array, "B W"], vocab_size: int) -> Bool[Array, "B V"]:
    """The bits of the words, false for tokens beyond them."""
    bits_BV = (words_BW[..., None] >> jnp.arange(32)) & 1
    bits_BV = bits_BV.reshape(len(words_BW), -1)[:, :vocab_size] > 0
    return jnp.pad(bits_BV, ((0, 0), (0, vocab_size - bits_BV.shape[1])))


class Scores(typing.NamedTuple):
    """Log-probabilities of given tokens, and the TOP most likely tokens in place of each."""

    logprobs_BL: Float[Array, "B L"]
    top_ids_BLT: Int[Array, "B L T"]
    top_logprobs_BLT: Float[Array, "B L T"]


def scores_of(logits_BLV: Float[Array, "B L V"], ids_BL: Int[Array, "B L"]) -> Scores:
    sums_BL1 = jax.nn.logsumexp(logits_BLV, axis=-1, keepdims=True)
    logits_BL1 = jnp.take_along_axis(logits_BLV, ids_BL[..., None], axis=-1)
    values_BLT, top_ids_BLT = lax.top_k(logits_BLV, min(TOP, logits_BLV.shape[-1]))
    return Scores((logits_BL1 - sums_BL1)[..., 0], top_ids_BLT, values_BLT - sums_BL1)


def sample(logits_BV: Float[Array, "B V"], rows: Rows) -> Int[Array, " B"]:
    """Sample a token id for each row (top-p: Holtzman et al., 2020)."""
    greedy_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    is_greedy_B = rows.temperatures_B == 0

    def drawn():
        scaled_BV = logits_BV / jnp.where(is_greedy_B, 1, rows.temperatures_B)[:, None]
        is_limited_B = (rows.top_ks_B > 0) | (rows.top_ps_B < 1) | (rows.min_ps_B > 0)
        limited_BV = lax.cond(is_limited_B.any(), limited, lambda x, _: x, scaled_BV, rows)
        keys_B = jax.vmap(key_of)(rows.seeds_B, rows.numbers_B, rows.steps_B)
        ids_B = jax.vmap(jax.random.categorical)(keys_B, limited_BV).astype(jnp.int32)
        return jnp.where(is_greedy_B, greedy_B, ids_B)

    return lax.cond(is_greedy_B.all(), lambda: greedy_B, drawn)


def key_of(seed: jax.Array, number: jax.Array, step: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), step)


def limited(logits_BV: Float[Array, "B V"], rows: Rows) -> Float[Array, "B V"]:
    """Logits with -inf for the tokens that top_k, min_p and then top_p exclude."""
    V = logits_BV.shape[-1]
    ks_B1 = jnp.where(rows.top_ks_B > 0, jnp.minimum(rows.top_ks_B, V), V)[:, None]
    largest_B1 = logits_BV.max(axis=-1, keepdims=True)

    def enough(least_B1):
        return jnp.sum(logits_BV >= least_B1, axis=-1, keepdims=True) >= ks_B1

    relative_B1 = largest_B1 + jnp.log(rows.min_ps_B)[:, None]
    least_B1 = jnp.maximum(threshold(enough, len(logits_BV)), relative_B1)
    candidates_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    chances_BV = jax.nn.softmax(candidates_BV, axis=-1)

    def likely(least_B1):
        mass_B1 = jnp.sum(chances_BV, axis=-1, keepdims=True, where=candidates_BV >= least_B1)
        return mass_B1 >= rows.top_ps_B[:, None]

    least_B1 = jnp.where(rows.top_ps_B[:, None] < 1, threshold(likely, len(logits_BV)), -jnp.inf)
    return jnp.where(candidates_BV < least_B1, -jnp.inf, candidates_BV)


def threshold(holds: typing.Callable, rows: int) -> Float[Array, "B 1"]:
    """The largest float32 of each row for which holds(values [B, 1]) is true, found bit by bit;
    -inf if there is none. `holds` is true up to some value, and false beyond it."""

    sign = jnp.uint32(1 << 31)

    def value(code_B1):  # from integers in the order of the floats that they stand for
        bits_B1 = jnp.where(code_B1 >= sign, code_B1 ^ sign, ~code_B1)
        return lax.bitcast_convert_type(bits_B1, jnp.float32)

    def step(i, code_B1):
        trial_B1 = code_B1 | (sign >> i.astype(jnp.uint32))
        candidate_B1 = value(trial_B1)
        is_less_B1 = ~jnp.isnan(candidate_B1) & holds(candidate_B1)
        return jnp.where(is_less_B1, trial_B1, code_B1)

    code_B1 = lax.fori_loop(0, 32, step, jnp.zeros((rows, 1), jnp.uint32))
    value_B1 = value(code_B1)
    return jnp.where(jnp.isnan(value_B1), -jnp.inf, value_B1)
