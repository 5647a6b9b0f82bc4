"""config.json and names of tensors of families with linear attention."""

import pytest
from published_configs import QWEN3_CODER_NEXT

from maxmeg.config.setting import with_fields
from maxmeg.hf.families.read import canonical_names, differences, hf_config, model_config
from maxmeg.models.registry import architecture

KIMI = {  # as the publisher's own files name its sizes
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM"},
    "first_k_dense_replace": 1,
    "hidden_size": 64,
    "kv_lora_rank": 16,
    "linear_attn_config": {
        "full_attn_layers": [3],
        "head_dim": 8,
        "kda_layers": [1, 2, 4],
        "num_heads": 6,
        "short_conv_kernel_size": 3,
    },
    "mla_use_nope": True,
    "model_max_length": 4096,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 24,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 4,
    "num_expert_group": 1,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "topk_group": 1,
    "use_grouped_topk": True,
}


def test_a_published_file_is_the_named_architecture():
    """Beside its base of rotation, and the loss that its file does not switch on."""
    model, named = model_config(QWEN3_CODER_NEXT), architecture("qwen3-next-80b-a3b")
    other = with_fields(named, {"rotary.base": 5e6, "moe.aux_loss": 0.0})
    assert not differences(model, other)
    assert not differences(model, model_config(hf_config(model, "Qwen3NextForCausalLM")))


def test_names_of_kimi_linear_are_those_of_its_publisher():
    model = model_config(KIMI)
    assert model.layers == "*(kda,mlp kda,moe mla,moe kda,moe)"
    delta, sizes = model.delta, ("num_heads", "key_size", "kernel_size")
    assert [getattr(delta, name) for name in sizes] == [6, 8, 3]
    assert model.moe.normalize_weights and model.moe.shared_ffn_size == 24
    assert not differences(model, model_config(hf_config(model, "KimiLinearForCausalLM")))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"kda_layers": [1, 2]}, "layer_types"),
        ({"gate_lower_bound": -5.0}, "it must be a group of num_heads, head_dim"),
    ],
)
def test_a_group_of_kimi_linear_that_says_more_is_refused(changed, words):
    group = KIMI["linear_attn_config"] | changed
    with pytest.raises(ValueError, match=words):
        model_config(KIMI | {"linear_attn_config": group})


def test_dense_layers_of_kimi_linear_have_two_names():
    written = "model.layers.0.block_sparse_moe.gate_proj.weight"
    names = canonical_names([written, "model.layers.0.mlp.up_proj.weight"], "KimiLinearForCausalLM")
    assert names[written] == "model.layers.0.mlp.gate_proj.weight"
