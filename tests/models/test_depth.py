"""Programs do not grow with the number of layers where these repeat."""

import pytest
from layouts import mesh_of, tiny

from maxmeg.planning.compile import abstract_step

MOST = 1.05  # 96 layers over 12
HYBRID = {"layers": "*(mamba mlp attention)", "mamba.num_groups": 1, "mamba.state_size": 4}


def lines(num_layers: int) -> int:
    """Of the lowered train step."""
    config = tiny(HYBRID | {"num_layers": num_layers}, {"micro_batch_size": 4}, fsdp=2)
    step, arguments = abstract_step(config, mesh_of(config))
    return step.lower(*arguments).as_text().count("\n")


@pytest.mark.slow
def test_the_step_of_96_layers_is_as_long_as_that_of_12():
    assert lines(96) <= MOST * lines(12)
