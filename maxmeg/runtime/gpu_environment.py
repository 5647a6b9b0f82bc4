"""The environment of a process on GPUs: variables that JAX, XLA and NCCL read when they start.

A value that the user has set wins. XLA's flags keep their defaults, but for `compiler_options`:
benchmarks/NOTES.md, "Flags of XLA", has what those that were tried change.
"""

import dataclasses
import functools
import glob
import itertools
import logging
import math
import os
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from maxmeg.config.parallel import GPUS_A_NODE
from maxmeg.parallel.mesh import EXPERT_AXES, EXPERT_TENSOR_AXES, MESH_AXES
from maxmeg.parallel.parameter import info, is_variable, num_stacked
from maxmeg.parallel.rules import fsdp_dim, reduction, storage_axes
from maxmeg.runtime.platform import choose_platform, uses_gpu

log = logging.getLogger("maxmeg")

# Fraction of a GPU's memory that XLA preallocates as its pool; XLA's default is 0.75. Arrays, the
# step's temporaries and cuDNN's workspaces come from the pool. The CUDA context, loaded kernels
# and NCCL's buffers lie outside of it: 0.08 leaves them 6 GiB on an 80 GB GPU. The planner compares
# with the same fraction.
MEMORY_FRACTION = 0.92
_FRACTION_NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")

# One hardware queue keeps kernels in the order in which XLA launches them, so that a collective
# starts before the product that is to hide it. NVIDIA's guide to XLA on GPUs advises it for Ampere
# and Hopper and against it for Blackwell. No GPU has timed it with maxmeg yet.
_ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
VARIABLES = {"Ampere": _ONE_QUEUE, "Hopper": _ONE_QUEUE, "Blackwell": {}}
_PREFIXES = "^(CUDA_DEVICE_|XLA_CLIENT_)"
_GENERATIONS = {
    "Ampere": r"\bA(100|800|40|30|10G?)\b|RTX A\d|RTX 30\d\d",
    "Hopper": r"\bG?H(100|200|800|20)\b",
    "Blackwell": r"\bG?B(100|200|300)\b|RTX 50\d\d|RTX PRO",
}

# With it XLA uses no atomic additions (scatters are sorted and summed in a fixed order), cuDNN's
# deterministic backward, and untuned products: tuning may choose differently after a restart.
DETERMINISTIC = "--xla_gpu_deterministic_ops"
NCCL_ALGORITHMS = "^NVLS,NVLSTree"  # sums inside NVLink switches have no fixed order

_ABSENT = {
    "CUDA_VISIBLE_DEVICES": "-1",  # a GPU of this machine must not be touched
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # the plugin's wheel without CUDA's wheels
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # the report has the seconds to compile
}

# JAX keeps only programs that take a second to compile, but a restart shall compile none again.
_CACHED_SECONDS = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"

# XLA combines reduce-scatters up to this size into one. Combined, the gradients of a layer's
# matrices wait for the last of them, and nothing is left that could hide their scatter.
COMBINED = "xla_gpu_reduce_scatter_combine_threshold_bytes"
XLA_COMBINES = 30 * 2**20  # its default

# XLA schedules one collective at a time. With two in flight, an all-gather over one mesh axis can
# overlap a collective over another; ring attention's backward sends K and V beside their gradients;
# and two lanes have their own.
AT_ONCE = "xla_gpu_experimental_parallel_collective_overlap_limit"

# XLA schedules for less memory instead of less waiting once a program takes more than this per cent
# of what its arguments leave of 80 % of the GPU. By default 95, though the pool is larger.
SLOP = "xla_gpu_memory_limit_slop_factor"
SLOP_PERCENT = int(95 * MEMORY_FRACTION / 0.8)

# XLA's own Triton products read wider copies of 8-bit operands; cuBLAS multiplies the codes.
TRITON_PRODUCTS = "xla_gpu_enable_triton_gemm"


@dataclasses.dataclass(frozen=True)
class Environment:
    """What `set_gpu_environment` decided.

    generation: of the GPUs; empty if unknown. added: variables with their new values. users: the
    user's values that replace ours, as NAME=VALUE.
    """

    generation: str
    added: dict[str, str]
    users: tuple[str, ...] = ()

    def words(self) -> str:
        """One line for the terminal: what was added, without common prefixes, and `users`."""
        ours = [f"{re.sub(_PREFIXES, '', name)}={value}" for name, value in self.added.items()]
        yours = ("yours:", *self.users) if self.users else ()
        return " ".join([self.generation or "unknown, default environment:", *ours, *yours])


def gpu_environment(
    environ: Mapping[str, str], generation: str = "", deterministic: bool = False
) -> Environment:
    """The environment to add to `environ` for a process on GPUs of a generation in VARIABLES.

    deterministic: as train.deterministic. ValueError if XLA_FLAGS contradict it, or name a file
    that does not exist.
    """
    added, users = {}, []
    fractions = [name for name in _FRACTION_NAMES if environ.get(name)]
    if fractions:  # JAX refuses both names together
        users += [f"{name}={environ[name]}" for name in fractions]
    else:
        added[_FRACTION_NAMES[0]] = str(MEMORY_FRACTION)
    for name, value in VARIABLES.get(generation, {}).items():
        if not environ.get(name):
            added[name] = value
        elif environ[name] != value:
            users.append(f"{name}={environ[name]}")
    ours = (COMBINED, AT_ONCE, SLOP, TRITON_PRODUCTS)  # `compiler_options`
    users += [flag for flag in user_flags(environ).split() if any(name in flag for name in ours)]
    if deterministic:
        added["XLA_FLAGS"] = deterministic_flags(user_flags(environ))
        added["NCCL_ALGO"] = environ.get("NCCL_ALGO") or NCCL_ALGORITHMS
    return Environment(generation, added, tuple(users))


def user_flags(environ: Mapping[str, str]) -> str:
    """The flags in XLA_FLAGS, or in the file that it names: a text without "-" is a file's path."""
    text = environ.get("XLA_FLAGS", "").strip()
    if not text or text.startswith("-"):
        return text
    try:
        with open(text, encoding="utf-8") as file:
            return " ".join(file.read().split())
    except OSError as error:
        raise ValueError(
            f"XLA_FLAGS={text} is neither flags, which begin with --, nor a file: {error.strerror}"
        ) from None


def deterministic_flags(flags: str) -> str:
    """XLA_FLAGS with the flag for deterministic programs; ValueError if they set it to false."""
    named = [flag for flag in flags.split() if flag.split("=")[0] == DETERMINISTIC]
    if any(flag.endswith(("=false", "=0")) for flag in named):
        raise ValueError(
            f"train.deterministic=true contradicts {named[-1]} in XLA_FLAGS: remove one of the two"
        )
    return flags if named else f"{flags} {DETERMINISTIC}=true".strip()


def generation_of(names: list[str]) -> str:
    """The generation of GPUs with these names; empty if unknown, or if they differ."""
    generations = {
        next((one for one, words in _GENERATIONS.items() if re.search(words, name)), "")
        for name in names
    }
    return generations.pop() if len(generations) == 1 else ""


def gpu_names() -> list[str]:
    """Names of this host's GPUs, as NVIDIA's driver on Linux lists them; JAX need not run."""
    texts = []
    for path in sorted(glob.glob("/proc/driver/nvidia/gpus/*/information")):
        with open(path, encoding="utf-8") as file:
            texts.append(file.read())
    return [match[1].strip() for text in texts if (match := re.search(r"^Model:(.*)", text, re.M))]


def set_gpu_environment(deterministic: bool = False, cache: str = "") -> Environment | None:
    """Add `gpu_environment` to this process's environment; call before the first use of a device.

    deterministic: as train.deterministic. cache: a folder for compiled programs, unless the user
    has chosen one. Without a GPU, JAX uses the CPU, and the result is None; ValueError if
    JAX_PLATFORMS asks for CUDA nevertheless.
    """
    choose_platform()
    if not uses_gpu():
        return None
    memory_fraction(os.environ)
    environment = gpu_environment(os.environ, generation_of(gpu_names()), deterministic)
    os.environ.update(environment.added)
    if cache and not jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", cache)
        if not os.environ.get(_CACHED_SECONDS):
            jax.config.update(_CACHED_SECONDS.lower(), 0.0)
    return environment


def memory_fraction(environ: Mapping[str, str]) -> float:
    """Fraction of a GPU's memory in XLA's pool; ValueError unless the user's is in (0, 1]."""
    for name in _FRACTION_NAMES:
        if text := environ.get(name):
            try:
                fraction = float(text)
            except ValueError:
                fraction = math.nan
            if not 0 < fraction <= 1:
                rule = f"must be above 0 and at most 1: unset it for {MEMORY_FRACTION}"
                raise ValueError(f"{name}={text} {rule}")
            return fraction
    return MEMORY_FRACTION


def pool_fraction() -> float:
    """`memory_fraction` of this process's environment, which the planner fits models to."""
    return memory_fraction(os.environ)


def compiler_options(
    model, mesh: Mesh, zero1: bool = False, fp8: bool = False, two_lanes: bool = False
) -> dict[str, int | bool]:
    """Options with which XLA compiles a train step of `model` for `mesh`; none on CPUs.

    Reduce-scatters of gradients are combined up to the size of the layers' largest matrix on a
    device, so that two large ones are not. Two collectives run at once where axes inside nodes and
    axes across nodes meet, which use different links, and with two lanes (parallel.lanes), unless
    both exchange tokens inside nodes, over one link. XLA may use the pool of `MEMORY_FRACTION`.
    fp8: whether products have 8-bit operands; then all products are cuBLAS calls. A flag in
    XLA_FLAGS wins.
    """
    if mesh.devices.flat[0].platform not in ("cuda", "gpu"):
        return {}
    size = largest_shard(model, mesh, zero1)
    options: dict[str, int | bool] = {SLOP: SLOP_PERCENT}
    if 0 < size < XLA_COMBINES:
        options[COMBINED] = size
    if fp8:
        options[TRITON_PRODUCTS] = False
    group = math.prod(mesh.shape[axis] for axis in (*EXPERT_AXES, *EXPERT_TENSOR_AXES))
    one_link = two_lanes and mesh.shape["expert"] > 1 and group <= GPUS_A_NODE
    if (len(links(mesh)) > 1 or mesh.shape["context"] > 1 or two_lanes) and not one_link:
        options[AT_ONCE] = 2
    users = user_flags(os.environ)
    return {n: value for n, value in options.items() if n not in users and is_known(n, value)}


@functools.cache
def is_known(name: str, value: int | bool) -> bool:
    """Whether this XLA has an option, which a later one may drop: else the first call warns."""
    try:
        jax.jit(lambda: jnp.int32(0), compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        log.warning("compiled without %s=%s: %s", name, value, error)
        return False
    return True


def links(mesh: Mesh) -> set[bool]:
    """Whether the axes over which layers communicate cross nodes of GPUS_A_NODE, as a set."""
    crossing, stride = set(), 1
    for axis in reversed(MESH_AXES):
        size = mesh.shape[axis]
        if size > 1 and axis != "pipe":  # stages communicate between ticks, not beside layers
            crossing.add(stride * size > GPUS_A_NODE)
        stride *= size
    return crossing


def largest_shard(model, mesh: Mesh, zero1: bool) -> int:
    """Bytes of the largest matrix of a layer whose gradient is scattered, on a device, in the dtype
    of its gradient: over fsdp or, without, over the axes of ZeRO-1."""
    sizes = [0]
    for variable in jax.tree.leaves(model, is_leaf=is_variable):
        layers = num_stacked(variable)  # their dimensions come first
        place = reduction(variable, mesh, zero1)
        has_fsdp = any(mesh.shape[axis] > 1 for axis in info(variable).fsdp_axes)
        if layers and fsdp_dim(variable, mesh) is not None and (has_fsdp or place.cut):
            axes = itertools.chain(*storage_axes(variable, mesh, zero1=not has_fsdp)[layers:])
            devices = math.prod(mesh.shape[axis] for axis in axes)
            elements = math.prod(variable.shape[layers:]) // devices
            sizes.append(elements * place.dtype.itemsize)
    return max(sizes)


def absent_environment(deterministic: bool = False) -> dict[str, str]:
    """Environment of a child process that compiles for GPUs that this machine does not have.

    It keeps the user's XLA_FLAGS. deterministic: as train.deterministic.
    """
    flags = user_flags(os.environ)
    flags = deterministic_flags(flags) if deterministic else flags
    flags = f"{flags} --xla_gpu_autotune_level=0".strip()
    return {**os.environ, **_ABSENT, "XLA_FLAGS": flags}


def recorded_environment() -> str:
    """The variables of this process that NCCL, CUDA and XLA read, for the run's metrics; empty
    without a GPU."""
    if not uses_gpu():
        return ""
    read = re.compile("XLA_|NCCL_|CUDA_DEVICE_MAX_CONNECTIONS$")
    return " ".join(
        f"{name}={value}" for name, value in sorted(os.environ.items()) if read.match(name)
    )
