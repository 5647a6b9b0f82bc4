"""Layers with a chunked scan compiled for an H100 that is not here: number of kernels, temporaries,
and the spills of the scan's own kernels."""

import json

import pytest
from absent.compiled_kernels import (
    MIB,
    SHARED_MEMORY,
    compiled_shapes,
    num_launches,
    output_of,
    selected,
)

# Layers at 8,192 tokens: (architecture, most kernels, most MiB of temporaries). In tiles of a CPU's
# size the scans alone are 10,118 kernels forward (Mamba-2), 44,148 (Kimi's) and 188,567 backward
# (the delta rule).
LAYERS = {
    "mamba forward": ("nemotron-h-8b", 150, 700),
    "mamba backward": ("nemotron-h-8b", 600, 1700),
    "gated_delta backward": ("qwen3-next-80b-a3b", 1900, 1300),
    "kda forward": ("kimi-linear-48b-a3b", 350, 900),
}
COMPILE = """
from maxmeg.config.architectures import architecture
from maxmeg.config.parallel import ParallelConfig
from maxmeg.layers.context import Context
from maxmeg.models.mixers import mixer_spec

os.environ["MOSAIC_GPU_DUMP_TO"] = sys.argv[1]
for name, model in json.loads(sys.argv[2]).items():
    mixer, direction = name.split()
    spec = mixer_spec(architecture(model), ParallelConfig(), mixer)
    x_BLD = array(1, 8192, spec.hidden_size)
    layer = jax.eval_shape(spec.make, jax.random.key(0))
    layer = jax.tree.map(lambda a: array(*a.shape), layer)

    def forward(layer, x_BLD):
        return layer(x_BLD, Context(jnp.arange(8192)[None]))[0]

    def backward(layer, x_BLD, slope_BLD):
        return jax.vjp(forward, layer, x_BLD)[1](slope_BLD)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        arrays = (x_BLD,) if direction == "forward" else (x_BLD, x_BLD)
        program = compiled(locals()[direction], layer, *arrays)
    pathlib.Path(sys.argv[1], name).write_text(program.as_text())
    tell(name, program)
"""


@pytest.fixture(scope="module")
def layers(request, tmp_path_factory) -> dict[str, tuple[int, float]]:
    """(number of kernels, MiB of temporaries) of each row of LAYERS that runs."""
    folder = tmp_path_factory.mktemp("layers")
    models = {name: LAYERS[name][0] for name in selected(request) if name in LAYERS}
    rows = output_of(COMPILE, str(folder), json.dumps(models))
    return {
        row["name"]: (num_launches((folder / row["name"]).read_text()), row["temporaries"] / MIB)
        for row in rows
    }


@pytest.mark.parametrize("name", LAYERS)
def test_layers_have_few_kernels(name, layers):
    kernels, temporaries = layers[name]
    assert kernels <= LAYERS[name][1]
    assert temporaries <= LAYERS[name][2]


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
