"""Blockwise products: operands and scales as the kernel gets them, and the choice of backend.

tests/kernels/test_fp8_blockwise.py interprets the kernel.
"""

import json
import types

import jax.numpy as jnp
import numpy as np
import pytest
from ops.block_matmul_cases import CASES, TOLERANCE, arrays_of, error, expected, run

import maxmeg.ops.quantized as quantized
from maxmeg.config.quantization import BlockBackend, QuantizationConfig, QuantizationRecipe
from maxmeg.ops import block_matmul, choices
from maxmeg.ops.backend import Device
from maxmeg.ops.quantized import check_device
from maxmeg.ops.recipes import recipe_of

HOPPER, BLACKWELL, CPU = Device("cuda", (9, 0)), Device("cuda", (10, 0)), Device("cpu")
NAMES = "rows that fill no block", "stacked"  # the other cases are for tiles of the kernel


def kernel(left_EMK, right_ENK, left_scale_EMK, right_scale_ENK, out_dtype):
    """What kernels/fp8_blockwise.py computes, and the form of the operands that it takes."""
    assert {left_EMK.dtype, right_ENK.dtype} == {jnp.dtype("float8_e4m3fn")}
    rows = right_ENK.shape[1] // right_scale_ENK.shape[1]
    assert rows in (1, 128)
    left, right = (codes.astype(jnp.float32) for codes in (left_EMK, right_ENK))
    left *= jnp.repeat(left_scale_EMK, 128, 2)
    right *= jnp.repeat(jnp.repeat(right_scale_ENK, 128, 2), rows, 1)
    return jnp.einsum("emk,enk->emn", left, right, precision="highest").astype(out_dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["mosaic", "xla"])
def test_products_are_those_of_the_rounded_numbers(backend: str, name: str, monkeypatch):
    if backend == "mosaic":
        monkeypatch.setattr(quantized, "target_device", lambda: HOPPER)
        module = types.SimpleNamespace(block_matmul=kernel)
        monkeypatch.setattr(block_matmul, "kernel_module", lambda name: module)
    case = CASES[name]
    arrays = arrays_of(case, "float32")
    actual, wanted = run(case, *arrays, backend), expected(case, *arrays)
    for part, array in wanted.items():
        assert actual[part].shape == np.shape(array)
        assert error(actual[part], array) < TOLERANCE["float32"], part


def settings(backend: BlockBackend) -> quantized.Recipe:
    recipe = recipe_of(QuantizationConfig(QuantizationRecipe.blockwise, backend=backend))
    assert recipe is not None
    return recipe


def test_the_kernel_is_chosen_where_it_is_named_or_was_measured(tmp_path, monkeypatch):
    path = tmp_path / "choices.json"
    monkeypatch.setattr(choices, "FILE", path)
    path.write_text("{}")
    auto, named = map(settings, (BlockBackend.auto, BlockBackend.mosaic))
    assert named.multiplies_codes_on(HOPPER) and not auto.multiplies_codes_on(HOPPER)
    choices.read.cache_clear()
    path.write_text(json.dumps({"9.0": {block_matmul.OP: ["mosaic", "xla"]}}))
    assert auto.multiplies_codes_on(HOPPER)
    assert not settings(BlockBackend.xla).multiplies_codes_on(HOPPER)
    assert not any(auto.multiplies_codes_on(device) for device in (BLACKWELL, CPU))
    choices.read.cache_clear()


@pytest.mark.parametrize(("device", "reason"), [(BLACKWELL, "found 10.0"), (CPU, "is cpu")])
def test_a_named_kernel_that_cannot_run_is_an_error(device: Device, reason: str):
    remedy = r"use auto or xla for train\.quantization\.backend$"
    with pytest.raises(ValueError, match=f"backend mosaic cannot run: .*{reason}.*; {remedy}"):
        check_device(settings(BlockBackend.mosaic), device)
    check_device(settings(BlockBackend.auto), device)
