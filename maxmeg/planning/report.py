"""The results of a plan as data, for text, JSON and HTML. Bytes are per device."""

import dataclasses

GATHER, SCATTER, REDUCE = "all-gather", "reduce-scatter", "all-reduce"  # XLA's names
PERMUTE, ALL_TO_ALL = "collective-permute", "all-to-all"
MARGIN = 0.05  # share of a GPU's memory that stays free: formulas may be too low by so much


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Communication over one mesh axis for one purpose in a step.

    axis: "tensor", "pipe", ... purpose: in words, such as "embedding table". kind: XLA's name of
    the collective, such as "all-gather". runs: collectives per step. volume: bytes that a device
    sends per step. seconds: over the slowest link of the axis, without overlap.
    """

    axis: str
    purpose: str
    kind: str
    runs: int
    volume: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Remedy:
    """Flags with which the config fits, its bytes per device with them, and the step time relative
    to that without them."""

    flags: str
    total: int
    slowdown: float


@dataclasses.dataclass(frozen=True)
class Analytic:
    """The report from formulas.

    parameters: number by kind (embedding, attention, ...). memory: peak bytes by purpose (masters,
    optimizer, weights, gradients, activations, loss). activations: bytes of activations under each
    recompute mode. flops: of a step, as the training log counts them. step_seconds: compute, bubble
    and exposed communication. devices: number of GPUs. mfu: fraction of their peak. remedies:
    changes with which a config that does not fit would fit; `analyze` leaves them empty.
    host_memory: bytes in pinned host memory by purpose; offload_seconds: what their transfers add.
    """

    parameters: dict[str, int]
    memory: dict[str, int]
    activations: dict[str, int]
    capacity: int
    flops: float
    traffic: tuple[Traffic, ...]
    compute_seconds: float
    bubble_fraction: float
    communication_seconds: float
    step_seconds: float
    tokens_per_second: float
    devices: int
    mfu: float
    remedies: tuple[Remedy, ...] = ()
    host_memory: dict[str, int] = dataclasses.field(default_factory=dict)
    offload_seconds: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether it fits also if the formulas are too low by MARGIN."""
        return self.total <= (1 - MARGIN) * self.capacity

    @property
    def tight(self) -> bool:
        """Whether only the compiler can tell."""
        return not self.fits and self.total <= self.capacity


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of one kind over the same mesh axes, in loops with the same number of trips.

    instructions: number in the program. runs: executions per step, of all of them. volume: bytes of
    their results per step. asynchronous: whether other work can overlap. exposed: number of runs
    without a matrix product between start and end. unbounded: in a loop whose number of trips the
    program does not say, counted as one: further rounds of experts with unbalanced loads.
    """

    kind: str
    axes: tuple[str, ...]
    instructions: int
    runs: int
    volume: int
    asynchronous: bool
    unbounded: bool = False
    exposed: int = 0


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The report on the real train step, compiled for GPUs that this machine does not have.

    arguments: bytes of state and batch. temporaries: bytes that the program needs beside them.
    host: bytes of both in pinned host memory, which the others exclude.
    kernels: custom calls per step, by target. flops: of matrix products, per device and step; where
    pipeline stages hold different layers, as if a stage ran all of them.
    """

    arguments: int
    temporaries: int
    outputs_not_aliased: int
    capacity: int
    collectives: tuple[Collective, ...]
    kernels: dict[str, int]
    flops: float
    lower_seconds: float
    compile_seconds: float
    host: int = 0

    @property
    def total(self) -> int:
        return self.arguments + self.temporaries + self.outputs_not_aliased

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity
