"""Decoding with random weights of a model's size, layers in a loop or unrolled."""

import functools
import time
from collections.abc import Iterator

from gpu_parts.steps import run_config
from gpu_parts.timing import Item, Served, Sizes, interleaved

SLOTS = 64


def serving(size: Sizes) -> Iterator[Item]:
    """A decode step of rows that have half of their tokens, and whole requests."""
    served = size.served
    for is_unrolled in (True, False):
        name = f"{served.model.name}, {'unrolled' if is_unrolled else 'loop'}"
        for lanes in served.lanes:
            step = functools.partial(measure_step, size, lanes, is_unrolled)
            yield f"{name}, {lanes} lanes", step
        words = f"{served.lanes[-1]} lanes, {served.tokens}/{served.tokens} tokens"
        yield f"{name}, {words}", functools.partial(measure_requests, served, is_unrolled)


@functools.cache
def loaded(served: Served, is_unrolled: bool):
    """The model as `load_run` would return it; both forms have the same arrays."""
    import jax

    from maxmeg.data.tokenizers.load import load_tokenizer
    from maxmeg.inference.load import Trained, cast
    from maxmeg.inference.mesh import local_mesh
    from maxmeg.models.lm import language_model
    from maxmeg.optim.build import make_optimizer
    from maxmeg.state import abstract_state

    config, mesh = run_config(served.model, 1, "minimal"), local_mesh()
    config.model.max_position = served.model.length
    if is_unrolled:
        model = jax.tree.map(lambda array: array, loaded(served, False).model)
        model.stack.unroll = 0
    else:
        abstract = abstract_state(config, make_optimizer(config.optim), mesh).model
        make = jax.jit(
            lambda key: cast(language_model(key, config), config.model.dtype),
            out_shardings=jax.tree.map(lambda array: array.sharding, abstract),
        )
        model = make(jax.random.key(0))
    tokenizer = load_tokenizer(f"null:{config.model.vocab_size - 1}")
    return Trained(model, config, tokenizer, 0, mesh)


def measure_step(size: Sizes, lanes: int, is_unrolled: bool) -> dict:
    import jax

    from maxmeg.inference.programs import Programs

    trained, length = loaded(size.served, is_unrolled), size.served.model.length
    slots = min(SLOTS, length)
    each = length // slots
    programs = Programs(trained, lanes, lanes * each, slots, each, slots)
    programs.allocate()
    row = {"count": 1, "start": length // 2, "top_p": 1}
    rows = {i: row | {"lane": i, "pages": range(i * each, (i + 1) * each)} for i in range(lanes)}
    started = time.perf_counter()
    jax.block_until_ready(programs.decode(rows))
    first = time.perf_counter() - started
    calls = {"step": lambda: programs.decode(rows)}
    seconds = interleaved(calls, size.rounds, size.repeats)["step"]
    weights = sum(a.nbytes for a in jax.tree.leaves(programs.model))
    return {
        "step_ms": seconds * 1e3,
        "tokens_per_s": lanes / seconds,
        "weights_tb_per_s": weights / seconds / 1e12,
        "first_step_s": first,
    }


def measure_requests(served: Served, is_unrolled: bool) -> dict:
    """As many requests as lanes, offline, with the engine's scheduler."""
    import numpy as np

    from maxmeg.inference.engine import Engine
    from maxmeg.inference.requests import Request
    from maxmeg.inference.sampling import Sampling

    trained, tokens = loaded(served, is_unrolled), served.tokens
    engine = Engine(trained, served.lanes[-1], block_size=min(SLOTS, served.model.length))
    engine.warm_up()
    shape = len(engine.scheduler.lanes), tokens
    prompts = np.random.default_rng(0).integers(0, trained.config.model.vocab_size, shape)
    started = time.perf_counter()
    replies = engine.generate([*prompts], Request(tokens, Sampling(temperature=0)))
    seconds = time.perf_counter() - started
    count = sum(len(reply.tokens) for reply in replies)
    return {
        "new_tokens_per_s": count / seconds,
        "seconds": seconds,
        "compiles": engine.programs.compiled(),
        "ok": count == prompts.size and engine.programs.compiled() == 2,
    }
