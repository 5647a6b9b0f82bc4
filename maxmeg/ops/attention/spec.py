"""Options and operands of an attention call; a backend refuses those that it does not support."""

import dataclasses
import typing

import jax
import jax.numpy as jnp

NEGATIVE = -1e30  # log-sum-exp of a query that sees no key; finite, so that sums of it are too


@dataclasses.dataclass(frozen=True)
class ScoreSpec:
    """The mask of visible keys, and the scores softcap * tanh(scale * q k / softcap).

    Query i is at position offset + i (Operands.offset), key j at position j.
    causal: a query sees no later keys. window: number of keys that a causal query sees, its own
    included (Mistral, Gemma); not causal: |i - j| < window. chunk: a query sees the keys of its own
    chunk of positions (Llama 4). window, chunk, softcap 0: off; scale 0: 1/sqrt(K). merged: outputs
    are merged with those of other keys, so a query that sees no key may have any output whose
    log-sum-exp is at most NEGATIVE. distance: of the buckets of `Operands.bias_NH`. largest:
    also return the largest score of each query.
    """

    causal: bool = True
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    scale: float = 0.0
    merged: bool = False
    distance: int = 0
    largest: bool = False

    def __post_init__(self) -> None:
        for name in ("window", "chunk", "softcap", "scale"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative (0: off)")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionDropout:
    """Dropout of the attention weights. rows_B, first_head: global indices of rows and heads.
    first_query, first_key: place in the sequence of the first query and key, one or one per row; of
    queries also [B, L], as `Operands.offset`."""

    key: jax.Array
    rows_B: jax.Array
    first_head: jax.Array | int
    rate: float = dataclasses.field(metadata={"static": True})
    first_query: jax.Array | int = 0
    first_key: jax.Array | int = 0


class Operands(typing.NamedTuple):
    """Optional operands beside queries, keys and values.

    offset: position of the first query, an int or traced, also one per row [B]; or [B, L], position
    minus index of each query, where positions ascend with gaps. segments_BL: document id of each
    query, and of each key unless key_segments_BM is set; a query sees keys of its own document
    only.
    sinks_H: a learned logit per head in the softmax's denominator (GPT-OSS). bias_NH: what a head
    adds to the score of a query and a key whose distance is in each of N buckets (T5).
    mask_B1LM: the mask that `call.dense_mask` built of this call before.
    """

    offset: jax.Array | int = 0
    segments_BL: jax.Array | None = None
    key_segments_BM: jax.Array | None = None
    sinks_H: jax.Array | None = None
    dropout: AttentionDropout | None = None
    bias_NH: jax.Array | None = None
    mask_B1LM: jax.Array | None = None


def check_shapes(q_BLHK, k_BMGK, v_BMGV, operands: Operands) -> None:
    """ValueError if the shapes of a call do not match."""
    (B, L, H, K), (M, G) = q_BLHK.shape, k_BMGK.shape[1:3]
    if k_BMGK.shape != (B, M, G, K) or v_BMGV.shape[:3] != (B, M, G):
        shapes = f"queries {q_BLHK.shape}, keys {k_BMGK.shape}, values {v_BMGV.shape}"
        raise ValueError(f"{shapes} are not [B, L, H, K], [B, M, G, K] and [B, M, G, V]")
    if H % G:
        raise ValueError(f"query heads={H} must be a multiple of key heads={G}")
    segments, keys = operands.segments_BL, operands.key_segments_BM
    if keys is not None and segments is None:
        raise ValueError("key_segments_BM needs segments_BL, the segments of the queries")
    if segments is not None and keys is None and L != M:
        raise ValueError(f"{L} queries and {M} keys: segments_BL needs key_segments_BM too")
    expected = {"segments_BL": (B, L), "key_segments_BM": (B, M), "sinks_H": (H,)}
    if jnp.ndim(operands.offset) == 2:
        expected["offset"] = (B, L)
    if operands.bias_NH is not None:
        expected["bias_NH"] = (len(operands.bias_NH), H)
    for name, shape in expected.items():
        array = getattr(operands, name)
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, needs {shape}")
