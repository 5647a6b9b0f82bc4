"""Every backend of linear + cross entropy over one table, against float64 NumPy."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.cross_entropy_cases import CASES, TOLERANCE, Case, arrays_of, error, expected, run
from tables import thinned

import maxmeg.ops.backend as dispatch
import maxmeg.ops.cross_entropy.call as module
import maxmeg.ops.cross_entropy.tiled as tiled
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.validate import axis_sizes
from maxmeg.ops.backend import Device
from maxmeg.ops.cross_entropy.call import CrossEntropySpec, linear_cross_entropy, token_log_probs
from maxmeg.parallel.collectives import VOCAB_AXES
from maxmeg.parallel.mesh import make_mesh
from maxmeg.parallel.spmd import spmd
from maxmeg.planning import hlo

CPU, GPU = Device("cpu"), Device("cuda")
P = jax.sharding.PartitionSpec
ROUNDED = ("sure of itself", "all", "wide, all", "kernels")


def can_run(backend: str) -> bool:
    h, w = (jax.ShapeDtypeStruct((n, 64), jnp.bfloat16) for n in (256, 512))
    targets, weights = (jax.ShapeDtypeStruct((256,), d) for d in (jnp.int32, jnp.float32))
    call = (h, w, targets, weights, CrossEntropySpec(512))
    return not module.BACKENDS[backend].refuses(*call, dispatch.target_device())


BACKENDS = [backend for backend in module.BACKENDS if can_run(backend)]
EVERY = pytest.mark.parametrize("backend", BACKENDS)


def prepared(name: str, dtype: str, monkeypatch) -> tuple[Case, list[np.ndarray]]:
    case = CASES[name]
    monkeypatch.setattr(tiled, "TILES", tiled.Tiles(*case.tiles, multiple=1))
    return case, arrays_of(case, dtype)


@EVERY
@pytest.mark.parametrize(
    ("name", "dtype"),
    thinned([(n, "float32") for n in CASES] + [(n, "bfloat16") for n in ROUNDED], 3),
)
def test_losses_and_gradients_equal_the_reference(name, dtype, backend, monkeypatch):
    case, arrays = prepared(name, dtype, monkeypatch)
    wanted, found = expected(case, arrays), run(case, arrays, backend, jax.jit)
    assert found["loss"].dtype == found["losses"].dtype == "float32"
    assert found["dh"].dtype == found["dw"].dtype == dtype
    errors = {key: error(found[key], wanted[key]) for key in wanted}
    assert all(e <= TOLERANCE[dtype] for e in errors.values()), errors
    assert error(found["losses"], wanted["losses"]) <= TOLERANCE["float32"]
    assert not found["dh"][arrays[3] == 0].any()
    assert not found["dw"][case.spec.vocab_size :].any()


@EVERY
@pytest.mark.parametrize("name", ["padded", "all"])
def test_without_gradients_the_loss_is_the_same(name, backend, monkeypatch):
    case, arrays = prepared(name, "float32", monkeypatch)
    call = functools.partial(linear_cross_entropy, spec=case.spec, backend=backend)
    wanted = expected(case, arrays)
    for key, found in zip(("loss", "losses"), jax.jit(call)(*arrays), strict=True):
        assert error(found, wanted[key]) <= TOLERANCE["float32"]


@EVERY
def test_huge_logits_stay_finite(backend, monkeypatch):
    case, (h, w, targets, weights) = prepared("plain", "float32", monkeypatch)
    found = run(case, [1e4 * h, 1e4 * w, targets, weights], backend, jax.jit)
    assert all(np.isfinite(array).all() for array in found.values())


@EVERY
def test_a_token_of_weight_zero_reaches_neither_the_sum_nor_other_tokens(backend, monkeypatch):
    case, arrays = prepared("all", "float32", monkeypatch)
    strange = arrays[0].copy()
    strange[arrays[3] == 0] = np.nan
    found = run(case, [strange, *arrays[1:]], backend, jax.jit)
    wanted = expected(case, arrays)
    assert error(found["loss"], wanted["loss"]) <= TOLERANCE["float32"]
    assert error(found["dh"], wanted["dh"]) <= TOLERANCE["float32"]


def over_vocabulary(case: Case, backend: str):
    """(the gradient of `case` with the vocabulary over two axes, its mesh, padded words)."""
    mesh = make_mesh(axis_sizes(ParallelConfig(pipe=2, tensor=4), 8), jax.devices()[:8])

    def local(h, w, targets, weights):
        call = functools.partial(linear_cross_entropy, spec=case.spec, backend=backend)
        run = jax.value_and_grad(call, argnums=(0, 1), has_aux=True)
        (loss, losses), (dh, dw) = run(h, w, targets, weights)
        return loss, losses, dh[None], dw

    specs = (P(), P(VOCAB_AXES), P(), P())
    return spmd(local, mesh, specs, (P(), P(), P(VOCAB_AXES), P(VOCAB_AXES))), mesh


def check_over_vocabulary(case: Case, arrays: list, backend: str) -> None:
    h, w, targets, weights = arrays
    padded = np.pad(w, ((0, 32 - case.words), (0, 0)))
    run, _ = over_vocabulary(case, backend)
    loss, losses, dh, dw = map(np.asarray, jax.jit(run)(h, padded, targets, weights))
    assert not dw[case.words :].any()
    actual = {"loss": loss, "losses": losses, "dh": dh.sum(axis=0), "dw": dw[: case.words]}
    wanted = expected(case, arrays, scale=1.0)
    for key, array in actual.items():
        assert error(array, wanted[key]) <= TOLERANCE["float32"], key


@EVERY
@pytest.mark.parametrize("name", ["padded", "all"])  # 21 words on 8 devices: some have none
def test_a_vocabulary_over_devices_is_the_whole_one(name, backend, monkeypatch):
    case, arrays = prepared(name, "float32", monkeypatch)
    check_over_vocabulary(case, arrays, backend)


def policy_loss(log_probs):
    """Some function of the log-probabilities of all targets together."""
    return jnp.sum(jnp.sin(log_probs)) + jnp.square(jnp.mean(jnp.exp(log_probs)))


def reference_log_probs(h, w, targets, case: Case):
    logits = h @ w[: case.spec.vocab_size].T
    logits = case.softcap * jnp.tanh(logits / case.softcap) if case.softcap else logits
    return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=-1)[:, 0]


@EVERY
@pytest.mark.parametrize("name", ["chunks that do not divide", "soft cap", "padded"])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_any_function_of_log_probs_has_the_gradient_of_log_softmax(
    name, is_sharded, backend, monkeypatch
):
    case, arrays = prepared(name, "float32", monkeypatch)
    h, w, targets, _ = map(jnp.asarray, arrays)

    def loss(h, w):
        return policy_loss(token_log_probs(h, w, targets, case.spec, backend))

    gradient = jax.value_and_grad(loss, argnums=(0, 1))
    words = np.pad(w, ((0, 32 - case.words), (0, 0)))
    if is_sharded:
        mesh = make_mesh(axis_sizes(ParallelConfig(pipe=2, tensor=4), 8), jax.devices()[:8])

        def local(h, w):
            value, (dh, dw) = gradient(h, w)
            return value, (dh[None], dw)

        outputs = P(), (P(VOCAB_AXES), P(VOCAB_AXES))
        value, (dh, dw) = jax.jit(spmd(local, mesh, (P(), P(VOCAB_AXES)), outputs))(h, words)
        dh = dh.sum(axis=0)
    else:
        value, (dh, dw) = jax.jit(gradient)(h, words)
    reference = jax.value_and_grad(
        lambda h, w: policy_loss(reference_log_probs(h, w, targets, case)), argnums=(0, 1)
    )
    wanted = jax.tree.leaves(reference(h, w))
    for array, right in zip((value, dh, dw[: case.words]), wanted, strict=True):
        assert error(array, right) <= TOLERANCE["float32"]


@EVERY
def test_log_probs_need_the_memory_of_the_loss(backend, monkeypatch):
    monkeypatch.setattr(tiled, "TILES", tiled.Tiles(200, 200, 400, 50, multiple=1))
    h, w = (jax.ShapeDtypeStruct((n, 8), jnp.float32) for n in (1000, 800))
    targets, weights = (jax.ShapeDtypeStruct((1000,), d) for d in (jnp.int32, jnp.float32))
    spec = CrossEntropySpec(800, chunk=100)

    def loss(h, w, targets, weights):
        return linear_cross_entropy(h, w, targets, weights, spec, backend=backend)[0]

    def of_log_probs(h, w, targets, weights):
        return policy_loss(weights * token_log_probs(h, w, targets, spec, backend))

    def temporaries(function) -> int:
        lowered = jax.jit(jax.grad(function, argnums=(0, 1))).lower(h, w, targets, weights)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    rows = 4 * 4 * 1000  # numbers of a token
    assert temporaries(of_log_probs) <= temporaries(loss) + rows


@EVERY
@pytest.mark.parametrize(("smoothing", "numbers"), [(0.0, 3), (0.1, 4)])
def test_communication_is_a_few_numbers_a_token(backend, smoothing, numbers, monkeypatch):
    """The largest logit, then sums of exponentials, of the target's logit and, with label
    smoothing, of all logits: once a chunk of tokens, however many chunks of words."""
    case = Case(64, 16, 64, label_smoothing=smoothing, chunk=16, tiles=(16, 2, 64, 2))
    monkeypatch.setattr(tiled, "TILES", tiled.Tiles(*case.tiles, multiple=1))
    run, mesh = over_vocabulary(case, backend)
    compiled = jax.jit(run).lower(*arrays_of(case, "float32")).compile()
    rows = hlo.collectives(hlo.parse(compiled.as_text()), dict(mesh.shape))
    assert {(row.kind, row.axes) for row in rows} == {("all-reduce", ("pipe", "tensor"))}
    assert sum(row.volume for row in rows) == 4 * numbers * case.tokens
    assert sum(row.runs for row in rows) <= numbers * case.tokens // case.chunk


@pytest.mark.parametrize(
    ("backend", "options", "products"),
    [
        ("xla", {}, 3),
        ("tiled", {}, 4),
        ("tiled", {"softcap": 3.0}, 4),
        ("tiled", {"label_smoothing": 0.1}, 4),
        ("tiled", {"label_smoothing": 0.1, "softcap": 3.0}, 5),
    ],
)
def test_the_number_of_matrix_products_is_as_expected(backend, options, products, monkeypatch):
    case = Case(64, 16, 96, chunk=16, tiles=(16, 24, 32, 12), **options)
    monkeypatch.setattr(tiled, "TILES", tiled.Tiles(*case.tiles, multiple=1))
    call = functools.partial(linear_cross_entropy, spec=case.spec, backend=backend)
    arrays = arrays_of(case, "float32")

    def count(function) -> float:
        text = jax.jit(function).lower(*arrays).compile().as_text()
        each = 2 * case.tokens * case.width * case.words
        return hlo.matrix_flops(hlo.parse(text)) / each

    assert count(jax.value_and_grad(call, argnums=(0, 1), has_aux=True)) == products
    assert count(call) == 1


def largest_array(backend: str, chunk: int) -> int:
    """Elements of the largest array in the compiled gradient of 1,000 tokens x 800 words."""
    h, w = (jax.ShapeDtypeStruct((n, 8), jnp.float32) for n in (1000, 800))
    targets, weights = (jax.ShapeDtypeStruct((1000,), d) for d in (jnp.int32, jnp.float32))
    spec = CrossEntropySpec(800, 1e-3, 5.0, chunk, 0.1)
    call = functools.partial(linear_cross_entropy, spec=spec, backend=backend)
    gradient = jax.grad(call, argnums=(0, 1), has_aux=True)
    lowered = jax.jit(gradient).lower(h, w, targets, weights)
    shapes = re.findall(r"\w+\[([\d,]+)\]", lowered.compile().as_text())
    return max(int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes)


@pytest.mark.parametrize(
    ("backend", "chunk", "elements"),
    # The first row shows that logits of all tokens would be found.
    [("xla", 1000, 1000 * 800), ("xla", 100, 100 * 800), ("tiled", 1000, 100 * 200)],
)
def test_the_logits_of_all_tokens_never_exist(backend, chunk, elements, monkeypatch):
    monkeypatch.setattr(tiled, "TILES", tiled.Tiles(200, 200, 400, 50, multiple=1))
    assert largest_array(backend, chunk) == elements


@pytest.mark.parametrize(("total", "size", "multiple"), [(29, 8, 1), (128, 48, 16), (100, 30, 64)])
def test_chunks_cover_all_rows_once(total, size, multiple):
    chunks = tiled.chunks_of(total, size, multiple)
    held = []
    for number in range(chunks.count):
        start = int(chunks.start(jnp.int32(number)))
        new = np.asarray(chunks.new(jnp.int32(number)))
        assert new.any()
        held += [start + row for row in range(chunks.size) if new[row]]
    assert held == list(range(total))
    assert chunks.size % multiple == 0 or chunks.size == total


def test_auto_chooses_by_the_size_of_the_logits():
    def found(tokens, words, device, chunk=2048):
        return module.preference(tokens, words, chunk, device)[0]

    assert found(8192, 50_304, GPU) == "xla"
    assert found(8192, 128_256, GPU) == "xla"
    assert found(8192, 256_000, GPU) == "tiled"
    assert found(8192, 256_000, GPU, chunk=1024) == "xla"
    assert found(512, 256_000, GPU) == "xla"
    assert found(8192, 32_000, CPU) == "xla" and found(8192, 128_256, CPU) == "tiled"
    assert module.choice("tiled", 1, 1, 1, CPU) == "tiled"


def test_invalid_arguments_are_refused():
    h, w = jnp.zeros((4, 8)), jnp.zeros((6, 8))
    targets, weights = jnp.zeros(4, jnp.int32), jnp.zeros(4)
    spec = CrossEntropySpec(6)
    with pytest.raises(ValueError, match=r"w \(6, 7\).* are not \[T, D\], \[V, D\]"):
        module.check_shapes(h, w[:, :7], targets, weights)
    with pytest.raises(ValueError, match="h is float32 and w is bfloat16"):
        linear_cross_entropy(h, w.astype(jnp.bfloat16), targets, weights, spec)
    with pytest.raises(ValueError, match="'liger' is none of auto, xla"):
        linear_cross_entropy(h, w, targets, weights, spec, backend="liger")
    low = jnp.float8_e4m3fn
    with pytest.raises(ValueError, match="backend tiled cannot run: dtype float8_e4m3fn"):
        linear_cross_entropy(h.astype(low), w.astype(low), targets, weights, spec, backend="tiled")
    for name, value in (("label_smoothing", 1.0), ("z_loss", -1.0), ("chunk", 0)):
        with pytest.raises(ValueError, match=f"{name}={value}"):
            CrossEntropySpec(6, **{name: value})
