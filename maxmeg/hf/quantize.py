"""Exports with quantized weights in the format of compressed-tensors, which vLLM and transformers
read (github.com/vllm-project/compressed-tensors).

The matrices of the layers are rounded exactly as by the qat_... recipes of train.quantization, so
that a server multiplies the same weights as quantization-aware training. Norms, biases, routers,
embeddings, the output projection and layers in 16 bits (model.last_layers_bf16) are not rounded.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from maxmeg.checkpoint.names import array_name
from maxmeg.checkpoint.stream import TensorInfo
from maxmeg.config.model import ModelConfig
from maxmeg.config.options import Quantize
from maxmeg.config.quantization import QuantizationRecipe
from maxmeg.hf.families.binding import Binding, Place
from maxmeg.hf.families.read import table_of
from maxmeg.models.lm import LM
from maxmeg.ops.fp4 import BLOCK as NVFP4_BLOCK
from maxmeg.ops.fp4 import packed, quantize_nvfp4
from maxmeg.ops.quantized import FP4, MX_BLOCK, quantize_blocks
from maxmeg.ops.recipes import RECIPES
from maxmeg.ops.straight_through import to_int8
from maxmeg.parallel.parameter import is_variable
from maxmeg.weights.quantized import quantized_matrices

WEIGHT = ".weight"
Arrays: typing.TypeAlias = dict[str, jax.Array]


def int8(w_OI: Float[Array, "O I"], _: jax.Array) -> Arrays:
    codes, scale = to_int8(w_OI, jnp.max(jnp.abs(w_OI), axis=-1, keepdims=True), -1)
    return {"weight": codes, "weight_scale": scale}


def mxfp4(w_OI: Float[Array, "O I"], _: jax.Array) -> Arrays:
    codes, exponents = quantize_blocks(w_OI, FP4, (1, MX_BLOCK))
    return {"weight_packed": packed(codes), "weight_scale": exponents}


def nvfp4(w_OI: Float[Array, "O I"], largest: jax.Array) -> Arrays:
    codes, scales, scale = quantize_nvfp4(w_OI, (1, NVFP4_BLOCK), largest)
    arrays = {"weight_packed": packed(codes), "weight_scale": scales}
    return arrays | {"weight_global_scale": (1 / scale).reshape(1)}


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of compressed-tensors, and its name there.

    recipe: that of train.quantization which rounds weights in the same way. quantize: takes a
    matrix and the largest magnitude in the model, returns the arrays of a module by their names.
    weights, inputs: how they are rounded, as compressed-tensors' QuantizationArgs; inputs=None: the
    server does not round inputs.
    """

    name: str
    recipe: QuantizationRecipe
    quantize: Callable[[jax.Array, jax.Array], Arrays]
    weights: Mapping[str, typing.Any]
    inputs: Mapping[str, typing.Any] | None = None


COMMON = {"symmetric": True, "dynamic": False}
FP4_BLOCKS = {"num_bits": 4, "type": "float", **COMMON}
FORMATS = {
    Quantize.int8: Format(
        "int-quantized",
        QuantizationRecipe.qat_int8,
        int8,
        {"num_bits": 8, "type": "int", "strategy": "channel", **COMMON},
        {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True},
    ),
    Quantize.mxfp4: Format(
        "mxfp4-pack-quantized",
        QuantizationRecipe.qat_mxfp4,
        mxfp4,
        {**FP4_BLOCKS, "strategy": "group", "group_size": MX_BLOCK, "scale_dtype": "torch.uint8"},
    ),
    Quantize.nvfp4: Format(
        "nvfp4-pack-quantized",
        QuantizationRecipe.qat_nvfp4,
        nvfp4,
        {
            **FP4_BLOCKS,
            "strategy": "tensor_group",
            "group_size": NVFP4_BLOCK,
            "scale_dtype": "torch.float8_e4m3fn",
        },
    ),
}


class QuantizedWeights:
    """The tensors of an export whose matrices are quantized.

    ValueError if the family has a matrix in a form that compressed-tensors cannot quantize, as
    stacked experts of any size, or if no matrix has sizes that the format can quantize.
    """

    def __init__(
        self,
        quantize: Quantize,
        model: ModelConfig,
        bindings: Sequence[Binding],
        family: str,
        read: Callable[[Place], np.ndarray],
    ) -> None:
        if quantize not in FORMATS:
            raise ValueError(f"--quantize={quantize.value} needs --to=gguf")
        self._format = FORMATS[quantize]
        if not table_of(family).outputs_first:
            raise ValueError(
                f"--quantize={quantize.value}: {family} stores matrices as [inputs, outputs], and "
                "compressed-tensors quantizes [outputs, inputs] alone: leave --quantize out"
            )
        names = quantized_names(model, self._format.recipe)
        chosen = [b for b in bindings if all(place.name in names for place in b.ours)]
        if not chosen:
            raise ValueError(
                f"--quantize={quantize.value}: no matrix of the layers has sizes that are "
                f"multiples of {RECIPES[self._format.recipe].multiple}: leave --quantize "
                "out"
            )
        for binding in (*(b for b in bindings if b.stacked), *chosen):
            if len(binding.shape) != 2 or not binding.theirs.endswith(WEIGHT):
                raise ValueError(
                    f"--quantize={quantize.value}: {family} stores several matrices as "
                    f"{binding.theirs} {list(binding.shape)}, which compressed-tensors does not "
                    "quantize: leave --quantize out"
                )
        self._modules = {b.theirs: b.theirs.removesuffix("weight") for b in chosen}
        others = [b.theirs for b in bindings if len(b.shape) == 2 and b.theirs not in self._modules]
        others = [name.removesuffix(WEIGHT) for name in others if name.endswith(WEIGHT)]
        self._ignored = [*others, *(["lm_head"] if "lm_head" not in others else [])]
        # One for all matrices: vLLM joins some of them, and takes one global scale for the whole.
        self._largest = jnp.zeros(())
        if quantize is Quantize.nvfp4:
            parts = (read(place) for b in chosen for place in b.ours)
            self._largest = jnp.asarray(max(np.abs(part).max() for part in parts))
        self._quantize = jax.jit(self._format.quantize)

    def has(self, binding: Binding) -> bool:
        return binding.theirs in self._modules

    def infos(self, binding: Binding) -> dict[str, TensorInfo]:
        """The tensors that take the place of a matrix."""
        w_OI = jax.ShapeDtypeStruct(binding.shape, np.float32)
        arrays = jax.eval_shape(self._format.quantize, w_OI, self._largest)
        return {
            self._modules[binding.theirs] + name: TensorInfo(np.dtype(array.dtype), array.shape)
            for name, array in arrays.items()
        }

    def arrays(self, binding: Binding, w_OI: np.ndarray) -> dict[str, np.ndarray]:
        """The quantized tensor, under the names of `infos`."""
        arrays = self._quantize(jnp.asarray(w_OI, jnp.float32), self._largest)
        module = self._modules[binding.theirs]
        return {module + name: np.asarray(array) for name, array in arrays.items()}

    def settings(self) -> dict[str, typing.Any]:
        """What config.json says of them, under "quantization_config"."""
        form = self._format
        group = {"targets": ["Linear"], "weights": form.weights, "input_activations": form.inputs}
        return {
            "quant_method": "compressed-tensors",
            "format": form.name,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": self._ignored,
        }


def quantized_names(model: ModelConfig, recipe: QuantizationRecipe) -> set[str]:
    """The names of the arrays that training with this recipe quantizes."""
    abstract = jax.eval_shape(functools.partial(LM, config=model), jax.random.key(0))
    matrices = quantized_matrices(abstract, RECIPES[recipe])
    chosen = {id(getattr(module, name)) for module, name in matrices}
    leaves = jax.tree_util.tree_leaves_with_path(abstract, is_leaf=is_variable)
    return {array_name(path) for path, leaf in leaves if id(leaf) in chosen}


def notes_of(recipe: QuantizationRecipe, quantize: Quantize) -> tuple[str, ...]:
    """What the user of an export should know: the run's recipe, and how it was exported."""
    trained_for = [form for form in FORMATS if FORMATS[form].recipe is recipe]
    if trained_for and quantize not in trained_for:
        option = f"--quantize={trained_for[0].value}"
        return (f"{recipe.value}: {option} exports the weights as training rounded them",)
    if quantize is Quantize.nvfp4:
        return (
            "the server will not round inputs to 4 bits, as qat_nvfp4 does in training: for that, "
            "export without --quantize and calibrate with the server's tool",
        )
    return ()
