"""The numbers of parameters, of models with settings that no named one has."""

import jax
import pytest
from layouts import CONVOLUTIONS, DELTA, EVERYTHING, HYBRID, KDA, tiny

from maxmeg.config.mixers import Activation, QkNorm
from maxmeg.config.model import Norm, NormPlace
from maxmeg.models.lm import LM
from maxmeg.planning.cost.parameters import num_parameters

EXPERTS = {
    "layers": "mla+mlp *(local_mla,moe)",
    "attention.window": 4,
    "parallel_norms": True,
    "norm": Norm.layernorm,
    "attention.bias_qkv": True,
    "attention.sinks": True,
    "mla.kv_rank": 12,
    "mla.rotary_size": 2,
    "mla.value_size": 6,
    "mlp.bias": True,
    "moe.num_experts": 8,
    "moe.ffn_size": 20,
    "moe.shared_ffn_size": 24,
    "moe.shared_gate": True,
    "moe.latent_size": 16,
    "moe.logit_bias": True,
    "moe.bias_balancing": True,
    "moe.global_aux_loss": 0.1,
    "mtp.num_layers": 2,
}


@pytest.mark.parametrize(
    "fields",
    [
        EVERYTHING,
        CONVOLUTIONS,
        DELTA,
        KDA,
        HYBRID,
        EXPERTS,
        EXPERTS | {"mla.query_rank": 10, "mlp.activation": Activation.gelu},
        EXPERTS | {"norm_place": NormPlace.sandwich, "moe.norms": True},
        {"attention.qk_norm": QkNorm.head, "attention.num_kv_heads": 4, "tied": True},
        {"attention.qk_norm": QkNorm.l2, "layers": "*(local,mlp attention,mlp)"}
        | {"attention.chunk": 4, "attention.local_head_dim": 6, "attention.local_kv_heads": 2}
        | {"attention.keys_as_values": True, "attention.value_norm": True, "layer_scale": True},
    ],
)
def test_print_shows_and_counts_every_array(fields):
    """print(model) shows each array on a line, and their number without padding."""
    model = tiny(fields).model
    arrays = jax.eval_shape(lambda: LM(jax.random.key(0), model))
    first, *lines = str(arrays).splitlines()
    assert first == f"LM: {num_parameters(model)[0]:,} parameters"
    groups = sum(line.endswith(" x") for line in lines)
    assert len(lines) - groups == len(jax.tree.leaves(arrays))
