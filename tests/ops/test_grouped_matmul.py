"""Every grouped matmul backend over one table, against products in float64 NumPy."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.grouped_matmul_cases import (
    CASES,
    NAMES,
    RECIPES,
    TOLERANCE,
    arrays_of,
    error,
    expected,
    rounded,
    run,
)
from tables import thinned

import maxmeg.ops.experts.grouped_matmul as module
from maxmeg.ops import backend as choice
from maxmeg.ops.backend import Device
from maxmeg.ops.experts.grouped_matmul import grouped_matmul, in_rows
from maxmeg.ops.quantized import E4M3, Recipe

ROUNDED = ("odd sizes", "rows after the last", "fp8, rows after the last", "mxfp8")


def struct(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def can_run(backend: str) -> bool:
    call = (struct(16, 16), struct(1, 16, 16), struct(1, dtype=jnp.int32), False)
    return not module.BACKENDS[backend].refuses(*call, choice.target_device())


BACKENDS = [backend for backend in module.BACKENDS if can_run(backend)]
RUNS = [("float32", name) for name in CASES] + [("bfloat16", name) for name in ROUNDED]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "name"), thinned(RUNS, 2))
def test_product_and_gradients_equal_the_reference(backend: str, dtype: str, name: str):
    """Of operands rounded to 8 bits where the case has a recipe for it."""
    case = CASES[name]
    arrays, sizes = arrays_of(case, dtype)
    actual = run(case, arrays, sizes, backend)
    wanted = (expected if case.recipe == "none" else rounded)(case, arrays)
    for part in NAMES:
        assert actual[part].dtype == dtype
        assert error(actual[part], wanted[part]) < TOLERANCE[dtype], part
    live = sum(case.sizes)
    assert not actual["y"][live:].any() and not actual["dx"][live:].any()
    assert not actual["dw"][np.asarray(case.sizes) == 0].any()


@pytest.mark.parametrize("name", ("fp8, rows after the last", "mxfp8"))
def test_codes_that_are_there_are_multiplied(name: str):
    case = CASES[name]
    (x, w, _), sizes = arrays_of(case, "bfloat16")
    recipe = RECIPES[case.recipe]
    assert recipe is not None
    codes = jax.jit(recipe.weights)(w, jnp.max(jnp.abs(w)))
    x_codes = jax.jit(lambda x: in_rows(x, recipe, E4M3))(x)
    how: dict = {"codes": codes, "recipe": recipe, "backend": "xla"}
    given = functools.partial(grouped_matmul, x_codes=x_codes, **how)
    operands = jnp.asarray(x), jnp.asarray(w), jnp.asarray(sizes)
    quantized_here = jax.jit(functools.partial(grouped_matmul, **how))
    np.testing.assert_array_equal(jax.jit(given)(*operands), quantized_here(*operands))
    assert "reduce_max" not in str(jax.make_jaxpr(given)(*operands))  # none looks for a scale


BAD = [
    ((struct(8, 16), struct(2, 8, 16), struct(2, dtype=jnp.int32)), r"must be \[T, D\]"),
    ((struct(8, 16), struct(2, 16, 16), struct(3, dtype=jnp.int32)), r"must be \[T, D\]"),
    ((struct(16), struct(2, 16, 16), struct(2, dtype=jnp.int32)), r"must be \[T, D\]"),
    ((struct(8, 16), struct(2, 16, 8, dtype=jnp.float32), struct(2, dtype=jnp.int32)), "cast both"),
    ((struct(8, 16), struct(2, 16, 16), struct(2)), "sizes are bfloat16"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_invalid_arguments_are_refused(call, message: str):
    with pytest.raises(ValueError, match=message):
        module.check_shapes(*call)


def test_unmeasured_kernels_are_run_by_name_only(monkeypatch, caplog):
    monkeypatch.setattr(module, "pick", choice.pick)
    monkeypatch.setattr(choice, "target_device", lambda: Device("cuda", (9, 0)))
    choice.log_choice.cache_clear()
    call = (struct(32, 64), struct(2, 64, 64), struct(2, dtype=jnp.int32))
    with caplog.at_level(logging.INFO, "maxmeg"):
        text = jax.make_jaxpr(grouped_matmul)(*call)
        jax.make_jaxpr(grouped_matmul)(*call)
    assert "ragged_dot" in str(text)
    assert caplog.messages == ["grouped_matmul backend: xla"]
    text = jax.make_jaxpr(functools.partial(grouped_matmul, backend="mosaic"))(*call)
    assert "ragged_dot" not in str(text) and "grouped_rows" in str(text)


@pytest.mark.parametrize("named", ["auto", "xla", "mosaic"])
def test_the_kernel_gets_codes_of_blocks_where_it_is_named(named: str, monkeypatch):
    for place in (choice, module):
        monkeypatch.setattr(place, "target_device", lambda: Device("cuda", (9, 0)))
    recipe = Recipe(block=128, square=True, backend=named)

    def call(x, w, sizes):
        codes = recipe.weights(w, None)
        return grouped_matmul(x, w, sizes, codes=codes, recipe=recipe, backend="mosaic")

    x, w, sizes = struct(17, 128), struct(3, 128, 128), struct(3, dtype=jnp.int32)
    text = str(jax.make_jaxpr(call)(x, w, sizes))
    is_read = [f"Ref<gmem>{{{dtype}[3,128,128]}}" in text for dtype in ("f8_e4m3fn", "bf16")]
    assert is_read == [named == "mosaic", named != "mosaic"]


REFUSED = {  # message: what is changed in a call that the kernel takes
    "cannot run: the device is cpu": {"device": Device("cpu")},
    "dimensions 64 and 96 are not multiples of 64": {"outer": 96},
    "dimensions 128 and 64 are not multiples of 128": {"inner": 128, "recipe": Recipe()},
    "in at most 256 groups": {"groups": 257},
    "at least one row": {"rows": 0},
    "not both bfloat16 or both float16": {"dtype": jnp.float32},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_named_kernel_says_why_it_cannot_run(message: str, monkeypatch):
    sizes = {"rows": 8, "inner": 64, "outer": 64, "groups": 2, "dtype": jnp.bfloat16}
    how = sizes | {"device": Device("cuda", (9, 0)), "recipe": None} | REFUSED[message]
    monkeypatch.setattr(choice, "target_device", lambda: how["device"])
    rows, inner, outer, groups = (how[name] for name in ("rows", "inner", "outer", "groups"))

    def call(x, w, sizes):
        recipe = how["recipe"]
        codes = recipe.weights(w, jnp.max(jnp.abs(w))) if recipe else None
        return grouped_matmul(x, w, sizes, codes=codes, recipe=recipe, backend="mosaic")

    x, w = struct(rows, inner, dtype=how["dtype"]), struct(groups, inner, outer, dtype=how["dtype"])
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call, x, w, struct(groups, dtype=jnp.int32))
