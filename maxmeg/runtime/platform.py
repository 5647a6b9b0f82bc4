"""The choice of JAX's platform, CPU or GPU, before JAX looks for devices."""

import glob
import importlib.metadata

import jax

_DEVICE_FILES = ("/dev/nvidia*", "/dev/dxg", "/dev/nvhost*", "/dev/nvgpu*")  # also WSL, Jetson
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")


def choose_platform() -> None:
    """Use the CPU if JAX's CUDA plugin is installed on a machine without an NVIDIA GPU.

    JAX would use the CPU too, after the plugin's traceback of 20 lines. Call before the first use
    of a device. ValueError if JAX_PLATFORMS asks for CUDA and the GPU or the plugin is missing.
    """
    platforms, has_gpu, has_plugin = requested_platforms(), has_nvidia_gpu(), has_cuda_plugin()
    if {"cuda", "gpu"} & {name.strip() for name in platforms.split(",")}:
        if not has_gpu:
            raise ValueError(
                f"JAX_PLATFORMS={platforms}: this machine has no NVIDIA GPU (no /dev/nvidia*); "
                "check nvidia-smi and the GPUs of the job or container, or unset JAX_PLATFORMS for "
                "a CPU"
            )
        if not has_plugin:
            raise ValueError(
                f"JAX_PLATFORMS={platforms}: JAX is installed without CUDA: pip install "
                "'maxmeg[cuda13]' (or cuda12)"
            )
    elif not platforms and has_plugin and not has_gpu:
        jax.config.update("jax_platforms", "cpu")


def requested_platforms() -> str:
    """JAX_PLATFORMS, or the value that the program has set; empty: any platform."""
    return jax.config.values["jax_platforms"] or ""


def uses_gpu() -> bool:
    """Whether JAX will use NVIDIA GPUs: a device, the plugin, and no request for the CPU."""
    return requested_platforms() != "cpu" and has_nvidia_gpu() and has_cuda_plugin()


def has_nvidia_gpu() -> bool:
    """Whether a device file of NVIDIA's driver exists."""
    return any(glob.glob(pattern) for pattern in _DEVICE_FILES)


def has_cuda_plugin() -> bool:
    """Whether JAX's plugin for CUDA is installed."""
    for name in _PLUGINS:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return True
    return False
