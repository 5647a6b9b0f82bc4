"""What the train step compiles to on H100s that are not here: `python benchmarks/absent_gpus.py`.

    python benchmarks/absent_gpus.py [CASE ...] [--recompute=none] [--hlo=FOLDER]

Compiles the real train step, nothing allocated, and prints for each case the memory of a device,
the collectives (within and outside loops, asynchronous or not) and the cuDNN calls, as JSON and as
a table. Works on any CPU with `pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt` in
jaxlib's version and `nvidia-cudnn-cu13`. GEMMs are not tuned: no speed can be read from it.
"""

import argparse
import collections
import dataclasses
import json
import os
import re
import sys
import time
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxmeg.config.schema import AttentionBackend, Config, ParallelConfig, Recompute, TrainConfig
from maxmeg.config.validate import axis_sizes, validate
from maxmeg.models.registry import use_architecture
from maxmeg.optim.build import make_optimizer
from maxmeg.parallel.mesh import AXES, batch_shards, make_mesh
from maxmeg.parallel.placement import batch_spec
from maxmeg.state import abstract_state
from maxmeg.step import make_train_step

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048
  core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Case:
    """A named architecture on `gpus` H100s, samples a device and microbatch, microbatches."""

    model: str
    gpus: int = 1
    parallel: dict[str, int] = dataclasses.field(default_factory=dict)
    micro_batch: int = 1
    microbatches: int = 1
    length: int = 0  # 0: the architecture's


CASES = {
    "gpt2-124m": Case("gpt2-124m", micro_batch=16),
    "1.3b": Case("1.3b", micro_batch=4),
    "8b-8": Case("llama3-8b", 8, {"data": 2, "fsdp": 2, "tensor": 2}, 1, 4),
    "8b-16": Case("llama3-8b", 16, {"fsdp": 16}, 1, 1),
    "8b-16-accumulated": Case("llama3-8b", 16, {"fsdp": 16}, 1, 4),
}


def h100s(count: int) -> list:
    """Devices that can be compiled for and nothing else, eight a host."""
    layout = f"{max(1, count // 8)}x1x{min(count, 8)}"
    topology = topologies.get_topology_desc(platform="cuda", target_config=H100, topology=layout)
    return list(topology.devices)[:count]


def config_of(case: Case, recompute: str) -> Config:
    shards = case.gpus // case.parallel.get("tensor", 1)
    config = Config(
        parallel=ParallelConfig(**case.parallel),
        train=TrainConfig(
            global_batch_size=case.micro_batch * case.microbatches * shards,
            micro_batch_size=case.micro_batch,
        ),
    )
    config = use_architecture(config, case.model)
    config.model.attention_backend = AttentionBackend.cudnn
    config.model.recompute = Recompute(recompute)
    config.data.sequence_length = case.length or config.data.sequence_length
    validate(config, case.gpus)
    return config


def compile_step(case: Case, recompute: str):
    """(compiled train step, abstract state) of a case."""
    config = config_of(case, recompute)
    mesh = make_mesh(axis_sizes(config.parallel, case.gpus), h100s(case.gpus))
    optimizer = make_optimizer(config.optim)
    abstract = abstract_state(config, optimizer, mesh)
    step = make_train_step(config, mesh, optimizer, abstract)

    def array(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    shape = (case.microbatches, case.micro_batch * batch_shards(mesh), config.data.sequence_length)
    dtypes = dict.fromkeys(("tokens", "targets", "positions"), jnp.int32)
    dtypes["loss_mask"] = jnp.float32
    batch = {name: array(shape, dtype, batch_spec(3)) for name, dtype in dtypes.items()}
    controls = {name: array((), jnp.float32, P()) for name in ("learning_rate", "weight_decay")}
    controls["stop"] = array((mesh.size,), jnp.int32, P(AXES))
    traced = step.trace(abstract, batch, controls)
    return traced.lower(lowering_platforms=("cuda",)).compile(), abstract


def computations(hlo: str) -> dict[str, str]:
    """Text of each computation by its name."""
    blocks = re.split(r"\n(?=(?:ENTRY )?%?[\w.\-]+ \()", re.sub(r"/\*.*?\*/", "", hlo))
    found = {}
    for block in blocks:
        if name := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(", block):
            found[name[1]] = block
    return found


def loop_trips(texts: dict[str, str]) -> dict[str, int]:
    """How often a step runs each computation that a loop contains, nested loops multiplied."""
    trips = dict.fromkeys(texts, 1)
    for _ in range(len(texts)):
        before = dict(trips)
        for name, text in texts.items():
            for line in text.splitlines():
                count = trips[name]
                if " while(" in line:
                    known = re.search(r'known_trip_count[^}]*?"n":"(\d+)"', line)
                    count *= int(known[1]) if known else 1
                for called in re.findall(r"(?:body|to_apply|calls)=%?([\w.\-]+)", line):
                    if called in trips:
                        trips[called] = max(trips[called], count)
        if trips == before:
            break
    return trips


def calls(hlo: str) -> tuple[list[dict], dict[str, dict]]:
    """Collectives of arrays, and custom calls by target: instructions, and runs a step."""
    texts = computations(hlo)
    trips = loop_trips(texts)
    found = collections.Counter()
    custom: dict[str, dict] = {}
    pattern = re.compile(rf"= (.*?) ({'|'.join(COLLECTIVES)})(-start)?\(")
    for name, text in texts.items():
        for line in text.splitlines():
            if target := re.search(r'custom_call_target="([^"]+)"', line):
                entry = custom.setdefault(target[1], {"instructions": 0, "runs": 0})
                entry["instructions"] += 1
                entry["runs"] += trips[name]
            match = pattern.search(line)
            if match and "[" in re.sub(r"\w+\[\]", "", match[1]):
                synchronous = re.search(r'"is_sync":(true|false)', line)
                wrapped = match[3] or "async" in name
                asynchronous = bool(wrapped) and not (synchronous and synchronous[1] == "true")
                found[match[2], trips[name], asynchronous] += 1
    rows = [
        {"kind": kind, "runs": runs, "asynchronous": asynchronous, "instructions": count}
        for (kind, runs, asynchronous), count in sorted(found.items())
    ]
    return rows, custom


def report(name: str, recompute: str, folder: str) -> dict:
    """Everything that is known of one case."""
    started = time.time()
    compiled, abstract = compile_step(CASES[name], recompute)
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    if folder:
        Path(folder, f"{name}-{recompute}.hlo.txt").write_text(hlo)
    collectives, custom = calls(hlo)
    state = sum(
        array.dtype.itemsize * int(jnp.prod(jnp.array(array.sharding.shard_shape(array.shape))))
        for array in jax.tree.leaves(abstract)
    )
    return {
        "case": name,
        "recompute": recompute,
        "compile_s": round(time.time() - started, 1),
        "state_gib": round(state / GIB, 2),
        "arguments_gib": round(memory.argument_size_in_bytes / GIB, 2),
        "temporary_gib": round(memory.temp_size_in_bytes / GIB, 2),
        "aliased_gib": round(memory.alias_size_in_bytes / GIB, 2),
        "collectives": collectives,
        "cudnn": {key: value for key, value in custom.items() if "cudnn" in key},
        "other_calls": sorted(key for key in custom if "cudnn" not in key),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"of {list(CASES)}; none: all")
    parser.add_argument("--recompute", default="none", help="none, selective, full; with commas")
    parser.add_argument("--hlo", default="", help="folder for the compiled text")
    given = parser.parse_args()
    if unknown := set(given.cases) - set(CASES):
        parser.error(f"{sorted(unknown)} are no cases: choose from {list(CASES)}")
    for name in given.cases or CASES:
        for recompute in given.recompute.split(","):
            print(json.dumps(report(name, recompute, given.hlo), indent=1), flush=True)


if __name__ == "__main__":
    main()
