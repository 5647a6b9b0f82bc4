"""The chunked scan of state-space and linear-attention layers, forward, backward and decoding.

    H_t = exp(g_t) H_{t-1} + k_t v_t^T                                    without beta
    H_t = (1 - beta_t k_t k_t^T) exp(g_t) H_{t-1} + beta_t k_t v_t^T      with it: the delta rule
    y_t = H_t^T q_t

Mamba-2 (Dao and Gu, 2024) is q = C, k = B, v = x dt and g = A dt; Gated DeltaNet (Yang et al.,
2024) adds beta; Kimi Delta Attention (Moonshot AI, 2025) has a decay g for each channel of the
keys.

Both directions are XLA's form or, with one decay per head, kernels for Hopper (ops.chunk_mosaic).
In XLA's form, heads and tokens are cut into tiles (ops.chunk_tile): on CPUs into many, whose
temporaries fit in a cache, on GPUs into few, as every kernel costs a launch. Backward stores the
inputs only and runs every tile again.

Letters beside the legend's: N state, P head value, I decays of a head (1 or N), M tokens of a tile.
"""

import dataclasses
import functools
import math
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from maxmeg.ops import chunk_mosaic, chunk_tile
from maxmeg.ops.backend import pick, target_device
from maxmeg.ops.chunk_tile import Tile, run_tile

BACKENDS = {"mosaic": chunk_mosaic, "xla": chunk_tile}
ORDER = ("xla",)  # for "auto": mosaic has not been measured
# Bytes of a tile's temporaries, by formula. With sums of gradients they stay below 16 MiB on CPUs;
# programs compiled for GPUs take a third to two thirds of what the formula says.
WORKSPACE, GPU_WORKSPACE = 12 << 20, 1 << 30
MOST_CHUNKS = 64  # of a tile: more would multiply mostly by zeros


@dataclasses.dataclass(frozen=True)
class ScanSpec:
    """chunk: number of tokens that XLA's form multiplies at once. backend: a key of BACKENDS, or
    "auto"."""

    chunk: int = 64
    backend: str = "auto"


PLAIN = ScanSpec()


class Inputs(typing.NamedTuple):
    """Of a whole call; docs_BL: as in Tile, before_BL: of the token before. state: at the start."""

    q_BLGN: typing.Any
    k_BLGN: jax.Array
    v_BLHP: jax.Array
    log_decay_BLHI: jax.Array
    beta_BLH: typing.Any
    state_BHNP: jax.Array


class Documents(typing.NamedTuple):
    docs_BL: typing.Any
    before_BL: typing.Any


@dataclasses.dataclass(frozen=True)
class Plan:
    """Tiles of `heads` heads and `chunks` chunks of `chunk` tokens. per_group: heads of a group.
    in_parallel: as in `run_tile`."""

    chunk: int
    heads: int
    chunks: int
    per_group: int
    in_parallel: bool

    @property
    def groups(self) -> int:
        """Number of groups of a tile, which may have a part of one only."""
        return max(self.heads // self.per_group, 1)

    @property
    def is_shared(self) -> bool:
        """Whether several blocks of heads have the same queries and keys."""
        return self.heads < self.per_group

    def run(self, tile: Tile, state_BGJNP: jax.Array) -> tuple[jax.Array | None, jax.Array]:
        return run_tile(tile, state_BGJNP, self.chunk, self.in_parallel)


class Place(typing.NamedTuple):
    """Of a tile: its first head and token, and its number of tokens, padding left out."""

    head: jax.Array
    token: jax.Array | int
    count: int


def chunk_scan(
    q_BLGN: Float[Array, "B L G N"] | None,
    k_BLGN: Float[Array, "B L G N"],
    v_BLHP: Float[Array, "B L H P"],
    log_decay: Float[Array, "B L H"] | Float[Array, "B L H N"],
    beta_BLH: Float[Array, "B L H"] | None = None,
    segments_BL: Int[Array, "B L"] | None = None,
    state_BHNP: Float[Array, "B H N P"] | None = None,
    spec: ScanSpec = PLAIN,
) -> tuple[typing.Any, Float[Array, "B H N P"]]:
    """(y [B, L, H, P] in the dtype of v, float32 state after the last token).

    log_decay: at most 0. segments_BL: a run of equal ids is a document; the initial state (None:
    zeros) belongs to the first document, the final one to the last. q_BLGN None: y is None.
    ValueError for sizes that do not fit and for a backend that cannot run the call.
    """
    check_sizes(q_BLGN, k_BLGN, v_BLHP, log_decay, beta_BLH, state_BHNP, spec.chunk)
    B, _, H, P = v_BLHP.shape
    log_decay_BLHI = log_decay if log_decay.ndim == 4 else log_decay[..., None]
    if state_BHNP is None:
        state_BHNP = jnp.zeros((B, H, k_BLGN.shape[-1], P), jnp.float32)
    state_BHNP = state_BHNP.astype(jnp.float32)
    documents = Documents(None, None)
    if segments_BL is not None:
        is_first_BL = jnp.diff(segments_BL, axis=1, prepend=segments_BL[:, :1]) != 0
        docs_BL = jnp.cumsum(is_first_BL.astype(jnp.int32), axis=1)
        documents = Documents(docs_BL, jnp.pad(docs_BL[:, :-1], ((0, 0), (1, 0))))
    inputs = Inputs(
        q_BLGN, k_BLGN, v_BLHP, log_decay_BLHI.astype(jnp.float32), beta_BLH, state_BHNP
    )
    op = "chunk_scan" if beta_BLH is None else "delta_scan"
    backend = pick(op, BACKENDS, ORDER, spec.backend, (inputs,))
    return scan_tiles(ScanSpec(spec.chunk, backend), inputs, documents)


def check_sizes(q_BLGN, k_BLGN, v_BLHP, log_decay, beta_BLH, state_BHNP, chunk: int) -> None:
    """Raise a ValueError for sizes that do not fit together."""
    (B, L, G, N), (H, P) = k_BLGN.shape, v_BLHP.shape[2:]
    if H % G:
        raise ValueError(
            f"chunk_scan: {H} heads are not divisible by {G} groups of queries and keys: choose a "
            f"number of groups in {[n for n in range(1, H + 1) if H % n == 0]}"
        )
    if chunk < 2 or chunk & (chunk - 1):
        raise ValueError(f"chunk_scan: chunk={chunk} must be a power of 2: choose 64 or 128")
    for name, shape, shapes in (
        ("q", k_BLGN.shape if q_BLGN is None else q_BLGN.shape, [(B, L, G, N)]),
        ("v", v_BLHP.shape, [(B, L, H, P)]),
        ("log_decay", log_decay.shape, [(B, L, H), (B, L, H, N)]),
        ("beta", (B, L, H) if beta_BLH is None else beta_BLH.shape, [(B, L, H)]),
        ("state", (B, H, N, P) if state_BHNP is None else state_BHNP.shape, [(B, H, N, P)]),
    ):
        if shape not in shapes:
            raise ValueError(
                f"chunk_scan: {name} has shape {shape}, which must be "
                f"{' or '.join(map(str, shapes))} for keys {k_BLGN.shape} (batch, length, groups, "
                f"state size) and {H} heads of size {P}: pass {name} in that shape"
            )


def plan_of(inputs: Inputs, chunk: int, backward: bool = False) -> Plan:
    """Tiles whose temporaries fit in a workspace: whole groups of heads, or equal parts of one."""
    (B, L, G, N), (H, P) = inputs.k_BLGN.shape, inputs.v_BLHP.shape[2:]
    is_delta, by_channel = inputs.beta_BLH is not None, inputs.log_decay_BLHI.shape[-1] > 1
    on_gpu = target_device().is_cuda
    workspace = GPU_WORKSPACE if on_gpu else WORKSPACE
    floats = (3 + 5 * is_delta) * chunk**2 + 5 * chunk * P + 4 * N * P
    floats += 4 * chunk * N * (by_channel or G == H)
    if not on_gpu:  # where XLA fuses them
        floats += 3 * chunk * N * int(math.log2(chunk)) * by_channel
    pairs = max(workspace // (4 * B * floats * (1 + backward)), 1)  # of a chunk and a head
    count, chunks = -(-L // chunk), pairs
    if is_delta and on_gpu:
        chunks = max(pairs // H, 1)
    elif is_delta:  # a loop over chunks, whose steps should have many heads
        # Backward stores the state before each tile of a block of heads: a quarter of WORKSPACE.
        chunks = math.isqrt(16 * pairs * count * B * N * P // WORKSPACE) + 1
    chunks = min(count, MOST_CHUNKS, chunks)
    chunks = next((n for n in range(chunks, chunks // 2, -1) if L % (n * chunk) == 0), chunks)
    group = H // G
    possible = [n for n in range(1, H + 1) if H % n == 0 and (n % group == 0 or group % n == 0)]
    heads = max(n for n in possible if n <= max(pairs // chunks, 1))
    return Plan(chunk, heads, chunks, group, on_gpu)


def tile_of(plan: Plan, inputs: Inputs, documents: Documents, place: Place) -> Tile:
    """The tile at a place, padded to whole chunks by tokens that change nothing."""
    group = place.head // plan.per_group
    before_B = None
    if documents.before_BL is not None:
        before_B = lax.dynamic_slice_in_dim(documents.before_BL, place.token, 1, 1)[:, 0]
    return Tile(
        part_of(plan, inputs.q_BLGN, place, group, plan.groups),
        part_of(plan, inputs.k_BLGN, place, group, plan.groups),
        part_of(plan, inputs.v_BLHP, place, place.head, plan.heads),
        part_of(plan, inputs.log_decay_BLHI, place, place.head, plan.heads),
        part_of(plan, inputs.beta_BLH, place, place.head, plan.heads),
        part_of(plan, documents.docs_BL, place, 0, 0),
        before_B,
    )


def part_of(plan: Plan, x, place: Place, head, heads: int) -> typing.Any:
    """The part of x [B, L, H, ...] for a tile, in float32, padded by zeros; of integers x [B, L],
    padded by the last one."""
    if x is None:
        return None
    x = lax.dynamic_slice_in_dim(x, place.token, place.count, 1)
    padding = (0, 0), (0, -place.count % plan.chunk)
    if x.ndim == 2:
        return jnp.pad(x, padding, mode="edge")
    x = lax.dynamic_slice_in_dim(x, head, heads, 2).astype(jnp.float32)
    return jnp.pad(x, (*padding, *((0, 0),) * (x.ndim - 2)))


def put(array, part, head, place: Place, add: bool = False) -> typing.Any:
    """`array` [B, L, H, ...] with the part of a tile, or with this added, from head `head` on."""
    if array is None:
        return None
    start = 0, place.token, head, *(0,) * (array.ndim - 3)
    part = part[:, : place.count]
    if add:
        part = part + lax.dynamic_slice(array, start, part.shape)
    return lax.dynamic_update_slice(array, part.astype(array.dtype), start)


def block_state(plan: Plan, state_BHNP, head) -> jax.Array:
    """The states [B, G, J, N, P] of a block of heads."""
    state = lax.dynamic_slice_in_dim(state_BHNP, head, plan.heads, 1)
    return state.reshape(len(state), plan.groups, -1, *state.shape[2:])


def put_state(state_BHNP, state_BGJNP, head) -> jax.Array:
    shape = len(state_BHNP), -1, *state_BHNP.shape[2:]
    return lax.dynamic_update_slice_in_dim(state_BHNP, state_BGJNP.reshape(shape), head, 1)


def over_tiles(plan: Plan, length: int, tile, carry, states=None, reverse: bool = False):
    """Run tile(carry, token, count[, state]) -> (carry, output) over the tiles of a sequence, of
    which the last one may be shorter: (carry, (outputs of the whole tiles, of the last one)).

    states: in the form of those outputs.
    """
    size = plan.chunk * plan.chunks
    num_tiles, rest = divmod(length, size)
    outputs: list = [None, None]
    extra = ((), ()) if states is None else ((states[0],), (states[1],))

    def last(carry):
        if rest:
            carry, outputs[1] = tile(carry, num_tiles * size, rest, *extra[1])
        return carry

    if reverse:
        carry = last(carry)
    if num_tiles:
        tokens = jnp.arange(num_tiles) * size
        carry, outputs[0] = lax.scan(
            lambda carry, x: tile(carry, x[0], size, *x[1:]),
            carry,
            (tokens, *extra[0]),
            reverse=reverse,
        )
    if not reverse:
        carry = last(carry)
    return carry, tuple(outputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scan_tiles(spec: ScanSpec, inputs: Inputs, documents: Documents):
    """(y or None, state after the last token)."""
    if spec.backend == "mosaic":
        return chunk_mosaic.scan(inputs, documents.docs_BL)
    plan, (length, num_heads) = plan_of(inputs, spec.chunk), inputs.v_BLHP.shape[1:3]

    def block(carry, head):
        def tile(carry, token, count: int):
            (y_BLHP, state), place = carry, Place(head, token, count)
            cut = tile_of(plan, inputs, documents, place)
            y_BMHP, state = plan.run(cut, state)
            return (put(y_BLHP, y_BMHP, head, place), state), None

        y_BLHP, states_BHNP = carry
        carry = y_BLHP, block_state(plan, inputs.state_BHNP, head)
        (y_BLHP, state), _ = over_tiles(plan, length, tile, carry)
        return (y_BLHP, put_state(states_BHNP, state, head)), None

    y_BLHP = None if inputs.q_BLGN is None else jnp.zeros_like(inputs.v_BLHP)
    carry = y_BLHP, jnp.zeros_like(inputs.state_BHNP)
    return lax.scan(block, carry, jnp.arange(0, num_heads, plan.heads))[0]


def scan_tiles_forward(spec: ScanSpec, inputs: Inputs, documents: Documents):
    return scan_tiles(spec, inputs, documents), (inputs, documents)


def scan_tiles_backward(spec: ScanSpec, residuals, slopes):
    """Gradients of the inputs: for each block of heads the states before its tiles, then the tiles
    in reverse order. Blocks of the same group add up their gradients of queries and keys."""
    (inputs, documents), (d_y_BLHP, d_state_BHNP) = residuals, slopes
    if spec.backend == "mosaic" and inputs.q_BLGN is not None:
        return chunk_mosaic.gradients(inputs, documents.docs_BL, slopes), None
    plan = plan_of(inputs, spec.chunk, backward=True)
    length, num_heads = inputs.v_BLHP.shape[1:3]

    def block(d_inputs: Inputs, head):
        def before(state, token, count: int):
            cut = tile_of(plan, inputs, documents, Place(head, token, count))
            return plan.run(cut._replace(q_BMGN=None), state)[1], state

        def tile(carry, token, count: int, state):
            (d_inputs, d_state), place = carry, Place(head, token, count)
            cut = tile_of(plan, inputs, documents, place)

            def run(arrays, state):
                return plan.run(Tile._make((*arrays, *cut[5:])), state)

            _, pull = jax.vjp(run, tuple(cut[:5]), state)
            d_y_BMHP = part_of(plan, d_y_BLHP, place, head, plan.heads)
            d_arrays, d_state = pull((d_y_BMHP, d_state))
            return (added(plan, d_inputs, d_arrays, place), d_state), None

        state = block_state(plan, inputs.state_BHNP, head)
        _, states = over_tiles(plan, length, before, state)
        carry = d_inputs, block_state(plan, d_state_BHNP, head)
        (d_inputs, d_state), _ = over_tiles(plan, length, tile, carry, states, reverse=True)
        return d_inputs._replace(state_BHNP=put_state(d_inputs.state_BHNP, d_state, head)), None

    def group(d_inputs: Inputs, head):
        heads = head + jnp.arange(0, plan.per_group, plan.heads)
        shape = *inputs.k_BLGN.shape[:2], 1, inputs.k_BLGN.shape[3]
        d_q, d_k = (None if x is None else jnp.zeros(shape, jnp.float32) for x in d_inputs[:2])
        d_group, _ = lax.scan(block, d_inputs._replace(q_BLGN=d_q, k_BLGN=d_k), heads)
        place = Place(head // plan.per_group, 0, length)
        d_q, d_k = (
            put(x, d, place.head, place) for x, d in zip(d_inputs[:2], d_group[:2], strict=True)
        )
        return d_group._replace(q_BLGN=d_q, k_BLGN=d_k), None

    step = (group, plan.per_group) if plan.is_shared else (block, plan.heads)
    zeros = jax.tree.map(jnp.zeros_like, inputs)
    return lax.scan(step[0], zeros, jnp.arange(0, num_heads, step[1]))[0], None


scan_tiles.defvjp(scan_tiles_forward, scan_tiles_backward)


def added(plan: Plan, d_inputs: Inputs, d_arrays, place: Place) -> Inputs:
    """The gradients with those of a tile; those of shared queries and keys are of one group."""
    d_q, d_k, *d_others = d_arrays
    group = 0 if plan.is_shared else place.head // plan.per_group
    others = (put(x, d, place.head, place) for x, d in zip(d_inputs[2:5], d_others, strict=True))
    d_q = put(d_inputs.q_BLGN, d_q, group, place, plan.is_shared)
    d_k = put(d_inputs.k_BLGN, d_k, group, place, plan.is_shared)
    return Inputs._make((d_q, d_k, *others, d_inputs.state_BHNP))


def chunk_scan_step(
    q_BLGN: Float[Array, "B L G N"],
    k_BLGN: Float[Array, "B L G N"],
    v_BLHP: Float[Array, "B L H P"],
    log_decay: Float[Array, "B L H"] | Float[Array, "B L H N"],
    beta_BLH: Float[Array, "B L H"] | None,
    state_BHNP: Float[Array, "B H N P"],
) -> tuple[Float[Array, "B L H P"], Float[Array, "B H N P"]]:
    """`chunk_scan` of few tokens, token by token: for decoding. A token with log_decay 0 and v 0
    (beta 0 with the delta rule) leaves the state as it is."""
    check_sizes(q_BLGN, k_BLGN, v_BLHP, log_decay, beta_BLH, state_BHNP, chunk=64)
    group, dtype = v_BLHP.shape[2] // k_BLGN.shape[2], v_BLHP.dtype
    q_BLHN, k_BLHN = (jnp.repeat(x.astype(jnp.float32), group, axis=2) for x in (q_BLGN, k_BLGN))
    decay = jnp.exp(log_decay.astype(jnp.float32))
    decay_BLHI = decay if decay.ndim == 4 else decay[..., None]
    outputs, state_BHNP = [], state_BHNP.astype(jnp.float32)
    for t in range(v_BLHP.shape[1]):
        state_BHNP = decay_BLHI[:, t, ..., None] * state_BHNP
        k_BHN, value_BHP = k_BLHN[:, t], v_BLHP[:, t].astype(jnp.float32)
        if beta_BLH is not None:
            prediction_BHP = jnp.einsum("BHN,BHNP->BHP", k_BHN, state_BHNP)
            value_BHP = beta_BLH[:, t, :, None].astype(jnp.float32) * (value_BHP - prediction_BHP)
        state_BHNP += k_BHN[..., None] * value_BHP[:, :, None]
        outputs.append(jnp.einsum("BHN,BHNP->BHP", q_BLHN[:, t], state_BHNP))
    return jnp.stack(outputs, axis=1).astype(dtype), state_BHNP
