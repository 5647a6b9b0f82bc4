"""Everything that needs a GPU, in one call of at most five minutes: `python benchmarks/gpu.py`.

    python benchmarks/gpu.py [--quick] [--parts=context,agreement,train,attention,split]

Needs jax, flax, optax, orbax and numpy. Each part runs in a process of its own with its share of
the time; what failed is recorded with its traceback, what did not fit as skipped, and the rest
goes on. Results: benchmarks/results/DEVICE-DATE.json after every part, and a table at the end.
On a CPU the shapes are tiny and the numbers mean nothing.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
SECONDS = 290
TOLERANCE = 2e-2  # of cuDNN's bfloat16 gradients against float32, relative to the largest

Item = tuple[str, Callable[[], dict]]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured: on a GPU, a quick look at one, or tiny shapes on a CPU."""

    matmul: int = 8192
    copy_elements: int = 2**31
    attention_tokens: int = 16384
    lengths: tuple[tuple[int, int, int], ...] = (  # length, heads, head dim
        (4096, 16, 128),
        (16384, 16, 128),
        (8192, 16, 128),
        (2048, 16, 128),
        (8192, 32, 64),
        (2048, 32, 64),
    )
    models: tuple[tuple[str, int, tuple], ...] = (  # name, length, (samples, recompute) to try
        ("gpt2-124m", 1024, ((32, "none"), (16, "none"), (16, "full"))),
        ("1.3b", 2048, ((8, "none"), (4, "none"), (4, "selective"), (4, "full"))),
    )
    steps: int = 10
    rounds: int = 5
    repeats: int = 10  # calls of a round


def sizes(quick: bool, on_gpu: bool) -> Sizes:
    if not on_gpu:
        return Sizes(128, 2**16, 256, ((128, 2, 16),), (("tiny", 32, ((2, "none"),)),), 4, 2, 1)
    if quick:
        full = Sizes()
        return Sizes(lengths=full.lengths[:2], models=full.models[:1], rounds=3)
    return Sizes()


def interleaved(calls: dict[str, Callable], rounds: int, repeats: int) -> dict[str, float]:
    """Median seconds of a call; candidates take turns, so that a drift of clocks hits all."""
    import jax

    for call in calls.values():
        jax.block_until_ready(call())
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            started = time.perf_counter()
            out = [call() for _ in range(repeats)][-1]
            jax.block_until_ready(out)
            spent[name].append((time.perf_counter() - started) / repeats)
    return {name: statistics.median(values) for name, values in spent.items()}


def context(size: Sizes) -> Iterator[Item]:
    """What the device reaches at best: a matrix product, and a copy."""
    import jax
    import jax.numpy as jnp

    def matmul() -> dict:
        n = size.matmul
        a, b = jax.random.normal(jax.random.key(0), (2, n, n), jnp.bfloat16)
        multiply = jax.jit(jnp.matmul)
        seconds = interleaved({"x": lambda: multiply(a, b)}, size.rounds, size.repeats)["x"]
        return {"tflops": 2 * n**3 / seconds / 1e12, "size": n}

    def copy() -> dict:
        x = jnp.zeros(size.copy_elements, jnp.bfloat16)
        add = jax.jit(lambda x: x + 1)
        seconds = interleaved({"x": lambda: add(x)}, size.rounds, size.repeats)["x"]
        return {"tb_per_s": 2 * x.nbytes / seconds / 1e12}

    yield "bf16 matmul", matmul
    yield "copy", copy


def backends() -> list[str]:
    import jax

    return ["cudnn", "xla"] if jax.default_backend() == "gpu" else ["xla"]


def random_qkv(shapes: list[tuple[int, ...]], dtype: str) -> list:
    import jax

    keys = jax.random.split(jax.random.key(1), len(shapes))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def gradients_of(backend: str) -> Callable:
    """Jitted (q, k, v, cotangent) -> gradients of causal attention."""
    import jax

    from maxmeg.ops.attention import attention

    def gradients(q, k, v, d):
        _, pull = jax.vjp(functools.partial(attention, backend=backend), q, k, v)
        return pull(d)

    return jax.jit(gradients)


def agreement(size: Sizes) -> Iterator[Item]:
    """Gradients of each attention backend in bfloat16 against float32."""
    import numpy as np

    def compare(heads: int, kv_heads: int, head_dim: int) -> dict:
        q, kv = (2, 256, heads, head_dim), (2, 256, kv_heads, head_dim)
        arrays = random_qkv([q, kv, kv, q], "bfloat16")
        exact = gradients_of("xla")(*(array.astype("float32") for array in arrays))
        worst = {}
        for backend in backends():
            found = gradients_of(backend)(*arrays)
            errors = [
                np.abs(np.asarray(a, np.float32) - b).max() / np.abs(b).max()
                for a, b in zip(found, map(np.asarray, exact), strict=True)
            ]
            worst[backend] = float(max(errors))
        return {"relative_errors": worst, "ok": max(worst.values()) < TOLERANCE}

    for shape in ((8, 8, 64), (8, 2, 128)):
        yield f"heads {shape[0]}/{shape[1]} of {shape[2]}", functools.partial(compare, *shape)


def attention(size: Sizes) -> Iterator[Item]:
    """Causal attention by backend, forward and forward with backward."""
    import jax

    from maxmeg.ops import attention as ops

    def measure(length: int, heads: int, head_dim: int) -> dict:
        shape = (max(1, size.attention_tokens // length), length, heads, head_dim)
        q, k, v, d = random_qkv([shape] * 4, "bfloat16")
        causal = 2 * shape[0] * heads * length**2 * head_dim  # FLOPs of a forward
        forward, both = {}, {}
        for backend in backends():
            run = jax.jit(functools.partial(ops.attention, backend=backend))
            forward[backend] = functools.partial(run, q, k, v)
            both[backend] = functools.partial(gradients_of(backend), q, k, v, d)
        found: dict = {"shape": shape}
        for name, calls, flops in (("forward", forward, causal), ("both", both, 3.5 * causal)):
            seconds = interleaved(calls, size.rounds, max(1, size.repeats // 2))
            reference = seconds.get("cudnn")
            for backend, spent in seconds.items():
                found[f"{name}_{backend}_tflops"] = flops / spent / 1e12
                if reference:
                    found[f"{name}_{backend}_of_cudnn"] = reference / spent
        return found

    for length, heads, head_dim in size.lengths:
        name = f"L{length} H{heads} D{head_dim}"
        yield name, functools.partial(measure, length, heads, head_dim)


def run_config(name: str, length: int, samples: int, recompute: str):
    """Config of one microbatch on one device."""
    from maxmeg.config.schema import Config, Recompute
    from maxmeg.models.registry import use_architecture

    config = Config()
    config.model.vocab_size = 512
    config = config if name == "tiny" else use_architecture(config, name)
    config.model.recompute = Recompute(recompute)
    config.data.sequence_length = length
    config.train.global_batch_size = samples
    return config


def make_run(config):
    """(train step, state, batch, controls) on one device, random tokens."""
    import numpy as np

    from maxmeg.optim.build import make_optimizer
    from maxmeg.parallel.mesh import local_mesh
    from maxmeg.parallel.placement import local_rows, place_batch, place_flag
    from maxmeg.state import abstract_state, create_state
    from maxmeg.step import make_train_step

    mesh, optimizer = local_mesh(), make_optimizer(config.optim)
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


def train_once(size: Sizes, name: str, length: int, samples: int, recompute: str) -> dict:
    import jax

    from maxmeg.planning.flops import training_flops
    from maxmeg.planning.hardware import peak_tflops

    config = run_config(name, length, samples, recompute)
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
        for _ in range(max(1, size.repeats // 3)):
            state, metrics = step(state, batch, controls)
        jax.block_until_ready(metrics["loss"])
        spent.append((time.perf_counter() - started) / max(1, size.repeats // 3))
    device = jax.local_devices()[0]
    seconds, peak = statistics.median(spent), peak_tflops(device.device_kind)
    tflops = training_flops(config.model, length, samples) / seconds / 1e12
    stats = device.memory_stats() or {}
    return {
        "samples": samples,
        "length": length,
        "recompute": recompute,
        "step_ms": seconds * 1e3,
        "tokens_per_s": samples * length / seconds,
        "tflops": tflops,
        "mfu": tflops / peak if peak else None,
        "peak_memory_gib": stats.get("peak_bytes_in_use", 0) / 2**30,
        "first_step_s": first,
        "compiles": step._cache_size(),
        "losses": losses,
        "ok": step._cache_size() == 1 and losses[-1] < losses[0],
    }


def train(size: Sizes) -> Iterator[Item]:
    """The train step: speed, memory, one compile, a loss that falls on a repeated batch."""
    import jax

    def attempt(name: str, length: int, choices: tuple) -> dict:
        failed = []
        for samples, recompute in choices:
            try:
                return train_once(size, name, length, samples, recompute) | {"failed": failed}
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                failed.append({"samples": samples, "recompute": recompute, "why": str(error)[:300]})
        raise MemoryError(f"no choice fits: {failed}")

    for name, length, choices in size.models:
        yield name, functools.partial(attempt, name, length, choices)


def split(size: Sizes) -> Iterator[Item]:
    """Parts of a step alone: stack, embedding, head with loss, optimizer; milliseconds."""
    for name, length, choices in size.models:
        samples, recompute = choices[-1]
        config = run_config(name, length, samples, recompute)
        yield name, functools.partial(split_model, size, config)


def split_model(size: Sizes, config) -> dict:
    import jax
    import jax.numpy as jnp

    from maxmeg.layers.context import Context
    from maxmeg.models.lm import LM
    from maxmeg.ops.cross_entropy import CrossEntropySpec, linear_cross_entropy
    from maxmeg.optim.build import clip, make_optimizer

    def both(function):
        """Jitted function and its gradient with respect to every argument."""

        def run(*arguments):
            out, pull = jax.vjp(function, *arguments)
            return pull(out)

        return jax.jit(run)

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

    stack = both(lambda stack, x: stack(x, Context(positions_BL))[0])
    head, embed = both(loss), both(lambda embedding: embedding(ids_BL))
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
        "stack": lambda: stack(model.stack, x_BLD),
        "head and loss": lambda: head(x_BLD, table_VD),
        "embedding": lambda: embed(model.embedding),
    }
    repeats = max(1, size.repeats // 3)
    seconds = {
        name: interleaved({name: call}, size.rounds, repeats)[name] for name, call in calls.items()
    }
    gradients = jax.tree.map(jnp.ones_like, masters)
    held = [masters, optimizer.init(masters)]
    del masters

    def optimize():
        held[:] = update(*held, gradients)
        return jax.tree.leaves(held[0])[0]

    seconds |= interleaved({"optimizer": optimize}, size.rounds, repeats)
    found = {f"{name} ms": value * 1e3 for name, value in seconds.items()}
    return {"samples": shape[0], "recompute": config.model.recompute.value, **found}


PARTS = {
    "context": context,
    "agreement": agreement,
    "train": train,
    "attention": attention,
    "split": split,
}


def run_parts(names: list[str], quick: bool, seconds: float) -> None:
    """The child: runs the items of parts, a line of JSON each."""
    started = time.time()
    sys.path.insert(0, str(FOLDER.parent))
    import jax

    device = jax.local_devices()[0]
    versions = {"jax": jax.__version__, "python": sys.version.split()[0]}
    print(json.dumps({"device": device.device_kind, **versions}), flush=True)
    size = sizes(quick, device.platform == "gpu")
    for name in names:
        for item, function in PARTS[name](size):
            begun = time.time()
            if begun - started > seconds:
                found = {"skipped": f"out of time after {begun - started:.0f} s"}
            else:
                try:
                    found = function()
                except Exception:
                    found = {"error": traceback.format_exc()[-4000:]}
                found["took_s"] = round(time.time() - begun, 1)
            print(json.dumps({"part": name, "item": item} | found), flush=True)


def child(names: list[str], quick: bool, seconds: float) -> list[dict]:
    """Rows of parts from a process of their own; a crash or a timeout is a row as well."""
    command = [sys.executable, __file__, f"--parts={','.join(names)}", "--child"]
    command += [f"--seconds={seconds:.0f}"] + ["--quick"] * quick
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", **os.environ}
    part, problem = ",".join(names), ""
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds + 15, env=environment)
        out, err = done.stdout, done.stderr
        problem = f"exit code {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        out, err = error.stdout or b"", error.stderr or b""
        problem = f"ended after {seconds + 15:.0f} s"
    lines = [line for line in out.decode().splitlines() if line.startswith("{")]
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    if problem:
        tail = err.decode(errors="replace")[-3000:]
        rows.append({"part": part, "item": "process", "error": f"{problem}\n{tail}"})
    return rows


def table(rows: list[dict]) -> str:
    """Markdown, a line an item: every number that it has."""
    lines = ["| part | item | result |", "|---|---|---|"]
    for row in rows:
        cells = []
        for key, value in row.items():
            if key in ("part", "item", "losses", "failed", "shape"):
                continue
            if key == "error":
                value = value.strip().splitlines()[-1][:160]
            cells.append(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}")
        lines.append(f"| {row['part']} | {row['item']} | {', '.join(cells)} |")
    return "\n".join(lines)


def measure(names: list[str], quick: bool, seconds: float, folder: Path) -> list[dict]:
    """Run parts one after the other, writing the results after each."""
    started = time.time()
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    groups = [names] if quick else [[name] for name in names]
    rows: list[dict] = []
    device: dict = {}
    for group in groups:
        left = seconds - (time.time() - started)
        if left < 10:
            rows += [{"part": name, "item": "all", "skipped": "out of time"} for name in group]
            continue
        for row in child(group, quick, left):
            if "part" in row:
                rows.append(row)
            else:
                device = row
        name = re.sub(r"\W+", "-", device.get("device", "unknown")).strip("-").lower()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}-{stamp}.json"
        whole = {**device, "date": stamp, "quick": quick, "rows": rows}
        path.write_text(json.dumps(whole, indent=1) + "\n")
    print(f"{device}, {time.time() - started:.0f} s\n\n{table(rows)}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer shapes, one process")
    parser.add_argument("--parts", default=",".join(PARTS), help="in this order, with commas")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="budget of the whole call")
    parser.add_argument("--results", type=Path, default=FOLDER / "results")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = given.parts.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"{sorted(unknown)} are no parts: choose from {list(PARTS)}")
    if given.child:
        run_parts(names, given.quick, given.seconds)
    elif any("error" in row for row in measure(names, given.quick, given.seconds, given.results)):
        sys.exit(1)


if __name__ == "__main__":
    main()
