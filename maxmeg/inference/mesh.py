"""Meshes of the commands that load a model to run it, by their options."""

import jax
from jax.sharding import Mesh

from maxmeg.config.validate import VIRTUAL_DEVICES
from maxmeg.parallel.mesh import AXES, make_mesh


def local_mesh(tensor: int = 1) -> Mesh:
    """A mesh of this process's first `tensor` devices, all along tensor."""
    devices = jax.local_devices()
    if not 1 <= tensor <= len(devices):
        platform = devices[0].platform
        virtual = f"; on a CPU: XLA_FLAGS={VIRTUAL_DEVICES}={tensor}" * (platform == "cpu")
        raise ValueError(
            f"--tensor={tensor} must lie in 1..{len(devices)}: JAX sees {len(devices)} {platform}"
            f"{virtual}"
        )
    return make_mesh(dict.fromkeys(AXES, 1) | {"tensor": tensor}, devices[:tensor])


def serving_mesh(tensor: int, expert: int, data: int) -> Mesh:
    """A mesh of the first data x expert x tensor devices, or of all devices of several processes.

    data=0: one replica, or in several processes as many as there are devices.
    """
    devices, processes = jax.devices(), jax.process_count()
    if processes == 1 and data <= 1 and expert == 1:
        return local_mesh(tensor)
    data = data or (len(devices) // (tensor * expert) if processes > 1 else 1)
    count = data * expert * tensor
    if count > len(devices) or (processes > 1 and count < len(devices)):
        have, remedy = ("process has", "smaller sizes")
        if processes > 1:
            have, remedy = f"{processes} processes have", "sizes whose product is that"
        raise ValueError(
            f"--data={data} x --expert={expert} x --tensor={tensor} = {count} devices, but the "
            f"{have} {len(devices)}: choose {remedy}"
        )
    sizes = {"data": data, "expert": expert, "tensor": tensor}
    return make_mesh(dict.fromkeys(AXES, 1) | sizes, devices[:count])
