"""The instruction wgmma for Mosaic-GPU's interpreter, and what else that of jax 0.10 cannot do.

Operands are read when a product is waited for, not when it is issued: a program that hands their
memory on too early is a race, which the interpreter's own wgmma, done at once, would not show.
Threads that read shared memory themselves must commit that before they hand anything back.
"""

import dataclasses
import functools
import threading
import types
from typing import Any

import interpreted
import jax
import jax.numpy as jnp
from jax import core, lax
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic.interpret.race_detection_state import RaceDetectionState
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory

from maxmeg.kernels import mosaic
from maxmeg.kernels.mosaic import pl, plgpu

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
PATIENCE = 60  # seconds
real_launch = mosaic.launch


@dataclasses.dataclass
class Sums:
    """An accumulator: its value is right once no product for it is under way."""

    value: jax.Array
    products: "Products"

    def __getitem__(self, _: Any) -> jax.Array:
        return self.products.value(self)


@dataclasses.dataclass(frozen=True)
class Transposed:
    ref: Any

    def __getitem__(self, _: Any) -> jax.Array:
        return self.ref[...].T


def accumulator(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.zeros(shape, dtype)


accumulator.init = lambda value: value


class Products:
    """Those that a thread has issued, oldest first; and whether it has read shared memory."""

    def __init__(self) -> None:
        self.issued: list[tuple[Sums, Any, Any]] = []
        self.uncommitted = False
        self.commit, self.arrive, self.load = plgpu.commit_smem, plgpu.barrier_arrive, mosaic.load

    def wgmma(self, sums: Sums, left: Any, right: Any) -> None:
        self.issued.append((sums, left, right))

    def wait(self, under_way: int) -> None:
        while len(self.issued) > under_way:
            sums, *operands = self.issued.pop(0)
            left, right = (x if isinstance(x, jax.Array) else x[...] for x in operands)
            sums.value += jnp.dot(left, right, preferred_element_type=jnp.float32)
        self.commit()  # unlike those of wgmma, these reads are not of the copies' kind

    def value(self, sums: Sums, *, wait_n: int = 0) -> jax.Array:
        self.wait(wait_n)
        assert all(sums is not other for other, *_ in self.issued)
        return sums.value

    def run_scoped(self, compute: Any, *values: jax.Array) -> Any:
        actual = compute(*(Sums(value, self) for value in values))
        assert not self.issued
        return actual

    def run_state(self, compute: Any) -> Any:
        def run(values: Any) -> Any:
            sums = jax.tree.map(lambda value: Sums(value, self), values)
            compute(sums)
            return jax.tree.map(self.value, sums, is_leaf=lambda leaf: isinstance(leaf, Sums))

        return run

    def read(self, ref: Any, layout: Any) -> jax.Array:
        self.uncommitted |= jax.typeof(ref.ref).memory_space == plgpu.SMEM
        return self.load(ref, layout) if interpreted.COMPLETE else ref[...]

    def commit_smem(self) -> None:
        self.uncommitted = False
        self.commit()

    def barrier_arrive(self, barrier: Any) -> None:
        assert not self.uncommitted, "handed on while reads of it are not committed"
        self.arrive(barrier)


def longer_results(
    body: Any, out_type: list, grid: dict[str, int], dims: int = 4, **options: Any
) -> Any:
    """Launches with room for whole tiles in dimension 1 of results with `dims` dimensions: jax 0.10
    drops a copy that is partly past the end."""

    def longer(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = list(array.shape)
        if len(shape) == dims:
            shape[1] += 64
        return jax.ShapeDtypeStruct(shape, array.dtype)

    call = real_launch(body, out_type=[*map(longer, out_type)], grid=grid, **options)
    return lambda *arrays: [
        actual[:, : wanted.shape[1]] if actual.ndim == dims else actual
        for actual, wanted in zip(call(*arrays), out_type, strict=True)
    ]


def compiled_once() -> Any:
    """A thread's program is compiled once, and quickly; jax 0.10 compiles it at each run."""
    lock, compiled = threading.Lock(), {}

    def run(program: Any, constants: Any, *arguments: Any) -> None:
        with lock:
            if id(program) not in compiled:
                jitted = jax.jit(functools.partial(core.eval_jaxpr, program))
                lowered = jitted.lower(constants, *arguments)
                compiled[id(program)] = (lowered.compile(compiler_options=QUICK), program)
        compiled[id(program)][0](constants, *arguments)

    return run


class Impatient(threading.Condition):
    """Lets a deadlock fail."""

    def wait(self, timeout: float | None = PATIENCE) -> bool:
        if not super().wait(timeout):
            raise TimeoutError(f"a barrier was waited for in vain for {timeout} s")
        return True


def skip_last_phases(barrier: Any) -> None:
    """Phases that nobody waits for before the program ends are no defect, jax 0.12 knows."""
    with barrier.cv:
        barrier.ref_count -= 1


def replace_products(monkeypatch: Any) -> None:
    """Lets the interpreter run kernels that multiply."""
    products = Products()
    monkeypatch.setattr(interpreted, "fill_gaps", lambda *_: None)  # all of them are filled here
    monkeypatch.setattr(mosaic, "transposed", Transposed)
    monkeypatch.setattr(mosaic, "load", products.read)
    monkeypatch.setattr(pl, "run_scoped", products.run_scoped)
    monkeypatch.setattr(pl, "run_state", products.run_state)
    monkeypatch.setattr(plgpu, "ACC", accumulator)
    monkeypatch.setattr(plgpu, "wgmma_accumulator_load", products.value)
    for name in ("wgmma", "commit_smem", "barrier_arrive"):
        monkeypatch.setattr(plgpu, name, getattr(products, name))
    monkeypatch.setattr(thread_map, "_run_jaxpr", compiled_once())
    impatient = types.SimpleNamespace(**{**vars(threading), "Condition": Impatient})
    monkeypatch.setattr(shared_memory, "threading", impatient)
    if not interpreted.WRITES_PAST_THE_END:
        monkeypatch.setattr(mosaic, "launch", longer_results)
    if not interpreted.COMPLETE:
        plain_iota = lambda *place, layout: lax.broadcasted_iota(*place)  # noqa: E731
        monkeypatch.setattr(plgpu, "broadcasted_iota", plain_iota)
        monkeypatch.setattr(plgpu, "layout_cast", lambda array, layout: array)
        monkeypatch.setattr(shared_memory.Barrier, "deallocate", skip_last_phases)


def interpret(call: Any, monkeypatch: Any) -> tuple[Any, bool]:
    """As interpreted.interpret, of several kernels: jax 0.10 itself knows the last one's races."""
    states = []

    def state(**options: Any) -> RaceDetectionState:
        states.append(RaceDetectionState(**options))
        return states[-1]

    with monkeypatch.context() as patch:
        if not interpreted.COMPLETE:
            patch.setattr(gpu_callbacks, "RaceDetectionState", state)
        actual, race = interpreted.interpret(call, patch)
    return actual, race or any(state.races_found for state in states)
