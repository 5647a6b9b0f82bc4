"""The chunked scan compiled for an H100 that is not here: temporaries, and its kernel's spills."""

import json

import pytest
from absent.compiled_kernels import MIB, SHARED_MEMORY, compiled_shapes, output_of, selected

MOST = 16 * MIB
# (name, heads, groups, size of states, of values, delta rule, decays for each channel, chunk) at
# 8,192 tokens, where the decays between the tokens of chunks alone are 512 MiB with 128 heads.
CASES = {
    "mamba, 8 groups": (128, 8, 128, 64, False, False, 128),
    "qwen 3 next": (32, 16, 128, 128, True, False, 64),
    "kimi linear": (32, 32, 128, 128, True, True, 64),
}
COMPILE = """
from maxmeg.ops.chunk_scan import ScanSpec, chunk_scan

os.environ["MOSAIC_GPU_DUMP_TO"] = sys.argv[1]
for name, (H, G, N, P, is_delta, by_channel, chunk) in json.loads(sys.argv[2]).items():
    B, L, exact = 1, 8192, jnp.float32
    keys, y = array(B, L, G, N), array(B, L, H, P)
    decays = array(B, L, H, *[N] * by_channel, dtype=exact)
    beta = array(B, L, H, dtype=exact) if is_delta else None
    inputs = keys, keys, y, decays, beta, None, array(B, H, N, P, dtype=exact)

    def scan(*inputs):
        return chunk_scan(*inputs, spec=ScanSpec(chunk))

    def gradients(inputs, slopes):
        return jax.vjp(scan, *inputs)[1](slopes)

    tell(name + " forward", compiled(scan, *inputs))
    tell(name + " backward", compiled(gradients, inputs, (y, inputs[-1])))
"""


@pytest.fixture(scope="module")
def temporaries(request, tmp_path_factory) -> dict[str, int]:
    cases = json.dumps({name: CASES[name] for name in selected(request) if name in CASES})
    lines = output_of(COMPILE, str(tmp_path_factory.mktemp("reports")), cases)
    return {line["name"]: line["temporaries"] for line in lines}


@pytest.mark.parametrize("name", CASES)
def test_temporaries_are_small(name, temporaries):
    assert temporaries[f"{name} forward"] <= MOST
    assert temporaries[f"{name} backward"] <= MOST


# MiB of a layer's scan, forward and backward. Backward has two bfloat16 states a chunk and head,
# which lie in the memory of results (y and the gradients of v) as far as these have room for them;
# the delta rule has corrected values and their gradients, in the size of values, beside them. The
# inverses that backward computes again are those of forward, which XLA keeps instead in some
# versions: then there is one kernel less, and up to 2 MiB more.
KERNELS = {
    "nemotron-h-8k-packed": 20.1,
    "wide-states-8k-packed": 133.1,
    "qwen3-next-8k-packed": 260.1,
}
KEPT = 2  # MiB
DELTA = list(KERNELS)[2:]
COMPILE_KERNELS = """
from maxmeg.kernels import chunk_scan as kernel, delta_scan
from maxmeg.ops import backend
from maxmeg.ops.chunk_scan import ScanSpec, chunk_scan

backend.target_device = lambda: backend.Device("cuda", (9, 0))
for name in sys.argv[2:]:
    report_to(name)
    is_delta = name in delta_scan.TUNED_SHAPES
    case = (delta_scan if is_delta else kernel).TUNED_SHAPES[name]
    B, L, H, exact = case.batch, case.length, case.heads, jnp.float32
    keys, y = array(B, L, case.groups, case.state), array(B, L, H, case.value)
    segments = array(B, L, dtype=jnp.int32) if case.documents else None
    decay = array(B, L, H, dtype=exact)
    inputs = keys, keys, y, decay, decay if is_delta else None, segments

    def scan(q, k, v, decay, beta, segments):
        return chunk_scan(q, k, v, decay, beta, segments, None, ScanSpec(128, "mosaic"))

    def gradients(inputs, slope):
        *arrays, segments = inputs
        (out, last), pull = jax.vjp(lambda *arrays: scan(*arrays, segments), *arrays)
        return out, pull((slope, jnp.zeros_like(last)))

    tell(name, compiled(gradients, inputs, y))
"""


@pytest.fixture(scope="module")
def compiled(request, tmp_path_factory) -> dict[str, tuple]:
    names = [name for name in selected(request) if name in KERNELS]
    return compiled_shapes(COMPILE_KERNELS, tmp_path_factory.mktemp("scans"), names)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_do_not_spill_and_their_temporaries_are_known(name, compiled):
    temporaries, kernels = compiled[name]
    assert -0.1 < temporaries / MIB - KERNELS[name] < 0.1 + KEPT * (name in DELTA)
    names = ["chunk_scan_backward"] * 2 + ["chunk_scan_forward"] * 3
    if name in DELTA:
        inverses = [kernel.name for kernel in kernels].count("delta_inverse")
        assert inverses in (1, 2)
        names = ["chunk_scan_backward"] * 4 + ["delta_inverse"] * inverses + ["delta_scan"] * 3
    assert [kernel.name for kernel in kernels] == names
    assert all(kernel.shared <= SHARED_MEMORY for kernel in kernels)
    assert not any(kernel.spilled or kernel.serialised for kernel in kernels)
