"""The decode attention kernel compiled for an H100 that is not here: memory, registers, spills."""

import pytest
from absent.compiled_kernels import MIB, SHARED_MEMORY, Kernel, compiled_shapes

from maxmeg.kernels import decode_attention
from maxmeg.kernels.decode_attention import TUNED_SHAPES

MULTIPROCESSOR = 233_472  # bytes of shared memory, of which every program takes RESERVED more
RESERVED = 1024
SHORTER = ("llama-256x1k", "llama-256x4k", "llama-8x32k")  # the kernel of other lengths
NAMES = [name for name in TUNED_SHAPES if name not in SHORTER]
# A window and a chunk are bounds that the kernel is given: the second is the program of the first.
TWINS = {"llama4-64x32k-chunks": "mistral-64x32k-window"}

COMPILE = """
from maxmeg.kernels import decode_attention


for name in sys.argv[2:]:
    report_to(name)
    case = decode_attention.TUNED_SHAPES[name]
    B, N = case.batch, case.length // case.page
    pools = [array(B * N, case.page, case.key_heads, K) for K in (case.head_dim, case.values)]
    q = array(B, case.queries, case.heads, case.head_dim)
    indices = array(B, N, dtype=jnp.int32), array(B, dtype=jnp.int32)

    def attend(q, *pages):
        return decode_attention.paged_attention(q, decode_attention.Pages(*pages), case.spec)

    tell(name, compiled(attend, q, *pools, *indices))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, tuple[int, list[Kernel]]]:
    """Of each shape the temporaries in bytes, and its kernels; one process compiles all."""
    folder = tmp_path_factory.mktemp("kernels")
    return compiled_shapes(COMPILE, folder, NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_shape_compiles_and_as_many_programs_fit_as_it_counts_on(compiled, name: str):
    case, (_, (kernel,)) = TUNED_SHAPES[name], compiled[TWINS.get(name, name)]
    assert kernel.name == "decode_attention"
    assert not kernel.spilled and not kernel.serialised
    assert kernel.shared <= SHARED_MEMORY
    programs = decode_attention.programs_at_once(case.head_dim, case.values)
    together = programs // decode_attention.MULTIPROCESSORS
    assert together * (kernel.shared + RESERVED) <= MULTIPROCESSOR


@pytest.mark.parametrize("name", NAMES)
def test_no_temporary_is_as_long_as_the_cache(compiled, name: str):
    """The queries, and of each part of a row the output and two numbers a query, in float32."""
    case = TUNED_SHAPES[name]
    rows = -(-case.queries * case.heads // case.key_heads // 8) * 8
    at_once = decode_attention.programs_at_once(case.head_dim, case.values)
    parts = decode_attention.part_count(case.batch * case.key_heads, case.length // 64, at_once)
    width = case.head_dim * 2 + parts * (case.values + 64) * 4
    assert compiled[name][0] <= 2 * case.batch * case.key_heads * rows * width + MIB
