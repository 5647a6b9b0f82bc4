"""The chunked scan compiled for an H100 that is not here: its temporaries."""

import json

import pytest
from absent.compiled_kernels import MIB, output_of

MOST = 16 * MIB
# (name, heads, groups, size of states, of values, delta rule, decays for each channel, chunk) at
# 8,192 tokens, where the decays between the tokens of chunks alone are 512 MiB with 128 heads.
CASES = {
    "mamba": (128, 1, 128, 64, False, False, 128),
    "mamba, 8 groups": (128, 8, 128, 64, False, False, 128),
    "delta": (128, 128, 128, 64, True, False, 64),
    "qwen 3 next": (32, 16, 128, 128, True, False, 64),
    "kimi linear": (32, 32, 128, 128, True, True, 64),
}
COMPILE = """
from maxmeg.ops.chunk_scan import chunk_scan

os.environ["MOSAIC_GPU_DUMP_TO"] = sys.argv[1]
for name, (H, G, N, P, is_delta, by_channel, chunk) in json.loads(sys.argv[2]).items():
    B, L, exact = 1, 8192, jnp.float32
    keys, y = array(B, L, G, N), array(B, L, H, P)
    decays = array(B, L, H, *[N] * by_channel, dtype=exact)
    beta = array(B, L, H, dtype=exact) if is_delta else None
    inputs = keys, keys, y, decays, beta, None, array(B, H, N, P, dtype=exact)

    def scan(*inputs):
        return chunk_scan(*inputs, chunk=chunk)

    def gradients(inputs, slopes):
        return jax.vjp(scan, *inputs)[1](slopes)

    tell(name + " forward", compiled(scan, *inputs))
    tell(name + " backward", compiled(gradients, inputs, (y, inputs[-1])))
"""


@pytest.fixture(scope="module")
def temporaries(tmp_path_factory) -> dict[str, int]:
    lines = output_of(COMPILE, str(tmp_path_factory.mktemp("reports")), json.dumps(CASES))
    return {line["name"]: line["temporaries"] for line in lines}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", CASES)
def test_temporaries_are_small(name, direction, temporaries):
    assert temporaries[f"{name} {direction}"] <= MOST
