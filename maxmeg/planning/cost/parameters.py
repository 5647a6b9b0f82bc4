"""The arrays of a model and their numbers, from the real model by `jax.eval_shape`.

`python -m maxmeg.planning.cost.parameters > maxmeg/config/sizes/counts.json` counts those of the
named architectures, for `maxmeg models`.
"""

import dataclasses
import functools
import json
import math

import jax
from flax import nnx

from maxmeg.config.architectures import ARCHITECTURES, architecture
from maxmeg.config.model import ModelConfig
from maxmeg.config.schema import Config, LoraConfig
from maxmeg.config.setting import walk, with_fields
from maxmeg.models.lm import language_model
from maxmeg.ops.quantized import Recipe
from maxmeg.parallel.parameter import info, is_variable, logical_axes
from maxmeg.weights.fused import fused_groups
from maxmeg.weights.quantized import quantized_matrices

NORMS = {"norm", "norms", "post_norm", "final_norm", "query_norm", "kv_norm"}  # modules
MIXERS = {"mla": "attention"}
MOE_PARTS = {"experts": "experts", "shared": "shared expert", "shared_gate": "shared expert"}


@dataclasses.dataclass(frozen=True, eq=False)
class Parameter:
    """An array of the model. group: its group of the layer stack; None: outside of the stack.

    kind: its mixer (attention, mlp, ...), or its part of a mixture of experts (experts, router,
    shared expert), or norm, embedding, positions, output. projections: number of the group of
    projections that it belongs to (parallel.fused); None: of no group. quantizable: whether it is
    a matrix that train.quantization rounds.
    """

    path: tuple[str, ...]
    kind: str
    group: int | None
    variable: nnx.Variable
    projections: int | None = None
    quantizable: bool = False

    @property
    def axes(self) -> tuple[str | None, ...]:
        return logical_axes(self.variable)

    @property
    def sublayer(self) -> int | None:
        """Its sublayer in the unit; None outside of the stack."""
        return None if self.group is None else int(self.path[self.path.index("sublayers") + 1])

    def is_quantized(self, recipe: Recipe | None) -> bool:
        """Whether a step with this recipe rounds it."""
        if recipe is None or not self.quantizable:
            return False
        sizes = info(self.variable).sizes[-2:]
        return not any(size % (recipe.block or 1) for size in sizes)


def architecture_key(model: ModelConfig) -> frozenset:
    """Fields of `model` as a hashable cache key, the same for all recompute modes."""
    same = dataclasses.replace(model, recompute="minimal")
    return frozenset((path, value) for path, value, _ in walk(same))


def parameters(model: ModelConfig, lora: LoraConfig | None = None) -> tuple[Parameter, ...]:
    """Every array of the model and its adapters, with the vocabulary padded for one device."""
    adapters = frozenset(vars(lora or LoraConfig()).items())
    return _parameters(architecture_key(model), adapters)


@functools.lru_cache(maxsize=64)
def _parameters(key: frozenset, adapters: frozenset) -> tuple[Parameter, ...]:
    config = Config(model=with_fields(ModelConfig(), dict(key)), lora=LoraConfig(**dict(adapters)))
    abstract = jax.eval_shape(lambda: language_model(jax.random.key(0), config))
    groups = {id(one): n for n, group in enumerate(fused_groups(abstract)) for one in group}
    quantizable = {
        id(getattr(module, name)) for module, name in quantized_matrices(abstract, Recipe())
    }
    arrays = []
    for path, variable in jax.tree_util.tree_leaves_with_path(abstract, is_leaf=is_variable):
        names = tuple(jax.tree_util.keystr(path, simple=True, separator=".").split("."))
        stacked = names[0] == "stack"
        group = int(names[2]) if stacked else None
        number, codes = groups.get(id(variable)), id(variable) in quantizable
        arrays.append(Parameter(names, kind_of(names), group, variable, number, codes))
    return tuple(arrays)


def kind_of(path: tuple[str, ...]) -> str:
    if NORMS & set(path):
        return "norm"
    if "mixers" not in path:
        return path[0]
    mixer, part, *_ = path[path.index("mixers") + 1 :]
    return MOE_PARTS.get(part, "router") if mixer == "moe" else MIXERS.get(mixer, mixer)


def parameter_counts(model: ModelConfig) -> dict[str, int]:
    """Number of parameters by kind, without the padding of the vocabulary."""
    return dict(_counts(parameters(model), model.vocab_size))


@functools.lru_cache(maxsize=64)
def _counts(every: tuple[Parameter, ...], vocabulary: int) -> dict[str, int]:
    counts: dict[str, int] = {}
    for parameter in every:
        sizes = zip(parameter.axes, parameter.variable.shape, strict=True)
        count = math.prod(vocabulary if axis == "vocab" else size for axis, size in sizes)
        counts[parameter.kind] = counts.get(parameter.kind, 0) + count
    return counts


def num_parameters(model: ModelConfig) -> tuple[int, int]:
    """(all parameters, those that one token uses), MTP layers included.

    A token uses top_k of the routed experts. The vocabulary is not padded; a tied table counts
    once; the arrays that balance experts without gradients count.
    """
    counts, moe = parameter_counts(model), model.moe
    total, routed = sum(counts.values()), counts.get("experts", 0)
    return total, total - routed * (moe.num_experts - moe.top_k) // max(moe.num_experts, 1)


if __name__ == "__main__":
    numbers = {name: num_parameters(architecture(name)) for name in sorted(ARCHITECTURES)}
    lines = (f"  {json.dumps(name)}: {json.dumps(pair)}" for name, pair in numbers.items())
    print("{\n" + ",\n".join(lines) + "\n}")
