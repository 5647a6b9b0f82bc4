"""The one shard_map of a step: manual over every mesh axis."""

from collections.abc import Callable

import jax
from jax.sharding import Mesh

from maxmeg.parallel.mesh import MESH_AXES


def spmd(function: Callable, mesh: Mesh, in_specs, out_specs) -> Callable:
    """`function` run on every device over its own shards; specs as for jax.shard_map."""
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=frozenset(MESH_AXES),
        check_vma=False,
    )
