"""What Mamba-2 and linear attention share: projections of the input, of which queries, keys and
values pass a short causal convolution and a SiLU, a scan over the tokens, and a gated norm.

Heads H are sharded over tensor, groups G of heads share queries and keys. Letters beside the
legend's: N size of a key, P of a value, X channels.
"""

import abc
import dataclasses
import typing

import jax
import jax.numpy as jnp

from maxmeg.config.model import ModelConfig
from maxmeg.config.parallel import ParallelConfig
from maxmeg.layers.context import Context
from maxmeg.layers.conv import Depthwise
from maxmeg.layers.linear import Linear, project
from maxmeg.layers.mixer import Mixer, MixerSpec, Widths
from maxmeg.layers.scan import ScanInputs, between, first_step_biases, scan
from maxmeg.ops.cache import CacheSize
from maxmeg.ops.chunk_scan import ScanSpec
from maxmeg.ops.random import split
from maxmeg.parallel.collectives import stored
from maxmeg.parallel.parameter import annotate, parameter

STORED = {"gate": "ssm_gate", "step": "ssm_step", "beta": "ssm_beta"}  # others: own names


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentSpec(MixerSpec):
    """num_heads: of the values. kernel_size: tokens that the convolution reads. bias: of the
    projections. conv_bias: of the convolution. chunk: tokens that the scan multiplies at once.
    backend: of the scan (ops.chunk_scan.ScanSpec)."""

    convolved: typing.ClassVar[tuple[str, ...]] = ("query", "key", "value")

    num_heads: int
    kernel_size: int = 4
    bias: bool = False
    conv_bias: bool = False
    chunk: int = 64
    backend: str = "auto"

    @classmethod
    def settings(cls, config: ModelConfig, parallel: ParallelConfig, mixer: str) -> dict:
        return super().settings(config, parallel, mixer) | {"norm_eps": config.norm_eps}

    @property
    @abc.abstractmethod
    def groups(self) -> int:
        """Number of groups of heads."""

    @property
    @abc.abstractmethod
    def head_sizes(self) -> tuple[int, int]:
        """(N, P)."""

    @property
    def projections(self) -> dict[str, tuple[int, str]]:
        """Width and logical axis of each projection of the input."""
        key_size, value_size = self.head_sizes
        values, keys = (self.num_heads * value_size, "heads"), (self.groups * key_size, "kv_heads")
        widths = {"gate": values, "value": values, "key": keys, "query": keys}
        return widths | {"step": (self.num_heads, "heads")}

    @property
    def width(self) -> int:
        """Number of channels of all heads."""
        return self.projections["value"][0]

    def weights(self) -> int:
        """Of the projections of the input and of the output."""
        return self.hidden_size * (
            self.width + sum(width for width, _ in self.projections.values())
        )

    def halos(self, tensor: int = 1) -> tuple[int, ...]:
        widths = self.widths(tensor).stored
        return tuple((self.kernel_size - 1) * widths[name] // tensor for name in self.convolved)

    def parts(self, name: str) -> tuple[int, ...]:
        """`Linear.parts` of a projection."""
        return ()

    def widths(self, tensor: int = 1) -> Widths:
        copies = max(self.groups, tensor) // self.groups
        inputs = {
            STORED.get(name) or name: width * (copies if axis == "kv_heads" else 1)
            for name, (width, axis) in self.projections.items()
        }
        return Widths(
            stored=inputs | {"scan_output": self.width},
            queries_keys_values=sum(inputs.values()),
            last_input=self.width,
        )


class Recurrent(Mixer):
    """With fewer groups than devices along tensor, each device has one of them
    (parallel.rules.KvSlice). num_keys: number of random keys. decays: initial decay rates are
    uniform between these. constant_steps: whether the initial biases of the steps are 1. low_rank:
    projections of a projection to `rank` elements."""

    num_keys: int
    decays = 1.0, 16.0
    constant_steps = False
    low_rank: tuple[str, ...] = ()

    def __init__(self, key: jax.Array, spec: typing.Any):
        keys, self.spec = split(key, self.num_keys), spec
        for name, (width, axis) in spec.projections.items():
            size, axis_in = spec.hidden_size, "embed"
            if name in self.low_rank:
                down = Linear(keys.pop(), (size, spec.rank), (axis_in, "latent"), spec.std)
                setattr(self, f"{name}_down", down)
                size, axis_in = spec.rank, "latent"
            options = spec.std, spec.bias, spec.parts(name)
            linear = Linear(keys.pop(), (size, width), (axis_in, axis), *options)
            annotate(linear, reads_width=axis_in != "latent")
            setattr(self, name, linear)
        for name in spec.convolved:
            width, axis = spec.projections[name]
            conv = Depthwise(keys.pop(), width, spec.kernel_size, spec.conv_bias, axis)
            setattr(self, f"{name}_conv", conv)
        for name in ("key", "query", "key_conv", "query_conv"):
            annotate(getattr(self, name), num_kv_heads=spec.groups)
        rates_H = between(keys.pop(), spec.num_heads, *self.decays)
        biases_I = first_step_biases(keys.pop(), spec.projections["step"][0])
        biases_I = jnp.ones_like(biases_I) if self.constant_steps else biases_I
        self.decay_log = parameter(jnp.log(rates_H), "heads", exact=True)
        self.step_bias = parameter(biases_I, "heads", exact=True)
        sizes, axes = (spec.width, spec.hidden_size), ("heads", "embed")
        self.out = Linear(keys.pop(), sizes, axes, spec.out_std, spec.bias)

    def steps(self, step_BLI: jax.Array) -> jax.Array:
        """Step sizes, in float32."""
        return jax.nn.softplus(step_BLI.astype(jnp.float32) + self.step_bias[...])

    def projected(self, h_BLD: jax.Array, ctx: Context) -> dict[str, jax.Array]:
        """Outputs of all projections, by name."""
        direct = [name for name in self.spec.projections if name not in self.low_rank]
        outputs = project([getattr(self, name) for name in direct], h_BLD, ctx)
        projections = dict(zip(direct, outputs, strict=True))
        for name in self.low_rank:
            down = getattr(self, f"{name}_down")(h_BLD, ctx)
            projections[name] = getattr(self, name)(down, ctx)
        return {name: stored(y, STORED.get(name) or name) for name, y in projections.items()}

    def convolved(
        self, parts: dict[str, jax.Array], ctx: Context, cache: dict | None
    ) -> tuple[dict[str, jax.Array], dict]:
        """(`parts`, in it the convolved queries, keys and values by heads; their new caches)."""
        new, (key_size, value_size) = {}, self.spec.head_sizes
        for name in self.spec.convolved:
            conv, y_BLX = getattr(self, f"{name}_conv"), parts[name]
            if cache is None:
                y_BLX = conv.convolved(y_BLX, ctx.segments_BL)
            else:
                y_BLX, new[name] = conv.continued(y_BLX, cache[name], ctx)
            size = value_size if name == "value" else key_size
            parts[name] = jax.nn.silu(y_BLX).reshape(*y_BLX.shape[:2], -1, size)
        return parts, new

    def scanned(
        self, inputs: ScanInputs, ctx: Context, cache: dict | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """(output [B, L, H, P], new states)."""
        states = None if cache is None else cache["state"]
        spec = ScanSpec(self.spec.chunk, self.spec.backend)
        y_BLHP, states = scan(inputs, ctx, states, spec)
        return stored(y_BLHP, "scan_output"), states

    def init_cache(self, size: CacheSize) -> dict[str, jax.Array]:
        """Of each lane, the last inputs of the convolutions and the float32 state of the scan."""
        convs = {name: getattr(self, f"{name}_conv") for name in self.spec.convolved}
        states = {name: conv.init_cache(size) for name, conv in convs.items()}
        shape = size.lanes, self.decay_log.shape[0], *self.spec.head_sizes
        return states | {"state": jnp.zeros(shape, jnp.float32)}
