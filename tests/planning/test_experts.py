"""Rows, bytes and words of experts on their devices, against the layers' own and what compiled."""

import pytest

from maxmeg.config.mixers import ExpertBackend, ExpertExchange, RouterScore
from maxmeg.config.model import ModelConfig
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.schema import Config, TrainConfig
from maxmeg.config.setting import with_fields
from maxmeg.config.validate import axis_sizes, validate
from maxmeg.distributed.experts import exchange
from maxmeg.layers.moe import MoeSpec
from maxmeg.ops.experts.dispatch import capacity_of
from maxmeg.ops.experts.routing import RoutingSpec
from maxmeg.planning.analytic import analyze, exposed_seconds
from maxmeg.planning.cost import experts
from maxmeg.planning.cost.communication import EXCHANGED_BACKWARD, EXCHANGED_FORWARD, traffic
from maxmeg.planning.cost.memory import device_memory
from maxmeg.planning.cost.workload import workload
from maxmeg.planning.hardware import parse_cluster
from maxmeg.planning.show.text import plan_of

COMPILED = 0.06  # of what XLA allocates
GIB = 2**30
SPARSE = {"layers": "*(attention,moe)", "moe.backend": ExpertBackend.mosaic}
MIXTRAL = SPARSE | {
    **{"hidden_size": 4096, "num_layers": 32, "mlp.ffn_size": 14336, "max_position": 4096},
    **{"attention.num_heads": 32, "attention.num_kv_heads": 8, "vocab_size": 32000},
    **{"moe.num_experts": 8, "moe.top_k": 2},
}
PADDED = {"moe.capacity_factor": 1.25, "moe.pad_to_capacity": True}
PADDED |= {"moe.backend": ExpertBackend.auto}
BLOCKS = {"moe.backend": ExpertBackend.batched}
DEEPSEEK = {
    **{"hidden_size": 7168, "num_layers": 61, "layers": "3(mla,mlp) *(mla,moe)"},
    **{"attention.num_heads": 128, "attention.head_dim": 128, "mlp.ffn_size": 18432},
    **{"vocab_size": 129280, "max_position": 4096},
    **{"moe.num_experts": 256, "moe.top_k": 8, "moe.ffn_size": 2048},
    **{"moe.shared_ffn_size": 2048, "moe.score": RouterScore.sigmoid, "moe.bias_balancing": True},
    **{"mla.kv_rank": 512, "mla.query_rank": 1536, "mla.rotary_size": 64},
    "moe.backend": ExpertBackend.mosaic,
}


def of(model: dict, gpus: int, microbatches: int = 1, length: int = 4096, **parallel) -> Config:
    """One sample a microbatch and device."""
    sizes = ParallelConfig(**parallel)
    axes = axis_sizes(sizes, gpus)
    batch = microbatches * axes["data"] * axes["fsdp"] * axes["expert"]
    train = TrainConfig(global_batch_size=batch, micro_batch_size=1)
    config = Config(model=with_fields(ModelConfig(), model), parallel=sizes, train=train)
    config.data.sequence_length = length
    validate(config, gpus)
    return config


@pytest.mark.parametrize(
    ("top_k", "devices", "local_experts"), [(1, 2, 4), (3, 8, 1), (8, 4, 2), (3, 3, 5)]
)
def test_rows_are_those_that_the_layer_exchanges(monkeypatch, top_k, devices, local_experts):
    monkeypatch.setattr(exchange.collectives, "axis_size", lambda axes: devices)
    for tokens in (1, 7, 64):
        for buffer in (1.0, 1.3, 2.0, 9.0):
            made = exchange.make_exchange(tokens, top_k, local_experts, ("expert",), buffer)
            routing = RoutingSpec(devices * local_experts, top_k)
            spec = MoeSpec(16, 16, routing=routing, buffer=buffer)
            found = experts.Dispatch(spec, tokens, devices, local_experts, itemsize=2)
            assert (found.rows, not found.in_rounds) == (made.rows, made.one_suffices)


@pytest.mark.parametrize(
    ("parallel", "tokens", "blocks"),
    [({}, 1000, 8), ({"expert": 4}, 500, 16), ({"expert": 4, "expert_tensor": 1}, 500, 8)],
)
def test_padded_rows_are_what_experts_take_of_each_device(parallel, tokens, blocks):
    """blocks: numbers of a device's experts times devices that send them tokens."""
    config = of(MIXTRAL | PADDED, 8, length=1000, **parallel | {"tensor": 2})
    dispatch = experts.dispatch_of(workload(config, 8))
    capacity = capacity_of(tokens, 2, 8, 1.25)
    assert (dispatch.rows, dispatch.in_rounds) == (blocks * capacity, False)


@pytest.mark.parametrize(
    ("capacity", "buffer", "block", "in_rounds"),
    [(0.0, 1.0, 250, True), (0.0, 4.0, 1000, False), (1.25, 1.5, 313, False), (2, 1.5, 375, True)],
)
def test_blocks_hold_the_buffer_or_the_most_that_there_is(capacity, buffer, block, in_rounds):
    fields = {"moe.backend": ExpertBackend.batched, "moe.capacity_factor": capacity}
    config = of(MIXTRAL | fields, 8, length=1000, expert=4, expert_buffer=buffer)
    dispatch = experts.dispatch_of(workload(config, 8))
    assert (dispatch.rows, dispatch.in_rounds) == (4 * 2 * block, in_rounds)
    assert dispatch.multiplied == dispatch.rows


# (model, GPUs, microbatches, tokens, sizes): GiB beside the state under some recompute modes, as
# XLA allocated them for the real step on absent GPUs, experts' products by kernels.
SMALL = MIXTRAL | {"num_layers": 2, "vocab_size": 4096, "max_position": 8192}
FOUR = SMALL | {"num_layers": 4}
WHOLE = {"tensor": 2, "expert": 8, "expert_tensor": 1}
GROUPS = {"moe.num_groups": 8, "moe.topk_groups": 4}  # tokens are sent by nodes
GATHERED = {"expert": 8, "expert_exchange": ExpertExchange.gather}
STAGES = {"pipe": 8, "tensor": 2, "expert": 64, "pad_layers": True}
COMPILED_GIB = [
    (SMALL, 8, 1, 8192, {"expert": 8}, {"minimal": 9.44, "full": 5.94}),
    (SMALL, 8, 1, 8192, WHOLE, {"minimal": 5.60}),
    (FOUR, 8, 4, 8192, {"expert": 4, "pipe": 2}, {"minimal": 20.06, "full": 9.88}),
    (MIXTRAL, 64, 1, 4096, {"expert": 8, "fsdp": 8}, {"minimal": 35.52, "full": 8.06}),
    (SMALL | BLOCKS, 8, 1, 8192, {"expert": 8}, {"minimal": 9.34, "full": 6.95}),
    (FOUR | BLOCKS, 8, 4, 8192, {"expert": 4, "pipe": 2}, {"minimal": 21.45, "full": 10.62}),
    (SMALL | PADDED, 8, 1, 8192, WHOLE, {"minimal": 4.59}),
    (SMALL | PADDED, 8, 1, 8192, {"expert": 4, "tensor": 2}, {"minimal": 4.88}),
    (SMALL | PADDED, 8, 1, 8192, GATHERED, {"minimal": 7.44, "full": 6.07}),
    (FOUR | PADDED, 8, 4, 8192, {"expert": 4, "pipe": 2}, {"minimal": 16.86, "full": 9.62}),
    (DEEPSEEK, 1024, 16, 4096, STAGES, {"full": 24.81}),
    (DEEPSEEK | GROUPS, 1024, 16, 4096, STAGES | {"expert_tensor": 1}, {"full": 18.33}),
    (DEEPSEEK, 1024, 16, 4096, STAGES | {"expert_tensor": 1}, {"full": 18.09}),
]


@pytest.mark.parametrize("case", COMPILED_GIB, ids=lambda case: f"{case[1]} {case[4]}")
def test_memory_is_what_was_compiled(case):
    model, gpus, microbatches, length, parallel, compiled = case
    for mode, gib in compiled.items():
        config = of(model, gpus, microbatches, length, **parallel)
        config.model.recompute = mode
        memory = device_memory(workload(config, gpus))
        beside = sum(memory.values()) - memory["master weights"] - memory["optimizer"]
        assert beside / GIB == pytest.approx(gib, rel=COMPILED)


def test_a_token_crosses_nodes_once_for_each():
    """Between nodes 3.6 of 8 rows, times the buffer; inside a node as many as there are copies."""
    config = of(DEEPSEEK | GROUPS, 1024, 16, **STAGES, expert_tensor=1)
    direct = of(DEEPSEEK, 1024, 16, **STAGES, expert_tensor=1)
    sent, seconds = [], []
    for one in (config, direct):
        one.model.recompute = "minimal"
        rows = traffic(workload(one, 1024), parse_cluster("h100x1024"))
        rows = [row for row in rows if row.kind == "all-to-all"]
        sent.append({row.axis.partition(", ")[2]: 0 for row in rows})
        for row in rows:
            sent[-1][row.axis.partition(", ")[2]] += row.volume
        seconds.append(sum(row.seconds for row in rows))
    (nodes, plain) = sent
    chosen = 4 * (1 - (1 - 1 / 4) ** 8)
    assert nodes["between nodes"] / plain[""] == pytest.approx(chosen / 8 * 8 / 9, rel=0.01)
    assert nodes["inside nodes"] == pytest.approx(plain[""] * 5 / 4 * 64 / 63 * 7 / 8, rel=0.01)
    assert seconds[0] < 0.6 * seconds[1]


def test_shared_experts_hide_half_of_what_is_sent():
    config = of(DEEPSEEK, 1024, 16, pipe=8, tensor=2, expert=64, pad_layers=True)
    rows = traffic(workload(config, 1024), parse_cluster("h100x1024"))
    sent = [
        sum(row.seconds for row in rows if row.purpose == purpose)
        for purpose in (EXCHANGED_FORWARD, EXCHANGED_BACKWARD)
    ]
    before = exposed_seconds(rows, 1e9, 1e9)
    assert exposed_seconds(rows, 1e9, 1e9, 1e9) == pytest.approx(before - sum(sent) / 2)
    less = sent[0] / 8
    assert exposed_seconds(rows, 1e9, 1e9, less) == pytest.approx(before - 3 * less)


def test_time_of_dense_products_is_reported():
    """XLA multiplies every row by every expert of the device."""
    config = of(MIXTRAL, 64, expert=2, fsdp=32)
    cluster = parse_cluster("h100x64")
    work = workload(config, 64)
    assert experts.surplus_seconds(work, cluster) == 0
    config.model.moe.backend = ExpertBackend.xla
    dispatch = experts.dispatch_of(work)
    rows, matrices = dispatch.rows, 3 * 4096 * 14336
    needed = 2 * dispatch.balanced_rows * matrices / cluster.matmul_rate
    dense = 2 * rows * 4 * matrices / cluster.matmul_rate
    assert experts.surplus_seconds(work, cluster) == pytest.approx(dense - needed)
    kernels = analyze(of(MIXTRAL, 64, expert=8, fsdp=8), cluster).compute_seconds
    assert analyze(config, cluster).compute_seconds > 2 * kernels


def test_empty_rows_take_time_too():
    cluster = parse_cluster("h100x64")
    work = workload(of(MIXTRAL | PADDED, 64, expert=2, fsdp=32), 64)
    needed = 2 * 2 * 4096 * 3 * 4096 * 14336 / cluster.matmul_rate
    assert experts.surplus_seconds(work, cluster) == pytest.approx(needed / 4)


def test_few_rows_wait_for_their_matrices():
    config = of(MIXTRAL, 8, length=128, expert=8)
    cluster = parse_cluster("h100x8")
    read = 2 * 3 * 4096 * 14336 / cluster.memory_rate
    needed = 2 * 256 * 3 * 4096 * 14336 / cluster.matmul_rate
    found = experts.surplus_seconds(workload(config, 8), cluster)
    assert found == pytest.approx(read - needed) and found > 0


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"expert": 8}, "1 per GPU; all-to-all, buffer 1.5"),
        (
            {"expert": 4, "tensor": 2, "expert_exchange": ExpertExchange.gather},
            "2 per GPU, each over tensor 2; gather",
        ),
        (
            {"expert": 8, "tensor": 2, "expert_tensor": 1, "expert_buffer": 2.0},
            "1 per GPU, each on one GPU; all-to-all, buffer 2",
        ),
    ],
)
def test_the_report_says_where_experts_are(parallel, words):
    found = plan_of(of(MIXTRAL, 8, **parallel), 8).settings["experts"]
    assert found == f"8 in 32 layers, top-2 routing, width 14336, {words}"
    if "expert_buffer" not in parallel:
        found = plan_of(of(MIXTRAL | PADDED, 8, **parallel), 8).settings["experts"]
        assert found.endswith(f"{words.split(', buffer')[0]}; padded to 1.25 times the mean load")


def test_mtp_layers_are_refused_by_the_planner():
    config = of(MIXTRAL | {"mtp.num_layers": 1}, 8, expert=8)
    with pytest.raises(ValueError, match=r"mtp\.num_layers=1: MTP layers are not planned"):
        workload(config, 8)
