"""Megatron's torch_dist checkpoints of GPT models -> folders of ours.

Layers lie stacked under one name (`decoder.layers.mlp.linear_fc2.weight` [L, ...]) or each under
its own; norms are named as Transformer Engine fuses them or as they stand; queries, keys and values
are interleaved by groups of heads, [gate; up] are one tensor or two (`weight_w`, `weight_v`).
Experts are stacked too, or each by itself (see megatron_experts.py).
Optimizer, schedules and random states are left out.
"""

import copy
import json
import math
import os
import pathlib
import re
import shutil
import sys
import typing
import urllib.parse
from collections.abc import Iterable, Mapping

import numpy as np

from maxmeg.checkpoint.stream import StreamWriter, TensorInfo
from maxmeg.config import files
from maxmeg.config.architecture import model_problems
from maxmeg.config.model import Activation, ModelConfig, Norm, Position, QkNorm, RotaryScaling
from maxmeg.config.schema import Config
from maxmeg.config.validate import resolve
from maxmeg.data.tokenizers import load_tokenizer
from maxmeg.hf import megatron_experts
from maxmeg.hf.binding import Binding
from maxmeg.hf.convert import Report
from maxmeg.hf.families import FREE, bindings, plain_value, unused_arrays
from maxmeg.hf.keys import resolved
from maxmeg.hf.tables import QKV, Family
from maxmeg.hf.torch_dist import METADATA, TorchDistReader
from maxmeg.hf.trained import array_path, array_paths
from maxmeg.state import CHECKPOINTS, VOCABULARY_TABLES

Arguments = Mapping[str, typing.Any]
# A tensor of the checkpoint, or an entry of it: of a layer, of an expert, or of both.
Piece = tuple[str, tuple[int, ...]]

LATEST = "latest_checkpointed_iteration.txt"
LAYER = "decoder.layers."
# A layer's number, an expert's: how names with them begin to be those of stacked tensors.
NUMBERED = {
    LAYER: re.compile(r"^decoder\.layers\.(\d+)\."),
    ".experts.experts.": re.compile(r"\.experts\.experts\.(\d+)\."),
}
ENDS = {
    "embedding": "embedding.word_embeddings",
    "positions": "embedding.position_embeddings",
    "final_norm": "decoder.final_layernorm",
    "output": "output_layer",
}
LAYERS = {
    QKV: "self_attention.linear_qkv",
    "attention.query_norm": "self_attention.q_layernorm",
    "attention.key_norm": "self_attention.k_layernorm",
    "attention.out": "self_attention.linear_proj",
    "mlp.out": "mlp.linear_fc2",
    "attention.norm": "input_layernorm",
    "mlp.norm": "pre_mlp_layernorm",
}
FUSED_NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)
LEFT_OUT = re.compile(
    r"(chained_\d+\.)?optimizer\.|opt_param_scheduler|rng_state|rerun_state|common_state"
    r"|.*\._extra_state"
)

REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")
# Arguments that would change the maths, and the values with which they do not.
WITHOUT_EFFECT: dict[str, tuple] = {
    "multi_latent_attention": (None, False),
    "attention_output_gate": (None, False),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "heterogeneous_layers_config_path": (None,),
    "hybrid_override_pattern": (None,),
    "is_hybrid_model": (None, False),
    "mtp_num_layers": (None, 0),
    "apply_residual_connection_post_layernorm": (None, False),
    "quick_geglu": (None, False),
    "activation_func_clamp_value": (None,),
    "no_rope_freq": (None,),
    "softmax_type": (None, "vanilla"),
    "retro_add_retriever": (None, False),
    "num_tokentypes": (None, 0),
}
POSITIONS = {
    "learned_absolute": Position.learned,
    "rope": Position.rotary,
    "none": Position.none,
}
NORMS = {"LayerNorm": Norm.layernorm, "RMSNorm": Norm.rmsnorm}


def import_megatron(
    source: str | os.PathLike,
    target: str | os.PathLike,
    config: Config | None = None,
    tokenizer: str = "",
    python: str = sys.executable,
) -> Report:
    """Makes a run's folder of a checkpoint: config.yaml, and a step 0 that holds the model alone.

    source: a folder of iterations (the latest is taken) or of one. config: the architecture and
    data.tokenizer; without it both are those of the checkpoint's arguments. tokenizer: in place of
    either's. python: an interpreter with torch. ValueError, naming every tensor and setting that
    does not fit, before anything is written.
    """
    target = pathlib.Path(target).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not empty: choose another folder")
    with TorchDistReader(iteration_folder(source), python) as reader:
        config = decided(config, reader.arguments(), tokenizer)
        config.run_dir = str(target)
        identity = resolve_sizes(config, reader.tensors)
        bound = bindings(config.model, family(config.model))
        pieces = locate(bound, reader.tensors, reader.dtypes)
        metadata = {
            "config": files.to_dict(config),
            "tokenizer": identity,
            "consumed_samples": 0,
        }
        try:
            with StreamWriter(
                target / CHECKPOINTS, 0, array_paths(config.model), metadata
            ) as writer:
                for binding in bound:
                    write(writer, reader, binding, pieces[binding.theirs])
                for name, shape in unused_arrays(config.model).items():
                    writer.write(array_path(name), np.zeros(shape, np.float32))
        except BaseException:
            shutil.rmtree(target / CHECKPOINTS, ignore_errors=True)
            raise
    files.save(config, target / "config.yaml")
    count = sum(math.prod(binding.shape) for binding in bound)
    return Report("megatron", len(bound), count, config.data.tokenizer)


def write(
    writer: StreamWriter, reader: TorchDistReader, binding: Binding, pieces: list[Piece]
) -> None:
    """One tensor of theirs as arrays of ours."""
    tensors = [reader.read(name, *index) for name, index in pieces]
    tensor = tensors[0] if len(tensors) == 1 else np.concatenate(tensors)
    padded = binding.ours[0].name in VOCABULARY_TABLES
    if padded:
        tensor = tensor[: binding.shape[0]]  # their rows beyond the vocabulary are not zero
    for place, array in zip(binding.ours, binding.split(tensor), strict=True):
        writer.write(array_path(place.name), array, place.index, pad_rows=padded)


def is_checkpoint(folder: str | os.PathLike) -> bool:
    """Whether a folder is Megatron's, of whatever format."""
    folder = pathlib.Path(folder)
    there = (folder / METADATA).is_file() or (folder / LATEST).is_file()
    return there or any(folder.glob("mp_rank_*"))


def iteration_folder(source: str | os.PathLike) -> pathlib.Path:
    """The folder of one iteration; ValueError says what else a folder is."""
    folder = pathlib.Path(source)
    if (folder / LATEST).is_file():
        latest = (folder / LATEST).read_text().strip()
        folder /= latest if latest == "release" else f"iter_{latest:0>7}"
    if (folder / METADATA).is_file():
        described = folder / "metadata.json"
        backend = json.loads(described.read_text()) if described.is_file() else {}
        if backend.get("sharded_backend", "torch_dist") == "torch_dist":
            return folder
        found = f"is of sharded_backend={backend['sharded_backend']!r}"
    elif any(folder.glob("mp_rank_*")):
        found = "is of the old format torch (mp_rank_*)"
    else:
        found = f"has neither {METADATA} nor {LATEST}"
    raise ValueError(
        f"{folder} {found}: give a checkpoint of Megatron's format torch_dist, or save it as one "
        "(--ckpt-convert-format torch_dist)"
    )


def decided(config: Config | None, arguments: Arguments, tokenizer: str) -> Config:
    """A copy of the config given, held against the arguments, or the one that these describe."""
    fields = architecture(arguments)
    if config is None:
        if not fields:
            raise ValueError(
                "the checkpoint has no readable arguments: give its architecture, --config=..."
            )
        config = Config(model=ModelConfig(**fields))
        config.data.tokenizer = tokenizer or tokenizer_name(arguments)
        config.data.sequence_length = arguments.get("seq_length") or config.data.sequence_length
        return config
    given = {field: resolved(config.model, field) for field in fields}
    theirs = ModelConfig(**fields)
    wrong = [
        f"model.{field}={getattr(given[field], 'name', given[field])}, in the checkpoint "
        f"{getattr(value, 'name', value)}"
        for field, value in fields.items()
        if field != "max_position"
        and plain_value(config.model, field) != plain_value(theirs, field)
    ]
    if wrong:
        raise ValueError(f"the config is not of the checkpoint's model: {'; '.join(wrong)}")
    config = copy.deepcopy(config)
    config.data.tokenizer = tokenizer or config.data.tokenizer
    return config


def architecture(arguments: Arguments) -> dict[str, typing.Any]:
    """What ModelConfig's fields stand for; empty where the arguments name no model. ValueError for
    maths that ours has not."""
    if not all(arguments.get(name) for name in REQUIRED):
        return {}

    def flag(name: str) -> bool:
        return bool(arguments.get(name, False))

    def chosen(name: str, default: str, table: Mapping[str, typing.Any]) -> typing.Any:
        value = arguments.get(name) or default
        if value not in table:
            refused.append(f"{name}={value!r} (supported are {', '.join(table)})")
        return table.get(value)

    refused = [
        f"{name}={arguments[name]!r}"
        for name, values in WITHOUT_EFFECT.items()
        if name in arguments and arguments[name] not in values
    ]
    linear_bias = bool(arguments.get("add_bias_linear", True))
    heads = arguments["num_attention_heads"]
    groups = arguments.get("num_query_groups") if flag("group_query_attention") else heads
    fields = {
        "num_layers": arguments["num_layers"],
        "hidden_size": arguments["hidden_size"],
        "num_heads": heads,
        "num_kv_heads": groups or heads,
        "head_dim": arguments.get("kv_channels") or arguments["hidden_size"] // heads,
        "activation": activation(arguments, linear_bias),
        "norm": chosen("normalization", "LayerNorm", NORMS),
        "norm_eps": arguments.get("norm_epsilon", 1e-5),
        "norm_one_plus": flag("apply_layernorm_1p"),
        "position": chosen("position_embedding_type", "learned_absolute", POSITIONS),
        "qk_norm": qk_norm(arguments),
        "bias_qkv": linear_bias or flag("add_qkv_bias"),
        "bias_attention_out": linear_bias,
        "bias_mlp": linear_bias,
        "tied": not flag("untie_embeddings_and_output_weights"),
        "max_position": arguments.get("max_position_embeddings") or 0,
        **windows(arguments, refused),
        **megatron_experts.fields(arguments, refused),
    }
    if fields["position"] is Position.rotary:
        fields |= rotary(arguments)
    if refused:
        raise ValueError(f"the checkpoint's model is not supported: {'; '.join(refused)}")
    model = ModelConfig(**fields, ffn_size=arguments.get("ffn_hidden_size") or 0)
    open_fields = {*FREE, "vocab_size"}  # all others are decided, what Megatron has not is off
    return {field: resolved(model, field) for field in vars(model) if field not in open_fields}


def activation(arguments: Arguments, linear_bias: bool) -> Activation:
    """Its fused bias + GELU is the approximation by tanh, its plain one is exact."""
    if arguments.get("swiglu"):
        return Activation.swiglu
    if arguments.get("squared_relu"):
        return Activation.relu_squared
    fused = linear_bias and arguments.get("bias_gelu_fusion", True)
    return Activation.gelu_tanh if fused else Activation.gelu


def qk_norm(arguments: Arguments) -> QkNorm:
    if arguments.get("qk_l2_norm"):
        return QkNorm.l2
    return QkNorm.head if arguments.get("qk_layernorm") else QkNorm.none


def windows(arguments: Arguments, refused: list[str]) -> dict[str, int]:
    """Their window is what lies before a token, ours has the token too; -1 is without end."""
    size, every = arguments.get("window_size"), arguments.get("window_attn_skip_freq")
    if not size:
        return {}
    if len(size) != 2 or size[1] > 0 or size[0] < 0 or not isinstance(every, int | None):
        refused.append(f"window_size={size}, window_attn_skip_freq={every}")
        return {}
    return {"attention_window": size[0] + 1, "attention_global_every": every or 0}


def rotary(arguments: Arguments) -> dict[str, typing.Any]:
    found = {
        "rotary_base": float(arguments.get("rotary_base") or 10000),
        "rotary_fraction": float(arguments.get("rotary_percent") or 1.0),
        "rotary_interleaved": bool(arguments.get("rotary_interleaved")),
    }
    if arguments.get("use_rope_scaling"):
        found |= {
            "rotary_scaling": RotaryScaling.llama3,
            "rotary_factor": float(arguments.get("rope_scaling_factor") or 8.0),
            "rotary_original_length": 8192,
            "rotary_low": 1.0,
            "rotary_high": 4.0,
        }
    elif factor := arguments.get("rotary_seq_len_interpolation_factor"):
        found |= {"rotary_scaling": RotaryScaling.linear, "rotary_factor": float(factor)}
    return found


def tokenizer_name(arguments: Arguments) -> str:
    """data.tokenizer of a run's arguments, where its file is here."""
    kind, model = arguments.get("tokenizer_type"), arguments.get("tokenizer_model")
    if kind == "NullTokenizer" and arguments.get("vocab_size"):
        return f"null:{arguments['vocab_size'] + 1}"  # and the end of a document
    prefix = {
        "HuggingFaceTokenizer": "huggingface",
        "SentencePieceTokenizer": "sentencepiece",
        "GPTSentencePieceTokenizer": "sentencepiece",
        "Llama2Tokenizer": "sentencepiece",
        "TikTokenizer": "tiktoken",
    }.get(kind or "")
    file = pathlib.Path(str(model))
    file = file / "tokenizer.json" if file.is_dir() else file
    if prefix is None or not file.is_file():
        raise ValueError(
            f"the checkpoint's tokenizer ({kind}, {model}) is not here: give a config with "
            "data.tokenizer and the architecture, --config=..."
        )
    options = []
    if prefix == "tiktoken":
        given = {"pattern": arguments.get("tiktoken_pattern")}
        given |= {"num_special_tokens": arguments.get("tiktoken_num_special_tokens")}
        given |= {"vocab_size": arguments.get("vocab_size")}
        options = [f"{name}={value}" for name, value in given.items() if value is not None]
    if names := arguments.get("tokenizer_special_tokens"):
        words = ",".join(urllib.parse.quote(name, safe="<>|[]()/ ") for name in names)
        options.append(f"special_tokens={words}")
    return f"{prefix}:{file}" + f"?{'&'.join(options)}" * bool(options)


def resolve_sizes(config: Config, tensors: Mapping[str, TensorInfo]) -> str:
    """Decides what the config leaves open, by the tokenizer, whose identity this is, and by the
    table of positions; ValueError where no model can be so."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    table = tensors.get(f"{ENDS['positions']}.weight")
    if config.model.position is Position.learned and table is not None and table.shape:
        config.model.max_position = config.model.max_position or table.shape[0]
    resolve(config, tokenizer.vocab_size)
    config.data.sequence_length = min(config.data.sequence_length, config.model.max_position)
    if problems := [*model_problems(config.model)]:
        raise ValueError("no model can be so:\n" + "\n".join(problems))
    return tokenizer.identity


def family(model: ModelConfig) -> Family:
    up = ("mlp.gate", "mlp.up") if model.gated else "mlp.up"
    shared, arrays, experts = megatron_experts.names(model.gated)
    return Family(
        "megatron",
        *((), ENDS, LAYER, {**LAYERS, up: "mlp.linear_fc1", **shared}, {}),
        grouped=frozenset({LAYERS[QKV]}),
        arrays=arrays,
        experts=experts,
    )


def locate(
    bound: Iterable[Binding], tensors: Mapping[str, TensorInfo], dtypes: Mapping[str, str]
) -> dict[str, list[Piece]]:
    """The pieces of every binding's tensor, in order; ValueError names all that do not fit."""
    names: dict[str, str] = {}
    problems: list[str] = []
    for key in tensors:
        if LEFT_OUT.match(key):
            continue
        name = key
        for fused, plain in FUSED_NORMS:
            name = name.replace(fused, plain)
        if name in names:
            problems.append(f"{key} and {names[name]} are the same weights")
        names[name] = key
    found = {}
    for binding in bound:
        halves = (f"{binding.theirs}_w", f"{binding.theirs}_v")
        pieces = [piece_of(binding.theirs, names)]
        if pieces == [None]:
            pieces = [piece_of(half, names) for half in halves]
        there = [piece for piece in pieces if piece is not None]
        found[binding.theirs] = there
        problems += misfits(binding, there, len(pieces), tensors)
    used = {key for pieces in found.values() for key, _ in pieces}
    extra = [key for key in dtypes if key not in used and not LEFT_OUT.match(key)]
    problems += [f"{key} ({dtypes[key]}) has no place in this model" for key in extra]
    problems += left_over(found, tensors)
    if problems:
        more = f"\nand {len(problems) - 20} more" if len(problems) > 20 else ""
        raise ValueError(
            "the checkpoint does not fit the architecture; check it:\n"
            + "\n".join(problems[:20])
            + more
        )
    return found


def piece_of(name: str, names: Mapping[str, str]) -> Piece | None:
    """A tensor under its own name, or an entry of one in which layers, experts or both lie."""
    ways: list[Piece] = [(name, ())]
    for plain, numbered in NUMBERED.items():
        for known, index in [*ways]:
            if number := numbered.search(known):
                whole = known[: number.start()] + plain + known[number.end() :]
                ways.append((whole, (*index, int(number[1]))))
    return next(((names[known], index) for known, index in ways if known in names), None)


def left_over(found: Mapping[str, list[Piece]], tensors: Mapping[str, TensorInfo]) -> Iterable[str]:
    """Entries of stacked tensors that the model has no place for."""
    used: dict[str, set[tuple[int, ...]]] = {}
    for key, index in (piece for pieces in found.values() for piece in pieces if piece[1]):
        used.setdefault(key, set()).add(index)
    for key, entries in used.items():
        kinds = ["experts"] if NUMBERED[LAYER].match(key) else ["layers", "experts"]
        for dimension, kind in enumerate(kinds[: len(next(iter(entries)))]):
            count = len({index[dimension] for index in entries})
            if tensors[key].shape[dimension] > count:
                yield f"{key} has {tensors[key].shape[dimension]} {kind}, the model {count}"


def misfits(
    binding: Binding, pieces: list[Piece], count: int, tensors: Mapping[str, TensorInfo]
) -> Iterable[str]:
    """What is wrong with a binding's tensor: not there, or of another shape."""
    if len(pieces) < count:
        yield f"{binding.theirs} {list(binding.shape)} is missing"
        return
    shapes = []
    for key, index in pieces:
        shape, lead = tensors[key].shape, len(index)
        if len(shape) < lead or any(i >= size for i, size in zip(index, shape, strict=False)):
            yield f"{key} {list(shape)} has no entry {', '.join(map(str, index))}"
            return
        shapes.append(shape[lead:])
    whole = shapes[0]
    if count > 1:
        whole = (sum(shape[0] for shape in shapes if shape), *whole[1:])
    wanted = binding.shape
    if binding.ours[0].name in VOCABULARY_TABLES and whole[1:] == wanted[1:]:
        if whole[0] < wanted[0]:
            yield f"{pieces[0][0]} has {whole[0]} words, the model {wanted[0]}"
    elif whole != wanted or any(shape[1:] != wanted[1:] for shape in shapes):
        yield f"{pieces[0][0]} is {list(whole)}, the model needs {list(wanted)}"
