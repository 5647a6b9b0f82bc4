"""Whole train steps on one GPU: tokens a second and MFU, and a step's parts one by one."""

import functools
import statistics
import time
from collections.abc import Iterator

from gpu_parts.timing import Item, Model, Sizes, interleaved, with_gradients

ALL_LAYERS = {"llama3-8b": 32, "tiny": 4}  # of what is measured with fewer


def run_config(model: Model, samples: int, recompute: str):
    """Config of one microbatch on one device."""
    from maxmeg.config.architectures import use_architecture
    from maxmeg.config.schema import Config
    from maxmeg.config.setting import get, set_field

    config = Config()
    config.model.vocab_size = 512
    config = config if model.name == "tiny" else use_architecture(config, model.name)
    config.model.recompute = recompute
    config.model.num_layers = model.layers or config.model.num_layers
    for name, value in model.settings:
        kind = type(get(config, name))
        set_field(config, name, kind(value))
    config.data.sequence_length = model.length
    config.train.global_batch_size = samples
    return config


def make_run(config):
    """(train step, state, batch, controls) on one device, random tokens."""
    import numpy as np

    from maxmeg.checkpoint.initialize import create_state
    from maxmeg.data.placement import local_rows, place_batch, place_flag
    from maxmeg.inference.mesh import local_mesh
    from maxmeg.optim.build import make_optimizer
    from maxmeg.state import abstract_state
    from maxmeg.step import make_train_step

    mesh = local_mesh()
    optimizer = make_optimizer(config.optim, mesh)
    abstract = abstract_state(config, optimizer, mesh)
    shape = (config.train.global_batch_size, config.data.sequence_length)
    tokens = np.random.default_rng(0).integers(
        0, config.model.vocab_size, (shape[0], shape[1] + 1), dtype=np.int32
    )
    arrays = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        "loss_mask": np.ones(shape, np.float32),
    }
    batch = place_batch(arrays, local_rows(mesh), mesh, shape[0])
    controls = {
        "learning_rate": np.float32(3e-4),
        "weight_decay": np.float32(0.01),
        "stop": place_flag(False, mesh),
    }
    step = make_train_step(config, mesh, optimizer, abstract)
    return step, create_state(config, optimizer, abstract), batch, controls


def train_once(size: Sizes, model: Model, samples: int, recompute: str) -> dict:
    import jax

    from maxmeg.planning.cost.flops import training_flops
    from maxmeg.planning.hardware import peak_tflops

    config = run_config(model, samples, recompute)
    step, state, batch, controls = make_run(config)
    started, losses = time.perf_counter(), []
    for i in range(size.steps):
        state, metrics = step(state, batch, controls)
        losses.append(float(metrics["loss"]))
        if i == 0:
            first = time.perf_counter() - started
    spent = []
    for _ in range(size.rounds):
        started = time.perf_counter()
        for _ in range(size.half):
            state, metrics = step(state, batch, controls)
        jax.block_until_ready(metrics["loss"])
        spent.append((time.perf_counter() - started) / size.half)
    device = jax.local_devices()[0]
    seconds, peak = statistics.median(spent), peak_tflops(device.device_kind)
    flops = training_flops(config.model, model.length, samples)
    stats = device.memory_stats() or {}
    return {
        "samples": samples,
        "length": model.length,
        "recompute": recompute,
        "layers": config.model.num_layers,
        "step_ms": seconds * 1e3,
        "tokens_per_s": samples * model.length / seconds,
        "tflops": flops / seconds / 1e12,
        "mfu": flops / seconds / 1e12 / peak if peak else None,
        "peak_memory_gib": stats.get("peak_bytes_in_use", 0) / 2**30,
        "first_step_s": first,
        "compiles": step._cache_size(),
        "losses": losses,
        "ok": step._cache_size() == 1 and losses[-1] < losses[0],
    }


def attempt(size: Sizes, model: Model, done: dict) -> dict:
    """The first choice that fits; `done` keeps the results."""
    import jax

    failed = []
    for samples, recompute in model.choices:
        try:
            found = train_once(size, model, samples, recompute)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            failed.append({"samples": samples, "recompute": recompute, "why": str(error)[:300]})
        else:
            done[model] = found
            return found | dict(model.settings) | {"failed": failed}
    raise MemoryError(f"no choice fits: {failed}")


def extrapolate(model: Model, layers: int, more: dict, fewer: dict) -> dict:
    """A step of all layers, from two depths that ran: each layer more costs the same."""
    import jax

    from maxmeg.planning.cost.flops import training_flops
    from maxmeg.planning.hardware import peak_tflops

    each = (more["step_ms"] - fewer["step_ms"]) / (more["layers"] - fewer["layers"])
    milliseconds = more["step_ms"] + each * (layers - more["layers"])
    config = run_config(model, more["samples"], more["recompute"])
    config.model.num_layers = layers
    tflops = training_flops(config.model, model.length, more["samples"]) / milliseconds / 1e9
    config.model.num_layers, config.model.vocab_size = 1, 1
    alone = training_flops(config.model, model.length, more["samples"]) / each / 1e9
    peak = peak_tflops(jax.local_devices()[0].device_kind)
    return {
        "extrapolated": True,
        "layers": layers,
        "recompute": more["recompute"],
        "step_ms": milliseconds,
        "a_layer_ms": each,
        "tokens_per_s": more["samples"] * model.length / milliseconds * 1e3,
        "mfu": tflops / peak if peak else None,
        "mfu of layers alone": alone / peak if peak else None,
    }


def train(size: Sizes) -> Iterator[Item]:
    """The train step: speed, memory, one compile, a loss that falls on a repeated batch."""
    done: dict[Model, dict] = {}
    for model in size.models:
        layers = f", {model.layers} layers" * bool(model.layers)
        settings = "".join(f", {name}={value}" for name, value in model.settings)
        yield model.name + layers + settings, functools.partial(attempt, size, model, done)
    for more in done:
        for fewer in done:
            same = more.name == fewer.name and more.settings == fewer.settings
            if same and more.layers > fewer.layers > 0:
                layers = ALL_LAYERS[more.name]
                yield (
                    f"{more.name}, {layers} layers, extrapolated",
                    functools.partial(extrapolate, more, layers, done[more], done[fewer]),
                )


def split(size: Sizes) -> Iterator[Item]:
    """Parts of a step alone: stack, embedding, head with loss, optimizer; milliseconds."""
    seen = set()
    for model in size.models:
        if model.name not in seen:
            samples, recompute = model.choices[-1]
            config = run_config(model, samples, recompute)
            yield model.name, functools.partial(split_model, size, config)
        seen.add(model.name)


def split_model(size: Sizes, config) -> dict:
    import jax
    import jax.numpy as jnp

    from maxmeg.layers.context import Context
    from maxmeg.models.lm import LM
    from maxmeg.ops.cross_entropy.call import CrossEntropySpec, linear_cross_entropy
    from maxmeg.optim.build import clip, make_optimizer

    shape = (config.train.global_batch_size, config.data.sequence_length)
    ids_BL = jax.random.randint(jax.random.key(3), shape, 0, config.model.vocab_size)
    positions_BL = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    masters = jax.jit(lambda key: LM(key, config.model))(jax.random.key(0))
    model = jax.jit(lambda m: jax.tree.map(lambda a: a.astype(jnp.bfloat16), m))(masters)
    x_BLD = jax.random.normal(jax.random.key(2), (*shape, config.model.hidden_size), jnp.bfloat16)
    spec = CrossEntropySpec(config.model.vocab_size, chunk=config.train.loss_chunk)
    weights_T = jnp.full(ids_BL.size, 1 / ids_BL.size)

    def loss(h_BLD, w_VD):
        h_TD = h_BLD.reshape(-1, h_BLD.shape[-1])
        return linear_cross_entropy(h_TD, w_VD, ids_BL.reshape(-1), weights_T, spec)[0]

    stack = with_gradients(lambda stack, x: stack(x, Context(positions_BL))[0])
    head, embed = with_gradients(loss), with_gradients(lambda embedding: embedding(ids_BL))
    optimizer = make_optimizer(config.optim)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(masters, state, gradients):
        gradients, _ = clip(gradients, config.optim.clip_norm)
        updates, state = optimizer.update(
            gradients, state, masters, learning_rate=3e-4, weight_decay=0.01
        )
        return jax.tree.map(jnp.add, masters, updates), state

    table_VD = model.output_weight()
    calls = {
        "stack": lambda: stack((model.stack, {"target": x_BLD}), {"target": x_BLD}),
        "head and loss": lambda: head((x_BLD, table_VD), jnp.ones(())),
        "embedding": lambda: embed((model.embedding,), x_BLD),
    }
    seconds = {
        name: interleaved({name: call}, size.rounds, size.half)[name]
        for name, call in calls.items()
    }
    gradients = jax.tree.map(jnp.ones_like, masters)
    held = [masters, optimizer.init(masters)]
    del masters

    def optimize():
        held[:] = update(*held, gradients)
        return jax.tree.leaves(held[0])[0]

    seconds |= interleaved({"optimizer": optimize}, size.rounds, size.half)
    found = {f"{name} ms": value * 1e3 for name, value in seconds.items()}
    return {"samples": shape[0], "recompute": config.model.recompute, **found}
