"""Megatron-LM's own estimate of memory, for comparison where both count the same terms."""

import dataclasses
import math

from maxmeg.config.schema import Config
from maxmeg.config.validate import axis_sizes
from maxmeg.planning.cost.workload import parameters


@dataclasses.dataclass(frozen=True)
class MegatronMemory:
    """What Megatron-LM's report of theoretical memory says; bytes on its most loaded device."""

    parameters: float
    shard_parameters: float
    bytes_per_parameter: float
    activations: float

    @property
    def weights_and_optimizer(self) -> float:
        return self.shard_parameters * self.bytes_per_parameter


def megatron_theoretical_memory(config: Config, num_devices: int) -> MegatronMemory:
    """Megatron-LM's estimate for a dense GPT (sequence parallelism, selective recomputation).

    With s tokens a sample, b samples a microbatch, h, f, v the widths of stream, MLP and padded
    vocabulary, p and t the sizes of pipe and tensor, V chunks a stage, m microbatches, d replicas:
    bytes a parameter: 18 (weights 2, gradients 4, master 4, moments 8), 6 + 12 / d with ZeRO-1.
    parameters: weights of layers, norms and embeddings, here as there without positions and the
    biases of projections. The most loaded shard: (layers / p + one embedding) / t, and an untied
    output where p = 1. Here embedding and output lie over pipe x tensor, so that no shard is the
    most loaded; total and bytes a parameter are the same terms (with fsdp = 1).
    activations: (layers s b h (18 + 4 f / h) + 8 s b p + s b h p) x in flight / t, where in flight
    is 1 + (p - 1) / (p V) with chunks, else min(1, m / p); with p = 1 also 4 s b h (1 + v / h) / t.
    From Korthikanti et al. 2022, Table 2: layers keep more there than here.
    """
    axes, model = axis_sizes(config.parallel, num_devices), config.model
    p, t, chunks = axes["pipe"], axes["tensor"], config.parallel.chunks
    replicas = axes["data"] * axes["fsdp"] * axes["expert"]
    embedding = model.hidden_size * model.padded_vocab_size(t)
    tables = embedding * (1 if model.tied else 2)
    block = sum(
        math.prod(parameter.variable.shape)
        for parameter in parameters(model)
        if parameter.kind not in ("embedding", "output", "positions")
        and (parameter.kind == "norm" or parameter.path[-1] == "weight")
    )
    shard = (block / p + embedding + (tables - embedding if p == 1 else 0)) / t
    samples = config.train.micro_batch_size or config.train.global_batch_size // replicas
    microbatches = config.train.global_batch_size // (samples * replicas)
    tokens, h = samples * config.data.sequence_length, model.hidden_size
    kept = model.num_layers * tokens * (18 * h + 4 * model.ffn) + 8 * tokens * p + tokens * h * p
    in_flight = 1 + (p - 1) / (p * chunks) if chunks > 1 else min(1.0, microbatches / p)
    kept = kept * in_flight
    if p == 1:
        kept += 4 * tokens * (h + embedding // h)
    per_parameter = 6 + 12 / replicas if config.parallel.zero1 else 18.0
    return MegatronMemory(block + tables, shard, per_parameter, kept / t)
