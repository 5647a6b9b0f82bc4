"""Copies of tokens to the devices of their experts and back, in rounds of bounded size.

Two ways with one interface. padded: an all-to-all of as many rows for every pair of devices.
ragged: every device gets one row a copy, whoever sends it, in one buffer. What a round does not
hold goes in the next, so that nothing is dropped and memory does not depend on how uneven loads
are. On other backends than CUDA, whose XLA has no ragged all-to-all, rows are picked from gathered
ones.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxmeg.ops.backend import target_device
from maxmeg.ops.experts.dispatch import Order, pad_experts, sort_by_expert
from maxmeg.parallel import collectives
from maxmeg.parallel.mesh import MESH_AXES

EVERYWHERE = tuple(axis for axis in MESH_AXES if axis != collectives.PIPE_AXIS)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Between the devices along `axes`; rows: that a device receives in a round, of padded the same
    number from each device."""

    axes: tuple[str, ...]
    rows: int
    ragged: bool = False

    @property
    def devices(self) -> int:
        return collectives.axis_size(self.axes)


class Parcels(NamedTuple):
    """Copies by the device that they go to: `order` sorts them, `places_TK` counts the copies for
    the same device before each, `counts_RR[s, r]` those that device s has for device r."""

    devices_TK: Int[Array, "T K"]
    order: Order
    places_TK: Int[Array, "T K"]
    counts_RR: Int[Array, "R R"]


def parcels(
    devices_TK: Int[Array, "T K"], kept_TK: Bool[Array, "T K"], exchange: Exchange
) -> Parcels:
    """kept_TK: those that are not dropped."""
    order = sort_by_expert(devices_TK, exchange.devices, kept_TK=kept_TK, distinct=False)
    order = jax.tree.map(lambda index: collectives.stored(index, "dispatch_order"), order)
    starts_R = jnp.cumsum(order.sizes_E) - order.sizes_E
    none = jnp.iinfo(jnp.int32).max
    places_TK = jnp.where(kept_TK, order.rows_TK - starts_R[devices_TK], none)
    counts_RR = collectives.gather(order.sizes_E[None], exchange.axes, 0)
    counts_RR = collectives.stored(counts_RR, "dispatch_counts")
    return Parcels(devices_TK, order, places_TK, counts_RR)


def count_rounds(given: Parcels, exchange: Exchange) -> jax.Array:
    """Rounds until every copy was sent, the same number on all devices but those along pipe."""
    if exchange.ragged:
        most = jnp.max(jnp.sum(given.counts_RR, axis=0))
        rounds = -(-most // exchange.rows)
    else:
        rounds = -(-jnp.max(given.counts_RR) // (exchange.rows // exchange.devices))
    return collectives.stored(collectives.max_over(rounds, EVERYWHERE), "dispatch_rounds")


def plan_round(given: Parcels, number, exchange: Exchange) -> tuple[Order, Callable, Callable]:
    """(where copies lie before they are sent, the function that sends such rows, and the one that
    sends back what comes of those received); rows of no copy arrive as zeros."""
    if exchange.ragged:
        slices = ragged_slices(given.counts_RR, number, exchange.rows)
        sent = len(given.order.copies_N)
        there = functools.partial(_ragged, exchange.axes, exchange.rows, slices)
        return given.order, there, functools.partial(_ragged, exchange.axes, sent, slices.back())
    width = exchange.rows // exchange.devices
    is_now_TK = given.places_TK // width == number
    places_TK = jnp.where(is_now_TK, given.places_TK % width, width)
    order = pad_experts(given.devices_TK, places_TK, exchange.devices, width)
    move = functools.partial(collectives.exchange, axes=exchange.axes)
    return order, move, move


class Slices(NamedTuple):
    """Of every device s (dimension 0) for every device r: sizes_RR rows, which begin at starts_RR
    in what s sends and at places_RR in what r receives."""

    starts_RR: Int[Array, "R R"]
    sizes_RR: Int[Array, "R R"]
    places_RR: Int[Array, "R R"]

    def back(self) -> "Slices":
        return Slices(self.places_RR.T, self.sizes_RR.T, self.starts_RR.T)


def ragged_slices(counts_RR: Int[Array, "R R"], number, rows: int) -> Slices:
    """Of the stream that a device receives, ordered by sender, a round takes the next `rows`."""
    before_RR = jnp.cumsum(counts_RR, axis=0) - counts_RR
    first_RR = jnp.clip(number * rows - before_RR, 0, counts_RR)
    last_RR = jnp.clip((number + 1) * rows - before_RR, 0, counts_RR)
    starts_RR = jnp.cumsum(counts_RR, axis=1) - counts_RR + first_RR
    places_RR = jnp.clip(before_RR + first_RR - number * rows, 0, rows)
    return Slices(starts_RR, last_RR - first_RR, places_RR)


def _move(axes: tuple[str, ...], rows: int, slices: Slices, x_ND: Float[Array, "N D"]):
    own = collectives.axis_index(axes)
    out = jnp.zeros((rows, *x_ND.shape[1:]), x_ND.dtype)
    starts_RR, sizes_RR, places_RR = (matrix.astype(jnp.int32) for matrix in slices)
    if target_device().is_cuda:
        sent = (starts_RR[own], sizes_RR[own], places_RR[own], sizes_RR[:, own])
        return collectives.ragged_exchange(x_ND, out, *sent, axes)
    all_RND = collectives.gather(x_ND[None], axes, 0)
    within_RN = jnp.arange(rows) - places_RR[:, own][:, None]
    is_from_RN = (within_RN >= 0) & (within_RN < sizes_RR[:, own][:, None])
    source_N = jnp.argmax(is_from_RN, axis=0)
    row_N = (starts_RR[:, own][:, None] + within_RN)[source_N, jnp.arange(rows)]
    row_N = jnp.where(jnp.any(is_from_RN, axis=0), row_N, len(x_ND))
    return all_RND.at[source_N, row_N].get(mode="fill", fill_value=0)


_ragged: Any = jax.custom_vjp(_move, nondiff_argnums=(0, 1))
_ragged.defvjp(
    lambda axes, rows, slices, x_ND: (_move(axes, rows, slices, x_ND), (slices, len(x_ND))),
    lambda axes, rows, kept, slope: (None, _move(axes, kept[1], kept[0].back(), slope)),
)
