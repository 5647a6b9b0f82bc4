"""Read llama.cpp's GGUF files as a config.json and tensors by transformers' names.

Quantized tensors are dequantized. Changes by llama.cpp's conversion are undone: the order of rows
in Llama's queries and keys, and the 1 added to Gemma's norms. `to_ggml` and `ggml_name` are the
inverses; hf/gguf_export.py uses them. llama.cpp stacks the experts of a layer in one tensor; here
each expert has tensors of its own.
"""

import dataclasses
import importlib
import math
import os
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from maxmeg.checkpoint.stream import TensorInfo
from maxmeg.data.tokenizers.tokenizer import library_errors
from maxmeg.hf.formats.gguf_tokenizer import tokenizer_files
from maxmeg.hf.formats.source import Source

FLOAT32 = np.dtype(np.float32)
ENDS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SANDWICH = LAYERS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ROUTER = "ffn_gate_inp"
EXPERTS = {  # {}: number of an expert, dimension 0 of llama.cpp's tensor
    ROUTER: "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
SHARED_EXPERT = {
    f"{ROUTER}_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
MIXTRAL = {
    ROUTER: "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
KEYS = {  # key after the architecture's name -> key of config.json
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
GEMMA_KEYS = KEYS | {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base_swa": "rope_local_base_freq",
}
MOE_KEYS = KEYS | {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
MIXTRAL_KEYS = MOE_KEYS | {"expert_count": "num_local_experts"}
WIDE_KEYS = MOE_KEYS | {"expert_feed_forward_length": "moe_intermediate_size"}
SHARED_KEYS = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
# Keys that `describe` reads itself, or that have no effect.
OTHERS = ("vocab_size", "attention.value_length", "rope.dimension_count", "rope.scaling.type")
OTHERS += ("rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned")
TOKENS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}
# Ends of a text, of a turn and of a message.
END_TOKENS = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
ROPE_FACTORS = "rope_freqs.weight"
NUMBER = r"\.\d+\."  # of an expert, in transformers' names


class Family(typing.NamedTuple):
    """How an architecture of GGUF corresponds to a model class of transformers.

    permuted: whether the rows of queries and keys are reordered. settings: of config.json, which
    llama.cpp takes for granted.
    """

    name: str
    model_type: str
    keys: Mapping[str, str] = KEYS
    layers: Mapping[str, str] = LAYERS
    permuted: bool = False
    norms_plus_one: bool = False
    settings: Mapping[str, typing.Any] = types.MappingProxyType({})


# The key is the name of GGUF's architecture and, after a space, what distinguishes its models.
FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", permuted=True),
    "llama with experts": Family(
        "MixtralForCausalLM", "mixtral", MIXTRAL_KEYS, LAYERS | MIXTRAL, permuted=True
    ),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3"),
    "qwen2moe": Family(
        "Qwen2MoeForCausalLM", "qwen2_moe", WIDE_KEYS | SHARED_KEYS,
        LAYERS | EXPERTS | SHARED_EXPERT,
    ),
    "qwen3moe": Family(
        "Qwen3MoeForCausalLM", "qwen3_moe", WIDE_KEYS, LAYERS | EXPERTS,
        settings={"norm_topk_prob": True},
    ),
    "olmoe": Family("OlmoeForCausalLM", "olmoe", MOE_KEYS, LAYERS | EXPERTS),
    "gemma2": Family(
        "Gemma2ForCausalLM", "gemma2", GEMMA_KEYS, SANDWICH, norms_plus_one=True
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM", "gemma3_text", GEMMA_KEYS, SANDWICH, norms_plus_one=True
    ),
}  # fmt: skip


class GgufWeights:
    """Tensors of a GGUF file by transformers' names, in float32; dequantized when read."""

    def __init__(
        self, tensors: Mapping[str, typing.Any], family: Family, config: Mapping[str, typing.Any]
    ) -> None:
        self._stored: dict[str, tuple[np.ndarray, typing.Any]] = {}
        self._family, self._config = family, config
        self.tensors: dict[str, TensorInfo] = {}
        for name, tensor in tensors.items():
            theirs = _their_name(name, family)
            shape = tuple(int(size) for size in reversed(tensor.shape))
            parts = {theirs: tensor.data}
            if "{}" in theirs:
                parts = {
                    theirs.replace("{}", str(i)): expert for i, expert in enumerate(tensor.data)
                }
                shape = shape[1:]
            elif f"{ROUTER}_shexp" in name:
                shape = (1, *shape[-1:])
            for part, data in parts.items():
                self._stored[part] = data, tensor.tensor_type
                self.tensors[part] = TensorInfo(FLOAT32, shape)

    def read(self, name: str, *index: int) -> np.ndarray:
        assert not index, "experts are tensors of their own"
        quants = importlib.import_module("gguf.quants")
        array = quants.dequantize(*self._stored[name])
        array = np.asarray(array, FLOAT32).reshape(self.tensors[name].shape)
        if self._family.permuted and (count := _num_heads(name, self._config)):
            return halves_from_pairs(array, count)
        return array - 1 if self._family.norms_plus_one and "norm" in name else array


def to_ggml(
    name: str, array: np.ndarray, architecture: str, config: Mapping[str, typing.Any]
) -> np.ndarray:
    """Return a tensor of transformers as llama.cpp's conversion writes it."""
    family = FAMILIES[architecture]
    if family.permuted and (count := _num_heads(name, config)):
        return pairs_from_halves(array, count)
    return array + np.float32(1) if family.norms_plus_one and "norm" in name else array


def _num_heads(name: str, config: Mapping[str, typing.Any]) -> int:
    """Return the number of heads in a tensor of queries or keys; 0 for other tensors."""
    heads = config["num_attention_heads"]
    counts = {"q_proj": heads, "k_proj": config.get("num_key_value_heads", heads)}
    return counts.get(name.split(".")[-2], 0)


def pairs_from_halves(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of each head from (0, 1, ...) to (0, d/2, 1, d/2 + 1, ...)."""
    halves = array.reshape(num_heads, 2, -1, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def halves_from_pairs(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of each head from (0, d/2, 1, d/2 + 1, ...) to (0, 1, ...)."""
    pairs = array.reshape(num_heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def load_library(purpose: str) -> typing.Any:
    """Import the gguf package; ValueError where it is not installed."""
    try:
        importlib.import_module("gguf.quants")
        return importlib.import_module("gguf")
    except ImportError as error:
        raise ValueError(f"{purpose} needs the gguf package: pip install 'maxmeg[gguf]'") from error


def open_file(path: str | os.PathLike[str]) -> Source:
    """Open a GGUF file of one of FAMILIES; ValueError for any other. Needs the `gguf` package."""
    library, path = load_library(f"reading {path}"), Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a file: check the path")
    try:
        reader = library.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # of any type, for a damaged file
        problem = f"{path} cannot be read as a GGUF file: {error}"
        raise ValueError(f"{problem}; it may be truncated: download it again") from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    factors = tensors.pop(ROPE_FACTORS, None)
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError(f"{path} has no token_embd.weight: it does not hold a language model")
    config, family = describe(
        fields, int(embedding.shape[-1]), "output.weight" not in tensors,
        None if factors is None else np.asarray(factors.data, np.float64),
    )  # fmt: skip
    source = Source(config, GgufWeights(tensors, family, config), ())
    try:
        with library_errors(str(path)):
            return dataclasses.replace(source, texts=tokenizer_files(fields))
    except (ValueError, TypeError) as error:  # metadata without a supported tokenizer
        return dataclasses.replace(source, no_tokenizer=str(error))


def describe(
    fields: Mapping[str, typing.Any], vocab_size: int, tied: bool, factors: np.ndarray | None
) -> tuple[dict[str, typing.Any], Family]:
    """Return a model's config.json by a GGUF's metadata `fields`, and its family.

    factors: divisors of the rotary frequencies, if the file has them.
    """
    name = str(fields.get("general.architecture"))
    with_experts = f"{name} with experts"
    has_experts = fields.get(f"{name}.expert_count") and with_experts in FAMILIES
    family, prefix = FAMILIES.get(with_experts if has_experts else name), f"{name}."
    if family is None:
        raise ValueError(f"general.architecture={name!r}: supported are {', '.join(FAMILIES)}")
    settings = {key.removeprefix(prefix): v for key, v in fields.items() if key.startswith(prefix)}
    for key, value in settings.items():
        if key not in family.keys and key not in OTHERS:
            raise ValueError(
                f"{prefix}{key}={str(value)[:100]}: this key is not known, and it may change the "
                "results; convert the model's safetensors instead"
            )
    experts = (key for key in family.keys if key.startswith("expert_"))
    missing = [key for key in (*list(KEYS)[:5], *experts) if key not in settings]
    if missing:
        raise ValueError(f"the metadata lack {', '.join(prefix + key for key in missing)}")
    config = {"architectures": [family.name], "model_type": family.model_type, **family.settings}
    config |= {"vocab_size": vocab_size, "tie_word_embeddings": tied}
    config |= {hf: fields[key] for key, hf in TOKENS.items() if key in fields}
    ends = dict.fromkeys(fields[key] for key in END_TOKENS if key in fields)
    ends = [end for end in ends if end < vocab_size]
    config |= {"eos_token_id": ends} if len(ends) > 1 else {}
    config |= {hf: _plain(settings[key]) for key, hf in family.keys.items() if key in settings}
    heads, width = config["num_attention_heads"], config["hidden_size"]
    head = config.get("head_dim", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if settings.get(key, head) != head:
            raise ValueError(f"{prefix}{key}={settings[key]} must be the size of a head, {head}")
    config |= _rotary(settings, config.get("rope_theta", 1e4), head, factors)
    if name.startswith("gemma"):
        config |= _gemma(name, config, head)
    return config, family


def _rotary(
    settings: Mapping[str, typing.Any], theta: float, head: int, factors: np.ndarray | None
) -> dict[str, typing.Any]:
    """Return the key rope_scaling, if it is needed."""
    kind, factor = (
        settings.get("rope.scaling.type", "none"),
        settings.get("rope.scaling.factor", 1.0),
    )
    if factors is not None:
        for scale in (8.0, 32.0):  # Llama 3.1 and 3.2; the file holds only the divisors
            expected = llama3_factors(theta, head, scale)
            if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-5):
                scaling = {"rope_type": "llama3", "factor": scale, "low_freq_factor": 1.0}
                scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
                return {"rope_scaling": scaling}
        raise ValueError(
            f"{ROPE_FACTORS} scales frequencies neither as Llama 3.1 nor as Llama 3.2: convert "
            "the model's safetensors instead"
        )
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return {}
    scaling = {"rope_type": kind, "factor": _plain(factor)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = settings[
            "rope.scaling.original_context_length"
        ]
    elif kind != "linear":
        raise ValueError(f"rope.scaling.type={kind!r}: supported are none, linear and yarn")
    return {"rope_scaling": scaling}


def llama3_factors(theta: float, head: int, factor: float) -> np.ndarray:
    """Return Llama 3's divisor of each rotary frequency, with an original length of 8192."""
    low, high, length = 1.0, 4.0, 8192
    waves = 2 * math.pi * theta ** (np.arange(0, head, 2) / head)
    smooth = np.clip((length / waves - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _gemma(name: str, config: Mapping[str, typing.Any], head: int) -> dict[str, typing.Any]:
    """Return the settings of Gemma that llama.cpp does not store."""
    largest = config["num_hidden_layers"] == (46 if name == "gemma2" else 62)  # 27B
    scalar = config["hidden_size"] // config["num_attention_heads"] if largest else head
    keys = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": scalar}
    if name == "gemma3":
        keys |= {"sliding_window_pattern": 6}
        keys |= {"rope_local_base_freq": config.get("rope_local_base_freq", 1e4)}
    return keys


def _their_name(name: str, family: Family) -> str:
    """Return transformers' name of a tensor; an unknown name is returned, and refused later."""
    module, _, leaf = name.rpartition(".")
    if module in ENDS:
        return f"{ENDS[module]}.{leaf}"
    parts = module.split(".", 2)
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in family.layers:
        return f"model.layers.{parts[1]}.{family.layers[parts[2]]}.{leaf}"
    return name


def ggml_name(name: str, architecture: str) -> str:
    """Return llama.cpp's name of a tensor of transformers."""
    module, _, leaf = name.rpartition(".")
    ends = {theirs: ours for ours, theirs in ENDS.items()}
    if module in ends:
        return f"{ends[module]}.{leaf}"
    layers = {theirs: ours for ours, theirs in FAMILIES[architecture].layers.items()}
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{layers[re.sub(NUMBER, '.{}.', inner)]}.{leaf}"


def ggml_shape(name: str, count: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor of llama.cpp that holds `count` tensors of transformers."""
    if f"{ROUTER}_shexp" in name:
        return shape[1:]
    return (count, *shape) if "_exps." in name else shape


def _plain(value: typing.Any) -> typing.Any:
    """Return a value; a float32 as its shortest decimal, 1e-05 instead of 9.99...e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
