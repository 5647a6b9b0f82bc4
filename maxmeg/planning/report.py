"""What a plan says, as data; text, JSON and HTML are made from it. Bytes are of one device."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one mesh axis carries for one purpose in a step.

    axis: "tensor", "pipe", ... purpose: in words, such as "gathered sequences". kind: as XLA
    names collectives, such as "all-gather". runs: collectives a step. volume: bytes that a device
    sends in a step. seconds: over the slowest link that the axis crosses, nothing hidden.
    """

    axis: str
    purpose: str
    kind: str
    runs: int
    volume: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Remedy:
    """Flags under which the config fits, its bytes per device then, and the time of a step divided
    by that without the flags."""

    flags: str
    total: int
    slowdown: float


@dataclasses.dataclass(frozen=True)
class Analytic:
    """Computed from formulas, in milliseconds.

    parameters: number by kind (embedding, attention, ...). memory: bytes of what a device holds
    at its fullest, by purpose (masters, optimizer, weights, gradients, activations, loss).
    activations: bytes of activations under each recompute mode. flops: of a step, as the training
    log counts them. step_seconds: compute, bubble and what communication cannot hide behind it.
    remedies: changes under which a config that does not fit would; `analyze` leaves them out.
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
    mfu: float
    remedies: tuple[Remedy, ...] = ()

    @property
    def total(self) -> int:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity


@dataclasses.dataclass(frozen=True)
class Collective:
    """Instructions of one kind over the same mesh axes, in loops that run as often.

    instructions: in the program; runs: executions per step, of all of them; volume: bytes of their
    results per step. asynchronous: whether other work can go on meanwhile; exposed: how many of the
    runs have no matrix product scheduled between start and end, so that nothing hides them.
    unbounded: in a loop whose number of trips the program does not say, counted as one: further
    rounds of experts with uneven loads, which even loads do not need.
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
    """What the compiler made of the real train step for GPUs that are not here.

    arguments: state and batch; temporaries: what the program needs beside them; kernels: custom
    calls by target and how often a step runs each; flops: of matrix products, a device and step.
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

    @property
    def total(self) -> int:
        return self.arguments + self.temporaries + self.outputs_not_aliased

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity
