"""The chunked scan of sequences that are cut over context: devices exchange states, no tokens.

A device has two halves, chunks r and 2 n - 1 - r of the sequence (parallel.sequence). Each half
starts without a state and yields its last state and its transition: factors, the total decay, or a
matrix N x N with the delta rule. All devices gather these of the 2 n halves and fold those before
each of their own: H = transition(H) + state. Then a half is scanned with its state. Backward
gathers the gradients of the states and folds them in reverse order.

Bytes that a device receives in forward, and again in backward, per row and layer:

    (2 n - 2) H (N P + I) 4               I: 1, or N with a decay for each channel
    (2 n - 2) H (N P + N N) 4             with the delta rule

which do not depend on the length: 59 MB for 128 heads of 64, 128 states and n = 8. With documents,
8 bytes a half more.

Letters beside the legend's: N state, P head value, E places of halves in the sequence.
"""

import typing

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from maxmeg.distributed.halves import stacked_halves
from maxmeg.ops.chunk_scan import PLAIN, ScanSpec, chunk_scan
from maxmeg.parallel import collectives, ordering
from maxmeg.parallel.mesh import CONTEXT_AXES


def chunk_scan_over_context(
    q_BLGN: Float[Array, "B L G N"],
    k_BLGN: Float[Array, "B L G N"],
    v_BLHP: Float[Array, "B L H P"],
    log_decay: Float[Array, "B L H"] | Float[Array, "B L H N"],
    beta_BLH: Float[Array, "B L H"] | None = None,
    segments_BL: Int[Array, "B L"] | None = None,
    spec: ScanSpec = PLAIN,
) -> Float[Array, "B L H P"]:
    """y of `chunk_scan` for this device's piece of the sequence, which starts without a state."""
    inputs = q_BLGN, k_BLGN, v_BLHP, log_decay, beta_BLH, segments_BL
    if collectives.axis_size(CONTEXT_AXES) == 1:
        return chunk_scan(*inputs, spec=spec)[0]
    halves: typing.Any = tuple(None if x is None else stacked_halves(x) for x in inputs)
    state_BHNP = collectives.stored(states_before(*halves[1:], spec=spec), "context_state")
    y_BLHP, _ = chunk_scan(*halves, state_BHNP=state_BHNP, spec=spec)
    return jnp.concatenate(jnp.split(y_BLHP, 2), axis=1)


def states_before(k_BLGN, v_BLHP, log_decay, beta_BLH, segments_BL, spec: ScanSpec) -> jax.Array:
    """The state [2 B, H, N, P] before each of this device's halves; zeros for a new document."""
    (B, _, H, P), N = v_BLHP.shape, k_BLGN.shape[-1]
    is_one_B11, is_new_EB = jnp.ones((B, 1, 1), bool), None
    if segments_BL is not None:
        is_one_B11 = jnp.all(segments_BL == segments_BL[:, :1], axis=1)[:, None, None]
        ends_EB2 = in_order(jnp.stack((segments_BL[:, 0], segments_BL[:, -1]), axis=1))
        last_EB = jnp.pad(ends_EB2[:-1, :, 1], ((1, 0), (0, 0)))
        is_new_EB = ends_EB2[:, :, 0] != last_EB
    if beta_BLH is None:
        _, state_BHNP = chunk_scan(None, k_BLGN, v_BLHP, log_decay, None, segments_BL, None, spec)
        total = jnp.sum(log_decay.astype(jnp.float32), axis=1).reshape(B, H, -1)
        transition = jnp.where(is_one_B11, jnp.exp(total), 0)
    else:
        # The matrix is the state of further values, which are 0, after the identity.
        padded_BLHP = jnp.concatenate(
            (v_BLHP, jnp.zeros_like(v_BLHP, shape=(*v_BLHP.shape[:3], N))), -1
        )
        unit_NP = jnp.concatenate((jnp.zeros((N, P)), jnp.eye(N)), axis=1)
        unit_BHNP = jnp.broadcast_to(unit_NP, (B, H, *unit_NP.shape))
        arrays = k_BLGN, padded_BLHP, log_decay, beta_BLH, segments_BL, unit_BHNP
        both_BHNP = chunk_scan(None, *arrays, spec)[1]
        state_BHNP, transition = both_BHNP[..., :P], both_BHNP[..., P:]
    if is_new_EB is not None:
        transition = ordering.after(transition, is_new_EB)
    return folded(state_BHNP, transition, is_new_EB)


def in_order(x_BI: jax.Array) -> jax.Array:
    """Arrays [2 B, ...] of all halves -> [E, B, ...] in the order of the sequence."""
    gathered = collectives.gather(x_BI[None], CONTEXT_AXES, 0)
    halves = gathered.reshape(len(gathered), 2, -1, *x_BI.shape[1:])
    return jnp.concatenate((halves[:, 0], halves[::-1, 1]))


def own_places(count: int) -> jax.Array:
    """Places of this device's halves among `count`."""
    rank = collectives.axis_index(CONTEXT_AXES)
    return jnp.stack((jnp.asarray(rank), jnp.asarray(count - 1 - rank)))


def passed(transition, state_BHNP: jax.Array, transposed: bool = False) -> jax.Array:
    """A state after a half, or a gradient before it, by the transition of the half."""
    if transition.ndim == 3:
        return transition[..., None] * state_BHNP
    letters = "BHNM,BHNP->BHMP" if transposed else "BHMN,BHNP->BHMP"
    return jnp.einsum(letters, transition, state_BHNP)


def gathered(state_BHNP: jax.Array, transition: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both of all halves, in order, by one collective."""
    rows = len(state_BHNP), -1
    both = jnp.concatenate((state_BHNP.reshape(rows), transition.reshape(rows)), axis=1)
    both_EBI, size = in_order(both), state_BHNP[0].size
    lead = both_EBI.shape[:2]
    states_EBHNP = both_EBI[..., :size].reshape(*lead, *state_BHNP.shape[1:])
    return states_EBHNP, both_EBI[..., size:].reshape(*lead, *transition.shape[1:])


@jax.custom_vjp
def folded(state_BHNP: jax.Array, transition: jax.Array, is_new_EB) -> jax.Array:
    """The state before each half, from the last states of all halves that started without one.

    is_new_EB: whether a half starts a document; None: there is one.
    """
    return fold(*gathered(state_BHNP, transition), is_new_EB, reverse=False)


def fold(states_EBHNP, transition_EBHI, is_new_EB, reverse: bool) -> jax.Array:
    """For this device's halves the states, or in reverse order the gradients, that come to them."""
    count = len(states_EBHNP)
    numbers_of_device, numbers = own_places(count), jnp.arange(count)
    if is_new_EB is None:
        is_new_EB = jnp.zeros((count, 1), bool)
    is_new_EB111 = is_new_EB[..., None, None, None]

    def step(carry, half):
        (arriving, chosen), (number, state, transition, is_new) = carry, half
        if not reverse:
            arriving = jnp.where(is_new, 0, arriving)
        is_mine = (number == numbers_of_device).reshape(2, *(1,) * state.ndim)
        chosen = jnp.where(is_mine, arriving, chosen)
        leaving = passed(transition, arriving, reverse) + state
        if reverse:
            leaving = jnp.where(is_new, 0, leaving)
        return (leaving, chosen), None

    zeros = jnp.zeros_like(states_EBHNP[0])
    halves = numbers, states_EBHNP, transition_EBHI, is_new_EB111
    (_, chosen), _ = lax.scan(step, (zeros, jnp.stack((zeros, zeros))), halves, reverse=reverse)
    return chosen.reshape(-1, *chosen.shape[2:])


def _folded_forward(state_BHNP, transition, is_new_EB):
    before_BHNP = folded(state_BHNP, transition, is_new_EB)
    return before_BHNP, (before_BHNP, transition, is_new_EB)


def _folded_backward(residuals, d_before_BHNP):
    before_BHNP, transition, is_new_EB = residuals
    d_state_BHNP = fold(*gathered(d_before_BHNP, transition), is_new_EB, reverse=True)
    if transition.ndim == 4:
        d_transition = jnp.einsum("BHMP,BHNP->BHMN", d_state_BHNP, before_BHNP)
    else:
        d_transition = jnp.sum(d_state_BHNP * before_BHNP, axis=-1)
        if transition.shape[-1] == 1:
            d_transition = jnp.sum(d_transition, axis=-1, keepdims=True)
    return d_state_BHNP, d_transition, None


folded.defvjp(_folded_forward, _folded_backward)
