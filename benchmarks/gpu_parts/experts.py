"""A layer of experts, forward and backward, beside an MLP with as many FLOPs a token."""

import functools
from collections.abc import Callable, Iterator

from gpu_parts.timing import Item, Mixture, Sizes, compare, random, with_gradients


def moe(size: Sizes) -> Iterator[Item]:
    """Router, dispatch, products and weighted sums; the FLOPs are those of the chosen experts."""
    for mixture in size.mixtures:
        yield f"{mixture.name} T{mixture.tokens}", functools.partial(measure, size, mixture)


def measure(size: Sizes, mixture: Mixture) -> dict:
    """TFLOP/s and MFU of each backend of the products, also with experts padded to their even
    share, and as ratios to the MLP."""
    import jax
    import jax.numpy as jnp

    from maxmeg.layers.context import Context
    from maxmeg.layers.mlp import Mlp, MlpSpec
    from maxmeg.layers.moe import Moe, MoeSpec
    from maxmeg.ops.experts.grouped_matmul import BACKENDS
    from maxmeg.ops.experts.routing import RoutingSpec
    from maxmeg.planning.hardware import peak_tflops

    tokens, width, inner = mixture.tokens, mixture.width, mixture.inner
    x_BLD, slope_BLD = random([(1, tokens, width)] * 2)
    context = Context(jnp.arange(tokens)[None])

    def run(layer, x_BLD):
        return layer(x_BLD, context)[0]

    def made(kind, spec):
        layer = jax.jit(lambda key: kind(key, spec))(jax.random.key(0))
        return jax.tree.map(lambda a: a.astype(jnp.bfloat16), layer)

    routing = RoutingSpec(mixture.experts, mixture.chosen)
    layers = {"dense MLP": made(Mlp, MlpSpec(width, mixture.chosen * inner))}
    for backend in size.backends("grouped", tuple(BACKENDS)):
        if backend == "xla" and mixture.experts > 8 and size.on_gpu:
            continue  # it multiplies every token with every expert
        layers[backend] = made(Moe, MoeSpec(width, inner, routing=routing, backend=backend))
    layers["batched"] = made(Moe, MoeSpec(width, inner, routing=routing, backend="batched"))
    layers["padded"] = made(Moe, MoeSpec(width, inner, routing=routing, capacity=1.0, pad=True))
    forward: dict[str, Callable] = {}
    both: dict[str, Callable] = {}
    for name, layer in layers.items():
        forward[name] = functools.partial(jax.jit(run), layer, x_BLD)
        both[name] = functools.partial(with_gradients(run), (layer, x_BLD), slope_BLD)
    flops = 2 * tokens * mixture.chosen * 3 * width * inner
    peak = peak_tflops(jax.local_devices()[0].device_kind)
    found: dict = {}
    for part, calls, amount in (("forward", forward, flops), ("both", both, 3 * flops)):
        rates = compare(calls, amount, "tflops", size, ("dense MLP",))
        found |= {f"{part} {key}": value for key, value in rates.items()}
        for name in layers:
            rate = rates.get(f"{name} tflops")
            if rate and peak:
                found[f"{part} {name} MFU"] = rate / peak
    return found
