"""Import Megatron-LM's torch_dist checkpoints of GPT and hybrid models as run folders.

Layers are stacked in one tensor (`decoder.layers.mlp.linear_fc2.weight` [L, ...]) or have a tensor
each. Norms have their own names or those of Transformer Engine's fused modules. Queries, keys and
values are interleaved by groups of heads; [gate; up] is one tensor or two (`weight_w`, `weight_v`).
Experts are stacked or have a tensor each (experts.py), and so are the projections that Mamba-2
fuses (hybrid.py). Optimizer, schedule and random states are ignored.
"""

import copy
import functools
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

from maxmeg.checkpoint.integrity import some
from maxmeg.checkpoint.names import VOCABULARY_TABLES
from maxmeg.checkpoint.stream import TensorInfo
from maxmeg.config.files import CHECKPOINTS
from maxmeg.config.initial import FREE
from maxmeg.config.mixers import Activation, QkNorm
from maxmeg.config.model import ModelConfig, Norm, Position
from maxmeg.config.model_rules import model_problems
from maxmeg.config.positions import RotaryScaling
from maxmeg.config.schema import Config
from maxmeg.config.setting import declared_problems, walk, with_fields
from maxmeg.config.validate import resolve
from maxmeg.data import run_folder
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.hf.convert import Report, check_empty, write_run
from maxmeg.hf.families.binding import Binding
from maxmeg.hf.families.keys import resolved, unread_groups, with_layers
from maxmeg.hf.families.read import bindings, plain_value
from maxmeg.hf.families.tables import QKV, Family
from maxmeg.megatron import encoders, hybrid
from maxmeg.megatron import experts as megatron_experts
from maxmeg.megatron.experts import Arguments, chosen
from maxmeg.megatron.torch_dist import METADATA, TorchDistReader
from maxmeg.runtime.screen import tracked

# Name of a tensor in the checkpoint, and an index into it: of a layer, an expert, or both.
Piece = tuple[str, tuple[int, ...]]

LATEST = "latest_checkpointed_iteration.txt"
LAYER = "decoder.layers."
# Name of a stacked tensor -> pattern of the names with the number of a layer or an expert.
NUMBERED = {
    LAYER: re.compile(r"^decoder\.layers\.(\d+)\."),
    "encoder.layers.": re.compile(r"^encoder\.layers\.(\d+)\."),
    ".experts.experts.": re.compile(r"\.experts\.experts\.(\d+)\."),
}
ENDS = {
    "embedding": "embedding.word_embeddings",
    "positions": "embedding.position_embeddings",
    "final_norm": "decoder.final_layernorm",
    "output": "output_layer",
    **encoders.ENDS,
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
    ("mixer.in_proj.layer_norm_", "input_layernorm."),
    ("self_attention.in_proj.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ("decoder.final_norm.", "decoder.final_layernorm."),  # of hybrid models
)
HALVES = ("_w", "_v")  # of [gate; up]
IGNORED = re.compile(
    r"(chained_\d+\.)?optimizer\.|opt_param_scheduler|rng_state|rerun_state|common_state"
    r"|.*\._extra_state"
    r"|position_embeddings\.|lm_head\.output_layer\."  # T5's, a second time
)

REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")
# Arguments of features that maxmeg lacks, and the values that switch them off.
WITHOUT_EFFECT: dict[str, tuple] = {
    "multi_latent_attention": (None, False),
    "attention_output_gate": (None, False),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "heterogeneous_layers_config_path": (None,),
    "mtp_num_layers": (None, 0),
    "apply_residual_connection_post_layernorm": (None, False),
    "quick_geglu": (None, False),
    "activation_func_clamp_value": (None,),
    "no_rope_freq": (None,),
    "softmax_type": (None, "vanilla"),
    "retro_add_retriever": (None, False),
    "use_mup": (None, False),
    "scaling_recipe": (None, "none"),
}
POSITIONS = {
    "learned_absolute": Position.learned,
    "rope": Position.rotary,
    "relative": Position.relative,
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
    """Write a run folder: config.yaml, and a checkpoint of step 0 that holds only the model.

    source: a folder of iterations (the latest is imported) or of one iteration. config: the model
    and data.tokenizer; default by the checkpoint's arguments. tokenizer: overrides data.tokenizer.
    python: an interpreter with torch. ValueError, before anything is written, naming every tensor
    and setting that does not fit.
    """
    target = pathlib.Path(target).absolute()
    check_empty(target)
    with TorchDistReader(iteration_folder(source), python) as reader:
        arguments = encoders.with_tensors(reader.arguments(), reader.tensors)
        config = resolve_config(config, arguments, tokenizer)
        config.run_dir = str(target)
        identity = resolve_sizes(config, reader.tensors)
        hybrid.check_layers(config.model, reader.tensors, LAYER)
        bound = bindings(config.model, family(config.model))
        pieces = locate(bound, reader.tensors, reader.dtypes)
        try:
            bar = tracked(bound, "converting")
            write_run(config, identity, ((b, tensor(reader, b, pieces[b.theirs])) for b in bar))
        except BaseException:
            shutil.rmtree(target / CHECKPOINTS, ignore_errors=True)
            raise
    count = sum(math.prod(binding.shape) for binding in bound)
    return Report("megatron", len(bound), count, run_folder.stored(config).data.tokenizer)


def tensor(reader: TorchDistReader, binding: Binding, pieces: list[Piece]) -> np.ndarray:
    """Return one tensor of the checkpoint, without Megatron-LM's padding of the vocabulary."""
    read = [reader.read(name, *index) for name, index in pieces]
    array = read[0] if len(read) == 1 else np.concatenate(read)
    # The padding is not zero.
    return array[: binding.shape[0]] if binding.ours[0].name in VOCABULARY_TABLES else array


def is_checkpoint(folder: str | os.PathLike) -> bool:
    """Return whether a folder is a checkpoint of Megatron-LM, of any format."""
    folder = pathlib.Path(folder)
    has_file = (folder / METADATA).is_file() or (folder / LATEST).is_file()
    return has_file or any(folder.glob("mp_rank_*"))


def iteration_folder(source: str | os.PathLike) -> pathlib.Path:
    """Return the folder of one iteration; ValueError for a folder of another format."""
    folder = pathlib.Path(source)
    if (folder / LATEST).is_file():
        latest = (folder / LATEST).read_text().strip()
        folder /= latest if latest == "release" else f"iter_{latest:0>7}"
    if (folder / METADATA).is_file():
        described = folder / "metadata.json"
        backend = json.loads(described.read_text()) if described.is_file() else {}
        if backend.get("sharded_backend", "torch_dist") == "torch_dist":
            return folder
        problem = f"is of sharded_backend={backend['sharded_backend']!r}"
    elif any(folder.glob("mp_rank_*")):
        problem = "is of the old format torch (mp_rank_*)"
    else:
        problem = f"has neither {METADATA} nor {LATEST}"
    raise ValueError(
        f"{folder} {problem}: give a checkpoint of Megatron's format torch_dist, or save it as one "
        "(--ckpt-convert-format torch_dist)"
    )


def resolve_config(config: Config | None, arguments: Arguments, tokenizer: str) -> Config:
    """Return the config, which must match the arguments, or else the config by the arguments."""
    fields = architecture(arguments)
    if config is None:
        if not fields:
            raise ValueError(
                "the checkpoint has no readable arguments: give its architecture, --config=..."
            )
        config = Config(model=with_fields(ModelConfig(), fields))
        config.data.tokenizer = tokenizer or tokenizer_name(arguments)
        config.data.sequence_length = arguments.get("seq_length") or config.data.sequence_length
        return config
    configured = {field: resolved(config.model, field) for field in fields}
    saved = with_fields(ModelConfig(), fields)
    wrong = [
        f"model.{field}={getattr(configured[field], 'name', configured[field])}, in the checkpoint "
        f"{getattr(value, 'name', value)}"
        for field, value in fields.items()
        if field != "max_position" and plain_value(config.model, field) != plain_value(saved, field)
    ]
    if wrong:
        raise ValueError(f"the config is not of the checkpoint's model: {'; '.join(wrong)}")
    config = copy.deepcopy(config)
    config.data.tokenizer = tokenizer or config.data.tokenizer
    return config


def architecture(arguments: Arguments) -> dict[str, typing.Any]:
    """Return fields of ModelConfig; empty if the arguments describe no model.

    ValueError for features that maxmeg lacks.
    """
    if not all(arguments.get(name) for name in REQUIRED):
        return {}

    def flag(name: str) -> bool:
        return bool(arguments.get(name, False))

    refused = megatron_experts.unsupported(arguments, WITHOUT_EFFECT)
    linear_bias = bool(arguments.get("add_bias_linear", True))
    heads = arguments["num_attention_heads"]
    groups = arguments.get("num_query_groups") if flag("group_query_attention") else heads
    fields = {
        "num_layers": arguments["num_layers"],
        "hidden_size": arguments["hidden_size"],
        "attention.num_heads": heads,
        "attention.num_kv_heads": groups or heads,
        "attention.head_dim": arguments.get("kv_channels") or arguments["hidden_size"] // heads,
        "mlp.activation": activation(arguments, linear_bias),
        "norm": chosen(arguments, "normalization", "LayerNorm", NORMS, refused),
        "norm_eps": arguments.get("norm_epsilon", 1e-5),
        "norm_one_plus": flag("apply_layernorm_1p"),
        "position": chosen(
            arguments, "position_embedding_type", "learned_absolute", POSITIONS, refused
        ),
        "attention.qk_norm": qk_norm(arguments),
        "attention.bias_qkv": linear_bias or flag("add_qkv_bias"),
        "attention.bias_out": linear_bias,
        "mlp.bias": linear_bias,
        "tied": not flag("untie_embeddings_and_output_weights"),
        "max_position": arguments.get("max_position_embeddings") or 0,
        **windows(arguments, refused),
        **megatron_experts.expert_fields(arguments, refused),
        **encoders.bert_fields(arguments),
    }
    if fields["position"] is Position.rotary:
        fields |= rotary(arguments)
    fields |= encoders.t5_fields(arguments, fields["position"])
    if mixed := hybrid.hybrid_fields(arguments, fields.get("local"), refused):
        fields = {n: value for n, value in fields.items() if n not in ("local", "dense")} | mixed
    fields = with_layers(fields)
    if refused:
        raise ValueError(f"the checkpoint's model is not supported: {'; '.join(refused)}")
    model = with_fields(
        ModelConfig(), {**fields, "mlp.ffn_size": arguments.get("ffn_hidden_size") or 0}
    )
    # A config may set fields that the arguments do not fix and that change no function. All others
    # are fixed, at their defaults if Megatron-LM lacks the feature.
    open_fields = {*FREE, "vocab_size"} - fields.keys()
    unread = unread_groups(model.layer_kinds)
    return {
        field: resolved(model, field)
        for field, _, _ in walk(model)
        if field not in open_fields and field.partition(".")[0] not in unread
    }


def activation(arguments: Arguments, linear_bias: bool) -> Activation:
    """Return the activation. Fused bias + GELU uses the tanh approximation, plain GELU is exact."""
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


def windows(arguments: Arguments, refused: list[str]) -> dict[str, typing.Any]:
    """Return the sliding window, which in Megatron-LM does not count the token itself."""
    size, every = arguments.get("window_size"), arguments.get("window_attn_skip_freq")
    if not size:
        return {}
    if len(size) != 2 or size[1] > 0 or size[0] < 0 or not isinstance(every, int | None):
        refused.append(f"window_size={size}, window_attn_skip_freq={every}")
        return {}
    numbers = range(arguments["num_layers"])
    local = [not every or (number + 1) % every > 0 for number in numbers]
    return {"attention.window": size[0] + 1, "local": local}


def rotary(arguments: Arguments) -> dict[str, typing.Any]:
    fields = {
        "rotary.base": float(arguments.get("rotary_base") or 10000),
        "rotary.fraction": float(arguments.get("rotary_percent") or 1.0),
        "rotary.interleaved": bool(arguments.get("rotary_interleaved")),
    }
    if arguments.get("use_rope_scaling"):
        fields |= {
            "rotary.scaling": RotaryScaling.llama3,
            "rotary.factor": float(arguments.get("rope_scaling_factor") or 8.0),
            "rotary.original_length": 8192,
            "rotary.low": 1.0,
            "rotary.high": 4.0,
        }
    elif factor := arguments.get("rotary_seq_len_interpolation_factor"):
        fields |= {"rotary.scaling": RotaryScaling.linear, "rotary.factor": float(factor)}
    return fields


def tokenizer_name(arguments: Arguments) -> str:
    """Return data.tokenizer by the arguments; ValueError if its file does not exist."""
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
        options_given = {"pattern": arguments.get("tiktoken_pattern")}
        options_given |= {"num_special_tokens": arguments.get("tiktoken_num_special_tokens")}
        options_given |= {"vocab_size": arguments.get("vocab_size")}
        options = [f"{name}={value}" for name, value in options_given.items() if value is not None]
    if names := arguments.get("tokenizer_special_tokens"):
        words = ",".join(urllib.parse.quote(name, safe="<>|[]()/ ") for name in names)
        options.append(f"special_tokens={words}")
    return f"{prefix}:{file}" + f"?{'&'.join(options)}" * bool(options)


def resolve_sizes(config: Config, tensors: Mapping[str, TensorInfo]) -> str:
    """Set the sizes that the config leaves open, by the tokenizer and the position embeddings.

    Returns the identity of the tokenizer. ValueError if the config does not describe a valid model.
    """
    tokenizer = load_tokenizer(config.data.tokenizer)
    table = tensors.get(f"{ENDS['positions']}.weight")
    if config.model.position is Position.learned and table is not None and table.shape:
        config.model.max_position = config.model.max_position or table.shape[0]
    resolve(config, tokenizer.vocab_size, tokenizer.required_size)
    config.data.sequence_length = min(config.data.sequence_length, config.model.max_position)
    if problems := [*declared_problems(config.model, "model."), *model_problems(config.model)]:
        raise ValueError("the sizes do not describe a valid model:\n" + "\n".join(problems))
    return tokenizer.identity


def family(model: ModelConfig) -> Family:
    up = ("mlp.gate", "mlp.up") if model.gated else "mlp.up"
    shared, arrays, experts = megatron_experts.names(model.gated)
    layers = {**LAYERS, up: "mlp.linear_fc1", **shared, **hybrid.MODULES}
    of_sides = functools.partial(encoders.layer_names, layers=layers) if model.has_source else None
    return Family(
        model_type="megatron",
        parts=(),
        constants={},
        ends=ENDS,
        layer=LAYER,
        layers=layers,
        layer_names=of_sides,
        grouped=frozenset({LAYERS[QKV], encoders.CROSS_KEYS}),
        arrays={**arrays, **hybrid.ARRAYS},
        experts=experts,
    )


def locate(
    bound: Iterable[Binding], tensors: Mapping[str, TensorInfo], dtypes: Mapping[str, str]
) -> dict[str, list[Piece]]:
    """Return the pieces of every binding's tensor, in order; ValueError naming all problems."""
    names: dict[str, str] = {}
    problems: list[str] = []
    is_bert = not any(encoders.CROSS in key for key in tensors)
    for key in tensors:
        if IGNORED.match(key):
            continue
        name = key.replace(encoders.BERT_LAYERS, "decoder.") if is_bert else key
        for fused, plain in FUSED_NORMS:
            name = name.replace(fused, plain)
        if name in names:
            problems.append(f"{key} and {names[name]} are the same weights")
        names[name] = key
    pieces_of = {}
    for binding in bound:
        pieces = [find_piece(binding.theirs, names)]
        if pieces == [None]:
            parts = hybrid.parts(binding.theirs) or [f"{binding.theirs}{end}" for end in HALVES]
            pieces = [find_piece(part, names) for part in parts]
        existing = [piece for piece in pieces if piece is not None]
        pieces_of[binding.theirs] = existing
        problems += shape_problems(binding, existing, len(pieces), tensors)
    source_names = {key for pieces in pieces_of.values() for key, _ in pieces}
    extra = [key for key in dtypes if key not in source_names and not IGNORED.match(key)]
    problems += [f"{key} ({dtypes[key]}) has no place in this model" for key in extra]
    problems += unused_entries(pieces_of, tensors)
    if problems:
        raise ValueError(
            "the checkpoint does not fit the architecture:\n" + some(problems, "\n", 20)
        )
    return pieces_of


def find_piece(name: str, names: Mapping[str, str]) -> Piece | None:
    """Find a tensor under its name, or as an entry of a tensor that stacks layers or experts."""
    ways: list[Piece] = [(name, ())]
    for plain, numbered in NUMBERED.items():
        for pattern, index in [*ways]:
            if number := numbered.search(pattern):
                key = pattern[: number.start()] + plain + pattern[number.end() :]
                ways.append((key, (*index, int(number[1]))))
    return next(((names[pattern], index) for pattern, index in ways if pattern in names), None)


def unused_entries(
    pieces_of: Mapping[str, list[Piece]], tensors: Mapping[str, TensorInfo]
) -> Iterable[str]:
    """Yield the stacked tensors that have more layers or experts than the model."""
    entries_of: dict[str, set[tuple[int, ...]]] = {}
    for key, index in (piece for pieces in pieces_of.values() for piece in pieces if piece[1]):
        entries_of.setdefault(key, set()).add(index)
    for key, entries in entries_of.items():
        kinds = ["experts"] if NUMBERED[LAYER].match(key) else ["layers", "experts"]
        for dimension, kind in enumerate(kinds[: len(next(iter(entries)))]):
            count = len({index[dimension] for index in entries})
            if tensors[key].shape[dimension] > count:
                yield f"{key} has {tensors[key].shape[dimension]} {kind}, the model {count}"


def shape_problems(
    binding: Binding, pieces: list[Piece], count: int, tensors: Mapping[str, TensorInfo]
) -> Iterable[str]:
    """Yield the problem if a binding's tensor is missing or of another shape."""
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
    full_shape = shapes[0]
    if count > 1:
        full_shape = (sum(shape[0] for shape in shapes if shape), *full_shape[1:])
    target = binding.shape
    if binding.ours[0].name in VOCABULARY_TABLES and full_shape[1:] == target[1:]:
        if full_shape[0] < target[0]:
            yield f"{pieces[0][0]} has {full_shape[0]} words, the model {target[0]}"
    elif full_shape != target or any(shape[1:] != target[1:] for shape in shapes):
        yield f"{pieces[0][0]} is {list(full_shape)}, the model needs {list(target)}"
