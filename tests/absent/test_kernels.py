"""The flash attention kernels compiled for an H100 that is not here: memory, registers, spills."""

import pytest
from absent.compiled_kernels import (
    ATTENTION_SHAPES,
    MIB,
    SHARED_MEMORY,
    Kernel,
    compiled_shapes,
    selected,
)

from maxmeg.kernels.attention import TUNED_SHAPES

SPLIT = ["deepseek-4k", "gemma-4k-softcap"]  # gradients of keys and values one after the other
SPILLED = {  # bytes a thread at most, of gradients; none elsewhere
    **dict.fromkeys(("llama-8k-packed", "mistral-16k-window"), 48),
    "mha-16k": 36,
    "deepseek-4k": 16,
    "gemma-4k-softcap": 288,
}

COMPILE = """
from maxmeg.kernels import attention


for name in sys.argv[2:]:
    report_to(name)
    case = attention.TUNED_SHAPES[name]
    B, L, K, V = case.batch, case.length, case.head_dim, case.value_dim or case.head_dim
    qkv = [array(B, L, case.heads, K), array(B, L, case.key_heads, K)]
    qkv += [array(B, L, case.key_heads, V)]
    ids = [array(B, L, dtype=jnp.int32)] if case.spec.segments else []

    def attend(q, k, v, ids=None):
        return attention.flash_attention(q, k, v, case.spec, query_segments_BL=ids)

    def gradients(q, k, v, ids=None):
        (out, lse), pull = jax.vjp(lambda *qkv: attend(*qkv, ids), q, k, v)
        return out, pull((out, lse))

    tell(name, compiled(gradients, *qkv, *ids))
"""


@pytest.fixture(scope="module")
def compiled(request, tmp_path_factory) -> dict[str, tuple[int, list[Kernel]]]:
    return compiled_shapes(COMPILE, tmp_path_factory.mktemp("kernels"), selected(request))


@pytest.mark.parametrize("name", ATTENTION_SHAPES)
def test_shape_compiles_within_a_program(compiled, name: str):
    """Nothing grows with the square of the length: there are three numbers a query and head, in
    float32, and what else is as long as the inputs."""
    temporaries, kernels = compiled[name]
    keys = 2 if name in SPLIT else 1
    expected = ["flash_forward", *["flash_key_gradients"] * keys, "flash_query_gradient"]
    assert sorted(kernel.name for kernel in kernels) == expected
    for kernel in kernels:
        assert kernel.shared <= SHARED_MEMORY
        assert not kernel.serialised
        assert kernel.spilled <= (0 if kernel.name == "flash_forward" else SPILLED.get(name, 0))
    case = TUNED_SHAPES[name]
    rows = case.batch * case.length * case.heads
    width = case.head_dim + (case.value_dim or case.head_dim)
    assert temporaries <= 2 * rows * width + 8 * 4 * rows + MIB
