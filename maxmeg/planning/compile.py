"""Compiles the real train step for GPUs that this machine does not have.

`compile_report` starts a child process, `python -m maxmeg.planning.compile < request.json`, with
the environment for absent GPUs; the caller keeps its devices. Nothing is allocated. Without a
device, GEMMs are not tuned: the result shows memory, collectives and structure, not GEMM speed.
"""

import dataclasses
import json
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxmeg.config import files
from maxmeg.config.data import HAS_TEXT, Objective
from maxmeg.config.schema import Config
from maxmeg.config.validate import axis_sizes, validate
from maxmeg.data.placement import LocalRows
from maxmeg.optim.build import make_optimizer
from maxmeg.parallel.batch import Batch, batch_spec
from maxmeg.parallel.mesh import MESH_AXES, batch_shards, make_mesh, sizes_of
from maxmeg.planning import absent, hlo
from maxmeg.planning.hardware import cluster, parse_cluster
from maxmeg.planning.report import Collective, Compiled
from maxmeg.program import Program
from maxmeg.runtime.gpu_environment import absent_environment
from maxmeg.state import abstract_state
from maxmeg.step import make_train_step

_REFUSALS = {kind.__name__: kind for kind in (ValueError, NotImplementedError)}


def compile_report(config: Config, hardware: str, count: int, hlo_path: str = "") -> Compiled:
    """Compile the train step of `config` for `count` GPUs in a child process.

    hlo_path: a file for the compiled text; empty: none. Raises ValueError if config, hardware name
    or count is wrong, or packages of `maxmeg[plan]` are missing; ChildProcessError if the compiler
    fails or runs out of memory.
    """
    parse_cluster(f"{hardware}x{count}")
    validate(config, count)
    request = {"config": files.to_dict(config), "hardware": hardware, "count": count}
    path = str(pathlib.Path(hlo_path).resolve()) if hlo_path else ""
    with absent.without_assembler(absent_environment(config.train.deterministic)) as environment:
        child = subprocess.run(
            [sys.executable, "-m", "maxmeg.planning.compile"],
            input=json.dumps({**request, "hlo_path": path}),
            env=environment,
            cwd=pathlib.Path(__file__).parents[2],  # finds the package even if it is not installed
            capture_output=True,
            text=True,
        )
    if child.returncode:
        cause = child.stderr.strip()[-4000:]
        if child.returncode == -signal.SIGKILL:
            cause = "killed: not enough memory on this machine"
        raise ChildProcessError(f"compiling for {count} {hardware} failed: {cause}")
    answer = json.loads(child.stdout.splitlines()[-1])
    if "refusal" in answer:
        raise _REFUSALS[answer["refusal"]](answer["message"])
    rows = [Collective(**{**row, "axes": tuple(row["axes"])}) for row in answer["collectives"]]
    return Compiled(**{**answer, "collectives": tuple(rows)})


def compile_here(config: Config, hardware: str, count: int) -> tuple[Compiled, str]:
    """(report, compiled text). This process must have `absent_environment()`."""
    started = time.monotonic()
    devices = absent.absent_gpus(hardware, count)
    mesh = make_mesh(axis_sizes(config.parallel, count), devices, config.parallel.fold)
    step, arguments = abstract_step(config, mesh)
    try:
        lowered = step.trace(*arguments).lower(lowering_platforms=("cuda",))
        lower_seconds = time.monotonic() - started
        compiled = lowered.compile()
    except Exception as error:
        if missing := missing_part(str(error)):
            raise ValueError(f"{missing} ({error})") from error
        raise
    compile_seconds = time.monotonic() - started - lower_seconds
    memory, text = compiled.memory_analysis(), compiled.as_text()
    program = hlo.parse(text)
    report = Compiled(
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        outputs_not_aliased=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        capacity=cluster(hardware, count).capacity,
        collectives=hlo.collectives(program, named_sizes(mesh)),
        kernels=hlo.kernels(program),
        flops=hlo.matrix_flops(program),
        lower_seconds=lower_seconds,
        compile_seconds=compile_seconds,
        host=memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes,
    )
    return report, text


def named_sizes(mesh: Mesh) -> dict[str, int]:
    """Sizes of the mesh axes; fold and tensor count as one axis if either has size 1."""
    joined = 1 in (mesh.shape["fold"], mesh.shape["tensor"])
    return sizes_of(mesh) if joined else dict(mesh.shape)


def missing_part(error: str) -> str:
    """The package whose absence made the compilation fail; empty: another error."""
    if "libdevice" in error:
        return f"CUDA's libdevice is missing: {absent.EXTRA}"
    if "cudnn" in error.lower() and not absent.has_cudnn():
        return (
            f"attention uses cuDNN, which is not installed: {absent.EXTRA}, "
            "or set config.model.attention.backend=xla"
        )
    return ""


def abstract_step(config: Config, mesh: jax.sharding.Mesh) -> tuple:
    """(jitted train step, its abstract arguments) of a config on a mesh."""
    width = config.model.width_multiplier
    optimizer = make_optimizer(config.optim, mesh, config.parallel.zero1, width)
    abstract = abstract_state(config, optimizer, mesh)
    train_step = make_train_step(config, mesh, optimizer, abstract)
    return train_step, (abstract, abstract_batch(config, mesh), abstract_controls(mesh))


def check_step(config: Config, program: Program) -> None:
    """Trace the training step, which raises the errors that it would raise in a run; compile
    nothing."""
    mesh = program.mesh
    batch, controls = abstract_batch(config, mesh), abstract_controls(mesh)
    jax.eval_shape(program.traced_step, program.abstract, batch, controls)


def abstract_batch(config: Config, mesh: jax.sharding.Mesh) -> Batch:
    """Abstract arrays [microbatch, sample, length] of one step, with those of its objective."""
    size = config.train.global_batch_size
    rows = LocalRows(batch_shards(mesh), (), config.train.micro_batch_size)
    microbatches = rows.microbatches(size)
    shape = (microbatches, size // microbatches, config.data.sequence_length)
    sharding = NamedSharding(mesh, batch_spec(3))
    ids: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    mask: Any = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    chunks: Any = None
    if config.parallel.context_chunks:
        count = config.parallel.context * config.parallel.context_chunks
        chunks = jax.ShapeDtypeStruct((*shape[:2], count), jnp.int32, sharding=sharding)
    extra: dict[str, Any] = {}
    if config.data.objective is Objective.masked:
        swapped = NamedSharding(mesh, batch_spec(2))
        extra = {"is_swapped": jax.ShapeDtypeStruct(shape[:2], jnp.int32, sharding=swapped)}
        extra |= {"token_types": ids}
    if config.data.objective.is_retrieval:
        flag = NamedSharding(mesh, batch_spec(2))
        has_text = jax.ShapeDtypeStruct(shape[:2], jnp.int32, sharding=flag)
        extra = {f"{HAS_TEXT}{number}": has_text for number in range(1 + config.data.negatives)}
    if source_length := config.data.source_tokens:
        source = jax.ShapeDtypeStruct((*shape[:2], source_length), jnp.int32, sharding=sharding)
        extra |= {"encoder_tokens": source, "encoder_segment_ids": source}
    segments: Any = ids if config.data.has_segments else None
    return Batch(ids, ids, ids, mask, segments, chunks, extra)


def abstract_controls(mesh: jax.sharding.Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Abstract learning rate and weight decay, and the stop flag of every device."""
    rate = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))
    stop = jax.ShapeDtypeStruct((mesh.size,), jnp.int32, sharding=NamedSharding(mesh, P(MESH_AXES)))
    return {"learning_rate": rate, "weight_decay": rate, "stop": stop}


def main() -> None:
    request = json.load(sys.stdin)
    config = files.from_dict(request["config"])
    try:
        report, text = compile_here(config, request["hardware"], request["count"])
    except tuple(_REFUSALS.values()) as error:
        kind = next(name for name, kind in _REFUSALS.items() if isinstance(error, kind))
        print(json.dumps({"refusal": kind, "message": str(error)}))
        return
    if request["hlo_path"]:
        pathlib.Path(request["hlo_path"]).write_text(text, encoding="utf-8")
    print(json.dumps(dataclasses.asdict(report)))


if __name__ == "__main__":
    main()
