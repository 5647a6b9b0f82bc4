"""What `auto` becomes, by the formulas of time and memory, and what is said of it."""

import dataclasses

import pytest
from layouts import of

from maxmeg.config.parallel import FsdpGather, LaneOrder
from maxmeg.config.schema import Config
from maxmeg.config.setting import get, with_fields
from maxmeg.config.validate import axis_sizes
from maxmeg.planning.automatic import VALUES, candidate_of, choose, chosen_words, cluster_here
from maxmeg.planning.hardware import GIB, Cluster, parse_cluster
from maxmeg.planning.search import search

GPUS = parse_cluster("h100x16")
STAGES = {"pipe": 4, "tensor": 2, "fsdp": 2}
SMALL = dataclasses.replace(GPUS, gpu=dataclasses.replace(GPUS.gpu, cuda_gib=36.0))


def llama(microbatches: int = 8, **parallel) -> Config:
    return of("llama3-8b", 16, 1, microbatches, **parallel)


def chosen(config: Config, gpus: Cluster | None = GPUS) -> tuple:
    """The values of VALUES, in order."""
    choose(config, gpus)
    return tuple(get(config, path).value for path in VALUES)


@pytest.mark.parametrize(
    ("lanes", "config", "gpus"),
    [
        ("together", llama(**STAGES), GPUS),
        ("apart", llama(**STAGES), None),
        ("apart", llama(**STAGES), cluster_here()),
        ("apart", llama(**STAGES), SMALL),
        ("apart", llama(1, tensor=8, fsdp=2), GPUS),
        ("apart", llama(fsdp=16), GPUS),
        ("apart", with_fields(llama(**STAGES), {"model.mtp.num_layers": 1}), GPUS),
    ],
    ids=["hides", "unknown GPU", "CPU", "too large", "one microbatch", "nothing", "not planned"],
)
def test_lanes_run_together_where_that_is_faster_and_fits(lanes, config, gpus):
    assert chosen(config, gpus)[0] == lanes


@pytest.mark.parametrize("order", [LaneOrder.apart, LaneOrder.together])
@pytest.mark.parametrize("gpus", [GPUS, SMALL, None], ids=["fits", "too large", "unknown"])
def test_a_value_that_is_set_is_kept(order, gpus):
    assert chosen(llama(**STAGES, lanes=order), gpus)[0] == order.value


def test_the_words_name_the_choice_and_the_cost_of_the_other():
    config = llama(**STAGES, lanes="together")
    reports = [candidate_of(llama(**STAGES, lanes=order), GPUS) for order in ("together", "apart")]
    now, other = (candidate.analytic for candidate in reports)
    longer = 100 * (other.step_seconds / now.step_seconds - 1)
    less = (now.total - other.total) / GIB
    expected = f"lanes=together (apart: +{longer:.1f} % time, -{less:.1f} GiB), fsdp_gather=microb"
    assert chosen_words(config, GPUS).startswith(expected)
    assert chosen_words(config, None) == ""


def test_lanes_together_that_do_not_fit_name_a_recompute_policy_that_does():
    words = chosen_words(llama(**STAGES, lanes="together"), SMALL)
    assert "too large: 32.9 GiB; model.recompute=selective fits, " in words
    tiny = dataclasses.replace(GPUS, gpu=dataclasses.replace(GPUS.gpu, cuda_gib=4.0))
    assert chosen_words(llama(**STAGES, lanes="together"), tiny).endswith("does it fit")


def test_a_search_takes_for_each_layout_the_lanes_that_are_chosen_there():
    cluster, taken = parse_cluster("h100x2"), set()
    for found in search(of("345m", 2, 1, 8), cluster):
        config = with_fields(found.config, {"parallel.lanes": LaneOrder.auto})
        assert chosen(config, cluster)[0] == found.settings["parallel.lanes"]
        taken.add(config.parallel.lanes)
    assert taken == {LaneOrder.apart, LaneOrder.together}


def mixtral(**parallel) -> Config:
    config = of("mixtral-8x7b", 64, 1, 4, "full", **{"expert": 8, "fsdp": 0} | parallel)
    return with_fields(config, {"data.sequence_length": 4096})


@pytest.mark.parametrize(
    ("gather", "parallel", "hardware"),
    [
        ("step", {}, "h100x64"),
        ("step", {"data": 2}, "h100x64"),
        ("microbatch", {"fsdp": 8}, "h100x64"),
        ("microbatch", {"zero1": False}, "h100x64"),
        ("microbatch", {"fsdp_context": True, "context": 2}, "h100x64"),
        ("microbatch", {}, "a100x64"),
    ],
)
def test_weights_are_gathered_once_a_step_where_that_is_faster_and_fits(gather, parallel, hardware):
    config, gpus = mixtral(**parallel), parse_cluster(hardware)
    if hardware == "a100x64":
        gpus = dataclasses.replace(gpus, gpu=dataclasses.replace(gpus.gpu, cuda_gib=40.0))
    sizes = axis_sizes(config.parallel, 64)
    assert chosen(config, gpus)[1] == gather
    moved = {"data": sizes["data"] * sizes["fsdp"], "fsdp": 1} if gather == "step" else {}
    assert axis_sizes(config.parallel, 64) == sizes | moved
    assert config.parallel.fsdp == parallel.get("fsdp", 0)  # as set, for other numbers of GPUs


def test_fsdp_moves_to_data_where_that_is_set_and_counts_as_that():
    named = mixtral(fsdp=8, fsdp_gather="step")
    assert chosen(named, None)[1] == "step"
    data, gpus = mixtral(data=8, fsdp=1), parse_cluster("h100x64")
    assert axis_sizes(named.parallel, 64) == axis_sizes(data.parallel, 64)
    expected, found = (candidate_of(config, gpus) for config in (data, named))
    assert expected.analytic == found.analytic
    assert "fsdp_gather=step (microbatch: +" in chosen_words(named, gpus)
    assert "fsdp_gather" not in chosen_words(data, gpus)  # nothing lies along fsdp


def test_a_search_has_both_as_sizes_and_replaces_the_setting():
    cluster = parse_cluster("h100x2")
    searched = [
        search(with_fields(of("345m", 2, 8, 1), {"parallel.fsdp_gather": gather}), cluster)
        for gather in FsdpGather
    ]
    assert [found.settings for found in searched[0]] == [found.settings for found in searched[1]]
    assert searched[0] == searched[2]
    config = with_fields(Config(), {"parallel.fsdp_gather": FsdpGather.step})
    assert searched[0][0].changed(config)["parallel.fsdp_gather"] == "auto"
