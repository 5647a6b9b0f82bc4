"""transformers' own model of every named architecture has as many parameters as ours."""

import jax
import pytest
import torch
import transformers

from maxmeg.checkpoint.names import array_name
from maxmeg.config.architectures import ARCHITECTURES, architecture
from maxmeg.hf.families.read import BIAS, families_of, hf_config
from maxmeg.models.lm import LM


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameters_are_as_many_as_those_of_transformers(name: str):
    config = architecture(name)
    family = families_of(config)[0]
    written = hf_config(config, family)
    with torch.device("meta"):
        kind = getattr(transformers, family)
        theirs = kind(kind.config_class(**written))
    config.vocab_divisible_by = 1
    ours = jax.eval_shape(lambda key: LM(key, config), jax.random.key(0))
    expected = sum(parameter.numel() for parameter in theirs.parameters())  # tied ones once
    if name.startswith("t5-v1.1"):  # the class ties what the files have apart
        expected += theirs.lm_head.weight.numel()
    scalars = [b for n, b in theirs.named_buffers() if n.endswith("layer_scalar")]  # Gemma 4's
    expected += sum(scalar.numel() for scalar in scalars)
    leaves = jax.tree_util.tree_leaves_with_path(ours)  # there counts are no parameters
    sizes = [array.size for path, array in leaves if not array_name(path).endswith(BIAS)]
    assert sum(sizes) == expected
