"""Backward of a layer in two lanes: gradients of its input now, of its weights later.

The backward program is traced, nested calls are dissolved, and its equations are divided: those
that the input's gradient needs run in the first lane, the rest in the second. What the second
needs of the first is stored or, where that is cheap, made again: a minimum cut chooses the least
bytes to store, as AOTAutograd's partitioner does between forward and backward.
"""

import math

import jax
import numpy as np
from jax.extend.core import Literal
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from maxmeg.pipeline.residuals import Arrays, UnitVjp

NESTED = ("jaxpr", "call_jaxpr")
DISSOLVED = ("jit", "pjit", "closed_call", "remat2", "checkpoint", "custom_jvp_call")
# Whatever costs no more than to read and to write its operands may be made again.
# fmt: off
CHEAP = frozenset((
    "abs", "add", "add_any", "and", "axis_index", "broadcast_in_dim", "ceil", "clamp",
    "concatenate", "convert_element_type", "copy", "cos", "div", "dynamic_slice", "eq", "erf",
    "erf_inv", "erfc", "exp", "exp2", "expand_dims", "expm1", "floor", "ge", "gt", "integer_pow",
    "iota", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "name", "ne",
    "neg", "not", "one_minus_square", "optimization_barrier", "or", "pad", "pow", "random_bits",
    "random_fold_in", "random_unwrap", "random_wrap", "reduce_precision", "rem", "reshape",
    "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign",
    "sin", "slice", "split", "sqrt", "square", "squeeze", "stop_gradient", "sub", "tanh",
    "threefry2x32", "transpose", "xor",
))
# fmt: on
GRAIN = 1024  # bytes: unit of the cut's capacities, which are 32-bit


class SplitVjp(UnitVjp):
    """UnitVjp whose backward comes in two parts; `deferred` is what the first hands the second."""

    def __init__(self, function, params, x, given):
        super().__init__(function, params, x, given)
        shapes = (self.residuals, params, given, self.output_shape(params, x, given))
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), shapes)

        def whole(*arguments):
            traced = jax.make_jaxpr(self.backward)(*arguments)
            return evaluate(traced.jaxpr, traced.consts, jax.tree.leaves(arguments), dissolve=True)

        traced = jax.make_jaxpr(whole)(*shapes)
        self.jaxpr, self.consts = traced.jaxpr, traced.consts
        self.first, self.second, self.stored = divide(self.jaxpr)
        self.deferred = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.stored]
        self.params_tree = jax.tree.structure(params)

    def output_shape(self, params, x, given):
        return jax.eval_shape(self.function, params, x, given)[0]

    def backward_input(self, residuals: Arrays, params, given, dy) -> tuple[jax.Array, Arrays]:
        """(gradient of x, what backward_weight needs beside the same residuals)."""
        values = jax.tree.leaves((residuals, params, given, dy))
        known = self.bound(values)
        run(self.first, known)
        return value(self.jaxpr.outvars[-1], known), [known[v] for v in self.stored]

    def backward_weight(self, residuals: Arrays, params, given, deferred: Arrays):
        """Gradients of params."""
        values = jax.tree.leaves((residuals, params, given))
        known = self.bound(values) | dict(zip(self.stored, deferred, strict=True))
        run(self.second, known)
        gradients = [value(v, known) for v in self.jaxpr.outvars[:-1]]
        return jax.tree.unflatten(self.params_tree, gradients)

    def bound(self, values: list) -> dict:
        known = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        return known | dict(zip(self.jaxpr.invars, values, strict=False))


def value(variable, known: dict):
    return variable.val if isinstance(variable, Literal) else known[variable]


def run(equations, known: dict) -> None:
    """Evaluate `equations` in order, adding to `known` variables."""
    for equation in equations:
        inputs = [value(v, known) for v in equation.invars]
        settings = equation.primitive.get_bind_params(equation.params)
        outputs = equation.primitive.bind(*inputs, **settings)
        if not equation.primitive.multiple_results:
            outputs = [outputs]
        known |= dict(zip(equation.outvars, outputs, strict=True))


def evaluate(jaxpr, consts, values, dissolve: bool) -> list:
    """The outputs of a jaxpr; dissolve: nested calls are evaluated in place."""
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        inner = next((equation.params[k] for k in NESTED if k in equation.params), None)
        if not dissolve or inner is None or name not in DISSOLVED:
            run([equation], known)
            continue
        closed = hasattr(inner, "consts")
        inputs = [value(v, known) for v in equation.invars]
        nested = inner.jaxpr if closed else inner
        outputs = evaluate(nested, inner.consts if closed else (), inputs, dissolve)
        known |= dict(zip(equation.outvars, outputs, strict=True))
    return [value(v, known) for v in jaxpr.outvars]


def variables(atoms) -> list:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def divide(jaxpr) -> tuple[list, list, list]:
    """(equations of the input's gradient, of the weights' gradients, variables stored between).

    The last output is the input's gradient; the last input, its cotangent, is the first lane's.
    """
    *weights, dx = jaxpr.outvars
    first = depended_on(jaxpr.eqns, [dx])
    rest = [e for e in depended_on(jaxpr.eqns, weights) if e not in first]
    makers = {v: e for e in first for v in e.outvars} | {jaxpr.invars[-1]: None}
    wanted = {v for e in rest for v in variables(e.invars)} | set(variables(weights))
    wanted &= makers.keys()
    stored = least_stored(wanted, makers)
    twice, pending = [], list(wanted - stored)
    while pending:
        maker = makers[pending.pop()]
        assert maker is not None  # the cotangent, if wanted, is stored
        if maker not in twice:
            twice.append(maker)
            pending += [v for v in variables(maker.invars) if v in makers and v not in stored]
    second = [e for e in jaxpr.eqns if e in rest or e in twice]
    return first, second, [v for v in makers if v in stored]


def depended_on(equations: list, outputs: list) -> list:
    """The equations that `outputs` depend on, in order."""
    needed, found = set(variables(outputs)), []
    for equation in reversed(equations):
        if not needed.isdisjoint(equation.outvars):
            found.append(equation)
            needed |= set(variables(equation.invars))
    return found[::-1]


def least_stored(wanted: set, makers: dict) -> set:
    """The fewest bytes of variables from which all `wanted` can be made by cheap equations.

    makers: the first lane's variables and their equations (None: its own input). A minimum cut:
    each variable is an edge of its size; what cannot be made again hangs on the source, what is
    wanted on the sink.
    """

    def inputs(variable) -> list:
        maker = makers[variable]
        if maker is None or maker.primitive.name not in CHEAP:
            return [None]
        return [v for v in variables(maker.invars) if v in makers]

    number, pending = {}, list(wanted)
    while pending:
        variable = pending.pop()
        if variable is not None and variable not in number:
            number[variable] = len(number)
            pending += inputs(variable)
    endless = np.iinfo(np.int32).max // 4
    source, sink = 2 * len(number), 2 * len(number) + 1
    edges = {}
    for variable, i in number.items():
        size = math.prod(variable.aval.shape) * variable.aval.dtype.itemsize
        edges[2 * i, 2 * i + 1] = min(size // GRAIN + 1, endless)
        for v in inputs(variable):
            edges[source if v is None else 2 * number[v] + 1, 2 * i] = endless
        if variable in wanted:
            edges[2 * i + 1, sink] = endless
    if not edges:
        return set()
    ends = np.array(list(edges)).T
    graph = csr_matrix((np.array(list(edges.values()), np.int32), ends), (sink + 1, sink + 1))
    left = graph - maximum_flow(graph, source, sink).flow
    left.data = np.maximum(left.data, 0)
    left.eliminate_zeros()
    near = set(breadth_first_order(left, source, return_predecessors=False).tolist())
    return {v for v, i in number.items() if 2 * i in near and 2 * i + 1 not in near}
