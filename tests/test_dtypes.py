"""bfloat16 on meshes: the dtype of every collective, of every sum and of what loops carry."""

import collections
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from layouts import (
    EVERYTHING,
    controls,
    mesh_of,
    tiny,
    tiny_abstract,
    tiny_batch,
)

from maxmeg.config.model import DType
from maxmeg.config.parallel import GradientDType, Schedule
from maxmeg.parallel.rules import reductions
from maxmeg.step import make_train_step
from maxmeg.weights.fused import Fuse

MOE = {"moe.num_experts": 4, "moe.ffn_size": 48, "moe.shared_ffn_size": 32, "moe.shared_gate": True}
MLA = {"layers": "*(mla,moe)", "mla.kv_rank": 16, "mla.query_rank": 12, "mla.rotary_size": 4}
STEPS = {
    "experts": (
        EVERYTHING
        | MOE
        | {"layers": "*(local,moe conv,mlp)", "num_layers": 6, "parallel_norms": False}
        | {"conv.bias": True, "moe.logit_bias": True, "moe.aux_loss": 0.1, "tied": False},
        {"fsdp": 2, "expert": 2, "tensor": 2},
    ),
    "pipeline": (
        MOE
        | MLA
        | {"num_layers": 4, "mlp.bias": True}
        | {"moe.capacity_factor": 1.5, "moe.pad_to_capacity": True},
        {"pipe": 2, "data": 2, "fsdp": 1, "tensor": 2, "schedule": Schedule.zero_bubble},
    ),
    "bfloat16 gradients": (
        {"num_layers": 3},
        {"data": 2, "fsdp": 2, "tensor": 2, "gradient_dtype": GradientDType.bfloat16},
    ),
}
GRADIENTS = "gradients of a whole step"
COMMON = {
    "all_gather tensor bfloat16": "the sequence of what mixers read, and gradients",
    "reduce_scatter tensor bfloat16": "what mixers write, and gradients, as in Megatron-LM",
    "dot_general bfloat16 x bfloat16 -> bfloat16": "tensor cores sum in float32 and round once",
    "dot_general bfloat16 x bfloat16 -> float32": "scores and logits, gradients of the head",
    "dot_general float32 x bfloat16 -> float32": "gradients of scores",
    "reduce_sum float32 -> float32": "norms, losses, the gradient norm, gradients of biases",
    "scatter-add float32 x float32 -> float32": "gradients of embeddings",
}
TABLES = {
    "experts": COMMON
    | {
        "dot_general float32 x float32 -> float32": "router",
        "all_gather fsdp bfloat16": "weights (ZeRO-3)",
        "reduce_scatter fsdp float32": "gradients of those, of one microbatch",
        "all_to_all expert bfloat16": "tokens to experts and back, and gradients",
        "all_to_all expert float32": "their routing weights and numbers of experts",
        "all_gather expert int32": "how many tokens devices send each other",
        "pmax fsdp+expert+tensor int32": "rounds of the exchange",
        "pmax tensor float32": "largest logit",
        "psum tensor float32": "terms of the cross entropy; statistics of the norms of all heads",
        "all_gather expert bfloat16": "weights (ZeRO-1)",
        "reduce_scatter expert float32": GRADIENTS,
        "psum fsdp float32": GRADIENTS,
        "psum fsdp+tensor float32": GRADIENTS,
        "all_gather tensor float32": "routing weights of devices that share experts",
        "reduce_scatter tensor float32": "gradients of those",
        "psum fsdp+expert float32": "number of tokens",
        "psum fsdp+expert+tensor float32": "tokens of experts, for their loss",
        "psum tensor+fsdp+expert float32": "losses, tokens of experts",
        "ragged_dot_general bfloat16 x bfloat16 -> float32": "experts",
    },
    "bfloat16 gradients": COMMON
    | {
        "all_gather fsdp bfloat16": "weights (ZeRO-3)",
        "reduce_scatter fsdp bfloat16": "gradients of those, of one microbatch",
        "all_gather data bfloat16": "weights (ZeRO-1)",
        "reduce_scatter data bfloat16": GRADIENTS,
        "psum fsdp+tensor bfloat16": GRADIENTS,
        "pmax tensor float32": "largest logit",
        "psum tensor float32": "terms of the cross entropy",
        "psum data+fsdp float32": "number of tokens",
        "psum tensor+data+fsdp float32": "losses",
    },
    "pipeline": COMMON
    | {
        "dot_general float32 x float32 -> float32": "router",
        "all_gather data bfloat16": "weights (ZeRO-1)",
        "all_gather pipe+data bfloat16": "weights of all stages (ZeRO-1)",
        "reduce_scatter data float32": GRADIENTS,
        "reduce_scatter pipe+data float32": GRADIENTS,
        "psum data float32": "number of tokens",
        "all_gather tensor int32": "experts of a sequence's tokens",
        "all_gather tensor float32": "their routing weights",
        "reduce_scatter tensor float32": "gradients of those",
        "psum pipe+tensor+data float32": "losses and tokens of experts",
        "psum tensor float32": GRADIENTS,
        "psum pipe+tensor float32": GRADIENTS + "; terms of the cross entropy",
        "pmax pipe+tensor float32": "largest logit",
        "ppermute pipe bfloat16": "activations to the next stage, gradients to the one before",
        "psum pipe bfloat16": "what one stage alone has; the gradient of the head's input",
    },
}
SUMS = ("dot_general", "ragged_dot_general", "reduce_sum", "cumsum", "scatter-add")


def equations(jaxpr) -> Iterator:
    """All equations of a program, those of its loops and calls too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves([*equation.params.values()]):  # a closed one has its own jaxpr
            if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
                yield from equations(inner)


def carry_of(params: dict) -> tuple[int, int]:
    """(number of constants before a scan's carry, number of arrays in the carry)."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # jax 0.12
    return len(consts), len(carry)


def program(step: str) -> tuple[list, set, set, collections.Counter]:
    """(equations of the train step in bfloat16, shapes of the parameters that a device computes
    with, of its stack's, numbers of the latter).

    The equations are JAX's, before compilation: XLA's CPU backend replaces bfloat16 by float32.
    """
    fields, parallel = STEPS[step]
    config = tiny({**fields, "dtype": DType.bfloat16}, {"micro_batch_size": 2}, **parallel)
    mesh = mesh_of(config)
    optimizer, abstract = tiny_abstract(config, mesh)
    train_step = make_train_step(config, mesh, optimizer, abstract)
    traced = train_step.trace(abstract, tiny_batch(config, mesh), controls(mesh))
    places = reductions(abstract.model, mesh, config.parallel.zero1)

    def local(array, place):
        shape = list(array.sharding.shard_shape(array.shape))
        if place.cut is not None:  # ZeRO-1 cuts the master alone
            shape[place.cut.dim] *= math.prod(mesh.shape[axis] for axis in place.cut.axes)
        return jax.ShapeDtypeStruct(shape, array.dtype)

    model = jax.tree.map(local, abstract.model, places)
    model = jax.eval_shape(lambda model: Fuse(mesh, None).enter(model), model)
    arrays = jax.tree_util.tree_leaves_with_path(model)
    shapes = {array.shape for _, array in arrays}
    stacked = {array.shape for path, array in arrays if path[0].name == "stack"}
    gathered = collections.Counter(a.shape for path, a in arrays if path[0].name == "stack")
    return list(equations(traced.jaxpr.jaxpr)), shapes, stacked, gathered


def check_dtypes(found: list, table: dict) -> None:
    """The table has the dtype of every collective and sum, and no other."""
    seen = set()
    for equation in found:
        params, name = equation.params, equation.primitive.name
        arrays = [array.aval for array in equation.invars]
        axes = params.get("axes") or params.get("axis_name") or ()
        axes = (axes,) if isinstance(axes, str) else axes
        if name != "axis_index" and axes and isinstance(axes[0], str):
            seen |= {f"{name} {'+'.join(axes)} {array.dtype}" for array in arrays}
        elif name in SUMS and jnp.issubdtype(arrays[0].dtype, jnp.floating):
            result = equation.outvars[0].aval
            if name != "reduce_sum" or arrays[0].size > result.size:  # else nothing is added
                operands = [str(a.dtype) for a in arrays if jnp.issubdtype(a.dtype, jnp.floating)]
                seen.add(f"{name} {' x '.join(operands)} -> {result.dtype}")
    assert seen == table.keys()


def check_loops(found: list, shapes: set, stacked: set, gathered: collections.Counter) -> None:
    """Loops over microbatches carry gradients in float32. What waits for its sum over fsdp, a
    layer's as it came, is no sum; nor are the weights that ZeRO-1 gathers, one array for each.
    Rounds of an exchange add to the first round's gradients of a layer, in their dtype."""
    carried = collections.defaultdict(set)
    for equation in found:
        if equation.primitive.name != "scan":
            continue
        consts, carry = carry_of(equation.params)
        arrays = equation.invars[consts:][:carry]
        for array in arrays:
            carried[str(array.aval.dtype)].add(array.aval.shape)
        rounded = [a.aval.shape for a in arrays if a.aval.dtype == jnp.bfloat16]
        assert collections.Counter(shape for shape in rounded if shape in stacked) <= gathered
    assert carried["float32"] >= shapes


@pytest.mark.parametrize("step", STEPS)
def test_every_collective_and_sum_and_what_loops_carry(step):
    found, *shapes = program(step)
    check_dtypes(found, TABLES[step])
    check_loops(found, *shapes)
