"""Megatron's arguments as fields of ours, and tensors by whatever names it gave them."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from written_settings import values_of

from maxmeg.checkpoint.stream import TensorInfo
from maxmeg.config.mixers import Activation
from maxmeg.config.model import ModelConfig
from maxmeg.config.schema import Config
from maxmeg.config.setting import walk, with_fields
from maxmeg.hf.families.read import bindings
from maxmeg.megatron import convert as megatron
from maxmeg.megatron import hybrid

SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


# Arguments of Megatron-LM, and fields of ModelConfig that follow.
GIVEN = [
    (
        {},
        "attention.num_kv_heads=4; attention.head_dim=16; "
        "mlp.activation=gelu_tanh; norm=layernorm; norm_eps=1e-05; position=learned; "
        "attention.bias_qkv=true; attention.bias_out=true; "
        "mlp.bias=true; tied=true; attention.qk_norm=none; norm_one_plus=false",
    ),
    ({"bias_gelu_fusion": False}, "mlp.activation=gelu"),
    ({"add_bias_linear": False}, "mlp.activation=gelu; attention.bias_qkv=false"),
    (
        {"add_bias_linear": False, "add_qkv_bias": True},
        "attention.bias_qkv=true; mlp.bias=false",
    ),
    ({"swiglu": True, "bias_gelu_fusion": True}, "mlp.activation=swiglu"),
    ({"squared_relu": True}, "mlp.activation=relu_squared"),
    ({"num_query_groups": 1}, "attention.num_kv_heads=4"),
    ({"group_query_attention": True, "num_query_groups": 2}, "attention.num_kv_heads=2"),
    ({"normalization": "RMSNorm", "norm_epsilon": 1e-6}, "norm=rmsnorm; norm_eps=1e-06"),
    (
        {"apply_layernorm_1p": True, "kv_channels": 24},
        "norm_one_plus=true; attention.head_dim=24",
    ),
    ({"qk_layernorm": True}, "attention.qk_norm=head"),
    ({"qk_l2_norm": True}, "attention.qk_norm=l2"),
    ({"untie_embeddings_and_output_weights": True}, "tied=false"),
    ({"window_size": [127, 0]}, "layers=*(local,mlp); attention.window=128"),
    (
        {"window_size": [127, 0], "window_attn_skip_freq": 4},
        "layers=*(local,mlp); attention.window=128",  # the fourth would be global
    ),
    (
        {"position_embedding_type": "rope", "rotary_base": 500000, "rotary_percent": 0.5},
        "position=rotary; rotary.base=500000.0; rotary.fraction=0.5",
    ),
    (
        {"position_embedding_type": "rope", "use_rope_scaling": True, "rope_scaling_factor": 32.0},
        "rotary.scaling=llama3; rotary.factor=32.0; rotary.original_length=8192",
    ),
    (
        {"position_embedding_type": "rope", "rotary_seq_len_interpolation_factor": 2},
        "rotary.scaling=linear; rotary.factor=2.0",
    ),
]

# The same of arguments beside num_experts.
ROUTED = [
    (
        {},
        "moe.top_k=2; layers=*(attention,moe); moe.score=softmax; moe.softmax_before_topk=false; "
        "moe.normalize_weights=false; moe.logit_bias=true; moe.ffn_size=256; "
        "moe.bias_balancing=false; moe.capacity_factor=0.0",
    ),
    ({"moe_ffn_hidden_size": 24, "ffn_hidden_size": 48}, "moe.ffn_size=24; mlp.ffn_size=48"),
    ({"moe_router_topk": 1, "moe_router_pre_softmax": True}, "moe.softmax_before_topk=true"),
    (
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        "moe.score=sigmoid; moe.normalize_weights=true; moe.bias_balancing=true",
    ),
    (
        {"moe_router_score_function": "sigmoid", "moe_router_topk": 1},
        "moe.normalize_weights=false; moe.top_k=1",
    ),
    (
        {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4}
        | {"moe_router_topk_scaling_factor": 2.5},
        "moe.num_groups=4; moe.topk_groups=2; moe.scale=2.5",
    ),
    (
        {"moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": True},
        "moe.shared_ffn_size=24; moe.shared_gate=true",
    ),
    ({"moe_layer_freq": 2}, "layers=*(attention,moe attention,mlp)"),
    ({"moe_layer_freq": [0, 1]}, "layers=*(attention,mlp attention,moe)"),
    ({"moe_router_load_balancing_type": "sinkhorn"}, "moe.sinkhorn=true"),
    ({"moe_router_load_balancing_type": ["aux_loss"]}, "moe.sinkhorn=false"),
    ({"moe_apply_probs_on_input": True, "moe_router_topk": 1}, "moe.scale_inputs=true"),
    (
        {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True},
        "moe.capacity_factor=1.5; moe.drop_policy=weight; moe.pad_to_capacity=true",
    ),
]
GIVEN += [({"num_experts": 8, **arguments}, fields) for arguments, fields in ROUTED]
# The same of hybrid models.
MIXED = {"num_layers": 4, "position_embedding_type": "none", "num_experts": 8}
HYBRIDS = [
    (
        {"hybrid_override_pattern": "M*ME", "mamba_num_heads": 6, "mamba_state_dim": 16},
        "layers=*(mamba attention mamba moe); mamba.num_heads=6; mamba.head_dim=64; "
        "mamba.num_groups=8; mamba.state_size=16; position=none; moe.top_k=2",
    ),
    (
        {"hybrid_layer_pattern": "M-|M*", "hybrid_override_pattern": None},
        "layers=*(mamba mlp mamba attention); mamba.num_heads=8; attention.num_heads=4",
    ),
    (
        {"hybrid_override_pattern": "M**-", "window_size": [7, 0]},
        "layers=mamba 2(local) *(mlp); attention.window=8",
    ),
    (
        {"hybrid_attention_ratio": 0.25, "hybrid_mlp_ratio": 0.25},
        "layers=2(mamba) *(attention mlp)",
    ),
    ({"is_hybrid_model": True, "hybrid_mlp_ratio": 0.0, "num_layers": 2}, "layers=*(mamba)"),
    (
        {"hybrid_override_pattern": "GM*-", "linear_num_value_heads": 8, "swiglu": True}
        | {"normalization": "RMSNorm", "add_bias_linear": False},
        "layers=*(gated_delta mamba attention mlp); delta.num_heads=8; delta.num_key_heads=16; "
        "delta.key_size=128; delta.value_size=128; delta.kernel_size=4",
    ),
]
GIVEN += [({**MIXED, "hidden_size": 256, **given}, fields) for given, fields in HYBRIDS]


@pytest.mark.parametrize(("arguments", "fields"), GIVEN)
def test_arguments_set_fields_of_the_model(arguments: dict, fields: str):
    actual, wanted = megatron.architecture({**SIZES, **arguments}), values_of(fields, ModelConfig)
    assert {name: actual[name] for name in wanted} == wanted
    assert set(actual) <= {path for path, _, _ in walk(ModelConfig())}


REFUSED = [
    ({"num_experts": 8, "moe_latent_size": 4}, "moe_latent_size=4"),
    ({"num_experts": 8, "moe_router_score_function": "x"}, "score_function='x' .supported are"),
    ({"num_experts": 8, "moe_layer_freq": [1, 0, 1]}, "moe_layer_freq=.* of 2 layers"),
    ({"num_experts": 8, "moe_layer_freq": 0}, "moe_layer_freq=0"),
    ({"num_experts": 8, "moe_expert_capacity_factor": 1.5, "moe_token_drop_policy": "x"}, "='x'"),
    ({"use_mup": True}, "use_mup"),
    ({"scaling_recipe": "mup"}, "scaling_recipe"),
    ({"multi_latent_attention": True}, "multi_latent_attention=True"),
    ({"position_embedding_type": "yarn"}, r"position_embedding_type='yarn' \(supported are"),
    ({"normalization": "L2Norm"}, "normalization='L2Norm'"),
    ({"window_size": [8, 8]}, "window_size=.*8, 8"),
    ({"window_size": [8, 0], "window_attn_skip_freq": [1, 0]}, "window_attn_skip_freq"),
    ({"softmax_type": "learnable"}, "softmax_type='learnable'"),
    ({"quick_geglu": True, "mtp_num_layers": 1}, "mtp_num_layers=1; quick_geglu=True"),
    (
        {"hybrid_layer_pattern": "MD/M/M"},
        r"hybrid_layer_pattern='MD/M/M' has MTP layers \(after /\), which are not imported",
    ),
    ({"hybrid_override_pattern": "D+"}, r"has the letters D \+ \(supported are M \(mamba\), "),
    (
        {"hybrid_override_pattern": "MG", "squared_relu": True, "apply_layernorm_1p": True},
        "normalization=None, swiglu=None, apply_layernorm_1p=True beside G",
    ),
    ({"hybrid_override_pattern": "M*-"}, "'M.-' has 3 layers, and num_layers=2 .they must be eq"),
    ({"hybrid_override_pattern": "MM", "norm_epsilon": 1e-6}, "norm_epsilon=1e-06 beside Mamba-2"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_unsupported_arguments_are_refused_by_name(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        megatron.architecture({**SIZES, **arguments})


def test_a_config_must_match_the_arguments():
    config = Config(model=with_fields(ModelConfig(), megatron.architecture(SIZES)))
    config.data.tokenizer = "null:9"
    actual = megatron.resolve_config(config, SIZES, "")
    assert actual == config and actual is not config
    assert megatron.resolve_config(config, {}, "null:7").data.tokenizer == "null:7"
    config.model.norm_eps, config.model.mlp.activation = 1e-6, Activation.gelu
    config.model.attention.softcap = 30.0
    message = (
        "model.norm_eps=1e-06, in the checkpoint 1e-05; model.attention.softcap=30.0, in the "
        "checkpoint 0.0; model.mlp.activation=gelu, in the checkpoint gelu_tanh$"
    )
    with pytest.raises(ValueError, match=message):
        megatron.resolve_config(config, SIZES, "")
    placed = SIZES | {"num_experts": 4, "moe_layer_freq": [0, 1], "add_bias_linear": False}
    config = Config(model=with_fields(ModelConfig(), megatron.architecture(placed)))
    config.data.tokenizer = "null:9"
    config.model.layers = "attention,mlp attention,moe"  # the same layers
    assert megatron.resolve_config(config, placed, "").model.layers == config.model.layers
    config.model.layers = "*(attention,moe)"
    with pytest.raises(ValueError, match=r"layers=\*\(attention,moe\), in the checkpoint "):
        megatron.resolve_config(config, placed, "")
    with pytest.raises(ValueError, match="no readable arguments: give its architecture"):
        megatron.resolve_config(None, {}, "")


def test_the_tokenizer_comes_from_the_arguments_if_its_file_exists(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    here = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tmp_path)}
    assert megatron.tokenizer_name(here) == f"huggingface:{tmp_path / 'tokenizer.json'}"
    more = megatron.tokenizer_name(here | {"tokenizer_special_tokens": ["<a,b>", "<|c d|>"]})
    assert more == f"huggingface:{tmp_path / 'tokenizer.json'}?special_tokens=<a%2Cb>,<|c d|>"
    ranks = {"tokenizer_type": "TikTokenizer", "tokenizer_model": str(tmp_path / "tokenizer.json")}
    ranks |= {"tiktoken_pattern": "v1", "tiktoken_num_special_tokens": 9, "vocab_size": 300}
    options = "pattern=v1&num_special_tokens=9&vocab_size=300"
    assert megatron.tokenizer_name(ranks) == f"tiktoken:{tmp_path / 'tokenizer.json'}?{options}"
    null = {"tokenizer_type": "NullTokenizer", "vocab_size": 99}
    assert megatron.tokenizer_name(null) == "null:100"
    for absent in ({}, {**here, "tokenizer_model": "/nowhere"}, {"tokenizer_type": "GPT2BPE"}):
        with pytest.raises(ValueError, match=r"tokenizer .* is not here: give a config"):
            megatron.tokenizer_name(absent)


FOLDERS = [
    ({}, "has neither .metadata nor latest_checkpointed_iteration.txt"),
    ({"mp_rank_00/model_optim_rng.pt": ""}, r"is of the old format torch \(mp_rank_\*\)"),
    (
        {".metadata": "", "metadata.json": '{"sharded_backend": "zarr"}'},
        "is of sharded_backend='zarr'",
    ),
    ({"latest_checkpointed_iteration.txt": "12"}, "iter_0000012 has neither"),
]


@pytest.mark.parametrize(("names", "message"), FOLDERS)
def test_other_folders_are_refused_with_the_way_to_save_them(names, message, tmp_path: Path):
    for name, text in names.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message + r"[\s\S]*--ckpt-convert-format torch_dist"):
        megatron.iteration_folder(tmp_path)
    assert megatron.is_checkpoint(tmp_path) == bool(names)


@pytest.mark.parametrize("latest", ["12\n", "release"])
def test_the_latest_iteration_is_taken(latest: str, tmp_path: Path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(latest)
    folder = tmp_path / ("release" if latest == "release" else "iter_0000012")
    folder.mkdir()
    (folder / ".metadata").touch()
    assert megatron.iteration_folder(tmp_path) == megatron.iteration_folder(folder) == folder


MODEL = with_fields(
    ModelConfig(),
    {
        "vocab_size": 10,
        "num_layers": 2,
        "hidden_size": 8,
        "attention.num_heads": 2,
        "mlp.ffn_size": 16,
    },
)
STACKED = "decoder.layers."


def tensors_of(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes by the names that layers have by themselves."""
    bound = bindings(model, megatron.family(model))
    return {binding.theirs: binding.shape for binding in bound}


def stack(shapes: dict) -> dict:
    actual = {}
    for name, shape in shapes.items():
        prefix, _, rest = name.partition(f"{STACKED}0.")
        if not name.startswith(STACKED):
            actual[name] = shape
        elif rest and not prefix:
            actual[STACKED + rest] = (MODEL.num_layers, *shape)
    return actual


def fuse_norms(shapes: dict) -> dict:
    for fused, plain in megatron.FUSED_NORMS:
        shapes = {name.replace(plain, fused): shape for name, shape in shapes.items()}
    return shapes


def halve(shapes: dict) -> dict:
    actual = {}
    for name, shape in shapes.items():
        if name.endswith("linear_fc1.weight"):
            axis = len(shape) - 2
            half = (*shape[:axis], shape[axis] // 2, *shape[axis + 1 :])
            actual |= {f"{name}_w": half, f"{name}_v": half}
        else:
            actual[name] = shape
    return actual


def locate(shapes: dict, model: ModelConfig = MODEL) -> dict[str, list[megatron.Piece]]:
    infos = {name: TensorInfo(np.dtype(np.float32), shape) for name, shape in shapes.items()}
    bound = bindings(model, megatron.family(model))
    return megatron.locate(bound, infos, dict.fromkeys(infos, "float32"))


@pytest.mark.parametrize("changes", [[], [stack, fuse_norms, halve]])
def test_tensors_are_found_under_every_naming(changes: list):
    shapes = tensors_of(MODEL)
    for change in changes:
        shapes = change(shapes)
    shapes |= {"optimizer.state.exp_avg.output_layer.weight": (1,), "rng_state.x": (1,)}
    shapes |= {"decoder.layers.mlp.linear_fc1._extra_state": (1,)}
    pieces = [piece for actual in locate(shapes).values() for piece in actual]
    used = {name for name in shapes if not megatron.IGNORED.match(name)}
    assert {name for name, _ in pieces} == used and len(set(pieces)) == len(pieces)
    halves = [name for name, _ in locate(shapes)[f"{STACKED}1.mlp.linear_fc1.weight"]]
    assert [name[-2:] for name in halves] in (["_w", "_v"], ["ht"])


SPARSE = with_fields(
    MODEL,
    {
        "layers": "*(attention,moe)",
        "moe.num_experts": 3,
        "moe.ffn_size": 6,
        "moe.shared_ffn_size": 4,
        "moe.shared_gate": True,
        "mlp.bias": True,
    },
)


def stack_experts(shapes: dict) -> dict:
    actual = {}
    for name, shape in shapes.items():
        plain = re.sub(r"\.experts\.experts\.\d+\.", ".experts.experts.", name)
        actual[plain] = shape if plain == name else (SPARSE.moe.num_experts, *shape)
    return actual


@pytest.mark.parametrize("changes", [[], [stack_experts], [stack_experts, stack], [halve]])
@pytest.mark.parametrize("pattern", ["*(attention,moe)", "attention,mlp *(attention,moe)"])
def test_experts_are_found_separately_or_stacked(changes, pattern):
    if "mlp" in pattern and stack in changes:
        return  # layers that differ are never stacked
    model = dataclasses.replace(SPARSE, layers=pattern)
    shapes = tensors_of(model)
    for change in changes:
        shapes = change(shapes)
    actual = locate(shapes, model)
    pieces = [piece for parts in actual.values() for piece in parts]
    assert {name for name, _ in pieces} == set(shapes) and len(set(pieces)) == len(pieces)
    lead = (1,) * (stack in changes) + (2,) * (stack_experts in changes)
    assert actual[f"{STACKED}1.mlp.experts.experts.2.linear_fc2.weight"][0][1] == lead


MIXED_MODEL = with_fields(
    MODEL,
    {
        "layers": "M*-E",
        "num_layers": 4,
        "mamba.head_dim": 4,
        "mamba.num_groups": 2,
        "mamba.state_size": 3,
        "moe.num_experts": 2,
        "moe.ffn_size": 6,
    },
)


def split_projections(shapes: dict) -> dict:
    """Mamba-2's projections and norm as Megatron-LM stores them: rows of z, x, B, C and dt."""
    rows = {"z": 16, "x": 16, "B": 6, "C": 6, "dt": 4}
    actual = {}
    for name, (count, *rest) in shapes.items():
        parts = hybrid.parts(name)
        actual |= {part: (rows[part.rpartition(".")[2]], *rest) for part in parts}
        fused = name.replace("0.input_layernorm.", "0.mixer.in_proj.layer_norm_")
        actual |= {} if parts else {fused: (count, *rest)}
    return actual


def test_the_projections_of_mamba_are_found_whole_or_in_parts():
    whole = tensors_of(MIXED_MODEL)
    for shapes in (whole, split_projections(whole), fuse_norms(split_projections(whole))):
        pieces = [piece for actual in locate(shapes, MIXED_MODEL).values() for piece in actual]
        assert {name for name, _ in pieces} == set(shapes) and len(pieces) == len(shapes)
    mixer = f"{STACKED}0.mixer.in_proj.weight"
    assert [name for name, _ in locate(split_projections(whole), MIXED_MODEL)[mixer]] == [
        f"{mixer}.{end}" for end in ("z", "x", "B", "C", "dt")
    ]
    shapes = split_projections(whole)
    shapes[f"{mixer}.B"] = (8, 8)
    with pytest.raises(ValueError, match=r"weight.z is \[50, 8\], the model needs \[48, 8"):
        locate(shapes, MIXED_MODEL)
    del shapes[f"{mixer}.B"]
    with pytest.raises(ValueError, match=r"in_proj.weight \[48, 8\] is missing"):
        locate(shapes, MIXED_MODEL)


def test_tensors_of_another_pattern_are_refused_with_their_own():
    names = fuse_norms(split_projections(tensors_of(MIXED_MODEL)))
    hybrid.check_layers(MIXED_MODEL, names, STACKED)
    hybrid.check_layers(MODEL, tensors_of(MODEL), STACKED)  # not a hybrid model
    other = dataclasses.replace(MIXED_MODEL, layers="M*E", num_layers=3)
    message = r"='M\*E' with model.num_layers=3 .* set model.layers='M\*-E' and .*num_layers=4"
    with pytest.raises(ValueError, match=message):
        hybrid.check_layers(other, names, STACKED)


@pytest.mark.parametrize("layers", [False, True])
def test_another_number_of_experts_is_named(layers):
    shapes = stack_experts(tensors_of(SPARSE))
    shapes = stack(shapes) if layers else shapes
    kind = "linear_fc2.weight has 3 experts, the model 2"
    for count, message in ((2, kind), (4, r"linear_fc2\.weight .* has no entry (\d, )?3")):
        with pytest.raises(ValueError, match=message):
            locate(
                shapes,
                with_fields(SPARSE, {"layers": "*(attention,moe)", "moe.num_experts": count}),
            )


def changed(**changes) -> dict:
    """The stacked names with some shapes changed, by the end of a name; None takes it away."""
    shapes = stack(tensors_of(MODEL))
    for end, shape in changes.items():
        (name,) = [name for name in shapes if name.endswith(end.replace("__", "."))] or [end]
        shapes[name] = shape
    return {name: shape for name, shape in shapes.items() if shape is not None}


MISFITS = [
    (changed(linear_proj__weight=None), r"0.self_attention.linear_proj.weight \[8, 8\] is missing"),
    (changed(linear_fc2__weight=(1, 8, 16)), r"linear_fc2.weight \[1, 8, 16\] has no entry 1"),
    (changed(linear_fc2__weight=(3, 8, 16)), "linear_fc2.weight has 3 layers, the model 2"),
    (changed(linear_qkv__weight=(2, 16, 8)), r"is \[16, 8\], the model needs \[24, 8\]"),
    (changed(word_embeddings__weight=(9, 8)), "has 9 words, the model 10"),
    (changed(word_embeddings__weight=(16, 4)), r"is \[16, 4\], the model needs \[10, 8\]"),
    (changed(router=(4,)), r"router \(float32\) has no place in this model"),
    (
        changed(linear_proj__weight=None)
        | {f"{STACKED}0.self_attention.linear_proj.weight": (8, 8)},
        "1.self_attention.linear_proj.weight",
    ),
    (changed() | {f"{STACKED}mlp.linear_fc1.layer_norm_weight": (2, 8)}, "are the same weights"),
]


@pytest.mark.parametrize(("shapes", "message"), MISFITS)
def test_tensors_that_do_not_fit_are_named(shapes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        locate(shapes)
