"""What an attention call can ask for; every backend takes these and refuses what it cannot do."""

import dataclasses
import typing

import jax

NEGATIVE = -1e30  # log-sum-exp of a query that sees nothing; finite, so that what follows is too


@dataclasses.dataclass(frozen=True)
class ScoreSpec:
    """Which keys a query sees, and its scores, softcap * tanh(scale * q k / softcap).

    Query i lies at position offset + i (offset: of `Operands`), key j at position j.
    causal: keys after the query's position are unseen.
    window: keys that a causal query sees, its own among them (Mistral, Gemma); else |i - j| <
    window. chunk: only keys of the query's own chunk of positions (Llama 4). scale 0: 1/sqrt(K).
    Of window, chunk and softcap 0 is off.
    """

    causal: bool = True
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    scale: float = 0.0

    def __post_init__(self) -> None:
        for name in ("window", "chunk", "softcap", "scale"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative (0: off)")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionDropout:
    """Rate and where the local heads and rows lie in the global batch and model."""

    key: jax.Array
    rows_B: jax.Array
    first_head: jax.Array | int
    rate: float = dataclasses.field(metadata={"static": True})


class Operands(typing.NamedTuple):
    """What a call may have beside queries, keys and values.

    offset: position of the first query, an int or traced. segments_BL: document of each query, and
    of each key unless key_segments_BM gives those; a query sees keys of its own document only.
    sinks_H: a learned logit a head that takes its share of the softmax and has no value (GPT-OSS).
    dropout: of the softmax's weights.
    """

    offset: jax.Array | int = 0
    segments_BL: jax.Array | None = None
    key_segments_BM: jax.Array | None = None
    sinks_H: jax.Array | None = None
    dropout: AttentionDropout | None = None


def check_shapes(q_BLHK, k_BMGK, v_BMGV, operands: Operands) -> None:
    """ValueError unless the arrays of a call fit each other."""
    (B, L, H, K), (M, G) = q_BLHK.shape, k_BMGK.shape[1:3]
    if k_BMGK.shape != (B, M, G, K) or v_BMGV.shape[:3] != (B, M, G):
        shapes = f"queries {q_BLHK.shape}, keys {k_BMGK.shape}, values {v_BMGV.shape}"
        raise ValueError(f"{shapes} are not [B, L, H, K], [B, M, G, K] and [B, M, G, V]")
    if H % G:
        raise ValueError(f"query heads={H} must be a multiple of key heads={G}")
    segments, keys = operands.segments_BL, operands.key_segments_BM
    if keys is not None and segments is None:
        raise ValueError("key_segments_BM says nothing without segments_BL, those of the queries")
    if segments is not None and keys is None and L != M:
        raise ValueError(f"{L} queries and {M} keys: segments_BL needs key_segments_BM beside it")
    expected = {"segments_BL": (B, L), "key_segments_BM": (B, M), "sinks_H": (H,)}
    for name, shape in expected.items():
        array = getattr(operands, name)
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, needs {shape}")
