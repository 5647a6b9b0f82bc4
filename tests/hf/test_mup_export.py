"""An exported muP model computes the same in its family, which has none of muP's factors."""

import jax
import numpy as np
import pytest
from layouts import mesh_of, tiny, tiny_state
from test_convert_mtp import save

from maxmeg.config.mixers import Activation, QkNorm
from maxmeg.hf import convert
from maxmeg.hf.mup import plain_model
from maxmeg.inference.load import load_run
from maxmeg.megatron.convert import architecture

SAME = 2e-6  # absolute, of logits about 0.1: factors that are no powers of two are rounded
MUP = {"mup.base_hidden_size": 24, "mup.base_head_dim": 3}
LATENT = {"layers": "*(mla,mlp)", "mla.kv_rank": 12, "mla.rotary_size": 4, "attention.head_dim": 6}
LATENT |= {"rotary.interleaved": True, "moe.num_experts": 4}
MODELS = {
    "LlamaForCausalLM": {"tied": True, "attention.num_kv_heads": 2},
    "Qwen3ForCausalLM": {"attention.qk_norm": QkNorm.head},
    "Qwen2ForCausalLM": {"attention.bias_qkv": True},
    "DeepseekV3ForCausalLM": LATENT,
    "GemmaForCausalLM": {
        "norm_one_plus": True,
        "tied": True,
        "embedding_scale": 32**0.5,
        "mlp.activation": Activation.geglu,
    },
    "GraniteForCausalLM": {"logit_scale": 0.25, "attention.scale": 0.3},
}


@pytest.mark.parametrize("family", MODELS)
def test_an_exported_model_computes_the_same(family, tmp_path):
    config = tiny({**MUP, "max_position": 16, "norm_eps": 1e-6} | MODELS[family], fsdp=1)
    config.data.tokenizer = "null:60"
    state = tiny_state(config, mesh_of(config))[2]
    save(tmp_path / "run", config, state)
    convert.export_model(tmp_path / "run", tmp_path / "hf", config.model.dtype, family=family)
    convert.import_model(convert.open_folder(tmp_path / "hf"), tmp_path / "again")
    ids_BL = jax.random.randint(jax.random.key(0), (2, 16), 0, 60)
    logits = []
    for folder in ("run", "again"):
        model = load_run(str(tmp_path / folder), dtype=config.model.dtype).model
        logits.append(np.asarray(jax.jit(lambda m: m(ids_BL))(model)))
    assert np.abs(logits[0]).max() > 0.05
    np.testing.assert_allclose(*logits, atol=SAME)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mtp.num_layers": 1}, "multiplies the logits of MTP layers too"),
        ({"attention.qk_norm": QkNorm.l2}, "queries that have no weights of their own"),
        ({"attention.output_gate": True}, "queries that have no weights of their own"),
    ],
)
def test_models_without_a_place_for_the_factors_are_refused(fields, message):
    model = tiny({**MUP, **fields}).model
    with pytest.raises(ValueError, match=message):
        plain_model(model)


def test_megatrons_checkpoints_with_mup_are_refused():
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    for arguments in ({"use_mup": True}, {"scaling_recipe": "mup"}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            architecture(sizes | arguments)
