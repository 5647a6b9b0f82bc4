"""Time of 8-bit and 4-bit matrix products compared with bfloat16, and the optimizer's share of a
step."""

import dataclasses
import functools
from collections.abc import Callable, Iterator

from gpu_parts.steps import make_run, run_config
from gpu_parts.timing import Item, Sizes, compare, interleaved, random, with_gradients

OPTIMIZERS: dict[str, tuple[tuple[str, object], ...]] = {
    "AdamW": (),
    "AdamW, moments in fp8": (("optim.moments", "float8"),),
    "Muon": (("optim.optimizer", "muon"),),
    "AdamW, offload": (("optim.offload", True),),
}


def fp8(size: Sizes) -> Iterator[Item]:
    """A projection with its gradients, in bfloat16 and with every recipe of train.quantization.
    Inputs and gradients are quantized in the call, the weight before it, as once a step."""
    for name, tokens, width, out in size.projections:
        shape = f"{name}, T{tokens} {width}x{out}"
        yield shape, functools.partial(measure_fp8, size, tokens, width, out)


def measure_fp8(size: Sizes, tokens: int, width: int, out: int) -> dict:
    import jax.numpy as jnp

    from maxmeg.config.quantization import QuantizationConfig, QuantizationRecipe
    from maxmeg.ops.backend import target_device
    from maxmeg.ops.quantized import check_device
    from maxmeg.ops.recipes import recipe_of

    x_TI, w_IO, slope_TO = random([(tokens, width), (width, out), (tokens, out)])
    products, skipped = {"bf16": jnp.matmul}, {}
    for kind in ("tensorwise", "blockwise", "mxfp8", "nvfp4"):
        recipe = recipe_of(QuantizationConfig(QuantizationRecipe[kind]))
        assert recipe is not None
        try:
            check_device(recipe, target_device())
        except ValueError as error:
            skipped[f"{kind} skipped"] = str(error)
        else:
            products[kind] = quantized_product(recipe, w_IO)
    calls = {
        name: functools.partial(with_gradients(product), (x_TI, w_IO), slope_TO)
        for name, product in products.items()
    }
    return compare(calls, 3 * 2 * tokens * width * out, "tflops", size, ("bf16",)) | skipped


def quantized_product(recipe, w_IO) -> Callable:
    """(inputs, weight) -> product, with codes of the weight."""
    import jax
    import jax.numpy as jnp

    from maxmeg.ops.quantized import matmul

    copies = recipe.weights(w_IO, jnp.max(jnp.abs(w_IO)))
    key = jax.random.key_data(jax.random.key(0)) if recipe.draws else None
    return lambda x, w: matmul(x, w, copies[0], copies[-1], recipe, key)


def optimizer(size: Sizes) -> Iterator[Item]:
    """A step of one microbatch, the update of its parameters alone, and its share of the step."""
    for name in size.optimizers:
        model = dataclasses.replace(size.optimized, settings=OPTIMIZERS[name])
        layers = f"{model.name}, {model.layers} layers, {name}"
        yield layers, functools.partial(measure_optimizer, size, model)


def measure_optimizer(size: Sizes, model) -> dict:
    import jax
    import jax.numpy as jnp

    from maxmeg.parallel.trainable import trained

    (samples, recompute) = model.choices[0]
    config = run_config(model, samples, recompute)
    step, state, batch, controls = make_run(config)
    held = [state]
    del state

    def whole():
        held[0], metrics = step(held[0], batch, controls)
        return metrics["loss"]

    seconds = interleaved({"step": whole}, size.rounds, size.half)
    small = functools.partial(jnp.full_like, fill_value=1e-4, dtype=jnp.float32)
    gradients = jax.jit(functools.partial(jax.tree.map, small))(trained(held[0].model))
    update = update_alone(config, held[0])

    def alone():
        held[0] = update(held[0], gradients)
        return held[0].step

    seconds |= interleaved({"optimizer": alone}, size.rounds, size.half)
    found = {f"{name}_ms": value * 1e3 for name, value in seconds.items()}
    share = {"optimizer of step": seconds["optimizer"] / seconds["step"]}
    return found | share | {"samples": samples, "length": model.length, "recompute": recompute}


def update_alone(config, state) -> Callable:
    """The jitted (state, gradients) -> state after the optimizer's update, as in a train step."""
    import jax
    import jax.numpy as jnp

    from maxmeg.inference.mesh import local_mesh
    from maxmeg.optim.build import clip, make_optimizer
    from maxmeg.optim.update import Parts, update
    from maxmeg.parallel.trainable import frozen, joined, saved

    mesh = local_mesh()
    transformation = make_optimizer(config.optim, mesh)
    aux = [None] * (len(state.model.stack.groups) + 1)  # the layers' state stays

    def run(state, gradients):
        gradients, norm = clip(gradients, config.optim.clip_norm)
        finite, key = jnp.isfinite(norm), jax.random.wrap_key_data(state.key)
        old = Parts(saved(state.model), state.remainders, state.optimizer, state.ema)
        rates = {"learning_rate": 1e-6, "weight_decay": 0.01}
        optimize = functools.partial(transformation.update, key=key, **rates)
        parts = config.optim, gradients, old, aux, finite, mesh, state.step
        new = update(optimize, *parts)
        model = joined(new.model, frozen(state.model))
        parts = {"optimizer": new.moments, "remainders": new.remainders, "ema": new.ema}
        return dataclasses.replace(state, model=model, **parts)

    places = jax.tree.map(lambda a: a.sharding, state)
    return jax.jit(run, donate_argnums=0, out_shardings=places)
