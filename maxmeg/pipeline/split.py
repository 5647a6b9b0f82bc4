"""Backward of a layer in two lanes: the gradient of its input now, of its weights later.

The backward jaxpr is traced and nested calls are inlined. Equations on which the input's gradient
depends run in the first lane, the others in the second. Values of the first lane that the second
needs are stored or, if cheap, recomputed: a minimum cut chooses the fewest bytes to store, as
AOTAutograd's partitioner does between forward and backward.
"""

import math

import jax
import numpy as np
from jax.extend.core import Literal
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from maxmeg.pipeline.residuals import Arrays, UnitVjp

NESTED = ("jaxpr", "call_jaxpr")
INLINED = ("jit", "pjit", "closed_call", "remat2", "checkpoint", "custom_jvp_call")
# Primitives that cost no more than reading and writing their operands: recompute them.
# fmt: off
CHEAP = frozenset((
    "abs", "add", "add_any", "and", "axis_index", "broadcast_in_dim", "ceil", "clamp",
    "concatenate", "convert_element_type", "copy", "cos", "device_put", "div", "dynamic_slice",
    "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expand_dims", "expm1", "floor", "ge", "gt",
    "integer_pow",
    "iota", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "name", "ne",
    "neg", "not", "one_minus_square", "optimization_barrier", "or", "pad", "pow", "random_bits",
    "random_fold_in", "random_unwrap", "random_wrap", "reduce_precision", "rem", "reshape",
    "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign",
    "sin", "slice", "split", "sqrt", "square", "squeeze", "stop_gradient", "sub", "tanh",
    "threefry2x32", "transpose", "xor",
))
# fmt: on
GRAIN = 1024  # bytes per unit of the cut's capacities, which are 32-bit


class SplitVjp(UnitVjp):
    """UnitVjp with a backward in two parts. deferred: shapes of what is stored between them."""

    def __init__(self, function, params, x, constants):
        super().__init__(function, params, x, constants)
        shapes = (self.residuals, params, constants, self.output_shape(params, x, constants))
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), shapes)

        def backward(*arguments):
            traced = jax.make_jaxpr(self.backward)(*arguments)
            return inlined(traced.jaxpr, traced.consts, jax.tree.leaves(arguments))

        traced = jax.make_jaxpr(backward)(*shapes)
        self.jaxpr, self.consts = traced.jaxpr, traced.consts
        self.x_tree = jax.tree.structure(x)
        self.first, self.second, self.stored = divide(self.jaxpr, self.x_tree.num_leaves)
        self.deferred = [v.aval for v in self.stored]
        self.params_tree = jax.tree.structure(params)

    def output_shape(self, params, x, constants):
        return jax.eval_shape(self.function, params, x, constants)[0]

    def backward_input(self, residuals: Arrays, params, constants, dy) -> tuple:
        """(gradient of x, values for backward_weight)."""
        values = jax.tree.leaves((residuals, params, constants, dy))
        env = self.bound(values)
        run(self.first, env)
        dx = [value(v, env) for v in self.jaxpr.outvars[-self.x_tree.num_leaves :]]
        return jax.tree.unflatten(self.x_tree, dx), [env[v] for v in self.stored]

    def backward_weight(self, residuals: Arrays, params, constants, deferred: Arrays):
        """Gradients of params."""
        values = jax.tree.leaves((residuals, params, constants))
        env = self.bound(values) | dict(zip(self.stored, deferred, strict=True))
        run(self.second, env)
        gradients = [value(v, env) for v in self.jaxpr.outvars[: -self.x_tree.num_leaves]]
        return jax.tree.unflatten(self.params_tree, gradients)

    def bound(self, values: list) -> dict:
        env = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        return env | dict(zip(self.jaxpr.invars, values, strict=False))


def value(variable, env: dict):
    return variable.val if isinstance(variable, Literal) else env[variable]


def run(equations, env: dict) -> None:
    """Evaluate `equations` in order, adding their results to `env`."""
    for equation in equations:
        inputs = [value(v, env) for v in equation.invars]
        settings = equation.primitive.get_bind_params(equation.params)
        outputs = equation.primitive.bind(*inputs, **settings)
        if not equation.primitive.multiple_results:
            outputs = [outputs]
        env |= dict(zip(equation.outvars, outputs, strict=True))


def inlined(jaxpr, consts, values) -> list:
    """Evaluate a jaxpr with its nested calls inlined. Returns its outputs."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))
    for equation in jaxpr.eqns:
        inner = next((equation.params[k] for k in NESTED if k in equation.params), None)
        if inner is None or equation.primitive.name not in INLINED:
            run([equation], env)
            continue
        closed = hasattr(inner, "consts")
        inputs = [value(v, env) for v in equation.invars]
        nested = inner.jaxpr if closed else inner
        outputs = inlined(nested, inner.consts if closed else (), inputs)
        env |= dict(zip(equation.outvars, outputs, strict=True))
    return [value(v, env) for v in jaxpr.outvars]


def variables(atoms) -> list:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def divide(jaxpr, count: int = 1) -> tuple[list, list, list]:
    """(equations of the first lane, equations of the second, variables stored between).

    The last `count` outputs of the jaxpr are the gradients of the input's arrays. Its last `count`
    inputs are the cotangents, which only the first lane has.
    """
    weights, dx = jaxpr.outvars[:-count], jaxpr.outvars[-count:]
    first = depended_on(jaxpr.eqns, dx)
    rest = [e for e in depended_on(jaxpr.eqns, weights) if e not in first]
    makers = {v: e for e in first for v in e.outvars} | dict.fromkeys(jaxpr.invars[-count:])
    targets = {v for e in rest for v in variables(e.invars)} | set(variables(weights))
    targets &= makers.keys()
    stored = least_stored(targets, makers)
    repeated, pending = [], list(targets - stored)
    while pending:
        maker = makers[pending.pop()]
        assert maker is not None  # cotangents among the targets are stored
        if maker not in repeated:
            repeated.append(maker)
            pending += [v for v in variables(maker.invars) if v in makers and v not in stored]
    second = [e for e in jaxpr.eqns if e in rest or e in repeated]
    return first, second, [v for v in makers if v in stored]


def depended_on(equations: list, outputs: list) -> list:
    """The equations that `outputs` depend on, in order."""
    pending, selected = set(variables(outputs)), []
    for equation in reversed(equations):
        if not pending.isdisjoint(equation.outvars):
            selected.append(equation)
            pending |= set(variables(equation.invars))
    return selected[::-1]


def least_stored(targets: set, makers: dict) -> set:
    """The variables of fewest bytes from which cheap equations compute all `targets`.

    makers: the first lane's variables with their equations (None: its input). A minimum cut: each
    variable is an edge with its size as capacity; the source leads to the variables that must not
    be recomputed, the targets lead to the sink.
    """

    def inputs(variable) -> list:
        maker = makers[variable]
        if maker is None or maker.primitive.name not in CHEAP:
            return [None]
        return [v for v in variables(maker.invars) if v in makers]

    number, pending = {}, list(targets)
    while pending:
        variable = pending.pop()
        if variable is not None and variable not in number:
            number[variable] = len(number)
            pending += inputs(variable)
    unlimited = np.iinfo(np.int32).max // 4
    source, sink = 2 * len(number), 2 * len(number) + 1
    edges = {}
    for variable, i in number.items():
        size = math.prod(variable.aval.shape) * variable.aval.dtype.itemsize
        edges[2 * i, 2 * i + 1] = min(size // GRAIN + 1, unlimited)
        for v in inputs(variable):
            edges[source if v is None else 2 * number[v] + 1, 2 * i] = unlimited
        if variable in targets:
            edges[2 * i + 1, sink] = unlimited
    if not edges:
        return set()
    ends = np.array(list(edges)).T
    graph = csr_matrix((np.array(list(edges.values()), np.int32), ends), (sink + 1, sink + 1))
    left = graph - maximum_flow(graph, source, sink).flow
    left.data = np.maximum(left.data, 0)
    left.eliminate_zeros()
    reachable = set(breadth_first_order(left, source, return_predecessors=False).tolist())
    return {v for v, i in number.items() if 2 * i in reachable and 2 * i + 1 not in reachable}
