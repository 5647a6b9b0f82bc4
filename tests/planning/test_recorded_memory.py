"""Memory by formulas against compiled steps of hybrids, of experts in units of several layers, and
of short attention in plain XLA (benchmarks/NOTES.md, 2026-11-27)."""

import pytest
from layouts import of

from maxmeg.config.data import Objective
from maxmeg.config.mixers import MoeConfig
from maxmeg.config.model import Position
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.retro import retro_layers
from maxmeg.config.schema import Config, TrainConfig
from maxmeg.planning.cost.memory import device_memory
from maxmeg.planning.cost.workload import workload

CLOSE = 0.05


def bert(*case, **parallel):
    config = of(*case, **parallel)
    config.data.objective, config.data.sequence_length = Objective.masked, 512
    return config


def t5(*case, **parallel):
    config = of(*case, **parallel)
    config.data.objective = Objective.span_corruption
    config.data.source_length, config.data.sequence_length = 512, 128
    return config


def retro(name: str, gpus: int, samples: int, microbatches: int, context: int = 1):
    """12 layers of width 512 with 101M parameters, chunks of 64 tokens, 2 neighbours of 128."""
    batch = samples * microbatches * gpus // context
    train = TrainConfig(global_batch_size=batch, micro_batch_size=samples)
    config = Config(train=train, parallel=ParallelConfig(context=context))
    model, data = config.model, config.data
    model.layers, model.num_layers = retro_layers((6, 9, 12), 12), 16
    model.hidden_size, model.vocab_size = 512, 50257
    model.attention.num_heads = model.attention.num_kv_heads = 8
    model.position, model.max_position = Position.learned, 1024
    model.retro.chunk_length, model.retro.neighbour_length = 64, 128
    data.objective, data.sequence_length = Objective.retro, 1024
    data.chunk_length, data.num_neighbours, data.neighbour_length = 64, 2, 128
    return config


def delta(name: str, gpus: int, samples: int, microbatches: int):
    """12 layers of the architecture's mixers, with MLPs of 4,096 instead of experts."""
    config, mixers = of(name, gpus, samples, microbatches), "3(kda,mlp) mla"
    if name.startswith("qwen"):
        mixers = "3(gated_delta,mlp) attention"
    config.model.layers, config.model.num_layers = f"*({mixers},mlp)", 12
    config.model.moe, config.model.mlp.ffn_size = MoeConfig(), 4096
    return config


# (config, (name, GPUs, samples, microbatches, recompute), sizes, GiB in all)
RECORDED = [
    (of, ("nemotron-h-8b", 16, 1, 1), {"fsdp": 8, "tensor": 2}, 21.80),
    (of, ("nemotron-h-56b", 64, 1, 2, "selective"), {"fsdp": 32, "tensor": 2}, 61.03),
    (of, ("falcon-h1-0.5b", 1, 1, 1), {}, 14.98),
    (of, ("qwen3-next-80b-a3b", 64, 1, 1, "selective"), {"fsdp": 8, "expert": 8}, 57.44),
    (delta, ("qwen3-next-80b-a3b", 8, 1, 1), {}, 10.91),
    (delta, ("kimi-linear-48b-a3b", 8, 1, 1), {}, 14.72),
    (of, ("gpt-oss-20b", 32, 1, 1), {"expert": 4}, 42.94),
    (retro, ("retro", 1, 8, 1), {}, 4.92),
    (retro, ("retro", 2, 8, 1), {"context": 2}, 2.91),
    (bert, ("bert-large", 8, 16, 2), {}, 13.45),  # stored queries, keys, values transposed
    (bert, ("bert-base", 1, 16, 1), {}, 6.15),  # the same in the place of the originals
    (t5, ("t5-base", 1, 16, 1), {}, 8.84),
    (t5, ("t5-base", 1, 16, 1, "full"), {}, 4.03),
    (t5, ("t5-large", 8, 16, 2), {}, 18.00),
]


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: "-".join(map(str, case[1])))
def test_memory_is_what_was_compiled(case):
    make, arguments, sizes, gib = case
    config = make(*arguments, **sizes)
    found = sum(device_memory(workload(config, arguments[1])).values())
    assert found / 2**30 == pytest.approx(gib, rel=CLOSE)
