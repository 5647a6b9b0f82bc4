"""What tests against other implementations share."""

import logging

import pytest


@pytest.fixture
def heard():
    """What transformers and peft log from warnings on."""
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    loggers = [logging.getLogger(name) for name in ("transformers", "peft")]
    for logger in loggers:
        logger.addHandler(handler)
    yield records
    for logger in loggers:
        logger.removeHandler(handler)


@pytest.fixture(scope="module")
def process_group(tmp_path_factory):
    """megatron-core's datasets ask which of the processes this is."""
    import torch

    store = tmp_path_factory.mktemp("store") / "store"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()
