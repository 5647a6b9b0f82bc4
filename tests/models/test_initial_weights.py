"""Initial weights: every parameter, layer and expert draws random numbers of its own."""

import jax
import numpy as np
import pytest
from layouts import tiny

from maxmeg.checkpoint.names import array_name
from maxmeg.config.model import Position
from maxmeg.config.schema import LoraConfig
from maxmeg.models.lm import language_model

WIDTH = 64
DENSE = {
    "layers": "conv,mlp 2(attention+mlp)",
    "num_layers": 3,
    "position": Position.learned,
    "max_position": WIDTH,
}
EXPERTS = {
    "layers": "mla,mlp 2(mla,moe)",
    "num_layers": 3,
    "mla.query_rank": WIDTH,
    "mla.kv_rank": WIDTH,
    "mla.rotary_size": 8,
    "moe.num_experts": WIDTH,
    "moe.ffn_size": WIDTH,
    "moe.shared_ffn_size": WIDTH,
    "moe.latent_size": WIDTH,
    "mtp.num_layers": 2,
}


@pytest.mark.parametrize(
    "model", [DENSE, pytest.param(EXPERTS, marks=pytest.mark.slow)], ids=["dense", "experts"]
)
def test_no_two_rows_of_weights_have_the_same_random_numbers(model):
    """A row is the first 64 weights of an input or token. Compared by signs, which tell of equal
    bits whatever the distribution and its deviation."""
    config = tiny({"hidden_size": WIDTH, "mlp.ffn_size": WIDTH, **model})
    config.lora = LoraConfig(rank=WIDTH, targets=("*",))
    arrays = jax.jit(lambda key: language_model(key, config))(jax.random.key(0))
    rows = []
    for path, array in jax.tree_util.tree_leaves_with_path(arrays):
        name = array_name(path)
        if array.ndim < 2 or name.endswith(("norm.weight", "lora.b")):
            continue
        vectors = np.asarray(array).reshape(-1, array.shape[-1])[:, :WIDTH]
        random = (vectors != 0).all(-1)  # not the padding of the vocabulary
        rows.append(np.packbits(vectors[random] > 0, axis=-1))
    _, counts = np.unique(np.concatenate(rows), axis=0, return_counts=True)
    assert counts.max() == 1 and len(counts) > 2000
