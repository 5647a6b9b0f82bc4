"""Tiny Hugging Face folders with random weights, made without transformers."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import tokenizers

from maxmeg.checkpoint.stream import TensorInfo
from maxmeg.config.mixers import Activation
from maxmeg.config.model import ModelConfig, Norm, Position
from maxmeg.config.setting import with_fields
from maxmeg.hf import convert
from maxmeg.hf.families import read as families
from maxmeg.hf.formats.safetensors import SafetensorsFolder, SafetensorsWriter

BF16 = np.dtype(ml_dtypes.bfloat16)
LLAMA = with_fields(
    ModelConfig(),
    {
        "vocab_size": 70,
        "num_layers": 3,
        "hidden_size": 32,
        "attention.num_heads": 4,
        "attention.num_kv_heads": 2,
        "mlp.ffn_size": 48,
        "max_position": 64,
    },
)
TIED = dataclasses.replace(LLAMA, tied=True)
GPT2 = with_fields(
    ModelConfig(),
    {
        "vocab_size": 70,
        "num_layers": 2,
        "hidden_size": 32,
        "attention.num_heads": 4,
        "mlp.ffn_size": 128,
        "mlp.activation": Activation.gelu_tanh,
        "norm": Norm.layernorm,
        "position": Position.learned,
        "max_position": 64,
        "attention.bias_qkv": True,
        "attention.bias_out": True,
        "mlp.bias": True,
        "tied": True,
    },
)
MODELS = {"LlamaForCausalLM": LLAMA, "GPT2LMHeadModel": GPT2}


def random_tensors(model, family, dtype=BF16, seed=0):
    """Every tensor of a model by its name in the files."""
    rng = np.random.default_rng(seed)
    return {
        binding.theirs: rng.standard_normal(binding.shape, np.float32).astype(dtype)
        for binding in families.bindings(model, family)
    }


def write_tensors(folder, tensors, max_shard_bytes=1 << 30):
    infos = {name: TensorInfo(array.dtype, array.shape) for name, array in tensors.items()}
    with SafetensorsWriter(folder, infos, max_shard_bytes) as writer:
        for name, array in tensors.items():
            writer.write(name, array)


def write_config(folder, model, family, **more):
    folder.mkdir(parents=True, exist_ok=True)
    config = families.hf_config(model, family) | more
    (folder / "config.json").write_text(json.dumps(config))


def write_tokenizer(folder, words=60, added=()):
    """A word-level tokenizer.json with an end of a document; added: special tokens."""
    vocabulary = {"<|end|>": 0, "[UNK]": 1} | {f"w{i}": i for i in range(2, words)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([*added])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))


def convert_in(source, target, **options):
    return convert.import_model(convert.open_folder(source), target, **options)


def assert_same_tensors(folder, tensors):
    """The folder holds these tensors, bit for bit, and no others."""
    found = SafetensorsFolder(folder)
    assert found.tensors.keys() == tensors.keys()
    for name, array in tensors.items():
        read = found.read(name)
        assert read.dtype == array.dtype and read.tobytes() == array.tobytes(), name


def make_folder(folder, family="LlamaForCausalLM", model=None, tensors=None, shard_bytes=1 << 30):
    """A folder as save_pretrained writes it; returns its tensors."""
    model = model or MODELS[family]
    tensors = random_tensors(model, family) if tensors is None else tensors
    write_config(folder, model, family)
    write_tokenizer(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    write_tensors(folder, tensors, shard_bytes)
    return tensors
