"""Which backend multiplies experts, on which device, and the warning of XLA's dense product."""

import logging

import jax
import pytest

from maxmeg.ops.backend import Device
from maxmeg.ops.experts.choice import choose_backend, warn_of_xla, xla_words

HOPPER, AMPERE, CPU = Device("cuda", (9, 0)), Device("cuda", (8, 0)), Device("cpu")


def chosen(device=HOPPER, named="auto", buffer=1.5, limit=4.0, size=128, fp8=False):
    matrices = jax.ShapeDtypeStruct((8, size, 256), "bfloat16")
    how = {"buffer": buffer, "limit": limit, "fp8": fp8, "device": device}
    return choose_backend(named, matrices, **how)


@pytest.mark.parametrize(
    ("arguments", "backend", "reason"),
    [
        ({}, "mosaic", ""),
        ({"size": 100}, "batched", "not multiples of 64"),
        ({"size": 192}, "mosaic", ""),
        ({"size": 192, "fp8": True}, "batched", "not multiples of 128"),  # bytes, as gpt-oss' 2880
        ({"device": AMPERE}, "batched", "needs a Hopper GPU"),
        ({"device": CPU}, "xla", ""),
        ({"limit": 1.1}, "batched", ""),
        ({"limit": 1.1, "buffer": 1.0}, "mosaic", ""),  # a second round is not rare
        ({"limit": 1.25}, "mosaic", ""),
        ({"named": "batched", "device": CPU}, "batched", ""),
        ({"named": "xla"}, "xla", ""),
    ],
)
def test_the_backend_and_why(arguments, backend, reason):
    found, because = chosen(**arguments)
    assert found == backend and reason in because and bool(reason) == bool(because)


def test_the_price_of_dense_products_is_said_once(caplog):
    words = xla_words(1000, 8, 2e12)
    assert "each of 1,000 rows by all 8 experts" in words and "16 instead of 2 TFLOP" in words
    logging.getLogger("maxmeg").propagate = True
    with caplog.at_level(logging.WARNING, "maxmeg"):
        for experts in (8, 8, 1):  # one expert's product is exact
            warn_of_xla(1000, experts, 2e12)
    assert caplog.messages == [words]
