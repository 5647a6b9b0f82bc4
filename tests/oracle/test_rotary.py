"""Rotary frequencies and amplitudes of every scaling equal those of Hugging Face."""

import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from maxmeg.ops.rope import RotaryScaling, RotarySpec, frequencies

TOLERANCE = 2e-6  # of each frequency; theirs are float32 throughout
HEAD, BASE, ORIGINAL = 64, 500000.0, 256
SHORT, LONG = np.linspace(1, 3, HEAD // 2).tolist(), np.linspace(1, 30, HEAD // 2).tolist()
KINDS = {  # their parameters, ours, length of the row
    "linear": ({"rope_type": "linear", "factor": 4.0}, RotaryScaling("linear", 4.0), 10),
    "llama3": (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        RotaryScaling("llama3", 8.0, ORIGINAL, 1.0, 4.0),
        10,
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0},
        RotaryScaling("yarn", 4.0, ORIGINAL, 1.0, 32.0),
        10,
    ),
    "yarn, own betas, not truncated": (
        {"rope_type": "yarn", "factor": 32.0, "beta_fast": 16.0, "beta_slow": 2.0}
        | {"truncate": False, "attention_factor": 1.25},
        RotaryScaling("yarn", 32.0, ORIGINAL, 2.0, 16.0, 1.25, truncate=False),
        10,
    ),
    "dynamic, short": (
        {"rope_type": "dynamic", "factor": 3.0},
        RotaryScaling("dynamic", 3.0, ORIGINAL),
        10,
    ),
    "dynamic, long": (
        {"rope_type": "dynamic", "factor": 3.0},
        RotaryScaling("dynamic", 3.0, ORIGINAL),
        1000,
    ),
    "longrope, short": (
        {"rope_type": "longrope", "factor": 16.0, "short_factor": SHORT, "long_factor": LONG},
        RotaryScaling(
            "longrope", 16.0, ORIGINAL, short_factors=tuple(SHORT), long_factors=tuple(LONG)
        ),
        ORIGINAL,
    ),
    "longrope, long": (
        {"rope_type": "longrope", "factor": 16.0, "short_factor": SHORT, "long_factor": LONG},
        RotaryScaling(
            "longrope", 16.0, ORIGINAL, short_factors=tuple(SHORT), long_factors=tuple(LONG)
        ),
        ORIGINAL + 1,
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_samples_have_the_expected_frequencies(name):
    theirs, scaling, length = KINDS[name]
    parameters = {"rope_theta": BASE, "original_max_position_embeddings": ORIGINAL} | theirs
    config = transformers.LlamaConfig(
        hidden_size=4 * HEAD,
        num_attention_heads=4,
        max_position_embeddings=ORIGINAL,
        rope_parameters=parameters,
    )
    expected, amplitude = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config, "cpu", seq_len=length)
    spec = RotarySpec(BASE, scaling=scaling)
    actual = np.ravel(frequencies(spec, HEAD, jnp.array([length])))
    np.testing.assert_allclose(actual, expected.numpy(), rtol=TOLERANCE)
    assert scaling.amplitude == pytest.approx(amplitude, rel=1e-6)
