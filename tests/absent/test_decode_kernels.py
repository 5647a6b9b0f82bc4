"""The decode attention kernel compiled for an H100 that is not here: memory, registers, spills."""

import pytest
from absent.compiled_kernels import MIB, SHARED_MEMORY, Kernel, compiled_shapes, selected

from maxmeg.kernels import decode_attention
from maxmeg.kernels.decode_attention import TUNED_SHAPES

MULTIPROCESSOR = 233_472  # bytes of shared memory, of which every program takes RESERVED more
RESERVED = 1024
# The kernels of other lengths; and a chunk is a bound like a window, which the kernel is given.
SIMILAR = ("llama-256x1k", "llama-256x4k", "llama-8x32k", "llama4-64x32k-chunks")
NAMES = [name for name in TUNED_SHAPES if name not in SIMILAR]

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
def compiled(request, tmp_path_factory) -> dict[str, tuple[int, list[Kernel]]]:
    return compiled_shapes(COMPILE, tmp_path_factory.mktemp("kernels"), selected(request))


@pytest.mark.parametrize("name", NAMES)
def test_shape_compiles_and_as_many_programs_fit_as_it_counts_on(compiled, name: str):
    """No temporary is as long as the cache: there are the queries, and of each part of a row the
    output and two numbers a query, in float32."""
    case, (temporaries, (kernel,)) = TUNED_SHAPES[name], compiled[name]
    assert kernel.name == "decode_attention"
    assert not kernel.spilled and not kernel.serialised
    assert kernel.shared <= SHARED_MEMORY
    programs = decode_attention.programs_at_once(case.head_dim, case.values)
    together = programs // decode_attention.MULTIPROCESSORS
    assert together * (kernel.shared + RESERVED) <= MULTIPROCESSOR
    rows = -(-case.queries * case.heads // case.key_heads // 8) * 8
    parts = decode_attention.part_count(case.batch * case.key_heads, case.length // 64, programs)
    width = case.head_dim * 2 + parts * (case.values + 64) * 4
    assert temporaries <= 2 * case.batch * case.key_heads * rows * width + MIB
