"""Self-attention: multi-head, grouped-query or multi-query, with a key/value cache for decoding."""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxmeg.config.context import KINDS, strategy_of
from maxmeg.config.layers import SHARED
from maxmeg.config.mixers import QkNorm
from maxmeg.config.model import ModelConfig, Position
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.setting import shared_values
from maxmeg.distributed.attention.context import ContextCall, attention_over_context, padded_heads
from maxmeg.distributed.attention.context_choice import ContextStrategy
from maxmeg.distributed.attention.rounds import KeyValueExpansion
from maxmeg.layers.context import Context, TableMakers
from maxmeg.layers.linear import Linear, project
from maxmeg.layers.mixer import STREAM, Mixer, MixerSpec, Widths
from maxmeg.layers.norm import Norm, NormSpec
from maxmeg.layers.qk_clip import LARGEST, QkClip, scale_heads
from maxmeg.ops.attention.call import attention_with_lse, dense_mask, output_and_largest
from maxmeg.ops.attention.spec import AttentionDropout, Operands, ScoreSpec
from maxmeg.ops.attention.temperature import Temperature
from maxmeg.ops.cache import CacheSize, cached_attention, empty_pages
from maxmeg.ops.random import split
from maxmeg.ops.rope import RotaryScaling, RotarySpec, rotate
from maxmeg.parallel.collectives import axis_size, first_index, stored
from maxmeg.parallel.maxima import Max
from maxmeg.parallel.mesh import TENSOR_AXES
from maxmeg.parallel.parameter import annotate, parameter

DROPOUT_PLACE = 0


def rotary_spec(config: ModelConfig, is_local: bool = False) -> RotarySpec:
    values = shared_values(RotarySpec, config.rotary)
    if is_local and config.rotary.local_base:
        values |= {"base": config.rotary.local_base, "scaling": RotaryScaling()}
    else:
        scaling = shared_values(RotaryScaling, config.rotary)
        values["scaling"] = RotaryScaling(kind=config.rotary.scaling.value, **scaling)
    return RotarySpec(**values)


@dataclasses.dataclass(frozen=True)
class AttentionSpec(MixerSpec):
    """rotary, qk_norm None: no rotary embedding, no normalization of queries and keys.

    qk_norm_over: "head" (each head), "heads" (all heads of a token together) or "l2" (each head,
    without a weight). causal, window, chunk, softcap, scale: as in ops.attention.spec.ScoreSpec.
    temperature: of queries that grow with their position, or None.
    keys_as_values: values are the outputs of the key projection. value_norm: normalization of the
    values of each head, without a weight, or None. sinks: a learned logit per head in the softmax's
    denominator. buckets, distance: of the relative biases (ops.attention.spec); 0: none.
    output_gate: outputs of heads are multiplied by the sigmoid of gates, which follow the queries
    in their projection. context: how devices with other parts of the sequence attend to each
    other's keys. clip: QK-clip, or None. keys_from, keys_to: the array of the residual stream with
    the keys and values of another layer, which it reads in place of its own, or to which it writes
    its own; "" for none.
    spans_devices: whether queries attend to keys on other devices along context.
    """

    name = "attention"
    spans_devices: typing.ClassVar[bool] = True

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: RotarySpec | None = RotarySpec()
    qk_norm: NormSpec | None = None
    qk_norm_over: str = "head"
    keys_as_values: bool = False
    value_norm: NormSpec | None = None
    bias_qkv: bool = False
    bias_out: bool = False
    dropout: float = 0.0
    causal: bool = True
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    scale: float = 0.0
    temperature: Temperature | None = None
    sinks: bool = False
    output_gate: bool = False
    buckets: int = 0
    distance: int = 0
    backend: str = "auto"
    context: ContextStrategy = ContextStrategy()
    clip: QkClip | None = None
    keys_from: str = ""
    keys_to: str = ""

    @classmethod
    def settings(cls, config: ModelConfig, parallel: ParallelConfig, mixer: str) -> dict:
        heads, norm, kind = config.attention, NormSpec.of(config), SHARED.get(mixer, mixer)
        is_local = kind.startswith("local")
        is_nope, in_encoder = mixer == "nope_attention", mixer == "encoder_attention"
        is_rotary = config.position is Position.rotary and not is_nope
        normalizes = heads.qk_norm not in (QkNorm.none, *[QkNorm.l2] * is_nope)
        growth = heads.temperature_scale, heads.temperature_length, heads.temperature_offset
        grows = heads.temperature_length and (is_nope or not config.has("nope_attention"))
        is_relative = config.position is Position.relative
        strategy = strategy_of(parallel, mixer if mixer in KINDS else "attention")
        return (
            super().settings(config, parallel, mixer)
            | (shared_values(AttentionSpec, config.relative) if is_relative else {})
            | {
                "num_kv_heads": (heads.local_kv_heads if is_local else 0) or config.kv_heads,
                "head_dim": config.local_head_size if is_local else config.head_size,
                "rotary": rotary_spec(config, is_local) if is_rotary else None,
                "qk_norm": norm if normalizes else None,
                "qk_norm_over": heads.qk_norm.value,
                "keys_as_values": heads.keys_as_values and not is_local,
                "value_norm": norm if heads.value_norm else None,
                "causal": heads.causal and not in_encoder,
                "window": heads.window if is_local else 0,
                "chunk": heads.chunk if is_local else 0,
                "temperature": Temperature(*growth) if grows else None,
                "scale": config.without_mup().attention.scale,
                "context": ContextStrategy(strategy, parallel.context_inner),
                "keys_from": f"keys_of_{kind}" if mixer in SHARED else "",
                "keys_to": f"keys_of_{mixer}" if config.has(f"shared_{mixer}") else "",
            }
        )

    @property
    def reads_stream(self) -> tuple[str, ...]:
        return (self.keys_from,) if self.keys_from else ()

    def stream(self, x_BLD: jax.Array, ctx: Context) -> dict[str, jax.Array]:
        if not self.keys_to:
            return {}
        heads = max(self.num_kv_heads // axis_size(TENSOR_AXES), 1)
        shape = *ctx.positions_BL.shape, 2, heads, self.head_dim
        return {self.keys_to: jnp.zeros(shape, x_BLD.dtype)}

    @property
    def key_size(self) -> int:
        """Size of a head's queries and keys."""
        return self.head_dim

    @property
    def head_output_size(self) -> int:
        """Size of a head's values and outputs."""
        return self.head_dim

    @property
    def travelling(self) -> tuple[int, int]:
        """What devices along context send: (heads, elements of each for a token)."""
        return self.num_kv_heads, self.key_size + self.head_output_size

    @property
    def rotated_size(self) -> int:
        """Size of the part of a head that `rotary` is about."""
        return self.head_dim

    def tables(self, dtype: jax.typing.DTypeLike) -> TableMakers:
        makers: TableMakers = {self.mask_key: functools.partial(self.mask, dtype)}
        if self.rotary is None:
            return makers
        rotary = self.rotary, self.rotated_size
        return makers | {rotary: lambda ctx: ctx.rotation(*rotary)}

    @property
    def mask_key(self) -> tuple:
        """What the mask, and its form, depend on."""
        sizes = self.key_size, self.head_output_size
        return self.causal, self.window, self.chunk, *sizes, self.backend

    def mask(self, dtype: jax.typing.DTypeLike, ctx: Context) -> jax.Array | None:
        """`Operands.mask_B1LM` of self-attention among the tokens of `ctx` in training."""
        is_other = self.reads_memory or not self.spans_devices or ctx.source is not None
        if is_other or ctx.cache_places is not None or axis_size(ctx.context_axes) > 1:
            return None
        shape = *ctx.positions_BL.shape, 1
        sizes = self.key_size, self.key_size, self.head_output_size
        arrays = (jax.ShapeDtypeStruct((*shape, size), dtype) for size in sizes)
        present: typing.Any = True  # in place of an operand whose shape no backend asks for
        operands = Operands(
            segments_BL=self.documents(ctx),
            sinks_H=present if self.sinks else None,
            dropout=present if self.dropout and ctx.training else None,
            bias_NH=present if self.buckets else None,
        )
        return dense_mask((*arrays, self.score_spec(ctx), operands), backend=self.backend)

    def documents(self, ctx: Context) -> jax.Array | None:
        """Document of each token; in packed rows a chunk, which counts from the start of its
        document, is a document of its own."""
        if not self.chunk or ctx.segments_BL is None:
            return ctx.segments_BL
        return ctx.segments_BL * ctx.sequence.whole_length + ctx.positions_BL // self.chunk

    def score_spec(self, ctx: Context | None = None) -> ScoreSpec:
        """ctx: None in decoding."""
        is_packed = ctx is not None and ctx.segments_BL is not None
        return ScoreSpec(
            causal=self.causal,
            window=self.window,
            chunk=0 if is_packed else self.chunk,
            softcap=self.softcap,
            scale=self.scale,
            distance=self.distance,
            largest=ctx is not None and ctx.training and self.clip is not None,
        )

    @property
    def bias_shape(self) -> tuple[int, int] | None:
        return (self.buckets, self.num_heads) if self.buckets else None

    def make(self, key: jax.Array) -> "Attention":
        return Attention(key, self)

    def weights(self) -> int:
        heads = (2 + self.output_gate) * self.num_heads
        heads += 0 if self.keys_from else (2 - self.keys_as_values) * self.num_kv_heads
        return self.hidden_size * self.head_dim * heads

    def parts(self, length: int, memory_length: int) -> int:
        """Number of parts of a row of `length` tokens; tokens attend within their part only."""
        return 1

    def scores(self, length: int) -> int:
        """Multiplications of q k and of scores with values, without pairs that windows mask."""
        pairs = length * min(length, self.chunk or length)
        pairs -= max(length - self.window, 0) ** 2 if self.window else 0
        return self.num_heads * (self.key_size + self.head_output_size) * pairs

    def widths(self, tensor: int = 1) -> Widths:
        keys = max(self.num_kv_heads, tensor) * self.head_dim
        queries = self.num_heads * self.head_dim * (1 + self.output_gate)
        values = {} if self.keys_as_values else {"value": keys}
        key_widths = {} if self.keys_from else {"key": keys, **values}
        return self._with_heads({"query": queries, **key_widths})

    def _with_heads(self, stored: dict[str, int], gathered: tuple[int, ...] = ()) -> Widths:
        queries = self.num_heads * self.key_size
        return Widths(
            stored=stored,
            queries_keys_values=sum(stored.values()),
            normalized=queries + stored.get("key", 0) if self.qk_norm else 0,
            gathered=gathered,
            head_outputs=self.num_heads * self.head_output_size,
        )


def qk_norm(spec: AttentionSpec, num_heads: int, axis: str) -> Norm | None:
    if spec.qk_norm is None:
        return None
    if spec.qk_norm_over == "heads":
        return Norm(num_heads * spec.head_dim, spec.qk_norm, axis, over=TENSOR_AXES)
    return Norm(spec.head_dim, spec.qk_norm, "head_dim", weighted=spec.qk_norm_over == "head")


def normalized(x_BLI: jax.Array, norm: Norm | None, heads: tuple[int, ...]) -> jax.Array:
    """x [B, L, heads x K] reshaped to [B, L, heads, K] and normalized."""
    if norm is None:
        return x_BLI.reshape(heads)
    return norm(x_BLI).reshape(heads) if norm.over else norm(x_BLI.reshape(heads))


class Attention(Mixer):
    """out(attention(query x, key x, value x)); heads are sharded over tensor.

    With fewer key/value heads than devices along tensor, each device has one of them
    (parallel.rules.KvSlice).
    """

    fused_projections = (("query", "key", "value"),)

    def __init__(self, key: jax.Array, spec: AttentionSpec):
        keys = split(key, 4)
        self.spec = spec
        D, K = spec.hidden_size, spec.head_dim
        H, G, std, bias = spec.num_heads, spec.num_kv_heads, spec.std, spec.bias_qkv
        queries, of_head = H * K * (1 + spec.output_gate), (K,) * (1 + spec.output_gate)
        self.query = Linear(keys[0], (D, queries), ("embed", "heads"), std, bias, of_head)
        inward, has_keys = ((D, G * K), ("embed", "kv_heads"), std, bias, (K,)), not spec.keys_from
        has_values = has_keys and not spec.keys_as_values
        self.key: typing.Any = Linear(keys[1], *inward) if has_keys else None
        self.value = Linear(keys[2], *inward) if has_values else None
        if not has_values:
            self.fused_projections = (("query", "key"),) if has_keys else ()
        self.out = Linear(keys[3], (H * K, D), ("heads", "embed"), spec.out_std, spec.bias_out)
        self.sinks = parameter(jnp.zeros(H), "heads") if spec.sinks else None
        self.query_norm = qk_norm(spec, H, "heads")
        self.key_norm = qk_norm(spec, G, "kv_heads") if has_keys else None
        values = spec.value_norm
        self.value_norm = None if values is None else Norm(K, values, "head_dim", weighted=False)
        annotate((self.key, self.value, self.key_norm), num_kv_heads=G)

    def __call__(
        self, h_BLD: Float[Array, "B L D"], ctx: Context, cache: tuple | None = None
    ) -> tuple[Float[Array, "B L D"], tuple | None, dict]:
        """(partial sums over tensor, new cache, values of `reported`)."""
        aux, projections = {}, [self.query, self.key, self.value]
        projections = [linear for linear in projections if linear is not None]
        q_BLI, *outputs = project(projections, h_BLD, ctx)
        heads = (*q_BLI.shape[:2], -1, self.spec.head_dim)
        q_BLI, gate_BLI = self.queries_and_gates(stored(q_BLI, "query"))
        q_BLHK = self.rotated(normalized(q_BLI, self.query_norm, heads), ctx)
        k_BLGK, v_BLGK = self.keys_and_values_of(outputs, heads, ctx)
        if self.spec.temperature is not None:
            q_BLHK = self.spec.temperature.scaled(q_BLHK, ctx.positions_BL)
        if cache is None:
            out_BLHK, aux = self.core(q_BLHK, k_BLGK, v_BLGK, ctx)
        else:
            assert ctx.cache_places is not None and ctx.segments_BL is None
            bias_NH = ctx.bias_NH if self.spec.buckets else None
            settings = ctx.cache_places, self.spec.score_spec(), self.sink_logits(), bias_NH
            out_BLHK, cache = cached_attention(q_BLHK, (k_BLGK, v_BLGK), cache, *settings)
        out_BLI = out_BLHK.reshape(*heads[:2], -1)
        if gate_BLI is not None:
            out_BLI *= jax.nn.sigmoid(gate_BLI)
        if self.spec.keys_to:
            aux |= {STREAM: {self.spec.keys_to: jnp.stack((k_BLGK, v_BLGK), axis=2)}}
        return self.out(out_BLI, ctx), cache, aux

    def keys_and_values_of(
        self, outputs: list[jax.Array], heads: tuple[int, ...], ctx: Context
    ) -> tuple[jax.Array, jax.Array]:
        """[B, L, G, K] each: from the outputs of their projections, or from an earlier layer."""
        if not outputs:
            kv_BL2GK = ctx.stream[self.spec.keys_from]
            return kv_BL2GK[:, :, 0], kv_BL2GK[:, :, 1]
        k_BLI = stored(outputs[0], "key")
        v_BLI = stored(outputs[1], "value") if outputs[1:] else k_BLI
        k_BLGK = normalized(k_BLI, self.key_norm, heads)
        v_BLGK = normalized(v_BLI, self.value_norm, heads)
        return self.rotated(k_BLGK, ctx), v_BLGK

    def rotated(self, x_BLHK: jax.Array, ctx: Context) -> jax.Array:
        rotary = self.spec.rotary
        if rotary is None:
            return x_BLHK
        return rotate(x_BLHK, ctx.rotation(rotary, self.spec.rotated_size), rotary.interleaved)

    def queries_and_gates(self, q_BLI: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Of a projection whose heads have a query and, with `output_gate`, then a gate."""
        if not self.spec.output_gate:
            return q_BLI, None
        both_BLHK = q_BLI.reshape(*q_BLI.shape[:2], -1, 2 * self.spec.head_dim)
        q_BLHK, gate_BLHK = jnp.split(both_BLHK, 2, axis=-1)
        return q_BLHK.reshape(*q_BLI.shape[:2], -1), gate_BLHK.reshape(*q_BLI.shape[:2], -1)

    def core(self, q_BLHK, k_BMGK, v_BMGK, ctx: Context) -> tuple[jax.Array, dict]:
        """(attention over the whole sequence, whose parts other devices along context may hold;
        values of `reported`)."""
        if axis_size(ctx.context_axes) > 1:
            kv_BMGI = jnp.concatenate((k_BMGK, v_BMGK), axis=-1)
            return self.over_context(q_BLHK, kv_BMGI, KeyValueExpansion(k_BMGK.shape[-1]), (), ctx)
        call = q_BLHK, k_BMGK, v_BMGK, self.spec.score_spec(ctx), self.operands(q_BLHK, ctx)
        results = attention_with_lse(*call, backend=self.spec.backend)
        return self.reported(*output_and_largest(*results))

    def over_context(
        self, q_BLHK, kv_BMGI, expand: KeyValueExpansion, weights, ctx: Context
    ) -> tuple[jax.Array, dict]:
        settings = self.spec.score_spec(ctx), self.operands(q_BLHK, ctx), self.spec.backend
        call = ContextCall(q_BLHK, kv_BMGI, expand, weights, *settings, ctx.chunks_BC)
        return self.reported(*attention_over_context(call, self.spec.context))

    def reported(self, out_BLHV, largest_H: jax.Array | None) -> tuple[jax.Array, dict]:
        """(output, the largest logit of all heads as auxiliary value, -inf for heads of other
        devices). largest_H: of this device's heads; None: nothing is reported."""
        if largest_H is None:
            return out_BLHV, {}
        first = first_index(TENSOR_AXES, len(largest_H))
        return out_BLHV, {LARGEST: Max(padded_heads(largest_H, first, self.spec.num_heads))}

    def update(self, aux: dict[str, jax.Array]) -> None:
        clip, spec = self.spec.clip, self.spec
        if clip is None:
            return
        H, G, K = spec.num_heads, spec.num_kv_heads, spec.head_dim
        largest_H = aux[LARGEST]
        eta_G = clip.shrinkage(jnp.max(largest_H.reshape(*largest_H.shape[:-1], G, -1), axis=-1))
        eta_H = jnp.repeat(eta_G, H // G, axis=-1)
        gates = [(jnp.ones_like(eta_H), K)] * spec.output_gate
        scale_heads(self.query, (eta_H**clip.alpha, K), *gates)
        scale_heads(self.key, (eta_G ** (1 - clip.alpha), K))

    def operands(self, q_BLHK: jax.Array, ctx: Context) -> Operands:
        spec, drop = self.spec, None
        if spec.dropout and ctx.training:
            first = first_index(TENSOR_AXES, q_BLHK.shape[2])
            drop = AttentionDropout(ctx.key(DROPOUT_PLACE), ctx.rows(), first, spec.dropout)
        bias_NH, mask_B1LM = ctx.bias_NH if spec.buckets else None, ctx.tables.get(spec.mask_key)
        arrays = self.sink_logits(), drop, bias_NH, mask_B1LM
        return Operands(0, spec.documents(ctx), None, *arrays)

    def sink_logits(self) -> jax.Array | None:
        return None if self.sinks is None else self.sinks[...]

    def init_cache(self, size: CacheSize) -> tuple[jax.Array, ...]:
        """Pages of keys and of values, in the weights' dtype."""
        weight, K = (self.key or self.query).weight[...], self.spec.head_dim
        G = max(self.spec.num_kv_heads // axis_size(TENSOR_AXES), 1)
        keys, values = (empty_pages(size, G, K, weight.dtype) for _ in "kv")
        return keys, values
