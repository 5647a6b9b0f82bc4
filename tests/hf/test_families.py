"""Families of Hugging Face: config.json is read strictly and written back, tensors have names,
shapes and exact inverses. (What they compute is proved in tests/oracle.)"""

import dataclasses
import math

import numpy as np
import pytest
from hf_cases import encoder_decoders, encoders, families, sparse, with_states
from published_configs import (
    BAMBA,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    ENCODERS,
    FALCON_7B,
    FALCON_40B,
    FALCON_H1,
    GEMMA2,
    GEMMA3,
    GEMMA3_4B,
    GLM45,
    GPT2,
    GPT_OSS,
    GRANITE4,
    LFM2,
    LINEAR,
    LLAMA31,
    MAMBA2,
    MISTRAL,
    MIXTRAL,
    NEMOTRON,
    NEMOTRON_H,
    OLMO2,
    PHI3,
    PYTHIA,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    QWEN25,
    SMOLLM2,
    STARCODER2,
)
from tables import thinned
from written_settings import values_of

from maxmeg.config.model import ModelConfig
from maxmeg.config.setting import get, with_fields
from maxmeg.hf.families.binding import Fusion
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
    unused_arrays,
)

PUBLISHED = {  # settings, number of parameters, fields
    "smollm2-135m": (SMOLLM2, 134_515_008, "rotary.base=100000.0; tied=true; mlp.bias=false"),
    "llama-3.1-8b": (LLAMA31, 8_030_261_248, "rotary.scaling=llama3; rotary.factor=8"),
    "mistral-7b": (
        MISTRAL,
        7_241_732_096,
        "layers=*(local,mlp); attention.window=4096; attention.num_kv_heads=8",
    ),
    "qwen2.5-14b": (QWEN25, 14_770_033_664, "attention.bias_qkv=true; layers=*(attention,mlp)"),
    "qwen3-8b": (QWEN3, 8_190_735_360, "attention.head_dim=128; attention.qk_norm=head"),
    "gemma-2-9b": (
        GEMMA2,
        9_241_705_984,
        "layers=*(local,mlp attention,mlp); attention.softcap=50; "
        "embedding_scale=59.86651818838306",
    ),
    "gemma-3-1b": (
        GEMMA3,
        999_885_952,
        "layers=*(5(local,mlp) attention,mlp); rotary.local_base=10000.0; rotary.base=1000000.0",
    ),
    "gemma-3-4b": (
        GEMMA3_4B,
        3_880_263_168,
        "rotary.scaling=linear; rotary.factor=8; attention.num_kv_heads=4",
    ),
    "olmo-2-32b": (OLMO2, 32_234_279_936, "attention.qk_norm=heads; tied=false"),
    "phi-3-mini-128k": (
        PHI3,
        3_821_079_552,
        "rotary.factor=32; rotary.original_length=4096; attention.window=262144",
    ),
    "pythia-12b": (PYTHIA, 11_846_072_320, "rotary.fraction=0.25; parallel_norms=true"),
    "falcon-7b": (FALCON_7B, 6_921_720_704, "attention.num_kv_heads=1; parallel_norms=false"),
    "falcon-40b": (FALCON_40B, 41_303_293_952, "attention.num_kv_heads=8; parallel_norms=true"),
    "starcoder2-3b": (STARCODER2, 3_030_371_328, "mlp.activation=gelu_tanh"),
    "minitron-8b": (NEMOTRON, 8_271_699_968, "norm_one_plus=true; rotary.fraction=0.5"),
    "nemotron-h-8b": (
        NEMOTRON_H,
        8_100_852_736,
        "num_layers=52; mamba.num_heads=128; mamba.min_step=0.001; position=none",
    ),
    "bamba-9b": (BAMBA, 9_780_235_392, "rotary.fraction=0.5; mamba.num_groups=1"),
    "granite-4.0-h-tiny": (
        GRANITE4,
        6_939_037_248,
        "residual_scale=0.22; moe.shared_ffn_size=1024; attention.scale=0.0078125",
    ),
    "falcon-h1-0.5b": (
        FALCON_H1,
        521_411_104,
        "layers=*(attention+mamba,mlp); mamba.norm=false; attention.output_scale=0.9375",
    ),
    "mamba2-2.7b": (MAMBA2, 2_702_599_680, "layers=*(mamba); mamba.state_size=128; tied=true"),
    "lfm2-1.2b": (
        LFM2,
        1_170_340_608,
        "num_layers=16; mlp.ffn_size=8192; conv.kernel_size=3; rotary.base=1000000.0",
    ),
    **LINEAR,
    "gpt2-1.5b": (GPT2, 1_557_611_200, "position=learned; norm=layernorm"),
    "mixtral": (MIXTRAL, 46_702_792_704, "layers=*(attention,moe); moe.num_experts=8; moe.top_k=2"),
    "qwen2-moe": (QWEN2_MOE, 57_408_658_944, "moe.shared_gate=true; moe.softmax_before_topk=true"),
    "qwen3-moe": (QWEN3_MOE, 30_532_122_624, "moe.ffn_size=768; moe.softmax_before_topk=false"),
    "gpt-oss": (GPT_OSS, 116_829_156_672, "mlp.activation_clamp=7.0; attention.sinks=true"),
    # With the layer that predicts one more token, but not its copies of embedding and output.
    "glm-4.5": (GLM45, 356_785_898_816, "moe.bias_balancing=true; mtp.num_layers=1"),
    "deepseek-v2": (
        DEEPSEEK_V2,
        235_741_434_880,
        "moe.num_groups=8; layers=mla,mlp *(mla,moe); mla.kv_rank=512",
    ),
    "deepseek-v3": (DEEPSEEK_V3, 682_636_487_424, "moe.group_score_topk=2; mtp.num_layers=1"),
    **ENCODERS,
}


def dimensions_of(array: str, by_expert: bool) -> int:
    """Of an array: those that tensors are entries of, layers and where it is so experts."""
    return array.startswith("stack.") + by_expert


@pytest.mark.parametrize("name", thinned(PUBLISHED, 12))
def test_published_configs_give_the_published_models(name):
    config, parameters, settings = PUBLISHED[name]
    model, family = model_config(config), architecture(config)
    fields = values_of(settings, ModelConfig)
    assert {field: get(model, field) for field in fields} == fields
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


def test_every_family_has_a_case():
    actual = {architecture(config) for config, _, _ in PUBLISHED.values()}
    assert actual == FAMILIES.keys() - CLASSIFIERS.keys()


# At their sizes every fused and every transposed tensor has a shape of its own.
SMALL = families() | sparse() | with_states() | encoders() | encoder_decoders()
SMALL |= {
    f"{name}, predicting": (family, settings | {"num_mtp_layers": 1})
    for name, (family, settings) in sparse().items()
    if "num_mtp_layers" in settings
}


@pytest.mark.parametrize("name", thinned(SMALL, 12))
def test_split_and_join_are_inverses(name):
    family, settings = SMALL[name]
    if "layers_block_type" in settings:
        settings = settings | {"num_hidden_layers": len(settings["layers_block_type"])}
    model = model_config({**settings, "architectures": [family]})
    shapes = array_shapes(model)
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


def test_fused_outputs_are_split_and_joined():
    q, k, v = (np.array(rows, np.float32) for rows in ([1, 2, 3, 4], [5, 6], [7, 8]))
    stacked = np.array([1, 2, 3, 4, 5, 6, 7, 8], np.float32)
    grouped = np.array([1, 2, 5, 7, 3, 4, 6, 8], np.float32)
    for fusion, fused in ((Fusion(1, (4, 2, 2)), stacked), (Fusion(2, (2, 1, 1)), grouped)):
        np.testing.assert_array_equal(fusion.join((q, k, v)), fused)
        for part, wanted in zip(fusion.split(fused), (q, k, v), strict=True):
            np.testing.assert_array_equal(part, wanted)
        matrix = np.stack([fused, 10 * fused], axis=1)  # [out, in]
        np.testing.assert_array_equal(fusion.split(matrix)[1], np.stack([k, 10 * k]))
        turned = dataclasses.replace(fusion, outputs_first=False)
        np.testing.assert_array_equal(turned.split(matrix.T)[2], np.stack([v, 10 * v]))
        np.testing.assert_array_equal(turned.join(turned.split(matrix.T)), matrix.T)


REFUSED = {  # settings, what is changed, what the message must name
    "unknown architecture": (SMOLLM2, {"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
    "mamba 1": (
        SMOLLM2,
        {"architectures": ["JambaForCausalLM"]},
        "Mamba-2: choose one of",
    ),
    "question answers": (SMOLLM2, {"architectures": ["LlamaForQuestionAnswering"]}, "supported"),
    "two architectures": (SMOLLM2, {"architectures": ["LlamaForCausalLM"] * 2}, "architectures"),
    "no architecture": (SMOLLM2, {"architectures": None, "model_type": "mamba"}, "architectures"),
    "another kind": (SMOLLM2, {"model_type": "mistral"}, "model_type='mistral'"),
    "unknown key": (SMOLLM2, {"use_magic": 3}, "use_magic=3"),
    "a key of another family": (SMOLLM2, {"sliding_window": 64}, "sliding_window=64"),
    "remote code": (SMOLLM2, {"auto_map": {"AutoModel": "modeling_x.X"}}, "trust_remote_code"),
    "remote code, renamed": (PHI3, {"auto_map": {"AutoModel": "modeling_x.X"}}, "auto_map"),
    "remote code of a repository": (PHI3, {"auto_map": {"A": "x--modeling_phi3.X"}}, "auto_map"),
    "quantized": (SMOLLM2, {"quantization_config": {"bits": 4}}, "quantization_config"),
    "tensor parallel pretraining": (SMOLLM2, {"pretraining_tp": 2}, "pretraining_tp=2"),
    "pairs": (SMOLLM2, {"rope_interleaved": True}, "rope_interleaved=True"),
    "activation": (SMOLLM2, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    "activation, no name": (SMOLLM2, {"hidden_act": ["silu"]}, "hidden_act"),
    "size, text": (SMOLLM2, {"hidden_size": "576"}, "hidden_size='576'"),
    "size, fraction": (SMOLLM2, {"hidden_size": 576.5}, "hidden_size=576.5"),
    "size, boolean": (SMOLLM2, {"num_hidden_layers": True}, "num_hidden_layers=True"),
    "size, none": (SMOLLM2, {"hidden_size": None}, "hidden_size=None"),
    "size, zero": (SMOLLM2, {"num_attention_heads": 0}, "num_attention_heads=0"),
    "size, negative": (SMOLLM2, {"vocab_size": -1}, "vocab_size=-1"),
    "size, huge": (SMOLLM2, {"num_hidden_layers": 10**30}, "num_hidden_layers"),
    "layers, many": (GEMMA2, {"num_hidden_layers": 10**9}, "at most 10000"),
    "eps, infinite": (SMOLLM2, {"rms_norm_eps": math.inf}, "rms_norm_eps=inf"),
    "eps, not a number": (SMOLLM2, {"rms_norm_eps": math.nan}, "rms_norm_eps=nan"),
    "flag, number": (SMOLLM2, {"tie_word_embeddings": 1}, "tie_word_embeddings=1"),
    "heads": (SMOLLM2, {"num_attention_heads": 10}, "num_heads=10"),
    "key heads": (SMOLLM2, {"num_key_value_heads": 2}, "num_kv_heads=2"),
    "rope kind": (SMOLLM2, {"rope_scaling": {"type": "mrope"}}, "mrope"),
    "rope kinds": (SMOLLM2, {"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, "yarn"),
    "rope, no factor": (SMOLLM2, {"rope_scaling": {"type": "linear"}}, "factor=None"),
    "rope, factor": (SMOLLM2, {"rope_scaling": {"type": "linear", "factor": "2"}}, "factor='2'"),
    "rope, small factor": (SMOLLM2, {"rope_scaling": {"type": "linear", "factor": 0.5}}, "0.5"),
    "rope, unknown": (SMOLLM2, {"rope_scaling": {"type": "linear", "factor": 2, "x": 1}}, "x=1"),
    "rope, a list": (SMOLLM2, {"rope_scaling": [2.0]}, "rope_scaling=[2.0]"),
    "rope bases": (SMOLLM2, {"rope_parameters": {"rope_theta": 5.0}}, "contradicts"),
    "rope twice": (
        LLAMA31,
        {"rope_parameters": {"rope_type": "llama3", "factor": 32.0}},
        "rope_parameters has factor=32.0",
    ),
    "rope, partly": (SMOLLM2, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    "rope, odd": (PYTHIA, {"rotary_pct": 0.06}, "rotary_pct=0.06"),
    "rope, too much": (PYTHIA, {"rotary_pct": 1.5}, "rotary_pct=1.5"),
    "longrope, short": (
        PHI3,
        {"rope_scaling": {**PHI3["rope_scaling"], "long_factor": [1.0]}},
        "rotary.long_factors",
    ),
    "longrope, text": (
        PHI3,
        {"rope_scaling": {**PHI3["rope_scaling"], "long_factor": "1"}},
        "long_factor='1'",
    ),
    "longrope elsewhere": (PHI3, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "yarn"),
    "window": (MISTRAL, {"sliding_window": 0}, "sliding_window=0"),
    "late window": (
        QWEN25,
        {"use_sliding_window": True, "max_window_layers": -1},
        "max_window_layers",
    ),
    "layer types, count": (GEMMA2, {"layer_types": ["full_attention"]}, "list of 42"),
    "layer types, kind": (GEMMA2, {"layer_types": ["chunked_attention"] * 42}, "chunked"),
    "layer types, no window": (QWEN3, {"layer_types": ["sliding_attention"] * 36}, "window"),
    "soft-cap": (GEMMA2, {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping=0.0"),
    "both ways": (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "text part, quantized": (GEMMA3_4B, {"quantization_config": {"bits": 8}}, "bits"),
    "text part": (GEMMA3_4B, {"text_config": None}, "text_config"),
    "rope of layers": (GEMMA3, {"rope_parameters": {"rope_type": "default"}}, "full_attention"),
    "alibi": (FALCON_7B, {"alibi": True}, "alibi=True"),
    "falcon's norms": (FALCON_7B, {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn=2"),
    "falcon's order": (FALCON_40B, {"parallel_attn": False}, "parallel_attn=False"),
    "by layer": (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx=True"),
    "unscaled": (GPT2, {"scale_attn_weights": False}, "scale_attn_weights=False"),
    "encoder": (GPT2, {"add_cross_attention": True}, "add_cross_attention=True"),
    "phi's biases": (PHI3, {"attention_bias": True}, "attention_bias=True"),
    "experts, unknown key": (MIXTRAL, {"shared_expert_intermediate_size": 8}, "=8: Mixtral"),
    "experts, none": (MIXTRAL, {"num_local_experts": 0}, "num_local_experts=0"),
    "experts, too few": (MIXTRAL, {"num_local_experts": 1}, "moe.top_k=2"),
    "experts, twice": (QWEN3_MOE, {"num_local_experts": 64}, "num_experts=128 contradicts"),
    "noise of routers": (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
    "dense layers, text": (QWEN3_MOE, {"mlp_only_layers": ["0"]}, "mlp_only_layers=['0']"),
    "dense layers, step": (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
    "gates, another": (GPT_OSS, {"swiglu_alpha": 2.0}, "swiglu_alpha=2.0"),
    "shared experts": (GLM45, {"n_shared_experts": 0}, "n_shared_experts=0"),
    "one group": (GLM45, {"topk_group": 2}, "topk_group=2"),
    "groups": (DEEPSEEK_V3, {"n_group": 7}, "moe.num_groups=7"),
    "one expert": (DEEPSEEK_V3, {"num_experts_per_tok": 1}, "norm_topk_prob=True"),
    "choice": (DEEPSEEK_V2, {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
    "scores": (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    "sums": (DEEPSEEK_V2, {"norm_topk_prob": True}, "norm_topk_prob=True"),
    "layers with experts": (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq=2"),
    "latents": (DEEPSEEK_V3, {"kv_lora_rank": None}, "kv_lora_rank=None"),
    "latents, heads": (DEEPSEEK_V3, {"num_key_value_heads": 8}, "num_kv_heads"),
    "latents, rotary": (DEEPSEEK_V3, {"qk_rope_head_dim": 63}, "even number of the 63"),
    "eight bits": (DEEPSEEK_V3, {"quantization_config": {"quant_method": "fp8"}}, "fp8"),
    "starcoder's norm": (STARCODER2, {"norm_type": "rms"}, "norm_type='rms'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_settings_are_refused_by_name(name):
    config, changes, named = REFUSED[name]
    model_config(config)
    with pytest.raises(ValueError) as caught:
        model_config({**config, **changes})
    assert named in str(caught.value) and len(str(caught.value)) < 1100


ANYTHING = [None, True, False, 0, 1, -1, 2.5, math.nan, 10**40, "", "x", [], [[1]], {}]
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
    assert 0 < read < 640


LLAMA = model_config(SMOLLM2)
LOST = {  # family, fields, what the message must name
    "norm": ("LlamaForCausalLM", "norm=layernorm", "model.norm=layernorm"),
    "pairs": ("LlamaForCausalLM", "rotary.interleaved=true", "model.rotary.interleaved"),
    "sinks": ("LlamaForCausalLM", "attention.sinks=true", "model.attention.sinks"),
    "window": (
        "LlamaForCausalLM",
        "layers=*(local,mlp); attention.window=8",
        "model.attention.window=8",
    ),
    "one bias": (
        "LlamaForCausalLM",
        "attention.bias_qkv=true",
        "model.attention.bias_out=False",
    ),
    "activation": ("LlamaForCausalLM", "mlp.activation=gelu", "activation=gelu"),
    "ntk": (
        "LlamaForCausalLM",
        "rotary.scaling=ntk; rotary.factor=2.0",
        "rotary.scaling=ntk",
    ),
    "qwen without biases": ("Qwen2ForCausalLM", "", "model.attention.bias_qkv=False"),
    "no length": ("LlamaForCausalLM", "max_position=0", "model.max_position=0"),
    "no vocabulary": ("LlamaForCausalLM", "vocab_size=0", "model.vocab_size=0"),
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


def test_families_that_can_express_a_model_are_listed():
    assert families_of(LLAMA) == [
        *("LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM"),
        "GraniteMoeHybridForCausalLM",  # as Granite 4.0, which has no Mamba-2 without the H
    ]
    gpt = ModelConfig(vocab_size=50257, max_position=1024)
    assert families_of(with_fields(gpt, {"rotary.interleaved": True})) == []


IN_FILES = {  # family -> name in a file -> name of a binding, None for what holds no weights
    "LlamaForCausalLM": {
        "model.norm.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
        "model.layers.3.self_attn.rotary_emb.inv_freq": None,
    },
    "GPT2LMHeadModel": {
        "wte.weight": "transformer.wte.weight",
        "h.0.attn.c_attn.bias": "transformer.h.0.attn.c_attn.bias",
        "h.0.attn.bias": None,
        "transformer.h.0.attn.masked_bias": None,
    },
    "GPTNeoXForCausalLM": {
        "gpt_neox.layers.0.attention.dense.bias": "gpt_neox.layers.0.attention.dense.bias",
        "gpt_neox.layers.0.attention.bias": None,
        "embed_out.weight": "embed_out.weight",
    },
    "Gemma3ForCausalLM": {
        "language_model.model.norm.weight": "model.norm.weight",
        "model.language_model.norm.weight": "model.norm.weight",
        "vision_tower.x.weight": None,
        "model.multi_modal_projector.x": None,
    },
    "Qwen3_5ForCausalLM": {
        "model.visual.pos_embed.weight": None,
        "model.language_model.norm.weight": "model.norm.weight",
        "mtp.fc.weight": "mtp.fc.weight",
    },
}


@pytest.mark.parametrize("family", IN_FILES)
def test_names_in_files_are_mapped_to_canonical_names(family):
    wanted = {name: known for name, known in IN_FILES[family].items() if known}
    assert canonical_names(IN_FILES[family], family) == wanted


def test_a_tied_output_may_be_stored_twice():
    assert aliases(LLAMA, "LlamaForCausalLM") == {"lm_head.weight": "model.embed_tokens.weight"}
    assert not aliases(dataclasses.replace(LLAMA, tied=False), "LlamaForCausalLM")
