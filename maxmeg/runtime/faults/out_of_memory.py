"""Out-of-memory errors with the requested size, the planner's memory table and remedies."""

import functools
import os
import re
import resource
import shlex
import sys
from collections.abc import Callable
from typing import Any

import jax

from maxmeg.config.flags import names_config
from maxmeg.config.schema import Config
from maxmeg.pages.table import aligned
from maxmeg.planning.hardware import cluster_name
from maxmeg.planning.remedies import largest_savings, planned_memory
from maxmeg.planning.show.tables import gib
from maxmeg.planning.show.text import memory_table
from maxmeg.processes import multihost
from maxmeg.runtime.metrics.memory import memory_limit
from maxmeg.runtime.metrics.progress import memory_size

# The messages of XLA's pool, the CUDA driver and NCCL. RESOURCE_EXHAUSTED alone is too broad: a
# kernel that asks for too much shared memory has this status as well.
_WORDS = re.compile(r"out of memory|OUT_OF_MEMORY|failed to allocate|exceeded memory limit", re.I)
_REQUESTED = re.compile(r"([\d.]+) ?(B|bytes|[KMGT]i?B)\b")
_UNITS = {"B": 1, "b": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def explains_out_of_memory(remedies: str = "") -> Callable:
    """Decorate a command: running out of memory becomes a MemoryError for the user.

    remedies: text that says what to change. Empty: the command's first argument is a run's config,
    and the message ends with the planner's memory table and the changes that save most.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def run(first: Any, *rest: Any, **named: Any) -> Any:
            try:
                return command(first, *rest, **named)
            except (MemoryError, jax.errors.JaxRuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                raise MemoryError(explanation(error, first, remedies)) from error

        return run

    return decorate


def check_memory(config: Config) -> None:
    """MemoryError if a run on CPUs needs more memory than this machine has, by the planner: the
    operating system would end the process without a word."""
    planned = planned_memory(config, jax.device_count())
    if planned is None or memory_limit() is not None:
        return
    estimate = sum(planned.values()) * jax.local_device_count()
    if estimate > host_memory():
        raise MemoryError(f"a step needs about {memory_size(estimate)}, by the planner")


def explanation(error: BaseException, argument: Any, remedies: str) -> str:
    """The text of the MemoryError that `explains_out_of_memory` raises."""
    happened = what_happened(error)
    if remedies:
        return f"{happened}; {remedies}"
    on_host = isinstance(error, MemoryError) and memory_limit() is not None  # beside a GPU
    return happened if on_host else "\n".join([happened, *advice(argument)])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's allocator or the host's refused memory."""
    return isinstance(error, MemoryError) or _WORDS.search(str(error)) is not None


def requested_bytes(text: str) -> int | None:
    """The bytes that an error of XLA or NumPy says were requested; None if it does not say."""
    match = _REQUESTED.search(text)
    return int(float(match[1]) * _UNITS[match[2][0]]) if match else None


def what_happened(error: BaseException) -> str:
    """One line: the device, the requested size, the available memory."""
    limit = memory_limit()
    kind = "the host" if isinstance(error, MemoryError) else jax.devices()[0].device_kind
    if limit is None or isinstance(error, MemoryError):
        available = f"{memory_size(host_memory())} of memory"
    else:
        available = f"a memory pool of {memory_size(limit)}"
    size = requested_bytes(str(error))
    cause = f"{memory_size(size)} requested" if size else " ".join(str(error).split())[:200]
    return f"out of memory on {kind}, which has {available}: {cause or 'no size given'}"


def host_memory() -> int:
    """Bytes of this machine's memory, or of the process's address space if that is less."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return machine if limit == resource.RLIM_INFINITY else min(machine, limit)


def advice(config: Config) -> list[str]:
    """Lines: the planner's memory table, the changes that save most, the command that searches
    layouts. Processes other than the first get the command alone."""
    count = jax.device_count()
    name = cluster_name(jax.devices()[0].device_kind)
    hardware = f"{name}x{count}" if name else "NAMExCOUNT"
    arguments = sys.argv[1:] if names_config(sys.argv) else ["--config=NAME"]
    command = f"maxmeg plan {shlex.join(arguments)} --hardware={hardware} --search"
    lines = [f"layouts that fit: {command}"]
    if not multihost.is_primary():
        return lines
    planned = planned_memory(config, count)
    if planned is None:
        changes = "train.micro_batch_size=1, model.recompute=full, more parallel.fsdp or tensor"
        return [f"what saves memory: {changes}", *lines]
    saved = [[f"  {flags}", gib(size)] for flags, size in largest_savings(config, count)]
    table = aligned([["settings that save memory, estimated", "GiB"], *saved], right=1)
    return [*memory_table(planned), *table, *lines]
