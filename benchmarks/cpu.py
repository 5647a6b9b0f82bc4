"""CPU time of a train step, of planning, of packing and of tokenizing.

    python benchmarks/cpu.py step|plan|packing|data

step: 4 layers, hidden 256, 8 heads of 32, SwiGLU 1,024, vocabulary 32,000 untied, sequence 512,
batch 4, float32, full recompute, synthetic tokens. Prints CPU-seconds (all cores, median of 5
steps), and seconds from the start of the process to the end of the first step. plan: CPU-seconds of
one analysis of GPT-3 175B on 1,024 H100 and of the search over its layouts. packing: documents per
CPU-second of each policy, 20,000 documents of 1 to 4,096 tokens in rows of 4,096. data: see
preprocessing.py.
"""

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable

from maxmeg.runtime.platform import choose_platform

STARTED = time.time() - time.process_time()  # near enough: nothing has waited yet


def step() -> dict:
    """Measure the step; returns the numbers."""
    import jax
    import numpy as np

    from maxmeg.checkpoint.initialize import create_state
    from maxmeg.config.data import DataConfig
    from maxmeg.config.model import DType, ModelConfig
    from maxmeg.config.schema import Config, TrainConfig
    from maxmeg.config.setting import with_fields
    from maxmeg.data.placement import local_rows, place_batch, place_flag
    from maxmeg.inference.mesh import local_mesh
    from maxmeg.optim.build import make_optimizer
    from maxmeg.state import abstract_state
    from maxmeg.step import make_train_step

    batch_size, length, vocab = 4, 512, 32000
    config = Config(
        model=with_fields(
            ModelConfig(),
            {
                "vocab_size": vocab,
                "num_layers": 4,
                "hidden_size": 256,
                "attention.num_heads": 8,
                "mlp.ffn_size": 1024,
                "dtype": DType.float32,
                "recompute": "full",
            },
        ),
        data=DataConfig(sequence_length=length),
        train=TrainConfig(global_batch_size=batch_size),
    )
    mesh = local_mesh()
    optimizer = make_optimizer(config.optim)
    abstract = abstract_state(config, optimizer, mesh)
    state = create_state(config, optimizer, abstract)
    train_step = make_train_step(config, mesh, optimizer, abstract)
    controls = {
        "learning_rate": np.float32(3e-4),
        "weight_decay": np.float32(0.1),
        "stop": place_flag(False, mesh),
    }
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab, (batch_size, length + 1), dtype=np.int32)
    shape = (batch_size, length)
    batch = place_batch(
        {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "positions": np.broadcast_to(np.arange(length, dtype=np.int32), shape),
            "loss_mask": np.ones(shape, np.float32),
        },
        local_rows(mesh),
        mesh,
        batch_size,
    )
    cpu_seconds, wall_seconds = [], []
    for i in range(6):
        cpu, wall = time.process_time(), time.time()
        state, metrics = train_step(state, batch, controls)
        loss = float(jax.block_until_ready(metrics["loss"]))
        if i == 0:
            first = time.time() - STARTED
        else:
            cpu_seconds.append(time.process_time() - cpu)
            wall_seconds.append(time.time() - wall)
    return {
        "first_step_after_s": round(first, 2),
        "cpu_seconds_a_step": round(statistics.median(cpu_seconds), 2),
        "wall_seconds_a_step": round(statistics.median(wall_seconds), 2),
        "compiles": train_step._cache_size(),
        "loss": round(loss, 4),
    }


def cpu_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def plan() -> dict:
    """Measure the planner; returns the numbers."""
    from maxmeg.config.architectures import use_architecture
    from maxmeg.config.parallel import ParallelConfig
    from maxmeg.config.schema import Config, TrainConfig
    from maxmeg.planning.analytic import analyze
    from maxmeg.planning.hardware import parse_cluster
    from maxmeg.planning.search import search

    train = TrainConfig(global_batch_size=1536, micro_batch_size=1)
    parallel = ParallelConfig(pipe=16, tensor=8, data=8)
    config = use_architecture(Config(parallel=parallel, train=train), "175b")
    cluster = parse_cluster("h100x1024")
    return {
        "analysis_cpu_seconds": round(cpu_seconds(lambda: analyze(config, cluster)), 3),
        "search_cpu_seconds": round(cpu_seconds(lambda: search(config, cluster)), 2),
    }


def packing() -> dict:
    """Measure the packing policies; returns the numbers."""
    import numpy as np

    from maxmeg.data.samples.packing import POLICIES, Packed

    lengths = np.random.default_rng(1).integers(1, 4097, 20_000)
    seconds = {p: cpu_seconds(functools.partial(Packed, lengths, 4096, p)) for p in POLICIES}
    return {policy: round(len(lengths) / seconds[policy]) for policy in POLICIES}


MEASUREMENTS = {"step": step, "plan": plan, "packing": packing}

if __name__ == "__main__":
    choose_platform()
    command, arguments = sys.argv[1:2], sys.argv[2:]
    if len(sys.argv) == 2 and sys.argv[1] in MEASUREMENTS:
        print(json.dumps(MEASUREMENTS[sys.argv[1]]()))
    elif command == ["data"]:
        import preprocessing

        print(json.dumps(preprocessing.main(arguments), indent=1))
    else:
        sys.exit("usage: python benchmarks/cpu.py step|plan|packing|data [--help]")
