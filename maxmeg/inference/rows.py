"""Declared rows of numbers: what a step of the engine gets from the host, and what it returns.

All fields of a row travel as one row of int32 words, since one array is sent sooner than many.
"""

import dataclasses
import typing
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from maxmeg.inference.sampling import BIASES

# Values by name for the rows that have any, by number: one, or for a field with a size a sequence.
Fields = Mapping[int, Mapping[str, typing.Any]]


@dataclasses.dataclass(frozen=True)
class Field:
    """One number per row, or `size` numbers. dtype: of four bytes. default: fills rows that are not
    in use and numbers that a row does not set."""

    name: str
    dtype: type = np.int32
    size: int | None = None
    default: float = 0


class Layout:
    """Fields in the order in which a row holds them."""

    def __init__(self, *fields: Field) -> None:
        self.fields = fields
        shapes = [() if field.size is None else (field.size,) for field in fields]
        kinds = [(f.name, f.dtype, shape) for f, shape in zip(fields, shapes, strict=True)]
        self.dtype = np.dtype(kinds)

    def filled(self, rows: Fields, count: int) -> np.ndarray:
        """A structured array of `count` rows."""
        array = np.zeros(count, self.dtype)
        for field in self.fields:
            column = array[field.name]
            column[...] = field.default
            for number, row in rows.items():
                if field.name in row:
                    value = row[field.name]
                    place = number if field.size is None else (number, slice(len(value)))
                    column[place] = value
        return array

    def joined(self, *values: jax.Array) -> Int[Array, "... X"]:
        """Return int32 rows that hold the values of the first fields. A value is an array [...], or
        [..., size] if its field has a size. For arrays on a device."""
        pairs = zip(self.fields, values, strict=False)
        parts = [value[..., None] if field.size is None else value for field, value in pairs]
        return jnp.concatenate([_cast(part, np.int32) for part in parts], axis=-1)

    def parted(self, words: typing.Any) -> dict[str, typing.Any]:
        """Return the value of each field in int32 rows [..., X]: an array [...], or [..., size] if
        the field has a size. For numpy arrays and for arrays on a device."""
        values, first = {}, 0
        for field in self.fields:
            end = first + (1 if field.size is None else field.size)
            part = words[..., first] if field.size is None else words[..., first:end]
            values[field.name], first = _cast(part, field.dtype), end
        return values


def _cast(array: typing.Any, dtype: type) -> typing.Any:
    """The bits of an array as another type of four bytes."""
    if array.dtype == dtype:
        return array
    if isinstance(array, jax.Array):
        return lax.bitcast_convert_type(array, dtype)
    return array.copy().view(dtype)


def step_inputs(lanes: int, pages: int, tokens: int, source: int) -> Layout:
    """What the host sends for each lane, or for each prompt. The arguments are numbers: of lanes,
    and of a row's pages, tokens and tokens of an encoder-decoder's source."""
    return Layout(
        Field("count"),  # of tokens in the row; 0 is an idle row
        Field("start"),  # tokens before them
        Field("lane", default=lanes),  # of the replica; idle rows have none
        Field("is_last"),  # a prompt ends here
        Field("token", default=-1),  # the one to feed; -1: the last one that was sampled
        Field("row_length"),  # the rotation is for rows of this length
        Field("scores"),  # log-probabilities of prompts are needed; the same in every row
        Field("adapter"),  # its number, 0 for the base model
        Field("source"),  # number of tokens of the source
        *map(Field, ("top_k", "seed", "number", "step", "wants_top", "penalises")),
        *map(Field, ("prompt_length", "is_biased", "is_masked")),
        *(Field(n, np.float32) for n in ("temperature", "top_p", "min_p")),
        *(Field(n, np.float32) for n in ("repetition", "frequency", "presence")),
        Field("pages", size=pages),
        Field("tokens", size=tokens),  # of a chunk and some after them, or proposed ones
        Field("source_tokens", size=source),
    )


def change_inputs(vocab_size: int) -> Layout:
    """What the host sends too, in steps with any row of biases or grammars."""
    return Layout(
        Field("biased", size=BIASES),  # tokens
        Field("biases", np.float32, BIASES),  # of these
        Field("allowed", size=-(-vocab_size // 32)),  # words of `sampling.Changes`
    )


def step_results(top: int, drafts: int) -> Layout:
    """What a step returns for each sampled token: with the most likely ones, and for each what MTP
    layers propose after the last taken one."""
    return Layout(
        Field("tokens"),
        Field("logprobs", np.float32),
        Field("top_tokens", size=top),
        Field("top_logprobs", np.float32, top),
        Field("drafts", size=drafts),
    )
