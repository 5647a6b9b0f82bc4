"""The choice of an op's backend, its log line and its errors.

A backend is a module or object with SUPPORTS, a line for error messages, and `refuses(*call,
device)`, which returns why it cannot run a call, or "" if it can. If it has `leaves_idle(*call)`,
which returns why others are better, "auto" follows it.
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import importlib.util
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from maxmeg.ops.choices import measured_order, wrong_here

AMPERE, HOPPER, BLACKWELL = 8, 9, 10  # major compute capabilities
COMPILED_FOR = {"A100": AMPERE, "H100": HOPPER, "H200": HOPPER, "B200": BLACKWELL}  # absent GPUs
SETTINGS = {  # of a run's configuration, which name an op's backend
    "attention": "model.attention.backend",
    "block_matmul": "train.quantization.backend",
    "chunk_scan": "model.mamba.backend",
    "delta_scan": "model.delta.backend",
    "grouped_matmul": "model.moe.backend",
    "linear + cross entropy": "train.loss_backend",
}


@dataclasses.dataclass(frozen=True)
class Device:
    """The device that a program is compiled for; capability (0, 0): unknown."""

    platform: str
    capability: tuple[int, int] = (0, 0)

    @property
    def is_cuda(self) -> bool:
        return self.platform in ("cuda", "gpu")


_chosen: contextvars.ContextVar[set | None] = contextvars.ContextVar("chosen", default=None)


@contextlib.contextmanager
def chosen_backends() -> Iterator[set[tuple[str, str]]]:
    """(op, backend) of every choice inside, such as while a program is traced."""
    chosen: set[tuple[str, str]] = set()
    token = _chosen.set(chosen)
    try:
        yield chosen
    finally:
        _chosen.reset(token)


def pick(
    op: str, backends: Mapping[str, Any], order: Sequence[str], named: str, call: tuple
) -> str:
    """The backend that runs `call` (`choose`) on the target device; logs each choice once."""
    name, reason = choose(op, backends, order, named, call, target_device())
    if named == "auto":
        log_choice(op, name, reason)
    return name


def choose(
    op: str,
    backends: Mapping[str, Any],
    order: Sequence[str],
    named: str,
    call: tuple,
    device: Device,
) -> tuple[str, str]:
    """(backend that runs `call`, why "auto" does not use those before it in its order).

    `named`, or for "auto" the first that supports the call, of those measured (ops/choices.py) and
    then of `order`. Its arrays may be shapes; nothing runs. ValueError, with the reasons, if the
    named backend or all that "auto" tries cannot run the call.
    """
    name, reason = named, ""
    if named == "auto":
        measured = measured_order(op, backends, order, device.capability)
        name, reason = first(op, backends, measured, call, device)
    else:
        check_named(op, backends, named, call, device)
    if (chosen := _chosen.get()) is not None:
        chosen.add((op, name))
    return name, reason


def check_named(
    op: str, backends: Mapping[str, Any], named: str, call: tuple, device: Device
) -> None:
    """ValueError, with the reason, if the backend cannot run the call."""
    if named not in backends:
        raise ValueError(f"{op} backend {named!r} is none of auto, {', '.join(backends)}")
    if device.is_cuda and (problem := wrong_here(op).get(named)):
        raise ValueError(
            f"{op} backend {named} gave wrong results on this GPU ({problem}): use auto, or check "
            "it again with maxmeg doctor --kernels"
        )
    if reason := backends[named].refuses(*call, device):
        others = " or ".join(name for name in backends if name != named)
        place = f" for {SETTINGS[op]}" if op in SETTINGS else ""
        raise ValueError(f"{op} backend {named} cannot run: {reason}; use auto or {others}{place}")


def first(
    op: str, backends: Mapping[str, Any], order: Sequence[str], call: tuple, device: Device
) -> tuple[str, str]:
    reasons = {}
    for name in order:
        leaves_idle = getattr(backends[name], "leaves_idle", lambda *call: "")
        reason = backends[name].refuses(*call, device) or leaves_idle(*call)
        if not reason:
            return name, "; ".join(f"{other}: {why}" for other, why in reasons.items())
        reasons[name] = reason
    raise ValueError(
        f"no {op} backend can run this: "
        + "; ".join(f"{name}: {why}" for name, why in reasons.items())
        + ". Supported are: "
        + "; ".join(f"by {name}: {module.SUPPORTS}" for name, module in backends.items())
    )


def refuses_older_gpus(device: Device) -> str:
    """Why kernels that need Ampere (bfloat16 tensor cores) cannot run; empty if they can."""
    if not device.is_cuda:
        return f"the device is {device.platform}, not a CUDA GPU"
    if (0, 0) < device.capability < (AMPERE, 0):
        major, minor = device.capability
        return f"it needs compute capability 8.0 (Ampere) or newer, found {major}.{minor}"
    return ""


def refuses_hopper_kernels(device: Device) -> str:
    """Why our Mosaic-GPU kernels cannot run: WGMMA exists on compute capability 9.0 only."""
    if not device.is_cuda:
        return f"the device is {device.platform}, not a CUDA GPU"
    if device.capability not in ((HOPPER, 0), (0, 0)):
        major, minor = device.capability
        return f"it needs a Hopper GPU (compute capability 9.0), found {major}.{minor}"
    return refuses_missing_kernels()


def refuses_missing_kernels() -> str:
    if importlib.util.find_spec("maxmeg.kernels") is None:
        return "the folder kernels/ is not installed as maxmeg.kernels (pip install -e .)"
    return ""


def kernel_module(name: str) -> Any:
    """maxmeg.kernels.NAME, imported at the first call: ops work without the folder kernels/."""
    return importlib.import_module(f"maxmeg.kernels.{name}")


def target_device() -> Device:
    """The device that the program will run on: a local GPU, or an absent one known by its name."""
    device = Device(target_platform())
    if not device.is_cuda:
        return device
    if jax.default_backend() != "gpu":
        mesh = jax.sharding.get_abstract_mesh()
        kind = getattr(getattr(mesh, "abstract_device", None), "device_kind", "")
        majors = [major for name, major in COMPILED_FOR.items() if name in kind]
        return Device(device.platform, (majors[0], 0)) if majors else device
    major, minor = jax.local_devices()[0].compute_capability.split(".")
    return Device(device.platform, (int(major), int(minor)))


def target_platform() -> str:
    """Platform of the current mesh, which may be of absent devices, else of the default backend."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    kind = getattr(device, "platform", None)
    return kind or jax.default_backend()


@functools.cache
def log_choice(op: str, backend: str, reason: str) -> None:
    because = f" ({reason})" if reason else ""
    logging.getLogger("maxmeg").info("%s backend: %s%s", op, backend, because)
