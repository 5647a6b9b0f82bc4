"""The product kernels compiled for an H100 that is not here: memory, registers, spills."""

import pytest
from absent.compiled_kernels import MIB, SHARED_MEMORY, Kernel, compiled_shapes, selected

from maxmeg.kernels.grouped_matmul import TUNED_SHAPES
from maxmeg.kernels.mosaic import CONSUMER_REGISTERS

GROUPED = ["mixtral-8k", "qwen3-down-32k"]
FP8 = ["deepseek-64k-fp8", "mixtral-8k-blockwise", "deepseek-down-64k-blockwise"]
# M, N and K of Llama 3 8B's projections with 8,192 tokens, and small ones.
BLOCKS = ["blocks-8192-6144-4096", "blocks-200-384-256", "rows-4096-14336-8192", "rows-384-256-256"]
ORDERS = ["MK-KN", "MK-NK", "KM-KN", "KM-NK"]

COMPILE = """
from maxmeg.kernels import fp8_blockwise, grouped_matmul, matmul
from maxmeg.ops import backend

backend.target_device = lambda: backend.Device("cuda", (9, 0))  # before the ops import it

from maxmeg.ops.experts.grouped_matmul import grouped_matmul as product
from maxmeg.ops.quantized import BLOCK, Recipe

RECIPES = {
    "fp8": Recipe(),
    "blockwise": Recipe(backward="float8_e4m3fn", block=BLOCK, square=True, backend="mosaic"),
}

def grouped(name):
    shape, _, kind = name.rpartition("-")
    recipe = RECIPES.get(kind)
    case = grouped_matmul.TUNED_SHAPES[shape if recipe else name]
    x, w = array(case.tokens, case.inner), array(case.groups, case.inner, case.outer)
    sizes, slope = array(case.groups, dtype=jnp.int32), array(case.tokens, case.outer)

    def both(x, w, sizes, slope):
        codes = recipe.weights(w, jnp.max(jnp.abs(w))) if recipe else None
        how = dict(codes=codes, recipe=recipe, backend="mosaic")
        y, pull = jax.vjp(lambda x, w: product(x, w, sizes, **how), x, w)
        return y, *pull(slope)

    return both, (x, w, sizes, slope)

def plain(name):
    left, right = name.split("-")
    tiling = matmul.Tiling(left=left, right=right)
    sizes = dict(M=8192, K=4096, N=8192)
    operands = [array(*(sizes[letter] for letter in order)) for order in (left, right)]
    return lambda *pair: matmul.matmul(*pair, tiling), operands

def blocks(name):
    kind, *sizes = name.split("-")
    M, N, K = map(int, sizes)
    codes = [array(1, size, K, dtype="float8_e4m3fn") for size in (M, N)]
    counts = M, N if kind == "rows" else N // 128
    scales = [array(1, count, K // 128, dtype=jnp.float32) for count in counts]
    return lambda *arrays: fp8_blockwise.block_matmul(*arrays), (*codes, *scales)

kinds = {"blocks": blocks, "rows": blocks, "MK": plain, "KM": plain}
for name in sys.argv[2:]:
    report_to(name)
    function, operands = kinds.get(name.split("-")[0], grouped)(name)
    tell(name, compiled(function, *operands))
"""


@pytest.fixture(scope="module")
def compiled(request, tmp_path_factory) -> dict[str, tuple[int, list[Kernel]]]:
    return compiled_shapes(COMPILE, tmp_path_factory.mktemp("products"), selected(request))


@pytest.mark.parametrize("name", [*GROUPED, *FP8, *ORDERS, *BLOCKS])
def test_shape_compiles_without_spills(compiled, name: str):
    """Temporaries do not grow with rows times groups: in 8 bits there is a byte for each operand,
    forward and backward, for the weights in both orders, and scales."""
    temporaries, kernels = compiled[name]
    expected = ["matmul_kernel"] if name in ORDERS else ["grouped_rows_kernel"] * 2
    expected = ["block_matmul_kernel"] if name in BLOCKS else expected
    if name in (*GROUPED, *FP8):
        expected.append("grouped_weights_kernel")
    assert sorted(kernel.name for kernel in kernels) == expected
    for kernel in kernels:
        assert kernel.shared <= SHARED_MEMORY
        assert not kernel.spilled and not kernel.serialised
    if name in GROUPED:
        assert temporaries <= MIB
    elif name in FP8:
        case = TUNED_SHAPES[name.rpartition("-")[0]]
        rows = case.tokens * (case.inner + case.outer)
        weights = 2 * case.groups * case.inner * case.outer
        assert temporaries <= 1.05 * (rows + weights) + MIB


def test_registers_of_all_warpgroups_fit():
    for consumers, registers in CONSUMER_REGISTERS.items():
        assert 128 * (consumers * registers + 24) <= 65_536
