"""Changes of a config that save memory, from formulas; nothing is compiled."""

import enum
import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence

from maxmeg.config.model import DType
from maxmeg.config.recompute import POLICIES
from maxmeg.config.schema import Config
from maxmeg.config.setting import fields, with_fields
from maxmeg.config.validate import axis_sizes, validate
from maxmeg.ops.backend import Device, target_device
from maxmeg.planning.analytic import analyze
from maxmeg.planning.cost.attention import backends, warnings
from maxmeg.planning.cost.experts import product_words
from maxmeg.planning.cost.memory import device_memory
from maxmeg.planning.cost.workload import workload
from maxmeg.planning.hardware import GPUS_A_NODE, Cluster
from maxmeg.planning.report import Remedy
from maxmeg.planning.search import divisors, needed_bytes, usable

Settings = dict[str, enum.Enum | str | int | bool]  # by name: {"parallel.tensor": 8}
SHOWN = 3


def planned_memory(config: Config, count: int) -> dict[str, int] | None:
    """Bytes per device by purpose, on `count` devices; None if the planner does not support it.

    On CPUs, where XLA computes bfloat16 in float32, with the sizes of float32, beside the weights
    that it converts.
    """
    dtype = config.model.dtype
    try:
        memory = device_memory(workload(config, count))
        if target_device().is_cuda or dtype is DType.float32:
            return memory
        wide = with_fields(config, {"model.dtype": DType.float32})
        converted = memory.get("frozen", 0) + memory["compute weights"]
        return device_memory(workload(wide, count)) | {f"{dtype.name} weights": converted}
    except ValueError:
        return None


def planned_kernels(config: Config, count: int) -> tuple[str, dict[str, str]]:
    """(backends of attention and experts in words, warnings of attention by reason) on this
    machine's GPUs; ("", {}) if it has none, or if the planner does not support the config."""
    if not target_device().is_cuda:
        return "", {}
    try:
        work = workload(config, count)
    except ValueError:
        return "", {}
    kernels = {"attention": backends(work), "experts": product_words(work)}
    words = "; ".join(f"{what} by {names}" for what, names in kernels.items() if names)
    return words, warnings(work)


def remedies(config: Config, cluster: Cluster) -> tuple[Remedy, ...]:
    """The smallest changes with which a config fits a cluster, the fastest first.

    It tries more recomputation, smaller microbatches and meshes that divide more of the memory:
    one of the three, then two together, then all. It keeps the fastest change of each set of
    settings. Empty if none of them fits.
    """
    seconds = analyze(config, cluster).step_seconds
    groups = [[{}, *group] for group in _changes(config, cluster.count)]
    combined: dict[int, list[Settings]] = {}
    for parts in itertools.product(*groups):
        settings = {name: value for part in parts for name, value in part.items()}
        combined.setdefault(sum(map(bool, parts)), []).append(settings)
    for number in (1, 2, 3):
        fastest: dict[tuple[str, ...], Remedy] = {}
        for settings in combined.get(number, []):
            changed = with_fields(config, settings)
            memory = _memory(changed, cluster.count, cluster.device)
            if memory is None or memory > usable(cluster):
                continue
            slowdown = analyze(changed, cluster).step_seconds / seconds
            remedy = Remedy(flags_text(settings), memory, slowdown)
            best = fastest.setdefault(tuple(settings), remedy)
            if slowdown < best.slowdown:
                fastest[tuple(settings)] = remedy
        if fastest:
            return tuple(sorted(fastest.values(), key=lambda remedy: remedy.slowdown)[:SHOWN])
    return ()


def largest_savings(config: Config, count: int) -> list[tuple[str, int]]:
    """(flags, bytes saved per device) of at most three single changes, the largest saving first.

    One change each of recomputation, microbatches and mesh. If no mesh of `count` devices saves
    memory, a mesh of twice as many.
    """
    before, smallest = _memory(config, count), []
    if before is None:
        return []
    for group in _changes(config, count):
        sizes = ((_memory(with_fields(config, change), count), change) for change in group)
        tried = [(size, flags_text(change)) for size, change in sizes if size is not None]
        smallest += [min(tried)] if tried else []
    saved = [(flags, before - size) for size, flags in smallest if size < before]
    if not any("parallel." in flags for flags, _ in saved):
        fsdp = 2 * axis_sizes(config.parallel, count)["fsdp"]
        doubled: Settings = {"parallel.fsdp": fsdp}
        size = _memory(with_fields(config, doubled), 2 * count)
        if size is not None and size < before:
            saved.append((f"{flags_text(doubled)} on {2 * count} devices", before - size))
    return sorted(saved, key=lambda pair: -pair[1])


def flags_text(settings: Mapping[str, object]) -> str:
    """ "--parallel.tensor=8 --model.recompute=full" """
    values = ((path, getattr(value, "value", value)) for path, value in settings.items())
    return " ".join(f"--{path}={value}".lower() for path, value in values)


def train_command(arguments: Sequence[str], options: type, changed: Mapping[str, object]) -> str:
    """The `maxmeg train` command for the settings of a `maxmeg plan` command line.

    arguments: that command line. options: dataclass of the options that only `plan` has; they are
    left out. changed: settings that replace those of the command line."""
    kinds, settings, words = fields(options), ["maxmeg", "train"], iter(arguments)
    for word in words:
        flag, equals, _ = word.partition("=")
        name = flag.lstrip("-")
        if name == word or not {name, name.removeprefix("no")} & {*kinds}:
            settings.append(word)
        elif not equals and kinds.get(name) is str:
            next(words, None)  # its value: --hardware h100x8
    return f"{shlex.join(settings)} {flags_text(changed)}".strip()


def _changes(config: Config, count: int) -> tuple[list[Settings], ...]:
    """Single changes that may save memory: recomputation, microbatches, mesh."""
    policies, train = list(POLICIES), config.train
    words = config.model.recompute.split(",")
    named = [word for word in words if word in POLICIES] or ["selective"]  # a list: then full
    changes: list[Settings] = [
        {"model.recompute": policy} for policy in policies[min(map(policies.index, named)) + 1 :]
    ]
    size = train.micro_batch_size or workload(config, count).samples
    return (
        changes,
        [{"train.micro_batch_size": smaller} for smaller in divisors(size)[:-1]],
        list(_meshes(config, count)),
    )


def _meshes(config: Config, count: int) -> Iterator[Settings]:
    """Meshes of the same devices that move a factor of `data` or `fsdp` to another axis."""
    parallel, sizes = config.parallel, axis_sizes(config.parallel, count)
    targets = ("fsdp", "tensor", "pipe", *(("expert",) if config.model.has("moe") else ()))
    for source, target in itertools.product(("data", "fsdp"), targets):
        for factor in divisors(sizes[source])[1:] if source != target else []:
            moved = {
                source: sizes[source] // factor,
                target: (sizes["fsdp"] if target == "fsdp" else getattr(parallel, target)) * factor,
            }
            tensor = moved.get("tensor", 1)
            if tensor > GPUS_A_NODE or (count > GPUS_A_NODE and GPUS_A_NODE % tensor):
                continue
            if not parallel.fsdp:  # 0: all remaining devices
                moved.pop("fsdp", None)
            padded = target == "pipe" and config.model.num_units % moved["pipe"]
            settings: Settings = {f"parallel.{axis}": size for axis, size in moved.items()}
            yield settings | ({"parallel.pad_layers": True} if padded else {})
    if parallel.context > 1 and not parallel.fsdp_context:
        yield {"parallel.fsdp_context": True}


def _memory(config: Config, count: int, device: Device | None = None) -> int | None:
    """Bytes per device; None if the config is invalid or not supported by the planner."""
    try:
        validate(config, count)
        return needed_bytes(config, count, device)
    except ValueError:
        return None
