"""What a Megatron checkpoint says of itself: arguments, names, lists of parts; none of it is run.

No torch is needed: classes that torch pickles are stood in for, by module and name.
"""

import dataclasses
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from maxmeg.checkpoint.stream import TensorInfo
from maxmeg.config.schema import (
    Activation,
    Config,
    ModelConfig,
    Norm,
    Position,
    QkNorm,
    RotaryScaling,
)
from maxmeg.hf import megatron
from maxmeg.hf.families import bindings
from maxmeg.hf.torch_dist import CHILD, TorchDistReader, UnsafePickleError, common, volume

DCP = "torch.distributed.checkpoint"
SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


def test_the_child_is_a_script_of_its_own():
    text = CHILD.read_text()
    assert "maxmeg" not in text.replace("'maxmeg[megatron]'", "")
    others = [path for path in CHILD.parents[1].rglob("*.py") if path != CHILD]
    imports = [path for path in others if "torch_dist_child import" in path.read_text()]
    assert not imports


# Arguments of Megatron-LM, and fields of ModelConfig that follow.
GIVEN = [
    (
        {},
        {
            "num_kv_heads": 4,
            "head_dim": 16,
            "activation": Activation.gelu_tanh,
            "norm": Norm.layernorm,
            "norm_eps": 1e-5,
            "position": Position.learned,
            "bias_qkv": True,
            "bias_attention_out": True,
            "bias_mlp": True,
            "tied": True,
            "qk_norm": QkNorm.none,
            "norm_one_plus": False,
        },
    ),
    ({"bias_gelu_fusion": False}, {"activation": Activation.gelu}),
    ({"add_bias_linear": False}, {"activation": Activation.gelu, "bias_qkv": False}),
    ({"add_bias_linear": False, "add_qkv_bias": True}, {"bias_qkv": True, "bias_mlp": False}),
    ({"swiglu": True, "bias_gelu_fusion": True}, {"activation": Activation.swiglu}),
    ({"squared_relu": True}, {"activation": Activation.relu_squared}),
    ({"num_query_groups": 1}, {"num_kv_heads": 4}),
    ({"group_query_attention": True, "num_query_groups": 2}, {"num_kv_heads": 2}),
    ({"normalization": "RMSNorm", "norm_epsilon": 1e-6}, {"norm": Norm.rmsnorm, "norm_eps": 1e-6}),
    ({"apply_layernorm_1p": True, "kv_channels": 24}, {"norm_one_plus": True, "head_dim": 24}),
    ({"qk_layernorm": True}, {"qk_norm": QkNorm.head}),
    ({"qk_l2_norm": True}, {"qk_norm": QkNorm.l2}),
    ({"untie_embeddings_and_output_weights": True}, {"tied": False}),
    ({"window_size": [127, 0]}, {"attention_window": 128, "attention_global_every": 0}),
    (
        {"window_size": [127, 0], "window_attn_skip_freq": 4},
        {"attention_window": 128, "attention_global_every": 4},
    ),
    (
        {"position_embedding_type": "rope", "rotary_base": 500000, "rotary_percent": 0.5},
        {"position": Position.rotary, "rotary_base": 500000.0, "rotary_fraction": 0.5},
    ),
    (
        {"position_embedding_type": "rope", "use_rope_scaling": True, "rope_scaling_factor": 32.0},
        {
            "rotary_scaling": RotaryScaling.llama3,
            "rotary_factor": 32.0,
            "rotary_original_length": 8192,
        },
    ),
    (
        {"position_embedding_type": "rope", "rotary_seq_len_interpolation_factor": 2},
        {"rotary_scaling": RotaryScaling.linear, "rotary_factor": 2.0},
    ),
]


@pytest.mark.parametrize(("arguments", "fields"), GIVEN)
def test_arguments_are_fields(arguments: dict, fields: dict):
    found = megatron.architecture({**SIZES, **arguments})
    assert {name: found[name] for name in fields} == fields
    assert set(found) <= {field.name for field in dataclasses.fields(ModelConfig)}


REFUSED = [
    ({"num_experts": 8}, "num_experts=8"),
    ({"multi_latent_attention": True}, "multi_latent_attention=True"),
    ({"position_embedding_type": "yarn"}, r"position_embedding_type='yarn' \(supported are"),
    ({"normalization": "L2Norm"}, "normalization='L2Norm'"),
    ({"window_size": [8, 8]}, "window_size=.*8, 8"),
    ({"window_size": [8, 0], "window_attn_skip_freq": [1, 0]}, "window_attn_skip_freq"),
    ({"softmax_type": "learnable"}, "softmax_type='learnable'"),
    ({"quick_geglu": True, "mtp_num_layers": 1}, "mtp_num_layers=1; quick_geglu=True"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_other_maths_is_refused_by_name(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        megatron.architecture({**SIZES, **arguments})


def test_a_config_is_held_against_the_arguments():
    config = Config(model=ModelConfig(**megatron.architecture(SIZES)))
    config.data.tokenizer = "null:9"
    found = megatron.decided(config, SIZES, "")
    assert found == config and found is not config
    assert megatron.decided(config, {}, "null:7").data.tokenizer == "null:7"
    config.model.norm_eps, config.model.activation = 1e-6, Activation.gelu
    message = "activation=gelu, in the checkpoint gelu_tanh; model.norm_eps=1e-06, in the"
    with pytest.raises(ValueError, match=message):
        megatron.decided(config, SIZES, "")
    with pytest.raises(ValueError, match="no readable arguments: give its architecture"):
        megatron.decided(None, {}, "")


def test_the_tokenizer_is_that_of_the_arguments_where_it_is_here(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    here = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tmp_path)}
    assert megatron.tokenizer_name(here) == f"huggingface:{tmp_path / 'tokenizer.json'}"
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


MODEL = ModelConfig(vocab_size=10, num_layers=2, hidden_size=8, num_heads=2, ffn_size=16)
STACKED = "decoder.layers."


def tensors_of(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes by the names that layers have by themselves."""
    bound = bindings(model, megatron.family(model))
    return {binding.theirs: binding.shape for binding in bound}


def stack(shapes: dict) -> dict:
    found = {}
    for name, shape in shapes.items():
        prefix, _, rest = name.partition(f"{STACKED}0.")
        if not name.startswith(STACKED):
            found[name] = shape
        elif rest and not prefix:
            found[STACKED + rest] = (MODEL.num_layers, *shape)
    return found


def fuse_norms(shapes: dict) -> dict:
    for fused, plain in megatron.FUSED_NORMS:
        shapes = {name.replace(plain, fused): shape for name, shape in shapes.items()}
    return shapes


def halve(shapes: dict) -> dict:
    found = {}
    for name, shape in shapes.items():
        if name.endswith("linear_fc1.weight"):
            axis = len(shape) - 2
            half = (*shape[:axis], shape[axis] // 2, *shape[axis + 1 :])
            found |= {f"{name}_w": half, f"{name}_v": half}
        else:
            found[name] = shape
    return found


def locate(shapes: dict, model: ModelConfig = MODEL) -> dict[str, list[megatron.Piece]]:
    infos = {name: TensorInfo(np.dtype(np.float32), shape) for name, shape in shapes.items()}
    bound = bindings(model, megatron.family(model))
    return megatron.locate(bound, infos, dict.fromkeys(infos, "float32"))


NAMINGS = {
    "apart": [],
    "stacked": [stack],
    "fused norms": [fuse_norms],
    "halves": [halve],
    "stacked, fused norms, halves": [stack, fuse_norms, halve],
}


@pytest.mark.parametrize("naming", NAMINGS)
def test_every_naming_has_every_tensor(naming: str):
    shapes = tensors_of(MODEL)
    for change in NAMINGS[naming]:
        shapes = change(shapes)
    shapes |= {"optimizer.state.exp_avg.output_layer.weight": (1,), "rng_state.x": (1,)}
    shapes |= {"decoder.layers.mlp.linear_fc1._extra_state": (1,)}
    pieces = [piece for found in locate(shapes).values() for piece in found]
    used = {name for name in shapes if not megatron.LEFT_OUT.match(name)}
    assert {name for name, _ in pieces} == used and len(set(pieces)) == len(pieces)
    halves = [name for name, _ in locate(shapes)[f"{STACKED}1.mlp.linear_fc1.weight"]]
    assert [name[-2:] for name in halves] in (["_w", "_v"], ["ht"])


def changed(**changes) -> dict:
    """The stacked names with some shapes changed, by the end of a name; None takes it away."""
    shapes = stack(tensors_of(MODEL))
    for end, shape in changes.items():
        (name,) = [name for name in shapes if name.endswith(end.replace("__", "."))] or [end]
        shapes[name] = shape
    return {name: shape for name, shape in shapes.items() if shape is not None}


MISFITS = [
    (changed(linear_proj__weight=None), r"0.self_attention.linear_proj.weight \[8, 8\] is missing"),
    (changed(linear_fc2__weight=(1, 8, 16)), r"linear_fc2.weight \[1, 8, 16\] has no layer 1"),
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


def test_boxes_share_what_arrays_share():
    random = np.random.default_rng(0)
    for _ in range(200):
        corners = np.sort(random.integers(0, 5, (2, 3, 2)), axis=-1)
        masks = [np.zeros((5, 5, 5), bool) for _ in range(3)]
        boxes = [tuple((int(b), int(e)) for b, e in box) for box in corners]
        for box, mask in zip([*boxes, common(*boxes)], masks, strict=True):
            mask[tuple(slice(*bounds) for bounds in box)] = True
            assert mask.sum() == volume(box)
        assert (masks[2] == (masks[0] & masks[1])).all()


@dataclasses.dataclass(eq=False)
class Called:
    """A call of MODULE.NAME, which need not exist, and the state that the result gets; without
    arguments the name itself."""

    module: str
    name: str
    arguments: tuple | None = None
    state: object = None


def pickled(value) -> bytes:
    """Opcodes that make a value."""
    if isinstance(value, Called):
        code = f"c{value.module}\n{value.name}\n".encode()
        code += b"" if value.arguments is None else pickled(value.arguments) + b"R"
        return code + (b"" if value.state is None else pickled(value.state) + b"b")
    if isinstance(value, dict):
        return b"(" + b"".join(pickled(k) + pickled(v) for k, v in value.items()) + b"d"
    if isinstance(value, list | tuple):
        inside = b"".join(pickled(item) for item in value)
        return b"(" + inside + (b"l" if isinstance(value, list) else b"t")
    if isinstance(value, bool) or value is None:
        return {None: b"N", True: b"I01\n", False: b"I00\n"}[value]
    return (f"V{value}\n" if isinstance(value, str) else f"I{value}\n").encode()


def record(name: str, **state) -> Called:
    module = f"{DCP}.{'filesystem' if name == '_StorageInfo' else 'metadata'}"
    return Called(module, name, (), state)


def size(*sizes: int) -> Called:
    return Called("torch", "Size", (sizes,))


Part = tuple[tuple[int, ...], tuple[int, ...], str, int, int]  # offsets, sizes, file, start, length
FILE = "__0_0.distcp"  # of 100 bytes
HALVES: list[Part] = [((0, 0), (3, 2), FILE, 0, 60), ((3, 0), (1, 2), FILE, 60, 40)]


def metadata(parts: list[Part], shape: tuple[int, ...] = (4, 2)) -> Called:
    """Of a tensor "w"."""
    chunks = [
        record("ChunkStorageMetadata", offsets=size(*at), sizes=size(*of)) for at, of, *_ in parts
    ]
    storage = {
        record("MetadataIndex", fqn="w", offset=size(*at)): record(
            "_StorageInfo", relative_path=file, offset=start, length=length
        )
        for at, _, file, start, length in parts
    }
    properties = Called(f"{DCP}.metadata", "TensorProperties", ())
    properties.state = (Called("torch", "float32"), False)
    tensor = record(
        "TensorStorageMetadata", properties=properties, size=size(*shape), chunks=chunks
    )
    objects = {"w": tensor, "rng_state/shard_0_1": record("BytesStorageMetadata")}
    return record("Metadata", state_dict_metadata=objects, storage_data=storage)


def put(folder: Path, listed, common_state=None) -> Path:
    """A folder with these pickles and one file of tensors."""
    (folder / ".metadata").write_bytes(pickled(listed) + b".")
    (folder / FILE).write_bytes(b"x" * 100)
    if common_state is not None:
        with zipfile.ZipFile(folder / "common.pt", "w") as archive:
            archive.writestr("common/data.pkl", pickled(common_state) + b".")
    return folder


def test_lists_of_parts_are_read_without_torch(tmp_path: Path):
    with TorchDistReader(put(tmp_path, metadata(HALVES))) as reader:
        assert reader.tensors == {"w": TensorInfo(np.dtype(np.float32), (4, 2))}
        assert reader.arguments() == {}


PARTS = [
    ([((0, 0), (3, 2), FILE, 0, 60)], "parts of w cover 6 of 8 numbers"),
    ([((0, 0), (3, 2), FILE, 0, 60), ((2, 0), (1, 2), FILE, 0, 40)], "cover 8 of 8 .* or overlap"),
    ([((0, 0), (5, 2), FILE, 0, 60)], r"has a part \[5, 2\] at \[0, 0\], outside it"),
    ([((-1, 0), (4, 2), FILE, 0, 60)], "outside it"),
    ([((0,), (4,), FILE, 0, 60)], "outside it"),
    ([((0, 0), (4, 2), FILE, 90, 60)], "bytes 90 to 150 .*, which has 100: the file is truncated"),
    ([((0, 0), (4, 2), FILE, 0, 31)], r"a part \[4, 2\] of float32 in 31 bytes"),
    ([((0, 0), (4, 2), FILE, -9, 60)], "bytes -9 to 51"),
    ([((0, 0), (4, 2), "../__0_0.distcp", 0, 60)], "which .* does not have"),
    ([((0, 0), (4, 2), "__9_0.distcp", 0, 60)], "'__9_0.distcp', which .* does not have"),
]


@pytest.mark.parametrize(("parts", "message"), PARTS)
def test_parts_that_are_no_tensor_are_refused(parts, message: str, tmp_path: Path):
    (tmp_path / "in").mkdir()
    (tmp_path / FILE).write_bytes(b"x" * 100)
    put(tmp_path / "in", metadata(parts))
    with pytest.raises(ValueError, match=message), TorchDistReader(tmp_path / "in") as reader:
        reader.read("w")


def test_huge_sizes_cost_nothing(tmp_path: Path):
    vast = [((0, 0), (2**40, 2**20), FILE, 0, 60)]
    with pytest.raises(ValueError, match="of float32 in 60 bytes"):
        TorchDistReader(put(tmp_path, metadata(vast, (2**40, 2**20))))


def test_arguments_are_plain_values(tmp_path: Path):
    state = {
        "num_layers": 2,
        "swiglu": True,
        "window_size": (127, 0),
        "tokenizer_model": None,
        "params_dtype": Called("torch", "bfloat16"),
        "attention_backend": Called("megatron.core.transformer.enums", "AttnBackend", (5,)),
        "activation": Called("torch.nn.functional", "gelu"),
        "names": Called("__builtin__", "set", (["a"],)),
        "nested": {"a": 1},
    }
    common_state = {"args": Called("argparse", "Namespace", (), state), "iteration": 3}
    with TorchDistReader(put(tmp_path, metadata(HALVES), common_state)) as reader:
        found = reader.arguments()
    kept = {name: state[name] for name in ("num_layers", "swiglu", "tokenizer_model")}
    assert found == {
        **kept,
        "window_size": [127, 0],
        "params_dtype": "bfloat16",
        "attention_backend": 5,
        "names": ["a"],
    }


# What runs a command where pickles are trusted.
GADGETS = [
    ("os", "system", ("touch ran",)),
    ("posix", "system", ("touch ran",)),
    ("builtins", "eval", ("open('ran', 'w')",)),
    ("__builtin__", "exec", ("open('ran', 'w')",)),
    ("builtins", "getattr", ("a", "b")),
    ("subprocess", "Popen", (["touch", "ran"],)),
    ("numpy.f2py.diagnose", "run_command", ("touch ran",)),
    ("runpy", "run_path", ("ran.py",)),
    ("copyreg", "__newobj__", ()),
]


@pytest.mark.parametrize(("module", "name", "arguments"), GADGETS)
@pytest.mark.parametrize("where", [".metadata", "common.pt"])
def test_commands_are_refused_by_name(
    where: str, module: str, name: str, arguments: tuple, tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    gadget = Called(module, name, arguments)
    hostile = where == ".metadata"
    put(tmp_path, gadget if hostile else metadata(HALVES), {"args": gadget})
    message = rf"{where} wants {module}\.{name}, which no checkpoint needs"
    with pytest.raises(UnsafePickleError, match=message), TorchDistReader(tmp_path) as reader:
        reader.arguments()
    assert not (tmp_path / "ran").exists()


# Names that may stand in a file, called or changed as no file of torch's does: nothing runs.
INERT = [
    Called("torch", "load", ("ran",)),
    Called("torch.hub", "load", ("ran",)),
    Called("torch", "Size", None, {"__call__": 1}),
    Called(f"{DCP}.metadata", "Metadata", None, {"__init__": 1}),
    Called(f"{DCP}.metadata", "Metadata.__init__.__globals__", ()),
    metadata([((0, 0), ("4", 2), FILE, 0, 60)]),
    metadata([((0, 0), (4, 2), FILE, "0", 60)]),
    metadata([((0, 0), (4, 2), FILE, 0, 60)], (4, None)),
    [1, 2],
    "text",
]


@pytest.mark.parametrize("value", INERT, ids=range(len(INERT)))
def test_other_values_are_damage(value, tmp_path: Path):
    with pytest.raises(ValueError, match=r"\.metadata (is damaged|wants torch.hub.load)"):
        TorchDistReader(put(tmp_path, value))


def test_an_interpreter_without_torch_says_so(tmp_path: Path):
    """-S: no packages."""
    put(tmp_path, metadata(HALVES))
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    script.chmod(0o755)
    with (
        TorchDistReader(tmp_path, python=str(script)) as reader,
        pytest.raises(ValueError, match=r"no torch, .* pip install 'maxmeg\[megatron\]'"),
    ):
        reader.read("w")
