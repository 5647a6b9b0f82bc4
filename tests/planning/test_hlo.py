"""Loops, collectives, kernels and matrix products read from the text of compiled programs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from maxmeg.parallel.mesh import AXES, make_mesh
from maxmeg.planning import hlo

SIZES = dict.fromkeys(AXES, 1) | {"pipe": 2, "fsdp": 2, "tensor": 2}
BIG = dict.fromkeys(AXES, 1) | {"pipe": 16, "fsdp": 8, "tensor": 8}


def compiled(function, *arguments) -> hlo.Program:
    return hlo.parse(jax.jit(function).lower(*arguments).compile().as_text() or "")


def local(function, *shapes) -> hlo.Program:
    """`function` on eight devices, each with arrays of `shapes`."""
    mesh = make_mesh(SIZES, jax.devices()[:8])
    spec = P(AXES)
    run = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return compiled(run, *(jnp.zeros((8 * shape[0], *shape[1:])) for shape in shapes))


def found(program: hlo.Program, sizes: dict[str, int] = SIZES) -> set[tuple]:
    return {
        (row.kind, row.axes, row.instructions, row.runs, row.volume, row.asynchronous)
        for row in hlo.collectives(program, sizes)
    }


def test_flops_of_nested_loops():
    def inner(x, w):
        return jnp.tanh(x @ w), None

    def outer(x, ws):
        x, _ = lax.scan(inner, x, ws)
        return jnp.tanh(x @ jnp.ones((32, 32)) * x), None

    x, ws = jnp.ones((8, 32)), jnp.ones((3, 5, 32, 32))
    program = compiled(lambda x, ws: lax.scan(outer, x, ws)[0], x, ws)
    assert hlo.matrix_flops(program) == 3 * (5 + 1) * 2 * 8 * 32 * 32


def test_collectives_in_loops_without_a_known_end_are_marked():
    def function(x):
        def more(state):
            return state[1] < jnp.max(x)

        def body(state):
            return lax.psum(state[0], "fsdp") * 0.5, state[1] + 1

        once = lax.psum(x * x, "fsdp")
        return lax.while_loop(more, body, (once, jnp.float32(0)))[0]

    rows = hlo.collectives(local(function, (4, 8)), SIZES)
    assert sorted((row.unbounded, row.runs) for row in rows) == [(False, 1), (True, 1)]


def test_flops_of_batched_products_convolutions_and_gradients():
    a, b = jnp.ones((4, 8, 16)), jnp.ones((4, 16, 32))
    forward = 2 * 4 * 8 * 16 * 32
    assert (
        hlo.matrix_flops(compiled(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), a, b)) == forward
    )
    gradient = jax.grad(lambda ab: jnp.sum(jnp.einsum("bij,bjk->bik", *ab) ** 2))
    assert hlo.matrix_flops(compiled(gradient, (a, b))) == 3 * forward
    text = MODULE.format(
        body="  %x = f32[2,16,16,3]{3,2,1,0} parameter(0)\n"
        "  %k = f32[5,5,3,8]{3,2,1,0} parameter(1)\n"
        "  ROOT %c = f32[2,12,12,8]{3,2,1,0} convolution(%x, %k), window={size=5x5}, "
        "dim_labels=b01f_01io->b01f"
    )
    assert hlo.matrix_flops(hlo.parse(text)) == 2 * (2 * 12 * 12 * 8) * (5 * 5 * 3)


def test_a_branch_counts_once():
    def either(flag, x):
        return lax.cond(flag, lambda x: jnp.tanh(x @ x @ x), lambda x: x + 1, x)

    def loop(flags, x):
        return lax.scan(lambda x, flag: (either(flag, x), None), x, flags)[0]

    program = compiled(loop, jnp.ones(6, bool), jnp.ones((16, 16)))
    assert hlo.matrix_flops(program) == 6 * 2 * 2 * 16**3


def test_collectives_by_axes_within_and_outside_loops():
    def step(x):
        def body(x, _):
            x = lax.ppermute(jnp.sin(x), "pipe", [(0, 1)])
            whole = lax.all_gather(x, ("fsdp", "tensor"), tiled=True)
            return lax.psum_scatter(jnp.cos(whole), ("fsdp", "tensor"), tiled=True), None

        x = lax.scan(body, x, None, length=7)[0]
        return x * lax.psum(x.sum(), "tensor") + lax.psum(x, ("pipe", "tensor"))

    size = 4 * 16 * 4
    assert found(local(step, (4, 16))) == {
        ("collective-permute", ("pipe",), 1, 7, 7 * size, False),
        ("all-gather", ("fsdp", "tensor"), 1, 7, 7 * 4 * size, False),
        ("reduce-scatter", ("fsdp", "tensor"), 1, 7, 7 * size, False),
        ("all-reduce", ("tensor",), 1, 1, 4, False),
        ("all-reduce", ("pipe", "tensor"), 1, 1, size, False),
    }


def subsets(names: list[str]) -> list[tuple[str, ...]]:
    counts = range(1, len(names) + 1)
    return [axes for count in counts for axes in itertools.combinations(names, count)]


@pytest.mark.parametrize("sizes", [BIG, {"pipe": 3, "data": 2, "fsdp": 5, "tensor": 4}])
def test_every_product_of_axes_in_every_form(sizes):
    shape = tuple(sizes.values())
    ids = np.arange(np.prod(shape)).reshape(shape)
    names = [axis for axis in sizes if sizes[axis] > 1]
    for axes in subsets(names):
        last = [list(sizes).index(axis) for axis in axes]
        order = [i for i in range(len(shape)) if i not in last] + last
        groups = ids.transpose(order).reshape(-1, np.prod([sizes[axis] for axis in axes]))
        shuffled = np.random.default_rng(0).permuted(groups[::-1], axis=1)
        listed = ",".join("{" + ",".join(map(str, group)) + "}" for group in shuffled.tolist())
        dims, source = ",".join(map(str, groups.shape)), ",".join(map(str, shape))
        forms = [
            "{" + listed + "}",
            f"[{dims}]<=[{source}]T({','.join(map(str, order))})",
            f"mesh[{','.join(f'{a!r}={n}' for a, n in sizes.items())}] "
            f"{{{','.join(map(repr, axes))}}}",
        ]
        for form in forms:
            assert hlo.axes_of(form, "all-reduce", tuple(sizes.items())) == axes, form


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{}", ("pipe", "fsdp", "tensor")),
        ("mesh['a'=8] {'a':(4)2}", ("tensor",)),
        ("mesh['a'=2,'b'=4] {'a','b':(1)2}", ("pipe", "fsdp")),
        ("mesh['a'=4,'b'=2], device_ids=([4,2]<=[2,4]T(1,0)) {'b'}", ("pipe",)),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ("pipe",)),
        ("mesh[a=8], device_ids=([8]0,4,1,5,2,6,3,7) {a:(4)2}", ("pipe",)),
        ("{{0,3},{1,2},{4,7},{5,6}}", ("?",)),  # crosses two axes, but not all of both
        ("{{0,1},{2,3}}", ("?",)),  # not all devices
        ("{{0,1},{2,3},{4,5,6,7}}", ("?",)),
        ("[4,4]<=[16]", ("?",)),
        ("", ("?",)),
    ],
)
def test_replica_groups_are_parsed(groups, axes):
    assert hlo.axes_of(groups, "all-gather", tuple(SIZES.items())) == axes


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", ("pipe",)),
        ("{{0,1},{1,0},{6,7}}", ("tensor",)),
        ("{{1,2}}", ("fsdp", "tensor")),
        ("{{0,8}}", ("?",)),
    ],
)
def test_permute_pairs_are_parsed(pairs, axes):
    assert hlo.axes_of(pairs, "collective-permute", tuple(SIZES.items())) == axes


MODULE = """HloModule jit_step, is_scheduled=true

FileNames
1 "step.py"

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

%gemm (p: bf16[64,16], q: bf16[32,64]) -> bf16[16,32] {{
  %p = bf16[64,16]{{1,0}} parameter(0)
  %q = bf16[32,64]{{1,0}} parameter(1)
  ROOT %d = bf16[16,32]{{1,0}} dot(%p, %q), lhs_contracting_dims={{0}}, rhs_contracting_dims={{1}}
}}

%wrapped (p: bf16[16]) -> bf16[16] {{
  %p = bf16[16]{{0}} parameter(0)
  ROOT %a2a = bf16[16]{{0}} all-to-all(%p), replica_groups=[4,2]<=[8], dimensions={{0}}
}}

%wrapped_sync (p: bf16[16]) -> bf16[16] {{
  %p = bf16[16]{{0}} parameter(0)
  ROOT %a2a = bf16[16]{{0}} all-to-all(%p), replica_groups=[4,2]<=[8], dimensions={{0}}
}}

%condition (s: (s32[], bf16[16])) -> pred[] {{
  ROOT %less = pred[] constant(true)
}}

%body (s: (s32[], bf16[16])) -> (s32[], bf16[16]) {{
  %s = (s32[], bf16[16]{{0}}) parameter(0)
{body}
}}

ENTRY %main (x: (s32[], bf16[16])) -> (s32[], bf16[16]) {{
  %x = (s32[], bf16[16]{{0}}) parameter(0)
  ROOT %w = (s32[], /*index=1*/bf16[16]{{0:T(256)}}) while(%x), condition=%condition, body=%body, \
backend_config={{"known_trip_count":{{"n":"1"}},"known_init_step":{{"init":"0"}}}}
}}
"""
SYNC = 'backend_config={"collective_backend_config":{"is_sync":true,"backend":"DEFAULT"}}'
ASYNC = SYNC.replace("true", "false")
# As GPUs' programs write them: (line, kind, axes, bytes, whether other work goes on meanwhile).
STARTS = [
    (
        "((bf16[4,2]{1,0}, bf16[2]{0}), (bf16[8,2]{1,0}, bf16[4]{0})) all-gather-start(%p, %q), "
        f"replica_groups={{{{0,2}},{{1,3}},{{4,6}},{{5,7}}}}, dimensions={{0}}, {ASYNC}",
        ("all-gather", ("fsdp",), 2 * (16 + 4), True),
    ),
    (
        "((bf16[8]{0}), bf16[4]{0}) reduce-scatter-start(%p), channel_id=1, "
        f"replica_groups=[4,2]<=[8], to_apply=%add, {SYNC}",
        ("reduce-scatter", ("tensor",), 8, False),
    ),
    (
        "(f32[4]{0}, f32[]) all-reduce-start(%p, %q), replica_groups=mesh['axis_0'=2,'axis_1'=4] "
        f"{{'axis_0'}}, use_global_device_ids=true, to_apply=%add, {ASYNC}",
        ("all-reduce", ("pipe",), 20, True),
    ),
    (
        "(bf16[4]{0}, bf16[4]{0}, u32[], u32[]) collective-permute-start(%p), "
        "source_target_pairs={{0,4},{1,5},{2,6},{3,7}}",
        ("collective-permute", ("pipe",), 8, True),
    ),
    (
        "((bf16[16]{0}), bf16[16]{0}, s32[]) async-start(%p), calls=%wrapped",
        ("all-to-all", ("tensor",), 32, True),
    ),
    (
        f"((bf16[16]{{0}}), bf16[16]{{0}}, s32[]) async-start(%p), calls=%wrapped_sync, {SYNC}",
        ("all-to-all", ("tensor",), 32, False),
    ),
    (
        "f8e4m3fn[6]{0:S(1)} all-gather(%p), replica_groups={}, dimensions={0}",
        ("all-gather", ("pipe", "fsdp", "tensor"), 6, False),
    ),
    ("s4[5]{0} collective-broadcast(%p), replica_groups=[1,8]<=[8]", None),
]


@pytest.mark.parametrize(("line", "expected"), STARTS)
def test_forms_of_gpu_collectives(line, expected):
    done = '  %done = bf16[8]{0} all-gather-done(%x), metadata={op_name="all-reduce("}'
    text = MODULE.replace('"n":"1"', '"n":"6"').format(body=f"  %x = {line}\n{done}")
    kind, axes, size, overlaps = expected or ("collective-broadcast", AXES[:1], 3, False)
    axes = axes if expected else ("pipe", "fsdp", "tensor")
    assert found(hlo.parse(text)) == {(kind, axes, 1, 6, 6 * size, overlaps)}


NUMBERS = '"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions"'
CUBLAS = (
    "  %l = bf16[16,64]{1,0} parameter(1)\n"
    "  %c = (bf16[16,32]{1,0}, s8[4194304]{0}) custom-call(%l, %r), "
    'custom_call_target="__cublas$lt$matmul", '
    f'backend_config={{"gemm_backend_config":{{{NUMBERS}:["0"]}}}}'
)
SCORES = (
    '"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["1", "16", "512", "512"]}'
)
ATTENTION = (
    "  %a = (bf16[1,16,512,128]{3,1,2,0}, f32[1,16,512]{2,1,0}, u8[0]{0}) custom-call(%q, %k, %v), "
    'custom_call_target="__cudnn$fmhaSoftmax", '
    f'backend_config={{"cudnn_fmha_backend_config": {{{SCORES}, "mask_type": "MASK"}}}}'
)
CAUSAL = ATTENTION.replace("MASK", "CAUSAL")
FUSION = "  %f = bf16[16,32]{1,0} fusion(%p, %q), kind=kCustom, calls=%gemm, backend_config={}"
PRODUCT, SQUARE = 2 * 16 * 32 * 64, 2 * 16 * 512 * 512 * 128


@pytest.mark.parametrize(
    ("body", "flops", "kernels"),
    [
        (CUBLAS, PRODUCT, {"__cublas$lt$matmul": 6}),
        (FUSION, PRODUCT, {}),
        ('  %e = f32[4]{0} custom-call(), custom_call_target="AllocateBuffer"', 0, {}),
        (ATTENTION, 2 * SQUARE, {"__cudnn$fmhaSoftmax": 6}),
        (CAUSAL, SQUARE, {"__cudnn$fmhaSoftmax": 6}),
        (CAUSAL.replace("max", "maxBackward"), 2.5 * SQUARE, {"__cudnn$fmhaSoftmaxBackward": 6}),
    ],
)
def test_matrix_products_of_gpu_kernels(body, flops, kernels):
    program = hlo.parse(MODULE.replace('"n":"1"', '"n":"6"').format(body=body))
    assert hlo.matrix_flops(program) == 6 * flops
    assert hlo.kernels(program) == kernels


def test_uncalled_computations_are_not_counted():
    program = hlo.parse(MODULE.format(body=""))
    assert hlo.matrix_flops(program) == 0
    assert not hlo.collectives(program, SIZES) and program.runs["gemm"] == 0


def test_text_of_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.parse("module @jit_step {\n}\n")


BESIDE = """  %x = bf16[64,16]{1,0} parameter(0)
  %y = bf16[32,64]{1,0} parameter(1)
  %before = bf16[16,32]{1,0} fusion(%x, %y), kind=kCustom, calls=%gemm
  %s = ((bf16[64,16]{1,0}), bf16[64,16]{1,0}) all-to-all-start(%x), replica_groups={{0,1}}
  %beside = bf16[16,32]{1,0} fusion(%x, %y), kind=kCustom, calls=%gemm
  %small = ((bf16[2]{0}), bf16[2]{0}) all-to-all-start(%v), replica_groups={{0,1}}
  %d = bf16[64,16]{1,0} all-to-all-done(%s)
  %e = bf16[2]{0} all-to-all-done(%small)
  %t = ((bf16[64,16]{1,0}), bf16[64,16]{1,0}) all-to-all-start(%d), replica_groups={{0,1}}
  ROOT %f = bf16[64,16]{1,0} all-to-all-done(%t)
"""


def test_products_between_start_and_end_of_a_collective():
    program = hlo.parse(MODULE.format(body=BESIDE))
    assert hlo.flops_beside(program) == {"s": 2 * 64 * 16 * 32, "small": 0, "t": 0}
    (row,) = hlo.collectives(program, SIZES)
    assert (row.runs, row.exposed, row.asynchronous) == (3, 2, True)
