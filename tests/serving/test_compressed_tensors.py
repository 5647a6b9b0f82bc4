"""compressed-tensors, which vLLM and transformers use, reads the numbers of quantized exports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from compressed_tensors import compressors, quantization

from maxmeg.config.options import Quantize
from maxmeg.hf.quantize import FORMATS
from maxmeg.ops.recipes import RECIPES


def as_torch(array: jax.Array):
    raw = np.array(array)
    if raw.dtype.itemsize == 1 and raw.dtype.kind not in "iu":  # NumPy has no float8
        return torch.from_numpy(raw.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(raw)


@pytest.mark.parametrize("form", FORMATS)
def test_compressed_tensors_reads_the_rounded_numbers(form):
    format = FORMATS[form]
    rng = np.random.default_rng(0)
    w_OI = jnp.asarray(rng.normal(size=(64, 96)) * np.exp(rng.normal(size=(64, 1))), jnp.float32)
    arrays = jax.jit(format.quantize)(w_OI, jnp.max(jnp.abs(w_OI)))
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=format.weights)
    reader = compressors.BaseCompressor.get_value_from_registry(format.name)
    actual = reader.decompress({name: as_torch(a) for name, a in arrays.items()}, scheme)["weight"]
    recipe, of_columns = RECIPES[format.recipe], {"axis": -2, "keepdims": True}
    largest = jnp.max(jnp.abs(w_OI.T), **(of_columns if form is Quantize.int8 else {}))
    wanted_IO = recipe.wide(recipe.weights(w_OI.T, largest)[0], jnp.float32)
    np.testing.assert_array_equal(actual.float().numpy(), np.asarray(wanted_IO).T)
