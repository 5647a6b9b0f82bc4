"""A train state as checkpoints hold it: float32 masters without a frozen base, by name."""

import dataclasses
import typing

import jax

from maxmeg.checkpoint.names import nested, to_arrays
from maxmeg.checkpoint.storage import row_orders
from maxmeg.config.schema import Masters, Moments, OptimConfig
from maxmeg.ops.random import fold
from maxmeg.optim.storage import decode, encode, merged, orders
from maxmeg.parallel.trainable import saved
from maxmeg.processes.host import to_device
from maxmeg.state import TrainState, shardings_of, with_masters


def on_disk(state):
    """A state, or an abstract one, as checkpoints hold it: with float32 masters. Other trees are
    as they are."""
    if not isinstance(state, TrainState) or state.remainders is None:
        return state
    places, is_abstract = shardings_of(state.model), isinstance(state.step, jax.ShapeDtypeStruct)
    widen = jax.jit(lambda model, rest: merged(model, to_device(rest)), out_shardings=places)
    model = (widen.eval_shape if is_abstract else widen)(state.model, state.remainders)
    return dataclasses.replace(state, model=model, remainders=None)


def from_disk(
    state: TrainState, moments: Moments, optim: OptimConfig, abstract: TrainState
) -> TrainState:
    """Convert a restored state (float32 masters, moments stored like `moments`) to the run's
    storage formats. abstract: the run's abstract state."""
    if moments is optim.moments and optim.masters is Masters.float32:
        return state

    def convert(state: TrainState) -> TrainState:
        optimizer = to_device(state.optimizer)
        if moments is not optim.moments:
            key = fold(jax.random.wrap_key_data(state.key), state.step)
            optimizer = encode(decode(optimizer, moments), optim.moments, key, orders(state.model))
        return with_masters(dataclasses.replace(state, optimizer=optimizer), optim.masters)

    # Only the model and the moments: a checkpoint may lack any of the others, or have more.
    rest: dict[str, typing.Any] = {"scaler": None, "ema": None}
    places = dataclasses.replace(shardings_of(abstract), **rest)
    converted = jax.jit(convert, out_shardings=places)(dataclasses.replace(state, **rest))
    return dataclasses.replace(converted, **{name: getattr(state, name) for name in rest})


def to_tree(tree) -> dict:
    """The arrays of a state without its frozen base, as nested dicts."""
    return nested(to_arrays(saved(on_disk(tree))))


def orders_of(tree) -> dict[str, tuple[int, ...]]:
    """The model's layer in each row of the arrays that a pipeline reorders, by checkpoint path.

    `tree` is a state, or a part of it by its name: {"model": its model}.
    """
    (model,) = (tree.model,) if isinstance(tree, TrainState) else tree.values()
    return row_orders(to_arrays(tree), model.stack.layout)
