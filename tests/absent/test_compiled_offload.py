"""Offloading in the real train step, compiled for H100s that are not here."""

import pytest
from layouts import of

from maxmeg.config.parallel import Schedule
from maxmeg.config.schema import Masters, Optimizer
from maxmeg.config.setting import with_fields
from maxmeg.planning.compile import compile_report
from maxmeg.planning.cost.offload import host_memory
from maxmeg.planning.cost.workload import workload
from maxmeg.planning.report import Compiled

GPUS, LAYERS = 8, 8
MIB = 2**20
PIPED = {"pipe": 4, "fsdp": 2}


def compiled(microbatches: int, parallel: dict, fields: dict) -> tuple[Compiled, int]:
    """(the report on Llama 3 8B with fewer layers, the plan's bytes of host memory)."""
    config = of("llama3-8b", GPUS, 1, microbatches, **parallel)
    config = with_fields(config, {"model.num_layers": LAYERS, **fields})
    report = compile_report(config, "h100", GPUS)
    return report, sum(host_memory(workload(config, GPUS)).values())


@pytest.mark.parametrize(
    ("names", "microbatches", "parallel", "least"),
    [
        ("attention_output", 1, {"fsdp": GPUS}, 0.999),
        ("mlp_up", 8, PIPED, 0.96),  # then the peak is elsewhere
        ("mlp_up", 8, PIPED | {"schedule": Schedule.zero_bubble}, 0.9),
    ],
)
def test_named_activations_leave_the_device(names, microbatches, parallel, least):
    """least: of the bytes on the host, the share by which the device's temporaries fall."""
    before, nothing = compiled(microbatches, parallel, {})
    words = {"model.recompute": f"minimal,offload:{names}"}
    after, planned = compiled(microbatches, parallel, words)
    assert nothing == before.host == 0 and after.arguments == before.arguments
    assert after.host == pytest.approx(planned, abs=MIB * LAYERS)
    assert before.temporaries - after.temporaries >= least * planned


@pytest.mark.parametrize(
    ("masters", "optimizer"),
    [(Masters.remainders, Optimizer.adamw), (Masters.float32, Optimizer.muon)],
)
def test_state_leaves_the_device_and_is_updated_in_place(masters, optimizer):
    """No second copy on the host, and among the temporaries no more than the arrays of the layers
    that are updated together."""
    fields = {"optim.masters": masters, "optim.optimizer": optimizer}
    (before, _), (after, planned) = (
        compiled(1, {"fsdp": GPUS}, fields | {"optim.offload": offload})
        for offload in (False, True)
    )
    assert after.host == pytest.approx(planned, rel=1e-4)
    assert before.arguments - after.arguments == pytest.approx(planned, rel=1e-4)
    assert after.temporaries <= before.temporaries + MIB  # the state of loops
    assert after.outputs_not_aliased == before.outputs_not_aliased
