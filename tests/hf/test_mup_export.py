"""An exported muP model computes the same in its family, which has none of muP's factors."""

import jax
import numpy as np
import pytest
from hf_cases import families, sparse, with_states
from layouts import mesh_of, tiny, tiny_state
from test_convert_mtp import save

from maxmeg.config.mixers import QkNorm
from maxmeg.config.model import DType
from maxmeg.config.setting import with_fields
from maxmeg.hf import convert
from maxmeg.hf.families.read import model_config
from maxmeg.hf.mup import plain_model
from maxmeg.inference.load import load_run

SAME = 2e-6  # absolute, of logits about 0.1: factors that are no powers of two are rounded
MUP = {"mup.base_hidden_size": 24, "mup.base_head_dim": 3}
CASES = families() | with_states() | sparse()
OTHERS = ("qwen 2", "gemma 3", "qwen 3 next", "deepseek v3", "granite 4")
NAMES = ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]


@pytest.mark.parametrize("name", NAMES)
def test_an_exported_model_computes_the_same(name, tmp_path):
    family, keys = CASES[name]
    config = tiny(fsdp=1)
    described = model_config({**keys, "vocab_size": 61, "architectures": [family]}).without_mtp()
    config.model = with_fields(described, {**MUP, "dtype": DType.float32})
    config.data.tokenizer = "null:60"
    save(tmp_path / "run", config, tiny_state(config, mesh_of(config))[2])
    convert.export_model(tmp_path / "run", tmp_path / "hf", DType.float32, family=family)
    convert.import_model(convert.open_folder(tmp_path / "hf"), tmp_path / "again")
    ids_BL = jax.random.randint(jax.random.key(0), (2, 16), 0, 60)
    logits = []
    for folder in ("run", "again"):
        model = load_run(str(tmp_path / folder), dtype=DType.float32).model
        logits.append(np.asarray(jax.jit(lambda m: m(ids_BL))(model)))
    assert np.abs(logits[0]).max() > 0.03
    np.testing.assert_allclose(*logits, atol=SAME)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mtp.num_layers": 1}, "into the final norm, which MTP layers do not use"),
        ({"attention.qk_norm": QkNorm.l2}, "no weight scales the queries alone"),
        ({"attention.output_gate": True}, "no weight scales the queries alone"),
    ],
)
def test_models_without_a_place_for_the_factors_are_refused(fields, message):
    model = tiny({**MUP, **fields}).model
    with pytest.raises(ValueError, match=message):
        plain_model(model)
