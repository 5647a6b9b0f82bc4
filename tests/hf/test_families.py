"""Families of Hugging Face: config.json is read strictly and written back, tensors have names,
shapes and exact inverses. (What they compute is proved in tests/oracle.)"""

import math

import numpy as np
import pytest
from hf_cases import encoder_decoders, encoders, families, sparse, with_states
from published_configs import PUBLISHED, published
from tables import thinned
from written_settings import values_of

from maxmeg.config import architectures
from maxmeg.config.model import ModelConfig
from maxmeg.config.setting import get, with_fields
from maxmeg.hf.families.classifier_tables import CLASSIFIERS
from maxmeg.hf.families.read import (
    FAMILIES,
    aliases,
    architecture,
    array_shapes,
    bindings,
    canonical_names,
    differences,
    families_of,
    hf_config,
    model_config,
    read_config,
    unused_arrays,
)
from maxmeg.hf.families.rotary import longrope_notes


def dimensions_of(array: str, by_expert: bool) -> int:
    """Of an array: those that tensors are entries of, layers and where it is so experts."""
    return array.startswith("stack.") + by_expert


@pytest.mark.parametrize("name", thinned(PUBLISHED, 12))
def test_published_configs_give_the_published_models(name):
    config, parameters, settings = PUBLISHED[name]
    model, family = model_config(config), architecture(config)
    fields = values_of(settings, ModelConfig)
    assert {field: get(model, field) for field in fields} == fields
    if not fields:
        named = architectures.architecture(name.removeprefix("further/"))
        named.mtp, named.mamba.chunk = model.mtp, model.mamba.chunk  # choices of training
        assert not differences(named, model)
    actual = bindings(model, family)
    assert sum(math.prod(binding.shape) for binding in actual) == parameters
    assert len({binding.theirs for binding in actual}) == len(actual)
    places = [place for binding in actual for place in binding.ours]
    whole = [place for place in places if not place.index]
    assert len(set(places)) == len(places)
    unused = unused_arrays(model)
    shapes = {name: s for name, s in array_shapes(model).items() if name not in unused}
    experts = {place.name for place in places if place.expert is not None}
    indexed = [dimensions_of(name, name in experts) for name in shapes]
    pieces = [math.prod(s[:n]) for s, n in zip(shapes.values(), indexed, strict=True) if n]
    assert len(places) == sum(pieces) + len(whole)
    assert not {place.name for place in whole} & {p.name for p in places if p.index}
    again = hf_config(model, family)
    assert not differences(model, model_config(again)) and family in families_of(model)


# At their sizes every fused and every transposed tensor has a shape of its own.
SMALL = families() | sparse() | with_states() | encoders() | encoder_decoders()
SMALL |= {
    f"{name}, predicting": (family, settings | {"num_mtp_layers": 1})
    for name, (family, settings) in sparse().items()
    if "num_mtp_layers" in settings
}


def test_every_family_has_a_case():
    actual = {architecture(config) for config, _, _ in PUBLISHED.values()}
    actual |= {family for family, _ in SMALL.values()}
    assert actual == FAMILIES.keys() - CLASSIFIERS.keys()


@pytest.mark.parametrize("name", thinned(SMALL, 12))
def test_split_and_join_are_inverses(name):
    family, settings = SMALL[name]
    if "layers_block_type" in settings:
        settings = settings | {"num_hidden_layers": len(settings["layers_block_type"])}
    model = model_config({**settings, "architectures": [family]})
    shapes = array_shapes(model)
    assert not differences(model, model_config(hf_config(model, family)))
    assert all(name != repeated for name, repeated in aliases(model, family).items())
    for binding in bindings(model, family):
        size = math.prod(binding.shape)
        theirs = np.arange(size, dtype=np.float32).reshape(binding.shape)
        ours = binding.split(theirs)
        assert len(ours) == len(binding.ours)
        for part, place in zip(ours, binding.ours, strict=True):
            assert part.shape == shapes[place.name][len(place.index) :]
        np.testing.assert_array_equal(binding.join(ours), theirs, strict=True)
        np.testing.assert_array_equal(np.sort(np.concatenate([p.ravel() for p in ours])),
                                      theirs.ravel())  # fmt: skip


PHI3 = published("phi3-mini-128k")
REFUSED = [  # file, what is changed, what the message must name
    ("smollm2-135m", {"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
    ("smollm2-135m", {"architectures": ["JambaForCausalLM"]}, "Mamba-2: choose one of"),
    ("smollm2-135m", {"architectures": ["LlamaForCausalLM"] * 2}, "architectures"),
    ("smollm2-135m", {"architectures": None, "model_type": "mamba"}, "architectures"),
    ("smollm2-135m", {"model_type": "mistral"}, "model_type='mistral'"),
    ("smollm2-135m", {"architectures": ["Llama5ForCausalLM"]}, "similar names are Llama"),
    ("smollm2-135m", {"use_magic": 3, "transformers_version": "99.0.1"}, "99.0) has use_magic=3:"),
    ("smollm2-135m", {"kv_lora_rank": 3, "n_head": 4}, "has kv_lora_rank=3, n_head=4: Llama"),
    ("smollm2-135m", {"auto_map": {"AutoModel": "modeling_x.X"}}, "trust_remote_code"),
    ("smollm2-135m", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("smollm2-135m", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("smollm2-135m", {"hidden_size": "576"}, "hidden_size='576'"),
    ("smollm2-135m", {"num_attention_heads": 0}, "num_attention_heads=0"),
    ("smollm2-135m", {"rms_norm_eps": math.inf}, "rms_norm_eps=inf"),
    ("smollm2-135m", {"tie_word_embeddings": 1}, "tie_word_embeddings=1"),
    ("smollm2-135m", {"num_key_value_heads": 2}, "num_kv_heads=2"),
    ("smollm2-135m", {"rope_scaling": {"type": "mrope"}}, "mrope"),
    ("smollm2-135m", {"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, "yarn"),
    ("smollm2-135m", {"rope_scaling": {"type": "linear", "factor": 2, "x": 1}}, "x=1"),
    ("smollm2-135m", {"rope_parameters": {"rope_theta": 5.0}}, "contradicts"),
    ("smollm2-135m", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("phi3-mini-128k", {"auto_map": {"AutoModel": "modeling_x.X"}}, "auto_map"),
    ("phi3-mini-128k", {"auto_map": {"A": "x--modeling_phi3.X"}}, "auto_map"),
    (
        "phi3-mini-128k",
        {"rope_scaling": {**PHI3["rope_scaling"], "long_factor": [1.0]}},
        "rotary.long_factors",
    ),
    ("phi3-mini-128k", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "yarn"),
    ("gemma2-9b", {"num_hidden_layers": 10**9}, "at most 10000"),
    ("gemma2-9b", {"layer_types": ["full_attention"]}, "list of 42"),
    ("gemma2-9b", {"layer_types": ["chunked_attention"] * 42}, "chunked"),
    (
        "llama3.1-8b",
        {"rope_parameters": {"rope_type": "llama3", "factor": 32.0}},
        "rope_parameters has factor=32.0",
    ),
    ("pythia-12b", {"rotary_pct": 0.06}, "rotary_pct=0.06"),
    ("qwen3-8b", {"layer_types": ["sliding_attention"] * 36}, "window"),
    ("gemma3-12b", {"rope_parameters": {"rope_type": "default"}}, "full_attention"),
    ("further/gemma3-4b", {"quantization_config": {"bits": 8}}, "bits"),
    ("further/gemma3-4b", {"text_config": None}, "text_config"),
    (
        "falcon-40b",
        {"num_ln_in_parallel_attn": 2, "new_decoder_architecture": False},
        "parallel_attn=2",
    ),
    ("falcon-40b", {"parallel_attn": False}, "parallel_attn=False"),
    ("gpt2-1.5b", {"scale_attn_weights": False}, "scale_attn_weights=False"),
    ("mixtral-8x7b", {"shared_expert_intermediate_size": 8}, "=8: Mixtral"),
    ("qwen3-30b-a3b", {"num_local_experts": 64}, "num_experts=128 contradicts"),
    ("qwen3-30b-a3b", {"mlp_only_layers": ["0"]}, "mlp_only_layers=['0']"),
    ("glm4.5", {"topk_group": 2}, "topk_group=2"),
    ("deepseek-v3", {"n_group": 7}, "moe.num_groups=7"),
    ("deepseek-v3", {"num_experts_per_tok": 1}, "norm_topk_prob=True"),
    ("deepseek-v3", {"num_key_value_heads": 8}, "num_kv_heads"),
    ("deepseek-v3", {"qk_rope_head_dim": 63}, "even number of the 63"),
    ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob=True"),
]


@pytest.mark.parametrize(("name", "changes", "named"), REFUSED)
def test_unsupported_settings_are_refused_by_name(name, changes, named):
    with pytest.raises(ValueError) as caught:
        model_config({**published(name), **changes})
    assert named in str(caught.value) and len(str(caught.value)) < 1100


def test_keys_without_effect_are_passed_over_and_named():
    off = {"lm_head_bias": False, "mlp_bias": False, "full_attn_mod": 1, "interpolate_factor": 1}
    code = {"AutoModel": "modeling_phi3.X", "AutoTokenizer": "Xenova/gpt-4o"}
    model, passed = read_config({**PHI3, **off, "auto_map": code})
    assert model == model_config(PHI3) and passed == [*off]
    assert "more than 4096 together" in longrope_notes(model)[0] and not longrope_notes(LLAMA)


ANYTHING = [None, True, False, 0, 1, -1, 2.5, math.nan, 10**40, 10**400, "", "x", [], [[1]], {}]
ANYTHING += [{"a": 1}, {"rope_type": ["x"]}, {"type": "yarn"}, {"full_attention": 3}]


def test_any_value_is_read_or_raises_a_value_error():
    rng, read = np.random.default_rng(0), 0
    names = sorted({key for config, _, _ in PUBLISHED.values() for key in config} | {
        "rope_parameters", "layer_types", "num_ln_in_parallel_attn", "_sliding_window_pattern",
    })  # fmt: skip
    for _ in range(40):
        for config, _, _ in PUBLISHED.values():
            name, value = names[rng.integers(len(names))], ANYTHING[rng.integers(len(ANYTHING))]
            try:
                model = model_config({**config, name: value})
            except ValueError:
                continue
            read += 1
            hf_config(model, architecture(config))  # what is read can be said
    assert 0 < read < 900


LLAMA = model_config(published("smollm2-135m"))
LOST = {  # family, fields, what the message must name
    "norm": ("LlamaForCausalLM", "norm=layernorm", "model.norm=layernorm"),
    "window": (
        "LlamaForCausalLM",
        "layers=*(local,mlp); attention.window=8",
        "model.attention.window=8",
    ),
    "ntk": (
        "LlamaForCausalLM",
        "rotary.scaling=ntk; rotary.factor=2.0",
        "rotary.scaling=ntk",
    ),
    "qwen without biases": ("Qwen2ForCausalLM", "", "model.attention.bias_qkv=False"),
    "no length": ("LlamaForCausalLM", "max_position=0", "model.max_position=0"),
    "no family": ("Llama", "", "choose from LlamaForCausalLM"),
}


@pytest.mark.parametrize("name", LOST)
def test_a_model_that_a_family_cannot_express_is_refused(name):
    family, fields, named = LOST[name]
    with pytest.raises(ValueError, match=r"model|family") as caught:
        hf_config(with_fields(LLAMA, values_of(fields, ModelConfig)), family)
    assert named in str(caught.value)


def test_arrays_that_no_tensor_holds_are_named():
    model = with_fields(LLAMA, {"attention.sinks": True})
    with pytest.raises(ValueError, match=r"no tensor for .*attention\.sinks"):
        bindings(model, "LlamaForCausalLM")


IN_FILES = {  # family -> name in a file -> name of a binding, None for what holds no weights
    "LlamaForCausalLM": {
        "module._orig_mod.model.norm.weight": "model.norm.weight",
        "_orig_mod.module.lm_head.weight": "lm_head.weight",
        "model._fsdp_wrapped_module.layers.0.mlp.x": "model.layers.0.mlp.x",
        "model.layers.3.self_attn.rotary_emb.inv_freq": None,
    },
    "GPT2LMHeadModel": {
        "wte.weight": "transformer.wte.weight",
        "h.0.attn.c_attn.bias": "transformer.h.0.attn.c_attn.bias",
        "h.0.attn.bias": None,
        "transformer.h.0.attn.masked_bias": None,
    },
    "Gemma3ForCausalLM": {
        "language_model.model.norm.weight": "model.norm.weight",
        "model.language_model.norm.weight": "model.norm.weight",
        "vision_tower.x.weight": None,
        "model.multi_modal_projector.x": None,
    },
}


@pytest.mark.parametrize("family", IN_FILES)
def test_names_in_files_are_mapped_to_canonical_names(family):
    wanted = {name: known for name, known in IN_FILES[family].items() if known}
    assert canonical_names(IN_FILES[family], family) == wanted
