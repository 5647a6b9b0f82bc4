"""Layouts of a model on a cluster, ranked by the analytic model of time; nothing is compiled."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from maxmeg.config.parallel import FsdpGather, LaneOrder, ParallelConfig, Schedule
from maxmeg.config.recompute import POLICIES
from maxmeg.config.schema import Config
from maxmeg.config.setting import declared_problems, with_fields
from maxmeg.config.validate import axis_sizes, batch_unit, layout_problems, validate
from maxmeg.ops.backend import Device
from maxmeg.planning.analytic import HIDDEN_BESIDE, analyze_work
from maxmeg.planning.cost.memory import device_memory, parameter_memory
from maxmeg.planning.cost.workload import Workload, workload
from maxmeg.planning.hardware import GIB, GPUS_A_NODE, Cluster, has_whole_nodes
from maxmeg.planning.report import MARGIN, Analytic

MICRO_BATCHES = (1, 2, 4, 8)
MOST_CHUNKS = 8
LEAST_GAIN = 0.01  # share of the time that a choice which needs more memory must save
MOST_GPUS = 2**16  # limit of the search for a sufficient number of GPUs
PLAIN = {"schedule": Schedule.one_f_one_b, "chunks": 1, "pad_layers": False}
LONG = 32768  # tokens of a sequence from which on the search divides it over context
LEAST_PIECE = 4096  # tokens of it on a device, unless the batch is smaller than the replicas
DEPENDENT = [
    "expert_exchange",
    "expert_buffer",
    "expert_nodes",
    "context_strategy",
    "context_inner",
]
MESH = ["pipe", "data", "fsdp", "expert", "expert_tensor", "context", "fsdp_context", "tensor"]
VARIED = {
    "parallel": (*MESH, "schedule", "lanes", "chunks", "pad_layers", "fsdp_gather"),
    "train": ("micro_batch_size",),
    "model": ("recompute",),
    "optim": ("offload",),
}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A valid config that fits, and its report."""

    config: Config
    analytic: Analytic

    @property
    def settings(self) -> dict[str, int | str | bool]:
        """The settings that the search chose, by flag: {"parallel.tensor": 8, ...}."""
        settings = {}
        for section, names in VARIED.items():
            for name in names:
                value = getattr(getattr(self.config, section), name)
                settings[f"{section}.{name}"] = getattr(value, "value", value)
        return settings

    def changed(self, config: Config) -> dict[str, int | str | bool]:
        """The settings that differ from those of `config`."""
        before = Candidate(config, self.analytic).settings
        return {path: value for path, value in self.settings.items() if value != before[path]}


def search(config: Config, cluster: Cluster) -> list[Candidate]:
    """Every valid layout that fits and leaves MARGIN of the memory, the fastest first.

    The search covers all sizes of tensor (within a node), context (`context_sizes`), pipe, fsdp,
    data and, with experts, expert whose product is the cluster; experts cut over tensor or not;
    micro_batch_size in MICRO_BATCHES; 1F1B with up to MOST_CHUNKS chunks, and zero bubble.
    Of the recompute policies it takes the first, from minimal to full, that fits; of the orders of
    lanes the faster. Where nothing fits, it sets optim.offload. It sets pad_layers if the layers do
    not divide; all else is as in `config`. ValueError if the config is invalid in every layout, or
    if nothing fits: by how much, and how many GPUs would be enough.
    """
    sizes = dict.fromkeys(("pipe", "context", "tensor", "fsdp", "data", "expert"), 1)
    dependent = {name: getattr(ParallelConfig(), name) for name in DEPENDENT}
    single = _with(config, {**sizes, "expert_tensor": 0, **dependent, **PLAIN}, 1)
    validate(single, 1)
    candidates = fitting(config, cluster)
    if not candidates:
        config = with_fields(config, {"optim.offload": True})
        candidates = fitting(config, cluster)
    if not candidates:
        raise ValueError(_nothing_fits(config, cluster))
    return sorted(candidates, key=lambda c: (c.analytic.step_seconds, c.analytic.total))


def fitting(config: Config, cluster: Cluster) -> list[Candidate]:
    """The layouts that fit, each with the first recompute policy with which it does."""
    candidates = []
    for layout in layouts(with_fields(config, {"model.recompute": "minimal"}), cluster.count):
        work = workload(layout, cluster.count, cluster.device)
        if sum(parameter_memory(work).values()) > usable(cluster):
            continue  # under every policy
        orders = (with_least_recomputation(each, cluster) for each in lane_orders(work))
        if fitting_orders := [candidate for candidate in orders if candidate]:
            candidates.append(fastest(fitting_orders))
    return candidates


def lane_orders(work: Workload) -> list[Workload]:
    """The work with each order of lanes to compare, apart first: with one that the config names, or
    where no communication could be hidden, that alone."""
    if work.config.parallel.lanes is not LaneOrder.auto:
        return [work]
    hides = work.microbatches > 1 and any(work.axes[axis] > 1 for axis in HIDDEN_BESIDE)
    return [work.with_lanes(order) for order in (LaneOrder.apart, LaneOrder.together)[: 1 + hides]]


def with_least_recomputation(work: Workload, cluster: Cluster) -> Candidate | None:
    """The candidate with the first recompute policy that fits; None if none does."""
    for policy in POLICIES:
        tried = work.with_recompute(policy)
        if sum(device_memory(tried).values()) <= usable(cluster):
            return Candidate(tried.config, analyze_work(tried, cluster))
    return None


def fastest(candidates: Sequence[Candidate]) -> Candidate:
    """Of those whose step is at most LEAST_GAIN longer than the shortest, the one that needs least
    memory."""
    limit = (1 + LEAST_GAIN) * min(each.analytic.step_seconds for each in candidates)
    fast = (each for each in candidates if each.analytic.step_seconds <= limit)
    return min(fast, key=lambda each: each.analytic.total)


def layouts(
    config: Config, count: int, micro_batches: tuple[int, ...] = MICRO_BATCHES
) -> Iterator[Config]:
    """All valid layouts with these micro-batch sizes, and the recompute policy of `config`, whose
    settings other than the layout are valid."""
    for tensor in divisors(count):
        if tensor > GPUS_A_NODE or (count > GPUS_A_NODE and GPUS_A_NODE % tensor):
            continue
        for pipe in divisors(count // tensor):
            for context in context_sizes(config, count // tensor // pipe):
                replicas = count // tensor // pipe // context
                for micro in micro_batches:
                    if pipe > config.model.num_units or _microbatches(config, replicas, micro) == 0:
                        continue
                    for order in orders(config, pipe, _microbatches(config, replicas, micro)):
                        for sizes in replicated(config, replicas, tensor, context):
                            mesh = {"tensor": tensor, "pipe": pipe, **sizes, **order}
                            layout = _with(config, mesh, micro)
                            if _is_valid(layout, count):
                                yield layout


def context_sizes(config: Config, devices: int) -> list[int]:
    """Sizes of context to try, of the divisors of `devices` that are left beside pipe and tensor.

    1; of sequences from LONG on, sizes that leave a device LEAST_PIECE tokens; if the batch is
    smaller than `devices`, or the config names a strategy of context, all that the sequence's
    length allows."""
    length, parallel = config.data.sequence_length, config.parallel
    is_chosen = parallel.context > 1 or parallel.context_strategy != "auto"
    every = is_chosen or config.train.global_batch_size < devices
    most = length // 2 if every else length // LEAST_PIECE if length >= LONG else 1
    sizes = (size for size in divisors(devices) if size <= most and length % (2 * size) == 0)
    return [1, *(size for size in sizes if size > 1)]


def replicated(config: Config, replicas: int, tensor: int, context: int = 1) -> Iterator[dict]:
    """Divisions of the replicas into fsdp, data and expert, with experts cut over tensor like the
    rest of the model or not cut; as fields of ParallelConfig. Different experts lie along context
    too."""
    sparse = config.model.has("moe")
    experts = config.model.moe.num_experts if sparse else 1
    for expert in divisors(replicas):
        number = expert * context if sparse else 1
        if experts % number or (expert > 1 and not sparse):
            continue
        shards = itertools.product(divisors(replicas // expert), (False, True)[: min(context, 2)])
        for fsdp, over_context in shards:
            sizes = {"context": context, "fsdp": fsdp, "data": replicas // expert // fsdp}
            sizes |= {"fsdp_context": over_context}
            yield sizes | {"expert": number, "expert_tensor": 0}
            if tensor > 1 and experts > 1 and experts % (number * tensor) == 0:
                yield sizes | {"expert": number * tensor, "expert_tensor": 1}


def orders(config: Config, pipe: int, microbatches: int) -> Iterator[dict]:
    """Schedules and numbers of chunks for `pipe` stages, as fields of ParallelConfig."""
    layers = config.model.num_units
    padded = {"pad_layers": layers % pipe != 0}
    yield PLAIN | padded
    if pipe == 1:
        return
    yield PLAIN | padded | {"schedule": Schedule.zero_bubble}
    if layers % pipe == 0 and microbatches % pipe == 0:
        for chunks in divisors(layers // pipe)[1:]:
            if chunks <= MOST_CHUNKS:
                yield PLAIN | {"chunks": chunks}


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def check_count(config: Config, cluster: Cluster) -> None:
    """ValueError, with the nearest counts, for a number of GPUs that leaves parallel.fsdp=0 a size
    by which width or batch are not divisible."""
    sizes, count = axis_sizes(config.parallel, cluster.count), cluster.count
    others, unit = count // sizes["fsdp"], batch_unit(config, sizes | {"fsdp": 1})
    width, batch = config.model.hidden_size, config.train.global_batch_size
    fitting = [size for size in divisors(width) if batch % (unit * size) == 0]
    counts = [n for n in (others * size for size in fitting) if has_whole_nodes(n)]
    if config.parallel.fsdp or sizes["fsdp"] in fitting or not counts:
        return
    nearest = {*[n for n in counts if n < count][-1:], *[n for n in counts if n > count][:1]}
    raise ValueError(
        f"hardware={cluster.name}x{count} leaves parallel.fsdp={sizes['fsdp']}, by which model."
        f"hidden_size={width} or train.global_batch_size={batch} is not divisible: choose "
        f"{' or '.join(map(str, sorted(nearest)))} GPUs, other sizes in parallel.*, or --search"
    )


def usable(cluster: Cluster) -> float:
    """Bytes of a GPU's memory that the search fills."""
    return (1 - MARGIN) * cluster.capacity


def needed_bytes(config: Config, count: int, device: Device | None = None) -> int:
    """Bytes per device; `device` as of `workload`."""
    return sum(device_memory(workload(config, count, device)).values())


def _with(config: Config, parallel: dict, micro: int) -> Config:
    """`config` with these fields, its layers divided evenly over the stages, and fsdp_gather=auto:
    the sizes of data and fsdp say how often weights are gathered."""
    even = {"chunk_layers": (), "first_stage_layers": 0, "last_stage_layers": 0}
    even["fsdp_gather"] = FsdpGather.auto
    return dataclasses.replace(
        config,
        parallel=dataclasses.replace(config.parallel, **even, **parallel),
        train=dataclasses.replace(config.train, micro_batch_size=micro),
    )


def _microbatches(config: Config, replicas: int, micro: int) -> int:
    """Microbatches per step; 0 if the batch does not divide."""
    count, remainder = divmod(config.train.global_batch_size, replicas * micro)
    return 0 if remainder else count


def _is_valid(config: Config, count: int) -> bool:
    """Whether no rule is broken that the fields of VARIED affect."""
    sizes = axis_sizes(config.parallel, count)
    problems = itertools.chain(layout_problems(config, sizes), declared_problems(config.parallel))
    return next(problems, None) is None


def least(config: Config, count: int, device: Device) -> tuple[int, Config | None]:
    """(bytes per device, layout) of the layout that needs least, under full recomputation."""
    best: tuple[int, Config | None] = (0, None)
    full = with_fields(config, {"model.recompute": "full"})
    for layout in layouts(full, count, micro_batches=(1,)):
        size = needed_bytes(layout, count, device)
        if best[1] is None or size < best[0]:
            best = size, layout
    return best


def _nothing_fits(config: Config, cluster: Cluster) -> str:
    where = f"{cluster.count} {cluster.name}"
    size, layout = least(config, cluster.count, cluster.device)
    if layout is None:
        unit = max(cluster.count // GPUS_A_NODE, 1)
        return (
            f"no layout of {where} is valid for model.attention.num_heads="
            f"{config.model.attention.num_heads}, "
            f"model.num_layers={config.model.num_layers} and "
            f"train.global_batch_size={config.train.global_batch_size}: choose a batch that the "
            f"replicas divide (best a multiple of {unit}), or another number of GPUs"
        )
    parallel, over = layout.parallel, size - usable(cluster)
    sizes = {"expert": parallel.expert, "context": parallel.context}
    others = "".join(f", {name}={size}" for name, size in sizes.items() if size > 1)
    offload = ", optim.offload" * config.optim.offload
    enough = cluster.count
    while enough <= MOST_GPUS:
        enough *= 2
        fewest, other = least(config, enough, cluster.device)
        if other is not None and fewest <= usable(cluster):
            remedy = f"{enough} GPUs would be enough by the same formulas"
            break
    else:
        remedy = f"nor does it on up to {MOST_GPUS} with this batch: take larger GPUs or less model"
    return (
        f"the model does not fit {where} under any layout: the least found is {size / GIB:.1f} GiB "
        f"a GPU (tensor={parallel.tensor}, pipe={parallel.pipe}, fsdp={parallel.fsdp}, "
        f"data={parallel.data}{others}, full recompute{offload}), {over / GIB:.1f} GiB "
        f"more than the {usable(cluster) / GIB:.1f} GiB that are planned of the "
        f"{cluster.capacity / GIB:.1f} GiB of one; {remedy}"
    )
