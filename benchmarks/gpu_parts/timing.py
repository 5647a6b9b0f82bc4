"""What is measured, and how time is taken."""

import dataclasses
import statistics
import time
from collections.abc import Callable

Item = tuple[str, Callable[[], dict]]


@dataclasses.dataclass(frozen=True)
class Model:
    """A train step: `choices` are (samples, recompute) to try until one fits; layers 0: all."""

    name: str
    length: int
    choices: tuple[tuple[int, str], ...]
    layers: int = 0
    settings: tuple[tuple[str, object], ...] = ()  # of the config, as (field, value)


@dataclasses.dataclass(frozen=True)
class Mixture:
    """A layer of gated experts, of which a token takes `chosen`."""

    name: str
    tokens: int
    width: int
    inner: int
    experts: int
    chosen: int


@dataclasses.dataclass(frozen=True)
class Served:
    """A model with contexts of at most model.length, the lanes of its decode steps, and requests
    with `tokens` tokens of a prompt and as many new ones."""

    model: Model
    lanes: tuple[int, ...]
    tokens: int


@dataclasses.dataclass(frozen=True)
class Sizes:
    """On a GPU, a quick look at one, or tiny shapes on a CPU, where numbers mean nothing."""

    on_gpu: bool = True
    matmul: int = 8192
    copy_elements: int = 2**31
    tokens: int = 32768  # of attention's and the memory-bound calls
    attention: tuple[tuple[int, int, int, int], ...] = (  # length, heads, key heads, head dim
        (4096, 16, 16, 128),
        (16384, 16, 16, 128),
        (8192, 16, 16, 128),
        (2048, 16, 16, 128),
        (8192, 32, 8, 128),
        (8192, 16, 16, 64),
        (2048, 16, 16, 64),
        (4096, 32, 32, 96),
    )
    shared: tuple[int, int, int, int] = (65536, 32, 8, 128)  # by 8 devices; as in attention
    losses: tuple[tuple[int, int, int], ...] = (  # tokens, vocabulary, width
        (8192, 128256, 4096),
        (16384, 50304, 768),
    )
    widths: tuple[int, ...] = (4096, 2048)  # of vectors, in memory-bound calls
    projections: tuple[tuple[str, int, int, int], ...] = (  # name, tokens, width in, width out
        ("query, key and value", 8192, 4096, 6144),
        ("attention output", 8192, 4096, 4096),
        ("up or gate", 8192, 4096, 14336),
        ("down", 8192, 14336, 4096),
    )
    experts: tuple[tuple[int, int, int, int], ...] = (  # experts, tokens, width in, width out
        (8, 32768, 4096, 14336),
        (128, 32768, 2048, 768),
        (256, 32768, 7168, 2048),
    )
    mixtures: tuple[Mixture, ...] = (
        Mixture("mixtral-8x7b", 8192, 4096, 14336, 8, 2),
        Mixture("qwen3-30b-a3b", 16384, 2048, 768, 128, 8),
    )
    caches: tuple[tuple[int, int, int], ...] = (  # rows, tokens of each, page
        (64, 8192, 64),
        (8, 32768, 64),
        (256, 1024, 64),
    )
    scans: tuple[tuple[int, int, int, int, int], ...] = (  # length, heads, groups, state, value
        (8192, 128, 8, 128, 64),
        (8192, 80, 1, 128, 64),
    )
    delta_scans: tuple[tuple[int, int, int, int, int], ...] = (
        (8192, 32, 16, 128, 128),  # Qwen3-Next-80B
        (8192, 96, 96, 128, 128),
        (32768, 4, 2, 128, 128),
    )
    heads: int = 32  # of attention over a paged cache, with a quarter as many of keys, of 128
    models: tuple[Model, ...] = (
        Model("gpt2-124m", 1024, ((32, "minimal"), (16, "minimal"), (16, "full"))),
        Model("1.3b", 2048, ((8, "minimal"), (4, "minimal"), (4, "selective"), (4, "full"))),
        Model(
            *("1.3b", 2048, ((8, "minimal"), (4, "minimal"), (4, "selective"), (4, "full"))),
            settings=(("model.scan_layers", False),),
        ),
        Model("llama3-8b", 8192, ((1, "minimal"), (1, "selective"), (1, "full")), layers=8),
        Model(
            *("llama3-8b", 8192, ((1, "minimal"), (1, "selective"), (1, "full")), 8),
            settings=(("train.quantization.recipe", "tensorwise"),),
        ),
        Model("llama3-8b", 8192, ((1, "minimal"), (1, "selective"), (1, "full")), layers=4),
        Model("345m", 1024, ((32, "minimal"), (16, "minimal"), (16, "full"))),
    )
    optimized: Model = Model("llama3-8b", 8192, ((1, "full"),), layers=8)
    optimizers: tuple[str, ...] = ("AdamW", "AdamW, moments in fp8", "Muon", "AdamW, offload")
    served: Served = Served(Model("llama3-8b", 2048, ()), (1, 64), 1000)
    steps: int = 6
    rounds: int = 5
    repeats: int = 10  # calls of a round
    skipped: tuple[str, ...] = ()  # "op:backend" that crashed or hung when it was checked

    def backends(self, op: str, names: tuple[str, ...]) -> list[str]:
        """Of an op's backends those to time; on a CPU no kernel runs."""
        here = names if self.on_gpu else [name for name in names if name in ("xla", "tiled")]
        return [name for name in here if f"{op}:{name}" not in self.skipped]

    @property
    def half(self) -> int:
        """Repeats of what takes longer."""
        return max(1, self.repeats // 3)


TINY = Sizes(
    on_gpu=False,
    matmul=128,
    copy_elements=2**16,
    tokens=256,
    attention=((128, 2, 1, 16),),
    shared=(128, 2, 1, 16),
    losses=((64, 512, 32),),
    widths=(64,),
    projections=(("tiny", 256, 128, 128),),
    experts=((4, 64, 32, 48),),
    mixtures=(Mixture("tiny", 32, 16, 24, 4, 2),),
    caches=((2, 40, 16),),
    scans=((64, 4, 2, 16, 8),),
    delta_scans=((64, 4, 2, 16, 8),),
    heads=4,
    models=(
        Model("tiny", 32, ((2, "minimal"),), layers=2),
        Model("tiny", 32, ((2, "minimal"),), layers=1),
        Model("tiny", 32, ((2, "minimal"),), 1, (("train.quantization.recipe", "tensorwise"),)),
    ),
    optimized=Model("tiny", 32, ((2, "full"),), layers=1),
    optimizers=("AdamW", "AdamW, offload"),
    served=Served(Model("tiny", 64, (), layers=2), (2,), 16),
    steps=4,
    rounds=2,
    repeats=1,
)


def sizes(quick: bool, on_gpu: bool) -> Sizes:
    if not on_gpu:
        return TINY
    full = Sizes()
    if not quick:
        return full
    return dataclasses.replace(
        full,
        attention=full.attention[:2],
        losses=full.losses[:1],
        projections=full.projections[:1],
        optimizers=full.optimizers[:2],
        experts=full.experts[:1],
        mixtures=full.mixtures[:1],
        caches=full.caches[:1],
        scans=full.scans[:1],
        delta_scans=full.delta_scans[:1],
        models=full.models[:1],
        rounds=3,
    )


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


def compare(
    calls: dict[str, Callable], amount: float, unit: str, size: Sizes, references: tuple[str, ...]
) -> dict:
    """`amount` a second of every call that runs, and as ratios to the references; else why not.

    unit: "tflops" or "tb_per_s"; amount: FLOPs or bytes of a call.
    """
    import jax

    found: dict = {}
    working = {}
    for name, call in calls.items():
        try:
            jax.block_until_ready(call())
            working[name] = call
        except Exception as error:  # of one backend: the others are still worth their numbers
            found[f"{name} error"] = f"{type(error).__name__}: {str(error)[:300]}"
    for name, seconds in interleaved(working, size.rounds, size.repeats).items():
        found[f"{name} {unit}"] = amount / seconds / 1e12
    for reference in references:
        if f"{reference} {unit}" in found:
            for name in working:
                if name != reference:
                    ratio = found[f"{name} {unit}"] / found[f"{reference} {unit}"]
                    found[f"{name} of {reference}"] = ratio
    return found


def random(shapes: list[tuple[int, ...]], dtype: str = "bfloat16", seed: int = 1) -> list:
    import jax

    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def with_gradients(function: Callable) -> Callable:
    """Jitted (inputs, slopes) -> gradients by the inputs; slopes are of `function`'s result."""
    import jax

    def run(inputs, slopes):
        _, pull = jax.vjp(function, *inputs)
        return pull(slopes)

    return jax.jit(run)
