"""The gated short convolution is its published formula. (On meshes, decoding: test_mixers.py.)"""

import numpy as np
import pytest
from mixer_cases import D, check_documents, convolved, projected

from maxmeg.layers.short_conv import ShortConv, ShortConvSpec

SPECS = {
    "lfm2": ShortConvSpec(D),
    "biases": ShortConvSpec(D, kernel_size=4, bias=True),
    "one token": ShortConvSpec(D, kernel_size=1),
}


def defined(layer: ShortConv, x_LD: np.ndarray) -> np.ndarray:
    """out(C * conv(B * x)) over one document, where B, C and x are projections."""
    product = projected(layer.input_gate, x_LD) * projected(layer.value, x_LD)
    gated = projected(layer.output_gate, x_LD) * convolved(layer.kernel, product)
    return projected(layer.out, gated)


@pytest.mark.parametrize("name", SPECS)
def test_documents_have_the_output_of_the_formula_alone(name):
    check_documents(SPECS[name], defined)
