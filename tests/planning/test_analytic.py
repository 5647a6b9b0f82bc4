"""The roofline: closed forms of the bubble, and the bounds that it must keep."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from layouts import of

from maxmeg.config.architectures import ARCHITECTURES, architecture
from maxmeg.config.parallel import LaneOrder, Schedule
from maxmeg.config.quantization import BlockBackend, QuantizationRecipe
from maxmeg.config.recompute import POLICIES
from maxmeg.config.validate import head_problems
from maxmeg.pipeline.schedule import SCHEDULES
from maxmeg.planning import analytic
from maxmeg.planning.analytic import (
    analyze,
    exposed_seconds,
    gathered_bytes,
    layer_seconds,
    product_seconds,
)
from maxmeg.planning.cost.flops import training_flops
from maxmeg.planning.cost.parameters import num_parameters
from maxmeg.planning.cost.workload import workload
from maxmeg.planning.hardware import BLOCKWISE_REACHED, MATMUL_REACHED, parse_cluster
from maxmeg.planning.report import MARGIN


def test_an_analysis_compiles_nothing():
    events = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
    config, cluster = of("175b", 1024, 1, 64, pipe=16, tensor=8, data=8), parse_cluster("h100x1024")
    analyze(config, cluster)
    assert not [name for name in events if "compile" in name and "trace" not in name]
    jax.jit(lambda x: x + 1.2345)(jnp.zeros(3))
    assert [name for name in events if "backend_compile" in name]  # the listener hears


def test_bubble_of_chunks_is_the_closed_form():
    config = of("345m", 8, 1, 8, pipe=4, data=2, fsdp=1, chunks=3)
    found = analyze(config, parse_cluster("h100x8")).bubble_fraction
    assert found == pytest.approx((4 - 1) / (3 * 8))


def test_a_tick_takes_the_time_of_the_busiest_chunk():
    """Chunks with fewer layers wait. Where stages hold layers of other kinds, none takes time for
    the others' (24 layers on 4 stages, the first 3 of another kind: 6 a tick, and 9 places)."""
    cluster, even = parse_cluster("h100x4"), of("345m", 4, 1, 8, pipe=4)
    uneven = of("345m", 4, 1, 8, pipe=4, pad_layers=True)
    uneven.model.num_layers = 21
    kinds = of("345m", 4, 1, 8, pipe=4)
    kinds.model.layers = "3(local,mlp) *(attention,mlp)"
    kinds.model.attention.window = 1024  # the whole sequence: as much work as full attention
    expected = analyze(even, cluster)
    assert workload(kinds, 4).places == (3, 6) and workload(kinds, 4).layers_of_chunk == 6
    assert analyze(uneven, cluster).step_seconds == pytest.approx(expected.step_seconds)
    updates = [analytic.update_seconds(workload(c, 4), cluster) for c in (kinds, even)]
    found = analyze(kinds, cluster)
    assert found.compute_seconds - updates[0] == pytest.approx(
        expected.compute_seconds - updates[1]
    )
    assert found.communication_seconds == pytest.approx(expected.communication_seconds)


@pytest.mark.parametrize("name", SCHEDULES)
def test_bubble_is_the_tables(name):
    """Ticks at which a lane is on, over the microbatches that it has to run."""
    table = SCHEDULES[name](8, 4)
    config = of("345m", 4, 1, 8, pipe=4, schedule=Schedule(name))
    lane = layer_seconds(workload(config, 4), parse_cluster("h100x4"))
    seconds = dataclasses.asdict(lane)
    if table.weight is None:
        seconds = {"forward": lane.forward, "backward": lane.backward + lane.weight}
    on = {n: int(units.active.any(axis=1).sum()) for n, units in table.lanes().items()}
    expected = sum(on[n] * seconds[n] for n in on) / (8 * sum(seconds.values())) - 1
    assert analyze(config, parse_cluster("h100x4")).bubble_fraction == pytest.approx(expected)


def test_lanes_together_hide_communication_in_ticks_that_have_both():
    """With the products, the bubble and all else as before; of one microbatch nothing."""
    cluster = parse_cluster("h100x8")
    sizes = {"pipe": 2, "tensor": 4}
    saved = []
    for microbatches in (4, 64):
        apart, together = (
            analyze(of("llama3-8b", 8, 1, microbatches, **sizes, lanes=order), cluster)
            for order in (LaneOrder.apart, LaneOrder.together)
        )
        assert together.bubble_fraction == apart.bubble_fraction
        assert apart.compute_seconds < together.compute_seconds < 1.03 * apart.compute_seconds
        assert sum(together.memory.values()) > sum(apart.memory.values())
        saved.append(1 - together.communication_seconds / apart.communication_seconds)
    assert 0 < saved[0] < saved[1] < 1


@pytest.mark.parametrize("name", [n for n in ARCHITECTURES if not architecture(n).has_source][::12])
def test_the_report_holds_together(name):
    cluster = parse_cluster("h200x64")
    tensor = 1 if list(head_problems(architecture(name), 8)) else 8
    config = of(name, 64, 1, 4, fsdp=0, tensor=tensor)
    found = analyze(config, cluster)
    model, length = config.model, config.data.sequence_length
    batch = config.train.global_batch_size
    assert sum(found.parameters.values()) == num_parameters(model)[0]
    targets = config.data.max_targets
    assert found.flops == training_flops(model, length, batch, tensor, max_targets=targets)
    assert found.step_seconds == found.compute_seconds + found.communication_seconds
    assert found.tokens_per_second == pytest.approx(batch * length / found.step_seconds)
    assert found.mfu == pytest.approx(found.flops / found.step_seconds / 64 / 989.4e12)
    assert 0 < found.mfu < MATMUL_REACHED
    assert found.total == sum(found.memory.values())
    minimal, selective, full = (found.activations[policy] for policy in POLICIES)
    assert found.memory["activations"] == minimal >= selective > full
    assert found.fits == (found.total <= (1 - MARGIN) * cluster.capacity)
    assert all(entry.seconds > 0 and entry.volume > 0 for entry in found.traffic)


@pytest.mark.parametrize(
    ("name", "samples", "lowest", "highest"),
    [("1.3b", 4, 0.55, 0.65), ("llama3-8b", 1, 0.58, 0.70)],
)
def test_one_gpu_is_near_the_known_roofline(name, samples, lowest, highest):
    """One H200, no recomputation: 62 % and 69 % of the peak (DESIGN.md section 6)."""
    assert lowest < analyze(of(name, 1, samples, 8), parse_cluster("h200x1")).mfu < highest


def test_recomputation_costs_time_and_a_third_at_most():
    times = []
    for mode in POLICIES:
        config = of("22b", 8, 1, 8, tensor=8)
        config.model.recompute = mode
        times.append(analyze(config, parse_cluster("h100x8")).compute_seconds)
    assert times[0] < times[1] < times[2] < 1.34 * times[0]


def test_communication_overlaps_with_compute_where_possible():
    config = of("llama3-8b", 16, 1, 4, fsdp=16)
    found = analyze(config, parse_cluster("h100x16"))
    total = sum(entry.seconds for entry in found.traffic)
    assert exposed_seconds(found.traffic, 0.0, 0.0) == pytest.approx(total)
    hidden = (*analytic.HIDDEN_FORWARD, *analytic.HIDDEN_BACKWARD)
    rest = sum(entry.seconds for entry in found.traffic if entry.purpose not in hidden)
    assert exposed_seconds(found.traffic, 1e9, 1e9) == pytest.approx(rest)
    assert rest * (1 - 1e-9) <= found.communication_seconds < total


def test_blockwise_products_are_eight_bit_ones_where_the_kernel_runs():
    """It transposes each weight's code once in forward: Llama 3 8B has 218 million a layer."""
    cluster, config = parse_cluster("h100x8"), of("llama3-8b", 8, 1, 8)
    config.train.quantization.recipe = QuantizationRecipe.blockwise
    weights = {}
    for backend in BlockBackend:
        config.train.quantization.backend = backend
        work = workload(config, 8, cluster.device)
        weights[backend] = product_seconds(work, cluster).weight
        wanted = 2 * 218_103_808 if backend is BlockBackend.mosaic else 0
        assert analytic.transposed_bytes(work) == wanted
    assert weights[BlockBackend.auto] == weights[BlockBackend.xla]
    ratio = weights[BlockBackend.xla] / weights[BlockBackend.mosaic]
    assert ratio == pytest.approx(2 * BLOCKWISE_REACHED / MATMUL_REACHED)
    with pytest.raises(ValueError, match="mosaic cannot run: it needs a Hopper GPU"):
        config.train.quantization.backend = BlockBackend.mosaic
        analyze(config, parse_cluster("b200x8"))


def test_weights_that_are_gathered_once_a_step_are_copied():
    """In bfloat16, read and written, and one more array of gradients; none under fsdp alone."""
    moved = {
        name: gathered_bytes(workload(of("llama3-8b", 8, 1, 1, **sizes), 8))
        for name, sizes in {
            "fsdp": {"fsdp": 8},
            "data": {"data": 8, "fsdp": 1},
            "whole": {"data": 8, "fsdp": 1, "zero1": False},
        }.items()
    }
    layers = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336)
    assert moved["fsdp"] == moved["whole"] == 0
    assert moved["data"] == pytest.approx(10 * layers * 7 / 8, rel=1e-3)


def test_products_beside_experts_by_kernels_hide_less(monkeypatch):
    exposed = {}
    for share in (0.5, 1.0):
        monkeypatch.setattr(analytic, "HIDDEN_BY_KERNELS", share)
        for name in ("llama3-8b", "mixtral-8x7b"):
            report = analyze(of(name, 64, 1, 4, fsdp=64), parse_cluster("h100x64"))
            exposed[name, share] = report.communication_seconds
    assert exposed["llama3-8b", 0.5] == exposed["llama3-8b", 1.0]
    assert exposed["mixtral-8x7b", 0.5] > 1.2 * exposed["mixtral-8x7b", 1.0]


def test_lanes_hide_exchanges_by_nodes_too():
    sizes = {"pipe": 16, "data": 4, "expert": 16, "pad_layers": True}
    apart, together = (
        analyze(
            of("deepseek-v3", 1024, 1, 64, "full", lanes=lanes, **sizes), parse_cluster("h100x1024")
        )
        for lanes in ("apart", "together")
    )
    assert together.communication_seconds < 0.9 * apart.communication_seconds
