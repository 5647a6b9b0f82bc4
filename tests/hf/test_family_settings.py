"""How settings of a config.json are read and written: rotary, windows, experts, losses."""

import dataclasses

import pytest
from published_configs import published

from maxmeg.config.setting import with_fields
from maxmeg.hf.families.read import (
    bindings,
    differences,
    families_of,
    hf_config,
    model_config,
)
from maxmeg.layers.attention import AttentionSpec
from maxmeg.models.mixers import pattern

SMOLLM2, QWEN3, GEMMA3 = map(published, ("smollm2-135m", "qwen3-8b", "gemma3-12b"))
MIXTRAL, QWEN3_MOE = map(published, ("mixtral-8x7b", "qwen3-30b-a3b"))
DEEPSEEK_V3, GEMMA3_4B = map(published, ("deepseek-v3", "further/gemma3-4b"))


def test_both_forms_of_rotary_settings_give_the_same_model():
    kinds = {
        "yarn": {"factor": 4.0, "beta_fast": 16, "truncate": False, "attention_factor": None},
        "dynamic": {"factor": 3.0},
        "linear": {"factor": 2.0},
    }
    for kind, settings in kinds.items():
        old = {**SMOLLM2, "rope_scaling": {"type": kind, **settings}}
        new = {k: v for k, v in SMOLLM2.items() if not k.startswith("rope_")}
        new |= {"rope_parameters": {"rope_type": kind, "rope_theta": 100000, **settings}}
        both = {**new, **old, "rope_scaling": {"type": kind, **settings}}
        model = model_config(old)
        assert model.rotary.scaling.value == kind
        assert model == model_config(new) == model_config(both)


def test_global_layers_of_gemma_4_may_have_the_heads_of_local_ones():
    """transformers then writes an empty per_layer_config, and no global_head_dim."""
    config = published("gemma4-e2b")["text_config"]
    config = {k: v for k, v in config.items() if k != "global_head_dim"}
    model = model_config(config | {"architectures": ["Gemma4ForCausalLM"], "per_layer_config": {}})
    heads = model.attention
    assert (heads.head_dim, heads.num_kv_heads) == (heads.local_head_dim, heads.local_kv_heads)
    assert heads.head_dim == config["head_dim"]


WINDOWS = {  # keys of Qwen 3 -> (window, layers)
    "none": ({}, (0, "*(attention,mlp)")),
    "all": (
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
        (9, "*(local,mlp)"),
    ),
    "too late": ({"use_sliding_window": True, "sliding_window": 9}, (0, "*(attention,mlp)")),
    "late": (
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 20},
        (9, "20(attention,mlp) *(local,mlp)"),
    ),
    "by type": (
        {"use_sliding_window": True, "sliding_window": 9}
        | {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 9},
        (9, "*(3(local,mlp) attention,mlp)"),
    ),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_window_settings_are_read_and_written(name):
    keys, wanted = WINDOWS[name]
    model = model_config({**QWEN3, **keys})
    assert (model.attention.window, model.layers) == wanted
    assert not differences(model, model_config(hf_config(model, "Qwen3ForCausalLM")))


PATTERNS = {  # layers of the classes' defaults
    "Olmo3ForCausalLM": "*(3(local,mlp) attention,mlp)",
    "CwmForCausalLM": "*(attention,mlp 3(local,mlp))",
    "Cohere2ForCausalLM": "*(3(local+mlp) nope_attention+mlp)",
    "SmolLM3ForCausalLM": "*(3(attention,mlp) nope_attention,mlp)",
}


@pytest.mark.parametrize("family", PATTERNS)
def test_layers_alternate_by_default(family):
    model = model_config({"architectures": [family]})
    assert model.layers == PATTERNS[family]
    specs = [sublayer.mixers[0] for sublayer in pattern(model)[0][0]]
    rotates = [spec.rotary is not None for spec in specs if isinstance(spec, AttentionSpec)]
    assert rotates == [True, True, True, not model.has("nope_attention")]


def test_dense_layers_anywhere_are_read_and_written():
    some = model_config({**QWEN3_MOE, "num_hidden_layers": 6, "decoder_sparse_step": 2})
    assert some.layers == "*(attention,mlp attention,moe)"
    named = {"num_hidden_layers": 6, "mlp_only_layers": [0, 1]}
    first = model_config({**QWEN3_MOE, **named})
    assert first.layers == "2(attention,mlp) *(attention,moe)"
    every = dataclasses.replace(first, layers="*(attention,moe attention,mlp)")
    for model in (some, first, every):
        written = hf_config(model, "Qwen3MoeForCausalLM")
        assert not differences(model, model_config(written))
    assert written["mlp_only_layers"] == [1, 3, 5]
    deepseek = dataclasses.replace(model_config(DEEPSEEK_V3), layers="*(mla,moe mla,mlp)")
    with pytest.raises(ValueError, match=r"layers=\*\(mla,moe mla,mlp\) would become"):
        hf_config(deepseek, "DeepseekV3ForCausalLM")


def test_what_training_alone_needs_is_not_exported():
    model, family = model_config(MIXTRAL), "MixtralForCausalLM"
    fields = {"moe.capacity_factor": 1.25, "moe.pad_to_capacity": True, "moe.global_aux_loss": 0.1}
    trained = with_fields(model, fields)
    assert hf_config(trained, family) == hf_config(model, family)
    named = [[binding.theirs for binding in bindings(each, family)] for each in (model, trained)]
    assert named[0] == named[1]


def test_router_losses_are_read_if_they_are_switched_on():
    on = {**MIXTRAL, "output_router_logits": True}
    assert model_config(MIXTRAL).moe.aux_loss == 0
    assert model_config(on).moe.aux_loss == 0.02
    written = hf_config(model_config(on), "MixtralForCausalLM")
    assert (written["output_router_logits"], written["router_aux_loss_coef"]) == (True, 0.02)
    each = model_config({**DEEPSEEK_V3, "seq_aux": False})
    assert (each.moe.aux_loss, each.moe.sequence_aux_loss) == (0.001, 0)
    assert not hf_config(each, "DeepseekV3ForCausalLM")["seq_aux"]


def test_a_normalized_softmax_equals_a_softmax_over_the_top_k():
    late = model_config(MIXTRAL)
    divided = with_fields(late, {"moe.softmax_before_topk": True, "moe.normalize_weights": True})
    plain = with_fields(late, {"moe.softmax_before_topk": True})
    assert not differences(late, divided) and families_of(divided)[0] == "MixtralForCausalLM"
    assert differences(late, plain) and "MixtralForCausalLM" not in families_of(plain)


def test_gemma_3_ignores_a_soft_cap_and_may_have_layers_of_one_kind():
    local = model_config({**GEMMA3, "num_hidden_layers": 5, "attn_logit_softcapping": 50.0})
    assert local.attention.softcap == 0 == model_config(GEMMA3).attention.softcap
    assert (local.attention.window, local.layers) == (1024, "*(local,mlp)")
    assert (local.rotary.base, local.rotary.local_base) == (1e4, 0)
    everywhere = model_config({**GEMMA3, "layer_types": ["full_attention"] * 48})
    assert (everywhere.attention.window, everywhere.rotary.base) == (0, 1e6)
    for model in (local, everywhere):
        assert not differences(model, model_config(hf_config(model, "Gemma3ForCausalLM")))


def test_special_tokens_are_carried_along():
    source = {**SMOLLM2, "bos_token_id": 7, "eos_token_id": [8, 9]}
    written = hf_config(model_config(SMOLLM2), "LlamaForCausalLM", source)
    assert [written[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [7, [8, 9], None]
    written = hf_config(model_config(GEMMA3_4B), "Gemma3ForCausalLM", GEMMA3_4B)
    assert written["eos_token_id"] == [1, 106]


def test_ministral_3_has_the_keys_of_its_temperature_with_any_scaling():
    family, rope = "Ministral3ForCausalLM", {"original_max_position_embeddings": 16}
    for beta in (0.0, 0.6):
        rope |= {"rope_type": "default", "llama_4_scaling_beta": beta}
        model = model_config({"architectures": [family], "rope_parameters": rope})
        assert hf_config(model, family)["rope_scaling"]["llama_4_scaling_beta"] == beta
