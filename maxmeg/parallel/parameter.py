"""What is known of a parameter beside its array: one record, declared where the parameter is.

Sharding, gradients, weight decay, learning rates and optimizer states derive from it.
"""

import dataclasses
import enum

import jax
import jax.numpy as jnp
from flax import nnx

STACKING_AXES = ("layers", "expert")  # dimensions along which whole parameters are stacked


class Side(enum.Enum):
    """A factor is an array [..., m, m] (left) or [..., n, n] (right) of an optimizer's state for
    parameters [..., m, n], with the record of the parameter."""

    left = "left"
    right = "right"


@dataclasses.dataclass(frozen=True)
class Cut:
    """Dimension `dim` of a parameter's master and optimizer state is also sharded over `axes`."""

    dim: int
    axes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ParameterInfo:
    """The metadata `info` of a variable.

    axes: logical name (rules.RULES) or None of each dimension; stacking over layers adds a leading
    dimension. sizes: global size of each of these dimensions, for matrices that fsdp shards along
    the first one that it can. head_parts: widths of the parts of each head's output, which are
    matrices by themselves (optim/muon.py). exact: never rounded to the compute dtype. state: the
    train step sets the variable from auxiliary values of its layer; it has no gradient. frozen: in
    the frozen base of adapters. num_kv_heads: key/value heads along the dimension "kv_heads", which
    is never sharded inside a head. reads_width: whether the number of its inputs is a width, by
    which muP scales, and not a rank. gradient_dtype: in which its gradient is summed over devices.
    fsdp_axes: mesh axes over which fsdp shards a matrix.

    Of the weights of a train step: is_gathered: over fsdp; cut: how ZeRO-1 shards a weight of the
    stack; fused_widths: local output widths of the projections in a fused weight.
    Of optimizer states: block_size: elements along the last dimension with one scale, of an array
    of scales; side, matrix: of a factor, with the shape (m, n) of the matrix.
    """

    axes: tuple[str | None, ...]
    sizes: tuple[int, ...] = ()
    head_parts: tuple[int, ...] = ()
    exact: bool = False
    state: bool = False
    frozen: bool = False
    num_kv_heads: int = 0
    reads_width: bool = True
    gradient_dtype: jnp.dtype = jnp.dtype(jnp.float32)
    fsdp_axes: tuple[str, ...] = ("fsdp",)
    is_gathered: bool = False
    cut: Cut | None = None
    fused_widths: tuple[int, ...] = ()
    block_size: int = 0
    side: Side | None = None
    matrix: tuple[int, ...] = ()

    @property
    def is_trained(self) -> bool:
        """Whether the optimizer updates the variable."""
        return not (self.frozen or self.state)

    @property
    def is_exact(self) -> bool:
        """Whether the variable is never rounded to the compute dtype."""
        return self.state or self.exact

    @property
    def has_matrices(self) -> bool:
        """Whether the variable is a matrix or a stack of matrices, not of vectors or scalars."""
        return sum(axis not in STACKING_AXES for axis in self.axes) >= 2


def parameter(value, *axes: str | None, **fields) -> nnx.Param:
    """A parameter with its ParameterInfo."""
    return nnx.Param(value, info=ParameterInfo(axes, **fields))


def state(value, *axes: str | None) -> nnx.Variable:
    """A variable that the train step sets (`ParameterInfo.state`)."""
    return nnx.Variable(value, info=ParameterInfo(axes, state=True))


def is_variable(node) -> bool:
    return isinstance(node, nnx.Variable)


def info(variable: nnx.Variable) -> ParameterInfo:
    return variable.get_metadata("info")


def replaced(variable: nnx.Variable, value, **fields) -> nnx.Variable:
    """A variable of `value` with other fields of its ParameterInfo."""
    return variable.replace(value, info=dataclasses.replace(info(variable), **fields))


def annotate(tree, **fields) -> None:
    """Change fields of the ParameterInfo of every variable in `tree`."""
    for variable in jax.tree.leaves(tree, is_leaf=is_variable):
        variable.set_metadata(info=dataclasses.replace(info(variable), **fields))


def num_stacked(variable: nnx.Variable) -> int:
    """Number of leading dimensions over which layers are stacked."""
    return variable.ndim - len(info(variable).axes)


def logical_axes(variable: nnx.Variable) -> tuple[str | None, ...]:
    """Logical names of the variable's dimensions, with a leading "layers" if it is stacked."""
    return ("layers",) * num_stacked(variable) + info(variable).axes
